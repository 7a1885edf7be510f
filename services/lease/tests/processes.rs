//! Daemon, client, supervisor and program, each killed before each of its system calls; and programs that make it difficult.
//!
//! No libtest, whose threads a client that is about to become another program must not have: without arguments this program is
//! the tests, with them it is what the first one names.

#[path = "support/tracer.rs"]
mod tracer;

mod support;

use hugemm_lease::client::{ClientError, Connection};
use hugemm_lease::daemon::{Daemon, PoolConfig};
use hugemm_lease::filler::{Manners, fill};
use hugemm_lease::memory_file::Page;
use hugemm_lease::policy::LendingPolicy;
use hugemm_lease::seccomp::{FilterError, report_ftruncate};
use hugemm_lease::server::{Listener, adopt, serve};
use hugemm_lease::service;
use hugemm_lease::status::Status;
use hugemm_lease::stock::Shapes;
use hugemm_lease::supervisor::{AttachError, attach};
use hugemm_lease::wire::{Answer, Forget, KeepAs, Request, Wish};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{PAGE, Pool, wait_for};
use tracer::{Then, trace};

/// A lease, and a file that the daemon has ready: two pages, so that there is a first and a last one.
const LEASE: u64 = 2 * PAGE;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    match words[..] {
        ["daemon", socket] => daemon(Path::new(socket)),
        ["client", socket, role] => client(Path::new(socket), role),
        ["keeper", socket] => keeper(Path::new(socket)),
        ["program", role] => program(role),
        // The flags of a test runner select nothing: all of this is one test.
        _ => tests(),
    }
}

