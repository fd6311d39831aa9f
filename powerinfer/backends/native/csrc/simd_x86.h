// The vector operations that the kernels are written in, for AVX2 + FMA + F16C, and with VNNI where the unit that
// includes this is compiled for it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace powerinfer::SIMD_NAMESPACE {

inline float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t f32_to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

struct F32 {
    static constexpr int kLanes = 8;
    __m256 v;
};

inline F32 zero() { return {_mm256_setzero_ps()}; }
inline F32 set1(float x) { return {_mm256_set1_ps(x)}; }
inline F32 halves(float low, float high) { return {_mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low))}; }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F32 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Eight numbers that lie `Stride` bytes apart.
template <int Stride>
inline F32 load_f16_strided(const void* p) {
    const auto at = [p](int i) {
        short h;
        std::memcpy(&h, static_cast<const char*>(p) + i * Stride, 2);
        return h;
    };
    return {_mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)))};
}
inline F32 load_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }
inline void store_f16(uint16_t* p, F32 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F32 round(F32 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2 ** a for whole a in -126..127
inline F32 exp2_whole(F32 a) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(a.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
}
inline float sum(F32 a) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline float largest(F32 a) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}

// Eight whole numbers.
struct I32 {
    __m256i v;
};

inline I32 zero_i32() { return {_mm256_setzero_si256()}; }
inline I32 set1_i32(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline I32 load_i8_as_i32(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline I32 load_u8_as_i32(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
// The low nibbles of four bytes, then their high nibbles.
inline I32 load_nibbles_as_i32(const uint8_t* p) {
    int bytes;
    std::memcpy(&bytes, p, 4);
    const __m128i four = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(bytes));
    return {_mm256_set_m128i(_mm_srli_epi32(four, 4), _mm_and_si128(four, _mm_set1_epi32(15)))};
}
inline I32 bit_and(I32 a, int mask) { return {_mm256_and_si256(a.v, _mm256_set1_epi32(mask))}; }
inline I32 shift_left(I32 a, int n) { return {_mm256_slli_epi32(a.v, n)}; }
inline I32 mul_add(I32 a, I32 b, I32 c) { return {_mm256_add_epi32(_mm256_mullo_epi32(a.v, b.v), c.v)}; }
inline I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I32 shift_right(I32 a, int n) { return {_mm256_srai_epi32(a.v, n)}; }
inline F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }

// Sixteen 16-bit whole numbers.
struct Words {
    __m256i v;
};

inline Words load_words(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
inline Words widen_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Words widen_i8(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// The same two words in each of eight pairs.
inline Words broadcast_pair(const void* p) {
    int pair;
    std::memcpy(&pair, p, 4);
    return {_mm256_set1_epi32(pair)};
}
inline Words bit_and(Words a, int mask) { return {_mm256_and_si256(a.v, _mm256_set1_epi16(static_cast<short>(mask)))}; }
inline Words bit_or(Words a, Words b) { return {_mm256_or_si256(a.v, b.v)}; }
inline Words shift_right(Words a, int n) { return {_mm256_srli_epi16(a.v, n)}; }  // fills with zeros
inline Words shift_left(Words a, int n) { return {_mm256_slli_epi16(a.v, n)}; }
inline Words subtract(Words a, int x) { return {_mm256_sub_epi16(a.v, _mm256_set1_epi16(static_cast<short>(x)))}; }
// Adds 16 to word i where bit i is set.
inline Words add_fifth_bits(Words a, uint16_t bits) {
    const __m256i mask = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    const __m256i all = _mm256_set1_epi16(static_cast<short>(bits));
    const __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(all, mask), mask);
    return {_mm256_add_epi16(a.v, _mm256_and_si256(set, _mm256_set1_epi16(16)))};
}
// Words of a and b in turn, of half of their columns each, in an order that only `in_order` knows.
inline Words interleave_low(Words a, Words b) { return {_mm256_unpacklo_epi16(a.v, b.v)}; }
inline Words interleave_high(Words a, Words b) { return {_mm256_unpackhi_epi16(a.v, b.v)}; }
// Sums over interleaved words, low and high, become those of columns 0..7 and 8..15: unpacking works in 128-bit halves.
inline void in_order(I32& low, I32& high) {
    const __m256i first = _mm256_permute2x128_si256(low.v, high.v, 0x20);
    high.v = _mm256_permute2x128_si256(low.v, high.v, 0x31);
    low.v = first;
}
// Lane i: the two numbers, rounded to 16 bits, as a pair of words.
inline I32 pair_of(F32 a, F32 b) {
    const __m256i high = _mm256_slli_epi32(_mm256_cvtps_epi32(b.v), 16);
    return {_mm256_blend_epi16(_mm256_cvtps_epi32(a.v), high, 0xAA)};
}
inline void store_i32(int32_t* p, I32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
inline F32 first_half(Words a) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(a.v)))};
}
inline F32 second_half(Words a) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(a.v, 1)))};
}

// Lane i: c + products of words 2 i and 2 i + 1.
inline I32 dot(Words a, Words b, I32 c) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return {_mm256_dpwssd_epi32(c.v, a.v, b.v)};
#else
    return {_mm256_add_epi32(c.v, _mm256_madd_epi16(a.v, b.v))};
#endif
}

// Rounds 32 floats times `scale` to whole numbers; sums: of the first 16 and of the others.
inline void quantize_32(const float* x, float scale, int16_t* q, int32_t* sums) {
    const __m256 by = _mm256_set1_ps(scale);
    for (int i = 0; i < 2; i++) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * i), by));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * i + 8), by));
        // packs works in 128-bit halves: put the four groups of four back in order
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 16 * i), packed);
        const __m256i all = _mm256_add_epi32(low, high);
        const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        const __m128i quarter = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
        sums[i] = _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xB1)));
    }
}

// Into the second-level cache, which keeps more requests under way than the first (8 against 11 GB/s of random rows).
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace powerinfer::SIMD_NAMESPACE
