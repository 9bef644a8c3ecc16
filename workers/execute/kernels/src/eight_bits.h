// Sixteen tokens of one kv head in 8 bits: half the size of bfloat16.
//
// A tile holds the numbers, -127..127, each at the place of its element in the layout of pages.h, followed by their
// scales in bfloat16. In a key, every 32 channels share a scale, as in llama.cpp's Q8_0: [head_dim / 32][16 tokens].
// Keys of some models have a few channels much larger than all others, and a single scale would leave the others no
// precision. A value has one scale.
//
// Attention reads the numbers as elements, which represent them exactly, and applies the scales elsewhere: a score is
// the sum over groups of the key's scale times a dot product of numbers, and a weight is multiplied by the scale of its
// value.
//
// What is stored for a token depends only on its own channels.
#pragma once

#include "numbers.h"

namespace triptych {

template <class Cache>
class EightBits {
 public:
  using Element = typename Cache::Element;
  static constexpr int kChannels = 32;  // in a group of a key

  explicit EightBits(int head_dim) : head_dim_(head_dim) {}  // that of keys or values

  size_t num_numbers() const { return size_t(kLanes) * head_dim_; }

  int num_groups() const { return (head_dim_ + kChannels - 1) / kChannels; }
  int channels_of(int group) const { return std::min(kChannels, head_dim_ - group * kChannels); }
  size_t key_bytes() const { return num_numbers() + num_groups() * kLanes * sizeof(uint16_t); }
  size_t value_bytes() const { return num_numbers() + kLanes * sizeof(uint16_t); }

  void write_key(char* tile, int token, const float* key) const {
    const auto place = [=](int d) { return (d / kGroup * kLanes + token) * kGroup + d % kGroup; };
    for (int group = 0; group < num_groups(); ++group) {
      const int begin = group * kChannels;
      scales_of(tile)[group * kLanes + token] = write(tile, key, begin, begin + channels_of(group), place);
    }
  }
  void write_value(char* tile, int token, const float* value) const {
    const int start = token / kGroup * head_dim_ * kGroup + token % kGroup;
    scales_of(tile)[token] = write(tile, value, 0, head_dim_, [=](int d) { return start + d * kGroup; });
  }
  // Makes a token's value zero.
  void clear_value(char* tile, int token) const { scales_of(tile)[token] = 0; }

  void read_numbers(const char* tile, Element* to) const {
    Numbers<Element>::read(reinterpret_cast<const uint8_t*>(tile), num_numbers(), to);
  }
  // The scales of 16 tokens; a value has one group.
  Floats read_scales(const char* tile, int group = 0) const {
    return widened(reinterpret_cast<const uint16_t*>(tile + num_numbers()) + group * kLanes);
  }

 private:
  static constexpr int kGroup = Cache::kGroup;
  static constexpr float kGreatest = 127.0f;

  uint16_t* scales_of(char* tile) const { return reinterpret_cast<uint16_t*>(tile + num_numbers()); }

  // Quantises these channels and writes the numbers; returns the scale.
  template <class Place>
  static uint16_t write(char* tile, const float* from, int begin, int end, const Place& place) {
    Floats magnitudes = broadcast(0.0f), nothing = broadcast(0.0f);
    for (int d = begin; d < end; d += kLanes) {
      const Floats channels = load<Floats>(from + d);
      magnitudes = max(magnitudes, abs(channels));
      nothing = nothing + channels * broadcast(0.0f);  // NaN if any channel is NaN or infinite, which must not be lost
    }
    const uint16_t stored = to_bf16(greatest(magnitudes) / kGreatest + sum(nothing));
    const float scale = from_bf16(stored), inverse = 1.0f / scale;
    for (int d = begin; d < end; d += kLanes) {
      int32_t numbers[kLanes] = {};
      if (scale > 0.0f) store(numbers, rounded(load<Floats>(from + d) * broadcast(inverse), kGreatest));
      for (int i = 0; i < kLanes; ++i)
        Numbers<Element>::write(reinterpret_cast<uint8_t*>(tile), place(d + i), numbers[i]);
    }
    return stored;
  }

  int head_dim_;
};

}  // namespace triptych