/// A name, and what is done.
type Test = (&'static str, fn(&Pool));

fn tests() {
    let tests: [Test; 8] = [
        ("the cap holds in every second", the_cap_holds),
        ("clients and supervisors are killed before every call", clients_and_supervisors_are_killed),
        ("the daemon is killed before every call", the_daemon_is_killed),
        ("a descriptor is closed while the supervisor looks", |pool| a_descriptor_changes(pool, "close")),
        ("a descriptor is reused while the supervisor looks", |pool| a_descriptor_changes(pool, "reuse")),
        ("a service manager holds what is filled", a_manager_holds_what_is_filled),
        ("kept memory survives its program and the daemon", kept_memory_survives_the_daemon),
        ("programs with filters, children and old calls", programs_of_all_kinds),
    ];
    let Some(pool) = Pool::with_free(CAPPED / PAGE) else { return };
    for (name, test) in tests {
        // Whatever hangs ends the test program, and that all that it traces.
        // SAFETY: a timer of this process.
        unsafe { libc::alarm(300) };
        test(&pool);
        pool.wait_until_lacks(0);
        println!("test {name} ... ok");
    }
}

// ---- The processes.

fn me(words: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(words);
    command
}

fn daemon(path: &Path) {
    let shapes = Shapes::new(&[(LEASE, 1)], LEASE, PAGE).expect("a shape");
    // SAFETY: the first thing that this process does.
    let inherited = unsafe { service::inherited() }.expect("what is passed makes sense");
    let listener = inherited.listener.map_or_else(|| Listener::bind(path, false), Ok).expect("a socket");
    let policy = LendingPolicy::closed(rustix::process::geteuid().as_raw());
    let daemon = Arc::new(Daemon::new(PoolConfig { page: Page::Huge2M, node: None, shapes, size: LEASE, policy }));
    let (never, _open) = std::io::pipe().expect("a pipe");
    daemon.adopt(inherited.files);
    adopt(&daemon, inherited.kept);
    service::ready();
    std::thread::scope(|scope| {
        scope.spawn(|| fill(&daemon, &Manners::default(), || None));
        let _ = serve(&daemon, &listener, never.as_fd());
    });
}

/// Leases, and becomes the program, on the lease if there is one. A daemon that is not there yet is waited for, unless it has
/// been there.
fn client(socket: &Path, role: &str) {
    if role == "listened" {
        // Some container runtimes do this.
        let listener = report_ftruncate(12_345, true).or_else(|_| report_ftruncate(12_345, false));
        std::mem::forget(listener.expect("a listener"));
    }
    if role == "filtered" {
        allow_all();
    }
    match lease(socket) {
        Ok(lease) => match attach(lease) {
            Ok(_) => {}
            Err(AttachError::Filter(FilterError::Taken)) => println!("taken"),
            Err(error) => println!("not attached: {error}"),
        },
        Err(error) => println!("not leased: {error}"),
    }
    panic!("{}", me(&["program", role]).exec());
}

fn lease(socket: &Path) -> Result<hugemm_lease::client::Lease, ClientError> {
    loop {
        let wish = Wish { bytes: LEASE, page: None, node: None, keep: None };
        match Connection::open(socket).and_then(|daemon| daemon.lease(wish)) {
            Err(ClientError::NoDaemon { .. } | ClientError::Refused(_)) if !gone(socket).exists() => {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}

/// Leases memory that is kept, writes into it, says its secret, and ends when it is told to.
fn keeper(socket: &Path) {
    let lease = kept(socket, None).expect("kept memory");
    with_bytes(&lease, |memory| memory.fill(0x5a));
    println!("{}", lease.about.secret.as_deref().expect("a secret"));
    let _ = std::io::stdin().read(&mut [0]);
}

fn kept(socket: &Path, secret: Option<&str>) -> Result<hugemm_lease::client::Lease, ClientError> {
    let keep = KeepAs { name: "cache".to_owned(), secret: secret.map(str::to_owned) };
    Connection::open(socket)?.lease(Wish { bytes: LEASE, page: None, node: None, keep: Some(keep) })
}

fn with_bytes(lease: &hugemm_lease::client::Lease, look: impl FnOnce(&mut [u8])) {
    let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: at an address of the kernel's choice; the file has that length, and nobody else has it mapped.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), LEASE as usize, rights, flags, &lease.file, 0).expect("mapped");
        look(std::slice::from_raw_parts_mut(at.cast(), LEASE as usize));
        rustix::mm::munmap(at, LEASE as usize).expect("unmapped");
    }
}

/// A mark that the daemon is not there any more.
fn gone(socket: &Path) -> PathBuf {
    socket.with_extension("gone")
}

/// Makes memory as stock programs do, and says what came of it.
fn program(role: &str) {
    if role == "child" {
        let mut child = me(&["program", "plain"]).spawn().expect("a child");
        assert!(child.wait().expect("ended").success());
        return;
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = memfd_create(c"program", flags).expect("a file");
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
        println!("{:?}", report_ftruncate(12_345, true).map(drop));
    }
    let answer = if role == "int80" { Ok(()) } else { rustix::fs::ftruncate(&file, LEASE) };
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
        Ok(()) => use_memory(&file, role == "stays"),
    }
}

/// Memory must be clear, keeps what is written, and says whether it was there before.
fn use_memory(file: &OwnedFd, stays: bool) {
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
fn move_descriptor(fd: i32, close: bool) {
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
const DONE: i64 = libc::SYS_getsid;

/// `ftruncate` as 32-bit programs call it.
#[cfg(target_arch = "x86_64")]
fn old_ftruncate(file: &OwnedFd) {
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
fn allow_all() {
    let mut all =
        [libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW }];
    let filter = libc::sock_fprog { len: 1, filter: all.as_mut_ptr() };
    // SAFETY: a flag of this process; a filter that outlives the call, which copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter), 0);
    }
}

// ---- The tests.

/// What is filled under a cap: a second and a half of chunks that are a page each.
const CAPPED: u64 = 36 * PAGE;
const CAP: u64 = 24 * PAGE;

/// As this machine fills: in no second more than a tenth above the cap, and in all no less than it has time for.
fn the_cap_holds(_: &Pool) {
    let shapes = Shapes::new(&[(CAPPED / 2, 2)], CAPPED, PAGE).expect("shapes");
    let policy = LendingPolicy::closed(rustix::process::geteuid().as_raw());
    let daemon = Daemon::new(PoolConfig { page: Page::Huge2M, node: None, shapes, size: CAPPED, policy });
    let manners = Manners { cap: Some(CAP), ..Manners::default() };
    // How much was filled at least at a time, and at most at one: a reader that is late must not take that for haste.
    let mut seen: Vec<(Instant, u64, Instant)> = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| fill(&daemon, &manners, || None));
        let end = Instant::now() + Duration::from_secs(60);
        while seen.last().is_none_or(|(_, filled, _)| *filled < CAPPED) && Instant::now() < end {
            let before = Instant::now();
            seen.push((before, daemon.status().counts.filled_bytes, Instant::now()));
            std::thread::sleep(Duration::from_millis(1));
        }
        daemon.stop();
    });
    assert_eq!(seen.last().map(|(_, filled, _)| *filled), Some(CAPPED));
    for (index, (from, before, _)) in seen.iter().enumerate() {
        let second = seen[index..].iter().take_while(|(_, _, to)| *to - *from <= Duration::from_secs(1));
        let most = second.map(|(_, filled, _)| filled - before).max().unwrap_or(0);
        assert!(most * 10 <= CAP * 11, "{most} bytes in a second at a cap of {CAP}");
    }
}

