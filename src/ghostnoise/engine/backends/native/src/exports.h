// The C ABI of the passes and tables that whole.cpp runs one after the other.
//
// `dtype` is that of x: 0 float, 1 double, 2 bfloat16, 3 float16; `last` tells the layout. A tensor comes as its address
// and two strides, a table as its address, the samples that a row serves, and its last row. For functions of tables
// alone, `dtype` is that of the tables, and `means` that of the samples' means: 0 float, 1 double. All return 0, or 1 for
// an unknown dtype.

#pragma once

#include "common.h"

#define GN_TENSOR(name) void *name, i64 name##_b, i64 name##_inner
#define GN_TABLE(name) const void *name, i64 name##_each, i64 name##_last

GN_EXPORT(moments)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(x), double *mean, double *var);

GN_EXPORT(transform)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(x), GN_TABLE(center),
                     GN_TABLE(scale), GN_TABLE(shift), GN_TENSOR(y));

// `tables` are those of a Blend, m and k may be null.
GN_EXPORT(blend)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(x), void *tables, const void *m,
                 const void *k, GN_TENSOR(y));

GN_EXPORT(gradient_sums)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(dy), GN_TENSOR(x),
                         GN_TABLE(center), void *total, void *moment);

GN_EXPORT(input_gradient)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(dy), GN_TENSOR(x),
                          GN_TABLE(scale), GN_TABLE(gain), GN_TABLE(center), GN_TABLE(slope), GN_TABLE(offset),
                          GN_TENSOR(dx));

GN_EXPORT(pool)(i64 means, i64 others, i64 threads, i64 G, const i64 *starts, i64 C, const void *mean,
                const double *var, double *to_mean, double *to_var);

GN_EXPORT(standardize)(i64 dtype, i64 threads, i64 R, i64 C, const double *mean, const double *var, double eps,
                       double least, const void *weight, const void *bias, void *to);

GN_EXPORT(pull)(i64 dtype, i64 threads, i64 B, i64 C, i64 R, i64 each, const void *total, const void *moment,
                const void *m, const void *k, const void *standard, const double *var, double eps, double least,
                const void *weight, void *to_weight, void *to_bias, void *to_mean, void *to_var, double *carried);

GN_EXPORT(everyone_ramp)(i64 dtype, i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const double *mean,
                         const void *g_mean, const void *g_var, void *center, void *slope, void *offset);

GN_EXPORT(others_ramp)(i64 dtype, i64 means, i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const void *mean,
                       const double *pooled, const void *g_mean, const void *g_var, void *center, void *slope,
                       void *offset);

GN_EXPORT(inject)(i64 means, i64 dtype, i64 threads, i64 B, i64 C, i64 K, i64 N, const void *mean, const double *var,
                  const i64 *indices, const double *around, const void *m, const void *s2, i64 shifts, i64 scales,
                  const double *whole_var, const double *margin, const void *standard, const void *weight,
                  const void *bias, void *to_m, void *to_k, void *to_scale, void *to_shift);
