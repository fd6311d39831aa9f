// Part of kernels_body.h: matrices that are always used whole, with groups of 16 rows interleaved.
//
// A group is two octets of rows; the octets' blocks of 32 columns follow each other, so that a group is read as one
// stream (two streams at once halve what a core gets from memory), while activations are loaded once for both.
//
// A vector holds a pair of columns of each row of an octet: words 2 r and 2 r + 1 are columns 2 p and 2 p + 1 of the octet's row r.
// The activations of the two columns are broadcast, so lane r of a sum collects row r: no horizontal sums, and the scales
// of 8 rows are one vector.

constexpr int kOctet = 8;
constexpr int kOctets = kPackedRows / kOctet;

// Nibbles of 8 columns (four pairs) of 8 rows are 32 bytes. In 16-bit lanes, lane 2 r + w holds columns 2 n + w of row r
// in its nibbles n = 0..3, so that a shift and a mask give a pair.
template <class Nibble>
inline void pack_eight_columns(Nibble nibble, uint8_t* out) {
    for (int lane = 0; lane < 16; lane++) {
        uint16_t word = 0;
        for (int n = 0; n < 4; n++) word |= static_cast<uint16_t>(nibble(lane / 2, 2 * n + lane % 2) << (4 * n));
        std::memcpy(out + 2 * lane, &word, 2);
    }
}

inline void unpack_eight_columns(const uint8_t* packed, Words (&pairs)[4]) {
    const Words all = load_words(packed);
    pairs[0] = bit_and(all, 15);
    pairs[1] = bit_and(shift_right(all, 4), 15);
    pairs[2] = bit_and(shift_right(all, 8), 15);
    pairs[3] = shift_right(all, 12);
}

template <class Row>
inline void pack_nibbles(const Row* const (&rows)[kOctet], uint8_t* out) {
    for (int c = 0; c < 4; c++) {
        const auto nibble = [&](int r, int j) {
            const int column = 8 * c + j;
            return column < 16 ? rows[r]->qs[column] & 15 : rows[r]->qs[column - 16] >> 4;
        };
        pack_eight_columns(nibble, out + 32 * c);
    }
}

template <class Row>
inline void pack_scales(const Row* const (&rows)[kOctet], uint16_t (&d)[8]) {
    for (int r = 0; r < kOctet; r++) d[r] = rows[r]->d;
}

// Of a type, value = d * word + m; `unpack`: pairs 4 c .. 4 c + 3 of 32 columns. kMin: whether m is not always zero;
// kNibbles: whether `qs` is all there is to the words.
struct PackedQ4_0 {
    struct Block {
        uint16_t d[8];
        uint8_t qs[4][32];
    };
    using Row = BlockQ4_0;
    static constexpr bool kMin = true, kNibbles = true;
    static void pack(const Row* const (&rows)[kOctet], Block& out) {
        pack_scales(rows, out.d);
        pack_nibbles(rows, out.qs[0]);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        unpack_eight_columns(b.qs[c], pairs);
    }
    static F32 d(const Block& b) { return load_f16(b.d); }
    static F32 m(const Block& b) { return mul(d(b), set1(-8.0f)); }
};

struct PackedQ4_1 {
    struct Block {
        uint16_t d[8], m[8];
        uint8_t qs[4][32];
    };
    using Row = BlockQ4_1;
    static constexpr bool kMin = true, kNibbles = true;
    static void pack(const Row* const (&rows)[kOctet], Block& out) {
        pack_scales(rows, out.d);
        for (int r = 0; r < kOctet; r++) out.m[r] = rows[r]->m;
        pack_nibbles(rows, out.qs[0]);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        unpack_eight_columns(b.qs[c], pairs);
    }
    static F32 d(const Block& b) { return load_f16(b.d); }
    static F32 m(const Block& b) { return load_f16(b.m); }
};

// Fifth bits of pair p: bit i of qh[p] belongs to word i.
template <class Row>
inline void pack_fifth_bits(const Row* const (&rows)[kOctet], uint16_t (&qh)[16]) {
    for (int p = 0; p < 16; p++) {
        uint16_t bits = 0;
        for (int i = 0; i < 16; i++) {
            const int column = 2 * p + i % 2;
            bits |= static_cast<uint16_t>((rows[i / 2]->qh[column / 8] >> (column % 8) & 1) << i);
        }
        qh[p] = bits;
    }
}

