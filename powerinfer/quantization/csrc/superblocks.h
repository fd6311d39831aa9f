// Blocks of runs whose scales are whole numbers times the block's own 16-bit ones, as k-quants have them.
//
// 1. Each run's own scale (and minimum), as in search.h. 2. The block's 16-bit scales, from the largest of these.
// 3. Each run's whole scale (and minimum), of a few about the wanted one those with the least error, and its numbers.
// 4. The 16-bit scales again, by least squares for the numbers found.
//
// Included once an instruction set, after search.h.

namespace powerinfer {
namespace quantization {
namespace SIMD_NAMESPACE {

// What a run of a tile got: whole scale and minimum; sums over its numbers q, for step 4.
struct Runs {
    float scale[kLanes], minimum[kLanes];
    float sum_q[kLanes], sum_qq[kLanes], sum_xq[kLanes], sum_x[kLanes];
};

inline bool is_finite(uint16_t half) { return (half & kHalfInfinity) != kHalfInfinity; }

// Scale and minimum that are whole numbers 0..kScaleTop times the block's 16-bit ones.
template <int kRunsABlock, int kSizeARun, int kTop, int kScaleTop>
struct AffineBlock {
    static constexpr int kRuns = kRunsABlock, kSize = kSizeARun;
    using Block = Tile<kSize>;

    struct Result {
        Runs runs{};
        uint16_t d[kLanes / kRuns], dmin[kLanes / kRuns];
    };

    // Fills the tile's numbers. `steps`: what the largest scale and minimum of a block become, at most, to try.
    // The first block whose 16-bit scales overflow, -1 if there is none.
    template <int kTrials, int kSteps>
    static int solve(Block& tile, const float (&trials)[kTrials], const int (&steps)[kSteps], Result& result) {
        float scale[kLanes], minimum[kLanes], best[kLanes / kRuns];
        for (int g = 0; g < kGroups; g++) {
            const Affine found = search_affine<kSize, kTop>(tile, g, trials);
            store_lanes(scale, g, found.scale);
            store_lanes(minimum, g, found.minimum);
        }
        for (float& error : best) error = HUGE_VALF;
        for (int n : steps) {
            Result trial;
            float d[kLanes], dmin[kLanes], error[kLanes];
            for (int block = 0; block < kLanes / kRuns; block++) {
                trial.d[block] = super_scale(largest(scale + block * kRuns), n);
                trial.dmin[block] = super_scale(largest(minimum + block * kRuns), n);
                if (!is_finite(trial.d[block]) || !is_finite(trial.dmin[block])) return block;
                std::fill_n(d + block * kRuns, kRuns, from_half(trial.d[block]));
                std::fill_n(dmin + block * kRuns, kRuns, from_half(trial.dmin[block]));
            }
            for (int g = 0; g < kGroups; g++) choose(tile, g, scale, minimum, d, dmin, trial.runs, error);
            for (int block = 0; block < kLanes / kRuns; block++) keep_better(trial, error, block, best, result);
        }
        for (int block = 0; block < kLanes / kRuns; block++) {
            std::fill_n(scale + block * kRuns, kRuns, from_half(result.d[block]));
            std::fill_n(minimum + block * kRuns, kRuns, from_half(result.dmin[block]));
        }
        for (int g = 0; g < kGroups; g++) store_numbers(tile, g, scale, minimum, result.runs);
        for (int block = 0; block < kLanes / kRuns; block++) {
            refit(result.runs, block, result.d[block], result.dmin[block]);
        }
        return -1;
    }

    static float largest(const float* values) { return *std::max_element(values, values + kRuns); }

    static void keep_better(const Result& trial, const float* errors, int block, float* best, Result& result) {
        const int first = block * kRuns;
        const float error = std::accumulate(errors + first, errors + first + kRuns, 0.0f);
        if (!(error < best[block])) return;
        best[block] = error;
        result.d[block] = trial.d[block];
        result.dmin[block] = trial.dmin[block];
        std::copy_n(trial.runs.scale + first, kRuns, result.runs.scale + first);
        std::copy_n(trial.runs.minimum + first, kRuns, result.runs.minimum + first);
    }

