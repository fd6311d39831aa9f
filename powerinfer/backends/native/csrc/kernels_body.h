// The kernels, once, in terms of the operations of a simd_*.h header. Each kernels_*.cpp defines SIMD_NAMESPACE (so that
// no function compiled for one processor is linked into the path of another), includes such a header, then this.

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace powerinfer::SIMD_NAMESPACE {

// ---- quantized weights: 32 bytes at a time against 32 int8 activations ----

// 32 weights: value = d * byte + m. Of a type, kMin: whether m is not always zero; kSigned: whether bytes are signed;
// `scales`: d and m of eight blocks.
struct Unpacked {
    Bytes bytes;
    F32 d;
    float m;
};

struct Q4_0 {
    using Block = BlockQ4_0;
    static constexpr int kPerBlock = 1;  // groups of 32 in a block
    static constexpr bool kMin = true, kSigned = false;
    static Bytes bytes(const Block& b) { return load_nibbles(b.qs); }
    static Unpacked unpack(const Block& b, int) { return {bytes(b), set1(f16_to_f32(b.d)), -8.0f * f16_to_f32(b.d)}; }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = mul(d, set1(-8.0f));
    }
};

struct Q4_1 {
    using Block = BlockQ4_1;
    static constexpr int kPerBlock = 1;
    static constexpr bool kMin = true, kSigned = false;
    static Bytes bytes(const Block& b) { return load_nibbles(b.qs); }
    static Unpacked unpack(const Block& b, int) { return {bytes(b), set1(f16_to_f32(b.d)), f16_to_f32(b.m)}; }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = load_f16_strided<sizeof(Block)>(&first->m);
    }
};

struct Q5_0 {
    using Block = BlockQ5_0;
    static constexpr int kPerBlock = 1;
    static constexpr bool kMin = true, kSigned = false;
    static Bytes bytes(const Block& b) { return add_fifth_bits(load_nibbles(b.qs), b.qh); }
    static Unpacked unpack(const Block& b, int) { return {bytes(b), set1(f16_to_f32(b.d)), -16.0f * f16_to_f32(b.d)}; }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = mul(d, set1(-16.0f));
    }
};

struct Q5_1 {
    using Block = BlockQ5_1;
    static constexpr int kPerBlock = 1;
    static constexpr bool kMin = true, kSigned = false;
    static Bytes bytes(const Block& b) { return add_fifth_bits(load_nibbles(b.qs), b.qh); }
    static Unpacked unpack(const Block& b, int) { return {bytes(b), set1(f16_to_f32(b.d)), f16_to_f32(b.m)}; }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = load_f16_strided<sizeof(Block)>(&first->m);
    }
};

struct Q8_0 {
    using Block = BlockQ8_0;
    static constexpr int kPerBlock = 1;
    static constexpr bool kMin = false, kSigned = true;
    static Bytes bytes(const Block& b) { return load_bytes(b.qs); }
    static Unpacked unpack(const Block& b, int) { return {bytes(b), set1(f16_to_f32(b.d)), 0.0f}; }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = zero();
    }
};

struct Q6_K {
    using Block = BlockQ6_K;
    static constexpr int kPerBlock = 8;
    static constexpr bool kMin = false, kSigned = true;
    static Unpacked unpack(const Block& b, int group) {
        const int half = group >> 2, quarter = group & 3;
        const Bytes low = load_bytes(b.ql + half * 64 + (quarter & 1) * 32);
        const Bytes high = load_bytes(b.qh + half * 32);
        Bytes bits;
        switch (quarter) {
            case 0: bits = shift_left<4>(and_all(high, 3)); break;
            case 1: bits = shift_left<2>(and_all(high, 12)); break;
            case 2: bits = and_all(high, 48); break;
            default: bits = shift_right<2>(and_all(high, 192)); break;
        }
        const Bytes nibbles = quarter < 2 ? and_all(low, 15) : shift_right<4>(low);
        const float d = f16_to_f32(b.d);
        const int8_t* scales = b.scales + half * 8 + quarter * 2;
        return {sub_all(bit_or(nibbles, bits), 32), halves(d * scales[0], d * scales[1]), 0.0f};
    }
};

