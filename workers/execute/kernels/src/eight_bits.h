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
    for (int group = 0; group < num_groups_; ++group) scales(tile)[group * kLanes + token] = 0;
  }

  void read_keys(const char* tile, Element* to) const {
    const int8_t* from = reinterpret_cast<const int8_t*>(tile);
    float scale[kLanes], spread[kLanes * kGroup];  // of each token; of each number of a step, 16 tokens with kGroup channels
    for (int group = 0; group < num_groups_; ++group) {
      read_scales(tile, group, scale);
      for (int i = 0; i < kLanes * kGroup; ++i) spread[i] = scale[i / kGroup];
      const Floats low = load<Floats>(spread), high = load<Floats>(spread + (kGroup - 1) * kLanes);
      for (int left = channels_of(group) * kLanes; left > 0; left -= 2 * kLanes, from += 2 * kLanes, to += 2 * kLanes)
        store_as(to, load_bytes(from) * low, load_bytes(from + kLanes) * high);
    }
  }
  void read_values(const char* tile, Element* to) const {
    const int row = head_dim_ * kGroup;  // the numbers of kGroup tokens
    for (int group = 0; group < num_groups_; ++group) {
      float scale[kLanes];
      read_scales(tile, group, scale);
      const int start = group * kChannels * kGroup, end = start + channels_of(group) * kGroup;
      for (int token = 0; token < kLanes; token += kGroup) {
        const int8_t* from = reinterpret_cast<const int8_t*>(tile) + token / kGroup * row;
        const Floats of_tokens = repeat<kGroup>(scale + token);
        Element* numbers = to + token / kGroup * row;
        int i = start;
        for (; i + 2 * kLanes <= end; i += 2 * kLanes)
          store_as(numbers + i, load_bytes(from + i) * of_tokens, load_bytes(from + i + kLanes) * of_tokens);
        if (i < end) store_as(numbers + i, load_bytes(from + i) * of_tokens);
      }
    }
  }

 private:
  static constexpr int kGroup = Cache::kGroup, kChannels = 32;
  static constexpr float kGreatest = 127.0f;

  int channels_of(int group) const { return std::min(kChannels, head_dim_ - group * kChannels); }
  uint16_t* scales(char* tile) const { return reinterpret_cast<uint16_t*>(tile + size_t(kLanes) * head_dim_); }
  void read_scales(const char* tile, int group, float* to) const {
    const uint16_t* from = scales(const_cast<char*>(tile)) + group * kLanes;
    for (int token = 0; token < kLanes; ++token) to[token] = from_bf16(from[token]);
  }

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
      scales(tile)[group * kLanes + token] = stored;
      for (int d = begin; d < end; ++d) {
        const float number = inverse > 0.0f ? std::nearbyint(from[d] * inverse) : 0.0f;
        to[place(d)] = int8_t(std::max(-kGreatest, std::min(kGreatest, number)));
      }
    }
  }

  int head_dim_, num_groups_;
};

}  // namespace triptych
