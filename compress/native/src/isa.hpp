// The products of every instruction set that is built.
#pragma once

#include "compress_cpu.h"

namespace compress_cpu {

// Whether indexes of books take half a byte each. Static: each set has its own.
static inline bool in_halves(const compress_weight &w) { return w.entries == 16 && w.length == 1 && w.books == 1; }

// Arguments of compress_run.
struct compress_step {
    const compress_instruction *code;
    int64_t first, count;
    void *const *slots;
    int32_t threads;
};

#define COMPRESS_SET(name)                                      \
    namespace name {                                            \
    int products(const compress_call *calls, int64_t count);    \
    int rotate(const compress_rotation *rotation);              \
    int round_columns(const compress_columns *columns);         \
    int sum_groups_of(const compress_groups *groups);           \
    int search_walks(const compress_search *search);            \
    int64_t run(const compress_step *step);                     \
    int attend_all(const compress_attention *attention);        \
    }
COMPRESS_SET(generic)
COMPRESS_SET(avx2)
COMPRESS_SET(avx512)
COMPRESS_SET(avx512_bf16)
COMPRESS_SET(amx_bf16)
COMPRESS_SET(neon)
COMPRESS_SET(neon_dotprod)
COMPRESS_SET(neon_bf16)
#undef COMPRESS_SET
}  // namespace compress_cpu
