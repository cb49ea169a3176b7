// Noise from the moments of ghost batches (engine/backends/aten.py): of drawn samples, or given as tables.

#include "exports.h"

#include <cmath>
#include <cstdlib>

namespace {

constexpr i64 DRAWN = 64;  // channels of a tile: few, so that the samples' moments fit a core's first caches

// The moments of samples, copied for a tile of channels. D is the type that they are read in: in float around a
// reference that a few outliers cannot move, the median of three samples.
template <class D> struct Copied {
    i64 step;  // of a row: means, then variances if there are any
    D *rows;
    double reference[DRAWN];

    template <class M> Copied(const Block<M> &x, i64 wide) : step(x.var ? 2 * DRAWN : DRAWN) {
        // No std::vector: its code would be shared by the copies for different instruction sets.
        rows = static_cast<D *>(std::malloc(std::size_t(x.n * step) * sizeof(D)));
        for (i64 c = 0; c < wide; ++c) {
            const double a = x.m(0, c), b = x.m(x.n / 2, c), e = x.m(x.n - 1, c);
            const double low = a < b ? a : b, high = a < b ? b : a;
            reference[c] = e < low ? low : e > high ? high : e;
        }
        for (i64 k = 0; k < x.n; ++k) {
            D *to = rows + k * step;
            for (i64 c = 0; c < DRAWN; ++c)
                to[c] = c < wide ? D(x.m(k, c) - reference[c]) : 0;
            for (i64 c = 0; x.var && c < DRAWN; ++c)
                to[DRAWN + c] = c < wide ? D(x.v(k, c)) : 0;
        }
    }
    ~Copied() { std::free(rows); }
    Copied(const Copied &) = delete;
};

// The moments of N drawn samples, the mean around `around`. Each drawn row is read once for both moments, around the
// first drawn one: an outlier that was not drawn cannot cost digits, and one that was makes the variance large.
template <bool WITH_VAR, class D>
void pool_drawn(const Copied<D> &x, const i64 *drawn, i64 N, const double *around, i64 wide, D *mean, D *var) {
    constexpr i64 LANES = Pack<D>::LANES, PACKS = DRAWN / LANES;
    const D *first = x.rows + drawn[0] * x.step;
    Pack<D> base[PACKS], sums[PACKS] = {}, squares[PACKS] = {};
    for (i64 p = 0; p < PACKS; ++p)
        base[p].load_from(first + p * LANES);
    for (i64 j = 0; j < N; ++j) {
        const D *row = x.rows + drawn[j] * x.step;
#pragma GCC unroll 8
        for (i64 p = 0; p < PACKS; ++p) {
            Pack<D> d;
            d.load_from(row + p * LANES);
            d.lanes -= base[p].lanes;
            sums[p].lanes += d.lanes;
            squares[p].lanes += d.lanes * d.lanes;
            if constexpr (WITH_VAR) {
                d.load_from(row + DRAWN + p * LANES);
                squares[p].lanes += d.lanes;
            }
        }
    }
    D sum[DRAWN], square[DRAWN];
    std::memcpy(sum, sums, sizeof(sum));
    std::memcpy(square, squares, sizeof(square));
    const D share = D(1) / D(N);
    for (i64 c = 0; c < wide; ++c) {
        const D d = sum[c] * share, value = square[c] * share - d * d;
        mean[c] = D(x.reference[c] - around[c]) + (first[c] + d);
        var[c] = value < 0 ? 0 : value;
    }
}

// Where ghost batches come from: K rows of N indices of samples, or tables m and s² (K, C), each of which may be absent.
template <class M, class D> struct Ghosts {
    const M *mean;
    const double *var;
    i64 B, N;
    const i64 *indices;
    const double *around;
    const D *m, *s2;
};

// Runs use(k, first channel, channels, m, s²) over all K ghost batches, by tiles of channels.
template <class M, class D, class Use> void for_ghosts(i64 threads, i64 K, i64 C, const Ghosts<M, D> &from, Use use) {
    for_columns<DRAWN>(1, C, threads, [=](i64, i64 c0, i64 wide) {
        if (!from.indices) {
            for (i64 k = 0; k < K; ++k)
                use(k, c0, wide, from.m ? from.m + k * C + c0 : nullptr, from.s2 ? from.s2 + k * C + c0 : nullptr);
            return;
        }
        const Copied<D> x(Block<M>{from.mean + c0, from.var ? from.var + c0 : nullptr, from.B, C}, wide);
        with_flag(from.var, [&](auto with_var) {
            D m[DRAWN], s2[DRAWN];
            for (i64 k = 0; k < K; ++k) {
                pool_drawn<decltype(with_var)::value>(x, from.indices + k * from.N, from.N, from.around + c0, wide, m, s2);
                use(k, c0, wide, m, s2);
            }
        });
    });
}

// inject: the moments m and s² of ghost batches to the noise k = sqrt((var + margin) / (s² + margin)); with the
// statistics of a normalizer, which all samples share, to m·rstd; and where asked for, to what is applied to x.
template <class A> struct Made {
    A *m, *k, *scale, *shift;
};

template <class M, class A>
void inject(i64 threads, i64 K, i64 C, const Ghosts<M, A> &ghosts, bool shifts, bool scales, const double *var,
            const double *margin, const A *standard, const A *weight, const A *bias, Made<A> to) {
    enum { ABOVE, BELOW, ROWS };
    A *rows = static_cast<A *>(std::malloc(sizeof(A) * (ROWS + Blend<A>::ROWS) * C));
    for (i64 c = 0; c < C; ++c) {
        rows[ABOVE * C + c] = A(std::sqrt(var[c] + margin[c]));
        rows[BELOW * C + c] = A(margin[c]);
    }
    const Blend<A> blend(rows + ROWS * C, C);
    if (standard)
        blend.fill(standard, weight, bias);
    const A *rstd = standard ? Standard<A>(const_cast<A *>(standard), C).rstd : nullptr;
    const auto run = [=, &ghosts](auto with_shift, auto with_scale, auto normalizes, auto applies) {
        for_ghosts(threads, K, C, ghosts, [=](i64 row, i64 c0, i64 wide, const A *ghost_m, const A *ghost_s2) {
            const i64 at = row * C + c0;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                A k = 1, m = decltype(with_shift)::value ? ghost_m[c] : A(0);
                if constexpr (decltype(with_scale)::value)
                    to.k[at + c] = k = rows[ABOVE * C + c0 + c] / std::sqrt(ghost_s2[c] + rows[BELOW * C + c0 + c]);
                if constexpr (decltype(normalizes)::value)
                    m *= rstd[c0 + c];
                if constexpr (decltype(applies)::value) {
                    to.scale[at + c] = blend.scale(c0 + c, k);
                    to.shift[at + c] = blend.shift(c0 + c, m, k);
                }
                if constexpr (decltype(with_shift)::value)
                    to.m[at + c] = m;
            }
        });
    };
    with_flag(shifts, [&](auto shift) {
        with_flag(scales, [&](auto scale) {
            if (to.scale)
                run(shift, scale, std::true_type(), std::true_type());
            else
                with_flag(standard, [&](auto normalizes) { run(shift, scale, normalizes, std::false_type()); });
        });
    });
    std::free(rows);
}

