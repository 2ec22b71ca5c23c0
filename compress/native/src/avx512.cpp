// Compiled with -mavx512f, bw, dq, vl and vnni.
#if defined(__x86_64__)  // a compiler for two processors at once compiles this for both
#define ISA avx512
#include "product.inc"
#endif
