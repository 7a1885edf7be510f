//! A socket that listens: who finds it, and that no two daemons have one place.

use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// A socket that listens, and is removed when dropped if it was made here.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    /// Its name, and which file that is.
    place: Option<(PathBuf, Option<(u64, u64)>)>,
}

/// Most connections that wait to be taken.
const BACKLOG: i32 = 64;

impl Listener {
    /// Makes the socket at `path`: readable and writable by its owner, and by everybody if `open` (the policy decides then).
    /// What a daemon that is gone has left there is removed.
    ///
    /// # Errors
    ///
    /// `AddrInUse` if a daemon has the place, `AlreadyExists` if something else has that name; the system's.
    pub fn bind(path: &Path, open: bool) -> io::Result<Self> {
        Self::bind_as(SocketType::SEQPACKET, path, open)
    }

    pub(crate) fn bind_as(kind: SocketType, path: &Path, open: bool) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let _alone = lock(path)?;
        if let Ok(meta) = fs::symlink_metadata(path) {
            if !meta.file_type().is_socket() {
                return Err(io::Error::new(ErrorKind::AlreadyExists, "something is there that is no socket"));
            }
            if is_listened_at(&address)? {
                return Err(in_use());
            }
            fs::remove_file(path)?;
        }
        let fd = crate::wire::socket(kind)?;
        rustix::net::bind(&fd, &address)?;
        // Before anybody can connect.
        fs::set_permissions(path, fs::Permissions::from_mode(if open { 0o666 } else { 0o600 }))?;
        rustix::net::listen(&fd, BACKLOG)?;
        // Wherever this process goes.
        let place = std::path::absolute(path)?;
        let identity = identity(&place);
        Ok(Listener { fd, place: Some((place, identity)) })
    }
}

/// A socket that somebody else has made, and keeps.
impl From<OwnedFd> for Listener {
    fn from(fd: OwnedFd) -> Self {
        Listener { fd, place: None }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some((path, own)) = &self.place else { return };
        let Ok(_alone) = lock(path) else { return };
        // A successor's stays.
        if own.is_some() && *own == identity(path) {
            let _ = fs::remove_file(path);
        }
    }
}

fn in_use() -> io::Error {
    io::Error::new(ErrorKind::AddrInUse, "a daemon is there already")
}

fn is_listened_at(address: &SocketAddrUnix) -> io::Result<bool> {
    let fd = crate::wire::socket(SocketType::SEQPACKET)?;
    // Whoever does not take connections at present is there, too.
    rustix::io::ioctl_fionbio(&fd, true)?;
    Ok(rustix::net::connect(&fd, address) != Err(Errno::CONNREFUSED))
}

/// How long another daemon may take or leave its place.
const PATIENCE: Duration = Duration::from_secs(5);

/// A file beside a socket, locked: as long as it is, nobody else takes that place, or leaves it. Nobody but its owner can open it.
struct Lock {
    path: PathBuf,
    _file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is locked: who waits for it finds that it is nowhere, and makes another.
        let _ = fs::remove_file(&self.path);
    }
}

fn lock_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

fn lock(path: &Path) -> io::Result<Lock> {
    let (path, end) = (lock_of(path), Instant::now() + PATIENCE);
    loop {
        let open = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path);
        let file = open.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        match file.try_lock() {
            Ok(()) if file.metadata().ok().map(|meta| (meta.dev(), meta.ino())) == identity(&path) => {
                return Ok(Lock { path, _file: file });
            }
            Ok(()) | Err(TryLockError::WouldBlock) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            Ok(()) | Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(
                    ErrorKind::TimedOut,
                    format!("another daemon has {} locked", path.display()),
                ));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// Which file has that name: no other one is the same as long as that one is a socket somebody has.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}
