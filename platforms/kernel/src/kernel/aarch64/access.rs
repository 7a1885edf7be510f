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
    str x1, [x0]
    mov w0, #1
    ret

    .global load_word
    .global load_at
    .type load_word, @function
load_word:
load_at:
    ldr x2, [x0]
    str x2, [x1]
    mov w0, #1
    ret

    .global access_failed
access_failed:
    mov w0, #0
    ret
    "#
);
