// What the kernels' object and the runtime's object know of each other. Both are loaded apart: the
// runtime once a process, one kernels' object for each kernels file. Plain structs, no C++ across.
#pragma once
#include <stdint.h>

namespace simt {

struct Worker;  // one OS thread that runs blocks; only the runtime looks inside

struct Index {
    unsigned x, y, z;
};

// The variables of the kernels' object that stand for CUDA's built-in ones, as seen by one OS thread.
struct Views {
    Index *thread_index;
    Index *block_index;
    Index *block_dim;
    Index *grid_dim;
    Worker **worker;
    unsigned long long *block_serial;  // changes with every block: shared memory is then poisoned anew
    unsigned char **dynamic_shared;
};

struct Kernel {
    void (*thread)(void **arguments);  // run the body for the current thread index, or
    void (*block)(void **arguments, Index shape, int backwards);  // for all threads, one by one
    void (*views)(Views *views);
};

enum AccessKind { kRead = 0, kWrite = 1, kAtomic = 2 };

// What the kernels' object calls. `line` is the source line of the call.
struct Api {
    void (*barrier)(Worker *, int line);
    int (*barrier_reduce)(Worker *, int line, int kind, int value);  // kind: 0 count, 1 and, 2 or
    // Gives `value` to the warp and takes that of lane `source` (0-31), or a vote (32): the lanes whose
    // value is not 0.
    uint64_t (*exchange)(Worker *, unsigned mask, uint64_t value, unsigned source, int line);
    unsigned (*active)(Worker *);  // lanes of this warp that have not returned
    void (*fault)(Worker *, int line, const char *message);  // ends the launch; does not return
    // A block's first thread is about to use this shared array (of `element` bytes an element): fill
    // it with 0xFF. Without an address: the name of the dynamic one.
    void (*shared)(const char *name, void *address, uint64_t bytes, uint64_t element);
    // Only from an object compiled to be watched (simt_callbacks.cpp).
    void (*access)(const volatile void *address, uint64_t bytes, int kind, uint64_t program_counter);
    void (*fence)();
};

struct Party {
    uint64_t program_counter;  // behind the access
    Index block, thread;
    int kind;  // AccessKind
};

// Two accesses to the same bytes that nothing orders, `first` being the one that ran first.
struct Race {
    Party first, second;
    uint64_t allocation;  // where the allocation's data starts; 0 for shared memory
    uint64_t offset;      // in bytes, in the allocation or the array
    uint64_t element;     // bytes an element of the shared array
    uint64_t count;       // how often the same two instructions met so
    char name[64];        // of the shared array
};

struct Watch {
    Race *races;  // room for `capacity`
    int capacity;
    int count;
};

struct Shape {
    Index grid, block;
    uint64_t shared_bytes;
    int cooperative;  // 0: no barrier or shuffle, threads may run as a plain loop
    int schedule;     // 0 benign, 1 reversed, 2 ahead, 3 ahead-reversed, 4 random
    uint64_t seed;
    int workers;
    Watch *watch;  // look for races, with one worker; nullptr: do not
};

// kind: 0 no fault, 1 barrier or shuffle, 2 illegal address, 3 arithmetic, 4 trap, assert or bounds
struct Report {
    int kind;
    int line;  // 0 where it is not known
    uint64_t address;
    uint64_t program_counter;
    Index block, thread;
    char message[400];
};

}  // namespace simt
