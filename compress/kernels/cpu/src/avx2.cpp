// Compiled with -mavx2 -mfma.
#define ISA avx2
#include "product.inc"
