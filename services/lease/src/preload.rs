//! Puts leased memory in the place of a program's own file where no [filter](crate::seccomp) can be had: a library that is loaded before
//! the program (`hugemm-lease-preload`) sees its `ftruncate`.
//!
//! The leased file waits in a socket that the program and all its children inherit. The kernel gives what is in a socket to one
//! receiver, so one file of one of them is replaced, once, and nobody else ever has the leased one.
//!
//! Source of the rules: ld.so(8), unix(7).

use crate::memory_file::Page;
use crate::own_file::{NotReplaced, OwnFile, check_proc};
use crate::seccomp::last_error;
use crate::wire;
use rustix::fs::fstat;
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

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
    require: bool,
}

impl Offer {
    /// Has `file`, of `bytes` and such pages, wait. The descriptor is inherited by every program that this process starts or becomes.
    /// `require`: a program that asks for memory of that length, and cannot have this, has none.
    ///
    /// # Errors
    ///
    /// The system's, and that no program could look at its file; the file is closed then.
    pub fn new(file: OwnedFd, bytes: u64, page: Page, require: bool) -> io::Result<(Self, OwnedFd)> {
        check_proc()?;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair?;
        wire::send(ours.as_fd(), &(), Some(file.as_fd()))?;
        fcntl_setfd(&theirs, FdFlags::empty())?;
        Ok((Offer { socket: theirs.as_raw_fd(), inode: fstat(&theirs)?.st_ino, bytes, page, require }, theirs))
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
    /// faster. False: it leads to its own file.
    ///
    /// Another length than the offer's costs a comparison and nothing else. With that length it allocates, opens and reads files; so not
    /// in signal handlers.
    ///
    /// # Errors
    ///
    /// `NOMEM`: it is of that kind, cannot be replaced, and the memory is required. Standard error says why.
    pub fn take(&self, fd: RawFd, bytes: u64) -> Result<bool, Errno> {
        if bytes != self.bytes {
            return Ok(false);
        }
        match self.replace(fd) {
            Ok(placed) => Ok(placed),
            Err(NotReplaced::Gone) => Ok(false),
            Err(why) => {
                let then = if self.require { "it fails" } else { "it has its own" };
                eprintln!("hugemm lease: this program asks for {bytes} bytes, and {then}: {why}");
                if self.require { Err(Errno::NOMEM) } else { Ok(false) }
            }
        }
    }

    fn replace(&self, fd: RawFd) -> Result<bool, NotReplaced> {
        let (Some(socket), Ok(number)) = (self.socket(), u32::try_from(fd)) else { return Ok(false) };
        let Some(own) = OwnFile::look("self", number, self.page)? else { return Ok(false) };
        let flags = if own.close_on_exec { libc::O_CLOEXEC } else { 0 };
        let put = |file: BorrowedFd<'_>| {
            // SAFETY: as the program that asked for its length is to have it: the same number, another file.
            if unsafe { libc::dup3(file.as_raw_fd(), fd, flags) } == fd { Ok(()) } else { Err(last_error()) }
        };
        let same = copy_of(fd).ok_or(NotReplaced::Gone)?;
        let own = own.alone(same, put)?;
        // The other end is closed: an empty socket is at its end, and nothing waits.
        match wire::receive::<()>(socket.as_fd()) {
            Ok(Some(((), Some(leased)))) => own.replace(leased.as_fd(), put).map(|()| true),
            _ => Ok(false),
        }
    }

    /// A descriptor of our own of the socket, for the program may close its own meanwhile.
    fn socket(&self) -> Option<OwnedFd> {
        copy_of(self.socket).filter(|socket| fstat(socket).is_ok_and(|stat| stat.st_ino == self.inode))
    }
}

