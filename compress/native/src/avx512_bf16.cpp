// Compiled with -mavx512f, bw, dq, vl, vnni and bf16.
#if defined(__x86_64__)  // a compiler for two processors at once compiles this for both
#define ISA avx512_bf16
#include "product.inc"
#endif
