//! Leases, as stock programs meet them: with transparent huge pages where the machine has them for shared memory, so that no
//! pool of it is touched; else, run by root, with pages that the machine's pool has more meanwhile.

use crate::support::lease::{judged, pool};
use crate::support::{Scratch, hugemm, misused, refused, rows};
use hugemm_base::PageSize;
use hugemm_inspect::pool::PoolGuard;
use hugemm_lease::listener::Listener;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const LEASE: u64 = 32 * MIB;

/// What a daemon has, all of it.
const MEMORY: u64 = 64 * MIB;

/// Pages of the pool that a program takes for itself.
const OWN: u64 = LEASE / PageSize::Size2M.bytes();

/// Where huge pages come from.
enum Pages {
    /// From the file system of shared memory.
    Transparent,
    /// From the machine's pool, which has as many more for as long, for one test at a time.
    Pool { _more: (PoolGuard, File) },
}

impl Pages {
    /// `None` where there are none; the test says so and ends.
    fn find() -> Option<Self> {
        let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
        if !enabled.is_empty() && !["[never]", "[deny]"].iter().any(|word| enabled.contains(word)) {
            return Some(Pages::Transparent);
        }
        let more = pool(MEMORY / PageSize::Size2M.bytes() + OWN);
        if more.is_none() {
            eprintln!(
                "no huge pages for shared memory either (as root: echo advise > \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled)"
            );
        }
        more.map(|_more| Pages::Pool { _more })
    }

    fn name(&self) -> &'static str {
        match self {
            Pages::Transparent => "thp",
            Pages::Pool { .. } => "2M",
        }
    }
}

/// A daemon that ends with the test.
struct Daemon {
    child: Child,
    socket: String,
    _scratch: Scratch,
    // Last: pages of the pool go back when nobody has them.
    pages: Pages,
}

impl Daemon {
    /// `None` where the machine has no huge pages; the test says so and ends.
    fn start(name: &str, more: &[&str]) -> Option<Self> {
        let pages = Pages::find()?;
        let scratch = Scratch::new(name);
        let socket = scratch.path("socket");
        let child = Command::new(env!("CARGO_BIN_EXE_hugemm"))
            .args(["pool", "serve", "--page", pages.name(), "--size", &format!("{}MB", MEMORY / MIB)])
            .args(["--shape", "32MBx2", "--socket", &socket])
            .args(more)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a daemon");
        Some(Daemon { child, socket, _scratch: scratch, pages })
    }

    fn status(&self) -> Option<Value> {
        let output = hugemm(&["pool", "status", "--json", "--socket", &self.socket]);
        output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    }