// A tile of R rows and T tokens: weights are unpacked once for all T. Scales are made ready for eight blocks at a time.
// `next`: R rows that come after these, or null. Rows can lie anywhere, where the processor cannot guess them: asking for
// them a row ahead is the difference between 7 and 20 GB/s on one core.
template <class Q, int R, int T>
void quantized_tile(const uint8_t* const* rows, const uint8_t* const* next, const Activations& a,
                    const int32_t* tokens, int first, float* out, ptrdiff_t ld) {
    constexpr int kRun = F32::kLanes;
    const int n_blocks = a.n_blocks();
    const int8_t* q[T];
    const float *d[T], *s[T];
    for (int t = 0; t < T; t++) {
        const ptrdiff_t token = tokens ? tokens[first + t] : first + t;
        q[t] = a.q + token * a.n_cols;
        d[t] = a.d + token * n_blocks;
        s[t] = a.s + token * n_blocks;
    }
    const typename Q::Block* w[R];
    for (int r = 0; r < R; r++) w[r] = reinterpret_cast<const typename Q::Block*>(rows[r]);
    F32 acc[R][T], offset[R][T];
    float tail[R][T];
    for (int r = 0; r < R; r++) {
        for (int t = 0; t < T; t++) {
            acc[r][t] = offset[r][t] = zero();
            tail[r][t] = 0.0f;
        }
    }
    const auto product = [&](const Bytes& bytes, int t, int b) {
        const Bytes x = load_bytes(q[t] + b * 32);
        return Q::kSigned ? dot_ss(bytes, x) : dot_us(bytes, x);
    };
    int b = 0;
    if constexpr (Q::kPerBlock == 1) {
        for (; b + kRun <= n_blocks; b += kRun) {
            float scale[R][T][kRun];
            for (int r = 0; r < R; r++) {
                F32 dw, mw;
                Q::scales(w[r] + b, dw, mw);
                if (next != nullptr) {
                    constexpr int kBytes = kRun * sizeof(typename Q::Block);
                    const uint8_t* at = next[r] + b * sizeof(typename Q::Block);
                    for (int line = 0; line < kBytes; line += 64) prefetch(at + line);
                }
                for (int t = 0; t < T; t++) {
                    store(scale[r][t], mul(dw, load(d[t] + b)));
                    if (Q::kMin) offset[r][t] = fma(mw, load(s[t] + b), offset[r][t]);
                }
            }
            for (int i = 0; i < kRun; i++) {
                for (int r = 0; r < R; r++) {
                    const Bytes bytes = Q::bytes(w[r][b + i]);
                    for (int t = 0; t < T; t++) {
                        acc[r][t] = fma(product(bytes, t, b + i), set1(scale[r][t][i]), acc[r][t]);
                    }
                }
            }
        }
    }
    for (; b < n_blocks; b++) {
        for (int r = 0; r < R; r++) {
            const Unpacked u = Q::unpack(w[r][b / Q::kPerBlock], b % Q::kPerBlock);
            for (int t = 0; t < T; t++) {
                acc[r][t] = fma(product(u.bytes, t, b), mul(u.d, set1(d[t][b])), acc[r][t]);
                if (Q::kMin) tail[r][t] += u.m * s[t][b];
            }
        }
    }
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < R; r++) out[(first + t) * ld + r] = sum(add(acc[r][t], offset[r][t])) + tail[r][t];
    }
}

template <class Q, int R>
void quantized_rows(const uint8_t* const* rows, const uint8_t* const* next, const Activations& a,
                    const int32_t* tokens, int n_tokens, float* out, ptrdiff_t ld) {
    int t = 0;
    for (; t + 4 <= n_tokens; t += 4) {
        for (int r = 0; r < R; r++) {
            quantized_tile<Q, 1, 4>(rows + r, t == 0 && next ? next + r : nullptr, a, tokens, t, out + r, ld);
        }
    }
    for (; t < n_tokens; t++) quantized_tile<Q, R, 1>(rows, t == 0 ? next : nullptr, a, tokens, t, out, ld);
}

