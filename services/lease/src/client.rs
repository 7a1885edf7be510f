//! A client's side: ask a daemon, get a descriptor.

use crate::status::Status;
use crate::wire::{self, Answer, Forget, KeepAs, Leased, Refused, Request, Seen, Wish};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::addr::SocketAddrArg;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SocketAddrUnix, SocketType};
use std::ffi::c_void;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// Why there is no lease.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers at the socket.
    #[error("no lease daemon at {}: {cause}; {}", path.display(), way_out(cause))]
    NoDaemon {
        /// Where it was looked for.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// The daemon said no.
    #[error("{}", .0.message)]
    Refused(Refused),
    /// The file with the secret of kept memory.
    #[error("{} {what}: {cause}", path.display())]
    Secret {
        /// The file.
        path: PathBuf,
        /// What could not be done with it.
        what: &'static str,
        /// What the system said.
        cause: io::Error,
    },
    /// The connection broke, or what came was no answer.
    #[error("lease daemon: {0}")]
    Connection(io::Error),
}

// Not its source: the message has it.
impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        ClientError::Connection(error)
    }
}

fn way_out(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "start one with: hugemm pool serve --size SIZE, or say where it is with --socket"
        }
        io::ErrorKind::WouldBlock => "it takes no connection in 5 s; is it stopped?",
        io::ErrorKind::PermissionDenied => {
            "this user may not ask it: have it served with a --policy that names the user"
        }
        _ => "say where it is with --socket",
    }
}

/// How long a daemon may take to take a connection, and then to answer, or, while it fills, to answer something else.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a daemon that answers others may take to fill what is asked for.
const MOST_FILLING: Duration = Duration::from_secs(60);

/// Memory that is the caller's. The daemon counts it as this process's until the process ends; the bytes live as long as anybody
/// has the file open or mapped.
#[derive(Debug)]
pub struct Lease {
    /// What it is.
    pub about: Leased,
    /// The file: `mmap` it shared.
    pub file: OwnedFd,
    /// The daemon that it is from.
    pub connection: Connection,
}

impl Lease {
    /// Ends it before the process does. The caller's mappings of it are gone by then; a dropped lease lasts as long as the process.
    ///
    /// # Errors
    ///
    /// As [`Connection::ask`]: a daemon that is gone has no lease of anybody.
    pub fn end(self) -> Result<(), ClientError> {
        let Lease { file, connection, .. } = self;
        drop(file);
        connection.ask(&Request::End {}).map(drop)
    }

    /// Maps all of it, shared, to be read and written.
    ///
    /// # Errors
    ///
    /// The system's: no address space.
    pub fn map(&self) -> io::Result<MappedLease> {
        let bytes = usize::try_from(self.about.bytes).map_err(io::Error::other)?;
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: at an address of the kernel's choice; no memory that exists is touched.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, rights, flags, &self.file, 0) }?;
        let at = NonNull::new(at).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(MappedLease { at, bytes })
    }
}

/// A shared mapping of a lease. Whoever has the file can write it at any time, so it is no slice; a sole owner makes one of it.
#[derive(Debug)]
pub struct MappedLease {
    at: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: an address and a length, which no thread's state belongs to.
unsafe impl Send for MappedLease {}

impl MappedLease {
    /// Where it begins.
    pub fn at(&self) -> NonNull<c_void> {
        self.at
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for MappedLease {
    fn drop(&mut self) {
        // SAFETY: mapped by `Lease::map`; who uses an address of it answers for it being dropped later.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr(), self.bytes) };
    }
}

/// The secret of kept memory; nothing if there is no such file, since the first lease makes it, or an empty one, which is what a full
/// disk or the end of whoever wrote it leaves.
///
/// # Errors
///
/// The system's.
pub fn read_secret(path: &Path) -> io::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim().to_owned()).filter(|secret| !secret.is_empty())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a secret where there is none, for the user alone. A file that nothing can be written into does not stay.
fn write_secret(path: &Path, secret: &str) -> io::Result<()> {
    if std::fs::symlink_metadata(path).is_ok() && read_secret(path)?.is_none() {
        // Not written into: whoever made it may have it open, or let others read it.
        std::fs::remove_file(path)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let written = writeln!(file, "{secret}").and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written
}

/// A connection to a daemon.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    /// Where the daemon is, from whatever directory.
    path: PathBuf,
}

/// Has whatever is done with a socket fail at `end`.
fn wait_until(end: Instant, socket: &OwnedFd) -> io::Result<()> {
    let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    // The first is for connecting, too (unix(7)).
    for wait in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(socket, wait, Some(left))?;
    }
    Ok(())
}

fn connect(daemon: &impl SocketAddrArg, end: Instant) -> io::Result<OwnedFd> {
    let fd = wire::socket(SocketType::SEQPACKET)?;
    wait_until(end, &fd)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&fd, daemon))?;
    Ok(fd)
}

fn no_answer(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other("no answer in 5 s; is it stopped?"),
        _ => error,
    }
}

