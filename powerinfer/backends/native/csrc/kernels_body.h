// The kernels, once, in terms of the operations of a simd_*.h header. Each kernels_*.cpp defines SIMD_NAMESPACE (so that
// no function compiled for one processor is linked into the path of another), includes such a header, then this.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace powerinfer::SIMD_NAMESPACE {

#include "kernels_rows.h"

#include "kernels_packed.h"

#include "kernels_float.h"

#include "kernels_math.h"

#include "kernels_attention.h"

template <class Q>
constexpr TypeKernels quantized_kernels() {
    using P = typename PackedForm<Q>::Type;
    return {true,
            Q::kBlockSize,
            sizeof(typename Q::Block),
            quantized_matmul<Q>,
            quantized_axpy<Q>,
            quantized_dequantize<Q>,
            pack_rows<P>,
            packed_matmul<P>};
}

constexpr TypeKernels q6_k_kernels() {
    return {true,
            256,
            sizeof(BlockQ6_K),
            q6_k_matmul,
            q6_k_axpy,
            q6_k_dequantize,
            pack_rows<PackedQ6_K>,
            packed_matmul_q6_k};
}

template <class W>
constexpr TypeKernels float_kernels() {
    return {false, 1, sizeof(typename W::Element), float_matmul<W>, float_axpy<W>, float_dequantize<W>,
            nullptr, nullptr};
}

constexpr Kernels make_kernels(const char* name) {
    Kernels k{};
    k.name = name;
    const auto set = [&k](Type type, TypeKernels kernels) { k.types[static_cast<int>(type)] = kernels; };
    set(Type::F32, float_kernels<AsF32>());
    set(Type::F16, float_kernels<AsF16>());
    set(Type::BF16, float_kernels<AsBF16>());
    set(Type::Q4_0, quantized_kernels<Q4_0>());
    set(Type::Q4_1, quantized_kernels<Q4_1>());
    set(Type::Q5_0, quantized_kernels<Q5_0>());
    set(Type::Q5_1, quantized_kernels<Q5_1>());
    set(Type::Q8_0, quantized_kernels<Q8_0>());
    set(Type::Q4_K, quantized_kernels<Q4_K>());
    set(Type::Q5_K, quantized_kernels<Q5_K>());
    set(Type::Q6_K, q6_k_kernels());
    k.round = round;
    k.rms_norm = rms_norm;
    k.layer_norm = layer_norm;
    k.attention = attention;
    k.caches[static_cast<int>(Type::F32)] = cache_kernels<FloatRow<AsF32>>(to_f32_row);
    k.caches[static_cast<int>(Type::F16)] = cache_kernels<FloatRow<AsF16>>(to_f16_row);
    k.caches[static_cast<int>(Type::Q8_0)] = cache_kernels<Q8_0Row>(to_q8_0_row);
    k.silu = silu;
    k.gelu = gelu;
    k.gelu_erf = gelu_erf;
    k.relu = relu;
    k.sparse_rank_update = sparse_rank_update;
    return k;
}

}  // namespace powerinfer::SIMD_NAMESPACE
