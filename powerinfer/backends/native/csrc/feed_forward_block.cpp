#include <algorithm>
#include <cstring>

#include "blocks_of_model.h"

namespace powerinfer {
namespace {

constexpr int kNeuronGrain = 64;   // neurons that a thread computes at a time, in batches
constexpr int kListGrain = 512;    // and for few: the first rows of a list are not prefetched, so few long ones
constexpr int kColumnGrain = 256;  // columns of the output that a thread takes at a time, in batches
// Up to so many tokens go through lists of neurons together. Beyond, batches do: two tokens take 33 ms in lists and 92 as a
// batch, eight 110 and 150, sixteen 230 as a batch (1.35B, 40 % of neurons active, two cores).
constexpr int kFewTokens = 8;
// With few tokens, neurons are cut into this many runs, each summed on its own. A thread takes a run at a time, so sums are
// made in the same order whatever the number of threads, and results do not depend on it.
constexpr int kSegments = 32;

}  // namespace

// What the threads of one call share. out (n_tokens x n_embd): what outputs are added to. Neurons are named by the
// predictor, from x, or by mask (n_tokens x n_ff) if that is not null; then `x` is normalised already. h (n_tokens x n_ff)
// is used in batches only.
struct FeedForwardBlock::Step {
    const float* x;
    const uint8_t* mask;
    float* out;
    int n_tokens, n_embd;
    float* h = nullptr;

    const float* row(int64_t token) const { return x + token * n_embd; }
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
        forward_neurons({x.row(0), nullptr, out, x.n_tokens, x.n_embd});
    } else {
        forward_dense(x, out);
    }
    if (post_norm_) add_normed(runtime_.kernels, post_norm_, out, residual);
    counts.tokens += x.n_tokens;
}

void FeedForwardBlock::add_neurons(const float* normed, const uint8_t* mask, int n_tokens, float* out) {
    const std::lock_guard<std::mutex> lock(runtime_.mutex);
    if (!down_.transposed) throw std::invalid_argument("feed-forward: the down projection has no rows of neurons");
    forward_neurons({normed, mask, out, n_tokens, up_.n_cols});
    counts.tokens += n_tokens;
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
            if (fired_of.empty()) continue;
            for (int r = 0; r < n; r++) fired_of[first + r] += h[r] != 0.0f;
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
    runtime_.matmul(region, fc1_, scratch.predictor_in.view(step.x), step.n_tokens, mid.row(0), fc1_.n_rows);
    region.barrier();
    region.for_each(step.n_tokens, 1, [&](int64_t t, int64_t) {
        runtime_.kernels.relu(mid.row(t), fc1_.n_rows, 0.0f);
        mid.round(runtime_.kernels, t);
    });
    region.barrier();
}

