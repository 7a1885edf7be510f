//! The way to EL1 with translation on: for the boot CPU from the loader's jump, for the others from PSCI's `CPU_ON`.
//!
//! The boot page tables map the first 4 GiB one to one and in the direct map, the first of them as devices, and the GiB that the
//! image is in again at the image's addresses. Each CPU leaves them for the kernel's own tables as soon as those exist.

use super::super::layout;
use super::{mmu, serial};
use core::arch::global_asm;

global_asm!(
    r#"
    .set KERNEL_BASE, 0xffffffff00000000

    # Goes on at EL1 with all interrupts masked, wherever between EL1 and EL2 it came from. Uses x1.
    .macro to_el1
    mrs x1, CurrentEL
    cmp x1, #(2 << 2)
    b.ne 1f
    # EL1 is 64-bit; nothing of it is trapped; it may read the counters, which have no offset.
    mov x1, #(1 << 31)
    msr hcr_el2, x1
    mov x1, #3
    msr cnthctl_el2, x1
    msr cntvoff_el2, xzr
    mov x1, #0x33ff
    msr cptr_el2, x1
    msr hstr_el2, xzr
    mrs x1, midr_el1
    msr vpidr_el2, x1
    mrs x1, mpidr_el1
    msr vmpidr_el2, x1
    # The interrupt controller's system registers, where there are any.
    mrs x1, id_aa64pfr0_el1
    ubfx x1, x1, #24, #4
    cbz x1, 2f
    mrs x1, ICC_SRE_EL2
    orr x1, x1, #8
    orr x1, x1, #1
    msr ICC_SRE_EL2, x1
    isb
2:  mov x1, #0x3c5
    msr spsr_el2, x1
    adr x1, 1f
    msr elr_el2, x1
    eret
1:  msr daifset, #15
    .endm

    # Translation by the boot tables. Uses x1 to x3.
    .macro translate
    ldr x1, ={mair}
    msr mair_el1, x1
    ldr x1, ={tcr}
    mrs x2, id_aa64mmfr0_el1
    and x2, x2, #15
    mov x3, #5
    cmp x2, x3
    csel x2, x2, x3, lo
    orr x1, x1, x2, lsl #32
    msr tcr_el1, x1
    adrp x1, boot_low
    msr ttbr0_el1, x1
    adrp x1, boot_high
    msr ttbr1_el1, x1
    msr cpacr_el1, xzr
    tlbi vmalle1
    dsb nsh
    isb
    ldr x1, ={sctlr}
    msr sctlr_el1, x1
    isb
    .endm

    # Leaves the low addresses to address spaces. Uses x1.
    .macro leave_low
    adrp x1, {nothing}
    ldr x2, =KERNEL_BASE
    sub x1, x1, x2
    msr ttbr0_el1, x1
    isb
    tlbi vmalle1
    dsb nsh
    isb
    .endm

    .section .boot, "ax"
    .global boot_entry
boot_entry:
    mov x19, x0
    to_el1
    # Normal memory or devices, accessed, for EL1 only; devices hold no code.
    ldr x1, =0x60000000000405
    adrp x2, boot_gibs
    str x1, [x2]
    ldr x1, =0x40000701
    mov x3, #1
    mov x4, #0x40000000
3:  str x1, [x2, x3, lsl #3]
    add x1, x1, x4
    add x3, x3, #1
    cmp x3, #4
    b.ne 3b
    orr x1, x2, #3
    adrp x2, boot_low
    str x1, [x2]
    adrp x2, boot_high
    str x1, [x2, #(256 * 8)]
    adrp x3, boot_image
    orr x1, x3, #3
    str x1, [x2, #(511 * 8)]
    ldr x1, =0x40000701
    str x1, [x3, #(509 * 8)]
    translate
    ldr x1, =boot_high_half
    br x1
boot_high_half:
    ldr x1, =boot_stack_top
    mov sp, x1
    mov x0, x19
    mov x29, xzr
    mov x30, xzr
    bl {main}
    brk #1

    # Where CPU_ON starts the others.
    .global ap_entry
ap_entry:
    to_el1
    translate
    adrp x1, {ap_root}
    ldr x19, [x1, :lo12:{ap_root}]
    bl to_kernel_tables
    ldr x1, =ap_high_half
    br x1
ap_high_half:
    leave_low
    adrp x1, {ap_stack}
    ldr x2, [x1, :lo12:{ap_stack}]
    mov sp, x2
    adrp x1, {ap_cpu}
    ldr x0, [x1, :lo12:{ap_cpu}]
    mov x29, xzr
    mov x30, xzr
    bl {ap_main}
    brk #1

    # x19: the kernel's tables. Runs at low addresses: nothing is translated by TTBR1 meanwhile, so that no address of the upper
    # half has two translations.
to_kernel_tables:
    msr ttbr1_el1, x19
    isb
    tlbi vmalle1
    dsb nsh
    isb
    ret

    # x0: page tables, x1: top of a stack that they map, x2: where to go on.
    .global continue_on
continue_on:
    mov x19, x0
    mov x20, x1
    mov x21, x2
    dsb ish
    ldr x1, =KERNEL_BASE
    adr x2, continue_low
    sub x2, x2, x1
    br x2
continue_low:
    bl to_kernel_tables
    ldr x1, =continue_high
    br x1
continue_high:
    leave_low
    mov sp, x20
    mov x29, xzr
    mov x30, xzr
    blr x21
    brk #1

    # Literals are within reach of the code that runs at low addresses.
    .ltorg

    .section .bss.boot, "aw", @nobits
    .balign 4096
boot_low:
    .skip 4096
boot_high:
    .skip 4096
boot_gibs:
    .skip 4096
boot_image:
    .skip 4096
    # As in `layout`: bit 16 is set in the addresses of a stack, and clear below it.
    .balign 0x20000
    .skip 0x10000
    .skip 0x10000
boot_stack_top:
    .skip 16

    .text
    "#,
    mair = const mmu::MAIR,
    tcr = const mmu::TCR,
    sctlr = const mmu::SCTLR,
    nothing = sym mmu::NOTHING,
    main = sym super::super::boot_main,
    ap_main = sym super::super::smp::ap_main,
    ap_root = sym super::super::smp::AP_ROOT,
    ap_stack = sym super::super::smp::AP_STACK,
    ap_cpu = sym super::super::smp::AP_CPU,
);

unsafe extern "C" {
    /// Where started CPUs begin, as linked.
    static ap_entry: u8;
    #[link_name = "continue_on"]
    fn continue_on_raw(root: u64, stack: u64, to: extern "C" fn() -> !) -> !;
}

/// Goes on at `to` with other page tables and an empty stack.
pub(crate) fn continue_on(root: u64, stack: u64, to: extern "C" fn() -> !) -> ! {
    // The last words on the boot tables, which have it elsewhere, have been said.
    serial::move_to(layout::DEVICES);
    // SAFETY: the tables map the image where it runs, and the stack; nothing on the old stack is used again.
    unsafe { continue_on_raw(root, stack, to) }
}

/// The physical address at which started CPUs begin.
pub(super) fn of_others() -> u64 {
    (&raw const ap_entry) as u64 - mmu::IMAGE
}
