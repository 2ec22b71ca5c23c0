// The products of every instruction set that is built.
#pragma once

#include "compress_cpu.h"

namespace compress_cpu {
namespace generic { int product(const compress_call *call); }
namespace avx2 { int product(const compress_call *call); }
namespace avx512_bf16 { int product(const compress_call *call); }
namespace avx512 { int product(const compress_call *call); }
}  // namespace compress_cpu
