//! What the first word makes of this program: a daemon, a client, a keeper of memory, or the program that a client becomes.

use crate::LEASE;
use crate::support::PAGE;
use hugemm_lease::client::{ClientError, Connection, Lease};
use hugemm_lease::daemon::{Daemon, PoolConfig};
use hugemm_lease::filler::{Manners, fill};
use hugemm_lease::listener::Listener;
use hugemm_lease::memory_file::Page;
use hugemm_lease::seccomp::{FilterError, Lengths, report_lengths};
use hugemm_lease::server::serve;
use hugemm_lease::service;
use hugemm_lease::stock::Shapes;
use hugemm_lease::supervisor::{AttachError, Lending, Say, attach};
use hugemm_lease::wire::{KeepAs, Wish, receive, send};
use rustix::fs::{FallocateFlags, MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Signal;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(crate) fn me(words: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(words);
    command
}

pub(crate) fn daemon(path: &Path) {
    // Tests that hang are ended by a signal, and nobody else would end it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a process");
    let shapes = Shapes::new(&[(LEASE, 1)], LEASE, PAGE).expect("a shape");
    // SAFETY: the first thing that this process does with descriptors.
    let inherited = unsafe { service::inherited() }.expect("what is passed makes sense");
    let listener = inherited.listener.map_or_else(|| Listener::bind(path, false), Ok).expect("a socket");
    let owner = rustix::process::geteuid().as_raw();
    let daemon = Arc::new(Daemon::new(PoolConfig::new(Page::Huge2M, shapes, LEASE, owner)));
    let (never, _open) = std::io::pipe().expect("a pipe");
    daemon.adopt(inherited.files);
    daemon.adopt_kept(inherited.kept);
    service::ready();
    std::thread::scope(|scope| {
        scope.spawn(|| fill(&daemon, &Manners::default()));
        let _ = serve(&daemon, &listener, never.as_fd());
    });
}

/// Leases, and becomes the program, on the lease if there is one. A daemon that is not there yet is waited for, unless it has
/// been there.
pub(crate) fn client(socket: &Path, role: &str) {
    if role == "listened" {
        // Some container runtimes do this.
        std::mem::forget(listen(true).or_else(|_| listen(false)).expect("a listener"));
    }
    if role == "filtered" {
        allow_all();
    }
    if let "threads" | "joined" = role {
        std::thread::spawn(if role == "threads" { std::thread::park } else { || std::thread::sleep(ENDS_SOON) });
    }
    if role == "ignores" {
        // What some shells and service managers start is started like this.
        // SAFETY: no handler.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    }
    let (lending, role) = match role.strip_prefix(UP_TO) {
        Some(role) => (when_there(socket, |daemon| Lending::up_to(daemon, LEASE, None, None)), role),
        None => (lease(socket).map(Lending::one), role),
    };
    match lending {
        Ok(lending) => match attach(lending, role == "required", Say::Each) {
            // SAFETY: as above.
            Ok(()) if role == "ignores" && unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) } != libc::SIG_IGN => {
                println!("SIGCHLD is not ignored any more")
            }
            Ok(()) => {}
            Err(AttachError::Filter(FilterError::Taken)) => println!("taken"),
            Err(error) => println!("not attached: {error}"),
        },
        Err(error) => println!("not leased: {error}"),
    }
    panic!("{}", me(&["program", role]).exec());
}

/// For how long a thread is there that may be joined already, longer than it takes to lease, and less than is waited for it.
const ENDS_SOON: Duration = Duration::from_millis(20);

/// How a role begins whose memory is leased when it is made.
pub(crate) const UP_TO: &str = "up-to-";

/// A listener as others have one.
fn listen(keep_privileges: bool) -> Result<OwnedFd, FilterError> {
    report_lengths(&Lengths { page: 1, bounds: 12_345..=12_345 }, keep_privileges)
}

pub(crate) fn lease(socket: &Path) -> Result<Lease, ClientError> {
    when_there(socket, |daemon| daemon.lease(Wish::of(LEASE)))
}

