// For any processor.
#define SIMD_NAMESPACE portable
#include "simd_portable.h"

#include "kernels_body.h"

namespace powerinfer {
const Kernels kPortable = portable::make_kernels("portable");
}
