// Paged attention: some query rows of one sequence and one kv head against all keys before them.
//
// Keys and values lie in tiles of 16 tokens, page_size / 16 tiles to a page. With 16-bit elements a group is a pair:
//   key tile    [head_dim / 2][16 tokens][2 channels]   one vector holds a pair of channels of 16 keys
//   value tile  [16 / 2][head_dim][2 tokens]            one vector holds 16 channels of a pair of tokens
// so that scores and outputs are made by the tile of tile.h, and every load serves all query rows.
//
// Keys pass by in blocks of 64 at fixed positions, with a running maximum and sum for each row (Milakov and
// Gimelshein 2018, "Online normalizer calculation for softmax"). A block that a row may not see changes none of its
// bits, so a row's result depends neither on the rows beside it nor on how its prompt was cut into chunks.
#pragma once

#include "abi.h"
#include "tile.h"

namespace triptych {

constexpr int kKeyBlock = 64;   // keys of a block, four tiles
constexpr int kBlockRows = 48;  // query rows of a work item, unless one token alone has more

// Query rows of one work item: `count` tokens of a sequence, each with the heads of one kv head's group.
struct QueryBlock {
  int32_t sequence;
  int32_t first_token;  // index into the tokens of the step
  int32_t count;
};

inline int tokens_per_item(int group_size) { return std::max(1, kBlockRows / group_size); }
inline int rows_per_item(int group_size) { return tokens_per_item(group_size) * group_size; }

// The pages of one layer, by tiles.
template <class Cache>
struct Pages {
  using Element = typename Cache::Element;
  static constexpr int kGroup = Cache::kGroup;
  Element* keys;
  Element* values;
  int num_kv_heads, head_dim, page_size;

  size_t tile(int page, int kv_head, int offset) const {
    const size_t tiles = size_t(page) * num_kv_heads + kv_head;
    return (tiles * (page_size / kLanes) + offset / kLanes) * head_dim * kLanes;
  }
  // Stores one token's key and value. If no token follows it in this step, the rest of its group of values is
  // cleared: a weight of 0 would not hide a not-a-number that lay there.
  void write(int64_t slot, int kv_head, const float* key, const float* value, bool is_last) const {
    const int offset = int(slot % page_size);
    const size_t start = tile(int(slot / page_size), kv_head, offset);
    const int t = offset % kLanes, in_group = t % kGroup;
    for (int d = 0; d < head_dim; ++d) {
      keys[start + (d / kGroup * kLanes + t) * kGroup + d % kGroup] = narrow(key[d], Element{});
      Element* group = values + start + (size_t(t) / kGroup * head_dim + d) * kGroup;
      group[in_group] = narrow(value[d], Element{});
      for (int i = in_group + 1; is_last && i < kGroup; ++i) group[i] = Element{};
    }
  }
};

// What a thread needs for one item; [rows] is rows_per_item.
template <class Cache>
struct AttentionScratch {
  float* outputs;                     // [rows][head_dim], not yet divided by the sums
  typename Cache::Element* weights;   // [rows][64]
  Floats* sums;                       // [rows], of weights, by lane
  float* maxima;                      // [rows]
  float* corrections;                 // [rows], what a new maximum makes of older outputs
};

template <class Cache>
class Attention {
 public:
  using Element = typename Cache::Element;

  Attention(const Pages<Cache>& pages, const AttentionScratch<Cache>& scratch, int window)
      : pages_(pages), scratch_(scratch), window_(window) {}

