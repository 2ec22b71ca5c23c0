// Compares every entry point of the kernels, with every instruction set that the processor has, with plain sums in double
// and with the portable set.
//
//     check_kernels LIBRARY [SETS]     SETS: the instruction sets that must be there, in this order, as avx2,generic

#include <algorithm>
#include <thread>

#include "attention.hpp"
#include "columns.hpp"
#include "rotations.hpp"
#include "searches.hpp"
#include "steps.hpp"

namespace {

enum Inputs { AS_THEY_ARE, INT8, STATIC_INT8, INT8_GROUPS, INT4_CLIPPED, BF16, INPUTS };
const char *const MODES[] = {"", ", int8", ", static int8", ", int8 in groups", ", clipped int4", ", bfloat16"};

struct Call {
    const Weight &weight;
    int type;  // of x, y and bias
    int64_t m, ldx;
    Inputs inputs;
    const Numbers &x;
    const Numbers *bias;
    float static_scale;

    int rounded() const { return inputs == BF16 ? COMPRESS_TO_BF16 : inputs == INT8_GROUPS ? COMPRESS_TO_INTEGERS_GROUPS : in_bytes() ? COMPRESS_TO_INTEGERS : COMPRESS_AS_THEY_ARE; }
    bool in_bytes() const { return inputs != AS_THEY_ARE && inputs != BF16; }
    int bits() const { return inputs == INT4_CLIPPED ? 4 : 8; }
    float clip() const { return inputs == INT4_CLIPPED ? 0.9f : 1.0f; }

    int by(Library &library, Output &y, int threads) const {
        return library.product(&weight.w, x.data(), y.data(), bias ? bias->data() : nullptr, inputs == STATIC_INT8 ? &static_scale : nullptr,
                               m, ldx, type, rounded(), bits(), clip(), threads);
    }

