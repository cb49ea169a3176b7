// A normalizer's whole forward pass, and its whole backward pass: the passes over x and the tables between them
// (engine/steps.py) in one call each. Threads stay awake from step to step, and what only the next step needs is in
// memory of the call's own.
//
// Ghost batches have nothing to do with each other, so all steps run on some of them, then on the next: where tables are
// large, as with few positions, they stay in the caches from step to step.

#include "exports.h"

#include <cstdlib>

#define GN_RUN(name) GN_JOIN(name, GN_ISA)

namespace {

// What stays the same from call to call; engine/backends/native/whole.py lists it in this order, and the starts after it.
struct How {
    i64 last, threads, grain, C, S;
    i64 x_b, x_inner, dy_b, dy_inner, made_b, made_inner;  // the last two of what is made: y, or dx
    i64 others, each, B, G;

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

struct Drawn {
    const i64 *indices;
    i64 N;
    double eps;
};

template <class A> constexpr i64 TABLES = sizeof(A) == sizeof(double);

template <class T> T *offset(T *at, i64 by) { return at ? at + by : at; }
inline void *offset(void *at, i64 by, i64 size) { return at ? static_cast<char *>(at) + by * size : at; }

// The moments of samples; the variance is null where it is zero.
struct Samples {
    i64 means;
    void *mean;
    double *var;

