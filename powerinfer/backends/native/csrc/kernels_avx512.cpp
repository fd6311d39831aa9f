// For x86-64 with AVX-512 VL and VNNI: the same 256-bit operations, with 32 registers and one-instruction int8 dots.
#define SIMD_NAMESPACE avx512
#include "simd_x86.h"

#include "kernels_body.h"

namespace powerinfer {
const Kernels kAvx512 = avx512::make_kernels("avx512");
}
