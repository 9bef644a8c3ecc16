// Paged attention: some query rows of one sequence, for some of its kv heads, against all keys up to their positions.
//
// Keys are processed in blocks of 64 at fixed positions, with a running sum for each row and a maximum that may be
// somewhat below the greatest score so far (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
// A block that is masked entirely for a row leaves every bit of it unchanged, so a row's result depends neither on the
// other rows nor on how its prompt was cut into chunks.
//
// With few rows attention is bound by memory bandwidth, and memory is fastest for long contiguous reads: the heads of a
// block of keys are adjacent in a page, and all of them are read before the next block.
#pragma once

#include <utility>

#include "activations.h"
#include "attention_tiles.h"
#include "byte_attention.h"
#include "pages.h"
#include "queries.h"
#include "row_lanes.h"

namespace triptych {

constexpr float kLog2E = 1.44269504f;  // scores are base-2 logarithms

// What a thread needs for one item; [rows] is rows_per_item.
template <class Cache>
struct AttentionScratch {
  QueryRow* rows;                    // [rows]
  Floats* outputs;                   // [rows][value_dim / 16], not yet divided by the sums
  typename Cache::Element* weights;  // [rows][64]
  Floats* sums;                      // [rows], sums of the weights, by lane
  float* maxima;                     // [rows]
  ByteScratch bytes;                 // with eight-bit pages
};

template <class Cache>
class Attention {
 public:
  using Element = typename Cache::Element;

  // `cap` applies to scores as base-2 logarithms; 0: none.
  Attention(const Pages<Cache>& pages, const AttentionScratch<Cache>& scratch, int window, float cap)
      : pages_(pages),
        bytes_(pages.head_dim, pages.value_dim, scratch.bytes),
        scratch_(scratch),
        window_(window),
        cap_(cap),
        num_vectors_(pages.value_dim / kLanes) {}

