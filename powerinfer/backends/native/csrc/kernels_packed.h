// Part of kernels_body.h: matrices that are always used whole, with groups of 8 rows interleaved.
//
// A chunk is 32 bytes: four columns of each of the 8 rows, row r in bytes 4 r .. 4 r + 3. Activations of the four columns
// are broadcast to all lanes, so that lane r collects row r: no horizontal sums, and the scales of 8 rows are one vector.

// Chunk c of 32 columns holds columns 4 c .. 4 c + 3. As with GGML's own blocks, the nibbles of one stored chunk c < 4
// are columns 4 c .. (low) and 16 + 4 c .. (high).
constexpr int kChunks = 8;

struct PackedUnpacked {
    Bytes chunks[kChunks];
    F32 d, m;
};

inline void pack_nibbles(const uint8_t* const (&qs)[kPackedRows], uint8_t* out) {
    for (int c = 0; c < 4; c++) {
        for (int r = 0; r < kPackedRows; r++) std::memcpy(out + c * 32 + r * 4, qs[r] + c * 4, 4);
    }
}

inline void unpack_nibbles(const uint8_t* packed, Bytes (&chunks)[kChunks]) {
    for (int c = 0; c < 4; c++) {
        const Bytes both = load_bytes(packed + c * 32);
        chunks[c] = and_all(both, 15);
        chunks[c + 4] = shift_right<4>(both);
    }
}

// Fifth bits: chunk c's 32 bits, one a byte, in out[4 c ..].
inline void pack_fifth_bits(const uint8_t* const (&qh)[kPackedRows], uint8_t* out) {
    for (int c = 0; c < kChunks; c++) {
        uint32_t bits = 0;
        for (int r = 0; r < kPackedRows; r++) {
            uint32_t row;
            std::memcpy(&row, qh[r], 4);
            bits |= ((row >> (c * 4)) & 15) << (r * 4);
        }
        std::memcpy(out + c * 4, &bits, 4);
    }
}

// kSteps: how many steps of dot_more a sum holds.
struct PackedQ4_0 {
    struct Block {
        uint16_t d[8];
        uint8_t qs[128];
    };
    using Row = BlockQ4_0;
    static constexpr bool kMin = true, kSigned = false;
    static constexpr int kSteps = 8;
    static void pack(const Row* const (&rows)[kPackedRows], Block& out) {
        const uint8_t* qs[kPackedRows];
        for (int r = 0; r < kPackedRows; r++) {
            out.d[r] = rows[r]->d;
            qs[r] = rows[r]->qs;
        }
        pack_nibbles(qs, out.qs);
    }
    static void unpack(const Block& b, PackedUnpacked& u) {
        unpack_nibbles(b.qs, u.chunks);
        u.d = load_f16(b.d);
        u.m = mul(u.d, set1(-8.0f));
    }
};

struct PackedQ4_1 {
    struct Block {
        uint16_t d[8], m[8];
        uint8_t qs[128];
    };
    using Row = BlockQ4_1;
    static constexpr bool kMin = true, kSigned = false;
    static constexpr int kSteps = 8;
    static void pack(const Row* const (&rows)[kPackedRows], Block& out) {
        const uint8_t* qs[kPackedRows];
        for (int r = 0; r < kPackedRows; r++) {
            out.d[r] = rows[r]->d;
            out.m[r] = rows[r]->m;
            qs[r] = rows[r]->qs;
        }
        pack_nibbles(qs, out.qs);
    }
    static void unpack(const Block& b, PackedUnpacked& u) {
        unpack_nibbles(b.qs, u.chunks);
        u.d = load_f16(b.d);
        u.m = load_f16(b.m);
    }
};