template <class Q>
void quantized_matmul(const uint8_t* const* rows, int n_rows, const Activations& a, const int32_t* tokens,
                      int n_tokens, float* out, ptrdiff_t ld) {
    int r = 0;
    for (; r + 2 <= n_rows; r += 2) {
        const uint8_t* const* next = r + 4 <= n_rows ? rows + r + 2 : nullptr;
        quantized_rows<Q, 2>(rows + r, next, a, tokens, n_tokens, out + r, ld);
    }
    for (; r < n_rows; r++) quantized_rows<Q, 1>(rows + r, nullptr, a, tokens, n_tokens, out + r, ld);
}

// Four vectors of 32 weights' whole numbers.
inline void widen_all(const Bytes& bytes, F32 (&w)[4]) {
    w[0] = widen<0>(bytes);
    w[1] = widen<1>(bytes);
    w[2] = widen<2>(bytes);
    w[3] = widen<3>(bytes);
}

// Scales of the first and the last 16 weights.
inline void split_scales(const F32& d, F32& low, F32& high) {
    float lanes[F32::kLanes];
    store(lanes, d);
    low = set1(lanes[0]);
    high = set1(lanes[4]);
}

template <class Q>
void quantized_axpy(const uint8_t* const* rows, const float* scales, int n_rows, int first, float* y, int n) {
    for (int b = 0; b < n / 32; b++) {
        F32 acc[4];
        float offset = 0.0f;
        for (int i = 0; i < 4; i++) acc[i] = load(y + b * 32 + i * 8);
        for (int r = 0; r < n_rows; r++) {
            const int at = first / 32 + b;
            const auto* block = reinterpret_cast<const typename Q::Block*>(rows[r]) + at / Q::kPerBlock;
            const Unpacked u = Q::unpack(*block, at % Q::kPerBlock);
            const F32 d = mul(u.d, set1(scales[r]));
            if (Q::kMin) offset += u.m * scales[r];
            F32 low = d, high = d, w[4];
            if (Q::kPerBlock > 1) split_scales(d, low, high);
            widen_all(u.bytes, w);
            for (int i = 0; i < 4; i++) acc[i] = fma(w[i], i < 2 ? low : high, acc[i]);
        }
        for (int i = 0; i < 4; i++) store(y + b * 32 + i * 8, Q::kMin ? add(acc[i], set1(offset)) : acc[i]);
    }
}

template <class Q>
void quantized_dequantize(const uint8_t* row, int first, float* y, int n) {
    for (int b = 0; b < n / 32; b++) {
        const int at = first / 32 + b;
        const auto* block = reinterpret_cast<const typename Q::Block*>(row) + at / Q::kPerBlock;
        const Unpacked u = Q::unpack(*block, at % Q::kPerBlock);
        F32 low, high, w[4];
        split_scales(u.d, low, high);
        widen_all(u.bytes, w);
        for (int i = 0; i < 4; i++) store(y + b * 32 + i * 8, fma(w[i], i < 2 ? low : high, set1(u.m)));
    }
}

#include "kernels_packed.h"

// ---- float weights against float32 activations ----

struct AsF32 {
    using Element = float;
    static F32 load8(const float* p) { return load(p); }
    static float one(float x) { return x; }
};
struct AsF16 {
    using Element = uint16_t;
    static F32 load8(const uint16_t* p) { return load_f16(p); }
    static float one(uint16_t x) { return f16_to_f32(x); }
};
struct AsBF16 {
    using Element = uint16_t;
    static F32 load8(const uint16_t* p) { return load_bf16(p); }
    static float one(uint16_t x) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float y;
        std::memcpy(&y, &bits, 4);
        return y;
    }
};