    Samples from(i64 at) const { return {means, offset(mean, at, means ? 8 : 4), offset(var, at)}; }
};

// Some consecutive ghost batches: `how` with their numbers, their first samples and the end, around the first of them.
struct Part {
    How how;
    const i64 *starts;
    i64 sample, pool;  // those before these
};

constexpr i64 LARGE = i64(1) << 23;  // bytes of a result that is written past the caches: parts of it should be too

// Runs step(part) over all ghost batches, until it returns other than 0.
template <class Step> int for_ghosts(const How &n, const i64 *starts, i64 bytes, Step step) {
    const bool large = n.B * n.C * n.S * bytes >= LARGE;
    // The least that is worth the threads where a dozen tables have a row for each sample, and else a few times that.
    const i64 entries = n.others ? n.grain : 4 * n.grain;
    const Scratch<i64> around(n.G + 1);
    for (i64 g = 0, end = 0; g < n.G; g = end) {
        i64 count = 0;
        for (; end < n.G && (count * n.C < entries || (large && count * n.C * n.S * bytes < LARGE)); ++end)
            count = starts[end + 1] - starts[g];
        for (i64 k = g; k <= end; ++k)
            around.at[k - g] = starts[k] - starts[g];
        Part part = {n, around.at, starts[g], n.others ? starts[g] : g};
        part.how.B = count;
        part.how.G = end - g;
        if (step(part))
            return 1;
    }
    return 0;
}

template <class A> struct Forward {
    i64 dtype, bytes;
    void *x, *y;
    const A *weight, *bias;
    Floor floor;
    Drawn drawn;
    Samples samples;
    double *means, *vars;  // of the pools
    A *m, *k;

    int operator()(const Part &part) const {
        const How &n = part.how;
        const i64 B = n.B, C = n.C, S = n.S, R = n.pools(), many = n.many(B * C * S), at = part.sample * C;
        const Samples own = samples.from(at);
        void *from = offset(x, part.sample * n.x_b, bytes), *to = offset(y, part.sample * n.made_b, bytes);
        if (S > 1 && GN_RUN(moments)(dtype, n.last, many, B, C, S, from, n.x_b, n.x_inner,
                                     static_cast<double *>(own.mean), own.var))
            return 1;
        double *mean = means + part.pool * C, *var = vars + part.pool * C;
        GN_RUN(pool)(own.means, n.others, n.many(B * C), n.G, part.starts, C, own.mean, own.var, mean, var);
        const Scratch<A> tables(5 * R * C);
        const Standard<A> standard(tables.at, R * C);
        GN_RUN(standardize)(TABLES<A>, n.many(R * C), R, C, mean, var, floor.eps, floor.least, weight, bias, tables.at);
        if (drawn.indices)
            return noisy(n, from, mean, var, standard, to);
        return GN_RUN(transform)(dtype, n.last, many, B, C, S, from, n.x_b, n.x_inner, standard.center, n.each, R - 1,
                                 standard.factor, n.each, R - 1, standard.shift, n.each, R - 1, to, n.made_b,
                                 n.made_inner);
    }

    // All samples are in one pool.
    int noisy(const How &n, void *from, double *mean, double *var, const Standard<A> &standard, void *to) const {
        const i64 B = n.B, C = n.C;
        const Scratch<double> margin(C);
        for (i64 c = 0; c < C; ++c)  // of the variance that counts as 1 where x is normalized
            margin.at[c] = double(A(drawn.eps) * (A(1) / (standard.rstd[c] * standard.rstd[c])));
        GN_RUN(inject)(samples.means, TABLES<A>, n.many(B * C * drawn.N), B, C, B, drawn.N, samples.mean, samples.var,
                       drawn.indices, mean, nullptr, nullptr, m != nullptr, k != nullptr, var, margin.at, standard.center,
                       weight, bias, m, k, nullptr, nullptr);
        const Scratch<A> shared(Blend<A>::ROWS * C);
        const Blend<A> blend(shared.at, C);
        blend.fill(standard.center, weight, bias);
        return GN_RUN(blend)(dtype, n.last, n.many(B * C * n.S), B, C, n.S, from, n.x_b, n.x_inner, blend.center, m, k,
                             to, n.made_b, n.made_inner);
    }
};

template <class A> struct Backward {
    i64 dtype, bytes;
    void *dy, *x, *dx;
    const A *weight;
    Floor floor;
    Samples kept;
    A *m, *k, *g_weight;  // the last one with that of bias after it
    double *carried;

    int operator()(const Part &part) const {
        const How &n = part.how;
        const i64 B = n.B, C = n.C, S = n.S, R = n.pools(), size = R * C, many = n.many(B * C * S), at = part.sample * C;
        void *gradient = offset(dy, part.sample * n.dy_b, bytes), *from = offset(x, part.sample * n.x_b, bytes);
        const Samples own = kept.from((n.others ? part.sample : part.pool) * C);
        const Scratch<double> pooled(n.others ? 2 * size : 0);
        if (n.others)
            GN_RUN(pool)(own.means, 1, n.many(B * C), n.G, part.starts, C, own.mean, own.var, pooled.at, pooled.at + size);
        const double *mean = n.others ? pooled.at : static_cast<double *>(own.mean);
        const double *var = n.others ? pooled.at + size : own.var;
        const Scratch<A> tables(10 * size + 2 * B * C);
        const Standard<A> standard(tables.at, size);
        GN_RUN(standardize)(TABLES<A>, n.many(size), R, C, mean, var, floor.eps, floor.least, weight, nullptr, tables.at);
        A *g_mean = tables.at + 5 * size, *g_var = g_mean + size, *center = g_var + size, *slope = center + size;
        A *shift = slope + size, *total = shift + size, *moment = total + B * C, *scale = offset(k, at);
        // Of a single position, dy itself may be its sum.
        const bool single = S == 1 && n.last && dtype < 2 && (n.dy_b == C || B == 1);
        if (GN_RUN(gradient_sums)(dtype, n.last, many, B, C, S, gradient, n.dy_b, n.dy_inner, from, n.x_b, n.x_inner,
                                  standard.center, n.each, R - 1, single ? nullptr : total, moment))
            return 1;
        GN_RUN(pull)(TABLES<A>, n.many(B * C), B, C, R, n.each, single ? gradient : total, moment, offset(m, at), scale,
                     tables.at, var, floor.eps, floor.least, weight, g_weight, g_weight + C, g_mean, g_var, carried);
        if (!dx)
            return 0;
        if (n.others)
            GN_RUN(others_ramp)(TABLES<A>, own.means, n.many(B * C), n.G, part.starts, C, S, own.mean, mean, g_mean,
                                g_var, center, slope, shift);
        else
            GN_RUN(everyone_ramp)(TABLES<A>, n.many(size), n.G, part.starts, C, S, mean, g_mean, g_var, center, slope,
                                  shift);
        A *ones = total;  // the sums are done with
        for (i64 c = 0; !k && c < C; ++c)
            ones[c] = 1;
        return GN_RUN(input_gradient)(dtype, n.last, many, B, C, S, gradient, n.dy_b, n.dy_inner, from, n.x_b, n.x_inner,
                                      standard.factor, n.each, R - 1, k ? scale : ones, 1, k ? B - 1 : 0, center, n.each,
                                      R - 1, slope, n.each, R - 1, shift, n.each, R - 1,
                                      offset(dx, part.sample * n.made_b, bytes), n.made_b, n.made_inner);
    }
};

inline i64 size_of(i64 dtype) { return dtype == 1 ? 8 : dtype == 0 ? 4 : 2; }

template <class A> A *at(void *table) { return static_cast<A *>(table); }
template <class A> const A *at(const void *table) { return static_cast<const A *>(table); }

} // namespace

// The C ABI: `dtype` is that of x, `how` a How and the starts of its ghost batches. Weight, bias, m, k, and the indices
// of drawn noise may be null.

#define GN_WHOLE(...)                                                                                                  \
    const How &n = *reinterpret_cast<const How *>(how);                                                                \
    const i64 *starts = how + sizeof(How) / sizeof(i64), bytes = size_of(dtype);                                       \
    if (dtype == 1) {                                                                                                  \
        using A = double;                                                                                              \
        return for_ghosts(n, starts, bytes, __VA_ARGS__);                                                              \
    } else {                                                                                                           \
        using A = float;                                                                                               \
        return for_ghosts(n, starts, bytes, __VA_ARGS__);                                                              \
    }

// normalize: makes the samples' moments `mean` and `var` (but of a single position, whose means are given, in `means`),
// the statistics of pools, mean and variance one after the other, the noise m and k, and y.
GN_EXPORT(normalize)(i64 dtype, const i64 *how, void *x, const void *weight, const void *bias, double eps, double least,
                     const i64 *indices, i64 N, double noise_eps, i64 means, void *mean, double *var, double *stats,
                     void *m, void *k, void *y) {
    GN_WHOLE(Forward<A>{dtype, bytes, x, y, at<A>(weight), at<A>(bias), {eps, least}, {indices, N, noise_eps},
                        {means, mean, var}, stats, stats + n.pools() * n.C, at<A>(m), at<A>(k)})
}

// normalize_gradient: makes the gradients of weight and bias, one after the other, and unless dx is null that of x;
// from what was kept: the moments of the samples, where the others in a ghost batch count, else the statistics.
GN_EXPORT(normalize_gradient)(i64 dtype, const i64 *how, void *dy, void *x, const void *weight, double eps, double least,
                              i64 means, void *mean, double *var, void *m, void *k, void *parameters, void *dx) {
    const i64 channels = reinterpret_cast<const How *>(how)->C;
    const Scratch<double> carried(2 * channels);
    std::memset(carried.at, 0, sizeof(double) * 2 * channels);
    GN_WHOLE(Backward<A>{dtype, bytes, dy, x, dx, at<A>(weight), {eps, least}, {means, mean, var}, at<A>(m), at<A>(k),
                         at<A>(parameters), carried.at})
}
