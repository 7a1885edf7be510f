//! Puts leased memory in the place of a program's own file where no [filter](crate::seccomp) can be had: a library that is loaded before
//! the program (`hugemm-lease-preload`) sees its `ftruncate`.
//!
//! The leased file waits in a socket that the program and all its children inherit. The kernel gives what is in a socket to one
//! receiver, so one file of one of them is replaced, once, and nobody else ever has the leased one.
//!
//! Source of the rules: ld.so(8), unix(7).

use crate::memory_file::{Page, copy_seals};
use crate::own_file::OwnFile;
use crate::wire;
use rustix::fs::fstat;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The variable of the environment in which the library finds its [`Offer`].
pub const VARIABLE: &str = "HUGEMM_LEASE_PRELOAD";

/// A leased file that waits for a program which makes one of its length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// Where it waits: a socket, by its number and which it is, for a program may close it and use the number again.
    socket: RawFd,
    inode: u64,
    bytes: u64,
    page: Page,
}

impl Offer {
    /// Has `file`, of `bytes` and such pages, wait. The descriptor is inherited by every program that this process starts or becomes.
    ///
    /// # Errors
    ///
    /// The system's; the file is closed then.
    pub fn new(file: OwnedFd, bytes: u64, page: Page) -> io::Result<(Self, OwnedFd)> {
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair?;
        wire::send(ours.as_fd(), &(), Some(file.as_fd()))?;
        fcntl_setfd(&theirs, FdFlags::empty())?;
        Ok((Offer { socket: theirs.as_raw_fd(), inode: fstat(&theirs)?.st_ino, bytes, page }, theirs))
    }

    /// What this process was offered by its environment.
    pub fn of_this_process() -> Option<Self> {
        serde_json::from_str(std::env::var_os(VARIABLE)?.to_str()?).ok()
    }

    /// For [`VARIABLE`].
    ///
    /// # Errors
    ///
    /// None that a number or a name could cause.
    pub fn variable(&self) -> io::Result<String> {
        Ok(serde_json::to_string(self)?)
    }

    /// Replaces the descriptor `fd` of this process, which is about to get `bytes`, if it is of the kind that is waited for, and nobody was
    /// faster. False: nothing has changed, but that a file whose seals cannot be copied is nobody's any more.
    ///
    /// Another length than the offer's costs a comparison and nothing else. With that length it allocates, opens and reads files; so not
    /// in signal handlers.
    pub fn take(&self, fd: RawFd, bytes: u64) -> bool {
        bytes == self.bytes && self.replace(fd).is_some()
    }

    fn replace(&self, fd: RawFd) -> Option<()> {
        let own = OwnFile::look("self", u32::try_from(fd).ok()?).filter(|own| own.is_replaceable(self.page))?;
        // Of our own, for the program may close its own meanwhile.
        // SAFETY: any number may be asked for: the kernel says whether it is open.
        let copy = unsafe { libc::fcntl(self.socket, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return None;
        }
        // SAFETY: made just now, so nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(copy) };
        if fstat(&socket).ok()?.st_ino != self.inode {
            return None;
        }
        // The other end is closed: an empty socket is at its end, and nothing waits.
        let (_, leased) = wire::receive::<()>(socket.as_fd()).ok()??;
        let leased = leased?;
        copy_seals(own.file.as_fd(), leased.as_fd()).ok()?;
        let flags = if own.close_on_exec { libc::O_CLOEXEC } else { 0 };
        // SAFETY: as the program that asked for its length is to have it: the same number, another file.
        (unsafe { libc::dup3(leased.as_raw_fd(), fd, flags) } == fd).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::MemoryFile;
    use rustix::fs::MemfdFlags;
    use rustix::io::{DupFlags, dup3};
    use std::mem::ManuallyDrop;

    const PAGE: Page = Page::Transparent;
    const BYTES: u64 = 4 << 20;

    fn leased() -> (OwnedFd, u64) {
        let file = MemoryFile::new(PAGE, BYTES).expect("a file").into_fd();
        let inode = inode(&file);
        (file, inode)
    }

    fn inode(fd: impl AsFd) -> u64 {
        fstat(fd).expect("open").st_ino
    }

    /// A program's own.
    fn own() -> OwnedFd {
        rustix::fs::memfd_create(c"own", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file")
    }

    #[test]
    fn one_fresh_file_of_the_length_is_replaced() {
        let (file, inode_of_leased) = leased();
        let (offer, socket) = Offer::new(file, BYTES, PAGE).expect("offered");
        assert!(!rustix::io::fcntl_getfd(&socket).expect("open").contains(FdFlags::CLOEXEC), "it is inherited");
        let told: Offer = serde_json::from_str(&offer.variable().expect("text")).expect("as it was written");
        assert_eq!(told, offer);
        let (first, second, used) = (own(), own(), own());
        rustix::fs::ftruncate(&used, 1).expect("longer");
        let take = |fd: &OwnedFd, bytes| told.take(fd.as_raw_fd(), bytes);
        assert!(!take(&first, BYTES + 1) && !take(&used, BYTES), "another length; a file with something in it");
        assert!(take(&first, BYTES));
        assert_eq!(inode(&first), inode_of_leased);
        assert!(rustix::io::fcntl_getfd(&first).expect("open").contains(FdFlags::CLOEXEC), "as its own was");
        assert!(!take(&second, BYTES), "it is lent once");
        assert_ne!(inode(&second), inode_of_leased);
    }

    /// What is no descriptor, and what is not open.
    #[test]
    fn a_number_that_is_no_socket_is_passed_over() {
        for socket in [-1, RawFd::MIN, RawFd::MAX] {
            let offer = Offer { socket, inode: 1, bytes: BYTES, page: PAGE };
            assert!(!offer.take(own().as_raw_fd(), BYTES), "{socket}");
        }
    }

    /// A program that closes what it does not know, and has something else under that number.
    #[test]
    fn nothing_is_taken_from_a_socket_of_the_programs_own() {
        let (offer, socket) = Offer::new(leased().0, BYTES, PAGE).expect("offered");
        let (other, mut at) = (leased().0, ManuallyDrop::new(socket));
        let (_, theirs) = Offer::new(other, BYTES, PAGE).expect("a socket with a packet");
        dup3(&theirs, &mut at, DupFlags::empty()).expect("in its place");
        assert!(!offer.take(own().as_raw_fd(), BYTES));
        assert!(
            wire::receive::<()>(theirs.as_fd()).expect("open").is_some_and(|(_, file)| file.is_some()),
            "untouched"
        );
        drop(ManuallyDrop::into_inner(at));
    }
}
