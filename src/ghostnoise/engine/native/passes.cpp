// The passes of engine/aten.py on CPUs, in plain C++ behind a C ABI. No Torch headers, no randomness.
//
// Compiled once for each instruction set, with GN_ISA naming the copy; dispatch.cpp picks one at run time. Loops are
// plain and marked for vectorization; reassociation is allowed in the marked reductions only, never elsewhere, since
// the statistics rely on (x - rough) being computed as written.
//
// A tensor is (B, C, S) in one of two layouts: rows, where the S positions of each (b, c) are contiguous, and
// channels-last, where the C channels of each (b, s) are. A table is (B, C), contiguous in C, with a stride over B
// that may be 0. Arithmetic is in float, and in double for double; long sums are added up in double.

#include "common.h"

#include <type_traits>

namespace {

struct Shape {
    i64 B, C, S;
};

struct Strides {  // over b, and over c (rows) or s (channels-last); the third is 1
    i64 b, inner;
};

constexpr i64 RUN = 256;   // positions that are summed in the arithmetic of x before they are added up in double
constexpr i64 TILE = 128;  // channels whose accumulators fit the registers

// Calls run with the width of a tile, as a constant where it is a common one: loops over a constant number of channels
// keep their accumulators in registers.
template <class Run> void with_width(i64 width, Run run) {
    if (width == TILE)
        run(std::integral_constant<i64, TILE>());
    else if (width == TILE / 2)
        run(std::integral_constant<i64, TILE / 2>());
    else
        run(width);
}

// Runs part(from, to) over S positions.
template <class Part> void for_runs(i64 S, Part part) {
    for (i64 s = 0; s < S; s += RUN)
        part(s, S - s < RUN ? S : s + RUN);
}

// Runs row(i, j) over i < outer and j < inner.
template <class Row> void for_pairs(i64 outer, i64 inner, int threads, Row row) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (i64 i = 0; i < outer; ++i)
            for (i64 j = 0; j < inner; ++j)
                row(i, j);
        fence();
    }
}

// Runs tile(b, first channel, channels) over all tiles, the last of a sample narrower.
template <class Tile> void for_tiles(const Shape &n, int threads, Tile tile) {
    for_pairs(n.B, (n.C + TILE - 1) / TILE, threads, [&](i64 b, i64 t) {
        const i64 c = t * TILE;
        tile(b, c, n.C - c < TILE ? n.C - c : TILE);
    });
}

// Runs row(b, c), or in channels-last passes row(b, s).
template <class Row> void for_rows(const Shape &n, int threads, Row row) { for_pairs(n.B, n.C, threads, row); }
template <class Row> void for_samples(const Shape &n, int threads, Row row) { for_pairs(n.B, n.S, threads, row); }

// Whether to write past the caches: a result that they could not hold anyway, in rows of whole, aligned lines.
template <class T> bool streams(const Shape &n, i64 row, const T *to, Strides os) {
    constexpr i64 LANES = 64 / sizeof(T), LARGE = i64(1) << 24;
    const bool aligned = reinterpret_cast<std::uintptr_t>(to) % 64 == 0 && os.b % LANES == 0 && os.inner % LANES == 0;
    return n.B * n.C * n.S * i64(sizeof(T)) >= LARGE && row % LANES == 0 && aligned;
}

// Writes value(i) to a row.
template <class T, class Value> void fill(T *to, i64 row, bool past_caches, Value value) {
    constexpr i64 LANES = 64 / sizeof(T);
    if (!past_caches) {
#pragma omp simd
        for (i64 i = 0; i < row; ++i)
            store(to[i], value(i));
        return;
    }
    for (i64 i = 0; i < row; i += LANES) {
        alignas(64) T line[LANES];
#pragma omp simd
        for (i64 k = 0; k < LANES; ++k)
            store(line[k], value(i + k));
        stream(to + i, line);
    }
}

// moments: two passes within a row; the second around a rough mean, so that nothing cancels.

template <class A> void write_moments(A rough, double rest, double square, i64 S, double &mean, double &var) {
    const double correction = rest / double(S), value = square / double(S) - correction * correction;
    mean = double(rough) + correction;
    var = value < 0 ? 0 : value;
}

