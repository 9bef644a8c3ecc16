// Four-bit weights: how groups are quantised, and how they are laid out. See int4.h for the format.
#pragma once

#include <algorithm>

#include "abi.h"
#include "int4.h"

namespace triptych {

// The weights of a group of 64 or 32, and how much the error of each matters.
template <int kInputs>
struct Group {
  static constexpr int kVectors = kInputs / kLanes;
  Floats weights[kVectors] = {};
  Floats importance[kVectors] = {};
};

// Of a group: the sum of the importance of all weights, and that of the weights, each times its importance.
struct Totals {
  float count, values;
  template <int kInputs>
  explicit Totals(const Group<kInputs>& group) {
    Floats sums[2] = {};
    for (int v = 0; v < group.kVectors; ++v) {
      sums[0] = sums[0] + group.importance[v];
      sums[1] = fma(group.importance[v], group.weights[v], sums[1]);
    }
    count = sum(sums[0]), values = sum(sums[1]);
  }
};

// A quantised group: its numbers, with scale and least value rounded to bfloat16.
template <int kInputs>
struct Quantised {
  static constexpr int kVectors = kInputs / kLanes;
  Floats numbers[kVectors];
  float scale, least;

  // Rounds every weight to the nearest of the 16 values.
  void assign(const Group<kInputs>& group, float new_scale, float new_least) {
    scale = from_bf16(to_bf16(new_scale));
    least = from_bf16(to_bf16(new_least));
    const Floats start = broadcast(least), factor = broadcast(scale > 0 ? 1 / scale : 0);
    const Floats rounder = broadcast(kRounder), none = broadcast(0.0f), most = broadcast(15.0f);
    for (int v = 0; v < kVectors; ++v)
      numbers[v] = min(max((group.weights[v] - start) * factor, none), most) + rounder - rounder;
  }

  // The sum of the squares of all errors, each times its importance.
  float error(const Group<kInputs>& group) const {
    const Floats unit = broadcast(scale), start = broadcast(least);
    Floats squares = broadcast(0.0f);
    for (int v = 0; v < kVectors; ++v) {
      const Floats difference = group.weights[v] - fma(numbers[v], unit, start);
      squares = fma(difference * group.importance[v], difference, squares);
    }
    return sum(squares);
  }

  // Reassigns with the scale and least value that fit the current numbers best, by least squares.
  void refine(const Group<kInputs>& group, const Totals& totals) {
    Floats sums[3] = {};
    for (int v = 0; v < kVectors; ++v) {
      const Floats counted = group.importance[v] * numbers[v];
      sums[0] = sums[0] + counted;
      sums[1] = fma(counted, numbers[v], sums[1]);
      sums[2] = fma(counted, group.weights[v], sums[2]);
    }
    const float ones = sum(sums[0]), squares = sum(sums[1]), products = sum(sums[2]);
    const float spread = totals.count * squares - ones * ones;
    if (!(spread > 0)) return;
    const float slope = (totals.count * products - ones * totals.values) / spread;
    assign(group, slope, (totals.values - slope * ones) / totals.count);
  }

  uint8_t number(int i) const { return uint8_t(reinterpret_cast<const float*>(numbers)[i]); }
  uint32_t worth(int) const { return to_bf16(scale) | uint32_t{to_bf16(least)} << 16; }
};

// Spreading sixteen values from the smallest to the largest weight wastes some on the few weights at both ends. So
// narrower ranges are tried too, refined by least squares a few times, and the best one is used. The weights may also
// be multiples of one number already, of which they need not use all sixteen. If a weight is infinite or NaN, the scale
// is NaN.
template <int kInputs>
inline Quantised<kInputs> quantise(const Group<kInputs>& group) {
  const Floats* const weights = group.weights;
  Floats low = weights[0], high = weights[0], zeros = broadcast(0.0f);
  for (int v = 0; v < group.kVectors; ++v) {
    low = min(low, weights[v]);
    high = max(high, weights[v]);
    zeros = zeros + (weights[v] - weights[v]);
  }
  const float least = -greatest(broadcast(0.0f) - low), range = greatest(high) - least + sum(zeros);
  constexpr float kShares[] = {0.95f, 0.8f};  // of the range
  constexpr int kRefinements = 4;  // more gain little
  const Totals totals(group);
  Quantised<kInputs> best, others[2];
  best.assign(group, range / 15, least);
  float least_error = best.error(group);
  const auto compare = [&](const Quantised<kInputs>& other) {
    const float error = other.error(group);
    if (error < least_error) best = other, least_error = error;
  };
  for (int k = 0; k < 2; ++k) others[k].assign(group, kShares[k] * range / 15, least + (1 - kShares[k]) / 2 * range);
  for (int i = 0; i < kRefinements; ++i)  // alternately, as each waits for its own sums
    for (Quantised<kInputs>& other : others) other.refine(group, totals);
  for (const Quantised<kInputs>& other : others) compare(other);
  if (kInputs < kGroupInputs)
    for (int steps = 14; steps >= 8; --steps) {
      others[0].assign(group, range / float(steps), least);
      others[0].refine(group, totals);
      compare(others[0]);
    }
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

// Rows of a checkpoint's weights, and how much each input matters: [num_inputs], or null if all matter alike.
template <class Source>
struct WeighedRows {
  const Source* rows;
  const float* importance;
  int num_inputs;

  // Quantises one group of a row. Missing inputs repeat existing ones, so that they take up none of the 16 values.
  template <int kInputs>
  Quantised<kInputs> quantise(int row, int index) const {
    Group<kInputs> group;
    const int first = index * kInputs, count = std::min(kInputs, num_inputs - first);
    if (count <= 0) return triptych::quantise(group);
    auto *weights = reinterpret_cast<float*>(group.weights), *own = reinterpret_cast<float*>(group.importance);
    convert(rows + size_t(row) * num_inputs + first, count, weights);
    std::fill_n(own, count, 1.0f);
    if (importance) std::copy_n(importance + first, count, own);
    for (int i = count; i < kInputs; ++i) weights[i] = weights[i - count], own[i] = own[i - count];
    return triptych::quantise(group);
  }
};

// 64 inputs in groups of 32.
struct Halves {
  Quantised<32> half[2];
  template <class Source>
  static Halves of(const WeighedRows<Source>& rows, int row, int index) {
    return {{rows.template quantise<32>(row, 2 * index), rows.template quantise<32>(row, 2 * index + 1)}};
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
