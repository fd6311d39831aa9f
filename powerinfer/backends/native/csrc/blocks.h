// Layouts of GGML's quantized blocks, as they lie in a file (little endian, no padding).
#pragma once

#include <cstdint>

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
static_assert(sizeof(BlockQ5_1) == 24 && sizeof(BlockQ8_0) == 34 && sizeof(BlockQ6_K) == 210);

}  // namespace powerinfer
