//! A filter that reports the system calls which give a file its length, `ftruncate` and `fallocate` from its beginning, and the descriptor
//! on which it reports them.
//!
//! The kernel knows beforehand that every other call passes, and does not run the filter for it (Linux 5.11); a length that no lease
//! could have passes, too. So no other call can ever wait for the supervisor. The filter is written out here because no maintained
//! library installs one with a listener: `seccompiler` has neither the action nor the flag, and `libseccomp` needs the C library, which a
//! static build has not.
//!
//! Source of the rules: seccomp(2) and seccomp_unotify(2).

use rustix::io::Errno;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// Byte offsets in the data that a filter sees (`struct seccomp_data`), little endian.
const NR: u32 = 0;
const ARCH_AT: u32 = 4;
const ARGS: u32 = 16;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_K) as u16;
const IF_EQUAL: u16 = JUMP | libc::BPF_JEQ as u16;
const IF_GREATER: u16 = JUMP | libc::BPF_JGT as u16;
const IF_AT_LEAST: u16 = JUMP | libc::BPF_JGE as u16;
const IF_ANY_BIT: u16 = JUMP | libc::BPF_JSET as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// A jump to the last instruction, which lets the call pass.
const PASS: u8 = u8::MAX;

fn load(at: u32) -> libc::sock_filter {
    libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: at }
}

/// Skips as many instructions as it says, where the loaded word is so, and where it is not.
fn jump(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Which lengths are reported: whole pages, no fewer and no more bytes than the bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Bytes of a page, a power of two of 32 bits.
    pub page: u64,
    /// From the least to the most.
    pub bounds: RangeInclusive<u64>,
}

impl Lengths {
    /// Whether it is one of them.
    pub fn contain(&self, length: u64) -> bool {
        self.bounds.contains(&length) && length.is_multiple_of(self.page)
    }

    /// Goes on where argument `number` is one of them.
    fn check(&self, number: u32) -> [libc::sock_filter; 12] {
        let (low, high) = (ARGS + 8 * number, ARGS + 8 * number + 4);
        let words = |bytes: u64| (bytes as u32, (bytes >> 32) as u32);
        let ((least_low, least_high), (most_low, most_high)) = (words(*self.bounds.start()), words(*self.bounds.end()));
        [
            load(high),
            jump(IF_GREATER, least_high, 3, 0),
            jump(IF_EQUAL, least_high, 0, PASS),
            load(low),
            jump(IF_AT_LEAST, least_low, 0, PASS),
            load(high),
            jump(IF_GREATER, most_high, PASS, 0),
            jump(IF_EQUAL, most_high, 0, 2),
            load(low),
            jump(IF_GREATER, most_low, PASS, 0),
            load(low),
            jump(IF_ANY_BIT, self.page as u32 - 1, PASS, 0),
        ]
    }
}

/// The program: of this architecture, reports `ftruncate(any, length)` and `fallocate(any, 0, 0, length)`, allows all else.
fn program(lengths: &Lengths) -> Vec<libc::sock_filter> {
    let give = |answer| [jump(RETURN, answer, 0, 0)];
    let is_zero = |at| [load(at), jump(IF_EQUAL, 0, 0, PASS)];
    let report = give(libc::SECCOMP_RET_USER_NOTIF);
    // A mode is a word; an offset has two.
    let whole_file = [ARGS + 8, ARGS + 16, ARGS + 20].map(is_zero).concat();
    let allocates = [&whole_file[..], &lengths.check(3), &report].concat();
    let truncates = [&lengths.check(1)[..], &report].concat();
    let which = [
        load(ARCH_AT),
        jump(IF_EQUAL, ARCH, 0, PASS),
        load(NR),
        jump(IF_EQUAL, libc::SYS_ftruncate as u32, 1, 0),
        jump(IF_EQUAL, libc::SYS_fallocate as u32, truncates.len() as u8, PASS),
    ];
    let mut program = [&which[..], &truncates, &allocates, &give(libc::SECCOMP_RET_ALLOW)].concat();
    let last = program.len() - 1;
    for (at, step) in program.iter_mut().enumerate() {
        for skip in [&mut step.jt, &mut step.jf] {
            if *skip == PASS {
                *skip = (last - at - 1) as u8;
            }
        }
    }
    program
}

/// What keeps a filter from being installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// Another filter of this process tree has a listener already, and Linux allows one.
    #[error("another seccomp listener is active in this process tree (a container runtime's, say); Linux allows one")]
    Taken,
    /// The kernel has no listeners (before 5.5), or seccomp is switched off.
    #[error("this kernel has no seccomp listeners (Linux 5.5 or later with CONFIG_SECCOMP_FILTER is needed)")]
    Unsupported,
    /// Anything else.
    #[error("seccomp: {0}")]
    Other(Errno),
}

