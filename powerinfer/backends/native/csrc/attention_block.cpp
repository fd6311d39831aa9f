#include <algorithm>
#include <limits>
#include <utility>

#include "blocks_of_model.h"

namespace powerinfer {

namespace {

constexpr int kTileTokens = 8;      // neighbours in a sequence that go through keys and values together
constexpr int kSplit = 256;         // positions that one item covers, where contexts are cut
constexpr int64_t kEnoughItems = 64;  // for all threads to have work without cutting; not a number of threads, so that
                                      // results do not depend on it

}  // namespace

// What the threads of one call share. Rows of `qkv`: all query heads, then key heads, then value heads. An item is a tile
// of tokens, a KV head and (of n_splits) a run of `split` positions; its part of `partial` holds outputs, maxima and sums
// of its queries: those of the tile's first token, then those of its second.
struct AttentionBlock::Step {
    const Hidden& x;
    KVCache& cache;
    LayerCache& layer;
    const std::vector<TokenTile>& tiles;
    const float* rotations;
    float* qkv;
    float* partial;
    int n_qkv, n_splits, split, max_queries;

    ptrdiff_t partial_size() const { return static_cast<ptrdiff_t>(max_queries) * (layer.head_dim + 2); }
};

AttentionBlock::AttentionBlock(Runtime& runtime, AttentionParams p)
    : runtime_(runtime),
      layer_(p.layer),
      n_head_(p.n_head),
      n_head_kv_(p.n_head_kv),
      head_dim_(p.head_dim),
      n_group_(p.n_head / p.n_head_kv),
      window_(p.window > 0 ? p.window : std::numeric_limits<int>::max()),
      scale_(p.scale),
      rope_(std::move(p.rope)),
      norm_(p.norm),
      q_norm_(p.q_norm),
      k_norm_(p.k_norm),
      post_norm_(p.post_norm),
      q_(p.q),
      k_(p.k),
      v_(p.v),
      output_(p.output) {
    if (q_.n_rows != n_head_ * head_dim_ || k_.n_rows != n_head_kv_ * head_dim_ || v_.n_rows != k_.n_rows ||
        output_.n_cols != q_.n_rows || n_head_ % n_head_kv_ != 0 || rope_.n_rot() > head_dim_) {
        throw std::invalid_argument("attention: shapes do not fit each other");
    }
}

namespace {

void rotate(float* head, const float* rotations, const RopeParams& rope) {
    const int n_pairs = rope.n_rot() / 2;
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
    const float* rotations = step.rotations + static_cast<ptrdiff_t>(token) * rope_.n_rot();
    float* row = step.qkv + static_cast<ptrdiff_t>(token) * step.n_qkv;
    for (int g = 0; g < n_group_; g++) {
        float* q = row + (head * n_group_ + g) * head_dim_;
        if (q_norm_) q_norm_.apply(runtime_.kernels, q, head_dim_, q);
        rotate(q, rotations, rope_);
    }
    float* k = row + (n_head_ + head) * head_dim_;
    float* v = row + (n_head_ + n_head_kv_ + head) * head_dim_;
    if (k_norm_) k_norm_.apply(runtime_.kernels, k, head_dim_, k);
    rotate(k, rotations, rope_);
    const ptrdiff_t at = step.cache.row(step.layer, step.x.slots[token], head, step.x.positions[token]);
    for (const auto& [rows, x] : {std::pair(&step.layer.k, k), std::pair(&step.layer.v, v)}) {
        rows->kernels->store(x, head_dim_, rows->data.get() + at * rows->row_bytes);
    }
}

// `queries`: this thread's own, max_queries of them; `n_positions`: twice as many.
void AttentionBlock::attend(const Step& step, int64_t item, const float** queries, int* n_positions) const {
    const int part = static_cast<int>(item % step.n_splits);
    const int head = static_cast<int>(item / step.n_splits % n_head_kv_);
    const TokenTile& tile = step.tiles[item / step.n_splits / n_head_kv_];
    const int first = part * step.split;
    int* n_hidden = n_positions + step.max_queries;
    int n_queries = 0;
    for (int t = tile.first; t < tile.first + tile.size; t++) {
        const int end = step.x.positions[t] + 1;
        const int seen = std::min(std::max(end - first, 0), step.split);
        const int hidden = static_cast<int>(std::min<int64_t>(std::max<int64_t>(end - window_ - first, 0), seen));
        const float* row = step.qkv + static_cast<ptrdiff_t>(t) * step.n_qkv + head * n_group_ * head_dim_;
        for (int g = 0; g < n_group_; g++) {
            queries[n_queries] = row + g * head_dim_;
            n_hidden[n_queries] = hidden;
            n_positions[n_queries++] = seen;
        }
    }
    const LayerCache& layer = step.layer;
    const ptrdiff_t at = step.cache.row(layer, step.x.slots[tile.first], head, first);
    AttentionArgs args{};
    args.keys = layer.k.kernels;
    args.values = layer.v.kernels;
    args.q = queries;
    args.n_positions = n_positions;
    args.n_hidden = n_hidden;
    args.k = layer.k.data.get() + at * layer.k.row_bytes;
    args.v = layer.v.data.get() + at * layer.v.row_bytes;
    args.n_queries = n_queries;
    args.head_dim = head_dim_;
    args.scale = scale_;
    args.out = step.partial + item * step.partial_size();
    args.max = args.out + static_cast<ptrdiff_t>(step.max_queries) * head_dim_;
    args.sum = args.max + step.max_queries;
    runtime_.kernels.attention(args);
}

// Joins the splits of the heads of a tile's tokens into their rows of scratch.wide.
void AttentionBlock::merge(const Step& step, int64_t index) const {
    const TokenTile& tile = step.tiles[index];
    ActivationBuffer& wide = runtime_.scratch.wide;
    const ptrdiff_t maxima = static_cast<ptrdiff_t>(step.max_queries) * head_dim_, sums = maxima + step.max_queries;
    for (int t = 0; t < tile.size; t++) {
        for (int head = 0; head < n_head_; head++) {
            const float* first = step.partial + (index * n_head_kv_ + head / n_group_) * step.n_splits * step.partial_size();
            const int query = t * n_group_ + head % n_group_;
            float top = -INFINITY;
            for (int p = 0; p < step.n_splits; p++) {
                top = std::fmax(top, first[p * step.partial_size() + maxima + query]);
            }
            float total = 0.0f;
            float* out = wide.row(tile.first + t) + head * head_dim_;
            for (int i = 0; i < head_dim_; i++) out[i] = 0.0f;
            for (int p = 0; p < step.n_splits; p++) {
                const float* part = first + p * step.partial_size();
                const float weight = std::exp(part[maxima + query] - top);
                total += weight * part[sums + query];
                for (int i = 0; i < head_dim_; i++) out[i] += weight * part[query * head_dim_ + i];
            }
            for (int i = 0; i < head_dim_; i++) out[i] /= total;
        }
        wide.round(runtime_.kernels, tile.first + t);
    }
}

// Neighbours of one sequence; tokens of a sequence come in ascending position.
void AttentionBlock::find_tiles(const Hidden& x, std::vector<TokenTile>& tiles) {
    tiles.clear();
    for (int t = 0; t < x.n_tokens; t++) {
        if (t > 0 && x.slots[t] == x.slots[t - 1] && tiles.back().size < kTileTokens) {
            tiles.back().size++;
        } else {
            tiles.push_back({t, 1});
        }
    }
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

    find_tiles(x, scratch.token_tiles);
    const std::vector<TokenTile>& tiles = scratch.token_tiles;
    const int64_t n_tiles = static_cast<int64_t>(tiles.size()), n_pairs = static_cast<int64_t>(n_tokens) * n_head_kv_;
    const int n_splits = n_tiles * n_head_kv_ >= kEnoughItems ? 1 : last / kSplit + 1;
    const int64_t n_items = n_tiles * n_head_kv_ * n_splits;
    const int max_queries = n_group_ * std::min(n_tokens, kTileTokens);
    Step step{x,
              cache,
              cache.layers[layer_],
              tiles,
              x.rotations(rope_),
              scratch.qkv.reserve(static_cast<size_t>(n_tokens) * n_qkv),
              nullptr,
              n_qkv,
              n_splits,
              n_splits == 1 ? last + 1 : kSplit,
              max_queries};
    step.partial = scratch.partial.reserve(n_items * step.partial_size());
    const float** queries = scratch.queries.reserve(static_cast<size_t>(max_queries) * runtime_.max_threads());
    int* positions = scratch.positions.reserve(2 * static_cast<size_t>(max_queries) * runtime_.max_threads());
    const size_t tile = Runtime::tile_size(output_.n_rows, n_tokens);
    scratch.tiles.reserve(tile * runtime_.max_threads());
    const size_t out_size = static_cast<size_t>(n_tokens) * residual.n_embd;
    float* out = post_norm_ ? scratch.unnormed.reserve(out_size) : residual.row(0);

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
        const ptrdiff_t mine = static_cast<ptrdiff_t>(region.thread()) * max_queries;
        region.for_each(n_items, 1, [&](int64_t item, int64_t) { attend(step, item, queries + mine, positions + 2 * mine); });
        region.barrier();
        region.for_each(n_tiles, 1, [&](int64_t tile, int64_t) { merge(step, tile); });
        region.barrier();
        runtime_.matmul(region, output_, scratch.wide.view(), n_tokens, out, residual.n_embd, !post_norm_,
                        scratch.tiles.data() + region.thread() * tile);
    });
    if (post_norm_) add_normed(runtime_.kernels, post_norm_, out, residual);
}

}  // namespace powerinfer