impl Connection {
    /// Connects to the daemon at `path`; waits for five seconds at most.
    ///
    /// # Errors
    ///
    /// [`ClientError::NoDaemon`].
    pub fn open(path: &Path) -> Result<Self, ClientError> {
        Self::open_until(Instant::now() + PATIENCE, path)
    }

    fn open_until(end: Instant, path: &Path) -> Result<Self, ClientError> {
        let connect = || {
            let socket = connect(&SocketAddrUnix::new(path)?, end)?;
            Ok(Connection { socket, path: std::path::absolute(path)? })
        };
        connect().map_err(|cause| ClientError::NoDaemon { path: path.to_owned(), cause })
    }

    /// Asks something and waits for the answer: five seconds, and for a lease, which may have to be filled, as long as the daemon
    /// answers others, for a minute.
    ///
    /// # Errors
    ///
    /// [`ClientError::Refused`], [`ClientError::Connection`].
    pub fn ask(&self, request: &Request) -> Result<(Answer, Option<OwnedFd>), ClientError> {
        self.ask_for(MOST_FILLING, request)
    }

    /// How things stand with the daemon.
    ///
    /// # Errors
    ///
    /// As [`ask`](Connection::ask); [`ClientError::Connection`]: the daemon is of another version.
    pub fn status(&self) -> Result<Status, ClientError> {
        match self.ask(&Request::Status {})? {
            (Answer::Status(status), _) => Ok(*status),
            _ => Err(io::Error::other("it answers something else; use a command and a daemon of one version").into()),
        }
    }

    fn ask_for(&self, most: Duration, request: &Request) -> Result<(Answer, Option<OwnedFd>), ClientError> {
        let (begun, is_lease) = (Instant::now(), matches!(request, Request::Lease(_)));
        self.say(begun + PATIENCE, request).map_err(no_answer)?;
        // The rest of the time is for asking something else.
        let patience = if is_lease { PATIENCE / 2 } else { PATIENCE };
        let answer = loop {
            match self.hear(Instant::now() + patience) {
                Err(error) if is_lease && error.kind() == io::ErrorKind::WouldBlock => {}
                answer => break answer.map_err(no_answer)?,
            }
            if begun.elapsed() >= most {
                let seconds = most.as_secs();
                return Err(io::Error::other(format!("it answers others, and lends nothing in {seconds} s")).into());
            }
            self.check_answers(Instant::now() + PATIENCE - patience)?;
        };
        match answer {
            None => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
            Some((Answer::Refused(refused), _)) => Err(ClientError::Refused(refused)),
            Some(answer) => Ok(answer),
        }
    }

    /// That the daemon answers somebody, whatever it says.
    fn check_answers(&self, end: Instant) -> Result<(), ClientError> {
        let other = Connection::open_until(end, &self.path)?;
        let heard = other.say(end, &Request::Status {}).and_then(|()| other.hear(end));
        Ok(heard.map(drop).map_err(no_answer)?)
    }

