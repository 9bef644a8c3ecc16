// The gated delta rule, which replaces attention (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464).
//
// For each sequence, every value head keeps a matrix S that maps keys to values. A token decays it, corrects by a
// fraction beta what S returns for the token's key, and reads what it returns for the token's query:
//   S = decay * S;  S = S + key (beta * (value - S^T key))^T;  output = S^T query
// Queries, keys and values are the outputs of a short causal convolution, whose last inputs are kept beside S.
//
// S is stored in tiles of columns that fit in half of an L1 cache: [value_dim / tile][key_dim][tile]. Each token makes
// two passes over a tile: the first computes S^T key and S^T query for the old state, the second updates the tile,
// which is then in cache, so each number is read from memory once and written once. All tokens of a chunk are applied
// to one tile, which stays in cache, before the next tile is touched.
//
// Tokens are applied one by one, however they are chunked, so a token's bits do not depend on how its prompt was cut. A
// step writes the new state to a different row than it read, so it can be run again.
#pragma once

#include "abi.h"
#include "causal_convolution.h"

namespace triptych {

class DeltaRule {
 public:
  static constexpr int kVectors = kParts == 1 ? 2 : 1;  // in a tile

  DeltaRule(const DeltaShape& shape, const DeltaLayer& layer, float eps)
      : shape_(shape),
        layer_(layer),
        convolution_{layer.convolution, nullptr, layer.inputs, shape.conv_size, num_channels(shape)},
        eps_(eps) {}

  // Channels of the convolution: queries, keys and values.
  static int num_channels(const DeltaShape& shape) {
    return 2 * shape.num_key_heads * shape.key_dim + shape.num_value_heads * shape.value_dim;
  }
  // Width of a row of `mixed`: channels, then decays and betas of the value heads, then query^T key of the key heads.
  static int width(const DeltaShape& shape) {
    return padded(num_channels(shape) + 2 * shape.num_value_heads + shape.num_key_heads);
  }

  // Computes a token's query, key and values for one key head and its value heads, as well as their decays, betas and
  // query^T key. The last token of a segment saves the inputs of the convolution for the tokens after it.
  void mix(const RecurrentChunk& chunk, int t, int key_head) const {
    const int key_dim = shape_.key_dim, keys = shape_.num_key_heads * key_dim, num_channels = this->num_channels();
    const int group = num_heads() / shape_.num_key_heads, num_values = group * shape_.value_dim;
    float *to = mixed(chunk, t), *query = to + key_head * key_dim, *key = query + keys;
    convolution_.run(chunk, t, key_head * key_dim, key_dim, to);
    convolution_.run(chunk, t, keys + key_head * key_dim, key_dim, to);
    convolution_.run(chunk, t, 2 * keys + key_head * num_values, num_values, to);
    to_length(query, 1.0f / std::sqrt(float(key_dim)));
    to_length(key, 1.0f);
    to[num_channels + 2 * num_heads() + key_head] = product(query, key);
    const float *betas = chunk.gates + t * chunk.gates_stride, *rates = betas + padded(num_heads(), kLanes);
    for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
      const float rate = layer_.rates[head] * softplus(rates[head] + layer_.rate_biases[head]);
      to[num_channels + head] = std::exp(-rate);
      to[num_channels + num_heads() + head] = 1.0f / (1.0f + std::exp(-betas[head]));
    }
  }

  // The outputs of one head for each token, normed and gated: [count][stride].
  template <class Element>
  void run(const RecurrentChunk& chunk, int head, Element* outputs, size_t stride) const {
    const int size = shape_.value_dim;
    int c = 0;
    for (; c + kVectors * kLanes <= size; c += kVectors * kLanes) pass<kVectors>(chunk, head, c);
    for (; c < size; c += kLanes) pass<1>(chunk, head, c);
    end_streams();
    for (int t = 0; t < chunk.count; ++t) {
      const float* values = value(chunk, t, head);
      const float* gates = chunk.projected + t * chunk.stride + num_channels() + head * size;
      Element* to = outputs + t * stride + head * size;
      const Floats factor = broadcast(inverse_rms(values, size, eps_));
      for (int c = 0; c < size; c += kLanes)
        store_as(to + c, load<Floats>(values + c) * factor * load<Floats>(layer_.norm + c) *
                             silu(load<Floats>(gates + c)));
    }
  }

