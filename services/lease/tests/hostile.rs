//! Clients who mean no good, over the socket: what they can have, see, and keep from others.

mod support;

use hugemm_lease::client::{ClientError, Connection, Lease};
use hugemm_lease::daemon::{Daemon, PoolConfig};
use hugemm_lease::filler::{Manners, fill};
use hugemm_lease::listener::Listener;
use hugemm_lease::memory_file::Page;
use hugemm_lease::policy::LendingPolicy;
use hugemm_lease::server::serve;
use hugemm_lease::status::{Left, Status};
use hugemm_lease::stock::Shapes;
use hugemm_lease::wire::{self, Answer, Forget, KeepAs, RefusedKind, Request, Wish};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{BufRead, ErrorKind, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use support::{PAGE, Pool, judged, wait_for};

/// Users that the policy names, with two pages each, and one that it does not.
const NAMED: [u32; 2] = [61_001, 61_002];
const STRANGER: u32 = 61_003;

/// A group that the policy names, with two pages.
const GROUP: u32 = 61_004;

/// As many as any attack takes, so that nothing waits for filling, which a busy machine has no time for.
const FILES: u64 = 5;

/// Runs `attack` beside a daemon with all files ready; skips, with a line, where there are no pages or no other users can be had.
fn with_daemon(name: &str, attack: impl FnOnce(&Path)) {
    // First: whoever waits for the pool has its file open.
    let alone = alone();
    judged(|| {
        let Some(pool) = Pool::with_free(FILES) else { return };
        serving(&alone, name, FILES, |socket| {
            wait_for("all is ready", || status(socket).ready.len() as u64 == FILES);
            attack(socket);
        });
        pool.wait_until_lacks(0);
    });
}

/// What one does with this process's descriptors is not for the others.
fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `attack` beside a daemon that is to have so many files.
fn serving(_alone: &MutexGuard<'_, ()>, name: &str, files: u64, attack: impl FnOnce(&Path)) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be other users");
        return;
    }
    let socket = std::env::temp_dir().join(format!("hugemm-hostile-{name}-{}", std::process::id()));
    let shapes = Shapes::new(&[(PAGE, files)], files * PAGE, PAGE).expect("shapes");
    let lines = format!("uid {} 4\nuid {} 4\ngid {GROUP} 4\n", NAMED[0], NAMED[1]);
    let size = |text: &str| text.parse::<u64>().ok().map(|mib| mib << 20);
    let policy = LendingPolicy::read(0, &lines, size).expect("lines");
    let config = PoolConfig { policy, ..PoolConfig::new(Page::Huge2M, shapes, files * PAGE, 0) };
    let daemon = Arc::new(Daemon::new(config));
    let listener = Listener::bind(&socket, true).expect("a socket");
    let (stop, told) = std::io::pipe().expect("a pipe");
    std::thread::scope(|scope| {
        scope.spawn(|| fill(&daemon, &Manners::default()));
        scope.spawn(|| serve(&daemon, &listener, stop.as_fd()));
        // Ends the daemon even if the attack succeeds.
        let attacked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            attack(&socket);
            wait_for("nothing is lent", || status(&socket).leases.is_empty());
        }));
        drop(told);
        if let Err(cause) = attacked {
            daemon.stop();
            std::panic::resume_unwind(cause);
        }
    });
}

/// As root, whom every daemon answers.
fn status(socket: &Path) -> Status {
    match Connection::open(socket).and_then(|daemon| daemon.ask(&Request::Status {})) {
        Ok((Answer::Status(status), _)) => *status,
        other => panic!("root is not answered: {other:?}"),
    }
}

fn connect(path: &Path) -> std::io::Result<OwnedFd> {
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

/// On a thread that is that user: its connections are, and stay, that user's.
fn as_user<R: Send>(uid: u32, run: impl FnOnce() -> R + Send) -> R {
    as_member(uid, uid, &[], run)
}

/// The same, of those groups.
fn as_member<R: Send>(uid: u32, gid: u32, groups: &[u32], run: impl FnOnce() -> R + Send) -> R {
    let thread = || {
        // SAFETY: the calls themselves, not the C library's, which change every thread's user; the groups outlive theirs.
        let changed = unsafe {
            libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) == 0
                && libc::syscall(libc::SYS_setresgid, gid, gid, gid) == 0
                && libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0
        };
        assert!(changed, "root may");
        run()
    };
    std::thread::scope(|scope| scope.spawn(thread).join()).unwrap_or_else(|cause| std::panic::resume_unwind(cause))
}

