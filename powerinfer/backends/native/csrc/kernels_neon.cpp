// For AArch64, all of which have NEON.
#define SIMD_NAMESPACE neon
#include "simd_neon.h"

#include "kernels_body.h"

namespace powerinfer {
const Kernels kNeon = neon::make_kernels("neon");
}
