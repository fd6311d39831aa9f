// The Python module: one call quantizes a run of blocks, with the best instruction set that the processor has.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "quantizers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace powerinfer {
namespace quantization {
namespace {

using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// From the best to the one that always runs.
std::vector<const QuantizerSet*> sets() {
    std::vector<const QuantizerSet*> list;
#ifdef POWERINFER_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) list.push_back(&kAvx512);
    if (__builtin_cpu_supports("avx2")) list.push_back(&kAvx2);
#endif
    list.push_back(&kPortable);
    return list;
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const QuantizerSet* set : sets()) names.emplace_back(set->isa);
    return names;
}

const Quantizer& find(const std::string& type, const std::string& isa) {
    for (const QuantizerSet* set : sets()) {
        if (!isa.empty() && isa != set->isa) continue;
        for (const Quantizer& quantizer : set->types) {
            if (type == quantizer.name) return quantizer;
        }
        throw std::invalid_argument("nothing is quantized to this type: " + type);
    }
    throw std::invalid_argument("this processor has no such instruction set: " + isa);
}

int64_t quantize(const std::string& type, const Floats2& values, const BytesOut& out, const std::string& isa) {
    const Quantizer& quantizer = find(type, isa);
    if (values.shape(1) != static_cast<size_t>(quantizer.block_size) || out.shape(0) != values.shape(0) ||
        out.shape(1) != static_cast<size_t>(quantizer.block_bytes)) {
        throw std::invalid_argument("values and out must have a row a block, of the type's elements and bytes");
    }
    const nb::gil_scoped_release released;
    return quantizer.run(values.data(), static_cast<int64_t>(values.shape(0)), out.data());
}

}  // namespace
}  // namespace quantization
}  // namespace powerinfer

NB_MODULE(_quantize, m) {
    using namespace powerinfer::quantization;

    m.doc() = "C++ kernels that quantize.";
    m.def("instruction_sets", &instruction_sets, "Names of the instruction sets that this processor runs, best first.");
    m.def("quantize", &quantize, "type"_a, "values"_a, "out"_a, "isa"_a = "",
          "float32 (n, block size) to uint8 (n, block bytes), without the GIL. isa: '' for the best; all give the same.\n"
          "Returns the index of the first block with a number that is not finite or too large for the type's 16-bit\n"
          "scales, after which `out` is unfinished; -1 if there is none.");
}
