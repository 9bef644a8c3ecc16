// Four-bit weights: how groups are quantised, and how they are laid out. See int4.h for the format.
#pragma once

#include <algorithm>

#include "abi.h"
#include "int4.h"

namespace triptych {

// A quantised group of 64 or 32: its numbers, with scale and least value rounded to bfloat16.
template <int kInputs>
struct Quantised {
  static constexpr int kVectors = kInputs / kLanes;
  Floats numbers[kVectors];
  float scale, least, error;  // error: sum of squares

  // Rounds every weight to the nearest of the 16 values.
  void assign(const Floats* weights, float new_scale, float new_least) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    scale = from_bf16(to_bf16(new_scale));
    least = from_bf16(to_bf16(new_least));
    const Floats unit = broadcast(scale), start = broadcast(least), factor = broadcast(scale > 0 ? 1 / scale : 0);
    const Floats magic = broadcast(kMagic), none = broadcast(0.0f), most = broadcast(15.0f);
    Floats squares = none;
    for (int v = 0; v < kVectors; ++v) {
      numbers[v] = min(max((weights[v] - start) * factor, none), most) + magic - magic;
      const Floats difference = weights[v] - fma(numbers[v], unit, start);
      squares = fma(difference, difference, squares);
    }
    error = sum(squares);
  }

  // Reassigns with the scale and least value that fit the current numbers best, by least squares.
  void refine(const Floats* weights) {
    Floats totals[4] = {};
    for (int v = 0; v < kVectors; ++v) {
      totals[0] = totals[0] + numbers[v];
      totals[1] = fma(numbers[v], numbers[v], totals[1]);
      totals[2] = totals[2] + weights[v];
      totals[3] = fma(numbers[v], weights[v], totals[3]);
    }
    const float ones = sum(totals[0]), squares = sum(totals[1]), values = sum(totals[2]), products = sum(totals[3]);
    const float spread = kInputs * squares - ones * ones;
    if (!(spread > 0)) return;
    const float slope = (kInputs * products - ones * values) / spread;
    assign(weights, slope, (values - slope * ones) / kInputs);
  }

  uint8_t number(int i) const { return uint8_t(reinterpret_cast<const float*>(numbers)[i]); }
  uint32_t worth(int) const { return to_bf16(scale) | uint32_t{to_bf16(least)} << 16; }
};

// Spreading sixteen values from the smallest to the largest weight wastes some on the few weights at both ends. So
// several narrower ranges are tried, each refined by least squares, and the best one is used. The weights may also be
// multiples of one number already, of which they need not use all sixteen. If a weight is infinite or NaN, the scale is
// NaN.
template <int kInputs>
inline Quantised<kInputs> quantise(const Floats* weights) {
  using Group = Quantised<kInputs>;
  Floats low = weights[0], high = weights[0], zeros = broadcast(0.0f);
  for (int v = 0; v < Group::kVectors; ++v) {
    low = min(low, weights[v]);
    high = max(high, weights[v]);
    zeros = zeros + (weights[v] - weights[v]);
  }
  const float least = -greatest(broadcast(0.0f) - low), range = greatest(high) - least + sum(zeros);
  Group best, group;
  best.assign(weights, range / 15, least);
  const auto attempt = [&](float scale, float start) {
    group.assign(weights, scale, start);
    group.refine(weights);
    if (group.error < best.error) best = group;
  };
  for (float part : {1.0f, 0.9f, 0.8f, 0.7f}) attempt(part * range / 15, least + (1 - part) / 2 * range);
  if (kInputs < kGroupInputs)
    for (int steps = 14; steps >= 8; --steps) attempt(range / float(steps), least);
  return best;
}