fn when_there<R>(socket: &Path, ask: impl Fn(Connection) -> Result<R, ClientError>) -> Result<R, ClientError> {
    loop {
        match Connection::open(socket).and_then(&ask) {
            Err(ClientError::NoDaemon { .. } | ClientError::Refused(_)) if !gone(socket).exists() => {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}

/// Leases memory that is kept, writes into it, says its secret, and ends when it is told to.
pub(crate) fn keeper(socket: &Path) {
    let lease = kept(socket, None).expect("kept memory");
    with_bytes(&lease.file, |memory| memory.fill(0x5a));
    println!("{}", lease.about.secret.as_deref().expect("a secret"));
    let _ = std::io::stdin().read(&mut [0]);
}

pub(crate) fn kept(socket: &Path, secret: Option<&str>) -> Result<Lease, ClientError> {
    let keep = KeepAs { name: "cache".to_owned(), secret: secret.map(str::to_owned) };
    Connection::open(socket)?.lease(Wish { keep: Some(keep), ..Wish::of(LEASE) })
}

pub(crate) fn with_bytes(file: &OwnedFd, look: impl FnOnce(&mut [u8])) {
    let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: at an address of the kernel's choice; the file has that length, and nobody else has it mapped.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), LEASE as usize, rights, flags, file, 0).expect("mapped");
        look(std::slice::from_raw_parts_mut(at.cast(), LEASE as usize));
        rustix::mm::munmap(at, LEASE as usize).expect("unmapped");
    }
}

/// A mark that the daemon is not there any more.
pub(crate) fn gone(socket: &Path) -> PathBuf {
    socket.with_extension("gone")
}

/// Makes memory as stock programs do, and says what came of it.
pub(crate) fn program(role: &str) {
    if role == "child" {
        let mut child = me(&["program", "plain"]).spawn().expect("a child");
        assert!(child.wait().expect("ended").success());
        return;
    }
    if role == "beside" {
        return beside();
    }
    if role == "headless" {
        std::thread::spawn(|| {
            let main = format!("/proc/self/task/{}/stat", std::process::id());
            while !std::fs::read_to_string(&main).is_ok_and(|stat| stat.contains(") Z ")) {}
            program("plain");
            std::process::exit(0);
        });
        // SAFETY: this thread alone ends, and nobody uses what is on its stack.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let file = own_file();
    if ["dup", "fork", "reopen", "send"].contains(&role) {
        return share(&file, role);
    }
    let mover = matches!(role, "close" | "reuse").then(|| {
        let (fd, close) = (file.as_raw_fd(), role == "close");
        std::thread::spawn(move || move_descriptor(fd, close))
    });
    #[cfg(target_arch = "x86_64")]
    if role == "int80" {
        old_ftruncate(&file);
    }
    if role == "listens" {
        // What a container runtime would see that is run on a lease.
        println!("{:?}", listen(true).map(drop));
    }
    let _copy = (role == "required").then(|| file.try_clone().expect("a descriptor"));
    let answer = match role {
        "int80" => Ok(()),
        "allocates" => rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, LEASE),
        _ => rustix::fs::ftruncate(&file, LEASE),
    };
    if let Some(mover) = mover {
        mover.join().expect("moved");
        let stat = rustix::fs::fstat(&file);
        let [answer, size, filled] =
            [answer.map(|()| 0), stat.map(|stat| stat.st_size), stat.map(|stat| stat.st_blocks)]
                .map(|result| result.map_or_else(|error| error.to_string(), |value| value.to_string()));
        println!("{answer}, {size}, {filled}");
        // Its number may be another's.
        std::mem::forget(file);
        return;
    }
    match answer {
        Err(Errno::NOSYS) => println!("ENOSYS"),
        Err(error) => println!("failed: {error}"),
        Ok(()) => use_memory(&file, matches!(role, "stays" | "listened")),
    }
}

fn own_file() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    memfd_create(c"program", flags).expect("a file")
}

/// Gives a file on a disk a length while another thread's memory is asked for, and says whether that waits still.
fn beside() {
    println!("started");
    let _ = std::io::stdin().read(&mut [0]);
    let has_memory = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = rustix::fs::ftruncate(own_file(), LEASE);
            has_memory.store(true, Ordering::Release);
        });
        // Long enough for the supervisor to begin; whoever does not is not seen.
        std::thread::sleep(Duration::from_millis(500));
        let path = std::env::temp_dir().join(format!("hugemm-lease-{}.beside", std::process::id()));
        let file = std::fs::File::create(&path).and_then(|file| file.set_len(LEASE));
        let waits = !has_memory.load(Ordering::Acquire);
        file.and_then(|()| std::fs::remove_file(&path)).expect("a file with a name");
        println!("{}", if waits { "the other waits" } else { "both have waited" });
    });
}

