//! Puts leased memory in the place of the file that a program makes for itself.
//!
//! The program is started with a [filter](crate::seccomp) that reports `ftruncate` to the lease's length. The supervisor looks
//! at the descriptor: a file of the right pages that has no name, no length and no pages yet is replaced by the leased one,
//! which has that length already. Every other call is executed as if nobody had asked.
//!
//! The supervisor is a process of its own, no child of the program, and lives as long as anything has the filter. If it is
//! killed, a call that waits and later calls of that one length fail with ENOSYS; nothing else changes.

use crate::client::{Connection, Lease};
use crate::memory_file::{Page, copy_seals};
use crate::own_file::OwnFile;
use crate::seccomp::{self, Call, CallAnswer, FilterError};
use crate::wire::Seen;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

/// Why a program cannot be started on a lease.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No filter. The program can be started without.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// No process for the supervisor. The program can be started without.
    #[error("cannot start the lease's supervisor: {0}")]
    Supervisor(io::Error),
    /// The supervisor was killed before it had begun. The filter is there: a program would find that its memory cannot be made.
    #[error("the lease's supervisor ended ({0}), and no program can make memory of that length here; start it anew")]
    Gone(io::Error),
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Setuid programs that this process starts get no rights from that any more (`no_new_privs`).
    pub no_new_privs: bool,
}

/// Starts a supervisor for the calling process: from here on, a file that it, or what it becomes by `exec` or starts, makes to the
/// lease's length is the leased one. For a process with one thread that is about to `exec`.
///
/// # Errors
///
/// [`AttachError`]: the lease is over, and nothing has changed but `no_new_privs`, or as [`AttachError::Gone`] says.
pub fn attach(lease: Lease) -> Result<Attached, AttachError> {
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let pair = pair.map_err(io::Error::from).and_then(|(ours, theirs)| Ok((split()?, ours, theirs)));
    let attached = match pair {
        Ok((Process::Supervisor, _, theirs)) => exit(run(theirs, lease).is_err().into()),
        Ok((Process::Program, ours, theirs)) => {
            // A supervisor that gets nothing ends when ours is closed.
            drop(theirs);
            report_to(ours, lease.about.bytes)
        }
        Err(error) => Err(AttachError::Supervisor(error)),
    };
    if attached.is_err() {
        // Nobody else says so before this process ends, and a daemon that does not hear it notices that.
        let _ = lease.end();
    }
    attached
}

/// Installs the filter and sends its listener to the supervisor.
fn report_to(supervisor: OwnedFd, length: u64) -> Result<Attached, AttachError> {
    let (listener, no_new_privs) = match seccomp::report_ftruncate(length, true) {
        Ok(listener) => (listener, false),
        Err(FilterError::Other(Errno::ACCESS)) => (seccomp::report_ftruncate(length, false)?, true),
        Err(error) => return Err(error.into()),
    };
    // The supervisor gets it, or ends, and with it the filter's power over this process but for calls of that length.
    // Nothing is waited for: the filter is there in either case.
    let sent = crate::wire::send(supervisor.as_fd(), &(), Some(listener.as_fd()));
    sent.map(|()| Attached { no_new_privs }).map_err(AttachError::Gone)
}

/// Which of the two a process is.
enum Process {
    Program,
    Supervisor,
}

/// Makes the supervisor's process, as nobody's child, so that the program does not find one that it has not started.
fn split() -> io::Result<Process> {
    // Where SIGCHLD is ignored, which outlives an exec, nobody is told how a child ended.
    // SAFETY: all zero is the default, with no flags and nothing blocked.
    let default: libc::sigaction = unsafe { mem::zeroed() };
    let own = on_child(&default)?;
    let which = split_waiting();
    on_child(&own)?;
    which
}

/// Says what becomes of SIGCHLD, and what became of it before.
fn on_child(action: &libc::sigaction) -> io::Result<libc::sigaction> {
    // SAFETY: as in `split`; it is overwritten.
    let mut before = unsafe { mem::zeroed() };
    // SAFETY: two actions that live as long as the call; the handler, if there is one, is the program's own.
    match unsafe { libc::sigaction(libc::SIGCHLD, action, &raw mut before) } {
        0 => Ok(before),
        _ => Err(io::Error::last_os_error()),
    }
}

