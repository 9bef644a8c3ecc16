// A state space with one decay per head, which replaces attention or runs beside it: Mamba-2 (Dao and Gu 2024,
// "Transformers are SSMs", arXiv 2405.21060), whose names B, C, D and dt are used here.
//
// For each sequence, every head keeps a matrix S. A token decays it by exp(-rate * dt), adds its own channels x to it,
// and reads it; B and C are shared by the heads of a group:
//   S = decay * S + B (dt * x)^T;  output = S^T C + D * x
// x, B and C are the outputs of a short causal convolution, whose last inputs are kept beside S.
//
// S is stored in tiles of columns, as in delta_rule.h: [head_dim / tile][state_size][tile]. A token makes one pass over
// a tile. All tokens of a chunk are applied to one tile, which stays in cache, before the next tile is touched.
//
// Tokens are applied one by one, however they are chunked, so a token's bits do not depend on how its prompt was cut. A
// step writes the new state to a different row than it read, so it can be run again.
#pragma once

#include "abi.h"
#include "causal_convolution.h"

namespace triptych {

class StateSpace {
 public:
  StateSpace(const StateSpaceShape& shape, const StateSpaceLayer& layer, float eps)
      : shape_(shape),
        layer_(layer),
        convolution_{layer.convolution, layer.convolution_biases, layer.inputs, shape.conv_size, num_channels(shape)},
        eps_(eps) {}

  static int num_outputs(const StateSpaceShape& shape) { return shape.num_heads * shape.head_dim; }
  // Channels of the convolution: x of each head, B of each group, C of each group.
  static int num_channels(const StateSpaceShape& shape) {
    return num_outputs(shape) + 2 * shape.num_groups * shape.state_size;
  }
  // Width of a row of `mixed`: channels, then the decays and the dt of all heads.
  static int width(const StateSpaceShape& shape) { return padded(num_channels(shape) + 2 * shape.num_heads); }

  // Computes a token's x, decay and dt of one head, and B and C if it is the first of its group. The last token of a
  // segment saves the inputs of the convolution for the tokens after it.
  void mix(const RecurrentChunk& chunk, int t, int head) const {
    const int size = shape_.state_size, group_size = shape_.num_heads / shape_.num_groups;
    float* to = mixed(chunk, t);
    convolution_.run(chunk, t, head * shape_.head_dim, shape_.head_dim, to);
    if (head % group_size == 0) {
      convolution_.run(chunk, t, first_b(head), size, to);
      convolution_.run(chunk, t, first_c(head), size, to);
    }
    const float raw = shape_.dt_multiplier * chunk.gates[t * chunk.gates_stride + head];
    const float dt = softplus(raw + layer_.dt_biases[head]);
    weights(chunk, t)[head] = std::exp(-layer_.rates[head] * dt);
    weights(chunk, t)[shape_.num_heads + head] = dt;
  }

  // Replaces x of one head by its outputs, for each token.
  void run(const RecurrentChunk& chunk, int head) const {
    const int size = shape_.head_dim;
    int c = 0;
    for (; c + kVectors * kLanes <= size; c += kVectors * kLanes) pass<kVectors>(chunk, head, c);
    for (; c < size; c += kLanes) pass<1>(chunk, head, c);
    end_streams();
  }

  // Gates the outputs of a token, and norms them in groups of norm_size channels, if there is a norm: [num_outputs].
  template <class Element>
  void finish(const RecurrentChunk& chunk, int t, Element* to) const {
    const int count = num_outputs(shape_), size = shape_.norm_size ? shape_.norm_size : count;
    const float* gates = chunk.projected + t * chunk.stride + num_channels(shape_);
    float* values = mixed(chunk, t);
    const bool gates_first = !shape_.norm_size || !shape_.norms_first;
    for (int first = 0; first < count; first += size) {
      if (gates_first) gate(values + first, gates + first, size);
      if (shape_.norm_size) norm_heads(values + first, size, layer_.norm + first, eps_);
      if (!gates_first) gate(values + first, gates + first, size);
    }
    store_all(to, values, count);
  }

