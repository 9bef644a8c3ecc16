// What attention does with keys and values in eight bits: scores and sums of values are products of integers.
//
// A query is transformed like the keys and rounded to -127..127 in each block of channels. The weights of a block of
// keys, times the scales of their values, are rounded to 0..kMostWeight times the greatest of them. Sums of products
// are thus exact, whatever instructions compute them, and a row's result depends on nothing but its own query and the
// keys.
//
// Source: "SageAttention: Accurate 8-Bit Attention for Plug-and-play Inference Acceleration", Zhang et al. 2024,
// arXiv 2410.02367, where weights have one scale for all keys.
#pragma once

#include "attention_tiles.h"
#include "eight_bits.h"
#include "pages.h"
#include "powers.h"
#include "row_lanes.h"

namespace triptych {

// A block of channels of a query.
struct QueryWorth {
  float unit;      // what a product of 1 with the number of a key stands for, without the scale of the key
  int32_t excess;  // what the excess of the keys adds to products
};

// How products become scores: those of the first block of channels, or of a further one.
template <bool kIsFirst>
struct ToScores {
  const Floats* scales;      // [kKeyTiles], of the keys
  const QueryWorth* worths;  // of the first row
  int stride;                // from row to row
  Ints begin(const Floats&) const { return Ints{}; }
  INLINED Floats end(const Floats& scores, const Ints& found, int row, int v) const {
    const QueryWorth& worth = worths[row * stride];
    const Floats products = to_floats(found - broadcast(worth.excess)) * scales[v], unit = broadcast(worth.unit);
    return kIsFirst ? products * unit : fma(products, unit, scores);
  }
};
// How weighted values are added to outputs.
struct TimesUnits {
  const float* units;  // of the rows
  Ints begin(const Floats&) const { return Ints{}; }
  INLINED Floats end(const Floats& outputs, const Ints& found, int row, int) const {
    return fma(to_floats(found), broadcast(units[row]), outputs);
  }
};

// The tiles, compiled once.
struct ByteTiles {
  using Rows = const uint32_t* const*;
  // scores [rows][kKeyTiles] = or += rows * keys, of kTileVectors tiles.
  static void score(int count, Floats* scores, Rows rows, int steps, const Separate& keys, Ahead& ahead,
                    const ToScores<true>& adding);
  static void add_scores(int count, Floats* scores, Rows rows, int steps, const Separate& keys, Ahead& ahead,
                         const ToScores<false>& adding);
  // outputs [rows][width] += rows * values, of kTileVectors vectors or of one.
  static void add_values(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                         Ahead& ahead, const TimesUnits& adding);
  static void add_vector(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                         Ahead& ahead, const TimesUnits& adding);
};

// Room for the rows of an item.
struct ByteScratch {
  uint8_t* queries;    // [rows][head_dim]
  QueryWorth* worths;  // [rows][blocks of channels]
  uint8_t* weights;    // [rows][64]
  float* units;        // [rows], what a weight of 1 stands for
  // [2 + blocks of channels][64 / 16], of a block of keys: those of the values, their logarithms, those of the keys.
  Floats* scales;
};

class ByteAttention {
 public:
  ByteAttention(int head_dim, int value_dim, const ByteScratch& scratch)
      : key_bits_(head_dim), value_bits_(value_dim), head_dim_(head_dim), value_dim_(value_dim), scratch_(scratch) {}

  template <class Element>
  void round_query(int row, const Element* query) const {
    const int block = key_bits_.block();
    for (int b = 0; b < key_bits_.num_blocks(); ++b, query += block) {
      float mixed[EightBits::kMostMixed];
      convert(query, block, mixed);
      const Magnitude magnitude = transform(mixed, mixed, block, block);
      uint8_t* const to = scratch_.queries + row * head_dim_ + b * block;
      Floats total = broadcast(0.0f);
      for (int d = 0; d < block; d += kLanes)
        total = total + store_bytes<0>(to + d, load<Floats>(mixed + d), magnitude.factor());
      const auto excess = int32_t(sum(total)) * EightBits::kExcess;
      scratch_.worths[row * key_bits_.num_blocks() + b] = {magnitude.unit() / float(block), excess};
    }
  }

  // To be called before the rows of a block of keys are weighed. Behind the first `num_keys`, anything may be. If a
  // value is NaN, so are the scores of its key.
  void read_scales(const KeyTiles& tiles, int num_keys) const {
    const Ints lanes = load<Ints>(kLaneNumbers);
    for (int i = 0; i < kKeyTiles; ++i) {
      const Floats stored = value_bits_.read_scales(reinterpret_cast<const char*>(tiles.values[i]));
      const Floats scales = where_between(lanes, 0, num_keys - 1 - i * kLanes, stored, broadcast(0.0f));
      value_scales()[i] = scales;
      logarithms()[i] = log2_or_more(scales);
      for (int block = 0; block < key_bits_.num_blocks(); ++block) {
        const Floats of_keys = key_bits_.read_scales(reinterpret_cast<const char*>(tiles.keys[i]), block);
        key_scales(block)[i] = fma(scales, broadcast(0.0f), of_keys);
      }
    }
  }

