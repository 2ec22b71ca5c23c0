// The C interface: checks of sizes, packing, and the choice of the instruction set.

#include "compress_cpu.h"

#include <atomic>
#include <cstring>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "isa.hpp"
#include "pool.hpp"

namespace {

using Product = int (*)(const compress_call *);

struct Set {
    const char *name;
    Product product;
    bool available;
};

bool has_avx512() {
#if defined(COMPRESS_AVX512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

bool has_avx2() {
#if defined(COMPRESS_AVX2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

const Set *sets() {
    static const Set found[] = {
#if defined(COMPRESS_AVX512)
        {"avx512", compress_cpu::avx512::product, has_avx512()},
#endif
#if defined(COMPRESS_AVX2)
        {"avx2", compress_cpu::avx2::product, has_avx2()},
#endif
        {"generic", compress_cpu::generic::product, true},
        {nullptr, nullptr, false},
    };
    return found;
}

std::atomic<Product> chosen{nullptr};

Product best() {
    Product found = chosen.load();
    if (!found) {
        const Set *set = sets();
        while (!set->available) ++set;
        chosen.store(found = set->product);
    }
    return found;
}

bool consistent(const compress_weight &w) {
    if (w.bits < 1 || (w.bits > 4 && w.bits != 8) || w.rows < 0 || w.width < 0 || w.units < 0 || w.group < 16 || w.group % 16) return false;
    if (!w.order && w.units * 32 < w.width) return false;
    return w.groups == (w.units * 32 + w.group - 1) / w.group;
}

struct Packing {
    const compress_weight *w;
    const uint8_t *codes;
    uint32_t *words;
};

void pack_tile(void *data, int64_t tile) {
    const Packing &p = *static_cast<Packing *>(data);
    const compress_weight &w = *p.w;
    static const int widths[] = {8, 4, 2, 1};  // of planes
    uint32_t *out = p.words + tile * w.units * w.bits * 16;
    std::memset(out, 0, static_cast<size_t>(w.units) * w.bits * 16 * sizeof(uint32_t));
    for (int64_t unit = 0; unit < w.units; ++unit, out += w.bits * 16)
        for (int lane = 0; lane < 16; ++lane) {
            const int64_t row = tile * 16 + lane;
            if (row >= w.rows) continue;
            for (int k = 0; k < 32; ++k) {
                const int64_t packed = unit * 32 + k, column = w.order ? w.order[packed] : packed;
                if (column < 0 || column >= w.width) continue;
                uint32_t code = p.codes[row * w.width + column];
                int first = 0, low = 0;
                for (int bits : widths) {
                    if (!(bits == 8 ? w.bits == 8 : w.bits != 8 && (w.bits & bits))) continue;
                    const int per = 8 / bits, quad = k / 4;
                    const uint32_t piece = (code >> low) & ((1u << bits) - 1);
                    out[(first + quad / per) * 16 + lane] |= piece << (8 * (k % 4) + bits * (quad % per));
                    first += bits, low += bits;
                }
            }
        }
}

}  // namespace

extern "C" {

int compress_product(const compress_call *call) {
    const compress_weight &w = call->weight;
    if (!consistent(w) || call->m < 0 || call->threads < 1 || (call->m > 1 && call->ldx < w.width)) return -1;
    return best()(call);
}

int compress_pack(const compress_weight *weight, const uint8_t *codes, uint32_t *words, int32_t threads) {
    if (!consistent(*weight) || threads < 1) return -1;
    if (weight->order)
        for (int64_t k = 0; k < weight->units * 32; ++k)
            if (weight->order[k] >= weight->width) return -1;
    Packing packing{weight, codes, words};
    compress_cpu::parallel(pack_tile, &packing, (weight->rows + 15) / 16, threads);
    return 0;
}

void compress_advise(void *data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + PAGE - 1) / PAGE * PAGE;
    const uintptr_t stop = (reinterpret_cast<uintptr_t>(data) + bytes) / PAGE * PAGE;
    if (first < stop) madvise(reinterpret_cast<void *>(first), stop - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

const char *compress_instruction_sets(void) {
    static const std::string names = [] {
        std::string found;
        for (const Set *set = sets(); set->name; ++set)
            if (set->available) found += (found.empty() ? "" : ",") + std::string(set->name);
        return found;
    }();
    return names.c_str();
}

int compress_use(const char *name) {
    for (const Set *set = sets(); set->name; ++set)
        if (set->available && !std::strcmp(set->name, name)) {
            chosen.store(set->product);
            return 0;
        }
    return -1;
}
}
