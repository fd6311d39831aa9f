// Quantization of float32 blocks, one set of functions an instruction set. All sets give the same bytes.
#pragma once

#include <cstdint>

namespace powerinfer {
namespace quantization {

struct Quantizer {
    const char* name;
    int block_size;   // elements
    int block_bytes;
    // float32 (n, block_size) to uint8 (n, block_bytes), both contiguous. The index of the first block that has a
    // number that is not finite, or too large for the type's 16-bit scales; -1 if there is none.
    int64_t (*run)(const float* x, int64_t n, uint8_t* out);
};

constexpr int kTypes = 10;

struct QuantizerSet {
    const char* isa;
    Quantizer types[kTypes];
};

extern const QuantizerSet kPortable;
#ifdef POWERINFER_X86
extern const QuantizerSet kAvx2;
extern const QuantizerSet kAvx512;
#endif

}  // namespace quantization
}  // namespace powerinfer
