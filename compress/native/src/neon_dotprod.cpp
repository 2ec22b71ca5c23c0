// Compiled with -march=armv8.2-a+dotprod.
#if defined(__aarch64__)  // a compiler for two processors at once compiles this for both
#define ISA neon_dotprod
#define NEON
#include "product.inc"
#endif
