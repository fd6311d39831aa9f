// For x86-64 with AVX-512F.
#define SIMD_NAMESPACE avx512
#define SIMD_WIDTH 16
#include "quantizers_body.h"

namespace powerinfer {
namespace quantization {
const QuantizerSet kAvx512 = avx512::quantizers("avx512");
}
}  // namespace powerinfer
