#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
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

// How long a thread then stays ready, but lets other threads of the machine run: a model that decodes calls again before.
constexpr std::chrono::microseconds STAY{400};

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // takes some tens of cycles; the hint `yield` takes one
#endif
}

struct Job {
    void (*task)(void *, int64_t) = nullptr;
    void *data = nullptr;
    int64_t count = 0;
};

// A job is closed when its caller finds no task left. It does not wait for threads that have not joined by then: on a loaded
// machine a thread may wake up long after the others have finished.
class Pool {
  public:
    void run(const Job &job, int threads) {
        std::lock_guard<std::mutex> turn(turn_);  // callers in several threads take turns
        grow(threads - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = job, open_ = true, helpers_ = threads - 1;
            next_.store(0, std::memory_order_relaxed);
            ticket_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        work(job);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            open_ = false;
        }
        for (int spins = 0; spins < SPINS && joined_.load(std::memory_order_acquire) > 0; ++spins) pause_briefly();
        if (joined_.load(std::memory_order_acquire) > 0) {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, [&] { return joined_.load(std::memory_order_acquire) == 0; });
        }
    }

  private:
    void work(const Job &job) {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < job.count;) job.task(job.data, i);
    }

    void grow(int count) {
        while (static_cast<int>(workers_.size()) < count) {
            const int index = static_cast<int>(workers_.size());
            workers_.emplace_back([this, index, seen = ticket_.load()] { serve(index, seen); });
            workers_.back().detach();
        }
    }

    void serve(int index, uint64_t seen) {
        for (;;) {
            for (int spins = 0; spins < SPINS && ticket_.load(std::memory_order_acquire) == seen; ++spins) pause_briefly();
            const auto until = std::chrono::steady_clock::now() + STAY;
            while (ticket_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until)
                std::this_thread::yield();
            Job job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return ticket_.load(std::memory_order_relaxed) != seen; });
                seen = ticket_.load(std::memory_order_relaxed);
                if (!open_ || index >= helpers_) continue;
                job = job_;
                joined_.fetch_add(1, std::memory_order_relaxed);
            }
            work(job);
            std::lock_guard<std::mutex> lock(mutex_);
            if (joined_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> joined_{0};
    int helpers_ = 0;
    bool open_ = false;
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
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) task(data, i);
        return;
    }
    pool->run({task, data, count}, threads);
}

}  // namespace compress_cpu
