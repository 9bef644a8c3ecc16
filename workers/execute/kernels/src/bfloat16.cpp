#include "entries.h"

template struct triptych::AttentionTiles<triptych::BFloat16>;
template struct triptych::Entries<triptych::BFloat16>;
