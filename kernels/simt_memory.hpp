// Memory for a device on the CPU: guarded, poisoned with 0xFF, and free of cost until it is written.
//
//   | 16 MiB no access | guard, 1 MiB | data | rest of its last page | guard, 1 MiB | 16 MiB no access |
//
// Everything between the ends is a private mapping of one small file full of 0xFF, mapped again and again:
// a 2 GiB cache takes no memory until pages of it are written. Bytes next to the data read as poison
// (0xFFFF is a bf16 NaN), and a write to them is found by check().
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace simt {

constexpr size_t kPoisonBytes = size_t(4) << 20;
constexpr size_t kGuardBytes = size_t(1) << 20;
constexpr size_t kFarBytes = size_t(16) << 20;  // without access: an illegal access, not damage
constexpr size_t kNearBytes = 4096;  // of each guard, checked every time

struct Allocation {
    unsigned char *start;  // of the whole mapping
    size_t bytes;          // of the whole mapping
    unsigned char *data;
    size_t size;
};

struct Damage {
    uint64_t data;
    int64_t offset;  // of the first changed byte: negative before the data, from its end behind it
};

inline size_t page_bytes() {
    static const size_t bytes = size_t(sysconf(_SC_PAGESIZE));
    return bytes;
}

// A file descriptor of kPoisonBytes of 0xFF; -1 with errno set. Survives fork.
inline int open_poison() {
    int file = -1;
#if defined(__linux__) && defined(SYS_memfd_create)
    file = int(syscall(SYS_memfd_create, "poison", 1u /* close on exec */));
#endif
    if (file < 0) {
        const char *folder = getenv("TMPDIR");
        char path[512];
        snprintf(path, sizeof path, "%s/poisonXXXXXX", folder && *folder ? folder : "/tmp");
        file = mkstemp(path);
        if (file < 0) return -1;
        unlink(path);
    }
    static unsigned char block[1 << 16];
    memset(block, 0xFF, sizeof block);
    for (size_t done = 0; done < kPoisonBytes; done += sizeof block)
        if (write(file, block, sizeof block) != ssize_t(sizeof block)) {
            close(file);
            return -1;
        }
    return file;
}

struct Memory {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    int poison = -1;
    const unsigned char *pattern = nullptr;  // kPoisonBytes of 0xFF to compare with
};

inline Memory &memory() {
    static Memory *only = new Memory();  // leaked: nothing is torn down at exit
    return *only;
}

inline bool ready(Memory &m) {
    pthread_mutex_lock(&m.mutex);
    if (m.poison < 0) {
        m.poison = open_poison();
        if (m.poison >= 0) {
            void *seen = mmap(nullptr, kPoisonBytes, PROT_READ, MAP_SHARED, m.poison, 0);
            m.pattern = seen == MAP_FAILED ? nullptr : static_cast<unsigned char *>(seen);
        }
    }
    bool good = m.poison >= 0 && m.pattern;
    pthread_mutex_unlock(&m.mutex);
    return good;
}

inline bool fill_poison(Memory &m, unsigned char *from, size_t bytes) {
    for (size_t done = 0; done < bytes; done += kPoisonBytes) {
        size_t part = bytes - done < kPoisonBytes ? bytes - done : kPoisonBytes;
        void *made = mmap(from + done, part, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, m.poison, 0);
        if (made == MAP_FAILED) return false;
    }
    return true;
}

// Reserves and poisons; false with errno set if the system refuses.
inline bool allocate(size_t size, Allocation *out) {
    Memory &m = memory();
    if (!ready(m)) return false;
    const size_t page = page_bytes();
    const size_t body = (size + page - 1) / page * page;
    const size_t middle = kGuardBytes + body + kGuardBytes;
    const size_t bytes = middle + 2 * kFarBytes;
    void *start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return false;
    auto *base = static_cast<unsigned char *>(start);
    if (!fill_poison(m, base + kFarBytes, middle)) {
        munmap(start, bytes);
        return false;
    }
    *out = Allocation{base, bytes, base + kFarBytes + kGuardBytes, size};
    return true;
}

// Index of the first byte of [from, from + bytes) that is not 0xFF, or -1.
inline int64_t first_changed(const unsigned char *from, size_t bytes) {
    const unsigned char *pattern = memory().pattern;
    for (size_t done = 0; done < bytes; done += kPoisonBytes) {
        size_t part = bytes - done < kPoisonBytes ? bytes - done : kPoisonBytes;
        if (memcmp(from + done, pattern, part) == 0) continue;
        for (size_t i = 0; i < part; i++)
            if (from[done + i] != 0xFF) return int64_t(done + i);
    }
    return -1;
}

// Compares the guards of one allocation and repairs them. Near only: the 4 KiB next to the data on each
// side (a microsecond). Otherwise all of both guards. Returns how many damages it wrote (0 to 2).
inline int check(const Allocation &a, bool full, Damage *out) {
    const size_t page = page_bytes();
    const size_t body = (a.size + page - 1) / page * page;
    const size_t left = full ? kGuardBytes : kNearBytes;
    const size_t right = (body - a.size) + (full ? kGuardBytes : 0);
    const size_t near_right = right < kNearBytes ? kNearBytes : right;
    int count = 0;
    int64_t at = first_changed(a.data - left, left);
    if (at >= 0) {
        out[count++] = Damage{uint64_t(uintptr_t(a.data)), at - int64_t(left)};
        fill_poison(memory(), a.data - kGuardBytes, kGuardBytes);
    }
    at = first_changed(a.data + a.size, near_right);
    if (at >= 0) {
        out[count++] = Damage{uint64_t(uintptr_t(a.data)), int64_t(a.size) + at};
        memset(a.data + a.size, 0xFF, body - a.size);
        fill_poison(memory(), a.data + body, kGuardBytes);
    }
    return count;
}

}  // namespace simt
