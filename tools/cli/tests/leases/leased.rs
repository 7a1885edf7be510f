//! Leases of the kernel's own huge pages: kept memory cleared, figures fetched, stock QEMU started.

use crate::support::lease::{Daemon, with_pool};
use crate::support::{Scratch, document, hugemm, misused, refused, rows};
use hugemm_lease::wire::{self, Answer, Refused, RefusedKind};
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, connect, listen, socket_with};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Runs a command of the shell on the memory that is kept as `cache`.
fn on_kept(daemon: &Daemon, options: &[&str], command: &str) -> Output {
    let (socket, secret) = (daemon.scratch.path("socket"), daemon.scratch.path("secret"));
    let mut words = vec!["lease", "8MB", "--require", "--socket", &socket, "--keep", "cache", "--secret", &secret];
    words.extend(options);
    words.extend(["--", "sh", "-c", command]);
    let output = hugemm(&words);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    daemon.wait_for("\"leases\":[]");
    output
}

/// Kept memory has its bytes, all of them, until its owner wants it cleared; then none.
#[test]
fn kept_memory_is_cleared_where_its_owner_says_so() {
    with_pool(8, || {
        let daemon = Daemon::start("leased-scrub", 8, &[]);
        // Huge pages cannot be written by `write`; a program that maps them can.
        let me = std::env::current_exe().expect("a path");
        let write = format!("LEASED=@LEASE@ {} --ignored program_that_maps_what_is_leased --nocapture", me.display());
        let count = |output: &Output| {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let line = text.lines().find_map(|line| line.split("bytes set: ").nth(1)).map(str::to_owned);
            line.unwrap_or_else(|| panic!("{text}"))
        };
        assert_eq!(count(&on_kept(&daemon, &[], &write)), "0", "fresh");
        assert_eq!(count(&on_kept(&daemon, &[], &write)), "8388608", "kept");
        let cleared = on_kept(&daemon, &["--scrub"], &write);
        assert_eq!(count(&cleared), "0", "cleared");
        assert!(String::from_utf8_lossy(&cleared.stderr).contains("cleared what was kept"));
        misused(&["lease", "8MB", "--scrub", "--", "true"], "--keep");
    });
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
    with_pool(8, || {
        let daemon = Daemon::start("leased-metrics", 8, &[]);
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
    });
}

/// As a script that has just started a daemon does.
#[test]
fn what_is_not_ready_yet_is_waited_for() {
    with_pool(8, || {
        let scratch = Scratch::new("leased-wait");
        let socket = scratch.path("socket");
        let wait = |seconds| hugemm(&["pool", "status", "--wait", seconds, "--json", "--socket", &socket]);
        let nobody = wait("1");
        assert!(!nobody.status.success() && String::from_utf8_lossy(&nobody.stderr).contains("no lease daemon"));
        let serve = |options: &[&str]| {
            let words = ["pool", "serve", "--size", "8MB", "--shape", "4MBx2", "--socket", &socket];
            let mut daemon = Command::new(env!("CARGO_BIN_EXE_hugemm"));
            daemon.args(words).args(options).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
            daemon.spawn().expect("a daemon")
        };
        for (options, ready) in [(&[][..], true), (&["--keep-free", "1TB"], false)] {
            let mut daemon = serve(options);
            let output = wait(if ready { "60" } else { "2" });
            daemon.kill().expect("killed");
            daemon.wait().expect("ended");
            let line = String::from_utf8_lossy(&output.stderr);
            let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a document");
            assert_eq!(output.status.success(), ready, "{line}");
            assert_eq!(status["ready"].as_array().map(Vec::len), Some(if ready { 2 } else { 0 }), "{status}");
            assert!(ready || line.contains("not all is ready after 2 s"), "{line}");
        }
    });
}

/// What a command has changed is seen in its answer.
#[test]
fn commands_answer_with_how_things_stand() {
    with_pool(8, || {
        let daemon = Daemon::start("leased-commands", 8, &[]);
        let socket = daemon.scratch.path("socket");
        let file = daemon.scratch.path("status.json");
        let told = |words: &[&str]| {
            let output = hugemm(&[words, &["--socket", &socket]].concat());
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        };
        let status = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).expect("one document");
        let drained = status(&told(&["pool", "drain", "--json"]));
        assert_eq!((&drained["drained"], &drained["ready"]), (&true.into(), &serde_json::json!([])));
        let to_a_file = told(&["pool", "fill", &format!("--json={file}")]);
        assert_eq!(status(&std::fs::read(&file).expect("written"))["drained"], false);
        daemon.wait_for("\"ready\":[8388608]");
        let secret = daemon.scratch.path("secret");
        let keep = ["lease", "8MB", "--require", "--keep", "a", "--secret", &secret, "--socket", &socket, "--", "true"];
        assert!(hugemm(&keep).status.success());
        let forgotten = status(&told(&["pool", "forget", "a", "--secret", &secret, "--json"]));
        assert_eq!(forgotten["kept"], serde_json::json!([]));
        assert!(to_a_file.is_empty() && told(&["pool", "drain"]).is_empty(), "nothing for people");
    });
}

