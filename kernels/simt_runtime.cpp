// Runs the blocks of a launch: fibers for the threads of a block, OS threads for blocks, and signals
// turned into reports. Built once and loaded once a process; knows nothing of any kernel.
//
// A thread runs until its next barrier or shuffle, then another one is picked (pick_fiber: the schedule).
// So a launch is deterministic for a schedule, whatever the number of OS threads: blocks share nothing but
// global memory. A happens-before detector would tick its clocks in release_barrier and complete.
//
// Errors never hang and never unwind: the fibers of a faulty block are dropped where they stand (they
// own nothing), and control goes back to the worker's own stack.

#include <dlfcn.h>
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>

#include "simt_abi.hpp"
#include "simt_fiber.hpp"
#include "simt_memory.hpp"

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
    if (!w->restart) {
        unsigned warp = w->current / 32;
        int found = pick_in_warp(w, warp, 0, backwards);
        if (found >= 0) return found;
    }
    w->restart = false;
    unsigned start = schedule == 4 ? unsigned(draw(w) % warps) : 0;
    for (unsigned k = 0; k < warps; k++) {
        unsigned warp = (start + k) % warps;
        int found = pick_in_warp(w, backwards ? warps - 1 - warp : warp, 0, backwards);
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
    w->kernel->block(w->arguments, w->shape->block);
    leave(w);
}

static void plain_backwards() {
    Worker *w = running;
    for (unsigned i = w->threads; i-- > 0;) {
        *w->views.thread_index = w->fibers[i].index;
        w->kernel->thread(w->arguments);
    }
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
        prepare(&plain, top, kPlainStackBytes, shape.schedule == 1 ? plain_backwards : plain_main);
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
        w->warps[i].live = lanes >= 32 ? 0xFFFFFFFFu : (1u << lanes) - 1;
        w->warps[i].arrived = 0;
    }
    w->live = n;
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

// --- signals --------------------------------------------------------------------------------------

static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction previous[4];

static void land() {
    leave(running);
    __builtin_unreachable();
}

// Arranges for the interrupted thread to go on in land(), on a stack of its own.
static bool redirect(Worker *w, void *context) {
    auto top = reinterpret_cast<uintptr_t>(w->landing_stack + kStackBytes - 256) & ~uintptr_t(15);
    auto *machine = static_cast<ucontext_t *>(context);
#if defined(__linux__) && defined(__x86_64__)
    w->report.program_counter = uint64_t(machine->uc_mcontext.gregs[REG_RIP]);
    machine->uc_mcontext.gregs[REG_RIP] = greg_t(reinterpret_cast<uintptr_t>(land));
    machine->uc_mcontext.gregs[REG_RSP] = greg_t(top - 8);
#elif defined(__linux__) && defined(__aarch64__)
    w->report.program_counter = machine->uc_mcontext.pc;
    machine->uc_mcontext.pc = reinterpret_cast<uintptr_t>(land);
    machine->uc_mcontext.sp = top;
#elif defined(__APPLE__) && defined(__x86_64__)
    w->report.program_counter = machine->uc_mcontext->__ss.__rip;
    machine->uc_mcontext->__ss.__rip = reinterpret_cast<uintptr_t>(land);
    machine->uc_mcontext->__ss.__rsp = top - 8;
#elif defined(__APPLE__) && defined(__aarch64__)
    w->report.program_counter = uint64_t(__darwin_arm_thread_state64_get_pc(machine->uc_mcontext->__ss));
    __darwin_arm_thread_state64_set_pc_fptr(machine->uc_mcontext->__ss, land);
    __darwin_arm_thread_state64_set_sp(machine->uc_mcontext->__ss, top);
#else
    (void)machine, (void)top, (void)w;
    return false;
#endif
    return true;
}

static void on_signal(int number, siginfo_t *info, void *context) {
    Worker *w = running;
    if (w && w->inside) {
        w->report.kind = number == SIGFPE ? 3 : number == SIGILL ? 4 : 2;
        w->report.line = 0;
        w->report.address = uint64_t(reinterpret_cast<uintptr_t>(info->si_addr));
        w->report.block = w->block;
        w->report.thread = *w->views.thread_index;
        snprintf(w->report.message, sizeof w->report.message, "%s",
                 number == SIGFPE   ? "whole-number division by zero"
                 : number == SIGILL ? "a trap instruction (unreachable code was reached)"
                                    : "illegal access");
        if (redirect(w, context)) return;
        leave(w);
    }
    // Not ours: hand it to whoever had it before, by letting it happen again.
    for (int i = 0; i < 4; i++)
        if (kSignals[i] == number) sigaction(number, &previous[i], nullptr);
}