  // Attention for consecutive tokens, the first of them at `position`. Queries must be scaled so that scores are base-2
  // logarithms. The result is in scratch.outputs, one row for each of scratch.rows. Calls expect(row) for each of them
  // before keys are read, which is the time to prefetch where its result will go.
  template <class Expect>
  void run(const Queries<Element>& queries, int position, const int32_t* table, int first_kv_head, int num_kv_heads,
           const Expect& expect) {
    queries_ = queries;
    first_position_ = position;
    const int rows_per_group = queries.rows_per_group(), num_rows = num_kv_heads * rows_per_group;
    list_rows(num_kv_heads);
    const int last = position + queries.num_tokens - 1;
    const int first = window_ ? std::max(0, position - window_ + 1) : 0;
    for (int r = 0; r < num_rows; ++r) {
      expect(scratch_.rows[r]);
      prefetch_query(std::min(r + kRowsAhead, num_rows - 1));
      scratch_.maxima[r] = kNoMaximum;
      scratch_.sums[r] = broadcast(0.0f);
      std::fill_n(output(r), num_vectors_, broadcast(0.0f));
      if (queries.sinks) begin_with_sink(r);
      if (pages_.has_eight_bits) round_query(r);
    }
    const int num_tiles = (rows_per_group + kTileRows - 1) / kTileRows;
    const int begin = first / kKeyBlock * kKeyBlock;
    next_ = find_tiles(table, first_kv_head, begin, last);
    for (int key = begin; key <= last; key += kKeyBlock) {
      const int num_keys = std::min(kKeyBlock, last + 1 - key);
      for (int group = 0; group < num_kv_heads; ++group) {
        tiles_ = next_;
        const bool is_last = group + 1 == num_kv_heads;
        const int next_group = is_last ? 0 : group + 1, next_key = is_last ? key + kKeyBlock : key;
        has_next_ = next_key <= last;
        if (has_next_) next_ = find_tiles(table, first_kv_head + next_group, next_key, last);
        if (pages_.has_eight_bits) {
          ahead_ = {&next_, {pages_.key_bytes(), pages_.value_bytes()}, has_next_ ? 0 : Ahead::kAll};
          has_next_ = false;
          bytes_.read_scales(tiles_, num_keys);
        }
        for (int tile = 0, end = 0; tile < num_tiles; ++tile) {
          const int row = std::exchange(end, rows_per_group * (tile + 1) / num_tiles);
          const int begin = group * rows_per_group + row, count = end - row;
          // Of the keys of the block, the tile's last row sees the most.
          const int num_visible = std::min(num_keys, position + scratch_.rows[begin + count - 1].token + 1 - key);
          if (num_visible <= 0) continue;
          weigh(begin, count, key);
          gather(begin, count, num_visible);
          has_next_ = false;  // already prefetched by the first tile of rows
          ahead_.tile = Ahead::kAll;  // likewise, as far as it matters
        }
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      const Floats factor = broadcast(1.0f / sum(scratch_.sums[r]));
      for (int v = 0; v < num_vectors_; ++v) output(r)[v] = output(r)[v] * factor;
    }
  }

 private:
  using Tiles = AttentionTiles<Cache>;
  static constexpr float kNoMaximum = -1e30f, kMasked = -2e30f;
  // A maximum follows the scores only once they exceed it by this, so weights are up to 256. Most blocks raise none,
  // and their powers of two need not wait for the greatest of their scores.
  static constexpr float kSlack = 8.0f;
  static constexpr int kRowsAhead = 4;

  KeyTiles find_tiles(const int32_t* table, int kv_head, int first_key, int last_key) const {
    KeyTiles tiles;
    for (int i = 0; i < kKeyTiles; ++i) {
      const int key = std::min(first_key + i * kLanes, last_key);  // past the end: repeat the last tile
      const size_t tile = pages_.tile(table[key / pages_.page_size], kv_head, key % pages_.page_size);
      tiles.keys[i] = reinterpret_cast<const uint32_t*>(pages_.keys + tile * pages_.key_bytes());
      tiles.values[i] = reinterpret_cast<const uint32_t*>(pages_.values + tile * pages_.value_bytes());
    }
    return tiles;
  }

  // Starts at `tile`: kTileVectors tiles of keys, each of which gives one column of scores.
  Separate keys_of(const KeyTiles& tiles, int tile) const {
    Separate keys;
    keys.segment_steps = pages_.head_dim / Cache::kGroup;
    for (int i = 0; i < kTileVectors; ++i) keys.start[i] = tiles.keys[tile + i];
    return keys;
  }
  // Channels of all values, from `vector` on, 16 to a vector.
  Adjacent<> values_of(const KeyTiles& tiles, int vector) const {
    Adjacent<> values;
    values.segment_steps = kLanes / Cache::kGroup;
    values.stride = pages_.value_dim;
    for (int i = 0; i < kKeyTiles; ++i) values.start[i] = tiles.values[i] + vector * kLanes;
    return values;
  }

  // A key visible to every row, with this score and no value (Xiao et al. 2023, "Efficient streaming language models
  // with attention sinks"; learned ones as in gpt-oss).
  void begin_with_sink(int row) {
    constexpr float kOne[kLanes] = {1.0f};
    scratch_.maxima[row] = kLog2E * queries_.sinks[scratch_.rows[row].head];
    scratch_.sums[row] = load<Floats>(kOne);
  }

  // One group after the other, in each of them token by token.
  void list_rows(int num_groups) const {
    QueryRow* row = scratch_.rows;
    for (int group = 0; group < num_groups; ++group)
      for (int token = 0; token < queries_.num_tokens; ++token)
        for (int i = 0, head = group * queries_.group_size; i < queries_.group_size; ++i, ++head)
          *row++ = {queries_.row(token, head), token, head};
  }
  void round_query(int row) const {
    bytes_.round_query(row, reinterpret_cast<const Element*>(scratch_.rows[row].channels));
  }
  // Tokens are too far apart for the hardware's prefetcher.
  void prefetch_query(int row) const {
    const char* const from = reinterpret_cast<const char*>(scratch_.rows[row].channels);
    for (size_t at = 0; at < pages_.head_dim * sizeof(Element); at += 64) __builtin_prefetch(from + at);
  }

  // Turns scores of rows from `begin` on against the block of keys into weights, and rescales outputs to new maxima.
  void weigh(int begin, int count, int first_key) {
    const QueryRow* const rows = scratch_.rows + begin;
    Floats scores[kTileRows * kKeyTiles];
    if (pages_.has_eight_bits) {
      bytes_.score(begin, count, tiles_, scores, ahead_);
    } else {
      const uint32_t* channels[kTileRows];
      for (int r = 0; r < count; ++r) channels[r] = rows[r].channels;
      for (int tile = 0; tile < kKeyTiles; tile += kTileVectors) {
        const Separate next = keys_of(has_next_ ? next_ : tiles_, tile);
        Tiles::score(count, scores + tile, channels, pages_.head_dim / Cache::kGroup, keys_of(tiles_, tile),
                     has_next_ ? &next : nullptr);
      }
    }
    for (int r = 0; queries_.slopes && r < count; ++r)
      lean(scores + r * kKeyTiles, kLog2E * queries_.slopes[rows[r].head], first_key - position_of(rows[r]));
    with_rows(count, [&](auto known) { weigh_scores<decltype(known)::value>(scores, begin, first_key); });
  }

  // Scores fall with the distance of the keys (Press et al. 2022, "Train short, test long"). The first one of the block
  // is `ahead` of the query, or behind if negative.
  void lean(Floats* scores, float slope, int ahead) const {
    const Floats first = to_floats(load<Ints>(kLaneNumbers)) + broadcast(float(ahead));
    for (int i = 0; i < kKeyTiles; ++i)
      scores[i] = fma(first + broadcast(float(i * kLanes)), broadcast(slope), scores[i]);
  }

  int position_of(const QueryRow& row) const { return first_position_ + row.token; }

  template <int kRows>
  void weigh_scores(Floats* scores, int begin, int first_key) {
    for (int i = 0; cap_ != 0.0f && i < kRows * kKeyTiles; ++i) scores[i] = capped(scores[i], cap_);
    for (int r = 0; r < kRows; ++r) mask(scores + r * kKeyTiles, position_of(scratch_.rows[begin + r]), first_key);
    float* const maxima = scratch_.maxima + begin;
    Floats tops[kRows], above = broadcast(kMasked);
    unrolled<kRows>([&](auto r) {
      const Floats* s = scores + r * kKeyTiles;
      tops[r] = max(max(s[0], s[1]), max(s[2], s[3]));
      above = max(tops[r] - broadcast(maxima[r]), above);  // in this order, a NaN does not hide other rows
    });
    if (greatest(above) > kSlack) raise_maxima<kRows>(tops, begin);
    alignas(64) float roundings[kLanes];
    if (pages_.has_eight_bits) {
      unrolled<kRows>([&](auto r) { tops[r] = bytes_.top(scores + r * kKeyTiles); });
      bytes_.template begin_weights<kRows>(begin, greatest_of_each(tops) - load_first<kRows>(maxima), roundings);
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats maximum = broadcast(maxima[r]);
      Floats weights[kKeyTiles], sums = scratch_.sums[begin + r];
      unrolled<kKeyTiles>([&](auto i) {
        weights[i] = exp2(scores[r * kKeyTiles + i] - maximum);
        sums = sums + weights[i];
      });
      scratch_.sums[begin + r] = sums;
      if (pages_.has_eight_bits) {
        bytes_.write_weights(begin + r, weights, roundings[r]);
        continue;
      }
      Element* const to = scratch_.weights + size_t(begin + r) * kKeyBlock;
      unrolled<kKeyTiles>([&](auto i) { store_as(to + i * kLanes, weights[i]); });
    }
  }

  void mask(Floats* scores, int position, int first_key) const {
    const int first = window_ ? position - window_ + 1 : 0;
    if (position >= first_key + kKeyBlock - 1 && first <= first_key) return;
    const Floats masked = broadcast(kMasked);
    const Ints lanes = load<Ints>(kLaneNumbers);
    for (int i = 0; i < kKeyTiles; ++i) {
      const Ints keys = lanes + broadcast(int32_t(first_key + i * kLanes));
      scores[i] = where_between(keys, first, position, scores[i], masked);
    }
  }

  // The maxima become those of the tops where these are far above, and what was found with the old ones is rescaled.
  template <int kRows>
  void raise_maxima(const Floats (&tops)[kRows], int begin) {
    float highest[kLanes];
    store(highest, greatest_of_each(tops));
    for (int r = 0; r < kRows; ++r) {
      float& maximum = scratch_.maxima[begin + r];
      if (!(highest[r] - maximum > kSlack)) continue;
      rescale(begin + r, exp2(broadcast(maximum - highest[r])));
      maximum = highest[r];
    }
  }

  void rescale(int row, Floats factor) {
    scratch_.sums[row] = scratch_.sums[row] * factor;
    Floats* outputs = output(row);
    for (int v = 0; v < num_vectors_; ++v) outputs[v] = outputs[v] * factor;
  }

  // outputs += weights * values.
  void gather(int begin, int count, int num_keys) {
    if (pages_.has_eight_bits) return bytes_.add_values(begin, count, num_keys, tiles_, output(begin), ahead_);
    const int steps = (num_keys + Cache::kGroup - 1) / Cache::kGroup;
    const uint32_t* rows[kTileRows];
    for (int r = 0; r < count; ++r) rows[r] = weights_of(begin + r);
    const auto add = [&](auto* add_channels, int vector) {
      const Adjacent<> next = values_of(has_next_ ? next_ : tiles_, vector);
      add_channels(count, output(begin) + vector, num_vectors_, rows, steps, values_of(tiles_, vector),
                   has_next_ ? &next : nullptr);
    };
    int vector = 0;
    for (; vector + kTileVectors <= num_vectors_; vector += kTileVectors) add(Tiles::add_values, vector);
    for (; vector < num_vectors_; ++vector) add(Tiles::add_vector, vector);
  }

  const uint32_t* weights_of(int row) const {
    return reinterpret_cast<const uint32_t*>(scratch_.weights + size_t(row) * kKeyBlock);
  }
  Floats* output(int row) const { return scratch_.outputs + size_t(row) * num_vectors_; }

  Pages<Cache> pages_;
  ByteAttention bytes_;
  AttentionScratch<Cache> scratch_;
  int window_;
  float cap_;
  int num_vectors_;  // vectors in a value
  Queries<Element> queries_{};
  int first_position_ = 0;
  KeyTiles tiles_{}, next_{};  // of the current block, and of the next
  bool has_next_ = false;   // whether the next block, if not in eight bits, is still to be prefetched
  Ahead ahead_{nullptr, {}, Ahead::kAll};  // what is still to be prefetched of an eight-bit block
};

}  // namespace triptych