 private:
  int num_heads() const { return shape_.num_value_heads; }
  int num_channels() const { return num_channels(shape_); }
  float* mixed(const RecurrentChunk& chunk, int t) const { return chunk.mixed + size_t(t) * width(shape_); }
  float* value(const RecurrentChunk& chunk, int t, int head) const {
    return mixed(chunk, t) + 2 * shape_.num_key_heads * shape_.key_dim + head * shape_.value_dim;
  }

  float product(const float* a, const float* b) const {
    Floats sums = broadcast(0.0f);
    for (int i = 0; i < shape_.key_dim; i += kLanes) sums = fma(load<Floats>(a + i), load<Floats>(b + i), sums);
    return sum(sums);
  }
  void to_length(float* x, float length) const {
    constexpr float kEps = 1e-6f;
    const Floats factor = broadcast(length / std::sqrt(product(x, x) + kEps));
    for (int i = 0; i < shape_.key_dim; i += kLanes) store(x + i, load<Floats>(x + i) * factor);
  }

  // Applies all tokens to the tile of a head that begins at channel c. Outputs overwrite the values.
  template <int kWidth>
  void pass(const RecurrentChunk& chunk, int head, int c) const {
    const int key_head = head / (num_heads() / shape_.num_key_heads), key_dim = shape_.key_dim;
    const size_t size = size_t(key_dim) * shape_.value_dim, first = head * size + size_t(c) * key_dim;
    const float* from = layer_.states + chunk.read * num_heads() * size + first;
    for (int t = 0, s = 0; t < chunk.count; ++t) {
      s += t == chunk.ends[s];
      float* to = layer_.states + chunk.writes[s] * num_heads() * size + first;
      const float *row = mixed(chunk, t), *weights = row + num_channels();
      const float *query = row + key_head * key_dim, *key = query + shape_.num_key_heads * key_dim;
      const Weighting weighting{weights[head], weights[num_heads() + head], weights[2 * num_heads() + key_head]};
      float* values = value(chunk, t, head) + c;
      // For a single token the state is not in cache before the step, and is not needed there afterwards.
      if (chunk.count == 1) {
        step<kWidth, true>(from, to, query, key, weighting, values);
      } else {
        step<kWidth, false>(from, to, query, key, weighting, values);
      }
      from = to;
    }
  }

  struct Weighting {
    float decay, beta, match;  // match: query^T key
  };
  // The sums over keys run in two chains, even keys and odd keys, so that an fma need not wait for the previous one.
  template <int kWidth, bool kStreams>
  void step(const float* from, float* to, const float* query, const float* key, const Weighting& by,
            float* values) const {
    constexpr int kChains = 2, kRow = kWidth * kLanes;
    const int key_dim = shape_.key_dim;
    const Floats decay = broadcast(by.decay), beta = broadcast(by.beta), match = broadcast(by.match);
    Floats known[kChains][kWidth] = {}, asked[kChains][kWidth] = {}, change[kWidth];
    for (int i = 0; i < key_dim; i += kChains)
      for (int chain = 0; chain < kChains; ++chain) {
        const Floats k = broadcast(key[i + chain]), q = broadcast(query[i + chain]);
        for (int v = 0; v < kWidth; ++v) {
          const Floats s = load<Floats>(from + (i + chain) * kRow + v * kLanes);
          known[chain][v] = fma(s, k, known[chain][v]);
          asked[chain][v] = fma(s, q, asked[chain][v]);
        }
      }
    for (int v = 0; v < kWidth; ++v) {
      const Floats before = decay * (known[0][v] + known[1][v]);
      change[v] = beta * (load<Floats>(values + v * kLanes) - before);
      store(values + v * kLanes, fma(change[v], match, decay * (asked[0][v] + asked[1][v])));
    }
    for (int i = 0; i < key_dim; ++i) {
      const Floats k = broadcast(key[i]);
      for (int v = 0; v < kWidth; ++v) {
        const int place = i * kRow + v * kLanes;
        if (kStreams) __builtin_prefetch(from + key_dim * kRow + place, 0, 2);  // what the next tile reads
        const Floats s = fma(k, change[v], decay * load<Floats>(from + place));
        kStreams ? stream(to + place, s) : store(to + place, s);
      }
    }
  }

  const DeltaShape& shape_;
  const DeltaLayer& layer_;
  const CausalConvolution<false> convolution_;
  const float eps_;  // for the norm of outputs
};

}  // namespace triptych