template <class T> void moments_rows(Shape n, const T *x, Strides xs, double *mean, double *var, int threads) {
    using A = typename Arithmetic<T>::type;
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *row = x + b * xs.b + c * xs.inner;
        double sum = 0, rest = 0, square = 0;
        for_runs(n.S, [&](i64 from, i64 to) {
            A part = 0;
#pragma omp simd reduction(+ : part)
            for (i64 s = from; s < to; ++s)
                part += load(row[s]);
            sum += double(part);
        });
        const A rough = A(sum / double(n.S));
        for_runs(n.S, [&](i64 from, i64 to) {
            A part = 0, part_square = 0;
#pragma omp simd reduction(+ : part, part_square)
            for (i64 s = from; s < to; ++s) {
                const A d = load(row[s]) - rough;
                part += d;
                part_square += d * d;
            }
            rest += double(part);
            square += double(part_square);
        });
        write_moments(rough, rest, square, n.S, mean[b * n.C + c], var[b * n.C + c]);
    });
}

template <class T, class Width>
void moments_tile(const Shape &n, const T *tile, i64 step, Width wide, double *mean, double *var) {
    using A = typename Arithmetic<T>::type;
    double sum[TILE] = {}, square[TILE] = {};
    A rough[TILE];
    for_runs(n.S, [&](i64 from, i64 to) {
        A part[TILE] = {};
        for (i64 s = from; s < to; ++s) {
            const T *row = tile + s * step;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                part[c] += load(row[c]);
        }
        for (i64 c = 0; c < wide; ++c)
            sum[c] += double(part[c]);
    });
    for (i64 c = 0; c < wide; ++c) {
        rough[c] = A(sum[c] / double(n.S));
        sum[c] = 0;
    }
    for_runs(n.S, [&](i64 from, i64 to) {
        A part[TILE] = {}, part_square[TILE] = {};
        for (i64 s = from; s < to; ++s) {
            const T *row = tile + s * step;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const A d = load(row[c]) - rough[c];
                part[c] += d;
                part_square[c] += d * d;
            }
        }
        for (i64 c = 0; c < wide; ++c) {
            sum[c] += double(part[c]);
            square[c] += double(part_square[c]);
        }
    });
    for (i64 c = 0; c < wide; ++c)
        write_moments(rough[c], sum[c], square[c], n.S, mean[c], var[c]);
}

template <class T> void moments_last(Shape n, const T *x, Strides xs, double *mean, double *var, int threads) {
    for_tiles(n, threads, [=](i64 b, i64 c, i64 width) {
        const T *tile = x + b * xs.b + c;
        double *to_mean = mean + b * n.C + c, *to_var = var + b * n.C + c;
        with_width(width, [&](auto wide) { moments_tile(n, tile, xs.inner, wide, to_mean, to_var); });
    });
}

// transform: scale * (x - center) + shift.

template <class T, class A>
void transform_rows(Shape n, const T *x, Strides xs, const A *center, i64 cs, const A *scale, i64 ks, const A *shift,
                    i64 hs, T *y, Strides ys, int threads) {
    const bool past = streams(n, n.S, y, ys);
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *from = x + b * xs.b + c * xs.inner;
        const A m = center[b * cs + c], k = scale[b * ks + c], h = shift[b * hs + c];
        fill(y + b * ys.b + c * ys.inner, n.S, past, [=](i64 s) { return k * (load(from[s]) - m) + h; });
    });
}

template <class T, class A>
void transform_last(Shape n, const T *x, Strides xs, const A *center, i64 cs, const A *scale, i64 ks, const A *shift,
                    i64 hs, T *y, Strides ys, int threads) {
    const bool past = streams(n, n.C, y, ys);
    for_samples(n, threads, [=](i64 b, i64 s) {
        const A *m = center + b * cs, *k = scale + b * ks, *h = shift + b * hs;
        const T *from = x + b * xs.b + s * xs.inner;
        fill(y + b * ys.b + s * ys.inner, n.C, past, [=](i64 c) { return k[c] * (load(from[c]) - m[c]) + h[c]; });
    });
}

// gradient_sums: Σ dy and Σ dy·(x - center).

template <class T, class A>
void sums_rows(Shape n, const T *dy, Strides ds, const T *x, Strides xs, const A *center, i64 cs, A *total, A *moment,
               int threads) {
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *gradient = dy + b * ds.b + c * ds.inner, *row = x + b * xs.b + c * xs.inner;
        const A m = center[b * cs + c];
        double sum = 0, product = 0;
        for_runs(n.S, [&](i64 from, i64 to) {
            A part = 0, part_product = 0;
#pragma omp simd reduction(+ : part, part_product)
            for (i64 s = from; s < to; ++s) {
                const A g = load(gradient[s]);
                part += g;
                part_product += g * (load(row[s]) - m);
            }
            sum += double(part);
            product += double(part_product);
        });
        total[b * n.C + c] = A(sum);
        moment[b * n.C + c] = A(product);
    });
}