struct PackedQ5_0 {
    struct Block {
        uint16_t d[8];
        uint16_t qh[16];
        uint8_t qs[4][32];
    };
    using Row = BlockQ5_0;
    static constexpr bool kMin = true, kNibbles = false;
    static void pack(const Row* const (&rows)[kOctet], Block& out) {
        pack_scales(rows, out.d);
        pack_fifth_bits(rows, out.qh);
        pack_nibbles(rows, out.qs[0]);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        unpack_eight_columns(b.qs[c], pairs);
        for (int p = 0; p < 4; p++) pairs[p] = add_fifth_bits(pairs[p], b.qh[4 * c + p]);
    }
    static F32 d(const Block& b) { return load_f16(b.d); }
    static F32 m(const Block& b) { return mul(d(b), set1(-16.0f)); }
};

struct PackedQ5_1 {
    struct Block {
        uint16_t d[8], m[8];
        uint16_t qh[16];
        uint8_t qs[4][32];
    };
    using Row = BlockQ5_1;
    static constexpr bool kMin = true, kNibbles = false;
    static void pack(const Row* const (&rows)[kOctet], Block& out) {
        pack_scales(rows, out.d);
        for (int r = 0; r < kOctet; r++) out.m[r] = rows[r]->m;
        pack_fifth_bits(rows, out.qh);
        pack_nibbles(rows, out.qs[0]);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        unpack_eight_columns(b.qs[c], pairs);
        for (int p = 0; p < 4; p++) pairs[p] = add_fifth_bits(pairs[p], b.qh[4 * c + p]);
    }
    static F32 d(const Block& b) { return load_f16(b.d); }
    static F32 m(const Block& b) { return load_f16(b.m); }
};

struct PackedQ8_0 {
    struct Block {
        uint16_t d[8];
        int8_t qs[16][16];
    };
    using Row = BlockQ8_0;
    static constexpr bool kMin = false, kNibbles = false;
    static void pack(const Row* const (&rows)[kOctet], Block& out) {
        pack_scales(rows, out.d);
        for (int p = 0; p < 16; p++) {
            for (int i = 0; i < 16; i++) out.qs[p][i] = rows[i / 2]->qs[2 * p + i % 2];
        }
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        for (int p = 0; p < 4; p++) pairs[p] = widen_i8(b.qs[4 * c + p]);
    }
    static F32 d(const Block& b) { return load_f16(b.d); }
    static F32 m(const Block&) { return zero(); }
};

// Row-major form to packed form.
template <class Q>
struct PackedForm;
template <>
struct PackedForm<Q4_0> {
    using Type = PackedQ4_0;
};
template <>
struct PackedForm<Q4_1> {
    using Type = PackedQ4_1;
};
template <>
struct PackedForm<Q5_0> {
    using Type = PackedQ5_0;
};
template <>
struct PackedForm<Q5_1> {
    using Type = PackedQ5_1;
};
template <>
struct PackedForm<Q8_0> {
    using Type = PackedQ8_0;
};

// Sums of 32 columns of a group for one token. Nibbles need no shift: 16 or 256 times their products are summed on their
// own.
template <class P>
inline void sums_of_token(const typename P::Block* blocks, const int16_t* x, I32 (&sums)[kOctets]) {
    I32 parts[kOctets][4];
    for (int g = 0; g < kOctets; g++) {
        for (int n = 0; n < 4; n++) parts[g][n] = zero_i32();
    }
    for (int c = 0; c < 4; c++) {
        Words pairs[kOctets][4], four[4];
        for (int n = 0; n < 4; n++) four[n] = broadcast_pair(x + 8 * c + 2 * n);
        for (int g = 0; g < kOctets; g++) {
            if constexpr (P::kNibbles) {
                const Words all = load_words(blocks[g].qs[c]);
                pairs[g][0] = bit_and(all, 0x00F);
                pairs[g][1] = bit_and(all, 0x0F0);
                pairs[g][2] = bit_and(all, 0xF00);
                pairs[g][3] = shift_right(all, 12);
            } else {
                P::unpack(blocks[g], c, pairs[g]);
            }
            for (int n = 0; n < 4; n++) parts[g][n] = dot(pairs[g][n], four[n], parts[g][n]);
        }
    }
    for (int g = 0; g < kOctets; g++) {
        if constexpr (P::kNibbles) {
            parts[g][1] = shift_right(parts[g][1], 4);
            parts[g][2] = shift_right(parts[g][2], 8);
        }
        sums[g] = add(add(parts[g][0], parts[g][1]), add(parts[g][2], parts[g][3]));
    }
}

