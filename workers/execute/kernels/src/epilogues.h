// What becomes of the results of a product: they are stored, converted and stored, added to a residual, or passed
// through the activation.
//
// An epilogue is part of each tile. It has no other tile's products to fill its waits with, so what counts is that
// there are few instructions: what is behind them can then begin.
#pragma once

#include "activations.h"
#include "matmul.h"

namespace triptych {

// Reads the 64 floats that a tile will write into the L2 cache while it computes. A store has to wait for its cache
// line, and of many rows the lines are far away: that would take a twentieth of the time of a prompt's products in
// int8. Into L1, the reads of six rows would take all of its buffers for misses, and the tile could not begin: above
// all where another core wrote the lines.
inline void prefetch_columns(const float* place) {
  for (int line = 0; line < 4; ++line) __builtin_prefetch(place + kLanes * line, 0, 2);
}

template <class Element>
struct StoreAs {
  Element* to;
  size_t stride;
  void expect(int, int) const {}
  template <class Results>
  INLINED void operator()(const Results& pair) const {
    Element* place = to + pair.first * stride + 64 * pair.block + 16 * pair.vector;
    for (int r = 0; r < pair.count; ++r, place += stride) {
      store_as(place, pair.low(r));
      store_as(place + 32, pair.high(r));
    }
  }
};

struct Store : StoreAs<float> {
  void expect(int row, int block) const { prefetch_columns(to + row * stride + 64 * block); }
};

struct Add {
  float* to;
  size_t stride;
  float multiplier;  // if 1, the fma is an addition, at the same speed
  const float* weights = nullptr;  // one for each row
  void expect(int row, int block) const { prefetch_columns(to + row * stride + 64 * block); }
  template <class Results>
  INLINED void operator()(const Results& pair) const {
    float* place = to + pair.first * stride + 64 * pair.block + 16 * pair.vector;
    for (int r = 0; r < pair.count; ++r, place += stride) {
      const Floats factor = broadcast(weights ? multiplier * weights[pair.first + r] : multiplier);
      store(place, fma(pair.low(r), factor, load<Floats>(place)));
      store(place + 32, fma(pair.high(r), factor, load<Floats>(place + 32)));
    }
  }
};

template <class Element>
struct Gate {
  Element* to;
  size_t stride;
  bool has_gates;  // otherwise all columns are ups
  int32_t activation;
  float slope, limit;  // see Model
  Xielu xielu_factors;
  void expect(int, int) const {}  // half as many lines or fewer: measured to gain nothing
  template <class Results>
  INLINED void operator()(const Results& pair) const {
    Element* place = to + pair.first * stride + (has_gates ? 32 : 64) * pair.block + 16 * pair.vector;
    if (has_gates && activation == kSilu) {  // by far the most common case: no call, and all in registers
      const Floats factor = broadcast(slope);
      for (int r = 0; r < pair.count; ++r, place += stride) store_as(place, silu(pair.low(r) * factor) * pair.high(r));
      return;
    }
    for (int r = 0; r < pair.count; ++r, place += stride) {
      if (has_gates) {
        store_as(place, gated(pair.low(r), pair.high(r)));
        continue;
      }
      store_as(place, activated(pair.low(r)));
      store_as(place + 32, activated(pair.high(r)));
    }
  }
  Floats gated(Floats gate, Floats up) const {
    if (activation == kClampedSwiglu) return clamped_swiglu(gate, up, slope, limit);
    return activated(gate) * up;
  }
  // Not inlined, see multiply_tile.
  __attribute__((noinline)) Floats activated(Floats x) const {
    switch (activation) {
      case kGelu: return gelu(x);
      case kGeluTanh: return gelu_tanh(x);
      case kRelu: return relu(x);
      case kSquaredRelu: return squared_relu(x);
      case kXielu: return xielu(x, xielu_factors.squared, xielu_factors.exponential, xielu_factors.linear);
      default: return silu(x * broadcast(slope));
    }
  }
};

}  // namespace triptych