  // Attends `num_rows` rows, row r being head r % group_size of token r / group_size, whose position is
  // first_position + r / group_size. Queries are scaled. The result is in scratch.outputs.
  void run(const Element* const* queries, int num_rows, int group_size, int first_position, const int32_t* table,
           int kv_head) {
    queries_ = queries;
    group_size_ = group_size;
    first_position_ = first_position;
    const int last = first_position + (num_rows - 1) / group_size;
    const int first = window_ ? std::max(0, first_position - window_ + 1) : 0;
    for (int r = 0; r < num_rows; ++r) {
      scratch_.maxima[r] = kNoMaximum;
      scratch_.sums[r] = broadcast(0.0f);
      std::memset(scratch_.outputs + size_t(r) * pages_.head_dim, 0, pages_.head_dim * sizeof(float));
    }
    for (int key = first / kKeyBlock * kKeyBlock; key <= last; key += kKeyBlock) {
      const int num_keys = std::min(kKeyBlock, last + 1 - key);
      find_tiles(table, kv_head, key, num_keys);
      const int num_groups = (num_rows + kTileRows - 1) / kTileRows;
      for (int group = 0; group < num_groups; ++group) {
        const int begin = num_rows * group / num_groups, end = num_rows * (group + 1) / num_groups;
        weigh(begin, end - begin, key);
        gather(begin, end - begin, num_keys);
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      float* row = scratch_.outputs + size_t(r) * pages_.head_dim;
      const Floats factor = broadcast(1.0f / sum(scratch_.sums[r]));
      for (int d = 0; d < pages_.head_dim; d += kLanes) store(row + d, load<Floats>(row + d) * factor);
    }
  }

 private:
  static constexpr float kNoMaximum = -1e30f, kMasked = -2e30f;

  void find_tiles(const int32_t* table, int kv_head, int first_key, int num_keys) {
    for (int i = 0; i < kKeyBlock / kLanes; ++i) {
      const int key = std::min(first_key + i * kLanes, first_key + num_keys - 1);  // past the end: the last tile again
      const size_t tile = pages_.tile(table[key / pages_.page_size], kv_head, key % pages_.page_size);
      key_tiles_[i] = reinterpret_cast<const uint32_t*>(pages_.keys + tile);
      value_tiles_[i] = reinterpret_cast<const uint32_t*>(pages_.values + tile);
    }
  }

  // Scores of the rows against the block of keys, made weights.
  void weigh(int begin, int count, int first_key) {
    constexpr int kTiles = kKeyBlock / kLanes;
    const uint32_t* rows[kTileRows];
    for (int r = 0; r < count; ++r) rows[r] = reinterpret_cast<const uint32_t*>(queries_[begin + r]);
    Floats scores[kTileRows][kTiles];
    const int steps = pages_.head_dim / Cache::kGroup;
    for (int tile = 0; tile < kTiles; tile += kTileVectors) {
      Weights keys;
      keys.segment_steps = steps;
      keys.stride = kLanes;
      for (int v = 0; v < kTileVectors; ++v) keys.start[0][v] = key_tiles_[tile + v];
      Floats sums[kTileRows * kTileVectors] = {};
      add_rows<Cache, kTileVectors, false>(count, sums, rows, keys, steps);
      for (int r = 0; r < count; ++r)
        for (int v = 0; v < kTileVectors; ++v) scores[r][tile + v] = sums[r * kTileVectors + v];
    }
    for (int r = 0; r < count; ++r) weigh_row(begin + r, scores[r], first_key);
  }

  void weigh_row(int row, Floats* scores, int first_key) {
    constexpr int kTiles = kKeyBlock / kLanes;
    const int position = first_position_ + row / group_size_;
    const int first = window_ ? position - window_ + 1 : 0;
    if (position < first_key + kKeyBlock - 1 || first > first_key) {
      const Floats masked = broadcast(kMasked);
      const Ints lanes{load<Ints>(kLaneNumbers)};
      for (int i = 0; i < kTiles; ++i) {
        const Ints keys = lanes + broadcast(int32_t(first_key + i * kLanes));
        scores[i] = where_between(keys, first, position, scores[i], masked);
      }
    }
    const float old = scratch_.maxima[row];
    const float top = greatest(max(max(scores[0], scores[1]), max(scores[2], scores[3])));
    const float maximum = top > old ? top : old;
    float correction[kLanes];
    store(correction, exp(broadcast(old - maximum)));
    Element* weights = scratch_.weights + size_t(row) * kKeyBlock;
    Floats sums = scratch_.sums[row] * broadcast(correction[0]);
    for (int i = 0; i < kTiles; ++i) {
      const Floats weight = exp(scores[i] - broadcast(maximum));
      sums = sums + weight;
      store_as(weights + i * kLanes, weight);
    }
    scratch_.sums[row] = sums;
    scratch_.maxima[row] = maximum;
    scratch_.corrections[row] = correction[0];
  }

  // outputs = outputs * correction + weights * values.
  void gather(int begin, int count, int num_keys) {
    const int steps = (num_keys + Cache::kGroup - 1) / Cache::kGroup;
    int vector = 0;
    const int num_vectors = pages_.head_dim / kLanes;
    for (; vector + kTileVectors <= num_vectors; vector += kTileVectors)
      gather_channels<kTileVectors>(begin, count, vector, steps);
    for (; vector < num_vectors; ++vector) gather_channels<1>(begin, count, vector, steps);
  }

  template <int kVectors>
  void gather_channels(int begin, int count, int vector, int steps) {
    Weights values;
    values.segment_steps = kLanes / Cache::kGroup;
    values.stride = pages_.head_dim;
    for (int i = 0; i < kKeyBlock / kLanes; ++i)
      for (int v = 0; v < kVectors; ++v) values.start[i][v] = value_tiles_[i] + (vector + v) * kLanes;
    const uint32_t* rows[kTileRows];
    Floats sums[kTileRows * kVectors];
    for (int r = 0; r < count; ++r) {
      rows[r] = reinterpret_cast<const uint32_t*>(scratch_.weights + size_t(begin + r) * kKeyBlock);
      const Floats correction = broadcast(scratch_.corrections[begin + r]);
      for (int v = 0; v < kVectors; ++v)
        sums[r * kVectors + v] = load<Floats>(output(begin + r, vector + v)) * correction;
    }
    add_rows<Cache, kVectors, false>(count, sums, rows, values, steps);
    for (int r = 0; r < count; ++r)
      for (int v = 0; v < kVectors; ++v) store(output(begin + r, vector + v), sums[r * kVectors + v]);
  }

  float* output(int row, int vector) const {
    return scratch_.outputs + size_t(row) * pages_.head_dim + vector * kLanes;
  }

  static constexpr int32_t kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  Pages<Cache> pages_;
  AttentionScratch<Cache> scratch_;
  int window_;
  const Element* const* queries_;
  int group_size_, first_position_;
  const uint32_t* key_tiles_[kKeyBlock / kLanes];
  const uint32_t* value_tiles_[kKeyBlock / kLanes];
};

}  // namespace triptych
