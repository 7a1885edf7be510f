//! The daemon's socket: one thread takes connections, one serves each, for as long as its lease lasts.

use crate::daemon::Daemon;
use crate::kept::Kept;
use crate::policy::Asker;
use crate::wire::{self, Answer, Refused, RefusedKind, Request};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// A socket that listens, and is removed when dropped if it was made here.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    made: Option<PathBuf>,
}

/// Most connections that wait to be taken.
const BACKLOG: i32 = 64;

impl Listener {
    /// Makes the socket at `path`: readable and writable by its owner, and by everybody if `open` (the policy decides then).
    /// What a daemon that is gone has left there is removed.
    ///
    /// # Errors
    ///
    /// `AddrInUse` if a daemon answers there, `AlreadyExists` if something else has that name; the system's.
    pub fn bind(path: &Path, open: bool) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        if let Ok(meta) = fs::symlink_metadata(path) {
            if !meta.file_type().is_socket() {
                return Err(io::Error::new(ErrorKind::AlreadyExists, "something is there that is no socket"));
            }
            if connect(path).is_ok() {
                return Err(io::Error::new(ErrorKind::AddrInUse, "a daemon is there already"));
            }
            fs::remove_file(path)?;
        }
        let fd = socket()?;
        rustix::net::bind(&fd, &address)?;
        // Before anybody can connect.
        fs::set_permissions(path, fs::Permissions::from_mode(if open { 0o666 } else { 0o600 }))?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(Listener { fd, made: Some(path.to_owned()) })
    }

    /// A socket that the service manager has made, and keeps.
    pub(crate) fn inherited(fd: OwnedFd) -> Self {
        Listener { fd, made: None }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            let _ = fs::remove_file(path);
        }
    }
}

pub(crate) fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Connects to a daemon.
///
/// # Errors
///
/// `NotFound` or `ConnectionRefused` where there is none; `PermissionDenied`.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let fd = socket()?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

/// Takes memory that a predecessor kept. A program that has some of it still is waited for by a thread.
pub fn adopt(daemon: &Arc<Daemon>, kept: Vec<Kept>) {
    for memory in kept {
        let running = memory.owner().and_then(|owner| Some((owner, owner.process()?)));
        let lease = daemon.adopt_kept(memory, running.as_ref().map(|(owner, _)| *owner));
        if let Some((lease, (_, process))) = lease.zip(running) {
            let daemon = Arc::clone(daemon);
            // Without a thread the memory stays in use, as far as the daemon knows.
            let _ = thread::Builder::new().name("kept".to_owned()).spawn(move || {
                let _ = wait_for_end(Some(&process));
                daemon.end(lease);
            });
        }
    }
}

