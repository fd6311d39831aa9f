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

// Spins for a millisecond or more before it gives the processor away between looks: on a busy machine whoever gets it
// keeps it for milliseconds, and work in a region is due sooner than that.
template <class Done>
inline void spin_until(Done done) {
    for (int i = 0; !done(); i++) {
        if (i < 100000) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

// About 50 µs of looking for the next region: longer than Python needs between two of them, short enough to leave
// the cores alone while a sampler or a user thinks.
constexpr int kSpins = 2000;

constexpr int kClosed = -(1 << 20);

}  // namespace

void Region::barrier() {
    if (n_threads_ == 1) return;
    if (loop_ > ThreadPool::kLoops) throw std::logic_error("too many loops in one parallel region");
    for (; awaited_ < loop_; awaited_++) {
        ThreadPool::Loop& loop = pool_.loops_[awaited_];
        const int64_t n = loop.n.load(std::memory_order_relaxed);
        spin_until([&] { return loop.done.load(std::memory_order_acquire) >= n; });
    }
}

ThreadPool::ThreadPool(int n_threads) : inside_(kClosed) {
    for (int i = 1; i < n_threads; i++) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true, std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_erased(int n_threads, Function function, void* context) {
    n_threads = n_threads < 1 ? 1 : n_threads > size() ? size() : n_threads;
    Region region(*this, 0, n_threads);
    if (n_threads == 1) return function(context, region);

    for (Loop& loop : loops_) {
        loop.next.store(0, std::memory_order_relaxed);
        loop.done.store(0, std::memory_order_relaxed);
    }
    function_ = function;
    context_ = context;
    n_active_ = n_threads;
    inside_.store(0, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    function(context, region);
    region.barrier();
    // Close: from here nobody joins; those inside find no pieces left and go.
    inside_.fetch_add(kClosed, std::memory_order_acq_rel);
    spin_until([&] { return inside_.load(std::memory_order_acquire) == kClosed; });
}

bool ThreadPool::join() {
    int inside = inside_.load(std::memory_order_acquire);
    while (inside >= 0) {
        if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
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
        if (stop_.load(std::memory_order_relaxed)) return;
        seen = generation_.load(std::memory_order_acquire);
        if (!join()) continue;
        if (thread < n_active_) {
            Region region(*this, thread, n_active_);
            function_(context_, region);
        }
        inside_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace powerinfer
