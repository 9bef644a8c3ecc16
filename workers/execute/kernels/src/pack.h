// From a checkpoint's matrix [outputs][inputs] to blocks of 64 columns.
//
// A block is [steps][64 columns] groups of 32 bits, a step being as many inputs as a group holds, so that the four
// vectors of a step are one contiguous run of 256 bytes. What is not written stays zero: padded columns and inputs.
//
// This is a transposition. It is done by strips of up to 16 outputs, whose groups of one step lie side by side and fill
// a cache line, and some steps at a time, so that the rows of a strip stay in the L1 cache meanwhile.
#pragma once

#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "int4.h"

namespace triptych {

// Output n of the source becomes column first + n / run * 64 + n % run: `run` is 64 for matrices side by side, and 32
// for gate and up columns that share blocks.
struct Placement {
  int32_t first;
  int32_t run;
  int column(int n) const { return first + n / run * 64 + n % run; }
  // How many of the outputs n..end become columns of one vector, side by side.
  int strip(int n, int end) const { return std::min({end - n, run - n % run, kLanes - column(n) % kLanes}); }
};

inline float widen(float value) { return value; }
inline float widen(uint16_t value) { return from_bf16(value); }

// Weights as the format has them.
template <class Element, class Source>
inline void convert(const Source* from, int count, Element* to) {
  if constexpr (std::is_same<Element, Source>::value) {
    std::memcpy(to, from, count * sizeof(Element));
  } else {
    for (int i = 0; i < count; ++i) to[i] = narrow(widen(from[i]), Element{});
  }
}

template <class Source>
inline float greatest_magnitude(const Source* row, int count) {
  float tops[kLanes];
  std::fill_n(tops, kLanes, 1e-30f);
  const auto add = [&](int lane, float value) {
    value = std::fabs(value);
    tops[lane] = value > tops[lane] ? value : tops[lane];
  };
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) add(lane, widen(row[i + lane]));
  for (int i = whole; i < count; ++i) add(i - whole, widen(row[i]));
  return greatest(load<Floats>(tops));
}

// How the outputs of a strip are written: as they are, or in int8, where the greatest weight of a column becomes 127.
template <class Format>
struct Narrowing {
  Narrowing(const Matrix&, int) {}
  template <class Source>
  void begin(int, const Source*) {}
  template <class Source>
  void operator()(int, const Source* from, int count, uint32_t* groups) {
    convert(from, count, reinterpret_cast<typename Format::Element*>(groups));
  }
  void end(int) {}
};

template <>
struct Narrowing<Int8> {
  const Matrix& matrix;
  const int column;
  float limits[kLanes];
  int32_t totals[kLanes] = {};

  Narrowing(const Matrix& matrix, int column) : matrix(matrix), column(column) {}
  template <class Source>
  void begin(int r, const Source* row) {
    limits[r] = greatest_magnitude(row, matrix.num_inputs);
  }
  template <class Source>
  void operator()(int r, const Source* from, int count, uint32_t* groups) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, found in the lowest bits
    auto* to = reinterpret_cast<int8_t*>(groups);
    const float factor = 127.0f / limits[r];
    int32_t total = 0;
    for (int i = 0; i < count; ++i) {
      const float shifted = widen(from[i]) * factor + kMagic;
      int32_t bits;
      std::memcpy(&bits, &shifted, sizeof bits);
      to[i] = int8_t(bits);
      total += to[i];
    }
    totals[r] += total;
  }
  void end(int r) {
    matrix.scales[column + r] = limits[r] / 127.0f;
    static_cast<int32_t*>(matrix.offsets)[column + r] = 128 * totals[r];
  }
};

// A group of four-bit weights, see int4.h: the numbers, and what they are worth, both rounded to bfloat16.
struct Quantised {
  static constexpr int kVectors = kGroupInputs / kLanes;
  Floats numbers[kVectors];
  float scale, least, error;  // the sum of squares

  // Every weight as the nearest of the 16 values.
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

