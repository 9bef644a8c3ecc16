// The layout of the keys and values of a layer, and how they are written.
//
// They are stored in tiles of 16 tokens, page_size / 16 tiles to a page. With 16-bit elements a group is a pair:
//   key tile    [head_dim / 2][16 tokens][2 channels]   one vector holds a pair of channels of 16 keys
//   value tile  [16 / 2][value_dim][2 tokens]           one vector holds 16 channels of a pair of tokens
// Scores and outputs are thus computed by the tile of tile.h, and every load serves all query rows.
#pragma once

#include "eight_bits.h"

namespace triptych {

// The pages of one layer, as tiles.
template <class Cache>
struct Pages {
  using Element = typename Cache::Element;
  static constexpr int kGroup = Cache::kGroup;
  char* keys;
  char* values;
  int num_kv_heads, head_dim, value_dim, page_size;
  bool has_eight_bits;  // otherwise they are elements

  size_t key_bytes() const { return has_eight_bits ? EightBits(head_dim).key_bytes() : element_bytes(head_dim); }
  size_t value_bytes() const {
    return has_eight_bits ? EightBits(value_dim).value_bytes() : element_bytes(value_dim);
  }
  static size_t element_bytes(int dim) { return size_t(kLanes) * dim * sizeof(Element); }
  // Index of a tile, from the beginning of the pages.
  size_t tile(int page, int kv_head, int offset) const {
    return (size_t(page) * num_kv_heads + kv_head) * (page_size / kLanes) + offset / kLanes;
  }
  // Stores one token's key and value. If no token follows it in this step, the rest of its group of values is cleared:
  // a weight of 0 would not mask a NaN left there. `room` holds both as elements.
  void write(int64_t slot, int kv_head, const float* key, const float* value, bool is_last, Element* room) const {
    const int offset = int(slot % page_size), t = offset % kLanes, group_end = (t / kGroup + 1) * kGroup;
    const size_t number = tile(int(slot / page_size), kv_head, offset);
    char *key_tile = keys + number * key_bytes(), *value_tile = values + number * value_bytes();
    if (has_eight_bits) {
      EightBits(head_dim).write_key(key_tile, t, key);
      EightBits(value_dim).write_value(value_tile, t, value);
      return;
    }
    store_all(room, key, head_dim);
    store_all(room + head_dim, value, value_dim);
    Element* key_group = reinterpret_cast<Element*>(key_tile) + t * kGroup;
    for (int d = 0; d < head_dim; d += kGroup, key_group += kLanes * kGroup)
      std::memcpy(key_group, room + d, kGroup * sizeof(Element));
    Element* value_group = reinterpret_cast<Element*>(value_tile) + size_t(t) / kGroup * value_dim * kGroup;
    for (int d = 0; d < value_dim; ++d) value_group[d * kGroup + t % kGroup] = room[head_dim + d];
    for (int other = t + 1; is_last && other < group_end; ++other)
      for (int d = 0; d < value_dim; ++d) value_group[d * kGroup + other % kGroup] = Element{};
  }
};

}  // namespace triptych
