// Runs of elements (blocks, or sub-blocks of k-quants) side by side, one a lane of vector registers. Every lane
// computes on its own and in the order of its elements, so that the width of registers does not change a bit.
//
// Included once an instruction set, with SIMD_NAMESPACE and SIMD_WIDTH (floats a register) defined.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "half.h"
#include "quantizers.h"

namespace powerinfer {
namespace quantization {
namespace SIMD_NAMESPACE {

constexpr int kWidth = SIMD_WIDTH;
constexpr int kLanes = 16;  // of a tile: the sub-blocks of a Q6_K block, or of two Q4_K blocks
constexpr int kGroups = kLanes / kWidth;

typedef float Floats __attribute__((vector_size(kWidth * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kWidth * sizeof(float))));

inline Floats splat(float value) { return Floats{} + value; }
inline Floats lower(Floats a, Floats b) { return a < b ? a : b; }
inline Floats higher(Floats a, Floats b) { return a > b ? a : b; }
inline Floats magnitude(Floats a) { return higher(a, -a); }

// To whole numbers, ties to even; |a| must be below 2^22.
inline Floats rounded(Floats a) { return (a + 12582912.0f) - 12582912.0f; }

// Towards zero; |a| must be below 2^31.
inline Floats truncated(Floats a) { return __builtin_convertvector(__builtin_convertvector(a, Ints), Floats); }

// Whatever is as large overflows the 16-bit scales of every type.
constexpr float kTooLarge = 1e12f;
// A 16-bit scale cannot say a thing about a run whose numbers lie this close together.
constexpr float kTooSmall = 1e-20f;

// kSize elements of kLanes runs. Groups of kWidth lanes are handled one after the other.
template <int kSize>
struct Tile {
    alignas(64) float values[kSize][kLanes];
    alignas(64) uint8_t numbers[kLanes][kSize];  // what they are quantized to

    // `x` (kLanes, kSize). The lane of the first element that is not finite or too large, -1 if there is none.
    int load(const float* x) {
        for (int lane = 0; lane < kLanes; lane++) {
            for (int i = 0; i < kSize; i++) values[i][lane] = x[lane * kSize + i];
        }
        for (int lane = 0; lane < kLanes; lane++) {
            int bad = 0;
            for (int i = 0; i < kSize; i++) bad |= !(std::fabs(x[lane * kSize + i]) < kTooLarge);
            if (bad) return lane;
        }
        return -1;
    }

    Floats at(int group, int i) const {
        Floats v;
        std::memcpy(&v, &values[i][group * kWidth], sizeof v);
        return v;
    }

    void store(int group, int i, Floats q) {
        const Ints whole = __builtin_convertvector(q, Ints);
        for (int l = 0; l < kWidth; l++) numbers[group * kWidth + l][i] = static_cast<uint8_t>(whole[l]);
    }
};

inline Floats load_lanes(const float* values, int group) {
    Floats v;
    std::memcpy(&v, values + group * kWidth, sizeof v);
    return v;
}

inline void store_lanes(float* values, int group, Floats v) { std::memcpy(values + group * kWidth, &v, sizeof v); }

// Runs a type over n blocks, kLanes / Type::kRuns of them a tile. See Quantizer::run.
template <class Type>
int64_t run_tiles(const float* x, int64_t n, uint8_t* out) {
    constexpr int kBlocks = kLanes / Type::kRuns;
    constexpr int kBlockSize = Type::kRuns * Type::kSize;
    int64_t block = 0;
    for (; block + kBlocks <= n; block += kBlocks) {
        const int bad = Type::quantize(x + block * kBlockSize, out + block * Type::kBytes);
        if (bad >= 0) return block + bad;
    }
    if (block < n) {
        float rest[kBlocks * kBlockSize] = {};
        uint8_t bytes[kBlocks * Type::kBytes];
        std::memcpy(rest, x + block * kBlockSize, (n - block) * kBlockSize * sizeof(float));
        const int bad = Type::quantize(rest, bytes);
        if (bad >= 0) return block + bad;
        std::memcpy(out + block * Type::kBytes, bytes, (n - block) * Type::kBytes);
    }
    return -1;
}

}  // namespace SIMD_NAMESPACE
}  // namespace quantization
}  // namespace powerinfer