template <class R, bool kHasM>
struct PackedQ5 {
    struct Block {
        uint16_t d[8], m[kHasM ? 8 : 0];
        uint8_t qh[32];
        uint8_t qs[128];
    };
    using Row = R;
    static constexpr bool kMin = true, kSigned = false;
    static constexpr int kSteps = 4;
    static void pack(const Row* const (&rows)[kPackedRows], Block& out) {
        const uint8_t *qs[kPackedRows], *qh[kPackedRows];
        for (int r = 0; r < kPackedRows; r++) {
            out.d[r] = rows[r]->d;
            if constexpr (kHasM) out.m[r] = rows[r]->m;
            qs[r] = rows[r]->qs;
            qh[r] = rows[r]->qh;
        }
        pack_nibbles(qs, out.qs);
        pack_fifth_bits(qh, out.qh);
    }
    static void unpack(const Block& b, PackedUnpacked& u) {
        unpack_nibbles(b.qs, u.chunks);
        for (int c = 0; c < kChunks; c++) u.chunks[c] = add_fifth_bits(u.chunks[c], b.qh + 4 * c);
        u.d = load_f16(b.d);
        if constexpr (kHasM) {
            u.m = load_f16(b.m);
        } else {
            u.m = mul(u.d, set1(-16.0f));
        }
    }
};

struct PackedQ8_0 {
    struct Block {
        uint16_t d[8];
        uint8_t qs[256];
    };
    using Row = BlockQ8_0;
    static constexpr bool kMin = false, kSigned = true;
    static constexpr int kSteps = 1;
    static void pack(const Row* const (&rows)[kPackedRows], Block& out) {
        for (int r = 0; r < kPackedRows; r++) {
            out.d[r] = rows[r]->d;
            for (int c = 0; c < kChunks; c++) std::memcpy(out.qs + c * 32 + r * 4, rows[r]->qs + c * 4, 4);
        }
    }
    static void unpack(const Block& b, PackedUnpacked& u) {
        for (int c = 0; c < kChunks; c++) u.chunks[c] = load_bytes(b.qs + c * 32);
        u.d = load_f16(b.d);
        u.m = zero();
    }
};

// Blocks of 256 columns. Sub-block j of 16 columns is four chunks: low nibbles of chunks 0 and 2 with those of 1 and 3
// above them in low[j], their high two bits in bits 0-1, 2-3, 4-5, 6-7 of high[j].
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
    static void pack(const Row* const (&rows)[kPackedRows], Block& out) {
        std::memset(&out, 0, sizeof(out));
        for (int r = 0; r < kPackedRows; r++) {
            out.d[r] = rows[r]->d;
            for (int j = 0; j < 16; j++) out.scales[j][r] = rows[r]->scales[j];
            for (int j = 0; j < 256; j++) {
                const int six = bits(*rows[r], j), chunk = j % 16 / 4, byte = r * 4 + j % 4;
                out.low[j / 16][chunk / 2 * 32 + byte] |= (six & 15) << (4 * (chunk & 1));
                out.high[j / 16][byte] |= (six >> 4) << (2 * chunk);
            }
        }
    }
    // Sub-block j, signed.
    static void unpack(const Block& b, int j, Bytes (&chunks)[4]) {
        const Bytes low01 = load_bytes(b.low[j]), low23 = load_bytes(b.low[j] + 32), high = load_bytes(b.high[j]);
        chunks[0] = bit_or(and_all(low01, 15), shift_left<4>(and_all(high, 3)));
        chunks[1] = bit_or(shift_right<4>(low01), shift_left<2>(and_all(high, 12)));
        chunks[2] = bit_or(and_all(low23, 15), and_all(high, 48));
        chunks[3] = bit_or(shift_right<4>(low23), shift_right<2>(and_all(high, 192)));
        for (Bytes& chunk : chunks) chunk = sub_all(chunk, 32);
    }
};

template <int T>
void packed_tile_q6_k(const uint8_t* group, const Activations& a, int first, float* out, ptrdiff_t ld) {
    const int n_blocks = a.n_blocks();
    const auto* blocks = reinterpret_cast<const PackedQ6_K::Block*>(group);
    const int8_t* q = a.q + static_cast<ptrdiff_t>(first) * a.n_cols;
    const float* dx = a.d + static_cast<ptrdiff_t>(first) * n_blocks;
    F32 acc[T];
    for (int t = 0; t < T; t++) acc[t] = zero();
    for (int b = 0; b < n_blocks; b++) {
        const PackedQ6_K::Block& block = blocks[b / 8];
        const F32 d = load_f16(block.d);
        I32 dots[T];
        for (int t = 0; t < T; t++) dots[t] = zero_i32();
        for (int half = 0; half < 2; half++) {
            const int j = b % 8 * 2 + half;
            Bytes chunks[4];
            PackedQ6_K::unpack(block, j, chunks);
            const I32 scale = load_i8_as_i32(block.scales[j]);
            for (int t = 0; t < T; t++) {
                const int8_t* x = q + static_cast<ptrdiff_t>(t) * a.n_cols + b * 32 + half * 16;
                DotSum sum = dot_begin();
                for (int c = 0; c < 4; c++) sum = dot_more_ss(sum, chunks[c], broadcast4(x + 4 * c));
                dots[t] = mul_add(dot_end(sum), scale, dots[t]);
            }
        }
        for (int t = 0; t < T; t++) {
            acc[t] = fma(to_f32(dots[t]), mul(d, set1(dx[static_cast<ptrdiff_t>(t) * n_blocks + b])), acc[t]);
        }
    }
    for (int t = 0; t < T; t++) store(out + (first + t) * ld, acc[t]);
}

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
    using Type = PackedQ5<BlockQ5_0, false>;
};
template <>
struct PackedForm<Q5_1> {
    using Type = PackedQ5<BlockQ5_1, true>;
};
template <>
struct PackedForm<Q8_0> {
    using Type = PackedQ8_0;
};

