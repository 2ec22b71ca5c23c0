// Columns that are rounded to integers, and sums over groups, by every instruction set, against their definitions.
#pragma once

#include "library.hpp"

// Numbers of a call; where one is left out, its pointer is NULL.
struct Rounding {
    compress_columns c{};
    Guarded<float> state, matrix, scale, zero, old, pivots, codes, values, moves, wanted;
    Guarded<uint8_t> keep;
};

inline Guarded<float> floats_of(Random &random, int64_t count, float low, float high) {
    Guarded<float> found(count);
    for (int64_t i = 0; i < count; ++i) found[i] = low + (high - low) * std::fabs(random.number(1.0f));
    return found;
}

inline Rounding rounding_of(Random &random, int64_t rows, int64_t columns) {
    Rounding r;
    const int64_t all = rows * columns, stride = columns + random.below(2) * 5, scales = random.chance(0.7) ? all : rows;
    r.state = floats_of(random, all, -1.0f, 3.0f), r.matrix = floats_of(random, columns * stride, -0.1f, 0.2f);
    r.scale = floats_of(random, scales, 0.05f, 0.6f), r.zero = floats_of(random, scales, -4.0f, 4.0f);
    r.old = floats_of(random, all, -1.0f, 1.0f), r.pivots = floats_of(random, columns, 0.5f, 3.0f);
    r.codes = Guarded<float>(all), r.values = Guarded<float>(all), r.moves = Guarded<float>(all), r.wanted = Guarded<float>(all);
    r.keep = Guarded<uint8_t>(all);
    for (int64_t i = 0; i < all; ++i) r.keep[i] = random.chance(0.7);
    for (int64_t i = 0; i < scales; ++i) {
        r.zero[i] = std::nearbyint(r.zero[i]);
        if (random.chance(0.2)) r.scale[i] = -r.scale[i];
    }
    const bool descent = random.chance(0.5);
    const int bits = 2 + random.below(7);
    r.c = {r.state.data(), r.matrix.data(), r.scale.data(), random.chance(0.5) ? r.zero.data() : nullptr,
           random.chance(0.5) ? r.keep.data() : nullptr, descent ? r.old.data() : nullptr, descent ? r.pivots.data() : nullptr,
           r.codes.data(), r.values.data(), r.moves.data(), r.wanted.data(), nullptr, rows, columns, scales == rows && columns > 1 ? 0 : rows,
           stride, 0, -static_cast<float>(1 << (bits - 1)), static_cast<float>((1 << (bits - 1)) - 1), 1};
    if (scales == rows) r.c.scale_stride = 0;
    return r;
}

// Each column follows from the moves of those before it, as the library gives them: codes of near ties may differ.
inline void check_columns(Library &library, Random &random, int64_t rows, int64_t columns) {
    Rounding r = rounding_of(random, rows, columns);
    const compress_columns &c = r.c;
    for (const std::string &set : library.sets)
        for (const int threads : {1, 3, 40}) {
            library.use(set.c_str());
            r.c.threads = threads;
            auto fails = [&](const char *what) {
                library.failures.add("%s: %lld columns of %lld rows%s, threads %d: %s", set.c_str(), (long long)columns, (long long)rows,
                                     c.old ? ", descent" : "", threads, what);
            };
            if (library.round_columns(&c)) return fails("refused");
            library.numbers += rows * columns;
            for (int64_t j = 0; j < columns; ++j)
                for (int64_t row = 0; row < rows; ++row) {
                    const int64_t at = j * rows + row, grid = j * c.scale_stride + row;
                    double state = c.state[at], size = std::fabs(state);
                    for (int64_t i = 0; i < j; ++i) {
                        const double term = static_cast<double>(c.matrix[i * c.matrix_stride + j]) * c.moves[i * rows + row];
                        state -= term, size += std::fabs(term);
                    }
                    double w = c.old ? c.old[at] + state / c.pivots[j] : state;
                    if (c.keep && !c.keep[at]) w = 0;
                    const double near = 1e-5 * (1 + size) / (c.old ? c.pivots[j] : 1), zero = c.zero ? c.zero[grid] : 0, scale = c.scale[grid];
                    if (!(std::fabs(c.wanted[at] - w) <= near)) return fails("what was rounded is not the sum");
                    const double place = std::min<double>(std::max<double>(c.wanted[at] / scale + zero, c.lowest), c.highest), code = c.codes[at];
                    if (code != std::nearbyint(code) || std::fabs(code - place) > 0.5 + 1e-4) return fails("a code is not the nearest");
                    if (c.values[at] != static_cast<float>(code - zero) * c.scale[grid]) return fails("a value is not that of its code");
                    const double move = c.old ? c.values[at] - c.old[at] : state - c.values[at];
                    if (!(std::fabs(c.moves[at] - move) <= 1e-5 * (1 + size))) return fails("a move is not the difference");
                }
        }
}

