// What the checks share: random numbers, buffers that end where memory ends, bfloat16, and the list of failures.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

// The same in every run and with every standard library, whose distributions differ.
struct Random {
    std::mt19937 engine{20240607};
    uint32_t bits() { return static_cast<uint32_t>(engine()); }
    int64_t below(int64_t count) { return bits() % count; }
    int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
    bool chance(double share) { return bits() < share * 4294967296.0; }
    float number(float size) { return (static_cast<float>(bits() >> 8) / 8388608.0f - 1.0f) * size; }
    template <class T> T of(const std::vector<T> &some) { return some[below(some.size())]; }
};

// Numbers that end at a page without access: reading or writing one more ends the program.
template <class T>
class Guarded {
  public:
    explicit Guarded(int64_t count = 0) : count_(count) {
        const int64_t page = sysconf(_SC_PAGESIZE), pages = (count * sizeof(T) + page - 1) / page;
        bytes_ = (pages + 1) * page;
        memory_ = static_cast<char *>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (memory_ == MAP_FAILED || mprotect(memory_ + pages * page, page, PROT_NONE)) abort();
        first_ = reinterpret_cast<T *>(memory_ + pages * page - count * sizeof(T));
    }
    Guarded(Guarded &&other) noexcept { *this = std::move(other); }
    Guarded &operator=(Guarded &&other) noexcept {
        std::swap(memory_, other.memory_), std::swap(bytes_, other.bytes_);
        std::swap(first_, other.first_), std::swap(count_, other.count_);
        return *this;
    }
    ~Guarded() { if (memory_) munmap(memory_, bytes_); }

    T *data() { return first_; }
    const T *data() const { return first_; }
    int64_t size() const { return count_; }
    T &operator[](int64_t i) { return first_[i]; }
    const T &operator[](int64_t i) const { return first_[i]; }

  private:
    char *memory_ = nullptr;
    T *first_ = nullptr;
    int64_t bytes_ = 0, count_ = 0;
};

template <class To, class From>
To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To found;
    std::memcpy(&found, &x, sizeof found);
    return found;
}

inline float from_bf16(uint16_t x) { return bits_as<float>(static_cast<uint32_t>(x) << 16); }

// To the nearest number of 8 significant bits, ties to even, by the rounding of the processor: of x as a float, the upper
// 16 bits and what is left of it.
inline uint16_t to_bf16(float x) {
    if (std::isnan(x)) return 0x7fc0;
    const uint32_t bits = bits_as<uint32_t>(x), rest = bits & 0xffff;
    const uint32_t up = rest > 0x8000 || (rest == 0x8000 && (bits >> 16 & 1));
    return static_cast<uint16_t>((bits >> 16) + up);
}

inline double rounded_to_bf16(double x) { return from_bf16(to_bf16(static_cast<float>(x))); }

// What did not hold; the program ends with an error if there is any.
struct Failures {
    int count = 0;
    template <class... Values>
    void add(const char *format, Values... values) {
        if (++count <= 20) std::fprintf(stderr, format, values...), std::fputc('\n', stderr);
    }
};
