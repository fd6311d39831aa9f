// IEEE 754 binary16, in integer arithmetic: the same bits on every processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace powerinfer {
namespace quantization {

constexpr uint16_t kHalfInfinity = 0x7c00;

// Rounds to nearest, ties to even; infinite from 65520 on.
inline uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    const float size = std::fabs(value);
    if (size < 6.103515625e-05f) {
        // Subnormal, a multiple of 2^-24, which is the last place of a float32 in [0.5, 1): the addition rounds to it.
        const float shifted = size + 0.5f;
        std::memcpy(&bits, &shifted, 4);
        return static_cast<uint16_t>(sign | (bits & 0x7ff));
    }
    bits &= 0x7fffffff;
    if (bits >= 0x477ff000) return sign | kHalfInfinity;
    const uint32_t even = bits >> 13 & 1;
    return static_cast<uint16_t>(sign | ((bits - (112u << 23) + 0xfff + even) >> 13));
}

// `half` must be finite.
inline float from_half(uint16_t half) {
    const int exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                     : std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25);
    return half & 0x8000 ? -size : size;
}

inline void store_half(uint8_t* to, uint16_t half) {
    to[0] = static_cast<uint8_t>(half);
    to[1] = static_cast<uint8_t>(half >> 8);
}

}  // namespace quantization
}  // namespace powerinfer
