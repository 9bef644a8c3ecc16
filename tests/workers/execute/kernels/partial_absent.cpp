// Stands in for what is not built.
#include <cstdlib>

#include "matmul.h"

namespace triptych {

class Decoder;

template <class Format>
struct Entries {
  static Decoder* new_decoder(const Model& model, const Sharing& sharing);
  static void multiply_floats(const Matrix& matrix, const float* x, int num_rows, float* y);
};

template <>
Decoder* Entries<Int8>::new_decoder(const Model&, const Sharing&) { std::abort(); }
template <>
Decoder* Entries<Float32>::new_decoder(const Model&, const Sharing&) { std::abort(); }
#if !__has_include("partial_products.inc")
template <>
void Entries<Int8>::multiply_floats(const Matrix&, const float*, int, float*) { std::abort(); }
#endif
template <>
void Entries<Float32>::multiply_floats(const Matrix&, const float*, int, float*) { std::abort(); }

template <>
void TileSums<Int8>::find(Accumulators*, const Tile&) { std::abort(); }

}  // namespace triptych
