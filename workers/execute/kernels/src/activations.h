// Functions that models apply to single values.
#pragma once

#include "powers.h"

namespace triptych {

INLINED Floats silu(Floats x) { return quotient(x, broadcast(1.0f) + exp(broadcast(0.0f) - x)); }
// x / 2 * (1 + tanh(u)), which is x / (1 + e^-2u), for u = sqrt(2 / pi) * (x + 0.044715 x^3).
INLINED Floats gelu_tanh(Floats x) {
  const Floats cubic = fma(x * x, broadcast(-2 * 0.7978845608f * 0.044715f), broadcast(-2 * 0.7978845608f));
  return quotient(x, broadcast(1.0f) + exp(x * cubic));
}
// x / 2 * (1 + erf(x / sqrt(2))), which is the positive part of x less |x| / 2 * erfc(|x| / sqrt(2)); NaN if x is
// infinite. The absolute error of erfc is 2e-7 (Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26).
inline Floats gelu(Floats x) {
  const Floats zeros = broadcast(0.0f), ones = broadcast(1.0f), size = abs(x);
  const Floats t = ones / fma(size, broadcast(0.3275911f * 0.7071067812f), ones);
  Floats series = broadcast(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) series = fma(series, t, broadcast(c));
  const Floats half = series * t * exp(x * x * broadcast(-0.5f)) * broadcast(0.5f);
  return max(zeros, x) - size * half;
}
// NaN for NaN, due to the order of arguments.
INLINED Floats relu(Floats x) { return max(broadcast(0.0f), x); }
INLINED Floats squared_relu(Floats x) {
  const Floats positive = relu(x);
  return positive * positive;
}
// squared * x^2 for positive x, exponential * (e^x - 1 - x) for others, and linear * x for all (Huang and Schlag 2024,
// "Deriving Activation Functions Using Integration"). NaN for NaN, due to the order of arguments.
inline Floats xielu(Floats x, float squared, float exponential, float linear) {
  const Floats above = max(broadcast(0.0f), x), below = min(broadcast(0.0f), x);
  const Floats curved = (exp(below) - broadcast(1.0f) - below) * broadcast(exponential);
  return fma(above * above, broadcast(squared), fma(x, broadcast(linear), curved));
}
// gate * sigmoid(slope * gate) * (up + 1), with the gate clamped to at most the limit and up to +-limit, as in gpt-oss
// (OpenAI 2025); NaN if either is NaN.
INLINED Floats clamped_swiglu(Floats gate, Floats up, float slope, float limit) {
  const Floats cut = min(broadcast(limit), gate) * broadcast(slope);  // the order of arguments matters: a NaN stays NaN
  const Floats within = max(broadcast(-limit), min(broadcast(limit), up));
  return silu(cut) * broadcast(1.0f / slope) * (within + broadcast(1.0f));
}
// cap * tanh(x / cap), within 1e-7 of the cap; NaN for NaN.
INLINED Floats capped(Floats x, float cap) {
  const Floats ones = broadcast(1.0f), power = exp(x * broadcast(2.0f / cap));
  const Floats result = broadcast(cap) * ((power - ones) / (power + ones));
  return each<Floats>([&](int i) { return x.part[i] == x.part[i] ? result.part[i] : x.part[i]; });
}

}  // namespace triptych
