// The register block that all kernels are built on: up to kTileRows rows times kTileVectors vectors of 16 columns.
//
// With AVX512 the 6 x 4 accumulators take 24 of 32 registers, four hold weights and one a broadcast activation; each
// loaded weight is used six times. Sums run over the groups of a row in order, in one chain for each output, so the
// result for a row does not depend on how many rows share the tile.
#pragma once

#include <algorithm>
#include <type_traits>

#include "formats.h"
#if defined(__aarch64__)
#include "neon_tile.h"
#endif

namespace triptych {

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kTileRows = 5, kTileVectors = 4;
#else
constexpr int kTileRows = 1, kTileVectors = 2;
#endif

// How many vectors of a tile's sums are in registers at a time. With AVX2, which has 16 registers of half a vector, it
// is one, five rows high, and what is left holds weights and an activation.
constexpr int vectors_at_a_time([[maybe_unused]] int num_rows, int num_vectors) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return std::min(num_vectors, num_rows > 2 ? 1 : 2);
#elif defined(__aarch64__)
  return std::min(num_vectors, num_rows > 2 ? 1 : num_rows > 1 ? 2 : 4);
#else
  return num_vectors;
#endif
}

// Where a tile's weights are. They come in segments of equally many steps, so that cached values from several pages can
// form one tile. A walk through a segment has the address of each vector, step by step. Vectors are either `kApart`
// groups apart, so that a single register holds their addresses,
template <int kApart = kLanes>
struct Adjacent {
  static constexpr int kMaxSegments = 4;
  const uint32_t* start[kMaxSegments];
  int segment_steps;
  size_t stride;  // from step to step

  struct Walk {
    const uint32_t* at;
    size_t stride;
    const uint32_t* vector(int v) const { return at + v * kApart; }
    void next() { at += stride; }
    void again() { at = renewed(at); }
  };
  Walk walk(int segment, int first_vector) const { return {start[segment] + first_vector * kApart, stride}; }
};
// or each in a place of its own, for all steps.
struct Separate {
  const uint32_t* start[kTileVectors];
  int segment_steps;

  struct Walk {
    const uint32_t* const* start;
    size_t at;
    const uint32_t* vector(int v) const { return start[v] + at; }
    void next() { at += kLanes; }
    void again() { at = renewed(at); }
  };
  Walk walk(int, int first_vector) const { return {start + first_vector, 0}; }
};

// Whether prefetches of a tile's own weights pay off even with few rows. On Zen 4, those into the L1 cache hold up the
// tile's own reads, so that it takes up to 1.4 times as long.
#if defined(__AVX512VP2INTERSECT__)  // Zen 5
constexpr bool kReadsAhead = true;
#else
constexpr bool kReadsAhead = false;
#endif

// What a tile prefetches at each of its steps, into the L2 cache. Either the next kLines cache lines, possibly none:
// four are the tile's own, which it reads soon and nobody reads again, so that they need not stay in any cache,
template <int kLines>
struct PrefetchLines {
  const char* next = nullptr;
  void begin_segment(int) {}
  void step() {
    constexpr int kStays = kLines == 4 && kReadsAhead ? 0 : 2;
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + 64 * line, 0, kStays);
    next += 64 * kLines;
  }
};
// or what another tile of the same shape will read at that step.
template <int kVectors, class Weights>
struct PrefetchTile {
  const Weights& tile;
  typename Weights::Walk next{};
  void begin_segment(int segment) { next = tile.walk(segment, 0); }
  void step() {
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(next.vector(v), 0, 2);
    next.next();
  }
};

// How a tile adds its products to the sums, which may be of another type: one by one,
struct Plainly {
  template <class Accumulators>
  Accumulators begin(const Accumulators& sums) const { return sums; }
  template <class Accumulators>
  Accumulators end(const Accumulators&, const Accumulators& found, int, int) const { return found; }
};
// or to zeros instead of the sums so far, which need not be initialised.
struct FromZero {
  template <class Accumulators>
  Accumulators begin(const Accumulators&) const { return Accumulators{}; }
  template <class Accumulators>
  Accumulators end(const Accumulators&, const Accumulators& found, int, int) const { return found; }
};

