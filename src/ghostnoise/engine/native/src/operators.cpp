// The operators of the namespace `ghostnoise` for CPUs, on torch's stable ABI. Python defines their schemas
// (engine/ops.py); a kernel receives its arguments in the order of its schema.
//
// Tensors are read through the C functions below torch::stable::Tensor, and the arguments one by one rather than with
// TORCH_BOX: with small inputs, reference-counted wrappers would take as long as the arithmetic, and TORCH_BOX of torch
// 2.10 to 2.13 loses the memory of each string argument.

#include <torch/csrc/stable/library.h>

#include "kernels.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>

#if defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
#include <intrin.h>
#endif

// The instruction sets that the kernels were compiled for.
#if defined(GN_WITH_BASELINE)
namespace ghostnoise::baseline { extern const Kernels kernels; }
#endif
#if defined(GN_WITH_AVX2)
namespace ghostnoise::avx2 { extern const Kernels kernels; }
#endif
#if defined(GN_WITH_AVX512)
namespace ghostnoise::avx512 { extern const Kernels kernels; }
#endif

namespace ghostnoise {

namespace {

bool requests_huge_pages() {
    const char *value = std::getenv("GHOSTNOISE_HUGE_PAGES");
    return !value || std::strcmp(value, "0") != 0;
}

// The kernels for the best instruction set that this processor and system have; null if there are none.
const Kernels *best_kernels() {
    bool avx2 = false, avx512 = false;
#if defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
    int first[4], seventh[4];
    __cpuidex(first, 1, 0);
    __cpuidex(seventh, 7, 0);
    const unsigned features = unsigned(first[2]), more = unsigned(seventh[1]);
    const unsigned needed = 1u << 12 | 1u << 29 | 1u << 27;                    // FMA, F16C, OSXSAVE
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;           // AVX-512 F, DQ, BW and VL
    if ((features & needed) == needed) {
        const unsigned long long saved = _xgetbv(0);  // the registers that the system saves: YMM, and masks and ZMM
        avx512 = (more & wide) == wide && (saved & 0xe6) == 0xe6;
        avx2 = (more & 1u << 5) && (saved & 0x6) == 0x6;
    }
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("fma");
    avx2 = fma && __builtin_cpu_supports("avx2");
    avx512 = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    (void)avx2, (void)avx512;
#if defined(GN_WITH_AVX512)
    if (avx512)
        return &avx512::kernels;
#endif
#if defined(GN_WITH_AVX2)
    if (avx2)
        return &avx2::kernels;
#endif
#if defined(GN_WITH_BASELINE)
    return &baseline::kernels;
#else
    return nullptr;
#endif
}

const Kernels *const kernels = best_kernels();

const std::int32_t FLOAT32 = aoti_torch_dtype_float32(), FLOAT64 = aoti_torch_dtype_float64();
const std::int32_t BFLOAT16 = aoti_torch_dtype_bfloat16(), FLOAT16 = aoti_torch_dtype_float16();
const std::int32_t INT64 = aoti_torch_dtype_int64(), CPU = aoti_torch_device_type_cpu();

template <class Error = std::runtime_error, class... Parts>
[[noreturn]] C10_NOINLINE void fail(const char *name, const Parts &...parts) {
    std::ostringstream text;
    text << "ghostnoise::" << name << ": ";
    (text << ... << parts);
    throw Error(text.str());
}

void succeed(AOTITorchError code) {
    if (code != TORCH_SUCCESS)
        throw std::runtime_error("ghostnoise: a function of torch's stable ABI failed; torch has written why");
}

// A tensor that this function owns a reference of, or none.
class Tensor {
  public:
    i64 dims = 0;
    const i64 *sizes = nullptr, *strides = nullptr;
    std::int32_t dtype = 0;

    Tensor() = default;
    explicit Tensor(AtenTensorHandle given) : handle(given) {
        if (!handle)
            return;
        i64 *found_sizes, *found_strides;
        succeed(aoti_torch_get_dim(handle, &dims));
        succeed(aoti_torch_get_sizes(handle, &found_sizes));
        succeed(aoti_torch_get_strides(handle, &found_strides));
        succeed(aoti_torch_get_dtype(handle, &dtype));
        sizes = found_sizes;
        strides = found_strides;
    }
    Tensor(Tensor &&other) noexcept
        : dims(other.dims), sizes(other.sizes), strides(other.strides), dtype(other.dtype), handle(other.handle) {
        other.handle = nullptr;
    }
    Tensor &operator=(Tensor &&other) noexcept {
        std::swap(dims, other.dims);
        std::swap(sizes, other.sizes);
        std::swap(strides, other.strides);
        std::swap(dtype, other.dtype);
        std::swap(handle, other.handle);
        return *this;
    }
    ~Tensor() {
        if (handle)
            aoti_torch_delete_tensor_object(handle);
    }