    fn say(&self, end: Instant, request: &Request) -> io::Result<()> {
        wait_until(end, &self.socket)?;
        match wire::send(self.socket.as_fd(), request, None) {
            // A daemon that has nothing for this user says so at once, and closes the connection.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }

    fn hear(&self, end: Instant) -> io::Result<Option<(Answer, Option<OwnedFd>)>> {
        wait_until(end, &self.socket)?;
        match wire::receive_answer(self.socket.as_fd()) {
            // The kernel tells first that the request was not read, then what was said before.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => wire::receive_answer(self.socket.as_fd()),
            other => other,
        }
    }

    /// Leases memory that is kept as `name`, with its bytes if it is kept already. `file` has its secret: the first lease writes it,
    /// for the user alone.
    ///
    /// # Errors
    ///
    /// As [`lease`](Connection::lease); [`ClientError::Secret`]: nothing is kept then that was not before.
    pub fn lease_kept(self, mut wish: Wish, name: &str, file: &Path) -> Result<Lease, ClientError> {
        let secret = |what, cause| ClientError::Secret { path: file.to_owned(), what, cause };
        let known = read_secret(file).map_err(|cause| secret("cannot be read", cause))?;
        wish.keep = Some(KeepAs { name: name.to_owned(), secret: known });
        let lease = self.lease(wish)?;
        if let (Some(new), false) = (&lease.about.secret, lease.about.resumed)
            && let Err(cause) = write_secret(file, new)
        {
            // Nobody could have it again.
            let keep = KeepAs { name: name.to_owned(), secret: Some(new.clone()) };
            let _ = lease.connection.ask(&Request::Forget(Forget { keep, uid: None }));
            let what = match cause.kind() {
                io::ErrorKind::AlreadyExists => {
                    "has another secret; remove it, if it is of memory that is kept no more"
                }
                _ => "cannot be written, so the memory is not kept",
            };
            return Err(secret(what, cause));
        }
        Ok(lease)
    }

    /// Tells the daemon what became of a lease of this connection. Nothing depends on its being heard.
    pub fn tell(&self, lease: u64, seen: Seen) {
        let _ = wire::send(self.socket.as_fd(), &Request::Seen { lease, seen }, None);
    }

    /// Gives a lease back whose memory nobody has.
    pub(crate) fn give_back(&self, lease: u64) {
        let _ = wire::send(self.socket.as_fd(), &Request::Return { lease }, None);
    }

    /// Leases memory.
    ///
    /// # Errors
    ///
    /// As [`ask`](Connection::ask).
    pub fn lease(self, wish: Wish) -> Result<Lease, ClientError> {
        self.another(wish).map(|(about, file)| Lease { about, file, connection: self })
    }

    /// The same, beside what was leased by this connection before.
    ///
    /// # Errors
    ///
    /// As [`ask`](Connection::ask).
    pub fn another(&self, wish: Wish) -> Result<(Leased, OwnedFd), ClientError> {
        let wanted = wish.bytes;
        match self.ask(&Request::Lease(wish))? {
            (Answer::Leased(about), Some(file)) if [0, about.bytes].contains(&wanted) => Ok((about, file)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "an answer to something else").into()),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Where a daemon of this user listens, unless told otherwise: below `/run/hugemm` for root, in the user's runtime
/// directory for others.
pub fn default_socket() -> PathBuf {
    let system = PathBuf::from("/run/hugemm/lease.socket");
    if rustix::process::geteuid().is_root() || system.exists() {
        return system;
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) => PathBuf::from(directory).join("hugemm-lease.socket"),
        None => system,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::Listener;
    use crate::tests::{BYTES, daemon};
    use std::thread;

    fn listening(name: &str) -> (PathBuf, Listener) {
        let path = std::env::temp_dir().join(format!("hugemm-client-{name}-{}", std::process::id()));
        let listener = Listener::bind(&path, false).expect("a socket");
        (path, listener)
    }

    /// Whoever waits for memory notices a daemon that is stopped no later than whoever waits for anything else.
    #[test]
    fn a_stopped_daemon_is_waited_for_once() {
        let (path, _stopped) = listening("stopped");
        let daemon = Connection::open(&path).expect("there is room");
        let begun = Instant::now();
        let error = daemon.lease(Wish::of(1)).expect_err("no answer").to_string();
        assert!(error.contains("no answer in 5 s"), "{error}");
        let waited = begun.elapsed();
        assert!(waited < PATIENCE * 3 / 2, "{waited:?}");
    }

    /// A stopped daemon at which as many wait as its socket lets. Linux keeps one more than it was told.
    #[test]
    fn a_full_daemon_is_not_waited_for() {
        let path = std::env::temp_dir().join(format!("hugemm-client-full-{}", std::process::id()));
        let full = wire::socket(SocketType::SEQPACKET).expect("a socket");
        let address = SocketAddrUnix::new(&path).expect("a short path");
        rustix::net::bind(&full, &address).expect("a new path");
        rustix::net::listen(&full, 0).expect("a bound socket");
        let _waits = Connection::open(&path).expect("there is room for one");
        let (said, hears) = std::sync::mpsc::channel();
        let end = Instant::now() + Duration::from_millis(300);
        let there = path.clone();
        thread::spawn(move || said.send(Connection::open_until(end, &there).map(drop)));
        let answer = hears.recv_timeout(6 * PATIENCE).expect("a connection ends in time, whatever the daemon does");
        let error = answer.expect_err("nobody takes it").to_string();
        assert!(error.contains("no lease daemon at"), "{error}");
        std::fs::remove_file(&path).expect("its own");
    }

    /// Its memory went with the daemon, say, that kept it.
    #[test]
    fn a_secret_that_outlived_its_memory_is_told_of() {
        let (path, listener) = listening("outlived");
        let daemon = std::sync::Arc::new(daemon(&[1]));
        daemon.gets(1);
        let (stops, stop) = io::pipe().expect("a pipe");
        let serves = thread::spawn(move || crate::server::serve(&daemon, &listener, stops.as_fd()));
        let secret = path.with_extension("secret");
        std::fs::write(&secret, "of old").expect("a file");
        let leased = Connection::open(&path).expect("it answers").lease_kept(Wish::of(BYTES), "cache", &secret);
        drop(stop);
        serves.join().expect("no panic").expect("served");
        std::fs::remove_file(&secret).expect("it is left where it is");
        let error = leased.expect_err("nobody could have it again").to_string();
        assert!(error.contains("remove it"), "{error}");
    }

    /// A daemon one of whose threads does not come back from the kernel answers others.
    #[test]
    fn a_lease_that_is_never_filled_is_not_waited_for() {
        let (path, listener) = listening("stuck");
        thread::spawn(move || {
            let mut stuck = Vec::new();
            while let Ok(client) = rustix::net::accept(&listener) {
                match wire::receive::<Request>(client.as_fd()) {
                    Ok(Some((Request::Status {}, _))) => drop(wire::send(client.as_fd(), &Answer::Done {}, None)),
                    _ => stuck.push(client),
                }
            }
        });
        let most = PATIENCE * 6 / 5;
        let error = Connection::open(&path).expect("it answers").ask_for(most, &Request::Lease(Wish::of(1)));
        let error = error.expect_err("nothing is lent").to_string();
        assert!(error.contains("answers others, and lends nothing in 6 s"), "{error}");
    }
}
