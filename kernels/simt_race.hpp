// The race detector: which accesses of one launch no barrier orders ("happens-before"). Included by
// simt_block.hpp, which tells it of blocks, barriers and warps; the kernels' object, compiled to be
// watched, tells it of every access (simt_callbacks.cpp).
//
// What is ordered: the accesses of one thread; all before a block's barrier and all after it; what the
// lanes of a shuffle's or __syncwarp's mask did before it and what they do after it. Nothing orders two
// blocks of a launch, and nothing else orders two threads, not even being of one warp (sm_70 and later
// run lanes independently). So a race is found whatever the schedule was, if only its two accesses ran.
// (Of memory, CUDA promises an order by __syncwarp only; by shuffles it has one wherever it was seen.)
//
// Time is one clock a warp. An access is stamped with it, a shuffle advances it, and a barrier sets
// all to one past the greatest. One cell for two bytes of memory keeps its last write, and up to two
// groups of lanes that have read it since: any later write misses at most one of two warps' reads.
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "simt_abi.hpp"
#include "simt_memory.hpp"

namespace simt {

struct Writer {
    uint32_t block;  // a number no other block of any launch has; 0: none
    uint32_t stamp;
    int32_t place;  // program counter, counted from the kernel's entry
    uint16_t thread;
    uint8_t bytes;  // which of the cell's two
    uint8_t kind;
};

struct Readers {  // lanes of one warp that read within one stamp
    uint32_t block, stamp;
    int32_t place;  // the first one's
    uint32_t lanes;
    uint16_t warp;
    uint8_t bytes;
};

struct alignas(64) Cell {
    Writer writer;
    Readers readers[2];
};

struct Region {
    uintptr_t low, high;
    Cell *cells;
    const char *name;  // of a shared array
    uint64_t element;
    bool shared;
    uintptr_t used_low, used_high;  // touched in this launch
};

struct Gap {
    uintptr_t low, high;
};

struct WarpTime {
    uint32_t clock;
    uint32_t all_seen;  // every lane is past what any lane did at earlier stamps
    bool partial;       // `seen` says more
    uint32_t seen[32][32];  // [lane][other]: lane is past what other did at earlier stamps
};

// A thread's atomic operation after a fence: whoever then operates on the same address is past what
// this block did before its last barrier, and past what this thread did. How the last block of a
// launch learns that all others have stored their parts.
struct Publication {
    uintptr_t address;
    uint32_t block, stamp, barrier;
    uint16_t thread;
};

constexpr size_t kKeptShadow = size_t(64) << 20;
constexpr size_t kPublications = 1 << 16;

struct Detector {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    bool on = false;
    Watch *watch;
    const Shape *shape;
    const unsigned *current;  // the running thread's number
    uintptr_t entry;
    uintptr_t stacks, stacks_end;  // the threads' own memory
    uint32_t base = 1;  // number of the launch's first block
    uint32_t block, barrier;  // the running block's number, and its clock at the last barrier
    unsigned warps;
    WarpTime time[32];
    uint8_t fenced[1024];
    std::vector<Region> shared;      // of this launch
    std::vector<Region> allocations;  // by address
    std::vector<Publication> publications;
    std::vector<Publication> known;  // by block of this launch; empty if nothing was acquired
    size_t last_allocation = 0, last_shared = 0;
    Gap gaps[2];  // between allocations, where the last accesses lay that nobody watches
    Cell *arena = nullptr;  // cells of shared arrays
    size_t arena_cells = 0, arena_used = 0;
    unsigned char *dynamic = nullptr;
};

static Detector &detector = *new Detector();  // leaked: nothing is torn down at exit

// --- memory ---------------------------------------------------------------------------------------

static Cell *map_cells(size_t count) {
    void *made = mmap(nullptr, count * sizeof(Cell), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return made == MAP_FAILED ? nullptr : static_cast<Cell *>(made);
}

static size_t cells_for(size_t bytes) { return (bytes + 1) / 2; }

static bool starts_lower(const Region &a, const Region &b) { return a.low < b.low; }

static void track_allocation(const Allocation &a) {
    Detector &d = detector;
    pthread_mutex_lock(&d.mutex);
    Region made{};
    made.low = reinterpret_cast<uintptr_t>(a.data);
    made.high = made.low + a.size;
    d.allocations.insert(
        std::upper_bound(d.allocations.begin(), d.allocations.end(), made, starts_lower), made);
    pthread_mutex_unlock(&d.mutex);
}

static void forget_allocation(const Allocation &a) {
    Detector &d = detector;
    pthread_mutex_lock(&d.mutex);
    const auto low = reinterpret_cast<uintptr_t>(a.data);
    for (size_t i = 0; i < d.allocations.size(); i++)
        if (d.allocations[i].low == low) {
            if (d.allocations[i].cells)
                munmap(d.allocations[i].cells, cells_for(a.size) * sizeof(Cell));
            d.allocations.erase(d.allocations.begin() + long(i));
            break;
        }
    d.last_allocation = 0;
    pthread_mutex_unlock(&d.mutex);
}

static void track_shared(const char *name, void *address, uint64_t bytes, uint64_t element) {
    Detector &d = detector;
    if (!d.on) return;
    if (!address) {  // the dynamic array has a name now
        address = d.dynamic;
        bytes = d.shape->shared_bytes;
    }
    const auto low = reinterpret_cast<uintptr_t>(address);
    for (Region &r : d.shared)
        if (r.low == low) {
            r.name = name;
            r.element = element;
            return;
        }
    const size_t count = cells_for(bytes);
    if (!d.arena) {
        d.arena_cells = size_t(1) << 24;  // 1 GiB of addresses, touched as needed
        d.arena = map_cells(d.arena_cells);
    }
    if (!d.arena || d.arena_used + count > d.arena_cells) return;
    d.shared.push_back(Region{low, low + bytes, d.arena + d.arena_used, name, element, true, 0, 0});
    d.arena_used += count;
}

static Region *region_of(Detector &d, uintptr_t at) {
    if (d.last_shared < d.shared.size()) {
        Region &r = d.shared[d.last_shared];
        if (at >= r.low && at < r.high) return &r;
    }
    if (d.last_allocation < d.allocations.size()) {
        Region &r = d.allocations[d.last_allocation];
        if (at >= r.low && at < r.high && r.cells) return &r;
    }
    for (size_t i = 0; i < d.shared.size(); i++)
        if (at >= d.shared[i].low && at < d.shared[i].high) {
            d.last_shared = i;
            return &d.shared[i];
        }
    for (const Gap &gap : d.gaps)
        if (at >= gap.low && at < gap.high) return nullptr;
    Region key{};
    key.low = at;
    auto found = std::upper_bound(d.allocations.begin(), d.allocations.end(), key, starts_lower);
    const uintptr_t next = found == d.allocations.end() ? ~uintptr_t(0) : found->low;
    const uintptr_t before = found == d.allocations.begin() ? 0 : (found - 1)->high;
    if (at >= before) {
        d.gaps[1] = d.gaps[0];
        d.gaps[0] = Gap{before, next};
        return nullptr;
    }
    Region &r = *--found;
    if (!r.cells) r.cells = map_cells(cells_for(r.high - r.low));
    if (!r.cells) return nullptr;  // no address space left for it: unwatched
    d.last_allocation = size_t(found - d.allocations.begin());
    return &r;
}

// --- order ----------------------------------------------------------------------------------------

// Whether the running thread is past what `thread` of `block` did at `stamp`.
static inline bool is_past(const Detector &d, uint32_t block, uint32_t stamp, unsigned thread) {
    const unsigned me = *d.current;
    if (block != d.block) {
        if (d.known.empty()) return false;
        const Publication &p = d.known[block - d.base];
        return p.block && (stamp < p.barrier || (thread == p.thread && stamp <= p.stamp));
    }
    if (stamp < d.barrier || thread == me) return true;
    if (thread / 32 != me / 32) return false;
    const WarpTime &t = d.time[me / 32];
    return stamp < t.all_seen || (t.partial && stamp < t.seen[me % 32][thread % 32]);
}

// Lanes of the group that the running thread is not past.
static inline uint32_t open_lanes(const Detector &d, const Readers &r) {
    const unsigned me = *d.current;
    if (r.block == d.block) {
        if (r.stamp < d.barrier) return 0;
        if (r.warp != me / 32) return r.lanes;
        const WarpTime &t = d.time[me / 32];
        if (r.stamp < t.all_seen) return 0;
        if (!t.partial) return r.lanes & ~(1u << me % 32);
    } else if (d.known.empty()) {
        return r.lanes;
    }
    uint32_t open = 0;
    for (uint32_t rest = r.lanes; rest; rest &= rest - 1) {
        const unsigned lane = unsigned(__builtin_ctz(rest));
        if (!is_past(d, r.block, r.stamp, r.warp * 32u + lane)) open |= 1u << lane;
    }
    return open;
}

static void watch_barrier() {
    Detector &d = detector;
    uint32_t next = 0;
    for (unsigned i = 0; i < d.warps; i++) next = std::max(next, d.time[i].clock);
    next++;
    for (unsigned i = 0; i < d.warps; i++) {
        d.time[i].clock = next;
        d.time[i].all_seen = next;
        d.time[i].partial = false;
    }
    d.barrier = next;
}

// The lanes of `mask` have met; `lanes` are all that the warp began with.
static void watch_warp(unsigned warp, uint32_t mask, uint32_t lanes) {
    WarpTime &t = detector.time[warp];
    const uint32_t next = ++t.clock;
    if ((mask & lanes) == lanes) {
        t.all_seen = next;
        t.partial = false;
        return;
    }
    if (!t.partial) memset(t.seen, 0, sizeof t.seen);
    t.partial = true;
    uint32_t joint[32] = {};
    for (uint32_t rest = mask & lanes; rest; rest &= rest - 1) {
        const unsigned lane = unsigned(__builtin_ctz(rest));
        for (unsigned i = 0; i < 32; i++) joint[i] = std::max(joint[i], t.seen[lane][i]);
    }
    for (uint32_t rest = mask & lanes; rest; rest &= rest - 1) joint[__builtin_ctz(rest)] = next;
    for (uint32_t rest = mask & lanes; rest; rest &= rest - 1)
        memcpy(t.seen[__builtin_ctz(rest)], joint, sizeof joint);
}

static void meet_atomically(Detector &d, uintptr_t address) {
    const unsigned me = *d.current;
    for (const Publication &p : d.publications) {
        if (p.address != address || p.block == d.block) continue;
        if (d.known.empty())
            d.known.resize(size_t(d.shape->grid.x) * d.shape->grid.y * d.shape->grid.z);
        Publication &held = d.known[p.block - d.base];
        if (!held.block || held.barrier <= p.barrier) held = p;
    }
    if (!d.fenced[me] || d.publications.size() >= kPublications) return;
    uint32_t &clock = d.time[me / 32].clock;
    d.publications.push_back(Publication{address, d.block, clock++, d.barrier, uint16_t(me)});
    for (const Publication &p : d.known)
        if (p.block && d.publications.size() < kPublications) {
            d.publications.push_back(p);
            d.publications.back().address = address;
        }
}

// --- races ----------------------------------------------------------------------------------------

static Party party_of(const Detector &d, int32_t place, uint32_t block, unsigned thread, int kind) {
    const Index &grid = d.shape->grid, &dim = d.shape->block;
    const uint32_t number = block - d.base;
    return Party{uint64_t(int64_t(d.entry) + place),
                 Index{number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y},
                 Index{thread % dim.x, thread / dim.x % dim.y, thread / dim.x / dim.y}, kind};
}

static void note_race(Detector &d, const Region &r, uintptr_t at, const Party &first, int32_t place,
                      int kind) {
    Watch &watch = *d.watch;
    const uint64_t counter = uint64_t(int64_t(d.entry) + place);
    const uint64_t allocation = r.shared ? 0 : r.low;
    for (int i = 0; i < watch.count; i++) {
        Race &known = watch.races[i];
        if (known.first.program_counter == first.program_counter && known.first.kind == first.kind &&
            known.second.program_counter == counter && known.second.kind == kind &&
            known.allocation == allocation) {
            known.count++;
            return;
        }
    }
    if (watch.count >= watch.capacity) return;
    Race &made = watch.races[watch.count++];
    made = Race{first, party_of(d, place, d.block, *d.current, kind), allocation, at - r.low,
                r.element, 1, {}};
    if (r.shared) strncpy(made.name, r.name ? r.name : "shared memory", sizeof made.name - 1);
}

static inline void watch_cell(Detector &d, const Region &r, Cell &cell, uintptr_t at, uint8_t bytes,
                              int kind, int32_t place) {
    const unsigned me = *d.current, warp = me / 32;
    const auto counts = [&](uint32_t block) {  // another launch's does not, nor another block's here
        return r.shared ? block == d.block : block >= d.base;
    };
    const uint32_t stamp = d.time[warp].clock;
    Writer &writer = cell.writer;
    if (counts(writer.block) && writer.bytes & bytes && !(kind == kAtomic && writer.kind == kAtomic) &&
        !is_past(d, writer.block, writer.stamp, writer.thread))
        note_race(d, r, at, party_of(d, writer.place, writer.block, writer.thread, writer.kind), place,
                  kind);
    if (kind != kRead) {
        for (Readers &readers : cell.readers) {
            if (!counts(readers.block) || !(readers.bytes & bytes)) continue;
            if (uint32_t open = open_lanes(d, readers)) {
                const unsigned thread = readers.warp * 32u + unsigned(__builtin_ctz(open));
                note_race(d, r, at, party_of(d, readers.place, readers.block, thread, kRead), place,
                          kind);
            }
            if (!(readers.bytes & ~bytes)) readers.block = 0;  // whoever races with them races with us
        }
        writer = Writer{d.block, stamp, place, uint16_t(me), bytes, uint8_t(kind)};
        return;
    }
    Readers *room = nullptr;
    for (Readers &readers : cell.readers) {
        if (readers.block == d.block && readers.warp == warp && readers.stamp == stamp &&
            readers.bytes == bytes) {
            readers.lanes |= 1u << me % 32;
            return;
        }
        if (!room && (!counts(readers.block) ||
                      (readers.block == d.block && !(readers.bytes & ~bytes) && !open_lanes(d, readers))))
            room = &readers;
    }
    Readers *both = cell.readers;
    if (!room && both[0].block == both[1].block && both[0].warp == both[1].warp &&
        !(both[0].block == d.block && both[0].warp == warp))
        room = &both[1];  // a second warp says more than more of the first
    if (room) *room = Readers{d.block, stamp, place, 1u << me % 32, uint16_t(warp), bytes};
}

static void watch_access(const volatile void *address, uint64_t size, int kind, uint64_t counter) {
    Detector &d = detector;
    const auto begin = reinterpret_cast<uintptr_t>(address);
    if (!d.on || (begin >= d.stacks && begin < d.stacks_end)) return;
    Region *r = region_of(d, begin);
    if (!r) return;
    const uintptr_t end = std::min(begin + size, r->high);
    r->used_low = std::min(r->used_low, begin);
    r->used_high = std::max(r->used_high, end);
    const auto place = int32_t(int64_t(counter) - int64_t(d.entry));
    for (uintptr_t at = begin; at < end;) {
        const uintptr_t offset = at - r->low;
        const bool whole = offset % 2 == 0 && at + 1 < end;
        watch_cell(d, *r, r->cells[offset / 2], at, whole ? 3 : offset % 2 ? 2 : 1, kind, place);
        at += whole ? 2 : 1;
    }
    if (kind == kAtomic) meet_atomically(d, begin);
}

static void watch_fence() {
    Detector &d = detector;
    if (d.on) d.fenced[*d.current] = 1;
}

// --- launches and blocks --------------------------------------------------------------------------

static void begin_watch(const Shape *shape, const void *entry, const unsigned *current,
                        const unsigned char *stacks, size_t stacks_size) {
    Detector &d = detector;
    pthread_mutex_lock(&d.mutex);
    const uint64_t blocks = uint64_t(shape->grid.x) * shape->grid.y * shape->grid.z;
    if (blocks > 0x7FFFFFFF) return;  // days of work
    if (d.base + blocks > 0xFFFFFFFF) {  // numbers begin anew: forget everything
        for (Region &r : d.allocations)
            if (r.cells) munmap(r.cells, cells_for(r.high - r.low) * sizeof(Cell)), r.cells = nullptr;
        if (d.arena) munmap(d.arena, d.arena_cells * sizeof(Cell)), d.arena = nullptr;
        d.base = 1;
    }
    d.watch = shape->watch;
    d.shape = shape;
    d.current = current;
    d.entry = reinterpret_cast<uintptr_t>(entry);
    d.stacks = reinterpret_cast<uintptr_t>(stacks);
    d.stacks_end = d.stacks + stacks_size;
    d.warps = (shape->block.x * shape->block.y * shape->block.z + 31) / 32;
    d.shared.clear();
    d.arena_used = 0;
    d.publications.clear();
    d.dynamic = nullptr;
    d.gaps[0] = d.gaps[1] = Gap{};
    for (Region &r : d.allocations) r.used_low = ~uintptr_t(0), r.used_high = 0;
    d.on = true;
}

static void end_watch() {
    Detector &d = detector;
    if (d.on) {
        const uint64_t blocks = uint64_t(d.shape->grid.x) * d.shape->grid.y * d.shape->grid.z;
        d.base += uint32_t(blocks);
        for (Region &r : d.allocations) {
            if (!r.cells || r.used_high <= r.used_low) continue;
            const size_t bytes = (r.used_high - r.used_low) / 2 * sizeof(Cell);
            if (bytes < kKeptShadow) continue;
            const uintptr_t page = page_bytes();
            const auto from = reinterpret_cast<uintptr_t>(r.cells + (r.used_low - r.low) / 2);
            const uintptr_t start = (from + page - 1) / page * page, end = (from + bytes) / page * page;
            madvise(reinterpret_cast<void *>(start), end - start, MADV_DONTNEED);
        }
    }
    d.on = false;
    pthread_mutex_unlock(&d.mutex);
}

static void watch_block(uint64_t number, unsigned char *dynamic_shared) {
    Detector &d = detector;
    d.block = d.base + uint32_t(number);
    d.barrier = 1;
    for (unsigned i = 0; i < d.warps; i++) {
        d.time[i].clock = d.time[i].all_seen = 1;
        d.time[i].partial = false;
    }
    memset(d.fenced, 0, sizeof d.fenced);
    d.known.clear();
    d.dynamic = dynamic_shared;
    if (d.shape->shared_bytes)
        track_shared("dynamic shared memory", dynamic_shared, d.shape->shared_bytes, 1);
}

}  // namespace simt
