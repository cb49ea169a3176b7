// How tensors lie in memory, and the arguments of kernels that are made of them.

#pragma once

#include "tensors.h"

namespace ghostnoise {

struct Strides {
    i64 b, inner;
};

// Whether the channels of a tensor (`last`), or else its positions, are contiguous; and its other strides.
inline bool lies(const Tensor &x, bool last, Strides &to) {
    i64 step = 1, next = -1;
    for (i64 d = x.dims - 1; d >= 2; --d) {
        if (x.sizes[d] == 1)
            continue;
        if (next < 0)
            step = x.strides[d];
        else if (x.strides[d] != next)
            return false;
        next = x.strides[d] * x.sizes[d];
        if (next < 0)
            return false;
    }
    if (last ? x.strides[1] != 1 && x.sizes[1] != 1 : step != 1)
        return false;
    to = {x.strides[0], last ? step : x.strides[1]};
    return true;
}

// A new tensor of the same shape and dtype in one of the two layouts.
inline Tensor empty_in_layout(const Tensor &x, bool last) {
    i64 strides[MAX_DIMS], next = last ? x.sizes[1] : 1;
    for (i64 d = x.dims - 1; d >= 2; --d) {
        strides[d] = next;
        next *= x.sizes[d];
    }
    strides[1] = last ? 1 : next;
    strides[0] = last ? next : next * x.sizes[1];
    return empty(x.dims, x.sizes, strides, x.dtype);
}

inline Tensor copy_in_layout(const Tensor &x, bool last) {
    Tensor copy = empty_in_layout(x, last);
    succeed(aoti_torch_copy_(copy.get(), x.get(), 0));
    return copy;
}

inline i64 torch_threads() {
    std::uint32_t found = 1;
    succeed(torch_get_num_threads(&found));
    return found > 0 ? found : 1;
}

inline i64 threads_for(i64 elements) { return elements >= GRAIN ? torch_threads() : 1; }

// What x and its result have in common: their layout, and where they lie. `x` may be a copy of what was given, and
// `result` lies beside `made` where that is in neither layout.
class Batch {
  public:
    Tensor made;  // empty without `with_result`
    Pass n;

    Batch(const char *name, const Tensor &given, bool with_result) : x(given) {
        if (given.dims < 2 || given.dims > MAX_DIMS)
            fail(name, "x of shape ", shape(given), "; it must have the shape (B, C, *spatial)");
        const i64 S = given.positions();
        n = {dtype_of(name, given), false, 1, given.sizes[0], given.sizes[1], S};
        n.threads = threads_for(given.sizes[0] * given.sizes[1] * S);
        if (with_result)
            made = empty_like(given);
        for (const bool last : {S == 1, S != 1})
            if (lies(x, last, at) && (!with_result || lies(made, last, to))) {
                n.last = last;
                return;
            }
        n.last = with_result && !lies(made, false, to) && lies(made, true, to);
        copy = copy_in_layout(given, n.last);
        lies(copy, n.last, at);
        if (with_result && !lies(made, n.last, to)) {
            beside = empty_in_layout(given, n.last);
            lies(beside, n.last, to);
        }
    }

    i64 elements() const { return n.B * n.C * n.S; }
    bool wide() const { return n.dtype == Dtype::DOUBLE; }
    std::int32_t arithmetic() const { return wide() ? FLOAT64 : FLOAT32; }
    i64 arithmetic_bytes() const { return wide() ? 8 : 4; }
    Input input() const { return {(copy ? copy : x).read(), at.b, at.inner}; }
    Output output() const { return {(beside ? beside : made).write(), to.b, to.inner}; }
    // The gradient of the result, or a copy of it, in the layout of x.
    Input gradient(const char *name, const Tensor &dy, Tensor &copied) const {
        bool same = dy.dims == x.dims && dy.dtype == x.dtype;
        for (i64 d = 0; same && d < x.dims; ++d)
            same = dy.sizes[d] == x.sizes[d];
        if (!same)
            fail(name, "dy of shape ", shape(dy), " and x of shape ", shape(x),
                 "; both must have the same shape and dtype");
        Strides found = {};
        if (lies(dy, n.last, found))
            return {dy.read(), found.b, found.inner};
        copied = copy_in_layout(dy, n.last);
        lies(copied, n.last, found);
        return {copied.read(), found.b, found.inner};
    }
    // Copies the result to where it belongs; called last.
    void finish() {
        if (beside)
            succeed(aoti_torch_copy_(made.get(), beside.get(), 0));
    }

  private:
    const Tensor &x;
    Tensor copy, beside;
    Strides at{}, to{};