    // Step 3, of one group: whole scales and minima near the wanted ones.
    static void choose(const Block& tile, int g, const float* wanted_scale, const float* wanted_minimum,
                       const float* unit_scale, const float* unit_minimum, Runs& runs, float* errors) {
        const Floats d = load_lanes(unit_scale, g), dmin = load_lanes(unit_minimum, g);
        const Floats scale = nearest(load_lanes(wanted_scale, g), d);
        const Floats minimum = nearest(load_lanes(wanted_minimum, g), dmin);
        Floats best = splat(HUGE_VALF), best_scale = {}, best_minimum = {};
        for (float ds = -1; ds <= 1; ds++) {
            const Floats whole_scale = within(scale + ds);
            const Floats step = d * whole_scale, per_step = step > 0.0f ? 1.0f / step : Floats{};
            for (float dm = -1; dm <= 1; dm++) {
                const Floats whole_minimum = within(minimum + dm);
                const Floats offset = dmin * whole_minimum;
                Floats error = {};
                for (int i = 0; i < kSize; i++) {
                    const Floats y = tile.at(g, i) + offset;
                    const Floats off = y - step * number(y * per_step);
                    error += off * off;
                }
                const Ints better = error < best;
                best = better ? error : best;
                best_scale = better ? whole_scale : best_scale;
                best_minimum = better ? whole_minimum : best_minimum;
            }
        }
        store_lanes(runs.scale, g, best_scale);
        store_lanes(runs.minimum, g, best_minimum);
        store_lanes(errors, g, best);
    }

    static void store_numbers(Block& tile, int g, const float* d, const float* dmin, Runs& runs) {
        const Floats step = load_lanes(d, g) * load_lanes(runs.scale, g);
        const Floats offset = load_lanes(dmin, g) * load_lanes(runs.minimum, g);
        const Floats per_step = step > 0.0f ? 1.0f / step : Floats{};
        Floats sum_q = {}, sum_qq = {}, sum_xq = {}, sum_x = {};
        for (int i = 0; i < kSize; i++) {
            const Floats x = tile.at(g, i), q = number((x + offset) * per_step);
            sum_q += q;
            sum_qq += q * q;
            sum_xq += x * q;
            sum_x += x;
            tile.store(g, i, q);
        }
        store_lanes(runs.sum_q, g, sum_q);
        store_lanes(runs.sum_qq, g, sum_qq);
        store_lanes(runs.sum_xq, g, sum_xq);
        store_lanes(runs.sum_x, g, sum_x);
    }

    // Step 4: the minimum of sum (d a - dmin m - x)^2 over a block, where a = scale q.
    static void refit(const Runs& runs, int block, uint16_t& half_d, uint16_t& half_dmin) {
        double aa = 0, am = 0, mm = 0, xa = 0, xm = 0;
        for (int lane = block * kRuns; lane < (block + 1) * kRuns; lane++) {
            const double s = runs.scale[lane], m = runs.minimum[lane];
            aa += s * s * runs.sum_qq[lane];
            am += s * m * runs.sum_q[lane];
            mm += m * m * kSize;
            xa += s * runs.sum_xq[lane];
            xm += m * runs.sum_x[lane];
        }
        const auto error = [&](double d, double dmin) {  // less the sum of squares
            return d * d * aa - 2 * d * dmin * am + dmin * dmin * mm - 2 * d * xa + 2 * dmin * xm;
        };
        double d = aa > 0 ? xa / aa : 0, dmin = 0;
        const double determinant = aa * mm - am * am;
        if (determinant > 1e-9 * aa * mm) {
            d = (xa * mm - xm * am) / determinant;
            dmin = (xa * am - xm * aa) / determinant;
        } else if (mm > 0) {
            return;
        }
        if (d < 0 || dmin < 0) return;
        const uint16_t new_d = to_half(static_cast<float>(d)), new_dmin = to_half(static_cast<float>(dmin));
        if (!is_finite(new_d) || !is_finite(new_dmin)) return;
        if (error(from_half(new_d), from_half(new_dmin)) < error(from_half(half_d), from_half(half_dmin))) {
            half_d = new_d;
            half_dmin = new_dmin;
        }
    }

    static Floats within(Floats scale) { return lower(higher(scale, Floats{}), splat(kScaleTop)); }
    static Floats nearest(Floats wanted, Floats unit) {
        return unit > 0.0f ? rounded(lower(wanted / unit, splat(kScaleTop))) : Floats{};
    }
    static Floats number(Floats y) { return rounded(lower(higher(y, Floats{}), splat(kTop))); }
};

// Scale that is a whole number -kScaleHalf..kScaleHalf - 1 times the block's 16-bit one. 16 runs of 16.
template <int kHalf, int kScaleHalf>
struct SymmetricBlock {
    static constexpr int kRuns = 16, kSize = 16;
    using Block = Tile<kSize>;

