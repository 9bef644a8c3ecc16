// Walsh-Hadamard transforms of rows before they are rounded to eight bits.
//
// A few channels of a model's activations are often many times larger than all others, which then share what little
// precision the row's scale leaves them. The transform replaces the channels of a block by sums of all of them with
// different signs, so each has a part in every result, and all results are of similar size. Products do not change:
// the weights are transformed likewise when they are packed, and the matrix times itself is the size of the block, by
// which their scales are divided.
//
// All sums are taken in the same order at every level: channels 1, 2, 4, ... apart.
//
// Source: "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", Ashkboos et al. 2024, arXiv 2404.00456.
#pragma once

#include <algorithm>

#include "rounded_bytes.h"

namespace triptych {

// The largest power of two that divides the number of inputs.
inline int hadamard_block(int num_inputs) { return num_inputs & -num_inputs; }

// Lane i has what lane i ^ kDistance had.
template <int kDistance>
INLINED Floats exchanged(Floats a) {
  constexpr int kOfPart = kLanes / kParts;
  return each<Floats>([&](int i) -> NativeFloats {
    if constexpr (kDistance >= kOfPart) return a.part[i ^ (kDistance / kOfPart)];
    const NativeFloats part = a.part[i];
#if defined(__AVX512F__)
    const __m512 lanes = (__m512)part;
    if constexpr (kDistance == 1) return (NativeFloats)_mm512_permute_ps(lanes, 0xb1);
    if constexpr (kDistance == 2) return (NativeFloats)_mm512_permute_ps(lanes, 0x4e);
    return (NativeFloats)_mm512_shuffle_f32x4(lanes, lanes, kDistance == 4 ? 0xb1 : 0x4e);
#elif defined(__AVX2__)
    const __m256 lanes = (__m256)part;
    if constexpr (kDistance == 1) return (NativeFloats)_mm256_permute_ps(lanes, 0xb1);
    if constexpr (kDistance == 2) return (NativeFloats)_mm256_permute_ps(lanes, 0x4e);
    return (NativeFloats)_mm256_permute2f128_ps(lanes, lanes, 1);
#else
    NativeFloats result;
    for (int lane = 0; lane < kOfPart; ++lane) result[lane] = part[(lane ^ kDistance) % kOfPart];
    return result;
#endif
  });
}

// x + y in each lane i whose bit kDistance is not set, x - y in lane i + kDistance, for these lanes' x and y.
template <int kDistance>
INLINED Floats with_neighbours(Floats a) {
  constexpr int kOfPart = kLanes / kParts;
  const Floats signs = each<Floats>([](int p) {
    NativeFloats lanes;
    for (int i = 0; i < kOfPart; ++i) lanes[i] = (p * kOfPart + i) & kDistance ? -1.0f : 1.0f;
    return lanes;
  });
  return fma(a, signs, exchanged<kDistance>(a));  // times 1 or -1, so only the sum is rounded
}

// The channels of a few vectors, `stride` floats apart: within the vectors if kHasLanes, then among them. `top` becomes
// the greatest of itself and the magnitudes of the results, see Magnitude.
template <int kVectors, bool kHasLanes>
INLINED void transform_vectors(const float* from, float* to, size_t stride, Ints& top) {
  Floats vectors[kVectors];
  unrolled<kVectors>([&](auto v) {
    vectors[v] = load<Floats>(from + v * stride);
    if constexpr (kHasLanes)
      vectors[v] = with_neighbours<8>(with_neighbours<4>(with_neighbours<2>(with_neighbours<1>(vectors[v]))));
  });
  unrolled<3>([&](auto step) {
    constexpr int kDistance = 1 << decltype(step)::value;
    if constexpr (kDistance < kVectors)
      unrolled<kVectors>([&](auto v) {
        if constexpr ((v & kDistance) == 0) {
          const Floats x = vectors[v], y = vectors[v + kDistance];
          vectors[v] = x + y;
          vectors[v + kDistance] = x - y;
        }
      });
  });
  unrolled<kVectors>([&](auto v) {
    store(to + v * stride, vectors[v]);
    top = max(top, as_ints(abs(vectors[v])));
  });
}

// One pass over a row, of all distances from `stride` floats to kVectors / 2 times that; within vectors if kHasLanes.
// Returns the greatest magnitudes by lane.
template <int kVectors, bool kHasLanes>
inline Ints transform_pass(const float* from, float* to, int count, int stride) {
  Ints top{};
  for (int first = 0; first < count; first += kVectors * stride)
    for (int i = first; i < first + stride; i += kLanes)
      transform_vectors<kVectors, kHasLanes>(from + i, to + i, stride, top);
  return top;
}
template <bool kHasLanes>
inline Ints transform_pass(int num_vectors, const float* from, float* to, int count, int stride) {
  switch (num_vectors) {
    case 1: return transform_pass<1, kHasLanes>(from, to, count, stride);
    case 2: return transform_pass<2, kHasLanes>(from, to, count, stride);
    case 4: return transform_pass<4, kHasLanes>(from, to, count, stride);
    default: return transform_pass<8, kHasLanes>(from, to, count, stride);
  }
}

// Within blocks that are smaller than a vector.
inline void transform_few(const float* from, float* to, int count, int block) {
  if (to != from) std::copy_n(from, count, to);
  for (int distance = 1; distance < block; distance *= 2)
    for (int i = 0; i < count; ++i) {
      if (i & distance) continue;
      const float x = to[i], y = to[i + distance];
      to[i] = x + y;
      to[i + distance] = x - y;
    }
}

// Transforms the blocks of a row of `count` channels, a multiple of the block. `to` may be `from`. Returns the greatest
// magnitude of the results if `count` is a multiple of 16: it costs nothing here, and a pass of its own otherwise.
inline Magnitude transform(const float* from, float* to, int count, int block) {
  constexpr int kMostVectors = 8;
  if (block < kLanes) {
    transform_few(from, to, count, block);
    return Magnitude(to, count / kLanes * kLanes);
  }
  int num_vectors = std::min(block / kLanes, kMostVectors);
  Ints top = transform_pass<true>(num_vectors, from, to, count, kLanes);
  for (int stride = num_vectors * kLanes; stride < block; stride *= num_vectors) {
    num_vectors = std::min(block / stride, kMostVectors);
    top = transform_pass<false>(num_vectors, to, to, count, stride);
  }
  return Magnitude(top);
}

}  // namespace triptych
