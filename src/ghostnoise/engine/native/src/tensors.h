// Tensors of torch's stable ABI, the arguments and results of operators, and their scratch memory.

#pragma once

#include <torch/csrc/stable/library.h>

#include "kernels.h"

#include <cstdlib>
#include <new>
#include <sstream>
#include <stdexcept>

namespace ghostnoise {

inline const std::int32_t FLOAT32 = aoti_torch_dtype_float32(), FLOAT64 = aoti_torch_dtype_float64();
inline const std::int32_t BFLOAT16 = aoti_torch_dtype_bfloat16(), FLOAT16 = aoti_torch_dtype_float16();
inline const std::int32_t INT64 = aoti_torch_dtype_int64(), CPU = aoti_torch_device_type_cpu();

template <class Error = std::runtime_error, class... Parts>
[[noreturn]] C10_NOINLINE void fail(const char *name, const Parts &...parts) {
    std::ostringstream text;
    text << "ghostnoise::" << name << ": ";
    (text << ... << parts);
    throw Error(text.str());
}

inline void succeed(AOTITorchError code) {
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

inline std::string shape(const Tensor &x) {
    std::string text;
    for (i64 d = 0; d < x.dims; ++d)
        text += (d ? ", " : "") + std::to_string(x.sizes[d]);
    return "(" + text + (x.dims == 1 ? ",)" : ")");
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

inline Tensor empty(i64 dims, const i64 *sizes, const i64 *strides, std::int32_t dtype) {
    AtenTensorHandle made;
    succeed(aoti_torch_empty_strided(dims, sizes, strides, dtype, CPU, 0, &made));
    return Tensor(made);
}

inline Tensor table(i64 R, i64 C, std::int32_t dtype) {
    const i64 sizes[] = {R, C}, strides[] = {C > 0 ? C : 1, 1};
    Tensor made = empty(2, sizes, strides, dtype);
    request_huge_pages(made.read(), R * C * (dtype == FLOAT64 ? 8 : 4));
    return made;
}

inline Tensor tables(i64 count, i64 R, i64 C, std::int32_t dtype) {
    const i64 sizes[] = {count, R, C}, strides[] = {R * C, C, 1};
    return empty(3, sizes, strides, dtype);
}

inline Tensor channels(i64 C, std::int32_t dtype) {
    const i64 stride = 1;
    return empty(1, &C, &stride, dtype);
}

inline bool is_contiguous(const Tensor &x) {
    i64 next = 1;
    for (i64 d = x.dims - 1; d >= 0; --d) {
        if (x.sizes[d] != 1 && x.strides[d] != next)
            return false;
        next *= x.sizes[d];
    }
    return true;
}

// Whether each element has memory of its own, and all together have no gaps; then results have the same strides.
inline bool is_dense(const Tensor &x) {
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
inline Tensor empty_like(const Tensor &x) {
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

}  // namespace ghostnoise
