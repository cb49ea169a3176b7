// Pools of per-sample moments: who counts in whose statistics (ghostnoise/ghosts.py), in single passes over the tables.
//
// Means are (B, C) in float or double, variances in double, or absent where samples have a single position. Sums are
// in double. Work goes by tiles of channels, whose rows of a ghost batch fit a core's cache.

#include "common.h"

#include <cstdlib>
#include <type_traits>

namespace {

// A ghost batch of n samples from row `from`, for `wide` channels from `c`.
template <class M> struct Block {
    const M *mean;
    const double *var;  // null: all zero
    i64 n, stride;

    double m(i64 row, i64 c) const { return double(mean[row * stride + c]); }
    double v(i64 row, i64 c) const { return var ? var[row * stride + c] : 0.0; }
};

template <class M> Block<M> block(const M *mean, const double *var, const i64 *starts, i64 g, i64 C, i64 c) {
    const i64 at = starts[g] * C + c;
    return {mean + at, var ? var + at : nullptr, starts[g + 1] - starts[g], C};
}

// everyone: the moments of each ghost batch (G, C).
template <class M> void everyone_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    double center[CHUNK] = {}, square[CHUNK] = {};
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            center[c] += x.m(k, c);
    for (i64 c = 0; c < wide; ++c)
        center[c] /= double(x.n);
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const double d = x.m(k, c) - center[c];
            square[c] += x.v(k, c) + d * d;
        }
    for (i64 c = 0; c < wide; ++c) {
        mean[c] = center[c];
        var[c] = square[c] / double(x.n);
    }
}

// others: for each sample, the moments of the others in its ghost batch (B, C). The most extreme sample is kept out of
// the totals, and added for everyone but itself: what is then subtracted is never larger than what stays.
template <class M> void others_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    if (x.n == 2) {  // the other one's own moments: a pool of one sample may be far from any offset
        for (i64 k = 0; k < 2; ++k)
            for (i64 c = 0; c < wide; ++c) {
                mean[k * x.stride + c] = x.m(1 - k, c);
                var[k * x.stride + c] = x.v(1 - k, c);
            }
        return;
    }
    double center[CHUNK] = {}, most[CHUNK], sum[CHUNK] = {}, square[CHUNK] = {}, own[CHUNK], own_square[CHUNK];
    i64 extreme[CHUNK] = {};
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            center[c] += x.m(k, c);
    for (i64 c = 0; c < wide; ++c) {
        center[c] /= double(x.n);
        most[c] = -1;
    }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const double d = x.m(k, c) - center[c], energy = x.v(k, c) + d * d;
            const bool more = !(energy <= most[c]);  // not a number counts as most extreme
            most[c] = more ? energy : most[c];
            extreme[c] = more ? k : extreme[c];
        }
    const double others = double(x.n - 1);
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            sum[c] += k == extreme[c] ? 0 : x.m(k, c);
    for (i64 c = 0; c < wide; ++c) {
        center[c] = sum[c] / others;
        sum[c] = 0;
        own[c] = x.m(extreme[c], c) - center[c];
        own_square[c] = x.v(extreme[c], c) + own[c] * own[c];
    }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const bool counts = k != extreme[c];
            const double d = x.m(k, c) - center[c];
            sum[c] += counts ? d : 0;
            square[c] += counts ? x.v(k, c) + d * d : 0;
        }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const bool itself = k == extreme[c];
            const double d = x.m(k, c) - center[c], energy = x.v(k, c) + d * d;
            const double total = itself ? sum[c] : sum[c] - d + own[c];
            const double squares = itself ? square[c] : square[c] - energy + own_square[c];
            const double shift = total / others, value = squares / others - shift * shift;
            mean[k * x.stride + c] = center[c] + shift;
            var[k * x.stride + c] = value < 0 ? 0 : value;
        }
}

