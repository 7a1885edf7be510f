//! The client libraries, each by a program of its language: C, Python, Rust. A daemon in this process serves them.

#[path = "../../lease/tests/support/mod.rs"]
mod support;

use hugemm_lease::client::Connection;
use hugemm_lease::daemon::{Daemon, PoolConfig};
use hugemm_lease::filler::{Manners, fill};
use hugemm_lease::listener::Listener;
use hugemm_lease::memory_file::Page;
use hugemm_lease::server::serve;
use hugemm_lease::stock::Shapes;
use hugemm_lease::wire::{Answer, Request, Wish};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use support::{PAGE, Pool, judged, wait_for};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const LEASE: u64 = 2 * PAGE;

/// As many as a client asks for, so that none has to wait.
const FILES: u64 = 9;

/// Runs `client` with the socket of a daemon and a directory; skips, with a line, where there are no huge pages.
fn with_daemon(name: &str, client: impl FnOnce(&Path, &Path)) {
    judged(|| serving(name, client));
}

fn serving(name: &str, client: impl FnOnce(&Path, &Path)) {
    let Some(pool) = Pool::with_free(FILES * LEASE / PAGE) else { return };
    let dir = std::env::temp_dir().join(format!("hugemm-clients-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let socket = dir.join("socket");
    let shapes = Shapes::new(&[(LEASE, FILES)], FILES * LEASE, PAGE).expect("shapes");
    let config = PoolConfig::new(Page::Huge2M, shapes, FILES * LEASE, rustix::process::geteuid().as_raw());
    let daemon = Arc::new(Daemon::new(config));
    let listener = Listener::bind(&socket, false).expect("a socket");
    let (told, stop) = std::io::pipe().expect("a pipe");
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| fill(&daemon, &Manners::default()));
        scope.spawn(|| serve(&daemon, &listener, told.as_fd()));
        // The threads end before a panic goes on.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_for("memory is ready", || {
                let answer = Connection::open(&socket).and_then(|daemon| daemon.ask(&Request::Status {}));
                matches!(answer, Ok((Answer::Status(status), _)) if status.ready.len() as u64 == FILES)
            });
            client(&socket, &dir)
        }));
        drop(stop);
        ended
    });
    drop((daemon, listener));
    std::fs::remove_dir_all(dir).expect("removed");
    if let Err(panic) = ended {
        std::panic::resume_unwind(panic);
    }
    pool.wait_until_lacks(0);
}

/// Runs a program to its end, which is to say `ok`.
#[track_caller]
fn says_ok(command: &mut Command) {
    let output = command.output().expect("it starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.ends_with("ok\n"), "{out}{err}");
}

fn is_there(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("skipped: no {program}");
    }
    found
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The library that cargo built for this test: the newest, if former builds left some.
fn library() -> PathBuf {
    let deps = std::env::current_exe().expect("a path").parent().expect("a directory").to_path_buf();
    let files = std::fs::read_dir(deps).expect("readable").flatten().map(|entry| entry.path());
    let of_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libhugemm_lease_c") && name.ends_with(".a")
    };
    files.filter(of_ours).max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok()).expect("a library")
}

#[test]
fn a_program_in_c() {
    if !is_there("cc") {
        return;
    }
    with_daemon("c", |socket, dir| {
        let program = dir.join("lease");
        let built = Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
            .arg(source("include"))
            .arg(source("tests/lease.c"))
            .arg("-o")
            .arg(&program)
            .arg(library())
            .args(["-lpthread", "-ldl", "-lm"])
            .output()
            .expect("it starts");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        says_ok(Command::new(program).arg(socket).arg(dir.join("secret")));
    });
}

#[test]
fn a_program_in_python() {
    if !is_there("python3") {
        return;
    }
    with_daemon("python", |socket, dir| {
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", source("../lease/python")).env("PYTHONDONTWRITEBYTECODE", "1");
        says_ok(python.arg(source("../lease/python/test_lease.py")).arg(socket).arg(dir.join("secret")));
    });
}

#[test]
fn a_program_in_rust() {
    with_daemon("rust", |socket, _| {
        let wish = Wish::of(LEASE);
        let lease = Connection::open(socket).and_then(|daemon| daemon.lease(wish)).expect("a lease");
        let mapping = lease.map().expect("mapped");
        assert_eq!(mapping.bytes() as u64, LEASE);
        // SAFETY: mapped, as long as `mapping`, and nobody else has the file.
        let memory = unsafe { std::slice::from_raw_parts_mut(mapping.at().as_ptr().cast::<u8>(), mapping.bytes()) };
        assert!(memory.iter().all(|byte| *byte == 0));
        memory.fill(1);
        drop(mapping);
        lease.end().expect("ended");
    });
}

/// A machine's memory as monitors in Rust have it.
#[test]
fn a_region_of_vm_memory() {
    with_daemon("vm-memory", |socket, _| {
        let wish = Wish::of(LEASE);
        let lease = Connection::open(socket).and_then(|daemon| daemon.lease(wish)).expect("a lease");
        let file = FileOffset::new(lease.file.try_clone().expect("a descriptor").into(), 0);
        let ranges = [(GuestAddress(0), LEASE as usize, Some(file))];
        let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges_with_files(ranges).expect("mapped");
        let last = GuestAddress(LEASE - 8);
        assert_eq!(memory.read_obj::<u64>(last).expect("there"), 0);
        memory.write_obj(0x5a5a_u64, last).expect("there");
        let mapping = lease.map().expect("mapped");
        // SAFETY: within the mapping, aligned, and nobody writes it now.
        let seen = unsafe { mapping.at().cast::<u8>().add(mapping.bytes() - 8).cast::<u64>().read() };
        assert_eq!(seen, 0x5a5a, "it is the lease's memory");
        drop((memory, mapping));
        lease.end().expect("ended");
    });
}
