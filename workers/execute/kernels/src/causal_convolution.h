// What delta rules and state spaces have in common: the tokens of one sequence that a layer computes in a step, and the
// causal convolution of each channel that comes first, whose last inputs are kept beside the layer's state.
//
// Tokens are convolved one by one, however they are chunked: their bits do not depend on how the prompt was cut.
#pragma once

#include <algorithm>

#include "rows.h"

namespace triptych {

// A step may save intermediate states for others to start from: a chunk consists of segments, and each of them
// continues from the row that the one before it wrote.
struct RecurrentChunk {
  const float* projected;  // [count][stride]: inputs of the convolution, then the output gates of each head
  size_t stride;
  const float* gates;  // [count][gates_stride]: for each head, see DeltaLayer and StateSpaceLayer
  size_t gates_stride;
  float* mixed;  // [count][width]: what tokens write to the state and read from it; see the layers for the width
  int count;
  int32_t read;                // row of the state and convolution inputs before the chunk
  int num_segments;            // the state and inputs are written after each segment
  const int32_t *ends, *writes;  // [num_segments]: token count at its end, increasing up to count; and row
};

// silu(bias + sum over taps of tap * input), with the input of this token and of those right before it.
template <bool kHasBiases>
struct CausalConvolution {
  static constexpr int kMostTaps = 8;

  const float* taps;    // [num_taps][num_channels]
  const float* biases;  // [num_channels]
  float* kept;          // [rows][num_taps - 1][num_channels], inputs of the last tokens, latest last
  int num_taps;
  int num_channels;

  // Convolves `count` channels of token t, from `first` on, to the same channels of `to`. The last token of a segment
  // saves the inputs for the tokens after it.
  void run(const RecurrentChunk& chunk, int t, int first, int count, float* to) const {
    const float* inputs[kMostTaps];
    for (int tap = 0; tap < num_taps; ++tap) inputs[tap] = input(chunk, t - (num_taps - 1) + tap);
    for (int c = first; c < first + count; c += kLanes) {
      Floats sums = kHasBiases ? load<Floats>(biases + c) : broadcast(0.0f);
      const float* weights = taps + c;
      for (int tap = 0; tap < num_taps; ++tap, weights += num_channels)
        sums = fma(load<Floats>(inputs[tap] + c), load<Floats>(weights), sums);
      store(to + c, silu(sums));
    }
    for (int s = 0; s < chunk.num_segments; ++s) {
      if (chunk.ends[s] != t + 1) continue;
      float* saved = kept + chunk.writes[s] * row_size() + first;
      for (int tap = 1; tap < num_taps; ++tap, saved += num_channels) std::copy_n(inputs[tap] + first, count, saved);
    }
  }

 private:
  size_t row_size() const { return size_t(num_taps - 1) * num_channels; }
  // The inputs of token t of the chunk, or, for t < 0, of an earlier token.
  const float* input(const RecurrentChunk& chunk, int t) const {
    if (t >= 0) return chunk.projected + t * chunk.stride;
    return kept + chunk.read * row_size() + size_t(num_taps - 1 + t) * num_channels;
  }
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace triptych
