// Sixteen tokens of one kv head in 8 bits, which is half of what they take in bfloat16.
//
// 32 channels of a token share a scale, as in llama.cpp's Q8_0: keys of some models have a few channels much greater than
// all others, which would leave the others nothing with one scale for all. The scale is a bfloat16, so that what a byte
// stands for is its product with it. Bytes have the places of the elements that they stand for, see attention.h, and
// behind them lie the scales: [head_dim / 32][16 tokens].
//
// What a token becomes depends on nothing but its own channels.
#pragma once

#include "simd.h"

namespace triptych {

template <class Cache>
class EightBits {
 public:
  using Element = typename Cache::Element;

  explicit EightBits(int head_dim) : head_dim_(head_dim), num_groups_((head_dim + kChannels - 1) / kChannels) {}

  size_t bytes() const { return size_t(kLanes) * head_dim_ + num_groups_ * kLanes * sizeof(uint16_t); }

  void write_key(char* tile, int token, const float* key) const {
    write(tile, token, key, [=](int d) { return (d / kGroup * kLanes + token) * kGroup + d % kGroup; });
  }
  void write_value(char* tile, int token, const float* value) const {
    const int start = token / kGroup * head_dim_ * kGroup + token % kGroup;
    write(tile, token, value, [=](int d) { return start + d * kGroup; });
  }
  // Makes what stands for a token zero.
  void clear(char* tile, int token) const {
    for (int group = 0; group < num_groups_; ++group) scales_of(tile)[group * kLanes + token] = 0;
  }

  void read_keys(const char* tile, Element* to) const {
    const int8_t* from = reinterpret_cast<const int8_t*>(tile);
    const uint16_t* scales = scales_of(tile);
    float scale[kLanes * kGroup];  // of each number of a step, which has kGroup channels of 16 tokens
    for (int group = 0; group < num_groups_; ++group) {
      for (int i = 0; i < kLanes * kGroup; ++i) scale[i] = from_bf16(scales[group * kLanes + i / kGroup]);
      const Floats low = load<Floats>(scale), high = load<Floats>(scale + (kGroup - 1) * kLanes);
      for (int left = channels_of(group) * kLanes; left > 0; left -= 2 * kLanes, from += 2 * kLanes, to += 2 * kLanes)
        store_as(to, load_bytes(from) * low, load_bytes(from + kLanes) * high);
    }
  }
  void read_values(const char* tile, Element* to) const {
    const int8_t* from = reinterpret_cast<const int8_t*>(tile);
    const uint16_t* scales = scales_of(tile);
    for (int token = 0; token < kLanes; token += kGroup)
      for (int group = 0; group < num_groups_; ++group) {
        float scale[kGroup];
        for (int i = 0; i < kGroup; ++i) scale[i] = from_bf16(scales[group * kLanes + token + i]);
        const Floats of_tokens = repeat<kGroup>(scale);
        const int count = channels_of(group) * kGroup;
        int i = 0;
        for (; i + 2 * kLanes <= count; i += 2 * kLanes)
          store_as(to + i, load_bytes(from + i) * of_tokens, load_bytes(from + i + kLanes) * of_tokens);
        if (i < count) store_as(to + i, load_bytes(from + i) * of_tokens);
        from += count, to += count;
      }
  }

 private:
  static constexpr int kGroup = Cache::kGroup, kChannels = 32;
  static constexpr float kGreatest = 127.0f;

  int channels_of(int group) const { return std::min(kChannels, head_dim_ - group * kChannels); }
  const uint16_t* scales_of(const char* tile) const {
    return reinterpret_cast<const uint16_t*>(tile + size_t(kLanes) * head_dim_);
  }
  uint16_t* scales_of(char* tile) const { return reinterpret_cast<uint16_t*>(tile + size_t(kLanes) * head_dim_); }

  template <class Place>
  void write(char* tile, int token, const float* from, const Place& place) const {
    int8_t* to = reinterpret_cast<int8_t*>(tile);
    for (int group = 0; group < num_groups_; ++group) {
      const int begin = group * kChannels, end = begin + channels_of(group);
      float greatest = 0.0f, nothing = 0.0f;
      for (int d = begin; d < end; ++d) {
        greatest = std::max(greatest, std::fabs(from[d]));
        nothing += from[d] * 0.0f;  // or no number, which must not get lost
      }
      const uint16_t stored = to_bf16(greatest / kGreatest + nothing);
      const float scale = from_bf16(stored), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      scales_of(tile)[group * kLanes + token] = stored;
      for (int d = begin; d < end; ++d) {
        const float number = inverse > 0.0f ? std::nearbyint(from[d] * inverse) : 0.0f;
        to[place(d)] = int8_t(std::max(-kGreatest, std::min(kGreatest, number)));
      }
    }
  }

  int head_dim_, num_groups_;
};

}  // namespace triptych
