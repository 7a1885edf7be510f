//! The daemon's side of its socket: one thread takes connections, one serves each, for as long as its lease lasts.

use crate::daemon::Daemon;
use crate::listener::Listener;
use crate::policy::Asker;
use crate::wire::{self, Answer, Packet, Refused, RefusedKind, Request};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::SocketFlags;
use rustix::net::sockopt::{Timeout, set_socket_send_buffer_size, set_socket_timeout};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Serves until `stop` becomes readable. Leases that are out stay with their owners.
///
/// # Errors
///
/// The socket's.
pub fn serve(daemon: &Arc<Daemon>, listener: &Listener, stop: BorrowedFd<'_>) -> io::Result<()> {
    let served = serve_until(daemon, listener, stop);
    // Whoever fills ends, too.
    daemon.stop();
    served
}

fn serve_until(daemon: &Arc<Daemon>, listener: &Listener, stop: BorrowedFd<'_>) -> io::Result<()> {
    // Somebody who opens kept memory while it is looked at has the kernel send this, and nothing is to be done.
    // SAFETY: no handler.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    let (mut users, room) = (BTreeMap::new(), room(&group()));
    loop {
        let mut wait = [PollFd::new(listener, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
        match poll(&mut wait, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        let [asked, stopped] = wait.map(|fd| !fd.revents().is_empty());
        if stopped {
            return Ok(());
        }
        if !asked {
            continue;
        }
        let connection = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(connection) => connection,
            Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => continue,
            // Out of memory, or of descriptors: root has taken even those that are kept back for it.
            Err(
                rustix::io::Errno::MFILE
                | rustix::io::Errno::NFILE
                | rustix::io::Errno::NOMEM
                | rustix::io::Errno::NOBUFS,
            ) => {
                thread::sleep(Duration::from_millis(100));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let Ok(peer) = Peer::of(connection.as_fd()) else { continue };
        let connection = Arc::new(connection);
        // Whoever may have nothing, or has too much, gets no thread. The socket is new, so there is room for the answer.
        let known = daemon.knows(&peer.asker).and_then(|()| enter(&mut users, daemon, &peer.asker, &connection, room));
        if let Err(refused) = known.and_then(|user| start(daemon, &connection, peer, user)) {
            let _ = wire::send(connection.as_fd(), &Answer::Refused(refused), None);
        }
    }
}

/// Has a thread serve a connection.
fn start(daemon: &Arc<Daemon>, connection: &Arc<OwnedFd>, peer: Peer, user: Arc<User>) -> Result<(), Refused> {
    let (daemon, connection) = (Arc::clone(daemon), Arc::clone(connection));
    let thread = thread::Builder::new().name("client".to_owned()).stack_size(STACK);
    // What goes wrong with one client's connection is that client's end.
    let started = thread.spawn(move || _ = client(&daemon, connection.as_fd(), &peer, &user));
    started.map(drop).map_err(|_| no_room())
}

/// Who is at the other end, as the kernel vouches for it.
struct Peer {
    asker: Asker,
    /// 0 for a process that this one's process namespace does not have.
    pid: u32,
    /// The process, which may have its number no more when it is looked for by that.
    process: Option<OwnedFd>,
}

impl Peer {
    fn of(connection: BorrowedFd<'_>) -> io::Result<Self> {
        let [mut about, mut groups] = [vec![0; 3], vec![0; GROUPS]];
        option(connection, libc::SO_PEERCRED, &mut about)?;
        option(connection, libc::SO_PEERGROUPS, &mut groups)?;
        let (pid, uid, gid) = (about[0], about[1], about[2]);
        let mut process = vec![0; 1];
        let process = match option(connection, libc::SO_PEERPIDFD, &mut process) {
            // SAFETY: a descriptor that the kernel has just made for this call.
            Ok(()) => Some(unsafe { OwnedFd::from_raw_fd(process[0] as i32) }),
            // Before Linux 6.5. At once, so that the number is likely to be that process's still.
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                Pid::from_raw(pid as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
            }
            // It has ended, and another may have its number.
            Err(_) => None,
        };
        Ok(Peer { asker: Asker { uid, gid, groups }, pid, process })
    }
}

/// More than most users have.
const GROUPS: usize = 32;

/// Reads an option that consists of numbers: as many as there are.
fn option(socket: BorrowedFd<'_>, name: libc::c_int, into: &mut Vec<u32>) -> io::Result<()> {
    loop {
        let mut bytes = (into.len() * 4) as libc::socklen_t;
        let at = into.as_mut_ptr().cast();
        // SAFETY: as many bytes as the numbers have, which outlive the call.
        let got = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, at, &raw mut bytes) };
        let (error, numbers) = (io::Error::last_os_error(), bytes as usize / 4);
        match got {
            0 => {
                into.truncate(numbers);
                return Ok(());
            }
            // There are more, and the kernel says how many.
            _ if error.raw_os_error() == Some(libc::ERANGE) && numbers > into.len() => into.resize(numbers, 0),
            _ => return Err(error),
        }
    }
}

/// What the connections of a user take in turns, so that many of them have no more of the daemon's time than one.
#[derive(Default)]
struct User {
    /// To be answered.
    answer: Mutex<()>,
    /// To be given memory, which may have to be filled.
    lease: Mutex<()>,
    /// To be told how things stand.
    status: Mutex<()>,
}

fn turn(of: &Mutex<()>) -> MutexGuard<'_, ()> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Most connections of one user, who has one for each program that is supervised, and for each that leases by itself.
const MOST: u64 = 1024;

/// The stack of a connection's thread, in bytes.
const STACK: usize = 256 << 10;

/// What a connection takes of the daemon's memory and the kernel's, in bytes: 50 KiB were measured, and as much again is for answers that
/// are not taken: the socket has room for two packets, and one more may be beyond it.
const EACH: u64 = 128 << 10;

/// For so long a client need not take what is said to it.
const DEAF: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 5000 });