  // The same with the scale and the least value that suit the numbers it has best, in the sense of least squares.
  void refine(const Floats* weights) {
    Floats totals[4] = {};
    for (int v = 0; v < kVectors; ++v) {
      totals[0] = totals[0] + numbers[v];
      totals[1] = fma(numbers[v], numbers[v], totals[1]);
      totals[2] = totals[2] + weights[v];
      totals[3] = fma(numbers[v], weights[v], totals[3]);
    }
    const float ones = sum(totals[0]), squares = sum(totals[1]), values = sum(totals[2]), products = sum(totals[3]);
    const float spread = kGroupInputs * squares - ones * ones;
    if (!(spread > 0)) return;
    const float slope = (kGroupInputs * products - ones * values) / spread;
    assign(weights, slope, (values - slope * ones) / kGroupInputs);
  }

  float value(int i) const { return scale * reinterpret_cast<const float*>(numbers)[i] + least; }
};

// Sixteen values from the least to the greatest weight waste some on the few at both ends. Of some narrower ranges,
// each moved to where its errors are least, the best is taken.
inline Quantised quantise(const Floats* weights) {
  Floats low = weights[0], high = weights[0];
  for (int v = 1; v < Quantised::kVectors; ++v) {
    low = min(low, weights[v]);
    high = max(high, weights[v]);
  }
  const float least = -greatest(broadcast(0.0f) - low), range = greatest(high) - least;
  Quantised best, group;
  best.assign(weights, range / 15, least);
  for (float part : {1.0f, 0.9f, 0.8f, 0.7f}) {
    group.assign(weights, part * range / 15, least + (1 - part) / 2 * range);
    group.refine(weights);
    if (group.error < best.error) best = group;
  }
  return best;
}

// `count` outputs of the source, from `rows` on, become as many columns of one vector.
template <class Format, class Source>
void pack_strip(const Matrix& matrix, const Source* rows, int column, int count) {
  constexpr int kGroup = Format::kGroup, kSteps = 128;
  const int num_inputs = matrix.num_inputs, steps = (num_inputs + kGroup - 1) / kGroup;
  uint32_t* place = matrix.blocks + size_t(column / 64) * steps * 64 + column % 64;
  alignas(64) uint32_t groups[kLanes][kSteps];
  Narrowing<Format> narrow_row(matrix, column);
  for (int r = 0; r < count; ++r) narrow_row.begin(r, rows + size_t(r) * num_inputs);
  for (int step = 0; step < steps; step += kSteps) {
    const int first = step * kGroup, num_steps = std::min(kSteps, steps - step);
    const int num_elements = std::min(num_steps * kGroup, num_inputs - first);
    for (int r = 0; r < count; ++r) {
      groups[r][num_steps - 1] = 0;  // the last group may lack inputs
      narrow_row(r, rows + size_t(r) * num_inputs + first, num_elements, groups[r]);
    }
    const auto transpose = [&](int width) {
      for (int k = 0; k < num_steps; ++k, place += 64)
        for (int r = 0; r < width; ++r) place[r] = groups[r][k];
    };
    count == kLanes ? transpose(kLanes) : transpose(count);
  }
  for (int r = 0; r < count; ++r) narrow_row.end(r);
}

// The groups of `count` columns of one vector, group_of(row, group). What stands for inputs that a group lacks does not
// matter: their activations are zeros, and offsets take back what these are more.
template <class GroupOf>
void pack_groups(const Matrix& matrix, int column, int count, const GroupOf& group_of) {
  const int num_groups = num_groups_of(matrix.num_inputs);
  uint32_t* place = matrix.blocks + size_t(column / 64) * num_groups * kGroupSteps * 64 + column % 64;
  double totals[kLanes] = {};
  for (int index = 0; index < num_groups; ++index, place += kGroupSteps * 64)
    for (int r = 0; r < count; ++r) {
      const Quantised group = group_of(r, index);
      uint8_t numbers[kGroupInputs];
      for (int i = 0; i < kGroupInputs; ++i) {
        numbers[i] = uint8_t(reinterpret_cast<const float*>(group.numbers)[i]);
        totals[r] += group.value(i);
      }
      for (int step = 0; step < kWeightSteps; ++step) {
        uint32_t low, high;
        std::memcpy(&low, numbers + step * Int4::kGroup, sizeof low);
        std::memcpy(&high, numbers + step * Int4::kGroup + 4, sizeof high);
        place[step * 64 + r] = low | high << 4;
      }
      place[kWeightSteps * 64 + r] = to_bf16(group.scale) | uint32_t{to_bf16(group.least)} << 16;
    }
  for (int r = 0; r < count; ++r) static_cast<float*>(matrix.offsets)[column + r] = float(128 * totals[r]);
}

