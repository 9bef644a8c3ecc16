// Powers of e and of two, logarithms, and what activations divide by.
#pragma once

#include "simd.h"

namespace triptych {

#if defined(__AVX512F__)
// What is above the largest integer that is not above x.
INLINED __m512 fraction(__m512 x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// 2^r as 1 + r q(r) for 0 <= r < 1, with the smallest greatest error.
INLINED __m512 power_of_fraction(__m512 r) {
  __m512 p = _mm512_set1_ps(1.867130213e-3f);
  for (float c : {9.017030019e-3f, 5.579991332e-2f, 2.401644501e-1f, 6.931513118e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return p;
}
#endif

// e^x with a relative error of 2e-7; exactly 0 below -87, and the value at 88 above that and for NaN.
INLINED Floats exp(Floats x) {
#if defined(__AVX512F__)
  // As a power of two, whose exponent is the sum of two numbers: what the first one lacks goes to its fraction.
  const __m512 limited = (__m512)min(x, broadcast(88.0f)).part[0];
  const __m512 log2e = _mm512_set1_ps(1.44269504f), exponents = _mm512_mul_ps(limited, log2e);
  const __m512 lost = _mm512_fmsub_ps(limited, log2e, exponents);
  const __m512 rest = _mm512_fmadd_ps(limited, _mm512_set1_ps(1.92596300e-8f), lost);  // log2 e less its float
  const __m512 powers = power_of_fraction(_mm512_add_ps(fraction(exponents), rest));
  const __mmask16 is_more = _mm512_cmp_ps_mask(limited, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
  return {{(NativeFloats)_mm512_maskz_scalef_ps(is_more, powers, exponents)}};
#else
  x = min(x, broadcast(88.0f));
  const Floats shifted = fma(x, broadcast(1.44269504f), broadcast(kRounder));
  const Floats n = shifted - broadcast(kRounder);
  Floats r = fma(n, broadcast(-0.693359375f), x);  // ln 2 in two parts
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);  // Cephes' expf
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, broadcast(c));
  p = fma(p, r * r, r + broadcast(1.0f));
  return each<Floats>([&](int i) {
    const NativeFloats scaled = (NativeFloats)((NativeBits)p.part[i] + ((NativeBits)shifted.part[i] << 23));
    return x.part[i] < -87.0f ? NativeFloats{} : scaled;
  });
#endif
}

// 2^x for x < 128 with a relative error of 2e-7; 1 for 0, exactly 0 below -150, NaN for NaN.
INLINED Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const __m512 exponents = (__m512)x.part[0];
  return {{(NativeFloats)_mm512_scalef_ps(power_of_fraction(fraction(exponents)), exponents)}};
#else
  // Taylor series of 2^r for |r| <= 1/2, with coefficients ln(2)^n / n!.
  const Floats shifted = x + broadcast(kRounder), r = x - (shifted - broadcast(kRounder));
  Floats p = broadcast(1.540353039e-4f);
  for (float c : {1.333355814e-3f, 9.618129108e-3f, 5.550410866e-2f, 2.402265070e-1f, 6.931471806e-1f, 1.0f})
    p = fma(p, r, broadcast(c));
  return each<Floats>([&](int i) {
    const NativeFloats scaled = (NativeFloats)((NativeBits)p.part[i] + ((NativeBits)shifted.part[i] << 23));
    const NativeFloats result = x.part[i] < -126.0f ? NativeFloats{} : scaled;
    return x.part[i] == x.part[i] ? result : x.part[i];
  });
#endif
}

// The binary logarithms of positive floats, or at most 0.09 more.
INLINED Floats log2_or_more(Floats x) {
  // The exponent and, for its fraction, the mantissa, which is at most 0.0861 below the logarithm.
  return fma(to_floats(as_ints(x)), broadcast(1.0f / (1 << 23)), broadcast(-127.0f + 0.0861f));
}

// a / b for 1 <= b < 2^127, with a relative error of 2e-7.
INLINED Floats quotient(Floats a, Floats b) {
#if defined(__AVX512F__)
  // One step of Newton's method; a division takes as long as ten other operations.
  const __m512 divisors = (__m512)b.part[0], near = _mm512_rcp14_ps(divisors);
  const __m512 error = _mm512_fnmadd_ps(divisors, near, _mm512_set1_ps(1.0f));
  return a * Floats{{(NativeFloats)_mm512_fmadd_ps(near, error, near)}};
#else
  return a / b;
#endif
}

}  // namespace triptych