// Neurons first..first + n of a few tokens: predictor, then gate of those that it names for any token, then up of those
// whose gate is open, each as one pass over a list of rows; then down, token by token, while the rows are in the cache.
// Their outputs are added to `sums`, n_tokens x n_embd.
void FeedForwardBlock::neurons_of_few(const Step& step, int first, int n, float* sums, Counts& counts) {
    const Scratch& scratch = runtime_.scratch;
    const int n_tokens = step.n_tokens;
    int list[kListGrain];
    float values[kListGrain * kFewTokens], ups[kListGrain * kFewTokens];  // n_tokens x n_list
    bool named[kListGrain * kFewTokens];
    const uint8_t* rows[kListGrain];
    int n_list = 0;

    // Whether neuron r of the list is used by token t.
    const auto keep = [&](auto&& used) {
        int kept = 0;
        for (int r = 0; r < n_list; r++) {
            bool any = false;
            for (int t = 0; t < n_tokens; t++) any |= used(t, r);
            list[kept] = list[r];
            if (!any) continue;
            for (int t = 0; t < n_tokens; t++) {
                named[t * kListGrain + kept] = used(t, r);
                values[t * kListGrain + kept] = values[t * kListGrain + r];
            }
            kept++;
        }
        n_list = kept;
    };
    const auto product = [&](const Matrix& w, float* to) {
        for (int r = 0; r < n_list; r++) rows[r] = w.row(list[r]);
        w.kernels->matmul(rows, n_list, scratch.normed.view(), nullptr, n_tokens, to, kListGrain);
        if (w.bias == nullptr) return;
        for (int t = 0; t < n_tokens; t++) {
            for (int r = 0; r < n_list; r++) to[t * kListGrain + r] += w.bias[list[r]];
        }
    };
    const auto activate_all = [&](Activation activation, float threshold, float* x) {
        for (int t = 0; t < n_tokens; t++) activate(activation, threshold, x + t * kListGrain, n_list);
    };
    const auto is_used = [&](int t, int r) {
        return named[t * kListGrain + r] && values[t * kListGrain + r] != 0.0f;
    };

    for (int r = 0; r < n; r++) list[r] = first + r;
    n_list = n;
    if (step.mask || fc2_) {
        if (step.mask) {
            keep([&](int t, int r) { return step.mask[static_cast<size_t>(t) * n_ff_ + first + r] != 0; });
        } else {
            fc2_.multiply(first, n, scratch.predictor_mid.view(), n_tokens, values, kListGrain);
            keep([&](int t, int r) { return values[t * kListGrain + r] >= threshold_; });
        }
        for (int t = 0; t < n_tokens; t++) {
            for (int r = 0; r < n_list; r++) counts.predicted += named[t * kListGrain + r];
        }
    } else {
        std::fill_n(named, static_cast<size_t>(n_tokens) * kListGrain, true);
        counts.predicted += static_cast<int64_t>(n_tokens) * n;
    }
    product(gate_ ? gate_ : up_, values);
    activate_all(activation_, activation_threshold_, values);
    keep(is_used);
    if (gate_) {
        product(up_, ups);
        activate_all(up_activation_, 0.0f, ups);
        for (int t = 0; t < n_tokens; t++) {
            for (int r = 0; r < n_list; r++) values[t * kListGrain + r] *= ups[t * kListGrain + r];
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        const float* of_token = values + t * kListGrain;
        float scales[kListGrain];
        int n_fired = 0;
        for (int r = 0; r < n_list; r++) {
            if (!is_used(t, r)) continue;
            rows[n_fired] = down_.row(list[r]);
            scales[n_fired++] = of_token[r];
            if (!fired_of.empty()) fired_of[list[r]]++;
        }
        counts.fired += n_fired;
        const int n_embd = step.n_embd;
        if (n_fired > 0) down_.kernels->axpy(rows, scales, n_fired, 0, sums + static_cast<ptrdiff_t>(t) * n_embd, n_embd);
    }
}

// Neurons first..first + n of many tokens, each for the tokens whose own mask names it; h of the others is 0.
void FeedForwardBlock::neurons_of_batch(const Step& step, int first, int n, float* scores, Counts& counts) {
    const int n_tokens = step.n_tokens;
    const Activations normed = runtime_.scratch.normed.view();
    if (fc2_ && !step.mask) fc2_.multiply(first, n, runtime_.scratch.predictor_mid.view(), n_tokens, scores, n);
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
            count += step.mask ? step.mask[static_cast<size_t>(t) * n_ff_ + i] != 0
                               : !fc2_ || scores[static_cast<size_t>(t) * n + r] >= threshold_;
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
            if (!fired_of.empty()) fired_of[i] += g[k] != 0.0f;
        }
    }
}

// out[:, first..first + n] += h . down_t[:, first..first + n], for all tokens.
void FeedForwardBlock::add_down_of_batch(const Step& step, int first, int n, float* weights) const {
    const int n_embd = step.n_embd;
    for (int i = 0; i < n_ff_; i += kNeuronGrain) {
        const int count = std::min(kNeuronGrain, n_ff_ - i);
        for (int r = 0; r < count; r++) down_.kernels->dequantize(down_.row(i + r), first, weights + r * n, n);
        runtime_.kernels.sparse_rank_update(step.h + i, n_ff_, step.n_tokens, weights, count, n,
                                            step.out + first, n_embd);
    }
    if (down_.bias == nullptr || step.mask) return;
    for (int t = 0; t < step.n_tokens; t++) {
        float* to = step.out + static_cast<ptrdiff_t>(t) * n_embd;
        for (int j = first; j < first + n; j++) to[j] += down_.bias[j];
    }
}

