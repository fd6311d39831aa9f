// Layouts of GGML's quantized blocks, as they lie in a file (little endian, no padding).
#pragma once

#include <cstdint>
#include <cstring>

namespace powerinfer {

// GGML's type numbers.
enum class Type : int {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    BF16 = 30,
};
constexpr int kTypeSlots = 31;

// value[j] = d * (q[j] - 8); q[j] is the low nibble of qs[j] for j < 16, the high nibble of qs[j - 16] above.
struct BlockQ4_0 {
    uint16_t d;
    uint8_t qs[16];
};

// value[j] = d * q[j] + m; nibbles as in Q4_0.
struct BlockQ4_1 {
    uint16_t d, m;
    uint8_t qs[16];
};

// value[j] = d * (q[j] - 16); bit j of qh is bit 4 of q[j], the rest as in Q4_0.
struct BlockQ5_0 {
    uint16_t d;
    uint8_t qh[4];
    uint8_t qs[16];
};

// value[j] = d * q[j] + m; bits as in Q5_0.
struct BlockQ5_1 {
    uint16_t d, m;
    uint8_t qh[4];
    uint8_t qs[16];
};

// value[j] = d * q[j].
struct BlockQ8_0 {
    uint16_t d;
    int8_t qs[32];
};

// 256 values in eight sub-blocks of 32: value = d * factor * q - dmin * minimum. Factors and minima have 6 bits: with s =
// scales, of sub-block j < 4 they are s[j] & 63 and s[j + 4] & 63; of j >= 4 their low four bits are the low and the high
// nibble of s[j + 4], their high two bits are bits 6-7 of s[j - 4] and of s[j]. q of sub-blocks 2 i and 2 i + 1 are the low and
// the high nibbles of the 32 bytes from qs[32 i].
struct BlockQ4_K {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qs[128];
};

// As Q4_K, and bit j of qh[l] is bit 4 of value l of sub-block j.
struct BlockQ5_K {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
};

// The factors and minima of a block's scales, eight each.
inline void unpack_sixes(const uint8_t (&scales)[12], uint8_t* factors, uint8_t* minima) {
    uint32_t s[3];
    std::memcpy(s, scales, 12);
    const uint32_t f[2] = {s[0] & 0x3F3F3F3F, (s[2] & 0x0F0F0F0F) | (s[0] >> 2 & 0x30303030)};
    const uint32_t m[2] = {s[1] & 0x3F3F3F3F, (s[2] >> 4 & 0x0F0F0F0F) | (s[1] >> 2 & 0x30303030)};
    std::memcpy(factors, f, 8);
    std::memcpy(minima, m, 8);
}

// 256 values = d * scales[j / 16] * (q[j] - 32). In each half of 128, with l = 0..31: the low four bits of values l, l +
// 32, l + 64, l + 96 are ql[l] & 15, ql[l + 32] & 15, ql[l] >> 4, ql[l + 32] >> 4, their high two bits are bits 0-1, 2-3,
// 4-5, 6-7 of qh[l].
struct BlockQ6_K {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
};

static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22);
static_assert(sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176);
static_assert(sizeof(BlockQ5_1) == 24 && sizeof(BlockQ8_0) == 34 && sizeof(BlockQ6_K) == 210);

}  // namespace powerinfer
