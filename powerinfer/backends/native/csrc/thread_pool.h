// A persistent pool: threads that spin shortly between parallel regions, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace powerinfer {

class ThreadPool;

// What one thread of a parallel region sees. All threads of a region make the same calls in the same order.
class Region {
  public:
    Region(ThreadPool& pool, int thread, int n_threads) : pool_(pool), thread_(thread), n_threads_(n_threads) {}

    int thread() const { return thread_; }
    int n_threads() const { return n_threads_; }

    // Waits until every thread of the region is here.
    void barrier();

    // Calls f(begin, end) for pieces of at most `grain` of 0..n, which are handed out one at a time to
    // whichever thread is free.
    // No barrier: the pieces of two loops in a row can overlap.
    template <class F>
    void for_each(int64_t n, int64_t grain, F&& f) {
        if (n_threads_ == 1) {
            for (int64_t begin = 0; begin < n; begin += grain) f(begin, begin + grain < n ? begin + grain : n);
            return;
        }
        std::atomic<int64_t>& next = counter();
        for (int64_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < n;) {
            f(begin, begin + grain < n ? begin + grain : n);
        }
    }

  private:
    std::atomic<int64_t>& counter();

    ThreadPool& pool_;
    int thread_, n_threads_;
    int next_counter_ = 0;
};

class ThreadPool {
  public:
    explicit ThreadPool(int n_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Runs f(Region&) on n_threads threads (at most `size`), the caller's among them.
    template <class F>
    void run(int n_threads, F&& f) {
        using Callable = std::remove_reference_t<F>;
        const Function call = [](void* context, Region& region) { (*static_cast<Callable*>(context))(region); };
        run_erased(n_threads, call, const_cast<std::remove_const_t<Callable>*>(&f));
    }

  private:
    friend class Region;
    using Function = void (*)(void*, Region&);
    static constexpr int kCounters = 32;

    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };

    void run_erased(int n_threads, Function function, void* context);
    void work(int thread);

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    alignas(64) std::atomic<uint64_t> generation_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    Counter counters_[kCounters];
    Function function_ = nullptr;
    void* context_ = nullptr;
    int n_active_ = 0;
    bool stop_ = false;
};

}  // namespace powerinfer