fn lease(socket: &Path, uid: u32, bytes: u64) -> Result<Lease, ClientError> {
    let wish = Wish::of(bytes);
    as_user(uid, || Connection::open(socket)?.lease(wish))
}

/// A lease is as long as its process, which is this one for all of them.
fn end(leases: impl IntoIterator<Item = Lease>) {
    leases.into_iter().for_each(|lease| lease.end().expect("heard"));
}

#[track_caller]
fn is_refused<T: std::fmt::Debug>(result: Result<T, ClientError>, why: &str) {
    match result.expect_err("refused") {
        ClientError::Refused(refused) => {
            assert!(refused.kind == RefusedKind::LendingPolicy && refused.message.contains(why), "{refused:?}");
        }
        other => panic!("{other}"),
    }
}

/// Memory counts as long as anybody has it, whoever says that its lease is over.
#[test]
fn a_quota_is_not_passed_by_ending_leases() {
    with_daemon("quota", |socket| {
        let [user, other] = NAMED;
        let (first, second) = (lease(socket, user, PAGE).expect("leased"), lease(socket, user, PAGE).expect("leased"));
        is_refused(lease(socket, user, PAGE), "has 4194304 leased already");
        let copy = first.file.try_clone().expect("a descriptor");
        first.end().expect("heard");
        second.end().expect("heard");
        wait_for("one is back", || status(socket).left == [Left { uid: user, bytes: PAGE }]);
        let third = lease(socket, user, PAGE).expect("as much as is back");
        is_refused(lease(socket, user, PAGE), "has 4194304 leased already");
        // A mapping is enough to have it.
        let mapped = third.map().expect("mapped");
        third.end().expect("heard");
        is_refused(lease(socket, user, 2 * PAGE), "has 4194304 leased already");
        drop((copy, mapped));
        let fourth = lease(socket, user, PAGE).expect("all is back");
        assert!(status(socket).left.is_empty());
        // Nobody else's quota was touched.
        end([lease(socket, other, PAGE).expect("leased"), fourth]);
    });
}

/// What a line for a group allows is the group's: a user with many numbers (subordinate ones, say) has no more of it.
#[test]
fn a_groups_quota_is_shared() {
    with_daemon("group", |socket| {
        let lease = |uid, bytes| {
            let wish = Wish::of(bytes);
            as_member(uid, GROUP, &[], || Connection::open(socket)?.lease(wish))
        };
        let (first, second) = (lease(62_001, PAGE).expect("leased"), lease(62_002, PAGE).expect("leased"));
        is_refused(lease(62_003, PAGE), "has 4194304 leased already");
        end([first]);
        end([lease(62_003, PAGE).expect("one is back"), second]);
    });
}

/// A program that ends before it has written the secret down leaves memory that its user can give back.
#[test]
fn kept_memory_without_a_secret_can_be_forgotten() {
    with_daemon("forget", |socket| {
        let [user, other] = NAMED;
        let keep = KeepAs { name: "cache".to_owned(), secret: None };
        let wish = Wish { keep: Some(keep.clone()), ..Wish::of(PAGE) };
        let lease = as_user(user, || Connection::open(socket)?.lease(wish)).expect("leased");
        let forget = |uid| {
            let forget = Request::Forget(Forget { keep: keep.clone(), uid: None });
            as_user(uid, || Connection::open(socket)?.ask(&forget))
        };
        assert!(matches!(forget(user), Err(ClientError::Refused(why)) if why.message.contains("secret")), "in use");
        end([lease]);
        assert!(forget(other).is_err(), "another's");
        forget(user).expect("its own, which nobody uses");
        assert!(status(socket).kept.is_empty());
        // A terminal obeys them, and a status of many would be long.
        let keep = KeepAs { name: "a\u{1b}b".to_owned(), secret: None };
        let wish = Wish { keep: Some(keep), ..Wish::of(PAGE) };
        match as_user(user, || Connection::open(socket)?.lease(wish)) {
            Err(ClientError::Refused(why)) => assert_eq!(why.kind, RefusedKind::Invalid, "{why:?}"),
            other => panic!("{other:?}"),
        }
    });
}

