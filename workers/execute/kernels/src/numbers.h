// Floats rounded to bytes, at -127..127 or 0..255 times a unit.
#pragma once

#include "formats.h"

namespace triptych {

// Sixteen floats times the factor, rounded to the nearest integers and shifted by kExcess, as bytes. Returns them, shifted,
// as floats.
template <int kExcess>
INLINED Floats store_bytes(uint8_t* to, Floats values, Floats factor) {
  constexpr float kRounding = 12582912.0f;  // adding it rounds to an integer, held in the lowest bits
  const Floats shifted = fma(values, factor, broadcast(kRounding + kExcess));
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
  return shifted - broadcast(kRounding);
}

// The greatest magnitude of some floats, which becomes 127. If any of them is infinite or NaN, the unit is NaN, and so is
// every product.
class Magnitude {
 public:
  INLINED Magnitude(const float* from, int count) {
    // As integers, magnitudes have the order of their values, and infinity and NaN are above all numbers.
    Ints top = as_ints(broadcast(1e-30f));
    for (int i = 0; i < count; i += kLanes) top = max(top, as_ints(abs(load<Floats>(from + i))));
    const int32_t greatest_bits = greatest(top);
    std::memcpy(&limit_, &greatest_bits, sizeof limit_);
    unit_ = limit_ / 127.0f + (limit_ - limit_);
  }
  float unit() const { return unit_; }
  Floats factor() const { return broadcast(127.0f / limit_); }

 private:
  float limit_, unit_;
};

// The binary logarithms of positive floats, or at most 0.09 more.
INLINED Floats log2_or_more(Floats x) {
  // The exponent and, for its fraction, the mantissa, which is at most 0.0861 below the logarithm.
  return fma(to_floats(as_ints(x)), broadcast(1.0f / (1 << 23)), broadcast(-127.0f + 0.0861f));
}

}  // namespace triptych