/// A daemon that is not traced, ended when dropped.
struct Served {
    child: Child,
    socket: PathBuf,
}

fn new_socket() -> PathBuf {
    let socket = std::env::temp_dir().join(format!("hugemm-lease-{}.socket", std::process::id()));
    let _ = std::fs::remove_file(&socket);
    let _ = std::fs::remove_file(gone(&socket));
    socket
}

impl Served {
    fn start() -> Self {
        let socket = new_socket();
        let child =
            me(&["daemon", socket.to_str().expect("UTF-8")]).stderr(Stdio::inherit()).spawn().expect("a daemon");
        let served = Served { child, socket };
        served.wait_until_idle();
        served
    }

    fn status(&self) -> Option<Status> {
        match Connection::open(&self.socket).and_then(|daemon| daemon.ask(&Request::Status {})) {
            Ok((Answer::Status(status), _)) => Some(*status),
            _ => None,
        }
    }

    /// Nothing is lent, and a file is ready.
    fn wait_until_idle(&self) {
        wait_for("nothing lent, and a file ready", || {
            self.status().is_some_and(|status| status.leases.is_empty() && status.ready.len() == 1)
        });
    }

    /// The client that becomes the program in that role.
    fn client(&self, role: &str) -> Command {
        let mut command = me(&["client", self.socket.to_str().expect("UTF-8"), role]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        command
    }

    /// What the program in that role says.
    fn said(&self, role: &str) -> String {
        let output = self.client(role).stderr(Stdio::inherit()).output().expect("run");
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// What a process has said that is over.
fn rest(output: Option<ChildStdout>) -> String {
    let mut said = String::new();
    let _ = output.expect("piped").read_to_string(&mut said);
    said
}

/// The client's processes: itself, which becomes the program; a child that only starts the supervisor; the supervisor.
const PROCESSES: usize = 3;
const PROGRAM: usize = 0;
const SUPERVISOR: usize = 2;

fn clients_and_supervisors_are_killed(pool: &Pool) {
    let daemon = Served::start();
    // Once undisturbed, to count the calls. What is before the first word with the daemon is no transition.
    let (mut calls, mut connects) = ([0; PROCESSES], None);
    let output = trace(&mut daemon.client("plain"), |stop| {
        calls[stop.process] = stop.number + 1;
        if stop.call == libc::SYS_connect {
            connects.get_or_insert(stop.number);
        }
        Then::Go
    });
    assert!(rest(output).starts_with("leased"));
    let first = [connects.expect("a client connects"), 0, 0];
    let mut steps: Vec<_> = (0..PROCESSES)
        .flat_map(|process| (first[process]..calls[process]).map(move |n| (process, n, Then::Kill)))
        .collect();
    // And the program killed while the supervisor is before each of its calls.
    steps.extend((0..calls[SUPERVISOR]).map(|n| (SUPERVISOR, n, Then::KillOther(PROGRAM))));
    let (mut seen, mut answers) = (BTreeSet::new(), BTreeSet::new());
    for (process, number, then) in steps {
        daemon.wait_until_idle();
        let output = trace(&mut daemon.client("plain"), |stop| {
            if (stop.process, stop.number) == (process, number) { then } else { Then::Go }
        });
        let said = rest(output);
        let mut words = said.split_whitespace();
        let answer = words.next().unwrap_or("killed").to_owned();
        if answer == "leased" {
            assert!(seen.insert(words.next().map(str::to_owned)), "lent twice: {said}");
        }
        let killed_itself = process == PROGRAM || then != Then::Kill;
        let allowed: &[&str] = match (killed_itself, process) {
            (true, _) => &["leased", "killed"],
            // Nobody starts the supervisor, or there is none any more: on without, or that one call fails.
            (false, _) => &["leased", "plain", "ENOSYS", "not"],
        };
        assert!(allowed.contains(&answer.as_str()), "process {process} killed before its call {number}: {said}");
        answers.insert(answer);
    }
    daemon.wait_until_idle();
    pool.wait_until_lacks(LEASE / PAGE);
    assert!(["leased", "killed", "ENOSYS"].iter().all(|answer| answers.contains(*answer)), "{answers:?}");
}

/// Whatever the daemon was about to do: the program runs, on memory that is its own and keeps its bytes.
fn the_daemon_is_killed(pool: &Pool) {
    let mut binds = None;
    for number in 0.. {
        let socket = new_socket();
        let name = socket.to_str().expect("UTF-8");
        let mut client = me(&["client", name, "stays"]);
        let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a client");
        let mut output = BufReader::new(client.stdout.take().expect("piped"));
        let (was_killed, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let said = std::thread::scope(|scope| {
            let mut daemon = me(&["daemon", name]);
            let first_line = scope.spawn(|| {
                let mut said = String::new();
                output.read_line(&mut said).expect("a line");
                if said.starts_with("leased") {
                    over.store(true, Ordering::Relaxed);
                    // Until the tracer has seen it make one more call, and ended it.
                    while Connection::open(&socket).is_ok_and(|daemon| daemon.ask(&Request::Status {}).is_ok()) {}
                }
                said
            });
            trace(daemon.stderr(Stdio::null()), |stop| {
                if over.load(Ordering::Relaxed) {
                    return Then::Kill;
                }
                if stop.call == libc::SYS_bind {
                    binds.get_or_insert(stop.number);
                }
                let step = binds.is_some_and(|first| stop.number == first + number);
                was_killed.fetch_or(step, Ordering::Relaxed);
                if step { Then::Kill } else { Then::Go }
            });
            std::fs::write(gone(&socket), "").expect("a mark");
            first_line.join().expect("a line")
        });
        drop(client.stdin.take());
        let mut all = said;
        output.read_to_string(&mut all).expect("UTF-8");
        assert!(client.wait().expect("ended").success(), "{all}");
        assert!(all.ends_with("kept\n"), "{all}");
        pool.wait_until_lacks(0);
        if !was_killed.into_inner() {
            assert!(all.starts_with("leased") && number > 20, "{number} steps, {all}");
            return;
        }
    }
}

/// The program's other thread closes or reuses the descriptor at each point at which the supervisor looks at it.
fn a_descriptor_changes(_: &Pool, how: &str) {
    let daemon = Served::start();
    for number in 0.. {
        daemon.wait_until_idle();
        let mut command = daemon.client(how);
        let (read, mut write) = std::io::pipe().expect("a pipe");
        command.stdin(Stdio::from(OwnedFd::from(read)));
        // Calls of the supervisor since it has taken the program's.
        let (mut since, mut at, mut placed) = (None, None, false);
        let output = trace(&mut command, |stop| {
            let ioctl = (stop.call == libc::SYS_ioctl).then_some(stop.second);
            match (stop.process, ioctl) {
                (SUPERVISOR, Some(RECEIVE)) => since = Some(0),
                (SUPERVISOR, _) if since == Some(number) && at.is_none() => {
                    at = Some(ioctl);
                    write.write_all(b"x").expect("told");
                    return Then::Hold;
                }
                (SUPERVISOR, _) => {
                    since = since.map(|n| n + 1);
                    placed |= ioctl == Some(ADD_FD) && at.is_none();
                }
                (PROGRAM, _) if stop.call == DONE => return Then::Release,
                _ => {}
            }
            Then::Go
        });
        let (said, at) = (rest(output), at.expect("the supervisor makes calls"));
        match at {
            // Here the call is answered, whatever happened.
            Some(SEND) => {
                assert!(number > 5, "{number}: {said}");
                return;
            }
            // Between the last look and this the supervisor makes no other call; a moment is left that no call can close.
            Some(ADD_FD) => {}
            // The program's own doing, after its call was as good as answered.
            _ if placed => {}
            _ if how == "close" => {
                assert_eq!(
                    said,
                    format!("{0}, {0}, {0}\n", Errno::BADF),
                    "closed before call {number}: not opened again"
                );
            }
            // The call goes to the other file, as it would have without a lease.
            _ => assert_eq!(said, format!("0, {LEASE}, 0\n"), "reused before call {number}: not replaced"),
        }
    }
}

/// A service manager as far as it is needed here: holds files, and never gets around to letting go of one.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    stored: Vec<(String, OwnedFd)>,
    said: Vec<String>,
}

impl Manager {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("hugemm-lease-{}.notify", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_nonblocking(true).expect("a flag");
        Manager { socket, path, stored: Vec::new(), said: Vec::new() }
    }

    /// Starts a daemon on the listening socket and what is stored.
    fn start(&self, listener: &OwnedFd) -> Child {
        let passed = std::iter::once(listener).chain(self.stored.iter().map(|(_, file)| file));
        // Out of the way of the numbers that they get.
        let passed: Vec<_> = passed.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 100).expect("a descriptor")).collect();
        let numbers: Vec<_> = passed.iter().map(AsRawFd::as_raw_fd).collect();
        let me = std::env::current_exe().expect("a path");
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" daemon /nowhere/socket"]).arg(me);
        command.env("NOTIFY_SOCKET", &self.path).env("LISTEN_FDS", numbers.len().to_string());
        // SAFETY: system calls between fork and exec, with descriptors that are open until after it.
        unsafe {
            command.pre_exec(move || {
                for (index, number) in numbers.iter().enumerate() {
                    if libc::dup2(*number, 3 + index as i32) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        command.spawn().expect("a daemon")
    }

    /// Hears what has been said.
    fn hear(&mut self) {
        let mut bytes = [0; 4096];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let Ok(got) = rustix::net::recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) else {
                return;
            };
            let text = String::from_utf8_lossy(&bytes[..got.bytes]).into_owned();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or_default().to_owned();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    assert!(text.contains("FDSTORE=1\n"), "{text}");
                    self.stored.extend(fds.map(|fd| (name.clone(), fd)));
                }
            }
            self.said.push(text);
        }
    }

    fn wait_for(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        wait_for(what, || {
            self.hear();
            is_so(self)
        });
    }

    fn was_told(&self, what: &str, name: &str) -> bool {
        self.said.iter().any(|said| said.contains(what) && said.contains(name))
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A daemon that is killed and started anew has what it had ready, and lends nothing twice, though the manager still has what it
/// was told to let go of.
fn a_manager_holds_what_is_filled(_: &Pool) {
    let mut manager = Manager::new();
    let socket = new_socket();
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let listener = rustix::net::socket_with(kind.0, kind.1, kind.2, None).expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(&socket).expect("a path")).expect("bound");
    rustix::net::listen(&listener, 8).expect("listening");
    let mut served = Served { child: manager.start(&listener), socket };
    manager.wait_for("ready", |manager| manager.was_told("READY=1", ""));
    manager.wait_for("one is stored", |manager| manager.stored.len() == 1);
    let mut first = served.client("stays").stdin(Stdio::piped()).spawn().expect("a client");
    manager.wait_for("another is stored", |manager| manager.stored.len() == 2);
    let lent = manager.stored[0].0.clone();
    assert!(manager.was_told("FDSTOREREMOVE=1", &lent), "{:?}", manager.said);
    served.child.kill().expect("killed");
    let _ = served.child.wait();
    manager.said.clear();
    served.child = manager.start(&listener);
    let status = served.status().expect("a status");
    assert_eq!((status.ready.len(), status.counts.filled_bytes), (1, 0), "nothing has to be filled again");
    manager.wait_for("what is lent is given up again", |manager| manager.was_told("FDSTOREREMOVE=1", &lent));
    let second = served.said("plain");
    let inode = manager.stored[1].0.strip_prefix("memory-").expect("a name");
    assert_eq!(second, format!("leased {inode}\n"));
    drop(first.stdin.take());
    let output = first.stdout.take();
    assert!(first.wait().expect("ended").success());
    let first = rest(output);
    assert!(first.ends_with(&format!("leased {}\nkept\n", lent.strip_prefix("memory-").expect("a name"))), "{first}");
}

