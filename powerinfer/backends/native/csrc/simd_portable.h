// The vector operations that the kernels are written in, without intrinsics: loops over small fixed arrays.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace powerinfer::SIMD_NAMESPACE {

inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
    float y;
    if (exponent == 0) {
        y = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -y : y;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | (mantissa << 13);
    std::memcpy(&y, &bits, 4);
    return y;
}

inline uint16_t f32_to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits >= 0x7F800000) return sign | (bits > 0x7F800000 ? 0x7E00 : 0x7C00);
    if (bits >= 0x477FF000) return sign | 0x7C00;
    if (bits < 0x38800000) {  // subnormal: let float addition do the rounding
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        return sign | static_cast<uint16_t>(std::nearbyintf(magnitude * 0x1p24f));
    }
    bits += 0xFFF + ((bits >> 13) & 1);  // round to nearest, ties to even
    return sign | static_cast<uint16_t>((bits >> 13) - (112 << 10));
}

struct F32 {
    static constexpr int kLanes = 8;
    float v[8];
};

template <class F>
inline F32 map(F f) {
    F32 y;
    for (int i = 0; i < 8; i++) y.v[i] = f(i);
    return y;
}

inline F32 zero() { return map([](int) { return 0.0f; }); }
inline F32 set1(float x) { return map([=](int) { return x; }); }
inline F32 halves(float low, float high) { return map([=](int i) { return i < 4 ? low : high; }); }
inline F32 load(const float* p) { return map([=](int i) { return p[i]; }); }
inline F32 load_f16(const uint16_t* p) { return map([=](int i) { return f16_to_f32(p[i]); }); }
// Eight numbers that lie `Stride` bytes apart.
template <int Stride>
inline F32 load_f16_strided(const void* p) {
    return map([=](int i) {
        uint16_t h;
        std::memcpy(&h, static_cast<const char*>(p) + i * Stride, 2);
        return f16_to_f32(h);
    });
}
inline F32 load_bf16(const uint16_t* p) {
    return map([=](int i) {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
        float y;
        std::memcpy(&y, &bits, 4);
        return y;
    });
}
inline void store(float* p, const F32& a) {
    for (int i = 0; i < 8; i++) p[i] = a.v[i];
}
inline void store_f16(uint16_t* p, const F32& a) {
    for (int i = 0; i < 8; i++) p[i] = f32_to_f16(a.v[i]);
}
inline F32 add(const F32& a, const F32& b) { return map([&](int i) { return a.v[i] + b.v[i]; }); }
inline F32 sub(const F32& a, const F32& b) { return map([&](int i) { return a.v[i] - b.v[i]; }); }
inline F32 mul(const F32& a, const F32& b) { return map([&](int i) { return a.v[i] * b.v[i]; }); }
inline F32 div(const F32& a, const F32& b) { return map([&](int i) { return a.v[i] / b.v[i]; }); }
inline F32 fma(const F32& a, const F32& b, const F32& c) { return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F32 max(const F32& a, const F32& b) { return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F32 min(const F32& a, const F32& b) { return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F32 abs(const F32& a) { return map([&](int i) { return std::fabs(a.v[i]); }); }
inline F32 round(const F32& a) { return map([&](int i) { return std::nearbyintf(a.v[i]); }); }
// 2 ** a for whole a in -126..127
inline F32 exp2_whole(const F32& a) {
    return map([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(static_cast<int>(a.v[i]) + 127) << 23;
        float y;
        std::memcpy(&y, &bits, 4);
        return y;
    });
}
inline float sum(const F32& a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline float largest(const F32& a) {
    float y = a.v[0];
    for (int i = 1; i < 8; i++) y = a.v[i] > y ? a.v[i] : y;
    return y;
}

// Eight whole numbers.
struct I32 {
    int32_t v[8];
};

inline I32 zero_i32() { return {}; }
inline I32 set1_i32(int32_t x) {
    I32 y;
    for (int32_t& v : y.v) v = x;
    return y;
}
inline I32 load_i8_as_i32(const int8_t* p) {
    I32 y;
    for (int i = 0; i < 8; i++) y.v[i] = p[i];
    return y;
}
inline I32 load_u8_as_i32(const uint8_t* p) {
    I32 y;
    for (int i = 0; i < 8; i++) y.v[i] = p[i];
    return y;
}
// The low nibbles of four bytes, then their high nibbles.
inline I32 load_nibbles_as_i32(const uint8_t* p) {
    I32 y;
    for (int i = 0; i < 8; i++) y.v[i] = i < 4 ? p[i] & 15 : p[i - 4] >> 4;
    return y;
}
inline I32 bit_and(I32 a, int mask) {
    for (int32_t& x : a.v) x &= mask;
    return a;
}
inline I32 shift_left(I32 a, int n) {
    for (int32_t& x : a.v) x <<= n;
    return a;
}
inline I32 mul_add(const I32& a, const I32& b, I32 c) {
    for (int i = 0; i < 8; i++) c.v[i] += a.v[i] * b.v[i];
    return c;
}
inline I32 add(const I32& a, I32 b) {
    for (int i = 0; i < 8; i++) b.v[i] += a.v[i];
    return b;
}
inline I32 shift_right(I32 a, int n) {
    for (int32_t& x : a.v) x >>= n;
    return a;
}
inline F32 to_f32(const I32& a) { return map([&](int i) { return static_cast<float>(a.v[i]); }); }

// Sixteen 16-bit whole numbers.
struct Words {
    int16_t v[16];
};

template <class F>
inline Words map_words(F f) {
    Words y;
    for (int i = 0; i < 16; i++) y.v[i] = static_cast<int16_t>(f(i));
    return y;
}

inline Words load_words(const void* p) {
    Words y;
    std::memcpy(y.v, p, 32);
    return y;
}
inline Words widen_u8(const uint8_t* p) { return map_words([=](int i) { return p[i]; }); }
inline Words widen_i8(const int8_t* p) { return map_words([=](int i) { return p[i]; }); }
// The same two words in each of eight pairs.
inline Words broadcast_pair(const void* p) {
    int16_t pair[2];
    std::memcpy(pair, p, 4);
    return map_words([=](int i) { return pair[i & 1]; });
}
inline Words bit_and(const Words& a, int mask) { return map_words([&](int i) { return a.v[i] & mask; }); }
inline Words bit_or(const Words& a, const Words& b) { return map_words([&](int i) { return a.v[i] | b.v[i]; }); }
inline Words shift_right(const Words& a, int n) {  // fills with zeros
    return map_words([&](int i) { return static_cast<uint16_t>(a.v[i]) >> n; });
}
inline Words shift_left(const Words& a, int n) {
    return map_words([&](int i) { return static_cast<uint16_t>(a.v[i]) << n; });
}
inline Words subtract(const Words& a, int x) { return map_words([&](int i) { return a.v[i] - x; }); }
// Adds 16 to word i where bit i is set.
inline Words add_fifth_bits(const Words& a, uint16_t bits) {
    return map_words([&](int i) { return a.v[i] + ((bits >> i) & 1) * 16; });
}
// Words of a and b in turn, of their first 8 and their last 8 columns, in an order that only `in_order` knows.
inline Words interleave_low(const Words& a, const Words& b) {
    return map_words([&](int i) { return i % 2 ? b.v[i / 2] : a.v[i / 2]; });
}
inline Words interleave_high(const Words& a, const Words& b) {
    return map_words([&](int i) { return i % 2 ? b.v[8 + i / 2] : a.v[8 + i / 2]; });
}
inline void in_order(I32&, I32&) {}
// Lane i: the two numbers, rounded to 16 bits, as a pair of words.
inline I32 pair_of(const F32& a, const F32& b) {
    I32 y;
    for (int i = 0; i < 8; i++) {
        const int16_t pair[2] = {static_cast<int16_t>(std::nearbyintf(a.v[i])), static_cast<int16_t>(std::nearbyintf(b.v[i]))};
        std::memcpy(&y.v[i], pair, 4);
    }
    return y;
}
inline void store_i32(int32_t* p, const I32& a) { std::memcpy(p, a.v, 32); }
inline F32 first_half(const Words& a) { return map([&](int i) { return static_cast<float>(a.v[i]); }); }
inline F32 second_half(const Words& a) { return map([&](int i) { return static_cast<float>(a.v[i + 8]); }); }

// Lane i: c + products of words 2 i and 2 i + 1.
inline I32 dot(const Words& a, const Words& b, I32 c) {
    for (int i = 0; i < 16; i++) c.v[i / 2] += static_cast<int32_t>(a.v[i]) * static_cast<int32_t>(b.v[i]);
    return c;
}

// Rounds 32 floats times `scale` to whole numbers; sums: of the first 16 and of the others.
inline void quantize_32(const float* x, float scale, int16_t* q, int32_t* sums) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; i++) {
        q[i] = static_cast<int16_t>(std::nearbyintf(x[i] * scale));
        sums[i / 16] += q[i];
    }
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace powerinfer::SIMD_NAMESPACE
