// Scales for runs of numbers. Each takes the least squared error over a few candidates: rounding with a trial scale
// gives whole numbers, and for these the best scale (and minimum) has a closed form.
//
// Included once an instruction set, after lanes.h.

namespace powerinfer {
namespace quantization {
namespace SIMD_NAMESPACE {

// x ~ scale q - minimum with q in 0..kTop, scale and minimum >= 0.
struct Affine {
    Floats scale, minimum;
};

// `trials`: how many more (or fewer) than kTop steps the range is cut into.
template <int kSize, int kTop, int kTrials>
Affine search_affine(const Tile<kSize>& tile, int group, const float (&trials)[kTrials]) {
    Floats low = {}, high = tile.at(group, 0);
    for (int i = 0; i < kSize; i++) {
        low = lower(tile.at(group, i), low);
        high = higher(tile.at(group, i), high);
    }
    const Floats range = high - low;
    const Ints flat = range < kTooSmall;
    const Floats per_range = flat ? Floats{} : 1.0f / range;
    // From here on in units of the range, from low: y in 0..1, y ~ s q + b, and b <= cap as no minimum is negative.
    const Floats cap = -low * per_range;
    Floats y[kSize], sum_y = {}, sum_yy = {};
    for (int i = 0; i < kSize; i++) {
        y[i] = (tile.at(group, i) - low) * per_range;
        sum_y += y[i];
        sum_yy += y[i] * y[i];
    }
    const float n = kSize;
    Floats best = splat(HUGE_VALF), best_s = {}, best_b = {};
    // Rounds y * steps + shift and keeps the best s and b for these numbers, if they are the best so far.
    const auto consider = [&](Floats steps, Floats shift) {
        Floats sum_q = {}, sum_qq = {}, sum_yq = {};
        for (int i = 0; i < kSize; i++) {
            const Floats q = rounded(lower(higher(y[i] * steps + shift, Floats{}), splat(kTop)));
            sum_q += q;
            sum_qq += q * q;
            sum_yq += y[i] * q;
        }
        const Floats determinant = n * sum_qq - sum_q * sum_q;
        Floats s = (n * sum_yq - sum_y * sum_q) / determinant;
        Floats b = (sum_y - s * sum_q) / n;
        const Ints capped = (determinant <= 0.0f) | (b > cap);
        s = capped ? (sum_yq - cap * sum_q) / sum_qq : s;
        b = capped ? cap : b;
        const Floats error = sum_yy + s * (s * sum_qq + 2.0f * (b * sum_q - sum_yq)) + b * (n * b - 2.0f * sum_y);
        const Ints better = error < best;  // never of a flat run, whose error is not a number
        best = better ? error : best;
        best_s = better ? s : best_s;
        best_b = better ? b : best_b;
    };
    for (float trial : trials) consider(splat(kTop + trial), Floats{});
    for (int i = 0; i < 2; i++) {  // rounding with what was found may find better still
        const Floats steps = 1.0f / best_s;
        consider(steps, -best_b * steps);
    }
    return {higher(best_s * range, Floats{}), higher(-(low + best_b * range), Floats{})};
}

// x ~ scale q with q in -kHalf..kHalf - 1; the scale may be negative, which puts the end with one more number to the
// side of the largest element.
template <int kSize, int kHalf, int kTrials>
Floats search_symmetric(const Tile<kSize>& tile, int group, const float (&trials)[kTrials]) {
    Floats top = {}, size = {};
    for (int i = 0; i < kSize; i++) {
        const Floats x = tile.at(group, i);
        const Ints larger = magnitude(x) > size;
        top = larger ? x : top;
        size = larger ? magnitude(x) : size;
    }
    const Ints flat = size < kTooSmall;
    const Floats per_top = flat ? Floats{} : 1.0f / top;
    Floats y[kSize];
    for (int i = 0; i < kSize; i++) y[i] = tile.at(group, i) * per_top;
    Floats best = {}, scale = {};
    const auto consider = [&](Floats steps) {
        Floats sum_qq = {}, sum_yq = {};
        for (int i = 0; i < kSize; i++) {
            const Floats q = rounded(lower(higher(y[i] * steps, splat(-kHalf)), splat(kHalf - 1)));
            sum_qq += q * q;
            sum_yq += y[i] * q;
        }
        const Floats explained = sum_yq * sum_yq / sum_qq;  // of the sum of squares
        const Ints better = explained > best;
        best = better ? explained : best;
        scale = better ? sum_yq / sum_qq : scale;
    };
    for (float trial : trials) consider(splat(trial));
    for (int i = 0; i < 2; i++) consider(1.0f / scale);  // rounding with what was found may find better still
    return scale * top;
}

// The 16-bit scale by which `top` becomes `steps` or a little less, never so much more that it would have to be cut.
inline uint16_t super_scale(float top, float steps) {
    if (top == 0) return 0;
    uint16_t half = to_half(top / steps);
    if (std::fabs(from_half(half)) * (steps + 0.5f) < std::fabs(top)) half++;
    return half;
}

}  // namespace SIMD_NAMESPACE
}  // namespace quantization
}  // namespace powerinfer
