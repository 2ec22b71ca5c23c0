// The C interface: checks of sizes, packing, and the choice of the instruction set.

#include "compress_cpu.h"

#include <atomic>
#include <cstring>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "isa.hpp"
#include "pool.hpp"
#include "processor.hpp"

namespace {

struct Set {
    const char *name;
    int (*products)(const compress_call *, int64_t);
    int (*rotate)(const compress_rotation *);
    int (*round_columns)(const compress_columns *);
    int (*sum_groups)(const compress_groups *);
    int (*search_walks)(const compress_search *);
    int64_t (*run)(const compress_cpu::compress_step *);
    int (*attend)(const compress_attention *);
    bool available;
};

#define COMPRESS_FUNCTIONS(set) set::products, set::rotate, set::round_columns, set::sum_groups_of, set::search_walks, set::run, \
    set::attend_all

const Set *sets() {
    using namespace compress_cpu;
    static const Set found[] = {
#if defined(__x86_64__)
#if defined(COMPRESS_AMX_BF16)
        {"amx_bf16", COMPRESS_FUNCTIONS(amx_bf16), has_amx_bf16()},
#endif
#if defined(COMPRESS_AVX512_BF16)
        {"avx512_bf16", COMPRESS_FUNCTIONS(avx512_bf16), has_avx512_bf16() && fast_pairs()},
#endif
#if defined(COMPRESS_AVX512)
        {"avx512", COMPRESS_FUNCTIONS(avx512), has_avx512()},
#endif
#if defined(COMPRESS_AVX512_BF16)
        {"avx512_bf16", COMPRESS_FUNCTIONS(avx512_bf16), has_avx512_bf16() && !fast_pairs()},
#endif
#if defined(COMPRESS_AVX2)
        {"avx2", COMPRESS_FUNCTIONS(avx2), has_avx2()},
#endif
#elif defined(__aarch64__)
#if defined(COMPRESS_NEON_BF16)
        {"neon_bf16", COMPRESS_FUNCTIONS(neon_bf16), has_dotprod() && has_bf16()},
#endif
#if defined(COMPRESS_NEON_DOTPROD)
        {"neon_dotprod", COMPRESS_FUNCTIONS(neon_dotprod), has_dotprod()},
#endif
#if defined(COMPRESS_NEON)
        {"neon", COMPRESS_FUNCTIONS(neon), true},
#endif
#endif
        {"generic", COMPRESS_FUNCTIONS(generic), true},
        {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, false},
    };
    return found;
}

std::atomic<const Set *> chosen{nullptr};

const Set &best() {
    const Set *found = chosen.load();
    if (!found) {
        found = sets();
        while (!found->available) ++found;
        chosen.store(found);
    }
    return *found;
}

int bits_of(const compress_weight &w) { return w.codec > 4 ? 8 : w.codec; }

bool kept_alone(const compress_weight &w) { return w.codec == COMPRESS_KEPT_F32 || w.codec == COMPRESS_KEPT_BF16; }

bool in_floats(const compress_weight &w) { return w.codec > COMPRESS_E5M2; }

// Whether the sizes of books fit together. An index is masked by the number of entries, so any byte is one.
bool looked_up(const compress_weight &w) {
    if (!w.table || w.books < 1 || w.entries < 1 || w.entries > 256 || (w.entries & (w.entries - 1))) return false;
    if (w.length < 1 || w.length > 16 || (w.length & (w.length - 1)) || w.width % w.length) return false;
    if (w.tables != 1 && w.tables != w.rows) return false;
    if (compress_cpu::in_halves(w)) return w.stride >= (w.width + 1) / 2;
    return w.stride >= w.width / w.length * w.books;
}

bool points(const compress_weight &w) { return w.codec >= COMPRESS_POINTS_2 && w.codec <= COMPRESS_POINTS_4; }

bool walks(const compress_weight &w) { return w.codec >= COMPRESS_WALKS_1MAD && w.codec <= COMPRESS_WALKS_HYB; }

bool positions(const compress_weight &w) { return w.codec >= COMPRESS_POSITIONS_F32; }

// Whether the sizes of tables of points fit together. Each byte is an index.
bool in_points(const compress_weight &w) {
    const int64_t bytes = w.codec - COMPRESS_POINTS_2 + 2;
    if (!w.table || w.tables != 1 || w.books != (bytes == 2 ? 2 : 3) || w.entries != 256 || w.length != 8) return false;
    return w.width % 8 == 0 && w.stride >= w.width / 8 * bytes;
}

// Whether the sizes of tiles of trellis paths fit together. Any bits are valid states.
bool in_walks(const compress_weight &w) {
    constexpr int64_t LARGEST = 1 << 16;
    const bool pairs = w.codec == COMPRESS_WALKS_HYB;
    const int64_t together = pairs ? 2 : 1;  // weights of a state
    if (w.step_bits < together || w.step_bits > 4 * together || w.states < w.step_bits || w.states > 16) return false;
    if (w.tile_rows < 1 || w.tile_rows > LARGEST || w.tile_columns < 1 || w.tile_columns > LARGEST) return false;
    const int64_t weights = w.tile_rows * w.tile_columns;
    if (weights % 8 || weights / together * w.step_bits % 8 || w.rows % w.tile_rows || w.width % w.tile_columns) return false;
    if (w.tile_columns % together) return false;
    if (pairs ? !w.table || w.tables != 1 || w.books != 1 || w.entries != 1024 || w.length != 2 : !!w.table) return false;
    return w.stride >= w.width / w.tile_columns * (weights / together * w.step_bits / 8);
}

bool consistent(const compress_weight &w) {
    if (w.codec < 1 || (w.codec > 4 && w.codec < 8) || w.codec > COMPRESS_POSITIONS_BF16) return false;
    if (walks(w)) { if (!in_walks(w)) return false; }
    else if (w.codec == COMPRESS_LOOKED_UP ? !looked_up(w) : points(w) ? !in_points(w) : w.table && w.codec > 4) return false;
    if (in_floats(w) && (w.zero || w.zero_point != 0.0f || !w.order == positions(w))) return false;
    if (w.scale_type < 0 || w.scale_type > COMPRESS_SCALE_F16 || w.zero_type < 0 || w.zero_type > COMPRESS_SCALE_F16) return false;
    if (in_floats(w) && w.scale_type != COMPRESS_SCALE_F32) return false;
    if (positions(w) && !w.offsets) return false;
    if (kept_alone(w) && (!w.masks || !w.offsets)) return false;
    if (w.rows < 0 || w.width < 0 || w.units < 0 || w.group < 16 || w.group % 16) return false;
    if ((!w.order || positions(w)) && w.units * 32 < w.width) return false;
    return w.groups == (w.units * 32 + w.group - 1) / w.group;
}

// Whether all columns are below `width`, and not below `lowest`.
bool inside(const int32_t *columns, int64_t count, int32_t lowest, int64_t width) {
    bool found = true;
    for (int64_t k = 0; k < count; ++k) found &= columns[k] >= lowest && columns[k] < width;
    return found;
}

// Whether row starts of single weights rise from 0 to their number.
bool rising(const int64_t *starts, int64_t rows, int64_t numbers) {
    bool found = starts[0] == 0 && starts[rows] == numbers;
    for (int64_t row = 0; row < rows; ++row) found &= starts[row] <= starts[row + 1];
    return found;
}

// Whether the tiles of kept weights begin where the masks say, and a vector behind the last weight can be read.
bool counted(const compress_weight &w, int64_t numbers) {
    int64_t count = 0;
    for (int64_t tile = 0; tile < (w.rows + 15) / 16; ++tile) {
        if (w.offsets[tile] != count) return false;
        const uint16_t *masks = w.masks + tile * w.units * 32;
        for (int64_t k = 0; k < w.units * 32; ++k) count += __builtin_popcount(masks[k]);
    }
    return count <= numbers - 16;
}

bool consistent(const compress_hadamard &h) {
    constexpr int64_t LARGEST = 1 << 20;
    if (h.order < 1 || h.order > LARGEST || h.inner < 1 || h.inner > h.order || h.levels < 0 || h.levels > 20 || h.count < 0)
        return false;
    if (h.levels > 0 && h.inner % 16) return false;  // butterflies take whole vectors
    int64_t order = h.inner << h.levels, numbers = h.inner * ((h.inner + 15) / 16 * 16);
    for (int64_t i = 0; i < h.count; ++i) {
        const int64_t length = h.lengths[i];
        if (length < 1 || length > h.order || order > h.order) return false;
        order *= length, numbers += length * length;
    }
    return order == h.order && numbers == h.numbers;
}

struct Packing {
    const compress_weight *w;
    uint8_t *codes;
    uint32_t *words;
    const int32_t *columns;
    int64_t count;
};

// Calls f(word, shift of the word, shift of the code, bits) for each piece of a code: its word in a tile, and its position.
template <class F>
void pieces(int bits, int64_t column, int lane, F f) {
    const int64_t unit = column / 32;
    const int quad = static_cast<int>(column % 32) / 4;
    int first = 0, low = 0;
    for (int width : {8, 4, 2, 1}) {  // of planes
        if (width == 8 ? bits != 8 : bits == 8 || !(bits & width)) continue;
        const int per = 8 / width;
        f((unit * bits + first + quad / per) * 16 + lane, 8 * (column % 4) + width * (quad % per), low, width);
        first += width, low += width;
    }
}

void pack_tile(void *data, int64_t tile) {
    const Packing &p = *static_cast<Packing *>(data);
    const compress_weight &w = *p.w;
    const int bits = bits_of(w);
    uint32_t *out = p.words + tile * w.units * bits * 16;
    std::memset(out, 0, static_cast<size_t>(w.units) * bits * 16 * sizeof(uint32_t));
    for (int64_t packed = 0; packed < w.units * 32; ++packed) {
        const int64_t column = w.order ? w.order[packed] : packed;
        if (column < 0 || column >= w.width) continue;
        for (int lane = 0; lane < 16 && tile * 16 + lane < w.rows; ++lane) {
            const uint32_t code = p.codes[(tile * 16 + lane) * w.width + column];
            pieces(bits, packed, lane, [&](int64_t word, int shift, int low, int width) {
                out[word] |= ((code >> low) & ((1u << width) - 1)) << shift;
            });
        }
    }
}

void codes_of_tile(void *data, int64_t tile) {
    const Packing &p = *static_cast<Packing *>(data);
    const compress_weight &w = *p.w;
    const int bits = bits_of(w);
    const uint32_t *words = w.words + tile * w.units * bits * 16;
    for (int lane = 0; lane < 16 && tile * 16 + lane < w.rows; ++lane)
        for (int64_t i = 0; i < p.count; ++i) {
            uint32_t code = 0;
            pieces(bits, p.columns[i], lane, [&](int64_t word, int shift, int low, int width) {
                code |= ((words[word] >> shift) & ((1u << width) - 1)) << low;
            });
            p.codes[(tile * 16 + lane) * p.count + i] = static_cast<uint8_t>(code);
        }
}

struct Walks {
    const uint8_t *codes;
    const float *values;
    float *found;
    int64_t count, size, states, step_bits, length;
};

constexpr int64_t WALKS_OF_A_TASK = 64;

template <int LENGTH>
void decode_circle(const Walks &w, const uint8_t *codes, float *found) {
    const int64_t steps = w.size * 8 / w.step_bits;
    const uint32_t mask = (1u << w.states) - 1;
    const int down = 32 - static_cast<int>(w.states);
    for (int64_t step = 0; step < steps; ++step) {  // a window of at most 16 bits begins in the first of four bytes
        const int64_t bit = step * w.step_bits, at = bit / 8;
        uint32_t four = 0;
        if (at + 4 <= w.size) four = static_cast<uint32_t>(codes[at]) << 24 | codes[at + 1] << 16 | codes[at + 2] << 8 | codes[at + 3];
        else for (int64_t i = 0; i < 4; ++i) four = four << 8 | codes[(at + i) % w.size];
        const float *value = w.values + (four >> (down - bit % 8) & mask) * LENGTH;
        for (int v = 0; v < LENGTH; ++v) found[step * LENGTH + v] = value[v];
    }
}

void decode_some(void *data, int64_t index) {
    const Walks &w = *static_cast<Walks *>(data);
    const int64_t first = index * WALKS_OF_A_TASK, stop = first + WALKS_OF_A_TASK < w.count ? first + WALKS_OF_A_TASK : w.count;
    const int64_t numbers = w.size * 8 / w.step_bits * w.length;
    for (int64_t row = first; row < stop; ++row)
        (w.length == 1 ? decode_circle<1> : decode_circle<2>)(w, w.codes + row * w.size, w.found + row * numbers);
}

}  // namespace

