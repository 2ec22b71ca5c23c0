// Compiled with -mavx2 -mfma.
#if defined(__x86_64__)  // a compiler for two processors at once compiles this for both
#define ISA avx2
#include "product.inc"
#endif
