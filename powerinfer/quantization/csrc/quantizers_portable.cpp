// For any processor.
#define SIMD_NAMESPACE portable
#define SIMD_WIDTH 4
#include "quantizers_body.h"

namespace powerinfer {
namespace quantization {
const QuantizerSet kPortable = portable::quantizers("portable");
}
}  // namespace powerinfer
