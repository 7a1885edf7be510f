//! Leases of the kernel's own huge pages: kept memory cleared, figures fetched, stock QEMU started.

mod support;

use hugemm_base::PageSize;
use hugemm_inspect::pool::{HugetlbPool, PoolGuard};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use support::{Scratch, document, hugemm, misused, rows};

/// The kernel's pool with that many free pages, for one test at a time; `None`, and a line, where they are not to be had.
fn pool(pages: u64) -> Option<(PoolGuard, File)> {
    let lock = std::env::temp_dir().join("hugemm-lease-pool.lock");
    let lock = File::options().create(true).truncate(false).write(true).open(lock).expect("a lock file");
    lock.lock().expect("locked");
    match HugetlbPool::new().ensure(PageSize::Size2M, pages, None) {
        Ok(more) => Some((more, lock)),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// A daemon with one file of 8 MiB ready, ended when dropped.
struct Daemon {
    child: Child,
    scratch: Scratch,
}

impl Daemon {
    fn start(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let child = Command::new(env!("CARGO_BIN_EXE_hugemm"))
            .args(["pool", "serve", "--size", "8MB", "--shape", "8MB"])
            .args(["--socket", &scratch.path("socket"), "--metrics", &scratch.path("metrics")])
            .stdout(Stdio::null())
            .spawn()
            .expect("a daemon");
        let daemon = Daemon { child, scratch };
        daemon.wait_for("\"ready\":[8388608]");
        daemon
    }

    /// Waits until the status has this in it.
    #[track_caller]
    fn wait_for(&self, what: &str) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let output = hugemm(&["pool", "status", "--json", "--socket", &self.scratch.path("socket")]);
            let said = String::from_utf8_lossy(&output.stdout);
            if said.contains(what) {
                return;
            }
            assert!(Instant::now() < end, "never {what}: {said}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs a command of the shell on the memory that is kept as `cache`.
    fn on_kept(&self, options: &[&str], command: &str) -> Output {
        let (socket, secret) = (self.scratch.path("socket"), self.scratch.path("secret"));
        let mut words = vec!["lease", "8MB", "--require", "--socket", &socket, "--keep", "cache", "--secret", &secret];
        words.extend(options);
        words.extend(["--", "sh", "-c", command]);
        let output = hugemm(&words);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.wait_for("\"leases\":[]");
        output
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kept memory has its bytes, all of them, until its owner wants it cleared; then none.
#[test]
fn kept_memory_is_cleared_where_its_owner_says_so() {
    let Some(_pool) = pool(8) else { return };
    let daemon = Daemon::start("leased-scrub");
    // Huge pages cannot be written by `write`; a program that maps them can.
    let me = std::env::current_exe().expect("a path");
    let write =
        format!("LEASED=@LEASE@ {} --ignored --exact program_that_maps_what_is_leased --nocapture", me.display());
    let count = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find_map(|line| line.split("bytes set: ").nth(1)).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{text}"))
    };
    assert_eq!(count(&daemon.on_kept(&[], &write)), "0", "fresh");
    assert_eq!(count(&daemon.on_kept(&[], &write)), "8388608", "kept");
    let cleared = daemon.on_kept(&["--scrub"], &write);
    assert_eq!(count(&cleared), "0", "cleared");
    assert!(String::from_utf8_lossy(&cleared.stderr).contains("cleared what was kept"));
    misused(&["lease", "8MB", "--scrub", "--", "true"], "--keep");
}

/// Says how many bytes of its memory are set, and sets them all.
#[test]
#[ignore = "a program for another test to run"]
fn program_that_maps_what_is_leased() {
    let file =
        File::options().read(true).write(true).open(std::env::var_os("LEASED").expect("a path")).expect("opened");
    let bytes = file.metadata().expect("metadata").len() as usize;
    // SAFETY: at an address of the kernel's choice; the file has that length, and nobody else has it.
    let memory = unsafe {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let at = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            rights,
            libc::MAP_SHARED,
            std::os::fd::AsRawFd::as_raw_fd(&file),
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        std::slice::from_raw_parts_mut(at.cast::<u8>(), bytes)
    };
    println!("bytes set: {}", memory.iter().filter(|byte| **byte != 0).count());
    memory.fill(0xff);
}

#[test]
fn figures_are_fetched_from_a_socket() {
    let Some(_pool) = pool(8) else { return };
    let daemon = Daemon::start("leased-metrics");
    let output = hugemm(&["lease", "8MB", "--require", "--socket", &daemon.scratch.path("socket"), "--", "true"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let fetch = |request: &str| {
        let mut stream = UnixStream::connect(daemon.scratch.path("metrics")).expect("connected");
        stream.write_all(request.as_bytes()).expect("asked");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    let answer = fetch("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("application/openmetrics-text"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    for line in ["hugemm_lease_requests_total{result=\"hit\"} 1", "hugemm_lease_time_seconds_count 1", "# EOF"] {
        assert!(body.lines().any(|found| found == line), "{line} in {body}");
    }
    assert!(fetch("GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(fetch("POST / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
}

/// Every way is measured, and checked to be what it says: the bench ends with an error where QEMU did not get the lease.
#[test]
fn stock_qemu_starts_in_every_way() {
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        eprintln!("skipped: no QEMU");
        return;
    }
    let Some(_pool) = pool(48) else { return };
    let document = document(&["bench", "lease", "--sizes", "32MB", "--runs", "1", "--warmup", "0", "--json"]);
    let times = rows(&document, "bench.lease.exec_to_ready");
    assert_eq!(times.len(), 7);
    assert!(times.iter().all(|row| row["value"].as_f64().is_some_and(|ms| ms > 0.0) && row["size"] == 32 << 20));
    for goal in ["wrapper", "path", "descriptor"] {
        assert_eq!(rows(&document, &format!("lease.{goal}_vs_prealloc_off"))[0]["goal"], 1.2);
    }
    assert!(rows(&document, "bench.lease.fill_cpu_per_gib")[0]["value"].as_f64().is_some_and(|seconds| seconds > 0.0));
}
