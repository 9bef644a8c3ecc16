// What is instantiated once for each format. Each format is a translation unit of its own: float32.cpp, bfloat16.cpp
// and int8.cpp compile in half the time on two processors that one file with all three would take. What several of
// them need is compiled once: tiles of keys and values in bfloat16 with that format, float products in library.cpp.
#pragma once

#include "decoder.h"

namespace triptych {

template <class Format>
struct Entries {
  // May throw bad_alloc.
  static Decoder* new_decoder(const Model& model, const Sharing& sharing);
  // y [num_rows][64 * num_blocks] = x [num_rows][num_inputs] times the matrix.
  static void multiply_floats(const Matrix& matrix, const float* x, int num_rows, float* y);
};

template <class Format>
Decoder* Entries<Format>::new_decoder(const Model& model, const Sharing& sharing) {
  return new FormatDecoder<Format>(model, sharing);
}

template <class Format>
void Entries<Format>::multiply_floats(const Matrix& matrix, const float* x, int num_rows, float* y) {
  const int width = padded(matrix.num_inputs);
  Operand<Format> operand;
  operand.reserve(num_rows, width);
  Buffer<float> row, scratch;
  row.reserve(width);
  scratch.reserve(width);
  for (int r = 0; r < num_rows; ++r) {
    std::memcpy(row.get(), x + size_t(r) * matrix.num_inputs, matrix.num_inputs * sizeof(float));
    operand.write(r, width, row.get(), {rounding_of(matrix), matrix.num_inputs, scratch.get()});
  }
  multiply<Format>(matrix, operand.rows(num_rows), {0, 2 * matrix.num_blocks},
                   Store{y, size_t(matrix.num_blocks) * 64});
}

extern template struct AttentionTiles<BFloat16>;
extern template struct TileSums<Float32>;
extern template struct TileSums<Int8>;
extern template struct Entries<Float32>;
extern template struct Entries<BFloat16>;
extern template struct Entries<Int8>;

}  // namespace triptych