/// Serves until `stop` becomes readable. Leases that are out stay with their owners.
///
/// # Errors
///
/// The socket's.
pub fn serve(daemon: &Arc<Daemon>, listener: &Listener, stop: BorrowedFd<'_>) -> io::Result<()> {
    let connections = Arc::new(Connections::default());
    loop {
        let mut wait = [PollFd::new(&listener.fd, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
        match poll(&mut wait, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        if !wait[1].revents().is_empty() {
            daemon.stop();
            return Ok(());
        }
        let connection = match rustix::net::accept_with(&listener.fd, SocketFlags::CLOEXEC) {
            Ok(connection) => connection,
            Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => continue,
            // Out of descriptors: those that are out come back.
            Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                thread::sleep(std::time::Duration::from_millis(100));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let Ok(peer) = rustix::net::sockopt::socket_peercred(&connection) else { continue };
        let asker = Asker { uid: peer.uid.as_raw(), gid: peer.gid.as_raw() };
        // Whoever may have nothing, or has too much, gets no thread. The socket is new, so there is room for the answer.
        let counted = match daemon.knows(asker).and_then(|()| connections.count(daemon, asker)) {
            Ok(counted) => counted,
            Err(refused) => {
                let _ = wire::send(connection.as_fd(), &Answer::Refused(refused), None);
                continue;
            }
        };
        let daemon = Arc::clone(daemon);
        // A client that is refused a thread sees its connection closed.
        let _ = thread::Builder::new().name("client".to_owned()).spawn(move || {
            // What goes wrong with one client's connection is that client's end.
            let _ = client(&daemon, connection.as_fd(), peer.pid, asker);
            drop(counted);
        });
    }
}

/// How many connections each user has.
#[derive(Default)]
struct Connections(Mutex<BTreeMap<u32, usize>>);

/// Most connections of one user, who has one for each program that is supervised, and for each that leases by itself.
const MOST: u64 = 1024;

impl Connections {
    /// One more. Root and the daemon's own user have as many as they want.
    fn count(self: &Arc<Self>, daemon: &Daemon, asker: Asker) -> Result<Counted, Refused> {
        let most = getrlimit(Resource::Nofile).current.map_or(MOST, |fds| MOST.min(fds / 4));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_user = all.entry(asker.uid).or_default();
        if *of_user as u64 >= most && !daemon.may_command(asker) {
            let message = format!("this user has {most} connections to the daemon already; end some of its programs");
            return Err(Refused { kind: RefusedKind::LendingPolicy, message });
        }
        *of_user += 1;
        Ok(Counted { all: Arc::clone(self), uid: asker.uid })
    }
}

/// A connection that counts until it is dropped.
struct Counted {
    all: Arc<Connections>,
    uid: u32,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_user) = all.get_mut(&self.uid) {
            *of_user -= 1;
            if *of_user == 0 {
                all.remove(&self.uid);
            }
        }
    }
}

fn client(daemon: &Daemon, connection: BorrowedFd<'_>, pid: Pid, asker: Asker) -> io::Result<()> {
    // Before the first answer, so that the number still is that process's.
    let process = pidfd_open(pid, PidfdFlags::empty()).ok();
    let mut held = Held { daemon, leases: Vec::new() };
    loop {
        let (request, fd) = match wire::receive::<Request>(connection) {
            Ok(Some(packet)) => packet,
            Ok(None) => return wait_for_end(process.as_ref().filter(|_| !held.leases.is_empty())),
            Err(error)
                if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::Other | ErrorKind::UnexpectedEof) =>
            {
                let message = format!("not a request: {error}");
                wire::send(connection, &Answer::Refused(Refused { kind: RefusedKind::Invalid, message }), None)?;
                continue;
            }
            Err(error) => return Err(error),
        };
        // No request has one.
        drop(fd);
        match request {
            Request::Lease(wish) => lease(daemon, connection, asker, pid, &wish, &mut held)?,
            Request::Status {} => wire::send(connection, &Answer::Status(Box::new(daemon.status_for(asker))), None)?,
            // Of a lease that there is.
            Request::Seen(seen) => held.leases.last().into_iter().for_each(|lease| daemon.seen(Some(*lease), seen)),
            Request::End {} => {
                held.end();
                wire::send(connection, &Answer::Done {}, None)?;
            }
            Request::Forget(forget) => {
                let answer = daemon.forget(asker, &forget).map_or_else(Answer::Refused, |()| Answer::Done {});
                wire::send(connection, &answer, None)?;
            }
            Request::Drain {} | Request::Fill {} if !daemon.may_command(asker) => {
                let message = "only root and the daemon's own user may do that".to_owned();
                wire::send(connection, &Answer::Refused(Refused { kind: RefusedKind::LendingPolicy, message }), None)?;
            }
            Request::Drain {} => {
                daemon.drain(true);
                wire::send(connection, &Answer::Done {}, None)?;
            }
            Request::Fill {} => {
                daemon.drain(false);
                wire::send(connection, &Answer::Done {}, None)?;
            }
        }
    }
}

fn lease(
    daemon: &Daemon,
    connection: BorrowedFd<'_>,
    asker: Asker,
    pid: Pid,
    wish: &wire::Wish,
    held: &mut Held<'_>,
) -> io::Result<()> {
    match daemon.lease(asker, pid.as_raw_nonzero().get() as u32, wish) {
        Ok((leased, file)) => {
            held.leases.push(leased.lease);
            wire::send(connection, &Answer::Leased(leased), Some(file.as_fd()))
        }
        Err(refused) => wire::send(connection, &Answer::Refused(refused), None),
    }
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

/// A lease lasts as long as its process, which need not keep the connection open, and as long as the connection, which a
/// supervisor keeps open for a program that goes on in a process of another number (a daemon). A client whose process cannot be
/// waited for (of another process namespace) has the connection alone.
fn wait_for_end(process: Option<&OwnedFd>) -> io::Result<()> {
    let Some(process) = process else { return Ok(()) };
    loop {
        match poll(&mut [PollFd::new(process, PollFlags::IN)], None) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other.map(drop)?),
        }
    }
}
