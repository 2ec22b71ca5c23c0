// Compiled with the flags of avx512_bf16, and -mamx-tile, bf16 and int8.
#if defined(__x86_64__)  // a compiler for two processors at once compiles this for both
#define ISA amx_bf16
#include "product.inc"
#endif