template <>
struct PackedForm<Q6_K> {
    using Type = PackedQ6_K;
};
template <class Q>
using PackedFormOf = typename PackedForm<Q>::Type;

template <class P, int T>
void packed_tile(const uint8_t* group, const Activations& a, int first, float* out, ptrdiff_t ld) {
    const int n_blocks = a.n_blocks();
    const auto* blocks = reinterpret_cast<const typename P::Block*>(group);
    const int8_t* q = a.q + static_cast<ptrdiff_t>(first) * a.n_cols;
    const float* dx = a.d + static_cast<ptrdiff_t>(first) * n_blocks;
    const float* sx = a.s + static_cast<ptrdiff_t>(first) * n_blocks;
    F32 acc[T];
    for (int t = 0; t < T; t++) acc[t] = zero();
    for (int b = 0; b < n_blocks; b++) {
        PackedUnpacked w;
        P::unpack(blocks[b], w);
        for (int t = 0; t < T; t++) {
            const int8_t* x = q + static_cast<ptrdiff_t>(t) * a.n_cols + b * 32;
            I32 dots = zero_i32();
            for (int run = 0; run < kChunks; run += P::kSteps) {
                DotSum sum = dot_begin();
                for (int c = run; c < run + P::kSteps; c++) {
                    const Bytes four = broadcast4(x + 4 * c);
                    sum = P::kSigned ? dot_more_ss(sum, w.chunks[c], four) : dot_more_us(sum, w.chunks[c], four);
                }
                dots = add(dots, dot_end(sum));
            }
            const ptrdiff_t at = static_cast<ptrdiff_t>(t) * n_blocks + b;
            acc[t] = fma(to_f32(dots), mul(w.d, set1(dx[at])), acc[t]);
            if (P::kMin) acc[t] = fma(w.m, set1(sx[at]), acc[t]);
        }
    }
    for (int t = 0; t < T; t++) store(out + (first + t) * ld, acc[t]);
}

template <class P>
void packed_matmul(const uint8_t* group, const Activations& a, int n_tokens, float* out, ptrdiff_t ld) {
    const auto tile = [&](auto n, int t) {
        if constexpr (std::is_same_v<P, PackedQ6_K>) {
            packed_tile_q6_k<n.value>(group, a, t, out, ld);
        } else {
            packed_tile<P, n.value>(group, a, t, out, ld);
        }
    };
    int t = 0;
    for (; t + 4 <= n_tokens; t += 4) tile(std::integral_constant<int, 4>{}, t);
    for (; t < n_tokens; t++) tile(std::integral_constant<int, 1>{}, t);
}

template <class P>
void pack_rows(const uint8_t* const* rows, int n_cols, uint8_t* group) {
    static_assert(sizeof(typename P::Block) == kPackedRows * sizeof(typename P::Row));
    auto* out = reinterpret_cast<typename P::Block*>(group);
    constexpr int block_size = std::is_same_v<P, PackedQ6_K> ? 256 : 32;
    for (int b = 0; b < n_cols / block_size; b++) {
        const typename P::Row* at[kPackedRows];
        for (int r = 0; r < kPackedRows; r++) at[r] = reinterpret_cast<const typename P::Row*>(rows[r]) + b;
        P::pack(at, out[b]);
    }
}
