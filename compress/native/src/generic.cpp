// Vectors of 16 lanes in whatever the compiler targets.
#define ISA generic
#include "product.inc"
