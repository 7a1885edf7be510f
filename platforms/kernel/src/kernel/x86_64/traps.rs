//! What happens at an exception or an interrupt: one gate per vector, one way in and out, one dispatch.

use super::super::page_fault::{self, PageFault};
use super::super::{fault, percpu, stack, tlb, watchdog};
use super::{controller, segments};
use core::arch::global_asm;
use core::cell::UnsafeCell;
use hugemm_vm::FaultAccess;
use x86_64::registers::control::Cr2;

/// Vectors of this kernel's interrupts.
pub(super) mod vector {
    /// The timer of a CPU's interrupt controller.
    pub(crate) const TIMER: u8 = 0x20;
    /// There is work: only there to end a halt.
    pub(crate) const WAKE: u8 = 0x21;
    /// Another CPU wants something invalidated.
    pub(crate) const SHOOTDOWN: u8 = 0x22;
    /// What an interrupt controller sends when a request has vanished. Its low four bits are set, as old ones want it.
    pub(crate) const SPURIOUS: u8 = 0xff;
}

const NMI: u64 = 2;
const DOUBLE_FAULT: u64 = 8;
const PAGE_FAULT: u64 = 14;
const MACHINE_CHECK: u64 = 18;

/// The registers at the moment of a trap, as `trap_common` pushes them.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Frame {
    /// r15, r14, r13, r12, r11, r10, r9, r8, rdi, rsi.
    pub r15_to_rsi: [u64; 10],
    /// Frame pointer.
    pub rbp: u64,
    /// rbx, rdx, rcx, rax.
    pub rbx_to_rax: [u64; 4],
    /// Which gate.
    pub vector: u64,
    /// What the CPU says about it; 0 where it says nothing.
    pub error: u64,
    /// Where it was.
    pub rip: u64,
    /// Code segment.
    pub cs: u64,
    /// Flags.
    pub rflags: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// Stack segment.
    pub ss: u64,
}

impl Frame {
    /// Where it was.
    pub(crate) fn at(&self) -> u64 {
        self.rip
    }

    /// Where the chain of frames begins.
    pub(crate) fn chain(&self) -> u64 {
        self.rbp
    }

    /// Goes on somewhere else.
    pub(crate) fn go_on_at(&mut self, at: u64) {
        self.rip = at;
    }
}

/// Where the caller's chain of frames begins.
#[inline(always)]
pub(crate) fn chain() -> u64 {
    let rbp: u64;
    // SAFETY: reads a register.
    unsafe { core::arch::asm!("mov {}, rbp", out(reg) rbp, options(nostack, nomem, preserves_flags)) };
    rbp
}

global_asm!(
    r#"
    .text
    .balign 16
    .global trap_stubs
    .type trap_stubs, @function
trap_stubs:
    .set vector, 0
    .rept 256
    .balign 16
    # Vectors for which the CPU pushes no error code get a zero.
    .if !((vector == 8) || ((vector >= 10) && (vector <= 14)) || (vector == 17) || (vector == 21) || (vector == 29) || (vector == 30))
    pushq $0
    .endif
    pushq $vector
    jmp trap_common
    .set vector, vector + 1
    .endr

    .type trap_common, @function
trap_common:
    cld
    pushq %rax
    pushq %rcx
    pushq %rdx
    pushq %rbx
    pushq %rbp
    pushq %rsi
    pushq %rdi
    pushq %r8
    pushq %r9
    pushq %r10
    pushq %r11
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    # The CPU aligned the stack to 16 and pushed 5 words; with 2 of the stub and 15 here it is aligned again.
    movq %rsp, %rdi
    call {entry}
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %r11
    popq %r10
    popq %r9
    popq %r8
    popq %rdi
    popq %rsi
    popq %rbp
    popq %rbx
    popq %rdx
    popq %rcx
    popq %rax
    addq $16, %rsp
    iretq
    "#,
    entry = sym trap_entry,
    options(att_syntax)
);

unsafe extern "C" {
    /// 256 stubs of 16 bytes.
    static trap_stubs: [u8; 16 * 256];
}

/// An interrupt gate: 16 bytes, as the CPU reads them.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gate {
    low: u64,
    high: u64,
}

