// Four-bit weights as published with gpt-oss: E2M1 numbers (a sign, two exponent bits and one mantissa bit), where each
// 32 inputs of a column share a power-of-two scale ("OCP Microscaling Formats (MX) Specification", version 1.0, 2023).
//
// The layout is that of Int4, with 64 inputs to a group, but the last step of a group holds two scales: of the first 32
// inputs, and of the other 32. Twice a number is an integer, so numbers are doubled and stored scales halved. Twelve
// is added to each, as products need them without a sign; dot products of 32 inputs are exact.
#pragma once

#include "int4.h"

namespace triptych {

struct Mxfp4 : Int4 {
  static constexpr int kPieces = 2;

  INLINED static Ints low(Ints weights) { return raised(Int4::low(weights)); }
  INLINED static Ints high(Ints weights) { return raised(Int4::high(weights)); }

  // Twelve more than twice the number that each byte, 0..15, encodes: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
  INLINED static Ints raised(Ints numbers) {
#if defined(__AVX512BW__)
    return {{(NativeInts)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table()), (__m512i)numbers.part[0])}};
#elif defined(__AVX2__)
    const __m256i table_of_both = _mm256_broadcastsi128_si256(table());
    return each<Ints>([&](int i) { return (NativeInts)_mm256_shuffle_epi8(table_of_both, (__m256i)numbers.part[i]); });
#elif defined(__aarch64__)
    const int8x16_t table = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return each<Ints>([&](int i) { return (NativeInts)vqtbl1q_s8(table, (uint8x16_t)numbers.part[i]); });
#else
    return each<Ints>([&](int i) {
      const NativeInts x = numbers.part[i], ones = x - x + 0x01010101;
      const NativeInts b0 = x & ones, b1 = x >> 1 & ones, b2 = x >> 2 & ones;
      const NativeInts twos = b2 & b1, magnitude = (x & 0x07070707) + (b2 & b0) + 2 * twos + 2 * (twos & b0);
      const NativeBits sign = (NativeBits)(x >> 3 & ones), is_negative = (sign << 8) - sign;
      // No byte carries into the next one, or borrows from it.
      return (magnitude & ~(NativeInts)is_negative) + 0x0c0c0c0c - (magnitude & (NativeInts)is_negative);
    });
#endif
  }
#if defined(__AVX2__)
  static __m128i table() { return _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0); }
#endif

  struct Worth {
    Floats scale;
    Worth(Ints stored, int piece) : scale(piece == 0 ? widened<0>(stored) : widened<1>(stored)) {}
    Floats add(Floats sum, Ints products, const GroupWorth& row, int piece) const {
      const Floats exact = fma(broadcast(-12.0f), broadcast(row.byte_sums[piece]), to_floats(products));
      return fma(exact, scale * broadcast(row.unit), sum);
    }
  };
};

}  // namespace triptych
