// Instructions of recorded steps by every instruction set: operations of numbers with any strides, rows, places of tables and
// attention, against double.
#pragma once

#include "library.hpp"

constexpr int64_t D = COMPRESS_MOST_DIMENSIONS;

// A tensor of floats or bfloat16 numbers with strides of its own in the dimensions of an instruction.
struct Tensor {
    Numbers numbers;
    compress_operand operand{};

    Tensor(Random &random, int type, const std::vector<int64_t> &sizes, int64_t slot, bool repeats)
        : numbers(random, type, 0) {
        int64_t count = 1;
        operand.slot = slot, operand.type = type;
        std::vector<int64_t> order(D);
        for (int64_t d = 0; d < D; ++d) order[d] = d;
        for (int64_t d = D - 1; d > 0; --d) if (random.chance(0.3)) std::swap(order[d], order[random.below(d + 1)]);
        for (int64_t i = D - 1; i >= 0; --i) {
            const bool once = repeats && random.chance(0.2);
            operand.strides[order[i]] = once ? 0 : count;
            count *= once ? 1 : sizes[order[i]];
        }
        numbers = Numbers(random, type, count);
    }
    int64_t place(const std::vector<int64_t> &at) const {
        int64_t found = 0;
        for (int64_t d = 0; d < D; ++d) found += at[d] * operand.strides[d];
        return found;
    }
};

// Calls f for all places of a space.
template <class F>
void each_place(const std::vector<int64_t> &sizes, F f) {
    std::vector<int64_t> at(D, 0);
    for (const int64_t size : sizes) if (!size) return;
    for (;;) {
        f(at);
        int64_t d = D - 1;
        for (; d >= 0 && ++at[d] == sizes[d]; --d) at[d] = 0;
        if (d < 0) return;
    }
}

inline double mapped(int64_t operation, double x, double y, double z) {
    switch (operation) {
        case COMPRESS_COPY: return x;
        case COMPRESS_NEGATIVE: return -x;
        case COMPRESS_ABSOLUTE: return std::fabs(x);
        case COMPRESS_SQUARE: return x * x;
        case COMPRESS_EXP: return std::exp(x);
        case COMPRESS_SIN: return std::sin(x);
        case COMPRESS_COS: return std::cos(x);
        case COMPRESS_TANH: return std::tanh(x);
        case COMPRESS_SIGMOID: return 1 / (1 + std::exp(-x));
        case COMPRESS_SILU: return x / (1 + std::exp(-x));
        case COMPRESS_GELU: return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
        case COMPRESS_GELU_TANH: return x * 0.5 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
        case COMPRESS_RELU: return x < 0 ? 0 : x;
        case COMPRESS_NOT: return x == 0;
        case COMPRESS_ADD: return x + y;
        case COMPRESS_SUBTRACT: return x - y;
        case COMPRESS_MULTIPLY: return x * y;
        case COMPRESS_DIVIDE: return x / y;
        case COMPRESS_LESSER: return std::min(x, y);
        case COMPRESS_GREATER: return std::max(x, y);
        case COMPRESS_BELOW: return x < y;
        case COMPRESS_AT_MOST: return x <= y;
        case COMPRESS_ABOVE: return x > y;
        case COMPRESS_AT_LEAST: return x >= y;
        case COMPRESS_EQUAL: return x == y;
        case COMPRESS_UNEQUAL: return x != y;
        case COMPRESS_AND: return x != 0 && y != 0;
        case COMPRESS_OR: return x != 0 || y != 0;
        case COMPRESS_CHOOSE: return x != 0 ? y : z;
    }
    return NAN;
}

struct Stepping {
    Library &library;
    std::vector<int64_t> sizes;
    compress_instruction i{};
    std::vector<void *> slots;

    Stepping(Library &to, int64_t operation, std::vector<int64_t> space) : library(to), sizes(std::move(space)) {
        i.operation = operation;
        for (int64_t d = 0; d < D; ++d) i.sizes[d] = sizes[d];
        i.out.slot = -1;
        for (auto &input : i.in) input.slot = -1;
    }
    int64_t run(int threads) {
        const compress_instruction both[2] = {i, i};
        return library.run(both, 1, 2, slots.data(), threads);
    }
    // Every instruction set gives what is wanted of `count` outputs of a type.
    void compare(const char *what, int type, int64_t count, const std::vector<double> &wanted, const std::vector<double> &allowed) {
        for (const std::string &set : library.sets)
            for (const int threads : {1, 3}) {
                library.use(set.c_str());
                Output y(type, count);
                slots[0] = y.data();
                if (run(threads) != 2) return library.failures.add("%s: %s %lld fails", set.c_str(), what, (long long)i.operation);
                y.compare(library, set, what, wanted, allowed);
            }
    }
};

inline double nearness(int type, double y) { return (type ? 8e-3 : 4e-6) * (1 + std::fabs(y)); }

inline std::vector<int64_t> space(Random &random, int64_t last) {
    std::vector<int64_t> sizes(D, 1);
    for (int64_t d = D - 3; d < D - 1; ++d) sizes[d] = random.between(1, 4);
    sizes[D - 1] = last;
    return sizes;
}

