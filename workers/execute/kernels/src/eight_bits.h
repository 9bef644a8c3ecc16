// Sixteen tokens of one kv head in 8 bits: half the size of bfloat16.
//
// A tile holds numbers, -127..127, at the places of elements in the layout of pages.h with groups of four, followed by
// their scales in bfloat16: [blocks][16 tokens] for keys, [16 tokens] for values, which have one scale.
//
// Keys are rounded after a Walsh-Hadamard transform of their channels, in blocks of a power of two, which spreads the
// few large channels that keys of some models have over all of a block. Queries are transformed likewise, so their
// products do not change, except for the factor `block()`.
//
// What is stored for a token depends only on its own channels.
#pragma once

#include <algorithm>

#include "formats.h"
#include "hadamard.h"
#include "rounded_bytes.h"

namespace triptych {

class EightBits {
 public:
  static constexpr int kGroup = Int8::kGroup;
  static constexpr int kExcess = Int8::kExcess;  // of the stored numbers of keys, see KeyBytes
  static constexpr int kMostMixed = 128;         // channels of a block

  // Channels of a key, or of a value: a multiple of 16.
  explicit EightBits(int head_dim) : head_dim_(head_dim), block_(std::min(hadamard_block(head_dim), kMostMixed)) {}

  size_t num_numbers() const { return size_t(kLanes) * head_dim_; }

  int block() const { return block_; }
  int num_blocks() const { return head_dim_ / block_; }
  size_t key_bytes() const { return num_numbers() + num_blocks() * kLanes * sizeof(uint16_t); }
  size_t value_bytes() const { return num_numbers() + kLanes * sizeof(uint16_t); }

  void write_key(char* tile, int token, const float* key) const {
    float mixed[kMostMixed];
    uint8_t numbers[kMostMixed];
    for (int block = 0; block < num_blocks(); ++block) {
      const Scale scale(transform(key + block * block_, mixed, block_, block_));
      scale.template round<kExcess>(mixed, block_, numbers);
      scales_of(tile)[block * kLanes + token] = scale.stored;
      char* to = tile + (block * block_ / kGroup * kLanes + token) * kGroup;
      for (int d = 0; d < block_; d += kGroup, to += kLanes * kGroup) std::memcpy(to, numbers + d, kGroup);
    }
  }
  void write_value(char* tile, int token, const float* value) const {
    const Scale scale(Magnitude(value, head_dim_));
    char* const to = tile + token / kGroup * head_dim_ * kGroup;
    for (int d = 0; d < head_dim_; d += kLanes) store_apart(to + d * kGroup, token % kGroup, scale, value + d);
    scales_of(tile)[token] = scale.stored;
  }

  // The scales of 16 tokens; a value has one block.
  Floats read_scales(const char* tile, int block = 0) const {
    return widened(reinterpret_cast<const uint16_t*>(tile + num_numbers()) + block * kLanes);
  }

 private:
  // That of some channels. NaN if any of them is infinite or NaN, which must not be lost.
  struct Scale {
    uint16_t stored;
    float inverse;

    explicit Scale(const Magnitude& magnitude) {
      stored = to_bf16(magnitude.unit());
      inverse = 1.0f / from_bf16(stored);
    }
    template <int kShift>
    void round(const float* from, int count, uint8_t* to) const {
      for (int d = 0; d < count; d += kLanes) store_bytes<kShift>(to + d, load<Floats>(from + d), broadcast(inverse));
    }
  };

  // Rounds sixteen numbers into byte `place` of as many groups. Others may be writing the other bytes.
  static void store_apart(char* to, int place, const Scale& scale, const float* from) {
#if defined(__AVX512BW__)
    const Ints numbers = rounded_bits<0>(load<Floats>(from), broadcast(scale.inverse));
    const __m512i shifted = _mm512_sll_epi32((__m512i)numbers.part[0], _mm_cvtsi32_si128(8 * place));
    _mm512_mask_storeu_epi8(to, 0x1111111111111111u << place, shifted);
#else
    uint8_t numbers[kLanes];
    scale.round<0>(from, kLanes, numbers);
    for (int lane = 0; lane < kLanes; ++lane) to[kGroup * lane + place] = char(numbers[lane]);
#endif
  }

  uint16_t* scales_of(char* tile) const { return reinterpret_cast<uint16_t*>(tile + num_numbers()); }

  int head_dim_, block_;
};

}  // namespace triptych
