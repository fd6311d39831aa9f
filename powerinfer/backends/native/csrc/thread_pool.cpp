#include "thread_pool.h"

#include <stdexcept>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace powerinfer {
namespace {

inline void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins, then gives the processor away between looks: threads may outnumber free cores.
template <class Done>
inline void spin_until(Done done) {
    for (int i = 0; !done(); i++) {
        if (i < 4096) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

// About 50 µs of looking for the next region: longer than Python needs between two of them, short enough to leave
// the cores alone while a sampler or a user thinks.
constexpr int kSpins = 2000;

}  // namespace

void Region::barrier() {
    if (n_threads_ == 1) return;
    const uint32_t phase = pool_.phase_.load(std::memory_order_relaxed);
    if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) == n_threads_ - 1) {
        pool_.arrived_.store(0, std::memory_order_relaxed);
        pool_.phase_.store(phase + 1, std::memory_order_release);
    } else {
        spin_until([&] { return pool_.phase_.load(std::memory_order_acquire) != phase; });
    }
}

std::atomic<int64_t>& Region::counter() {
    if (next_counter_ == ThreadPool::kCounters) throw std::logic_error("too many loops in one parallel region");
    return pool_.counters_[next_counter_++].value;
}

ThreadPool::ThreadPool(int n_threads) {
    for (int i = 1; i < n_threads; i++) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_erased(int n_threads, Function function, void* context) {
    n_threads = n_threads < 1 ? 1 : n_threads > size() ? size() : n_threads;
    if (n_threads > 1) {
        for (Counter& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
        function_ = function;
        context_ = context;
        n_active_ = n_threads;
        running_.store(size() - 1, std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
    }
    Region region(*this, 0, n_threads);
    function(context, region);
    if (n_threads > 1) {
        spin_until([&] { return running_.load(std::memory_order_acquire) == 0; });
    }
}

void ThreadPool::work(int thread) {
    uint64_t seen = 0;
    for (;;) {
        for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; i++) pause();
        if (generation_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
            sleeping_.fetch_sub(1, std::memory_order_relaxed);
        }
        seen = generation_.load(std::memory_order_acquire);
        if (stop_) return;
        if (thread < n_active_) {
            Region region(*this, thread, n_active_);
            function_(context_, region);
        }
        running_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace powerinfer