fn copy_of(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: any number may be asked for: the kernel says whether it is open.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    // SAFETY: made just now, so nobody else has it.
    (copy >= 0).then(|| unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::memory_file::MemoryFile;
    use rustix::fs::MemfdFlags;
    use rustix::io::{DupFlags, dup3};
    use rustix::mm::{MapFlags, ProtFlags};
    use std::fs::File;
    use std::mem::ManuallyDrop;
    use std::process::{Command, Stdio};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// A process that one test starts has, for a moment, the files of all.
    pub(crate) fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

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
        let _turn = turn();
        let (file, inode_of_leased) = leased();
        let (offer, socket) = Offer::new(file, BYTES, PAGE, false).expect("offered");
        assert!(!rustix::io::fcntl_getfd(&socket).expect("open").contains(FdFlags::CLOEXEC), "it is inherited");
        let told: Offer = serde_json::from_str(&offer.variable().expect("text")).expect("as it was written");
        assert_eq!(told, offer);
        let (first, second, used) = (own(), own(), own());
        rustix::fs::ftruncate(&used, 1).expect("longer");
        let take = |fd: &OwnedFd, bytes| told.take(fd.as_raw_fd(), bytes) == Ok(true);
        assert!(!take(&first, BYTES + 1) && !take(&used, BYTES), "another length; a file with something in it");
        assert!(take(&first, BYTES));
        assert_eq!(inode(&first), inode_of_leased);
        assert!(rustix::io::fcntl_getfd(&first).expect("open").contains(FdFlags::CLOEXEC), "as its own was");
        assert!(!take(&second, BYTES), "it is lent once");
        assert_ne!(inode(&second), inode_of_leased);
    }

    /// As one that has made a directory without `/proc` its root: it has its own memory, or none where the leased one is required, and the
    /// lease is there for another.
    #[test]
    fn a_program_without_proc_is_not_lent_in_silence() {
        let _turn = turn();
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root has another root");
            return;
        }
        let (file, inode_of_leased) = leased();
        let (offer, _socket) = Offer::new(file, BYTES, PAGE, false).expect("offered");
        let strict = Offer { require: true, ..offer.clone() };
        let own_file = own();
        let before = inode(&own_file);
        let root = std::env::temp_dir().join(format!("hugemm-no-proc-{}", std::process::id()));
        std::fs::create_dir(&root).expect("a directory");
        let elsewhere = || {
            // SAFETY: this thread alone has another root from here on.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FS) }, 0);
            rustix::process::chroot(&root).expect("root may");
            assert_eq!(strict.take(own_file.as_raw_fd(), BYTES), Err(Errno::NOMEM));
            assert_eq!(offer.take(own_file.as_raw_fd(), BYTES), Ok(false));
        };
        let ended = std::thread::scope(|scope| scope.spawn(elsewhere).join());
        std::fs::remove_dir(&root).expect("empty");
        ended.unwrap_or_else(|cause| std::panic::resume_unwind(cause));
        assert_eq!(inode(&own_file), before);
        let closed = own().as_raw_fd();
        assert_eq!(strict.take(closed, BYTES), Ok(false), "what is closed is the kernel's to refuse");
        assert_eq!(offer.take(own_file.as_raw_fd(), BYTES), Ok(true));
        assert_eq!(inode(&own_file), inode_of_leased);
    }

    /// A file that can be reached in a second way, from here or elsewhere, stays what it is: there would be two memories.
    #[test]
    fn a_file_that_somebody_else_can_reach_is_left_alone() {
        let _turn = turn();
        let map = |fd: &OwnedFd| {
            let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            // SAFETY: at an address of the kernel's choice; nothing is touched there.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), BYTES as usize, rights, flags, fd, 0) }.expect("mapped")
        };
        let (file, inode_of_leased) = leased();
        let (offer, _socket) = Offer::new(file, BYTES, PAGE, false).expect("offered");
        let strict = Offer { require: true, ..offer.clone() };
        let left_alone = |how: &str, own: &OwnedFd| {
            let before = inode(own);
            for (offer, answer) in [(&offer, Ok(false)), (&strict, Err(Errno::NOMEM))] {
                assert_eq!(offer.take(own.as_raw_fd(), BYTES), answer, "{how}");
                assert_eq!(inode(own), before, "{how}");
            }
        };
        let own_file = own();
        let copy = own_file.try_clone().expect("a descriptor");
        left_alone("duplicated", &own_file);
        assert_eq!(inode(&copy), inode(&own_file));
        let own_file = own();
        let _opened = File::open(format!("/proc/self/fd/{}", own_file.as_raw_fd())).expect("opened");
        left_alone("opened by its path", &own_file);
        let own_file = own();
        let at = map(&own_file);
        left_alone("mapped", &own_file);
        // SAFETY: mapped above, and nobody uses it.
        unsafe { rustix::mm::munmap(at, BYTES as usize) }.expect("unmapped");
        let own_file = own();
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, _theirs) = pair.expect("a pair");
        wire::send(ours.as_fd(), &(), Some(own_file.as_fd())).expect("sent");
        left_alone("in a socket", &own_file);
        let own_file = own();
        let inherits = Stdio::from(own_file.try_clone().expect("a descriptor"));
        let mut child = Command::new("cat").stdin(Stdio::piped()).stderr(inherits).spawn().expect("cat");
        left_alone("another process's", &own_file);
        drop(child.stdin.take());
        child.wait().expect("ended");
        // That the mapping, the other process and so on are over is enough.
        assert_eq!(offer.take(own_file.as_raw_fd(), BYTES), Ok(true));
        assert_eq!(inode(&own_file), inode_of_leased);
    }

    /// One that somebody duplicates between the look and the exchange: the program has its own file back.
    #[test]
    fn a_file_that_is_duplicated_meanwhile_is_left_alone() {
        let _turn = turn();
        let ((leased, _), own_file) = (leased(), own());
        let (fd, before) = (own_file.as_raw_fd(), inode(&own_file));
        // SAFETY: the same number, which stays this test's.
        let put = |file: BorrowedFd<'_>| match unsafe { libc::dup3(file.as_raw_fd(), fd, libc::O_CLOEXEC) } {
            at if at == fd => Ok(()),
            _ => Err(last_error()),
        };
        let found = OwnFile::look("self", fd as u32, PAGE).expect("it can be looked at").expect("a fresh file");
        let alone = found.alone(copy_of(fd).expect("open"), put).expect("nobody else has it");
        let copy = own_file.try_clone().expect("a descriptor");
        assert_eq!(alone.replace(leased.as_fd(), put), Err(NotReplaced::Shared));
        assert_eq!((inode(&own_file), inode(&copy)), (before, before));
    }

    /// What is no descriptor, and what is not open.
    #[test]
    fn a_number_that_is_no_socket_is_passed_over() {
        for socket in [-1, RawFd::MIN, RawFd::MAX] {
            let offer = Offer { socket, inode: 1, bytes: BYTES, page: PAGE, require: true };
            assert_eq!(offer.take(own().as_raw_fd(), BYTES), Ok(false), "{socket}");
        }
    }

    /// A program that closes what it does not know, and has something else under that number.
    #[test]
    fn nothing_is_taken_from_a_socket_of_the_programs_own() {
        let (offer, socket) = Offer::new(leased().0, BYTES, PAGE, false).expect("offered");
        let (other, mut at) = (leased().0, ManuallyDrop::new(socket));
        let (_, theirs) = Offer::new(other, BYTES, PAGE, false).expect("a socket with a packet");
        dup3(&theirs, &mut at, DupFlags::empty()).expect("in its place");
        assert_eq!(offer.take(own().as_raw_fd(), BYTES), Ok(false));
        assert!(
            wire::receive::<()>(theirs.as_fd()).expect("open").is_some_and(|(_, file)| file.is_some()),
            "untouched"
        );
        drop(ManuallyDrop::into_inner(at));
    }
}
