// The gated delta rule in place of attention (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464).
//
// Of what a sequence has said each value head keeps a matrix S, which maps keys to values. A token lets it decay,
// corrects by a part beta what S has for the token's key, and reads what it has for the token's query:
//   S = decay * S;  S = S + key (beta * (value - S^T key))^T;  output = S^T query
// Queries, keys and values come out of a short causal convolution, whose last inputs are kept beside S.
//
// S lies in tiles of as many columns as registers have room for the sums of: [value_dim / tile][key_dim][tile]. A token
// passes over a tile twice: for S^T key and S^T query of the state before it, then to write. The second pass finds the
// tile in the L1 cache, so memory gives each number once and takes it once. All tokens of a chunk pass over one tile,
// which stays in that cache, before the next one is touched.
//
// Tokens come one by one, whatever the chunk, so a token's bits do not depend on how its prompt was cut. A step leaves a
// state elsewhere than it found one, so it can be run again.
#pragma once

#include <algorithm>

#include "abi.h"
#include "rows.h"
#include "tile.h"

namespace triptych {

// The tokens of one sequence in a step.
struct DeltaChunk {
  const float* projected;  // [count][stride]: inputs of the convolution, then what gates the output of each value head
  size_t stride;
  const float* gates;  // [count][gates_stride]: of each value head, see DeltaLayer
  size_t gates_stride;
  float* mixed;  // [count][DeltaRule::width(shape)]
  int count;
  int32_t read, write;  // rows of states and inputs
};

class DeltaRule {
 public:
  static constexpr int kMostTaps = 8;  // of the convolution

  DeltaRule(const DeltaShape& shape, const DeltaLayer& layer, float eps) : shape_(shape), layer_(layer), eps_(eps) {}

  // Of the convolution: queries, keys and values.
  static int num_channels(const DeltaShape& shape) {
    return 2 * shape.num_key_heads * shape.key_dim + shape.num_value_heads * shape.value_dim;
  }
  // Of a row that is mixed: channels, then decays and betas of the value heads, then query^T key of the key heads.
  static int width(const DeltaShape& shape) {
    return padded(num_channels(shape) + 2 * shape.num_value_heads + shape.num_key_heads);
  }

  // Makes queries, keys and values of a token, and what they are weighted by. The last token leaves the inputs of the
  // convolution for the next step.
  void mix(const DeltaChunk& chunk, int t) const {
    const int num_taps = shape_.conv_size, key_dim = shape_.key_dim, num_channels = this->num_channels();
    const float* taps[kMostTaps];
    for (int tap = 0; tap < num_taps; ++tap) taps[tap] = input(chunk, t - (num_taps - 1) + tap);
    float* to = mixed(chunk, t);
    for (int c = 0; c < num_channels; c += kLanes) {
      Floats sums = broadcast(0.0f);
      const float* weights = layer_.convolution + c;
      for (int tap = 0; tap < num_taps; ++tap, weights += num_channels)
        sums = fma(load<Floats>(taps[tap] + c), load<Floats>(weights), sums);
      store(to + c, silu(sums));
    }
    float* matches = to + num_channels + 2 * num_heads();
    for (int head = 0; head < shape_.num_key_heads; ++head) {
      float *query = to + head * key_dim, *key = query + shape_.num_key_heads * key_dim;
      to_length(query, 1.0f / std::sqrt(float(key_dim)));
      to_length(key, 1.0f);
      matches[head] = product(query, key);
    }
    const float *betas = chunk.gates + t * chunk.gates_stride, *rates = betas + padded(num_heads(), kLanes);
    for (int head = 0; head < num_heads(); ++head) {
      const float rate = layer_.rates[head] * softplus(rates[head] + layer_.rate_biases[head]);
      to[num_channels + head] = std::exp(-rate);
      to[num_channels + num_heads() + head] = 1.0f / (1.0f + std::exp(-betas[head]));
    }
    if (t + 1 == chunk.count) keep_inputs(chunk);
  }

