//! What a service manager passes to `hugemm pool serve`, and is told; no page is filled, so none is needed.

use crate::support::Scratch;
use crate::support::lease::Daemon;
use hugemm_lease::listener::Listener;
use hugemm_lease::memory_file::{MemoryFile, Page};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, memfd_create};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The length of what is passed, and the only one that the daemon has a place for.
const BYTES: u64 = Page::Transparent.bytes();

/// A daemon, and where it tells its manager what becomes of what it was passed.
struct Managed {
    daemon: Daemon,
    notified: UnixDatagram,
    _listener: Listener,
}

impl Managed {
    /// On a socket that listens already and such files, called so: `None` names nothing.
    fn start(name: &str, files: &[&OwnedFd], names: Option<&str>) -> Self {
        let scratch = Scratch::new(name);
        let listener = Listener::bind(Path::new(&scratch.path("socket")), false).expect("a socket");
        let notified = UnixDatagram::bind(scratch.path("notify")).expect("a socket");
        // Out of the way of the numbers that they get.
        let passed = std::iter::once(listener.as_fd()).chain(files.iter().map(|file| file.as_fd()));
        let passed: Vec<_> = passed.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 100).expect("a descriptor")).collect();
        let numbers: Vec<_> = passed.iter().map(AsRawFd::as_raw_fd).collect();
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh", env!("CARGO_BIN_EXE_hugemm")]);
        command.args(["pool", "serve", "--page", "thp", "--size", "2MB", "--keep-free", "1024TB"]);
        command.args(["--socket", &scratch.path("nosuch/socket")]);
        command.env("NOTIFY_SOCKET", scratch.path("notify")).env("LISTEN_FDS", numbers.len().to_string());
        match names {
            Some(names) => command.env("LISTEN_FDNAMES", format!("socket:{names}")),
            None => command.env_remove("LISTEN_FDNAMES"),
        };
        // SAFETY: system calls between fork and exec, with descriptors that are open until after it.
        unsafe {
            command.pre_exec(move || {
                for (at, number) in (3..).zip(&numbers) {
                    if libc::dup2(*number, at) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let log = File::create(scratch.path("log")).expect("a file");
        let child = command.stdout(Stdio::null()).stderr(log).spawn().expect("a daemon");
        Managed { daemon: Daemon { child, scratch }, notified, _listener: listener }
    }

    /// What it has told its manager, and written, once it waits for pages.
    fn said(&self) -> (String, String) {
        self.daemon.wait_for("bytes missing");
        self.notified.set_nonblocking(true).expect("a flag");
        let (mut told, mut bytes) = (String::new(), [0; 4096]);
        while let Ok(got) = self.notified.recv(&mut bytes) {
            told.push_str(&String::from_utf8_lossy(&bytes[..got]));
        }
        (told, std::fs::read_to_string(self.daemon.scratch.path("log")).expect("text"))
    }
}

fn number(fd: impl AsFd) -> u64 {
    fstat(fd).expect("open").st_ino
}

/// A manager that passes no names (or an older one) starts the daemon all the same. Only by its name a file is one that nobody has had:
/// what is kept can be made to look like one.
#[test]
fn what_is_passed_without_a_name_is_not_lent() {
    let ready = || {
        let file = MemoryFile::new(Page::Transparent, BYTES).expect("a file").into_fd();
        // Of whatever pages.
        fallocate(&file, FallocateFlags::empty(), 0, BYTES).expect("memory");
        file
    };
    let named = ready();
    let managed = Managed::start("managed-named", &[&named], Some(&format!("memory-{}", number(&named))));
    managed.daemon.wait_for(&format!("\"ready\":[{BYTES}]"));
    let managed = Managed::start("managed-unnamed", &[&ready()], None);
    managed.daemon.wait_for("\"ready\":[]");
    let (told, log) = managed.said();
    assert!(told.contains("READY=1") && !told.contains("FDNAME=memory-"), "{told}, {log}");
}

/// Kept memory whose record another version has written stays with the manager, and a line says so.
#[test]
fn a_record_that_nobody_can_read_is_named_and_left() {
    let memory = MemoryFile::new(Page::Transparent, BYTES).expect("a file").into_fd();
    let mut record = File::from(memfd_create(c"record", MemfdFlags::CLOEXEC).expect("a file"));
    write!(record, "{:4096}", r#"{"owners":[7]}"#).expect("written");
    let name = format!("kept-{}", number(&memory));
    let managed = Managed::start("managed-unread", &[&memory, &record.into()], Some(&format!("{name}:{name}")));
    let (told, log) = managed.said();
    assert!(told.contains("READY=1") && !told.contains("FDSTOREREMOVE=1"), "{told}");
    let lines: Vec<_> = log.lines().filter(|line| line.contains("\"event\":\"unread\"")).collect();
    assert!(matches!(lines[..], [line] if line.contains(&name) && line.contains("--what=fdstore")), "{log}");
}

/// Whoever opens kept memory while the daemon asks the kernel who has it (F_SETLEASE) has SIGIO sent to it.
#[test]
fn a_daemon_outlives_the_signal_of_a_file_lease() {
    let managed = Managed::start("managed-signal", &[], None);
    managed.said();
    let pid = managed.daemon.child.id() as i32;
    // SAFETY: a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGIO) }, 0);
    managed.daemon.wait_for("\"leases\":[]");
}
