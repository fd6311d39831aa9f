// The kernels, once, in terms of the operations of a simd_*.h header. Each kernels_*.cpp defines SIMD_NAMESPACE (so that
// no function compiled for one processor is linked into the path of another), includes such a header, then this.

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace powerinfer::SIMD_NAMESPACE {

// ---- quantized weights in rows as they lie in a file, 32 at a time ----

// Words of 32 weights in order: value = d * word + m. Of a type, kMin: whether m is not always zero; `scales`: d and m of
// eight blocks.
struct Halves {
    Words low, high;
};

inline Halves unpack_nibbles(const uint8_t* qs) {
    const Words both = widen_u8(qs);
    return {bit_and(both, 15), shift_right(both, 4)};
}

struct Q4_0 {
    using Block = BlockQ4_0;
    static constexpr bool kMin = true;
    static Halves unpack(const Block& b) {
        return unpack_nibbles(b.qs);
    }
    static float d(const Block& b) { return f16_to_f32(b.d); }
    static float m(const Block& b) { return -8.0f * f16_to_f32(b.d); }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = mul(d, set1(-8.0f));
    }
};

struct Q4_1 {
    using Block = BlockQ4_1;
    static constexpr bool kMin = true;
    static Halves unpack(const Block& b) {
        return unpack_nibbles(b.qs);
    }
    static float d(const Block& b) { return f16_to_f32(b.d); }
    static float m(const Block& b) { return f16_to_f32(b.m); }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = load_f16_strided<sizeof(Block)>(&first->m);
    }
};

struct Q5_0 {
    using Block = BlockQ5_0;
    static constexpr bool kMin = true;
    static Halves unpack(const Block& b) {
        Halves y = unpack_nibbles(b.qs);
        uint16_t bits[2];
        std::memcpy(bits, b.qh, 4);
        return {add_fifth_bits(y.low, bits[0]), add_fifth_bits(y.high, bits[1])};
    }
    static float d(const Block& b) { return f16_to_f32(b.d); }
    static float m(const Block& b) { return -16.0f * f16_to_f32(b.d); }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = mul(d, set1(-16.0f));
    }
};

struct Q5_1 {
    using Block = BlockQ5_1;
    static constexpr bool kMin = true;
    static Halves unpack(const Block& b) {
        Halves y = unpack_nibbles(b.qs);
        uint16_t bits[2];
        std::memcpy(bits, b.qh, 4);
        return {add_fifth_bits(y.low, bits[0]), add_fifth_bits(y.high, bits[1])};
    }
    static float d(const Block& b) { return f16_to_f32(b.d); }
    static float m(const Block& b) { return f16_to_f32(b.m); }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = load_f16_strided<sizeof(Block)>(&first->m);
    }
};

struct Q8_0 {
    using Block = BlockQ8_0;
    static constexpr bool kMin = false;
    static Halves unpack(const Block& b) {
        return {widen_i8(b.qs), widen_i8(b.qs + 16)};
    }
    static float d(const Block& b) { return f16_to_f32(b.d); }
    static float m(const Block&) { return 0.0f; }
    static void scales(const Block* first, F32& d, F32& m) {
        d = load_f16_strided<sizeof(Block)>(&first->d);
        m = zero();
    }
};

// 16 weights of a Q6_K block: value = d * scales[j] * word.
inline Words unpack_q6_k(const BlockQ6_K& b, int j) {
    const int half = j / 8, quarter = j % 8 / 2, first = j % 2 * 16;
    const Words low = widen_u8(b.ql + half * 64 + quarter % 2 * 32 + first);
    const Words high = shift_right(widen_u8(b.qh + half * 32 + first), 2 * quarter);
    const Words nibbles = quarter < 2 ? bit_and(low, 15) : shift_right(low, 4);
    return subtract(bit_or(nibbles, shift_left(bit_and(high, 3), 4)), 32);
}

