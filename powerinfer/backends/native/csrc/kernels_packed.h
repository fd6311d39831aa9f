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
// kNibbles: whether `qs` is all there is to the words. kRowSize: columns of a block in a file. `blocks`: those of 32
// columns, one for each octet. `Head`: what eight of them from a multiple of eight on have in common. `pack` writes one
// octet's part of a block of its rows.
struct NoHead {};

template <class B>
struct PlainPacked {
    using Head = NoHead;
    static constexpr int kRowSize = 32;
    static const B* blocks(const uint8_t* group, int block) {
        return reinterpret_cast<const B*>(group) + block * kOctets;
    }
    static Head head(const uint8_t*, int, int) { return {}; }
    static F32 d(const B& b, const Head&, int) { return load_f16(b.d); }
};

struct PackedQ4_0Block {
    uint16_t d[8];
    uint8_t qs[4][32];
};

static_assert(sizeof(PackedQ4_0Block) == kOctet * sizeof(BlockQ4_0));
struct PackedQ4_0 : PlainPacked<PackedQ4_0Block> {
    using Block = PackedQ4_0Block;
    using Row = BlockQ4_0;
    static constexpr bool kMin = true, kNibbles = true;
    static void pack(const Row* const (&rows)[kOctet], uint8_t* group, int block, int g) {
        Block& out = reinterpret_cast<Block*>(group)[block * kOctets + g];
        pack_scales(rows, out.d);
        pack_nibbles(rows, out.qs[0]);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        unpack_eight_columns(b.qs[c], pairs);
    }
    static F32 m(const Block& b, const Head& h, int) { return mul(d(b, h, 0), set1(-8.0f)); }
};

struct PackedQ4_1Block {
    uint16_t d[8], m[8];
    uint8_t qs[4][32];
};

static_assert(sizeof(PackedQ4_1Block) == kOctet * sizeof(BlockQ4_1));
struct PackedQ4_1 : PlainPacked<PackedQ4_1Block> {
    using Block = PackedQ4_1Block;
    using Row = BlockQ4_1;
    static constexpr bool kMin = true, kNibbles = true;
    static void pack(const Row* const (&rows)[kOctet], uint8_t* group, int block, int g) {
        Block& out = reinterpret_cast<Block*>(group)[block * kOctets + g];
        pack_scales(rows, out.d);
        for (int r = 0; r < kOctet; r++) out.m[r] = rows[r]->m;
        pack_nibbles(rows, out.qs[0]);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        unpack_eight_columns(b.qs[c], pairs);
    }
    static F32 m(const Block& b, const Head&, int) { return load_f16(b.m); }
};

// Fifth bits of 32 columns: bit p of lane 2 r + w is that of column 2 p + w of row r. bit(r, column) gives it.
template <class Bit>
inline void pack_fifth_bits(Bit bit, uint16_t (&qh)[16]) {
    for (int lane = 0; lane < 16; lane++) {
        qh[lane] = 0;
        for (int p = 0; p < 16; p++) qh[lane] |= static_cast<uint16_t>(bit(lane / 2, 2 * p + lane % 2) << p);
    }
}

// Pairs 4 c .. 4 c + 3, from nibbles and fifth bits.
inline void unpack_eight_columns(const uint8_t* packed, const uint16_t (&qh)[16], int c, Words (&pairs)[4]) {
    unpack_eight_columns(packed, pairs);
    const Words bits = load_words(qh);
    for (int n = 0; n < 4; n++) {
        const int p = 4 * c + n;
        pairs[n] = bit_or(pairs[n], bit_and(p < 4 ? shift_left(bits, 4 - p) : shift_right(bits, p - 4), 16));
    }
}

struct PackedQ5_0Block {
    uint16_t d[8];
    uint16_t qh[16];
    uint8_t qs[4][32];
};