template <class T, class A, class Width>
void sums_tile(const Shape &n, const T *dy, i64 dy_step, const T *x, i64 x_step, const A *center, Width wide, A *total,
               A *moment) {
    double sum[TILE] = {}, product[TILE] = {};
    for_runs(n.S, [&](i64 from, i64 to) {
        A part[TILE] = {}, part_product[TILE] = {};
        for (i64 s = from; s < to; ++s) {
            const T *gradient = dy + s * dy_step, *row = x + s * x_step;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const A g = load(gradient[c]);
                part[c] += g;
                part_product[c] += g * (load(row[c]) - center[c]);
            }
        }
        for (i64 c = 0; c < wide; ++c) {
            sum[c] += double(part[c]);
            product[c] += double(part_product[c]);
        }
    });
    for (i64 c = 0; c < wide; ++c) {
        total[c] = A(sum[c]);
        moment[c] = A(product[c]);
    }
}

template <class T, class A>
void sums_last(Shape n, const T *dy, Strides ds, const T *x, Strides xs, const A *center, i64 cs, A *total, A *moment,
               int threads) {
    for_tiles(n, threads, [=](i64 b, i64 c, i64 width) {
        const T *gradient = dy + b * ds.b + c, *tile = x + b * xs.b + c;
        const i64 at = b * n.C + c;
        with_width(width, [&](auto wide) {
            sums_tile(n, gradient, ds.inner, tile, xs.inner, center + b * cs + c, wide, total + at, moment + at);
        });
    });
}

// input_gradient: scale * dy + slope * (x - center) + offset.

template <class T, class A>
void gradient_rows(Shape n, const T *dy, Strides ds, const T *x, Strides xs, const A *scale, i64 ks, const A *center,
                   i64 cs, const A *slope, i64 ps, const A *offset, i64 qs, T *dx, Strides os, int threads) {
    const bool past = streams(n, n.S, dx, os);
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *gradient = dy + b * ds.b + c * ds.inner, *row = x + b * xs.b + c * xs.inner;
        const A k = scale[b * ks + c], m = center[b * cs + c], p = slope[b * ps + c], q = offset[b * qs + c];
        fill(dx + b * os.b + c * os.inner, n.S, past,
             [=](i64 s) { return k * load(gradient[s]) + (p * (load(row[s]) - m) + q); });
    });
}

template <class T, class A>
void gradient_last(Shape n, const T *dy, Strides ds, const T *x, Strides xs, const A *scale, i64 ks, const A *center,
                   i64 cs, const A *slope, i64 ps, const A *offset, i64 qs, T *dx, Strides os, int threads) {
    const bool past = streams(n, n.C, dx, os);
    for_samples(n, threads, [=](i64 b, i64 s) {
        const A *k = scale + b * ks, *m = center + b * cs, *p = slope + b * ps, *q = offset + b * qs;
        const T *gradient = dy + b * ds.b + s * ds.inner, *row = x + b * xs.b + s * xs.inner;
        fill(dx + b * os.b + s * os.inner, n.C, past,
             [=](i64 c) { return k[c] * load(gradient[c]) + (p[c] * (load(row[c]) - m[c]) + q[c]); });
    });
}

// scale_gradient: scale * dy.

template <class T, class A>
void rescale_rows(Shape n, const T *dy, Strides ds, const A *scale, i64 ks, T *dx, Strides os, int threads) {
    const bool past = streams(n, n.S, dx, os);
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *gradient = dy + b * ds.b + c * ds.inner;
        const A k = scale[b * ks + c];
        fill(dx + b * os.b + c * os.inner, n.S, past, [=](i64 s) { return k * load(gradient[s]); });
    });
}

template <class T, class A>
void rescale_last(Shape n, const T *dy, Strides ds, const A *scale, i64 ks, T *dx, Strides os, int threads) {
    const bool past = streams(n, n.C, dx, os);
    for_samples(n, threads, [=](i64 b, i64 s) {
        const A *k = scale + b * ks;
        const T *gradient = dy + b * ds.b + s * ds.inner;
        fill(dx + b * os.b + s * os.inner, n.C, past, [=](i64 c) { return k[c] * load(gradient[c]); });
    });
}

} // namespace

