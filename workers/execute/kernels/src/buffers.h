// The activations of one step. They grow to the greatest step that was seen and are then used again.
#pragma once

#include <cstdlib>
#include <new>
#include <type_traits>

#include "attention.h"
#include "matmul.h"

namespace triptych {

// Zeroed memory on a cache line of its own.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(start_); }

  // At least `count` elements, all zero if there were less before.
  void reserve(size_t count) {
    if (count <= count_) return;
    std::free(start_);
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    start_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (!start_) throw std::bad_alloc();
    std::memset(static_cast<void*>(start_), 0, bytes);
    count_ = count;
  }
  T* get() const { return start_; }

 private:
  T* start_ = nullptr;
  size_t count_ = 0;
};

// Rows that a product takes. With int8 they are written as floats first, since the scale of a row needs all of it.
template <class Format>
struct Inputs {
  using Element = typename Format::Element;
  static constexpr bool kIsQuantised = std::is_same<Format, Int8>::value;
  using Written = typename std::conditional<kIsQuantised, float, Element>::type;

  Buffer<Element> elements;
  Buffer<float> floats;
  Buffer<float> scales;
  int width = 0;  // padded

  void reserve(int num_rows, int num_values) {
    width = padded(num_values);
    elements.reserve(size_t(num_rows) * width);
    scales.reserve(num_rows);
    if (kIsQuantised) floats.reserve(size_t(num_rows) * width);
  }
  Written* written(int row) {
    if constexpr (kIsQuantised) {
      return floats.get() + size_t(row) * width;
    } else {
      return elements.get() + size_t(row) * width;
    }
  }
  Element* row(int row) { return elements.get() + size_t(row) * width; }
  Rows rows(int count) const {
    return {reinterpret_cast<const uint32_t*>(elements.get()), size_t(width) / Format::kGroup, scales.get(), count};
  }
};

template <class Format>
struct Buffers {
  using Cache = typename Format::Cache;

  Buffer<float> residual;                   // [tokens][hidden]
  Inputs<Format> normed;                    // [tokens][hidden]
  Buffer<float> qkv;                        // [tokens][all heads]
  Buffer<typename Cache::Element> queries;  // [tokens][heads][head_dim]
  Inputs<Format> attended;                  // [tokens][heads * head_dim]
  Inputs<Format> gated;                     // [tokens][intermediate]
  Buffer<uint8_t> is_last;                  // [tokens], of their sequence in this step
  Buffer<QueryBlock> query_blocks;          // [tokens] at most
  Buffer<float> scratch;                    // [threads][hidden]
  // Of attention, [threads][rows].
  Buffer<float> outputs;
  Buffer<typename Cache::Element> weights;
  Buffer<Floats> sums;
  Buffer<float> maxima;
  Buffer<float> corrections;

  void reserve(const Model& model, int tokens, int num_threads) {
    const int hidden = padded(model.hidden_size), heads = model.num_heads * model.head_dim;
    residual.reserve(size_t(tokens) * hidden);
    normed.reserve(tokens, hidden);
    qkv.reserve(size_t(tokens) * model.layers[0].qkv.num_blocks * 64);
    queries.reserve(size_t(tokens) * heads);
    attended.reserve(tokens, heads);
    gated.reserve(tokens, model.intermediate_size);
    is_last.reserve(tokens);
    query_blocks.reserve(tokens);
    scratch.reserve(size_t(num_threads) * hidden);
    const size_t rows = size_t(num_threads) * rows_per_item(model.num_heads / model.num_kv_heads);
    outputs.reserve(rows * model.head_dim);
    weights.reserve(rows * kKeyBlock);
    sums.reserve(rows);
    maxima.reserve(rows);
    corrections.reserve(rows);
  }
  AttentionScratch<Cache> attention_scratch(const Model& model, int thread) {
    const size_t row = size_t(thread) * rows_per_item(model.num_heads / model.num_kv_heads);
    return {outputs.get() + row * model.head_dim, weights.get() + row * kKeyBlock, sums.get() + row,
            maxima.get() + row, corrections.get() + row};
  }
};

}  // namespace triptych