impl Gate {
    const EMPTY: Gate = Gate { low: 0, high: 0 };

    /// A gate to `handler` in the code segment (selector 8), interrupts off, on emergency stack `ist` (0: none).
    fn to(handler: u64, ist: u64) -> Gate {
        const PRESENT_INTERRUPT_GATE: u64 = 0x8e00 << 32;
        const CODE: u64 = 8 << 16;
        let low = handler & 0xffff | CODE | ist << 32 | PRESENT_INTERRUPT_GATE | (handler >> 16 & 0xffff) << 48;
        Gate { low, high: handler >> 32 }
    }
}

struct Idt(UnsafeCell<[Gate; 256]>);

// SAFETY: the boot CPU fills the table in its call of `load`, before the others start; they only load it.
unsafe impl Sync for Idt {}

static IDT: Idt = Idt(UnsafeCell::new([Gate::EMPTY; 256]));

/// Loads descriptor tables and gates on the calling CPU; the boot CPU fills the gates first.
pub(crate) fn load(own: &'static segments::Own) {
    segments::load(own);
    let table = IDT.0.get();
    if percpu::current() == 0 {
        for vector in 0..256_u64 {
            let ist = match vector {
                NMI => segments::NMI + 1,
                DOUBLE_FAULT => segments::DOUBLE_FAULT + 1,
                MACHINE_CHECK => segments::MACHINE_CHECK + 1,
                _ => 0,
            };
            let stub = &raw const trap_stubs as u64 + 16 * vector;
            // SAFETY: alone; see `Idt`.
            unsafe { (*table)[vector as usize] = Gate::to(stub, ist.into()) };
        }
    }
    let pointer = x86_64::structures::DescriptorTablePointer {
        limit: (size_of::<[Gate; 256]>() - 1) as u16,
        base: x86_64::VirtAddr::from_ptr(table),
    };
    // SAFETY: the table is static, full, and its gates lead to stubs that save and restore everything.
    unsafe { x86_64::instructions::tables::lidt(&pointer) };
}

/// Every trap. Interrupts are off.
extern "C" fn trap_entry(frame: &mut Frame) {
    match (frame.vector, frame.vector as u8) {
        (_, vector::TIMER) => {
            controller::end_of_interrupt();
            watchdog::tick(frame);
        }
        (_, vector::WAKE) => controller::end_of_interrupt(),
        (_, vector::SHOOTDOWN) => {
            controller::end_of_interrupt();
            tlb::serve();
        }
        (_, vector::SPURIOUS) => {}
        (NMI, _) => fault::interrupted(frame),
        (PAGE_FAULT, _) => page_fault(frame),
        _ => exception(frame),
    }
}

/// A page fault, read from its error code (Intel SDM, volume 3, 5.7).
fn page_fault(frame: &mut Frame) {
    const INTERRUPTS: u64 = 1 << 9;
    let Some(tried) = FaultAccess::from_x86_error(frame.error) else { exception(frame) };
    let cause = if frame.error & 1 != 0 { fault::DENIED } else { fault::ABSENT };
    let fault = PageFault { at: Cr2::read_raw(), tried, cause, interrupts: frame.rflags & INTERRUPTS != 0 };
    page_fault::handle(frame, &fault);
}

/// What nobody expects.
fn exception(frame: &Frame) -> ! {
    let name = match frame.vector {
        0 => "division error",
        1 | 3 => "debug trap",
        6 => "invalid instruction",
        8 => "double fault",
        13 => "general protection fault",
        14 => "page fault that no page cures: an entry has reserved bits set, say",
        16 | 19 => "floating point exception",
        17 => "misaligned access",
        18 => "machine check: the hardware reports an error",
        vector if vector >= 32 => "interrupt that nobody expects",
        _ => "exception",
    };
    let (vector, error) = (frame.vector, frame.error);
    // A double fault is mostly a page fault whose handler could not be entered: there was no stack.
    let overflown = || stack::overflown(frame.rsp.saturating_sub(8)).or_else(|| stack::overflown(Cr2::read_raw()));
    let overflown = if vector == DOUBLE_FAULT { overflown() } else { None };
    fault::exception(frame, format_args!("vector {vector}, error code {error:#x}"), name, overflown)
}
