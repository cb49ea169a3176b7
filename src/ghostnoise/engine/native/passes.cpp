// The passes of engine/aten.py on CPUs, in plain C++ behind a C ABI. No Torch headers, no randomness.
//
// Compiled once for each instruction set, with GN_ISA naming the copy; dispatch.cpp picks one at run time. Loops are
// plain and marked for vectorization; reassociation is allowed in the marked reductions only, never elsewhere, since
// the statistics rely on (x - rough) being computed as written.
//
// A tensor is (B, C, S) in one of two layouts: rows, where the S positions of each (b, c) are contiguous, and
// channels-last, where the C channels of each (b, s) are. A table is (B, C), contiguous in C, with a stride over B
// that may be 0. Accumulation is in float, and in double for double.

#include <cstdint>
#include <cstring>

namespace {

using i64 = std::int64_t;

struct bfloat16 {
    std::uint16_t bits;
};

template <class T> struct Arithmetic { using type = float; };
template <> struct Arithmetic<double> { using type = double; };

inline float load(float value) { return value; }
inline double load(double value) { return value; }
inline float load(bfloat16 value) {
    std::uint32_t bits = std::uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline void store(float &to, float value) { to = value; }
inline void store(double &to, double value) { to = value; }
inline void store(bfloat16 &to, float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint32_t even = bits + 0x7fffu + ((bits >> 16) & 1u);  // to nearest, ties to even
    to.bits = std::uint16_t((value != value ? (bits | 0x400000u) : even) >> 16);
}

#ifdef __FLT16_MAX__
using float16 = _Float16;
inline float load(float16 value) { return float(value); }
inline void store(float16 &to, float value) { to = float16(value); }
#endif

struct Shape {
    i64 B, C, S;
};

struct Strides {  // over b, and over c (rows) or s (channels-last); the third is 1
    i64 b, inner;
};

constexpr i64 CHUNK = 64;  // channels that one tile of a channels-last pass keeps in registers

// Runs tile(b, first channel, channels) over all tiles, the last of a row of tiles narrower.
template <class Tile> void for_tiles(const Shape &n, int threads, Tile tile) {
    const i64 tiles = (n.C + CHUNK - 1) / CHUNK;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (i64 b = 0; b < n.B; ++b)
        for (i64 t = 0; t < tiles; ++t) {
            const i64 c = t * CHUNK;
            tile(b, c, n.C - c < CHUNK ? n.C - c : CHUNK);
        }
}

// Runs row(b, s) over all samples and positions.
template <class Row> void for_samples(const Shape &n, int threads, Row row) {
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (i64 b = 0; b < n.B; ++b)
        for (i64 s = 0; s < n.S; ++s)
            row(b, s);
}

// Runs row(b, c) over all samples and channels.
template <class Row> void for_rows(const Shape &n, int threads, Row row) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 b = 0; b < n.B; ++b)
        for (i64 c = 0; c < n.C; ++c)
            row(b, c);
}

// moments: two passes within a row; the second around a rough mean, so that nothing cancels.

template <class T> void moments_rows(Shape n, const T *x, Strides xs, double *mean, double *var, int threads) {
    using A = typename Arithmetic<T>::type;
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *row = x + b * xs.b + c * xs.inner;
        A sum = 0, rest = 0, square = 0;
#pragma omp simd reduction(+ : sum)
        for (i64 s = 0; s < n.S; ++s)
            sum += load(row[s]);
        const A rough = sum / A(n.S);
#pragma omp simd reduction(+ : rest, square)
        for (i64 s = 0; s < n.S; ++s) {
            const A d = load(row[s]) - rough;
            rest += d;
            square += d * d;
        }
        const double correction = double(rest) / double(n.S);
        const double value = double(square) / double(n.S) - correction * correction;
        mean[b * n.C + c] = double(rough) + correction;
        var[b * n.C + c] = value < 0 ? 0 : value;
    });
}

template <class T> void moments_last(Shape n, const T *x, Strides xs, double *mean, double *var, int threads) {
    using A = typename Arithmetic<T>::type;
    for_tiles(n, threads, [=](i64 b, i64 c0, i64 width) {
        const T *tile = x + b * xs.b + c0;
        double *to_mean = mean + b * n.C + c0, *to_var = var + b * n.C + c0;
        if (n.S == 1) {
            for (i64 c = 0; c < width; ++c) {
                to_mean[c] = double(load(tile[c]));
                to_var[c] = to_mean[c] - to_mean[c];  // 0, or not a number where x is not finite
            }
            return;
        }
        A rough[CHUNK] = {}, rest[CHUNK] = {}, square[CHUNK] = {};
        const auto passes = [&](i64 wide) {
            for (i64 s = 0; s < n.S; ++s) {
                const T *row = tile + s * xs.inner;
#pragma omp simd
                for (i64 c = 0; c < wide; ++c)
                    rough[c] += load(row[c]);
            }
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                rough[c] /= A(n.S);
            for (i64 s = 0; s < n.S; ++s) {
                const T *row = tile + s * xs.inner;
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const A d = load(row[c]) - rough[c];
                    rest[c] += d;
                    square[c] += d * d;
                }
            }
        };
        if (width == CHUNK)
            passes(CHUNK);  // a constant width keeps the accumulators in registers
        else
            passes(width);
        for (i64 c = 0; c < width; ++c) {
            const double correction = double(rest[c]) / double(n.S);
            const double value = double(square[c]) / double(n.S) - correction * correction;
            to_mean[c] = double(rough[c]) + correction;
            to_var[c] = value < 0 ? 0 : value;
        }
    });
}