fn split_waiting() -> io::Result<Process> {
    // SAFETY: the process has one thread, by the contract of `attach`, so the child may do what any program may.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let _ = rustix::process::setsid();
            // SAFETY: as above.
            match unsafe { libc::fork() } {
                0 => Ok(Process::Supervisor),
                pid => exit((pid < 0).into()),
            }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child just made.
            while unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            if status == 0 { Ok(Process::Program) } else { Err(io::Error::from(io::ErrorKind::OutOfMemory)) }
        }
    }
}

fn exit(code: i32) -> ! {
    // SAFETY: ends the process without running what the program had registered for its own end.
    unsafe { libc::_exit(code) }
}

/// The supervisor's life.
fn run(from_program: OwnedFd, lease: Lease) -> io::Result<()> {
    let Lease { about, file, connection } = lease;
    let others = [from_program.as_fd(), file.as_fd(), connection.as_fd()];
    keep_only(&others.map(|fd| fd.as_raw_fd()))?;
    let Some(((), Some(listener))) = crate::wire::receive::<()>(from_program.as_fd())? else { return Ok(()) };
    drop(from_program);
    seccomp::switch_at_once(listener.as_fd());
    let mut supervisor =
        Supervisor { listener, length: about.bytes, page: about.page, file: Some(file), connection, watch: None };
    supervisor.serve()
}

/// Closes everything else: a program waits for the end of pipes that its starter had open. Standard streams go nowhere.
fn keep_only(fds: &[i32]) -> io::Result<()> {
    let mut keep = fds.to_vec();
    keep.sort_unstable();
    let mut from = 3;
    for end in keep.into_iter().map(Some).chain([None]) {
        let to = end.map_or(u32::MAX, |fd| (fd as u32).wrapping_sub(1));
        if end.is_none_or(|fd| fd as u32 > from) {
            // SAFETY: closes descriptors that no value of this process uses from here on: all that it uses are kept.
            unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
        }
        from = end.map_or(u32::MAX, |fd| fd as u32 + 1);
    }
    // Now there is a free number, however few the process may have.
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    drop(null);
    rustix::process::chdir("/")?;
    let name = c"hugemm-lease";
    // SAFETY: a string with its end.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr(), 0, 0, 0) };
    Ok(())
}

struct Supervisor {
    listener: OwnedFd,
    length: u64,
    page: Page,
    /// Until it is placed; afterwards the program alone has it, so that its memory goes with it.
    file: Option<OwnedFd>,
    connection: Connection,
    /// How the program maps what it was given is looked at for a while.
    watch: Option<Watch>,
}

struct Watch {
    thread: u32,
    inode: u64,
    until: Instant,
}

/// How often, and for how long, a program's mappings are looked at.
const LOOK: Duration = Duration::from_millis(200);
const LOOKS_FOR: Duration = Duration::from_secs(10);

