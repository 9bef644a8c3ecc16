// Bytes that encode -127..127, converted to elements: bfloat16 and float represent all of these exactly.
#pragma once

#include "simd.h"

namespace triptych {

// In general: two's complement, in order.
template <class Element>
struct Numbers {
  static void write(uint8_t* numbers, int place, int number) { numbers[place] = uint8_t(int8_t(number)); }
  // `count` is a multiple of 64.
  static void read(const uint8_t* numbers, size_t count, Element* to) {
    const int8_t* from = reinterpret_cast<const int8_t*>(numbers);
    for (size_t i = 0; i < count; i += 2 * kLanes)
      store_exact(to + i, load_bytes(from + i), load_bytes(from + i + kLanes));
  }
};

#if defined(__AVX512VBMI__)
// The lower bytes of 0..127 in bfloat16, followed by the upper bytes.
struct BytesOfNumbers {
  alignas(64) uint8_t bytes[256] = {};
  constexpr BytesOfNumbers() {
    for (int number = 1, exponent = 0; number < 128; ++number) {
      if (number >> (exponent + 1)) ++exponent;
      const int bits = (127 + exponent) << 7 | (number << (7 - exponent) & 0x7f);
      bytes[number] = uint8_t(bits);
      bytes[128 + number] = uint8_t(bits >> 8);
    }
  }
};

// A sign and seven bits of magnitude, which index two tables that give both bytes of 64 bfloat16 at once. The
// interleaving instructions work within lanes of 16 bytes, so the first 32 of 64 numbers are stored in the lower halves
// of the lanes and the others in the upper halves.
template <>
struct Numbers<uint16_t> {
  static void write(uint8_t* numbers, int place, int number) {
    const int chunk = place & ~63, half = place >> 5 & 1, lane = place >> 3 & 3, i = place & 7;
    numbers[chunk + 16 * lane + 8 * half + i] = uint8_t(number < 0 ? 0x80 - number : number);
  }
  static void read(const uint8_t* numbers, size_t count, uint16_t* to) {
    const Tables tables;
    for (size_t i = 0; i < count; i += 64)
      tables.read(numbers + i, [&](int half, Ints pairs) { store(to + i + 32 * half, pairs); });
  }

  // Keeps the lookup tables in registers.
  class Tables {
   public:
    // Calls use(half, 32 bfloat16) for each half of 64 numbers.
    template <class Use>
    INLINED void read(const uint8_t* numbers, const Use& use) const {
      const __m512i bytes = _mm512_loadu_si512(numbers);
      const __m512i lower = _mm512_permutex2var_epi8(low_, bytes, low_64_);
      const __m512i magnitude = _mm512_permutex2var_epi8(high_, bytes, high_64_);
      const __m512i upper = _mm512_ternarylogic_epi32(magnitude, bytes, sign_, 0xf8);  // magnitude | bytes & sign
      use(0, Ints{{(NativeInts)_mm512_unpacklo_epi8(lower, upper)}});
      use(1, Ints{{(NativeInts)_mm512_unpackhi_epi8(lower, upper)}});
    }

   private:
    static constexpr BytesOfNumbers kBytes{};
    static __m512i table(int at) { return _mm512_load_si512(kBytes.bytes + at); }
    const __m512i low_ = table(0), low_64_ = table(64), high_ = table(128), high_64_ = table(192);
    const __m512i sign_ = _mm512_set1_epi8(char(0x80));
  };
};
#endif

}  // namespace triptych
