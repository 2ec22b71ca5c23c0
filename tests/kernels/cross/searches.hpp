// Walks through trellises by every instruction set: their errors are those of the best walks, found in double.
#pragma once

#include "library.hpp"

// The least error of a walk; ends: the bits that the first state begins with and the last one ends with, or -1.
inline double least_error(const compress_search &s, int64_t row, int64_t ends) {
    const int64_t overlaps = int64_t{1} << (s.states - s.step_bits), every = int64_t{1} << s.states;
    std::vector<double> costs(overlaps, ends < 0 ? 0.0 : INFINITY), next(overlaps);
    if (ends >= 0) costs[ends] = 0;
    for (int64_t step = 0; step < s.steps; ++step) {
        std::fill(next.begin(), next.end(), INFINITY);
        for (int64_t state = 0; state < every; ++state) {
            double cost = costs[state >> s.step_bits];
            for (int64_t v = 0; v < s.length; ++v) {
                const double off = static_cast<double>(s.values[v * every + state]) - s.sequences[(row * s.steps + step) * s.length + v];
                cost += off * off;
            }
            next[state % overlaps] = std::min(next[state % overlaps], cost);
        }
        costs.swap(next);
    }
    return ends < 0 ? *std::min_element(costs.begin(), costs.end()) : costs[ends];
}

inline void check_search(Library &library, Random &random, int64_t states, int64_t step_bits, int64_t length, int64_t count, int64_t steps) {
    const int64_t every = int64_t{1} << states, overlaps = every >> step_bits;
    Guarded<float> sequences(count * steps * length), values(every * length);
    Guarded<int32_t> ends(count), found(count * steps);
    for (int64_t i = 0; i < sequences.size(); ++i) sequences[i] = random.number(2.0f);
    for (int64_t i = 0; i < values.size(); ++i) values[i] = random.number(2.0f);
    for (int64_t i = 0; i < count; ++i) ends[i] = static_cast<int32_t>(random.below(overlaps));
    const bool tied = random.chance(0.5) && steps * step_bits >= states;
    compress_search s = {sequences.data(), values.data(), tied ? ends.data() : nullptr, found.data(), count, steps, length, states, step_bits, 1};
    for (const std::string &set : library.sets)
        for (const int threads : {1, 3, 40}) {
            library.use(set.c_str());
            s.threads = threads;
            auto fails = [&](const char *what) {
                library.failures.add("%s: walks of %lld steps, %lld states, %lld bits, threads %d: %s", set.c_str(), (long long)steps,
                                     (long long)every, (long long)step_bits, threads, what);
            };
            if (library.search_walks(&s)) return fails("refused");
            library.numbers += count * steps;
            for (int64_t row = 0; row < count; ++row) {
                const int32_t *walk = found.data() + row * steps;
                double error = 0;
                for (int64_t step = 0; step < steps; ++step) {
                    if (walk[step] < 0 || walk[step] >= every) return fails("a state is out of range");
                    if (step && walk[step] >> step_bits != walk[step - 1] % overlaps) return fails("a state does not follow");
                    for (int64_t v = 0; v < length; ++v) {
                        const double off = static_cast<double>(values[v * every + walk[step]]) - sequences[(row * steps + step) * length + v];
                        error += off * off;
                    }
                }
                if (tied && (walk[0] >> step_bits != ends[row] || walk[steps - 1] % overlaps != ends[row])) return fails("an end is another");
                const double least = least_error(s, row, tied ? ends[row] : -1);
                if (error > least * (1 + 1e-4) + 1e-5) return fails("another walk is better");
            }
        }
}

// Circles of bits, read bit by bit.
inline void check_values(Library &library, Random &random, int64_t states, int64_t step_bits, int64_t length, int64_t count, int64_t size) {
    const int64_t steps = size * 8 / step_bits;
    Guarded<uint8_t> codes(count * size);
    Guarded<float> values((int64_t{1} << states) * length), found(count * steps * length);
    for (int64_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(random.below(256));
    for (int64_t i = 0; i < values.size(); ++i) values[i] = random.number(2.0f);
    if (library.decode_walks(codes.data(), values.data(), found.data(), count, size, states, step_bits, length, random.of<int>({1, 3, 40})))
        return library.failures.add("values of walks: refused");
    library.numbers += found.size();
    for (int64_t i = 0; i < found.size(); ++i) {
        const int64_t first = i / length % steps * step_bits;
        int64_t state = 0;
        for (int64_t bit = 0; bit < states; ++bit) {
            const int64_t at = (first + bit) % (size * 8);
            state = 2 * state + (codes[i / (steps * length) * size + at / 8] >> (7 - at % 8) & 1);
        }
        if (found[i] != values[state * length + i % length]) return library.failures.add("values of walks: number %lld is another", (long long)i);
    }
}

inline void check_searches(Library &library, Random &random) {
    for (const int64_t length : {1, 2})
        for (const int64_t step_bits : {1, 2, 3, 4, 5, 8})
            for (const int64_t more : {4, 5, 7}) {
                const int64_t states = step_bits + more;
                if (states > 13) continue;
                check_search(library, random, states, step_bits, length, random.between(1, 9), random.between(1, 20));
            }
    for (const int64_t states : {1, 4, 12, 16})
        for (int64_t step_bits = 1; step_bits <= 8 && step_bits <= states; ++step_bits)
            check_values(library, random, states, step_bits, random.between(1, 2), random.between(0, 200), step_bits * random.between(1, 9));
    if (library.decode_walks(nullptr, nullptr, nullptr, 1, 1, 17, 1, 1, 1) != -1) library.failures.add("values of walks: 17 bits were taken");
    check_search(library, random, 12, 2, 1, 30, 40);
    check_search(library, random, 6, 2, 1, 0, 5);
    check_search(library, random, 6, 2, 1, 5, 0);
    float number = 0;
    const int32_t end = 16;
    int32_t state = 0;
    auto refused = [&](const char *what, compress_search s) {
        if (library.search_walks(&s) != -1) library.failures.add("walks: %s were taken", what);
    };
    refused("too few states", {&number, &number, nullptr, &state, 1, 1, 1, 5, 2, 1});
    refused("too many states", {&number, &number, nullptr, &state, 1, 1, 1, 17, 2, 1});
    refused("three weights a state", {&number, &number, nullptr, &state, 1, 1, 3, 6, 2, 1});
    refused("ends out of range", {&number, &number, &end, &state, 1, 1, 1, 6, 2, 1});
    refused("no threads", {&number, &number, nullptr, &state, 1, 1, 1, 6, 2, 0});
}
