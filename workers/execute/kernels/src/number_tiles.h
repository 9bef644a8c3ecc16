// The tiles of tile.h for eight-bit numbers, converted to elements in registers: with few rows that is less work than
// writing elements to memory and reading them back. The products and the order of the sums are the same.
#pragma once

#include "eight_bits.h"
#include "tile.h"

namespace triptych {

template <class Cache>
struct NumberTiles {
  static constexpr bool kAreThere = false;
};

#if defined(__AVX512VBMI__)
template <>
struct NumberTiles<BFloat16> {
  static constexpr bool kAreThere = true;
  static constexpr int kVectors = EightBits<BFloat16>::kChannels / kLanes;  // in a group of channels

  // sums[row][v] += rows * keys[v] * scales[v], where keys[v] are 16 keys from some channel on, for `steps` pairs of
  // channels. `steps` is even.
  template <int kRows, int kTiles, class Asking>
  __attribute__((noinline)) static void add_keys(Floats* sums, int width, const uint32_t* const* rows,
                                                 const uint8_t* const* keys, int steps, Asking asking,
                                                 TimesScales adding) {
    const Numbers<uint16_t>::Tables tables;
    Floats registers[kRows][kTiles];
    unrolled<kRows>([&](auto r) {
      unrolled<kTiles>([&](auto v) { registers[r][v] = adding.begin(sums[r * width + v]); });
    });
    for (int k = 0; k < steps; k += 2) {
      Ints pairs[2][kTiles];
      unrolled<kTiles>([&](auto v) {
        tables.read(keys[v] + size_t(k) * 2 * kLanes, [&](int half, Ints columns) { pairs[half][v] = columns; });
      });
      asking.step();
      asking.step();
      unrolled<2>([&](auto half) {
        unrolled<kRows>([&](auto r) {
          const uint32_t group = rows[r][k + half];
          unrolled<kTiles>([&](auto v) { registers[r][v] = with_group<BFloat16>(registers[r][v], group, pairs[half][v]); });
        });
      });
    }
    unrolled<kRows>([&](auto r) {
      unrolled<kTiles>([&](auto v) { sums[r * width + v] = adding.end(sums[r * width + v], registers[r][v], v); });
    });
  }

  // sums[row][v] += rows * the values, for one channel group and `steps` pairs of tokens, in tiles of 16 tokens.
  template <int kRows, class Asking>
  __attribute__((noinline)) static void add_values(Floats* sums, int width, const uint32_t* const* rows,
                                                   const uint8_t* const* values, int head_dim, int steps, Asking asking) {
    const Numbers<uint16_t>::Tables tables;
    Floats registers[kRows][kVectors];
    unrolled<kRows>([&](auto r) {
      unrolled<kVectors>([&](auto v) { registers[r][v] = sums[r * width + v]; });
    });
    for (int k = 0, tile = 0; k < steps; ++tile) {
      const uint8_t* from = values[tile];
      for (const int end = std::min(steps, k + kLanes / 2); k < end; ++k, from += 2 * head_dim) {
        Ints channels[kVectors];
        tables.read(from, [&](int half, Ints columns) { channels[half] = columns; });
        asking.step();
        unrolled<kRows>([&](auto r) {
          const uint32_t group = rows[r][k];
          unrolled<kVectors>([&](auto v) { registers[r][v] = with_group<BFloat16>(registers[r][v], group, channels[v]); });
        });
      }
    }
    unrolled<kRows>([&](auto r) {
      unrolled<kVectors>([&](auto v) { sums[r * width + v] = registers[r][v]; });
    });
  }
};
#endif

}  // namespace triptych
