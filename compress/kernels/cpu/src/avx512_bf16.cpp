// Compiled with -mavx512f, bw, dq, vl, vnni and bf16.
#define ISA avx512_bf16
#include "product.inc"
