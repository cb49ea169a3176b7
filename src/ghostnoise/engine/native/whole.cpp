// A normalizer's whole forward pass, and its whole backward pass: the passes over x and the tables between them
// (engine/steps.py) in one call each, with all that only the next step needs in memory of the call's own. Threads stay
// awake from step to step.

#include "exports.h"

#include <cstdlib>

#define GN_RUN(name) GN_JOIN(name, GN_ISA)

namespace {

// What stays the same from call to call; engine/native_whole.py lists it in this order.
struct How {
    i64 last, threads, grain, B, C, S;
    i64 x_b, x_inner, dy_b, dy_inner, made_b, made_inner;  // the last two of what is made: y, or dx
    i64 others, each, G, starts[1];                        // G + 1 of them

    i64 pools() const { return others ? B : G; }
    i64 many(i64 elements) const { return elements >= grain ? threads : 1; }
};

template <class A> struct Scratch {
    A *at;

    explicit Scratch(i64 count) : at(static_cast<A *>(std::malloc(std::size_t(count) * sizeof(A)))) {}
    ~Scratch() { std::free(at); }
    Scratch(const Scratch &) = delete;
};

struct Floor {
    double eps, least;
};

// The moments of the samples, of which the variance is null where it is zero.
struct Samples {
    i64 means;
    void *mean;
    double *var;
};

struct Drawn {
    const i64 *indices;
    i64 N;
    double eps;
};

template <class A> struct Noise {
    A *m, *k;
};

template <class A> struct Parameters {
    const A *weight, *bias;
};

template <class A> constexpr i64 TABLES = sizeof(A) == sizeof(double);

void pool(const How &n, const Samples &from, double *stats) {
    GN_RUN(pool)(from.means, n.others, n.many(n.B * n.C), n.G, n.starts, n.C, from.mean, from.var, stats,
                 stats + n.pools() * n.C);
}

template <class A>
int normalize(i64 dtype, const How &n, void *x, Parameters<A> given, Floor floor, Drawn drawn, Samples samples,
              double *stats, Noise<A> noise, void *y) {
    const i64 B = n.B, C = n.C, S = n.S, R = n.pools(), size = R * C, many = n.many(B * C * S);
    if (S > 1 && GN_RUN(moments)(dtype, n.last, many, B, C, S, x, n.x_b, n.x_inner,
                                 static_cast<double *>(samples.mean), samples.var))
        return 1;
    pool(n, samples, stats);
    const Scratch<A> tables(5 * size + Blend<A>::ROWS * C);
    const Standard<A> standard(tables.at, size);
    GN_RUN(standardize)(TABLES<A>, n.many(size), R, C, stats, stats + size, floor.eps, floor.least, given.weight,
                        given.bias, tables.at);
    if (!drawn.indices)
        return GN_RUN(transform)(dtype, n.last, many, B, C, S, x, n.x_b, n.x_inner, standard.center, n.each, R - 1,
                                 standard.factor, n.each, R - 1, standard.shift, n.each, R - 1, y, n.made_b,
                                 n.made_inner);
    const Scratch<double> margin(C);
    for (i64 c = 0; c < C; ++c)  // of the variance that counts as 1 where x is normalized
        margin.at[c] = double(A(drawn.eps) * (A(1) / (standard.rstd[c] * standard.rstd[c])));
    GN_RUN(inject)(samples.means, TABLES<A>, n.many(B * C * drawn.N), B, C, B, drawn.N, samples.mean, samples.var,
                   drawn.indices, stats, nullptr, nullptr, noise.m != nullptr, noise.k != nullptr, stats + size,
                   margin.at, tables.at, given.weight, given.bias, noise.m, noise.k, nullptr, nullptr);
    const Blend<A> blend(tables.at + 5 * size, C);
    blend.fill(tables.at, given.weight, given.bias);
    return GN_RUN(blend)(dtype, n.last, many, B, C, S, x, n.x_b, n.x_inner, blend.center, noise.m, noise.k, y, n.made_b,
                         n.made_inner);
}

template <class A>
int gradient(i64 dtype, const How &n, void *dy, void *x, const A *weight, Floor floor, Samples kept, Noise<A> noise,
             A *parameters, void *dx) {
    const i64 B = n.B, C = n.C, S = n.S, R = n.pools(), size = R * C, many = n.many(B * C * S);
    const Scratch<double> pooled(n.others ? 2 * size : 0);
    const double *stats = static_cast<double *>(kept.mean), *vars = kept.var;
    if (n.others) {
        pool(n, kept, pooled.at);
        stats = pooled.at;
        vars = pooled.at + size;
    }
    const Scratch<A> tables(10 * size + 2 * B * C + C);
    const Standard<A> standard(tables.at, size);
    GN_RUN(standardize)(TABLES<A>, n.many(size), R, C, stats, vars, floor.eps, floor.least, weight, nullptr, tables.at);
    A *g_mean = tables.at + 5 * size, *g_var = g_mean + size, *center = g_var + size, *slope = center + size;
    A *offset = slope + size, *total = offset + size, *moment = total + B * C, *ones = moment + B * C;
    // Of a single position, dy itself may be its sum.
    const bool single = S == 1 && n.last && dtype < 2 && (n.dy_b == C || B == 1);
    if (GN_RUN(gradient_sums)(dtype, n.last, many, B, C, S, dy, n.dy_b, n.dy_inner, x, n.x_b, n.x_inner, standard.center,
                              n.each, R - 1, single ? nullptr : total, moment))
        return 1;
    const A *sums = single ? static_cast<const A *>(dy) : total;
    GN_RUN(pull)(TABLES<A>, n.many(B * C), B, C, R, n.each, sums, moment, noise.m, noise.k, tables.at, vars, floor.eps,
                 floor.least, weight, parameters, parameters + C, g_mean, g_var);
    if (!dx)
        return 0;
    if (n.others)
        GN_RUN(others_ramp)(TABLES<A>, kept.means, n.many(B * C), n.G, n.starts, C, S, kept.mean, stats, g_mean, g_var,
                            center, slope, offset);
    else
        GN_RUN(everyone_ramp)(TABLES<A>, n.many(size), n.G, n.starts, C, S, stats, g_mean, g_var, center, slope, offset);
    for (i64 c = 0; c < C; ++c)
        ones[c] = 1;
    return GN_RUN(input_gradient)(dtype, n.last, many, B, C, S, dy, n.dy_b, n.dy_inner, x, n.x_b, n.x_inner,
                                  standard.factor, n.each, R - 1, noise.k ? noise.k : ones, 1, noise.k ? B - 1 : 0,
                                  center, n.each, R - 1, slope, n.each, R - 1, offset, n.each, R - 1, dx, n.made_b,
                                  n.made_inner);
}

template <class A> A *at(void *table) { return static_cast<A *>(table); }
template <class A> const A *at(const void *table) { return static_cast<const A *>(table); }

} // namespace

