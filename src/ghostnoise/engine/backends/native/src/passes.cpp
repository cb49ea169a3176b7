// The passes of engine/backends/aten.py on CPUs, in plain C++ behind a C ABI. No Torch headers, no randomness.
//
// Compiled once for each instruction set, with GN_ISA naming the copy; level.cpp tells which one to run. Loops are
// plain and marked for vectorization; reassociation is allowed in the marked reductions only, never elsewhere, since
// the statistics rely on (x - rough) being computed as written.
//
// A tensor is (B, C, S) in one of two layouts: rows, where the S positions of each (b, c) are contiguous, and
// channels-last, where the C channels of each (b, s) are. A table is (R, C) and contiguous; each of its rows serves
// some consecutive samples. Arithmetic is in float, and in double for double; long sums are added up in double.

#include "exports.h"

#include <type_traits>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

struct Shape {
    i64 B, C, S;
};

template <class T> struct Tensor {  // strides over b, and over c (rows) or s (channels-last); the third is 1
    T *at;
    i64 b, inner;

    T *row(i64 sample, i64 i) const { return at + sample * b + i * inner; }
};

constexpr i64 TILE = 512;  // channels of a tile in channels-last passes, whose accumulators fit a core's first cache
constexpr i64 RUN = 256;   // positions that a lane or a channel sums in the arithmetic of x before it goes on in double
constexpr i64 SHORT = 1024;  // positions up to which rows are taken several at a time

template <class Part> void for_steps(i64 end, i64 step, Part part) {
    for (i64 from = 0; from < end; from += step)
        part(from, end - from < step ? end : from + step);
}

// Runs part(b, from, to) over the samples and over steps of `count` channels or positions.
template <class Part> void for_parts(i64 B, i64 count, i64 step, int threads, Part part) {
    const i64 parts = (count + step - 1) / step;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (i64 b = 0; b < B; ++b)
            for (i64 p = 0; p < parts; ++p)
                part(b, p * step, count - p * step < step ? count : (p + 1) * step);
        fence();
    }
}

// Channels that one call takes in rows passes: more where rows are short.
template <class A> i64 rows_step(i64 S) { return S <= 64 ? 64 : S <= SHORT ? Pack<A>::LANES : 1; }

// Calls run with the number of positions, as a constant where it is a common short one.
template <class Run> void with_positions(i64 S, Run run) {
    if (S == 16)
        run(std::integral_constant<i64, 16>());
    else if (S == 64)
        run(std::integral_constant<i64, 64>());
    else
        run(S);
}

// Whether to write past the caches: a result that they could not hold anyway, in rows of whole, aligned lines.
template <class T> bool streams(const Shape &n, i64 row, const Tensor<T> &to) {
    constexpr i64 LANES = 64 / sizeof(T), LARGE = i64(1) << 23;
    const bool aligned = reinterpret_cast<std::uintptr_t>(to.at) % 64 == 0 && to.b % LANES == 0 && to.inner % LANES == 0;
    return n.B * n.C * n.S * i64(sizeof(T)) >= LARGE && row % LANES == 0 && aligned;
}

// Asks for huge pages below a large result: malloc has it from the system anew where it does not keep freed memory, and
// then most of a pass would go into faults of small pages.
template <class T> Tensor<T> with_huge_pages(const Shape &n, const Tensor<T> &to) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t HUGE = std::uintptr_t(1) << 21;
    const i64 bytes = n.B * n.C * n.S * i64(sizeof(T));
    const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(to.at);
    const std::uintptr_t from = (begin + HUGE - 1) / HUGE * HUGE, end = (begin + std::uintptr_t(bytes)) / HUGE * HUGE;
    if (to.b == n.C * n.S && end > from)
        madvise(reinterpret_cast<void *>(from), end - from, MADV_HUGEPAGE);  // no harm if it is refused
#endif
    return to;
}

// Writes value(i) to a row.
template <class T, class Length, class Value> void fill(T *to, Length length, bool past_caches, Value value) {
    constexpr i64 LANES = 64 / sizeof(T);
    if (!past_caches) {
#pragma omp simd
        for (i64 i = 0; i < length; ++i)
            store(to[i], value(i));
        return;
    }
    for (i64 i = 0; i < length; i += LANES) {
        alignas(64) T line[LANES];
#pragma omp simd
        for (i64 k = 0; k < LANES; ++k)
            store(line[k], value(i + k));
        stream(to + i, line);
    }
}