// Packs the groups of `count` columns of one vector; group_of(row, group) returns a group. The contents of missing
// inputs do not matter: their activations are zeros.
template <class GroupOf>
void pack_groups(const Matrix& matrix, int column, int count, const GroupOf& group_of) {
  const int num_groups = num_groups_of(matrix.num_inputs), group_steps = group_steps_of(matrix.format);
  uint32_t* place = matrix.blocks + size_t(column / 64) * num_groups * group_steps * 64 + column % 64;
  for (int index = 0; index < num_groups; ++index, place += group_steps * 64)
    for (int r = 0; r < count; ++r) {
      const auto group = group_of(r, index);
      uint8_t numbers[kGroupInputs];
      for (int i = 0; i < kGroupInputs; ++i) numbers[i] = group.number(i);
      for (int step = 0; step < kWeightSteps; ++step) {
        uint32_t low, high;
        std::memcpy(&low, numbers + step * Int4::kGroup, sizeof low);
        std::memcpy(&high, numbers + step * Int4::kGroup + 4, sizeof high);
        place[step * 64 + r] = low | high << 4;
      }
      for (int step = kWeightSteps; step < group_steps; ++step) place[step * 64 + r] = group.worth(step - kWeightSteps);
    }
}

// Quantises one group of a checkpoint's weights. Missing inputs repeat existing ones, so that they take up none of the
// 16 values.
template <int kInputs, class Source>
Quantised<kInputs> quantise(const Source* row, int num_inputs, int group) {
  Floats weights[Quantised<kInputs>::kVectors] = {};
  float* const values = reinterpret_cast<float*>(weights);
  const int first = group * kInputs, count = std::min(kInputs, num_inputs - first);
  if (count <= 0) return quantise<kInputs>(weights);
  convert(row + first, count, values);
  for (int i = count; i < kInputs; ++i) values[i] = values[i - count];
  return quantise<kInputs>(weights);
}

// 64 inputs in groups of 32.
struct Halves {
  Quantised<32> half[2];
  template <class Source>
  static Halves of(const Source* row, int num_inputs, int group) {
    return {{quantise<32>(row, num_inputs, 2 * group), quantise<32>(row, num_inputs, 2 * group + 1)}};
  }
  uint8_t number(int i) const { return half[i / 32].number(i % 32); }
  uint32_t worth(int step) const { return half[step].worth(0); }
};

// A matrix that is already in four bits, in groups of 64 or 32.
template <int kInputs>
struct FourBits {
  const uint8_t* numbers;  // [outputs][inputs] of 0..15
  const float* scales;     // [outputs][groups]
  const float* least;      // [outputs][groups]

  // 64 inputs.
  auto group(int output, int num_inputs, int index) const {
    if constexpr (kInputs == kGroupInputs)
      return stored(output, num_inputs, index);
    else
      return Halves{{stored(output, num_inputs, 2 * index), stored(output, num_inputs, 2 * index + 1)}};
  }
  Quantised<kInputs> stored(int output, int num_inputs, int index) const {
    const int first = index * kInputs, count = std::min(kInputs, num_inputs - first);
    Quantised<kInputs> group{};
    if (count <= 0) return group;
    const size_t worth = size_t(output) * ((num_inputs + kInputs - 1) / kInputs) + index;
    for (int i = 0; i < count; ++i)
      reinterpret_cast<float*>(group.numbers)[i] = numbers[size_t(output) * num_inputs + first + i];
    group.scale = from_bf16(to_bf16(scales[worth]));
    group.least = from_bf16(to_bf16(least[worth]));
    return group;
  }
};

// Weight `input` of a column as stored: its number, and the parameters of its group.
struct Grouped {
  int number;
  uint32_t worth;
};
inline Grouped grouped(const Matrix& matrix, int column, int input) {
  const size_t num_groups = num_groups_of(matrix.num_inputs), group_steps = group_steps_of(matrix.format);
  const uint32_t* group =
      matrix.blocks + (column / 64 * num_groups + input / kGroupInputs) * group_steps * 64 + column % 64;
  const int worth_step = matrix.format == kFineInt4 && input % kGroupInputs >= 32 ? 1 : 0;
  const int place = input % kGroupInputs, shift = 8 * (place % 4) + place % Int4::kGroup / 4 * 4;
  return {int(group[place / Int4::kGroup * 64] >> shift & 15), group[(kWeightSteps + worth_step) * 64]};
}

// The same weight, dequantised.
inline float int4_weight(const Matrix& matrix, int column, int input) {
  const Grouped weight = grouped(matrix, column, input);
  return from_bf16(uint16_t(weight.worth)) * float(weight.number) + from_bf16(uint16_t(weight.worth >> 16));
}

}  // namespace triptych
