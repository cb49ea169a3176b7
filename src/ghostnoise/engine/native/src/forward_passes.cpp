// Forward passes over x: the moments of its samples, and the affine maps that are applied to it.

#include "passes.h"

namespace ghostnoise::GN_ISA {
namespace {

// moments: two passes within a row, the second around a rough mean, so that nothing cancels.

template <class A> void write_moments(A rough, double rest, double square, i64 S, double &mean, double &var) {
    const double share = 1 / double(S), correction = rest * share, value = square * share - correction * correction;
    mean = double(rough) + correction;
    var = value < 0 ? 0 : value;
}

// The moments of up to a pack's lanes of rows.
template <class T, class Count, class Positions>
void moments_of_rows(const T *x, i64 step, Count rows, Positions S, double *mean, double *var) {
    using A = typename Arithmetic<T>::type;
    constexpr i64 LANES = Pack<A>::LANES;
    double rest[LANES] = {}, square[LANES] = {};
    A total[LANES] = {};
    for_steps(S, RUN * LANES, [&](i64 from, i64 to) {
        Pack<A> sums[LANES] = {};
        for_packs<A>(rows, from, to, [&](i64 r, i64 s, auto count) {
            sums[r].lanes += values<A>(x + r * step + s, count, A(0)).lanes;
        });
        sum_lanes(sums);
        for (i64 r = 0; r < LANES; ++r)
            total[r] += sums[0].lanes[r];
    });
    for (i64 r = 0; r < LANES; ++r)
        total[r] *= A(1) / A(S);
    for_steps(S, RUN * LANES, [&](i64 from, i64 to) {
        Pack<A> sums[LANES] = {}, squares[LANES] = {};
        for_packs<A>(rows, from, to, [&](i64 r, i64 s, auto count) {
            Pack<A> d = values<A>(x + r * step + s, count, total[r]);
            d.lanes -= total[r];
            sums[r].lanes += d.lanes;
            squares[r].lanes += d.lanes * d.lanes;
        });
        sum_lanes(sums);
        sum_lanes(squares);
        for (i64 r = 0; r < LANES; ++r) {
            rest[r] += double(sums[0].lanes[r]);
            square[r] += double(squares[0].lanes[r]);
        }
    });
    for (i64 r = 0; r < rows; ++r)
        write_moments(total[r], rest[r], square[r], S, mean[r], var[r]);
}

template <class T> void moments_rows(Shape n, Tensor<const T> x, double *mean, double *var, i64 threads) {
    using A = typename Arithmetic<T>::type;
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            for_blocks<A>(from, to, [=](i64 c, auto rows) {
                moments_of_rows(x.row(b, c), x.inner, rows, S, mean + b * n.C + c, var + b * n.C + c);
            });
        });
    });
}

// The moments of some packs of channels, which have `count` channels each.
template <class T, class Packs, class Count>
void moments_of_packs(const T *x, i64 step, i64 S, Packs packs, Count count, double *mean, double *var) {
    using A = typename Arithmetic<T>::type;
    constexpr i64 PACKS = Packs::value, LANES = Pack<A>::LANES;
    Pack<A> rough[PACKS] = {}, rest[PACKS] = {}, square[PACKS] = {};
    for (i64 s = 0; s < S; ++s)
        for (i64 p = 0; p < packs; ++p)
            rough[p].lanes += values<A>(x + s * step + p * LANES, count, A(0)).lanes;
    for (i64 p = 0; p < packs; ++p)
        rough[p].lanes *= A(1) / A(S);
    for (i64 s = 0; s < S; ++s)
        for (i64 p = 0; p < packs; ++p) {
            Pack<A> d = values<A>(x + s * step + p * LANES, count, A(0));
            d.lanes -= rough[p].lanes;
            rest[p].lanes += d.lanes;
            square[p].lanes += d.lanes * d.lanes;
        }
    alignas(64) A made[3][PACKS * LANES];
    std::memcpy(made[0], rough, sizeof(rough));
    std::memcpy(made[1], rest, sizeof(rest));
    std::memcpy(made[2], square, sizeof(square));
#pragma omp simd
    for (i64 c = 0; c < (packs - 1) * LANES + count; ++c)
        write_moments(made[0][c], double(made[1][c]), double(made[2][c]), S, mean[c], var[c]);
}

