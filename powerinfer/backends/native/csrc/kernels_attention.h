// Part of kernels_body.h: rows of the KV cache, and attention over them.

// One row: a key or a value of one head. load8 gives eight elements, to be multiplied by `scale` of their 32.
template <class W>
struct FloatRow {
    static constexpr bool kScaled = false;
    static constexpr int kBytes = sizeof(typename W::Element);
    static F32 load8(const uint8_t* row, int j) { return W::load8(reinterpret_cast<const typename W::Element*>(row) + j); }
    static float one(const uint8_t* row, int j) {
        return W::one(reinterpret_cast<const typename W::Element*>(row)[j]);
    }
    static float scale(const uint8_t*, int) { return 1.0f; }
};

struct Q8_0Row {
    static constexpr bool kScaled = true;
    static constexpr int kBytes = 0;  // of one element: there is no such thing
    static const BlockQ8_0& block(const uint8_t* row, int b) { return reinterpret_cast<const BlockQ8_0*>(row)[b]; }
    static F32 load8(const uint8_t* row, int j) {
        return to_f32(load_i8_as_i32(block(row, j / 32).qs + j % 32));
    }
    static float one(const uint8_t* row, int j) { return scale(row, j / 32) * block(row, j / 32).qs[j % 32]; }
    static float scale(const uint8_t* row, int b) { return f16_to_f32(block(row, b).d); }
};

void to_f32_row(const float* x, int n, uint8_t* y) { std::memcpy(y, x, sizeof(float) * n); }

void to_f16_row(const float* x, int n, uint8_t* row) {
    auto* y = reinterpret_cast<uint16_t*>(row);
    int j = 0;
    for (; j + F32::kLanes <= n; j += F32::kLanes) store_f16(y + j, load(x + j));
    for (; j < n; j++) y[j] = f32_to_f16(x[j]);
}

void to_q8_0_row(const float* x, int n, uint8_t* row) {
    auto* y = reinterpret_cast<BlockQ8_0*>(row);
    for (int b = 0; b < n / 32; b++, x += 32, y++) {
        F32 top = max(max(abs(load(x)), abs(load(x + 8))), max(abs(load(x + 16)), abs(load(x + 24))));
        const float scale = largest(top) / 127.0f;
        int16_t q[32];
        int32_t sums[2];
        quantize_32(x, scale > 0.0f ? 1.0f / scale : 0.0f, q, sums);
        for (int i = 0; i < 32; i++) y->qs[i] = static_cast<int8_t>(q[i]);
        y->d = f32_to_f16(scale);
    }
}

constexpr int kPositions = 64;  // a block of keys and values that stays in the cache while several queries use it

// scores[i * kPositions + p] = q[i] . row p, for I queries and P rows: each row is converted once for all queries.
template <class K, int I, int P>
inline void score_tile(const float* const* q, const uint8_t* k, ptrdiff_t row_bytes, int n, float* scores) {
    F32 acc[I][P];
    for (int i = 0; i < I; i++) {
        for (int p = 0; p < P; p++) acc[i][p] = zero();
    }
    int j = 0;
    if (K::kScaled) {
        for (; j + 32 <= n; j += 32) {
            for (int p = 0; p < P; p++) {
                const uint8_t* row = k + p * row_bytes;
                const F32 scale = set1(K::scale(row, j / 32));
                F32 part[I];
                for (int i = 0; i < I; i++) part[i] = zero();
                for (int c = j; c < j + 32; c += 8) {
                    const F32 key = K::load8(row, c);
                    for (int i = 0; i < I; i++) part[i] = fma(key, load(q[i] + c), part[i]);
                }
                for (int i = 0; i < I; i++) acc[i][p] = fma(part[i], scale, acc[i][p]);
            }
        }
    } else {
        for (; j + 8 <= n; j += 8) {
            F32 x[I];
            for (int i = 0; i < I; i++) x[i] = load(q[i] + j);
            for (int p = 0; p < P; p++) {
                const F32 key = K::load8(k + p * row_bytes, j);
                for (int i = 0; i < I; i++) acc[i][p] = fma(key, x[i], acc[i][p]);
            }
        }
    }
    for (int i = 0; i < I; i++) {
        for (int p = 0; p < P; p++) {
            float y = sum(acc[i][p]);
            for (int c = j; c < n; c++) y += q[i][c] * K::one(k + p * row_bytes, c);
            scores[i * kPositions + p] = y;
        }
    }
}

// out[i] = out[i] * keep[i] + sum over p < count of weights[i * kPositions + p] * row p, for I queries.
template <class V, int I>
inline void add_values(const uint8_t* v, ptrdiff_t row_bytes, int n, int count, const float* weights, const float* keep,
                       float* out) {
    int j = 0;
    for (; j + 16 <= n; j += 16) {
        F32 a[I], b[I];
        for (int i = 0; i < I; i++) {
            a[i] = mul(load(out + i * n + j), set1(keep[i]));
            b[i] = mul(load(out + i * n + j + 8), set1(keep[i]));
        }
        const uint8_t* row = v;
        for (int p = 0; p < count; p++, row += row_bytes) {
            const F32 low = V::load8(row, j), high = V::load8(row, j + 8);
            const float scale = V::kScaled ? V::scale(row, j / 32) : 1.0f;
            for (int i = 0; i < I; i++) {
                const float weight = weights[i * kPositions + p];
                const F32 w = set1(V::kScaled ? weight * scale : weight);
                a[i] = fma(low, w, a[i]);
                b[i] = fma(high, w, b[i]);
            }
        }
        for (int i = 0; i < I; i++) {
            store(out + i * n + j, a[i]);
            store(out + i * n + j + 8, b[i]);
        }
    }
    for (; j < n; j++) {
        for (int i = 0; i < I; i++) {
            float y = out[i * n + j] * keep[i];
            for (int p = 0; p < count; p++) y += weights[i * kPositions + p] * V::one(v + p * row_bytes, j);
            out[i * n + j] = y;
        }
    }
}

