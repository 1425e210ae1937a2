// A thread of a kernel is a fiber: a stack, and a switch that saves the registers which a call must keep.
//
// ucontext does it everywhere, but with a system call at every switch; on x86-64 a few instructions do.
#pragma once
#include <stddef.h>

extern "C" void octile_switch(void** from, void* to);  // `to` is from `new_stack`, or what an earlier switch left

#if defined(__x86_64__) && !defined(OCTILE_UCONTEXT)
asm(R"(
.text
.globl octile_switch
octile_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

inline void* new_stack(unsigned char* base, size_t bytes, void (*entry)()) {
    void** words = reinterpret_cast<void**>(base + bytes) - 2;  // as after a call: 8 bytes off a multiple of 16
    words[0] = reinterpret_cast<void*>(entry);
    for (int i = 1; i <= 6; ++i) words[-i] = nullptr;
    return words - 6;
}
#else
#include <ucontext.h>

extern "C" void octile_switch(void** from, void* to) {
    ucontext_t here;  // on the stack that is left
    *from = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}

inline void* new_stack(unsigned char* base, size_t bytes, void (*entry)()) {
    const size_t room = (sizeof(ucontext_t) + 63) / 64 * 64;
    auto* context = reinterpret_cast<ucontext_t*>(base + bytes - room);
    getcontext(context);
    context->uc_stack.ss_sp = base;
    context->uc_stack.ss_size = bytes - room;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}
#endif
