// A persistent pool: threads that spin shortly between parallel regions, then sleep.
//
// Nothing waits for a thread, only for work: a region is a sequence of loops, each cut into pieces that threads take one
// at a time, and a barrier waits until the pieces before it are done, by whomever. A thread that the system has not let
// run yet delays nobody; it joins at the piece that is due, or finds the region closed. On a machine that is busy
// otherwise this is the difference between losing a core and losing ten times the speed.
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

    int thread() const { return thread_; }  // below n_threads; no two threads of a region have the same

    // Waits until all pieces of the loops before it are done.
    void barrier();

    // Calls f(begin, end) for pieces of at most `grain` of 0..n, each on one of the threads. Which one is left to
    // chance, so f's result must not depend on `thread()`.
    template <class F>
    void for_each(int64_t n, int64_t grain, F&& f);

  private:
    friend class ThreadPool;
    ThreadPool& pool_;
    int thread_, n_threads_;
    int loop_ = 0;      // the next loop's number
    int awaited_ = 0;   // loops before this one are done
};

class ThreadPool {
  public:
    explicit ThreadPool(int n_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Runs f(Region&) on the caller's thread and up to n_threads - 1 of the pool; returns when all its loops are done.
    template <class F>
    void run(int n_threads, F&& f) {
        using Callable = std::remove_const_t<std::remove_reference_t<F>>;
        const Function call = [](void* context, Region& region) { (*static_cast<Callable*>(context))(region); };
        run_erased(n_threads, call, const_cast<Callable*>(&f));
    }

  private:
    friend class Region;
    using Function = void (*)(void*, Region&);
    static constexpr int kLoops = 24;

    // Of one loop of a region: the next item to hand out, and how many are done.
    struct alignas(64) Loop {
        std::atomic<int64_t> next{0};
        std::atomic<int64_t> done{0};
        std::atomic<int64_t> n{-1};
    };

    void run_erased(int n_threads, Function function, void* context);
    void work(int thread);
    bool join();

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    alignas(64) std::atomic<uint64_t> generation_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    // Workers inside the region, or a large negative number where there is no region to join.
    alignas(64) std::atomic<int> inside_;
    Loop loops_[kLoops];
    Function function_ = nullptr;
    void* context_ = nullptr;
    int n_active_ = 0;
    std::atomic<bool> stop_{false};
};

template <class F>
void Region::for_each(int64_t n, int64_t grain, F&& f) {
    if (n_threads_ == 1) {
        for (int64_t begin = 0; begin < n; begin += grain) f(begin, begin + grain < n ? begin + grain : n);
        return;
    }
    ThreadPool::Loop& loop = pool_.loops_[loop_++ % ThreadPool::kLoops];
    loop.n.store(n, std::memory_order_relaxed);  // all threads store the same
    for (int64_t begin; (begin = loop.next.fetch_add(grain, std::memory_order_relaxed)) < n;) {
        const int64_t end = begin + grain < n ? begin + grain : n;
        f(begin, end);
        loop.done.fetch_add(end - begin, std::memory_order_release);
    }
}

}  // namespace powerinfer
