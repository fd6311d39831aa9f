// The functions that exist once for each instruction set, and the choice among them at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace powerinfer {

// Rows of activations: float32 as computed, and (for quantized weights) rounded to 15 bits in blocks of 32 with
// f[j] ~ d[j / 32] * q[j]; s[b] = d[b] * (sum of q over block b), which multiplies a weight block's minimum; h[i]: the sum
// of 16 q, of half a block.
//
// Why not 8 bits: a block of 32 with one large value leaves its others few steps, and logits move by 0.06 (rms; 0.7 at
// most) on a small Q4_0 model, enough to change greedy tokens. 15 bits move them by 0.0003. Sums of 16-bit products take
// as many instructions for a row of weights (no sign tricks), and reading weights stays the limit.
constexpr int kActivationMax = 16383;  // 32 products with Q6_K's 6 bits and 8-bit scales fit in 32 bits

struct Activations {
    const float* f;
    const int16_t* q;
    const float* d;
    const float* s;
    const int32_t* h;
    int n_cols;

    int n_blocks() const { return n_cols / 32; }
};

struct TypeKernels {
    bool takes_rounded;  // whether `matmul` reads q, d, s (else f)
    int block_size;      // elements
    int block_bytes;

    // out[t * ld + r] = rows[r] . token(t), t < n_tokens; token(t) is row tokens[t] of `a`, or row t if tokens is null.
    void (*matmul)(const uint8_t* const* rows, int n_rows, const Activations& a, const int32_t* tokens, int n_tokens,
                   float* out, ptrdiff_t ld);
    // y[j] += sum over r of scales[r] * rows[r][first + j], j < n; first and n are multiples of the block size.
    void (*axpy)(const uint8_t* const* rows, const float* scales, int n_rows, int first, float* y, int n);
    // y[j] = row[first + j], j < n.
    void (*dequantize)(const uint8_t* row, int first, float* y, int n);

    // Groups of kPackedRows rows, interleaved so that a vector holds the same columns of all of them; as many bytes as
    // the rows have. Null where there is no such form.
    void (*pack)(const uint8_t* const* rows, int n_cols, uint8_t* group);
    // out[t * ld + r] = row r of the group . token t, t < n_tokens.
    void (*packed_matmul)(const uint8_t* group, const Activations& a, int n_tokens, float* out, ptrdiff_t ld);
};

constexpr int kPackedRows = 16;

// Rows of the KV cache of one type: a key or a value of one head.
struct CacheKernels {
    int block_size, block_bytes;

    ptrdiff_t row_bytes(int head_dim) const { return static_cast<ptrdiff_t>(head_dim / block_size) * block_bytes; }

    void (*store)(const float* x, int n, uint8_t* row);
    // For 1, 2 and 4 queries: scores[i * 64 + p] = q[i] . row p, p < count <= 64.
    void (*scores[3])(const float* const* q, const uint8_t* rows, int n, int count, float* scores);
    // For 1, 2 and 4 rows of out: out[i] = out[i] * keep[i] + sum over p < count of weights[i * 64 + p] * row p.
    void (*values[3])(const uint8_t* rows, int n, int count, const float* weights, const float* keep, float* out);
};

// Queries that read the same KV head: a group of heads, of several tokens.
struct AttentionArgs {
    const CacheKernels *keys, *values;
    const float* const* q;    // n_queries rows of head_dim
    const int* n_positions;   // of each query: how many positions it sees,
    const int* n_hidden;      // but for so many of the first
    const uint8_t *k, *v;     // rows, one a position
    int n_queries, head_dim;
    float scale;
    float* out;  // n_queries rows of head_dim, not divided by the sum
    float* max;  // n_queries: the largest score
    float* sum;  // n_queries: sum of exp(score - max)
};

struct Kernels {
    const char* name;
    TypeKernels types[kTypeSlots];   // indexed by Type; block_size is 0 where there is none
    CacheKernels caches[kTypeSlots];  // likewise

    void (*round)(const float* x, int n, int16_t* q, float* d, float* s, int32_t* h);
    void (*rms_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* y);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* y);
    void (*attention)(const AttentionArgs& args);
    void (*silu)(float* x, int n);
    void (*gelu)(float* x, int n);
    void (*gelu_erf)(float* x, int n);
    void (*relu)(float* x, int n, float threshold);  // x where x > threshold, else 0
    // y[t][0..n) += sum over i of h[t][i] * w[i][0..n): rows of h with many zeros. w: n_rows x n, float32.
    void (*sparse_rank_update)(const float* h, ptrdiff_t ld_h, int n_tokens, const float* w, int n_rows, int n, float* y,
                               ptrdiff_t ld_y);
};

extern const Kernels kPortable;
#ifdef POWERINFER_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif
#ifdef POWERINFER_NEON
extern const Kernels kNeon;
#endif

// The best that this processor runs, or the one named (nullptr if it is unknown or this processor cannot run it).
const Kernels* best_kernels();
const Kernels* find_kernels(const char* name);

}  // namespace powerinfer
