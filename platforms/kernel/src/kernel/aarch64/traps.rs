//! What happens at an exception or an interrupt: a vector for each kind, one way in and out, one dispatch.
//!
//! Source: Arm ARM, D1 "Exception entry" and "Synchronous exception types"; ESR_EL1 for syndromes.

use super::super::page_fault::{self, PageFault};
use super::super::{fault, layout, stack, tlb, watchdog};
use super::controller::{self, Interrupt};
use super::{interrupts, mmu, read, write};
use crate::abort::{Abort, Cause, DATA, FETCH};
use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;

/// The registers at the moment of a trap, as the vectors store them.
#[derive(Debug)]
#[repr(C, align(16))]
pub(crate) struct Frame {
    /// x0 to x28.
    pub registers: [u64; 29],
    /// x29: frame pointer.
    pub chain: u64,
    /// x30.
    pub link: u64,
    /// Where it was.
    pub at: u64,
    /// Its state.
    pub state: u64,
    /// Nothing.
    pub unused: u64,
}

impl Frame {
    /// Where it was.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Where the chain of frames begins.
    pub(crate) fn chain(&self) -> u64 {
        self.chain
    }

    /// Goes on somewhere else.
    pub(crate) fn go_on_at(&mut self, at: u64) {
        self.at = at;
    }
}

/// Where the caller's chain of frames begins.
#[inline(always)]
pub(crate) fn chain() -> u64 {
    let chain: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, x29", out(reg) chain, options(nostack, nomem, preserves_flags)) };
    chain
}

/// Bytes of a stack for a CPU whose own has run over.
const EMERGENCY: usize = 16 << 10;

/// That stack. It begins where TPIDR_EL1 points to: what comes next is the CPU's data.
#[repr(C, align(128))]
pub(crate) struct Own(UnsafeCell<[u8; EMERGENCY]>);

// SAFETY: each CPU uses its own, once.
unsafe impl Sync for Own {}

impl Own {
    /// All zero.
    pub(crate) const fn new() -> Self {
        Own(UnsafeCell::new([0; EMERGENCY]))
    }
}

