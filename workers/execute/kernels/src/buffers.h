// The activations of one step. Buffers grow to the largest step seen so far and are reused.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include <sys/mman.h>

#include "attention.h"
#include "delta_rule.h"
#include "queries.h"
#include "rounding.h"
#include "state_space.h"

namespace triptych {

// Zeroed memory, aligned to a cache line.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept : start_(other.start_), count_(other.count_) { other.start_ = nullptr; }
  ~Buffer() { std::free(start_); }

  // Makes room for `count` elements. If that takes a new allocation, all of them are zero.
  void reserve(size_t count) {
    if (count <= count_) return;
    std::free(start_);
    count_ = 0;  // stays 0 if the allocation fails
    const size_t alignment = count * sizeof(T) < kHugePage ? 64 : kHugePage;
    const size_t bytes = (count * sizeof(T) + alignment - 1) / alignment * alignment;
    start_ = static_cast<T*>(std::aligned_alloc(alignment, bytes));
    if (!start_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (alignment == kHugePage) madvise(start_, bytes, MADV_HUGEPAGE);
#endif
    std::memset(static_cast<void*>(start_), 0, bytes);
    count_ = count;
  }
  T* get() const { return start_; }

 private:
  static constexpr size_t kHugePage = 2 << 20;

  T* start_ = nullptr;
  size_t count_ = 0;
};

// Rows in the form a product takes as input, of any width up to the reserved one. A row begins in the same place
// whatever its width is, so that what a thread writes is not in another core's cache.
template <class Format>
class Operand {
 public:
  using Element = typename Format::Element;

  void reserve(size_t num_rows, int width) {
    constexpr int kLine = 64 / sizeof(Element);  // a power of two would give rows the same few sets of a cache
    stride_ = width + kLine;
    elements_.reserve(num_rows * stride_);
    scales_.reserve(num_rows * scale_stride());
  }
  void write(int row, int width, const float* from, const Rounding& rounding) const {
    write_row(from, width, elements_.get() + row * stride_, scales_.get() + row * scale_stride(), rounding);
  }
  Rows rows(int count) const {
    return {reinterpret_cast<const uint32_t*>(elements_.get()), stride_ / Format::kGroup, scales_.get(), scale_stride(),
            count};
  }

 private:
  size_t scale_stride() const { return stride_ / kGroupInputs * (sizeof(GroupWorth) / sizeof(float)); }

  size_t stride_ = 0;
  Buffer<Element> elements_;
  Buffer<float> scales_;  // int8 only, see Rows
};

// Rows for a product, in one form or in two.
template <class Format>
struct Inputs {
  Operand<Format> operand;  // after the norm or quantisation
  Operand<Format> whole;    // the same rows for weights in eight bits, see Rows

  void reserve(size_t num_rows, int width, bool has_groups) {
    operand.reserve(num_rows, width);
    if (has_groups) whole.reserve(num_rows, width);
  }
};

// Buffers private to one thread.
template <class Format>
struct ThreadBuffers {
  static constexpr int kOwnRows = 4;  // for up to this many rows, computing them in every thread beats a barrier
  using Element = typename Format::Cache::Element;

  Inputs<Format> inputs;    // [kOwnRows]
  Buffer<float> rows;       // [kOwnRows][hidden], after the norm
  Buffer<float> hadamard;   // a row, after its transform
  Buffer<Element> head;     // [head_dim]
  // For attention.
  Buffer<QueryRow> query_rows;
  Buffer<Floats> outputs;
  Buffer<Element> weights;
  Buffer<Floats> sums;
  Buffer<float> maxima;
  Buffer<uint8_t> byte_queries;
  Buffer<QueryWorth> worths;
  Buffer<uint8_t> byte_weights;
  Buffer<float> units;
  Buffer<Floats> scales;

  AttentionScratch<typename Format::Cache> attention() const {
    return {query_rows.get(), outputs.get(), weights.get(), sums.get(), maxima.get(),
            {byte_queries.get(), worths.get(), byte_weights.get(), units.get(), scales.get()}};
  }
};

template <class Format>
struct Buffers {
  using Element = typename Format::Element;
  // Element type of the outputs of attention and of the gate. An int8 row has a single scale, so it is only quantised
  // once all of it is known.
  static constexpr bool kIsQuantised = std::is_same<Format, Int8>::value;
  using Written = typename std::conditional<kIsQuantised, float, Element>::type;

  Buffer<float> residual;                           // [tokens][hidden]
  Buffer<float> added;                              // [tokens][hidden], to be normed and added to the residual
  Inputs<Format> inputs;                            // [tokens]
  Buffer<float> qkv;                                // [tokens][all heads], as wide as a layer's qkv or space.projection
  Buffer<typename Format::Cache::Element> queries;  // [tokens][heads][head_dim]
  Buffer<Written> attended;                         // [tokens][heads * channels of a value]
  Buffer<Written> gated;                            // [tokens][intermediate]
  Buffer<float> exact;                              // [tokens][hidden], after the norm, for float products
  Buffer<float> gates;                              // [tokens][betas and rates] of a delta rule, or a state space's dt
  Buffer<float> mixed;                              // [tokens][DeltaRule::width() or StateSpace::width()]
  Buffer<Written> delta_outputs;                    // [tokens][value heads * value_dim]
  Buffer<Written> space_outputs;                    // [tokens][heads * head_dim], of a state space
  Buffer<Written> convolved;                        // [tokens][hidden], of a short convolution
  Buffer<float> latent_queries;                     // [tokens][heads * channels], made of their latents
  Operand<Format> plain_queries;                    // [tokens][heads][plain_dim], for latents
  Operand<Format> attended_latents;                 // [tokens][heads][rank]
  Buffer<float> router_logits;                      // [tokens][experts and the shared expert]
  Buffer<float> shared_weights;                     // [tokens], of the shared expert
  Buffer<Written> expert_gated;                     // [choices][expert_size], see experts.h
  Inputs<Format> expert_inputs;                     // [choices], int8 only
  Buffer<float> expert_outputs;                     // [choices][hidden]
  Buffer<int32_t> sequences;                        // [tokens], the sequence of each token
  Buffer<QueryBlock> query_blocks;                  // [tokens * kv heads] at most
  Buffer<QueryBlock> last_blocks;                   // those of the last layer
  std::vector<ThreadBuffers<Format>> threads;
  bool has_groups = false;  // weights are in four bits