/// Kept memory counts until it is forgotten, also while nobody has it.
#[test]
fn kept_memory_counts_while_nobody_has_it() {
    with_daemon("kept", |socket| {
        let user = NAMED[0];
        let keep = |secret| KeepAs { name: "cache".to_owned(), secret };
        let wish = Wish { keep: Some(keep(None)), ..Wish::of(PAGE) };
        let kept = as_user(user, || Connection::open(socket)?.lease(wish)).expect("leased");
        let secret = kept.about.secret.clone();
        end([kept]);
        is_refused(lease(socket, user, 2 * PAGE), "has 2097152 leased already");
        end([lease(socket, user, PAGE).expect("as much as is left")]);
        let forget = Request::Forget(Forget { keep: keep(secret), uid: None });
        as_user(user, || Connection::open(socket)?.ask(&forget)).expect("its own");
        wait_for("it is back", || status(socket).left.is_empty());
        end([0, 1].map(|_| lease(socket, user, PAGE).expect("all of it")));
    });
}

/// The path of a lease is for its owner, and others' leases are not even named.
#[test]
fn nobody_sees_what_is_anothers() {
    with_daemon("others", |socket| {
        let [user, other] = NAMED;
        let leased = lease(socket, user, PAGE).expect("leased");
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&leased.file));
        let open = || std::fs::File::options().read(true).open(&path).map(drop).map_err(|error| error.kind());
        // A duplicate of its number: this process is root's, so the file's own mode decides.
        assert_eq!(as_user(user, open), Ok(()));
        assert_eq!(as_user(other, open), Err(std::io::ErrorKind::PermissionDenied));
        let seen = |uid| as_user(uid, || Connection::open(socket)?.ask(&Request::Status {}));
        for (uid, leases) in [(user, 1), (other, 0)] {
            match seen(uid) {
                Ok((Answer::Status(status), _)) => assert_eq!(status.leases.len(), leases, "{uid}"),
                answer => panic!("{answer:?}"),
            }
        }
        is_refused(seen(STRANGER), "no line");
        is_refused(lease(socket, STRANGER, PAGE), "no line");
        for command in [Request::Drain {}, Request::Fill {}] {
            is_refused(as_user(user, || Connection::open(socket)?.ask(&command)), "only root");
        }
        end([leased]);
    });
}

/// Descriptors of this process, among which the daemon's are, but for files of memory, which come and go.
fn descriptors() -> usize {
    let all = std::fs::read_dir("/proc/self/fd").expect("a directory").flatten();
    let links = all.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter(|link| !link.display().to_string().contains("memfd:")).count()
}

fn send(socket: &OwnedFd, text: &[u8], fds: &[&OwnedFd]) -> rustix::io::Result<usize> {
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL)
}

/// The socket that the client below is for.
const SOCKET: &str = "HUGEMM_HOSTILE_SOCKET";

/// A client that is deaf, says half of something, or goes away in the middle.
#[test]
#[ignore = "a client of the test below"]
fn client_that_makes_no_sense() {
    let Some(socket) = std::env::var_os(SOCKET).map(std::path::PathBuf::from) else { return };
    let fd = OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
    let wish: &[u8] = b"{\"lease\":{\"bytes\":2097152}}";
    let words: [&[u8]; 6] = [b"{\"lea", wish, b"\xff\xfe", b"{\"status\":{}}", b"[]", b"{\"end\":{}}"];
    as_user(NAMED[0], || {
        for round in 0..200 {
            let one = connect(&socket).expect("connected");
            // More descriptors than there is room for, too.
            let words = words[round % words.len()];
            // Two leases at most, so that there are ready files for others however slowly this machine fills.
            let words = if words == wish && round >= 2 * 6 { b"{}" } else { words };
            send(&one, words, &[&fd; 8][..round % 9]).expect("sent");
            if round % 5 == 0 {
                send(&one, &[b' '; 70_000][..60_000 + round * 50], &[&fd]).expect("sent");
            }
            // Gone before the answer.
        }
        let deaf = connect(&socket).expect("connected");
        // Until the daemon waits for answers to be taken, and no more is taken from here.
        rustix::io::ioctl_fionbio(&deaf, true).expect("a socket");
        while send(&deaf, b"{\"status\":{}}", &[]).is_ok() {}
    });
}