/// Where this process's control group is.
fn group() -> String {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    format!("/sys/fs/cgroup{}", groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default())
}

/// For how many connections half of the memory is enough that a control group may have, and there may be threads.
fn room(group: &str) -> u64 {
    let most = |of| std::fs::read_to_string(format!("{group}/{of}")).ok()?.trim().parse::<u64>().ok();
    let memory = most("memory.max").map(|most| most / 2 / EACH);
    memory.into_iter().chain(most("pids.max")).min().unwrap_or(u64::MAX)
}

fn no_room() -> Refused {
    let message =
        "the daemon has no memory, or no thread, left; raise memory.max or pids.max of its control group (TasksMax)";
    Refused { kind: RefusedKind::LendingPolicy, message: message.to_owned() }
}

/// One connection more. Root and the daemon's own user have as many as they want, and descriptors that nobody else gets.
fn enter(
    users: &mut BTreeMap<u32, Arc<User>>,
    daemon: &Daemon,
    asker: &Asker,
    connection: &OwnedFd,
    room: u64,
) -> Result<Arc<User>, Refused> {
    let fds = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    users.retain(|_, user| Arc::strong_count(user) > 1);
    let all: u64 = users.values().map(|user| Arc::strong_count(user) as u64 - 1).sum();
    let user = users.entry(asker.uid).or_default();
    let (has, most) = (Arc::strong_count(user) as u64 - 1, MOST.min(fds / 8).min(room / 8));
    let refusal = |message| Err(Refused { kind: RefusedKind::LendingPolicy, message });
    if !daemon.may_command(asker) {
        if has >= most {
            return refusal(format!(
                "this user has {most} connections to the daemon already; end some of its programs"
            ));
        }
        // The kernel gives the lowest number that is free.
        if connection.as_raw_fd() as u64 >= fds - fds / 8 {
            return refusal("the daemon has no descriptor left for users; raise its limit (LimitNOFILE)".to_owned());
        }
        if all >= room - room / 8 {
            return Err(no_room());
        }
    }
    Ok(Arc::clone(user))
}

