// Runs the blocks of a launch: fibers for the threads of a block, OS threads for blocks, and signals
// turned into reports. Built once and loaded once a process; knows nothing of any kernel.
//
// Blocks share nothing but global memory, so that a launch is deterministic for a schedule, whatever
// the number of OS threads.
//
// Errors never hang and never unwind: the fibers of a faulty block are dropped where they stand (they
// own nothing), and control goes back to the worker's own stack.

#include <dlfcn.h>
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__APPLE__)
#include <sys/ucontext.h>
#else
#include <ucontext.h>
#endif
#include <unistd.h>

#include <atomic>

#include "simt_abi.hpp"
#include "simt_block.hpp"
#include "simt_fiber.hpp"
#include "simt_memory.hpp"

namespace simt {

// --- signals --------------------------------------------------------------------------------------

static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction previous[4];

[[maybe_unused]] static void land() {
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
    if (job->shape->cooperative)
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

static const Api kApi = {barrier,      barrier_reduce, exchange,     active,
                         kernel_fault, shared_array,   watch_access, watch_fence};

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
    int count = shape->watch ? 1 : shape->workers;
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
    if (shape->watch) {
        const Worker *w = pool->workers[0];
        begin_watch(shape, reinterpret_cast<const void *>(kernel->thread), &w->current, w->stacks,
                    kMaxThreads * (kStackBytes + page_bytes()));
    }
    work(pool->workers[0], &job);
    if (shape->watch) end_watch();
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
    if (!simt::allocate(size, out)) return errno ? errno : ENOMEM;
    simt::track_allocation(*out);
    return 0;
}

SIMT_VISIBLE void simt_free(const simt::Allocation *allocation) {
    simt::forget_allocation(*allocation);
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
