// The set of every AArch64 processor.
#if defined(__aarch64__)  // a compiler for two processors at once compiles this for both
#define ISA neon
#define NEON
#include "product.inc"
#endif