template <class P>
void packed_token(const uint8_t* group, const Activations& a, int token, float* out) {
    const int n_blocks = a.n_blocks();
    const auto* blocks = reinterpret_cast<const typename P::Block*>(group);
    const int16_t* x = a.q + static_cast<ptrdiff_t>(token) * a.n_cols;
    const float* dx = a.d + static_cast<ptrdiff_t>(token) * n_blocks;
    const float* sx = a.s + static_cast<ptrdiff_t>(token) * n_blocks;
    F32 acc[kOctets], offset[kOctets];
    for (int g = 0; g < kOctets; g++) acc[g] = offset[g] = zero();
    for (int b = 0; b < n_blocks; b++, blocks += kOctets) {
        I32 sums[kOctets];
        sums_of_token<P>(blocks, x + b * 32, sums);
        for (int g = 0; g < kOctets; g++) {
            acc[g] = fma(to_f32(sums[g]), mul(P::d(blocks[g]), set1(dx[b])), acc[g]);
            if (P::kMin) offset[g] = fma(P::m(blocks[g]), set1(sx[b]), offset[g]);
        }
    }
    for (int g = 0; g < kOctets; g++) store(out + g * kOctet, add(acc[g], offset[g]));
}

// A group and T tokens: columns are unpacked once for all tokens.
template <class P, int T>
void packed_tile(const uint8_t* group, const Activations& a, int first, float* out, ptrdiff_t ld) {
    const int n_blocks = a.n_blocks();
    const auto* blocks = reinterpret_cast<const typename P::Block*>(group);
    const int16_t* q = a.q + static_cast<ptrdiff_t>(first) * a.n_cols;
    const float* dx = a.d + static_cast<ptrdiff_t>(first) * n_blocks;
    const float* sx = a.s + static_cast<ptrdiff_t>(first) * n_blocks;
    F32 acc[kOctets][T];
    for (int g = 0; g < kOctets; g++) {
        for (int t = 0; t < T; t++) acc[g][t] = zero();
    }
    for (int b = 0; b < n_blocks; b++, blocks += kOctets) {
        I32 sums[kOctets][T];
        for (int g = 0; g < kOctets; g++) {
            for (int t = 0; t < T; t++) sums[g][t] = zero_i32();
        }
        for (int c = 0; c < 4; c++) {
            Words pairs[kOctets][4];
            for (int g = 0; g < kOctets; g++) P::unpack(blocks[g], c, pairs[g]);
            for (int p = 0; p < 4; p++) {
                for (int t = 0; t < T; t++) {
                    const Words x = broadcast_pair(q + static_cast<ptrdiff_t>(t) * a.n_cols + b * 32 + c * 8 + p * 2);
                    for (int g = 0; g < kOctets; g++) sums[g][t] = dot(pairs[g][p], x, sums[g][t]);
                }
            }
        }
        for (int g = 0; g < kOctets; g++) {
            const F32 d = P::d(blocks[g]), m = P::m(blocks[g]);
            for (int t = 0; t < T; t++) {
                const ptrdiff_t at = static_cast<ptrdiff_t>(t) * n_blocks + b;
                acc[g][t] = fma(to_f32(sums[g][t]), mul(d, set1(dx[at])), acc[g][t]);
                if (P::kMin) acc[g][t] = fma(m, set1(sx[at]), acc[g][t]);
            }
        }
    }
    for (int t = 0; t < T; t++) {
        for (int g = 0; g < kOctets; g++) store(out + (first + t) * ld + g * kOctet, acc[g][t]);
    }
}

template <class P>
void packed_matmul(const uint8_t* group, const Activations& a, int n_tokens, float* out, ptrdiff_t ld) {
    int t = 0;
    for (; t + 4 <= n_tokens; t += 4) packed_tile<P, 4>(group, a, t, out, ld);
    for (; t < n_tokens; t++) packed_token<P>(group, a, t, out + t * ld);
}

// Blocks of 256 columns in sub-blocks of 16: nibbles as above, high two bits of pair n in bits 2 n, 2 n + 1 of the same
// lanes of `high`.
struct PackedQ6_K {
    struct Block {
        uint16_t d[8];
        int8_t scales[16][8];
        uint8_t low[16][64];
        uint8_t high[16][32];
    };
    using Row = BlockQ6_K;