/// Installs the filter for the calling thread and everything that it starts; for ever. Call it in a process with one thread.
/// Returns the listener, which is closed on exec.
///
/// `keep_privileges`: leave `no_new_privs` alone, which needs CAP_SYS_ADMIN; setuid programs that the caller starts keep working.
///
/// # Errors
///
/// [`FilterError`]; nothing is installed then (`no_new_privs` may be set).
pub fn report_lengths(lengths: &Lengths, keep_privileges: bool) -> Result<OwnedFd, FilterError> {
    if !keep_privileges {
        // SAFETY: sets a flag of the calling thread.
        if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
            return Err(FilterError::Other(last_error()));
        }
    }
    let mut program = program(lengths);
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // Before Linux 5.16 a filter also switched speculation past stores off, for the program and all that it starts: it is taken for a
    // sandbox there. This one is none.
    let listener = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // A signal that does not kill waits until the call is answered, or a half-answered call would be begun again and find
    // its descriptor changed. Linux 5.19; without it such a signal is as rare as before.
    let flags = [listener | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, listener];
    let mut error = Errno::INVAL;
    for flags in flags {
        // SAFETY: the program outlives the call, which copies it.
        let fd = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter) };
        if fd >= 0 {
            // SAFETY: a new descriptor, nobody else's.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
        }
        error = last_error();
        if error != Errno::INVAL {
            break;
        }
    }
    Err(match error {
        Errno::BUSY => FilterError::Taken,
        Errno::INVAL | Errno::NOSYS => FilterError::Unsupported,
        other => FilterError::Other(other),
    })
}

/// Why the last system call of this thread failed.
pub(crate) fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// A call that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Names the call towards the kernel.
    pub id: u64,
    /// The calling thread, as this process sees its number; 0 if it is in a namespace that cannot be seen from here.
    pub thread: u32,
    /// The descriptor whose file it gives a length.
    pub fd: u32,
    /// The length.
    pub length: u64,
}

/// How a call is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallAnswer {
    /// The kernel executes it as if nobody had asked.
    Continue,
    /// It is said to have succeeded.
    Done,
    /// It is said to have failed: no memory.
    NoMemory,
}

#[repr(C)]
struct AddFd {
    id: u64,
    flags: u32,
    from: u32,
    to: u32,
    to_flags: u32,
}

const RECEIVE: libc::c_ulong = request(3, 0, size_of::<libc::seccomp_notif>());
const SEND: libc::c_ulong = request(3, 1, size_of::<libc::seccomp_notif_resp>());
const IS_VALID: libc::c_ulong = request(1, 2, size_of::<u64>());
const ADD_FD: libc::c_ulong = request(1, 3, size_of::<AddFd>());
const SET_FLAGS: libc::c_ulong = request(1, 4, size_of::<u64>());

/// The number of an ioctl of seccomp: direction (1 write, 3 both), number, size of what is passed.
const fn request(direction: u64, number: u64, size: usize) -> libc::c_ulong {
    (direction << 30 | (size as u64) << 16 | (b'!' as u64) << 8 | number) as libc::c_ulong
}

