#include <algorithm>
#include <cstring>

#include "blocks_of_model.h"

namespace powerinfer {
namespace {

constexpr int kNeuronGrain = 64;   // neurons that a thread computes at a time, in batches
constexpr int kListGrain = 512;    // and for one token: the first rows of a list are not prefetched, so few long ones
constexpr int kColumnGrain = 256;  // columns of the output that a thread takes at a time, in batches
// With one token, neurons are cut into this many runs, each summed on its own. A thread takes a run at a time, so sums are
// made in the same order whatever the number of threads, and results do not depend on it.
constexpr int kSegments = 32;

}  // namespace

// What the threads of one call share. out (n_tokens x n_embd): what outputs are added to. h (n_tokens x n_ff) is used in
// batches only.
struct FeedForwardBlock::Step {
    const Hidden& x;
    float* out;
    int n_tokens;
    float* h;
};

FeedForwardBlock::FeedForwardBlock(Runtime& runtime, Norm norm, Matrix gate, Matrix up, Matrix down,
                                   Activation activation, float activation_threshold, Activation up_activation,
                                   Matrix fc1, Matrix fc2, float threshold, Norm post_norm)
    : runtime_(runtime),
      norm_(norm),
      post_norm_(post_norm),
      gate_(gate),
      up_(up),
      down_(down),
      activation_(activation),
      up_activation_(up_activation),
      activation_threshold_(activation_threshold),
      fc1_(fc1),
      fc2_(fc2),
      threshold_(threshold),
      n_ff_(up.n_rows) {
    const bool transposed = down.transposed;
    const bool down_fits = transposed ? down.n_rows == n_ff_ && down.n_cols == up.n_cols
                                      : down.n_cols == n_ff_ && down.n_rows == up.n_cols;
    const bool gate_fits = !gate || (gate.n_rows == n_ff_ && gate.n_cols == up.n_cols);
    const bool predictor_fits =
        !fc1 || (transposed && fc1.n_cols == up.n_cols && fc2 && fc2.n_rows == n_ff_ && fc2.n_cols == fc1.n_rows);
    if (!down_fits || !gate_fits || !predictor_fits) {
        throw std::invalid_argument("feed-forward: shapes do not fit each other");
    }
}

void FeedForwardBlock::activate(Activation activation, float threshold, float* x, int n) const {
    switch (activation) {
        case Activation::Identity: break;
        case Activation::Relu: runtime_.kernels.relu(x, n, threshold); break;
        case Activation::Silu: runtime_.kernels.silu(x, n); break;
        case Activation::Gelu: runtime_.kernels.gelu(x, n); break;
        case Activation::GeluErf: runtime_.kernels.gelu_erf(x, n); break;
    }
}

void FeedForwardBlock::forward(Hidden& x, Hidden& residual) {
    const std::lock_guard<std::mutex> lock(runtime_.mutex);
    if (x.n_embd != up_.n_cols || residual.n_embd != x.n_embd || residual.n_tokens != x.n_tokens) {
        throw std::invalid_argument("feed-forward: the hidden state is of another model");
    }
    const size_t size = static_cast<size_t>(x.n_tokens) * x.n_embd;
    float* out = post_norm_ ? runtime_.scratch.unnormed.reserve(size) : residual.row(0);
    if (down_.transposed) {
        if (post_norm_) std::memset(out, 0, sizeof(float) * size);
        forward_neurons(x, out);
    } else {
        forward_dense(x, out);
    }
    if (post_norm_) add_normed(runtime_.kernels, post_norm_, out, residual);
    counts.tokens += x.n_tokens;
}

// out = (or, without post_norm, +=) down(h).
void FeedForwardBlock::forward_dense(Hidden& x, float* out) {
    const int n_tokens = x.n_tokens;
    Scratch& scratch = runtime_.scratch;
    scratch.normed.reserve(n_tokens, x.n_embd, up_.takes_rounded() || gate_.takes_rounded());
    scratch.wide.reserve(n_tokens, n_ff_, down_.takes_rounded());
    const size_t tile = Runtime::tile_size(std::max(n_ff_, x.n_embd), n_tokens);
    scratch.tiles.reserve(2 * tile * runtime_.max_threads());

    // gate and up of the same rows, joined while they are in the cache
    const auto rows = [&](int first, int n, float* g, float* u) {
        const Activations normed = scratch.normed.view();
        up_.multiply(first, n, normed, n_tokens, u, n);
        if (gate_) {
            gate_.multiply(first, n, normed, n_tokens, g, n);
            activate(activation_, activation_threshold_, g, n_tokens * n);
            activate(up_activation_, 0.0f, u, n_tokens * n);
        } else {
            activate(activation_, activation_threshold_, u, n_tokens * n);
        }
        for (int t = 0; t < n_tokens; t++) {
            float* h = scratch.wide.row(t) + first;
            for (int r = 0; r < n; r++) h[r] = gate_ ? g[t * n + r] * u[t * n + r] : u[t * n + r];
        }
    };

    runtime_.run(n_tokens, [&](Region& region) {
        float* mine = scratch.tiles.data() + region.thread() * 2 * tile;
        region.for_each(n_tokens, 1, [&](int64_t t, int64_t) {
            norm_.apply(runtime_.kernels, x.row(t), x.n_embd, scratch.normed.row(t));
            scratch.normed.round(runtime_.kernels, t);
        });
        region.barrier();
        region.for_each(n_ff_, runtime_.row_grain(n_ff_, n_tokens), [&](int64_t begin, int64_t end) {
            rows(static_cast<int>(begin), static_cast<int>(end - begin), mine, mine + tile);
        });
        region.barrier();
        region.for_each(n_tokens, 1, [&](int64_t t, int64_t) { scratch.wide.round(runtime_.kernels, t); });
        region.barrier();
        runtime_.matmul(region, down_, scratch.wide.view(), n_tokens, out, x.n_embd, !post_norm_, mine);
    });
    counts.predicted += static_cast<int64_t>(n_tokens) * n_ff_;
    counts.fired += static_cast<int64_t>(n_tokens) * n_ff_;
}

// predictor_mid = relu(fc1 . x), for all tokens.
void FeedForwardBlock::predict_hidden(Region& region, const Step& step) const {
    Scratch& scratch = runtime_.scratch;
    ActivationBuffer& mid = scratch.predictor_mid;
    runtime_.matmul(region, fc1_, scratch.predictor_in.view(step.x.row(0)), step.n_tokens, mid.row(0), fc1_.n_rows);
    region.barrier();
    region.for_each(step.n_tokens, 1, [&](int64_t t, int64_t) {
        runtime_.kernels.relu(mid.row(t), fc1_.n_rows, 0.0f);
        mid.round(runtime_.kernels, t);
    });
    region.barrier();
}

// Neurons first..first + n of the only token: predictor, then gate of those it names, then up and down of those whose
// gate is open, each as one pass over a list of rows. Their outputs are added to `sum`, n_embd floats.
void FeedForwardBlock::neurons_of_token(const Step& step, int first, int n, float* sum, Counts& counts) const {
    const Scratch& scratch = runtime_.scratch;
    int active[kListGrain];
    float values[kListGrain];
    int n_active = 0;
    if (fc2_) {
        fc2_.multiply(first, n, scratch.predictor_mid.view(), 1, values, n);
        for (int r = 0; r < n; r++) {
            active[n_active] = first + r;
            n_active += values[r] >= threshold_;
        }
    } else {
        for (int r = 0; r < n; r++) active[n_active++] = first + r;
    }
    counts.predicted += n_active;

    const uint8_t* rows[kListGrain];
    const auto product = [&](const Matrix& w, float* to) {
        for (int k = 0; k < n_active; k++) rows[k] = w.row(active[k]);
        w.kernels->matmul(rows, n_active, scratch.normed.view(), nullptr, 1, to, n_active);
        if (w.bias == nullptr) return;
        for (int k = 0; k < n_active; k++) to[k] += w.bias[active[k]];
    };
    const auto drop_zeros = [&] {
        int open = 0;
        for (int k = 0; k < n_active; k++) {
            if (values[k] == 0.0f) continue;
            active[open] = active[k];
            values[open++] = values[k];
        }
        n_active = open;
    };
    product(gate_ ? gate_ : up_, values);
    activate(activation_, activation_threshold_, values, n_active);
    drop_zeros();
    if (gate_) {
        float u[kListGrain];
        product(up_, u);
        activate(up_activation_, 0.0f, u, n_active);
        for (int k = 0; k < n_active; k++) values[k] *= u[k];
        drop_zeros();
    }
    counts.fired += n_active;
    for (int k = 0; k < n_active; k++) rows[k] = down_.row(active[k]);
    if (n_active > 0) down_.kernels->axpy(rows, values, n_active, 0, sum, step.x.n_embd);
}

// Neurons first..first + n of many tokens, each for the tokens whose own mask names it; h of the others is 0.
void FeedForwardBlock::neurons_of_batch(const Step& step, int first, int n, float* scores, Counts& counts) const {
    const int n_tokens = step.n_tokens;
    const Activations normed = runtime_.scratch.normed.view();
    if (fc2_) {
        fc2_.multiply(first, n, runtime_.scratch.predictor_mid.view(), n_tokens, scores, n);
    }
    float* g = scores + static_cast<size_t>(n_tokens) * kNeuronGrain;
    float* u = g + n_tokens;
    int32_t* tokens = reinterpret_cast<int32_t*>(u + n_tokens);
    const auto product = [&](const Matrix& w, int i, int count, float* to) {
        const uint8_t* row = w.row(i);
        w.kernels->matmul(&row, 1, normed, tokens, count, to, 1);
        if (w.bias == nullptr) return;
        for (int k = 0; k < count; k++) to[k] += w.bias[i];
    };
    for (int r = 0; r < n; r++) {
        const int i = first + r;
        int count = 0;
        for (int t = 0; t < n_tokens; t++) {
            step.h[static_cast<size_t>(t) * n_ff_ + i] = 0.0f;
            tokens[count] = t;
            count += !fc2_ || scores[static_cast<size_t>(t) * n + r] >= threshold_;
        }
        counts.predicted += count;
        if (count == 0) continue;
        product(gate_ ? gate_ : up_, i, count, g);
        activate(activation_, activation_threshold_, g, count);
        int open = 0;
        for (int k = 0; k < count; k++) {
            if (g[k] == 0.0f) continue;
            tokens[open] = tokens[k];
            g[open++] = g[k];
        }
        if (gate_ && open > 0) {
            product(up_, i, open, u);
            activate(up_activation_, 0.0f, u, open);
            for (int k = 0; k < open; k++) g[k] *= u[k];
        }
        for (int k = 0; k < open; k++) {
            step.h[static_cast<size_t>(tokens[k]) * n_ff_ + i] = g[k];
            counts.fired += g[k] != 0.0f;
        }
    }
}

// out[:, first..first + n] += h . down_t[:, first..first + n], for all tokens.
void FeedForwardBlock::add_down_of_batch(const Step& step, int first, int n, float* weights) const {
    const int n_embd = step.x.n_embd;
    for (int i = 0; i < n_ff_; i += kNeuronGrain) {
        const int count = std::min(kNeuronGrain, n_ff_ - i);
        for (int r = 0; r < count; r++) down_.kernels->dequantize(down_.row(i + r), first, weights + r * n, n);
        runtime_.kernels.sparse_rank_update(step.h + i, n_ff_, step.n_tokens, weights, count, n,
                                            step.out + first, n_embd);
    }
    if (down_.bias == nullptr) return;
    for (int t = 0; t < step.n_tokens; t++) {
        float* to = step.out + static_cast<ptrdiff_t>(t) * n_embd;
        for (int j = first; j < first + n; j++) to[j] += down_.bias[j];
    }
}

// out += down(h).
void FeedForwardBlock::forward_neurons(Hidden& x, float* out) {
    const int n_tokens = x.n_tokens, n_embd = x.n_embd;
    Scratch& scratch = runtime_.scratch;
    scratch.normed.reserve(n_tokens, n_embd, up_.takes_rounded() || gate_.takes_rounded());
    if (fc1_) {
        scratch.predictor_in.reserve(n_tokens, n_embd, fc1_.takes_rounded());
        scratch.predictor_mid.reserve(n_tokens, fc1_.n_rows, fc2_.takes_rounded());
    }
    Step step{x, out, n_tokens, nullptr};
    if (n_tokens > 1) {
        scratch.wide.reserve(n_tokens, n_ff_, false);
        step.h = scratch.wide.row(0);
    }
    const size_t tile = std::max<size_t>(static_cast<size_t>(n_tokens) * (kNeuronGrain + 3), kNeuronGrain * kColumnGrain);
    scratch.tiles.reserve(tile * runtime_.max_threads());
    const int n_segments = n_tokens > 1 ? (n_ff_ + kNeuronGrain - 1) / kNeuronGrain : std::min(kSegments, (n_ff_ + kPackedRows - 1) / kPackedRows);
    const int rows = n_segments * kPackedRows;
    const int segment = (n_ff_ + rows - 1) / rows * kPackedRows;  // whole groups
    scratch.sums.reserve(static_cast<size_t>(n_embd) * n_segments);
    std::vector<Counts> found(n_segments);

    runtime_.run(n_tokens, [&](Region& region) {
        float* mine = scratch.tiles.data() + region.thread() * tile;
        region.for_each(n_tokens, 1, [&](int64_t t, int64_t) {
            norm_.apply(runtime_.kernels, x.row(t), n_embd, scratch.normed.row(t));
            scratch.normed.round(runtime_.kernels, t);
            if (fc1_) scratch.predictor_in.round(runtime_.kernels, t, x.row(t));
        });
        region.barrier();
        if (fc1_) predict_hidden(region, step);
        region.for_each(n_segments, 1, [&](int64_t k, int64_t) {
            const int begin = k * segment, end = std::min(begin + segment, n_ff_);
            float* sum = scratch.sums.data() + k * n_embd;
            if (n_tokens == 1) std::memset(sum, 0, sizeof(float) * n_embd);
            const int grain = n_tokens == 1 ? kListGrain : kNeuronGrain;
            for (int first = begin; first < end; first += grain) {
                const int n = std::min(grain, end - first);
                if (n_tokens == 1) {
                    neurons_of_token(step, first, n, sum, found[k]);
                } else {
                    neurons_of_batch(step, first, n, mine, found[k]);
                }
            }
        });
        region.barrier();
        region.for_each(n_embd, kColumnGrain, [&](int64_t begin, int64_t end) {
            if (n_tokens > 1) return add_down_of_batch(step, begin, end - begin, mine);
            for (int k = 0; k < n_segments; k++) {
                const float* sum = scratch.sums.data() + static_cast<size_t>(k) * n_embd;
                for (int64_t j = begin; j < end; j++) out[j] += sum[j];
            }
            if (down_.bias == nullptr) return;
            for (int64_t j = begin; j < end; j++) out[j] += down_.bias[j];
        });
    });
    for (const Counts& c : found) {
        counts.predicted += c.predicted;
        counts.fired += c.fired;
    }
}

}  // namespace powerinfer
