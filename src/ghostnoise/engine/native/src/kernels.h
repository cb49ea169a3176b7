// What the operators and the kernels share: their arguments, the signature of each kernel, and one table of kernels for
// each instruction set. Plain data only: an inline function in this header would be compiled for every instruction set,
// and the linker keeps any one of the copies.

#pragma once

#include <cstdint>

namespace ghostnoise {

using i64 = std::int64_t;

enum class Status { OK, OUT_OF_MEMORY, INDEX_OUT_OF_RANGE };

enum class Dtype { FLOAT, DOUBLE, BFLOAT16, FLOAT16 };

constexpr i64 GRAIN = 1 << 15;  // elements that justify waking the threads, as for torch's own operators

// The numbers of a pass over x (B, C, S). Its layout is `last` where the channels of each position are contiguous;
// otherwise the positions of each channel are.
struct Pass {
    Dtype dtype;
    bool last;
    i64 threads, B, C, S;
};

// A tensor (B, C, S), with its strides over samples and over channels, or over positions where the layout is `last`.
struct Input {
    const void *at;
    i64 b, inner;
};
struct Output {
    void *at;
    i64 b, inner;
};

// A table (R, C) in the arithmetic of x, of which each row serves `per_row` consecutive samples; the last row also
// serves those left over.
struct Table {
    const void *at;
    i64 per_row, last;
};

// A table in double, or in the arithmetic of x unless `wide`. The stride over rows is 0 where all samples share one.
struct GivenTable {
    const void *at;
    bool wide;
    i64 row, channel;
};

// A batch, its layout and its ghost batches. `made` is the result: y, or dx.
struct Geometry {
    Dtype dtype;
    bool last, exclusive;
    i64 threads, B, C, S;
    i64 x_b, x_inner, dy_b, dy_inner, made_b, made_inner;
    i64 per_pool;       // samples of a pool, but for the last one
    i64 G;              // ghost batches
    const i64 *starts;  // their first samples, and the number of samples
};

// Where noise comes from: N drawn samples, or a seed and a law (law.h); neither if both are null.
struct NoiseSource {
    const i64 *indices;
    i64 N;
    const i64 *seed;
    const double *law;
    const void *quantiles;
    double eps;
};

// Batch Renormalization: from the pool's statistics towards the reference, within limits; no correction if it is null.
struct Renormalization {
    const double *mean, *var;
    double r_max, d_max;
    void *r, *d;
};

// The moments (C,) that running statistics are updated towards: those of the whole batch, or with `ghosts` the averages
// over samples of the moments of their ghost batches; not made if null.
struct Population {
    bool ghosts;
    double *mean, *var;
};

// The forward pass of a normalizer. `mean` and `var` are made: those of the pools, or of the samples of exclusive pools
// with several positions; both are null for exclusive pools with a single position, whose samples are their own means.
// Parameters and noise are in the arithmetic of x, and may be null. `least` is the least value of var + eps.
struct NormalizeCall {
    Geometry geometry;
    const void *x, *weight, *bias;
    double eps, least;
    double *mean, *var;
    NoiseSource noise;
    void *m, *k;  // shift and scale of the noise (B, C)
    Renormalization renormalization;
    Population population;
    void *y;
};

// Its backward pass, with `mean` and `var` as the forward pass made them. Without dx, only the gradients of weight and
// bias are made.
struct NormalizeBackwardCall {
    Geometry geometry;
    const void *dy, *x, *weight;
    double eps, least;
    const double *mean, *var;
    const void *m, *k, *r, *d;
    void *g_weight, *g_bias, *dx;
};

// Noise alone from drawn samples, y = (x - m) * k; at least one of m and k is made.
struct GhostNoiseCall {
    Geometry geometry;
    const void *x;
    NoiseSource noise;
    void *m, *k, *y;
};

namespace signatures {

// mean = sum(x) / S and var = sum((x - mean)^2) / S over the positions of each sample (B, C). With a single position,
// `var` may be null.
using moments = Status(const Pass &, Input x, double *mean, double *var);

// y = scale * (x - center) + shift. `part_of_large`: the result is a part of one that is written with non-temporal
// stores, although the part alone would be too small for these.
using transform = Status(const Pass &, bool part_of_large, Input x, Table center, Table scale, Table shift, Output y);

// total = sum(dy) and moment = sum(dy * (x - center)) over the positions of each sample (B, C).
using gradient_sums = Status(const Pass &, Input dy, Input x, Table center, void *total, void *moment);

// dx = gain * scale * dy + slope * (x - center) + offset.
using input_gradient = Status(const Pass &, bool part_of_large, Input dy, Input x, Table scale, Table gain,
                              Table center, Table slope, Table offset, Output dx);

// A table (R, C) of numbers in the arithmetic of x, which is double if `wide`.
using convert = void(bool wide, i64 threads, i64 R, i64 C, GivenTable from, void *to);

// The tables (R, C) of slope * (x - center) + offset, one after another: the center is rounded, and the offset
// compensates for it.
using convert_linear = void(bool wide, i64 threads, i64 R, i64 C, GivenTable center, GivenTable slope,
                            GivenTable offset, void *to);

// Gradient sums (B, C) in double around the center itself, from those around the rounded center.
using widen_sums = void(bool wide, i64 threads, i64 B, i64 C, GivenTable center, const void *total, const void *moment,
                        double *to_total, double *to_moment);

// `transform` and `gradient_sums` of samples with a single position whose channels are contiguous.
using transform_single = void(const Pass &, Input x, GivenTable center, GivenTable scale, GivenTable shift, Output y);
using gradient_sums_single = void(const Pass &, Input dy, Input x, GivenTable center, double *total, double *moment);

// The moments of each sample's ghost batch (B, C), or of a single one (1, C), and from their gradients those of the
// samples' own moments. Variances that are null are 0, and gradients that are null are not made; with a single ghost
// batch, all samples have the same gradient of the variance (1, C).
using ghost_batches = void(i64 threads, i64 G, const i64 *starts, i64 C, const double *mean, const double *var,
                           double *to_mean, double *to_var);
using ghost_batches_backward = void(i64 threads, i64 G, const i64 *starts, i64 C, const double *g_mean,
                                    const double *g_var, const double *mean, const double *pooled, double *to_mean,
                                    double *to_var);

// The same for each sample's ghost batch without the sample (B, C).
using excluding_sample = void(i64 threads, i64 G, const i64 *starts, i64 C, const double *mean, const double *var,
                              double *to_mean, double *to_var);
using excluding_sample_backward = void(i64 threads, i64 G, const i64 *starts, i64 C, const double *g_mean,
                                       const double *g_var, const double *mean, const double *pooled, double *to_mean,
                                       double *to_var);

// weight / sqrt(max(var + eps, least)) of pools (R, C), where weight (C,) may be null; and from its gradient those of the
// variances, and of the weight unless null.
using normalizing_scale = void(i64 threads, i64 R, i64 C, const double *var, const double *weight, double eps,
                               double least, double *to);
using normalizing_scale_backward = void(i64 threads, i64 R, i64 C, const double *gradient, const double *var,
                                        const double *weight, double eps, double least, double *to_var,
                                        double *to_weight);

// The moments (K, C) of the samples in each of K rows of N indices of B samples.
using pool_drawn = Status(i64 threads, i64 B, i64 C, i64 K, i64 N, const double *mean, const double *var,
                          const i64 *indices, double *to_mean, double *to_var);

using normalize = Status(const NormalizeCall &);
using normalize_backward = Status(const NormalizeBackwardCall &);
using ghost_noise = Status(const GhostNoiseCall &);

}  // namespace signatures

struct Kernels {
    const char *level;
    signatures::moments *moments;
    signatures::transform *transform;
    signatures::gradient_sums *gradient_sums;
    signatures::input_gradient *input_gradient;
    signatures::convert *convert;
    signatures::convert_linear *convert_linear;
    signatures::widen_sums *widen_sums;
    signatures::transform_single *transform_single;
    signatures::gradient_sums_single *gradient_sums_single;
    signatures::ghost_batches *ghost_batches;
    signatures::ghost_batches_backward *ghost_batches_backward;
    signatures::excluding_sample *excluding_sample;
    signatures::excluding_sample_backward *excluding_sample_backward;
    signatures::normalizing_scale *normalizing_scale;
    signatures::normalizing_scale_backward *normalizing_scale_backward;
    signatures::pool_drawn *pool_drawn;
    signatures::normalize *normalize;
    signatures::normalize_backward *normalize_backward;
    signatures::ghost_noise *ghost_noise;
};

// Runs share(context, k) for each k below `shares` on torch's threads (operators.cpp).
void run_shares(i64 shares, void (*share)(void *context, i64 k), void *context);

// Requests huge pages for the memory of a large result (operators.cpp). Where malloc returns freed memory to the system,
// a large result is new memory each time, and page faults would take most of the time of a pass.
void request_huge_pages(const void *at, i64 bytes);

}  // namespace ghostnoise

