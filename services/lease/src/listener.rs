//! A socket that listens: who finds it, and that no two daemons have one place.

use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A socket that listens, and is removed when dropped if it was made here.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    place: Option<Place>,
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
        let place = Place::take(path)?;
        if let Ok(meta) = fs::symlink_metadata(path) {
            if !meta.file_type().is_socket() {
                return Err(io::Error::new(ErrorKind::AlreadyExists, "something is there that is no socket"));
            }
            // By somebody who takes no places: a service manager.
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
        Ok(Listener { fd, place: Some(place) })
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
        if let Some(place) = self.place.as_ref().filter(|place| place.is_ours()) {
            let _ = fs::remove_file(&place.path);
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

/// A name in the file system for a socket, which is one process's alone as long as that has the file beside it locked.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    lock: File,
}

impl Place {
    fn take(path: &Path) -> io::Result<Self> {
        loop {
            let options = &mut File::options();
            let lock = options.create(true).truncate(false).write(true).mode(0o600).open(beside(path))?;
            match lock.try_lock() {
                Err(TryLockError::WouldBlock) => return Err(in_use()),
                other => other?,
            }
            let place = Place { path: path.to_owned(), lock };
            // If not, its former owner has removed it before it was locked.
            if place.is_ours() {
                return Ok(place);
            }
        }
    }

    /// Whether the file that is locked is the one that others find. If not, the place is another's, or nobody's.
    fn is_ours(&self) -> bool {
        let number = |meta: fs::Metadata| (meta.dev(), meta.ino());
        let found = fs::symlink_metadata(beside(&self.path)).ok().map(number);
        found.is_some() && found == self.lock.metadata().ok().map(number)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_ours() {
            let _ = fs::remove_file(beside(&self.path));
        }
    }
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}
