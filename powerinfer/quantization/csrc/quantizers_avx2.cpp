// For x86-64 with AVX2.
#define SIMD_NAMESPACE avx2
#define SIMD_WIDTH 8
#include "quantizers_body.h"

namespace powerinfer {
namespace quantization {
const QuantizerSet kAvx2 = avx2::quantizers("avx2");
}
}  // namespace powerinfer