/// A secret that a full disk has no room for is one that nobody has: what is left of its file keeps nobody from leasing later.
#[test]
fn a_secret_that_could_not_be_written_is_no_secret() {
    with_pool(8, || {
        let daemon = Daemon::start("leased-full", 8, &[]);
        let (socket, secret) = (daemon.scratch.path("socket"), daemon.scratch.path("secret"));
        let lease = |before: &str| {
            daemon.wait_for("\"ready\":[8388608]");
            let hugemm = env!("CARGO_BIN_EXE_hugemm");
            let run = format!(
                "{before} {hugemm} lease 8MB --require --keep a --secret {secret} --socket {socket} -- echo ran"
            );
            let output = Command::new("sh").args(["-c", &run]).output().expect("it starts");
            daemon.wait_for("\"leases\":[]");
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
        };
        // A file may be made, and not be written, as on a disk that is full.
        let said = lease("trap '' XFSZ; ulimit -f 0;");
        assert!(said.contains("cannot be written, so the memory is not kept"), "{said}");
        assert!(!std::fs::exists(&secret).expect("looked at"));
        // What the end of a client between the two leaves, for all to read.
        let said = lease(&format!(": > {secret}; chmod 666 {secret};"));
        assert!(said.contains("ran"), "{said}");
        assert_eq!(std::fs::metadata(&secret).expect("a file").permissions().mode() & 0o777, 0o600);
        daemon.wait_for("\"lease\":null");
        assert!(lease("").contains("ran"));
    });
}

/// However few descriptors a program may have, it has its lease, or it runs as without, and a line says so: never does the call fail
/// that makes its memory.
#[test]
fn a_program_that_may_open_little_runs() {
    with_pool(8, || {
        let daemon = Daemon::start("leased-few", 8, &[]);
        let (socket, file) = (daemon.scratch.path("socket"), daemon.scratch.path("file"));
        let mut without = 0;
        for descriptors in 4..12 {
            daemon.wait_for("\"ready\":[8388608]");
            let run = format!(
                "ulimit -S -n {descriptors}; exec {} lease 8MB --socket {socket} -- truncate -s 8M {file}",
                env!("CARGO_BIN_EXE_hugemm")
            );
            let output = Command::new("sh").args(["-c", &run]).output().expect("it starts");
            let line = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && line.lines().count() < 2, "{descriptors}: {line}");
            without += usize::from(line.contains("is started without"));
            daemon.wait_for("\"leases\":[]");
        }
        assert!((1..7).contains(&without), "{without} were started without");
    });
}

/// A daemon that does not answer keeps no program waiting for its memory.
#[test]
fn a_stopped_daemon_is_not_waited_for() {
    with_pool(8, || {
        let daemon = Daemon::start("leased-stopped", 8, &[]);
        let signal = |signal| {
            // SAFETY: a child that has not been waited for.
            assert_eq!(unsafe { libc::kill(daemon.child.id() as i32, signal) }, 0);
        };
        signal(libc::SIGSTOP);
        let socket = daemon.scratch.path("socket");
        let words = ["60", env!("CARGO_BIN_EXE_hugemm"), "lease", "8MB", "--socket", &socket, "--", "echo", "ran"];
        let output = Command::new("timeout").args(words).output().expect("it starts");
        let line = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && output.stdout == b"ran\n" && line.contains("is it stopped?"), "{line}");
        // What it was asked for and nobody wants any more is not lent.
        signal(libc::SIGCONT);
        daemon.wait_for("\"leases\":[]");
        daemon.wait_for("\"ready\":[8388608]");
    });
}