template <class K>
constexpr ptrdiff_t row_size(int n) {
    return K::kScaled ? n / 32 * static_cast<ptrdiff_t>(sizeof(BlockQ8_0)) : n * static_cast<ptrdiff_t>(K::kBytes);
}

template <class K, int I>
void key_scores(const float* const* q, const uint8_t* k, int n, int count, float* scores) {
    constexpr int P = I == 1 ? 4 : 2;
    const ptrdiff_t row_bytes = row_size<K>(n);
    int p = 0;
    for (; p + P <= count; p += P) score_tile<K, I, P>(q, k + p * row_bytes, row_bytes, n, scores + p);
    for (; p < count; p++) score_tile<K, I, 1>(q, k + p * row_bytes, row_bytes, n, scores + p);
}

template <class V, int I>
void value_sums(const uint8_t* v, int n, int count, const float* weights, const float* keep, float* out) {
    add_values<V, I>(v, row_size<V>(n), n, count, weights, keep, out);
}

// Turns scores hidden..count of one query and block into weights exp(score - maximum), the others into 0. Returns what its
// sums so far are to be multiplied by.
inline float soften(float* scores, int hidden, int count, float scale, float& max_so_far, float& sum_so_far) {
    float top = max_so_far;
    for (int p = hidden; p < count; p++) {
        scores[p] *= scale;
        top = scores[p] > top ? scores[p] : top;
    }
    const float keep = std::exp(max_so_far - top);
    const F32 center = set1(top);
    for (int p = 0; p < count; p += F32::kLanes) store(scores + p, exp(sub(load(scores + p), center)));
    for (int p = 0; p < hidden; p++) scores[p] = 0.0f;
    for (int p = count; p < kPositions; p++) scores[p] = 0.0f;
    F32 total = zero();
    for (int p = 0; p < kPositions; p += F32::kLanes) total = add(total, load(scores + p));
    sum_so_far = sum_so_far * keep + sum(total);
    max_so_far = top;
    return keep;
}

// Softmax over blocks of positions with a running maximum (Milakov and Gimelshein 2018, as in FlashAttention). Queries
// that read the same keys go through a block together, up to four at a time.
void attention(const AttentionArgs& args) {
    const int n = args.head_dim;
    int begin = args.n_hidden[0], end = 0;
    for (int i = 0; i < args.n_queries; i++) {
        args.max[i] = -INFINITY;
        args.sum[i] = 0.0f;
        begin = std::min(begin, args.n_hidden[i]);
        end = std::max(end, args.n_positions[i]);
    }
    std::memset(args.out, 0, sizeof(float) * n * args.n_queries);
    const ptrdiff_t k_bytes = args.keys->row_bytes(n), v_bytes = args.values->row_bytes(n);
    alignas(64) float scores[4 * kPositions];
    for (int start = begin / kPositions * kPositions; start < end; start += kPositions) {
        const uint8_t *k = args.k + start * k_bytes, *v = args.v + start * v_bytes;
        for (int first = 0; first < args.n_queries;) {
            const int left = args.n_queries - first;
            const int size = left >= 4 ? 2 : left >= 2 ? 1 : 0;  // 4, 2 or 1 queries
            int hidden[4], counts[4], count = 0;
            for (int i = 0; i < 1 << size; i++) {
                hidden[i] = std::max(args.n_hidden[first + i] - start, 0);
                counts[i] = std::min(std::max(args.n_positions[first + i] - start, 0), kPositions);
                count = std::max(count, counts[i]);
            }
            args.keys->scores[size](args.q + first, k, n, count, scores);
            float keep[4];
            for (int i = 0; i < 1 << size; i++) {
                float* mine = scores + i * kPositions;
                keep[i] = 1.0f;
                if (counts[i] > hidden[i]) {
                    keep[i] = soften(mine, hidden[i], counts[i], args.scale, args.max[first + i], args.sum[first + i]);
                } else {
                    std::memset(mine, 0, sizeof(float) * kPositions);
                }
            }
            args.values->values[size](v, n, count, scores, keep, args.out + static_cast<ptrdiff_t>(first) * n);
            first += 1 << size;
        }
    }
}

template <class K>
constexpr CacheKernels cache_kernels(void (*store)(const float*, int, uint8_t*)) {
    return {K::kScaled ? 32 : 1,
            static_cast<int>(row_size<K>(K::kScaled ? 32 : 1)),
            store,
            {key_scores<K, 1>, key_scores<K, 2>, key_scores<K, 4>},
            {value_sums<K, 1>, value_sums<K, 2>, value_sums<K, 4>}};
}