global_asm!(
    r#"
    .set FRAME, {frame}

    # A bit is set in the addresses of every stack, and clear in the hole below it: where the frame would lie in the hole, the
    # stack has run over. There is no user mode, so its thread register is free.
    .macro vector kind
    .balign 0x80
    msr tpidr_el0, x0
    sub x0, sp, #FRAME
    tbz x0, #{stack_bit}, 1f
    mov sp, x0
    mrs x0, tpidr_el0
    stp x0, x1, [sp]
    mov x1, #\kind
    b trap_common
1:  mov x1, x0
    b stack_overflow
    .endm

    .text
    .balign 0x800
    .global trap_vectors
trap_vectors:
    # By the stack of user mode, which nobody uses.
    vector 3
    vector 3
    vector 3
    vector 3
    # By the kernel's: synchronous, IRQ, FIQ, SError.
    vector 0
    vector 1
    vector 2
    vector 3
    # From user mode, which there is not.
    .rept 8
    vector 3
    .endr

    .type trap_common, @function
trap_common:
    stp x2, x3, [sp, #16]
    stp x4, x5, [sp, #32]
    stp x6, x7, [sp, #48]
    stp x8, x9, [sp, #64]
    stp x10, x11, [sp, #80]
    stp x12, x13, [sp, #96]
    stp x14, x15, [sp, #112]
    stp x16, x17, [sp, #128]
    stp x18, x19, [sp, #144]
    stp x20, x21, [sp, #160]
    stp x22, x23, [sp, #176]
    stp x24, x25, [sp, #192]
    stp x26, x27, [sp, #208]
    stp x28, x29, [sp, #224]
    mrs x2, elr_el1
    mrs x3, spsr_el1
    stp x30, x2, [sp, #240]
    str x3, [sp, #256]
    mov x0, sp
    bl {entry}
    # Nothing may come between restoring where it was and going there.
    msr daifset, #3
    ldp x30, x2, [sp, #240]
    ldr x3, [sp, #256]
    msr elr_el1, x2
    msr spsr_el1, x3
    ldp x28, x29, [sp, #224]
    ldp x26, x27, [sp, #208]
    ldp x24, x25, [sp, #192]
    ldp x22, x23, [sp, #176]
    ldp x20, x21, [sp, #160]
    ldp x18, x19, [sp, #144]
    ldp x16, x17, [sp, #128]
    ldp x14, x15, [sp, #112]
    ldp x12, x13, [sp, #96]
    ldp x10, x11, [sp, #80]
    ldp x8, x9, [sp, #64]
    ldp x6, x7, [sp, #48]
    ldp x4, x5, [sp, #32]
    ldp x2, x3, [sp, #16]
    ldp x0, x1, [sp]
    add sp, sp, #FRAME
    eret

    # x1: where the frame would lie. What other registers had is of no use any more, but for where it was.
stack_overflow:
    mrs x2, tpidr_el1
    mov sp, x2
    mrs x2, elr_el1
    mov x3, x29
    mov x0, x1
    mov x1, x2
    mov x2, x3
    mov x29, xzr
    bl {overflown}
    brk #1
    .ltorg
    "#,
    frame = const size_of::<Frame>(),
    stack_bit = const layout::STACK_BYTES.trailing_zeros(),
    entry = sym trap_entry,
    overflown = sym overflown,
);

unsafe extern "C" {
    /// 16 vectors of 128 bytes.
    static trap_vectors: u8;
}

/// Has the calling CPU use the vectors.
pub(crate) fn load(_own: &'static Own) {
    // SAFETY: the vectors save and restore everything.
    unsafe {
        write!("vbar_el1", &raw const trap_vectors);
        asm!("isb", options(nostack, preserves_flags));
    }
}

/// A frame did not fit on the stack: at `frame` it would lie in the hole below one.
extern "C" fn overflown(frame: u64, at: u64, chain: u64) -> ! {
    let of = stack::overflown(frame);
    let frame = Frame { registers: [0; 29], chain, link: 0, at, state: 0, unused: 0 };
    fault::exception(&frame, format_args!("no room for {} bytes", size_of::<Frame>()), "stack overflow", of)
}

/// Every trap. Everything is masked.
extern "C" fn trap_entry(frame: &mut Frame, kind: u64) {
    const SYNCHRONOUS: u64 = 0;
    const IRQ: u64 = 1;
    const FIQ: u64 = 2;
    // Before FIQ is let in, whose trap would have syndromes of its own.
    let (syndrome, address) = (read!("esr_el1"), read!("far_el1"));
    // One that has not been taken would come again and again.
    if kind != FIQ {
        // SAFETY: where it was has been saved; what comes as FIQ may come anywhere.
        unsafe { asm!("msr daifclr, #1", options(nostack, preserves_flags)) };
    }
    match kind {
        SYNCHRONOUS => synchronous(frame, syndrome, address),
        IRQ => match controller::take() {
            Interrupt::Timer => watchdog::tick(frame),
            Interrupt::Shootdown => tlb::serve(),
            Interrupt::Wake | Interrupt::Vanished => {}
            Interrupt::Unknown(number) => {
                fault::exception(frame, format_args!("number {number}"), "interrupt that nobody expects", None)
            }
        },
        FIQ if controller::take_fiq() => fault::interrupted(frame),
        FIQ => {}
        _ => fault::exception(frame, format_args!("syndrome {syndrome:#x}"), "error that hardware reports", None),
    }
}

/// Classes of synchronous exceptions (ESR_EL1.EC).
mod class {
    pub(super) const UNKNOWN: u64 = 0;
    pub(super) const VECTORS: u64 = 0x07;
    pub(super) const STATE: u64 = 0x0e;
    pub(super) const PC: u64 = 0x22;
    pub(super) const SP: u64 = 0x26;
    pub(super) const BREAKPOINT: u64 = 0x3c;
}

fn synchronous(frame: &mut Frame, syndrome: u64, address: u64) {
    const IRQ_OFF: u64 = 1 << 7;
    let (tried, cause) = match Abort::of(syndrome) {
        Some(Abort::Fault(tried, cause)) => (tried, cause),
        Some(Abort::Conflict) => return mmu::drop_everything(),
        Some(Abort::Fatal) | None => return fatal(frame, syndrome, address),
    };
    let why = match cause {
        Cause::Absent => fault::ABSENT,
        Cause::NotAccessed => "the entry is not marked as accessed",
        Cause::Denied => fault::DENIED,
    };
    page_fault::handle(frame, &PageFault { at: address, tried, cause: why, interrupts: frame.state & IRQ_OFF == 0 });
    if cause == Cause::Denied {
        // This CPU may keep the translation that refused, whatever the entry says now.
        mmu::drop_translation(address);
    }
}

fn fatal(frame: &Frame, syndrome: u64, address: u64) {
    let name = match syndrome >> 26 & 63 {
        class::UNKNOWN => "invalid instruction",
        class::VECTORS => "use of vector registers, which the kernel has not",
        class::STATE => "illegal state",
        class::PC => "misaligned instruction",
        class::SP => "misaligned stack",
        class::BREAKPOINT => "debug trap",
        FETCH | DATA => "abort: memory or tables that cannot be used so",
        _ => "exception",
    };
    fault::exception(frame, format_args!("syndrome {syndrome:#x}, address {address:#x}"), name, None)
}

/// Goes the way that hardware goes at a TLB conflict abort of a load from `at`, from the vector on and back: for tests, since no emulator
/// raises one. The registers say what such an abort would leave in them.
pub(crate) fn conflict(at: u64) {
    const SYNCHRONOUS: u64 = 0x200;
    let syndrome = DATA << 26 | 1 << 25 | 0x30;
    interrupts::without(|| {
        let state = read!("daif") | read!("CurrentEL") | read!("SPSel");
        // SAFETY: all that the vector may not find as it was is said to be lost: it saves every register, and these four are written at any
        // exception, of which none comes in between, everything being masked. It returns to the label, with the state that was. The frame
        // lies below the stack pointer, where nobody keeps anything. No `nomem`: accesses stay on their sides.
        unsafe {
            asm!(
                "msr daifset, #15",
                "msr esr_el1, {syndrome}",
                "msr far_el1, {at}",
                "msr spsr_el1, {state}",
                "adr {state}, 2f",
                "msr elr_el1, {state}",
                "isb",
                "br {vector}",
                "2:",
                syndrome = in(reg) syndrome,
                at = in(reg) at,
                state = inout(reg) state => _,
                vector = in(reg) (&raw const trap_vectors) as u64 + SYNCHRONOUS,
            );
        }
    });
}