static_assert(sizeof(PackedQ5_0Block) == kOctet * sizeof(BlockQ5_0));
struct PackedQ5_0 : PlainPacked<PackedQ5_0Block> {
    using Block = PackedQ5_0Block;
    using Row = BlockQ5_0;
    static constexpr bool kMin = true, kNibbles = false;
    static void pack(const Row* const (&rows)[kOctet], uint8_t* group, int block, int g) {
        Block& out = reinterpret_cast<Block*>(group)[block * kOctets + g];
        pack_scales(rows, out.d);
        pack_fifth_bits([&](int r, int column) { return rows[r]->qh[column / 8] >> (column % 8) & 1; }, out.qh);
        pack_nibbles(rows, out.qs[0]);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        unpack_eight_columns(b.qs[c], b.qh, c, pairs);
    }
    static F32 m(const Block& b, const Head& h, int) { return mul(d(b, h, 0), set1(-16.0f)); }
};

struct PackedQ5_1Block {
    uint16_t d[8], m[8];
    uint16_t qh[16];
    uint8_t qs[4][32];
};

static_assert(sizeof(PackedQ5_1Block) == kOctet * sizeof(BlockQ5_1));
struct PackedQ5_1 : PlainPacked<PackedQ5_1Block> {
    using Block = PackedQ5_1Block;
    using Row = BlockQ5_1;
    static constexpr bool kMin = true, kNibbles = false;
    static void pack(const Row* const (&rows)[kOctet], uint8_t* group, int block, int g) {
        Block& out = reinterpret_cast<Block*>(group)[block * kOctets + g];
        pack_scales(rows, out.d);
        for (int r = 0; r < kOctet; r++) out.m[r] = rows[r]->m;
        pack_fifth_bits([&](int r, int column) { return rows[r]->qh[column / 8] >> (column % 8) & 1; }, out.qh);
        pack_nibbles(rows, out.qs[0]);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        unpack_eight_columns(b.qs[c], b.qh, c, pairs);
    }
    static F32 m(const Block& b, const Head&, int) { return load_f16(b.m); }
};

struct PackedQ8_0Block {
    uint16_t d[8];
    int8_t qs[16][16];
};

static_assert(sizeof(PackedQ8_0Block) == kOctet * sizeof(BlockQ8_0));
struct PackedQ8_0 : PlainPacked<PackedQ8_0Block> {
    using Block = PackedQ8_0Block;
    using Row = BlockQ8_0;
    static constexpr bool kMin = false, kNibbles = false;
    static void pack(const Row* const (&rows)[kOctet], uint8_t* group, int block, int g) {
        Block& out = reinterpret_cast<Block*>(group)[block * kOctets + g];
        pack_scales(rows, out.d);
        for (int p = 0; p < 16; p++) {
            for (int i = 0; i < 16; i++) out.qs[p][i] = rows[i / 2]->qs[2 * p + i % 2];
        }
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) {
        for (int p = 0; p < 4; p++) pairs[p] = widen_i8(b.qs[4 * c + p]);
    }
    static F32 m(const Block&, const Head&, int) { return zero(); }
};

// Scales of an octet's 256 columns.
struct PackedScales {
    uint16_t d[8], dmin[8];
    uint8_t factors[8][8];  // of 32 columns and row r: bits 0-5 the factor, 6-7 the low bits of the minimum
    uint8_t minima[8][4];   // bits 2-5 of the minimum: low nibble of byte r for r < 4, high nibble of byte r - 4 above
};

template <class B, class RowBlock>
struct SuperPacked {
    using Block = B;
    using Row = RowBlock;
    struct Group {
        PackedScales scales[kOctets];
        B blocks[8][kOctets];
    };
    struct Head {
        F32 d, dmin;
        const PackedScales* scales;
    };
    static_assert(sizeof(Group) == kPackedRows * sizeof(Row));
    static constexpr int kRowSize = 256;
    static constexpr bool kMin = true;

