#include <cstring>

#include "kernels.h"

namespace powerinfer {
namespace {

struct Candidate {
    const Kernels* kernels;
    bool runs_here;
};

// From the best to the one that always runs.
void candidates(Candidate (&list)[3]) {
#ifdef POWERINFER_X86
    __builtin_cpu_init();
    // Every processor with AVX2 and FMA has F16C, which older compilers cannot ask for.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    list[0] = {&kAvx512, avx512};
    list[1] = {&kAvx2, avx2};
#elif defined(POWERINFER_NEON)
    list[0] = {&kNeon, true};  // part of every AArch64 processor
    list[1] = {nullptr, false};
#else
    list[0] = list[1] = {nullptr, false};
#endif
    list[2] = {&kPortable, true};
}

}  // namespace

const Kernels* best_kernels() {
    Candidate list[3];
    candidates(list);
    for (const Candidate& c : list) {
        if (c.runs_here) return c.kernels;
    }
    return &kPortable;
}

const Kernels* find_kernels(const char* name) {
    Candidate list[3];
    candidates(list);
    for (const Candidate& c : list) {
        if (c.runs_here && std::strcmp(c.kernels->name, name) == 0) return c.kernels;
    }
    return nullptr;
}

}  // namespace powerinfer
