#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace compress_cpu {
namespace {

constexpr int SPINS = 2000;  // some 30 microseconds: the layers of a block follow each other sooner than a thread wakes up

constexpr int MOST = 1024;  // threads of a call

// How long a thread then stays ready, but lets other threads of the machine run: a model that decodes calls again before.
constexpr std::chrono::microseconds STAY{400};

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

struct Job {
    void (*task)(void *, int64_t) = nullptr;
    void *data = nullptr;
};

// The tasks that a thread has yet to do: from `begin` to `end`, in one number that changes at once. A thread takes its own
// from the front, so that it reads one stretch of memory; one that has none left takes the rear half of another's.
class alignas(64) Range {
  public:
    void set(int64_t begin, int64_t end) { both_.store(begin << 32 | end, std::memory_order_relaxed); }

    // The next task, or -1.
    int64_t take() {
        for (int64_t both = both_.load(std::memory_order_relaxed);;) {
            const int64_t begin = both >> 32, end = both & LOW;
            if (begin >= end) return -1;
            if (both_.compare_exchange_weak(both, (begin + 1) << 32 | end, std::memory_order_relaxed)) return begin;
        }
    }

    // Moves the rear half to a range that is empty; false if there is nothing to move.
    bool give_half(Range &other) {
        for (int64_t both = both_.load(std::memory_order_relaxed);;) {
            const int64_t begin = both >> 32, end = both & LOW, middle = begin + (end - begin) / 2;
            if (begin >= end) return false;
            if (!both_.compare_exchange_weak(both, begin << 32 | middle, std::memory_order_relaxed)) continue;
            other.set(middle, end);
            return true;
        }
    }

  private:
    static constexpr int64_t LOW = 0xffffffff;
    std::atomic<int64_t> both_{0};
};

// A job is closed when its caller finds no task left. Threads that have not joined by then are not waited for: beside
// other busy processes a thread may wake up long after the others have done its share.
//
// `state_` holds the number of the job, how many helpers it takes, whether it is open, and how many helpers have joined it.
// A helper joins by one exchange of an open state, and reads the job after that; the caller changes the job when all that
// joined have left. A helper that sleeps says so before it looks at the number for the last time, and the caller looks at
// who sleeps after it has changed the number, so that no helper misses a job.
class Pool {
  public:
    void run(const Job &job, int64_t count, int threads) {
        std::lock_guard<std::mutex> turn(turn_);  // callers in several threads take turns
        grow(threads - 1);
        job_ = job, threads_ = threads;
        for (int i = 0; i < threads; ++i) ranges_[i].set(count * i / threads, count * (i + 1) / threads);
        const uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
        state_.store(number << 32 | static_cast<uint64_t>(threads - 1) * HELPER | OPEN, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work(job, 0, threads);
        state_.fetch_and(~OPEN, std::memory_order_acq_rel);
        for (int spins = 0; spins < SPINS && joined() > 0; ++spins) pause_briefly();
        if (joined() > 0) {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, [&] { return joined() == 0; });
        }
    }

  private:
    static constexpr uint64_t JOINED = 1, OPEN = 1 << 15, HELPER = 1 << 16;  // helpers and those that joined: below 2^15

    uint64_t joined() const { return state_.load(std::memory_order_acquire) & (OPEN - 1); }

    uint64_t number() const { return state_.load(std::memory_order_seq_cst) >> 32; }

    void work(const Job &job, int self, int threads) {
        for (bool found = true; found;) {
            for (int64_t i; (i = ranges_[self].take()) >= 0;) job.task(job.data, i);
            found = false;
            for (int other = 1; other < threads && !found; ++other)
                found = ranges_[(self + other) % threads].give_half(ranges_[self]);
        }
    }

    void grow(int count) {
        if (static_cast<int>(workers_.size()) >= count) return;
        ranges_ = std::make_unique<Range[]>(count + 1);
        while (static_cast<int>(workers_.size()) < count) {
            const int index = static_cast<int>(workers_.size());
            workers_.emplace_back([this, index, seen = number()] { serve(index, seen); });
            workers_.back().detach();
        }
    }

    // Joins the present job; false if it is closed, or takes fewer helpers.
    bool join(int index, uint64_t &seen) {
        for (uint64_t state = state_.load(std::memory_order_acquire);;) {
            seen = state >> 32;
            if (!(state & OPEN) || static_cast<uint64_t>(index) >= (state & 0xffffffff) / HELPER) return false;
            if (state_.compare_exchange_weak(state, state + JOINED, std::memory_order_acq_rel)) return true;
        }
    }

    void leave() {
        if ((state_.fetch_sub(JOINED, std::memory_order_acq_rel) & (2 * OPEN - 1)) != JOINED) return;
        std::lock_guard<std::mutex> lock(mutex_);  // the job is closed, and this was the last
        done_.notify_one();
    }

    void wait(uint64_t seen) {
        for (int spins = 0; spins < SPINS; ++spins) {
            if (number() != seen) return;
            pause_briefly();
        }
        const auto until = std::chrono::steady_clock::now() + STAY;
        while (std::chrono::steady_clock::now() < until) {
            if (number() != seen) return;
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return number() != seen; });
        asleep_.fetch_sub(1, std::memory_order_relaxed);
    }

    void serve(int index, uint64_t seen) {
        for (;;) {
            wait(seen);
            if (!join(index, seen)) continue;
            work(job_, index + 1, threads_);
            leave();
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    std::unique_ptr<Range[]> ranges_;
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int> asleep_{0};
    int threads_ = 0;
    Job job_;
};

// Never destroyed: its threads may still wait when the process ends. After a fork the child starts with a new one.
Pool *pool = new Pool;

#if defined(__linux__) || defined(__APPLE__)
const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif

}  // namespace

void parallel(void (*task)(void *, int64_t), void *data, int64_t count, int threads) {
    if (threads > count) threads = static_cast<int>(count);
    if (threads > MOST) threads = MOST;
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) task(data, i);
        return;
    }
    pool->run({task, data}, count, threads);
}

}  // namespace compress_cpu