#if !defined(__aarch64__)  // see neon_tile.h
// sums[row][v] += sum over k of rows[row][k] * weights(v, k), for `steps` groups and kVectors vectors from `first` on;
// a row of sums has `width` vectors.
template <class Format, int kRows, int kVectors, class Sum, class Weights, class Asking, class Adding>
__attribute__((noinline)) void add_tile(Sum* sums, int width, const uint32_t* const* rows, const Weights& weights,
                                        int first, int steps, Asking asking, Adding adding) {
  typename Format::Accumulators registers[kRows][kVectors];
  const uint32_t* a[kRows];
  unrolled<kRows>([&](auto r) {
    a[r] = rows[r];
    unrolled<kVectors>([&](auto v) { registers[r][v] = adding.begin(sums[r * width + first + v]); });
  });
  for (int segment = 0, k = 0; k < steps; ++segment) {
    auto walk = weights.walk(segment, first);
    asking.begin_segment(segment);
    const int end = std::min(steps, k + weights.segment_steps);
    for (; k < end; ++k) {
      asking.step();
      unrolled<Format::kPasses>([&](auto pass) __attribute__((always_inline)) {
        const auto read = [&](auto v) { return Format::template columns<pass>(held(load<Ints>(walk.vector(v)))); };
        typename Format::Columns columns[kVectors];
        unrolled<kVectors>([&](auto v) { if (kRows > 1) columns[v] = read(v); });
        unrolled<kRows>([&](auto r) {
          const auto activation = Format::template activation<pass>(a[r][k]);
          unrolled<kVectors>([&](auto v) {
            registers[r][v] = Format::dot(registers[r][v], activation, kRows > 1 ? columns[v] : read(v));
          });
        });
        if (pass + 1 < Format::kPasses) {
          walk.again();
          unrolled<kRows>([&](auto r) { a[r] = renewed(a[r]); });
        }
      });
      walk.next();
    }
  }
  unrolled<kRows>([&](auto r) {
    unrolled<kVectors>([&](auto v) {
      auto& sum = sums[r * width + first + v];
      sum = adding.end(sum, registers[r][v], r, first + v);
    });
  });
}
#endif

// Calls function(std::integral_constant) for a number of rows known only at run time, 1..kTileRows.
template <class Function>
inline void with_rows(int num_rows, const Function& function) {
  switch (num_rows) {
    case 1: return function(std::integral_constant<int, 1>{});
#if defined(__AVX2__) || defined(__aarch64__)
    case 2: return function(std::integral_constant<int, 2>{});
    case 3: return function(std::integral_constant<int, 3>{});
    case 4: return function(std::integral_constant<int, 4>{});
    case 5: return function(std::integral_constant<int, 5>{});
#endif
#if defined(__AVX512F__)
    case 6: return function(std::integral_constant<int, 6>{});
#endif
  }
}

template <class Format, int kRows, int kVectors, class Sum, class Weights, class Asking, class Adding>
inline void add_known_rows(Sum* sums, int width, const uint32_t* const* rows, const Weights& weights, int steps,
                           const Asking& asking, const Adding& adding) {
  constexpr int kAtATime = vectors_at_a_time(kRows, kVectors);
  add_tile<Format, kRows, kAtATime>(sums, width, rows, weights, 0, steps, asking, adding);
  if constexpr (kAtATime < kVectors)  // what was to be prefetched has been
    for (int first = kAtATime; first < kVectors; first += kAtATime)
      add_tile<Format, kRows, kAtATime>(sums, width, rows, weights, first, steps, PrefetchLines<0>{}, adding);
}

template <class Format, int kVectors, class Sum, class Weights, class Asking, class Adding = Plainly>
inline void add_rows(int num_rows, Sum* sums, int width, const uint32_t* const* rows, const Weights& weights, int steps,
                     const Asking& asking, const Adding& adding = {}) {
  with_rows(num_rows, [&](auto count) {
    add_known_rows<Format, decltype(count)::value, kVectors>(sums, width, rows, weights, steps, asking, adding);
  });
}

}  // namespace triptych
