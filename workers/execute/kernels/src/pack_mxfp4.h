// Packs groups of a checkpoint's MXFP4 weights, see mxfp4.h.
#pragma once

#include "mxfp4.h"
#include "pack_int4.h"

namespace triptych {

// The weights as stored in a checkpoint.
struct MxWeights {
  static constexpr int kInputs = 32;  // per scale
  const uint8_t* numbers;  // [outputs][inputs / 2], the first of two in the low nibble
  const uint8_t* scales;   // [outputs][inputs / 32], exponents of two with a bias of 127; 255: NaN

  struct Group {
    uint8_t numbers[kGroupInputs];
    uint16_t scales[2];  // bfloat16
    uint8_t number(int i) const { return numbers[i]; }
    uint32_t worth(int) const { return scales[0] | uint32_t{scales[1]} << 16; }
  };
  // Missing inputs are zeros.
  Group group(int output, int num_inputs, int index) const {
    const int first = index * kGroupInputs, count = std::min(kGroupInputs, num_inputs - first);
    const uint8_t* from = numbers + (size_t(output) * num_inputs + first) / 2;
    const uint8_t* exponents = scales + (size_t(output) * num_inputs + first) / kInputs;
    Group group{};
    for (int i = 0; i < count; ++i) group.numbers[i] = from[i / 2] >> i % 2 * 4 & 15;
    for (int piece = 0; piece < count / kInputs; ++piece) group.scales[piece] = half_of(exponents[piece]);
    return group;
  }
  // 2^(exponent - 128).
  static uint16_t half_of(uint8_t exponent) {
    if (exponent == 255) return 0x7fc0;
    return exponent > 1 ? uint16_t((exponent - 1) << 7) : uint16_t(0x20 << exponent);  // the smallest are subnormal
  }
};

inline float mxfp4_value(int number, uint16_t half_scale) {
  constexpr float kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
  return kDoubled[number] * from_bf16(half_scale);
}

// Weight `input` of a column, dequantised.
inline float mxfp4_weight(const Matrix& matrix, int column, int input) {
  const Grouped weight = grouped(matrix, column, input);
  const bool is_first = input % kGroupInputs < MxWeights::kInputs;
  return mxfp4_value(weight.number, uint16_t(is_first ? weight.worth : weight.worth >> 16));
}

}  // namespace triptych