// A group of a checkpoint's weights.
template <class Source>
Quantised quantise(const Source* row, int num_inputs, int group) {
  Floats weights[Quantised::kVectors] = {};
  const int first = group * kGroupInputs;
  convert(row + first, std::min(kGroupInputs, num_inputs - first), reinterpret_cast<float*>(weights));
  return quantise(weights);
}

// A matrix that has four bits already.
struct FourBits {
  const uint8_t* numbers;  // [outputs][inputs] of 0..15
  const float* scales;     // [outputs][groups]
  const float* least;      // [outputs][groups]

  Quantised group(int output, int num_inputs, int index) const {
    const int first = index * kGroupInputs, count = std::min(kGroupInputs, num_inputs - first);
    const size_t worth = size_t(output) * num_groups_of(num_inputs) + index;
    Quantised group{};
    for (int i = 0; i < count; ++i)
      reinterpret_cast<float*>(group.numbers)[i] = numbers[size_t(output) * num_inputs + first + i];
    group.scale = from_bf16(to_bf16(scales[worth]));
    group.least = from_bf16(to_bf16(least[worth]));
    return group;
  }
};

inline void pack(const Matrix& matrix, const FourBits& source, Placement placement, int begin, int end) {
  for (int n = begin, count; n < end; n += count) {
    count = placement.strip(n, end);
    pack_groups(matrix, placement.column(n), count,
                [&](int r, int group) { return source.group(n + r, matrix.num_inputs, group); });
  }
}

template <class Format, class Source>
void pack(const Matrix& matrix, const Source* source, Placement placement, int begin, int end) {
  for (int n = begin, count; n < end; n += count) {
    count = placement.strip(n, end);
    const Source* rows = source + size_t(n) * matrix.num_inputs;
    if constexpr (std::is_same<Format, Int4>::value) {
      pack_groups(matrix, placement.column(n), count, [&](int r, int group) {
        return quantise(rows + size_t(r) * matrix.num_inputs, matrix.num_inputs, group);
      });
    } else {
      pack_strip<Format>(matrix, rows, placement.column(n), count);
    }
  }
}

template <class Source>
void pack(const Matrix& matrix, const Source* source, Placement placement, int begin, int end) {
  switch (matrix.format) {
    case kInt4: return pack<Int4>(matrix, source, placement, begin, end);
    case kFloat32: return pack<Float32>(matrix, source, placement, begin, end);
    case kBFloat16: return pack<BFloat16>(matrix, source, placement, begin, end);
    default: return pack<Int8>(matrix, source, placement, begin, end);
  }
}

// What weight `input` of a column in eight or four bits stands for.
inline float weight_of(const Matrix& matrix, int column, int input) {
  const int num_inputs = matrix.num_inputs, place = input % kGroupInputs;
  const size_t block = column / 64;
  const uint32_t* start = matrix.blocks + column % 64;
  if (matrix.format == kInt8) {
    start += (block * ((num_inputs + Int8::kGroup - 1) / Int8::kGroup) + input / Int8::kGroup) * 64;
    return matrix.scales[column] * reinterpret_cast<const int8_t*>(start)[input % Int8::kGroup];
  }
  start += (block * num_groups_of(num_inputs) + input / kGroupInputs) * kGroupSteps * 64;
  const uint32_t worth = start[kWeightSteps * 64], numbers = start[place / Int4::kGroup * 64];
  const int shift = 8 * (place % 4) + place % Int4::kGroup / 4 * 4;
  return from_bf16(uint16_t(worth)) * float(numbers >> shift & 15) + from_bf16(uint16_t(worth >> 16));
}

// Outputs begin..end as a checkpoint has them: the opposite of pack. Those of a strip share cache lines.
inline void unpack(const Matrix& matrix, Placement placement, int begin, int end, float* to) {
  for (int n = begin, count; n < end; n += count) {
    count = placement.strip(n, end);
    for (int input = 0; input < matrix.num_inputs; ++input)
      for (int r = 0; r < count; ++r)
        to[size_t(n + r) * matrix.num_inputs + input] = weight_of(matrix, placement.column(n) + r, input);
  }
}

}  // namespace triptych