    static void pack_super(const Row* const (&rows)[kOctet], Group& out, int g) {
        PackedScales& to = out.scales[g];
        uint8_t factors[kOctet][8], minima[kOctet][8];
        for (int r = 0; r < kOctet; r++) {
            to.d[r] = rows[r]->d;
            to.dmin[r] = rows[r]->dmin;
            unpack_sixes(rows[r]->scales, factors[r], minima[r]);
        }
        for (int i = 0; i < 8; i++) {
            for (int r = 0; r < kOctet; r++) {
                to.factors[i][r] = static_cast<uint8_t>(factors[r][i] | (minima[r][i] & 3) << 6);
            }
            for (int r = 0; r < 4; r++) {
                to.minima[i][r] = static_cast<uint8_t>(minima[r][i] >> 2 | (minima[r + 4][i] >> 2) << 4);
            }
            for (int c = 0; c < 4; c++) {
                const auto nibble = [&](int r, int j) {
                    const int byte = rows[r]->qs[i / 2 * 32 + 8 * c + j];
                    return i % 2 ? byte >> 4 : byte & 15;
                };
                pack_eight_columns(nibble, out.blocks[i][g].qs[c]);
            }
        }
    }
    static const B* blocks(const uint8_t* group, int block) {
        return reinterpret_cast<const Group*>(group)[block / 8].blocks[block % 8];
    }
    static Head head(const uint8_t* group, int block, int g) {
        const PackedScales& scales = reinterpret_cast<const Group*>(group)[block / 8].scales[g];
        return {load_f16(scales.d), load_f16(scales.dmin), &scales};
    }
    static F32 d(const B&, const Head& head, int i) {
        return mul(head.d, to_f32(bit_and(load_u8_as_i32(head.scales->factors[i]), 63)));
    }
    static F32 m(const B&, const Head& head, int i) {
        const I32 low = shift_right(load_u8_as_i32(head.scales->factors[i]), 6);
        const I32 minima = add(low, shift_left(load_nibbles_as_i32(head.scales->minima[i]), 2));
        return mul(sub(zero(), head.dmin), to_f32(minima));
    }
};

struct PackedQ4_KBlock {
    uint8_t qs[4][32];
};

struct PackedQ4_K : SuperPacked<PackedQ4_KBlock, BlockQ4_K> {
    static constexpr bool kNibbles = true;
    static void pack(const Row* const (&rows)[kOctet], uint8_t* group, int block, int g) {
        pack_super(rows, reinterpret_cast<Group*>(group)[block], g);
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) { unpack_eight_columns(b.qs[c], pairs); }
};

struct PackedQ5_KBlock {
    uint16_t qh[16];
    uint8_t qs[4][32];
};

