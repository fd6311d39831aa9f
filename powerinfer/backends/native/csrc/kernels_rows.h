// Part of kernels_body.h: quantized weights in rows as they lie in a file, 32 at a time.

// Words of 32 weights in order, `block` counted in 32s: value = d * word + m. Of a type, kMin: whether m is not always
// zero; `scales`: d and m of eight blocks, the first of them a multiple of eight; `bytes`: of as many blocks.
struct Halves {
    Words low, high;
};

inline Halves unpack_nibbles(const uint8_t* qs) {
    const Words both = widen_u8(qs);
    return {bit_and(both, 15), shift_right(both, 4)};
}

inline Halves unpack_nibbles(const uint8_t* qs, const uint8_t* qh) {
    const Halves y = unpack_nibbles(qs);
    uint16_t bits[2];
    std::memcpy(bits, qh, 4);
    return {add_fifth_bits(y.low, bits[0]), add_fifth_bits(y.high, bits[1])};
}

// Types with one scale for each 32.
template <class B>
struct PlainBlocks {
    using Block = B;
    static constexpr int kBlockSize = 32;
    static constexpr int bytes(int n_blocks) { return n_blocks * static_cast<int>(sizeof(B)); }
    static const B& at(const uint8_t* row, int block) { return reinterpret_cast<const B*>(row)[block]; }
    static float d(const uint8_t* row, int block) { return f16_to_f32(at(row, block).d); }
    static F32 eight_d(const uint8_t* row, int block) { return load_f16_strided<sizeof(B)>(&at(row, block).d); }
};

// m = kOffset * d.
template <class B, int kOffset>
struct OffsetBlocks : PlainBlocks<B> {
    using Base = PlainBlocks<B>;
    static constexpr bool kMin = kOffset != 0;
    static float m(const uint8_t* row, int block) { return kOffset * Base::d(row, block); }
    static void scales(const uint8_t* row, int block, F32& d, F32& m) {
        d = Base::eight_d(row, block);
        m = kMin ? mul(d, set1(kOffset)) : zero();
    }
};

template <class B>
struct MinBlocks : PlainBlocks<B> {
    using Base = PlainBlocks<B>;
    static constexpr bool kMin = true;
    static float m(const uint8_t* row, int block) { return f16_to_f32(Base::at(row, block).m); }
    static void scales(const uint8_t* row, int block, F32& d, F32& m) {
        d = Base::eight_d(row, block);
        m = load_f16_strided<sizeof(B)>(&Base::at(row, block).m);
    }
};

struct Q4_0 : OffsetBlocks<BlockQ4_0, -8> {
    static Halves unpack(const uint8_t* row, int block) { return unpack_nibbles(at(row, block).qs); }
};

struct Q4_1 : MinBlocks<BlockQ4_1> {
    static Halves unpack(const uint8_t* row, int block) { return unpack_nibbles(at(row, block).qs); }
};

struct Q5_0 : OffsetBlocks<BlockQ5_0, -16> {
    static Halves unpack(const uint8_t* row, int block) {
        return unpack_nibbles(at(row, block).qs, at(row, block).qh);
    }
};

struct Q5_1 : MinBlocks<BlockQ5_1> {
    static Halves unpack(const uint8_t* row, int block) {
        return unpack_nibbles(at(row, block).qs, at(row, block).qh);
    }
};

struct Q8_0 : OffsetBlocks<BlockQ8_0, 0> {
    static Halves unpack(const uint8_t* row, int block) {
        const int8_t* qs = at(row, block).qs;
        return {widen_i8(qs), widen_i8(qs + 16)};
    }
};

// Types of 256 weights, eight 32s, whose scales and minima are 6-bit factors of d and dmin.
template <class B>
struct SuperBlocks {
    using Block = B;
    static constexpr int kBlockSize = 256;
    static constexpr bool kMin = true;
    static constexpr int bytes(int n_blocks) { return n_blocks * static_cast<int>(sizeof(B)) / 8; }
    static const B& at(const uint8_t* row, int block) { return reinterpret_cast<const B*>(row)[block / 8]; }
    static float d(const uint8_t* row, int block) {
        uint8_t d[8], m[8];
        unpack_sixes(at(row, block).scales, d, m);
        return f16_to_f32(at(row, block).d) * d[block % 8];
    }
    static float m(const uint8_t* row, int block) {
        uint8_t d[8], m[8];
        unpack_sixes(at(row, block).scales, d, m);
        return -f16_to_f32(at(row, block).dmin) * m[block % 8];
    }
    static void scales(const uint8_t* row, int block, F32& d, F32& m) {
        const B& b = at(row, block);
        uint8_t factors[8], minima[8];
        unpack_sixes(b.scales, factors, minima);
        d = mul(to_f32(load_u8_as_i32(factors)), set1(f16_to_f32(b.d)));
        m = mul(to_f32(load_u8_as_i32(minima)), set1(-f16_to_f32(b.dmin)));
    }
    // Pairs of 32s share bytes: one has the low nibbles, the other the high ones.
    static Halves nibbles(const uint8_t* row, int block) {
        const uint8_t* qs = at(row, block).qs + block % 8 / 2 * 32;
        const Words first = widen_u8(qs), second = widen_u8(qs + 16);
        if (block % 2) return {shift_right(first, 4), shift_right(second, 4)};
        return {bit_and(first, 15), bit_and(second, 15)};
    }
};

