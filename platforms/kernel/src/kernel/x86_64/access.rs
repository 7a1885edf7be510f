//! Accesses that may fail: whoever cannot serve the page fault of one of these sends it on to its failing end.

use core::arch::global_asm;

global_asm!(
    r#"
    .text
    .balign 16
    .global store_word
    .global store_at
    .type store_word, @function
store_word:
store_at:
    movq %rsi, (%rdi)
    movl $1, %eax
    ret

    .global load_word
    .global load_at
    .type load_word, @function
load_word:
load_at:
    movq (%rdi), %rax
    movq %rax, (%rsi)
    movl $1, %eax
    ret

    .global access_failed
access_failed:
    xorl %eax, %eax
    ret
    "#,
    options(att_syntax)
);
