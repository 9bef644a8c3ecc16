// Paged attention: some query rows of one sequence, for some of its kv heads, against all keys up to their positions.
//
// Keys are processed in blocks of 64 at fixed positions, with a running maximum and sum for each row (Milakov and
// Gimelshein 2018, "Online normalizer calculation for softmax"). A block that is masked entirely for a row leaves every
// bit of it unchanged, so a row's result depends neither on the other rows nor on how its prompt was cut into chunks.
//
// With few rows attention is bound by memory bandwidth, and memory is fastest for long contiguous reads: the heads of a
// block of keys are adjacent in a page, and all of them are read before the next block.
#pragma once

#include "abi.h"
#include "activations.h"
#include "attention_tiles.h"
#include "pages.h"
#include "queries.h"

namespace triptych {

constexpr float kLog2E = 1.44269504f;  // scores are base-2 logarithms

// What a thread needs for one item; [rows] is rows_per_item.
template <class Cache>
struct AttentionScratch {
  Floats* outputs;                   // [rows][value_dim / 16], not yet divided by the sums
  typename Cache::Element* weights;  // [rows][64]; with eight-bit pages, multiplied by the scales of the values
  Floats* sums;                      // [rows], sums of the weights, by lane
  float* maxima;                     // [rows]
  // Keys and values of a block stored in eight bits: its numbers as elements, and their scales.
  typename Cache::Element* block;  // [2][64][head_dim]
  Floats* scales;                  // [1 + groups of channels][64 / 16], the scales of the values first
};

template <class Cache>
class Attention {
 public:
  using Element = typename Cache::Element;

  // `cap` applies to scores as base-2 logarithms; 0: none.
  Attention(const Pages<Cache>& pages, const AttentionScratch<Cache>& scratch, int window, float cap)
      : pages_(pages),
        key_bits_(pages.head_dim),
        value_bits_(pages.value_dim),
        scratch_(scratch),
        window_(window),
        cap_(cap),
        num_vectors_(pages.value_dim / kLanes) {}