template <class T> void moments_last(Shape n, Tensor<const T> x, double *mean, double *var, i64 threads) {
    using A = typename Arithmetic<T>::type;
    if (n.S <= FEW_POSITIONS) {
        for_parts(n.B, n.C, TILE, threads, [=](i64 b, i64 c0, i64 c1) {
            for_channel_packs<A>(c0, c1, [=](i64 c, auto packs, auto count) {
                moments_of_packs(x.row(b, 0) + c, x.inner, n.S, packs, count, mean + b * n.C + c, var + b * n.C + c);
            });
        });
        return;
    }
    for_parts(n.B, n.C, TILE, threads, [=](i64 b, i64 c0, i64 c1) {
        const i64 wide = c1 - c0;
        alignas(64) A rough[TILE], part[TILE], part_square[TILE];
        double rest[TILE], square[TILE];
        clear(TILE, rough);
        clear(wide, rest, square);
        for_steps(n.S, RUN, [&](i64 from, i64 to) {
            clear(TILE, part);
            for_tile_packs<A>(from, to, wide, [&](i64 s, i64 c, auto count) {
                add(part + c, values<A>(x.row(b, s) + c0 + c, count, A(0)));
            });
            for (i64 c = 0; c < wide; ++c)
                rough[c] += part[c];
        });
        for (i64 c = 0; c < wide; ++c)
            rough[c] *= A(1) / A(n.S);
        for_steps(n.S, RUN, [&](i64 from, i64 to) {
            clear(TILE, part, part_square);
            for_tile_packs<A>(from, to, wide, [&](i64 s, i64 c, auto count) {
                Pack<A> around, d = values<A>(x.row(b, s) + c0 + c, count, A(0));
                std::memcpy(&around, rough + c, VECTOR);
                d.lanes -= around.lanes;
                add(part + c, d);
                d.lanes *= d.lanes;
                add(part_square + c, d);
            });
            for (i64 c = 0; c < wide; ++c) {
                rest[c] += double(part[c]);
                square[c] += double(part_square[c]);
            }
        });
        double *to_mean = mean + b * n.C + c0, *to_var = var + b * n.C + c0;
        for (i64 c = 0; c < wide; ++c)
            write_moments(rough[c], rest[c], square[c], n.S, to_mean[c], to_var[c]);
    });
}

// transform: scale * (x - center) + shift.

template <class T, class A>
void transform_rows(Shape n, Tensor<const T> x, Rows<A> center, Rows<A> scale, Rows<A> shift, Tensor<T> y,
                    bool part_of_large, i64 threads) {
    const bool non_temporal = streams(n, n.S, y, part_of_large);
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            const A *centers = center.of(b), *scales = scale.of(b), *shifts = shift.of(b);
            for (i64 c = from; c < to; ++c) {
                const T *row = x.row(b, c);
                const A m = centers[c], k = scales[c], h = shifts[c];
                fill(y.row(b, c), S, non_temporal, [=](i64 s) { return k * (load(row[s]) - m) + h; });
            }
        });
    });
}

template <class T, class A>
void transform_last(Shape n, Tensor<const T> x, Rows<A> center, Rows<A> scale, Rows<A> shift, Tensor<T> y,
                    bool part_of_large, i64 threads) {
    const bool non_temporal = streams(n, n.C, y, part_of_large);
    for_parts(n.B, n.S, 16, threads, [=](i64 b, i64 from, i64 to) {
        const A *m = center.of(b), *k = scale.of(b), *h = shift.of(b);
        for (i64 s = from; s < to; ++s) {
            const T *row = x.row(b, s);
            fill(y.row(b, s), n.C, non_temporal, [=](i64 c) { return k[c] * (load(row[c]) - m[c]) + h[c]; });
        }
    });
}

// noisy_transform: the same with scale and shift computed from noise, without tables of them.

