// The products of every instruction set that is built.
#pragma once

#include "compress_cpu.h"

namespace compress_cpu {

// Whether indexes of books take half a byte each.
inline bool in_halves(const compress_weight &w) { return w.entries == 16 && w.length == 1 && w.books == 1; }

namespace generic { int products(const compress_call *calls, int64_t count); }
namespace avx2 { int products(const compress_call *calls, int64_t count); }
namespace avx512_bf16 { int products(const compress_call *calls, int64_t count); }
namespace avx512 { int products(const compress_call *calls, int64_t count); }
}  // namespace compress_cpu