fn ioctl<T>(listener: BorrowedFd<'_>, request: libc::c_ulong, argument: &mut T) -> Result<i32, Errno> {
    // SAFETY: each request above is called with the type whose size is in its number.
    let answer = unsafe { libc::ioctl(listener.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
    if answer < 0 { Err(last_error()) } else { Ok(answer) }
}

/// Takes the next call. Waits for one. `None` if the one that was there is gone (its thread was killed).
///
/// # Errors
///
/// The kernel's.
pub fn receive(listener: BorrowedFd<'_>) -> Result<Option<Call>, Errno> {
    // SAFETY: integers, for which zero is a value; the kernel wants them zero.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    match ioctl(listener, RECEIVE, &mut call) {
        Ok(_) => {}
        Err(Errno::NOENT | Errno::INTR) => return Ok(None),
        Err(error) => return Err(error),
    }
    let (args, allocates) = (call.data.args, i64::from(call.data.nr) == libc::SYS_fallocate);
    let length = args[if allocates { 3 } else { 1 }];
    Ok(Some(Call { id: call.id, thread: call.pid, fd: args[0] as u32, length }))
}

/// Has the kernel run whoever waits for a call at once, on the same CPU, and the caller again when it is answered; for the time of a
/// program's start. Linux 6.6; without it they wait for each other as processes do.
pub fn switch_at_once(listener: BorrowedFd<'_>) {
    // SAFETY: changes a flag of the listener; the argument is a number.
    unsafe { libc::ioctl(listener.as_raw_fd(), SET_FLAGS as _, 1usize) };
}

/// Whether the call still waits, so that what has been read of its process was of its process.
pub fn is_valid(listener: BorrowedFd<'_>, call: &Call) -> bool {
    ioctl(listener, IS_VALID, &mut { call.id }).is_ok()
}

/// Puts `file` in the place of the call's descriptor in the calling process. The call goes on waiting.
///
/// # Errors
///
/// The kernel's: `NOENT` if the call waits no more, `MFILE` if the number is past the process's limit.
pub fn replace_descriptor(
    listener: BorrowedFd<'_>,
    call: &Call,
    file: BorrowedFd<'_>,
    close_on_exec: bool,
) -> Result<(), Errno> {
    let mut place = AddFd {
        id: call.id,
        flags: libc::SECCOMP_ADDFD_FLAG_SETFD as u32,
        from: file.as_raw_fd() as u32,
        to: call.fd,
        to_flags: if close_on_exec { libc::O_CLOEXEC as u32 } else { 0 },
    };
    ioctl(listener, ADD_FD, &mut place).map(drop)
}

/// Answers a call.
///
/// # Errors
///
/// The kernel's: `NOENT` if the call waits no more.
pub fn answer(listener: BorrowedFd<'_>, call: &Call, answer: CallAnswer) -> Result<(), Errno> {
    let (error, flags) = match answer {
        CallAnswer::Continue => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        CallAnswer::Done => (0, 0),
        CallAnswer::NoMemory => (-libc::ENOMEM, 0),
    };
    let mut response = libc::seccomp_notif_resp { id: call.id, val: 0, error, flags };
    ioctl(listener, SEND, &mut response).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers as the kernel's header has them on every little-endian architecture of ours.
    #[test]
    fn the_requests_have_the_kernels_numbers() {
        let ours = [RECEIVE, SEND, IS_VALID, ADD_FD, SET_FLAGS];
        assert_eq!(ours, [0xc050_2100, 0xc018_2101, 0x4008_2102, 0x4018_2103, 0x4008_2104]);
    }

    /// Interprets the program as the kernel does.
    fn run(program: &[libc::sock_filter], arch: u32, nr: i64, args: [u64; 4]) -> bool {
        let (mut at, mut loaded) = (0, 0);
        loop {
            let step = program[at];
            let goes = |is_so: bool| usize::from(if is_so { step.jt } else { step.jf });
            match step.code {
                LOAD => {
                    let words = args.map(|arg| [arg as u32, (arg >> 32) as u32]).concat();
                    loaded = match step.k {
                        NR => nr as u32,
                        ARCH_AT => arch,
                        other => words[(other - ARGS) as usize / 4],
                    }
                }
                IF_EQUAL => at += goes(loaded == step.k),
                IF_GREATER => at += goes(loaded > step.k),
                IF_AT_LEAST => at += goes(loaded >= step.k),
                IF_ANY_BIT => at += goes(loaded & step.k != 0),
                RETURN => return step.k == libc::SECCOMP_RET_USER_NOTIF,
                other => panic!("instruction {other:#x}"),
            }
            at += 1;
        }
    }

    /// What is reported is what the type says, at both ends of it and on both sides of what half a word can say.
    #[test]
    fn lengths_that_a_lease_could_have_are_reported_and_all_other_calls_pass() {
        const PAGE: u64 = 2 << 20;
        let all = [PAGE..=u64::MAX >> 1, 7 * PAGE..=7 * PAGE, (1 << 32)..=(1 << 33) + PAGE, PAGE..=(1 << 32) - PAGE];
        let ends = all.clone().map(|bounds| [*bounds.start(), *bounds.end()]).concat();
        let some = [0, 1, PAGE, 1 << 32, (1 << 32) - PAGE, 1 << 33, 3 << 32, 1 << 63, u64::MAX];
        for bounds in all {
            let lengths = Lengths { page: PAGE, bounds };
            let program = program(&lengths);
            let tried = ends
                .iter()
                .chain(&some)
                .flat_map(|&n| [0, 1, PAGE - 1, PAGE].map(|m| [n.wrapping_add(m), n.wrapping_sub(m)]));
            for length in tried.flatten() {
                let (truncate, allocate) = ([9, length, 5, 6], [9, 0, 0, length]);
                assert_eq!(
                    run(&program, ARCH, libc::SYS_ftruncate, truncate),
                    lengths.contain(length),
                    "{length:#x} {lengths:?}"
                );
                assert_eq!(
                    run(&program, ARCH, libc::SYS_fallocate, allocate),
                    lengths.contain(length),
                    "{length:#x} {lengths:?}"
                );
                for other in [[9, 1, 0, length], [9, 0, 1, length], [9, 0, 1 << 32, length]] {
                    assert!(!run(&program, ARCH, libc::SYS_fallocate, other), "{other:x?}");
                }
                assert!(!run(&program, ARCH ^ 1, libc::SYS_ftruncate, truncate));
                assert!(!run(&program, ARCH, libc::SYS_write, truncate));
                // Whoever passes a word for the mode leaves what is above it as it was.
                assert_eq!(run(&program, ARCH, libc::SYS_fallocate, [9, 7 << 32, 0, length]), lengths.contain(length));
            }
        }
    }
}
