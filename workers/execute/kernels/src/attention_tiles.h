// The tiles of attention: queries times keys, and weights times values. Decoders with weights in different formats
// share those of a format of keys and values, which are compiled once.
#pragma once

#include "tile.h"

namespace triptych {

constexpr int kKeyBlock = 64;  // keys in a block
constexpr int kKeyTiles = kKeyBlock / kLanes;
constexpr int32_t kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Addresses of the tiles of a block of keys and of its values.
struct KeyTiles {
  const uint32_t* keys[kKeyTiles];
  const uint32_t* values[kKeyTiles];
};

// The next block's eight-bit tiles, prefetched line by line while the current block is computed: prefetching all of
// it at once would delay the reads under way and leave memory idle afterwards.
struct Ahead {
  static constexpr int kAll = 2 * kKeyTiles;
  const KeyTiles* tiles;
  size_t bytes[2];  // of a tile of keys, and of a tile of values
  int tile;         // index of the next tile to prefetch: those of the keys, then those of the values
  size_t at = 0;

  bool is_over() const { return tile == kAll; }
  // Some lines beyond the end of a tile may be prefetched too: those of the next head.
  template <int kLines>
  void ask() {
    if (is_over()) return;
    const bool is_key = tile < kKeyTiles;
    const uint32_t* start = is_key ? tiles->keys[tile] : tiles->values[tile - kKeyTiles];
    const char* const next = reinterpret_cast<const char*>(start) + at;
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + 64 * line, 0, 2);
    at += 64 * kLines;
    if (at >= bytes[!is_key]) at = 0, ++tile;
  }
};
// A step computes four of the lines that a block of keys and its values have.
struct AskAhead {
  Ahead& ahead;
  void begin_segment(int) {}
  void step() { ahead.ask<5>(); }
};

// Of up to kTileRows rows. With few rows a block is computed as fast as memory delivers it, and pages are scattered in
// memory, so the next block, `next` if it is not null, is prefetched at the same pace.
template <class Cache>
struct AttentionTiles {
  using Rows = const uint32_t* const*;
  // scores [rows][kKeyTiles] = rows * keys, of kTileVectors tiles.
  static void score(int count, Floats* scores, Rows rows, int steps, const Separate& keys, const Separate* next);
  // outputs [rows][width] += rows * values, of kTileVectors vectors or of one.
  static void add_values(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                         const Adjacent<>* next);
  static void add_vector(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                         const Adjacent<>* next);

 private:
  template <int kVectors>
  static void add(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                  const Adjacent<>* next) {
    if (next)
      add_rows<Cache, kVectors>(count, outputs, width, rows, values, steps, PrefetchTile<kVectors, Adjacent<>>{*next});
    else
      add_rows<Cache, kVectors>(count, outputs, width, rows, values, steps, PrefetchLines<0>{});
  }
};

template <class Cache>
void AttentionTiles<Cache>::score(int count, Floats* scores, Rows rows, int steps, const Separate& keys,
                                  const Separate* next) {
  using Next = PrefetchTile<kTileVectors, Separate>;
  if (next)
    add_rows<Cache, kTileVectors>(count, scores, kKeyTiles, rows, keys, steps, Next{*next}, FromZero{});
  else
    add_rows<Cache, kTileVectors>(count, scores, kKeyTiles, rows, keys, steps, PrefetchLines<0>{}, FromZero{});
}

template <class Cache>
void AttentionTiles<Cache>::add_values(int count, Floats* outputs, int width, Rows rows, int steps,
                                       const Adjacent<>& values, const Adjacent<>* next) {
  add<kTileVectors>(count, outputs, width, rows, steps, values, next);
}

template <class Cache>
void AttentionTiles<Cache>::add_vector(int count, Floats* outputs, int width, Rows rows, int steps,
                                       const Adjacent<>& values, const Adjacent<>* next) {
  add<1>(count, outputs, width, rows, steps, values, next);
}

}  // namespace triptych