  explicit Buffers(int num_threads) : threads(num_threads) {}

  void reserve(const Model& model, int tokens) {
    const int hidden = padded(model.hidden_size), queries_rank = model.latent.query_rank;
    const int heads = padded(model.num_heads * (model.latent.rank ? model.latent.head_value_dim : model.head_dim));
    const int inner = padded(model.intermediate_size), expert = padded(model.expert_size);
    const int values = padded(model.delta.num_value_heads * model.delta.value_dim);
    const int space = padded(StateSpace::num_outputs(model.space));
    const int widest = std::max({hidden, heads, inner, expert, values, space, queries_rank});
    const int rows = rows_per_item(model.num_heads, model.num_kv_heads);
    residual.reserve(size_t(tokens) * hidden);
    if (model.layers[0].attended_norm) added.reserve(size_t(tokens) * hidden);
    inputs.reserve(tokens, kIsQuantised ? widest : std::max(hidden, queries_rank), has_groups);
    for (int i = 0; i < model.num_layers; ++i) {
      const Layer& layer = model.layers[i];
      qkv.reserve(size_t(tokens) * std::max(layer.qkv.num_blocks, layer.space.projection.num_blocks) * 64);
    }
    queries.reserve(size_t(tokens) * model.num_heads * model.head_dim);
    attended.reserve(size_t(tokens) * heads);
    gated.reserve(size_t(tokens) * inner);
    if (model.num_experts) reserve_experts(model, tokens);
    if (model.delta.num_value_heads) reserve_delta(model, tokens);
    if (model.space.num_heads) reserve_state_space(model, tokens);
    if (model.latent.rank) reserve_latents(model, tokens);
    if (model.num_taps) convolved.reserve(size_t(tokens) * hidden);
    sequences.reserve(tokens);
    const size_t num_blocks = size_t(tokens) * (model.latent.rank ? model.num_heads : model.num_kv_heads);
    query_blocks.reserve(num_blocks);
    last_blocks.reserve(num_blocks);
    for (ThreadBuffers<Format>& own : threads) {
      own.inputs.reserve(ThreadBuffers<Format>::kOwnRows, widest, has_groups);
      own.rows.reserve(std::max(ThreadBuffers<Format>::kOwnRows * hidden, queries_rank));
      if (kIsQuantised) own.hadamard.reserve(std::max(widest, model.latent.rank));
      own.head.reserve(2 * model.head_dim);
      own.query_rows.reserve(rows);
      own.outputs.reserve(size_t(rows) * model.head_dim / kLanes);
      own.weights.reserve(size_t(rows) * kKeyBlock);
      own.sums.reserve(rows);
      own.maxima.reserve(rows);
      if (model.eight_bit_pages) {
        const size_t num_blocks = EightBits(model.head_dim).num_blocks();
        own.byte_queries.reserve(size_t(rows) * model.head_dim);
        own.worths.reserve(rows * num_blocks);
        own.byte_weights.reserve(size_t(rows) * kKeyBlock);
        own.units.reserve(rows);
        own.scales.reserve((2 + num_blocks) * kKeyTiles);
      }
    }
  }

  void reserve_delta(const Model& model, size_t tokens) {
    const DeltaShape& delta = model.delta;
    exact.reserve(tokens * padded(model.hidden_size));
    gates.reserve(tokens * padded(2 * padded(delta.num_value_heads, kLanes)));
    mixed.reserve(tokens * DeltaRule::width(delta));
    delta_outputs.reserve(tokens * padded(delta.num_value_heads * delta.value_dim));
  }

  void reserve_state_space(const Model& model, size_t tokens) {
    exact.reserve(tokens * padded(model.hidden_size));
    gates.reserve(tokens * padded(model.space.num_heads));
    mixed.reserve(tokens * StateSpace::width(model.space));
    space_outputs.reserve(tokens * padded(StateSpace::num_outputs(model.space)));
  }

  void reserve_latents(const Model& model, size_t tokens) {
    const LatentShape& latent = model.latent;
    for (int i = 0; i < model.num_layers; ++i)
      latent_queries.reserve(tokens * model.layers[i].latent.query_up.num_blocks * 64);
    plain_queries.reserve(tokens * model.num_heads, latent.plain_dim);
    attended_latents.reserve(tokens * model.num_heads, latent.rank);
  }

  void reserve_experts(const Model& model, size_t tokens) {
    const int hidden = padded(model.hidden_size), inner = padded(model.expert_size);
    const size_t num_choices = tokens * model.experts_per_token;
    exact.reserve(tokens * hidden);
    router_logits.reserve(tokens * padded(model.num_experts + 1));
    shared_weights.reserve(tokens);
    expert_gated.reserve(num_choices * inner);
    expert_outputs.reserve(num_choices * hidden);
    if (kIsQuantised) expert_inputs.reserve(num_choices, inner, false);
  }
};

}  // namespace triptych
