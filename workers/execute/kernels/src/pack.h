// From a checkpoint's matrix [outputs][inputs] to blocks of 64 columns.
//
// A block is [steps][64 columns] groups of 32 bits, a step being as many inputs as a group holds, so that the four
// vectors of a step are one contiguous run of 256 bytes. What is not written stays zero: padded columns and inputs.
#pragma once

#include "abi.h"
#include "formats.h"

namespace triptych {

// Output n of the source becomes column first + n / run * 64 + n % run: `run` is 64 for matrices side by side, and 32
// for gate and up columns that share blocks.
struct Placement {
  int32_t first;
  int32_t run;
  int column(int n) const { return first + n / run * 64 + n % run; }
};

inline float element(const float* source, size_t i) { return source[i]; }
inline float element(const uint16_t* source, size_t i) { return from_bf16(source[i]); }

template <class Format, class Source>
void pack_row(Matrix& matrix, const Source* row, int column) {
  using Element = typename Format::Element;
  constexpr int kGroup = Format::kGroup;
  const int steps = (matrix.num_inputs + kGroup - 1) / kGroup;
  auto* block = reinterpret_cast<Element*>(matrix.blocks + size_t(column / 64) * steps * 64);
  Element* place = block + column % 64 * kGroup;
  for (int k = 0; k < matrix.num_inputs; ++k)
    place[k / kGroup * 64 * kGroup + k % kGroup] = narrow(element(row, k), Element{});
}

// Symmetric: the greatest weight of the column becomes 127.
template <class Source>
void quantise_row(Matrix& matrix, const Source* row, int column) {
  const int steps = (matrix.num_inputs + 3) / 4;
  auto* place = reinterpret_cast<int8_t*>(matrix.blocks + size_t(column / 64) * steps * 64 + column % 64);
  float limit = 1e-30f;
  for (int k = 0; k < matrix.num_inputs; ++k) limit = std::max(limit, std::fabs(element(row, k)));
  int32_t total = 0;
  for (int k = 0; k < matrix.num_inputs; ++k) {
    const int32_t value = int32_t(std::lrintf(element(row, k) * (127.0f / limit)));
    place[k / 4 * 256 + k % 4] = int8_t(value);
    total += value;
  }
  matrix.scales[column] = limit / 127.0f;
  matrix.offsets[column] = 128 * total;
}

template <class Source>
void pack(int format, Matrix& matrix, const Source* source, Placement placement, int begin, int end) {
  for (int n = begin; n < end; ++n) {
    const Source* row = source + size_t(n) * matrix.num_inputs;
    const int column = placement.column(n);
    if (format == kFloat32) {
      pack_row<Float32>(matrix, row, column);
    } else if (format == kBFloat16) {
      pack_row<BFloat16>(matrix, row, column);
    } else {
      quantise_row(matrix, row, column);
    }
  }
}

}  // namespace triptych