static void use_signal_stack(Worker *w, stack_t *before) {
    stack_t stack{};
    stack.ss_sp = w->signal_stack;
    stack.ss_size = kStackBytes;
    sigaltstack(&stack, before);
}

// --- workers --------------------------------------------------------------------------------------

struct Job {
    const Kernel *kernel;
    const Shape *shape;
    void **arguments;
    uint64_t blocks;
    uint64_t chunk;
    std::atomic<uint64_t> next;
    std::atomic<uint64_t> faulty;  // least position of a faulty block so far
};

struct Pool {
    pid_t process;
    pthread_mutex_t launching = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t go = PTHREAD_COND_INITIALIZER;
    pthread_cond_t done = PTHREAD_COND_INITIALIZER;
    Worker *workers[64] = {};
    int started = 1;  // worker 0 is whoever launches
    int wanted = 0;   // workers that take part in the job
    int busy = 0;
    uint64_t job_number = 0;
    Job job = {};
};

static void work(Worker *w, Job *job) {
    fenv_t environment;
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);  // torch may have set flush-to-zero on this thread
    running = w;
    w->kernel = job->kernel;
    w->shape = job->shape;
    w->arguments = job->arguments;
    w->report.kind = 0;
    job->kernel->views(&w->views);
    *w->views.worker = w;
    *w->views.block_dim = job->shape->block;
    *w->views.grid_dim = job->shape->grid;
    w->threads = job->shape->block.x * job->shape->block.y * job->shape->block.z;
    const size_t page = page_bytes(), shared_room = (kSharedLimit + page) / page * page;
    *w->views.dynamic_shared = w->shared + shared_room - (job->shape->shared_bytes + 15) / 16 * 16;
    const Index shape = job->shape->block;
    if (job->shape->cooperative || job->shape->schedule == 1)
        for (unsigned i = 0; i < w->threads; i++)
            w->fibers[i].index = Index{i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
    const bool backwards = job->shape->schedule == 1 || job->shape->schedule == 3 ||
                           (job->shape->schedule == 4 && job->shape->seed % 2);
    for (;;) {
        uint64_t from = job->next.fetch_add(job->chunk);
        uint64_t to = from + job->chunk < job->blocks ? from + job->chunk : job->blocks;
        if (from >= job->blocks) break;
        for (uint64_t at = from; at < to && at < job->faulty.load(std::memory_order_relaxed); at++) {
            run_block(w, backwards ? job->blocks - 1 - at : at);
            if (w->report.kind) {
                w->report_block = at;
                uint64_t least = job->faulty.load();
                while (at < least && !job->faulty.compare_exchange_weak(least, at)) {
                }
                break;
            }
        }
        if (w->report.kind || from > job->faulty.load()) break;
    }
    running = nullptr;
    fesetenv(&environment);
}

struct Start {
    Pool *pool;
    int number;
};

static void *worker_main(void *given) {
    Start start = *static_cast<Start *>(given);
    delete static_cast<Start *>(given);
    Pool *pool = start.pool;
    Worker *w = pool->workers[start.number];
    use_signal_stack(w, nullptr);
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (pool->job_number == seen || start.number >= pool->wanted) {
            seen = pool->job_number;
            pthread_cond_wait(&pool->go, &pool->mutex);
        }
        seen = pool->job_number;
        pthread_mutex_unlock(&pool->mutex);
        work(w, &pool->job);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->busy == 0) pthread_cond_signal(&pool->done);
    }
    return nullptr;
}

static std::atomic<Pool *> the_pool{nullptr};

// The pool of this process; after a fork the parent's threads are gone, so the child makes its own.
static Pool *pool_of_process() {
    Pool *pool = the_pool.load();
    while (!pool || pool->process != getpid()) {
        Pool *made = new Pool();  // never freed: workers wait on it until the process ends
        made->process = getpid();
        if (the_pool.compare_exchange_strong(pool, made)) return made;
        delete made;
    }
    return pool;
}