/// Whoever reads what a daemon says may stop doing so: it lends and ends as before.
#[test]
fn nobody_waits_for_who_reads_the_daemons_log() {
    with_pool(8, || {
        let scratch = Scratch::new("leased-unread");
        let socket = scratch.path("socket");
        let (unread, mut log) = std::io::pipe().expect("a pipe");
        rustix::fs::fcntl_setfl(&log, OFlags::NONBLOCK).expect("its own");
        while std::io::Write::write(&mut log, &[b' '; 4096]).is_ok() {}
        rustix::fs::fcntl_setfl(&log, OFlags::empty()).expect("its own");
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_hugemm"));
        daemon.args(["pool", "serve", "--size", "8MB", "--socket", &socket]).stderr(log);
        let mut daemon = daemon.spawn().expect("it starts");
        let wait = hugemm(&["pool", "status", "--wait", "60", "--socket", &socket]);
        assert!(wait.status.success(), "{}", String::from_utf8_lossy(&wait.stderr));
        let leased = hugemm(&["lease", "8MB", "--require", "--socket", &socket, "--", "true"]);
        assert!(leased.status.success(), "{}", String::from_utf8_lossy(&leased.stderr));
        // SAFETY: a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(daemon.id() as i32, libc::SIGTERM) }, 0);
        assert!(daemon.wait().expect("it ends").success());
        drop(unread);
    });
}

/// A daemon whose place was named from its own directory is found again from another, when an answer takes longer than one waits for it.
#[test]
fn a_daemon_in_another_directory_is_found_again() {
    let scratch = Scratch::new("leased-relative");
    // From this program's directory, as the daemon's.
    let up = "../".repeat(std::env::current_dir().expect("a directory").components().count() - 1);
    let relative = format!("{up}{}", scratch.path("s").trim_start_matches('/'));
    let daemon = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket");
    bind(&daemon, &SocketAddrUnix::new(&relative).expect("an address")).expect("bound");
    listen(&daemon, 4).expect("listens");
    let no = |message: &str| Answer::Refused(Refused { kind: RefusedKind::Empty, message: message.to_owned() });
    let line = std::thread::scope(|scope| {
        scope.spawn(|| {
            let first = accept(&daemon).expect("a client");
            // Which asks after five seconds whether anybody is there.
            let again = accept(&daemon).expect("the client");
            let _ = wire::send(again.as_fd(), &no("busy"), None);
            let _ = wire::send(first.as_fd(), &no("none at last"), None);
        });
        let mut client = Command::new(env!("CARGO_BIN_EXE_hugemm"));
        client.args(["lease", "8MB", "--require", "--socket", &scratch.path("s"), "--fd", "7", "--", "true"]);
        let output = client.current_dir("/").output().expect("it starts");
        // Where it has not asked again, nobody else does.
        let other = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let _ = connect(other.expect("a socket"), &SocketAddrUnix::new(&relative).expect("an address"));
        String::from_utf8_lossy(&output.stderr).into_owned()
    });
    assert!(line.contains("none at last"), "{line}");
}

/// Who may lease how much is read again when its file changes, or another takes its place, however old; what is wrong changes nothing.
#[test]
fn a_policy_is_read_again() {
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root has other users");
        return;
    }
    with_pool(8, || {
        let scratch = Scratch::new("leased-policies");
        let policy = scratch.put("policy", "uid 65534 4MB\n");
        let daemon = Daemon::start("leased-policy", 8, &["--policy", &policy]);
        let [command, socket] = ["hugemm", "socket"].map(|name| daemon.scratch.path(name));
        std::fs::copy(env!("CARGO_BIN_EXE_hugemm"), &command).expect("copied");
        let is_forbidden = || {
            let words = ["lease", "8MB", "--require", "--socket", &socket, "--fd", "7", "--", "true"];
            let output = Command::new(&command).args(words).uid(65534).gid(65534).output().expect("it starts");
            String::from_utf8_lossy(&output.stderr).contains("the policy allows")
        };
        let wait_until_forbidden = |wanted: bool| {
            let end = Instant::now() + Duration::from_secs(30);
            while is_forbidden() != wanted {
                assert!(Instant::now() < end, "not read again");
                std::thread::sleep(Duration::from_millis(50));
            }
        };
        wait_until_forbidden(true);
        scratch.put("policy", "uid 65534 8MB\n");
        wait_until_forbidden(false);
        let other = scratch.put("other", "uid 65534 4MB\n");
        let time = std::fs::metadata(&policy).and_then(|file| file.modified()).expect("a time");
        File::options().write(true).open(&other).and_then(|file| file.set_modified(time)).expect("as old");
        std::fs::rename(other, policy).expect("in its place");
        wait_until_forbidden(true);
        scratch.put("policy", "uid 65534 a lot\n");
        std::thread::sleep(Duration::from_millis(500));
        assert!(is_forbidden(), "nothing has changed");
        scratch.put("policy", "uid 65534 8MB\n");
        wait_until_forbidden(false);
    });
}

