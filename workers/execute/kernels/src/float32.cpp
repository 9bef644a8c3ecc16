#include "entries.h"

template struct triptych::Entries<triptych::Float32>;
