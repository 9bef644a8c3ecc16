// Packs a checkpoint's matrix [outputs][inputs] into blocks of 64 columns.
//
// A block is [steps][64 columns] of 32-bit groups. A step covers as many inputs as a group holds, so its four vectors
// are 256 contiguous bytes. Padded columns and inputs are not written and stay zero.
//
// This is a transposition. It is done in strips of up to 16 outputs, whose groups of one step are adjacent and fill a
// cache line, and a number of steps at a time, so that the rows of a strip stay in the L1 cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "hadamard.h"
#include "pack_mxfp4.h"

namespace triptych {

// Output n of the source becomes column first + n / run * 64 + n % run. `run` is 64 for matrices side by side, and 32
// for gate and up columns, which share blocks.
struct Placement {
  int32_t first;
  int32_t run;
  int column(int n) const { return first + n / run * 64 + n % run; }
  // How many of the outputs n..end become adjacent columns of one vector.
  int strip(int n, int end) const { return std::min({end - n, run - n % run, kLanes - column(n) % kLanes}); }
};

// Returns NaN if the row contains one: interpreted as integers, the bits of floats are ordered by magnitude, with NaNs
// above all numbers.
template <class Source>
inline float greatest_magnitude(const Source* row, int count) {
  constexpr float kLeast = 1e-30f;
  int32_t tops[kLanes], least;
  std::memcpy(&least, &kLeast, sizeof least);
  std::fill_n(tops, kLanes, least);
  const auto add = [&](int lane, float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    tops[lane] = std::max(tops[lane], bits & 0x7fffffff);
  };
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) add(lane, widen(row[i + lane]));
  for (int i = whole; i < count; ++i) add(i - whole, widen(row[i]));
  float top;
  std::memcpy(&top, std::max_element(tops, tops + kLanes), sizeof top);
  return top;
}

// How the outputs of a strip are stored: converted, or quantised to int8, with the largest weight of a column as 127.
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
    auto* to = reinterpret_cast<int8_t*>(groups);
    const float factor = 127.0f / limits[r];
    int32_t total = 0;
    for (int i = 0; i < count; ++i) {
      const float shifted = widen(from[i]) * factor + kRounder;
      int32_t bits;
      std::memcpy(&bits, &shifted, sizeof bits);
      to[i] = int8_t(bits);
      total += to[i];
    }
    totals[r] += total;
  }
  void end(int r) {
    matrix.scales[column + r] = limits[r] / 127.0f / float(hadamard_block(matrix.num_inputs));
    matrix.offsets[column + r] = 128 * totals[r];
  }
};

// Packs `count` outputs of the source, from `rows` on, into as many columns of one vector.
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
      groups[r][num_steps - 1] = 0;  // the last group may be partial
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

// `Source` is FourBits or MxWeights.
template <class Source>
void pack_stored(const Matrix& matrix, const Source& source, Placement placement, int begin, int end) {
  for (int n = begin, count; n < end; n += count) {
    count = placement.strip(n, end);
    pack_groups(matrix, placement.column(n), count,
                [&](int r, int group) { return source.group(n + r, matrix.num_inputs, group); });
  }
}

// Rows of a matrix in int8, whose inputs are transformed.
template <class Source>
std::vector<float> transformed(const Source* rows, const Matrix& matrix, int count) {
  std::vector<float> result(size_t(count) * matrix.num_inputs);
  convert(rows, int(result.size()), result.data());
  transform(result.data(), result.data(), int(result.size()), hadamard_block(matrix.num_inputs));
  return result;
}

// `importance` of each input matters in four bits only, see WeighedRows.
template <class Format, class Source>
void pack(const Matrix& matrix, const Source* source, const float* importance, Placement placement, int begin,
          int end) {
  for (int n = begin, count; n < end; n += count) {
    count = placement.strip(n, end);
    const Source* rows = source + size_t(n) * matrix.num_inputs;
    const WeighedRows<Source> weighed{rows, importance, matrix.num_inputs};
    if constexpr (std::is_same<Format, Int4>::value) {
      pack_groups(matrix, placement.column(n), count,
                  [&](int r, int group) { return weighed.template quantise<kGroupInputs>(r, group); });
    } else if constexpr (std::is_same<Format, FineInt4>::value) {
      pack_groups(matrix, placement.column(n), count, [&](int r, int group) { return Halves::of(weighed, r, group); });
    } else if constexpr (std::is_same<Format, Int8>::value) {
      pack_strip<Format>(matrix, transformed(rows, matrix, count).data(), placement.column(n), count);
    } else {
      pack_strip<Format>(matrix, rows, placement.column(n), count);
    }
  }
}

