// Backward passes over x and dy: sums over positions, and the gradient of x.

#include "passes.h"

namespace ghostnoise::GN_ISA {
namespace {

// gradient_sums: Σ dy and Σ dy·(x - center).

template <class T, class A>
void gradient_sums_rows(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> center, A *total, A *moment,
                        i64 threads) {
    constexpr i64 LANES = Pack<A>::LANES;
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 first, i64 end) {
            const A *around = center.of(b);
            for_blocks<A>(first, end, [=](i64 c, auto rows) {
                double sum[LANES] = {}, product[LANES] = {};
                for_steps(S, RUN * LANES, [&](i64 from, i64 to) {
                    Pack<A> sums[LANES] = {}, products[LANES] = {};
                    for_packs<A>(rows, from, to, [&](i64 r, i64 s, auto count) {
                        const Pack<A> g = values<A>(dy.row(b, c + r) + s, count, A(0));
                        Pack<A> d = values<A>(x.row(b, c + r) + s, count, around[c + r]);
                        d.lanes -= around[c + r];
                        sums[r].lanes += g.lanes;
                        products[r].lanes += g.lanes * d.lanes;
                    });
                    sum_lanes(sums);
                    sum_lanes(products);
                    for (i64 r = 0; r < LANES; ++r) {
                        sum[r] += double(sums[0].lanes[r]);
                        product[r] += double(products[0].lanes[r]);
                    }
                });
                for (i64 r = 0; r < rows; ++r) {
                    total[b * n.C + c + r] = A(sum[r]);
                    moment[b * n.C + c + r] = A(product[r]);
                }
            });
        });
    });
}

// For a single position: the products, and the gradient itself as its sum.
template <class T, class A>
void gradient_sums_single(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> center, A *total, A *moment,
                          i64 threads) {
    for_parts(n.B, n.C, n.C, threads, [=](i64 b, i64, i64) {
        const T *gradient = dy.row(b, 0), *row = x.row(b, 0);
        const A *m = center.of(b);
        fill(moment + b * n.C, n.C, false, [=](i64 c) { return load(gradient[c]) * (load(row[c]) - m[c]); });
        fill(total + b * n.C, n.C, false, [=](i64 c) { return load(gradient[c]); });
    });
}

// The sums of some packs of channels, which have `count` channels each.
template <class T, class A, class Packs, class Count>
void gradient_sums_of_packs(const T *dy, i64 dy_step, const T *x, i64 x_step, i64 S, Packs packs, Count count,
                            const A *center, A *total, A *moment) {
    constexpr i64 PACKS = Packs::value, LANES = Pack<A>::LANES;
    Pack<A> around[PACKS], sum[PACKS] = {}, product[PACKS] = {};
    for (i64 p = 0; p < packs; ++p)
        around[p] = values<A>(center + p * LANES, count, A(0));
    for (i64 s = 0; s < S; ++s)
        for (i64 p = 0; p < packs; ++p) {
            const Pack<A> g = values<A>(dy + s * dy_step + p * LANES, count, A(0));
            Pack<A> d = values<A>(x + s * x_step + p * LANES, count, A(0));
            d.lanes -= around[p].lanes;
            sum[p].lanes += g.lanes;
            product[p].lanes += g.lanes * d.lanes;
        }
    std::memcpy(total, sum, sizeof(A) * ((packs - 1) * LANES + count));
    std::memcpy(moment, product, sizeof(A) * ((packs - 1) * LANES + count));
}