fn client(daemon: &Daemon, connection: BorrowedFd<'_>, peer: &Peer, user: &User) -> io::Result<()> {
    // The kernel doubles it (socket(7)).
    set_socket_send_buffer_size(connection, wire::PART)?;
    set_socket_timeout(connection, Timeout::Send, Some(DEAF))?;
    let mut held = Held { daemon, leases: Vec::new() };
    loop {
        wait_for(connection)?;
        let received = {
            let _turn = turn(&user.answer);
            wire::receive_request(connection)
        };
        let request = match received {
            Ok(None) => break,
            Ok(Some(request)) => Ok(request),
            Err(error)
                if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::Other | ErrorKind::UnexpectedEof) =>
            {
                Err(format!("not a request: {error}"))
            }
            Err(error) => return Err(error),
        };
        let packet = {
            let of = match &request {
                // Which waits for its file, and is filled already.
                Ok(Request::Lease(wish)) if wish.template.is_some() => None,
                Ok(Request::Lease(_)) => Some(&user.lease),
                // It takes a while, and none but who may have all of the daemon's time does it.
                Ok(Request::Drain {} | Request::Fill {}) => None,
                // Which may wait for the memory's owner.
                Ok(Request::Forget(_)) => None,
                // Which asks the disks of templates.
                Ok(Request::Status {}) => Some(&user.status),
                _ => Some(&user.answer),
            };
            let _turn = of.map(turn);
            let answer = match request {
                Ok(request) => answer(daemon, peer, request, &mut held),
                Err(message) => Some((refused(RefusedKind::Invalid, message), None)),
            };
            answer.map(|(answer, file)| Packet::new(&answer, file)).transpose()?
        };
        // Whoever does not take its answers waits alone, and not for long.
        packet.map_or(Ok(()), |packet| packet.send(connection))?;
    }
    // A lease lasts as long as its process, which need not keep the connection open, and as long as the connection, which a supervisor
    // keeps open for a program that goes on in a process of another number (a daemon). A client whose process cannot be waited for
    // (of another process namespace, before Linux 6.5) has the connection alone.
    match &peer.process {
        Some(process) if !held.leases.is_empty() => wait_for(process.as_fd()),
        _ => Ok(()),
    }
}

/// What is answered, if anything, and the descriptor beside it.
fn answer(daemon: &Daemon, peer: &Peer, request: Request, held: &mut Held<'_>) -> Option<(Answer, Option<OwnedFd>)> {
    let asker = &peer.asker;
    let answer = match request {
        Request::Lease(wish) => match daemon.lease(asker, peer.pid, &wish) {
            Ok((leased, file)) => {
                held.leases.push(leased.lease);
                return Some((Answer::Leased(leased), Some(file)));
            }
            Err(refused) => Answer::Refused(refused),
        },
        Request::Status {} => Answer::Status(Box::new(daemon.status_for(asker))),
        Request::Seen { lease, seen } => {
            if held.leases.contains(&lease) {
                daemon.seen(lease, seen);
            }
            return None;
        }
        Request::Return { lease } => {
            if held.leases.contains(&lease) {
                held.leases.retain(|other| *other != lease);
                daemon.end(lease);
            }
            return None;
        }
        Request::End {} => {
            held.end();
            Answer::Done {}
        }
        Request::Forget(forget) => daemon.forget(asker, &forget).map_or_else(Answer::Refused, |()| Answer::Done {}),
        Request::Drain {} | Request::Fill {} if !daemon.may_command(asker) => refused(
            RefusedKind::LendingPolicy,
            "only root and the daemon's own user may do that, and not whom a line of the policy names".to_owned(),
        ),
        Request::Drain {} | Request::Fill {} => {
            daemon.drain(matches!(request, Request::Drain {}));
            Answer::Done {}
        }
    };
    Some((answer, None))
}

fn refused(kind: RefusedKind, message: String) -> Answer {
    Answer::Refused(Refused { kind, message })
}

/// The leases of a connection, which end with it.
struct Held<'a> {
    daemon: &'a Daemon,
    leases: Vec<u64>,
}