template <class A> const A *in(const void *table) { return static_cast<const A *>(table); }
template <class A> A *out(void *table) { return static_cast<A *>(table); }

} // namespace

// The C ABI, as exports.h says it.

#define GN_BOTH(...)                                                                                                   \
    switch (2 * means + dtype) {                                                                                       \
        case 0: { using M = float; using A = float; __VA_ARGS__; return 0; }                                                  \
        case 1: { using M = float; using A = double; __VA_ARGS__; return 0; }                                                 \
        case 2: { using M = double; using A = float; __VA_ARGS__; return 0; }                                                 \
        case 3: { using M = double; using A = double; __VA_ARGS__; return 0; }                                                \
        default: return 1;                                                                                             \
    }

// draws: for each of K rows of indices (K, N), the moments of the drawn samples, the mean around `around`.
GN_EXPORT(draws)(i64 means, i64 dtype, i64 threads, i64 B, i64 C, i64 K, i64 N, const void *mean, const double *var,
                 const i64 *indices, const double *around, void *to_mean, void *to_var) {
    GN_BOTH(const Ghosts<M, A> ghosts = {in<M>(mean), var, B, N, indices, around, nullptr, nullptr};
            for_ghosts(threads, K, C, ghosts, [=](i64 k, i64 c0, i64 wide, const A *m, const A *s2) {
                std::memcpy(out<A>(to_mean) + k * C + c0, m, sizeof(A) * wide);
                std::memcpy(out<A>(to_var) + k * C + c0, s2, sizeof(A) * wide);
            }))
}

// inject: from indices as in draws, or without any from the tables m and s². Without a normalizer, `standard` is null.
// Scale and shift are null where they are not asked for.
GN_EXPORT(inject)(i64 means, i64 dtype, i64 threads, i64 B, i64 C, i64 K, i64 N, const void *mean, const double *var,
                  const i64 *indices, const double *around, const void *m, const void *s2, i64 shifts, i64 scales,
                  const double *whole_var, const double *margin, const void *standard, const void *weight,
                  const void *bias, void *to_m, void *to_k, void *to_scale, void *to_shift) {
    GN_BOTH(const Ghosts<M, A> ghosts = {in<M>(mean), var, B, N, indices, around, in<A>(m), in<A>(s2)};
            const Made<A> to = {out<A>(to_m), out<A>(to_k), out<A>(to_scale), out<A>(to_shift)};
            inject<M, A>(threads, K, C, ghosts, shifts, scales, whole_var, margin, in<A>(standard), in<A>(weight),
                         in<A>(bias), to))
}
