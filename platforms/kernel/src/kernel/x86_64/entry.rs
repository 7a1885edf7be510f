//! The way to 64-bit mode: for the boot CPU from the PVH loader's jump, for the others from real mode.
//!
//! The boot page tables map the first 4 GiB one to one and in the direct map, and the first GiB again at the image's
//! addresses; both kinds of CPU leave them for the kernel's own tables as soon as those exist.

use super::super::layout;
use core::arch::global_asm;

/// Where the start-up code of the other CPUs is copied to: a frame below 1 MiB that the memory map never gives out.
pub(super) const TRAMPOLINE: u64 = 0x8000;

global_asm!(
    r#"
    .set KERNEL_BASE, 0xffffffff80000000
    .set TRAMPOLINE, {trampoline}

    # The note by which a PVH loader finds the 32-bit entry: type 18 of owner "Xen".
    .section .note.Xen, "a", @note
    .balign 4
    .long 4, 8, 18
    .asciz "Xen"
    .quad pvh_entry - KERNEL_BASE

    # Sets CR4.PAE, the boot tables, EFER.LME and EFER.NXE, CR0.PG, CR0.WP and CR0.PE.
    .macro long_mode
    movl %cr4, %eax
    orl $0x20, %eax
    movl %eax, %cr4
    movl $(boot_pml4 - KERNEL_BASE), %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x900, %eax
    wrmsr
    movl %cr0, %eax
    orl $0x80010001, %eax
    movl %eax, %cr0
    .endm

    .macro data_segments
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    .endm

    .section .boot, "ax"
    .code32
    .global pvh_entry
pvh_entry:
    cli
    cld
    movl %ebx, %ebp
    # 2048 entries of 2 MiB: 4 GiB, present and writable.
    movl $(boot_pd - KERNEL_BASE), %edi
    movl $0x83, %eax
    movl $2048, %ecx
1:  movl %eax, (%edi)
    addl $0x200000, %eax
    addl $8, %edi
    loop 1b
    movl $(boot_pdpt_low - KERNEL_BASE), %edi
    movl $(boot_pd - KERNEL_BASE + 3), %eax
    movl $4, %ecx
2:  movl %eax, (%edi)
    addl $0x1000, %eax
    addl $8, %edi
    loop 2b
    movl $(boot_pd - KERNEL_BASE + 3), boot_pdpt_high - KERNEL_BASE + 510 * 8
    movl $(boot_pdpt_low - KERNEL_BASE + 3), boot_pml4 - KERNEL_BASE
    # The same at the beginning of the direct map, where tables are reached.
    movl $(boot_pdpt_low - KERNEL_BASE + 3), boot_pml4 - KERNEL_BASE + 256 * 8
    movl $(boot_pdpt_high - KERNEL_BASE + 3), boot_pml4 - KERNEL_BASE + 511 * 8
    long_mode
    lgdt boot_gdt_pointer - KERNEL_BASE
    ljmpl $8, $(boot_long - KERNEL_BASE)

    .code64
boot_long:
    data_segments
    movabsq $boot_high, %rax
    jmp *%rax
boot_high:
    movabsq $boot_stack_top, %rsp
    movl %ebp, %edi
    xorl %ebp, %ebp
    call {main}
    ud2

ap_long:
    data_segments
    movabsq $ap_high, %rax
    jmp *%rax
ap_high:
    movq {ap_root}(%rip), %rax
    movq %rax, %cr3
    movq {ap_stack}(%rip), %rsp
    movq {ap_cpu}(%rip), %rdi
    xorl %ebp, %ebp
    call {ap_main}
    ud2

    # rdi: page tables, rsi: top of a stack that they map, rdx: where to go on.
    .global continue_on
continue_on:
    movq %rdi, %cr3
    movq %rsi, %rsp
    xorl %ebp, %ebp
    call *%rdx
    ud2

    # Runs at TRAMPOLINE: every address is taken relative to that.
    .section .rodata.trampoline, "a"
    .global trampoline_start
    .global trampoline_end
    .code16
trampoline_start:
    cli
    cld
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl trampoline_gdt_pointer - trampoline_start + TRAMPOLINE
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $24, $(trampoline_32 - trampoline_start + TRAMPOLINE)
    .code32
trampoline_32:
    data_segments
    long_mode
    ljmpl $8, $(ap_long - KERNEL_BASE)
    .balign 8
trampoline_gdt_pointer:
    .word 31
    .long boot_gdt - KERNEL_BASE
trampoline_end:
    .code64

    # Null, 64-bit code, data, 32-bit code.
    .section .rodata.boot_gdt, "a"
    .balign 8
boot_gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cf9b000000ffff
boot_gdt_pointer:
    .word 31
    .long boot_gdt - KERNEL_BASE

    .section .bss.boot, "aw", @nobits
    .balign 4096
boot_pml4:
    .skip 4096
boot_pdpt_low:
    .skip 4096
boot_pdpt_high:
    .skip 4096
boot_pd:
    .skip 4 * 4096
    .skip 32768
boot_stack_top:

    .text
    "#,
    trampoline = const TRAMPOLINE,
    main = sym super::super::boot_main,
    ap_main = sym super::super::smp::ap_main,
    ap_root = sym super::super::smp::AP_ROOT,
    ap_stack = sym super::super::smp::AP_STACK,
    ap_cpu = sym super::super::smp::AP_CPU,
    options(att_syntax)
);

unsafe extern "C" {
    /// First byte of the start-up code of the other CPUs, as linked.
    static trampoline_start: u8;
    /// One past its last byte.
    static trampoline_end: u8;
    #[link_name = "continue_on"]
    fn continue_on_raw(root: u64, stack: u64, to: extern "C" fn() -> !) -> !;
}

/// Goes on at `to` with other page tables and an empty stack.
pub(crate) fn continue_on(root: u64, stack: u64, to: extern "C" fn() -> !) -> ! {
    // SAFETY: the tables map the image where it runs, and the stack; nothing on the old stack is used again.
    unsafe { continue_on_raw(root, stack, to) }
}

/// Puts the start-up code of the other CPUs where they begin.
pub(super) fn place_trampoline() {
    // SAFETY: two symbols around constant bytes of the image, copied to a frame below 1 MiB that is nobody's: the memory map never
    // gives it out, and the direct map reaches it.
    unsafe {
        let bytes = (&raw const trampoline_end).offset_from(&raw const trampoline_start) as usize;
        core::ptr::copy_nonoverlapping(&raw const trampoline_start, layout::direct(TRAMPOLINE), bytes);
    }
}