template <class T, class A>
void gradient_sums_last(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> center, A *total, A *moment,
                        i64 threads) {
    if (n.S == 1)
        return gradient_sums_single(n, dy, x, center, total, moment, threads);
    if (n.S <= FEW_SUMMED) {
        for_parts(n.B, n.C, TILE, threads, [=](i64 b, i64 c0, i64 c1) {
            for_channel_packs<A>(c0, c1, [=](i64 c, auto packs, auto count) {
                gradient_sums_of_packs(dy.row(b, 0) + c, dy.inner, x.row(b, 0) + c, x.inner, n.S, packs, count,
                                       center.of(b) + c, total + b * n.C + c, moment + b * n.C + c);
            });
        });
        return;
    }
    for_parts(n.B, n.C, TILE, threads, [=](i64 b, i64 c0, i64 c1) {
        const i64 wide = c1 - c0;
        alignas(64) A around[TILE], part[TILE], part_product[TILE];
        double sum[TILE], product[TILE];
        clear(TILE, around);
        clear(wide, sum, product);
        std::memcpy(around, center.of(b) + c0, sizeof(A) * wide);
        for_steps(n.S, RUN, [&](i64 from, i64 to) {
            clear(TILE, part, part_product);
            for_tile_packs<A>(from, to, wide, [&](i64 s, i64 c, auto count) {
                const Pack<A> g = values<A>(dy.row(b, s) + c0 + c, count, A(0));
                Pack<A> m, d = values<A>(x.row(b, s) + c0 + c, count, A(0));
                std::memcpy(&m, around + c, VECTOR);
                add(part + c, g);
                d.lanes = g.lanes * (d.lanes - m.lanes);
                add(part_product + c, d);
            });
            for (i64 c = 0; c < wide; ++c) {
                sum[c] += double(part[c]);
                product[c] += double(part_product[c]);
            }
        });
        for (i64 c = 0; c < wide; ++c) {
            total[b * n.C + c0 + c] = A(sum[c]);
            moment[b * n.C + c0 + c] = A(product[c]);
        }
    });
}

// input_gradient: gain * scale * dy + slope * (x - center) + offset.

template <class T, class A>
void input_gradient_rows(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> scale, Rows<A> gain, Rows<A> center,
                         Rows<A> slope, Rows<A> offset, Tensor<T> dx, bool part_of_large, i64 threads) {
    const bool non_temporal = streams(n, n.S, dx, part_of_large);
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            const A *scales = scale.of(b), *gains = gain.of(b), *centers = center.of(b);
            const A *slopes = slope.of(b), *offsets = offset.of(b);
            for (i64 c = from; c < to; ++c) {
                const T *gradient = dy.row(b, c), *row = x.row(b, c);
                const A k = scales[c] * gains[c], m = centers[c], p = slopes[c], q = offsets[c];
                fill(dx.row(b, c), S, non_temporal,
                     [=](i64 s) { return k * load(gradient[s]) + (p * (load(row[s]) - m) + q); });
            }
        });
    });
}

template <class T, class A>
void input_gradient_last(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> scale, Rows<A> gain, Rows<A> center,
                         Rows<A> slope, Rows<A> offset, Tensor<T> dx, bool part_of_large, i64 threads) {
    const bool non_temporal = streams(n, n.C, dx, part_of_large);
    for_parts(n.B, n.S, 16, threads, [=](i64 b, i64 from, i64 to) {
        const A *k = scale.of(b), *g = gain.of(b), *m = center.of(b), *p = slope.of(b), *q = offset.of(b);
        for (i64 s = from; s < to; ++s) {
            const T *gradient = dy.row(b, s), *row = x.row(b, s);
            fill(dx.row(b, s), n.C, non_temporal,
                 [=](i64 c) { return k[c] * g[c] * load(gradient[c]) + (p[c] * (load(row[c]) - m[c]) + q[c]); });
        }
    });
}

}  // namespace

Status gradient_sums(const Pass &pass, Input dy, Input x, Table center, void *total, void *moment) {
    const Shape n = {pass.B, pass.C, pass.S};
    with_type(pass.dtype, [&](auto type) {
        using T = decltype(type);
        using A = typename Arithmetic<T>::type;
        (pass.last ? gradient_sums_last<T, A> : gradient_sums_rows<T, A>)(
            n, tensor<T>(dy), tensor<T>(x), rows<A>(center, n.C), static_cast<A *>(total), static_cast<A *>(moment),
            pass.threads);
    });
    return Status::OK;
}

Status input_gradient(const Pass &pass, bool part_of_large, Input dy, Input x, Table scale, Table gain, Table center,
                      Table slope, Table offset, Output dx) {
    const Shape n = {pass.B, pass.C, pass.S};
    with_type(pass.dtype, [&](auto type) {
        using T = decltype(type);
        using A = typename Arithmetic<T>::type;
        (pass.last ? input_gradient_last<T, A> : input_gradient_rows<T, A>)(
            n, tensor<T>(dy), tensor<T>(x), rows<A>(scale, n.C), rows<A>(gain, n.C), rows<A>(center, n.C),
            rows<A>(slope, n.C), rows<A>(offset, n.C), tensor<T>(n, dx), part_of_large, pass.threads);
    });
    return Status::OK;
}

}  // namespace ghostnoise::GN_ISA
