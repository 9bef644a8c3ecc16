// What a product computes with, in one layout: a group of 32 bits is one float, two bfloat16 or four bytes. Formats of
// four bits, whose weights become bytes in registers, are in int4.h and mxfp4.h.
//
// A row of activations is a row of groups, and a vector of weights is the same group of 16 columns. The dot product of
// a broadcast activation group and such a vector updates 16 accumulators with one instruction: an fma, vdpbf16ps or
// vpdpbusd. Without those instructions the numbers of a group are widened first, and a tile takes `kPasses` over each
// group: what is widened for one pass leaves the registers before the next one.
#pragma once

#include "simd.h"
#if defined(__aarch64__)
#include "neon_groups.h"
#endif

namespace triptych {

#if defined(__aarch64__)
using Float32Groups = OfLanes<NeonFloat32Groups>;
#else
struct Float32Groups {
  static constexpr int kPasses = 1;
  using Columns = Floats;
  template <int>
  INLINED static NativeFloats activation(uint32_t group) { return (NativeFloats)broadcast_part(group); }
  template <int>
  INLINED static Columns columns(Ints weights) { return as_floats(weights); }
  INLINED static Floats dot(Floats sums, NativeFloats a, Columns columns) { return fma(a, columns, sums); }
};
#endif

struct Float32 : Float32Groups {
  using Element = float;  // of activations and of cached keys and values
  using Accumulators = Floats;
  using Cache = Float32;  // the format of keys and values
  static constexpr int kGroup = 1;
};

// Groups that instructions multiply as they are stored.
struct WholeGroups {
  static constexpr int kPasses = 1;
  using Columns = Ints;
  template <int>
  INLINED static NativeInts activation(uint32_t group) { return broadcast_part(group); }
  template <int>
  INLINED static Columns columns(Ints weights) { return weights; }
};

#if defined(__aarch64__)
using BFloat16Groups = OfLanes<NeonBFloat16Groups>;
#elif defined(__AVX512BF16__)
struct BFloat16Groups : WholeGroups {
  INLINED static Floats dot(Floats sums, NativeInts a, Columns columns) {
    return {{(NativeFloats)_mm512_dpbf16_ps((__m512)sums.part[0], (__m512bh)a, (__m512bh)columns.part[0])}};
  }
};
#else
// The first of each pair, then the second.
struct BFloat16Groups {
  static constexpr int kPasses = 2;
  using Columns = Floats;
  template <int kPass>
  INLINED static NativeFloats activation(uint32_t group) { return widened<kPass>(held(broadcast_part(group))); }
  template <int kPass>
  INLINED static Columns columns(Ints pairs) { return widened<kPass>(pairs); }
  INLINED static Floats dot(Floats sums, NativeFloats a, Columns columns) { return fma(a, columns, sums); }
};
#endif

struct BFloat16 : BFloat16Groups {
  using Element = uint16_t;
  using Accumulators = Floats;
  using Cache = BFloat16;
  static constexpr int kGroup = 2;
};

#if defined(__aarch64__)
template <bool>  // all are signed
using Bytes = OfLanes<NeonInt8Groups>;
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
INLINED NativeInts products_added(NativeInts sums, NativeInts unsigned_bytes, NativeInts signed_bytes) {
#if defined(__AVX512VNNI__)
  return (NativeInts)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#else
  return (NativeInts)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
#endif
}
template <bool kHasSignedRows>
struct Bytes : WholeGroups {
  INLINED static Ints dot(Ints sums, NativeInts a, Columns columns) {
    return each<Ints>([&](int i) {
      return kHasSignedRows ? products_added(sums.part[i], columns.part[i], a)
                            : products_added(sums.part[i], a, columns.part[i]);
    });
  }
};
#elif defined(__AVX2__)
// Even and odd bytes are widened to 16 bits, so that a sum of two products cannot saturate.
template <bool kHasSignedRows>
struct Bytes {
  static constexpr int kPasses = 1;
  struct Widened {
    __m256i even, odd;
  };
  struct Columns {
    Widened part[kParts];
  };
  template <int>
  INLINED static Widened activation(uint32_t group) {
    return extended<kHasSignedRows>((__m256i)held(broadcast_part(group)));
  }
  template <int>
  INLINED static Columns columns(Ints weights) {
    return each<Columns>([&](int i) { return extended<!kHasSignedRows>((__m256i)weights.part[i]); });
  }
  INLINED static Ints dot(Ints sums, Widened a, Columns columns) {
    return each<Ints>([&](int i) {
      const Widened weights = columns.part[i];
      const __m256i even = _mm256_madd_epi16(a.even, weights.even), odd = _mm256_madd_epi16(a.odd, weights.odd);
      return sums.part[i] + (NativeInts)_mm256_add_epi32(even, odd);
    });
  }

 private:
  template <bool kIsSigned>
  INLINED static Widened extended(__m256i bytes) {
    if (kIsSigned) return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
    return {_mm256_and_si256(bytes, _mm256_set1_epi32(0x00ff00ff)), _mm256_srli_epi16(bytes, 8)};
  }
};
#else
// Byte by byte.
template <bool kHasSignedRows>
struct Bytes {
  static constexpr int kPasses = 4;
  using Columns = Ints;
  template <int kPass>
  INLINED static NativeInts activation(uint32_t group) {
    return extended<kPass, kHasSignedRows>(broadcast_part(group));
  }
  template <int kPass>
  INLINED static Columns columns(Ints weights) {
    return each<Ints>([&](int i) { return extended<kPass, !kHasSignedRows>(weights.part[i]); });
  }
  INLINED static Ints dot(Ints sums, NativeInts a, Columns columns) {
    return each<Ints>([&](int i) { return sums.part[i] + columns.part[i] * a; });
  }

 private:
  template <int kPass, bool kIsSigned>
  INLINED static NativeInts extended(NativeInts bytes) {
    return kIsSigned ? bytes << (24 - 8 * kPass) >> 24 : bytes >> 8 * kPass & 0xff;
  }
};
#endif

// Where instructions multiply unsigned by signed bytes, activations are 128 more than the value they represent, and
// Matrix.offsets corrects for that.
struct Int8 : Bytes<false> {
#if defined(__aarch64__)
  static constexpr int kExcess = 0;
#else
  static constexpr int kExcess = 128;
#endif
  using Element = std::conditional_t<kExcess == 0, int8_t, uint8_t>;
  using Accumulators = Ints;
  using Cache = BFloat16;
  static constexpr int kGroup = 4;
};

// Rows of queries times keys, of which these have the excess: the correction is one for each row.
struct KeyBytes : Bytes<true> {
  using Accumulators = Ints;
  static constexpr int kGroup = 4;
};

// What belongs to each 64 activations where weights are in four bits, besides the bytes; these then have a sign.
struct GroupWorth {
  float unit;          // what a byte of 1 stands for
  float total;         // the sum of the bytes, in units
  float byte_sums[2];  // of the first 32 bytes, and of the others
};

// The sums with the products of one group added.
template <class Format>
INLINED typename Format::Accumulators with_group(typename Format::Accumulators sums, uint32_t group, Ints weights) {
  unrolled<Format::kPasses>([&](auto pass) {
    sums = Format::dot(sums, Format::template activation<pass>(group), Format::template columns<pass>(weights));
  });
  return sums;
}

}  // namespace triptych
