// Switching stacks: a few lines of assembly on x86-64 and arm64, ucontext elsewhere.
//
// Measured for 1,024 fibers in the trial of simt.md: assembly 10 ns, _setjmp 24, swapcontext 248. The
// switch ends in `ret`, which the processor predicts well: every fiber resumes at the same address.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace simt {

struct Context {
    void *stack_pointer;
#if !defined(__x86_64__) && !defined(__aarch64__)
    void *machine;  // a ucontext_t
#endif
    const char *fetch() const { return static_cast<const char *>(stack_pointer); }
};

}  // namespace simt

#if defined(__APPLE__)
#define SIMT_SYMBOL(name) "_" name
#define SIMT_HIDDEN(name) ".private_extern _" name
#else
#define SIMT_SYMBOL(name) name
#define SIMT_HIDDEN(name) ".hidden " name
#endif

#if defined(__x86_64__)

extern "C" void simt_switch(void **save, void *load);
asm(".text\n.globl " SIMT_SYMBOL("simt_switch") "\n" SIMT_HIDDEN("simt_switch") "\n.p2align 4\n"
    SIMT_SYMBOL("simt_switch") ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");

namespace simt {

inline void switch_to(Context *from, Context *to) {
    simt_switch(&from->stack_pointer, to->stack_pointer);
}

// The next switch to `context` starts `entry` on the stack that ends at `top`.
inline void prepare(Context *context, char *top, size_t, void (*entry)()) {
    uintptr_t aligned = reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15);
    void **words = reinterpret_cast<void **>(aligned) - 8;  // 6 registers, entry, a spare word
    words[6] = reinterpret_cast<void *>(entry);
    words[7] = nullptr;  // where entry would return to; rsp is 8 past a multiple of 16 there
    context->stack_pointer = words;
}

}  // namespace simt

#elif defined(__aarch64__)

extern "C" void simt_switch(void **save, void *load);
asm(".text\n.globl " SIMT_SYMBOL("simt_switch") "\n" SIMT_HIDDEN("simt_switch") "\n.p2align 4\n"
    SIMT_SYMBOL("simt_switch") ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");

namespace simt {

inline void switch_to(Context *from, Context *to) {
    simt_switch(&from->stack_pointer, to->stack_pointer);
}

inline void prepare(Context *context, char *top, size_t, void (*entry)()) {
    uintptr_t aligned = reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15);
    void **words = reinterpret_cast<void **>(aligned) - 20;
    words[10] = nullptr;                            // x29, the frame pointer
    words[11] = reinterpret_cast<void *>(entry);    // x30, where `ret` goes
    context->stack_pointer = words;
}

}  // namespace simt

#else

#include <ucontext.h>

namespace simt {

inline ucontext_t *machine(Context *context) {
    if (!context->machine) context->machine = new ucontext_t();
    return static_cast<ucontext_t *>(context->machine);
}

inline void switch_to(Context *from, Context *to) { swapcontext(machine(from), machine(to)); }

inline void prepare(Context *context, char *top, size_t size, void (*entry)()) {
    ucontext_t *made = machine(context);
    getcontext(made);
    made->uc_stack.ss_sp = top - size;
    made->uc_stack.ss_size = size;
    made->uc_link = nullptr;
    makecontext(made, entry, 0);
}

}  // namespace simt

#endif