// A tile of R rows and T tokens: weights are unpacked once for all T. Scales are made ready for eight blocks at a time.
// `next`: R rows that come after these, or null. Rows can lie anywhere, where the processor cannot guess them: asking for
// them a row ahead is the difference between 7 and 20 GB/s on one core.
template <class Q, int R, int T>
void quantized_tile(const uint8_t* const* rows, const uint8_t* const* next, const Activations& a,
                    const int32_t* tokens, int first, float* out, ptrdiff_t ld) {
    constexpr int kRun = F32::kLanes;
    const int n_blocks = a.n_blocks();
    const int16_t* q[T];
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
    const auto product = [&](const Halves& w, int t, int b) {
        const int16_t* x = q[t] + b * 32;
        return to_f32(dot(w.low, load_words(x), dot(w.high, load_words(x + 16), zero_i32())));
    };
    int b = 0;
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
                const Halves words = Q::unpack(w[r][b + i]);
                for (int t = 0; t < T; t++) {
                    acc[r][t] = fma(product(words, t, b + i), set1(scale[r][t][i]), acc[r][t]);
                }
            }
        }
    }
    for (; b < n_blocks; b++) {
        for (int r = 0; r < R; r++) {
            const Halves words = Q::unpack(w[r][b]);
            for (int t = 0; t < T; t++) {
                acc[r][t] = fma(product(words, t, b), set1(Q::d(w[r][b]) * d[t][b]), acc[r][t]);
                if (Q::kMin) tail[r][t] += Q::m(w[r][b]) * s[t][b];
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

// Factors of eight rows in eight blocks: a row's scale times what it is multiplied by, rounded to 15 bits of the largest of
// the eight. pairs[p][b]: those of rows 2 p and 2 p + 1; offset: the sum of m times the multiplier.
struct EightFactors {
    int32_t pairs[4][8];
    float step[8], offset[8];
};

template <class Q>
inline void find_factors(const typename Q::Block* const (&blocks)[8], const float (&by)[8], EightFactors& out) {
    F32 factors[8], top = zero(), offset = zero();
    for (int r = 0; r < 8; r++) {
        F32 d, m;
        Q::scales(blocks[r], d, m);
        factors[r] = mul(d, set1(by[r]));
        top = max(top, abs(factors[r]));
        if (Q::kMin) offset = fma(m, set1(by[r]), offset);
    }
    const F32 step = mul(top, set1(1.0f / kActivationMax));
    const F32 inverse = div(set1(1.0f), max(step, set1(1e-37f)));  // all zero: any number will do
    for (int p = 0; p < 4; p++) {
        store_i32(out.pairs[p], pair_of(mul(factors[2 * p], inverse), mul(factors[2 * p + 1], inverse)));
    }
    store(out.step, step);
    store(out.offset, offset);
}

// Eight rows at a time, in whole numbers: pairs of rows are interleaved, so that one instruction multiplies both by their
// factors and adds. Converting each row to float32 would cost twice as much.
template <class Q>
inline void axpy_of_eight(const typename Q::Block* const (&blocks)[8], const EightFactors& f, int b, float* y) {
    I32 sums[4] = {zero_i32(), zero_i32(), zero_i32(), zero_i32()};
    for (int p = 0; p < 4; p++) {
        const Words factor = broadcast_pair(reinterpret_cast<const int16_t*>(&f.pairs[p][b]));
        const Halves a = Q::unpack(blocks[2 * p][b]), c = Q::unpack(blocks[2 * p + 1][b]);
        sums[0] = dot(interleave_low(a.low, c.low), factor, sums[0]);
        sums[1] = dot(interleave_high(a.low, c.low), factor, sums[1]);
        sums[2] = dot(interleave_low(a.high, c.high), factor, sums[2]);
        sums[3] = dot(interleave_high(a.high, c.high), factor, sums[3]);
    }
    in_order(sums[0], sums[1]);
    in_order(sums[2], sums[3]);
    const F32 step = set1(f.step[b]), offset = set1(f.offset[b]);
    for (int i = 0; i < 4; i++) {
        const F32 at = load(y + i * 8);
        store(y + i * 8, fma(to_f32(sums[i]), step, Q::kMin ? add(at, offset) : at));
    }
}

// As axpy, for blocks that are no run of eight.
template <class Q>
inline void axpy_of_block(const typename Q::Block* const (&blocks)[8], const float (&by)[8], float* y) {
    F32 acc[4];
    float offset = 0.0f;
    for (int i = 0; i < 4; i++) acc[i] = load(y + i * 8);
    for (int r = 0; r < 8; r++) {
        const Halves w = Q::unpack(*blocks[r]);
        const F32 d = set1(Q::d(*blocks[r]) * by[r]);
        if (Q::kMin) offset += Q::m(*blocks[r]) * by[r];
        acc[0] = fma(first_half(w.low), d, acc[0]);
        acc[1] = fma(second_half(w.low), d, acc[1]);
        acc[2] = fma(first_half(w.high), d, acc[2]);
        acc[3] = fma(second_half(w.high), d, acc[3]);
    }
    for (int i = 0; i < 4; i++) store(y + i * 8, Q::kMin ? add(acc[i], set1(offset)) : acc[i]);
}

template <class Q>
void quantized_axpy(const uint8_t* const* rows, const float* scales, int n_rows, int first, float* y, int n) {
    using Block = typename Q::Block;
    constexpr int kRun = 8;
    for (int r = 0; r < n_rows; r += 8) {
        const Block* blocks[8];
        float by[8];
        for (int i = 0; i < 8; i++) {
            blocks[i] = reinterpret_cast<const Block*>(rows[r + i < n_rows ? r + i : r]) + first / 32;
            by[i] = r + i < n_rows ? scales[r + i] : 0.0f;
        }
        int b = 0;
        for (; b + kRun <= n / 32; b += kRun) {
            for (int i = 0; i < 8 && r + 8 + i < n_rows; i++) {
                const uint8_t* at = rows[r + 8 + i] + (first / 32 + b) * sizeof(Block);
                for (size_t line = 0; line < kRun * sizeof(Block); line += 64) prefetch(at + line);
            }
            EightFactors factors;
            find_factors<Q>(blocks, by, factors);
            for (int i = 0; i < kRun; i++) axpy_of_eight<Q>(blocks, factors, i, y + (b + i) * 32);
            for (const Block*& block : blocks) block += kRun;
        }
        for (; b < n / 32; b++) {
            axpy_of_block<Q>(blocks, by, y + b * 32);
            for (const Block*& block : blocks) block++;
        }
    }
}

template <class Q>
void quantized_dequantize(const uint8_t* row, int first, float* y, int n) {
    for (int b = 0; b < n / 32; b++) {
        const auto& block = reinterpret_cast<const typename Q::Block*>(row)[first / 32 + b];
        const Halves w = Q::unpack(block);
        const F32 d = set1(Q::d(block)), m = set1(Q::m(block));
        store(y + b * 32, fma(first_half(w.low), d, m));
        store(y + b * 32 + 8, fma(second_half(w.low), d, m));
        store(y + b * 32 + 16, fma(first_half(w.high), d, m));
        store(y + b * 32 + 24, fma(second_half(w.high), d, m));
    }
}

template <int T>
void q6_k_tile(const uint8_t* row, const Activations& a, const int32_t* tokens, int first, float* out, ptrdiff_t ld) {
    const int n_blocks = a.n_blocks();
    const auto* blocks = reinterpret_cast<const BlockQ6_K*>(row);
    ptrdiff_t token[T];
    F32 acc[T];
    for (int t = 0; t < T; t++) {
        token[t] = tokens ? tokens[first + t] : first + t;
        acc[t] = zero();
    }
    for (int j = 0; j < 2 * n_blocks; j++) {
        const BlockQ6_K& block = blocks[j / 16];
        const Words w = unpack_q6_k(block, j % 16);
        const float d = f16_to_f32(block.d) * block.scales[j % 16];
        for (int t = 0; t < T; t++) {
            const I32 products = dot(w, load_words(a.q + token[t] * a.n_cols + j * 16), zero_i32());
            acc[t] = fma(to_f32(products), set1(d * a.d[token[t] * n_blocks + j / 2]), acc[t]);
        }
    }
    for (int t = 0; t < T; t++) out[(first + t) * ld] = sum(acc[t]);
}

void q6_k_matmul(const uint8_t* const* rows, int n_rows, const Activations& a, const int32_t* tokens, int n_tokens,
                 float* out, ptrdiff_t ld) {
    for (int r = 0; r < n_rows; r++) {
        int t = 0;
        for (; t + 4 <= n_tokens; t += 4) q6_k_tile<4>(rows[r], a, tokens, t, out + r, ld);
        for (; t < n_tokens; t++) q6_k_tile<1>(rows[r], a, tokens, t, out + r, ld);
    }
}

void q6_k_axpy(const uint8_t* const* rows, const float* scales, int n_rows, int first, float* y, int n) {
    for (int j = 0; j < n / 16; j++, y += 16) {
        F32 low = load(y), high = load(y + 8);
        for (int r = 0; r < n_rows; r++) {
            const int at = first / 16 + j;
            const BlockQ6_K& block = reinterpret_cast<const BlockQ6_K*>(rows[r])[at / 16];
            const Words w = unpack_q6_k(block, at % 16);
            const F32 d = set1(f16_to_f32(block.d) * block.scales[at % 16] * scales[r]);
            low = fma(first_half(w), d, low);
            high = fma(second_half(w), d, high);
        }
        store(y, low);
        store(y + 8, high);
    }
}

void q6_k_dequantize(const uint8_t* row, int first, float* y, int n) {
    const float one = 1.0f;
    std::memset(y, 0, sizeof(float) * n);
    q6_k_axpy(&row, &one, 1, first, y, n);
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

void round(const float* x, int n, int16_t* q, float* d, float* s) {
    for (int b = 0; b < n / 32; b++, x += 32, q += 32) {
        F32 top = max(max(abs(load(x)), abs(load(x + 8))), max(abs(load(x + 16)), abs(load(x + 24))));
        const float scale = largest(top) / kActivationMax;
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
    using P = typename PackedForm<Q>::Type;
    return {true,
            32,
            sizeof(typename Q::Block),
            quantized_matmul<Q>,
            quantized_axpy<Q>,
            quantized_dequantize<Q>,
            pack_rows<P>,
            packed_matmul<P>};
}

constexpr TypeKernels q6_k_kernels() {
    return {true,
            256,
            sizeof(BlockQ6_K),
            q6_k_matmul,
            q6_k_axpy,
            q6_k_dequantize,
            pack_rows<PackedQ6_K>,
            packed_matmul_q6_k};
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
    set(Type::Q6_K, q6_k_kernels());
    k.round = round;
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