    // The six bits of value j of a row.
    static int bits(const Row& row, int j) {
        const int half = j / 128, quarter = j % 128 / 32, l = j % 32;
        const int low = row.ql[half * 64 + (quarter & 1) * 32 + l];
        const int high = row.qh[half * 32 + l] >> (2 * quarter) & 3;
        return (quarter < 2 ? low & 15 : low >> 4) | high << 4;
    }
    static void pack(const Row* const (&rows)[kOctet], Block& out) {
        pack_scales(rows, out.d);
        for (int j = 0; j < 16; j++) {
            for (int r = 0; r < kOctet; r++) out.scales[j][r] = rows[r]->scales[j];
            for (int c = 0; c < 2; c++) {
                const auto nibble = [&](int r, int i) { return bits(*rows[r], j * 16 + c * 8 + i) & 15; };
                pack_eight_columns(nibble, out.low[j] + 32 * c);
            }
            for (int lane = 0; lane < 16; lane++) {
                uint16_t word = 0;
                for (int n = 0; n < 8; n++) {
                    const int six = bits(*rows[lane / 2], j * 16 + 2 * n + lane % 2);
                    word |= static_cast<uint16_t>((six >> 4) << (2 * n));
                }
                std::memcpy(out.high[j] + 2 * lane, &word, 2);
            }
        }
    }
    // The eight pairs of sub-block j.
    static void unpack(const Block& b, int j, Words (&pairs)[8]) {
        Words low[2][4];
        unpack_eight_columns(b.low[j], low[0]);
        unpack_eight_columns(b.low[j] + 32, low[1]);
        const Words high = load_words(b.high[j]);
        for (int n = 0; n < 8; n++) {
            const Words at_4 = n < 2 ? shift_left(high, 4 - 2 * n) : shift_right(high, 2 * n - 4);
            pairs[n] = subtract(bit_or(low[n / 4][n % 4], bit_and(at_4, 48)), 32);
        }
    }
};

template <int T>
void packed_tile_q6_k(const uint8_t* group, const Activations& a, int first, float* out, ptrdiff_t ld) {
    const int n_blocks = a.n_blocks();
    const auto* blocks = reinterpret_cast<const PackedQ6_K::Block*>(group);
    const int16_t* q = a.q + static_cast<ptrdiff_t>(first) * a.n_cols;
    const float* dx = a.d + static_cast<ptrdiff_t>(first) * n_blocks;
    F32 acc[kOctets][T];
    for (int g = 0; g < kOctets; g++) {
        for (int t = 0; t < T; t++) acc[g][t] = zero();
    }
    for (int at = 0; at < n_blocks * kOctets; at++) {
        const int g = at / 8 % kOctets, b = at / (8 * kOctets) * 8 + at % 8;  // octet and 32 columns
        const PackedQ6_K::Block& block = blocks[at / 8];
        const F32 d = load_f16(block.d);
        I32 sums[T];
        for (int t = 0; t < T; t++) sums[t] = zero_i32();
        for (int half = 0; half < 2; half++) {
            const int j = b % 8 * 2 + half;
            Words pairs[8];
            PackedQ6_K::unpack(block, j, pairs);
            const I32 scale = load_i8_as_i32(block.scales[j]);
            for (int t = 0; t < T; t++) {
                const int16_t* x = q + static_cast<ptrdiff_t>(t) * a.n_cols + b * 32 + half * 16;
                I32 products = zero_i32();
                for (int p = 0; p < 8; p++) products = dot(pairs[p], broadcast_pair(x + 2 * p), products);
                sums[t] = mul_add(products, scale, sums[t]);
            }
        }
        for (int t = 0; t < T; t++) {
            const F32 scale = mul(d, set1(dx[static_cast<ptrdiff_t>(t) * n_blocks + b]));
            acc[g][t] = fma(to_f32(sums[t]), scale, acc[g][t]);
        }
    }
    for (int t = 0; t < T; t++) {
        for (int g = 0; g < kOctets; g++) store(out + (first + t) * ld + g * kOctet, acc[g][t]);
    }
}

void packed_matmul_q6_k(const uint8_t* group, const Activations& a, int n_tokens, float* out, ptrdiff_t ld) {
    int t = 0;
    for (; t + 4 <= n_tokens; t += 4) packed_tile_q6_k<4>(group, a, t, out, ld);
    for (; t < n_tokens; t++) packed_tile_q6_k<1>(group, a, t, out, ld);
}

template <class P>
void pack_rows(const uint8_t* const* rows, int n_cols, uint8_t* group) {
    static_assert(sizeof(typename P::Block) == kOctet * sizeof(typename P::Row));
    constexpr int block_size = std::is_same_v<P, PackedQ6_K> ? 256 : 32;
    auto* out = reinterpret_cast<typename P::Block*>(group);
    for (int b = 0; b < n_cols / block_size; b++) {
        for (int g = 0; g < kOctets; g++) {
            const typename P::Row* at[kOctet];
            for (int r = 0; r < kOctet; r++) at[r] = reinterpret_cast<const typename P::Row*>(rows[g * kOctet + r]) + b;
            P::pack(at, out[b * kOctets + g]);
        }
    }
}
