#include "blocks_of_model.h"

namespace powerinfer {

// What the threads of one call share. Rows of `qkv`: all query heads, then key heads, then value heads. A pair (token,
// KV head) is cut into `n_splits` runs of `split` positions; each leaves n_group outputs, maxima and sums in `partial`.
struct AttentionBlock::Step {
    const Hidden& x;
    KVCache& cache;
    LayerCache& layer;
    const float* rotations;
    float* qkv;
    float* partial;
    int n_qkv, n_splits, split;
    ptrdiff_t partial_size;
};

AttentionBlock::AttentionBlock(Runtime& runtime, int layer, int n_head, int n_head_kv, int head_dim, RopeParams rope,
                               Norm norm, Matrix q, Matrix k, Matrix v, Matrix output)
    : runtime_(runtime),
      layer_(layer),
      n_head_(n_head),
      n_head_kv_(n_head_kv),
      head_dim_(head_dim),
      n_group_(n_head / n_head_kv),
      rope_(rope),
      norm_(norm),
      q_(q),
      k_(k),
      v_(v),
      output_(output) {
    if (q.n_rows != n_head * head_dim || k.n_rows != n_head_kv * head_dim || v.n_rows != k.n_rows ||
        output.n_cols != q.n_rows || n_head % n_head_kv != 0 || rope.n_rot > head_dim || rope.n_rot % 2 != 0) {
        throw std::invalid_argument("attention: shapes do not fit each other");
    }
}

namespace {

void rotate(float* head, const float* rotations, const RopeParams& rope) {
    const int n_pairs = rope.n_rot / 2;
    const int step = rope.neox ? 1 : 2, gap = rope.neox ? n_pairs : 1;
    for (int i = 0; i < n_pairs; i++) {
        float &a = head[i * step], &b = head[i * step + gap];
        const float cosine = rotations[2 * i], sine = rotations[2 * i + 1];
        const float x = a, y = b;
        a = x * cosine - y * sine;
        b = x * sine + y * cosine;
    }
}

}  // namespace

// Item (token, KV head): its key and value go into the cache, the query heads that read it are turned.
void AttentionBlock::rotate_and_store(const Step& step, int token, int head) const {
    const float* rotations = step.rotations + static_cast<ptrdiff_t>(token) * rope_.n_rot;
    float* row = step.qkv + static_cast<ptrdiff_t>(token) * step.n_qkv;
    for (int g = 0; g < n_group_; g++) rotate(row + (head * n_group_ + g) * head_dim_, rotations, rope_);
    float* k = row + (n_head_ + head) * head_dim_;
    float* v = row + (n_head_ + n_head_kv_ + head) * head_dim_;
    rotate(k, rotations, rope_);
    const ptrdiff_t at = step.cache.offset(step.layer, step.x.slots[token], head, step.x.positions[token]);
    runtime_.kernels.to_f16(k, head_dim_, step.layer.k.get() + at);
    runtime_.kernels.to_f16(v, head_dim_, step.layer.v.get() + at);
}

void AttentionBlock::attend(const Step& step, int64_t item, float* scores) const {
    const int part = static_cast<int>(item % step.n_splits);
    const int head = static_cast<int>(item / step.n_splits % n_head_kv_);
    const int token = static_cast<int>(item / step.n_splits / n_head_kv_);
    float* out = step.partial + item * step.partial_size;
    const int first = part * step.split, end = step.x.positions[token] + 1;
    const int n_positions = end - first < step.split ? end - first : step.split;
    const ptrdiff_t at = step.cache.offset(step.layer, step.x.slots[token], head, first);
    AttentionArgs args{};
    args.q = step.qkv + static_cast<ptrdiff_t>(token) * step.n_qkv + head * n_group_ * head_dim_;
    args.k = step.layer.k.get() + at;
    args.v = step.layer.v.get() + at;
    args.n_group = n_group_;
    args.head_dim = head_dim_;
    args.n_positions = n_positions > 0 ? n_positions : 0;
    args.scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    args.scratch = scores;
    args.out = out;
    args.max = out + n_group_ * head_dim_;
    args.sum = args.max + n_group_;
    runtime_.kernels.attention(args);
}

// Joins the splits of a token's heads into a row of scratch.wide.
void AttentionBlock::merge(const Step& step, int token) const {
    ActivationBuffer& wide = runtime_.scratch.wide;
    for (int head = 0; head < n_head_; head++) {
        const int64_t item = (static_cast<int64_t>(token) * n_head_kv_ + head / n_group_) * step.n_splits;
        const float* first = step.partial + item * step.partial_size;
        const int g = head % n_group_, maxima = n_group_ * head_dim_ + g, sums = maxima + n_group_;
        float top = -INFINITY;
        for (int p = 0; p < step.n_splits; p++) top = std::fmax(top, first[p * step.partial_size + maxima]);
        float total = 0.0f;
        float* out = wide.row(token) + head * head_dim_;
        for (int i = 0; i < head_dim_; i++) out[i] = 0.0f;
        for (int p = 0; p < step.n_splits; p++) {
            const float* part = first + p * step.partial_size;
            const float weight = std::exp(part[maxima] - top);
            total += weight * part[sums];
            for (int i = 0; i < head_dim_; i++) out[i] += weight * part[g * head_dim_ + i];
        }
        for (int i = 0; i < head_dim_; i++) out[i] /= total;
    }
    wide.round(runtime_.kernels, token);
}

void AttentionBlock::forward(Hidden& x, Hidden& residual, KVCache& cache) {
    const std::lock_guard<std::mutex> lock(runtime_.mutex);
    if (layer_ >= static_cast<int>(cache.layers.size()) || cache.layers[layer_].n_head_kv != n_head_kv_ ||
        cache.layers[layer_].head_dim != head_dim_ || x.n_embd != q_.n_cols || residual.n_embd != output_.n_rows ||
        residual.n_tokens != x.n_tokens) {
        throw std::invalid_argument("attention: the hidden state or the cache is of another model");
    }
    int last = 0;
    for (int t = 0; t < x.n_tokens; t++) {
        if (x.positions[t] < 0 || x.positions[t] >= cache.n_ctx || x.slots[t] < 0 || x.slots[t] >= cache.n_slots) {
            throw std::out_of_range("attention: a position or slot lies outside the KV cache");
        }
        last = x.positions[t] > last ? x.positions[t] : last;
    }

    const int n_tokens = x.n_tokens;
    Scratch& scratch = runtime_.scratch;
    const bool rounded = q_.takes_rounded() || k_.takes_rounded() || v_.takes_rounded();
    scratch.normed.reserve(n_tokens, x.n_embd, rounded);
    scratch.wide.reserve(n_tokens, q_.n_rows, output_.takes_rounded());
    const int n_qkv = q_.n_rows + k_.n_rows + v_.n_rows;

    // Few items leave threads idle on a long context: cut it.
    const int64_t n_pairs = static_cast<int64_t>(n_tokens) * n_head_kv_;
    const int n_splits = n_pairs >= 8 * runtime_.max_threads() ? 1 : last / 256 + 1;
    const ptrdiff_t partial_size = static_cast<ptrdiff_t>(n_group_) * (head_dim_ + 2);
    Step step{x,
              cache,
              cache.layers[layer_],
              x.rotations(rope_),
              scratch.qkv.reserve(static_cast<size_t>(n_tokens) * n_qkv),
              scratch.partial.reserve(n_pairs * n_splits * partial_size),
              n_qkv,
              n_splits,
              n_splits == 1 ? last + 1 : 256,
              partial_size};
    const size_t tile = Runtime::tile_size(output_.n_rows, n_tokens);
    scratch.tiles.reserve(tile * runtime_.max_threads());

    runtime_.run(n_tokens, [&](Region& region) {
        region.for_each(n_tokens, 1, [&](int64_t t, int64_t) {
            norm_.apply(runtime_.kernels, x.row(t), x.n_embd, scratch.normed.row(t));
            scratch.normed.round(runtime_.kernels, t);
        });
        region.barrier();
        const Activations normed = scratch.normed.view();
        runtime_.matmul(region, q_, normed, n_tokens, step.qkv, n_qkv);
        runtime_.matmul(region, k_, normed, n_tokens, step.qkv + q_.n_rows, n_qkv);
        runtime_.matmul(region, v_, normed, n_tokens, step.qkv + q_.n_rows + k_.n_rows, n_qkv);
        region.barrier();
        region.for_each(n_pairs, 4, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) rotate_and_store(step, i / n_head_kv_, i % n_head_kv_);
        });
        region.barrier();
        region.for_each(n_pairs * n_splits, 1, [&](int64_t item, int64_t) {
            alignas(64) float scores[64];
            attend(step, item, scores);
        });
        region.barrier();
        region.for_each(n_tokens, 1, [&](int64_t t, int64_t) { merge(step, t); });
        region.barrier();
        runtime_.matmul(region, output_, scratch.wide.view(), n_tokens, residual.row(0), residual.n_embd, true,
                        scratch.tiles.data() + region.thread() * tile);
    });
}

}  // namespace powerinfer
