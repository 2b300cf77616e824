// What a compiler's -fsanitize=thread calls at each access to memory, handed on to the race detector
// (simt_race.hpp). Linked into the kernels' object instead of libtsan, and itself compiled without
// that flag.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simt_abi.hpp"

namespace simt {
static void ignore_access(const volatile void *, uint64_t, int, uint64_t) {}
static void ignore_fence() {}
static void (*access)(const volatile void *, uint64_t, int, uint64_t) = ignore_access;
static void (*fence)() = ignore_fence;
}  // namespace simt

extern "C" __attribute__((visibility("default"))) void simt_watch(const simt::Api *api) {
    simt::access = api->access;
    simt::fence = api->fence;
}

#define HERE uint64_t(reinterpret_cast<uintptr_t>(__builtin_return_address(0)))
#define CALLBACK extern "C" void

CALLBACK __tsan_init() {}
CALLBACK __tsan_func_entry(void *) {}
CALLBACK __tsan_func_exit() {}
CALLBACK __tsan_ignore_thread_begin() {}
CALLBACK __tsan_ignore_thread_end() {}

#define ACCESSES(size)                                                                              \
    CALLBACK __tsan_read##size(void *p) { simt::access(p, size, simt::kRead, HERE); }               \
    CALLBACK __tsan_write##size(void *p) { simt::access(p, size, simt::kWrite, HERE); }             \
    CALLBACK __tsan_unaligned_read##size(void *p) { simt::access(p, size, simt::kRead, HERE); }     \
    CALLBACK __tsan_unaligned_write##size(void *p) { simt::access(p, size, simt::kWrite, HERE); }   \
    CALLBACK __tsan_volatile_read##size(void *p) { simt::access(p, size, simt::kRead, HERE); }      \
    CALLBACK __tsan_volatile_write##size(void *p) { simt::access(p, size, simt::kWrite, HERE); }    \
    CALLBACK __tsan_unaligned_volatile_read##size(void *p) {                                        \
        simt::access(p, size, simt::kRead, HERE);                                                   \
    }                                                                                               \
    CALLBACK __tsan_unaligned_volatile_write##size(void *p) {                                       \
        simt::access(p, size, simt::kWrite, HERE);                                                  \
    }                                                                                               \
    CALLBACK __tsan_read_write##size(void *p) { simt::access(p, size, simt::kWrite, HERE); }        \
    CALLBACK __tsan_unaligned_read_write##size(void *p) { simt::access(p, size, simt::kWrite, HERE); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

CALLBACK __tsan_read_range(void *p, size_t size) { simt::access(p, size, simt::kRead, HERE); }
CALLBACK __tsan_write_range(void *p, size_t size) { simt::access(p, size, simt::kWrite, HERE); }
CALLBACK __tsan_vptr_read(void *p) { simt::access(p, sizeof p, simt::kRead, HERE); }
CALLBACK __tsan_vptr_update(void *p, void *) { simt::access(p, sizeof p, simt::kWrite, HERE); }

extern "C" void *__tsan_memcpy(void *to, const void *from, size_t size) {
    simt::access(from, size, simt::kRead, HERE);
    simt::access(to, size, simt::kWrite, HERE);
    return memcpy(to, from, size);
}
extern "C" void *__tsan_memmove(void *to, const void *from, size_t size) {
    simt::access(from, size, simt::kRead, HERE);
    simt::access(to, size, simt::kWrite, HERE);
    return memmove(to, from, size);
}
extern "C" void *__tsan_memset(void *to, int byte, size_t size) {
    simt::access(to, size, simt::kWrite, HERE);
    return memset(to, byte, size);
}

// The compiler hands atomic operations over whole: do them, too. Every order is the strongest here.
// A plain atomic load tells the detector nothing: it races with no atomic write.
#define FETCH(bits, T, name, operation)                                                \
    extern "C" T __tsan_atomic##bits##_fetch_##name(volatile T *p, T value, int) {     \
        simt::access(p, sizeof(T), simt::kAtomic, HERE);                               \
        return operation(p, value, __ATOMIC_SEQ_CST);                                  \
    }
#define COMPARE(bits, T, kind)                                                                       \
    extern "C" int __tsan_atomic##bits##_compare_exchange_##kind(volatile T *p, T *expected, T value, \
                                                                 int, int) {                         \
        simt::access(p, sizeof(T), simt::kAtomic, HERE);                                             \
        return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST,              \
                                           __ATOMIC_SEQ_CST);                                        \
    }
#define ATOMICS(bits, T)                                                                         \
    extern "C" T __tsan_atomic##bits##_load(const volatile T *p, int) {                          \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                             \
    }                                                                                            \
    CALLBACK __tsan_atomic##bits##_store(volatile T *p, T value, int) {                          \
        simt::access(p, sizeof(T), simt::kAtomic, HERE);                                         \
        __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                            \
    }                                                                                            \
    extern "C" T __tsan_atomic##bits##_exchange(volatile T *p, T value, int) {                   \
        simt::access(p, sizeof(T), simt::kAtomic, HERE);                                         \
        return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                  \
    }                                                                                            \
    extern "C" T __tsan_atomic##bits##_compare_exchange_val(volatile T *p, T expected, T value,  \
                                                            int, int) {                          \
        simt::access(p, sizeof(T), simt::kAtomic, HERE);                                         \
        __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST,                \
                                    __ATOMIC_SEQ_CST);                                           \
        return expected;                                                                         \
    }                                                                                            \
    COMPARE(bits, T, strong)                                                                     \
    COMPARE(bits, T, weak)                                                                       \
    FETCH(bits, T, add, __atomic_fetch_add)                                                      \
    FETCH(bits, T, sub, __atomic_fetch_sub)                                                      \
    FETCH(bits, T, and, __atomic_fetch_and)                                                      \
    FETCH(bits, T, or, __atomic_fetch_or)                                                        \
    FETCH(bits, T, xor, __atomic_fetch_xor)                                                      \
    FETCH(bits, T, nand, __atomic_fetch_nand)
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

CALLBACK __tsan_atomic_thread_fence(int) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    simt::fence();
}
CALLBACK __tsan_atomic_signal_fence(int) {}
