// The blocks of a transformer that backends/interface.py names, each one fused.
#pragma once

#include "runtime.h"

namespace powerinfer {

enum class Activation : int { Identity, Relu, Silu, Gelu, GeluErf };

// RMSNorm or LayerNorm; weight and bias (n,), bias may be null.
struct Norm {
    const float* weight = nullptr;
    const float* bias = nullptr;
    float eps = 1e-5f;
    bool layer = false;

    explicit operator bool() const { return weight != nullptr; }
    void apply(const Kernels& kernels, const float* x, int n, float* y) const {
        (layer ? kernels.layer_norm : kernels.rms_norm)(x, weight, bias, eps, n, y);
    }
};

// residual += norm(x), row by row; x is written over.
inline void add_normed(const Kernels& kernels, const Norm& norm, float* x, Hidden& residual) {
    const int n = residual.n_embd;
    for (int t = 0; t < residual.n_tokens; t++, x += n) {
        norm.apply(kernels, x, n, x);
        for (int j = 0; j < n; j++) residual.row(t)[j] += x[j];
    }
}

// As interface.py's Attention says; window 0: none. The last three norms may be empty.
struct AttentionParams {
    int layer, n_head, n_head_kv, head_dim, window;
    float scale;
    RopeParams rope;
    Norm norm;
    Matrix q, k, v, output;
    Norm q_norm, k_norm, post_norm;
};

class AttentionBlock {
  public:
    AttentionBlock(Runtime& runtime, AttentionParams params);

    // residual += post_norm(output(attention(norm(x)))); keys and values of x go into the cache.
    void forward(Hidden& x, Hidden& residual, KVCache& cache);

  private:
    struct Step;
    void rotate_and_store(const Step& step, int token, int head) const;
    void attend(const Step& step, int64_t item, const float** queries, int* n_positions) const;
    void merge(const Step& step, int64_t tile) const;
    static void find_tiles(const Hidden& x, std::vector<TokenTile>& tiles);

    Runtime& runtime_;
    const int layer_, n_head_, n_head_kv_, head_dim_, n_group_;
    const int64_t window_;  // positions that a token sees, its own among them
    const float scale_;
    const RopeParams rope_;
    const Norm norm_, q_norm_, k_norm_, post_norm_;
    const Matrix q_, k_, v_, output_;
};

struct Counts {
    int64_t tokens = 0, predicted = 0, fired = 0;
};

class FeedForwardBlock {
  public:
    // `down` is n_embd x n_ff, or, if it is transposed, n_ff x n_embd. gate, fc1, fc2 and post_norm may be empty.
    // activation_threshold: of `activation` if that is Relu.
    FeedForwardBlock(Runtime& runtime, Norm norm, Matrix gate, Matrix up, Matrix down, Activation activation,
                     float activation_threshold, Activation up_activation, Matrix fc1, Matrix fc2, float threshold,
                     Norm post_norm);

    // residual += post_norm(down(h)), as interface.py's FeedForward says.
    void forward(Hidden& x, Hidden& residual);

    // out (n_tokens x n_embd) += what the neurons that `mask` (n_tokens x n_ff) names give, from x normalised; no biases
    // of down, no post_norm: a part of the whole.
    void add_neurons(const float* normed, const uint8_t* mask, int n_tokens, float* out);

    // Of each neuron, for how many tokens it fired; counted unless it is empty. A neuron is one thread's at a time.
    std::vector<int64_t> fired_of;

    int n_embd() const { return up_.n_cols; }
    int n_ff() const { return n_ff_; }

    Counts counts;

  private:
    struct Step;
    void forward_dense(Hidden& x, float* out);
    void forward_neurons(Step step);
    void predict_hidden(Region& region, const Step& step) const;
    void neurons_of_few(const Step& step, int first, int n, float* sums, Counts& counts);
    void neurons_of_batch(const Step& step, int first, int n, float* scores, Counts& counts);
    void add_down_of_batch(const Step& step, int first, int n, float* weights) const;
    void activate(Activation activation, float threshold, float* x, int n) const;

    Runtime& runtime_;
    const Norm norm_, post_norm_;
    const Matrix gate_, up_, down_;
    const Activation activation_, up_activation_;
    const float activation_threshold_;
    const Matrix fc1_, fc2_;
    const float threshold_;
    const int n_ff_;
};

// Rows of the embedding for the tokens of a batch, times `scale`, plus (unless it is empty) rows of position_embd.
void embed(Runtime& runtime, const Matrix& token_embd, float scale, const Matrix& position_embd, const int32_t* tokens,
           Hidden& out);

// logits = output(norm(x)) of the rows `outputs`, n_outputs x n_vocab.
void head(Runtime& runtime, const Norm& norm, const Matrix& output, const Hidden& x, const int32_t* outputs,
          int n_outputs, float* logits);

}  // namespace powerinfer
