// CUDA's words with a meaning on a CPU: included ahead of a lifted kernels file in place of CUDA's own
// headers. Threads of a block are fibers of one OS thread (simt_runtime.cpp), so a `__shared__` variable
// is a thread-local one; simt.py rewrites its declaration (and only that) before this file is compiled.
//
// <math.h> and not only <cmath>: with the latter alone cos(float) is double.
#pragma once
#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "simt_abi.hpp"

#define __host__
#define __device__
#define __global__
#define __managed__
#define __constant__ static
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __builtin_align__(n) __attribute__((aligned(n)))
#ifndef __restrict__
#define __restrict__ __restrict
#endif
#define __CUDA_ARCH__ 900
#define __CUDACC__ 1

// --- built-in variables ---------------------------------------------------------------------------

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return uint3{x, y, z}; }
};

// __thread, because `extern thread_local` would be reached through a wrapper function
static __thread uint3 threadIdx;
static __thread uint3 blockIdx;
static __thread uint3 blockDim;
static __thread uint3 gridDim;
static constexpr int warpSize = 32;

namespace simt {

static __thread Worker *worker;
static __thread unsigned char *dynamic_shared;
static Api api;

inline Index *index_of(uint3 &v) { return reinterpret_cast<Index *>(&v); }

// What a kernel (and not the functions that it calls) gets as a hidden argument: finding a
// thread-local variable costs a call each time, so a kernel has copies of the built-in ones.
struct Here {
    uint3 thread, block, dim, grid;
    unsigned long long serial;
};

struct Serial {
    unsigned long long serial;
};

}  // namespace simt

static __thread simt::Serial simt_here;  // a kernel's argument of this name hides it

#define SIMT_PARAMETER const simt::Here &simt_here
#define SIMT_HERE                                                                     \
    [[maybe_unused]] const uint3 threadIdx = simt_here.thread, blockIdx = simt_here.block, \
                                 blockDim = simt_here.dim, gridDim = simt_here.grid;

namespace simt {

// The pointer itself, of which the compiler no longer knows that it can be found again.
template <class T>
inline T *keep(T *pointer) {
    asm("" : "+r"(pointer));
    return pointer;
}

inline void views(Views *v) {
    *v = Views{index_of(threadIdx), index_of(blockIdx), index_of(blockDim), index_of(gridDim),
               &worker, &simt_here.serial, &dynamic_shared};
}

inline Here here() { return Here{threadIdx, blockIdx, blockDim, gridDim, simt_here.serial}; }

inline unsigned lane() {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31u;
}

[[noreturn]] inline void fault(int line, const char *message) {
    api.fault(worker, line, message);
    __builtin_unreachable();
}

template <class... A, size_t... I>
inline void call(void (*kernel)(const Here &, A...), const Here &here, void **arguments,
                 std::index_sequence<I...>) {
    kernel(here, *static_cast<std::remove_reference_t<A> *>(arguments[I])...);
}

template <auto kernel, class... A>
inline void run_thread(void (*)(const Here &, A...), const Here &here, void **arguments) {
    call(kernel, here, arguments, std::index_sequence_for<A...>());
}

template <auto kernel>
void thread(void **arguments) {
    run_thread<kernel>(kernel, here(), arguments);
}

// Only for kernels without barriers and shuffles (SIMT_INLINE: their body ends up in this loop).
template <auto kernel>
void block(void **arguments, Index shape, int backwards) {
    Here own = here();
    uint3 *index = keep(&threadIdx);
    for (unsigned k = 0; k < shape.z; k++)
        for (unsigned j = 0; j < shape.y; j++)
            for (unsigned i = 0; i < shape.x; i++) {
                own.thread = backwards ? uint3{shape.x - 1 - i, shape.y - 1 - j, shape.z - 1 - k}
                                       : uint3{i, j, k};
                *index = own.thread;
                run_thread<kernel>(kernel, own, arguments);
            }
}

}  // namespace simt

#define SIMT_VISIBLE extern "C" __attribute__((visibility("default")))
#define SIMT_INLINE inline __attribute__((always_inline))
#define SIMT_KERNEL(name, thread, block)                \
    SIMT_VISIBLE const simt::Kernel simt_kernel_##name; \
    const simt::Kernel simt_kernel_##name = {thread, block, simt::views};

SIMT_VISIBLE void simt_bind(const simt::Api *given) { simt::api = *given; }