inline void check_map(Library &library, Random &random, int64_t operation) {
    const std::vector<int64_t> sizes = space(random, random.of<int64_t>({1, 7, 16, 65, 300}));
    std::vector<Tensor> given;
    for (int64_t k = 0; k < 3; ++k) given.emplace_back(random, random.below(2), sizes, k + 1, true);
    Tensor out(random, random.below(2), sizes, 0, false);
    Stepping step(library, operation, sizes);
    step.i.out = out.operand, step.slots = {nullptr};
    for (int64_t k = 0; k < 3; ++k) step.i.in[k] = given[k].operand, step.slots.push_back(const_cast<void *>(given[k].numbers.data()));
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    std::vector<double> wanted(count), allowed(count);
    const int type = static_cast<int>(out.operand.type);
    each_place(sizes, [&](const std::vector<int64_t> &at) {
        double x[3];
        for (int64_t k = 0; k < 3; ++k) x[k] = given[k].numbers.at(given[k].place(at));
        const double y = mapped(operation, x[0], x[1], x[2]);
        wanted[out.place(at)] = std::isinf(static_cast<float>(y)) ? NAN : y, allowed[out.place(at)] = nearness(type, y);
    });
    for (const double y : wanted) if (std::isnan(y)) return;  // too large for a float
    step.compare("an operation of numbers", type, count, wanted, allowed);
}

inline void check_rows(Library &library, Random &random, int64_t operation) {
    const std::vector<int64_t> sizes = space(random, random.of<int64_t>({1, 15, 16, 257, 1000}));
    const int64_t n = sizes[D - 1], rows = sizes[D - 3] * sizes[D - 2];
    Tensor x(random, random.below(2), sizes, 1, false);
    const bool whole = operation == COMPRESS_SOFTMAX || operation == COMPRESS_NORMALIZE;
    Stepping step(library, operation, sizes);
    step.slots = {nullptr, const_cast<void *>(x.numbers.data())};
    step.i.in[0] = x.operand, step.i.out.slot = 0, step.i.numbers[0] = 1e-5f;
    step.i.out.strides[D - 1] = whole, step.i.out.strides[D - 2] = whole ? n : 1;
    step.i.out.strides[D - 3] = sizes[D - 2] * step.i.out.strides[D - 2];
    std::vector<double> wanted, allowed;
    for (int64_t row = 0; row < rows; ++row) {
        std::vector<int64_t> at(D, 0);
        at[D - 3] = row / sizes[D - 2], at[D - 2] = row % sizes[D - 2];
        double sum = 0, most = -INFINITY, squares = 0, exps = 0, size = 0;
        auto number = [&](int64_t k) { at[D - 1] = k; return static_cast<double>(x.numbers.at(x.place(at))); };
        for (int64_t k = 0; k < n; ++k) sum += number(k), size += std::fabs(number(k)), most = std::max(most, number(k));
        for (int64_t k = 0; k < n; ++k) squares += (number(k) - sum / n) * (number(k) - sum / n), exps += std::exp(number(k) - most);
        if (!whole) wanted.push_back(operation == COMPRESS_SUM ? sum : operation == COMPRESS_MEAN ? sum / n : most), allowed.push_back(1e-5 * (1 + size));
        else for (int64_t k = 0; k < n; ++k) {
            const double deviation = std::sqrt(squares / n + 1e-5);
            wanted.push_back(operation == COMPRESS_SOFTMAX ? std::exp(number(k) - most) / exps : (number(k) - sum / n) / deviation);
            allowed.push_back(operation == COMPRESS_SOFTMAX ? 1e-5 : 1e-5 * (1 + (1 + size / n) / deviation));
        }
    }
    step.compare("an operation of rows", 0, static_cast<int64_t>(wanted.size()), wanted, allowed);
}

// A table of three rows; the second place may be one that there is not.
inline void check_places(Library &library, Random &random, bool there) {
    const int64_t width = random.between(1, 40);
    Numbers table(random, 0, 3 * width);
    Guarded<int64_t> places(2);
    places[0] = random.between(-3, 2), places[1] = there ? random.below(3) : random.of<int64_t>({3, -4, 1 << 20});
    std::vector<int64_t> sizes(D, 1);
    sizes[D - 2] = 2, sizes[D - 1] = width;
    Stepping step(library, COMPRESS_TAKE, sizes);
    step.slots = {nullptr, places.data(), const_cast<void *>(table.data())};
    step.i.along = D - 2, step.i.limit = 3;
    step.i.out.slot = 0, step.i.in[0].slot = 1, step.i.in[1].slot = 2, step.i.in[0].type = COMPRESS_NUMBER_I64;
    for (auto *operand : {&step.i.out, &step.i.in[1]}) operand->strides[D - 2] = width, operand->strides[D - 1] = 1;
    step.i.in[0].strides[D - 2] = 1;
    std::vector<double> wanted, allowed(2 * width, 0.0);
    if (there) {
        for (int64_t row = 0; row < 2; ++row)
            for (int64_t k = 0; k < width; ++k) wanted.push_back(table.at((places[row] + 3) % 3 * width + k));
        return step.compare("places of a table", 0, 2 * width, wanted, allowed);
    }
    Output y(0, 2 * width);
    step.slots[0] = y.data();
    if (step.run(1) != -1) library.failures.add("a place that there is not is taken");
}

