// Compiled with -mavx512f, bw, dq, vl and vnni.
#define ISA avx512
#include "product.inc"
