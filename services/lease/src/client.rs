//! A client's side: ask a daemon, get a descriptor.

use crate::server::connect;
use crate::wire::{self, Answer, Leased, Refused, Request, Seen, Wish};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

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
    /// The connection broke, or what came was no answer.
    #[error("lease daemon: {0}")]
    Connection(#[from] io::Error),
}

fn way_out(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "start one with: hugemm pool serve --size SIZE, or say where it is with --socket"
        }
        io::ErrorKind::PermissionDenied => {
            "this user may not ask it: have it served with a --policy that names the user"
        }
        _ => "say where it is with --socket",
    }
}

/// How long a daemon may take to answer what needs no filling.
const PATIENCE: Duration = Duration::from_secs(5);

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

/// A connection to a daemon.
#[derive(Debug)]
pub struct Connection(OwnedFd);

impl Connection {
    /// Connects to the daemon at `path`.
    ///
    /// # Errors
    ///
    /// [`ClientError::NoDaemon`].
    pub fn open(path: &Path) -> Result<Self, ClientError> {
        connect(path).map(Connection).map_err(|cause| ClientError::NoDaemon { path: path.to_owned(), cause })
    }

    /// Asks something and waits for the answer: for a lease as long as filling takes, if that has to be waited for; for anything
    /// else five seconds.
    ///
    /// # Errors
    ///
    /// [`ClientError::Refused`], [`ClientError::Connection`].
    pub fn ask(&self, request: &Request) -> Result<(Answer, Option<OwnedFd>), ClientError> {
        let patience = (!matches!(request, Request::Lease(_))).then_some(PATIENCE);
        set_socket_timeout(&self.0, Timeout::Recv, patience).map_err(io::Error::from)?;
        wire::send(self.0.as_fd(), request, None)?;
        let answer = wire::receive(self.0.as_fd()).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::other("no answer in 5 s; is it stopped?"),
            _ => error,
        });
        match answer? {
            None => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
            Some((Answer::Refused(refused), _)) => Err(ClientError::Refused(refused)),
            Some(answer) => Ok(answer),
        }
    }

    /// Tells the daemon what became of a lease. Nothing depends on its being heard.
    pub fn tell(&self, seen: Seen) {
        let _ = wire::send(self.0.as_fd(), &Request::Seen(seen), None);
    }

    /// Leases memory.
    ///
    /// # Errors
    ///
    /// As [`ask`](Connection::ask).
    pub fn lease(self, wish: Wish) -> Result<Lease, ClientError> {
        match self.ask(&Request::Lease(wish))? {
            (Answer::Leased(about), Some(file)) => Ok(Lease { about, file, connection: self }),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "an answer to something else").into()),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
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