    /// Waits until a status is as wanted.
    #[track_caller]
    fn wait_for(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let status = self.status();
            if let Some(status) = status.as_ref().filter(|status| wanted(status)) {
                return status.clone();
            }
            assert!(Instant::now() < end, "never {what}: {status:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// False where memory is in pieces, so that no huge page is to be had; the test says so and ends.
    #[track_caller]
    fn wait_until_ready(&self) -> bool {
        let no_pages = |status: &Value| status["waiting"].as_str().is_some_and(|why| why.contains("huge page"));
        let is_ready = |status: &Value| status["ready"].as_array().map(Vec::len) == Some(2);
        let since = Instant::now();
        let patient =
            |status: &Value| is_ready(status) || no_pages(status) && since.elapsed() > Duration::from_secs(10);
        let ready = is_ready(&self.wait_for("ready", patient));
        if !ready {
            eprintln!("skipped: this machine's memory is in pieces");
        }
        ready
    }

    fn lease(&self, options: &[&str], command: &[&str]) -> Output {
        let mut words = vec!["lease", "32MB", "--socket", &self.socket];
        words.extend(options);
        words.push("--");
        words.extend(command);
        hugemm(&words)
    }

    /// The test program itself, as the stock program that is run on a lease.
    fn lease_to(&self, program: &str) -> Output {
        let me = me();
        self.lease(&["--require"], &[&words(&me, program)[..], &[self.pages.name()]].concat())
    }
}

/// This program.
fn me() -> String {
    std::env::current_exe().ok().and_then(|path| path.into_os_string().into_string().ok()).expect("a path")
}

/// How one of its programs is run.
fn words<'a>(me: &'a str, program: &'a str) -> [&'a str; 4] {
    [me, "--ignored", "--nocapture", program]
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// A file as programs make one for themselves, of the pages that the program's last argument names; sealable, as QEMU's is.
fn fresh_file() -> File {
    let pool = std::env::args().next_back().is_some_and(|pages| pages == "2M");
    let pages = if pool { libc::MFD_HUGETLB | libc::MFD_HUGE_2MB } else { 0 };
    // SAFETY: a string with its end; the descriptor is new and nobody else's.
    unsafe {
        let fd = libc::memfd_create(c"program".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | pages);
        assert!(fd >= 0);
        File::from_raw_fd(fd)
    }
}

/// Writes the beginning of a file. Files of the pool's pages are written by mapping them.
fn store(file: &File, bytes: &[u8]) {
    // SAFETY: a new mapping of a file that is this program's alone; what is copied fits.
    unsafe {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let at = libc::mmap(std::ptr::null_mut(), 2 << 20, rights, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        assert_eq!(libc::munmap(at, 2 << 20), 0);
    }
}

fn filled(file: &File) -> u64 {
    file.metadata().expect("metadata").blocks() * 512
}

/// Run by `a_stock_programs_file_becomes_the_lease`, under a lease.
#[test]
#[ignore = "a program for another test to run"]
fn program_that_makes_its_memory() {
    let other = fresh_file();
    other.set_len(LEASE - 2 * MIB).expect("a length that nobody waits for");
    assert_eq!(filled(&other), 0, "another length is another file");
    let file = fresh_file();
    // SAFETY: asks for the descriptor's flags.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFD) };
    file.set_len(LEASE).expect("a length");
    assert_eq!(file.metadata().expect("metadata").len(), LEASE);
    assert_eq!(filled(&file), LEASE, "all of it was there before it was asked for");
    // SAFETY: as above.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFD) }, flags, "closed on exec as before");
    let mut bytes = vec![1; 1 << 20];
    (&file).read_exact(&mut bytes).expect("readable");
    assert!(bytes.iter().all(|byte| *byte == 0));
    // One lease, one file.
    let second = fresh_file();
    second.set_len(LEASE).expect("a length");
    assert_eq!(filled(&second), 0);
    println!("inode {}", file.metadata().expect("metadata").ino());
}

fn inode(output: &Output) -> u64 {
    let text = said(output);
    let line = text.lines().find_map(|line| line.split("inode ").nth(1)).unwrap_or_else(|| panic!("{text}"));
    line.trim().parse().expect("a number")
}

#[test]
fn a_stock_programs_file_becomes_the_lease() {
    judged(|| {
        let Some(daemon) = Daemon::start("lease-stock", &[]) else { return };
        if !daemon.wait_until_ready() {
            return;
        }
        let first = daemon.lease_to("program_that_makes_its_memory");
        assert!(first.status.success(), "{}", said(&first));
        // The lease ends with its program, and the daemon fills another file: never the same one.
        let placed = |n: u64| {
            move |status: &Value| status["counts"]["placed"] == n && status["leases"] == Value::from(Vec::<u8>::new())
        };
        daemon.wait_for("over", placed(1));
        if !daemon.wait_until_ready() {
            return;
        }
        let second = daemon.lease_to("program_that_makes_its_memory");
        assert!(second.status.success(), "{}", said(&second));
        assert_ne!(inode(&first), inode(&second), "a file is lent once");
        daemon.wait_for("over", placed(2));
    });
}

/// Run under a lease: a file that has something in it already, or a name, or is not to be written, is left alone.
#[test]
#[ignore = "a program for another test to run"]
fn program_with_files_of_its_own() {
    let used = fresh_file();
    used.set_len(2 * MIB).expect("another length");
    store(&used, b"mine");
    used.set_len(LEASE).expect("a length");
    let mut bytes = [0; 4];
    std::os::unix::fs::FileExt::read_exact_at(&used, &mut bytes, 0).expect("read");
    assert_eq!(&bytes, b"mine");
    let named = std::env::temp_dir().join(format!("hugemm-lease-named-{}", std::process::id()));
    let file = File::create(&named).expect("a file");
    file.set_len(LEASE).expect("a length");
    assert!(filled(&file) < LEASE);
    fs::remove_file(named).expect("removed");
    println!("left alone");
}

#[test]
fn other_files_of_that_length_are_left_alone() {
    judged(|| {
        let Some(daemon) = Daemon::start("lease-others", &[]) else { return };
        if !daemon.wait_until_ready() {
            return;
        }
        let output = daemon.lease_to("program_with_files_of_its_own");
        assert!(output.status.success() && said(&output).contains("left alone"), "{}", said(&output));
        daemon.wait_for("unused", |status| status["counts"]["unused"] == 1 && status["counts"]["placed"] == 0);
    });
}

/// Run under a lease: a file that a second descriptor leads to, and, where that does not size it, one that is mapped already. It is left
/// alone, since there would be two memories.
#[test]
#[ignore = "a program for another test to run"]
fn program_with_two_views_of_its_memory() {
    let first = fresh_file();
    let second = first.try_clone().expect("a descriptor");
    let map = |file: &File| {
        // SAFETY: at an address of the kernel's choice; what is touched is within the file's length by then.
        let at = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), LEASE as usize, rights, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>()
    };
    let pool = std::env::args().next_back().is_some_and(|pages| pages == "2M");
    let early = (!pool).then(|| map(&first));
    if let Err(error) = second.set_len(LEASE) {
        println!("no memory: {error}");
        return;
    }
    let views = [early.unwrap_or_else(|| map(&first)), map(&first), map(&second)];
    // SAFETY: the first byte of three mappings of one file.
    let seen = unsafe {
        views[0].write_volatile(7);
        views.map(|view| view.read_volatile())
    };
    println!("one memory: {}", seen == [7; 3]);
}

/// A lease that nothing takes is told when the program ends, and one whose program nobody could look at is not had.
#[test]
fn what_is_not_placed_is_said() {
    judged(|| {
        let Some(daemon) = Daemon::start("lease-untaken", &[]) else { return };
        if !daemon.wait_until_ready() {
            return;
        }
        let output = daemon.lease(&["--require"], &["true"]);
        assert!(output.status.success() && said(&output).contains("nothing took the lease"), "{}", said(&output));
        // Nor is it said at the end alone, which may be far; once is enough.
        let status = format!("{} pool status --socket {}", env!("CARGO_BIN_EXE_hugemm"), daemon.socket);
        let output =
            daemon.lease(&["--require"], &["sh", "-c", &format!("sleep 1; {status}; sleep 11; echo it ends >&2")]);
        let text = said(&output);
        assert!(text.contains("not taken yet"), "{text}");
        let lines: Vec<_> = text.lines().filter(|line| line.contains("took the lease") || *line == "it ends").collect();
        assert!(
            matches!(lines[..], [line, "it ends"] if line.contains("has run for 10 s, and nothing took")),
            "{text}"
        );
        if !daemon.wait_until_ready() {
            return;
        }
        let output = daemon.lease(&["--fd", "9"], &["sh", "-c", &status]);
        assert!(said(&output).lines().any(|line| line.trim_end().ends_with("given")), "{}", said(&output));
        // Whoever reads what a program says does not wait for what it leaves behind.
        let output = daemon.lease(&["--require"], &["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]);
        let left: i32 = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a process");
        // SAFETY: a process that was started for this.
        assert_eq!(unsafe { libc::kill(left, libc::SIGKILL) }, 0);
        let command = format!("{} lease 32MB --socket {}", env!("CARGO_BIN_EXE_hugemm"), daemon.socket);
        let hits = || daemon.status().expect("a status")["counts"]["hits"].clone();
        let (before, me) = (hits(), me());
        let program = words(&me, "program_with_two_views_of_its_memory").join(" ") + " " + daemon.pages.name();
        // It hides `/proc` from its supervisor, too, when it has the lease.
        let late = format!("-- sh -c 'umount -l /proc; exec {program}'");
        for (options, what, more) in [
            ("--pid --fork", "another process namespace", "--require -- echo ran"),
            ("--pid --fork", "another process namespace", "-- echo ran"),
            ("--pid --fork", "another process namespace", "--path"),
            ("--mount", "no /proc", "--require -- echo ran"),
            ("--mount", "no /proc", "-- echo ran"),
            ("--mount", "no /proc", "--path"),
            ("--mount", "no /proc", "-- echo @LEASE@"),
            ("--mount", "no /proc", &format!("--require {late}")),
        ] {
            let is_late = more.ends_with(&late);
            if is_late && !daemon.wait_until_ready() {
                return;
            }
            let hide = if what == "no /proc" && !is_late { "umount -l /proc; " } else { "" };
            let script = format!("{hide}{command} {more}");
            let words = options.split(' ').chain(["sh", "-c", &script]);
            let output = Command::new("unshare").args(words).output().expect("util-linux");
            let text = said(&output);
            if text.contains("unshare failed") {
                eprintln!("skipped: {text}");
                return;
            }
            assert!(text.contains(what), "{more}: {text}");
            if is_late {
                assert!(text.contains("no memory: "), "{more}: {text}");
            } else {
                let runs = more == "-- echo ran";
                assert_eq!(output.stdout, if runs { "ran\n" } else { "" }.as_bytes(), "{more}: {text}");
                assert_eq!(output.status.success(), runs, "{more}: {text}");
                assert_eq!(hits(), before, "{more}: a lease was taken for nothing");
            }
        }
        daemon.wait_for("over", |status| status["leases"] == Value::from(Vec::<u8>::new()));
    });
}

#[test]
fn memory_is_handed_over_as_a_path_or_a_descriptor() {
    judged(|| {
        let Some(daemon) = Daemon::start("lease-path", &[]) else { return };
        if !daemon.wait_until_ready() {
            return;
        }
        let output = daemon.lease(&["--require"], &["stat", "-L", "-c", "%s %a %b", "@LEASE@"]);
        assert_eq!(said(&output).trim(), format!("{LEASE} 600 {}", LEASE / 512));
        // As 9, and as the number that the lease has anyway.
        for fd in ["9", "3", "4"] {
            let path = format!("/proc/self/fd/{fd}");
            let output = daemon.lease(&["--fd", fd], &["stat", "-L", "-c", "%s %a %b", &path]);
            assert_eq!(said(&output).trim(), format!("{LEASE} 600 {}", LEASE / 512));
            if !daemon.wait_until_ready() {
                return;
            }
        }
        let output = hugemm(&["lease", "32MB", "--json", "--socket", &daemon.socket]);
        let about: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
        let file = fs::metadata(about["path"].as_str().expect("a path")).expect("there");
        assert_eq!((file.len(), file.blocks() * 512), (LEASE, LEASE));
        let holder = about["holder"].as_u64().expect("a process");
        daemon.wait_for("lent", |status| status["leases"][0]["pid"] == holder);
        // SAFETY: the process that holds the lease, started for this.
        unsafe { libc::kill(holder as i32, libc::SIGKILL) };
        daemon.wait_for("over", |status| status["leases"] == Value::from(Vec::<u8>::new()));
    });
}

/// Run by `kept_memory_has_its_bytes`.
#[test]
#[ignore = "a program for another test to run"]
fn program_that_writes_into_its_lease() {
    let path = std::env::args().next_back().expect("the lease");
    let file = File::options().read(true).write(true).open(path).expect("the lease");
    store(&file, b"weights");
}

/// Same user, same name, same secret: the same bytes. Another secret, or none: nothing.
#[test]
fn kept_memory_has_its_bytes() {
    judged(|| {
        let Some(daemon) = Daemon::start("lease-kept", &[]) else { return };
        if !daemon.wait_until_ready() {
            return;
        }
        let scratch = Scratch::new("lease-secret");
        let secret = scratch.path("secret");
        let kept = ["--require", "--keep", "cache", "--secret", &secret];
        let me = me();
        let writer = [&words(&me, "program_that_writes_into_its_lease")[..], &["@LEASE@"]].concat();
        let output = daemon.lease(&kept, &writer);
        assert!(output.status.success(), "{}", said(&output));
        daemon.wait_for("over", |status| status["kept"][0]["lease"].is_null());
        let output = daemon.lease(&kept, &["head", "-c", "7", "@LEASE@"]);
        assert_eq!(said(&output), "weights");
        assert_eq!(fs::metadata(&secret).expect("a file").mode() & 0o777, 0o600);
        daemon.wait_for("over", |status| status["kept"][0]["lease"].is_null());
        let wrong = scratch.put("wrong", "guessed");
        let output = daemon.lease(&["--require", "--keep", "cache", "--secret", &wrong], &["true"]);
        assert!(!output.status.success() && said(&output).contains("the secret is not the one"), "{}", said(&output));
        // A secret that cannot be written is one that nobody has: the memory is not kept then.
        let output = daemon.lease(&["--require", "--keep", "other", "--secret", "/nonexistent/secret"], &["true"]);
        assert!(!output.status.success() && said(&output).contains("the memory is not kept"), "{}", said(&output));
        daemon.wait_for("not kept", |status| status["kept"].as_array().map(Vec::len) == Some(1));
        let forget =
            |secret: &str| hugemm(&["pool", "forget", "cache", "--secret", secret, "--socket", &daemon.socket]);
        assert!(forget(&secret).status.success() && !fs::exists(&secret).expect("looked at"));
        daemon.wait_for("forgotten", |status| status["kept"] == Value::from(Vec::<u8>::new()));
        assert!(said(&forget(&secret)).contains("nothing is kept as `cache`"));
    });
}

/// What cannot be leased is said in one line, and the program runs all the same, unless told otherwise.
#[test]
fn without_a_lease_the_program_still_runs() {
    let scratch = Scratch::new("lease-none");
    let socket = scratch.path("nobody");
    let output = hugemm(&["lease", "32MB", "--socket", &socket, "--", "echo", "ran"]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"ran\n" && err.lines().count() == 1, "{}", said(&output));
    assert!(err.contains("start one with: hugemm pool serve"), "{err}");
    refused(&["lease", "32MB", "--socket", &socket, "--require", "--", "echo", "ran"], &["no lease daemon at"]);
    // A command that is to be given the memory has nothing to run on.
    refused(&["lease", "32MB", "--socket", &socket, "--fd", "9", "--", "echo", "ran"], &["no lease daemon at"]);
    refused(&["lease", "32MB", "--socket", &socket, "--", "echo", "@LEASE@"], &["no lease daemon at"]);
    refused(&["lease", "32MB"], &["name a command behind --"]);
    refused(&["lease", "3MB", "--page", "2M", "--path"], &["3MB is not a whole number of 2M pages", "multiple"]);
    refused(&["pool", "status", "--socket", &socket], &["no lease daemon at"]);
    misused(&["pool", "serve", "--size", "1GB", "--page", "4K"], "none of 2M, 1G and thp");
    misused(&["pool", "serve", "--size", "1GB", "--shape", "1GBx0"], "no files of a size");
    refused(&["pool", "serve", "--size", "2MB", "--shape", "4MB"], &["more than the pool's", "--size"]);
    refused(&["pool", "serve", "--size", "4MB", "--shape", "3MB"], &["not whole pages of 2097152", "--shape"]);
    refused(&["pool", "serve", "--size", "4MB", "--node", "999"], &["node 999", "has_memory"]);
}

/// What does not exist, cannot be, or may not be asked: one line with the way out, and nothing is left behind.
#[test]
fn odd_commands_are_answered_in_one_line() {
    let scratch = Scratch::new("lease-odd");
    let (socket, file) = (scratch.path("socket"), scratch.put("file", "no socket"));
    misused(&["lease"], "<SIZE>");
    misused(&["lease", "0", "--", "true"], "larger than zero");
    misused(&["lease", "1G", "true"], "the command stands behind --");
    misused(&["lease", "1G", "--fd", "7"], "<COMMAND>");
    misused(&["lease", "1G", "--fd", "2", "--", "true"], "not in 3..");
    misused(&["lease", "1G", "--path", "--", "true"], "cannot be used with");
    misused(&["lease", "1G", "--keep", "name", "--", "true"], "--secret");
    misused(&["pool", "serve", "--size", "0"], "larger than zero");
    let serve = |more: &[&str], parts: &[&str]| {
        refused(&[&["pool", "serve", "--page", "2M"][..], more].concat(), parts);
    };
    serve(&["--size", "900T", "--socket", &socket], &["more than this machine's memory", "--size"]);
    serve(&["--size", "8M", "--cpus", "60000", "--socket", &socket], &["--cpus"]);
    serve(&["--size", "8M", "--socket", &file], &["no socket", "--socket"]);
    serve(&["--size", "8M", "--socket", "/dev/null/x"], &["cannot listen at /dev/null/x", "--socket"]);
    assert!(!fs::exists(&socket).expect("looked at"), "nothing is left of a daemon that did not start");
    refused(&["pool", "status", "--socket", "/nonexistent"], &["no lease daemon at /nonexistent", "pool serve"]);
    refused(&["pool", "status", "--socket", &"x".repeat(200)], &["name too long", "--socket"]);
    refused(&["pool", "forget", "x", "--socket", &socket], &["no lease daemon"]);
    refused(&["bench", "lease", "--qemu", "/nonexistent/qemu"], &["/nonexistent/qemu cannot be run", "--qemu"]);
    for (program, code) in [("/nonexistent", 127), ("no-such-program", 127), (file.as_str(), 126)] {
        let output = hugemm(&["lease", "64M", "--socket", &socket, "--", program]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), err.lines().count()), (Some(code), 1), "{err}");
        assert!(err.contains(&format!("{program} cannot be started")), "{err}");
    }
    // What is left of a daemon that was killed is no daemon, and no hindrance.
    drop(UnixListener::bind(&socket).expect("a socket"));
    refused(&["pool", "status", "--socket", &socket], &["no lease daemon", "pool serve"]);
    // One that does not answer is not waited for without end; the line says so.
    let _silent = Listener::bind(scratch.path("silent").as_ref(), false).expect("a socket");
    refused(&["pool", "status", "--socket", &scratch.path("silent")], &["no answer in 5 s", "stopped"]);
}

/// A daemon that takes no connections keeps no program waiting for its memory, and nobody who asks how things are.
#[test]
fn a_daemon_that_takes_no_connections_is_not_waited_for() {
    let scratch = Scratch::new("lease-full");
    let socket = scratch.path("socket");
    let _deaf = Listener::bind(socket.as_ref(), false).expect("a socket");
    let address = SocketAddrUnix::new(socket.as_str()).expect("a path");
    let mut waiting = Vec::new();
    loop {
        let fd =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).expect("a socket");
        match rustix::net::connect(&fd, &address) {
            Ok(()) => waiting.push(fd),
            Err(rustix::io::Errno::AGAIN) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let ends = |words: &[&str]| {
        let output = Command::new("timeout").args(["60", env!("CARGO_BIN_EXE_hugemm")]).args(words).output();
        let output = output.expect("coreutils");
        assert_ne!(output.status.code(), Some(124), "{words:?} waits");
        (output.status.success(), said(&output))
    };
    let lease = ["lease", "32MB", "--socket", &socket];
    let (ran, text) = ends(&[&lease[..], &["--", "echo", "ran"]].concat());
    assert!(ran && text.contains("ran\n") && text.contains("it takes no connection in 5 s; is it stopped?"), "{text}");
    let (ran, text) = ends(&[&lease[..], &["--require", "--", "echo", "ran"]].concat());
    assert!(!ran && text.lines().count() == 1 && text.contains("is it stopped?"), "{text}");
    let (ran, text) = ends(&["pool", "status", "--wait", "1", "--socket", &socket]);
    assert!(!ran && text.contains("is it stopped?"), "{text}");
    let (ran, text) = ends(&["pool", "doctor", "--socket", &socket]);
    assert!(ran && text.contains("is it stopped?"), "{text}");
}

/// A daemon says to a service manager when it serves and when it ends, to its user why it waits, and lets nobody in beside it.
#[test]
fn a_daemon_says_what_it_does() {
    let scratch = Scratch::new("lease-says");
    let (socket, notify) = (scratch.path("socket"), scratch.path("notify"));
    let manager = UnixDatagram::bind(&notify).expect("a socket");
    manager.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_hugemm"));
    // More than the pool has, and less than the machine.
    let size = fs::read_to_string("/proc/meminfo").expect("readable");
    let size: u64 = size.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("MemTotal");
    daemon.args(["pool", "serve", "--size", &format!("{size}K"), "--keep-free", "900T", "--socket", &socket]);
    let mut daemon =
        daemon.env("NOTIFY_SOCKET", &notify).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("run");
    let heard = || {
        let mut bytes = [0; 4096];
        let length = manager.recv(&mut bytes).expect("something is said");
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    assert!(heard().contains("READY=1"));
    let mut says = BufReader::new(daemon.stderr.take().expect("piped"));
    let mut event = || {
        let mut line = String::new();
        says.read_line(&mut line).expect("a line");
        let event: serde_json::Value = serde_json::from_str(&line).expect("an object");
        event
    };
    let serving = event();
    assert!(serving["event"] == "serving" && serving["page"] == "2M" && serving["ready"] == serde_json::json!([]));
    let waiting = event();
    assert!(waiting["event"] == "waiting" && waiting["why"].to_string().contains("nr_hugepages"), "{waiting}");
    let second = hugemm(&["pool", "serve", "--size", "8M", "--socket", &socket]);
    assert!(!second.status.success() && said(&second).contains("a daemon is there already"), "{}", said(&second));
    // The first one is there still; it answers until it is told to end.
    assert!(hugemm(&["pool", "status", "--socket", &socket]).status.success());
    // SAFETY: the daemon, started for this.
    unsafe { libc::kill(daemon.id() as i32, libc::SIGTERM) };
    assert!(heard().contains("STOPPING=1"));
    // A line for people, too.
    let last = says.lines().map_while(Result::ok).find(|line| line.contains("\"event\":\"stopping\""));
    assert!(last.is_some(), "an event");
    assert!(daemon.wait().expect("ended").success());
    assert!(!fs::exists(&socket).expect("looked at"), "its socket goes with it");
}

/// A user whom the socket does not let in is told what to do about that.
#[test]
fn a_user_who_may_not_ask_is_told_so() {
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can ask as another user");
        return;
    }
    let dir = std::env::temp_dir().join(format!("hugemm-lease-closed-{}", std::process::id()));
    let listener = UnixListener::bind(&dir).expect("a socket");
    fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("closed");
    let output =
        Command::new(env!("CARGO_BIN_EXE_hugemm")).args(["pool", "status", "--socket"]).arg(&dir).uid(65534).output();
    drop(listener);
    fs::remove_file(&dir).expect("removed");
    match output {
        // Where the command lies may be closed to others, too.
        Err(_) => eprintln!("skipped: another user cannot run the command here"),
        Ok(output) => assert!(said(&output).contains("--policy that names the user"), "{}", said(&output)),
    }
}

#[test]
fn doctor_says_what_limits_leases() {
    let scratch = Scratch::new("lease-doctor");
    let output = hugemm(&["pool", "doctor", "--json", "--socket", &scratch.path("socket")]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
    let find = |metric: &str| rows(&document, metric)[0].clone();
    let daemon = find("doctor.lease_daemon");
    assert!(daemon["remedy"].as_str().is_some_and(|remedy| remedy.contains("pool serve")), "{daemon}");
    assert!(find("doctor.seccomp_listener")["found"].as_str().is_some_and(|found| !found.is_empty()));
    let text = hugemm(&["pool", "doctor", "--socket", &scratch.path("socket")]);
    assert!(text.status.success() && said(&text).contains("users of huge pages"), "{}", said(&text));
}

#[test]
fn drained_memory_goes_back_and_asking_says_so() {
    judged(|| {
        let Some(daemon) = Daemon::start("lease-drain", &[]) else { return };
        if !daemon.wait_until_ready() {
            return;
        }
        assert!(hugemm(&["pool", "drain", "--socket", &daemon.socket]).status.success());
        let status = daemon.status().expect("a status");
        assert_eq!((status["drained"].as_bool(), status["ready"].as_array().map(Vec::len)), (Some(true), Some(0)));
        let output = daemon.lease(&["--require"], &["echo", "ran"]);
        assert!(!output.status.success() && said(&output).contains("nothing is ready"), "{}", said(&output));
        assert!(hugemm(&["pool", "fill", "--socket", &daemon.socket]).status.success());
        let _ = daemon.wait_until_ready();
    });
}
