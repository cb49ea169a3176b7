// All steps of a normalizer's forward pass, and all steps of its backward pass, in one call each: the passes over x and
// the tables between them. The threads stay awake from step to step, and tables that only the next step needs are in
// scratch memory.
//
// Ghost batches do not depend on each other, so all steps run on a few of them, then on the next few: where tables are
// large, as with few positions, they stay in the caches from step to step.

#include "coefficients.h"
#include "exclusive.h"
#include "gradients.h"
#include "passes.h"

namespace ghostnoise::GN_ISA {
namespace {

// The choices that depend on the shape of a batch alone.
struct Batch : Geometry {
    explicit Batch(const Geometry &given) : Geometry(given) {}

    i64 pools() const { return exclusive ? B : G; }
    i64 many(i64 elements) const { return elements >= GRAIN ? threads : 1; }
    Pass pass(i64 elements) const { return {dtype, last, many(elements), B, C, S}; }
    Table table(const void *at) const { return {at, per_pool, pools() - 1}; }
    // Whether to run on tiles of channels (single_position.h); with few tiles, the steps use more threads.
    bool tiles(i64 samples, i64 most) const {
        const i64 available = (C + TILE_CHANNELS - 1) / TILE_CHANNELS;
        return S == 1 && last && available >= many(B * C) && samples <= most;
    }
    bool exclusive_tiles() const { return exclusive && tiles(largest(G, starts), EXCLUSIVE_SAMPLES); }
    // Whether to make the tables of exclusive statistics on tiles of channels (exclusive.h).
    bool exclusive_tables() const {
        const i64 available = (C + TILE_CHANNELS - 1) / TILE_CHANNELS;
        return exclusive && S > 1 && available >= table_threads() && largest(G, starts) <= EXCLUSIVE_SAMPLES;
    }
    i64 table_threads() const { return many(B * C * EXCLUSIVE_WORK); }
    // Whether x itself is the table of its samples' means.
    bool own_means() const {
        return S == 1 && last && x_b == C && (dtype == Dtype::FLOAT || dtype == Dtype::DOUBLE);
    }
    // Requests memory for a result if it is dense; with several ghost batches it is written in parts
    // (`for_parts_of_batch`).
    void request_memory(const void *result, i64 bytes) const {
        if (made_b != C * S)
            return;
        request_huge_pages(result, B * C * S * bytes);
        if (G > 1)
            populate(result, B * C * S * bytes, threads);
    }
};

constexpr i64 LAW = 16;  // the work of a draw from a law, in elements that are only copied

// From a tensor of x's dtype to one of its later elements.
inline const void *later(const void *at, i64 bytes) { return at ? static_cast<const char *>(at) + bytes : at; }
inline void *later(void *at, i64 bytes) { return at ? static_cast<char *>(at) + bytes : at; }

inline Samples from_sample(const Samples &samples, i64 at) {
    return {samples.wide, later(samples.mean, at * (samples.wide ? 8 : 4)), offset(samples.var, at)};
}

// Some consecutive ghost batches, with their starts relative to the first of them, and how many samples and pools
// precede them.
struct Part : Batch {
    i64 sample, pool;
    bool large;  // whether the whole result is written with non-temporal stores

