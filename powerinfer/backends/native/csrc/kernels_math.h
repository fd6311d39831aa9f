// Part of kernels_body.h: activations, norms and the down projection of a batch.

void round(const float* x, int n, int16_t* q, float* d, float* s, int32_t* h) {
    for (int b = 0; b < n / 32; b++, x += 32, q += 32) {
        F32 top = max(max(abs(load(x)), abs(load(x + 8))), max(abs(load(x + 16)), abs(load(x + 24))));
        const float scale = largest(top) / kActivationMax;
        quantize_32(x, scale > 0.0f ? 1.0f / scale : 0.0f, q, h + 2 * b);
        d[b] = scale;
        s[b] = scale * static_cast<float>(h[2 * b] + h[2 * b + 1]);
    }
}

template <class F>
float reduce(const float* x, int n, F f) {
    F32 acc = zero();
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) acc = add(acc, f(load(x + j)));
    float y = sum(acc);
    for (; j < n; j++) y += largest(f(set1(x[j])));
    return y;
}

inline void scale_and_shift(const float* x, float mean, float scale, const float* weight, const float* bias, int n,
                            float* y) {
    for (int j = 0; j < n; j++) y[j] = (x[j] - mean) * scale * weight[j] + (bias ? bias[j] : 0.0f);
}

void rms_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* y) {
    const float square = reduce(x, n, [](F32 v) { return mul(v, v); });
    scale_and_shift(x, 0.0f, 1.0f / std::sqrt(square / n + eps), weight, bias, n, y);
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* y) {
    const float mean = reduce(x, n, [](F32 v) { return v; }) / n;
    const F32 center = set1(mean);
    const float variance = reduce(x, n, [=](F32 v) { return mul(sub(v, center), sub(v, center)); }) / n;
    scale_and_shift(x, mean, 1.0f / std::sqrt(variance + eps), weight, bias, n, y);
}

// exp(x) = 2^k e^r with |r| <= ln(2) / 2; the polynomial is Cephes' expf (error below 2 ulp). Below -87 the result is
// about 1e-38, not zero.
inline F32 exp(F32 x) {
    x = min(max(x, set1(-87.0f)), set1(88.0f));
    const F32 k = round(mul(x, set1(1.44269504f)));
    F32 r = fma(k, set1(-0.693359375f), x);
    r = fma(k, set1(2.12194440e-4f), r);
    F32 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return mul(p, exp2_whole(k));
}

inline F32 silu_of(F32 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// The tanh form, as llama.cpp has it: x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))).
inline F32 gelu_of(F32 x) {
    const F32 cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    return div(x, add(set1(1.0f), exp(mul(cubic, set1(-1.5957691216057308f)))));
}

// (x + |x| erf(|x| / sqrt(2))) / 2, with erf as Abramowitz and Stegun 7.1.26 have it (error below 1.5e-7).
inline F32 gelu_erf_of(F32 x) {
    const F32 size = abs(x), z = mul(size, set1(0.70710678f));
    const F32 t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
    F32 p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    const F32 erf = sub(set1(1.0f), mul(mul(p, t), exp(sub(zero(), mul(z, z)))));
    return mul(fma(size, erf, x), set1(0.5f));
}

template <class F>
void in_place(float* x, int n, F f) {
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) store(x + j, f(load(x + j)));
    if (j < n) {
        float tail[F32::kLanes] = {};
        std::memcpy(tail, x + j, sizeof(float) * (n - j));
        store(tail, f(load(tail)));
        std::memcpy(x + j, tail, sizeof(float) * (n - j));
    }
}

void silu(float* x, int n) { in_place(x, n, silu_of); }
void gelu(float* x, int n) { in_place(x, n, gelu_of); }
void gelu_erf(float* x, int n) { in_place(x, n, gelu_erf_of); }
void relu(float* x, int n, float threshold) {
    if (threshold == 0.0f) return in_place(x, n, [](F32 v) { return max(v, zero()); });
    for (int j = 0; j < n; j++) x[j] = x[j] > threshold ? x[j] : 0.0f;
}

void sparse_rank_update(const float* h, ptrdiff_t ld_h, int n_tokens, const float* w, int n_rows, int n, float* y,
                        ptrdiff_t ld_y) {
    for (int t = 0; t < n_tokens; t++, h += ld_h, y += ld_y) {
        int active[256];
        int n_active = 0;
        for (int i = 0; i < n_rows; i++) {
            active[n_active] = i;
            n_active += h[i] != 0.0f;
        }
        if (n_active == 0) continue;
        int j = 0;
        for (; j + 32 <= n; j += 32) {
            F32 acc[4];
            for (int i = 0; i < 4; i++) acc[i] = load(y + j + 8 * i);
            for (int k = 0; k < n_active; k++) {
                const F32 scale = set1(h[active[k]]);
                const float* at = w + static_cast<ptrdiff_t>(active[k]) * n + j;
                for (int i = 0; i < 4; i++) acc[i] = fma(load(at + 8 * i), scale, acc[i]);
            }
            for (int i = 0; i < 4; i++) store(y + j + 8 * i, acc[i]);
        }
        for (; j < n; j++) {
            for (int k = 0; k < n_active; k++) y[j] += h[active[k]] * w[static_cast<ptrdiff_t>(active[k]) * n + j];
        }
    }
}
