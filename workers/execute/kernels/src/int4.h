// Four-bit weights, in groups of 64 inputs of a column.
//
// The weights of a group are scale * q + least, with q in 0..15 and both parameters in bfloat16. A group takes nine
// steps of a block. Each of the first eight holds eight weights: the low nibbles of its four bytes go with one group of
// activations, the high nibbles with the next. The ninth holds the scale (low half of the 32 bits) and the least value.
// A block thus remains one contiguous run of memory, of 4.5 bits per weight. The dot product of a group is exact in
// integers; groups are added in float:
//   sum of (x + 128) (scale q + least) = scale * sum of (x + 128) q + least * sum of (x + 128).
#pragma once

#include "tile.h"

namespace triptych {

// For weights only: activations are those of Int8.
struct Int4 {
  static constexpr int kGroup = 8;
  static constexpr int kPieces = 1;  // of a group, each with a scale of its own
  using Accumulators = Floats;

  static Ints low(Ints weights) {
    return each<Ints>([&](int i) { return weights.part[i] & 0x0f0f0f0f; });
  }
  static Ints high(Ints weights) {
    return each<Ints>([&](int i) { return weights.part[i] >> 4 & 0x0f0f0f0f; });
  }

  // The parameters of a group, or of a piece of it, for 16 columns.
  struct Worth {
    Floats scale, least;
    Worth(Ints stored, int) : scale(lower_half(stored)), least(upper_half(stored)) {}
    // sum + the dequantised products; `total` is the sum of the group's activations.
    Floats add(Floats sum, Ints products, const float* total) const {
      return fma(to_floats(products), scale, fma(broadcast(*total), least, sum));
    }
  };
  static Floats lower_half(Ints pairs) {
    return each<Floats>([&](int i) { return (NativeFloats)(pairs.part[i] << 16); });
  }
  static Floats upper_half(Ints pairs) {
    return each<Floats>([&](int i) { return (NativeFloats)(pairs.part[i] & int32_t(0xffff0000)); });
  }

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  using Activation = __m256i;
  static Activation activation(uint32_t group) { return _mm256_set1_epi32(int32_t(group)); }
  static Ints dot(Ints sums, Activation a, Ints weights) {
    return each<Ints>([&](int i) {
      const __m256i pairs = _mm256_maddubs_epi16(a, (__m256i)weights.part[i]);  // at most 2 * 255 * 15
      return sums.part[i] + (NativeInts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    });
  }
#else
  using Activation = Int8::Activation;
  static Activation activation(uint32_t group) { return Int8::activation(group); }
  static Ints dot(Ints sums, Activation a, Ints weights) { return Int8::dot(sums, a, weights); }
#endif
};

constexpr int kGroupInputs = 64;
constexpr int kWeightSteps = kGroupInputs / Int4::kGroup, kGroupSteps = kWeightSteps + 1;

inline int num_groups_of(int num_inputs) { return (num_inputs + kGroupInputs - 1) / kGroupInputs; }

// sums[r * kVectors + v] += rows times weights. `totals` are the sums of each 64 activations of a row.
template <class Format, int kRows, int kVectors, class Asking>
__attribute__((noinline)) void add_groups(Floats* sums, const uint32_t* const* rows, const float* const* totals,
                                          const Weights& weights, int num_groups, Asking asking) {
  constexpr int kSteps = kWeightSteps / Format::kPieces;
  const uint32_t *a[kRows], *w[kVectors];
  for (int r = 0; r < kRows; ++r) a[r] = rows[r];
  for (int v = 0; v < kVectors; ++v) w[v] = weights.start[0][v];
  const size_t stride = weights.stride;
  for (int group = 0; group < num_groups; ++group) {
    for (int piece = 0; piece < Format::kPieces; ++piece) {
      Ints products[kRows][kVectors] = {};
      const auto add = [&](const Ints* columns, int at) {
        for (int r = 0; r < kRows; ++r) {
          const auto activation = Format::activation(a[r][at]);
          for (int v = 0; v < kVectors; ++v) products[r][v] = Format::dot(products[r][v], activation, columns[v]);
        }
      };
      for (int step = 0; step < kSteps; ++step) {
        Ints columns[kVectors];
        asking.step();
        for (int v = 0; v < kVectors; ++v) columns[v] = Format::low(load<Ints>(w[v]));
        add(columns, 2 * step);
        for (int v = 0; v < kVectors; ++v) {
          columns[v] = Format::high(load<Ints>(w[v]));
          w[v] += stride;
        }
        add(columns, 2 * step + 1);
      }
      for (int v = 0; v < kVectors; ++v) {
        const size_t rest = kWeightSteps - (piece + 1) * kSteps;
        const typename Format::Worth worth(load<Ints>(w[v] + rest * stride), piece);
        for (int r = 0; r < kRows; ++r) {
          Floats& sum = sums[r * kVectors + v];
          sum = worth.add(sum, products[r][v], totals[r] + group);
        }
      }
      for (int r = 0; r < kRows; ++r) a[r] += 2 * kSteps;
    }
    asking.step();
    for (int v = 0; v < kVectors; ++v) w[v] += stride;
  }
}

}  // namespace triptych