template <class... Value> void clear(i64 count, Value *...values) { (std::memset(values, 0, sizeof(Value) * count), ...); }

// moments: two passes within a row; the second around a rough mean, so that nothing cancels.

template <class A> void write_moments(A rough, double rest, double square, i64 S, double &mean, double &var) {
    const double correction = rest / double(S), value = square / double(S) - correction * correction;
    mean = double(rough) + correction;
    var = value < 0 ? 0 : value;
}

// Runs part(r, s, count) over the packs of `rows` rows from `from` to `to`, the last of a row with fewer lanes.
template <class A, class Count, class Part> void for_packs(Count rows, i64 from, i64 to, Part part) {
    constexpr i64 LANES = Pack<A>::LANES;
    for (i64 r = 0; r < rows; ++r) {
        i64 s = from;
        for (; s + LANES <= to; s += LANES)
            part(r, s, std::integral_constant<i64, LANES>());
        if (s < to)
            part(r, s, to - s);
    }
}

template <class A, class T, class Count> Pack<A> values(const T *from, Count count, A rest) {
    Pack<A> pack;
    if constexpr (std::is_same_v<Count, std::integral_constant<i64, Pack<A>::LANES>>)
        pack.load_from(from);
    else
        pack.load_part(from, count, rest);
    return pack;
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

// Runs block(c, rows) over channels, as many at a time as a pack has lanes.
template <class A, class Block> void for_blocks(i64 from, i64 to, Block block) {
    constexpr i64 LANES = Pack<A>::LANES;
    for (; from + LANES <= to; from += LANES)
        block(from, std::integral_constant<i64, LANES>());
    if (from < to)
        block(from, to - from);
}

template <class T> void moments_rows(Shape n, Tensor<const T> x, double *mean, double *var, int threads) {
    using A = typename Arithmetic<T>::type;
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            for_blocks<A>(from, to, [=](i64 c, auto rows) {
                moments_of_rows(x.row(b, c), x.inner, rows, S, mean + b * n.C + c, var + b * n.C + c);
            });
        });
    });
}

// Runs part(s, c, count) over positions and packs of channels; the count is a constant where it is full.
template <class A, class Part> void for_tile_packs(i64 from, i64 to, i64 wide, Part part) {
    constexpr i64 LANES = Pack<A>::LANES;
    for (i64 s = from; s < to; ++s) {
        i64 c = 0;
        for (; c + LANES <= wide; c += LANES)
            part(s, c, std::integral_constant<i64, LANES>());
        if (c < wide)
            part(s, c, wide - c);
    }
}

// Adds a pack to what is at `to`, whose length is a multiple of a pack.
template <class A> void add(A *to, const Pack<A> &pack) {
    Pack<A> sum;
    std::memcpy(&sum, to, 64);
    sum.lanes += pack.lanes;
    std::memcpy(to, &sum, 64);
}

template <class T> void moments_last(Shape n, Tensor<const T> x, double *mean, double *var, int threads) {
    using A = typename Arithmetic<T>::type;
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
                std::memcpy(&around, rough + c, 64);
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
                    int threads) {
    const bool past = streams(n, n.S, y);
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            const A *centers = center.of(b), *scales = scale.of(b), *shifts = shift.of(b);
            for (i64 c = from; c < to; ++c) {
                const T *row = x.row(b, c);
                const A m = centers[c], k = scales[c], h = shifts[c];
                fill(y.row(b, c), S, past, [=](i64 s) { return k * (load(row[s]) - m) + h; });
            }
        });
    });
}

template <class T, class A>
void transform_last(Shape n, Tensor<const T> x, Rows<A> center, Rows<A> scale, Rows<A> shift, Tensor<T> y,
                    int threads) {
    const bool past = streams(n, n.C, y);
    for_parts(n.B, n.S, 16, threads, [=](i64 b, i64 from, i64 to) {
        const A *m = center.of(b), *k = scale.of(b), *h = shift.of(b);
        for (i64 s = from; s < to; ++s) {
            const T *row = x.row(b, s);
            fill(y.row(b, s), n.C, past, [=](i64 c) { return k[c] * (load(row[c]) - m[c]) + h[c]; });
        }
    });
}

