// Sixteen 32-bit lanes on any machine: one register of 512 bits, two of 256 or four of 128.
//
// Products are accumulated with an explicit fma (the library is built with -ffp-contract=off), so that the same source
// gives the same bits in every instantiation of a template.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace triptych {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kParts = 1;
#elif defined(__AVX2__)
constexpr int kParts = 2;
#else
constexpr int kParts = 4;
#endif

typedef float NativeFloats __attribute__((vector_size(64 / kParts)));
typedef int32_t NativeInts __attribute__((vector_size(64 / kParts)));
typedef uint32_t NativeBits __attribute__((vector_size(64 / kParts)));

// 1.5 * 2^23: added to a float of less than 2^22, it rounds to an integer, held in the lowest bits; ties go to even.
constexpr float kRounder = 12582912.0f;

struct Floats {
  NativeFloats part[kParts];
};
struct Ints {
  NativeInts part[kParts];
};

// What a tile computes has to become part of it, however large it grows: a call would move all sums through memory.
#define INLINED inline __attribute__((always_inline))

// Calls visit(0), ... visit(kCount - 1) with constants. Unlike those of a loop, which compilers unroll late, the
// elements of an array that are indexed with them stay in registers from one loop around it to the next.
template <class Visit, int... kIndices>
INLINED void unrolled(const Visit& visit, std::integer_sequence<int, kIndices...>) {
  (visit(std::integral_constant<int, kIndices>{}), ...);
}
template <int kCount, class Visit>
INLINED void unrolled(const Visit& visit) {
  unrolled(visit, std::make_integer_sequence<int, kCount>{});
}

// Lanes whose part i is function(i).
template <class Lanes, class Function>
INLINED Lanes each(const Function& function) {
  Lanes lanes;
  unrolled<kParts>([&](auto i) { lanes.part[i] = function(i); });
  return lanes;
}

// Keeps lanes that were loaded once from being loaded again for each use, or computed elsewhere than in a register.
INLINED NativeInts held(NativeInts part) {
#if defined(__x86_64__)
  asm("" : "+v"(part));
#elif defined(__aarch64__)
  asm("" : "+w"(part));
#endif
  return part;
}
INLINED Ints held(Ints lanes) {
  return each<Ints>([&](int i) { return held(lanes.part[i]); });
}
// Hides that an address has not changed, so that what was loaded from it is loaded again rather than kept.
template <class Address>
INLINED Address renewed(Address address) {
  asm("" : "+r"(address));
  return address;
}

// Part by part: compilers copy larger structures through memory.
template <class Lanes>
INLINED Lanes load(const void* from) {
  return each<Lanes>([&](int i) {
    decltype(Lanes::part[0] + 0) part;
    std::memcpy(&part, static_cast<const char*>(from) + i * sizeof part, sizeof part);
    return part;
  });
}
template <class Lanes>
INLINED void store(void* to, Lanes lanes) {
  unrolled<kParts>([&](int i) {
    std::memcpy(static_cast<char*>(to) + i * sizeof lanes.part[i], &lanes.part[i], sizeof lanes.part[i]);
  });
}

// A non-temporal store: bypasses the caches, which then need not read what is overwritten. `to` is aligned. Other
// threads may not see it before end_streams.
INLINED void stream(float* to, Floats lanes) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)lanes.part[0]);
#elif defined(__AVX2__)
  for (int i = 0; i < kParts; ++i) _mm256_stream_ps(to + 8 * i, (__m256)lanes.part[i]);
#elif defined(__SSE2__)
  for (int i = 0; i < kParts; ++i) _mm_stream_ps(to + 4 * i, (__m128)lanes.part[i]);
#else
  store(to, lanes);
#endif
}
INLINED void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

