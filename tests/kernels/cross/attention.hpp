// Attention of many queries by every instruction set, against sums in double.
#pragma once

#include "library.hpp"

// A row of q, k or v: its place by sequence, head and row, with room between rows.
struct Rows {
    int64_t strides[3];
    Guarded<float> numbers;

    Rows(Random &random, int64_t batch, int64_t heads, int64_t rows, int64_t width) {
        const int64_t row = width + random.below(3);
        strides[0] = heads * rows * row, strides[1] = rows * row, strides[2] = row;
        if (random.chance(0.5)) strides[1] = row, strides[2] = heads * row;  // as a layer before it writes them
        numbers = Guarded<float>(batch * heads * rows * row - (row - width));
        for (int64_t i = 0; i < numbers.size(); ++i) numbers[i] = random.number(random.chance(0.01) ? 20.0f : 2.0f);
    }
    int64_t at(int64_t b, int64_t h, int64_t r) const { return b * strides[0] + h * strides[1] + r * strides[2]; }
};

inline void check_attention(Library &library, Random &random, int64_t queries, int64_t keys, int64_t width, int64_t out) {
    const int64_t batch = random.between(1, 2), groups = random.between(1, 2), shared = random.between(1, 3), heads = groups * shared;
    Rows q(random, batch, heads, queries, width), k(random, batch, groups, keys, width), v(random, batch, groups, keys, out);
    const int kind = random.below(3), causal = random.chance(0.3);
    const bool own = random.chance(0.5);  // a mask for each head
    const int64_t masks = kind ? (own ? batch * heads : 1) * queries * keys : 0;
    Guarded<uint8_t> seen(kind == COMPRESS_MASK_BOOL ? masks : 0);
    Guarded<float> biases(kind == COMPRESS_MASK_F32 ? masks : 0);
    const bool triangle = random.chance(0.5);
    for (int64_t i = 0; i < masks; ++i) {
        const bool open = triangle ? i % keys <= i / keys % queries : random.chance(0.7);
        if (kind == COMPRESS_MASK_BOOL) seen[i] = open;
        else biases[i] = open ? random.number(1.0f) : random.chance(0.5) ? -INFINITY : -3.4028235e38f;
    }
    if (random.chance(0.2)) q.numbers[q.at(0, 0, random.below(queries)) + random.below(width)] = bits_as<float>(0x7fc12345u);  // NaN
    compress_attention a = {};
    const int64_t sizes[6] = {batch, heads, queries, keys, width, out};
    std::copy(sizes, sizes + 6, a.sizes);
    for (int i = 0; i < 3; ++i) a.q_strides[i] = q.strides[i], a.k_strides[i] = k.strides[i], a.v_strides[i] = v.strides[i];
    a.out_strides[0] = heads * queries * out, a.out_strides[1] = queries * out, a.out_strides[2] = out;
    if (own) a.mask_strides[0] = heads * queries * keys, a.mask_strides[1] = queries * keys;
    a.mask_strides[2] = keys;
    a.q = q.numbers.data(), a.k = k.numbers.data(), a.v = v.numbers.data();
    a.mask = kind == COMPRESS_MASK_BOOL ? static_cast<const void *>(seen.data()) : kind ? biases.data() : nullptr;
    a.groups = groups, a.scale = 0.3f, a.mask_type = kind, a.causal = causal;
    std::vector<double> wanted, allowed;
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t r = 0; r < queries; ++r) {
                std::vector<double> scores(keys);
                double most = -INFINITY, sum = 0, size = 0;
                for (int64_t s = 0; s < keys; ++s) {
                    double score = 0;
                    for (int64_t c = 0; c < width; ++c) score += double(q.numbers[q.at(b, h, r) + c]) * k.numbers[k.at(b, h / shared, s) + c];
                    size = std::max(size, std::fabs(score));
                    const int64_t place = ((own ? b * heads + h : 0) * queries + r) * keys + s;
                    score *= 0.3f;
                    if (kind == COMPRESS_MASK_F32) score = static_cast<float>(score + biases[place]);
                    if ((causal && s > r) || (kind == COMPRESS_MASK_BOOL && !seen[place])) score = -INFINITY;
                    scores[s] = score;
                    if (score > most || score != score) most = score;
                }
                for (double &score : scores) sum += score = most == -INFINITY ? 0 : std::exp(score - most);
                for (int64_t c = 0; c < out; ++c) {
                    double y = 0, largest = 0;
                    for (int64_t s = 0; s < keys; ++s) {
                        const float value = v.numbers[v.at(b, h / shared, s) + c];
                        if (scores[s] != 0) y += scores[s] * value / sum, largest = std::max(largest, std::fabs(double(value)));
                    }
                    wanted.push_back(y), allowed.push_back(largest * (1e-5 + 2e-6 * size) + 1e-6);
                }
            }
    for (const std::string &set : library.sets) {
        library.use(set.c_str());
        for (const int threads : {1, 3, 40}) {
            Output y(COMPRESS_F32, batch * heads * queries * out);
            a.out = static_cast<float *>(y.data()), a.threads = threads;
            const int failed = library.attend(&a);
            char what[200];
            std::snprintf(what, sizeof what, "attention of %lld heads, %lld queries, %lld keys, widths %lld and %lld, mask %d, causal %d, threads %d",
                          (long long)(batch * heads), (long long)queries, (long long)keys, (long long)width, (long long)out, kind, causal, threads);
            if (failed) library.failures.add("%s: %s: returned %d", set.c_str(), what, failed);
            y.compare(library, set, what, wanted, allowed);
        }
    }
}

inline void check_attentions(Library &library, Random &random) {
    for (int i = 0; i < 150; ++i) {
        const int64_t keys = random.chance(0.3) ? random.between(90, 300) : random.between(1, 60);
        check_attention(library, random, random.between(1, 70), keys, random.between(1, 40), random.between(1, 40));
    }
    check_attention(library, random, 150, 150, 64, 64);  // enough for several threads
    compress_attention wrong = {};
    wrong.groups = 2, wrong.threads = 1;
    for (int64_t &size : wrong.sizes) size = 1;
    if (library.attend(&wrong) != -1) library.failures.add("attention: two heads for one head were taken");
}