// blend: the same with scale and shift from noise, without tables of these.

template <class T, class A>
void blend_rows(Shape n, Tensor<const T> x, Blend<A> blend, const A *m, const A *k, Tensor<T> y, int threads) {
    const bool past = streams(n, n.S, y);
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            for (i64 c = from; c < to; ++c) {
                const T *row = x.row(b, c);
                const A around = blend.center[c], by = k ? k[b * n.C + c] : A(1);
                const A scale = blend.scale(c, by), shift = blend.shift(c, m ? m[b * n.C + c] : A(0), by);
                fill(y.row(b, c), S, past, [=](i64 s) { return scale * (load(row[s]) - around) + shift; });
            }
        });
    });
}

template <class T, class A>
void blend_last(Shape n, Tensor<const T> x, Blend<A> blend, const A *m, const A *k, Tensor<T> y, int threads) {
    const bool past = streams(n, n.C, y);
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
                        scale[c] = blend.scale(c0 + c, by);
                        shift[c] = blend.shift(c0 + c, decltype(shifts)::value ? m[at + c] : A(0), by);
                    }
                });
            });
            const A *around = blend.center + c0, *by = scale, *added = shift;
            for (i64 s = from; s < to; ++s) {
                const T *row = x.row(b, s) + c0;
                fill(y.row(b, s) + c0, wide, past, [=](i64 c) { return by[c] * (load(row[c]) - around[c]) + added[c]; });
            }
        }
    });
}

// gradient_sums: Σ dy and Σ dy·(x - center).

template <class T, class A>
void sums_rows(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> center, A *total, A *moment, int threads) {
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

// Of a single position: the products, and where it is asked for the gradient itself as its sum.
template <class T, class A>
void sums_single(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> center, A *total, A *moment, int threads) {
    for_parts(n.B, n.C, n.C, threads, [=](i64 b, i64, i64) {
        const T *gradient = dy.row(b, 0), *row = x.row(b, 0);
        const A *m = center.of(b);
        fill(moment + b * n.C, n.C, false, [=](i64 c) { return load(gradient[c]) * (load(row[c]) - m[c]); });
        if (total)
            fill(total + b * n.C, n.C, false, [=](i64 c) { return load(gradient[c]); });
    });
}

template <class T, class A>
void sums_last(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> center, A *total, A *moment, int threads) {
    if (n.S == 1)
        return sums_single(n, dy, x, center, total, moment, threads);
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
                std::memcpy(&m, around + c, 64);
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
void gradient_rows(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> scale, Rows<A> gain, Rows<A> center,
                   Rows<A> slope, Rows<A> offset, Tensor<T> dx, int threads) {
    const bool past = streams(n, n.S, dx);
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            const A *scales = scale.of(b), *gains = gain.of(b), *centers = center.of(b);
            const A *slopes = slope.of(b), *offsets = offset.of(b);
            for (i64 c = from; c < to; ++c) {
                const T *gradient = dy.row(b, c), *row = x.row(b, c);
                const A k = scales[c] * gains[c], m = centers[c], p = slopes[c], q = offsets[c];
                fill(dx.row(b, c), S, past,
                     [=](i64 s) { return k * load(gradient[s]) + (p * (load(row[s]) - m) + q); });
            }
        });
    });
}

template <class T, class A>
void gradient_last(Shape n, Tensor<const T> dy, Tensor<const T> x, Rows<A> scale, Rows<A> gain, Rows<A> center,
                   Rows<A> slope, Rows<A> offset, Tensor<T> dx, int threads) {
    const bool past = streams(n, n.C, dx);
    for_parts(n.B, n.S, 16, threads, [=](i64 b, i64 from, i64 to) {
        const A *k = scale.of(b), *g = gain.of(b), *m = center.of(b), *p = slope.of(b), *q = offset.of(b);
        for (i64 s = from; s < to; ++s) {
            const T *gradient = dy.row(b, s), *row = x.row(b, s);
            fill(dx.row(b, s), n.C, past,
                 [=](i64 c) { return k[c] * g[c] * load(gradient[c]) + (p[c] * (load(row[c]) - m[c]) + q[c]); });
        }
    });
}

// scale_gradient: scale * dy.

