// The three number formats of weights, built on one idea: a 32-bit group is one float, two bfloat16 or four int8.
//
// A row of activations is a row of groups, and a vector of weights is the same group of 16 columns. The dot product of
// a broadcast activation group and such a vector updates 16 accumulators with one instruction: an fma, vdpbf16ps or
// vpdpbusd.
#pragma once

#include "simd.h"

namespace triptych {

struct Float32 {
  using Element = float;  // of activations and of cached keys and values
  using Accumulators = Floats;
  using Cache = Float32;  // the format of keys and values
  static constexpr int kGroup = 1;

  struct Activation {
    Floats value;
  };
  INLINED static Activation activation(uint32_t group) {
    float value;
    std::memcpy(&value, &group, sizeof value);
    return {broadcast(value)};
  }
  INLINED static Floats dot(Floats sums, Activation a, Ints weights) {
    return fma(a.value, each<Floats>([&](int i) { return (NativeFloats)weights.part[i]; }), sums);
  }
};

struct BFloat16 {
  using Element = uint16_t;
  using Accumulators = Floats;
  using Cache = BFloat16;
  static constexpr int kGroup = 2;

#if defined(__AVX512BF16__)
  using Activation = Ints;
  INLINED static Activation activation(uint32_t group) { return broadcast(int32_t(group)); }
  INLINED static Floats dot(Floats sums, Activation a, Ints weights) {
    return {{(NativeFloats)_mm512_dpbf16_ps((__m512)sums.part[0], (__m512bh)a.part[0], (__m512bh)weights.part[0])}};
  }
#else
  // A bfloat16 is the upper half of a float: a shift widens one of a group, and a mask the other.
  struct Activation {
    Floats even, odd;
  };
  INLINED static Activation activation(uint32_t group) {
    return {broadcast(from_bf16(uint16_t(group))), broadcast(from_bf16(uint16_t(group >> 16)))};
  }
  INLINED static Floats dot(Floats sums, Activation a, Ints weights) {
    const Floats even = each<Floats>([&](int i) { return (NativeFloats)(weights.part[i] << 16); });
    const Floats odd = each<Floats>([&](int i) { return (NativeFloats)(weights.part[i] & int32_t(0xffff0000)); });
    return fma(a.odd, odd, fma(a.even, even, sums));
  }
#endif
};

// Activations are unsigned, 128 more than the value they represent; Matrix.offsets corrects for that.
struct Int8 {
  using Element = uint8_t;
  using Accumulators = Ints;
  using Cache = BFloat16;
  static constexpr int kGroup = 4;

#if defined(__AVX512VNNI__)
  using Activation = Ints;
  INLINED static Activation activation(uint32_t group) { return broadcast(int32_t(group)); }
  INLINED static Ints dot(Ints sums, Activation a, Ints weights) {
    return {{(NativeInts)_mm512_dpbusd_epi32((__m512i)sums.part[0], (__m512i)a.part[0], (__m512i)weights.part[0])}};
  }
#elif defined(__AVXVNNI__)
  using Activation = __m256i;
  INLINED static Activation activation(uint32_t group) { return _mm256_set1_epi32(int32_t(group)); }
  INLINED static Ints dot(Ints sums, Activation a, Ints weights) {
    return each<Ints>([&](int i) {
      return (NativeInts)_mm256_dpbusd_avx_epi32((__m256i)sums.part[i], a, (__m256i)weights.part[i]);
    });
  }
#elif defined(__AVX2__)
  // Even and odd bytes are widened to 16 bits, so that a sum of two products cannot saturate.
  struct Activation {
    __m256i even, odd;
  };
  INLINED static Activation activation(uint32_t group) {
    return {_mm256_set1_epi32(int32_t(group & 0x00ff00ff)), _mm256_set1_epi32(int32_t(group >> 8 & 0x00ff00ff))};
  }
  INLINED static Ints dot(Ints sums, Activation a, Ints weights) {
    return each<Ints>([&](int i) {
      const __m256i w = (__m256i)weights.part[i];
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
      const __m256i odd = _mm256_srai_epi16(w, 8);
      const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(a.even, even), _mm256_madd_epi16(a.odd, odd));
      return sums.part[i] + (NativeInts)products;
    });
  }
#else
  struct Activation {
    uint32_t group;
  };
  INLINED static Activation activation(uint32_t group) { return {group}; }
  INLINED static Ints dot(Ints sums, Activation a, Ints weights) {
    for (int byte = 0; byte < 4; ++byte) {
      const int32_t value = a.group >> 8 * byte & 0xff;
      const Ints column = each<Ints>([&](int i) { return weights.part[i] << (24 - 8 * byte) >> 24; });
      sums = sums + column * broadcast(value);
    }
    return sums;
  }
#endif
};

}  // namespace triptych