// transform: scale * (x - center) + shift.

template <class T, class A>
void transform_rows(Shape n, const T *x, Strides xs, const A *center, i64 cs, const A *scale, i64 ks, const A *shift,
                    i64 hs, T *y, Strides ys, int threads) {
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *from = x + b * xs.b + c * xs.inner;
        T *to = y + b * ys.b + c * ys.inner;
        const A m = center[b * cs + c], k = scale[b * ks + c], h = shift[b * hs + c];
#pragma omp simd
        for (i64 s = 0; s < n.S; ++s)
            store(to[s], k * (load(from[s]) - m) + h);
    });
}

template <class T, class A>
void transform_last(Shape n, const T *x, Strides xs, const A *center, i64 cs, const A *scale, i64 ks, const A *shift,
                    i64 hs, T *y, Strides ys, int threads) {
    for_samples(n, threads, [=](i64 b, i64 s) {
        const A *m = center + b * cs, *k = scale + b * ks, *h = shift + b * hs;
        const T *from = x + b * xs.b + s * xs.inner;
        T *to = y + b * ys.b + s * ys.inner;
#pragma omp simd
        for (i64 c = 0; c < n.C; ++c)
            store(to[c], k[c] * (load(from[c]) - m[c]) + h[c]);
    });
}

// gradient_sums: Σ dy and Σ dy·(x - center).

template <class T, class A>
void sums_rows(Shape n, const T *dy, Strides ds, const T *x, Strides xs, const A *center, i64 cs, A *total, A *moment,
               int threads) {
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *gradient = dy + b * ds.b + c * ds.inner, *row = x + b * xs.b + c * xs.inner;
        const A m = center[b * cs + c];
        A sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
        for (i64 s = 0; s < n.S; ++s) {
            const A g = load(gradient[s]);
            sum += g;
            product += g * (load(row[s]) - m);
        }
        total[b * n.C + c] = sum;
        moment[b * n.C + c] = product;
    });
}

template <class T, class A>
void sums_last(Shape n, const T *dy, Strides ds, const T *x, Strides xs, const A *center, i64 cs, A *total, A *moment,
               int threads) {
    for_tiles(n, threads, [=](i64 b, i64 c0, i64 width) {
        A m[CHUNK], sum[CHUNK] = {}, product[CHUNK] = {};
        for (i64 c = 0; c < width; ++c)
            m[c] = center[b * cs + c0 + c];
        const auto pass = [&](i64 wide) {
            for (i64 s = 0; s < n.S; ++s) {
                const T *gradient = dy + b * ds.b + s * ds.inner + c0, *row = x + b * xs.b + s * xs.inner + c0;
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const A g = load(gradient[c]);
                    sum[c] += g;
                    product[c] += g * (load(row[c]) - m[c]);
                }
            }
        };
        width == CHUNK ? pass(CHUNK) : pass(width);
        for (i64 c = 0; c < width; ++c) {
            total[b * n.C + c0 + c] = sum[c];
            moment[b * n.C + c0 + c] = product[c];
        }
    });
}

// input_gradient: scale * dy + slope * (x - center) + offset.

template <class T, class A>
void gradient_rows(Shape n, const T *dy, Strides ds, const T *x, Strides xs, const A *scale, i64 ks, const A *center,
                   i64 cs, const A *slope, i64 ps, const A *offset, i64 qs, T *dx, Strides os, int threads) {
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *gradient = dy + b * ds.b + c * ds.inner, *row = x + b * xs.b + c * xs.inner;
        T *to = dx + b * os.b + c * os.inner;
        const A k = scale[b * ks + c], m = center[b * cs + c], p = slope[b * ps + c], q = offset[b * qs + c];
#pragma omp simd
        for (i64 s = 0; s < n.S; ++s)
            store(to[s], k * load(gradient[s]) + (p * (load(row[s]) - m) + q));
    });
}