  // Scores [count][kKeyTiles] of rows from `first` on.
  void score(int first, int count, const KeyTiles& tiles, Floats* scores, Ahead& ahead) const {
    const int num_blocks = key_bits_.num_blocks(), steps = key_bits_.block() / EightBits::kGroup;
    const uint32_t* rows[kTileRows];
    for (int r = 0; r < count; ++r)
      rows[r] = reinterpret_cast<const uint32_t*>(scratch_.queries + (first + r) * head_dim_);
    for (int b = 0; b < num_blocks; ++b) {
      const QueryWorth* const worths = scratch_.worths + first * num_blocks + b;
      for (int tile = 0; tile < kKeyTiles; tile += kTileVectors) {
        Separate keys;
        keys.segment_steps = steps;
        for (int i = 0; i < kTileVectors; ++i) keys.start[i] = tiles.keys[tile + i] + b * steps * kLanes;
        const Floats* const scales = key_scales(b) + tile;
        if (b == 0)
          ByteTiles::score(count, scores + tile, rows, steps, keys, ahead, {scales, worths, num_blocks});
        else
          ByteTiles::add_scores(count, scores + tile, rows, steps, keys, ahead, {scales, worths, num_blocks});
      }
      for (int r = 0; r < count; ++r) rows[r] += steps;
    }
  }

  // The greatest of a row's scores [kKeyTiles] plus the logarithms of the values' scales, by lane.
  INLINED Floats top(const Floats* scores) const {
    const Floats* const more = logarithms();
    return max(max(scores[0] + more[0], scores[1] + more[1]), max(scores[2] + more[2], scores[3] + more[3]));
  }
  // How the weights of rows from `first` on are to be rounded: by the row, the binary logarithm of at least the
  // greatest of them, times the scale of its value. `factors` receives what they are multiplied by.
  template <int kRows>
  INLINED void begin_weights(int first, Floats logarithm, float* factors) const {
    const Floats within = max(logarithm, broadcast(-100.0f));
    store_first<kRows>(scratch_.units + first, exp2(within) * broadcast(1.0f / kMostWeight));
    store(factors, exp2(broadcast(0.0f) - within) * broadcast(kMostWeight));
  }
  INLINED void write_weights(int row, const Floats* weights, float factor) const {
    uint8_t* const to = scratch_.weights + row * kKeyBlock;
    const Floats* const scales = value_scales();
    unrolled<kKeyTiles>([&](auto i) { store_bytes<0>(to + i * kLanes, weights[i] * scales[i], broadcast(factor)); });
  }

  // outputs [count][value_dim / 16] += the rounded weights of rows from `first` on * the values of the first
  // `num_keys`.
  void add_values(int first, int count, int num_keys, const KeyTiles& tiles, Floats* outputs, Ahead& ahead) const {
    const int steps = (num_keys + EightBits::kGroup - 1) / EightBits::kGroup, num_vectors = value_dim_ / kLanes;
    const uint32_t* rows[kTileRows];
    for (int r = 0; r < count; ++r)
      rows[r] = reinterpret_cast<const uint32_t*>(scratch_.weights + (first + r) * kKeyBlock);
    const auto add = [&](auto* add_channels, int vector) {
      Adjacent<> values;
      values.segment_steps = kLanes / EightBits::kGroup;
      values.stride = value_dim_;
      for (int i = 0; i < kKeyTiles; ++i) values.start[i] = tiles.values[i] + vector * kLanes;
      add_channels(count, outputs + vector, num_vectors, rows, steps, values, ahead, {scratch_.units + first});
    };
    int vector = 0;
    for (; vector + kTileVectors <= num_vectors; vector += kTileVectors) add(ByteTiles::add_values, vector);
    for (; vector < num_vectors; ++vector) add(ByteTiles::add_vector, vector);
  }

 private:
  static constexpr float kMostWeight = EightBits::kExcess ? 255.0f : 127.0f;  // unsigned if keys have an excess

  Floats* value_scales() const { return scratch_.scales; }
  Floats* logarithms() const { return scratch_.scales + kKeyTiles; }
  Floats* key_scales(int block) const { return scratch_.scales + (2 + block) * kKeyTiles; }

  EightBits key_bits_, value_bits_;
  int head_dim_, value_dim_;
  ByteScratch scratch_;
};

}  // namespace triptych
