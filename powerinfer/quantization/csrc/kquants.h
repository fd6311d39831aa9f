// Q2_K to Q6_K: blocks of 256. `kquants.py` says what the bytes mean.
//
// Included once an instruction set, after superblocks.h.

namespace powerinfer {
namespace quantization {
namespace SIMD_NAMESPACE {

// Low pairs of bits of 256 numbers: of each 128, byte i has those of i, i + 32, i + 64, i + 96 from its lowest bits up.
inline void pack_pairs(const uint8_t* q, int shift, uint8_t* out) {
    for (int half = 0; half < 2; half++, q += 128, out += 32) {
        for (int i = 0; i < 32; i++) {
            unsigned byte = 0;
            for (int part = 0; part < 4; part++) byte |= (q[i + 32 * part] >> shift & 3u) << 2 * part;
            out[i] = static_cast<uint8_t>(byte);
        }
    }
}

// Low nibbles of 256 numbers: of each 2 n, byte i has that of i in its low nibble and that of i + n in its high one.
inline void pack_nibbles_of(const uint8_t* q, int n, uint8_t* out) {
    for (int at = 0; at < 256; at += 2 * n, out += n) {
        for (int i = 0; i < n; i++) out[i] = static_cast<uint8_t>((q[at + i] & 15) | q[at + i + n] << 4);
    }
}

// One bit of each of 256 numbers: bit s of byte i is that of number i + 32 s.
inline void pack_bits(const uint8_t* q, int shift, uint8_t* out) {
    for (int i = 0; i < 32; i++) {
        unsigned byte = 0;
        for (int s = 0; s < 8; s++) byte |= (q[i + 32 * s] >> shift & 1u) << s;
        out[i] = static_cast<uint8_t>(byte);
    }
}

// 8 scales and 8 minima of 6 bits in 12 bytes: see `_six_bit_scales` in kquants.py.
inline void pack_six_bits(const float* scale, const float* minimum, uint8_t* out) {
    for (int i = 0; i < 4; i++) {
        const unsigned s = static_cast<unsigned>(scale[i]), high_s = static_cast<unsigned>(scale[i + 4]);
        const unsigned m = static_cast<unsigned>(minimum[i]), high_m = static_cast<unsigned>(minimum[i + 4]);
        out[i] = static_cast<uint8_t>(s | high_s >> 4 << 6);
        out[i + 4] = static_cast<uint8_t>(m | high_m >> 4 << 6);
        out[i + 8] = static_cast<uint8_t>((high_s & 15) | (high_m & 15) << 4);
    }
}

struct Q2_K : AffineBlock<16, 16, 3, 15> {
    static constexpr int kBytes = 84;

    static int quantize(const float* x, uint8_t* out) {
        static constexpr float kTrialSteps[] = {-0.5f, -0.3f, -0.1f, 0.1f, 0.3f, 0.5f, 0.7f, 0.9f, 1.1f, 1.3f};
        static constexpr int kScaleSteps[] = {15, 14, 13, 12};
        Block tile;
        Result found{};
        if (tile.load(x) >= 0 || solve(tile, kTrialSteps, kScaleSteps, found) >= 0) return 0;
        for (int run = 0; run < kRuns; run++) {
            const unsigned minimum = static_cast<unsigned>(found.runs.minimum[run]);
            out[run] = static_cast<uint8_t>(static_cast<unsigned>(found.runs.scale[run]) | minimum << 4);
        }
        pack_pairs(tile.numbers[0], 0, out + 16);
        store_half(out + 80, found.d[0]);
        store_half(out + 82, found.dmin[0]);
        return -1;
    }
};

struct Q3_K : SymmetricBlock<4, 32> {
    static constexpr int kBytes = 110;

    static int quantize(const float* x, uint8_t* out) {
        static constexpr float kTrialScales[] = {-4.8f, -4.5f, -4.2f, -3.9f, -3.6f, -3.3f, -3.0f, -2.7f, -2.4f,
                                                 2.4f,  2.7f,  3.0f,  3.3f,  3.6f};
        static constexpr int kScaleSteps[] = {32, 31, 30};
        Block tile;
        Runs runs{};
        uint16_t d = 0;
        if (tile.load(x) >= 0 || !solve(tile, kTrialScales, kScaleSteps, runs, d)) return 0;
        pack_bits(tile.numbers[0], 2, out);
        pack_pairs(tile.numbers[0], 0, out + 32);
        std::memset(out + 96, 0, 12);
        for (int run = 0; run < kRuns; run++) {
            const unsigned scale = static_cast<unsigned>(runs.scale[run] + 32);
            out[96 + run % 8] |= static_cast<uint8_t>((scale & 15) << (run < 8 ? 0 : 4));
            out[104 + run % 4] |= static_cast<uint8_t>(scale >> 4 << 2 * (run / 4));
        }
        store_half(out + 108, d);
        return -1;
    }
};

// Q4_K and Q5_K.
template <int kTop>
struct SixBitScales : AffineBlock<8, 32, kTop, 63> {
    using Base = AffineBlock<8, 32, kTop, 63>;
    static constexpr int kHighBytes = kTop > 15 ? 32 : 0;
    static constexpr int kBytes = 16 + kHighBytes + 128;

    static int quantize(const float* x, uint8_t* out) {
        static constexpr float kTrialSteps[] = {-1.2f, -0.9f, -0.6f, -0.4f, -0.2f, 0.0f, 0.2f, 0.4f, 0.6f, 0.9f, 1.2f};
        static constexpr int kScaleSteps[] = {63, 61, 58};
        typename Base::Block tile;
        typename Base::Result found{};
        const int bad = tile.load(x);
        if (bad >= 0) return bad / Base::kRuns;
        const int overflown = Base::solve(tile, kTrialSteps, kScaleSteps, found);
        if (overflown >= 0) return overflown;
        for (int block = 0; block < 2; block++, out += kBytes) {
            const uint8_t* q = tile.numbers[block * Base::kRuns];
            store_half(out, found.d[block]);
            store_half(out + 2, found.dmin[block]);
            pack_six_bits(found.runs.scale + block * Base::kRuns, found.runs.minimum + block * Base::kRuns, out + 4);
            if (kHighBytes > 0) pack_bits(q, 4, out + 16);
            pack_nibbles_of(q, 32, out + 16 + kHighBytes);
        }
        return -1;
    }
};

using Q4_K = SixBitScales<15>;
using Q5_K = SixBitScales<31>;

struct Q6_K : SymmetricBlock<32, 128> {
    static constexpr int kBytes = 210;

    static int quantize(const float* x, uint8_t* out) {
        static constexpr float kTrialScales[] = {-32.9f, -32.6f, -32.3f, -32.0f, -31.7f, -31.4f, -31.1f, 31.0f};
        static constexpr int kScaleSteps[] = {128, 125, 121};
        Block tile;
        Runs runs{};
        uint16_t d = 0;
        if (tile.load(x) >= 0 || !solve(tile, kTrialScales, kScaleSteps, runs, d)) return 0;
        pack_nibbles_of(tile.numbers[0], 64, out);
        pack_pairs(tile.numbers[0], 4, out + 128);
        for (int run = 0; run < kRuns; run++) out[192 + run] = static_cast<uint8_t>(static_cast<int>(runs.scale[run]));
        store_half(out + 208, d);
        return -1;
    }
};

}  // namespace SIMD_NAMESPACE
}  // namespace quantization
}  // namespace powerinfer
