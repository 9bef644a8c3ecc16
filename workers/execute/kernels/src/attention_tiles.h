// The tiles of attention: queries times keys, and weights times values. Decoders with weights in different formats
// share those of a format of keys and values, which are compiled once.
#pragma once

#include "number_tiles.h"
#include "tile.h"

namespace triptych {

constexpr int kKeyBlock = 64;  // keys in a block
constexpr int kKeyTiles = kKeyBlock / kLanes;

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
  void ask() {
    if (is_over()) return;
    const bool is_key = tile < kKeyTiles;
    const uint32_t* start = is_key ? tiles->keys[tile] : tiles->values[tile - kKeyTiles];
    __builtin_prefetch(reinterpret_cast<const char*>(start) + at, 0, 2);
    at += 64;
    if (at >= bytes[!is_key]) at = 0, ++tile;
  }
};
struct AskAhead {
  Ahead& ahead;
  void begin_segment(int) {}
  void step() { ahead.ask(), ahead.ask(); }
};

// Of up to kTileRows rows. With few rows a block is computed as fast as memory delivers it, and pages are scattered in
// memory, so the next block is prefetched at the same pace: `next` if it is not null, or what is ahead in eight bits.
template <class Cache>
struct AttentionTiles {
  using Rows = const uint32_t* const*;
  // scores [rows][kKeyTiles] = rows * keys, of kTileVectors tiles.
  static void score(int count, Floats* scores, Rows rows, int steps, const Separate& keys, const Separate* next);
  // scores += (rows * keys) * scales.
  static void add_scores(int count, Floats* scores, Rows rows, int steps, const Separate& keys, Ahead& ahead,
                         const TimesScales& scales);
  // outputs [rows][width] += rows * values, of kTileVectors vectors or of one.
  static void add_values(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                         const Adjacent<>* next, Ahead& ahead);
  static void add_vector(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                         const Adjacent<>* next, Ahead& ahead);

  // The same for numbers in eight bits that are converted in registers, half a block of keys or a group of channels.
  using Numbers = NumberTiles<Cache>;
  static constexpr int kHalf = kKeyTiles / 2;
  static void add_number_scores(int count, Floats* scores, Rows rows, int steps, const uint8_t* const* keys,
                                Ahead& ahead, const TimesScales& scales);
  static void add_number_values(int count, Floats* outputs, int width, Rows rows, int steps,
                                const uint8_t* const* values, int value_dim, Ahead& ahead);

 private:
  template <int kVectors>
  static void add(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                  const Adjacent<>* next, Ahead& ahead) {
    if (next)
      add_rows<Cache, kVectors>(count, outputs, width, rows, values, steps, PrefetchTile<kVectors, Adjacent<>>{*next});
    else if (ahead.is_over())
      add_rows<Cache, kVectors>(count, outputs, width, rows, values, steps, PrefetchLines<0>{});
    else
      add_rows<Cache, kVectors>(count, outputs, width, rows, values, steps, AskAhead{ahead});
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
void AttentionTiles<Cache>::add_scores(int count, Floats* scores, Rows rows, int steps, const Separate& keys,
                                       Ahead& ahead, const TimesScales& scales) {
  if (ahead.is_over())
    add_rows<Cache, kTileVectors>(count, scores, kKeyTiles, rows, keys, steps, PrefetchLines<0>{}, scales);
  else
    add_rows<Cache, kTileVectors>(count, scores, kKeyTiles, rows, keys, steps, AskAhead{ahead}, scales);
}

template <class Cache>
void AttentionTiles<Cache>::add_values(int count, Floats* outputs, int width, Rows rows, int steps,
                                       const Adjacent<>& values, const Adjacent<>* next, Ahead& ahead) {
  add<kTileVectors>(count, outputs, width, rows, steps, values, next, ahead);
}

template <class Cache>
void AttentionTiles<Cache>::add_vector(int count, Floats* outputs, int width, Rows rows, int steps,
                                       const Adjacent<>& values, const Adjacent<>* next, Ahead& ahead) {
  add<1>(count, outputs, width, rows, steps, values, next, ahead);
}

template <class Cache>
void AttentionTiles<Cache>::add_number_scores(int count, Floats* scores, Rows rows, int steps,
                                              const uint8_t* const* keys, Ahead& ahead, const TimesScales& scales) {
  if constexpr (Numbers::kAreThere)
    with_rows(count, [&](auto known) {
      Numbers::template add_keys<decltype(known)::value, kHalf>(scores, kKeyTiles, rows, keys, steps, AskAhead{ahead},
                                                                scales);
    });
}

template <class Cache>
void AttentionTiles<Cache>::add_number_values(int count, Floats* outputs, int width, Rows rows, int steps,
                                              const uint8_t* const* values, int value_dim, Ahead& ahead) {
  if constexpr (Numbers::kAreThere)
    with_rows(count, [&](auto known) {
      Numbers::template add_values<decltype(known)::value>(outputs, width, rows, values, value_dim, steps,
                                                           AskAhead{ahead});
    });
}

}  // namespace triptych