template <class T, class A> void rescale_rows(Shape n, Tensor<const T> dy, Rows<A> scale, Tensor<T> dx, int threads) {
    const bool past = streams(n, n.S, dx);
    with_positions(n.S, [=](auto S) {
        for_parts(n.B, n.C, rows_step<A>(S), threads, [=](i64 b, i64 from, i64 to) {
            const A *scales = scale.of(b);
            for (i64 c = from; c < to; ++c) {
                const T *gradient = dy.row(b, c);
                const A k = scales[c];
                fill(dx.row(b, c), S, past, [=](i64 s) { return k * load(gradient[s]); });
            }
        });
    });
}

template <class T, class A> void rescale_last(Shape n, Tensor<const T> dy, Rows<A> scale, Tensor<T> dx, int threads) {
    const bool past = streams(n, n.C, dx);
    for_parts(n.B, n.S, 16, threads, [=](i64 b, i64 from, i64 to) {
        const A *k = scale.of(b);
        for (i64 s = from; s < to; ++s) {
            const T *gradient = dy.row(b, s);
            fill(dx.row(b, s), n.C, past, [=](i64 c) { return k[c] * load(gradient[c]); });
        }
    });
}

} // namespace

// The C ABI, as exports.h says it.

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
#define GN_IN(name) Tensor<const T>{static_cast<const T *>(name), name##_b, name##_inner}
#define GN_OUT(name) with_huge_pages(n, Tensor<T>{static_cast<T *>(name), name##_b, name##_inner})
#define GN_ROWS(name) Rows<A>{static_cast<const A *>(name), name##_each, name##_last, n.C}

GN_EXPORT(moments)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(x), double *mean, double *var) {
    const Shape n = {B, C, S};
    GN_DISPATCH((void)sizeof(A); (last ? moments_last<T> : moments_rows<T>)(n, GN_IN(x), mean, var, int(threads)))
}

GN_EXPORT(transform)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(x), GN_TABLE(center),
                     GN_TABLE(scale), GN_TABLE(shift), GN_TENSOR(y)) {
    const Shape n = {B, C, S};
    GN_DISPATCH((last ? transform_last<T, A> : transform_rows<T, A>)(n, GN_IN(x), GN_ROWS(center), GN_ROWS(scale),
                                                                     GN_ROWS(shift), GN_OUT(y), int(threads)))
}

GN_EXPORT(blend)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(x), void *tables, const void *m,
                 const void *k, GN_TENSOR(y)) {
    const Shape n = {B, C, S};
    GN_DISPATCH((last ? blend_last<T, A> : blend_rows<T, A>)(n, GN_IN(x), Blend<A>(static_cast<A *>(tables), C),
                                                             static_cast<const A *>(m), static_cast<const A *>(k),
                                                             GN_OUT(y), int(threads)))
}

GN_EXPORT(gradient_sums)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(dy), GN_TENSOR(x),
                         GN_TABLE(center), void *total, void *moment) {
    const Shape n = {B, C, S};
    GN_DISPATCH((last ? sums_last<T, A> : sums_rows<T, A>)(n, GN_IN(dy), GN_IN(x), GN_ROWS(center),
                                                           static_cast<A *>(total), static_cast<A *>(moment),
                                                           int(threads)))
}

GN_EXPORT(input_gradient)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(dy), GN_TENSOR(x),
                          GN_TABLE(scale), GN_TABLE(gain), GN_TABLE(center), GN_TABLE(slope), GN_TABLE(offset),
                          GN_TENSOR(dx)) {
    const Shape n = {B, C, S};
    GN_DISPATCH((last ? gradient_last<T, A> : gradient_rows<T, A>)(
        n, GN_IN(dy), GN_IN(x), GN_ROWS(scale), GN_ROWS(gain), GN_ROWS(center), GN_ROWS(slope), GN_ROWS(offset), GN_OUT(dx),
        int(threads)))
}

GN_EXPORT(scale_gradient)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(dy), GN_TABLE(scale),
                          GN_TENSOR(dx)) {
    const Shape n = {B, C, S};
    GN_DISPATCH((last ? rescale_last<T, A> : rescale_rows<T, A>)(n, GN_IN(dy), GN_ROWS(scale), GN_OUT(dx),
                                                                 int(threads)))
}