// Follows each static `__shared__` variable, which simt.py has renamed to simt_shared_NAME: the first
// thread of a block that comes by has it filled with 0xFF (NaN), because what the block before left
// there would hide a missing store. A reference, for the sake of `keep`.
#define SIMT_SHARED(name)                                                                       \
    auto &name = *simt::keep(&simt_shared_##name);                                              \
    {                                                                                           \
        static __thread unsigned long long simt_seen;                                           \
        if (simt_seen != simt_here.serial) {                                                    \
            simt_seen = simt_here.serial;                                                       \
            using Element = std::remove_all_extents_t<std::remove_reference_t<decltype(name)>>; \
            simt::api.shared(#name, (void *)&name, sizeof name, sizeof(Element));               \
        }                                                                                       \
    }
// `extern __shared__ T name[];`
#ifdef SIMT_WATCHED
#define SIMT_DYNAMIC(name, ...)                                    \
    __VA_ARGS__ *const name = (__VA_ARGS__ *)simt::dynamic_shared; \
    simt::api.shared(#name, nullptr, 0, sizeof(__VA_ARGS__));
#else
#define SIMT_DYNAMIC(name, ...) __VA_ARGS__ *const name = (__VA_ARGS__ *)simt::dynamic_shared;
#endif

// --- barriers, shuffles, votes --------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE()) { simt::api.barrier(simt::worker, line); }
inline int __syncthreads_count(int p, int line = __builtin_LINE()) {
    return simt::api.barrier_reduce(simt::worker, line, 0, p);
}
inline int __syncthreads_and(int p, int line = __builtin_LINE()) {
    return simt::api.barrier_reduce(simt::worker, line, 1, p);
}
inline int __syncthreads_or(int p, int line = __builtin_LINE()) {
    return simt::api.barrier_reduce(simt::worker, line, 2, p);
}

namespace simt {

template <class T>
inline T shuffle(unsigned mask, T value, unsigned source, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = api.exchange(worker, mask, bits, source, line);
    memcpy((void *)&value, &bits, sizeof value);
    return value;
}

}  // namespace simt

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    unsigned lane = simt::lane();
    return simt::shuffle(mask, value, (lane & ~(width - 1u)) + (source & (width - 1)), line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        int line = __builtin_LINE()) {
    unsigned lane = simt::lane();
    return simt::shuffle(mask, value, (lane & (width - 1u)) < delta ? lane : lane - delta, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          int line = __builtin_LINE()) {
    unsigned lane = simt::lane();
    bool outside = (lane & (width - 1u)) + delta > width - 1u;
    return simt::shuffle(mask, value, outside ? lane : lane + delta, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                         int line = __builtin_LINE()) {
    unsigned lane = simt::lane(), source = lane ^ unsigned(lanes);
    if (source >= (lane & ~(width - 1u)) + width || source > 31) source = lane;
    return simt::shuffle(mask, value, source, line);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    simt::api.exchange(simt::worker, mask, 0, 32, line);
}
inline unsigned __ballot_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return unsigned(simt::api.exchange(simt::worker, mask, p != 0, 32, line));
}
inline int __any_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return __ballot_sync(mask, p, line) != 0;
}
inline int __all_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return __ballot_sync(mask, !p, line) == 0;
}
inline unsigned __activemask() { return simt::api.active(simt::worker); }

namespace simt {

template <class T, class F>
inline T reduce(unsigned mask, T value, int line, F f) {
    T sum = value;
    for (unsigned i = 0; i < 32; i++) {
        if (!(mask >> i & 1u)) continue;
        T other = shuffle(mask, value, i, line);
        if (i != lane() && api.active(worker) >> i & 1u) sum = f(sum, other);
    }
    return sum;
}

}  // namespace simt

#define SIMT_REDUCE(name, T, expression)                                                   \
    inline T name(unsigned mask, T v, int line = __builtin_LINE()) {                       \
        return simt::reduce(mask, v, line, [](T a, T b) { return T(expression); });        \
    }
SIMT_REDUCE(__reduce_add_sync, unsigned, a + b)
SIMT_REDUCE(__reduce_add_sync, int, unsigned(a) + unsigned(b))
SIMT_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
SIMT_REDUCE(__reduce_max_sync, int, a > b ? a : b)
SIMT_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
SIMT_REDUCE(__reduce_min_sync, int, a < b ? a : b)

// Blocks run side by side on several OS threads: fences are real, threads of one block need none.
inline void __threadfence_block() {}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) {}

// Always on, as nvcc has it by default.
#undef assert
#define assert(condition) \
    ((condition) ? (void)0 : simt::fault(__LINE__, "assertion failed: " #condition))
inline void __trap(int line = __builtin_LINE()) { simt::fault(line, "__trap()"); }

// -fsanitize=bounds calls this; the structs are those that g++ and clang emit for it.
namespace simt {
struct SourceLocation {
    const char *file;
    uint32_t line, column;
};
struct TypeName {
    uint16_t kind, info;
    char name[1];
};
struct OutOfBounds {
    SourceLocation location;
    const TypeName *array;
    const TypeName *index;
};
}  // namespace simt
extern "C" __attribute__((visibility("hidden"), noinline)) inline void
__ubsan_handle_out_of_bounds_abort(simt::OutOfBounds *data, uintptr_t index) {
    char text[200];
    snprintf(text, sizeof text, "index %lld is outside the array of type %.80s", (long long)(int)index,
             static_cast<const char *>(data->array->name));
    simt::fault(int(data->location.line), text);
}
namespace simt {
__attribute__((used)) static void (*const keep_handler)(OutOfBounds *, uintptr_t) =
    __ubsan_handle_out_of_bounds_abort;
}

// --- atomics --------------------------------------------------------------------------------------

namespace simt {

template <class T, class F>
inline T atomic(T *address, F next) {
    T old, made;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do made = next(old);
    while (!__atomic_compare_exchange(address, &old, &made, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

}  // namespace simt

template <class T>
using simt_same = std::common_type_t<T>;  // the second argument converts to the first one's type
#define SIMT_ATOMIC(name, expression)                                        \
    template <class T>                                                       \
    inline T name(T *address, simt_same<T> v) {                              \
        return simt::atomic(address, [v](T old) -> T { return expression; }); \
    }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicExch, ((void)old, v))
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicAnd, old & v)
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicXor, old ^ v)
SIMT_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
SIMT_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T>
inline T atomicCAS(T *address, simt_same<T> compare, simt_same<T> v) {
    return simt::atomic(address, [=](T old) -> T { return old == compare ? v : old; });
}

#include "simt_math.hpp"
#include "simt_bf16.hpp"

#ifdef SIMT_WATCHED
// g++ leaves these to the C library, where nobody watches.
extern "C" void *__tsan_memcpy(void *, const void *, size_t);
extern "C" void *__tsan_memmove(void *, const void *, size_t);
extern "C" void *__tsan_memset(void *, int, size_t);
namespace std {
using ::__tsan_memcpy, ::__tsan_memmove, ::__tsan_memset;
}
#define memcpy __tsan_memcpy
#define memmove __tsan_memmove
#define memset __tsan_memset
#endif
