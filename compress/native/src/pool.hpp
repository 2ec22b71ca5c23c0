// A pool of threads that sleeps while it waits.
#pragma once

#include <cstdint>

namespace compress_cpu {

// Calls task(data, i) for i in [0, count), on up to `threads` threads, the caller among them.
void parallel(void (*task)(void *, int64_t), void *data, int64_t count, int threads);

}  // namespace compress_cpu