// The C ABI: `dtype` is that of x, `how` a How. Weight, bias, m, k, and the indices of drawn noise may be null.

#define GN_WHOLE(call)                                                                                                 \
    if (dtype == 1) {                                                                                                  \
        using A = double;                                                                                              \
        return call;                                                                                                   \
    } else {                                                                                                           \
        using A = float;                                                                                               \
        return call;                                                                                                   \
    }

// normalize: makes the samples' moments `mean` and `var` (but of a single position, whose means are given, in `means`),
// the statistics of pools, mean and variance one after the other, the noise m and k, and y.
GN_EXPORT(normalize)(i64 dtype, const i64 *how, void *x, const void *weight, const void *bias, double eps, double least,
                     const i64 *indices, i64 N, double noise_eps, i64 means, void *mean, double *var, double *stats,
                     void *m, void *k, void *y) {
    const How &n = *reinterpret_cast<const How *>(how);
    GN_WHOLE((normalize<A>(dtype, n, x, {at<A>(weight), at<A>(bias)}, {eps, least}, {indices, N, noise_eps},
                           {means, mean, var}, stats, {at<A>(m), at<A>(k)}, y)))
}

// normalize_gradient: makes the gradients of weight and bias, one after the other, and unless dx is null that of x;
// from what was kept: the moments of the samples, where the others in a ghost batch count, else the statistics.
GN_EXPORT(normalize_gradient)(i64 dtype, const i64 *how, void *dy, void *x, const void *weight, double eps, double least,
                              i64 means, void *mean, double *var, void *m, void *k, void *parameters, void *dx) {
    const How &n = *reinterpret_cast<const How *>(how);
    GN_WHOLE((gradient<A>(dtype, n, dy, x, at<A>(weight), {eps, least}, {means, mean, var}, {at<A>(m), at<A>(k)},
                          at<A>(parameters), dx)))
}
