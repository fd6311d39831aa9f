// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: blocks of 32 with one scale, and a minimum in the _1 types. What comes out is byte for
// byte what gguf-py makes, so every operation and its order matter here. `legacy.py` says what the bytes mean.
//
// Included once an instruction set, after lanes.h.

namespace powerinfer {
namespace quantization {
namespace SIMD_NAMESPACE {

using Tile32 = Tile<32>;

// 1 / d, and 0 where d is 0 or its inverse not finite.
inline Floats inverse(Floats d) {
    const Floats size = magnitude(d);
    return size < 2.94e-39f ? Floats{} : 1.0f / d;
}

struct BlockScales {
    float d[kLanes], minimum[kLanes];
};

// Numbers 0..2 half - 1 where the element of largest magnitude (the first of several) becomes 0: value = d (q - half).
inline void quantize_symmetric(Tile32& tile, int half, BlockScales& scales) {
    for (int g = 0; g < kGroups; g++) {
        Floats top = tile.at(g, 0), size = magnitude(top);
        for (int i = 1; i < 32; i++) {
            const Floats x = tile.at(g, i);
            const Ints larger = magnitude(x) > size;
            top = larger ? x : top;
            size = larger ? magnitude(x) : size;
        }
        const Floats d = top / static_cast<float>(-half), id = inverse(d);
        for (int i = 0; i < 32; i++) {
            const Floats q = truncated(tile.at(g, i) * id + (static_cast<float>(half) + 0.5f));
            tile.store(g, i, lower(q, splat(static_cast<float>(2 * half - 1))));
        }
        store_lanes(scales.d, g, d);
    }
}

// Numbers 0..top: value = d q + minimum.
inline void quantize_affine(Tile32& tile, int top, BlockScales& scales) {
    for (int g = 0; g < kGroups; g++) {
        Floats low = tile.at(g, 0), high = low;
        for (int i = 1; i < 32; i++) {
            low = lower(tile.at(g, i), low);
            high = higher(tile.at(g, i), high);
        }
        const Floats d = (high - low) / static_cast<float>(top), id = inverse(d);
        for (int i = 0; i < 32; i++) {
            const Floats q = truncated((tile.at(g, i) - low) * id + 0.5f);
            tile.store(g, i, lower(q, splat(static_cast<float>(top))));
        }
        store_lanes(scales.d, g, d);
        store_lanes(scales.minimum, g, low);
    }
}

// Numbers -127..127, halves rounded away from zero.
inline void quantize_bytes(Tile32& tile, BlockScales& scales) {
    for (int g = 0; g < kGroups; g++) {
        Floats size = {};
        for (int i = 0; i < 32; i++) size = higher(magnitude(tile.at(g, i)), size);
        const Floats d = size / 127.0f, id = inverse(d);
        for (int i = 0; i < 32; i++) {
            const Floats scaled = tile.at(g, i) * id;
            const Floats part = magnitude(scaled), whole = truncated(part);
            const Floats q = whole + truncated(2.0f * (part - whole));
            tile.store(g, i, scaled < 0.0f ? -q : q);
        }
        store_lanes(scales.d, g, d);
    }
}

// The low nibbles of two elements 16 apart share a byte; bit i of 4 more bytes is the fifth bit of element i.
inline void pack_nibbles(const uint8_t* q, uint8_t* out) {
    for (int i = 0; i < 16; i++) out[i] = static_cast<uint8_t>((q[i] & 15) | q[i + 16] << 4);
}

inline void pack_fifth_bits(const uint8_t* q, uint8_t* out) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++) bits |= static_cast<uint32_t>(q[i] >> 4) << i;
    for (int i = 0; i < 4; i++) out[i] = static_cast<uint8_t>(bits >> 8 * i);
}

// kAffine: with a minimum. kBits: 4, 5 or 8 a number.
template <bool kAffine, int kBits>
struct Legacy {
    static constexpr int kRuns = 1, kSize = 32;
    static constexpr int kBytes = 2 + 2 * kAffine + 4 * kBits;

    static int quantize(const float* x, uint8_t* out) {
        Tile32 tile;
        const int bad = tile.load(x);
        if (bad >= 0) return bad;
        BlockScales scales;
        if (kBits == 8) {
            quantize_bytes(tile, scales);
        } else if (kAffine) {
            quantize_affine(tile, (1 << kBits) - 1, scales);
        } else {
            quantize_symmetric(tile, 1 << (kBits - 1), scales);
        }
        for (int lane = 0; lane < kLanes; lane++) {
            if (!pack(tile.numbers[lane], scales, lane, out + lane * kBytes)) return lane;
        }
        return -1;
    }

    // Whether its 16-bit scale and minimum are finite.
    static bool pack(const uint8_t* q, const BlockScales& scales, int lane, uint8_t* out) {
        const uint16_t d = to_half(scales.d[lane]);
        store_half(out, d);
        out += 2;
        bool finite = (d & kHalfInfinity) != kHalfInfinity;
        if (kAffine) {
            const uint16_t m = to_half(scales.minimum[lane]);
            finite = finite && (m & kHalfInfinity) != kHalfInfinity;
            store_half(out, m);
            out += 2;
        }
        if (kBits == 8) {
            std::memcpy(out, q, 32);
            return finite;
        }
        if (kBits == 5) {
            pack_fifth_bits(q, out);
            out += 4;
        }
        pack_nibbles(q, out);
        return finite;
    }
};

using Q4_0 = Legacy<false, 4>;
using Q4_1 = Legacy<true, 4>;
using Q5_0 = Legacy<false, 5>;
using Q5_1 = Legacy<true, 5>;
using Q8_0 = Legacy<false, 8>;

}  // namespace SIMD_NAMESPACE
}  // namespace quantization
}  // namespace powerinfer
