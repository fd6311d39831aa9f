// For x86-64 with AVX2, FMA and F16C.
#define SIMD_NAMESPACE avx2
#include "simd_x86.h"

#include "kernels_body.h"

namespace powerinfer {
const Kernels kAvx2 = avx2::make_kernels("avx2");
}
