// Single products of bytes, without the decoders and without products in four bits, which take most of the time to
// compile.
#include "entries.h"

namespace triptych {

template <>
void multiply<Int8, Store>(const Matrix& matrix, const Rows& rows, Range range, const Store& write) {
  multiply_halves<Int8>(matrix, rows, range, write);
}

template void Entries<Int8>::multiply_floats(const Matrix&, const float*, int, float*);

}  // namespace triptych
