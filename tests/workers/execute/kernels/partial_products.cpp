// Single products of bytes, without the decoders, which take most of the time to compile.
#include "entries.h"

using namespace triptych;

template void Entries<Int8>::multiply_floats(const Matrix&, const float*, int, float*);