/// Whoever says nothing, half of something, or goes away in the middle keeps nobody from being served, and leaves nothing behind.
#[test]
fn a_client_that_makes_no_sense_is_its_own_trouble() {
    with_daemon("nonsense", |socket| {
        // And that of the watches, with the first lease.
        let before = descriptors() + 1;
        let quiet: Vec<OwnedFd> = as_user(NAMED[0], || (0..20).map(|_| connect(socket).expect("connected")).collect());
        let mut client = std::process::Command::new(std::env::current_exe().expect("a path"));
        client.args(["--ignored", "--exact", "client_that_makes_no_sense"]).env(SOCKET, socket);
        let output = client.output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        end([lease(socket, NAMED[1], PAGE).expect("others are served")]);
        drop(quiet);
        wait_for("all is closed", || descriptors() <= before);
        wait_for("nothing is lent, nor left", || status(socket).leases.is_empty() && status(socket).left.is_empty());
    });
}

/// As where a cleaner of temporary files was at work: a daemon that ends leaves the socket of the one that came after.
#[test]
fn a_daemon_that_ends_leaves_its_successors_socket() {
    let directory = std::env::temp_dir().join(format!("hugemm-successor-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("a directory");
    let socket = directory.join("socket");
    let first = Listener::bind(&socket, false).expect("a socket");
    assert_eq!(Listener::bind(&socket, false).expect_err("one at a time").kind(), ErrorKind::AddrInUse);
    std::fs::remove_dir_all(&directory).expect("cleaned");
    std::fs::create_dir(&directory).expect("a directory");
    let second = Listener::bind(&socket, false).expect("a socket");
    assert_eq!(std::fs::read_dir(&directory).expect("a directory").count(), 1, "a killed one leaves its socket alone");
    drop(first);
    connect(&socket).expect("it is there still");
    drop(second);
    assert_eq!(std::fs::read_dir(&directory).expect("a directory").count(), 0, "nothing is left");
    std::fs::remove_dir(&directory).expect("empty");
}

/// A socket that a killed daemon left is taken over by one of those who find it.
#[test]
fn one_of_many_starters_has_the_socket() {
    let socket = std::env::temp_dir().join(format!("hugemm-starters-{}", std::process::id()));
    let others: Vec<_> = (0..200).map(|_| std::sync::Barrier::new(4)).collect();
    for together in &others {
        // Bound, and nobody's any more.
        drop(std::os::unix::net::UnixListener::bind(&socket).expect("a socket"));
        let start = || {
            together.wait();
            let listener = Listener::bind(&socket, false);
            together.wait();
            listener.is_ok()
        };
        let started = std::thread::scope(|scope| {
            let starters: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
            starters.into_iter().map(|starter| usize::from(starter.join().expect("no panic"))).sum::<usize>()
        });
        assert_eq!(started, 1);
        let _ = std::fs::remove_file(&socket);
    }
}

/// A daemon that is stopped has its place, however many wait for it to answer: whoever starts another one is told so. Nor does anybody wait
/// for ever for a place that another daemon does not leave, or at all for who has the directory locked, as whoever may read it can.
#[test]
fn a_starter_does_not_wait_for_a_stopped_daemon() {
    let directory = std::env::temp_dir().join(format!("hugemm-stopped-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("a directory");
    let socket = directory.join("socket");
    let refusal_at = |socket: &Path| {
        let (tell, told) = std::sync::mpsc::channel();
        let socket = socket.to_owned();
        std::thread::spawn(move || tell.send(Listener::bind(&socket, false).map(drop).map_err(|error| error.kind())));
        told.recv_timeout(std::time::Duration::from_secs(60)).expect("it does not wait for ever").expect_err("refused")
    };
    let refusal = || refusal_at(&socket);
    let stopped = Listener::bind(&socket, false).expect("a socket");
    let mut waiting = Vec::new();
    let full = loop {
        let fd =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).expect("a socket");
        match rustix::net::connect(&fd, &SocketAddrUnix::new(&socket).expect("a name")) {
            Ok(()) => waiting.push(fd),
            Err(error) => break error,
        }
    };
    assert_eq!((full, refusal()), (rustix::io::Errno::AGAIN, ErrorKind::AddrInUse), "{} wait", waiting.len());
    let others = std::fs::File::open(&directory).expect("a directory");
    others.lock().expect("nobody has it locked");
    drop(Listener::bind(&directory.join("other"), false).expect("a socket"));
    let locked = std::fs::File::create(directory.join("socket.lock")).expect("a file");
    locked.lock().expect("nobody has it locked");
    assert_eq!(refusal(), ErrorKind::TimedOut);
    drop((others, locked));
    // Whoever may write there can put something in the way, and nobody waits for that.
    let (planted, there) = (directory.join("planted"), directory.join("planted.lock"));
    mknodat(CWD, &there, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe with a name");
    refusal_at(&planted);
    std::fs::remove_file(&there).expect("removed");
    std::os::unix::fs::symlink(directory.join("elsewhere"), &there).expect("a link");
    refusal_at(&planted);
    assert!(!directory.join("elsewhere").exists(), "nor made where it leads to");
    std::fs::remove_file(&there).expect("removed");
    drop(stopped);
    std::fs::remove_dir(&directory).expect("empty");
}

/// More is to be said than a packet holds.
#[test]
fn a_long_status_is_answered() {
    const MANY: u64 = 20_000;
    serving(&alone(), "long", MANY, |socket| assert_eq!(status(socket).wanted.len() as u64, MANY));
}

/// A user is who it is in its other groups, too.
#[test]
fn a_policy_names_every_group_of_a_user() {
    serving(&alone(), "groups", 1, |socket| {
        let ask = || Connection::open(socket)?.ask(&Request::Status {});
        assert!(as_member(STRANGER, GROUP, &[], ask).is_ok());
        assert!(as_member(STRANGER, STRANGER, &[STRANGER, GROUP], ask).is_ok());
        is_refused(as_member(STRANGER, STRANGER, &[NAMED[0]], ask), "no line");
    });
}

/// As many connections as can be had, of many users of a group, held until told.
#[test]
#[ignore = "a client of the test below"]
fn client_that_connects() {
    let Some(socket) = std::env::var_os(SOCKET).map(std::path::PathBuf::from) else { return };
    let ask = || {
        let connection = connect(&socket)?;
        rustix::net::sockopt::set_socket_timeout(
            &connection,
            rustix::net::sockopt::Timeout::Recv,
            Some(std::time::Duration::from_millis(200)),
        )?;
        // Refused or not.
        send(&connection, b"{\"status\":{}}", &[]).ok();
        let answered = wire::receive::<serde_json::Value>(connection.as_fd()).is_ok();
        std::io::Result::Ok((connection, answered))
    };
    // The daemon's limit, which is this process's as well, is not the client's.
    let all = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: all.maximum, ..all }).expect("allowed");
    let mut held = Vec::new();
    for uid in 0..300 {
        let (connection, answered) = as_member(62_000 + uid, GROUP, &[], ask).expect("connected");
        held.push(connection);
        if !answered {
            break;
        }
    }
    println!("holds");
    let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
}

/// Puts the limit of descriptors back.
struct Reset(Rlimit);

impl Drop for Reset {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.0).expect("as before");
    }
}

