// What every AArch64 processor has.
#if defined(__aarch64__)  // a compiler for two processors at once compiles this for both
#define ISA neon
#define NEON
#include "product.inc"
#endif
