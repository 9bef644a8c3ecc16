// Four-bit weights too, whose activations are bytes as well.
#include "entries.h"

template struct triptych::Entries<triptych::Int8>;
