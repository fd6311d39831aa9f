#include "blocks_of_model.h"

namespace powerinfer {

void embed(Runtime& runtime, const Matrix& token_embd, float scale, const Matrix& position_embd, const int32_t* tokens,
           Hidden& out) {
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    for (int t = 0; t < out.n_tokens; t++) {
        if (tokens[t] < 0 || tokens[t] >= token_embd.n_rows) throw std::out_of_range("embedding: no such token");
        if (position_embd && (out.positions[t] < 0 || out.positions[t] >= position_embd.n_rows)) {
            throw std::out_of_range("embedding: no such position");
        }
    }
    float* position = position_embd ? runtime.scratch.unnormed.reserve(out.n_embd) : nullptr;
    for (int t = 0; t < out.n_tokens; t++) {
        float* x = out.row(t);
        token_embd.kernels->dequantize(token_embd.row(tokens[t]), 0, x, out.n_embd);
        if (scale != 1.0f) {
            for (int j = 0; j < out.n_embd; j++) x[j] *= scale;
        }
        if (!position_embd) continue;
        position_embd.kernels->dequantize(position_embd.row(out.positions[t]), 0, position, out.n_embd);
        for (int j = 0; j < out.n_embd; j++) x[j] += position[j];
    }
}

void head(Runtime& runtime, const Norm& norm, const Matrix& output, const Hidden& x, const int32_t* outputs,
          int n_outputs, float* logits) {
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    for (int i = 0; i < n_outputs; i++) {
        if (outputs[i] < 0 || outputs[i] >= x.n_tokens) throw std::out_of_range("head: no such row in the batch");
    }
    ActivationBuffer& normed = runtime.scratch.normed;
    normed.reserve(n_outputs, x.n_embd, output.takes_rounded());
    runtime.run(n_outputs, [&](Region& region) {
        region.for_each(n_outputs, 1, [&](int64_t i, int64_t) {
            norm.apply(runtime.kernels, x.row(outputs[i]), x.n_embd, normed.row(i));
            normed.round(runtime.kernels, i);
        });
        region.barrier();
        runtime.matmul(region, output, normed.view(), n_outputs, logits, output.n_rows);
    });
}

}  // namespace powerinfer