extern "C" {

int compress_products(int64_t count, const compress_weight *const *weights, const void *x, void *const *y,
                      const void *const *bias, const float *static_scale, int64_t m, int64_t ldx, int32_t type,
                      int32_t rounded, int32_t bits, float clip, int32_t threads) {
    if (count < 1 || count > COMPRESS_MOST_PRODUCTS || m < 0 || threads < 1) return -1;
    if (bits < 2 || bits > 8 || !(clip > 0.0f && clip <= 1.0f)) return -1;
    compress_call calls[COMPRESS_MOST_PRODUCTS];
    for (int64_t i = 0; i < count; ++i) {
        const compress_weight &w = *weights[i];
        if (!consistent(w) || w.width != weights[0]->width || (m > 1 && ldx < w.width)) return -1;
        calls[i] = {weights[i], x, y[i], bias[i], static_scale, m, ldx, type, rounded, bits, clip, threads};
    }
    return best().products(calls, count);
}

int compress_product(const compress_weight *weight, const void *x, void *y, const void *bias, const float *static_scale,
                     int64_t m, int64_t ldx, int32_t type, int32_t rounded, int32_t bits, float clip, int32_t threads) {
    return compress_products(1, &weight, x, &y, &bias, static_scale, m, ldx, type, rounded, bits, clip, threads);
}

int compress_rotate(const compress_hadamard *matrix, const void *x, void *y, const int8_t *signs, const float *bias, int64_t m,
                    int64_t width, int64_t ldx, int32_t x_type, int32_t y_type, int32_t outputs, int32_t threads) {
    if (!consistent(*matrix) || m < 0 || threads < 1 || width < 0 || width % matrix->order || (m > 1 && ldx < width)) return -1;
    const compress_rotation rotation = {matrix, x, y, signs, bias, m, width, ldx, x_type, y_type, outputs, threads};
    return m == 0 || width == 0 ? 0 : best().rotate(&rotation);
}

// Whether a table of levels has a size that fits, or none is given.
static bool levels_fit(const float *levels, int64_t entries) {
    return levels ? entries > 0 && entries <= COMPRESS_MOST_LEVELS : entries == 0;
}

int compress_round_columns(const compress_columns *columns) {
    const compress_columns &c = *columns;
    if (c.rows < 0 || c.columns < 0 || c.columns > COMPRESS_MOST_COLUMNS || c.threads < 1) return -1;
    if ((c.scale_stride && c.scale_stride < c.rows) || c.matrix_stride < c.columns || !c.old != !c.pivots) return -1;
    if (!levels_fit(c.levels, c.entries) || (c.levels && c.zero)) return -1;
    return c.rows && c.columns ? best().round_columns(columns) : 0;
}

int compress_sum_groups(const compress_groups *groups) {
    const compress_groups &g = *groups;
    if (g.rows < 0 || g.groups < 0 || g.size < 0 || g.threads < 1 || !g.squares != !g.products) return -1;
    if (!levels_fit(g.levels, g.entries) || (g.levels && g.zero)) return -1;
    return g.rows && g.groups ? best().sum_groups(groups) : 0;
}

int compress_search_walks(const compress_search *search) {
    const compress_search &s = *search;
    if (s.count < 0 || s.steps < 0 || s.threads < 1 || s.length < 1 || s.length > 2) return -1;
    // a vector is 16 states with the same first bits
    if (s.step_bits < 1 || s.states > 16 || s.states - s.step_bits < 4) return -1;
    if (s.overlap)
        for (int64_t i = 0; i < s.count; ++i)
            if (s.overlap[i] < 0 || s.overlap[i] >> (s.states - s.step_bits)) return -1;
    return s.count && s.steps ? best().search_walks(search) : 0;
}

int64_t compress_run(const compress_instruction *code, int64_t first, int64_t count, void *const *slots, int32_t threads) {
    if (first < 0 || first > count || threads < 1) return -1;
    const compress_cpu::compress_step step = {code, first, count, slots, threads};
    return best().run(&step);
}

int compress_attend(const compress_attention *attention) {
    const compress_attention &a = *attention;
    for (const int64_t size : a.sizes)
        if (size < 0) return -1;
    if (a.groups < 1 || a.sizes[1] % a.groups || a.threads < 1 || a.mask_type < 0 || a.mask_type > COMPRESS_MASK_F32) return -1;
    if (!a.mask != (a.mask_type == COMPRESS_MASK_NONE)) return -1;
    return a.sizes[0] && a.sizes[1] && a.sizes[2] && a.sizes[5] ? best().attend(attention) : 0;
}

int compress_pack(const compress_weight *weight, const uint8_t *codes, uint32_t *words, int32_t threads) {
    if (!consistent(*weight) || in_floats(*weight) || threads < 1) return -1;
    if (weight->order)
        for (int64_t k = 0; k < weight->units * 32; ++k)
            if (weight->order[k] >= weight->width) return -1;
    Packing packing{weight, const_cast<uint8_t *>(codes), words, nullptr, 0};
    compress_cpu::parallel(pack_tile, &packing, (weight->rows + 15) / 16, threads);
    return 0;
}

int compress_check_weight(const compress_weight *weight, int64_t numbers, int64_t places, int64_t starts) {
    const compress_weight &w = *weight;
    if (!consistent(w) || numbers < 0) return -1;
    if (positions(w)) {
        if (starts != w.rows + 1 || places != numbers) return -1;
        return rising(w.offsets, w.rows, numbers) && inside(w.order, numbers, 0, w.width) ? 0 : COMPRESS_OUTSIDE;
    }
    if (kept_alone(w)) return starts != (w.rows + 15) / 16 ? -1 : counted(w, numbers) ? 0 : COMPRESS_OUTSIDE;
    if (!w.order) return 0;
    return places != w.units * 32 ? -1 : inside(w.order, places, -1, w.width) ? 0 : COMPRESS_OUTSIDE;
}

int compress_codes(const compress_weight *weight, const int32_t *columns, int64_t count, uint8_t *codes, int32_t threads) {
    if (!consistent(*weight) || in_floats(*weight) || threads < 1 || count < 0) return -1;
    for (int64_t i = 0; i < count; ++i)
        if (columns[i] < 0 || columns[i] >= weight->units * 32) return -1;
    Packing packing{weight, codes, nullptr, columns, count};
    compress_cpu::parallel(codes_of_tile, &packing, (weight->rows + 15) / 16, threads);
    return 0;
}

int compress_decode_walks(const uint8_t *codes, const float *values, float *found, int64_t count, int64_t size, int64_t states,
                          int64_t step_bits, int64_t length, int32_t threads) {
    if (count < 0 || size < 0 || threads < 1 || length < 1 || length > 2) return -1;
    if (states < 1 || states > 16 || step_bits < 1 || step_bits > states) return -1;
    Walks walks{codes, values, found, count, size, states, step_bits, length};
    compress_cpu::parallel(decode_some, &walks, (count + WALKS_OF_A_TASK - 1) / WALKS_OF_A_TASK, threads);
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

void compress_release(const void *data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_PAGEOUT)
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t stop = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    if (first < stop) madvise(reinterpret_cast<void *>(first), stop - first, MADV_PAGEOUT);
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
            chosen.store(set);
            return 0;
        }
    return -1;
}
}
