// What the blocks share: threads, kernels, scratch memory, matrices, the hidden state and the KV cache.
#pragma once

#include <cmath>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace powerinfer {

// Memory aligned to cache lines, or to huge pages, which it then asks for, where it is large: a matrix that is read through
// pages of 4 kB comes at 19 GB/s, through pages of 2 MB at 31. Null if there is none.
void* allocate(size_t nbytes);

// Memory that only grows, contents undefined.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    T* reserve(size_t n) {
        if (n > capacity_) {
            std::free(data_);
            data_ = nullptr;
            capacity_ = 0;
            if (n > SIZE_MAX / sizeof(T) - 64) throw std::bad_alloc();
            data_ = static_cast<T*>(allocate(n * sizeof(T)));
            if (data_ == nullptr) throw std::bad_alloc();
            capacity_ = n;
        }
        return data_;
    }
    T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    size_t capacity_ = 0;
};

// Rows of a weight as they lie in a file; of the first `n_packed` there may be a packed form to use instead. Does not
// own them.
struct Matrix {
    const uint8_t* data = nullptr;
    const uint8_t* packed = nullptr;
    int n_packed = 0;  // a multiple of kPackedRows
    const float* bias = nullptr;  // n_rows (if `transposed`, n_cols), or null
    bool transposed = false;      // one row an input: used by rows, not by `multiply`
    const TypeKernels* kernels = nullptr;
    int n_rows = 0, n_cols = 0;
    size_t row_bytes = 0;

    explicit operator bool() const { return data != nullptr; }
    const uint8_t* row(int64_t i) const { return data + i * row_bytes; }
    bool takes_rounded() const { return kernels != nullptr && kernels->takes_rounded; }

    // out[t * ld + r] = row first + r . token t + bias[first + r], r < n. `first` is a multiple of kPackedRows.
    void multiply(int first, int n, const Activations& a, int n_tokens, float* out, ptrdiff_t ld) const;
};

// Activations of a batch, as float32 and (where some matrix wants them) rounded, see kernels.h.
class ActivationBuffer {
  public:
    void reserve(int n_tokens, int n_cols, bool rounded) {
        n_cols_ = n_cols;
        f_.reserve(static_cast<size_t>(n_tokens) * n_cols);
        if (rounded) {
            q_.reserve(static_cast<size_t>(n_tokens) * n_cols);
            d_.reserve(static_cast<size_t>(n_tokens) * (n_cols / 32));
            s_.reserve(static_cast<size_t>(n_tokens) * (n_cols / 32));
            h_.reserve(static_cast<size_t>(n_tokens) * (n_cols / 16));
        }
        rounded_ = rounded;
    }
    float* row(int token) { return f_.data() + static_cast<size_t>(token) * n_cols_; }
    // Rounds row `token` (of this buffer, or `f` if given) where that is wanted.
    void round(const Kernels& kernels, int token, const float* f = nullptr) {
        if (!rounded_) return;
        const size_t block = static_cast<size_t>(token) * (n_cols_ / 32);
        kernels.round(f ? f : row(token), n_cols_, q_.data() + block * 32, d_.data() + block, s_.data() + block,
                      h_.data() + 2 * block);
    }
    Activations view(const float* f = nullptr) const {
        return {f ? f : f_.data(), q_.data(), d_.data(), s_.data(), h_.data(), n_cols_};
    }

  private:
    Buffer<float> f_, d_, s_;
    Buffer<int16_t> q_;
    Buffer<int32_t> h_;
    int n_cols_ = 0;
    bool rounded_ = false;
};

// Neighbouring tokens of a batch.
struct TokenTile {
    int first, size;
};

// Scratch memory of all blocks of a model: they run one after another.
struct Scratch {
    ActivationBuffer normed, predictor_in, predictor_mid, wide;
    Buffer<float> qkv, partial, tiles, sums, unnormed;
    Buffer<const float*> queries;
    Buffer<int> positions;
    std::vector<TokenTile> token_tiles;
};

class Runtime {
  public:
    Runtime(const Kernels& kernels, int n_threads, int n_threads_batch)
        : kernels(kernels),
          n_threads(n_threads),
          n_threads_batch(n_threads_batch),
          pool(n_threads > n_threads_batch ? n_threads : n_threads_batch) {}

