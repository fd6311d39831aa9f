// Part of kernels_body.h: float weights against float32 activations.

struct AsF32 {
    using Element = float;
    static F32 load8(const float* p) { return load(p); }
    static float one(float x) { return x; }
};
struct AsF16 {
    using Element = uint16_t;
    static F32 load8(const uint16_t* p) { return load_f16(p); }
    static float one(uint16_t x) { return f16_to_f32(x); }
};
struct AsBF16 {
    using Element = uint16_t;
    static F32 load8(const uint16_t* p) { return load_bf16(p); }
    static float one(uint16_t x) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float y;
        std::memcpy(&y, &bits, 4);
        return y;
    }
};

template <class W, int R, int T>
void float_tile(const uint8_t* const* rows, const Activations& a, const int32_t* tokens, int first, float* out,
                ptrdiff_t ld) {
    const int n = a.n_cols;
    const float* x[T];
    for (int t = 0; t < T; t++) x[t] = a.f + static_cast<ptrdiff_t>(tokens ? tokens[first + t] : first + t) * n;
    const typename W::Element* w[R];
    for (int r = 0; r < R; r++) w[r] = reinterpret_cast<const typename W::Element*>(rows[r]);
    F32 acc[R][T];
    for (int r = 0; r < R; r++) {
        for (int t = 0; t < T; t++) acc[r][t] = zero();
    }
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) {
        F32 v[R];
        for (int r = 0; r < R; r++) v[r] = W::load8(w[r] + j);
        for (int t = 0; t < T; t++) {
            const F32 xv = load(x[t] + j);
            for (int r = 0; r < R; r++) acc[r][t] = fma(v[r], xv, acc[r][t]);
        }
    }
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < R; r++) {
            float y = sum(acc[r][t]);
            for (int i = j; i < n; i++) y += W::one(w[r][i]) * x[t][i];
            out[(first + t) * ld + r] = y;
        }
    }
}

template <class W>
void float_matmul(const uint8_t* const* rows, int n_rows, const Activations& a, const int32_t* tokens, int n_tokens,
                  float* out, ptrdiff_t ld) {
    int r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        int t = 0;
        for (; t + 2 <= n_tokens; t += 2) float_tile<W, 4, 2>(rows + r, a, tokens, t, out + r, ld);
        for (; t < n_tokens; t++) float_tile<W, 4, 1>(rows + r, a, tokens, t, out + r, ld);
    }
    for (; r < n_rows; r++) {
        int t = 0;
        for (; t + 4 <= n_tokens; t += 4) float_tile<W, 1, 4>(rows + r, a, tokens, t, out + r, ld);
        for (; t < n_tokens; t++) float_tile<W, 1, 1>(rows + r, a, tokens, t, out + r, ld);
    }
}

template <class W>
void float_axpy(const uint8_t* const* rows, const float* scales, int n_rows, int first, float* y, int n) {
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) {
        F32 acc = load(y + j);
        for (int r = 0; r < n_rows; r++) {
            const auto* w = reinterpret_cast<const typename W::Element*>(rows[r]) + first;
            acc = fma(W::load8(w + j), set1(scales[r]), acc);
        }
        store(y + j, acc);
    }
    for (; j < n; j++) {
        for (int r = 0; r < n_rows; r++) {
            y[j] += W::one(reinterpret_cast<const typename W::Element*>(rows[r])[first + j]) * scales[r];
        }
    }
}

template <class W>
void float_dequantize(const uint8_t* row, int first, float* y, int n) {
    const auto* w = reinterpret_cast<const typename W::Element*>(row) + first;
    for (int j = 0; j < n; j++) y[j] = W::one(w[j]);
}