    // The numbers of a pass over x.
    Pass pass() const { return Batch::pass(B * C * S); }
};

constexpr i64 LARGE = i64(1) << 23;   // bytes of a result that passes write with non-temporal stores
constexpr i64 CACHED = i64(1) << 22;  // bytes of x in a part of a large batch: the next step finds it in the caches

// Runs step(part) over all ghost batches, until it returns other than OK.
template <class Step> Status for_parts_of_batch(const Batch &n, i64 bytes, Step step) {
    const bool large = n.B * n.C * n.S * bytes >= LARGE;
    if (n.G == 1)
        return step(Part{n, 0, 0, large});
    // A small x stays in the caches, but where a dozen tables have a row for each sample, these may not: then a part is
    // the least that is worth the threads. Tables of ghost batches are smaller, and are passed between cores at each
    // step, so few steps matter more than caches.
    const i64 entries = n.exclusive ? GRAIN : 64 * GRAIN;
    const Scratch<i64> relative(n.G + 1);
    if (!relative.at)
        return Status::OUT_OF_MEMORY;
    for (i64 g = 0, end = 0; g < n.G; g = end) {
        i64 count = 0;
        for (; end < n.G && (large ? count * n.C * n.S * bytes < CACHED : count * n.C < entries); ++end)
            count = n.starts[end + 1] - n.starts[g];
        for (i64 k = g; k <= end; ++k)
            relative.at[k - g] = n.starts[k] - n.starts[g];
        Part part = {n, n.starts[g], n.exclusive ? n.starts[g] : g, large};
        part.B = count;
        part.G = end - g;
        part.starts = relative.at;
        if (const Status status = step(part); status != Status::OK)
            return status;
    }
    return Status::OK;
}

inline double clip(double value, double low, double high) {  // NaN stays NaN
    return value < low ? low : value > high ? high : value;
}

template <class A> struct Forward {
    const NormalizeCall &call;
    i64 bytes;  // of an element of x
    Samples samples;
    Floor floor;
    const A *weight, *bias;

    Status operator()(const Part &n) const {
        const i64 B = n.B, C = n.C, R = n.pools(), size = R * C, at = n.sample * C;
        const bool exclusive = n.exclusive_tables(), kept = !n.exclusive;
        const Scratch<A> tables(Coefficients<A>::TABLES * size);
        const Scratch<double> pooled(kept || exclusive ? 0 : 2 * size);
        if (!tables.at || !pooled.at)
            return Status::OUT_OF_MEMORY;
        const Samples own = from_sample(samples, at);
        const Input x = {later(call.x, n.sample * n.x_b * bytes), n.x_b, n.x_inner};
        const Output y = {later(call.y, n.sample * n.made_b * bytes), n.made_b, n.made_inner};
        if (n.S > 1)
            moments(n.pass(), x, const_cast<double *>(in<double>(own.mean)), const_cast<double *>(own.var));
        if (exclusive) {
            A *center = tables.at, *factor = center + size, *shift = factor + size;
            const Status status = exclusive_affine(n.table_threads(), n.G, n.starts, C, in<double>(own.mean), own.var,
                                                   floor, weight, bias, center, factor, shift);
            if (status != Status::OK)
                return status;
            return transform(n.pass(), n.large, x, n.table(center), n.table(factor), n.table(shift), y);
        }
        double *mean = kept ? call.mean + n.pool * C : pooled.at, *var = kept ? call.var + n.pool * C : mean + size;
        pool(n.exclusive, n.many(B * C), n.G, n.starts, C, own, mean, var);
        const Coefficients<A> pools(tables.at, size);
        coefficients(n.many(size), R, C, mean, var, floor, weight, bias, pools);
        if (call.noise.indices || call.noise.seed)
            return with_noise(n, x, mean, var, pools, y);
        if (call.renormalization.mean)
            renormalize(C, mean, var, pools);
        return transform(n.pass(), n.large, x, n.table(pools.center), n.table(pools.factor), n.table(pools.shift), y);
    }

    // All samples share one pool. The affine map that follows normalization becomes weight * r and bias + weight * d.
    void renormalize(i64 C, const double *mean, const double *var, const Coefficients<A> &pool) const {
        const auto [reference_mean, reference_var, r_max, d_max, to_r, to_d] = call.renormalization;
        for (i64 c = 0; c < C; ++c) {
            const double reference_std = std::sqrt(floor.of(reference_var[c]));
            const A r = A(clip(std::sqrt(floor.of(var[c])) / reference_std, 1 / r_max, r_max));
            const A d = A(clip((mean[c] - reference_mean[c]) / reference_std, -d_max, d_max));
            pool.factor[c] *= r;
            const A shift = pool.factor[c] * pool.rounding[c] + (weight ? weight[c] * d : d);
            pool.shift[c] = bias ? shift + bias[c] : shift;
            out<A>(to_r)[c] = r;
            out<A>(to_d)[c] = d;
        }
    }

    // All samples share one pool.
    Status with_noise(const Part &n, Input x, const double *mean, const double *var, const Coefficients<A> &pool,
                      Output y) const {
        const i64 B = n.B, C = n.C;
        const Scratch<double> rest(2 * C);
        const Scratch<A> rows(NoisyAffine<A>::ROWS * C);
        if (!rest.at || !rows.at)
            return Status::OUT_OF_MEMORY;
        double *margin = rest.at, *unit_var = rest.at + C;
        for (i64 c = 0; c < C; ++c) {
            margin[c] = noise_margin(call.noise.eps, pool.rstd[c]);
            unit_var[c] = double(A(1) / (pool.rstd[c] * pool.rstd[c]));  // the variance that normalization maps to 1
        }
        const NoisyAffine<A> affine(rows.at, C);
        affine.fill(pool, weight, bias, C);
        // If the means of the samples are x itself, unless y is so large that it is written past the caches.
        const bool at_once = samples.mean == call.x && n.made_b == C && B * C * bytes < LARGE;
        const bool law = call.noise.seed;
        const Status status = noise_tables({n.dtype == Dtype::DOUBLE, n.many(B * C * (law ? LAW : call.noise.N)), B, C,
                                            samples, call.noise, mean, law ? unit_var : var, margin, pool.rstd,
                                            rows.at, call.m, call.k, at_once ? y.at : nullptr});
        if (status != Status::OK || at_once)
            return status;
        return noisy_transform(n.pass(), x, rows.at, call.m, call.k, y);
    }
};

template <class A> struct Backward {
    const NormalizeBackwardCall &call;
    i64 bytes;
    Samples saved;  // the statistics of the pools, or the moments of the samples of exclusive pools
    Floor floor;
    const A *weight;
    double *carried;  // the sums (2, C) for weight and bias over the parts before this one

    Status operator()(const Part &n) const {
        if (n.exclusive_tables())
            return exclusive(n);
        const i64 B = n.B, C = n.C, S = n.S, R = n.pools(), size = R * C, at = n.sample * C;
        const Scratch<double> pooled(n.exclusive ? 2 * size : 0);
        const bool single = S == 1 && n.last && !n.exclusive;  // dy and x themselves serve as sums
        const Scratch<A> tables((Coefficients<A>::TABLES + 5) * size + (single ? C : 2 * B * C));
        if (!pooled.at || !tables.at)
            return Status::OUT_OF_MEMORY;
        const Input dy = gradient(n), x = input(n);
        const Samples own = from_sample(saved, (n.exclusive ? n.sample : n.pool) * C);
        if (n.exclusive)
            pool(true, n.many(B * C), n.G, n.starts, C, own, pooled.at, pooled.at + size);
        const double *mean = n.exclusive ? pooled.at : in<double>(own.mean);
        const double *var = n.exclusive ? pooled.at + size : own.var;
        const Coefficients<A> pools(tables.at, size);
        coefficients(n.many(size), R, C, mean, var, floor, weight, static_cast<const A *>(nullptr), pools);
        A *g_mean = tables.at + Coefficients<A>::TABLES * size, *g_var = g_mean + size, *center = g_var + size;
        A *slope = center + size, *shift = slope + size, *total = shift + size, *moment = total + B * C;
        const SampleNoise<A> noise = SampleNoise<A>{in<A>(call.m), in<A>(call.k)}.from(at);
        const auto gradients = [&](const auto &sums) {
            statistics_gradient<A>(n.many(B * C), B, C, R, n.per_pool, sums, noise, tables.at, var, floor,
                                   out<A>(call.g_weight), out<A>(call.g_bias), g_mean, g_var, carried);
        };
        if (single) {
            with_type_of<A>(n.dtype, [&](auto type) {
                using T = decltype(type);
                gradients(SingleSums<T, A>{in<T>(dy.at), dy.b, in<T>(x.at), x.b, C});
            });
        } else {
            gradient_sums(n.pass(), dy, x, n.table(pools.center), total, moment);
            gradients(SumTables<A>{total, moment, C});
        }
        if (!call.dx)
            return Status::OK;
        if (!n.exclusive)
            linear_term(n.many(size), n.G, n.starts, C, S, mean, g_mean, g_var, center, slope, shift);
        else if (own.wide)
            exclusive_linear_term(n.many(B * C), n.G, n.starts, C, S, in<double>(own.mean), mean, g_mean, g_var, center,
                                  slope, shift);
        else
            exclusive_linear_term(n.many(B * C), n.G, n.starts, C, S, in<float>(own.mean), mean, g_mean, g_var, center,
                                  slope, shift);
        A *ones = total;  // the sums are no longer needed
        for (i64 c = 0; !noise.k && c < C; ++c)
            ones[c] = 1;
        const Table gain = noise.k ? Table{noise.k, 1, B - 1} : Table{ones, B, 0};
        return input_gradient(n.pass(), n.large, dy, x, n.table(pools.factor), gain, n.table(center), n.table(slope),
                              n.table(shift), result(n));
    }

    // Exclusive statistics of samples with several positions.
    Status exclusive(const Part &n) const {
        const i64 B = n.B, C = n.C, S = n.S, size = B * C, threads = n.table_threads();
        const PooledTiles pooled(B, C);
        const Scratch<A> tables(6 * size + C);
        if (!tables.at)
            return Status::OUT_OF_MEMORY;
        const Samples own = from_sample(saved, n.sample * C);
        const double *mean = in<double>(own.mean);
        A *center = tables.at, *factor = center + size, *slope = factor + size, *shift = slope + size;
        A *total = shift + size, *moment = total + size, *ones = moment + size;
        Status status = exclusive_centers(threads, n.G, n.starts, C, mean, own.var, pooled, center);
        if (status != Status::OK)
            return status;
        gradient_sums(n.pass(), gradient(n), input(n), n.table(center), total, moment);
        status = exclusive_terms(threads, n.G, n.starts, C, S, mean, pooled, floor, weight, total, moment,
                                 out<A>(call.g_weight), out<A>(call.g_bias), carried, factor, center,
                                 call.dx ? slope : nullptr, shift);
        if (status != Status::OK || !call.dx)
            return status;
        for (i64 c = 0; c < C; ++c)
            ones[c] = 1;
        return input_gradient(n.pass(), n.large, gradient(n), input(n), n.table(factor), {ones, B, 0}, n.table(center),
                              n.table(slope), n.table(shift), result(n));
    }

    Input gradient(const Part &n) const { return {later(call.dy, n.sample * n.dy_b * bytes), n.dy_b, n.dy_inner}; }
    Input input(const Part &n) const { return {later(call.x, n.sample * n.x_b * bytes), n.x_b, n.x_inner}; }
    Output result(const Part &n) const {
        return {later(call.dx, n.sample * n.made_b * bytes), n.made_b, n.made_inner};
    }
};

// Copies samples with a single position, which are their own means, to a table (B, C) in the arithmetic of x.
template <class A> void copy_samples(const Batch &n, const void *x, A *to) {
    with_type_of<A>(n.dtype, [&](auto type) {
        const auto *from = in<decltype(type)>(x);
        const i64 step = n.last ? 1 : n.x_inner;
        in_parallel(n.many(n.B * n.C), n.B, [=](i64 begin, i64 end, i64) {
            for (i64 b = begin; b < end; ++b) {
                const auto *row = from + b * n.x_b;
                if (step == 1)
#pragma omp simd
                    for (i64 c = 0; c < n.C; ++c)
                        to[b * n.C + c] = load(row[c]);
                else
                    for (i64 c = 0; c < n.C; ++c)
                        to[b * n.C + c] = load(row[c * step]);
            }
        });
    });
}

// The moments that running statistics are updated towards.
void population_moments(const Batch &n, const Samples &samples, const NormalizeCall &call) {
    const auto [ghosts, mean, var] = call.population;
    if (n.exclusive) {
        const i64 whole[2] = {0, n.B};
        pool(false, n.many(n.B * n.C), 1, whole, n.C, samples, mean, var);
        return;
    }
    for (i64 c = 0; c < n.C; ++c)
        mean[c] = var[c] = 0;
    const auto share = [&](i64 g) { return double(n.starts[g + 1] - n.starts[g]) / double(n.B); };
    for (i64 g = 0; g < n.G; ++g)
        for (i64 c = 0; c < n.C; ++c)
            mean[c] += share(g) * call.mean[g * n.C + c];
    for (i64 g = 0; g < n.G; ++g)
        for (i64 c = 0; c < n.C; ++c) {
            const double d = ghosts ? 0 : call.mean[g * n.C + c] - mean[c];
            var[c] += share(g) * (call.var[g * n.C + c] + d * d);
        }
}

template <class A> Status forward(const NormalizeCall &call) {
    const Batch n(call.geometry);
    const i64 bytes = size_of(n.dtype), C = n.C, many = n.many(n.B * C);
    const Floor floor = {call.eps, call.least};
    const A *weight = in<A>(call.weight), *bias = in<A>(call.bias);
    const bool drawn = call.noise.indices, plain = !drawn && !call.noise.seed && !call.renormalization.mean;
    const bool exclusive_tiles = n.exclusive_tiles(), noisy_tiles = drawn && n.tiles(n.B, TILE_SAMPLES);
    const bool half_tiles = !n.exclusive && plain && bytes == 2 && n.tiles(largest(n.G, n.starts), TILE_SAMPLES);
    const bool tiles = exclusive_tiles || noisy_tiles || half_tiles;
    const bool needs_means = !tiles || (n.exclusive && call.population.mean);
    const bool copies = n.S == 1 && needs_means && !n.own_means(), given = n.exclusive && n.S > 1;
    const Scratch<double> made(n.S > 1 && !given ? 2 * n.B * C : 0);
    const Scratch<A> copied(copies ? n.B * C : 0);
    if (!made.at || !copied.at)
        return Status::OUT_OF_MEMORY;
    Samples samples = {true, made.at, made.at + n.B * C};
    if (given)
        samples = {true, call.mean, call.var};
    else if (n.S == 1)
        samples = {n.dtype == Dtype::DOUBLE, copies ? copied.at : call.x, nullptr};
    if (copies)
        copy_samples(n, call.x, copied.at);
    for (void *table : {call.m, call.k})
        request_huge_pages(table, table ? n.B * C * i64(sizeof(A)) : 0);
    n.request_memory(call.y, bytes);
    Status status = Status::OK;
    if (tiles)
        with_type_of<A>(n.dtype, [&](auto type) {
            using T = decltype(type);
            const T *x = in<T>(call.x);
            T *y = out<T>(call.y);
            if (exclusive_tiles)
                status = exclusive_forward(many, n.G, n.starts, C, x, n.x_b, weight, bias, floor, y, n.made_b);
            else if (noisy_tiles)
                status = noisy_forward(many, n.B, C, x, n.x_b, weight, bias, floor,
                                       {call.noise.indices, call.noise.N, call.noise.eps, out<A>(call.m),
                                        out<A>(call.k)},
                                       call.mean, call.var, y, n.made_b);
            else if constexpr (sizeof(T) == 2)
                status = inclusive_forward(many, n.G, n.starts, C, x, n.x_b, weight, bias, floor, call.mean, call.var,
                                           y, n.made_b);
        });
    else
        status = for_parts_of_batch(n, bytes, Forward<A>{call, bytes, samples, floor, weight, bias});
    if (status == Status::OK && call.population.mean)
        population_moments(n, samples, call);
    return status;
}

template <class A> Status backward(const NormalizeBackwardCall &call) {
    const Batch n(call.geometry);
    const i64 bytes = size_of(n.dtype), C = n.C;
    const A *r = in<A>(call.r), *d = in<A>(call.d), *weight = in<A>(call.weight);
    A *g_weight = out<A>(call.g_weight), *g_bias = out<A>(call.g_bias);
    const bool tiles = n.exclusive_tiles(), own = n.exclusive && n.S == 1;
    const bool copies = own && !tiles && !n.own_means();
    const Scratch<double> carried(2 * C);
    const Scratch<A> folded(r ? C : 0), copied(copies ? n.B * C : 0);
    if (!carried.at || !folded.at || !copied.at)
        return Status::OUT_OF_MEMORY;
    if (r) {  // Batch Renormalization makes weight * r the weight of the affine map
        for (i64 c = 0; c < C; ++c)
            folded.at[c] = weight ? weight[c] * r[c] : r[c];
        weight = folded.at;
    }
    if (call.dx)
        n.request_memory(call.dx, bytes);
    const Floor floor = {call.eps, call.least};
    Status status = Status::OK;
    if (tiles) {
        with_type_of<A>(n.dtype, [&](auto type) {
            using T = decltype(type);
            status = exclusive_backward(n.many(n.B * C), n.G, n.starts, C, in<T>(call.dy), n.dy_b, in<T>(call.x),
                                        n.x_b, weight, floor, g_weight, g_bias, out<T>(call.dx), n.made_b);
        });
        return status;
    }
    if (copies)
        copy_samples(n, call.x, copied.at);
    Samples saved = {true, call.mean, call.var};
    if (own)
        saved = {n.dtype == Dtype::DOUBLE, copies ? copied.at : call.x, nullptr};
    std::memset(carried.at, 0, sizeof(double) * 2 * C);
    status = for_parts_of_batch(n, bytes, Backward<A>{call, bytes, saved, floor, weight, carried.at});
    for (i64 c = 0; r && c < C; ++c)  // from the gradients of weight * r and of the bias to that of the weight
        g_weight[c] = r[c] * g_weight[c] + d[c] * g_bias[c];
    return status;
}

template <class A> Status noise_alone(const GhostNoiseCall &call) {
    const Batch n(call.geometry);
    const i64 B = n.B, C = n.C, many = n.many(B * C);
    const bool single = n.S == 1, copies = single && !n.own_means();
    const Scratch<double> own(single ? 0 : 2 * B * C), rows(3 * C);
    const Scratch<A> copied(copies ? B * C : 0), constants(2 * C);
    if (!own.at || !rows.at || !copied.at || !constants.at)
        return Status::OUT_OF_MEMORY;
    const Input x = {call.x, n.x_b, n.x_inner};
    Samples samples = {true, own.at, own.at + B * C};
    if (single)
        samples = {n.dtype == Dtype::DOUBLE, copies ? copied.at : call.x, nullptr};
    if (copies)
        copy_samples(n, call.x, copied.at);
    const Pass pass = n.pass(B * C * n.S);
    if (!single)
        moments(pass, x, own.at, own.at + B * C);
    double *mean = rows.at, *var = mean + C, *margin = var + C;
    pool(false, many, 1, n.starts, C, samples, mean, var);
    A *zero = constants.at, *one = zero + C;
    for (i64 c = 0; c < C; ++c) {
        margin[c] = call.noise.eps;
        zero[c] = 0;
        one[c] = 1;
    }
    const Status status = noise_tables({n.dtype == Dtype::DOUBLE, n.many(B * C * call.noise.N), B, C, samples,
                                        call.noise, mean, var, margin, one, nullptr, call.m, call.k, nullptr});
    if (status != Status::OK)
        return status;
    const auto table = [&](const void *noise, const A *constant) {
        return noise ? Table{noise, 1, B - 1} : Table{constant, B, 0};
    };
    n.request_memory(call.y, size_of(n.dtype));
    return transform(pass, false, x, table(call.m, zero), table(call.k, one), table(nullptr, zero),
                     {call.y, n.made_b, n.made_inner});
}

}  // namespace

Status normalize(const NormalizeCall &call) {
    return call.geometry.dtype == Dtype::DOUBLE ? forward<double>(call) : forward<float>(call);
}

Status normalize_backward(const NormalizeBackwardCall &call) {
    return call.geometry.dtype == Dtype::DOUBLE ? backward<double>(call) : backward<float>(call);
}

Status ghost_noise(const GhostNoiseCall &call) {
    return call.geometry.dtype == Dtype::DOUBLE ? noise_alone<double>(call) : noise_alone<float>(call);
}

#define GN_TEXT_(name) #name
#define GN_TEXT(name) GN_TEXT_(name)

const Kernels kernels = {GN_TEXT(GN_ISA),
                         moments,
                         transform,
                         gradient_sums,
                         input_gradient,
                         convert,
                         convert_linear,
                         widen_sums,
                         transform_single,
                         gradient_sums_single,
                         ghost_batches,
                         ghost_batches_backward,
                         excluding_sample,
                         excluding_sample_backward,
                         normalizing_scale,
                         normalizing_scale_backward,
                         pool_drawn,
                         normalize,
                         normalize_backward,
                         ghost_noise};

}  // namespace ghostnoise::GN_ISA