/// A file that can be reached in a second way when it gets its length: says whether both ways lead to one memory.
fn share(file: &OwnedFd, how: &str) {
    let size_and_write = || {
        rustix::fs::ftruncate(file, LEASE).expect("a length");
        with_bytes(file, |memory| memory[0] = 7);
    };
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a pair");
    let mut other = match how {
        "reopen" => {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            Some(std::fs::File::options().read(true).write(true).open(path).expect("opened").into())
        }
        "send" => {
            send(ours.as_fd(), &(), Some(file.as_fd())).expect("sent");
            None
        }
        _ => Some(file.try_clone().expect("a descriptor")),
    };
    if how == "fork" {
        // SAFETY: this program has one thread, so the child may do what any program may.
        match unsafe { libc::fork() } {
            0 => {
                size_and_write();
                std::process::exit(0);
            }
            // SAFETY: waits for the child just made.
            child => assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child),
        }
    } else {
        size_and_write();
    }
    if how == "send" {
        other = receive::<()>(theirs.as_fd()).expect("open").expect("a packet").1;
    }
    let [first, second] = [file, other.as_ref().expect("another descriptor")].map(|fd| {
        let stat = rustix::fs::fstat(fd).expect("open");
        let mut byte = 0;
        with_bytes(fd, |memory| byte = memory[0]);
        (stat.st_ino, stat.st_size, byte)
    });
    let is_one = first == second && first.2 == 7;
    println!("{}: {first:?}, {second:?}", if is_one { "one" } else { "two" });
}

/// Memory must be clear, keeps what is written, and says whether it was there before.
pub(crate) fn use_memory(file: &OwnedFd, stays: bool) {
    let stat = rustix::fs::fstat(file).expect("a file");
    assert_eq!(stat.st_size as u64, LEASE);
    let leased = stat.st_blocks as u64 * 512 == LEASE;
    let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: at an address of the kernel's choice; the file has that length.
    let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEASE as usize, rights, flags, file, 0) };
    let at: *mut u8 = at.expect("mapped").cast();
    // SAFETY: just mapped, and nobody else has the file.
    let memory = unsafe { std::slice::from_raw_parts_mut(at, LEASE as usize) };
    assert!(memory.iter().all(|byte| *byte == 0), "what is lent is clear");
    memory.fill(0xa5);
    println!("{} {}", if leased { "leased" } else { "plain" }, stat.st_ino);
    if stays {
        let _ = std::io::stdin().read(&mut [0]);
        assert!(memory.iter().all(|byte| *byte == 0xa5), "lent memory has its bytes, whatever becomes of the daemon");
        println!("kept");
    }
}

/// When it is told to: closes the descriptor, or puts another file in its place. A call that nothing else here makes says that it
/// is done.
pub(crate) fn move_descriptor(fd: i32, close: bool) {
    let other = memfd_create(c"other", MemfdFlags::CLOEXEC).expect("a file");
    let _ = std::io::stdin().read(&mut [0]);
    // SAFETY: the descriptor's number is the program's to close; its owner forgets it.
    unsafe {
        if close {
            libc::close(fd);
        } else {
            libc::dup2(other.as_raw_fd(), fd);
        }
    }
    // SAFETY: asks for a number.
    unsafe { libc::syscall(DONE, 0) };
}

/// What says that a descriptor has been moved.
pub(crate) const DONE: i64 = libc::SYS_getsid;

/// `ftruncate` as 32-bit programs call it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn old_ftruncate(file: &OwnedFd) {
    let mut answer = 93i64;
    // SAFETY: the call changes the length of the file; `rbx` is put back. The kernel leaves r8 to r11 undefined.
    unsafe {
        std::arch::asm!(
            "xchg rbx, {fd}", "int 0x80", "xchg rbx, {fd}",
            fd = inout(reg) i64::from(file.as_raw_fd()) => _,
            inout("rax") answer, in("rcx") LEASE,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    assert_eq!(answer, 0, "this kernel runs 32-bit calls, and failed this one");
}

/// A filter that allows all, as programs install which forbid some calls.
pub(crate) fn allow_all() {
    let mut all =
        [libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW }];
    let filter = libc::sock_fprog { len: 1, filter: all.as_mut_ptr() };
    // SAFETY: a flag of this process; a filter that outlives the call, which copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter), 0);
    }
}