/// Whatever users take, there are descriptors for root.
#[test]
fn few_descriptors_are_kept_back() {
    serving(&alone(), "descriptors", 1, |socket| {
        let all = getrlimit(Resource::Nofile);
        let most = 100 + descriptors() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..all }).expect("less than before");
        let reset = Reset(all);
        let mut client = std::process::Command::new(std::env::current_exe().expect("a path"));
        client.args(["--ignored", "--exact", "--nocapture", "client_that_connects"]).env(SOCKET, socket);
        let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut said = std::io::BufReader::new(client.stdout.take().expect("piped"));
        let mut line = String::new();
        while !line.contains("holds") {
            line.clear();
            assert_ne!(said.read_line(&mut line).expect("read"), 0, "it ended");
        }
        let answer = Connection::open(socket).and_then(|daemon| daemon.ask(&Request::Status {}));
        drop(client.stdin.take());
        assert!(client.wait().expect("ended").success());
        drop(reset);
        answer.expect("root is answered");
    });
}

/// One user has so many connections and no more, so that others have some.
#[test]
fn connections_are_counted() {
    with_daemon("connections", |socket| {
        let mut all = Vec::new();
        let refused = as_user(NAMED[0], || {
            for _ in 0..2000 {
                let connection = Connection::open(socket).expect("connected");
                match connection.ask(&Request::Status {}) {
                    Ok(_) => all.push(connection),
                    Err(why) => return Some(why),
                }
            }
            None
        });
        is_refused(Err::<(), _>(refused.expect("refused at some time")), "connections to the daemon already");
        assert!(all.len() >= 100, "{}", all.len());
        end([lease(socket, NAMED[1], PAGE).expect("others are served")]);
        drop(all);
        let again = || as_user(NAMED[0], || Connection::open(socket)?.ask(&Request::Status {}));
        wait_for("they are forgotten", || again().is_ok());
    });
}