    // Fills the tile's numbers, which count from -kHalf. `steps`: what the largest scale becomes, at most, to try.
    // Whether the block's 16-bit scale is finite.
    template <int kTrials, int kSteps>
    static bool solve(Block& tile, const float (&trials)[kTrials], const int (&steps)[kSteps], Runs& runs,
                      uint16_t& half_d) {
        float wanted[kLanes], best = HUGE_VALF;
        for (int g = 0; g < kGroups; g++) store_lanes(wanted, g, search_symmetric<kSize, kHalf>(tile, g, trials));
        float top = 0;
        for (float scale : wanted) top = std::fabs(scale) > std::fabs(top) ? scale : top;
        for (int n : steps) {
            float scale[kLanes], errors[kLanes];
            const uint16_t trial = super_scale(-top, n);
            if (!is_finite(trial)) return false;
            for (int g = 0; g < kGroups; g++) choose(tile, g, wanted, from_half(trial), scale, errors);
            const float error = std::accumulate(errors, errors + kLanes, 0.0f);
            if (!(error < best)) continue;
            best = error;
            half_d = trial;
            std::copy_n(scale, kLanes, runs.scale);
        }
        for (int g = 0; g < kGroups; g++) store_numbers(tile, g, from_half(half_d), runs);
        refit(runs, half_d);
        return true;
    }

    // Step 3, of one group: whole scales near the wanted ones.
    static void choose(const Block& tile, int g, const float* wanted, float d, float* scales, float* errors) {
        const Floats scale = d != 0 ? rounded(within(load_lanes(wanted, g) / d)) : Floats{};
        Floats best = splat(HUGE_VALF), best_scale = {};
        for (float ds = -1; ds <= 1; ds++) {
            const Floats whole_scale = within(scale + ds), step = d * whole_scale;
            const Floats per_step = inverse_of(step);
            Floats error = {};
            for (int i = 0; i < kSize; i++) {
                const Floats x = tile.at(g, i), off = x - step * number(x * per_step);
                error += off * off;
            }
            const Ints better = error < best;
            best = better ? error : best;
            best_scale = better ? whole_scale : best_scale;
        }
        store_lanes(scales, g, best_scale);
        store_lanes(errors, g, best);
    }

    static void store_numbers(Block& tile, int g, float d, Runs& runs) {
        const Floats per_step = inverse_of(d * load_lanes(runs.scale, g));
        Floats sum_qq = {}, sum_xq = {};
        for (int i = 0; i < kSize; i++) {
            const Floats x = tile.at(g, i), q = number(x * per_step);
            sum_qq += q * q;
            sum_xq += x * q;
            tile.store(g, i, q + static_cast<float>(kHalf));
        }
        store_lanes(runs.sum_qq, g, sum_qq);
        store_lanes(runs.sum_xq, g, sum_xq);
    }

    // Step 4: the minimum of sum (d a - x)^2 over the block, where a = scale q.
    static void refit(const Runs& runs, uint16_t& half_d) {
        double aa = 0, xa = 0;
        for (int lane = 0; lane < kLanes; lane++) {
            const double s = runs.scale[lane];
            aa += s * s * runs.sum_qq[lane];
            xa += s * runs.sum_xq[lane];
        }
        if (aa <= 0) return;
        const uint16_t new_half = to_half(static_cast<float>(xa / aa));
        if (!is_finite(new_half)) return;
        const double d = from_half(half_d), new_d = from_half(new_half);
        if (new_d * (new_d * aa - 2 * xa) < d * (d * aa - 2 * xa)) half_d = new_half;
    }

    static Floats inverse_of(Floats step) { return step != 0.0f ? 1.0f / step : Floats{}; }
    static Floats within(Floats scale) { return lower(higher(scale, splat(-kScaleHalf)), splat(kScaleHalf - 1)); }
    static Floats number(Floats y) { return rounded(lower(higher(y, splat(-kHalf)), splat(kHalf - 1))); }
};

}  // namespace SIMD_NAMESPACE
}  // namespace quantization
}  // namespace powerinfer