template <class W, int R, int T>
void float_tile(const uint8_t* const* rows, const Activations& a, const int32_t* tokens, int first, float* out,
                ptrdiff_t ld) {
    const int n = a.n_cols;
    const float* x[T];
    for (int t = 0; t < T; t++) x[t] = a.f + static_cast<ptrdiff_t>(tokens ? tokens[first + t] : first + t) * n;
    const typename W::Element* w[R];
    for (int r = 0; r < R; r++) w[r] = reinterpret_cast<const typename W::Element*>(rows[r]);
    F32 acc[R][T];
    for (int r = 0; r < R; r++) {
        for (int t = 0; t < T; t++) acc[r][t] = zero();
    }
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) {
        F32 v[R];
        for (int r = 0; r < R; r++) v[r] = W::load8(w[r] + j);
        for (int t = 0; t < T; t++) {
            const F32 xv = load(x[t] + j);
            for (int r = 0; r < R; r++) acc[r][t] = fma(v[r], xv, acc[r][t]);
        }
    }
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < R; r++) {
            float y = sum(acc[r][t]);
            for (int i = j; i < n; i++) y += W::one(w[r][i]) * x[t][i];
            out[(first + t) * ld + r] = y;
        }
    }
}

template <class W>
void float_matmul(const uint8_t* const* rows, int n_rows, const Activations& a, const int32_t* tokens, int n_tokens,
                  float* out, ptrdiff_t ld) {
    int r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        int t = 0;
        for (; t + 2 <= n_tokens; t += 2) float_tile<W, 4, 2>(rows + r, a, tokens, t, out + r, ld);
        for (; t < n_tokens; t++) float_tile<W, 4, 1>(rows + r, a, tokens, t, out + r, ld);
    }
    for (; r < n_rows; r++) {
        int t = 0;
        for (; t + 4 <= n_tokens; t += 4) float_tile<W, 1, 4>(rows + r, a, tokens, t, out + r, ld);
        for (; t < n_tokens; t++) float_tile<W, 1, 1>(rows + r, a, tokens, t, out + r, ld);
    }
}

template <class W>
void float_axpy(const uint8_t* const* rows, const float* scales, int n_rows, int first, float* y, int n) {
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) {
        F32 acc = load(y + j);
        for (int r = 0; r < n_rows; r++) {
            const auto* w = reinterpret_cast<const typename W::Element*>(rows[r]) + first;
            acc = fma(W::load8(w + j), set1(scales[r]), acc);
        }
        store(y + j, acc);
    }
    for (; j < n; j++) {
        for (int r = 0; r < n_rows; r++) {
            y[j] += W::one(reinterpret_cast<const typename W::Element*>(rows[r])[first + j]) * scales[r];
        }
    }
}

template <class W>
void float_dequantize(const uint8_t* row, int first, float* y, int n) {
    const auto* w = reinterpret_cast<const typename W::Element*>(row) + first;
    for (int j = 0; j < n; j++) y[j] = W::one(w[j]);
}

// ---- activations, norms, attention ----

void quantize(const float* x, int n, int8_t* q, float* d, float* s) {
    for (int b = 0; b < n / 32; b++, x += 32, q += 32) {
        F32 top = max(max(abs(load(x)), abs(load(x + 8))), max(abs(load(x + 16)), abs(load(x + 24))));
        const float scale = largest(top) / 127.0f;
        const int total = quantize_32(x, scale > 0.0f ? 1.0f / scale : 0.0f, q);
        d[b] = scale;
        s[b] = scale * static_cast<float>(total);
    }
}

template <class F>
float reduce(const float* x, int n, F f) {
    F32 acc = zero();
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) acc = add(acc, f(load(x + j)));
    float y = sum(acc);
    for (; j < n; j++) y += largest(f(set1(x[j])));
    return y;
}

inline void scale_and_shift(const float* x, float mean, float scale, const float* weight, const float* bias, int n,
                            float* y) {
    for (int j = 0; j < n; j++) y[j] = (x[j] - mean) * scale * weight[j] + (bias ? bias[j] : 0.0f);
}

void rms_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* y) {
    const float square = reduce(x, n, [](F32 v) { return mul(v, v); });
    scale_and_shift(x, 0.0f, 1.0f / std::sqrt(square / n + eps), weight, bias, n, y);
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* y) {
    const float mean = reduce(x, n, [](F32 v) { return v; }) / n;
    const F32 center = set1(mean);
    const float variance = reduce(x, n, [=](F32 v) { return mul(sub(v, center), sub(v, center)); }) / n;
    scale_and_shift(x, mean, 1.0f / std::sqrt(variance + eps), weight, bias, n, y);
}

