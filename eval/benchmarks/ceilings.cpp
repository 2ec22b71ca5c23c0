// The limits of a machine for kernels.py: reading, and the products of each type, per second, on some threads.
//
//     ceilings THREADS
//
// prints a JSON object of GB/s (of reading 256 MiB in huge pages) and Gop/s (of the widest instructions that it was
// compiled for: float32, bfloat16 pairs, int8 quads). Each is the best of several rounds. As a library it reads once more
// when `read_all` is called, since what a shared machine reads changes from minute to minute.

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

constexpr int64_t BYTES = 256 << 20;
constexpr int STEPS = 2000000, CHAINS = 12, ROUNDS = 8;

#if defined(__AVX512F__)
typedef __m512 Floats;
#else
typedef __m256 Floats;
#endif
constexpr int LANES = sizeof(Floats) / 4;

// Seconds of the slowest of `threads` that start together; the best round.
template <class F>
double seconds(int threads, F work, int rounds = ROUNDS) {
    double best = 1e9;
    for (int round = 0; round < rounds; ++round) {
        std::atomic<int> ready{0};
        std::vector<double> took(threads);
        std::vector<std::thread> team;
        for (int i = 0; i < threads; ++i)
            team.emplace_back([&, i] {
                for (++ready; ready < threads;) std::this_thread::yield();
                const auto start = std::chrono::steady_clock::now();
                work(i);
                took[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            });
        for (auto &thread : team) thread.join();
        best = std::min(best, *std::max_element(took.begin(), took.end()));
    }
    return best;
}

volatile float sink;

template <class T, class F>
double products(int threads, T zero, F step) {
    return seconds(threads, [&](int) {
        T sum[CHAINS];
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; ++c) sum[c] = zero;
        for (int i = 0; i < STEPS; ++i) {
#pragma GCC unroll 12
            for (int c = 0; c < CHAINS; ++c) {
                sum[c] = step(sum[c]);
                __asm__("" : "+v"(sum[c]));
            }
        }
#pragma GCC unroll 12
        for (int c = 1; c < CHAINS; ++c) sum[0] = (T)((Floats)sum[0] + (Floats)sum[c]);
        sink = ((Floats)sum[0])[0];
    });
}

// Bytes to read, in huge pages.
const void *bytes() {
    static void *const data = [] {
        void *found = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        madvise(found, BYTES, MADV_HUGEPAGE);
        std::memset(found, 1, BYTES);
        return found;
    }();
    return data;
}

double reading(int threads, int rounds) {
    const Floats *const from = static_cast<const Floats *>(bytes());
    return seconds(threads, [&](int i) {
        const int64_t each = BYTES / sizeof(Floats) / threads / 4 * 4;
        Floats a = from[0], b = a, c = a, d = a;
        for (int64_t k = each * i; k < each * (i + 1); k += 4) a += from[k], b += from[k + 1], c += from[k + 2], d += from[k + 3];
        sink = ((a + b) + (c + d))[0];
    }, rounds);
}

// Gigabytes per second of reading once.
extern "C" double read_all(int threads) { return BYTES / reading(threads, 1) / 1e9; }

int main(int, char **arguments) {
    const int threads = std::atoi(arguments[1]);
    std::printf("{\"threads\": %d, \"read_gb_s\": %.1f", threads, BYTES / reading(threads, ROUNDS) / 1e9);
    const double count = 2.0 * STEPS * CHAINS * LANES * threads / 1e9;
    Floats one = {};
    one += 1.0f;
    __asm__("" : "+v"(one));
    std::printf(", \"float32_gop_s\": %.0f", count / products(threads, Floats{}, [&](Floats s) { return s + one * one; }));
#if defined(__AVX512BF16__)
    const __m512bh pairs = (__m512bh)one;
    std::printf(", \"bfloat16_gop_s\": %.0f",
                2 * count / products(threads, Floats{}, [&](Floats s) { return _mm512_dpbf16_ps(s, pairs, pairs); }));
#endif
#if defined(__AVX512VNNI__)
    const __m512i quads = (__m512i)one;
    std::printf(", \"int8_gop_s\": %.0f",
                4 * count / products(threads, __m512i{}, [&](__m512i s) { return _mm512_dpbusd_epi32(s, quads, quads); }));
#elif defined(__AVX2__)
    const __m256i quads = (__m256i)one;  // two 16-bit products and their sum, of exact int8 kernels
    std::printf(", \"int8_gop_s\": %.0f",
                2 * count / products(threads, __m256i{}, [&](__m256i s) { return s + _mm256_madd_epi16(quads, quads); }));
#endif
    std::printf("}\n");
}
