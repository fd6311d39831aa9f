#include "runtime.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace powerinfer {

void* allocate(size_t nbytes) {
    constexpr size_t kLine = 64, kHugePage = size_t{2} << 20;
    const size_t unit = nbytes >= 2 * kHugePage ? kHugePage : kLine;
    const size_t size = (nbytes + unit - 1) / unit * unit;
    void* memory = std::aligned_alloc(unit, size);
#ifdef MADV_HUGEPAGE
    if (memory != nullptr && unit == kHugePage) madvise(memory, size, MADV_HUGEPAGE);  // advice: may be refused
#endif
    return memory;
}

void Matrix::multiply(int first, int n, const Activations& a, int n_tokens, float* out, ptrdiff_t ld) const {
    int r = 0;
    for (; r + kPackedRows <= n && first + r < n_packed; r += kPackedRows) {
        kernels->packed_matmul(packed + (first + r) * row_bytes, a, n_tokens, out + r, ld);
    }
    constexpr int kRows = 16;
    const uint8_t* rows[kRows];
    for (; r < n; r += kRows) {
        const int count = n - r < kRows ? n - r : kRows;
        for (int i = 0; i < count; i++) rows[i] = row(first + r + i);
        kernels->matmul(rows, count, a, nullptr, n_tokens, out + r, ld);
    }
    if (bias == nullptr) return;
    for (int t = 0; t < n_tokens; t++) {
        for (int i = 0; i < n; i++) out[t * ld + i] += bias[first + i];
    }
}

void Runtime::matmul(Region& region, const Matrix& w, const Activations& a, int n_tokens, float* out, ptrdiff_t ld,
                     bool add, float* tile) const {
    region.for_each(w.n_rows, row_grain(w.n_rows, n_tokens), [&](int64_t begin, int64_t end) {
        const int first = static_cast<int>(begin), n = static_cast<int>(end - begin);
        if (!add) return w.multiply(first, n, a, n_tokens, out + first, ld);
        w.multiply(first, n, a, n_tokens, tile, n);
        for (int t = 0; t < n_tokens; t++) {
            for (int r = 0; r < n; r++) out[t * ld + first + r] += tile[t * n + r];
        }
    });
}

const float* Hidden::rotations(const RopeParams& rope) {
    for (const auto& known : rotations_) {
        if (known->rope.turns_like(rope)) return known->values.data();
    }
    rotations_.push_back(std::make_unique<Rotations>());
    rotations_.back()->rope = rope;
    float* values = rotations_.back()->values.reserve(static_cast<size_t>(n_tokens) * rope.n_rot());
    float* out = values;
    for (int t = 0; t < n_tokens; t++) {
        for (const double frequency : rope.frequencies) {
            const double angle = positions[t] * frequency;  // float32 loses its fraction at long positions
            *out++ = static_cast<float>(std::cos(angle)) * rope.magnitude;
            *out++ = static_cast<float>(std::sin(angle)) * rope.magnitude;
        }
    }
    return values;
}

CacheRows KVCache::make_rows(const Kernels& kernels, int type, int n_head_kv, int head_dim, double n_positions) {
    const bool known = type >= 0 && type < kTypeSlots && kernels.caches[type].block_size > 0;
    if (!known) throw std::invalid_argument("no KV cache of this type");
    const CacheKernels& cache = kernels.caches[type];
    if (head_dim % cache.block_size != 0) {
        throw std::invalid_argument("heads of " + std::to_string(head_dim) + " elements are no whole blocks of " +
                                    std::to_string(cache.block_size));
    }
    const ptrdiff_t row_bytes = cache.row_bytes(head_dim);
    const double wanted = n_positions * n_head_kv * row_bytes;
    if (wanted > static_cast<double>(PTRDIFF_MAX)) throw std::bad_alloc();
    const size_t nbytes = static_cast<size_t>(wanted);
    // Not cleared: pages are taken from the system when positions are first written.
    auto* memory = static_cast<uint8_t*>(std::malloc(nbytes > 0 ? nbytes : 1));
    if (memory == nullptr) throw std::bad_alloc();
    return {&cache, row_bytes, nbytes, {memory, &std::free}};
}

KVCache::KVCache(const Kernels& kernels, int type_k, int type_v, int n_slots, int n_ctx,
                 const std::vector<std::pair<int, int>>& heads)
    : n_slots(n_slots), n_ctx(n_ctx) {
    const double n_positions = static_cast<double>(n_slots) * n_ctx;
    for (const auto& [n_head_kv, head_dim] : heads) {
        layers.push_back({n_head_kv, head_dim, make_rows(kernels, type_k, n_head_kv, head_dim, n_positions),
                          make_rows(kernels, type_v, n_head_kv, head_dim, n_positions)});
    }
}

size_t KVCache::nbytes() const {
    size_t total = 0;
    for (const LayerCache& layer : layers) total += layer.k.nbytes + layer.v.nbytes;
    return total;
}

}  // namespace powerinfer
