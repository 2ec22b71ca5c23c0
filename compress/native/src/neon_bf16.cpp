// Compiled with -march=armv8.2-a+dotprod+bf16.
#if defined(__aarch64__)  // a compiler for two processors at once compiles this for both
#define ISA neon_bf16
#define NEON
#include "product.inc"
#endif
