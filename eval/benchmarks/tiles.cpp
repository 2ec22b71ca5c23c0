// What the products of one row of inputs take without Python: where codes are in the cache, and read from memory.
//
//     c++ -std=c++17 -O2 -fno-strict-aliasing -fno-math-errno -ffp-contract=fast -fno-code-hoisting -march=native -pthread
//         -I compress/native/src eval/benchmarks/tiles.cpp compress/native/src/pool.cpp -o build/tiles && build/tiles
//
// prints a JSON object per kind of codes and inputs: the cycles that 64 columns of 16 rows take in the cache (the best of
// many), those that reading them would take at the read ceiling, and GB/s from memory in one thread and in two (medians).

#define ISA measured
#include "product.inc"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

using namespace compress_cpu::measured;

constexpr int64_t WIDTH = 4096, GROUP = 64, BYTES_OF_CODES = 192 << 20;
volatile float sink;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Fresh memory in huge pages.
template <class T>
T *fresh(int64_t count) {
    void *found = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(found, count * sizeof(T), MADV_HUGEPAGE);
    return static_cast<T *>(found);
}

// Seconds of `work(thread)` in the slowest of some threads: the best, or the median of the rounds.
template <class F>
double seconds(int threads, int rounds, bool best, F work) {
    std::vector<double> found;
    for (int round = 0; round < rounds; ++round) {
        std::vector<std::thread> team;
        const double start = now();
        for (int i = 1; i < threads; ++i) team.emplace_back(work, i);
        work(0);
        for (auto &thread : team) thread.join();
        found.push_back(now() - start);
    }
    std::sort(found.begin(), found.end());
    return found[best ? 0 : rounds / 2];
}

double reading(int threads) {
    static const vf *const from = [] {
        float *found = fresh<float>(BYTES_OF_CODES / 4);
        for (int64_t k = 0; k < BYTES_OF_CODES / 4; ++k) found[k] = 1.0f;
        return reinterpret_cast<const vf *>(found);
    }();
    return BYTES_OF_CODES / seconds(threads, 9, false, [&](int i) {
        const int64_t each = BYTES_OF_CODES / sizeof(vf) / threads;
        vf a = broadcast(0.0f), b = a, c = a, d = a;
        for (int64_t k = each * i; k < each * (i + 1); k += 4)
            a = a + from[k], b = b + from[k + 1], c = c + from[k + 2], d = d + from[k + 3];
        alignas(64) float sums[LANES];
        store(sums, (a + b) + (c + d));
        sink = sums[0];
    });
}

double gigahertz() {
    double best = 1e9;
    for (int round = 0; round < 9; ++round) {
        const double start = now();
        uint64_t n = 0;
        for (int i = 0; i < 20000000; ++i) {
            n += 1;  // waits for the one before
            __asm__ volatile("" : "+r"(n));
        }
        sink = static_cast<float>(n);
        best = std::min(best, now() - start);
    }
    return 20000000 / best / 1e9;
}

template <int K, int C>
void measure(const char *name, int bits, double clock, double read) {
    const int64_t units = WIDTH / UNIT, groups = WIDTH / GROUP, tile = units * bits * LANES;
    const int64_t tiles = BYTES_OF_CODES / (tile * 4) / 2 * 2;
    uint32_t *words = fresh<uint32_t>(tiles * tile);
    uint32_t random = 1;
    for (int64_t k = 0; k < tiles * tile; ++k) words[k] = random = random * 1664525u + 1013904223u;
    uint16_t *scale = fresh<uint16_t>(tiles * groups * LANES);
    for (int64_t k = 0; k < tiles * groups * LANES; ++k) scale[k] = 0x3c00;
    std::vector<float> x(WIDTH, 1.0f), y(tiles * LANES), sums(groups, 0.0f), scales(groups, 1.0f);
    compress_weight w = {};
    w.words = words, w.scale = scale, w.codec = bits, w.rows = tiles * LANES, w.width = WIDTH;
    w.units = units, w.group = GROUP, w.groups = groups, w.scale_type = COMPRESS_SCALE_BF16;
    compress_call call = {};
    call.weight = &w, call.x = x.data(), call.y = y.data(), call.m = 1;
    Work work = {};
    work.call = &call, work.w = &w, work.x = reinterpret_cast<int32_t *>(x.data()), work.sums = sums.data();
    work.scales = scales.data(), work.zero_point = 8.0f, work.columns = WIDTH, work.tiles = tiles, work.rows = 1;
    work.kind = K, work.direct = true;
    const auto some = [&](int64_t first, int64_t stop) {
        for (int64_t t = first; t < stop; ++t) tile_of_codes<K, C, 1>(work, t);
    };
    const double bytes = tile * 4 + groups * LANES * 2;  // of a tile
    const double cached = seconds(1, 31, true, [&](int) { for (int i = 0; i < 400; ++i) some(0, 1); }) / 400 / groups;
    const double one = seconds(1, 9, false, [&](int) { some(0, tiles); });
    const double two = seconds(2, 9, false, [&](int i) { some(tiles / 2 * i, tiles / 2 * (i + 1)); });
    std::printf("{\"kind\": \"%s\", \"cycles\": %.0f, \"cycles_of_reading\": %.0f, \"gb_s\": [%.1f, %.1f]}\n", name,
                cached * clock * 1e9, bytes / groups / read * clock * 1e9, tiles * bytes / one / 1e9, tiles * bytes / two / 1e9);
    munmap(words, tiles * tile * 4), munmap(scale, tiles * groups * LANES * 2);
}

int main() {
    const double clock = gigahertz(), read[] = {reading(1), reading(2)};
    std::printf("{\"gigahertz\": %.2f, \"read_gb_s\": [%.1f, %.1f]}\n", clock, read[0] / 1e9, read[1] / 1e9);
    constexpr int FOUR = TABLES ? TABLE + 4 : 4;
    measure<BYTES, 4>("int4 x int8", 4, clock, read[0]);
    measure<BYTES, 8>("int8 x int8", 8, clock, read[0]);
#if defined(PAIR_PRODUCTS)
    measure<PAIRS, FOUR>("int4 x bfloat16", 4, clock, read[0]);
    measure<PAIRS, 8>("int8 x bfloat16", 8, clock, read[0]);
#endif
    measure<FLOATS, FOUR>("int4 x float32", 4, clock, read[0]);
    measure<FLOATS, 8>("int8 x float32", 8, clock, read[0]);
}