struct PackedQ5_K : SuperPacked<PackedQ5_KBlock, BlockQ5_K> {
    static constexpr bool kNibbles = false;
    static void pack(const Row* const (&rows)[kOctet], uint8_t* group, int block, int g) {
        Group& out = reinterpret_cast<Group*>(group)[block];
        pack_super(rows, out, g);
        for (int i = 0; i < 8; i++) {
            pack_fifth_bits([&](int r, int column) { return rows[r]->qh[column] >> i & 1; }, out.blocks[i][g].qh);
        }
    }
    static void unpack(const Block& b, int c, Words (&pairs)[4]) { unpack_eight_columns(b.qs[c], b.qh, c, pairs); }
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
template <>
struct PackedForm<Q4_K> {
    using Type = PackedQ4_K;
};
template <>
struct PackedForm<Q5_K> {
    using Type = PackedQ5_K;
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
    const int16_t* x = a.q + static_cast<ptrdiff_t>(token) * a.n_cols;
    const float* dx = a.d + static_cast<ptrdiff_t>(token) * n_blocks;
    const float* sx = a.s + static_cast<ptrdiff_t>(token) * n_blocks;
    F32 acc[kOctets], offset[kOctets];
    for (int g = 0; g < kOctets; g++) acc[g] = offset[g] = zero();
    typename P::Head heads[kOctets] = {};
    for (int b = 0; b < n_blocks; b++) {
        const typename P::Block* blocks = P::blocks(group, b);
        if (b % 8 == 0) {
            for (int g = 0; g < kOctets; g++) heads[g] = P::head(group, b, g);
        }
        I32 sums[kOctets];
        sums_of_token<P>(blocks, x + b * 32, sums);
        for (int g = 0; g < kOctets; g++) {
            acc[g] = fma(to_f32(sums[g]), mul(P::d(blocks[g], heads[g], b % 8), set1(dx[b])), acc[g]);
            if (P::kMin) offset[g] = fma(P::m(blocks[g], heads[g], b % 8), set1(sx[b]), offset[g]);
        }
    }
    for (int g = 0; g < kOctets; g++) store(out + g * kOctet, add(acc[g], offset[g]));
}

// A group and T tokens: columns are unpacked once for all tokens.
template <class P, int T>
void packed_tile(const uint8_t* group, const Activations& a, int first, float* out, ptrdiff_t ld) {
    const int n_blocks = a.n_blocks();
    const int16_t* q = a.q + static_cast<ptrdiff_t>(first) * a.n_cols;
    const float* dx = a.d + static_cast<ptrdiff_t>(first) * n_blocks;
    const float* sx = a.s + static_cast<ptrdiff_t>(first) * n_blocks;
    F32 acc[kOctets][T];
    for (int g = 0; g < kOctets; g++) {
        for (int t = 0; t < T; t++) acc[g][t] = zero();
    }
    typename P::Head heads[kOctets] = {};
    for (int b = 0; b < n_blocks; b++) {
        const typename P::Block* blocks = P::blocks(group, b);
        if (b % 8 == 0) {
            for (int g = 0; g < kOctets; g++) heads[g] = P::head(group, b, g);
        }
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
            const F32 d = P::d(blocks[g], heads[g], b % 8), m = P::m(blocks[g], heads[g], b % 8);
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
    switch (n_tokens - t) {
        case 3: return packed_tile<P, 3>(group, a, t, out, ld);
        case 2: return packed_tile<P, 2>(group, a, t, out, ld);
        case 1: return packed_token<P>(group, a, t, out + t * ld);
    }
}

// 256 columns in sub-blocks of 16, eight pairs. A word has room for two values and four bits more, so three
// words hold eight: bits 0-5 and 6-11 of words[i] are pairs 2 i and 2 i + 1; bits 12-15 of words[0] and words[1] are the low
// four bits of pairs 6 and 7, their high two are bits 12-13 and 14-15 of words[2].
struct PackedQ6_KGroup {
    uint16_t d[kOctets][8];
    int8_t scales[16][kOctets][8];
    uint16_t words[16][kOctets][3][16];
};

struct PackedQ6_K {
    using Group = PackedQ6_KGroup;
    using Row = BlockQ6_K;
    static constexpr int kRowSize = 256;
    static_assert(sizeof(Group) == kPackedRows * sizeof(Row));

    // The six bits of value j of a row.
    static int bits(const Row& row, int j) {
        const int half = j / 128, quarter = j % 128 / 32, l = j % 32;
        const int low = row.ql[half * 64 + (quarter & 1) * 32 + l];
        const int high = row.qh[half * 32 + l] >> (2 * quarter) & 3;
        return (quarter < 2 ? low & 15 : low >> 4) | high << 4;
    }
    static void pack(const Row* const (&rows)[kOctet], uint8_t* group, int block, int g) {
        Group& out = reinterpret_cast<Group*>(group)[block];
        pack_scales(rows, out.d[g]);
        for (int j = 0; j < 16; j++) {
            for (int r = 0; r < kOctet; r++) out.scales[j][g][r] = rows[r]->scales[j];
            for (int lane = 0; lane < 16; lane++) {
                const auto pair = [&](int p) { return bits(*rows[lane / 2], j * 16 + 2 * p + lane % 2); };
                const int tops[3] = {pair(6) & 15, pair(7) & 15, pair(6) >> 4 | (pair(7) >> 4) << 2};
                for (int i = 0; i < 3; i++) {
                    out.words[j][g][i][lane] = static_cast<uint16_t>(pair(2 * i) | pair(2 * i + 1) << 6 | tops[i] << 12);
                }
            }
        }
    }
    // Pairs of a sub-block: even, of the first six; odd, 64 times too large; and the last two.
    static void unpack(const uint16_t (&from)[3][16], Words (&even)[3], Words (&odd)[3], Words (&last)[2]) {
        Words words[3];
        for (int i = 0; i < 3; i++) {
            words[i] = load_words(from[i]);
            even[i] = bit_and(words[i], 0x03F);
            odd[i] = bit_and(words[i], 0xFC0);
        }
        for (int i = 0; i < 2; i++) {
            last[i] = bit_or(shift_right(words[i], 12), bit_and(shift_right(words[2], 8 + 2 * i), 48));
        }
    }
};

// Values are 32 less than their six bits: sums start with that of the activations.
template <int T>
void packed_tile_q6_k(const uint8_t* group, const Activations& a, int first, float* out, ptrdiff_t ld) {
    const int n_blocks = a.n_blocks();
    const auto* groups = reinterpret_cast<const PackedQ6_K::Group*>(group);
    const int16_t* q = a.q + static_cast<ptrdiff_t>(first) * a.n_cols;
    const float* dx = a.d + static_cast<ptrdiff_t>(first) * n_blocks;
    const int32_t* hx = a.h + static_cast<ptrdiff_t>(first) * 2 * n_blocks;
    F32 acc[kOctets][T];
    for (int g = 0; g < kOctets; g++) {
        for (int t = 0; t < T; t++) acc[g][t] = zero();
    }
    for (int b = 0; b < n_blocks; b++) {
        const PackedQ6_K::Group& packed = groups[b / 8];
        I32 sums[kOctets][T];
        for (int half = 0; half < 2; half++) {
            const int j = b % 8 * 2 + half;
            for (int g = 0; g < kOctets; g++) {
                Words even[3], odd[3], last[2];
                PackedQ6_K::unpack(packed.words[j][g], even, odd, last);
                const I32 scale = load_i8_as_i32(packed.scales[j][g]);
                for (int t = 0; t < T; t++) {
                    const int16_t* x = q + static_cast<ptrdiff_t>(t) * a.n_cols + b * 32 + half * 16;
                    const int32_t offset = hx[static_cast<ptrdiff_t>(t) * 2 * n_blocks + 2 * b + half];
                    I32 products = set1_i32(-32 * offset), large = zero_i32();
                    for (int i = 0; i < 3; i++) {
                        products = dot(even[i], broadcast_pair(x + 4 * i), products);
                        large = dot(odd[i], broadcast_pair(x + 4 * i + 2), large);
                    }
                    for (int i = 0; i < 2; i++) products = dot(last[i], broadcast_pair(x + 12 + 2 * i), products);
                    const I32 so_far = half ? sums[g][t] : zero_i32();
                    sums[g][t] = mul_add(add(products, shift_right(large, 6)), scale, so_far);
                }
            }
        }
        for (int g = 0; g < kOctets; g++) {
            const F32 d = load_f16(packed.d[g]);
            for (int t = 0; t < T; t++) {
                const F32 scale = mul(d, set1(dx[static_cast<ptrdiff_t>(t) * n_blocks + b]));
                acc[g][t] = fma(to_f32(sums[g][t]), scale, acc[g][t]);
            }
        }
    }
    for (int t = 0; t < T; t++) {
        for (int g = 0; g < kOctets; g++) store(out + (first + t) * ld + g * kOctet, acc[g][t]);
    }
}

void packed_matmul_q6_k(const uint8_t* group, const Activations& a, int n_tokens, float* out, ptrdiff_t ld) {
    int t = 0;
    for (; t + 4 <= n_tokens; t += 4) packed_tile_q6_k<4>(group, a, t, out, ld);
    for (; t + 2 <= n_tokens; t += 2) packed_tile_q6_k<2>(group, a, t, out, ld);
    for (; t < n_tokens; t++) packed_tile_q6_k<1>(group, a, t, out, ld);
}

template <class P>
void pack_rows(const uint8_t* const* rows, int n_cols, uint8_t* group) {
    for (int b = 0; b < n_cols / P::kRowSize; b++) {
        for (int g = 0; g < kOctets; g++) {
            const typename P::Row* at[kOctet];
            for (int r = 0; r < kOctet; r++) at[r] = reinterpret_cast<const typename P::Row*>(rows[g * kOctet + r]) + b;
            P::pack(at, group, b, g);
        }
    }
}
