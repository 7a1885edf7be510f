//! What every arm64 kernel with two CPUs has, whoever manages its memory: here for QEMU's `virt` machine with a GICv2.

use crate::kernel::{interrupt, kernel_main, second_cpu};
use core::arch::{asm, global_asm};
use core::fmt;
use core::ptr::with_exposed_provenance_mut;
use hugemm::prelude::{Extent, PhysAddr};

/// Memory, as `run.sh` asks for it; a kernel reads the device tree.
pub const MEMORY: Extent = Extent::within(PhysAddr::new(0x4000_0000), 128 << 20);

/// Of the interrupt controller: what all CPUs share, and each CPU's own (IHI 0048).
const DISTRIBUTOR: usize = 0x800_0000;
const ENABLE: usize = DISTRIBUTOR + 0x100;
const OWN: usize = 0x801_0000;
const LEAST_PRIORITY: usize = OWN + 4;
const ACKNOWLEDGE: usize = OWN + 0xc;
const END: usize = OWN + 0x10;

const UART: usize = 0x900_0000;

/// The virtual timer's interrupt, on every arm64 machine (DEN0094).
const TIMER: u32 = 27;

/// PSCI's calls (DEN0022).
const CPU_ON: u64 = 0xc400_0003;
const SYSTEM_OFF: u64 = 0x8400_0008;

// Memory is mapped one to one by blocks of 1 GiB: the first devices, the others normal memory. Vectors: a page each 128 bytes apart; only
// interrupts of the kernel itself come back.
global_asm!(
    r#"
    .section .boot, "ax"
    .global boot
boot:
    adr x19, {main}
    adrp x1, stacks + 0x10000
    b enter
    .global boot_second
boot_second:
    adr x19, {second}
    adrp x1, stacks + 0x20000
enter:
    mov sp, x1
    ldr x1, =0xff
    msr mair_el1, x1
    ldr x1, =0x803520
    msr tcr_el1, x1
    adrp x1, table
    msr ttbr0_el1, x1
    adr x1, vectors
    msr vbar_el1, x1
    tlbi vmalle1
    dsb nsh
    isb
    ldr x1, =0x30d01805
    msr sctlr_el1, x1
    isb
    blr x19
    brk #1
    .ltorg

    .balign 2048
vectors:
    .rept 5
    b {fault}
    .balign 128
    .endr
    stp x29, x30, [sp, #-176]!
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    stp x8, x9, [sp, #80]
    stp x10, x11, [sp, #96]
    stp x12, x13, [sp, #112]
    stp x14, x15, [sp, #128]
    stp x16, x17, [sp, #144]
    str x18, [sp, #160]
    bl {interrupt}
    b back
    .balign 128
    .rept 10
    b {fault}
    .balign 128
    .endr
back:
    ldp x0, x1, [sp, #16]
    ldp x2, x3, [sp, #32]
    ldp x4, x5, [sp, #48]
    ldp x6, x7, [sp, #64]
    ldp x8, x9, [sp, #80]
    ldp x10, x11, [sp, #96]
    ldp x12, x13, [sp, #112]
    ldp x14, x15, [sp, #128]
    ldp x16, x17, [sp, #144]
    ldr x18, [sp, #160]
    ldp x29, x30, [sp], #176
    eret

    .data
    .balign 4096
table:
    .quad 0x60000000000405
    .quad 0x40000701
    .quad 0x80000701
    .quad 0xc0000701

    .section .bss.stacks, "aw", @nobits
    .balign 4096
stacks:
    .skip 0x20000

    .text
    "#,
    main = sym kernel_main,
    second = sym second_cpu,
    interrupt = sym interrupt,
    fault = sym fault,
);

unsafe extern "C" {
    static image_end: u8;
    static boot_second: u8;
}

/// What nobody uses.
pub fn ram() -> Extent {
    let end = &raw const image_end as u64;
    MEMORY.split_at((end - MEMORY.start().get()) / 4096).1
}

fn set(register: usize, value: u32) {
    // SAFETY: a register of a device of this machine, mapped as such; what it does is its caller's business.
    unsafe { with_exposed_provenance_mut::<u32>(register).write_volatile(value) };
}

fn get(register: usize) -> u32 {
    // SAFETY: as in `set`.
    unsafe { with_exposed_provenance_mut::<u32>(register).read_volatile() }
}

/// A call of the firmware.
fn psci(call: u64, arguments: [u64; 2]) -> u64 {
    let result;
    // SAFETY: the firmware keeps all other registers (DEN0028).
    unsafe {
        asm!("hvc #0", inout("x0") call => result, inout("x1") arguments[0] => _, inout("x2") arguments[1] => _, inout("x3") 0 => _);
    }
    result
}

/// Starts the second CPU.
pub fn start_second_cpu() {
    let entry = &raw const boot_second as u64;
    assert_eq!(psci(CPU_ON, [1, entry]), 0, "there is a second CPU");
}

/// 1000 timer interrupts per second from now on, on this CPU.
pub fn start_interrupts() {
    set(DISTRIBUTOR, 1);
    set(ENABLE, 1 << TIMER);
    set(LEAST_PRIORITY, 0xff);
    set(OWN, 1);
    start_timer();
    // SAFETY: there are handlers.
    unsafe { asm!("msr daifclr, #2", options(nostack, preserves_flags)) };
}

fn start_timer() {
    // SAFETY: a timer of this CPU's own.
    unsafe {
        asm!("mrs {0}, cntfrq_el0", "udiv {0}, {0}, {1}", "msr cntv_tval_el0, {0}", "msr cntv_ctl_el0, {2}",
            out(reg) _, in(reg) 1000_u64, in(reg) 1_u64, options(nomem, nostack, preserves_flags));
    }
}

/// Whether it is the timer that has interrupted; it goes on.
pub fn end_of_interrupt() -> bool {
    let number = get(ACKNOWLEDGE) & 0x3ff;
    if number == TIMER {
        start_timer();
    }
    if number < 1020 {
        set(END, number);
    }
    number == TIMER
}

/// No interrupt of this CPU any more.
pub fn stop_interrupts() {
    // SAFETY: masks them.
    unsafe { asm!("msr daifset, #2", options(nostack, preserves_flags)) };
}

/// This CPU does nothing any more.
pub fn halt() -> ! {
    stop_interrupts();
    loop {
        // SAFETY: waits.
        unsafe { asm!("wfi", options(nostack, preserves_flags)) };
    }
}

/// The machine goes off.
pub fn off() -> ! {
    psci(SYSTEM_OFF, [0; 2]);
    halt()
}

extern "C" fn fault() -> ! {
    let (what, at, address): (u64, u64, u64);
    // SAFETY: reads registers.
    unsafe {
        asm!("mrs {}, esr_el1", "mrs {}, elr_el1", "mrs {}, far_el1", out(reg) what, out(reg) at, out(reg) address)
    };
    panic!("exception {what:#x} at {at:#x}, address {address:#x}")
}

/// The serial port, which QEMU has set up.
pub struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| set(UART, byte.into()));
        Ok(())
    }
}