inline void check_groups(Library &library, Random &random, int64_t rows, int64_t groups, int64_t size) {
    const Guarded<float> weights = floats_of(random, rows * groups * size, -1.0f, 2.0f), scale = floats_of(random, rows * groups, 0.05f, 0.5f);
    const Guarded<float> zero = floats_of(random, rows * groups, -3.0f, 3.0f), importance = floats_of(random, groups * size, 0.0f, 2.0f);
    const bool zeros = random.chance(0.5), summed = random.chance(0.5);
    std::vector<double> wanted[3], allowed[3];
    for (int64_t at = 0; at < rows * groups; ++at) {
        double sums[3] = {}, slack[3] = {};
        for (int64_t k = 0; k < size; ++k) {
            const double h = importance[at % groups * size + k], z = zeros ? zero[at] : 0;
            const float w = weights[at * size + k];
            const float place = w / scale[at] + static_cast<float>(z);
            const double level = std::nearbyint(std::min(std::max(place, -8.0f), 7.0f)) - z, off = level * scale[at] - w;
            const double tie = std::fabs(std::fabs(place - std::floor(place)) - 0.5) < 1e-5 ? 1 : 1e-5;  // either code is right
            sums[0] += h * off * off, sums[1] += h * level * level, sums[2] += h * level * w;
            slack[0] += 1e-5 * (1 + h * off * off) + (tie == 1 ? 1e-4 * h : 0);
            slack[1] += tie * h * (2 * std::fabs(level) + 1) + 1e-5 * h * level * level;
            slack[2] += tie * h * std::fabs(w) * (1 + std::fabs(level));
        }
        for (int i = 0; i < 3; ++i) wanted[i].push_back(sums[i]), allowed[i].push_back(slack[i] + 1e-6);
    }
    for (const std::string &set : library.sets)
        for (const int threads : {1, 3, 40}) {
            library.use(set.c_str());
            Output found[3] = {Output(COMPRESS_F32, rows * groups), Output(COMPRESS_F32, rows * groups), Output(COMPRESS_F32, rows * groups)};
            float *data[3];
            for (int i = 0; i < 3; ++i) data[i] = i && !summed ? nullptr : static_cast<float *>(found[i].data());
            const compress_groups g = {weights.data(), scale.data(), zeros ? zero.data() : nullptr, importance.data(), data[0], data[1], data[2], nullptr,
                                       rows, groups, size, 0, -8.0f, 7.0f, threads};
            char what[100];
            std::snprintf(what, sizeof what, "sums of %lld x %lld groups of %lld, threads %d", (long long)rows, (long long)groups, (long long)size, threads);
            if (library.sum_groups(&g)) library.failures.add("%s: %s: refused", set.c_str(), what);
            for (int i = 0; i < (summed ? 3 : 1); ++i) found[i].compare(library, set, what, wanted[i], allowed[i]);
        }
}

inline void check_rounding(Library &library, Random &random) {
    for (const int64_t rows : {0, 1, 15, 16, 17, 40, 300})
        for (const int64_t columns : {0, 1, 2, 16, 33, 128, 256}) check_columns(library, random, rows, columns);
    for (const int64_t size : {1, 15, 16, 17, 32, 64, 100}) check_groups(library, random, random.between(1, 70), random.between(1, 5), size);
    Rounding r = rounding_of(random, 3, 4);
    auto refused = [&](const char *what, auto change) {
        compress_columns wrong = r.c;
        change(wrong);
        if (library.round_columns(&wrong) != -1) library.failures.add("columns: %s were taken", what);
    };
    refused("too many", [](compress_columns &c) { c.columns = COMPRESS_MOST_COLUMNS + 1, c.matrix_stride = c.columns; });
    refused("rows below zero", [](compress_columns &c) { c.rows = -1; });
    refused("overlapping rows of a matrix", [](compress_columns &c) { c.matrix_stride = 3; });
    refused("overlapping scales", [](compress_columns &c) { c.scale_stride = 2; });
    refused("old values without pivots", [&](compress_columns &c) { c.old = r.old.data(), c.pivots = nullptr; });
    refused("no threads", [](compress_columns &c) { c.threads = 0; });
    compress_groups groups{};
    groups.rows = groups.groups = groups.size = 1, groups.threads = 0;
    if (library.sum_groups(&groups) != -1) library.failures.add("groups: no threads were taken");
}