// draws: for each of K rows of indices (K, N), the moments of the N drawn samples, the mean around `around`. Each drawn
// row is read once for both moments, around the first drawn one: an outlier that was not drawn cannot cost digits, and
// one that was drawn makes the variance large. D is the type that drawn rows are read in. For float, the rows are first
// copied around a reference that a few outliers cannot move, the median of three samples.
template <class M, class D>
void draws_tile(const Block<M> &x, i64 wide, i64 K, i64 N, const i64 *indices, const double *around, D *mean, D *var) {
    // No std::vector: its code would be shared by the copies for different instruction sets.
    const i64 step = x.var ? 2 * CHUNK : CHUNK;  // of a copied row: means, then variances
    D *rows = static_cast<D *>(std::malloc(std::size_t(x.n * step) * sizeof(D)));
    double reference[CHUNK];
    for (i64 c = 0; c < wide; ++c) {
        const double a = x.m(0, c), b = x.m(x.n / 2, c), e = x.m(x.n - 1, c);
        const double low = a < b ? a : b, high = a < b ? b : a;
        reference[c] = e < low ? low : e > high ? high : e;
    }
    for (i64 k = 0; k < x.n; ++k) {
        D *to = rows + k * step;
        for (i64 c = 0; c < CHUNK; ++c)
            to[c] = c < wide ? D(x.m(k, c) - reference[c]) : 0;
        for (i64 c = 0; x.var && c < CHUNK; ++c)
            to[CHUNK + c] = c < wide ? D(x.v(k, c)) : 0;
    }
    constexpr i64 PACKS = CHUNK / Pack<D>::LANES;
    const auto pool = [&](auto with_var) {
        for (i64 k = 0; k < K; ++k) {
            const i64 *drawn = indices + k * N;
            const D *first = rows + drawn[0] * step;
            Pack<D> base[PACKS], sums[PACKS] = {}, squares[PACKS] = {};
            for (i64 p = 0; p < PACKS; ++p)
                base[p].load_from(first + p * Pack<D>::LANES);
            for (i64 j = 0; j < N; ++j) {
                const D *row = rows + drawn[j] * step;
#pragma GCC unroll 8
                for (i64 p = 0; p < PACKS; ++p) {
                    Pack<D> d;
                    d.load_from(row + p * Pack<D>::LANES);
                    d.lanes -= base[p].lanes;
                    sums[p].lanes += d.lanes;
                    squares[p].lanes += d.lanes * d.lanes;
                    if constexpr (decltype(with_var)::value) {
                        d.load_from(row + CHUNK + p * Pack<D>::LANES);
                        squares[p].lanes += d.lanes;
                    }
                }
            }
            D sum[CHUNK], square[CHUNK];
            std::memcpy(sum, sums, sizeof(sum));
            std::memcpy(square, squares, sizeof(square));
            const D share = D(1) / D(N);
            for (i64 c = 0; c < wide; ++c) {
                const D d = sum[c] * share, value = square[c] * share - d * d;
                mean[k * x.stride + c] = D(reference[c] - around[c]) + (first[c] + d);
                var[k * x.stride + c] = value < 0 ? 0 : value;
            }
        }
    };
    if (x.var)
        pool(std::true_type());
    else
        pool(std::false_type());
    std::free(rows);
}

template <class M>
void pool(i64 others, i64 threads, i64 G, const i64 *starts, i64 C, const M *mean, const double *var, double *to_mean,
          double *to_var) {
    for_columns(G, C, threads, [=](i64 g, i64 c, i64 wide) {
        const Block<M> x = block(mean, var, starts, g, C, c);
        const i64 at = (others ? starts[g] : g) * C + c;
        if (others)
            others_tile(x, wide, to_mean + at, to_var + at);
        else
            everyone_tile(x, wide, to_mean + at, to_var + at);
    });
}

template <class M, class D>
void draw(i64 threads, i64 B, i64 C, i64 K, i64 N, const M *mean, const double *var, const i64 *indices,
          const double *around, D *to_mean, D *to_var) {
    const i64 starts[2] = {0, B};
    for_columns(1, C, threads, [=, &starts](i64, i64 c, i64 wide) {
        draws_tile<M, D>(block(mean, var, starts, 0, C, c), wide, K, N, indices, around + c, to_mean + c, to_var + c);
    });
}

} // namespace

// `dtype` is that of the means: 0 float, 1 double. `starts` are the first rows of G ghost batches, and the end.
GN_EXPORT(pool)(i64 dtype, i64 others, i64 threads, i64 G, const i64 *starts, i64 C, const void *mean,
                const double *var, double *to_mean, double *to_var) {
    if (dtype == 0)
        pool(others, threads, G, starts, C, static_cast<const float *>(mean), var, to_mean, to_var);
    else
        pool(others, threads, G, starts, C, static_cast<const double *>(mean), var, to_mean, to_var);
    return dtype > 1;
}

// `made` is the dtype of the results.
GN_EXPORT(draws)(i64 dtype, i64 made, i64 threads, i64 B, i64 C, i64 K, i64 N, const void *mean, const double *var,
                 const i64 *indices, const double *around, void *to_mean, void *to_var) {
    const auto run = [&](auto *means) {
        if (made == 0)
            draw(threads, B, C, K, N, means, var, indices, around, static_cast<float *>(to_mean),
                 static_cast<float *>(to_var));
        else
            draw(threads, B, C, K, N, means, var, indices, around, static_cast<double *>(to_mean),
                 static_cast<double *>(to_var));
    };
    if (dtype == 0)
        run(static_cast<const float *>(mean));
    else
        run(static_cast<const double *>(mean));
    return dtype > 1 || made > 1;
}
