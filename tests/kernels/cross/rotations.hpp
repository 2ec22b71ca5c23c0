// Rows times Hadamard matrices by every instruction set, against sums over one axis of a run after the other.
#pragma once

#include "library.hpp"

struct Matrix {
    compress_hadamard h{};
    Guarded<float> matrices;
    Guarded<int64_t> lengths;
};

// Matrices of random signs: a kernel multiplies by any. lengths: of all but the innermost.
inline Matrix matrix_of(Random &random, int64_t inner, int64_t levels, const std::vector<int64_t> &lengths) {
    Matrix found;
    const int64_t padded = (inner + 15) / 16 * 16;
    int64_t order = inner << levels, numbers = inner * padded;
    for (const int64_t length : lengths) order *= length, numbers += length * length;
    found.matrices = Guarded<float>(numbers), found.lengths = Guarded<int64_t>(lengths.size());
    for (int64_t i = 0; i < numbers; ++i) found.matrices[i] = random.chance(0.5) ? 1.0f : -1.0f;
    for (int64_t i = 0; i < inner * padded; ++i) if (i % padded >= inner) found.matrices[i] = 0.0f;
    for (size_t i = 0; i < lengths.size(); ++i) found.lengths[i] = lengths[i];
    found.h = {found.matrices.data(), found.lengths.data(), numbers, static_cast<int64_t>(lengths.size()), inner, levels, order};
    return found;
}

// An axis of `length` numbers, `step` apart, times a matrix with rows of `padded` numbers.
inline void along(std::vector<double> &run, int64_t length, int64_t step, int64_t padded, const float *matrix) {
    std::vector<double> axis(length);
    for (int64_t first = 0; first < static_cast<int64_t>(run.size()); ++first) {
        if (first / step % length) continue;
        for (int64_t j = 0; j < length; ++j) {
            axis[j] = 0;
            for (int64_t i = 0; i < length; ++i) axis[j] += run[first + i * step] * matrix[i * padded + j];
        }
        for (int64_t j = 0; j < length; ++j) run[first + j * step] = axis[j];
    }
}

inline void rotate_plainly(const compress_hadamard &h, std::vector<double> &run) {
    static const float TWO[] = {1, 1, 1, -1};
    const int64_t padded = (h.inner + 15) / 16 * 16;
    const float *matrix = h.matrices;
    int64_t step = h.inner;
    along(run, h.inner, 1, padded, matrix);
    matrix += h.inner * padded;
    for (int64_t level = 0; level < h.levels; ++level, step *= 2) along(run, 2, step, 2, TWO);
    for (int64_t i = 0; i < h.count; matrix += h.lengths[i] * h.lengths[i], step *= h.lengths[i], ++i)
        along(run, h.lengths[i], step, h.lengths[i], matrix);
    for (double &number : run) number /= std::sqrt(static_cast<double>(h.order));
}

inline void check_rotation(Library &library, Random &random, const Matrix &matrix, int64_t m, int64_t runs) {
    const int64_t width = runs * matrix.h.order, ldx = width + random.below(3) * 4;
    const int x_type = random.below(2), y_type = random.below(2), outputs = random.below(2);
    Numbers x(random, x_type, m ? (m - 1) * ldx + width : 0);
    if (m && random.chance(0.2)) x.set(random.below(m) * ldx + random.below(width), std::nanf(""));  // for its run alone
    Guarded<int8_t> signs(width);
    Guarded<float> bias(width);
    for (int64_t k = 0; k < width; ++k) signs[k] = random.chance(0.5) ? 1 : -1, bias[k] = random.number(1.0f);
    const bool biased = random.chance(0.5);
    std::vector<double> wanted, allowed;
    for (int64_t row = 0; row < m; ++row)
        for (int64_t first = 0; first < width; first += matrix.h.order) {
            std::vector<double> run(matrix.h.order);
            double square = 0;
            for (int64_t k = 0; k < matrix.h.order; ++k) {
                run[k] = x.at(row * ldx + first + k) * (outputs ? 1 : signs[first + k]);
                square += run[k] * run[k];
            }
            rotate_plainly(matrix.h, run);
            for (int64_t k = 0; k < matrix.h.order; ++k) {
                const double y = run[k] * (outputs ? signs[first + k] : 1) + (biased ? bias[first + k] : 0.0f);
                wanted.push_back(y);
                allowed.push_back(1e-5 * std::sqrt(square) + (y_type ? std::fabs(y) / 256 : 0) + 1e-6);
            }
        }
    for (const std::string &set : library.sets) {
        library.use(set.c_str());
        for (const int threads : {1, 3, 40}) {
            Output y(y_type, m * width);
            const int failed = library.rotate(&matrix.h, x.data(), y.data(), signs.data(), biased ? bias.data() : nullptr, m, width, ldx,
                                              x_type, y_type, outputs, threads);
            char what[200];
            std::snprintf(what, sizeof what, "rotation of %lld x %lld by %lld, inner %lld, %lld levels, threads %d",
                          (long long)m, (long long)width, (long long)matrix.h.order, (long long)matrix.h.inner, (long long)matrix.h.levels, threads);
            if (failed) library.failures.add("%s: %s: returned %d", set.c_str(), what, failed);
            y.compare(library, set, what, wanted, allowed);
        }
    }
}

inline void check_rotations(Library &library, Random &random) {
    const std::vector<std::vector<int64_t>> others = {{}, {12}, {20}, {12, 28}, {3}, {5, 7}};
    for (const int64_t inner : {1, 2, 4, 8, 12, 16, 20, 24, 40, 48})
        for (const int64_t levels : {0, 1, 2, 3})
            for (const auto &lengths : others) {
                if (levels && inner % 16) continue;
                const Matrix matrix = matrix_of(random, inner, levels, lengths);
                if (matrix.h.order > 8000) continue;
                check_rotation(library, random, matrix, random.of<int64_t>({0, 1, 2, 3, 5}), random.between(1, 2));
            }
    check_rotation(library, random, matrix_of(random, 16, 5, {}), 40, 2);  // enough for several threads
    const Matrix matrix = matrix_of(random, 16, 1, {});
    compress_hadamard wrong = matrix.h;
    wrong.order = 64;
    float numbers[64] = {};
    const int8_t signs[64] = {};
    if (library.rotate(&wrong, numbers, numbers, signs, nullptr, 1, 64, 64, 0, 0, 0, 1) != -1)
        library.failures.add("rotation: sizes that do not fit together were taken");
}
