// One number for each of a few rows, in the first lanes.
#pragma once

#include "simd.h"

namespace triptych {

template <int kRows>
INLINED Floats load_first(const float* from) {
#if defined(__AVX512F__)
  return {{(NativeFloats)_mm512_maskz_loadu_ps((1 << kRows) - 1, from)}};
#else
  float lanes[kLanes] = {};
  std::memcpy(lanes, from, kRows * sizeof(float));
  return load<Floats>(lanes);
#endif
}
template <int kRows>
INLINED void store_first(float* to, Floats values) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (1 << kRows) - 1, (__m512)values.part[0]);
#else
  float lanes[kLanes];
  store(lanes, values);
  std::memcpy(to, lanes, kRows * sizeof(float));
#endif
}

// The greatest of each row; what later lanes have means nothing.
template <int kRows>
INLINED Floats greatest_of_each(const Floats (&rows)[kRows]) {
#if defined(__AVX512F__)
  // Pairs of rows fold their halves, then their quarters, until a vector has two lanes of each of eight rows.
  static_assert(kRows <= 8, "");
  const auto row = [&](int r) { return (__m512)rows[r < kRows ? r : 0].part[0]; };
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const auto quarters = [](__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  const __m512 low = quarters(halves(row(0), row(1)), halves(row(2), row(3)));
  const __m512 high = kRows > 4 ? quarters(halves(row(4), row(5)), halves(row(6), row(7))) : low;
  const __m512 pairs = _mm512_max_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  const __m512 all = _mm512_max_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
  return {{(NativeFloats)_mm512_permutexvar_ps(places, all)}};
#else
  float lanes[kLanes] = {};
  for (int r = 0; r < kRows; ++r) lanes[r] = greatest(rows[r]);
  return load<Floats>(lanes);
#endif
}

}  // namespace triptych