  // Attention for consecutive tokens, the first of them at `position`. Queries must be scaled so that scores are base-2
  // logarithms. The result is in scratch.outputs, one row for each query row.
  void run(const Queries<Element>& queries, int position, const int32_t* table, int first_kv_head, int num_kv_heads) {
    queries_ = queries;
    first_position_ = position;
    const int rows_per_group = queries.rows_per_group(), num_rows = num_kv_heads * rows_per_group;
    const int last = position + queries.num_tokens - 1;
    const int first = window_ ? std::max(0, position - window_ + 1) : 0;
    for (int r = 0; r < num_rows; ++r) {
      scratch_.maxima[r] = kNoMaximum;
      scratch_.sums[r] = broadcast(0.0f);
      std::fill_n(output(r), num_vectors_, broadcast(0.0f));
      if (queries.sinks) begin_with_sink(r);
    }
    const int num_tiles = (rows_per_group + kTileRows - 1) / kTileRows;
    const int begin = first / kKeyBlock * kKeyBlock;
    in_registers_ = kAreInRegisters && pages_.has_eight_bits && num_tiles == 1 &&
                    pages_.head_dim % EightBits<Cache>::kChannels == 0 &&
                    pages_.value_dim % EightBits<Cache>::kChannels == 0;
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
        }
        bool is_to_read = pages_.has_eight_bits;
        for (int tile = 0; tile < num_tiles; ++tile) {
          const int row = rows_per_group * tile / num_tiles, end = rows_per_group * (tile + 1) / num_tiles;
          // Of the keys of the block, the tile's last row sees the most.
          const int num_visible = std::min(num_keys, position + queries.token(end - 1) + 1 - key);
          if (num_visible <= 0) continue;
          if (is_to_read) read_keys(num_keys);
          weigh(group, row, end - row, key);
          if (is_to_read) read_values(num_keys, num_tiles);
          gather(group * rows_per_group + row, end - row, num_visible);
          is_to_read = false;
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
  static constexpr bool kAreInRegisters = Tiles::Numbers::kAreThere;
  static constexpr float kNoMaximum = -1e30f, kMasked = -2e30f;

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

  // Converts the keys of a block to elements for all rows of the item, unless that happens in registers. Also reads the
  // scales, of which those of the values are folded into the weights.
  void read_keys(int num_keys) {
    for (int i = 0; i < kKeyTiles; ++i) {
      value_scales()[i] = value_bits_.read_scales(reinterpret_cast<const char*>(tiles_.values[i]));
      for (int group = 0; group < key_bits_.num_groups(); ++group)
        key_scales(group)[i] = key_bits_.read_scales(reinterpret_cast<const char*>(tiles_.keys[i]), group);
    }
    if (!in_registers_) read(tiles_.keys, key_bits_, scratch_.block, num_keys);
  }
  // Values overwrite the keys, unless later rows still need the keys: this keeps the working set in cache small.
  void read_values(int num_keys, int num_row_tiles) {
    if (in_registers_) return;
    Element* to = scratch_.block + (num_row_tiles > 1 ? size_t(kKeyBlock) * pages_.head_dim : 0);
    read(tiles_.values, value_bits_, to, num_keys);
  }
  static void read(const uint32_t** tiles, const EightBits<Cache>& format, Element* to, int num_keys) {
    const size_t size = format.num_numbers();
    const int num_tiles = (num_keys + kLanes - 1) / kLanes;
    for (int i = 0; i < kKeyTiles; ++i) {
      Element* tile = to + std::min(i, num_tiles - 1) * size;
      if (i < num_tiles) format.read_numbers(reinterpret_cast<const char*>(tiles[i]), tile);
      tiles[i] = reinterpret_cast<const uint32_t*>(tile);
    }
  }
  Floats* value_scales() const { return scratch_.scales; }
  Floats* key_scales(int group) const { return scratch_.scales + (1 + group) * kKeyTiles; }

  // Starts at `tile` and channel group `group`: kTileVectors tiles of keys, each of which gives one column of scores.
  Separate keys_of(const KeyTiles& tiles, int tile, int group = 0) const {
    Separate keys;
    keys.segment_steps = pages_.head_dim / Cache::kGroup;
    for (int i = 0; i < kTileVectors; ++i)
      keys.start[i] = tiles.keys[tile + i] + group * EightBits<Cache>::kChannels / Cache::kGroup * kLanes;
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
    const int per_group = queries_.rows_per_group();
    constexpr float kOne[kLanes] = {1.0f};
    scratch_.maxima[row] = kLog2E * queries_.sinks[queries_.head(row / per_group, row % per_group)];
    scratch_.sums[row] = load<Floats>(kOne);
  }

  // Turns scores of a group's rows against the block of keys into weights, and rescales outputs to the new maxima.
  void weigh(int group, int first_row, int count, int first_key) {
    const uint32_t* rows[kTileRows];
    int positions[kTileRows];
    float slopes[kTileRows];
    int token = queries_.token(first_row), head = queries_.head(group, first_row);
    for (int r = 0; r < count; ++r) {
      rows[r] = queries_.row(token, head);
      positions[r] = first_position_ + token;
      if (queries_.slopes) slopes[r] = kLog2E * queries_.slopes[head];
      if (++head == (group + 1) * queries_.group_size) head = group * queries_.group_size, ++token;
    }
    Floats scores[kTileRows * kKeyTiles];
    if (pages_.has_eight_bits) {
      std::fill_n(scores, count * kKeyTiles, broadcast(0.0f));
      add_scaled(count, scores, rows);
    } else {
      for (int tile = 0; tile < kKeyTiles; tile += kTileVectors) {
        const Separate next = keys_of(has_next_ ? next_ : tiles_, tile);
        Tiles::score(count, scores + tile, rows, pages_.head_dim / Cache::kGroup, keys_of(tiles_, tile),
                     has_next_ ? &next : nullptr);
      }
    }
    for (int r = 0; queries_.slopes && r < count; ++r)
      lean(scores + r * kKeyTiles, slopes[r], first_key - positions[r]);
    with_rows(count, [&](auto rows_of_tile) {
      weigh_scores<decltype(rows_of_tile)::value>(scores, positions, group * queries_.rows_per_group() + first_row,
                                                  first_key);
    });
  }

  // Scores fall with the distance of the keys (Press et al. 2022, "Train short, test long"). The first one of the block is
  // `ahead` of the query, or behind if negative.
  void lean(Floats* scores, float slope, int ahead) const {
    const Floats first = to_floats(load<Ints>(kLaneNumbers)) + broadcast(float(ahead));
    for (int i = 0; i < kKeyTiles; ++i)
      scores[i] = fma(first + broadcast(float(i * kLanes)), broadcast(slope), scores[i]);
  }

  // `begin` is the first row's index in the scratch.
  template <int kRows>
  void weigh_scores(Floats* scores, const int* positions, int begin, int first_key) {
    for (int i = 0; cap_ != 0.0f && i < kRows * kKeyTiles; ++i) scores[i] = capped(scores[i], cap_);
    for (int r = 0; r < kRows; ++r) mask(scores + r * kKeyTiles, positions[r], first_key);
    float shrink[kLanes] = {};
    for (int r = 0; r < kRows; ++r) {
      const Floats* s = scores + r * kKeyTiles;
      const float old = scratch_.maxima[begin + r], top = greatest(max(max(s[0], s[1]), max(s[2], s[3])));
      scratch_.maxima[begin + r] = top > old ? top : old;
      shrink[r] = old - scratch_.maxima[begin + r];
    }
    float factors[kLanes];
    store(factors, exp2(load<Floats>(shrink)));
    for (int r = 0; r < kRows; ++r) {
      if (factors[r] != 1.0f) rescale(begin + r, factors[r]);
      const Floats maximum = broadcast(scratch_.maxima[begin + r]);
      Element* weights = scratch_.weights + size_t(begin + r) * kKeyBlock;
      Floats sums = scratch_.sums[begin + r];
      for (int i = 0; i < kKeyTiles; ++i) {
        const Floats weight = exp2(scores[r * kKeyTiles + i] - maximum);
        sums = sums + weight;
        store_as(weights + i * kLanes, pages_.has_eight_bits ? weight * value_scales()[i] : weight);
      }
      scratch_.sums[begin + r] = sums;
    }
  }

  // scores += the sum over channel groups of (rows * keys) * the scales of the keys.
  void add_scaled(int count, Floats* scores, const uint32_t** rows) {
    const int at_a_time = in_registers_ ? Tiles::kHalf : kTileVectors;
    for (int group = 0; group < key_bits_.num_groups(); ++group) {
      const int steps = key_bits_.channels_of(group) / Cache::kGroup;
      for (int tile = 0; tile < kKeyTiles; tile += at_a_time) {
        const TimesScales scales{key_scales(group) + tile};
        if (in_registers_)
          add_numbers(count, scores + tile, rows, group, tile, steps, scales);
        else
          Tiles::add_scores(count, scores + tile, rows, steps, keys_of(tiles_, tile, group), ahead_, scales);
      }
      for (int r = 0; r < count; ++r) rows[r] += steps;
    }
  }
  void add_numbers(int count, Floats* scores, const uint32_t* const* rows, int group, int tile, int steps,
                   const TimesScales& scales) {
    const uint8_t* keys[Tiles::kHalf];
    for (int i = 0; i < Tiles::kHalf; ++i)
      keys[i] = reinterpret_cast<const uint8_t*>(tiles_.keys[tile + i]) + group * EightBits<Cache>::kChannels * kLanes;
    Tiles::add_number_scores(count, scores, rows, steps, keys, ahead_, scales);
  }
  // outputs += weights * the values, for one channel group.
  void add_values(int begin, int count, int group, int steps) {
    constexpr int kChannels = EightBits<Cache>::kChannels;
    const uint8_t* values[kKeyTiles];
    for (int i = 0; i < kKeyTiles; ++i)
      values[i] = reinterpret_cast<const uint8_t*>(tiles_.values[i]) + group * kChannels * Cache::kGroup;
    const uint32_t* rows[kTileRows];
    for (int r = 0; r < count; ++r) rows[r] = weights_of(begin + r);
    Tiles::add_number_values(count, output(begin) + group * (kChannels / kLanes), num_vectors_, rows, steps, values,
                             pages_.value_dim, ahead_);
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

  void rescale(int row, float by) {
    const Floats factor = broadcast(by);
    scratch_.sums[row] = scratch_.sums[row] * factor;
    Floats* outputs = output(row);
    for (int v = 0; v < num_vectors_; ++v) outputs[v] = outputs[v] * factor;
  }

  // outputs += weights * values.
  void gather(int begin, int count, int num_keys) {
    const int steps = (num_keys + Cache::kGroup - 1) / Cache::kGroup;
    if (in_registers_) {
      for (int g = 0; g < value_bits_.num_groups(); ++g) add_values(begin, count, g, steps);
      return;
    }
    const uint32_t* rows[kTileRows];
    for (int r = 0; r < count; ++r) rows[r] = weights_of(begin + r);
    const auto add = [&](auto* add_channels, int vector) {
      const Adjacent<> next = values_of(has_next_ ? next_ : tiles_, vector);
      add_channels(count, output(begin) + vector, num_vectors_, rows, steps, values_of(tiles_, vector),
                   has_next_ ? &next : nullptr, ahead_);
    };
    int vector = 0;
    for (; vector + kTileVectors <= num_vectors_; vector += kTileVectors) add(Tiles::add_values, vector);
    for (; vector < num_vectors_; ++vector) add(Tiles::add_vector, vector);
  }

  const uint32_t* weights_of(int row) const {
    return reinterpret_cast<const uint32_t*>(scratch_.weights + size_t(row) * kKeyBlock);
  }
  Floats* output(int row) const { return scratch_.outputs + size_t(row) * num_vectors_; }

  static constexpr int32_t kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  Pages<Cache> pages_;
  EightBits<Cache> key_bits_, value_bits_;
  AttentionScratch<Cache> scratch_;
  int window_;
  float cap_;
  int num_vectors_;  // vectors in a value
  Queries<Element> queries_{};
  int first_position_ = 0;
  KeyTiles tiles_{}, next_{};  // of the current block, and of the next
  bool has_next_ = false;   // whether the next block, if not in eight bits, is still to be prefetched
  Ahead ahead_{nullptr, {}, Ahead::kAll};  // what is still to be prefetched of an eight-bit block
  bool in_registers_ = false;              // whether eight-bit numbers are converted in registers
};

}  // namespace triptych