template <class Source>
void pack(const Matrix& matrix, const Source* source, const float* importance, Placement placement, int begin,
          int end) {
  switch (matrix.format) {
    case kInt4: return pack<Int4>(matrix, source, importance, placement, begin, end);
    case kFineInt4: return pack<FineInt4>(matrix, source, importance, placement, begin, end);
    case kFloat32: return pack<Float32>(matrix, source, importance, placement, begin, end);
    case kBFloat16: return pack<BFloat16>(matrix, source, importance, placement, begin, end);
    default: return pack<Int8>(matrix, source, importance, placement, begin, end);
  }
}

// Weight `input` of an eight-bit column, dequantised.
inline float byte_weight(const Matrix& matrix, int column, int input) {
  const size_t steps = (matrix.num_inputs + Int8::kGroup - 1) / Int8::kGroup;
  const uint32_t* group = matrix.blocks + (column / 64 * steps + input / Int8::kGroup) * 64 + column % 64;
  return matrix.scales[column] * reinterpret_cast<const int8_t*>(group)[input % Int8::kGroup];
}

inline float float_weight(const Matrix& matrix, int column, int input) {
  const uint32_t* weight = matrix.blocks + (column / 64 * size_t(matrix.num_inputs) + input) * 64 + column % 64;
  return *reinterpret_cast<const float*>(weight);
}

// The inverse of pack, for outputs begin..end. The outputs of a strip share cache lines.
template <class Weight>
void unpack(const Matrix& matrix, Placement placement, int begin, int end, float* to, const Weight& weight) {
  for (int n = begin, count; n < end; n += count) {
    count = placement.strip(n, end);
    float* const rows = to + size_t(n) * matrix.num_inputs;
    for (int input = 0; input < matrix.num_inputs; ++input)
      for (int r = 0; r < count; ++r)
        rows[size_t(r) * matrix.num_inputs + input] = weight(matrix, placement.column(n) + r, input);
    if (matrix.format == kInt8) transform(rows, rows, count * matrix.num_inputs, hadamard_block(matrix.num_inputs));
  }
}

inline void unpack(const Matrix& matrix, Placement placement, int begin, int end, float* to) {
  const auto with = [&](const auto& weight) { unpack(matrix, placement, begin, end, to, weight); };
  switch (matrix.format) {
    case kInt4:
    case kFineInt4: return with([](const auto&... of) { return int4_weight(of...); });
    case kMxfp4: return with([](const auto&... of) { return mxfp4_weight(of...); });
    case kFloat32: return with([](const auto&... of) { return float_weight(of...); });
    default: return with([](const auto&... of) { return byte_weight(of...); });
  }
}

// The Euclidean length of a vector, added up in lanes that compilers find.
template <class At>
inline double length(int count, const At& at) {
  float squares[kLanes] = {};
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) squares[lane] += at(i + lane) * at(i + lane);
  for (int i = whole; i < count; ++i) squares[i - whole] += at(i) * at(i);
  return std::sqrt(std::accumulate(squares, squares + kLanes, 0.0));
}

// Packs outputs begin..end of the copy of the head in eight bits, and finds by how much its logits may differ from those
// of the weights w in `source`, as multiples of the size of x (see Screen): |w x - v y| <= |w - v| |x| + |v| |x - y|,
// where v are the packed weights and y is x in bytes twice, and what sums in float lose. Lengths are those of
// transformed weights, which are longer by a factor, before and after they become bytes.
template <class Source>
void pack_screen(const Matrix& matrix, const Source* source, int begin, int end, float* limits) {
  const int num_inputs = matrix.num_inputs, block = hadamard_block(num_inputs);
  // What is left of a channel is half a unit of the second bytes, whose greatest stands for half a unit of the first.
  const double of_rows = std::sqrt(double(num_inputs)) / (4 * 127 * 127), of_sums = num_inputs * 0x1p-23;
  for (int n = begin; n < end; n += kLanes) {
    const int count = std::min(kLanes, end - n);
    const std::vector<float> rows = transformed(source + size_t(n) * num_inputs, matrix, count);
    pack_strip<Int8>(matrix, rows.data(), n, count);
    for (int r = 0; r < count; ++r) {
      const float* const row = rows.data() + size_t(r) * num_inputs;
      const float scale = matrix.scales[n + r], inverse = 1.0f / (scale * float(block));
      const auto byte = [&](int i) { return (row[i] * inverse + kRounder) - kRounder; };
      const double error = length(num_inputs, [&](int i) { return row[i] * inverse - byte(i); });
      const double size = length(num_inputs, byte);
      limits[n + r] = float(1.01 * scale * std::sqrt(double(block)) * (error + (of_rows + of_sums) * size));
    }
  }
}

}  // namespace triptych