    static Dtype dtype_of(const char *name, const Tensor &x) {
        if (x.dtype == FLOAT32)
            return Dtype::FLOAT;
        if (x.dtype == FLOAT64)
            return Dtype::DOUBLE;
        if (x.dtype == BFLOAT16)
            return Dtype::BFLOAT16;
        if (x.dtype == FLOAT16)
            return Dtype::FLOAT16;
        fail(name, "x must be float32, float64, bfloat16 or float16");
    }
};

inline void check(const char *name, Status status) {
    if (status == Status::OUT_OF_MEMORY)
        throw std::bad_alloc();
    if (status == Status::INDEX_OUT_OF_RANGE)
        fail<std::out_of_range>(name, "indices outside of the batch; they must lie in [0, B)");
}

// Calls run with a null pointer to the type of the elements.
template <class Run> void with_elements(const char *name, const char *what, const Tensor &x, Run run) {
    if (x.dtype == FLOAT32)
        run(static_cast<float *>(nullptr));
    else if (x.dtype == FLOAT64)
        run(static_cast<double *>(nullptr));
    else if (x.dtype == BFLOAT16)
        run(static_cast<torch::headeronly::BFloat16 *>(nullptr));
    else if (x.dtype == FLOAT16)
        run(static_cast<torch::headeronly::Half *>(nullptr));
    else
        fail(name, what, " must be float32, float64, bfloat16 or float16");
}

inline void check_channels(const char *name, const char *what, const Tensor &x, i64 C) {
    if (x.dims != 1 || x.sizes[0] != C)
        fail(name, what, " of shape ", shape(x), "; it must have the shape (C,) = (", C, ",)");
}

// Values of channels as A, copied if they do not lie in memory that way; null for none.
template <class A> const A *values(const char *name, const char *what, const Tensor &x, i64 C, Memory &memory) {
    if (!x)
        return nullptr;
    check_channels(name, what, x, C);
    if (x.dtype == (sizeof(A) == 8 ? FLOAT64 : FLOAT32) && (x.strides[0] == 1 || C == 1))
        return static_cast<const A *>(x.read());
    A *to = memory.of<A>(C);
    with_elements(name, what, x, [&](auto *type) {
        const auto *from = static_cast<decltype(type)>(const_cast<void *>(x.read()));
        for (i64 c = 0; c < C; ++c)
            to[c] = A(from[c * x.strides[0]]);
    });
    return to;
}

inline const void *parameter(const char *name, const char *what, const Tensor &x, const Batch &batch, Memory &memory) {
    if (batch.wide())
        return values<double>(name, what, x, batch.n.C, memory);
    return values<float>(name, what, x, batch.n.C, memory);
}

// A table (R, C) with a row for each sample, or one for all.
inline GivenTable given_table(const char *name, const char *what, const Tensor &x, const Batch &batch, i64 &R) {
    const bool wide = x.dtype == FLOAT64;
    if (x.dims != 2 || x.sizes[1] != batch.n.C || (x.sizes[0] != 1 && x.sizes[0] != batch.n.B))
        fail(name, what, " of shape ", shape(x), "; it must have the shape (1, C) or (B, C)");
    if (!wide && x.dtype != batch.arithmetic())
        fail(name, what, " must be float64, or have the dtype of the arithmetic");
    if (x.sizes[0] > R)
        R = x.sizes[0];
    return {x.read(), wide, x.sizes[0] == 1 ? 0 : x.strides[0], batch.n.C == 1 ? 1 : x.strides[1]};
}

// A table in double, contiguous, of this shape; a copy if it is not.
inline const double *statistics(const char *name, const char *what, const Tensor &x, i64 R, i64 C, Tensor &copied) {
    if (x.dims != 2 || x.sizes[0] != R || x.sizes[1] != C)
        fail(name, what, " of shape ", shape(x), "; it must have the shape (", R, ", ", C, ")");
    if (x.dtype == FLOAT64 && (x.strides[1] == 1 || C == 1) && (x.strides[0] == C || R <= 1))
        return static_cast<const double *>(x.read());
    copied = table(R, C, FLOAT64);
    succeed(aoti_torch_copy_(copied.get(), x.get(), 0));
    return static_cast<const double *>(copied.read());
}

// The first samples of G ghost batches of `ghost_size` consecutive samples, of which the last one takes the rest, and
// the number of samples.
inline const i64 *ghost_batches(const char *name, std::optional<i64> ghost_size, i64 B, i64 &G, Memory &memory) {
    if (ghost_size && *ghost_size < 1)
        fail(name, "ghost_size of ", *ghost_size, "; it must be 1 or more, or None");
    const i64 size = ghost_size && *ghost_size < B ? *ghost_size : B;
    G = B ? B / size : 0;
    i64 *starts = memory.of<i64>(G + 1);
    for (i64 g = 0; g < G; ++g)
        starts[g] = g * size;
    starts[G] = B;
    return starts;
}

// Rows of N indices of samples, or a copy of them.
inline const i64 *rows_of_indices(const char *name, const Tensor &indices, Tensor &copied) {
    if (indices.dtype != INT64 || indices.dims != 2 || indices.sizes[1] < 1)
        fail(name, "indices of shape ", shape(indices), "; they must be int64 and have the shape (B, N)");
    const i64 K = indices.sizes[0], N = indices.sizes[1];
    const bool dense = (indices.strides[1] == 1 || N == 1) && (indices.strides[0] == N || K == 1);
    if (!dense)
        copied = copy_in_layout(indices, false);
    return static_cast<const i64 *>((dense ? indices : copied).read());
}

}  // namespace ghostnoise
