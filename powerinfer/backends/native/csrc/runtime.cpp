#include "runtime.h"

namespace powerinfer {

void Runtime::matmul(Region& region, const Matrix& w, const Activations& a, int n_tokens, float* out, ptrdiff_t ld,
                     bool add, float* tile) const {
    region.for_each(w.n_rows, kRowGrain, [&](int64_t begin, int64_t end) {
        const int n = static_cast<int>(end - begin);
        const uint8_t* rows[kRowGrain];
        for (int r = 0; r < n; r++) rows[r] = w.row(begin + r);
        float* to = add ? tile : out + begin;
        const ptrdiff_t ld_to = add ? n : ld;
        w.kernels->matmul(rows, n, a, nullptr, n_tokens, to, ld_to);
        if (!add && w.bias == nullptr) return;
        for (int t = 0; t < n_tokens; t++) {
            for (int r = 0; r < n; r++) {
                const float y = to[t * ld_to + r] + (w.bias ? w.bias[begin + r] : 0.0f);
                float& at = out[t * ld + begin + r];
                at = add ? at + y : y;
            }
        }
    });
}

const float* Hidden::rotations(const RopeParams& rope) {
    if (rope_ == rope) return rotations_.data();
    const int n_pairs = rope.n_rot / 2;
    float* out = rotations_.reserve(static_cast<size_t>(n_tokens) * rope.n_rot);
    std::vector<double> frequency(n_pairs);
    for (int i = 0; i < n_pairs; i++) {
        frequency[i] = rope.freq_scale * std::pow(static_cast<double>(rope.freq_base), -2.0 * i / rope.n_rot);
    }
    for (int t = 0; t < n_tokens; t++) {
        for (int i = 0; i < n_pairs; i++) {
            // float32 loses the angle's fraction at long positions
            const double angle = positions[t] * frequency[i];
            *out++ = static_cast<float>(std::cos(angle));
            *out++ = static_cast<float>(std::sin(angle));
        }
    }
    rope_ = rope;
    return rotations_.data();
}

KVCache::KVCache(int n_slots, int n_ctx, const std::vector<std::pair<int, int>>& heads)
    : n_slots(n_slots), n_ctx(n_ctx) {
    for (const auto& [n_head_kv, head_dim] : heads) {
        const double wanted = 2.0 * n_slots * n_ctx * n_head_kv * head_dim;
        if (wanted > static_cast<double>(PTRDIFF_MAX)) throw std::bad_alloc();
        const size_t size = static_cast<size_t>(n_slots) * n_ctx * n_head_kv * head_dim;
        // Not cleared: pages are taken from the system when positions are first written.
        const auto allocate = [size] {
            void* memory = std::malloc(size * sizeof(uint16_t));
            if (memory == nullptr) throw std::bad_alloc();
            return std::unique_ptr<uint16_t, decltype(&std::free)>(static_cast<uint16_t*>(memory), &std::free);
        };
        layers.push_back({n_head_kv, head_dim, size, allocate(), allocate()});
    }
}

size_t KVCache::nbytes() const {
    size_t total = 0;
    for (const LayerCache& layer : layers) total += layer.size * sizeof(uint16_t) * 2;
    return total;
}

}  // namespace powerinfer
