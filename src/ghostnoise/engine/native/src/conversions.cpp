// Tables that callers give in double, or in the arithmetic of x, in any strides; and the passes over samples with a
// single position, whose tables are as large as x: they are converted where they are used.

#include "passes.h"

namespace ghostnoise::GN_ISA {
namespace {

// Reads a part of a row of a table.
inline void read(const GivenTable &table, i64 r, i64 c0, i64 wide, double *to) {
    const i64 at = r * table.row + c0 * table.channel;
    if (table.wide && table.channel == 1)
        std::memcpy(to, static_cast<const double *>(table.at) + at, sizeof(double) * wide);
    else if (table.wide)
        for (i64 c = 0; c < wide; ++c)
            to[c] = static_cast<const double *>(table.at)[at + c * table.channel];
    else
        for (i64 c = 0; c < wide; ++c)
            to[c] = double(static_cast<const float *>(table.at)[at + c * table.channel]);
}

// Runs part(r, first channel, channels) over rows and tiles of channels.
template <class Part> void for_table(i64 threads, i64 R, i64 C, Part part) {
    in_parallel(threads, R, [=](i64 begin, i64 end, i64) {
        for (i64 r = begin; r < end; ++r)
            for (i64 c = 0; c < C; c += CHUNK)
                part(r, c, C - c < CHUNK ? C - c : CHUNK);
    });
}

template <class A> void convert(i64 threads, i64 R, i64 C, GivenTable from, A *to) {
    for_table(threads, R, C, [=](i64 r, i64 c0, i64 wide) {
        double line[CHUNK];
        read(from, r, c0, wide, line);
        for (i64 c = 0; c < wide; ++c)
            to[r * C + c0 + c] = A(line[c]);
    });
}

template <class A>
void convert_linear(i64 threads, i64 R, i64 C, GivenTable center, GivenTable slope, GivenTable offset, A *to) {
    for_table(threads, R, C, [=](i64 r, i64 c0, i64 wide) {
        double m[CHUNK], p[CHUNK], q[CHUNK];
        read(center, r, c0, wide, m);
        read(slope, r, c0, wide, p);
        read(offset, r, c0, wide, q);
        A *rounded = to + r * C + c0, *slopes = rounded + R * C, *offsets = slopes + R * C;
        for (i64 c = 0; c < wide; ++c) {
            rounded[c] = A(m[c]);
            slopes[c] = A(p[c]);
            offsets[c] = A(q[c] + p[c] * (double(A(m[c])) - m[c]));
        }
    });
}

template <class A>
void widen_sums(i64 threads, i64 B, i64 C, GivenTable center, const A *total, const A *moment, double *to_total,
                double *to_moment) {
    for_table(threads, B, C, [=](i64 b, i64 c0, i64 wide) {
        double m[CHUNK];
        read(center, b, c0, wide, m);
        const i64 at = b * C + c0;
        for (i64 c = 0; c < wide; ++c) {
            to_total[at + c] = double(total[at + c]);
            to_moment[at + c] = double(moment[at + c]) + (double(A(m[c])) - m[c]) * double(total[at + c]);
        }
    });
}

template <class T>
void transform_single(const Pass &n, Tensor<const T> x, GivenTable center, GivenTable scale, GivenTable shift,
                      Tensor<T> y) {
    using A = typename Arithmetic<T>::type;
    for_table(n.threads, n.B, n.C, [=](i64 b, i64 c0, i64 wide) {
        double m[CHUNK], p[CHUNK], q[CHUNK];
        read(center, b, c0, wide, m);
        read(scale, b, c0, wide, p);
        read(shift, b, c0, wide, q);
        const T *from = x.row(b, 0) + c0;
        T *to = y.row(b, 0) + c0;
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            store(to[c], A(p[c]) * (load(from[c]) - A(m[c])) + A(q[c] + p[c] * (double(A(m[c])) - m[c])));
    });
}

template <class T>
void gradient_sums_single(const Pass &n, Tensor<const T> dy, Tensor<const T> x, GivenTable center, double *total,
                          double *moment) {
    using A = typename Arithmetic<T>::type;
    for_table(n.threads, n.B, n.C, [=](i64 b, i64 c0, i64 wide) {
        double m[CHUNK];
        read(center, b, c0, wide, m);
        const T *dy_row = dy.row(b, 0) + c0, *x_row = x.row(b, 0) + c0;
        double *to_total = total + b * n.C + c0, *to_moment = moment + b * n.C + c0;
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const A gradient = load(dy_row[c]);
            to_total[c] = double(gradient);
            to_moment[c] = double(gradient * (load(x_row[c]) - A(m[c]))) + (double(A(m[c])) - m[c]) * double(gradient);
        }
    });
}

}  // namespace

void transform_single(const Pass &n, Input x, GivenTable center, GivenTable scale, GivenTable shift, Output y) {
    with_type(n.dtype, [&](auto type) {
        using T = decltype(type);
        transform_single<T>(n, tensor<T>(x), center, scale, shift, tensor<T>({n.B, n.C, n.S}, y));
    });
}

void gradient_sums_single(const Pass &n, Input dy, Input x, GivenTable center, double *total, double *moment) {
    with_type(n.dtype, [&](auto type) {
        using T = decltype(type);
        gradient_sums_single<T>(n, tensor<T>(dy), tensor<T>(x), center, total, moment);
    });
}

void convert(bool wide, i64 threads, i64 R, i64 C, GivenTable from, void *to) {
    if (wide)
        convert(threads, R, C, from, out<double>(to));
    else
        convert(threads, R, C, from, out<float>(to));
}

void convert_linear(bool wide, i64 threads, i64 R, i64 C, GivenTable center, GivenTable slope, GivenTable offset,
                    void *to) {
    if (wide)
        convert_linear(threads, R, C, center, slope, offset, out<double>(to));
    else
        convert_linear(threads, R, C, center, slope, offset, out<float>(to));
}

void widen_sums(bool wide, i64 threads, i64 B, i64 C, GivenTable center, const void *total, const void *moment,
                double *to_total, double *to_moment) {
    if (wide)
        widen_sums(threads, B, C, center, in<double>(total), in<double>(moment), to_total, to_moment);
    else
        widen_sums(threads, B, C, center, in<float>(total), in<float>(moment), to_total, to_moment);
}

}  // namespace ghostnoise::GN_ISA