impl Supervisor {
    fn serve(&mut self) -> io::Result<()> {
        loop {
            let pause = self.watch.as_ref().map(|_| Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() });
            let mut wait = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut wait, pause.as_ref()) {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            let events = wait[0].revents();
            if events.contains(PollFlags::IN) {
                if let Some(call) = seccomp::receive(self.listener.as_fd())? {
                    self.answer(&call);
                }
            } else if !events.is_empty() {
                // Nothing has the filter any more.
                if self.file.is_some() {
                    self.connection.tell(Seen::Unused);
                }
                return Ok(());
            }
            self.look();
        }
    }

    /// Answers a call. An error of an answer means that nobody waits for it any more.
    fn answer(&mut self, call: &Call) {
        let placed = call.length == self.length && self.place(call).is_some();
        let answer = if placed { CallAnswer::Done } else { CallAnswer::Continue };
        let _ = seccomp::answer(self.listener.as_fd(), call, answer);
    }

    /// Replaces the call's descriptor, if it is of the kind that is waited for.
    fn place(&mut self, call: &Call) -> Option<()> {
        let leased = self.file.as_ref()?;
        // A thread in a namespace that cannot be seen from here has the number 0.
        let process = (call.thread != 0).then(|| call.thread.to_string())?;
        let found = OwnFile::look(&process, call.fd)?;
        // All that was read is of the process that waits.
        if !found.is_replaceable(self.page) || !seccomp::is_valid(self.listener.as_fd(), call) {
            return None;
        }
        copy_seals(found.file.as_fd(), leased.as_fd()).ok()?;
        // The last thing before: another thread may have closed the descriptor, and its number may be another file's by now. A
        // thread that does so between these two calls loses what it opened; it did so during a call on that very number.
        if !found.is_still_there() {
            return None;
        }
        seccomp::replace_descriptor(self.listener.as_fd(), call, leased.as_fd(), found.close_on_exec).ok()?;
        let inode = rustix::fs::fstat(leased).map_or(0, |stat| stat.st_ino);
        self.watch = Some(Watch { thread: call.thread, inode, until: Instant::now() + LOOKS_FOR });
        self.file = None;
        self.connection.tell(Seen::Placed);
        Some(())
    }

    /// Looks whether the program maps its memory privately, and says so once.
    fn look(&mut self) {
        let Some(watch) = &self.watch else { return };
        let maps = fs::read(format!("/proc/{}/maps", watch.thread)).unwrap_or_default();
        let private = is_private(&maps, watch.inode);
        if private == Some(true) {
            self.connection.tell(Seen::PrivateMapping);
        }
        if private.is_some() || Instant::now() >= watch.until {
            self.watch = None;
        }
    }
}

/// Whether an inode is mapped privately; `None` if it is not mapped. Lines as in proc_pid_maps(5).
fn is_private(maps: &[u8], inode: u64) -> Option<bool> {
    let inode = inode.to_string();
    maps.split(|&byte| byte == b'\n').find_map(|line| {
        let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let rights = words.nth(1)?;
        (words.nth(2)? == inode.as_bytes()).then(|| rights.last() == Some(&b'p'))
    })
}

/// What of a program's arguments keeps it from gaining anything, if that can be seen: a line for its user.
pub fn private_by_arguments<A: AsRef<OsStr>>(arguments: &[A]) -> Option<String> {
    arguments.iter().find_map(|argument| {
        let argument = argument.as_ref().as_bytes();
        let text = std::str::from_utf8(argument).ok()?;
        let options = || text.split(',');
        let file = options().any(|option| option == "memory-backend-file" || option == "qom-type=memory-backend-file");
        let memfd =
            options().any(|option| option == "memory-backend-memfd" || option == "qom-type=memory-backend-memfd");
        let share = options().find_map(|option| option.strip_prefix("share="));
        let private = match share {
            Some(value) => (file || memfd) && matches!(value, "off" | "no" | "false"),
            // QEMU's default: shared for a memfd, private for a file.
            None => file,
        };
        private.then(|| format!("`{text}` maps its memory privately and would copy every page; add share=on"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_read_as_the_kernel_writes_them() {
        let maps =
            b"7f00-7f10 rw-s 00000000 00:10 4711    /memfd:a b (deleted)\n7f10-7f20 rw-p 00000000 00:10 42  /x\n";
        assert_eq!(is_private(maps, 4711), Some(false));
        assert_eq!(is_private(maps, 42), Some(true));
        assert_eq!(is_private(maps, 7), None);
    }

    #[test]
    fn a_private_backend_is_named_before_it_starts() {
        for (argument, private) in [
            ("memory-backend-memfd,id=m,size=1G", false),
            ("memory-backend-memfd,id=m,size=1G,share=off", true),
            ("memory-backend-file,id=m,size=1G,mem-path=/x", true),
            ("memory-backend-file,id=m,size=1G,mem-path=/x,share=on", false),
            ("virtio-net,share=off", false),
        ] {
            assert_eq!(private_by_arguments(&["-object", argument]).is_some(), private, "{argument}");
        }
    }
}