struct Q4_K : SuperBlocks<BlockQ4_K> {
    static Halves unpack(const uint8_t* row, int block) { return nibbles(row, block); }
};

struct Q5_K : SuperBlocks<BlockQ5_K> {
    static Halves unpack(const uint8_t* row, int block) {
        const Halves y = nibbles(row, block);
        const uint8_t* qh = at(row, block).qh;
        const auto fifth = [&](const uint8_t* p) {
            return shift_left(bit_and(shift_right(widen_u8(p), block % 8), 1), 4);
        };
        return {bit_or(y.low, fifth(qh)), bit_or(y.high, fifth(qh + 16))};
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
            Q::scales(rows[r], b, dw, mw);
            if (next != nullptr) {
                const uint8_t* at = next[r] + Q::bytes(b);
                for (int line = 0; line < Q::bytes(kRun); line += 64) prefetch(at + line);
            }
            for (int t = 0; t < T; t++) {
                store(scale[r][t], mul(dw, load(d[t] + b)));
                if (Q::kMin) offset[r][t] = fma(mw, load(s[t] + b), offset[r][t]);
            }
        }
        for (int i = 0; i < kRun; i++) {
            for (int r = 0; r < R; r++) {
                const Halves words = Q::unpack(rows[r], b + i);
                for (int t = 0; t < T; t++) {
                    acc[r][t] = fma(product(words, t, b + i), set1(scale[r][t][i]), acc[r][t]);
                }
            }
        }
    }
    for (; b < n_blocks; b++) {
        for (int r = 0; r < R; r++) {
            const Halves words = Q::unpack(rows[r], b);
            for (int t = 0; t < T; t++) {
                acc[r][t] = fma(product(words, t, b), set1(Q::d(rows[r], b) * d[t][b]), acc[r][t]);
                if (Q::kMin) tail[r][t] += Q::m(rows[r], b) * s[t][b];
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
inline void find_factors(const uint8_t* const (&rows)[8], int first, const float (&by)[8], EightFactors& out) {
    F32 factors[8], top = zero(), offset = zero();
    for (int r = 0; r < 8; r++) {
        F32 d, m;
        Q::scales(rows[r], first, d, m);
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
inline void axpy_of_eight(const uint8_t* const (&rows)[8], const EightFactors& f, int first, int b, float* y) {
    I32 sums[4] = {zero_i32(), zero_i32(), zero_i32(), zero_i32()};
    for (int p = 0; p < 4; p++) {
        const Words factor = broadcast_pair(&f.pairs[p][b]);
        const Halves a = Q::unpack(rows[2 * p], first + b), c = Q::unpack(rows[2 * p + 1], first + b);
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
inline void axpy_of_block(const uint8_t* const (&rows)[8], int block, const float (&by)[8], float* y) {
    F32 acc[4];
    float offset = 0.0f;
    for (int i = 0; i < 4; i++) acc[i] = load(y + i * 8);
    for (int r = 0; r < 8; r++) {
        const Halves w = Q::unpack(rows[r], block);
        const F32 d = set1(Q::d(rows[r], block) * by[r]);
        if (Q::kMin) offset += Q::m(rows[r], block) * by[r];
        acc[0] = fma(first_half(w.low), d, acc[0]);
        acc[1] = fma(second_half(w.low), d, acc[1]);
        acc[2] = fma(first_half(w.high), d, acc[2]);
        acc[3] = fma(second_half(w.high), d, acc[3]);
    }
    for (int i = 0; i < 4; i++) store(y + i * 8, Q::kMin ? add(acc[i], set1(offset)) : acc[i]);
}

// `first` is a multiple of 256.
template <class Q>
void quantized_axpy(const uint8_t* const* rows, const float* scales, int n_rows, int first, float* y, int n) {
    constexpr int kRun = 8;
    for (int r = 0; r < n_rows; r += 8) {
        const uint8_t* eight[8];
        float by[8];
        for (int i = 0; i < 8; i++) {
            eight[i] = rows[r + i < n_rows ? r + i : r];
            by[i] = r + i < n_rows ? scales[r + i] : 0.0f;
        }
        int b = first / 32;
        const int end = b + n / 32;
        float* to = y;
        for (; b + kRun <= end; b += kRun, to += kRun * 32) {
            for (int i = 0; i < 8 && r + 8 + i < n_rows; i++) {
                const uint8_t* at = rows[r + 8 + i] + Q::bytes(b);
                for (int line = 0; line < Q::bytes(kRun); line += 64) prefetch(at + line);
            }
            EightFactors factors;
            find_factors<Q>(eight, b, by, factors);
            for (int i = 0; i < kRun; i++) axpy_of_eight<Q>(eight, factors, b, i, to + i * 32);
        }
        for (; b < end; b++, to += 32) axpy_of_block<Q>(eight, b, by, to);
    }
}

template <class Q>
void quantized_dequantize(const uint8_t* row, int first, float* y, int n) {
    for (int b = first / 32; b < (first + n) / 32; b++, y += 32) {
        const Halves w = Q::unpack(row, b);
        const F32 d = set1(Q::d(row, b)), m = set1(Q::m(row, b));
        store(y, fma(first_half(w.low), d, m));
        store(y + 8, fma(second_half(w.low), d, m));
        store(y + 16, fma(first_half(w.high), d, m));
        store(y + 24, fma(second_half(w.high), d, m));
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