  // What one head reads for each token, normed and gated, [count][stride].
  template <class Element>
  void run(const DeltaChunk& chunk, int head, Element* outputs, size_t stride) const {
    const int size = shape_.value_dim;
    for (int c = 0; c < size;) {
      if (c + kTileVectors * kLanes <= size) {
        pass<kTileVectors>(chunk, head, c);
        c += kTileVectors * kLanes;
      } else {
        pass<1>(chunk, head, c);
        c += kLanes;
      }
    }
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
  size_t inputs_size() const { return size_t(shape_.conv_size - 1) * num_channels(); }  // of a row of them
  float* mixed(const DeltaChunk& chunk, int t) const { return chunk.mixed + size_t(t) * width(shape_); }
  float* value(const DeltaChunk& chunk, int t, int head) const {
    return mixed(chunk, t) + 2 * shape_.num_key_heads * shape_.key_dim + head * shape_.value_dim;
  }

  // Of the convolution: that of token t of the chunk, or of one before it.
  const float* input(const DeltaChunk& chunk, int t) const {
    if (t >= 0) return chunk.projected + t * chunk.stride;
    return layer_.inputs + chunk.read * inputs_size() + size_t(shape_.conv_size - 1 + t) * num_channels();
  }
  void keep_inputs(const DeltaChunk& chunk) const {
    const int num_kept = shape_.conv_size - 1, num_channels = this->num_channels();
    float* to = layer_.inputs + chunk.write * inputs_size();
    for (int i = 0; i < num_kept; ++i, to += num_channels)
      std::copy_n(input(chunk, chunk.count - num_kept + i), num_channels, to);
  }

  static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
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

  // All tokens over the tile of a head that begins with channel c. Outputs take the place of values.
  template <int kVectors>
  void pass(const DeltaChunk& chunk, int head, int c) const {
    const int key_head = head / (num_heads() / shape_.num_key_heads), key_dim = shape_.key_dim;
    const size_t size = size_t(key_dim) * shape_.value_dim, first = head * size + size_t(c) * key_dim;
    const float* from = layer_.states + chunk.read * num_heads() * size + first;
    float* to = layer_.states + chunk.write * num_heads() * size + first;
    for (int t = 0; t < chunk.count; ++t, from = to) {
      const float *row = mixed(chunk, t), *weights = row + num_channels();
      const float *query = row + key_head * key_dim, *key = query + shape_.num_key_heads * key_dim;
      const Weighting weighting{weights[head], weights[num_heads() + head], weights[2 * num_heads() + key_head]};
      step<kVectors>(from, to, query, key, weighting, value(chunk, t, head) + c);
    }
  }

  struct Weighting {
    float decay, beta, match;  // match: query^T key
  };
  template <int kVectors>
  void step(const float* from, float* to, const float* query, const float* key, const Weighting& by,
            float* values) const {
    constexpr int kWidth = kVectors * kLanes;
    const int key_dim = shape_.key_dim;
    const Floats decay = broadcast(by.decay), beta = broadcast(by.beta), match = broadcast(by.match);
    Floats known[kVectors] = {}, asked[kVectors] = {}, change[kVectors];
    for (int i = 0; i < key_dim; ++i) {
      const Floats k = broadcast(key[i]), q = broadcast(query[i]);
      for (int v = 0; v < kVectors; ++v) {
        const Floats s = load<Floats>(from + i * kWidth + v * kLanes);
        known[v] = fma(s, k, known[v]);
        asked[v] = fma(s, q, asked[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      change[v] = beta * (load<Floats>(values + v * kLanes) - decay * known[v]);
      store(values + v * kLanes, fma(change[v], match, decay * asked[v]));
    }
    for (int i = 0; i < key_dim; ++i) {
      const Floats k = broadcast(key[i]);
      for (int v = 0; v < kVectors; ++v) {
        const int place = i * kWidth + v * kLanes;
        store(to + place, fma(k, change[v], decay * load<Floats>(from + place)));
      }
    }
  }

  const DeltaShape& shape_;
  const DeltaLayer& layer_;
  const float eps_;  // of the norm of outputs
};

}  // namespace triptych
