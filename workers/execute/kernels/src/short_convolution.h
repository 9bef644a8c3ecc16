// A short convolution, which replaces attention in LFM2 (Liquid AI 2025). Each channel of a token's output is
//   output gate * sum over taps of tap * (input gate * input),
// with the inputs of this token and of those right before it. The last ones of a sequence, gated, are kept for its next
// step; a step writes them to a different row than it read, as in delta_rule.h.
//
// Gated inputs are computed anew for each token that sees them: a token's bits do not depend on how its prompt was cut.
#pragma once

#include "abi.h"
#include "rows.h"

namespace triptych {

// The tokens of one sequence in a step.
struct ConvolutionChunk {
  const float* projected;  // [count][stride]: input gates, output gates and inputs, [width] each
  size_t stride;
  int width;                     // channels, padded
  int32_t read;                  // row of inputs before the chunk
  int num_segments;              // the inputs are written after each segment
  const int32_t *ends, *writes;  // [num_segments]: token count at its end, increasing up to count; and row
};

class ShortConvolver {
 public:
  ShortConvolver(const ShortConvolution& layer, int num_taps) : layer_(layer), num_past_(num_taps - 1) {}

  // The output of token t of the chunk, [width]. The last token of a segment saves the inputs for the tokens after it.
  template <class Element>
  void convolve(const ConvolutionChunk& chunk, int t, Element* to) const {
    const float* gates = chunk.projected + t * chunk.stride + chunk.width;
    for (int c = 0; c < chunk.width; c += kLanes) {
      Floats sums = broadcast(0.0f);
      for (int tap = 0; tap <= num_past_; ++tap)
        sums = fma(input(chunk, t - num_past_ + tap, c), load<Floats>(layer_.taps + tap * chunk.width + c), sums);
      store_as(to + c, load<Floats>(gates + c) * sums);
    }
    for (int s = 0; s < chunk.num_segments; ++s)
      if (chunk.ends[s] == t + 1) save(chunk, t, chunk.writes[s]);
  }

 private:
  // Sixteen channels of the gated input at token t of the chunk, or, for t < 0, at an earlier token.
  Floats input(const ConvolutionChunk& chunk, int t, int c) const {
    if (t < 0) return load<Floats>(kept(chunk, chunk.read, num_past_ + t) + c);
    const float* row = chunk.projected + t * chunk.stride + c;
    return load<Floats>(row) * load<Floats>(row + 2 * chunk.width);
  }
  void save(const ConvolutionChunk& chunk, int t, int32_t row) const {
    for (int n = 0; n < num_past_; ++n)
      for (int c = 0; c < chunk.width; c += kLanes)
        store(kept(chunk, row, n) + c, input(chunk, t - num_past_ + 1 + n, c));
  }
  float* kept(const ConvolutionChunk& chunk, int32_t row, int n) const {
    return layer_.inputs + (size_t(row) * num_past_ + n) * chunk.width;
  }

  const ShortConvolution& layer_;
  const int num_past_;
};

}  // namespace triptych