 private:
  static constexpr int kVectors = kParts == 1 ? 2 : 1;  // in a tile

  float* mixed(const RecurrentChunk& chunk, int t) const { return chunk.mixed + size_t(t) * width(shape_); }
  float* weights(const RecurrentChunk& chunk, int t) const { return mixed(chunk, t) + num_channels(shape_); }
  int first_b(int head) const {
    return num_outputs(shape_) + head / (shape_.num_heads / shape_.num_groups) * shape_.state_size;
  }
  int first_c(int head) const { return first_b(head) + shape_.num_groups * shape_.state_size; }

  void gate(float* values, const float* gates, int count) const {
    const Floats factor = broadcast(shape_.gate_multiplier);
    for (int i = 0; i < count; i += kLanes)
      store(values + i, load<Floats>(values + i) * silu(load<Floats>(gates + i) * factor));
  }

  // Applies all tokens to the tile of a head that begins at channel c. Outputs overwrite x.
  template <int kWidth>
  void pass(const RecurrentChunk& chunk, int head, int c) const {
    const size_t size = size_t(shape_.state_size) * shape_.head_dim, row_size = shape_.num_heads * size;
    const size_t first = head * size + size_t(c) * shape_.state_size;
    const float* from = layer_.states + chunk.read * row_size + first;
    for (int t = 0, s = 0; t < chunk.count; ++t) {
      s += t == chunk.ends[s];
      float* to = layer_.states + chunk.writes[s] * row_size + first;
      float *row = mixed(chunk, t), *x = row + head * shape_.head_dim + c;
      const Weighting weighting{row + first_b(head), row + first_c(head), weights(chunk, t)[head],
                                weights(chunk, t)[shape_.num_heads + head], layer_.skips[head]};
      // For a single token the state is not in cache before the step, and is not needed there afterwards.
      if (chunk.count == 1) {
        step<kWidth, true>(from, to, weighting, x);
      } else {
        step<kWidth, false>(from, to, weighting, x);
      }
      from = to;
    }
  }

  struct Weighting {
    const float *b, *c;  // [state_size]
    float decay, dt, skip;
  };
  // The sums over the state run in two chains, even and odd rows, so that an fma need not wait for the previous one.
  template <int kWidth, bool kStreams>
  void step(const float* from, float* to, const Weighting& by, float* x) const {
    constexpr int kChains = 2, kRow = kWidth * kLanes;
    const int size = shape_.state_size;
    const Floats decay = broadcast(by.decay);
    Floats sums[kChains][kWidth] = {}, added[kWidth];
    unrolled<kWidth>([&](auto v) { added[v] = broadcast(by.dt) * load<Floats>(x + v * kLanes); });
    for (int i = 0; i < size; i += kChains)
      unrolled<kChains>([&](auto chain) {
        const Floats b = broadcast(by.b[i + chain]), c = broadcast(by.c[i + chain]);
        unrolled<kWidth>([&](auto v) {
          const int place = (i + chain) * kRow + v * kLanes;
          if (kStreams) __builtin_prefetch(from + size * kRow + place, 0, 2);  // what the next tile reads
          const Floats s = fma(b, added[v], decay * load<Floats>(from + place));
          kStreams ? stream(to + place, s) : store(to + place, s);
          sums[chain][v] = fma(s, c, sums[chain][v]);
        });
      });
    unrolled<kWidth>([&](auto v) {
      store(x + v * kLanes, fma(broadcast(by.skip), load<Floats>(x + v * kLanes), sums[0][v] + sums[1][v]));
    });
  }

  const StateSpaceShape& shape_;
  const StateSpaceLayer& layer_;
  const CausalConvolution<true> convolution_;
  const float eps_;  // for the norm of outputs
};

}  // namespace triptych