impl Held<'_> {
    fn end(&mut self) {
        self.leases.drain(..).for_each(|lease| self.daemon.end(lease));
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits for a packet, or for the end of whoever would send one; of a process, for its end.
fn wait_for(fd: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], None) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other.map(drop)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::background::may_make_no_thread;
    use crate::daemon::PoolConfig;
    use crate::template::Template;
    use crate::tests::{BYTES, cache, config, daemon, file, is_root, kept};
    use crate::wire::{Forget, KeepAs, Seen, Wish};
    use rustix::event::Timespec;
    use rustix::net::{AddressFamily, SocketType, socketpair};

    /// A client may say what it likes as often as it likes: of its own leases each thing counts, and is logged, once; of others' nothing.
    #[test]
    fn what_is_said_of_a_lease_counts_once() {
        let (mut log, write) = std::io::pipe().expect("a pipe");
        let daemon = Daemon::with_log(config(&[1; 2]), OwnedFd::from(write).into());
        let user = User::default();
        std::thread::scope(|scope| {
            let connect = || {
                let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
                let (ours, theirs) = pair.expect("a pair");
                let (daemon, user) = (&daemon, &user);
                let peer = Peer { asker: Asker::user(0), pid: 7, process: None };
                scope.spawn(move || client(daemon, theirs.as_fd(), &peer, user));
                ours
            };
            let ask = |socket: &OwnedFd, request: &Request| {
                wire::send(socket.as_fd(), request, None).expect("sent");
                wire::receive_answer(socket.as_fd()).expect("received").expect("an answer").0
            };
            let lease = |socket: &OwnedFd| {
                daemon.gets(1);
                wire::send(socket.as_fd(), &Request::Lease(Wish::of(BYTES)), None).expect("sent");
                match wire::receive_answer(socket.as_fd()).expect("received") {
                    Some((Answer::Leased(leased), file)) => (leased.lease, file),
                    other => panic!("{other:?}"),
                }
            };
            // What is counted by then: placed, mapped privately, never used.
            let said = |socket: &OwnedFd, lease, seen: &[Seen]| {
                for seen in seen.iter().cycle().take(400 * seen.len()) {
                    let request = Request::Seen { lease, seen: *seen };
                    wire::send(socket.as_fd(), &request, None).expect("sent");
                }
                match ask(socket, &Request::Status {}) {
                    Answer::Status(status) => [status.counts.placed, status.counts.private, status.counts.unused],
                    other => panic!("{other:?}"),
                }
            };
            let all = [Seen::Awaited, Seen::Placed, Seen::PrivateMapping, Seen::Unused];
            let [one, other] = [connect(), connect()];
            let ((first, _file), (second, _other)) = (lease(&one), lease(&other));
            assert_eq!(said(&one, second, &all), [0; 3], "another's");
            assert_eq!(said(&one, second + 1, &all), [0; 3], "nobody's");
            assert_eq!(said(&one, first, &all[..1]), [0; 3], "that it waits is nothing to count");
            assert_eq!(said(&one, first, &all[..2]), [1, 0, 0]);
            assert_eq!(said(&one, first, &all), [1; 3]);
            assert_eq!(said(&other, second, &all[..2]), [2, 1, 1]);
            // Whose lease it is gives it back, and nobody else does.
            let leases = |socket: &OwnedFd| match ask(socket, &Request::Status {}) {
                Answer::Status(status) => status.leases.iter().map(|lent| lent.lease).collect::<Vec<_>>(),
                other => panic!("{other:?}"),
            };
            for (lease, left) in [(second, vec![first, second]), (first, vec![second])] {
                wire::send(one.as_fd(), &Request::Return { lease }, None).expect("sent");
                assert_eq!(leases(&one), left);
            }
            ask(&other, &Request::End {});
            assert_eq!(said(&other, second, &all), [2, 1, 1], "it is over");
        });
        drop(daemon);
        let mut text = String::new();
        std::io::Read::read_to_string(&mut log, &mut text).expect("UTF-8");
        assert_eq!(text.lines().filter(|line| line.contains("\"event\":\"seen\"")).count(), 4, "{text}");
    }

    /// A file of a file system that its sender serves would have whoever closes it wait for that.
    #[test]
    fn a_descriptor_with_a_request_is_never_the_daemons() {
        let daemon = daemon(&[]);
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.expect("a pair");
        let peer = Peer { asker: Asker::user(0), pid: 0, process: None };
        thread::scope(|scope| {
            scope.spawn(|| client(&daemon, theirs.as_fd(), &peer, &User::default()));
            let (mut read, write) = io::pipe().expect("a pipe");
            wire::send(ours.as_fd(), &Request::Status {}, Some(write.as_fd())).expect("sent");
            drop(write);
            match wire::receive_answer(ours.as_fd()).expect("received").expect("an answer").0 {
                Answer::Refused(refused) => assert_eq!(refused.kind, RefusedKind::Invalid, "{refused:?}"),
                other => panic!("{other:?}"),
            }
            assert_eq!(io::Read::read(&mut read, &mut [0]).expect("a pipe"), 0, "nobody has it");
            let keep = KeepAs { name: "x".repeat(60_000), secret: None };
            wire::send(ours.as_fd(), &Request::Forget(Forget { keep, uid: None }), None).expect("sent");
            match wire::receive_answer(ours.as_fd()).expect("received").expect("an answer").0 {
                Answer::Refused(refused) => assert!(refused.message.len() < 1024, "it is not said again"),
                other => panic!("{other:?}"),
            }
            drop(ours);
        });
    }

    /// An owner can keep the kernel busy with its memory: whoever forgets that waits alone, and root does not.
    #[test]
    fn nobody_else_waits_while_an_owner_forgets() {
        if !is_root("has other users") {
            return;
        }
        let daemon = &daemon(&[]);
        daemon.adopt_kept(vec![kept(file(1), 1000)]);
        let memory = daemon.first_kept();
        thread::scope(|scope| {
            let user = Arc::new(User::default());
            let connect = || {
                let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
                let ((ours, theirs), user) = (pair.expect("a pair"), Arc::clone(&user));
                let peer = Peer { asker: Asker::user(1000), pid: 0, process: None };
                scope.spawn(move || client(daemon, theirs.as_fd(), &peer, &user));
                set_socket_timeout(&ours, Timeout::Recv, Some(Duration::from_secs(20))).expect("a timeout");
                ours
            };
            let waits = memory.has_turn();
            let [forgets, other] = [connect(), connect()];
            let forget = Forget { keep: cache(None), uid: None };
            wire::send(forgets.as_fd(), &Request::Forget(forget.clone()), None).expect("sent");
            while Arc::strong_count(&memory) < 3 {
                thread::yield_now();
            }
            wire::send(other.as_fd(), &Request::Status {}, None).expect("sent");
            wire::receive_answer(other.as_fd()).expect("in time");
            let (says, hears) = std::sync::mpsc::channel();
            let forget = Forget { uid: Some(1000), ..forget };
            scope.spawn(move || says.send(daemon.forget(&Asker::user(0), &forget)));
            hears.recv_timeout(Duration::from_secs(20)).expect("in time").expect("root may");
            drop(waits);
            assert!(wire::receive_answer(forgets.as_fd()).expect("answered").is_some());
        });
    }

    /// However many there are, each may be named by the policy.
    #[test]
    fn all_groups_of_a_peer_are_known() {
        let groups: Vec<u32> = (0..3 * GROUPS as u32).collect();
        let known = std::thread::spawn(move || {
            // SAFETY: of this thread alone; as many numbers as it says.
            if unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) } != 0 {
                return eprintln!("skipped: only root has what groups it likes");
            }
            let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            let peer = Peer::of(pair.expect("a pair").0.as_fd()).expect("it is there");
            assert_eq!(peer.asker.groups, groups);
        });
        known.join().expect("no panic");
    }

    /// Connections take no more of the daemon's memory and threads than there are, and no user's most of them.
    #[test]
    fn connections_fit_in_the_memory() {
        let group = std::env::temp_dir().join(format!("hugemm-group-{}", std::process::id()));
        std::fs::create_dir(&group).expect("a directory");
        let rooms = [("memory.max", "max"), ("pids.max", "16"), ("memory.max", "1048576")].map(|(file, most)| {
            std::fs::write(group.join(file), format!("{most}\n")).expect("written");
            room(&group.display().to_string())
        });
        std::fs::remove_dir_all(&group).expect("its own");
        assert!(rooms[0] > 16 && rooms[1..] == [16, 4], "{rooms:?}");
        let (mut users, room) = (BTreeMap::new(), 16);
        let policy = (1000..1010).map(|uid| format!("uid {uid} 1\n")).collect::<String>();
        let policy = crate::policy::LendingPolicy::read(0, &policy, |text| text.parse().ok()).expect("lines");
        let daemon = Daemon::new(PoolConfig { policy, ..config(&[]) });
        let connection = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("a descriptor");
        let mut has = |uid| {
            let enter = |_| enter(&mut users, &daemon, &Asker::user(uid), &connection, room).ok();
            (0..4).map_while(enter).collect::<Vec<_>>()
        };
        let all: Vec<_> = (1000..1010).map(&mut has).collect();
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 2, 2, 2, 2, 2, 0, 0, 0]);
        assert_eq!(has(0).len(), 4, "root has what it wants");
    }

    /// Where the kernel gives no thread, its client hears what to raise.
    #[test]
    fn who_gets_no_thread_is_told() {
        if !is_root("has other users") {
            return;
        }
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a pair");
        let started = thread::spawn(move || {
            may_make_no_thread(61_011);
            let daemon = Arc::new(daemon(&[]));
            let peer = Peer { asker: Asker::user(0), pid: 0, process: None };
            start(&daemon, &Arc::new(pair.0), peer, Arc::default())
        });
        let refused = started.join().expect("no panic").expect_err("it may not");
        assert!(refused.message.contains("TasksMax"), "{refused:?}");
    }

    /// However many connections a user has, one of them is answered at a time; nobody else waits for that, and who takes no answers
    /// keeps none from the others.
    #[test]
    fn connections_of_a_user_are_answered_by_turns() {
        let templates = vec![Template { name: "none".to_owned(), path: "/nowhere".into() }];
        let daemon = Arc::new(Daemon::new(PoolConfig { templates, ..config(&[1; 1000]) }));
        let connect = |user: &Arc<User>| {
            let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            let ((ours, theirs), daemon, user) = (pair.expect("a pair"), Arc::clone(&daemon), Arc::clone(user));
            let peer = Peer { asker: Asker::user(0), pid: 0, process: None };
            thread::spawn(move || client(&daemon, theirs.as_fd(), &peer, &user));
            ours
        };
        let (user, other) = (Arc::default(), Arc::default());
        let (deaf, several, another) = (connect(&user), [connect(&user), connect(&user)], connect(&other));
        let ask = |socket: &OwnedFd| wire::send(socket.as_fd(), &Request::Status {}, None).expect("sent");
        let hears = |socket: &OwnedFd| wire::receive_answer(socket.as_fd()).expect("received").expect("an answer");
        rustix::io::ioctl_fionbio(&deaf, true).expect("a socket");
        while wire::send(deaf.as_fd(), &Request::Status {}, None).is_ok() {}
        let turn = turn(&user.status);
        several.iter().for_each(ask);
        for _ in 0..100 {
            ask(&another);
            hears(&another);
        }
        let heard = |socket: &OwnedFd| poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&Default::default()));
        assert!(several.iter().all(|socket| heard(socket) == Ok(0)), "it is not their turn");
        drop(turn);
        several.iter().for_each(|socket| drop(hears(socket)));
        let mut waits = [PollFd::new(&deaf, PollFlags::RDHUP)];
        let gone = poll(&mut waits, Some(&Timespec { tv_sec: 20, tv_nsec: 0 }));
        assert_eq!(gone, Ok(1), "it is not waited for");
    }
}
