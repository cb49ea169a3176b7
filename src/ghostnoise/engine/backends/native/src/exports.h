// The C ABI. abi.py lists the same functions and argument types; a test compares the two, and the compiler compares
// this header with the definitions.
//
// `dtype` is that of x: 0 float, 1 double, 2 bfloat16, 3 float16. `last` is 1 if the channels of x are contiguous, and
// 0 if its positions are. A tensor is passed as its address and two strides, a table as its address, the number of
// samples that a row serves, and the index of its last row. In functions of tables alone, `dtype` is that of the
// tables, and `means` that of the samples' means: 0 float, 1 double. `starts` has the first sample of each of G ghost
// batches, and the number of samples. All functions return a Status.
//
// `part_of_large` is 1 if the result is a part of one that is written with non-temporal stores, although the part alone
// would be too small for these.

#pragma once

#include "tables.h"

enum Status { OK = 0, UNKNOWN_DTYPE = 1, OUT_OF_MEMORY = 2, INDEX_OUT_OF_RANGE = 3 };

#define GN_JOIN_(name, isa) gn_##name##_##isa
#define GN_JOIN(name, isa) GN_JOIN_(name, isa)
#define GN_FUNCTION(name) GN_JOIN(name, GN_ISA)
#define GN_EXPORT(name) GN_PUBLIC int GN_FUNCTION(name)
#define GN_TENSOR(name) void *name, i64 name##_b, i64 name##_inner
#define GN_TABLE(name) const void *name, i64 name##_per_row, i64 name##_last

// ---- passes over x ----

// mean = sum(x) / S and var = sum((x - mean)^2) / S over the positions of each sample (B, C).
GN_EXPORT(moments)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(x), double *mean, double *var);

// y = scale * (x - center) + shift.
GN_EXPORT(transform)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, i64 part_of_large, GN_TENSOR(x),
                     GN_TABLE(center), GN_TABLE(scale), GN_TABLE(shift), GN_TENSOR(y));

// The same for a pool that all samples share, with noise; `affine` has the rows of a NoisyAffine. The noise is (B, C),
// and null where there is none.
GN_EXPORT(noisy_transform)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(x), void *affine,
                           const void *m, const void *k, GN_TENSOR(y));

// total = sum(dy) and moment = sum(dy * (x - center)) over the positions of each sample (B, C). For a single position
// with contiguous channels, `total` may be null: it is dy itself.
GN_EXPORT(gradient_sums)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(dy), GN_TENSOR(x),
                         GN_TABLE(center), void *total, void *moment);

// dx = gain * scale * dy + slope * (x - center) + offset.
GN_EXPORT(input_gradient)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, i64 part_of_large, GN_TENSOR(dy),
                          GN_TENSOR(x), GN_TABLE(scale), GN_TABLE(gain), GN_TABLE(center), GN_TABLE(slope),
                          GN_TABLE(offset), GN_TENSOR(dx));

// dx = scale * dy.
GN_EXPORT(scale_gradient)(i64 dtype, i64 last, i64 threads, i64 B, i64 C, i64 S, GN_TENSOR(dy), GN_TABLE(scale),
                          GN_TENSOR(dx));

// ---- tables ----

// The moments of each ghost batch (G, C); if `exclusive`, those of each sample's ghost batch without the sample (B, C).
GN_EXPORT(pool)(i64 means, i64 exclusive, i64 threads, i64 G, const i64 *starts, i64 C, const void *mean,
                const double *var, double *to_mean, double *to_var);

// The coefficients of R pools, from their statistics. `least` is the least value of var + eps. Weight and bias may be
// null.
GN_EXPORT(coefficients)(i64 dtype, i64 threads, i64 R, i64 C, const double *mean, const double *var, double eps,
                        double least, const void *weight, const void *bias, void *to);

// From the sums `total` and `moment` (B, C) to the gradients of weight and bias (C,), and of the statistics (R, C),
// each of which serves `per_pool` samples. The coefficients are tables as `coefficients` makes them. If not null,
// `carried` holds the sums (2, C) for weight and bias over the samples before these, and then also over these.
GN_EXPORT(statistics_gradient)(i64 dtype, i64 threads, i64 B, i64 C, i64 R, i64 per_pool, const void *total,
                               const void *moment, const void *m, const void *k, const void *coefficients,
                               const double *var, double eps, double least, void *to_weight, void *to_bias,
                               void *to_mean, void *to_var, double *carried);

// The linear terms of the input gradient, slope * (x - center) + offset, from the gradient of the statistics of ghost
// batches (G, C).
GN_EXPORT(linear_term)(i64 dtype, i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const double *mean,
                       const void *g_mean, const void *g_var, void *center, void *slope, void *offset);

