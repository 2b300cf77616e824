// The threads of one block as fibers: whose turn it is, barriers, shuffles, and running a block to its
// end. Included by simt_runtime.cpp, which runs blocks on OS threads.
//
// A thread runs until its next barrier or shuffle, then another one is picked (pick_fiber: the schedule).
// So a block's course depends on nothing but the schedule.
#pragma once
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>

#include "simt_abi.hpp"
#include "simt_fiber.hpp"
#include "simt_memory.hpp"
#include "simt_race.hpp"

namespace simt {

constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = size_t(64) << 10;
constexpr size_t kPlainStackBytes = size_t(1) << 20;
constexpr size_t kSharedLimit = 232448;  // 227 KiB: dynamic shared memory of a block on sm_90
constexpr uint64_t kReady = 0;
constexpr uint64_t kInWarp = ~uint64_t(1);  // waits for lanes of its warp
constexpr uint64_t kGone = ~uint64_t(0);    // has returned

struct Fiber {
    Context context;
    uint64_t wait;  // runs once the block's barrier generation has reached this
    Index index;
    int line;  // of the barrier or shuffle it waits at
};

struct Warp {
    unsigned lanes;    // those that there are
    unsigned live;     // lanes that have not returned
    unsigned arrived;  // lanes that wait in exchange()
    unsigned want[32];  // each lane's mask, the lane it reads (32: a vote) and what it gives
    unsigned source[32];
    int line[32];
    uint64_t value[32];
    uint64_t received[32];
};

struct Pool;

struct Worker {
    Context home;
    Context landing;  // where a faulty fiber is left behind
    Views views;
    const Kernel *kernel;
    const Shape *shape;
    void **arguments;
    Index block;
    unsigned threads;
    unsigned live;
    unsigned current;
    unsigned arrived;  // at the block's barrier
    int barrier_line;
    unsigned barrier_first;  // thread that reached it first
    int other_line;          // a different barrier that another thread waits at; 0: none
    unsigned other_thread;
    int deserter;  // a watched thread that returned after some barrier; -1: none
    bool restart;  // the barrier has just opened: schedules start over
    bool inside;   // a fiber is running
    uint64_t generation;
    uint64_t random;
    int votes[2][3];  // of __syncthreads_count, _and, _or, by parity of the generation
    Report report;
    uint64_t report_block;
    unsigned char *stacks;
    unsigned char *plain_stack;
    unsigned char *landing_stack;
    unsigned char *signal_stack;
    unsigned char *shared;  // dynamic shared memory; its end abuts a page without access
    Pool *pool;
    Warp warps[kMaxThreads / 32];
    Fiber fibers[kMaxThreads];
};

static __thread Worker *running;
static std::atomic<unsigned long long> serials{1};

static void leave(Worker *w) {
    w->inside = false;
    switch_to(&w->landing, &w->home);
}

[[noreturn]] static void fail(Worker *w, int kind, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
[[noreturn]] static void fail(Worker *w, int kind, int line, const char *format, ...) {
    w->report.kind = kind;
    w->report.line = line;
    w->report.block = w->block;
    w->report.thread = *w->views.thread_index;
    va_list list;
    va_start(list, format);
    vsnprintf(w->report.message, sizeof w->report.message, format, list);
    va_end(list);
    leave(w);
    __builtin_unreachable();
}

// --- the schedule ---------------------------------------------------------------------------------

static uint64_t draw(Worker *w) {  // splitmix64
    uint64_t z = w->random += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int pick_in_warp(const Worker *w, unsigned warp, unsigned from, bool backwards) {
    unsigned first = warp * 32, count = w->threads - first < 32 ? w->threads - first : 32;
    for (unsigned k = 0; k < count; k++) {
        unsigned lane = (from + k) % count;
        unsigned i = first + (backwards ? count - 1 - lane : lane);
        if (w->fibers[i].wait <= w->generation) return int(i);
    }
    return -1;
}

// The thread to run next, -1 if none can.
//   0 benign, 1 reversed: round and round over all threads.
//   2 ahead, 3 ahead-reversed: one warp as far as it gets; after a barrier warp 0 (the last) first.
//   4 random: one warp as far as it gets, then any other.
static int pick_fiber(Worker *w) {
    const unsigned n = w->threads, warps = (n + 31) / 32;
    const int schedule = w->shape->schedule;
    if (schedule <= 1) {
        const unsigned step = schedule == 0 ? 1 : n - 1;
        unsigned i = w->restart ? (schedule == 0 ? n - 1 : 0) : w->current;
        w->restart = false;
        for (unsigned k = 0; k < n; k++) {
            i += step;
            if (i >= n) i -= n;
            if (w->fibers[i].wait <= w->generation) return int(i);
        }
        return -1;
    }
    const bool backwards = schedule == 3;
    const unsigned warp = w->current / 32, lane = w->current % 32;
    unsigned start = 0;  // a warp, counted in the schedule's direction
    if (!w->restart) {
        const unsigned lanes = n - warp * 32 < 32 ? n - warp * 32 : 32;
        int found = pick_in_warp(w, warp, backwards ? lanes - lane : lane + 1, backwards);
        if (found >= 0) return found;
        start = (backwards ? warps - 1 - warp : warp) + 1;  // those before it wait for this barrier
    }
    w->restart = false;
    if (schedule == 4) start = unsigned(draw(w) % warps);
    for (unsigned k = 0; k < warps; k++) {
        const unsigned at = (start + k) % warps;
        int found = pick_in_warp(w, backwards ? warps - 1 - at : at, 0, backwards);
        if (found >= 0) return found;
    }
    return -1;
}

[[noreturn]] static void stuck(Worker *w) {
    unsigned in_warp = 0, in_barrier = 0, first = 0;
    for (unsigned i = 0; i < w->threads; i++) {
        uint64_t wait = w->fibers[i].wait;
        if (wait == kInWarp && in_warp++ == 0) first = i;
        if (wait != kInWarp && wait != kGone) in_barrier++;
    }
    *w->views.thread_index = w->fibers[first].index;
    Warp &warp = w->warps[first / 32];
    unsigned missing = warp.want[first % 32] & warp.live & ~warp.arrived;
    unsigned lane = missing ? unsigned(__builtin_ctz(missing)) : 0;
    const Fiber &other = w->fibers[first / 32 * 32 + lane];
    fail(w, 1, w->fibers[first].line,
         "a shuffle (or warp barrier) is never completed: its mask 0x%08x names lane %u, which waits at "
         "line %d (%u threads of the block wait in shuffles, %u at a barrier)",
         warp.want[first % 32], lane, other.line, in_warp, in_barrier);
}

// Gives the processor to the next thread; comes back when the calling one runs again.
static inline void resume_next(Worker *w) {
    const unsigned before = w->current;
    int next = int(before + 1);  // the usual case of the benign schedule
    if (w->shape->schedule != 0 || w->restart || unsigned(next) >= w->threads ||
        w->fibers[next].wait > w->generation) {
        next = pick_fiber(w);
        if (__builtin_expect(next < 0, 0)) stuck(w);
    }
    Fiber &to = w->fibers[next];
    *w->views.thread_index = to.index;
    // A thousand stacks do not fit the nearest cache: fetch what the fiber after this one will pop.
    const char *ahead = w->fibers[next + 2 < int(w->threads) ? next + 2 : 0].context.fetch();
    __builtin_prefetch(ahead);
    __builtin_prefetch(ahead + 64);
    if (unsigned(next) == before) return;
    w->current = unsigned(next);
    switch_to(&w->fibers[before].context, &to.context);
}

// --- barriers and shuffles ------------------------------------------------------------------------

static void release_barrier(Worker *w) {
    if (w->other_line)
        fail(w, 1, w->barrier_line,
             "threads of one block wait at different barriers: thread %u at line %d, thread %u at line %d",
             w->barrier_first, w->barrier_line, w->other_thread, w->other_line);
    if (w->shape->watch) {
        if (w->deserter >= 0)
            fail(w, 1, w->barrier_line,
                 "a barrier that only %u of the block's %u threads reach: thread %d, for one, took part in "
                 "an earlier barrier and has ended",
                 w->live, w->threads, w->deserter);
        watch_barrier();
    }
    w->generation++;
    w->arrived = 0;
    w->restart = true;
    int *votes = w->votes[w->generation & 1];  // of the barrier to come
    votes[0] = 0, votes[1] = 1, votes[2] = 0;
}

static void need_fibers(Worker *w, int line) {
    if (!w->shape->cooperative)
        fail(w, 4, line, "a barrier or shuffle in a kernel whose text shows none; report this as a bug");
}

static void barrier(Worker *w, int line) {
    need_fibers(w, line);
    Fiber &self = w->fibers[w->current];
    self.line = line;
    self.wait = w->generation + 1;
    if (w->arrived++ == 0) {
        w->barrier_line = line;
        w->barrier_first = w->current;
        w->other_line = 0;
    } else if (w->barrier_line != line && !w->other_line) {
        w->other_line = line;
        w->other_thread = w->current;
    }
    if (w->arrived == w->live) release_barrier(w);
    resume_next(w);
}

static int barrier_reduce(Worker *w, int line, int kind, int value) {
    need_fibers(w, line);
    int *votes = w->votes[w->generation & 1];
    votes[0] += value != 0;
    votes[1] &= value != 0;
    votes[2] |= value != 0;
    barrier(w, line);
    return votes[kind];
}

// Completes the exchange that `lane` waits for, if all lanes of its mask have come or returned.
static bool complete(Worker *w, Warp &warp, unsigned warp_index, unsigned lane) {
    const unsigned mask = warp.want[lane];
    const unsigned need = mask & warp.live;
    if ((warp.arrived & need) != need) return false;
    Fiber *fibers = w->fibers + warp_index * 32;
    const int line = warp.line[lane];
    if (w->shape->watch) watch_warp(warp_index, mask, warp.lanes);
    if (need == 0xFFFFFFFFu) {  // the usual case, in loops that the compiler can vectorise
        unsigned differ = 0;
        for (unsigned i = 0; i < 32; i++)
            differ |= (warp.want[i] ^ mask) | unsigned(warp.line[i] ^ line) | warp.source[i] >> 5;
        if (!differ) {
            for (unsigned i = 0; i < 32; i++) warp.received[i] = warp.value[warp.source[i]];
            for (unsigned i = 0; i < 32; i++) fibers[i].wait = kReady;
            warp.arrived = 0;
            return true;
        }
    }
    unsigned votes = 0;
    for (unsigned rest = need; rest; rest &= rest - 1) {
        const unsigned i = unsigned(__builtin_ctz(rest));
        if (warp.want[i] != mask || warp.line[i] != line)
            fail(w, 1, line,
                 "lanes of one warp meet in different shuffles: lane %u at line %d with mask 0x%08x, "
                 "lane %u at line %d with mask 0x%08x",
                 lane, line, mask, i, warp.line[i], warp.want[i]);
        votes |= unsigned(warp.value[i] != 0) << i;
    }
    for (unsigned rest = need; rest; rest &= rest - 1) {
        const unsigned i = unsigned(__builtin_ctz(rest)), from = warp.source[i];
        // poison from a lane that is not in the mask, has returned or does not exist
        const bool there = from < 32 && need >> from & 1u;
        warp.received[i] = from == 32 ? votes : there ? warp.value[from] : ~uint64_t(0);
        fibers[i].wait = kReady;
    }
    warp.arrived &= ~need;
    return true;
}

static uint64_t exchange(Worker *w, unsigned mask, uint64_t value, unsigned source, int line) {
    need_fibers(w, line);
    const unsigned index = w->current / 32, lane = w->current % 32;
    Warp &warp = w->warps[index];
    Fiber &self = w->fibers[w->current];
    if (!(mask >> lane & 1u))
        fail(w, 1, line, "lane %u takes part in a shuffle whose mask 0x%08x does not name it", lane, mask);
    warp.value[lane] = value;
    warp.want[lane] = mask;
    warp.source[lane] = source;
    warp.line[lane] = line;
    warp.arrived |= 1u << lane;
    self.line = line;
    self.wait = kInWarp;
    if (!complete(w, warp, index, lane)) resume_next(w);
    return warp.received[lane];
}

static unsigned active(Worker *w) {
    return w->shape->cooperative ? w->warps[w->current / 32].live : 1u;
}

static void shared_array(const char *name, void *address, uint64_t bytes, uint64_t element) {
    if (address) memset(address, 0xFF, bytes);
    track_shared(name, address, bytes, element);
}

static void kernel_fault(Worker *w, int line, const char *message) { fail(w, 4, line, "%s", message); }

// --- running a block ------------------------------------------------------------------------------

static void fiber_main() {
    Worker *w = running;
    w->kernel->thread(w->arguments);
    const unsigned index = w->current / 32, lane = w->current % 32;
    w->fibers[w->current].wait = kGone;
    w->live--;
    Warp &warp = w->warps[index];
    warp.live &= ~(1u << lane);
    if (w->live == 0) leave(w);
    if (w->shape->watch && w->generation) w->deserter = int(w->current);
    // A thread that has returned counts as arrived, for barriers and for shuffles (as on sm_70 and later).
    for (unsigned waiting = warp.arrived; waiting; waiting &= waiting - 1) {
        unsigned other = unsigned(__builtin_ctz(waiting));
        if (warp.arrived >> other & 1u) complete(w, warp, index, other);
    }
    if (w->arrived == w->live) release_barrier(w);
    resume_next(w);
    __builtin_unreachable();
}

static void plain_main() {
    Worker *w = running;
    w->kernel->block(w->arguments, w->shape->block, w->shape->schedule == 1);
    leave(w);
}

static unsigned char *map_stacks(size_t count, size_t bytes) {
    const size_t page = page_bytes(), stride = bytes + page;
    void *made = mmap(nullptr, count * stride + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return nullptr;
    auto *start = static_cast<unsigned char *>(made);
    for (size_t i = 0; i <= count; i++) mprotect(start + i * stride, page, PROT_NONE);
    return start + page;  // stack i is [i * stride, i * stride + bytes)
}

static bool prepare_worker(Worker *w, bool cooperative) {
    if (!w->plain_stack) w->plain_stack = map_stacks(1, kPlainStackBytes);
    if (!w->landing_stack) w->landing_stack = map_stacks(1, kStackBytes);
    if (!w->signal_stack) w->signal_stack = map_stacks(1, kStackBytes);
    if (!w->shared) w->shared = map_stacks(1, (kSharedLimit + page_bytes()) / page_bytes() * page_bytes());
    if (cooperative && !w->stacks) w->stacks = map_stacks(kMaxThreads, kStackBytes);
    return w->plain_stack && w->landing_stack && w->signal_stack && w->shared &&
           (w->stacks || !cooperative);
}

static void run_block(Worker *w, uint64_t number) {
    const Shape &shape = *w->shape;
    w->block = Index{unsigned(number % shape.grid.x), unsigned(number / shape.grid.x % shape.grid.y),
                     unsigned(number / shape.grid.x / shape.grid.y)};
    *w->views.block_index = w->block;
    *w->views.block_serial = serials.fetch_add(1, std::memory_order_relaxed);
    if (shape.shared_bytes) memset(*w->views.dynamic_shared, 0xFF, shape.shared_bytes);
    w->report.kind = 0;
    if (!shape.cooperative) {
        auto *top = reinterpret_cast<char *>(w->plain_stack + kPlainStackBytes);
        Context plain{};
        prepare(&plain, top, kPlainStackBytes, plain_main);
        w->inside = true;
        switch_to(&w->home, &plain);
        return;
    }
    const unsigned n = w->threads;
    const size_t stride = kStackBytes + page_bytes();
    for (unsigned i = 0; i < n; i++) {
        // odd offsets: stacks a power of two apart fight for the same few cache lines
        char *top = reinterpret_cast<char *>(w->stacks + i * stride + kStackBytes) - i * 7 % 31 * 64;
        prepare(&w->fibers[i].context, top, kStackBytes - 4096, fiber_main);
        w->fibers[i].wait = kReady;
    }
    for (unsigned i = 0; i < (n + 31) / 32; i++) {
        unsigned lanes = n - i * 32;
        w->warps[i].lanes = w->warps[i].live = lanes >= 32 ? 0xFFFFFFFFu : (1u << lanes) - 1;
        w->warps[i].arrived = 0;
    }
    w->live = n;
    w->deserter = -1;
    if (shape.watch) watch_block(number, *w->views.dynamic_shared);
    w->arrived = 0;
    w->generation = 0;
    w->votes[0][0] = w->votes[0][2] = 0;
    w->votes[0][1] = 1;
    w->random = shape.seed * 0x9E3779B97F4A7C15u + number;
    w->restart = true;
    w->current = 0;
    unsigned first = unsigned(pick_fiber(w));
    w->current = first;
    *w->views.thread_index = w->fibers[first].index;
    w->inside = true;
    switch_to(&w->home, &w->fibers[first].context);
}

}  // namespace simt