/// What is wrong is named, and what is wanted; no directories are made for what is likely a slip.
#[test]
fn words_that_cannot_be_meant_are_refused_by_name() {
    for words in [&["lease", "8MB", "--node", "x", "--", "true"][..], &["pool", "forget", "a", "--user", "x"]] {
        misused(words, "'x' is no number");
    }
    misused(&["pool", "serve", "--size", "1GB", "--shape", "1GBxtwo"], "'two' is no number of files");
    refused(&["bench", "lease", "--qemu", "/nosuch"], &["/nosuch", "--qemu"]);
    let scratch = Scratch::new("leased-slip");
    let long = scratch.path(&format!("{}/socket", "x".repeat(100)));
    refused(&["pool", "serve", "--page", "thp", "--size", "2MB", "--socket", &long], &["cannot listen", "--socket"]);
    assert!(!std::path::Path::new(&long).parent().expect("a directory").exists());
    let socket = scratch.path("nosuch/deeper/socket");
    let words = ["10", env!("CARGO_BIN_EXE_hugemm"), "pool", "serve", "--page", "thp", "--size", "2MB", "--socket"];
    let output = Command::new("timeout").args(words).arg(&socket).output().expect("it starts");
    let line = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && line.contains("cannot be made"), "{line}");
    assert!(!std::path::Path::new(&scratch.path("nosuch")).exists());
}

/// Every way is measured, and checked to be what it says: the bench ends with an error where QEMU did not get the lease.
#[test]
fn stock_qemu_starts_in_every_way() {
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        eprintln!("skipped: no QEMU");
        return;
    }
    with_pool(16, || {
        // QEMU that writes down what it is told.
        let scratch = Scratch::new("lease-ways");
        let log = scratch.path("log");
        let qemu = scratch.put("qemu", format!("#!/bin/sh\necho \"$*\" >>'{log}'\nexec qemu-system-x86_64 \"$@\"\n"));
        std::fs::set_permissions(&qemu, PermissionsExt::from_mode(0o755)).expect("executable");
        let words =
            ["bench", "lease", "--sizes", "32MB,4096TB", "--runs", "1", "--warmup", "0", "--qemu", &qemu, "--json"];
        let document = document(&words);
        let told = std::fs::read_to_string(&log).expect("QEMU was started");
        // Each way but kept memory, which takes two starts, has one on ordinary memory before it; one asks for the version, and one is the
        // first use; a machine is saved, and restored on three kinds of memory.
        assert_eq!(told.lines().count(), 24, "{told}");
        assert_eq!(told.lines().filter(|words| words.contains("reserve=off")).count(), 8, "{told}");
        assert_eq!(told.lines().filter(|words| words.contains("prealloc=off")).count(), 2, "{told}");
        let times = rows(&document, "bench.lease.exec_to_ready");
        assert_eq!(times.len(), 10);
        assert!(times.iter().all(|row| row["value"].as_f64().is_some_and(|ms| ms > 0.0) && row["size"] == 32 << 20));
        for metric in ["bench.lease.restore_to_running", "bench.lease.restore_to_touched"] {
            let restored = rows(&document, metric);
            let memories: Vec<_> = restored.iter().map(|row| row["memory"].as_str().expect("a name")).collect();
            assert_eq!(memories, ["leased, template", "file, page cache", "file, cold"]);
        }
        let filtered = &rows(&document, "bench.lease.filter_cpu")[0];
        // Whatever else the machine does.
        assert!(filtered["value"].as_f64().is_some_and(|ratio| (0.2..5.0).contains(&ratio)), "{filtered}");
        let pins = rows(&document, "bench.lease.pin");
        assert_eq!(pins.iter().filter(|row| row["by"] == "io_uring").count(), 7);
        assert_eq!(rows(&document, "lease.vs_no_prealloc")[0]["goal"], 1.2);
        let filled = rows(&document, "bench.lease.filled")[0]["value"].as_f64();
        assert!(filled >= Some(9.0 / 32.0), "{filled:?} GiB, for 9 ways of 32 MiB");
        assert!(
            rows(&document, "bench.lease.fill_cpu_per_gib")[0]["value"].as_f64().is_some_and(|seconds| seconds > 0.0)
        );
    });
}
