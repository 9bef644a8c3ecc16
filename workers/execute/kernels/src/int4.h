// Four-bit weights, in groups of 64 inputs of a column.
//
// The weights of a group are scale * q + least, with q in 0..15 and both parameters in bfloat16. A group takes nine
// steps of a block. Each of the first eight holds eight weights: the low nibbles of its four bytes go with one group of
// activations, the high nibbles with the next. The ninth holds the scale (low half of the 32 bits) and the least value.
// A block thus remains one contiguous run of memory, of 4.5 bits per weight.
//
// Activations x have eight bits, with a sign, and a unit for each group too. The dot product of a group is exact in
// integers; groups are added in float:
//   sum of unit x (scale q + least) = unit scale * sum of x q + least * unit * sum of x.
#pragma once

#include "abi.h"
#include "tile.h"

namespace triptych {

// Of weights in four bits, unpacked to bytes without a sign, and activations with one.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
struct Int4Groups : WholeGroups {
  static constexpr int kMostRows = kTileRows;  // of a tile
  INLINED static Ints dot(Ints sums, NativeInts a, Columns columns) {
    return each<Ints>([&](int i) { return products_added(sums.part[i], columns.part[i], a); });
  }
};
#elif defined(__AVX2__)
struct Int4Groups : WholeGroups {
  static constexpr int kMostRows = 3;  // with more, compilers spill the sums of pairs
  INLINED static Ints dot(Ints sums, NativeInts a, Columns columns) {
    return each<Ints>([&](int i) {
      const __m256i pairs = _mm256_maddubs_epi16((__m256i)columns.part[i], (__m256i)a);  // at most 2 * 24 * 127
      return sums.part[i] + (NativeInts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    });
  }
};
#elif defined(__aarch64__)
struct Int4Groups : Bytes<false> {
  static constexpr int kMostRows = 4;  // with five, and masks or a table, sums are spilled
};
#else
struct Int4Groups : Bytes<false> {
  static constexpr int kMostRows = kTileRows;
  template <int kPass>
  INLINED static NativeInts activation(uint32_t group) {
    return broadcast_part(uint32_t(int32_t(group << (24 - 8 * kPass)) >> 24));
  }
};
#endif

// For weights only: activations are bytes with a GroupWorth for each group.
struct Int4 : Int4Groups {
  static constexpr int kGroup = 8;
  static constexpr int kWeightSteps = 8;  // of a group
  static constexpr int kWorthSteps = 1;   // behind them
  static constexpr int kPieces = 1;       // of a group, each with a scale of its own
  using Accumulators = Floats;

  INLINED static Ints low(Ints weights) {
    return each<Ints>([&](int i) { return weights.part[i] & 0x0f0f0f0f; });
  }
  INLINED static Ints high(Ints weights) {
#if defined(__aarch64__)
    return each<Ints>([&](int i) { return (NativeInts)vshrq_n_u8((uint8x16_t)weights.part[i], 4); });
#else
    return each<Ints>([&](int i) { return weights.part[i] >> 4 & 0x0f0f0f0f; });
#endif
  }

  // The parameters of a group, or of a piece of it, for 16 columns.
  struct Worth {
    Floats scale, least;
    Worth(Ints stored, int) : scale(widened<0>(stored)), least(widened<1>(stored)) {}
    // sum + the dequantised products
    Floats add(Floats sum, Ints products, const GroupWorth& row, int) const {
      return fma(to_floats(products), scale * broadcast(row.unit), fma(broadcast(row.total), least, sum));
    }
  };
};

// Groups of 32: the same for each half of 64 inputs, whose parameters take a step each. 5 bits per weight.
struct FineInt4 : Int4 {
  static constexpr int kWorthSteps = 2;
  static constexpr int kPieces = 2;

  struct Worth : Int4::Worth {
    using Int4::Worth::Worth;
    Floats add(Floats sum, Ints products, const GroupWorth& row, int piece) const {
      const Floats total = broadcast(row.unit * row.byte_sums[piece]);
      return fma(to_floats(products), scale * broadcast(row.unit), fma(total, least, sum));
    }
  };
};

constexpr int kGroupInputs = 64;
constexpr int kWeightSteps = Int4::kWeightSteps;
template <class Format>
constexpr int kGroupSteps = kWeightSteps + Format::kWorthSteps;
inline int group_steps_of(int32_t format) { return format == kFineInt4 ? kGroupSteps<FineInt4> : kGroupSteps<Int4>; }

inline int num_groups_of(int num_inputs) { return (num_inputs + kGroupInputs - 1) / kGroupInputs; }

#if !defined(__aarch64__)  // see neon_tile.h
// sums[row][v] += rows times weights, for kVectors vectors from `first` on; a row of sums has `width` vectors.
template <class Format, int kRows, int kVectors, class Weights, class Asking>
__attribute__((noinline)) void add_groups(Floats* sums, int width, const uint32_t* const* rows,
                                          const GroupWorth* const* worths, const Weights& weights, int first,
                                          int num_groups, Asking asking) {
  constexpr int kSteps = kWeightSteps / Format::kPieces;
  const uint32_t* a[kRows];
  unrolled<kRows>([&](auto r) { a[r] = rows[r]; });
  auto walk = weights.walk(0, first);
  for (int group = 0; group < num_groups; ++group) {
    for (int piece = 0; piece < Format::kPieces; ++piece) {
      Ints products[kRows][kVectors] = {};
      const auto add = [&](const Ints* columns, int at) __attribute__((always_inline)) {
        unrolled<Format::kPasses>([&](auto pass) __attribute__((always_inline)) {
          unrolled<kRows>([&](auto r) {
            const auto activation = Format::template activation<pass>(a[r][at]);
            unrolled<kVectors>([&](auto v) {
              products[r][v] = Format::dot(products[r][v], activation, Format::template columns<pass>(columns[v]));
            });
          });
        });
      };
      for (int step = 0; step < kSteps; ++step) {
        Ints low[kVectors], high[kVectors];
        asking.step();
        unrolled<kVectors>([&](auto v) { low[v] = held(Format::low(load<Ints>(walk.vector(v)))); });
        add(low, 2 * step);
        unrolled<kVectors>([&](auto v) { high[v] = held(Format::high(load<Ints>(walk.vector(v)))); });
        walk.next();
        add(high, 2 * step + 1);
      }
      unrolled<kVectors>([&](auto v) {
        const size_t rest = kWeightSteps - (piece + 1) * kSteps + piece % Format::kWorthSteps;
        const typename Format::Worth worth(load<Ints>(walk.vector(v) + rest * weights.stride), piece);
        unrolled<kRows>([&](auto r) {
          Floats& sum = sums[r * width + first + v];
          sum = worth.add(sum, products[r][v], worths[r][group], piece);
        });
      });
      unrolled<kRows>([&](auto r) { a[r] += 2 * kSteps; });
    }
    for (int step = 0; step < Format::kWorthSteps; ++step) {
      asking.step();
      walk.next();
    }
  }
}
#endif

}  // namespace triptych