INLINED Floats broadcast(float value) {
  return each<Floats>([=](int) { return value - NativeFloats{}; });
}
INLINED Ints broadcast(int32_t value) {
  return each<Ints>([=](int) { return value - NativeInts{}; });
}
// One part, as all are the same.
INLINED NativeInts broadcast_part(uint32_t value) { return int32_t(value) - NativeInts{}; }
INLINED Floats operator+(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.part[i] + b.part[i]; });
}
INLINED Floats operator-(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.part[i] - b.part[i]; });
}
INLINED Floats operator*(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.part[i] * b.part[i]; });
}
INLINED Floats operator/(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.part[i] / b.part[i]; });
}
INLINED Ints operator+(Ints a, Ints b) {
  return each<Ints>([&](int i) { return a.part[i] + b.part[i]; });
}
INLINED Ints operator-(Ints a, Ints b) {
  return each<Ints>([&](int i) { return a.part[i] - b.part[i]; });
}
INLINED Floats as_floats(Ints a) {
  return each<Floats>([&](int i) { return (NativeFloats)a.part[i]; });
}
INLINED Ints as_ints(Floats a) {
  return each<Ints>([&](int i) { return (NativeInts)a.part[i]; });
}
INLINED Floats to_floats(Ints a) {
  return each<Floats>([&](int i) { return __builtin_convertvector(a.part[i], NativeFloats); });
}
// If a lane of either is NaN, or both are zeros, it is that of b. Compilers find the instruction with 256 bits, but not
// with 512, where a comparison, a mask and a blend in a row take four times as long.
INLINED Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return {{(NativeFloats)_mm512_max_ps((__m512)a.part[0], (__m512)b.part[0])}};
#else
  return each<Floats>([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
#endif
}
INLINED Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return {{(NativeFloats)_mm512_min_ps((__m512)a.part[0], (__m512)b.part[0])}};
#else
  return each<Floats>([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
#endif
}
INLINED Ints max(Ints a, Ints b) {
#if defined(__AVX512F__)
  return {{(NativeInts)_mm512_max_epi32((__m512i)a.part[0], (__m512i)b.part[0])}};
#else
  return each<Ints>([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
#endif
}
INLINED Floats abs(Floats a) {
  return each<Floats>([&](int i) { return (NativeFloats)((NativeInts)a.part[i] & 0x7fffffff); });
}
// Lanes of a where low <= position <= high, otherwise of b.
INLINED Floats where_between(Ints position, int32_t low, int32_t high, Floats a, Floats b) {
  return each<Floats>([&](int i) {
    return ((position.part[i] >= low) & (position.part[i] <= high)) ? a.part[i] : b.part[i];
  });
}

INLINED NativeFloats fma(NativeFloats a, NativeFloats b, NativeFloats c) {
#if defined(__AVX512F__)
  return (NativeFloats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (NativeFloats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (NativeFloats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
INLINED Floats fma(Floats a, Floats b, Floats c) {
  return each<Floats>([&](int i) { return fma(a.part[i], b.part[i], c.part[i]); });
}
INLINED Floats fma(NativeFloats a, Floats b, Floats c) {  // a is the same for all parts
  return each<Floats>([&](int i) { return fma(a, b.part[i], c.part[i]); });
}

// All reduce by folding the upper half onto the lower one, four times.
INLINED float sum(Floats a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)a.part[0]);
#elif defined(__aarch64__)
  const float32x4_t part = (float32x4_t)((a.part[0] + a.part[2]) + (a.part[1] + a.part[3]));
  const float32x2_t pair = vadd_f32(vget_low_f32(part), vget_high_f32(part));
  return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
#else
  float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}
INLINED float greatest(Floats a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a.part[0]);
#elif defined(__aarch64__)
  const auto greater = [](NativeFloats b, NativeFloats c) { return b > c ? b : c; };
  return vmaxnmvq_f32((float32x4_t)greater(greater(a.part[0], a.part[2]), greater(a.part[1], a.part[3])));
#else
  float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}
INLINED int32_t greatest(Ints a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)a.part[0]);
#else
  int32_t lanes[kLanes];
  store(lanes, a);
  return *std::max_element(lanes, lanes + kLanes);
#endif
}

INLINED float from_bf16(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
// The first (0) or the second (1) bfloat16 of each pair: it is the upper half of a float.
template <int kPlace>
INLINED NativeFloats widened(NativeInts pairs) {
  return (NativeFloats)(kPlace == 0 ? pairs << 16 : pairs & int32_t(0xffff0000));
}
template <int kPlace>
INLINED Floats widened(Ints pairs) {
  return each<Floats>([&](int i) { return widened<kPlace>(pairs.part[i]); });
}
// Rounds to nearest, ties to even; NaN stays NaN.
INLINED uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#if defined(__aarch64__)
// The same as to_bf16.
INLINED uint16x8_t narrowed(NativeFloats low, NativeFloats high) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (uint16x8_t)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
#else
  const auto rounded = [](NativeFloats values) {
    const NativeInts bits = (NativeInts)values;
    return values == values ? bits + ((bits >> 16 & 1) + 0x7fff) : bits | 0x400000;
  };
  return vuzp2q_u16((uint16x8_t)rounded(low), (uint16x8_t)rounded(high));
#endif
}
#endif
INLINED void store_as(float* to, Floats values) { store(to, values); }
INLINED void store_as(uint16_t* to, Floats values) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)values.part[0]);
  std::memcpy(to, &narrow, sizeof narrow);
#elif defined(__aarch64__)
  const uint16x8_t halves[] = {narrowed(values.part[0], values.part[1]), narrowed(values.part[2], values.part[3])};
  std::memcpy(to, halves, sizeof halves);
#else
  float lanes[kLanes];
  store(lanes, values);
  for (int i = 0; i < kLanes; ++i) to[i] = to_bf16(lanes[i]);
#endif
}
// Loads sixteen bfloat16 as floats.
INLINED Floats widened(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {{(NativeFloats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16)}};
#elif defined(__aarch64__)
  return each<Floats>([&](int i) { return (NativeFloats)vshll_n_u16(vld1_u16(from + 4 * i), 16); });
#else
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = from_bf16(from[i]);
  return load<Floats>(lanes);
#endif
}
template <class Element>
INLINED void store_all(Element* to, const float* from, int count) {
  for (int i = 0; i < count; i += kLanes) store_as(to + i, load<Floats>(from + i));
}
INLINED float narrow(float value, float) { return value; }
INLINED uint16_t narrow(float value, uint16_t) { return to_bf16(value); }
INLINED float widen(float value) { return value; }
INLINED float widen(uint16_t value) { return from_bf16(value); }

// Converts numbers from one type to another.
template <class Element, class Source>
INLINED void convert(const Source* from, int count, Element* to) {
  if constexpr (std::is_same<Element, Source>::value) {
    std::memcpy(to, from, count * sizeof(Element));
  } else {
    for (int i = 0; i < count; ++i) to[i] = narrow(widen(from[i]), Element{});
  }
}

INLINED int padded(int count, int multiple = 64) { return (count + multiple - 1) / multiple * multiple; }

}  // namespace triptych