    std::string name(int threads) const {
        return weight.name + ", batch " + std::to_string(m) + MODES[inputs] + (type ? ", bfloat16 inputs" : "") + (bias ? ", bias" : "") + ", threads " + std::to_string(threads);
    }
};

// The numbers that x is rounded to. A row with a NaN is NaN, and one that is infinite where its largest number is the scale.
std::vector<double> rounded_inputs(const Call &call, bool narrow) {
    const compress_weight &w = call.weight.w;
    const float half = static_cast<float>(1 << (call.bits() - 1));
    std::vector<double> found(call.m * w.width);
    for (int64_t row = 0; row < call.m; ++row) {
        std::vector<float> largest(w.groups, 0.0f);
        auto group = [&](int64_t k) { return call.inputs == INT8_GROUPS ? call.weight.group_of[k] : 0; };
        for (int64_t k = 0; k < w.width; ++k) {
            const float size = std::fabs(call.x.at(row * call.ldx + k));
            if (!(size <= largest[group(k)])) largest[group(k)] = size;
        }
        for (int64_t k = 0; k < w.width; ++k) {
            const float x = call.x.at(row * call.ldx + k);
            double &y = found[row * w.width + k];
            if (!call.in_bytes()) { y = narrow ? rounded_to_bf16(x) : x; continue; }
            float scale = call.inputs == STATIC_INT8 ? call.static_scale : call.clip() * largest[group(k)] / (half - 0.5f);
            if (scale == 0.0f) scale = 1.0f;
            const float code = std::min(std::max(std::nearbyint(x / scale), -half), half - 1.0f);
            const bool undefined = std::isnan(largest[group(k)]) || std::isinf(scale);
            y = undefined ? std::nan("") : static_cast<double>(code) * scale;
        }
    }
    return found;
}

// Outputs in double, and how far a kernel may be from them: 1e-5 of the magnitudes that it adds up, and its last rounding.
void plainly(const Call &call, bool narrow, std::vector<double> &wanted, std::vector<double> &allowed) {
    const compress_weight &w = call.weight.w;
    const std::vector<double> x = rounded_inputs(call, narrow), &weights = narrow ? call.weight.narrow : call.weight.numbers;
    wanted.assign(call.m * w.rows, 0.0), allowed.assign(call.m * w.rows, 0.0);
    for (int64_t row = 0; row < call.m; ++row)
        for (int64_t out = 0; out < w.rows; ++out) {
            const double bias = call.bias ? call.bias->at(out) : 0.0f;
            double sum = bias, size = std::fabs(bias);
            for (int64_t k = 0; k < w.width; ++k) {
                if (call.weight.alone && call.weight.sizes[out * w.width + k] == 0) continue;
                sum += x[row * w.width + k] * weights[out * w.width + k];
                size += std::fabs(x[row * w.width + k]) * call.weight.sizes[out * w.width + k];
            }
            wanted[row * w.rows + out] = sum;
            allowed[row * w.rows + out] = 1e-5 * size + (call.type ? std::fabs(sum) / 256 : 0) + 1e-30;
        }
}

void check_call(Library &library, const Call &call) {
    std::vector<double> wanted, allowed, wanted_of_pairs, allowed_of_pairs;
    plainly(call, false, wanted, allowed);
    const int64_t count = call.m * call.weight.w.rows;
    const bool may_narrow = !call.in_bytes() && (call.type || call.inputs == BF16) && !call.weight.alone && !(call.weight.floats_for_few && call.m <= 8);
    std::vector<double> portable, twice = allowed;  // two kernels may be that far from the sum, in two directions
    for (double &far : twice) far *= 2;
    for (auto set = library.sets.rbegin(); set != library.sets.rend(); ++set) {
        library.use(set->c_str());
        const bool in_floats = *set == "amx_bf16" && call.m <= 8;  // tile registers are for more rows
        const bool pairs = may_narrow && !in_floats && set->size() > 5 && set->substr(set->size() - 5) == "_bf16";
        if (pairs && wanted_of_pairs.empty()) plainly(call, true, wanted_of_pairs, allowed_of_pairs);
        Output one(call.type, count);
        for (const int threads : {1, 3, 64}) {
            Output y(call.type, count);
            const std::string what = call.name(threads);
            if (const int failed = call.by(library, y, threads)) library.failures.add("%s: %s: returned %d", set->c_str(), what.c_str(), failed);
            if (threads > 1 && !y.equals(one)) library.failures.add("%s: %s: not the bits of one thread", set->c_str(), what.c_str());
            y.compare(library, *set, what.c_str(), pairs ? wanted_of_pairs : wanted, pairs ? allowed_of_pairs : allowed);
            if (!portable.empty() && !pairs) y.compare(library, *set + " and the portable set", what.c_str(), portable, twice);
            if (threads == 1) one = std::move(y);
        }
        if (portable.empty()) for (int64_t i = 0; i < count; ++i) portable.push_back(one.at(i));
    }
}

// A weight with inputs of every kind that it takes.
void check_weight(Library &library, Random &random, const Weight &weight, int64_t m) {
    const compress_weight &w = weight.w;
    for (int inputs = 0; inputs < INPUTS; ++inputs)
        for (const int type : {COMPRESS_F32, COMPRESS_BF16}) {
            const bool in_bytes = inputs != AS_THEY_ARE && inputs != BF16;
            if ((in_bytes && !weight.integers) || (inputs == BF16 && type)) continue;
            const int64_t ldx = w.width + (random.chance(0.5) ? random.between(1, 40) : 0);
            Numbers x(random, type, m ? (m - 1) * ldx + w.width : 0);
            const Numbers bias(random, type, w.rows);
            if (m && w.width && random.chance(0.2)) x.set(random.below(m) * ldx + random.below(w.width), std::nanf(""));
            if (m && w.width && in_bytes && random.chance(0.1)) x.set(random.below(m) * ldx + random.below(w.width), INFINITY);
            if (m && in_bytes && random.chance(0.1)) for (int64_t k = 0; k < w.width; ++k) x.set(k, 0.0f);
            if (m && in_bytes && random.chance(0.1)) for (int64_t k = 0; k < w.width; ++k) x.set(k, random.chance(0.9) ? -2.0f : 2.0f);  // -128, 127
            check_call(library, {weight, type, m, ldx, static_cast<Inputs>(inputs), x, random.chance(0.5) ? &bias : nullptr, 0.02f});
        }
}

int64_t some_rows(Random &random) { return random.of<int64_t>({1, 2, 15, 16, 17, 31, 33, 48, 50}); }
int64_t some_width(Random &random) { return random.of<int64_t>({1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 257, 300, 513, 640}); }
int64_t some_batch(Random &random) { return random.of<int64_t>({1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 20}); }

void check_codes(Library &library, Random &random, int codec, Offsets offsets, int64_t rows, int64_t width, int64_t group, int64_t groups, int64_t m) {
    Weight weight = codes_of(random, codec, rows, width, group, offsets, groups);
    const compress_weight &w = weight.w;
    if (library.pack(&w, weight.codes.data(), weight.words.data(), random.of<int>({1, 2, 7})))
        return library.failures.add("%s: could not be packed", weight.name.c_str());
    std::vector<int32_t> columns, sources;
    for (int64_t k = 0; k < w.units * 32; ++k) {
        const int64_t column = w.order ? w.order[k] : k;
        if (column >= 0 && column < width && random.chance(0.7)) columns.push_back(static_cast<int32_t>(k)), sources.push_back(static_cast<int32_t>(column));
    }
    const int64_t count = columns.size();
    Guarded<uint8_t> found(rows * count);
    if (library.codes(&w, columns.data(), count, found.data(), 3)) library.failures.add("%s: codes are not given", weight.name.c_str());
    for (int64_t i = 0; i < rows * count; ++i)
        if (found[i] != weight.codes[i / count * width + sources[i % count]])
            return library.failures.add("%s: a code is not the one that was packed", weight.name.c_str());
    check_weight(library, random, weight, m);
}

void check_all_codes(Library &library, Random &random, int cases) {
    struct Kind { int codec; Offsets offsets; };
    std::vector<Kind> kinds = {{COMPRESS_E4M3, POINT}, {COMPRESS_E5M2, POINT}, {8, POINT}, {8, ZEROS}};
    for (const int bits : {1, 2, 3, 4})
        for (const Offsets offsets : {POINT, ZEROS, TABLE}) kinds.push_back({bits, offsets});
    for (const Kind &kind : kinds)
        for (int i = 0; i < cases; ++i) {
            const int64_t groups = i % 4 == 3 ? random.between(1, 6) : 0, group = random.of<int64_t>({0, 16, 32, 48, 64, 128, 528});
            check_codes(library, random, kind.codec, kind.offsets, some_rows(random), some_width(random), group, groups, some_batch(random));
        }
    for (const int codec : {4, 8}) {  // enough for several threads, more of them than tiles, and longer than a panel
        check_codes(library, random, codec, POINT, 40, 4000, 128, 0, 20);
        check_codes(library, random, codec, ZEROS, 300, 2000, 64, 0, 2);
        check_codes(library, random, codec, ZEROS, 40, 300, 32, 0, 70);
        check_codes(library, random, codec, ZEROS, 20, 100, 32, 0, 0);
        check_codes(library, random, codec, POINT, 0, 100, 32, 0, 3);
    }
}

void check_other_weights(Library &library, Random &random, int cases) {
    for (int i = 0; i < cases; ++i) {
        const bool half = i % 2;
        check_weight(library, random, kept_of(random, half, some_rows(random), some_width(random), random.of<double>({0.0, 0.1, 0.5, 1.0})), some_batch(random));
        check_weight(library, random, rows_of(random, half, some_rows(random), some_width(random)), some_batch(random));
        check_weight(library, random, positions_of(random, half, some_rows(random), some_width(random), random.of<double>({0.0, 0.02, 0.3})), some_batch(random));
        check_weight(library, random, points_of(random, some_rows(random), random.between(1, 40), 2 + i % 3), some_batch(random));
        for (const int codec : {COMPRESS_WALKS_1MAD, COMPRESS_WALKS_3INST, COMPRESS_WALKS_HYB}) {
            const int64_t tile_columns = random.of<int64_t>({4, 8, 12, 16, 16, 32, 64}), columns = random.between(1, tile_columns < 16 ? 20 : 5);
            const int64_t step_bits = codec == COMPRESS_WALKS_HYB ? random.between(2, 8) : random.between(1, 4);
            check_weight(library, random, walks_of(random, codec, random.between(1, 3), columns, random.of<int64_t>({2, 8, 16, 18}), tile_columns, step_bits, random.between(3, 16)), some_batch(random));
        }
        const int64_t length = random.of<int64_t>({1, 2, 4, 8, 16}), entries = random.of<int64_t>({1, 2, 16, 64, 256});
        const int64_t runs = (some_width(random) + length - 1) / length, group = random.of<int64_t>({0, 0, 16, 64, 128});
        const bool per_row = random.chance(0.3);
        check_weight(library, random, looked_up_of(random, some_rows(random), runs, length, random.between(1, 3), entries, group, per_row), some_batch(random));
        check_weight(library, random, looked_up_of(random, some_rows(random), some_width(random), 1, 1, 16, group, per_row), some_batch(random));
    }
    check_weight(library, random, rows_of(random, true, 200, 1000), 5);
    check_weight(library, random, points_of(random, 40, 80, 2), 70);
    check_weight(library, random, walks_of(random, COMPRESS_WALKS_3INST, 3, 40, 16, 16, 2, 12), 70);
    check_weight(library, random, kept_of(random, true, 40, 4000, 0.5), 20);
    check_weight(library, random, looked_up_of(random, 200, 500, 4, 2, 256, 0, false), 4);
    check_weight(library, random, rows_of(random, false, 20, 100), 0);
    check_weight(library, random, positions_of(random, true, 300, 2000, 0.1), 70);
}

// Some weights in one call: the bits of one call each; also from several threads at once.
void check_many(Library &library, Random &random) {
    constexpr int64_t WIDTH = 300, COUNT = 5;
    std::vector<Weight> weights;
    for (const Offsets offsets : {POINT, POINT, ZEROS}) weights.push_back(codes_of(random, 4, random.between(1, 100), WIDTH, 64, offsets, 0));
    weights.push_back(codes_of(random, 8, 37, WIDTH, 64, POINT, 0));
    weights.push_back(codes_of(random, 8, 64, WIDTH, 128, ZEROS, 0));
    std::vector<const compress_weight *> all;
    for (Weight &weight : weights) library.pack(&weight.w, weight.codes.data(), weight.words.data(), 2), all.push_back(&weight.w);
    for (const std::string &set : library.sets)
        for (const int64_t m : {0, 1, 2, 5, 12})
            for (const int rounded : {COMPRESS_AS_THEY_ARE, COMPRESS_TO_INTEGERS, COMPRESS_TO_INTEGERS_GROUPS}) {
                library.use(set.c_str());
                const Numbers x(random, COMPRESS_F32, m * WIDTH);
                const void *bias[COUNT] = {};
                std::vector<Output> single, together;
                void *y[COUNT];
                for (int64_t i = 0; i < COUNT; ++i) {
                    for (auto *some : {&single, &together}) some->emplace_back(COMPRESS_F32, m * all[i]->rows);
                    y[i] = together[i].data();
                }
                std::vector<std::thread> threads;  // each with one weight
                for (int64_t i = 0; i < COUNT; ++i)
                    threads.emplace_back([&, i] { library.product(all[i], x.data(), single[i].data(), nullptr, nullptr, m, WIDTH, COMPRESS_F32, rounded, 8, 1.0f, 3); });
                for (std::thread &thread : threads) thread.join();
                if (library.products(COUNT, all.data(), x.data(), y, bias, nullptr, m, WIDTH, COMPRESS_F32, rounded, 8, 1.0f, 4))
                    library.failures.add("%s: some products at once failed", set.c_str());
                for (int64_t i = 0; i < COUNT; ++i)
                    if (!single[i].equals(together[i])) library.failures.add("%s: some products at once, batch %lld: not the bits of single ones", set.c_str(), (long long)m);
            }
}

void check_errors(Library &library, Random &random) {
    Weight weight = codes_of(random, 4, 20, 64, 32, POINT, 0);
    float x[64] = {}, y[20] = {};
    auto refused = [&](const char *what, auto change) {
        compress_weight wrong = weight.w;
        change(wrong);
        if (library.product(&wrong, x, y, nullptr, nullptr, 1, 64, COMPRESS_F32, 0, 8, 1.0f, 1) != -1) library.failures.add("%s was taken", what);
    };
    refused("a group of 24 columns", [](compress_weight &w) { w.group = 24; });
    refused("a codec of 6 bits", [](compress_weight &w) { w.codec = 6; });
    refused("too few units", [](compress_weight &w) { w.units = 1, w.groups = 1; });
    refused("a wrong number of groups", [](compress_weight &w) { w.groups = 1; });
    refused("positions without columns", [](compress_weight &w) { w.codec = COMPRESS_POSITIONS_F32, w.zero_point = 0; });
    refused("books without a table", [](compress_weight &w) { w.codec = COMPRESS_LOOKED_UP; });
    for (const char *name : {"mmx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon_dotprod", "neon"}) {
        const bool listed = std::find(library.sets.begin(), library.sets.end(), name) != library.sets.end();
        if (library.choose(name) != (listed ? 0 : -1)) library.failures.add("%s was %s", name, listed ? "refused" : "chosen");
    }
    const int32_t column = 64;
    uint8_t code[20];
    if (library.codes(&weight.w, &column, 1, code, 1) != -1) library.failures.add("a column outside of a weight was given");
    std::vector<char> memory(6 << 20, 'x');
    library.advise(memory.data(), memory.size()), library.release(memory.data(), memory.size());
    for (const char byte : memory) if (byte != 'x') return library.failures.add("memory changed when it was released");
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 2 || count > 3) return std::fprintf(stderr, "usage: %s LIBRARY [SETS]\n", arguments[0]), 2;
    Library library(arguments[1]);
    std::printf("instruction sets: %s\n", library.instruction_sets());
    if (count > 2 && std::strcmp(arguments[2], library.instruction_sets()))
        library.failures.add("the instruction sets are %s, not %s", library.instruction_sets(), arguments[2]);
    Random random;
    check_errors(library, random);
    check_all_codes(library, random, 12);
    check_other_weights(library, random, 20);
    check_many(library, random);
    check_rotations(library, random);
    check_rounding(library, random);
    check_searches(library, random);
    check_steps(library, random);
    check_attentions(library, random);
    std::printf("%lld outputs compared, %d failures\n", static_cast<long long>(library.numbers), library.failures.count);
    return library.failures.count ? 1 : 0;
}
