// The library of the kernels, and inputs and outputs in its two types.
#pragma once

#include <dlfcn.h>

#include "weights.hpp"

struct Library {
    std::vector<std::string> sets;  // the portable one is the last
    Failures failures;
    int64_t numbers = 0;  // outputs that were compared
    decltype(&compress_products) products;
    decltype(&compress_product) product;
    decltype(&compress_pack) pack;
    decltype(&compress_codes) codes;
    decltype(&compress_rotate) rotate;
    decltype(&compress_round_columns) round_columns;
    decltype(&compress_sum_groups) sum_groups;
    decltype(&compress_search_walks) search_walks;
    decltype(&compress_decode_walks) decode_walks;
    decltype(&compress_attend) attend;
    decltype(&compress_run) run;
    decltype(&compress_advise) advise;
    decltype(&compress_release) release;
    decltype(&compress_instruction_sets) instruction_sets;
    decltype(&compress_use) choose;

    explicit Library(const char *path) {
        handle_ = dlopen(path, RTLD_NOW);
        if (!handle_) std::fprintf(stderr, "%s\n", dlerror()), exit(2);
        get("compress_products", products), get("compress_product", product), get("compress_pack", pack);
        get("compress_codes", codes), get("compress_rotate", rotate), get("compress_advise", advise);
        get("compress_round_columns", round_columns), get("compress_sum_groups", sum_groups);
        get("compress_search_walks", search_walks), get("compress_decode_walks", decode_walks);
        get("compress_attend", attend), get("compress_run", run), get("compress_release", release);
        get("compress_instruction_sets", instruction_sets), get("compress_use", choose);
        const std::string names = instruction_sets();
        for (size_t first = 0; first <= names.size();) {
            const size_t stop = std::min(names.find(',', first), names.size());
            sets.push_back(names.substr(first, stop - first));
            first = stop + 1;
        }
    }

    void use(const char *name) {
        if (choose(name)) std::fprintf(stderr, "%s was listed and cannot be chosen\n", name), exit(2);
    }

  private:
    void *handle_;

    template <class F>
    void get(const char *name, F &function) {
        function = reinterpret_cast<F>(dlsym(handle_, name));
        if (!function) std::fprintf(stderr, "%s\n", dlerror()), exit(2);
    }
};

// Random floats or bfloat16 numbers. Some are much larger than the others.
class Numbers {
  public:
    Numbers(Random &random, int type, int64_t count) : type_(type), floats_(type ? 0 : count), halves_(type ? count : 0) {
        for (int64_t i = 0; i < count; ++i) set(i, random.number(random.chance(0.01) ? 40.0f : 2.0f));
    }
    void set(int64_t i, float x) { type_ ? void(halves_[i] = to_bf16(x)) : void(floats_[i] = x); }
    float at(int64_t i) const { return type_ ? from_bf16(halves_[i]) : floats_[i]; }
    const void *data() const { return type_ ? static_cast<const void *>(halves_.data()) : floats_.data(); }

  private:
    int type_;
    Guarded<float> floats_;
    Guarded<uint16_t> halves_;
};

// Outputs with a pattern before them, and no memory after them.
class Output {
  public:
    Output(int type, int64_t count) : type_(type), count_(count), bytes_(BEFORE + count * (type ? 2 : 4)) {
        std::memset(bytes_.data(), PATTERN, bytes_.size());
    }
    void *data() { return bytes_.data() + BEFORE; }
    float at(int64_t i) const {
        if (!type_) { float x; std::memcpy(&x, bytes_.data() + BEFORE + 4 * i, 4); return x; }
        uint16_t x;
        std::memcpy(&x, bytes_.data() + BEFORE + 2 * i, 2);
        return from_bf16(x);
    }
    bool equals(const Output &other) const { return !std::memcmp(bytes_.data(), other.bytes_.data(), bytes_.size()); }

    // Whether all are as near as is allowed, and NaN where NaN is wanted.
    bool near(const std::vector<double> &wanted, const std::vector<double> &allowed, int64_t &worst) const {
        for (worst = 0; worst < count_; ++worst) {
            const double found = at(worst), error = std::fabs(found - wanted[worst]);
            if (std::isnan(wanted[worst]) ? !std::isnan(found) : !(error <= allowed[worst])) return false;
        }
        return true;
    }

    void compare(Library &library, const std::string &set, const char *what, const std::vector<double> &wanted, const std::vector<double> &allowed) const {
        int64_t at_fault;
        library.numbers += count_;
        if (!near(wanted, allowed, at_fault))
            library.failures.add("%s: %s: output %lld is %.9g, not %.9g within %.2g", set.c_str(), what, (long long)at_fault,
                                 at(at_fault), wanted[at_fault], allowed[at_fault]);
        for (int64_t i = 0; i < BEFORE; ++i)
            if (bytes_[i] != PATTERN) return library.failures.add("%s: %s: wrote before its outputs", set.c_str(), what);
    }

  private:
    static constexpr int64_t BEFORE = 64;
    static constexpr uint8_t PATTERN = 0xa5;
    int type_;
    int64_t count_;
    Guarded<uint8_t> bytes_;
};
