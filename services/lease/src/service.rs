//! What a service manager and the daemon tell each other: sockets and files that the manager holds, that the daemon serves, that it
//! stops (sd_notify(3), sd_listen_fds(3)). Without a manager nothing is said.

use crate::kept::Kept;
use crate::listener::Listener;
use crate::memory_file::MemoryFile;
use rustix::net::sockopt::socket_acceptconn;
use sd_notify::NotifyState;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

/// What the manager had for this process.
#[derive(Debug, Default)]
pub struct Inherited {
    /// A socket that listens already.
    pub listener: Option<Listener>,
    /// Files that a predecessor had filled, and nobody has had.
    pub files: Vec<MemoryFile>,
    /// Memory that it kept.
    pub kept: Vec<Kept>,
    /// What the manager calls memory that it kept by a record of another version. The manager holds it.
    pub unread: Vec<String>,
}

/// Takes what the manager has passed. Files that have been lent are given up, here and in the manager's store, unless they are kept.
///
/// # Errors
///
/// The manager's variables make no sense.
///
/// # Safety
///
/// Once per process, and before anything else has made descriptors of the numbers that the manager names.
pub unsafe fn inherited() -> io::Result<Inherited> {
    let (mut inherited, mut others) = (Inherited::default(), Vec::new());
    // Its variables may be another process's.
    let passed = sd_notify::listen_fds()?.len() > 0;
    let passed: Vec<_> = if passed { sd_notify::listen_fds_with_names()?.collect() } else { Vec::new() };
    for (fd, called) in passed {
        // SAFETY: passed to this process, and nobody else takes it, by the contract.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if socket_acceptconn(&fd) == Ok(true) {
            inherited.listener = Some(Listener::from(fd));
            continue;
        }
        // Kept memory can be made to look like a file that nobody has had.
        let file = if called.starts_with(NAME) { MemoryFile::adopt(fd) } else { Err(fd) };
        match file {
            Ok(file) => inherited.files.push(file),
            Err(other) => others.push((called, other)),
        }
    }
    let found = Kept::find(others);
    (inherited.kept, inherited.unread) = (found.kept, found.unread);
    found.rest.iter().for_each(|(called, _)| give_up(called));
    Ok(inherited)
}

/// The daemon answers at its socket.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// The daemon ends.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Has the manager hold a file that is ready, for the next daemon.
pub(crate) fn store(file: &MemoryFile) {
    let Some(name) = name_of(file) else { return };
    // Without it the file is lost with this process, and nothing else.
    let _ = sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(&name)], &[file.as_fd()]);
}

/// Has the manager let go of a file. It does so when it gets to it; until then the file's own mode says whose it is.
pub(crate) fn let_go(file: &MemoryFile) {
    name_of(file).into_iter().for_each(|name| give_up(&name));
}

/// Has the manager hold kept memory with what is written beside it.
pub(crate) fn store_kept(kept: &Kept) {
    let name = kept.name_in_store();
    let _ = sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(&name)], &kept.both());
}

/// Has the manager let go of both. Until it gets to it, the record says that nobody keeps it.
pub(crate) fn let_go_of_kept(kept: &Kept) {
    kept.forget();
    give_up(&kept.name_in_store());
}

fn give_up(name: &str) {
    tell(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]);
}

fn tell(what: &[NotifyState<'_>]) {
    // A manager that does not listen is none.
    let _ = sd_notify::notify(what);
}

/// How the names of files begin that are ready.
const NAME: &str = "memory-";

/// A file's name in the store: no two files have one at the same time.
fn name(inode: u64) -> String {
    format!("{NAME}{inode}")
}

fn name_of(file: &MemoryFile) -> Option<String> {
    rustix::fs::fstat(file).ok().map(|stat| name(stat.st_ino))
}