template <class T, class A>
void noisy_transform_rows(Shape n, Tensor<const T> x, NoisyAffine<A> affine, const A *m, const A *k, Tensor<T> y,
                          i64 threads) {
    const bool non_temporal = streams(n, n.S, y);
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            for (i64 c = from; c < to; ++c) {
                const T *row = x.row(b, c);
                const A around = affine.center[c], by = k ? k[b * n.C + c] : A(1);
                const A scale = affine.scale(c, by), shift = affine.shift(c, m ? m[b * n.C + c] : A(0), by);
                fill(y.row(b, c), S, non_temporal, [=](i64 s) { return scale * (load(row[s]) - around) + shift; });
            }
        });
    });
}

template <class T, class A>
void noisy_transform_last(Shape n, Tensor<const T> x, NoisyAffine<A> affine, const A *m, const A *k, Tensor<T> y,
                          i64 threads) {
    const bool non_temporal = streams(n, n.C, y);
    for_parts(n.B, n.S, 16, threads, [=](i64 b, i64 from, i64 to) {
        for (i64 c0 = 0; c0 < n.C; c0 += TILE) {
            const i64 wide = n.C - c0 < TILE ? n.C - c0 : TILE;
            A scale[TILE], shift[TILE];
            with_flag(m, [&](auto shifts) {
                with_flag(k, [&](auto scales) {
                    const i64 at = b * n.C + c0;
#pragma omp simd
                    for (i64 c = 0; c < wide; ++c) {
                        const A by = decltype(scales)::value ? k[at + c] : A(1);
                        scale[c] = affine.scale(c0 + c, by);
                        shift[c] = affine.shift(c0 + c, decltype(shifts)::value ? m[at + c] : A(0), by);
                    }
                });
            });
            const A *around = affine.center + c0, *by = scale, *added = shift;
            for (i64 s = from; s < to; ++s) {
                const T *row = x.row(b, s) + c0;
                fill(y.row(b, s) + c0, wide, non_temporal,
                     [=](i64 c) { return by[c] * (load(row[c]) - around[c]) + added[c]; });
            }
        }
    });
}

// The moments of samples with a single position, which are their own means.
template <class T> void moments_single(Shape n, bool last, Tensor<const T> x, double *mean, double *var, i64 threads) {
    const i64 step = last ? 1 : x.inner;
    for_parts(n.B, n.C, n.C, threads, [=](i64 b, i64, i64) {
        const T *row = x.row(b, 0);
        for (i64 c = 0; c < n.C; ++c)
            mean[b * n.C + c] = double(load(row[c * step]));
        if (var)
            std::memset(var + b * n.C, 0, sizeof(double) * n.C);
    });
}

}  // namespace

Status moments(const Pass &pass, Input x, double *mean, double *var) {
    const Shape n = {pass.B, pass.C, pass.S};
    with_type(pass.dtype, [&](auto type) {
        using T = decltype(type);
        if (n.S == 1)
            moments_single<T>(n, pass.last, tensor<T>(x), mean, var, pass.threads);
        else
            (pass.last ? moments_last<T> : moments_rows<T>)(n, tensor<T>(x), mean, var, pass.threads);
    });
    return Status::OK;
}

Status transform(const Pass &pass, bool part_of_large, Input x, Table center, Table scale, Table shift, Output y) {
    const Shape n = {pass.B, pass.C, pass.S};
    with_type(pass.dtype, [&](auto type) {
        using T = decltype(type);
        using A = typename Arithmetic<T>::type;
        (pass.last ? transform_last<T, A> : transform_rows<T, A>)(n, tensor<T>(x), rows<A>(center, n.C),
                                                                  rows<A>(scale, n.C), rows<A>(shift, n.C),
                                                                  tensor<T>(n, y), part_of_large, pass.threads);
    });
    return Status::OK;
}

Status noisy_transform(const Pass &pass, Input x, const void *affine, const void *m, const void *k, Output y) {
    const Shape n = {pass.B, pass.C, pass.S};
    with_type(pass.dtype, [&](auto type) {
        using T = decltype(type);
        using A = typename Arithmetic<T>::type;
        (pass.last ? noisy_transform_last<T, A> : noisy_transform_rows<T, A>)(
            n, tensor<T>(x), NoisyAffine<A>(static_cast<A *>(const_cast<void *>(affine)), n.C),
            static_cast<const A *>(m), static_cast<const A *>(k), tensor<T>(n, y), pass.threads);
    });
    return Status::OK;
}

}  // namespace ghostnoise::GN_ISA