#if defined(GN_ISA)
namespace ghostnoise::GN_ISA {

extern const Kernels kernels;

signatures::moments moments;
signatures::transform transform;
signatures::gradient_sums gradient_sums;
signatures::input_gradient input_gradient;
signatures::convert convert;
signatures::convert_linear convert_linear;
signatures::widen_sums widen_sums;
signatures::transform_single transform_single;
signatures::gradient_sums_single gradient_sums_single;
signatures::ghost_batches ghost_batches;
signatures::ghost_batches_backward ghost_batches_backward;
signatures::excluding_sample excluding_sample;
signatures::excluding_sample_backward excluding_sample_backward;
signatures::normalizing_scale normalizing_scale;
signatures::normalizing_scale_backward normalizing_scale_backward;
signatures::pool_drawn pool_drawn;
signatures::normalize normalize;
signatures::normalize_backward normalize_backward;
signatures::ghost_noise ghost_noise;

// The same for a pool that all samples share, with noise (B, C), which is null where there is none; `affine` has the
// rows of a NoisyAffine.
Status noisy_transform(const Pass &, Input x, const void *affine, const void *m, const void *k, Output y);

// The moments of samples (B, C): means in double, or in float unless `wide`. The variance is null where it is zero.
struct Samples {
    bool wide;
    const void *mean;
    const double *var;
};

// The moments of each ghost batch (G, C); if `exclusive`, those of each sample's ghost batch without the sample (B, C).
void pool(bool exclusive, i64 threads, i64 G, const i64 *starts, i64 C, Samples samples, double *mean, double *var);

// Noise (B, C) on samples whose pooled mean is `around` (C,): scale k = sqrt((pool_var + margin) / (var + margin)), and
// shift m = mean * unit, each unless null. For a law, pool_var is the variance of the channel. Unless y is null, also
// applies it to x, whose samples have a single position and are their own means; `affine` has the rows of a
// NoisyAffine.
struct NoiseTables {
    bool wide_arithmetic;
    i64 threads, B, C;
    Samples samples;
    NoiseSource source;
    const double *around, *pool_var, *margin;
    const void *unit, *affine;
    void *m, *k, *y;
};
Status noise_tables(const NoiseTables &);

}  // namespace ghostnoise::GN_ISA
#endif
