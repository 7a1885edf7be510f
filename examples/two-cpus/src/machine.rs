//! What every kernel of a PC with two CPUs has, whoever manages its memory: gates, interrupt controllers, the second CPU's start.

use crate::kernel::{page_fault, second_cpu, shootdown, timer};
use alloc::{boxed::Box, vec};
use core::arch::{global_asm, naked_asm};
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use hugemm::prelude::PhysAddr;
use x86_64::VirtAddr;
use x86_64::instructions::{hlt, interrupts, port::Port};
use x86_64::registers::control::{Cr4, Cr4Flags};
use x86_64::structures::idt::InterruptDescriptorTable;

/// Registers of the local interrupt controller of whichever CPU looks (Intel SDM, volume 3, "Local APIC").
pub const REGISTERS: PhysAddr = PhysAddr::new(0xfee0_0000);
const END: usize = 0xb0;
const SPURIOUS: usize = 0xf0;
const COMMAND: usize = 0x300;
const TARGET: usize = 0x310;
const TIMER: usize = 0x320;
const TIMER_START: usize = 0x380;
const TIMER_DIVIDE: usize = 0x3e0;

/// Vectors.
const TICK: u8 = 0x20;
pub const SHOOTDOWN: u8 = 0x22;

/// Where the second CPU starts: a page below 1 MiB that is RAM and that nobody manages.
const TRAMPOLINE: usize = 0x8000;

fn write(register: usize, value: u32) {
    // SAFETY: the controller's registers are mapped one to one, uncached; what is written is the caller's business.
    unsafe { with_exposed_provenance_mut::<u32>(REGISTERS.get() as usize + register).write_volatile(value) };
}

/// Says that an interrupt has been dealt with.
pub fn end_of_interrupt() {
    write(END, 0);
}

fn command(cpu: u32, what: u32) {
    interrupts::without_interrupts(|| {
        write(TARGET, cpu << 24);
        write(COMMAND, what);
    });
}

/// Interrupts another CPU, after all earlier stores.
pub fn interrupt(cpu: u32, vector: u8) {
    core::sync::atomic::fence(Ordering::SeqCst);
    command(cpu, 1 << 14 | u32::from(vector));
}

/// No more ticks on the calling CPU.
pub fn stop_timer() {
    write(TIMER, 1 << 16);
}

/// Interrupts, on and nothing else, for good.
pub fn halt() -> ! {
    loop {
        hlt();
    }
}

macro_rules! gate {
    ($name:ident, $handler:path, $before:literal) => {
        /// Saves what the handler may change: this kernel has no vector registers. The stack is aligned at the call: the CPU has
        /// pushed 48 bytes, an error code among them, or a word in its place.
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!($before, "push rax", "push rcx", "push rdx", "push rsi", "push rdi", "push r8", "push r9", "push r10", "push r11",
                "sub rsp, 8", "mov rdi, cr2", "mov rsi, [rsp + 80]", "mov rdx, [rsp + 104]", "shr rdx, 9", "and edx, 1", "cld",
                "call {handler}", "add rsp, 8",
                "pop r11", "pop r10", "pop r9", "pop r8", "pop rdi", "pop rsi", "pop rdx", "pop rcx", "pop rax", "add rsp, 8", "iretq",
                handler = sym $handler)
        }
    };
}

gate!(page_fault_gate, page_fault, "");
gate!(timer_gate, timer, "push 0");
gate!(shootdown_gate, shootdown, "push 0");
gate!(other_gate, other, "push 0");

/// What nobody expects.
extern "C" fn other() {
    panic!("an exception or interrupt that nobody expects");
}

static GATES: AtomicPtr<InterruptDescriptorTable> = AtomicPtr::new(null_mut());

/// Gates, interrupt controller and timer of the calling CPU; interrupts are on from here on. The boot CPU first.
pub fn start_interrupts() {
    if GATES.load(Ordering::Relaxed).is_null() {
        let mut gates = Box::new(InterruptDescriptorTable::new());
        let at = |gate: extern "C" fn()| VirtAddr::new(gate as *const () as u64);
        // SAFETY: the gates save and restore what they change, and return as a handler of their kind does.
        unsafe {
            gates.double_fault.set_handler_addr(at(other_gate));
            gates.general_protection_fault.set_handler_addr(at(other_gate));
            gates.invalid_opcode.set_handler_addr(at(other_gate));
            gates.page_fault.set_handler_addr(at(page_fault_gate));
            gates[TICK].set_handler_addr(at(timer_gate));
            gates[SHOOTDOWN].set_handler_addr(at(shootdown_gate));
        }
        GATES.store(Box::into_raw(gates), Ordering::Relaxed);
        // The old controllers share vectors with exceptions: silence them.
        for port in [0x21_u16, 0xa1] {
            // SAFETY: their mask registers, or nobody's.
            unsafe { Port::new(port).write(0xff_u8) };
        }
    }
    // SAFETY: leaked above; global pages are what the kernel's tables have.
    unsafe {
        (*GATES.load(Ordering::Relaxed)).load_unsafe();
        Cr4::update(|cr4| cr4.insert(Cr4Flags::PAGE_GLOBAL));
    }
    write(SPURIOUS, 0x1ff);
    write(TIMER_DIVIDE, 3);
    write(TIMER, 1 << 17 | u32::from(TICK));
    write(TIMER_START, 50_000);
    interrupts::enable();
}

/// The second CPU's stack.
static STACK: AtomicU64 = AtomicU64::new(0);

/// Starts the CPU with number 1, which is what hardware calls it too.
pub fn start_second_cpu() {
    let stack = vec![0_u128; 4096].leak();
    STACK.store(stack.as_mut_ptr_range().end.expose_provenance() as u64, Ordering::Release);
    let (from, bytes) = (&raw const trampoline, (&raw const trampoline_end).addr() - (&raw const trampoline).addr());
    // SAFETY: the code, to a page that nobody uses.
    unsafe { from.copy_to(with_exposed_provenance_mut(TRAMPOLINE), bytes) };
    // INIT, 10 ms, STARTUP: as the manual wants it.
    command(1, 5 << 8 | 1 << 14);
    for _ in 0..10_000 {
        // SAFETY: a port of diagnostic cards; it takes a microsecond.
        unsafe { Port::new(0x80).write(0_u8) };
    }
    command(1, 6 << 8 | 1 << 14 | (TRAMPOLINE >> 12) as u32);
}

unsafe extern "C" {
    static trampoline: u8;
    static trampoline_end: u8;
}

global_asm!(
    r#"
    .section .rodata.trampoline, "a"
    .global trampoline
    .global trampoline_end
    .code16
trampoline:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl trampoline_gdt - trampoline + {trampoline}
    # CR4.PAE, the boot tables, EFER.LME and EFER.NXE, CR0.PG, CR0.WP and CR0.PE: from real mode to 64 bits at once.
    movl $0x20, %eax
    movl %eax, %cr4
    movl $boot_pml4, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x900, %eax
    wrmsr
    movl %cr0, %eax
    andl $0x9fffffff, %eax
    orl $0x80010001, %eax
    movl %eax, %cr0
    ljmpl $8, $second_long
    .balign 4
trampoline_gdt:
    .word 23
    .long boot_gdt
trampoline_end:

    .section .boot, "ax"
    .code64
second_long:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movq {stack}(%rip), %rsp
    xorl %ebp, %ebp
    call {main}
    ud2

    .text
    "#,
    trampoline = const TRAMPOLINE,
    stack = sym STACK,
    main = sym second_cpu,
    options(att_syntax)
);
