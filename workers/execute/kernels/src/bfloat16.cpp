#include "entries.h"

template struct triptych::Entries<triptych::BFloat16>;