    explicit operator bool() const { return handle; }
    AtenTensorHandle get() const { return handle; }
    AtenTensorHandle release() {
        AtenTensorHandle given = handle;
        handle = nullptr;
        return given;
    }
    const void *read() const {
        const void *at = nullptr;
        if (handle)
            succeed(torch_get_const_data_ptr(handle, &at));
        return at;
    }
    void *write() const {
        void *at = nullptr;
        if (handle)
            succeed(torch_get_mutable_data_ptr(handle, &at));
        return at;
    }
    i64 positions() const {
        i64 count = 1;
        for (i64 d = 2; d < dims; ++d)
            count *= sizes[d];
        return count;
    }

  private:
    AtenTensorHandle handle = nullptr;
};

std::string shape(const Tensor &x) {
    std::string text = "(";
    for (i64 d = 0; d < x.dims; ++d)
        text += std::to_string(x.sizes[d]) + (d + 1 < x.dims ? ", " : ")");
    return x.dims ? text : "()";
}

// The arguments of a kernel, which takes all of them before anything may fail.
class Arguments {
  public:
    Arguments(StableIValue *stack, std::uint64_t given, std::uint64_t taken) : next(stack) {
        if (given != taken)
            throw std::runtime_error("ghostnoise: the C++ library was built for other schemas; reinstall ghostnoise");
    }
    Tensor tensor() { return Tensor(take<AtenTensorHandle>()); }
    Tensor optional_tensor() {
        const auto found = take<std::optional<AtenTensorHandle>>();
        return found ? Tensor(*found) : Tensor();
    }
    template <class T> T take() { return torch::stable::detail::to<T>(*next++); }
    // The first letter of a string, which distinguishes all values of the arguments that are strings.
    char letter() {
        const StringHandle text = take<StringHandle>();
        const char *at = "";
        succeed(torch_string_c_str(text, &at));
        const char first = *at;
        succeed(torch_delete_string(text));
        return first;
    }

  private:
    StableIValue *next;
};

template <class... Tensors> void give(StableIValue *stack, Tensors &...made) {
    ((*stack++ = torch::stable::detail::from(made.release())), ...);
}

// Scratch memory on the stack, or where it does not suffice on the heap.
class Memory {
  public:
    Memory() = default;
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() {
        for (int k = 0; k < blocks; ++k)
            std::free(block[k]);
    }
    void *bytes(i64 count) {
        count = (count + 63) / 64 * 64;
        if (count <= SIZE - used) {
            used += count;
            return local + used - count;
        }
        void *made = blocks < BLOCKS ? std::malloc(std::size_t(count)) : nullptr;
        if (!made)
            throw std::bad_alloc();
        return block[blocks++] = made;
    }
    template <class T> T *of(i64 count) { return static_cast<T *>(bytes(count * i64(sizeof(T)))); }