// out += down(h); without down's bias if there is a mask, which is that of a part of the neurons.
void FeedForwardBlock::forward_neurons(Step step) {
    const int n_tokens = step.n_tokens, n_embd = step.n_embd;
    const bool predicts = fc1_ && !step.mask;
    Scratch& scratch = runtime_.scratch;
    scratch.normed.reserve(n_tokens, n_embd, up_.takes_rounded() || gate_.takes_rounded());
    if (predicts) {
        scratch.predictor_in.reserve(n_tokens, n_embd, fc1_.takes_rounded());
        scratch.predictor_mid.reserve(n_tokens, fc1_.n_rows, fc2_.takes_rounded());
    }
    const bool few = n_tokens <= kFewTokens;
    if (!few) {
        scratch.wide.reserve(n_tokens, n_ff_, false);
        step.h = scratch.wide.row(0);
    }
    const size_t tile = std::max<size_t>(static_cast<size_t>(n_tokens) * (kNeuronGrain + 3), kNeuronGrain * kColumnGrain);
    scratch.tiles.reserve(tile * runtime_.max_threads());
    const int n_groups = (n_ff_ + kPackedRows - 1) / kPackedRows;
    const int n_segments = few ? std::min(kSegments, n_groups) : (n_ff_ + kNeuronGrain - 1) / kNeuronGrain;
    const int segment = (n_groups + n_segments - 1) / n_segments * kPackedRows;  // whole groups
    const size_t n_sums = static_cast<size_t>(n_tokens) * n_embd;
    scratch.sums.reserve(few ? n_sums * n_segments : 0);
    std::vector<Counts> found(n_segments);

    runtime_.run(n_tokens, [&](Region& region) {
        float* mine = scratch.tiles.data() + region.thread() * tile;
        region.for_each(n_tokens, 1, [&](int64_t t, int64_t) {
            if (step.mask) {
                std::copy_n(step.row(t), n_embd, scratch.normed.row(t));
            } else {
                norm_.apply(runtime_.kernels, step.row(t), n_embd, scratch.normed.row(t));
            }
            scratch.normed.round(runtime_.kernels, t);
            if (predicts) scratch.predictor_in.round(runtime_.kernels, t, step.row(t));
        });
        region.barrier();
        if (predicts) predict_hidden(region, step);
        region.for_each(n_segments, 1, [&](int64_t k, int64_t) {
            const int begin = static_cast<int>(k) * segment, end = std::min(begin + segment, n_ff_);
            float* sums = scratch.sums.data() + k * n_sums;
            if (few) std::memset(sums, 0, sizeof(float) * n_sums);
            const int grain = few ? kListGrain : kNeuronGrain;
            for (int first = begin; first < end; first += grain) {
                const int n = std::min(grain, end - first);
                if (few) {
                    neurons_of_few(step, first, n, sums, found[k]);
                } else {
                    neurons_of_batch(step, first, n, mine, found[k]);
                }
            }
        });
        region.barrier();
        if (!few) {
            region.for_each(n_embd, kColumnGrain, [&](int64_t begin, int64_t end) {
                add_down_of_batch(step, static_cast<int>(begin), static_cast<int>(end - begin), mine);
            });
            return;
        }
        region.for_each(n_tokens * n_embd, kColumnGrain, [&](int64_t begin, int64_t end) {
            for (int k = 0; k < n_segments; k++) {
                const float* sums = scratch.sums.data() + k * n_sums;
                for (int64_t j = begin; j < end; j++) step.out[j] += sums[j];
            }
            if (down_.bias == nullptr || step.mask) return;
            for (int64_t j = begin; j < end; j++) step.out[j] += down_.bias[j % n_embd];
        });
    });
    for (const Counts& c : found) {
        counts.predicted += c.predicted;
        counts.fired += c.fired;
    }
}

}  // namespace powerinfer
