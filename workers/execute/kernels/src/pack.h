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
#include "formats.h"

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
    matrix.offsets[column + r] = 128 * totals[r];
  }
};

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

template <class Format, class Source>
void pack(const Matrix& matrix, const Source* source, Placement placement, int begin, int end) {
  for (int n = begin, count; n < end; n += count) {
    count = placement.strip(n, end);
    pack_strip<Format>(matrix, source + size_t(n) * matrix.num_inputs, placement.column(n), count);
  }
}

template <class Source>
void pack(int format, const Matrix& matrix, const Source* source, Placement placement, int begin, int end) {
  switch (format) {
    case kFloat32: return pack<Float32>(matrix, source, placement, begin, end);
    case kBFloat16: return pack<BFloat16>(matrix, source, placement, begin, end);
    default: return pack<Int8>(matrix, source, placement, begin, end);
  }
}

}  // namespace triptych
