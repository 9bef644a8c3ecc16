// What of the kernels uses tile registers, for tests: all of bfloat16, and single products of bytes. Decoders in other
// formats would take twice as long to compile as all of this.
#include "entries.h"

using namespace triptych;

template void Entries<Int8>::multiply_floats(const Matrix&, const float*, int, float*);