// The C ABI. `dtype` is 0 float, 1 double, 2 bfloat16, 3 float16; `last` tells the layout. `shape` is (B, C, S), and
// each tensor comes with its two strides, each table with its stride over B. Returns 0, or 1 for an unknown dtype.

#ifdef __FLT16_MAX__
#define GN_FLOAT16(call) case 3: { using T = float16; using A = float; call; return 0; }
#else
#define GN_FLOAT16(call)
#endif
#define GN_DISPATCH(call)                                                                                              \
    switch (dtype) {                                                                                                   \
        case 0: { using T = float; using A = float; call; return 0; }                                                  \
        case 1: { using T = double; using A = double; call; return 0; }                                                \
        case 2: { using T = bfloat16; using A = float; call; return 0; }                                               \
        GN_FLOAT16(call)                                                                                               \
        default: return 1;                                                                                             \
    }

namespace {
Shape shape_of(const i64 *n) { return {n[0], n[1], n[2]}; }
Strides strides_of(const i64 *s) { return {s[0], s[1]}; }
} // namespace

GN_EXPORT(moments)(i64 dtype, i64 last, i64 threads, const i64 *shape, const void *x, const i64 *xs, double *mean,
                   double *var) {
    const Shape n = shape_of(shape);
    GN_DISPATCH((void)sizeof(A); if (last) moments_last<T>(n, static_cast<const T *>(x), strides_of(xs), mean, var, threads);
                else moments_rows<T>(n, static_cast<const T *>(x), strides_of(xs), mean, var, int(threads)))
}

GN_EXPORT(transform)(i64 dtype, i64 last, i64 threads, const i64 *shape, const void *x, const i64 *xs,
                     const void *center, i64 cs, const void *scale, i64 ks, const void *shift, i64 hs, void *y,
                     const i64 *ys) {
    const Shape n = shape_of(shape);
    GN_DISPATCH((last ? transform_last<T, A> : transform_rows<T, A>)(
        n, static_cast<const T *>(x), strides_of(xs), static_cast<const A *>(center), cs,
        static_cast<const A *>(scale), ks, static_cast<const A *>(shift), hs, static_cast<T *>(y), strides_of(ys),
        threads))
}

GN_EXPORT(gradient_sums)(i64 dtype, i64 last, i64 threads, const i64 *shape, const void *dy, const i64 *ds,
                         const void *x, const i64 *xs, const void *center, i64 cs, void *total, void *moment) {
    const Shape n = shape_of(shape);
    GN_DISPATCH((last ? sums_last<T, A> : sums_rows<T, A>)(
        n, static_cast<const T *>(dy), strides_of(ds), static_cast<const T *>(x), strides_of(xs),
        static_cast<const A *>(center), cs, static_cast<A *>(total), static_cast<A *>(moment), int(threads)))
}

GN_EXPORT(input_gradient)(i64 dtype, i64 last, i64 threads, const i64 *shape, const void *dy, const i64 *ds,
                          const void *x, const i64 *xs, const void *scale, i64 ks, const void *center, i64 cs,
                          const void *slope, i64 ps, const void *offset, i64 qs, void *dx, const i64 *os) {
    const Shape n = shape_of(shape);
    GN_DISPATCH((last ? gradient_last<T, A> : gradient_rows<T, A>)(
        n, static_cast<const T *>(dy), strides_of(ds), static_cast<const T *>(x), strides_of(xs),
        static_cast<const A *>(scale), ks, static_cast<const A *>(center), cs, static_cast<const A *>(slope), ps,
        static_cast<const A *>(offset), qs, static_cast<T *>(dx), strides_of(os), int(threads)))
}

GN_EXPORT(scale_gradient)(i64 dtype, i64 last, i64 threads, const i64 *shape, const void *dy, const i64 *ds,
                          const void *scale, i64 ks, void *dx, const i64 *os) {
    const Shape n = shape_of(shape);
    GN_DISPATCH((last ? rescale_last<T, A> : rescale_rows<T, A>)(n, static_cast<const T *>(dy), strides_of(ds),
                                                                 static_cast<const A *>(scale), ks,
                                                                 static_cast<T *>(dx), strides_of(os), int(threads)))
}