// The same for exclusive statistics (B, C): `mean` has the samples' own means, `pooled` those of their pools.
GN_EXPORT(exclusive_linear_term)(i64 dtype, i64 means, i64 threads, i64 G, const i64 *starts, i64 C, i64 S,
                                 const void *mean, const double *pooled, const void *g_mean, const void *g_var,
                                 void *center, void *slope, void *offset);

// Updates running buffers (C,) and the batch count, unless the updated values are not finite. Each of the three may be
// null. A factor below 0 stands for the cumulative average.
GN_EXPORT(update_running)(i64 dtype, i64 C, void *mean, void *var, i64 *count, const double *to_mean,
                          const double *to_var, double factor);

// The moments (K, C) of the samples in each of K rows of N indices, the mean relative to `around` (C,).
GN_EXPORT(pool_drawn)(i64 means, i64 dtype, i64 threads, i64 B, i64 C, i64 K, i64 N, const void *mean,
                      const double *var, const i64 *indices, const double *around, void *to_mean, void *to_var);

// Noise (K, C) from drawn samples as in `pool_drawn`, or if `seed` is not null from a law (law.h) with the variances of
// the samples, or if both are null from the moments `ghost_mean` and `ghost_var` (K, C): scale = sqrt((pool_var +
// margin) / (var + margin)), and shift = mean. With the coefficients of a pool that all samples share, the shift is
// multiplied by its rstd. Unless `to_scale` is null, also what is then applied to x; unless `to_y` is null, instead the
// result y, where the means are x itself and as many rows as samples are drawn.
GN_EXPORT(noise_tables)(i64 means, i64 dtype, i64 threads, i64 B, i64 C, i64 K, i64 N, const void *mean,
                        const double *var, const i64 *indices, const double *around, const void *ghost_mean,
                        const void *ghost_var, const i64 *seed, const double *law, const void *quantiles, i64 shifts,
                        i64 scales, const double *pool_var, const double *margin, const void *coefficients,
                        const void *weight, const void *bias, void *to_m, void *to_k, void *to_scale, void *to_shift,
                        void *to_y);

// ---- fused: all steps of one direction in one call; `geometry` has the numbers of a Geometry, then the starts ----
//
// The arguments are the members of a struct, which Python packs faster than ctypes converts as many arguments.

// Makes the samples' moments unless null, the pooled statistics (R, C), the noise, and y. With a single position the
// samples are their own means: `mean` is x, a copy of it in the arithmetic of x, or null, and `var` is null. Weight,
// bias, pooled statistics, noise, indices and seed may be null. Unless `reference_mean` is null, all samples share one
// pool, Batch Renormalization corrects it towards the reference (C,), `limits` has r_max and d_max, and r and d are
// made (C,). Unless `population` is 0, updates running buffers as `update_running` does: towards the moments of the
// whole batch (1), or the averages over samples of the moments of their ghost batches (2), with the variance multiplied
// by `bessel`.
struct ForwardCall {
    i64 dtype;
    const i64 *geometry;
    void *x;
    const void *weight, *bias;
    double eps, least;
    const i64 *indices;
    i64 N;
    const i64 *seed;
    const double *law;
    const void *quantiles;
    double noise_eps;
    i64 means;
    void *mean;
    double *var, *pooled_mean, *pooled_var;
    void *m, *k;
    i64 live;  // whether the reference is first copied from the running statistics
    double *reference_mean, *reference_var;
    const double *limits;
    void *r, *d;
    i64 population;
    double bessel;
    i64 buffers;
    void *running_mean, *running_var;
    i64 *count;
    double factor;
    void *y;
};

GN_EXPORT(fused_forward)(const ForwardCall *call);

// Makes the gradients of weight and bias (C,), and unless dx is null that of x. `mean` and `var` are the statistics
// of the pools, or if these are exclusive the moments of the samples.
struct BackwardCall {
    i64 dtype;
    const i64 *geometry;
    void *dy, *x;
    const void *weight;
    double eps, least;
    i64 means;
    void *mean;
    double *var;
    void *m, *k;
    const void *r, *d;
    void *to_weight, *to_bias, *dx;
};

GN_EXPORT(fused_backward)(const BackwardCall *call);

// Makes the tables (B, C) of noise of x from drawn samples: unless null, its shift m and its scale k.
struct NoiseCall {
    i64 dtype;
    const i64 *geometry;
    void *x;
    const i64 *indices;
    i64 N;
    double eps;
    void *m, *k;
};

GN_EXPORT(fused_noise)(const NoiseCall *call);