  private:
    static constexpr i64 SIZE = 4096;
    static constexpr int BLOCKS = 16;
    alignas(64) char local[SIZE];
    i64 used = 0;
    int blocks = 0;
    void *block[BLOCKS];
};

constexpr i64 MAX_DIMS = 64;

Tensor empty(i64 dims, const i64 *sizes, const i64 *strides, std::int32_t dtype) {
    AtenTensorHandle made;
    succeed(aoti_torch_empty_strided(dims, sizes, strides, dtype, CPU, 0, &made));
    return Tensor(made);
}

Tensor table(i64 R, i64 C, std::int32_t dtype) {
    const i64 sizes[] = {R, C}, strides[] = {C > 0 ? C : 1, 1};
    return empty(2, sizes, strides, dtype);
}

Tensor channels(i64 C, std::int32_t dtype) {
    const i64 stride = 1;
    return empty(1, &C, &stride, dtype);
}

// Whether each element has memory of its own, and all together have no gaps; then results have the same strides.
bool is_dense(const Tensor &x) {
    i64 done = 1;
    std::uint64_t left = 0;
    for (i64 d = 0; d < x.dims; ++d)
        left |= std::uint64_t(x.sizes[d] != 1) << d;
    while (left) {  // dimension by dimension, by increasing strides
        i64 next = -1;
        for (i64 d = x.dims - 1; next < 0 && d >= 0; --d)
            if (left >> d & 1 && x.strides[d] == done)
                next = d;
        if (next < 0)
            return false;
        left &= ~(std::uint64_t(1) << next);
        done *= x.sizes[next];
    }
    return true;
}

// A tensor of the same shape in the memory format that torch's own operators preserve.
Tensor empty_like(const Tensor &x) {
    if (is_dense(x))
        return empty(x.dims, x.sizes, x.strides, x.dtype);
    AtenTensorHandle same;
    succeed(aoti_torch_new_tensor_handle(x.get(), &same));
    StableIValue stack[6] = {torch::stable::detail::from(same)};
    for (int k = 1; k < 6; ++k)
        stack[k] = torch::stable::detail::from(std::nullopt);
    succeed(torch_call_dispatcher("aten::empty_like", "", stack, TORCH_ABI_VERSION));
    return Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

struct Strides {
    i64 b, inner;
};

// Whether the channels of a tensor (`last`), or else its positions, are contiguous; and its other strides.
bool lies(const Tensor &x, bool last, Strides &to) {
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
Tensor empty_in_layout(const Tensor &x, bool last) {
    i64 strides[MAX_DIMS], next = last ? x.sizes[1] : 1;
    for (i64 d = x.dims - 1; d >= 2; --d) {
        strides[d] = next;
        next *= x.sizes[d];
    }
    strides[1] = last ? 1 : next;
    strides[0] = last ? next : next * x.sizes[1];
    return empty(x.dims, x.sizes, strides, x.dtype);
}

Tensor copy_in_layout(const Tensor &x, bool last) {
    Tensor copy = empty_in_layout(x, last);
    succeed(aoti_torch_copy_(copy.get(), x.get(), 0));
    return copy;
}

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
        n.threads = given.sizes[0] * given.sizes[1] * S >= GRAIN ? threads() : 1;
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

    static i64 threads() {
        std::uint32_t found = 1;
        succeed(torch_get_num_threads(&found));
        return found > 0 ? found : 1;
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
            fail(name, "dy of shape ", shape(dy), " and x of shape ", shape(x), "; both must have the same shape and dtype");
        Strides found;
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

void check(const char *name, Status status) {
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

void check_channels(const char *name, const char *what, const Tensor &x, i64 C) {
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

const void *parameter(const char *name, const char *what, const Tensor &x, const Batch &batch, Memory &memory) {
    if (batch.wide())
        return values<double>(name, what, x, batch.n.C, memory);
    return values<float>(name, what, x, batch.n.C, memory);
}

// A table (R, C) with a row for each sample, or one for all.
GivenTable given_table(const char *name, const char *what, const Tensor &x, const Batch &batch, i64 &R) {
    const bool wide = x.dtype == FLOAT64;
    if (x.dims != 2 || x.sizes[1] != batch.n.C || (x.sizes[0] != 1 && x.sizes[0] != batch.n.B))
        fail(name, what, " of shape ", shape(x), "; it must have the shape (1, C) or (B, C)");
    if (!wide && x.dtype != batch.arithmetic())
        fail(name, what, " must be float64, or have the dtype of the arithmetic");
    if (x.sizes[0] > R)
        R = x.sizes[0];
    return {x.read(), wide, x.sizes[0] == 1 ? 0 : x.strides[0], batch.n.C == 1 ? 1 : x.strides[1]};
}

i64 threads_for(const Batch &batch, i64 elements) { return elements >= GRAIN ? batch.n.threads : 1; }

// A table in double, contiguous, of this shape; a copy if it is not.
const double *statistics(const char *name, const char *what, const Tensor &x, i64 R, i64 C, Tensor &copied) {
    if (x.dims != 2 || x.sizes[0] != R || x.sizes[1] != C)
        fail(name, what, " of shape ", shape(x), "; it must have the shape (", R, ", ", C, ")");
    if (x.dtype == FLOAT64 && (x.strides[1] == 1 || C == 1) && (x.strides[0] == C || R <= 1))
        return static_cast<const double *>(x.read());
    copied = table(R, C, FLOAT64);
    succeed(aoti_torch_copy_(copied.get(), x.get(), 0));
    return static_cast<const double *>(copied.read());
}

// ---- passes ----

void moments(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "moments";
    Arguments arguments(stack, given, 1);
    const Tensor x = arguments.tensor();
    const Batch batch(name, x, false);
    const Pass &n = batch.n;
    Tensor mean = table(n.B, n.C, FLOAT64), var = table(n.B, n.C, FLOAT64);
    double *to_mean = static_cast<double *>(mean.write()), *to_var = static_cast<double *>(var.write());
    if (batch.elements())
        check(name, kernels->moments(n, batch.input(), to_mean, to_var));
    for (i64 k = 0; n.S == 0 && k < n.B * n.C; ++k)
        to_mean[k] = to_var[k] = NAN;
    give(stack, mean, var);
}

void transform(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "transform";
    Arguments arguments(stack, given, 4);
    const Tensor x = arguments.tensor(), center = arguments.tensor(), scale = arguments.tensor();
    const Tensor shift = arguments.tensor();
    Batch batch(name, x, true);
    const Pass &n = batch.n;
    i64 R = 1;
    const GivenTable centers = given_table(name, "center", center, batch, R);
    const GivenTable scales = given_table(name, "scale", scale, batch, R);
    const GivenTable shifts = given_table(name, "shift", shift, batch, R);
    if (batch.elements()) {
        Memory memory;
        const i64 size = R * n.C * batch.arithmetic_bytes();
        char *to = static_cast<char *>(memory.bytes(3 * size));
        kernels->convert_linear(batch.wide(), threads_for(batch, R * n.C), R, n.C, centers, scales, shifts, to);
        const auto rows = [&](int k) { return Table{to + k * size, R == 1 ? n.B : 1, R - 1}; };
        check(name, kernels->transform(n, false, batch.input(), rows(0), rows(1), rows(2), batch.output()));
        batch.finish();
    }
    give(stack, batch.made);
}

void gradient_sums(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "gradient_sums";
    Arguments arguments(stack, given, 3);
    const Tensor dy = arguments.tensor(), x = arguments.tensor(), center = arguments.tensor();
    const Batch batch(name, x, false);
    const Pass &n = batch.n;
    Tensor copied;
    const Input gradient = batch.gradient(name, dy, copied);
    i64 R = 1;
    const GivenTable centers = given_table(name, "center", center, batch, R);
    Tensor total = table(n.B, n.C, FLOAT64), moment = table(n.B, n.C, FLOAT64);
    double *to_total = static_cast<double *>(total.write()), *to_moment = static_cast<double *>(moment.write());
    if (batch.elements()) {
        Memory memory;
        const i64 size = n.B * n.C * batch.arithmetic_bytes(), threads = threads_for(batch, n.B * n.C);
        char *rounded = static_cast<char *>(memory.bytes(R * n.C * batch.arithmetic_bytes()));
        char *sums = static_cast<char *>(memory.bytes(2 * size));
        kernels->convert(batch.wide(), threads, R, n.C, centers, rounded);
        check(name, kernels->gradient_sums(n, gradient, batch.input(), {rounded, R == 1 ? n.B : 1, R - 1}, sums,
                                           sums + size));
        kernels->widen_sums(batch.wide(), threads, n.B, n.C, centers, sums, sums + size, to_total, to_moment);
    }
    for (i64 k = 0; n.S == 0 && k < n.B * n.C; ++k)
        to_total[k] = to_moment[k] = 0;
    give(stack, total, moment);
}

void input_gradient(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "input_gradient";
    Arguments arguments(stack, given, 6);
    const Tensor dy = arguments.tensor(), x = arguments.tensor(), scale = arguments.tensor();
    const Tensor center = arguments.tensor(), slope = arguments.tensor(), offset = arguments.tensor();
    Batch batch(name, x, true);
    const Pass &n = batch.n;
    Tensor copied;
    const Input gradient = batch.gradient(name, dy, copied);
    i64 R = 1, scale_rows = 1;
    const GivenTable scales = given_table(name, "scale", scale, batch, scale_rows);
    const GivenTable centers = given_table(name, "center", center, batch, R);
    const GivenTable slopes = given_table(name, "slope", slope, batch, R);
    const GivenTable offsets = given_table(name, "offset", offset, batch, R);
    if (batch.elements()) {
        Memory memory;
        const i64 bytes = batch.arithmetic_bytes(), size = R * n.C * bytes;
        char *to = static_cast<char *>(memory.bytes(3 * size));
        char *factor = static_cast<char *>(memory.bytes(scale_rows * n.C * bytes));
        char *ones = static_cast<char *>(memory.bytes(n.C * bytes));
        const double one = 1;
        const bool wide = batch.wide();
        kernels->convert_linear(wide, threads_for(batch, R * n.C), R, n.C, centers, slopes, offsets, to);
        kernels->convert(wide, threads_for(batch, scale_rows * n.C), scale_rows, n.C, scales, factor);
        kernels->convert(wide, 1, 1, n.C, {&one, true, 0, 0}, ones);
        const auto rows = [&](int k) { return Table{to + k * size, R == 1 ? n.B : 1, R - 1}; };
        check(name, kernels->input_gradient(n, false, gradient, batch.input(),
                                            {factor, scale_rows == 1 ? n.B : 1, scale_rows - 1}, {ones, n.B, 0},
                                            rows(0), rows(1), rows(2), batch.output()));
        batch.finish();
    }
    give(stack, batch.made);
}

// ---- fused ----

// The ghost batches of a batch: of `ghost_size` consecutive samples, of which the last one takes the rest.
Geometry geometry(const char *name, const Batch &batch, std::optional<i64> ghost_size, bool exclusive,
                  Memory &memory) {
    const Pass &n = batch.n;
    if (ghost_size && *ghost_size < 1)
        fail(name, "ghost_size of ", *ghost_size, "; it must be 1 or more, or None");
    if (!batch.elements())
        fail(name, "x has no values; it must have one for each sample and channel");
    const i64 size = ghost_size && *ghost_size < n.B ? *ghost_size : n.B, G = n.B / size;
    i64 *starts = memory.of<i64>(G + 1);
    for (i64 g = 0; g < G; ++g)
        starts[g] = g * size;
    starts[G] = n.B;
    Geometry made = {};
    made.dtype = n.dtype;
    made.last = n.last;
    made.exclusive = exclusive;
    made.threads = Batch::threads();  // tables may justify more threads than x does
    made.B = n.B;
    made.C = n.C;
    made.S = n.S;
    made.per_pool = exclusive || G == n.B ? 1 : G == 1 ? n.B : size;
    made.G = G;
    made.starts = starts;
    return made;
}

// The number of batches that were tracked.
i64 count_of(const char *name, const char *what, const Tensor &count) {
    if (count.dtype != INT64 || (count.dims != 0 && !(count.dims == 1 && count.sizes[0] == 1)))
        fail(name, what, " of shape ", shape(count), "; it must be an int64 scalar");
    return *static_cast<const i64 *>(count.read());
}

// from + factor * (to - from), exactly `from` or `to` where the factor is 0 or 1, as torch.lerp computes it.
template <class T> T interpolate(T from, double to, double factor) {
    using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const A start = A(from), end = A(to), gap = end - start, weight = A(factor);
    return T(factor < 0.5 ? start + weight * gap : end - gap * (A(1) - weight));
}

// Updates running statistics towards the moments of a batch, and the number of batches, unless the updated values are
// not finite. Each of the three may be absent.
struct Running {
    const Tensor &mean, &var, &count;
    std::optional<double> momentum;

    explicit operator bool() const {
        return (mean || var || count) && (momentum || count);  // an average needs the count
    }
    void check(const char *name, i64 C) const {
        for (const Tensor *buffer : {&mean, &var})
            if (*buffer) {
                check_channels(name, "a running statistic", *buffer, C);
                with_elements(name, "a running statistic", *buffer, [](auto) {});
                if (C > 1 && buffer->strides[0] == 0)
                    fail(name, "an expanded running statistic; its elements must have memory of their own");
            }
        if (count)
            count_of(name, "num_batches_tracked", count);
    }
    void update(const char *name, i64 C, const double *to_mean, const double *to_var) const {
        i64 *const batches = static_cast<i64 *>(count.write());
        const double factor = momentum ? *momentum : 1.0 / double(*batches + 1);
        double sum = 0;  // 0 if all values are finite, else NaN
        const auto each = [&](const Tensor &buffer, const double *to, auto use) {
            if (buffer)
                with_elements(name, "a running statistic", buffer, [&](auto *type) {
                    auto *at = static_cast<decltype(type)>(buffer.write());
                    for (i64 c = 0; c < C; ++c)
                        use(at[c * buffer.strides[0]], interpolate(at[c * buffer.strides[0]], to[c], factor));
                });
        };
        const auto sum_up = [&](const auto &, auto updated) { sum += 0 * double(updated); };
        const auto store = [](auto &old, auto updated) { old = updated; };
        each(mean, to_mean, sum_up);
        each(var, to_var, sum_up);
        for (i64 c = 0; !mean && !var && c < C; ++c)
            sum += 0 * (to_mean[c] + to_var[c]);
        if (sum != 0)
            return;
        each(mean, to_mean, store);
        each(var, to_var, store);
        if (batches)
            ++*batches;
    }
};

// The limits r_max and d_max after `count` batches: those of Batch Normalization for `warmup` batches, then linear to
// the final ones.
void limit(Renormalization &to, double r_max, double d_max, const Tensor &count, i64 batches, i64 warmup,
           i64 transition) {
    double progress = 1;
    if (count && transition == 0)
        progress = batches >= warmup;
    else if (count)
        progress = double(batches - warmup) / double(transition);
    progress = progress < 0 ? 0 : progress > 1 ? 1 : progress;
    to.r_max = 1 + (r_max - 1) * progress;
    to.d_max = d_max * progress;
}

// Rows of indices of drawn samples, or a copy of them.
void draw(const char *name, const Tensor &indices, i64 B, Tensor &copied, NoiseSource &to) {
    if (indices.dtype != INT64 || indices.dims != 2 || indices.sizes[0] != B || indices.sizes[1] < 1)
        fail(name, "indices of shape ", shape(indices), "; they must be int64 and have the shape (B, N)");
    to.N = indices.sizes[1];
    const bool dense = (indices.strides[1] == 1 || to.N == 1) && (indices.strides[0] == to.N || B == 1);
    if (!dense)
        copied = copy_in_layout(indices, false);
    to.indices = static_cast<const i64 *>((dense ? indices : copied).read());
}

// The seed and the law of noise as law.h takes them.
void draw_from_law(const char *name, const Tensor &seed, const Tensor &law, const Tensor &quantiles,
                   const Batch &batch, NoiseSource &to) {
    const auto dense = [](const Tensor &x, std::int32_t dtype, i64 count) {
        i64 next = 1;
        if (!x || x.dtype != dtype)
            return false;
        for (i64 d = x.dims - 1; d >= 0; --d) {
            if (x.sizes[d] != 1 && x.strides[d] != next)
                return false;
            next *= x.sizes[d];
        }
        return next == count;
    };
    constexpr i64 NUMBERS = 6, QUANTILES = 2 * 4 * 224;
    if (!dense(seed, INT64, 1) || !dense(law, FLOAT64, NUMBERS) || !dense(quantiles, batch.arithmetic(), QUANTILES))
        fail(name, "noise from a law needs an int64 seed (1,), a law of ", NUMBERS, " float64 numbers, and quantiles (2, 4, "
             "224) in the dtype of the arithmetic, all contiguous");
    to.seed = static_cast<const i64 *>(seed.read());
    to.law = static_cast<const double *>(law.read());
    to.quantiles = quantiles.read();
}

void normalize(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "normalize";
    Arguments arguments(stack, given, 26);
    const Tensor x = arguments.tensor(), weight = arguments.optional_tensor(), bias = arguments.optional_tensor();
    const Tensor running_mean = arguments.optional_tensor(), running_var = arguments.optional_tensor();
    const Tensor tracked = arguments.optional_tensor();
    const auto momentum = arguments.take<std::optional<double>>();
    const char towards = arguments.letter();  // "whole", "unbiased" or "ghosts"
    const auto ghost_size = arguments.take<std::optional<i64>>();
    const bool exclusive = arguments.take<bool>();
    const double eps = arguments.take<double>(), min_std = arguments.take<double>();
    const Tensor indices = arguments.optional_tensor(), seed = arguments.optional_tensor();
    const Tensor law = arguments.optional_tensor(), quantiles = arguments.optional_tensor();
    const double noise_eps = arguments.take<double>();
    const bool shift = arguments.take<bool>(), scale = arguments.take<bool>();
    const Tensor reference_mean = arguments.optional_tensor(), reference_var = arguments.optional_tensor();
    const Tensor reference_count = arguments.optional_tensor();
    const auto r_max = arguments.take<std::optional<double>>();
    const double d_max = arguments.take<double>();
    const i64 warmup_steps = arguments.take<i64>(), transition_steps = arguments.take<i64>();

    Memory memory;
    Batch batch(name, x, true);
    const auto [_, last, threads, B, C, S] = batch.n;
    NormalizeCall call = {};
    call.geometry = geometry(name, batch, ghost_size, exclusive, memory);
    const bool one_pool = call.geometry.G == 1 && !exclusive, noisy = indices || seed;
    if (noisy ? !one_pool || r_max || (!shift && !scale) || (indices && seed) : shift || scale)
        fail(name, "noise needs indices or a seed, shift or scale, one pool of all samples, and no renormalization");
    if (r_max && !one_pool)
        fail(name, "renormalization needs one pool of all samples");
    if (towards != 'w' && towards != 'u' && (towards != 'g' || exclusive))
        fail(name, "running statistics are updated towards 'whole', 'unbiased', or without exclusive pools 'ghosts'");
    const Running running = {running_mean, running_var, tracked, momentum};
    running.check(name, C);
    call.weight = parameter(name, "weight", weight, batch, memory);
    call.bias = parameter(name, "bias", bias, batch, memory);
    call.eps = eps;
    call.least = min_std * min_std;
    call.noise.eps = noise_eps;
    Tensor drawn;
    if (indices)
        draw(name, indices, B, drawn, call.noise);
    else if (seed)
        draw_from_law(name, seed, law, quantiles, batch, call.noise);

    const i64 kept = exclusive ? S > 1 ? B : 0 : call.geometry.G;
    Tensor mean = table(kept, C, FLOAT64), var = table(kept, C, FLOAT64);
    const i64 components = i64(shift) + i64(scale);
    const i64 noise_sizes[] = {components, B, C}, noise_strides[] = {B * C, C, 1};
    Tensor noise = empty(3, noise_sizes, noise_strides, batch.arithmetic());
    Tensor correction = table(r_max ? 2 : 0, C, batch.arithmetic());
    if (kept) {
        call.mean = static_cast<double *>(mean.write());
        call.var = static_cast<double *>(var.write());
    }
    char *const noise_at = static_cast<char *>(components ? noise.write() : nullptr);
    call.m = shift ? noise_at : nullptr;
    call.k = scale ? noise_at + (shift ? B * C * batch.arithmetic_bytes() : 0) : nullptr;
    if (r_max) {
        const bool live = !reference_mean && !reference_var;
        const Tensor &from_mean = live ? running_mean : reference_mean, &from_var = live ? running_var : reference_var;
        const Tensor &count = reference_count ? reference_count : tracked;
        if (!from_mean || !from_var)
            fail(name, "renormalization needs reference statistics or running statistics, a mean and a variance");
        Renormalization &to = call.renormalization;
        to.mean = values<double>(name, "a reference mean", from_mean, C, memory);
        to.var = values<double>(name, "a reference variance", from_var, C, memory);
        char *at = static_cast<char *>(correction.write());
        to.r = at;
        to.d = at + C * batch.arithmetic_bytes();
        limit(to, *r_max, d_max, count, count ? count_of(name, "a count of batches", count) : 0, warmup_steps,
              transition_steps);
    }
    if (running) {
        call.population = {towards == 'g', memory.of<double>(C), nullptr};
        call.population.var = memory.of<double>(C);
    }
    const Input input = batch.input();
    const Output output = batch.output();
    call.x = input.at;
    call.y = output.at;
    call.geometry.x_b = call.geometry.dy_b = input.b;
    call.geometry.x_inner = call.geometry.dy_inner = input.inner;
    call.geometry.made_b = output.b;
    call.geometry.made_inner = output.inner;
    check(name, kernels->normalize(call));
    batch.finish();
    if (running) {
        const double values = double(B * S), bessel = towards == 'u' ? values / (values - 1) : 1;
        for (i64 c = 0; c < C; ++c)
            call.population.var[c] *= bessel;
        running.update(name, C, call.population.mean, call.population.var);
    }
    give(stack, batch.made, mean, var, noise, correction);
}

void normalize_backward(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "normalize_backward";
    Arguments arguments(stack, given, 14);
    const Tensor dy = arguments.tensor(), x = arguments.tensor(), weight = arguments.optional_tensor();
    const Tensor mean = arguments.tensor(), var = arguments.tensor(), noise = arguments.tensor();
    const Tensor correction = arguments.tensor();
    const auto ghost_size = arguments.take<std::optional<i64>>();
    const bool exclusive = arguments.take<bool>();
    const double eps = arguments.take<double>(), min_std = arguments.take<double>();
    const bool shift = arguments.take<bool>(), scale = arguments.take<bool>(), needs_x = arguments.take<bool>();

    Memory memory;
    Batch batch(name, x, needs_x);
    const auto [_, last, threads, B, C, S] = batch.n;
    NormalizeBackwardCall call = {};
    call.geometry = geometry(name, batch, ghost_size, exclusive, memory);
    Tensor copied, copied_mean, copied_var, copied_noise, copied_correction;
    const Input gradient = batch.gradient(name, dy, copied), input = batch.input();
    call.weight = parameter(name, "weight", weight, batch, memory);
    call.eps = eps;
    call.least = min_std * min_std;
    const i64 kept = exclusive ? S > 1 ? B : 0 : call.geometry.G;
    call.mean = statistics(name, "mean", mean, kept, C, copied_mean);
    call.var = statistics(name, "var", var, kept, C, copied_var);
    const auto dense = [&](const char *what, const Tensor &table, i64 rows, i64 size, Tensor &copy) -> const char * {
        i64 count = 1;
        for (i64 d = 0; d < table.dims; ++d)
            count *= table.sizes[d];
        if (table.dtype != batch.arithmetic() || table.dims < 2 || table.sizes[0] != rows || count != rows * size)
            fail(name, what, " of shape ", shape(table), "; it must be what `normalize` has returned");
        if (!rows)
            return nullptr;
        i64 next = 1;
        bool contiguous = true;
        for (i64 d = table.dims - 1; d >= 0; --d) {
            contiguous = contiguous && (table.sizes[d] == 1 || table.strides[d] == next);
            next *= table.sizes[d];
        }
        if (!contiguous)
            copy = copy_in_layout(table, false);
        return static_cast<const char *>((contiguous ? table : copy).read());
    };
    const i64 bytes = batch.arithmetic_bytes();
    const char *noise_at = dense("noise", noise, i64(shift) + i64(scale), B * C, copied_noise);
    call.m = shift ? noise_at : nullptr;
    call.k = scale ? noise_at + (shift ? B * C * bytes : 0) : nullptr;
    const char *correction_at =
        dense("correction", correction, correction.dims && correction.sizes[0] ? 2 : 0, C, copied_correction);
    call.r = correction_at;
    call.d = correction_at ? correction_at + C * bytes : nullptr;
    if ((call.m || call.k || call.r) && (call.geometry.G > 1 || exclusive))
        fail(name, "noise and renormalization need one pool of all samples");
    Tensor g_weight = channels(C, batch.arithmetic()), g_bias = channels(C, batch.arithmetic());
    call.dy = gradient.at;
    call.x = input.at;
    call.g_weight = g_weight.write();
    call.g_bias = g_bias.write();
    call.geometry.x_b = input.b;
    call.geometry.x_inner = input.inner;
    call.geometry.dy_b = gradient.b;
    call.geometry.dy_inner = gradient.inner;
    if (needs_x) {
        const Output output = batch.output();
        call.dx = output.at;
        call.geometry.made_b = output.b;
        call.geometry.made_inner = output.inner;
    } else {
        batch.made = channels(0, x.dtype);
    }
    check(name, kernels->normalize_backward(call));
    batch.finish();
    give(stack, batch.made, g_weight, g_bias);
}

void ghost_noise(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "ghost_noise";
    Arguments arguments(stack, given, 5);
    const Tensor x = arguments.tensor(), indices = arguments.tensor();
    const double eps = arguments.take<double>();
    const bool shift = arguments.take<bool>(), scale = arguments.take<bool>();

    Memory memory;
    Batch batch(name, x, true);
    const i64 B = batch.n.B, C = batch.n.C;
    GhostNoiseCall call = {};
    call.geometry = geometry(name, batch, std::nullopt, false, memory);
    if (!shift && !scale)
        fail(name, "neither shift nor scale; one of them must be True");
    Tensor drawn, factor = table(scale ? B : 0, C, batch.arithmetic());
    draw(name, indices, B, drawn, call.noise);
    call.noise.eps = eps;
    call.m = shift ? memory.bytes(B * C * batch.arithmetic_bytes()) : nullptr;
    call.k = scale ? factor.write() : nullptr;
    const Input input = batch.input();
    const Output output = batch.output();
    call.x = input.at;
    call.y = output.at;
    call.geometry.x_b = input.b;
    call.geometry.x_inner = input.inner;
    call.geometry.made_b = output.b;
    call.geometry.made_inner = output.inner;
    check(name, kernels->ghost_noise(call));
    batch.finish();
    give(stack, batch.made, factor);
}

}  // namespace

bool huge_pages_requested = requests_huge_pages();

void run_shares(i64 shares, void (*share)(void *context, i64 k), void *context) {
    struct Call {
        void (*share)(void *, i64);
        void *context;
    } call = {share, context};
    const auto run = [](std::int64_t begin, std::int64_t end, void *given) {
        for (i64 k = begin; k < end; ++k)
            static_cast<Call *>(given)->share(static_cast<Call *>(given)->context, k);
    };
    succeed(torch_parallel_for(0, shares, 1, run, &call));
}

}  // namespace ghostnoise

// The instruction set of the kernels that run, for `ghostnoise doctor`; null if the library was built for others, and
// has not registered any kernel.
#if defined(_WIN32)
extern "C" __declspec(dllexport)
#else
extern "C" __attribute__((visibility("default")))
#endif
const char *ghostnoise_level() {
    return ghostnoise::kernels ? ghostnoise::kernels->level : nullptr;
}

STABLE_TORCH_LIBRARY_IMPL(ghostnoise, CPU, m) {
    if (!ghostnoise::kernels)
        return;
    m.impl("moments", &ghostnoise::moments);
    m.impl("transform", &ghostnoise::transform);
    m.impl("gradient_sums", &ghostnoise::gradient_sums);
    m.impl("input_gradient", &ghostnoise::input_gradient);
    m.impl("normalize", &ghostnoise::normalize);
    m.impl("normalize_backward", &ghostnoise::normalize_backward);
    m.impl("ghost_noise", &ghostnoise::ghost_noise);
}
