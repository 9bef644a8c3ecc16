#include "attention.h"

template class triptych::Attention<triptych::Float32>;
template class triptych::Attention<triptych::BFloat16>;
