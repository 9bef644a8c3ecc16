// Operations on single rows of the batch: embedding, norms, rotary embedding, gates, choice of a token.
#pragma once

#include <algorithm>

#include "abi.h"
#include "activations.h"
#include "simd.h"

namespace triptych {

// Reads what will soon be read or written into the L2 cache.
template <class Element>
inline void prefetch_row(const Element* row, int count) {
  const char* const from = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < count * sizeof(Element); at += 64) __builtin_prefetch(from + at, 0, 2);
}

// 1 / sqrt(mean of squares + eps) of `count` values, stored in a padded row.
inline float inverse_rms(const float* values, int count, float eps) {
  Floats squares = broadcast(0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const Floats x = load<Floats>(values + i);
    squares = fma(x, x, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / float(count) + eps);
}

// The row minus the mean of its values. Padding, which is zero before, stays so.
inline void centre(const float* x, int count, float* to) {
  Floats sums = broadcast(0.0f);
  for (int i = 0; i < count; i += kLanes) sums = sums + load<Floats>(x + i);
  const Floats mean = broadcast(sum(sums) / float(count));
  for (int i = 0; i < count; i += kLanes) store(to + i, load<Floats>(x + i) - mean);
  std::fill(to + count, to + padded(count), 0.0f);
}

// Norms a row; without `weight`, only copies it. Rows and weights are padded, and `to` may be x. A layer norm is the
// RMS norm of what differs from the mean.
inline void norm_row(const Model& model, const float* x, const float* weight, float* to) {
  const int count = model.hidden_size, end = padded(count);
  if (!weight) {
    std::copy_n(x, end, to);
    return;
  }
  if (model.has_layer_norms) {
    centre(x, count, to);
    x = to;
  }
  const Floats factor = broadcast(inverse_rms(x, count, model.norm_eps));
  for (int i = 0; i < end; i += kLanes) store(to + i, load<Floats>(x + i) * factor * load<Floats>(weight + i));
  if (model.has_layer_norms)
    for (int i = 0; i < end; i += kLanes) store(to + i, load<Floats>(to + i) + load<Floats>(weight + end + i));
}

// The padding of the row is reset to zeros: a step with NaNs may leave some there, and norms read it. Guesses of a
// draft model may lie behind its last position.
inline void embed(const Model& model, int token_id, int position, float* to) {
  const size_t first = size_t(token_id) * model.hidden_size;
  if (model.embedding_is_bf16) {
    const uint16_t* from = static_cast<const uint16_t*>(model.embedding) + first;
    for (int i = 0; i < model.hidden_size; ++i) to[i] = from_bf16(from[i]);
  } else {
    std::memcpy(to, static_cast<const float*>(model.embedding) + first, model.hidden_size * sizeof(float));
  }
  if (model.embedding_multiplier != 1.0f)
    for (int i = 0; i < model.hidden_size; ++i) to[i] *= model.embedding_multiplier;
  std::fill(to + model.hidden_size, to + padded(model.hidden_size), 0.0f);
  if (model.positions) {
    const int width = padded(model.hidden_size);
    const float* learned = model.positions + size_t(std::min(position, model.num_positions - 1)) * width;
    for (int i = 0; i < width; i += kLanes) store(to + i, load<Floats>(to + i) + load<Floats>(learned + i));
  }
  if (model.embedding_norm) norm_row(model, to, model.embedding_norm, to);
}

// to += multiplier * the normed row x. All rows are padded.
inline void add_normed_row(const float* x, const float* weight, int count, float eps, float multiplier, float* to) {
  const Floats factor = broadcast(inverse_rms(x, count, eps) * multiplier);
  for (int i = 0; i < padded(count); i += kLanes)
    store(to + i, fma(load<Floats>(x + i) * factor, load<Floats>(weight + i), load<Floats>(to + i)));
}

inline void cap_row(float* row, int count, float cap) {
  for (int i = 0; i < padded(count); i += kLanes) store(row + i, capped(load<Floats>(row + i), cap));
}

// NaN for NaN, due to the order of arguments.
inline void clip_row(float* row, int width, float limit) {
  for (int i = 0; i < width; i += kLanes)
    store(row + i, max(broadcast(-limit), min(broadcast(limit), load<Floats>(row + i))));
}

// Stores the argmax of a row's logits in `place`, the first on ties, and returns its logit; NaN if any logit is NaN.
inline float choose(const float* logits, int count, int32_t* place) {
  const int whole = count / kLanes * kLanes;
  Floats tops = broadcast(-INFINITY), zeros = broadcast(0.0f);
  for (int i = 0; i < whole; i += kLanes) {
    const Floats x = load<Floats>(logits + i);
    tops = max(tops, x);
    zeros = zeros + (x - x);
  }
  float top = greatest(tops), zero = sum(zeros);
  for (int i = whole; i < count; ++i) {
    top = logits[i] > top ? logits[i] : top;
    zero += logits[i] - logits[i];
  }
  int i = 0;
  while (i + 1 < count && !(logits[i] == top)) ++i;
  *place = i;
  return top + zero;
}

// Norms one head, or several together, in place. `size` is a multiple of 16.
inline void norm_heads(float* heads, int size, const float* weight, float eps) {
  const Floats scale = broadcast(inverse_rms(heads, size, eps));
  for (int i = 0; i < size; i += kLanes) store(heads + i, load<Floats>(heads + i) * scale * load<Floats>(weight + i));
}

// Rotates pairs of channels of a head, in place; channels from rotary_dim on are not rotated.
inline void turn(float* head, int rotary_dim, bool are_neighbours, const float* cosines, const float* sines) {
  const int half = rotary_dim / 2;
  if (are_neighbours) {
    for (int i = 0; i < half; ++i) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * cosines[i] - b * sines[i];
      head[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
    return;
  }
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + half] = b * cosines[i] + a * sines[i];
  }
}

// One head, in place: its norm, if the model has one for each, and its rotary embedding unless cosines are null.
inline void turn_head(float* head, const Model& model, const float* norm, const float* cosines, const float* sines,
                      float factor) {
  const int size = model.head_dim;
  if (norm && !model.norms_turned_heads) norm_heads(head, size, norm, model.norm_eps);
  if (cosines) turn(head, model.rotary_dim, model.turns_neighbours, cosines, sines);
  if (norm && model.norms_turned_heads) norm_heads(head, size, norm, model.norm_eps);
  if (factor == 1.0f) return;
  for (int i = 0; i < size; i += kLanes) store(head + i, load<Floats>(head + i) * broadcast(factor));
}

// Multiplies a head by the sigmoid of its gate; NaN where the gate is NaN or infinite.
inline void gate_head(float* head, int size, const float* gate) {
  const Floats ones = broadcast(1.0f), zeros = broadcast(0.0f);
  for (int i = 0; i < size; i += kLanes) {
    const Floats x = load<Floats>(gate + i);
    store(head + i, load<Floats>(head + i) / (ones + exp(zeros - x)) + x * zeros);
  }
}

}  // namespace triptych