// exp(x) = 2^k e^r with |r| <= ln(2) / 2; the polynomial is Cephes' expf (error below 2 ulp). Below -87 the result is
// about 1e-38, not zero.
inline F32 exp(F32 x) {
    x = min(max(x, set1(-87.0f)), set1(88.0f));
    const F32 k = round(mul(x, set1(1.44269504f)));
    F32 r = fma(k, set1(-0.693359375f), x);
    r = fma(k, set1(2.12194440e-4f), r);
    F32 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return mul(p, exp2_whole(k));
}

inline F32 silu_of(F32 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// The tanh form, as llama.cpp has it: x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))).
inline F32 gelu_of(F32 x) {
    const F32 cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    return div(x, add(set1(1.0f), exp(mul(cubic, set1(-1.5957691216057308f)))));
}

template <class F>
void in_place(float* x, int n, F f) {
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) store(x + j, f(load(x + j)));
    if (j < n) {
        float tail[F32::kLanes] = {};
        std::memcpy(tail, x + j, sizeof(float) * (n - j));
        store(tail, f(load(tail)));
        std::memcpy(x + j, tail, sizeof(float) * (n - j));
    }
}

void silu(float* x, int n) { in_place(x, n, silu_of); }
void gelu(float* x, int n) { in_place(x, n, gelu_of); }
void relu(float* x, int n) {
    in_place(x, n, [](F32 v) { return max(v, zero()); });
}

void to_f16(const float* x, int n, uint16_t* y) {
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) store_f16(y + j, load(x + j));
    for (; j < n; j++) y[j] = f32_to_f16(x[j]);
}

inline float dot_f16(const float* x, const uint16_t* y, int n) {
    F32 acc[2] = {zero(), zero()};
    int j = 0;
    for (; j + 16 <= n; j += 16) {
        acc[0] = fma(load(x + j), load_f16(y + j), acc[0]);
        acc[1] = fma(load(x + j + 8), load_f16(y + j + 8), acc[1]);
    }
    float total = sum(add(acc[0], acc[1]));
    for (; j < n; j++) total += x[j] * f16_to_f32(y[j]);
    return total;
}

// y[0..n) = y * keep + sum over p of weights[p] * v[p][0..n)
inline void accumulate_f16(const uint16_t* v, const float* weights, int n_positions, int n, float keep, float* y) {
    int j = 0;
    for (; j + 16 <= n; j += 16) {
        F32 a = mul(load(y + j), set1(keep)), b = mul(load(y + j + 8), set1(keep));
        const uint16_t* at = v + j;
        for (int p = 0; p < n_positions; p++, at += n) {
            const F32 w = set1(weights[p]);
            a = fma(load_f16(at), w, a);
            b = fma(load_f16(at + 8), w, b);
        }
        store(y + j, a);
        store(y + j + 8, b);
    }
    for (; j < n; j++) {
        y[j] *= keep;
        for (int p = 0; p < n_positions; p++) y[j] += weights[p] * f16_to_f32(v[p * n + j]);
    }
}

