// The table of an instruction set. Included with SIMD_NAMESPACE and SIMD_WIDTH defined.
#include "lanes.h"

#include "legacy.h"

#include "search.h"

#include "superblocks.h"

#include "kquants.h"

namespace powerinfer {
namespace quantization {
namespace SIMD_NAMESPACE {

template <class Type>
constexpr Quantizer quantizer(const char* name) {
    return {name, Type::kRuns * Type::kSize, Type::kBytes, &run_tiles<Type>};
}

constexpr QuantizerSet quantizers(const char* isa) {
    return {isa,
            {quantizer<Q4_0>("Q4_0"), quantizer<Q4_1>("Q4_1"), quantizer<Q5_0>("Q5_0"), quantizer<Q5_1>("Q5_1"),
             quantizer<Q8_0>("Q8_0"), quantizer<Q2_K>("Q2_K"), quantizer<Q3_K>("Q3_K"), quantizer<Q4_K>("Q4_K"),
             quantizer<Q5_K>("Q5_K"), quantizer<Q6_K>("Q6_K")}};
}

}  // namespace SIMD_NAMESPACE
}  // namespace quantization
}  // namespace powerinfer
