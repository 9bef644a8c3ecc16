// Also for four-bit weights, whose activations are bytes too.
#include "entries.h"

template struct triptych::TileSums<triptych::Int8>;
template struct triptych::Entries<triptych::Int8>;
