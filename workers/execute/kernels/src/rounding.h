// How rows of floats become what a product reads.
#pragma once

#include <numeric>

#include "hadamard.h"
#include "matmul.h"
#include "rounded_bytes.h"

namespace triptych {

// How activations are rounded for a matrix.
struct Rounding {
  enum Kind { kWhole, kInGroups } kind;  // in groups if the weights are in four bits
  int block;       // otherwise, of the transform
  float* scratch;  // room for a row

  Rounding(Kind kind, int num_inputs, float* scratch)
      : kind(kind), block(hadamard_block(num_inputs)), scratch(scratch) {}
};
inline Rounding::Kind rounding_of(const Matrix& matrix) {
  return matrix.format >= kInt4 ? Rounding::kInGroups : Rounding::kWhole;
}

// Converts a row of floats to the form that the next product reads. `count` is a multiple of 64.
template <class Element>
inline void write_row(const float* from, int count, Element* to, float*, const Rounding&) {
  store_all(to, from, count);
}

// For weights in four bits: with a sign, and a unit for each group.
inline void write_groups(const float* from, int count, uint8_t* to, GroupWorth* worth) {
  constexpr int kHalf = kGroupInputs / 2;
  for (int i = 0; i < count; i += kGroupInputs, from += kGroupInputs, to += kGroupInputs, ++worth) {
    const Magnitude magnitude(from, kGroupInputs);
    for (int k = 0; k < kGroupInputs; k += kLanes) store_bytes<0>(to + k, load<Floats>(from + k), magnitude.factor());
    const auto* bytes = reinterpret_cast<const int8_t*>(to);
    for (int half = 0; half < 2; ++half)
      worth->byte_sums[half] = float(std::accumulate(bytes + half * kHalf, bytes + (half + 1) * kHalf, 0));
    worth->unit = magnitude.unit();
    worth->total = worth->unit * (worth->byte_sums[0] + worth->byte_sums[1]);
  }
}

// Adds the squares of the rows that a product reads to those of its matrix, if it has any. At most one thread at a
// time.
inline void add_squares(const Matrix& matrix, const Rows& rows) {
  if (!matrix.squares) return;
  for (int r = rows.first; r < rows.first + rows.count; ++r) {
    const auto* bytes = reinterpret_cast<const int8_t*>(rows.row(r));
    const GroupWorth* worths = rows.worths(r);
    for (int i = 0; i < matrix.num_inputs; ++i) {
      const float x = worths[i / kGroupInputs].unit * float(bytes[i]);
      matrix.squares[i] += x * x;
    }
  }
}

// Dynamic quantisation: one unit for the transformed row, in which all values are shifted by Int8::kExcess.
inline void write_row(const float* from, int count, Int8::Element* to, float* scale, const Rounding& rounding) {
  auto* const bytes = reinterpret_cast<uint8_t*>(to);
  if (rounding.kind == Rounding::kInGroups)
    return write_groups(from, count, bytes, reinterpret_cast<GroupWorth*>(scale));
  const Magnitude magnitude = transform(from, rounding.scratch, count, rounding.block);
  *scale = magnitude.unit();
  for (int i = 0; i < count; i += kLanes)
    store_bytes<Int8::kExcess>(bytes + i, load<Floats>(rounding.scratch + i), magnitude.factor());
}

}  // namespace triptych
