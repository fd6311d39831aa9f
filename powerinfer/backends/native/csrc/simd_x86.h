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
inline F32 load_i8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
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

// 32 bytes, signed or not as the operation says.
struct Bytes {
    __m256i v;
};

inline Bytes load_bytes(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
inline void store_bytes(void* p, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.v); }
// Low nibbles of 16 bytes, then their high nibbles.
inline Bytes load_nibbles(const uint8_t* p) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
    return {_mm256_and_si256(both, _mm256_set1_epi8(15))};
}
// Adds 16 to byte j where bit j of the 32 at p is set.
inline Bytes add_fifth_bits(Bytes a, const uint8_t* p) {
    int bits;
    std::memcpy(&bits, p, 4);
    const __m256i spread = _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread);
    const __m256i mask = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask);
    return {_mm256_or_si256(a.v, _mm256_and_si256(set, _mm256_set1_epi8(16)))};
}
inline Bytes and_all(Bytes a, uint8_t mask) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(static_cast<char>(mask)))}; }
template <int N>
inline Bytes shift_right(Bytes a) {
    return and_all({_mm256_srli_epi16(a.v, N)}, 0xFF >> N);
}
template <int N>
inline Bytes shift_left(Bytes a) {
    return and_all({_mm256_slli_epi16(a.v, N)}, static_cast<uint8_t>(0xFF << N));
}
inline Bytes bit_or(Bytes a, Bytes b) { return {_mm256_or_si256(a.v, b.v)}; }
inline Bytes sub_all(Bytes a, uint8_t x) { return {_mm256_sub_epi8(a.v, _mm256_set1_epi8(static_cast<char>(x)))}; }

// Eight partial sums of products of 32 bytes; lanes 0..3 hold bytes 0..15, lanes 4..7 bytes 16..31.
// a unsigned and at most 127, so that no pair overflows 16 bits; b signed.
inline F32 dot_us(Bytes a, Bytes b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return {_mm256_cvtepi32_ps(_mm256_dpbusd_epi32(_mm256_setzero_si256(), a.v, b.v))};
#else
    const __m256i pairs = _mm256_maddubs_epi16(a.v, b.v);
    return {_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
#endif
}
// Both signed: |a| times b with a's sign. b is at least -127.
inline F32 dot_ss(Bytes a, Bytes b) { return dot_us({_mm256_sign_epi8(a.v, a.v)}, {_mm256_sign_epi8(b.v, a.v)}); }

// The 8 bytes 8 I .. 8 I + 7, signed.
template <int I>
inline F32 widen(Bytes a) {
    const __m128i half = I < 2 ? _mm256_castsi256_si128(a.v) : _mm256_extracti128_si256(a.v, 1);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(I % 2 ? _mm_srli_si128(half, 8) : half))};
}

// Eight whole numbers.
struct I32 {
    __m256i v;
};

inline I32 zero_i32() { return {_mm256_setzero_si256()}; }
inline I32 load_i8_as_i32(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline I32 mul_add(I32 a, I32 b, I32 c) { return {_mm256_add_epi32(_mm256_mullo_epi32(a.v, b.v), c.v)}; }
inline I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }

// The same four bytes in each of eight lanes.
inline Bytes broadcast4(const int8_t* p) {
    int four;
    std::memcpy(&four, p, 4);
    return {_mm256_set1_epi32(four)};
}

// Sums of products of bytes, a lane the products of four. Without VNNI the running sum is of pairs, in 16 bits: with
// |b| <= 127 it holds 8 steps of |a| <= 15, 4 of |a| <= 32, 1 of |a| <= 128 before `dot_end`.
struct DotSum {
    __m256i v;
};

inline DotSum dot_begin() { return {_mm256_setzero_si256()}; }
inline DotSum dot_more_us(DotSum sum, Bytes a, Bytes b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return {_mm256_dpbusd_epi32(sum.v, a.v, b.v)};
#else
    return {_mm256_add_epi16(sum.v, _mm256_maddubs_epi16(a.v, b.v))};
#endif
}
inline DotSum dot_more_ss(DotSum sum, Bytes a, Bytes b) {
    return dot_more_us(sum, {_mm256_sign_epi8(a.v, a.v)}, {_mm256_sign_epi8(b.v, a.v)});
}
inline I32 dot_end(DotSum sum) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return {sum.v};
#else
    return {_mm256_madd_epi16(sum.v, _mm256_set1_epi16(1))};
#endif
}

// Rounds 32 floats times `scale` to int8 and returns their sum.
inline int quantize_32(const float* x, float scale, int8_t* q) {
    const __m256 by = _mm256_set1_ps(scale);
    __m256i part[4];
    for (int i = 0; i < 4; i++) part[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), by));
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(part[0], part[1]), _mm256_packs_epi32(part[2], part[3]));
    // packs works in 128-bit halves: put the eight groups of four back in order
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_permutevar8x32_epi32(packed, order));
    const __m256i all = _mm256_add_epi32(_mm256_add_epi32(part[0], part[1]), _mm256_add_epi32(part[2], part[3]));
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    const __m128i quarter = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xB1)));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace powerinfer::SIMD_NAMESPACE
