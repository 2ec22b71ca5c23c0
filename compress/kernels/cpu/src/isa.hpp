// The products of every instruction set that is built.
#pragma once

#include "compress_cpu.h"

namespace compress_cpu {
namespace generic { int products(const compress_call *calls, int64_t count); }
namespace avx2 { int products(const compress_call *calls, int64_t count); }
namespace avx512_bf16 { int products(const compress_call *calls, int64_t count); }
namespace avx512 { int products(const compress_call *calls, int64_t count); }
}  // namespace compress_cpu