static Worker *worker(Pool *pool, int number, bool cooperative) {
    if (!pool->workers[number]) {
        void *made = mmap(nullptr, sizeof(Worker), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
        if (made == MAP_FAILED) return nullptr;
        pool->workers[number] = static_cast<Worker *>(made);
        pool->workers[number]->pool = pool;
    }
    return prepare_worker(pool->workers[number], cooperative) ? pool->workers[number] : nullptr;
}

// Starts OS threads until `count` workers exist (the launching one included); how many there are.
static int start_workers(Pool *pool, int count, bool cooperative) {
    if (count > 64) count = 64;
    for (int i = 0; i < count; i++)
        if (!worker(pool, i, cooperative)) return i;
    sigset_t all, before;
    sigfillset(&all);
    for (int number : kSignals) sigdelset(&all, number);
    while (pool->started < count) {
        pthread_t thread;
        auto *start = new Start{pool, pool->started};
        pthread_sigmask(SIG_BLOCK, &all, &before);  // Python's signals are not for workers
        int failed = pthread_create(&thread, nullptr, worker_main, start);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (failed) {
            delete start;
            break;
        }
        pthread_detach(thread);
        pool->started++;
    }
    return pool->started < count ? pool->started : count;
}

static const Api kApi = {barrier, barrier_reduce, exchange, active, kernel_fault};

}  // namespace simt

#define SIMT_VISIBLE extern "C" __attribute__((visibility("default")))

SIMT_VISIBLE const simt::Api *simt_api() { return &simt::kApi; }

// Runs one launch to its end. 0: done; 1: a fault, told in `report`; -1: no memory for stacks.
SIMT_VISIBLE int simt_launch(const simt::Kernel *kernel, const simt::Shape *shape, void **arguments,
                             simt::Report *report) {
    using namespace simt;
    Pool *pool = pool_of_process();
    pthread_mutex_lock(&pool->launching);
    const uint64_t blocks = uint64_t(shape->grid.x) * shape->grid.y * shape->grid.z;
    int count = shape->workers;
    if (uint64_t(count) > blocks) count = int(blocks);
    count = start_workers(pool, count, shape->cooperative);
    if (count < 1) {
        pthread_mutex_unlock(&pool->launching);
        return -1;
    }
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 4; i++) sigaction(kSignals[i], &action, &previous[i]);
    stack_t stack_before;
    use_signal_stack(pool->workers[0], &stack_before);

    Job &job = pool->job;
    job.kernel = kernel;
    job.shape = shape;
    job.arguments = arguments;
    job.blocks = blocks;
    job.chunk = blocks / (uint64_t(count) * 8) + 1;
    job.next = 0;
    job.faulty = ~uint64_t(0);
    for (int i = 0; i < count; i++) pool->workers[i]->report.kind = 0;
    if (count > 1) {
        pthread_mutex_lock(&pool->mutex);
        pool->wanted = count;
        pool->busy = count - 1;
        pool->job_number++;
        pthread_cond_broadcast(&pool->go);
        pthread_mutex_unlock(&pool->mutex);
    }
    work(pool->workers[0], &job);
    if (count > 1) {
        pthread_mutex_lock(&pool->mutex);
        while (pool->busy) pthread_cond_wait(&pool->done, &pool->mutex);
        pthread_mutex_unlock(&pool->mutex);
    }
    sigaltstack(&stack_before, nullptr);
    for (int i = 0; i < 4; i++) sigaction(kSignals[i], &previous[i], nullptr);

    int result = 0;
    for (int i = 0; i < count; i++) {  // the first faulty block, whoever ran it
        const Worker *w = pool->workers[i];
        if (w->report.kind && w->report_block == job.faulty.load()) {
            *report = w->report;
            result = 1;
        }
    }
    pthread_mutex_unlock(&pool->launching);
    return result;
}

SIMT_VISIBLE int simt_allocate(uint64_t size, simt::Allocation *out) {
    return simt::allocate(size, out) ? 0 : errno ? errno : ENOMEM;
}

SIMT_VISIBLE void simt_free(const simt::Allocation *allocation) {
    munmap(allocation->start, allocation->bytes);
}

// Checks `count` allocations; writes at most 2 * count damages and returns how many.
SIMT_VISIBLE int simt_check(const simt::Allocation *allocations, int count, int full, simt::Damage *out) {
    int found = 0;
    for (int i = 0; i < count; i++) found += simt::check(allocations[i], full != 0, out + found);
    return found;
}

// Where the object that holds this instruction is loaded; 0 if nobody knows.
SIMT_VISIBLE uint64_t simt_base(uint64_t program_counter) {
    Dl_info about;
    if (!dladdr(reinterpret_cast<void *>(uintptr_t(program_counter)), &about)) return 0;
    return uint64_t(reinterpret_cast<uintptr_t>(about.dli_fbase));
}
