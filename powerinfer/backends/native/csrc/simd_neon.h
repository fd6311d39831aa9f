// The vector operations that the kernels are written in, for NEON as every AArch64 processor has it.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace powerinfer::SIMD_NAMESPACE {

inline float f16_to_f32(uint16_t h) {
    __fp16 x;
    std::memcpy(&x, &h, 2);
    return x;
}
inline uint16_t f32_to_f16(float x) {
    const __fp16 y = static_cast<__fp16>(x);
    uint16_t h;
    std::memcpy(&h, &y, 2);
    return h;
}

struct F32 {
    static constexpr int kLanes = 8;
    float32x4_t low, high;
};

inline F32 widen_f16(uint16x8_t a) {
    const float16x8_t h = vreinterpretq_f16_u16(a);
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}

inline F32 halves(float low, float high) { return {vdupq_n_f32(low), vdupq_n_f32(high)}; }
inline F32 set1(float x) { return halves(x, x); }
inline F32 zero() { return set1(0.0f); }
inline F32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline F32 load_f16(const uint16_t* p) { return widen_f16(vld1q_u16(p)); }
// Eight numbers that lie `Stride` bytes apart.
template <int Stride>
inline F32 load_f16_strided(const void* p) {
    const auto at = [p](int i) {
        uint16_t h;
        std::memcpy(&h, static_cast<const char*>(p) + i * Stride, 2);
        return h;
    };
    return widen_f16(uint16x8_t{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)});
}
inline F32 load_bf16(const uint16_t* p) {
    const uint16x8_t h = vld1q_u16(p), none = vdupq_n_u16(0);
    return {vreinterpretq_f32_u16(vzip1q_u16(none, h)), vreinterpretq_f32_u16(vzip2q_u16(none, h))};
}
inline void store(float* p, F32 a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
}
inline void store_f16(uint16_t* p, F32 a) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.low), a.high)));
}
inline F32 add(F32 a, F32 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline F32 sub(F32 a, F32 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline F32 mul(F32 a, F32 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline F32 div(F32 a, F32 b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
// Of a NaN in `a` and a number, the number, as on other processors: vmaxq_f32 would give the NaN.
inline F32 max(F32 a, F32 b) { return {vmaxnmq_f32(a.low, b.low), vmaxnmq_f32(a.high, b.high)}; }
inline F32 min(F32 a, F32 b) { return {vminnmq_f32(a.low, b.low), vminnmq_f32(a.high, b.high)}; }
inline F32 abs(F32 a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
inline F32 round(F32 a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
// In the order of the other processors, so that sums round as theirs do.
inline float sum(F32 a) {
    const float32x4_t half = vaddq_f32(a.low, a.high);
    return vpadds_f32(vadd_f32(vget_low_f32(half), vget_high_f32(half)));
}
inline float largest(F32 a) { return vmaxnmvq_f32(vmaxnmq_f32(a.low, a.high)); }

// Eight whole numbers.
struct I32 {
    int32x4_t low, high;
};

inline I32 set1_i32(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline I32 zero_i32() { return set1_i32(0); }
inline I32 widen_s16(int16x8_t a) { return {vmovl_s16(vget_low_s16(a)), vmovl_high_s16(a)}; }
inline I32 load_i8_as_i32(const int8_t* p) { return widen_s16(vmovl_s8(vld1_s8(p))); }
inline I32 load_u8_as_i32(const uint8_t* p) { return widen_s16(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p)))); }
// The low nibbles of four bytes, then their high nibbles.
inline I32 load_nibbles_as_i32(const uint8_t* p) {
    uint32_t bytes;
    std::memcpy(&bytes, p, 4);
    const uint16x8_t words = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)));
    const uint32x4_t four = vmovl_u16(vget_low_u16(words));
    return {vreinterpretq_s32_u32(vandq_u32(four, vdupq_n_u32(15))), vreinterpretq_s32_u32(vshrq_n_u32(four, 4))};
}
inline I32 bit_and(I32 a, int mask) {
    return {vandq_s32(a.low, vdupq_n_s32(mask)), vandq_s32(a.high, vdupq_n_s32(mask))};
}
inline I32 mul_add(I32 a, I32 b, I32 c) { return {vmlaq_s32(c.low, a.low, b.low), vmlaq_s32(c.high, a.high, b.high)}; }
inline I32 add(I32 a, I32 b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
// Shifts are written with operators: intrinsics take a constant in the source, or give up the immediate form.
inline I32 shift_left(I32 a, int n) { return {a.low << vdupq_n_s32(n), a.high << vdupq_n_s32(n)}; }
inline I32 shift_right(I32 a, int n) { return {a.low >> vdupq_n_s32(n), a.high >> vdupq_n_s32(n)}; }
inline F32 to_f32(I32 a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
inline I32 to_i32(F32 a) { return {vcvtnq_s32_f32(a.low), vcvtnq_s32_f32(a.high)}; }
inline void store_i32(int32_t* p, I32 a) {
    vst1q_s32(p, a.low);
    vst1q_s32(p + 4, a.high);
}

// 2 ** a for whole a in -126..127
inline F32 exp2_whole(F32 a) {
    const I32 bits = shift_left(add(to_i32(a), set1_i32(127)), 23);
    return {vreinterpretq_f32_s32(bits.low), vreinterpretq_f32_s32(bits.high)};
}

// Sixteen 16-bit whole numbers, those of even and those of odd index: lane i of a dot product takes word i of both, so
// that it is four multiplications that accumulate. In order it would need as many and four additions of neighbours.
struct Words {
    uint16x8_t even, odd;
};

inline Words load_words(const void* p) {
    const uint16x8x2_t both = vld2q_u16(static_cast<const uint16_t*>(p));
    return {both.val[0], both.val[1]};
}
inline Words bit_and(Words a, int mask) {
    const uint16x8_t all = vdupq_n_u16(static_cast<uint16_t>(mask));
    return {vandq_u16(a.even, all), vandq_u16(a.odd, all)};
}
inline Words bit_or(Words a, Words b) { return {vorrq_u16(a.even, b.even), vorrq_u16(a.odd, b.odd)}; }
inline Words shift_right(Words a, int n) {  // fills with zeros
    const uint16x8_t by = vdupq_n_u16(static_cast<uint16_t>(n));
    return {a.even >> by, a.odd >> by};
}
inline Words shift_left(Words a, int n) {
    const uint16x8_t by = vdupq_n_u16(static_cast<uint16_t>(n));
    return {a.even << by, a.odd << by};
}
inline Words subtract(Words a, int x) {
    const uint16x8_t all = vdupq_n_u16(static_cast<uint16_t>(x));
    return {vsubq_u16(a.even, all), vsubq_u16(a.odd, all)};
}
// A byte of even index is the low half of a 16-bit lane, the next one is its high half.
inline Words widen_u8(const uint8_t* p) {
    const uint16x8_t pairs = vreinterpretq_u16_u8(vld1q_u8(p));
    return {vandq_u16(pairs, vdupq_n_u16(255)), vshrq_n_u16(pairs, 8)};
}
inline Words widen_i8(const int8_t* p) {
    const int16x8_t pairs = vreinterpretq_s16_s8(vld1q_s8(p));
    return {vreinterpretq_u16_s16(vshrq_n_s16(vshlq_n_s16(pairs, 8), 8)), vreinterpretq_u16_s16(vshrq_n_s16(pairs, 8))};
}
// The same two words in each of eight pairs. Multiplications take them from a lane of one register; GCC sees that for
// lanes 2 and 3, but copies lane 0 to a register of its own first.
inline Words broadcast_pair(const void* p) {
    uint32_t pair;
    std::memcpy(&pair, p, 4);
    const uint16x4_t words = vreinterpret_u16_u32(vdup_n_u32(pair));
    return {vdupq_lane_u16(words, 2), vdupq_lane_u16(words, 3)};
}
// Adds 16 to word i where bit i is set.
inline Words add_fifth_bits(Words a, uint16_t bits) {
    const uint16x8_t even = {1 << 0, 1 << 2, 1 << 4, 1 << 6, 1 << 8, 1 << 10, 1 << 12, 1 << 14};
    const uint16x8_t odd = vshlq_n_u16(even, 1), all = vdupq_n_u16(bits), fifth = vdupq_n_u16(16);
    return {vaddq_u16(a.even, vandq_u16(vtstq_u16(all, even), fifth)),
            vaddq_u16(a.odd, vandq_u16(vtstq_u16(all, odd), fifth))};
}
// Words of a and b in turn, of half of their columns each, in an order that only `in_order` knows.
inline Words interleave_low(Words a, Words b) { return {a.even, b.even}; }
inline Words interleave_high(Words a, Words b) { return {a.odd, b.odd}; }
// Sums over interleaved words, low and high, become those of columns 0..7 and 8..15: they are of the even columns and
// of the odd ones.
inline void in_order(I32& low, I32& high) {
    const I32 first = {vzip1q_s32(low.low, high.low), vzip2q_s32(low.low, high.low)};
    high = {vzip1q_s32(low.high, high.high), vzip2q_s32(low.high, high.high)};
    low = first;
}
// Lane i: the two numbers, rounded to 16 bits, as a pair of words.
inline I32 pair_of(F32 a, F32 b) {
    const I32 first = to_i32(a), second = to_i32(b);
    return {vsliq_n_s32(first.low, second.low, 16), vsliq_n_s32(first.high, second.high, 16)};
}
inline F32 first_half(Words a) { return to_f32(widen_s16(vreinterpretq_s16_u16(vzip1q_u16(a.even, a.odd)))); }
inline F32 second_half(Words a) { return to_f32(widen_s16(vreinterpretq_s16_u16(vzip2q_u16(a.even, a.odd)))); }

inline I32 multiply_add(uint16x8_t a, uint16x8_t b, I32 c) {
    const int16x8_t x = vreinterpretq_s16_u16(a), y = vreinterpretq_s16_u16(b);
    return {vmlal_s16(c.low, vget_low_s16(x), vget_low_s16(y)), vmlal_high_s16(c.high, x, y)};
}
// Lane i: c + products of words 2 i and 2 i + 1.
inline I32 dot(Words a, Words b, I32 c) { return multiply_add(a.odd, b.odd, multiply_add(a.even, b.even, c)); }

// Rounds 32 floats times `scale` to whole numbers; sums: of the first 16 and of the others.
inline void quantize_32(const float* x, float scale, int16_t* q, int32_t* sums) {
    const F32 by = set1(scale);
    for (int i = 0; i < 2; i++, x += 16, q += 16) {
        const I32 a = to_i32(mul(load(x), by)), b = to_i32(mul(load(x + 8), by));
        vst1q_s16(q, vqmovn_high_s32(vqmovn_s32(a.low), a.high));
        vst1q_s16(q + 8, vqmovn_high_s32(vqmovn_s32(b.low), b.high));
        const I32 all = add(a, b);
        sums[i] = vaddvq_s32(vaddq_s32(all.low, all.high));
    }
}

// Into the second-level cache.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace powerinfer::SIMD_NAMESPACE