// Softmax over blocks of positions with a running maximum (Milakov and Gimelshein 2018, as in FlashAttention).
void attention(const AttentionArgs& args) {
    constexpr int kBlock = 64;
    const int n = args.head_dim;
    for (int g = 0; g < args.n_group; g++) {
        args.max[g] = -INFINITY;
        args.sum[g] = 0.0f;
        std::memset(args.out + g * n, 0, sizeof(float) * n);
    }
    for (int start = 0; start < args.n_positions; start += kBlock) {
        const int count = args.n_positions - start < kBlock ? args.n_positions - start : kBlock;
        const uint16_t* k = args.k + static_cast<ptrdiff_t>(start) * n;
        const uint16_t* v = args.v + static_cast<ptrdiff_t>(start) * n;
        for (int g = 0; g < args.n_group; g++) {
            float* scores = args.scratch;
            float top = args.max[g];
            for (int p = 0; p < count; p++) {
                scores[p] = dot_f16(args.q + g * n, k + static_cast<ptrdiff_t>(p) * n, n) * args.scale;
                top = scores[p] > top ? scores[p] : top;
            }
            for (int p = count; p < kBlock; p++) scores[p] = -INFINITY;
            const float keep = std::exp(args.max[g] - top);
            const F32 center = set1(top);
            F32 total = zero();
            for (int p = 0; p < count; p += F32::kLanes) {
                const F32 e = exp(sub(load(scores + p), center));
                store(scores + p, e);
            }
            for (int p = count; p < kBlock; p++) scores[p] = 0.0f;
            for (int p = 0; p < kBlock; p += F32::kLanes) total = add(total, load(scores + p));
            args.sum[g] = args.sum[g] * keep + sum(total);
            args.max[g] = top;
            accumulate_f16(v, scores, count, n, keep, args.out + g * n);
        }
    }
}

void sparse_rank_update(const float* h, ptrdiff_t ld_h, int n_tokens, const float* w, int n_rows, int n, float* y,
                        ptrdiff_t ld_y) {
    for (int t = 0; t < n_tokens; t++, h += ld_h, y += ld_y) {
        int active[256];
        int n_active = 0;
        for (int i = 0; i < n_rows; i++) {
            active[n_active] = i;
            n_active += h[i] != 0.0f;
        }
        if (n_active == 0) continue;
        int j = 0;
        for (; j + 32 <= n; j += 32) {
            F32 acc[4];
            for (int i = 0; i < 4; i++) acc[i] = load(y + j + 8 * i);
            for (int k = 0; k < n_active; k++) {
                const F32 scale = set1(h[active[k]]);
                const float* at = w + static_cast<ptrdiff_t>(active[k]) * n + j;
                for (int i = 0; i < 4; i++) acc[i] = fma(load(at + 8 * i), scale, acc[i]);
            }
            for (int i = 0; i < 4; i++) store(y + j + 8 * i, acc[i]);
        }
        for (; j < n; j++) {
            for (int k = 0; k < n_active; k++) y[j] += h[active[k]] * w[static_cast<ptrdiff_t>(active[k]) * n + j];
        }
    }
}

template <class Q>
constexpr TypeKernels quantized_kernels() {
    using P = PackedFormOf<Q>;
    return {true,
            32 * Q::kPerBlock,
            sizeof(typename Q::Block),
            quantized_matmul<Q>,
            quantized_axpy<Q>,
            quantized_dequantize<Q>,
            pack_rows<P>,
            packed_matmul<P>};
}

template <class W>
constexpr TypeKernels float_kernels() {
    return {false, 1, sizeof(typename W::Element), float_matmul<W>, float_axpy<W>, float_dequantize<W>,
            nullptr, nullptr};
}

constexpr Kernels make_kernels(const char* name) {
    Kernels k{};
    k.name = name;
    const auto set = [&k](Type type, TypeKernels kernels) { k.types[static_cast<int>(type)] = kernels; };
    set(Type::F32, float_kernels<AsF32>());
    set(Type::F16, float_kernels<AsF16>());
    set(Type::BF16, float_kernels<AsBF16>());
    set(Type::Q4_0, quantized_kernels<Q4_0>());
    set(Type::Q4_1, quantized_kernels<Q4_1>());
    set(Type::Q5_0, quantized_kernels<Q5_0>());
    set(Type::Q5_1, quantized_kernels<Q5_1>());
    set(Type::Q8_0, quantized_kernels<Q8_0>());
    set(Type::Q6_K, quantized_kernels<Q6_K>());
    k.quantize = quantize;
    k.rms_norm = rms_norm;
    k.layer_norm = layer_norm;
    k.attention = attention;
    k.to_f16 = to_f16;
    k.silu = silu;
    k.gelu = gelu;
    k.relu = relu;
    k.sparse_rank_update = sparse_rank_update;
    return k;
}

}  // namespace powerinfer::SIMD_NAMESPACE