/// Kept memory has its bytes, its owner and its secret after the daemon was killed; while its program runs nobody else gets it; and
/// what is forgotten stays so, though the manager still has it.
fn kept_memory_survives_the_daemon(_: &Pool) {
    let mut manager = Manager::new();
    let socket = new_socket();
    let listener = Listener::bind(&socket, false).expect("a socket");
    let listener = listener.as_fd().try_clone_to_owned().expect("a descriptor");
    let mut served = Served { child: manager.start(&listener), socket };
    let restart = |served: &mut Served, manager: &mut Manager| {
        served.child.kill().expect("killed");
        let _ = served.child.wait();
        served.child = manager.start(&listener);
    };
    manager.wait_for("one is stored", |manager| manager.stored.len() == 1);
    let mut keeper = me(&["keeper", served.socket.to_str().expect("UTF-8")]);
    let mut keeper = keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a client");
    let mut secret = String::new();
    BufReader::new(keeper.stdout.take().expect("piped")).read_line(&mut secret).expect("a secret");
    let secret = secret.trim();
    let of_kept = |manager: &Manager| manager.stored.iter().filter(|(name, _)| name.starts_with("kept-")).count();
    manager.wait_for("kept memory and its record are stored", |manager| of_kept(manager) == 2);
    restart(&mut served, &mut manager);
    let refusal = |secret: Option<&str>| match kept(&served.socket, secret) {
        Err(ClientError::Refused(refused)) => refused.message,
        other => panic!("{other:?}"),
    };
    assert!(refusal(Some(secret)).contains("in use"), "its program still runs");
    assert!(refusal(None).contains("the secret is not the one"));
    drop(keeper.stdin.take());
    assert!(keeper.wait().expect("ended").success());
    let is_free = |status: &Status| matches!(&status.kept[..], [kept] if kept.lease.is_none());
    wait_for("its program is over", || served.status().is_some_and(|status| is_free(&status)));
    restart(&mut served, &mut manager);
    let lease = kept(&served.socket, Some(secret)).expect("leased again");
    assert!(lease.about.resumed);
    with_bytes(&lease, |memory| assert!(memory.iter().all(|byte| *byte == 0x5a), "it has its bytes"));
    drop(lease);
    let forget = |secret: &str, uid| {
        let keep = KeepAs { name: "cache".to_owned(), secret: Some(secret.to_owned()) };
        Connection::open(&served.socket)?.ask(&Request::Forget(Forget { keep, uid }))
    };
    assert!(forget(secret, Some(4711)).is_err(), "another's of that name is not there");
    assert!(matches!(forget(secret, None), Ok((Answer::Done {}, _))));
    assert_eq!(served.status().map(|status| status.kept), Some(Vec::new()));
    manager.wait_for("it is let go of", |manager| manager.was_told("FDSTOREREMOVE=1", "FDNAME=kept-"));
    restart(&mut served, &mut manager);
    assert_eq!(served.status().map(|status| status.kept), Some(Vec::new()), "what is forgotten stays so");
}

const RECEIVE: u64 = 0xc050_2100;
const SEND: u64 = 0xc018_2101;
const ADD_FD: u64 = 0x4018_2103;

fn programs_of_all_kinds(_: &Pool) {
    let daemon = Served::start();
    for (role, expected) in [
        ("plain", "leased"),
        // What it starts has the filter, too.
        ("child", "leased"),
        ("filtered", "leased"),
        // Linux allows one listener: the one that is there stays, and the program runs without a lease.
        ("listened", "taken\nplain"),
        ("listens", "Err(Taken)\nleased"),
        #[cfg(target_arch = "x86_64")]
        ("int80", "plain"),
    ] {
        daemon.wait_until_idle();
        let said = daemon.said(role);
        assert!(said.starts_with(expected), "{role}: {said}");
    }
}