inline void check_attention(Library &library, Random &random) {
    const int64_t batch = random.between(1, 2), heads = random.between(1, 3), queries = random.between(1, 4);
    const int64_t keys = random.of<int64_t>({1, 5, 33, 256, 257, 700}), width = random.of<int64_t>({3, 16, 40, 64}), out = random.of<int64_t>({5, 16, 64});
    const int type = static_cast<int>(random.below(2));
    Numbers q(random, type, batch * heads * queries * width), k(random, type, batch * heads * keys * width), v(random, type, batch * heads * keys * out);
    Guarded<float> mask(batch * keys);
    for (int64_t s = 0; s < mask.size(); ++s) mask[s] = s % keys && random.chance(0.3) ? -INFINITY : random.number(1.0f);
    Stepping step(library, COMPRESS_ATTEND, {batch, heads, queries, keys, width, out});
    step.slots = {nullptr, const_cast<void *>(q.data()), const_cast<void *>(k.data()), const_cast<void *>(v.data()), mask.data()};
    step.i.numbers[0] = 0.1f;
    step.i.out = {0, 0, {heads * queries * out, queries * out, out, 0, 0, 1}, 0};
    step.i.in[0] = {1, 0, {heads * queries * width, queries * width, width, 0, 1, 0}, type};
    step.i.in[1] = {2, 0, {heads * keys * width, keys * width, 0, width, 1, 0}, type};
    step.i.in[2] = {3, 0, {heads * keys * out, keys * out, 0, out, 0, 1}, type};
    step.i.in[3] = {4, 0, {keys, 0, 0, 1, 0, 0}, 0};
    std::vector<double> wanted, allowed;
    for (int64_t head = 0; head < batch * heads; ++head)
        for (int64_t r = 0; r < queries; ++r) {
            std::vector<double> weights(keys);
            double most = -INFINITY, sum = 0;
            for (int64_t s = 0; s < keys; ++s) {
                for (int64_t d = 0; d < width; ++d) weights[s] += static_cast<double>(q.at((head * queries + r) * width + d)) * k.at((head * keys + s) * width + d);
                most = std::max(most, weights[s] = weights[s] * 0.1f + mask[head / heads * keys + s]);
            }
            for (double &weight : weights) sum += weight = std::exp(weight - most);
            for (int64_t d = 0; d < out; ++d) {
                double y = 0, size = 0;
                for (int64_t s = 0; s < keys; ++s) y += weights[s] / sum * v.at((head * keys + s) * out + d), size = std::max(size, std::fabs(static_cast<double>(v.at((head * keys + s) * out + d))));
                wanted.push_back(y), allowed.push_back(2e-4 * (1 + size));
            }
        }
    step.compare("attention", 0, static_cast<int64_t>(wanted.size()), wanted, allowed);
}

inline void check_steps(Library &library, Random &random) {
    for (int round = 0; round < 12; ++round) {
        for (int64_t operation : {COMPRESS_COPY, COMPRESS_NEGATIVE, COMPRESS_ABSOLUTE, COMPRESS_SQUARE, COMPRESS_EXP, COMPRESS_SIN,
                                  COMPRESS_COS, COMPRESS_TANH, COMPRESS_SIGMOID, COMPRESS_SILU, COMPRESS_GELU, COMPRESS_GELU_TANH,
                                  COMPRESS_RELU, COMPRESS_NOT, COMPRESS_ADD, COMPRESS_SUBTRACT, COMPRESS_MULTIPLY, COMPRESS_DIVIDE,
                                  COMPRESS_LESSER, COMPRESS_GREATER, COMPRESS_BELOW, COMPRESS_AT_MOST, COMPRESS_ABOVE,
                                  COMPRESS_AT_LEAST, COMPRESS_EQUAL, COMPRESS_UNEQUAL, COMPRESS_AND, COMPRESS_OR, COMPRESS_CHOOSE})
            check_map(library, random, operation);
        for (int64_t operation : {COMPRESS_SUM, COMPRESS_MEAN, COMPRESS_LARGEST, COMPRESS_SOFTMAX, COMPRESS_NORMALIZE})
            check_rows(library, random, operation);
        check_places(library, random, true), check_places(library, random, false);
        check_attention(library, random), check_attention(library, random);
    }
    Stepping step(library, COMPRESS_CALLER, std::vector<int64_t>(D, 1));
    if (step.run(1) != 1) library.failures.add("a step goes on behind what the caller computes");
    step.i.operation = 30;
    step.slots = {nullptr};
    if (step.run(1) != -1) library.failures.add("an unknown operation is computed");
    if (library.run(&step.i, 2, 1, step.slots.data(), 1) != -1) library.failures.add("a step begins behind its end");
}
