//! Carries out, in a signal handler, the real encodings of store instructions that this CPU lacks.
//!
//! SIGILL brings the instructions that the CPU refuses. For those it has, the trap flag brings a SIGTRAP before each
//! instruction, so that the same emulator can be put in the CPU's place and compared with it.

pub(crate) mod decode;

use core::ffi::c_void;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use decode::{Decoded, Op, decode};

/// Instructions carried out since [`install`]. Written by the handler, on the thread that the tests run.
static EMULATED: AtomicUsize = AtomicUsize::new(0);

/// One user at a time: signal handlers and the count belong to the whole process.
static TURN: Mutex<()> = Mutex::new(());

/// The handlers are in place while this lives.
pub(crate) struct Emulator {
    old: [(i32, libc::sigaction); 2],
    _turn: MutexGuard<'static, ()>,
}

impl Emulator {
    pub(crate) fn install() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        EMULATED.store(0, Relaxed);
        let old = [libc::SIGILL, libc::SIGTRAP].map(|signal| {
            // SAFETY: all-zero is a valid `sigaction`; the handler has the signature that SA_SIGINFO asks for and
            // does only what is safe in a signal handler.
            unsafe {
                let mut new: libc::sigaction = core::mem::zeroed();
                let mut old: libc::sigaction = core::mem::zeroed();
                new.sa_sigaction = handler as *const () as usize;
                new.sa_flags = libc::SA_SIGINFO;
                assert_eq!(libc::sigaction(signal, &new, &mut old), 0);
                (signal, old)
            }
        });
        Self { old, _turn: turn }
    }

    /// How many instructions have been emulated.
    pub(crate) fn count(&self) -> usize {
        EMULATED.load(Relaxed)
    }

    /// Runs `f` one instruction at a time, with the emulator in the place of every store it knows.
    pub(crate) fn instead_of_the_cpu(&self, f: impl FnOnce()) {
        // SAFETY: setting the trap flag raises SIGTRAP after each instruction, which this value's handler returns from;
        // the pushes and pops are balanced and the red zone is not in use around an asm block that may use the stack.
        unsafe { core::arch::asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
        f();
        // SAFETY: as above; clears the trap flag.
        unsafe { core::arch::asm!("pushfq", "and qword ptr [rsp], -0x101", "popfq") };
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        for (signal, old) in &self.old {
            // SAFETY: puts back what `install` found.
            unsafe { libc::sigaction(*signal, old, core::ptr::null_mut()) };
        }
    }
}

/// Where the kernel's frame holds each general register, in the order of their numbers.
const GPR: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

unsafe extern "C" fn handler(signal: i32, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a ucontext that is this handler's until it returns.
    let machine = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext };
    let mut done = 0;
    // Under the trap flag, also the known instructions that follow at once: after the return the first would be run
    // by the CPU.
    loop {
        let gpr = GPR.map(|i| machine.gregs[i as usize] as u64);
        let rip = machine.gregs[libc::REG_RIP as usize] as u64;
        // SAFETY: the decoder fetches only bytes of the instruction that the CPU was about to run.
        let fetch = |at: u64| unsafe { (at as *const u8).read() };
        let Some(Decoded { op, len }) = decode(&fetch, rip, &gpr) else { break };
        // SAFETY: the program was about to store there itself.
        unsafe { carry_out(op, machine.fpregs.cast()) };
        machine.gregs[libc::REG_RIP as usize] = (rip + len) as i64;
        done += 1;
        if signal == libc::SIGILL {
            break;
        }
    }
    EMULATED.fetch_add(done, Relaxed);
    if signal == libc::SIGILL && done == 0 {
        // Not ours: let it be fatal.
        // SAFETY: `signal` is safe in a handler; the instruction is run again and kills the process.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
}

/// # Safety
/// The memory that `op` reads and writes may be accessed, and `fp` is the kernel's frame of vector registers.
unsafe fn carry_out(op: Op, fp: *const u8) {
    // SAFETY: the caller's promises.
    unsafe {
        match op {
            Op::Clzero { addr } => (addr as *mut u8).write_bytes(0, 64),
            Op::Movdir64b { dst, src } => {
                // A misaligned destination is a #GP on the CPU.
                if dst % 64 != 0 {
                    libc::abort();
                }
                let line = (src as *const [u8; 64]).read();
                (dst as *mut [u8; 64]).write(line);
            }
            Op::Vmovntdq { dst, reg, bytes } => {
                if !(dst as usize).is_multiple_of(bytes) {
                    libc::abort();
                }
                let value = vector_register(fp, reg);
                (dst as *mut u8).copy_from_nonoverlapping(value.as_ptr(), bytes);
            }
        }
    }
}

/// A vector register as the program left it: 128 bits from the FXSAVE area, 128 more from the AVX part, and zeros above
/// them, which is all that a CPU without AVX-512 can have put there.
///
/// # Safety
/// `fp` is the kernel's signal frame of vector registers (or null): the standard XSAVE format.
unsafe fn vector_register(fp: *const u8, reg: u8) -> [u8; 64] {
    const XMM: usize = 160;
    const MAGIC: usize = 464;
    const XSTATE_BV: usize = 512;
    const YMM_HIGH: usize = 576;
    let mut value = [0; 64];
    if fp.is_null() || reg > 15 {
        // SAFETY: `abort` may be called in a handler. No CPU without AVX-512 has such a register.
        unsafe { libc::abort() };
    }
    let reg = usize::from(reg);
    // SAFETY: the FXSAVE area is always there; what follows it is where the kernel's magic number says so.
    unsafe {
        value[..16].copy_from_slice(&fp.add(XMM + 16 * reg).cast::<[u8; 16]>().read());
        let extended = fp.add(MAGIC).cast::<u32>().read() == 0x4650_5853;
        if extended && fp.add(XSTATE_BV).cast::<u64>().read() & 4 != 0 {
            value[16..32].copy_from_slice(&fp.add(YMM_HIGH + 16 * reg).cast::<[u8; 16]>().read());
        }
    }
    value
}