template <class T, class A>
void gradient_last(Shape n, const T *dy, Strides ds, const T *x, Strides xs, const A *scale, i64 ks, const A *center,
                   i64 cs, const A *slope, i64 ps, const A *offset, i64 qs, T *dx, Strides os, int threads) {
    for_samples(n, threads, [=](i64 b, i64 s) {
        const A *k = scale + b * ks, *m = center + b * cs, *p = slope + b * ps, *q = offset + b * qs;
        const T *gradient = dy + b * ds.b + s * ds.inner, *row = x + b * xs.b + s * xs.inner;
        T *to = dx + b * os.b + s * os.inner;
#pragma omp simd
        for (i64 c = 0; c < n.C; ++c)
            store(to[c], k[c] * load(gradient[c]) + (p[c] * (load(row[c]) - m[c]) + q[c]));
    });
}

// scale_gradient: scale * dy.

template <class T, class A>
void rescale_rows(Shape n, const T *dy, Strides ds, const A *scale, i64 ks, T *dx, Strides os, int threads) {
    for_rows(n, threads, [=](i64 b, i64 c) {
        const T *gradient = dy + b * ds.b + c * ds.inner;
        T *to = dx + b * os.b + c * os.inner;
        const A k = scale[b * ks + c];
#pragma omp simd
        for (i64 s = 0; s < n.S; ++s)
            store(to[s], k * load(gradient[s]));
    });
}

template <class T, class A>
void rescale_last(Shape n, const T *dy, Strides ds, const A *scale, i64 ks, T *dx, Strides os, int threads) {
    for_samples(n, threads, [=](i64 b, i64 s) {
        const A *k = scale + b * ks;
        const T *gradient = dy + b * ds.b + s * ds.inner;
        T *to = dx + b * os.b + s * os.inner;
#pragma omp simd
        for (i64 c = 0; c < n.C; ++c)
            store(to[c], k[c] * load(gradient[c]));
    });
}

// draws: for each of M rows of indices (M, N), the moments of the N drawn samples, the mean around `around`. Each drawn
// row is read once for both moments, around the first drawn one: an outlier that was not drawn cannot cost digits, and
// one that was drawn makes the variance large.

template <class A>
void draws(i64 M, i64 N, i64 C, const double *mean, const double *var, const i64 *indices, const double *around,
           A *to_mean, A *to_var, int threads) {
    const i64 tiles = (C + CHUNK - 1) / CHUNK;
    // A thread stays within a column of tiles, whose rows of all samples fit its cache.
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (i64 t = 0; t < tiles; ++t)
        for (i64 k = 0; k < M; ++k) {
            const i64 c0 = t * CHUNK, width = C - c0 < CHUNK ? C - c0 : CHUNK, *row = indices + k * N;
            double sum[CHUNK] = {}, square[CHUNK] = {};
            const double *first = mean + row[0] * C + c0;
            const auto pass = [&](i64 wide) {
                for (i64 j = 0; j < N; ++j) {
                    const double *m = mean + row[j] * C + c0, *v = var + row[j] * C + c0;
#pragma omp simd
                    for (i64 c = 0; c < wide; ++c) {
                        const double d = m[c] - first[c];
                        sum[c] += d;
                        square[c] += v[c] + d * d;
                    }
                }
            };
            width == CHUNK ? pass(CHUNK) : pass(width);
            for (i64 c = 0; c < width; ++c) {
                const double d = sum[c] / double(N), value = square[c] / double(N) - d * d;
                to_mean[k * C + c0 + c] = A(first[c] - around[c0 + c] + d);
                to_var[k * C + c0 + c] = A(value < 0 ? 0 : value);
            }
        }
}

} // namespace

// The C ABI. `dtype` is 0 float, 1 double, 2 bfloat16, 3 float16; `last` tells the layout. `shape` is (B, C, S), and
// each tensor comes with its two strides, each table with its stride over B. Returns 0, or 1 for an unknown dtype.

#define GN_JOIN_(name, isa) gn_##name##_##isa
#define GN_JOIN(name, isa) GN_JOIN_(name, isa)
#define GN_EXPORT(name) extern "C" int GN_JOIN(name, GN_ISA)
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

// `dtype` is that of the results.
GN_EXPORT(draws)(i64 dtype, i64 threads, i64 rows, i64 drawn, i64 channels, const double *mean, const double *var,
                 const i64 *indices, const double *around, void *to_mean, void *to_var) {
    if (dtype == 0)
        draws(rows, drawn, channels, mean, var, indices, around, static_cast<float *>(to_mean),
              static_cast<float *>(to_var), threads);
    else if (dtype == 1)
        draws(rows, drawn, channels, mean, var, indices, around, static_cast<double *>(to_mean),
              static_cast<double *>(to_var), threads);
    else
        return 1;
    return 0;
}
