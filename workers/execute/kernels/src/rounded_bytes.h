// Floats rounded to bytes, at -127..127 or 0..255 times a unit.
#pragma once

#include "simd.h"

namespace triptych {

// Sixteen floats times the factor, rounded to the nearest integers and shifted by kExcess, in the lowest bytes.
template <int kExcess>
INLINED Ints rounded_bits(Floats values, Floats factor) {
  return as_ints(fma(values, factor, broadcast(kRounder + kExcess)));
}

// The same, stored as bytes. Returns them, shifted, as floats.
template <int kExcess>
INLINED Floats store_bytes(uint8_t* to, Floats values, Floats factor) {
  const Floats shifted = as_floats(rounded_bits<kExcess>(values, factor));
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)shifted.part[0]);
  std::memcpy(to, &bytes, sizeof bytes);
#else
  const Ints bits = each<Ints>([&](int p) { return (NativeInts)shifted.part[p] & 0xff; });
#if defined(__aarch64__)
  const uint16x8_t low = vuzp1q_u16((uint16x8_t)bits.part[0], (uint16x8_t)bits.part[1]);
  const uint16x8_t high = vuzp1q_u16((uint16x8_t)bits.part[2], (uint16x8_t)bits.part[3]);
  vst1q_u8(to, vuzp1q_u8((uint8x16_t)low, (uint8x16_t)high));
#else
  int32_t lanes[kLanes];
  store(lanes, bits);
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = uint8_t(lanes[lane]);
#endif
#endif
  return shifted - broadcast(kRounder);
}

// The greatest magnitude of some floats, which becomes 127. If any of them is infinite or NaN, the unit is NaN, and so
// is every product.
class Magnitude {
 public:
  // Of magnitudes as integers, which have the order of their values; infinity and NaN are above all numbers.
  INLINED explicit Magnitude(Ints magnitudes) {
    const int32_t greatest_bits = greatest(max(magnitudes, as_ints(broadcast(1e-30f))));
    std::memcpy(&limit_, &greatest_bits, sizeof limit_);
    unit_ = limit_ / 127.0f + (limit_ - limit_);
  }
  INLINED Magnitude(const float* from, int count) : Magnitude(top_of(from, count)) {}
  float unit() const { return unit_; }
  Floats factor() const { return broadcast(127.0f / limit_); }

 private:
  INLINED static Ints top_of(const float* from, int count) {
    Ints top{};
    for (int i = 0; i < count; i += kLanes) top = max(top, as_ints(abs(load<Floats>(from + i))));
    return top;
  }

  float limit_, unit_;
};

}  // namespace triptych
