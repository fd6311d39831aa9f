// Part of kernels_body.h: quantized weights in rows as they lie in a file, 32 at a time.

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