    // Runs f(Region&) on as many threads as suit a batch of n_tokens.
    template <class F>
    void run(int n_tokens, F&& f) {
        pool.run(n_tokens > 1 ? n_threads_batch : n_threads, f);
    }
    int max_threads() const { return pool.size(); }

    // out[t * ld + r] (= or, if `add`, +=) w.row(r) . token(t) + bias[r]. `tile`: this thread's own
    // tile_size(w.n_rows, n_tokens) floats, used if `add`.
    void matmul(Region& region, const Matrix& w, const Activations& a, int n_tokens, float* out, ptrdiff_t ld,
                bool add = false, float* tile = nullptr) const;

    // Rows that a thread takes at a time, whole groups of kPackedRows. With many tokens for each row, few. With few, where
    // reading is all, a long run: each jump restarts the processor's prefetching, and two threads that take turns at
    // pieces of 20 kB read memory more slowly than one alone (20 against 25 GB/s; in long runs 35).
    int row_grain(int n_rows, int n_tokens) const {
        if (n_tokens > kFewTokens) return kPackedRows;
        const int pieces = 2 * (n_tokens > 1 ? n_threads_batch : n_threads) * kPackedRows;
        return (n_rows + pieces - 1) / pieces * kPackedRows;
    }
    // Floats for as many rows as a thread takes at a time.
    static size_t tile_size(int n_rows, int n_tokens) {
        return static_cast<size_t>(n_tokens) * (n_tokens > kFewTokens ? kPackedRows : n_rows);
    }

    static constexpr int kFewTokens = 8;

    const Kernels& kernels;
    const int n_threads, n_threads_batch;
    ThreadPool pool;
    Scratch scratch;
    std::mutex mutex;  // one block at a time
};

// Pair i of a head turns by position * frequencies[i] radians and is multiplied by `magnitude`.
struct RopeParams {
    std::vector<double> frequencies;
    float magnitude = 1.0f;
    bool neox = false;

    int n_rot() const { return static_cast<int>(2 * frequencies.size()); }
    bool turns_like(const RopeParams& o) const { return frequencies == o.frequencies && magnitude == o.magnitude; }
};

// n_tokens x n_embd, and where each token belongs.
class Hidden {
  public:
    Hidden(int n_tokens, int n_embd, std::vector<int32_t> positions, std::vector<int32_t> slots)
        : n_tokens(n_tokens), n_embd(n_embd), positions(std::move(positions)), slots(std::move(slots)) {
        values.reserve(static_cast<size_t>(n_tokens) * n_embd);
    }
    float* row(int token) const { return values.data() + static_cast<size_t>(token) * n_embd; }

    // cos and sin of each token's rotary angles, times the magnitude, n_tokens x n_rot; computed once for all layers that
    // agree on `rope`.
    const float* rotations(const RopeParams& rope);

    const int n_tokens, n_embd;
    const std::vector<int32_t> positions, slots;
    Buffer<float> values;

  private:
    struct Rotations {
        RopeParams rope;
        Buffer<float> values;
    };
    std::vector<std::unique_ptr<Rotations>> rotations_;  // one for each kind of layer
};

// Keys, or values, of one layer: n_slots x n_head_kv x n_ctx rows of head_dim elements.
struct CacheRows {
    const CacheKernels* kernels;
    ptrdiff_t row_bytes;
    size_t nbytes;
    std::unique_ptr<uint8_t, decltype(&std::free)> data;
};

struct LayerCache {
    int n_head_kv, head_dim;
    CacheRows k, v;
};

class KVCache {
  public:
    // heads: (n_head_kv, head_dim) of each layer.
    KVCache(const Kernels& kernels, int type_k, int type_v, int n_slots, int n_ctx,
            const std::vector<std::pair<int, int>>& heads);
    KVCache(const KVCache&) = delete;
    KVCache& operator=(const KVCache&) = delete;

    size_t nbytes() const;
    // Which row of `layer` belongs to a slot, KV head and position.
    ptrdiff_t row(const LayerCache& layer, int slot, int head, int position) const {
        return (static_cast<ptrdiff_t>(slot) * layer.n_head_kv + head) * n_ctx + position;
    }

    const int n_slots, n_ctx;
    std::vector<LayerCache> layers;

  private:
    static CacheRows make_rows(const Kernels& kernels, int type, int n_head_kv, int head_dim, double n_positions);
};

}  // namespace powerinfer
