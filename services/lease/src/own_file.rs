//! A file that a program has made for itself, and whose place a leased one may take: one that nobody but the program's one descriptor
//! leads to. With a second descriptor, a mapping, or a copy in a socket there would be two memories where the program has one.
//!
//! What its own process has duplicated is seen there, and nothing is touched. Else nothing but the kernel knows who can reach a file,
//! and there is one thing that it does when the last way to an *open file* is gone: it gives up the open file's lock (flock(2)). So the
//! program's descriptor is first led to the same file, opened once more, while it waits in its call; if the lock of the open file that
//! it had then is free, nobody else had that. The same is done again when the leased file comes: who has duplicated the descriptor
//! meanwhile has the lock, and the program has its own file back. Files that were opened by a path (`/proc/PID/fd/N`) are open files of
//! their own; these the kernel counts (`F_SETLEASE`, fcntl(2)). From Linux 7.0 on it counts none on hugetlbfs (EINVAL), so there every
//! process that this user may look at is asked what it has open and mapped; one that is in a socket, in a ring or in a thread's own
//! table is not seen then, and processes that share a table count as two.
//!
//! What is left: a thread that duplicates the descriptor between the two, and another one that does so after the second, have two
//! memories; both during a call on that very number. A descriptor opened with `O_PATH` counts as nothing.

use crate::memory_file::{Page, copy_seals, page_of};
use crate::seccomp::last_error;
use rustix::fs::{
    FileType, FlockOperation, Mode, OFlags, SeekFrom, Stat, fcntl_setfl, flock, fstat, major, minor, seek, stat,
};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// For how long it is looked at what all processes have open.
const PATIENCE: Duration = Duration::from_secs(5);

/// A descriptor of a process that leads to a file which has no name, no length and no pages.
#[derive(Debug)]
pub(crate) struct OwnFile {
    /// The file, opened once more.
    file: OwnedFd,
    /// Where it was found, and which it is.
    path: String,
    identity: (u64, u64),
    /// What its open file has of its own.
    flags: OFlags,
    position: u64,
    pub(crate) close_on_exec: bool,
}

/// Why a file that is of the right kind keeps its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotReplaced {
    /// It would have two memories.
    #[error(
        "something else leads to the same file, too: a duplicate, a mapping, another process, a socket that it was sent by"
    )]
    Shared,
    /// It may have.
    #[error("whether something else leads to the same file cannot be found out: a process may be stuck in the kernel")]
    Unknown,
    /// Its name leads to it, and to nothing else.
    #[error("it has a name, by which others may open it, too")]
    Named,
    /// Nothing is leased for it.
    #[error("{0}")]
    NotLent(String),
    /// It could not be looked at, or changed.
    #[error("{0}: {1}")]
    Refused(&'static str, Errno),
    /// The descriptor is another's by now, or nobody waits any more.
    #[error("its descriptor was closed meanwhile")]
    Gone,
}

fn refused(what: &'static str) -> impl Fn(Errno) -> NotReplaced {
    move |errno| NotReplaced::Refused(what, errno)
}

/// Whether what `/proc` says of a number is of the process that has it here: without that no program's file can be looked at, and none
/// is replaced.
///
/// # Errors
///
/// What is wrong, and the way out.
pub fn check_proc() -> io::Result<()> {
    let status = File::open("/proc/self/status").map(BufReader::new);
    let what = if status.is_ok() { "/proc is of another process namespace" } else { "there is no /proc" };
    let mut lines = status.into_iter().flat_map(|status| status.lines().map_while(Result::ok));
    let numbers = lines.find_map(|line| Some(line.strip_prefix("NSpid:")?.trim().to_owned()));
    if numbers.is_some_and(|numbers| numbers == std::process::id().to_string()) {
        return Ok(());
    }
    Err(io::Error::other(format!("{what}, so files of a process cannot be found (mount -t proc proc /proc)")))
}

impl OwnFile {
    /// Looks at a descriptor of `process`, a number or `self`. `None`: it is none that a leased file of such pages could replace.
    ///
    /// # Errors
    ///
    /// [`NotReplaced::Refused`]: nobody knows what it is.
    pub(crate) fn look(process: &str, fd: u32, page: Page) -> Result<Option<Self>, NotReplaced> {
        let path = format!("/proc/{process}/fd/{fd}");
        let info = match fs::read_to_string(format!("/proc/{process}/fdinfo/{fd}")).map_err(errno_of) {
            Err(Errno::NOENT) if stat("/proc/self/fd").is_ok() => return Ok(None),
            // A program may hide it after it was started.
            Err(Errno::NOENT) => return Err(refused("there is no /proc to look at its descriptor by")(Errno::NOENT)),
            other => other.map_err(refused("its descriptor cannot be looked at"))?,
        };
        let has = |name| info.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        let flags = has("flags:").and_then(|flags| i32::from_str_radix(flags, 8).ok());
        let position = has("pos:").and_then(|position| position.parse().ok()).unwrap_or(0);
        let Some(flags) = flags.filter(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY) else { return Ok(None) };
        if !is_in_memory(process, &path, &info) {
            return Ok(None);
        }
        // Before anything is changed: duplicates in its process have its open file, and are to keep it.
        let inode = info.lines().find(|line| line.starts_with("ino:"));
        let at = fs::read_link(&path).ok().zip(inode);
        let ways = at.and_then(|(link, inode)| ways_to(&Path::new("/proc").join(process), &link, inode).ok());
        // What is looked at is what is opened: a device, say, could do something.
        let at = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let at = at.map_err(refused("its descriptor cannot be looked at"))?;
        let stat = fstat(&at).map_err(refused("its descriptor cannot be looked at"))?;
        let is_fresh = stat.st_size == 0 && stat.st_blocks == 0;
        if !is_fresh || !FileType::from_raw_mode(stat.st_mode).is_file() || page_of(at.as_fd()) != Some(page) {
            return Ok(None);
        }
        if stat.st_nlink > 0 {
            // Of transparent ones any file in memory may have some.
            return if page.pool().is_some() { Err(NotReplaced::Named) } else { Ok(None) };
        }
        if ways.is_some_and(|ways| ways > 1) {
            return Err(NotReplaced::Shared);
        }
        let file = open_again(at.as_fd()).map_err(refused("its file cannot be opened"))?;
        let (identity, close_on_exec) = ((stat.st_dev, stat.st_ino), flags & libc::O_CLOEXEC != 0);
        let flags = OFlags::from_bits_retain(flags as u32);
        Ok(Some(OwnFile { file, path, identity, flags, position, close_on_exec }))
    }

    /// Leads the descriptor to the same file, opened once more, by `put`, and says whether nothing else leads there. `same` is another
    /// descriptor of the open file that it leads to now.
    ///
    /// # Errors
    ///
    /// [`NotReplaced`]: it leads to the same file in either case.
    pub(crate) fn alone(
        self,
        same: OwnedFd,
        put: impl Fn(BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<AloneFile, NotReplaced> {
        let at = fstat(&same).map_err(refused("fstat"))?;
        if (at.st_dev, at.st_ino) != self.identity {
            return Err(NotReplaced::Gone);
        }
        self.liken(self.file.as_fd())?;
        // Somebody who has locked it is somebody else.
        flock(&same, FlockOperation::NonBlockingLockExclusive).map_err(|_| NotReplaced::Shared)?;
        self.put(self.file.as_fd(), put).inspect_err(|_| {
            let _ = flock(&same, FlockOperation::Unlock);
        })?;
        // The last way to it, if the program had the only one.
        drop(same);
        // The program's descriptor, and the one here.
        check_alone(self.file.as_fd(), 2)?;
        Ok(AloneFile(self))
    }

    /// Whether the descriptor leads to it still, and it has no length and no pages.
    pub(crate) fn is_there(&self) -> bool {
        let is_same =
            |stat: Stat| (stat.st_dev, stat.st_ino) == self.identity && stat.st_size == 0 && stat.st_blocks == 0;
        stat(&self.path).is_ok_and(is_same)
    }

    /// Gives another open file what the program's has of its own.
    fn liken(&self, file: BorrowedFd<'_>) -> Result<(), NotReplaced> {
        fcntl_setfl(file, self.flags).map_err(refused("F_SETFL"))?;
        seek(file, SeekFrom::Start(self.position)).map(drop).map_err(refused("lseek"))
    }

    /// The last thing before is a look: another thread may have closed the descriptor, and its number may be another file's by now. A
    /// thread that does so between these two calls loses what it opened; it did so during a call on that very number.
    fn put(&self, file: BorrowedFd<'_>, put: impl Fn(BorrowedFd<'_>) -> Result<(), Errno>) -> Result<(), NotReplaced> {
        if !self.is_there() {
            return Err(NotReplaced::Gone);
        }
        put(file).map_err(|errno| match errno {
            Errno::NOENT => NotReplaced::Gone,
            errno => NotReplaced::Refused("its descriptor cannot be replaced", errno),
        })
    }
}

/// A program's file that one descriptor leads to, and nothing else did when it was looked at.
#[derive(Debug)]
pub(crate) struct AloneFile(OwnFile);

impl AloneFile {
    /// Leads the descriptor to `leased`, with the seals of its own file.
    ///
    /// # Errors
    ///
    /// [`NotReplaced`]: it leads to its own file. The leased one may have some of its seals; after [`NotReplaced::Shared`] and
    /// [`NotReplaced::Unknown`] somebody may have it.
    pub(crate) fn replace(
        mut self,
        leased: BorrowedFd<'_>,
        put: impl Fn(BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<(), NotReplaced> {
        let own = &mut self.0;
        copy_seals(own.file.as_fd(), leased).map_err(refused("the leased file cannot have its seals"))?;
        let again = open_again(own.file.as_fd()).map_err(refused("/proc/self/fd"))?;
        own.liken(again.as_fd())?;
        own.liken(leased)?;
        own.put(leased, &put)?;
        // The lock of the one before is free if that was the last way to it.
        own.file = again;
        // Whoever that is has the leased file now, too, or has not.
        check_alone(own.file.as_fd(), 1).inspect_err(|_| _ = put(own.file.as_fd()))
    }
}

impl Drop for AloneFile {
    fn drop(&mut self) {
        // The program has it, and has not locked it.
        let _ = flock(&self.0.file, FlockOperation::Unlock);
    }
}

fn open(path: &str) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
}

/// Opens the file that a descriptor leads to once more.
fn open_again(file: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    open(&format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Whether a descriptor leads to a file in memory, without asking its file system, which may not answer: it may be served by a program
/// that waits for this process.
fn is_in_memory(process: &str, path: &str, info: &str) -> bool {
    // What memfd_create(2) makes is on a mount that is nowhere.
    if fs::read_link(path).is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(b"/memfd:")) {
        return true;
    }
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    let mounts = File::open(format!("/proc/{process}/mountinfo"));
    let (Some(mount), Ok(mounts)) = (mount, mounts) else { return false };
    let mut lines = BufReader::new(mounts).split(b'\n').map_while(Result::ok);
    let found = lines.find_map(|line| is_memory_mount(&String::from_utf8_lossy(&line), mount.trim()));
    found.unwrap_or(false)
}

/// Whether the mount of that number is one in memory, if the line is its own (proc_pid_mountinfo(5)).
fn is_memory_mount(line: &str, mount: &str) -> Option<bool> {
    let (about, system) = line.split_once(" - ")?;
    let is_it = about.split(' ').next() == Some(mount);
    is_it.then(|| ["hugetlbfs ", "tmpfs "].iter().any(|kind| system.starts_with(kind)))
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

/// That no open file of this file is locked, and no other one was opened by a path. If so it is locked by this one. So many descriptors
/// are known to lead to it.
fn check_alone(file: BorrowedFd<'_>, known: usize) -> Result<(), NotReplaced> {
    flock(file, FlockOperation::NonBlockingLockExclusive).map_err(|_| NotReplaced::Shared)?;
    let alone = match is_opened_elsewhere(file, known, is_only_one(file)) {
        Some(false) => Ok(()),
        Some(true) => Err(NotReplaced::Shared),
        None => Err(NotReplaced::Unknown),
    };
    alone.inspect_err(|_| _ = flock(file, FlockOperation::Unlock))
}

/// `None`: that is not known.
fn is_opened_elsewhere(file: BorrowedFd<'_>, known: usize, is_only_one: Option<bool>) -> Option<bool> {
    is_only_one.map_or_else(|| is_found_elsewhere(file, known), |is_only_one| Some(!is_only_one))
}

/// Whether no other open file leads to a file of this user's that was opened by a path for writing, as the kernel counts them (`F_SETLEASE`,
/// fcntl(2)). `None`: it does so on no such file system, or not for this user. For a process that ignores SIGIO: who opens it meanwhile has
/// that sent.
pub(crate) fn is_only_one(file: BorrowedFd<'_>) -> Option<bool> {
    let lease = |kind: libc::c_int| {
        // SAFETY: asks the kernel about open files; no memory is involved.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } == 0 { Ok(()) } else { Err(last_error()) }
    };
    match lease(libc::F_WRLCK) {
        Ok(()) => Some(lease(libc::F_UNLCK).is_ok()),
        Err(Errno::AGAIN) => Some(false),
        Err(_) => None,
    }
}

/// Whether more descriptors than are known lead to a file, or a mapping does, as `/proc` has it; `None` if that is not known in time, for
/// to look at a process that is stuck in the kernel takes for ever. Processes that this user may not look at are left out.
fn is_found_elsewhere(file: BorrowedFd<'_>, known: usize) -> Option<bool> {
    static STUCK: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let at = fstat(file).ok()?;
    in_time(&mut STUCK.lock().unwrap_or_else(PoisonError::into_inner), PATIENCE, move || {
        look_for(&link, &at, known).ok()
    })
}

/// What a thread finds in time. As long as one is stuck no second one looks.
fn in_time(
    stuck: &mut Option<JoinHandle<()>>,
    patience: Duration,
    look: impl FnOnce() -> Option<bool> + Send + 'static,
) -> Option<bool> {
    if stuck.as_ref().is_some_and(|looks| !looks.is_finished()) {
        return None;
    }
    let (says, hears) = std::sync::mpsc::channel();
    let looks = thread::Builder::new().spawn(move || _ = says.send(look())).ok()?;
    match hears.recv_timeout(patience) {
        Ok(found) => {
            let _ = looks.join();
            found
        }
        Err(_) => {
            *stuck = Some(looks);
            None
        }
    }
}

/// What a line of proc_pid_maps(5) has of a file: its device and its number there.
pub(crate) fn mapped_as(at: &Stat) -> String {
    format!("{:02x}:{:02x} {}", major(at.st_dev), minor(at.st_dev), at.st_ino)
}

/// How many descriptors of a process lead to the file of a link and an inode.
fn ways_to(process: &Path, link: &Path, inode: &str) -> io::Result<usize> {
    let is_it = |descriptor: &fs::DirEntry| {
        let info = || fs::read_to_string(process.join("fdinfo").join(descriptor.file_name())).unwrap_or_default();
        fs::read_link(descriptor.path()).is_ok_and(|to| to == link) && info().lines().any(|line| line == inode)
    };
    Ok(fs::read_dir(process.join("fd"))?.flatten().filter(is_it).count())
}

/// Grows with what all processes have open and mapped. File systems are not asked: one may not answer.
fn look_for(link: &Path, at: &Stat, known: usize) -> io::Result<bool> {
    let inode = format!("ino:\t{}", at.st_ino);
    let mapped = mapped_as(at);
    let mut found = 0;
    for process in fs::read_dir("/proc")?.flatten() {
        let process = process.path();
        // Not `self`, which is among the numbers.
        if process.file_name().is_none_or(|name| !name.as_encoded_bytes().iter().all(u8::is_ascii_digit)) {
            continue;
        }
        let Ok(ways) = ways_to(&process, link, &inode) else { continue };
        found += ways;
        let Ok(maps) = File::open(process.join("maps")) else { continue };
        for line in BufReader::new(maps).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            let mut words = line.split_ascii_whitespace().skip(3);
            if words.next().zip(words.next()).is_some_and(|(device, inode)| format!("{device} {inode}") == mapped) {
                return Ok(true);
            }
        }
    }
    Ok(found > known)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::memory_file::MemoryFile;
    use crate::wire;
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fcntl_getfl, ftruncate, memfd_create, tell};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::process::{Command, Stdio};
    use std::sync::{Arc, MutexGuard};

    /// A process that one test starts has, for a moment, the files of all.
    pub(crate) fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    const PAGE: Page = Page::Transparent;
    const BYTES: u64 = 4 << 20;

    fn inode(fd: impl AsFd) -> u64 {
        fstat(fd).expect("open").st_ino
    }

    /// A program's own.
    fn own() -> OwnedFd {
        memfd_create("own", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file")
    }

    /// Leads a descriptor of this process to another file.
    fn put_at(own: &OwnedFd) -> impl Fn(BorrowedFd<'_>) -> Result<(), Errno> + Copy + 'static {
        let fd = own.as_raw_fd();
        // SAFETY: the same number, which stays this test's.
        move |file| match unsafe { libc::dup3(file.as_raw_fd(), fd, libc::O_CLOEXEC) } {
            at if at == fd => Ok(()),
            _ => Err(last_error()),
        }
    }

    fn alone(own: &OwnedFd) -> Result<AloneFile, NotReplaced> {
        let found = OwnFile::look("self", own.as_raw_fd() as u32, PAGE)?.expect("a fresh file");
        found.alone(rustix::io::fcntl_dupfd_cloexec(own, 0).expect("a descriptor"), put_at(own))
    }

    /// A file that can be reached in a second way, from here or elsewhere, stays what it is: there would be two memories.
    #[test]
    fn a_file_that_somebody_else_can_reach_is_left_alone() {
        let _turn = turn();
        let map = |fd: &OwnedFd| {
            let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            // SAFETY: at an address of the kernel's choice; nothing is touched there.
            unsafe { mmap(std::ptr::null_mut(), BYTES as usize, rights, flags, fd, 0) }.expect("mapped")
        };
        let left_alone = |how: &str, own: &OwnedFd| {
            let before = inode(own);
            assert_eq!(alone(own).err(), Some(NotReplaced::Shared), "{how}");
            assert_eq!(inode(own), before, "{how}");
        };
        let own_file = own();
        let copy = own_file.try_clone().expect("a descriptor");
        left_alone("duplicated", &own_file);
        assert_eq!(inode(&copy), inode(&own_file));
        seek(&copy, SeekFrom::Start(100)).expect("a place");
        assert_eq!(tell(&own_file), Ok(100), "it is one open file still");
        let own_file = own();
        let _opened = File::open(format!("/proc/self/fd/{}", own_file.as_raw_fd())).expect("opened");
        left_alone("opened by its path", &own_file);
        let own_file = own();
        let at = map(&own_file);
        left_alone("mapped", &own_file);
        // SAFETY: mapped above, and nobody uses it.
        unsafe { munmap(at, BYTES as usize) }.expect("unmapped");
        let own_file = own();
        let (ours, _theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a pair");
        wire::send(ours.as_fd(), &(), Some(own_file.as_fd())).expect("sent");
        left_alone("in a socket", &own_file);
        let own_file = own();
        let inherits = Stdio::from(own_file.try_clone().expect("a descriptor"));
        let mut child = Command::new("cat").stdin(Stdio::piped()).stderr(inherits).spawn().expect("cat");
        left_alone("another process's", &own_file);
        drop(child.stdin.take());
        child.wait().expect("ended");
        // That the mapping, the other process and so on are over is enough.
        let leased = MemoryFile::new(PAGE, BYTES).expect("a file").into_fd();
        fcntl_setfl(&own_file, OFlags::APPEND).expect("a flag");
        seek(&own_file, SeekFrom::Start(100)).expect("a place");
        let is_like_before =
            || tell(&own_file) == Ok(100) && fcntl_getfl(&own_file).is_ok_and(|flags| flags.contains(OFlags::APPEND));
        let file = alone(&own_file).expect("nobody else has it");
        assert!(is_like_before(), "by another open file");
        file.replace(leased.as_fd(), put_at(&own_file)).expect("replaced");
        assert_eq!(inode(&own_file), inode(&leased));
        assert!(is_like_before(), "with leased memory");
    }

    /// One that somebody duplicates between the look and the exchange: the program has its own file back.
    #[test]
    fn a_file_that_is_duplicated_meanwhile_is_left_alone() {
        let _turn = turn();
        let (leased, own_file) = (MemoryFile::new(PAGE, BYTES).expect("a file").into_fd(), own());
        let before = inode(&own_file);
        let file = alone(&own_file).expect("nobody else has it");
        let copy = own_file.try_clone().expect("a descriptor");
        assert_eq!(file.replace(leased.as_fd(), put_at(&own_file)), Err(NotReplaced::Shared));
        assert_eq!((inode(&own_file), inode(&copy)), (before, before));
    }

    /// One that another thread gives a length, and pages, meanwhile has its bytes: the look from before is of no use any more.
    #[test]
    fn a_file_that_gets_its_length_meanwhile_is_left_alone() {
        let _turn = turn();
        type Grow = fn(&OwnedFd) -> Result<(), Errno>;
        let grow: [Grow; 2] = [|own| ftruncate(own, BYTES), |own| fallocate(own, FallocateFlags::KEEP_SIZE, 0, BYTES)];
        for grow in grow {
            let (leased, own_file) = (MemoryFile::new(PAGE, BYTES).expect("a file").into_fd(), own());
            let before = inode(&own_file);
            let file = alone(&own_file).expect("nobody else has it");
            grow(&own_file).expect("its own");
            assert_eq!(file.replace(leased.as_fd(), put_at(&own_file)), Err(NotReplaced::Gone));
            assert_eq!(inode(&own_file), before);
        }
    }

    /// A descriptor that cannot be replaced is not one that was closed: whoever requires a lease has none, and is told.
    #[test]
    fn a_descriptor_that_cannot_be_replaced_is_told_of() {
        let _turn = turn();
        let own = own();
        let refusal = |errno| {
            let found = OwnFile::look("self", own.as_raw_fd() as u32, PAGE).expect("it may").expect("a fresh file");
            let same = rustix::io::fcntl_dupfd_cloexec(&own, 0).expect("a descriptor");
            found.alone(same, |_| Err(errno)).expect_err("as planted")
        };
        assert_eq!(refusal(Errno::MFILE), NotReplaced::Refused("its descriptor cannot be replaced", Errno::MFILE));
        assert_eq!(refusal(Errno::NOENT), NotReplaced::Gone);
    }

    #[test]
    fn no_second_thread_looks_while_one_is_stuck() {
        let ((says, hears), mut stuck) = (std::sync::mpsc::channel::<()>(), None);
        let soon = Duration::from_millis(20);
        assert_eq!(in_time(&mut stuck, soon, move || hears.recv().ok().map(|()| true)), None);
        assert_eq!(in_time(&mut stuck, PATIENCE, || Some(true)), None);
        drop(says);
        while stuck.as_ref().is_some_and(|looks| !looks.is_finished()) {
            thread::yield_now();
        }
        assert_eq!(in_time(&mut stuck, PATIENCE, || Some(true)), Some(true));
    }

    /// A file system that is served by a program may never answer, as when that program waits for whoever looks.
    #[test]
    fn no_file_system_but_memory_is_asked() {
        let dev = File::options().read(true).write(true).open("/dev/fuse");
        let Ok(dev) = dev.and_then(|dev| Ok((dev, unshared()?))).map(|(dev, ())| Arc::new(dev)) else {
            return eprintln!("skipped: only root mounts, and /dev/fuse must be there");
        };
        let place = std::env::temp_dir().join(format!("hugemm-own-file-{}", std::process::id()));
        fs::write(&place, "").expect("a file");
        let options = format!("fd={},rootmode=100644,user_id=0,group_id=0", dev.as_raw_fd());
        let options = std::ffi::CString::new(options).expect("no zero");
        rustix::mount::mount("test", &place, "fuse", rustix::mount::MountFlags::empty(), Some(options.as_c_str()))
            .expect("mounted");
        let served = Arc::clone(&dev);
        let serves = thread::spawn(move || open_once(&served));
        let file = File::options().read(true).write(true).open(&place).expect("it is answered so far");
        serves.join().expect("no panic");
        let (says, hears) = std::sync::mpsc::channel();
        let fd = file.as_raw_fd() as u32;
        let look = move || says.send(OwnFile::look("thread-self", fd, PAGE).map(|found| found.is_none()));
        let looks = thread::spawn(look);
        let found = hears.recv_timeout(PATIENCE);
        // Whoever waits for it waits no more.
        drop(dev);
        assert!(looks.join().is_ok_and(|said| said.is_ok()));
        rustix::mount::unmount(&place, rustix::mount::UnmountFlags::DETACH).expect("mounted");
        fs::remove_file(&place).expect("its own");
        assert_eq!(found.expect("nobody answers"), Ok(true));
    }

    /// What is mounted by this thread from here on is seen by those that it starts.
    fn unshared() -> io::Result<()> {
        // SAFETY: its own view of mounts for this thread, and for none that is there.
        if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let private = rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC;
        Ok(rustix::mount::mount_change("/", private)?)
    }

    /// Answers what the kernel asks until a file is opened (linux/fuse.h).
    fn open_once(mut dev: &File) {
        const INIT: u32 = 26;
        const OPEN: u32 = 14;
        let mut request = vec![0_u8; 1 << 17];
        loop {
            let got = io::Read::read(&mut dev, &mut request).expect("a request");
            let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().expect("four bytes"));
            let (call, unique) = (word(4), &request[8..16]);
            assert!(got >= 40);
            // Of version 7.31, with writes of a page.
            let mut about = [0_u8; 64];
            about[..8].copy_from_slice(&[7, 0, 0, 0, 31, 0, 0, 0]);
            about[20..24].copy_from_slice(&4096_u32.to_le_bytes());
            let (body, error) = if call == INIT { (&about[..], 0) } else { (&[][..], -libc::ENOSYS) };
            let length = 16 + body.len() as u32;
            let answer = [&length.to_le_bytes(), &error.to_le_bytes(), unique, body].concat();
            io::Write::write_all(&mut dev, &answer).expect("taken");
            if call == OPEN {
                return;
            }
        }
    }

    /// As on hugetlbfs from Linux 7.0 on.
    #[test]
    fn what_opened_a_file_by_its_path_is_found_where_the_kernel_counts_none() {
        let _turn = turn();
        let file = memfd_create("own-file", MemfdFlags::CLOEXEC).expect("a file");
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let is_elsewhere = || is_opened_elsewhere(file.as_fd(), 1, None).expect("in time");
        assert!(!is_elsewhere(), "only this one");
        let again = open(&path).expect("opened");
        assert!(is_elsewhere(), "opened here");
        ftruncate(&file, 4096).expect("longer");
        let (rights, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: at an address of the kernel's choice; nothing is touched there.
        let mapping = unsafe { mmap(std::ptr::null_mut(), 4096, rights, flags, &again, 0) }.expect("mapped");
        drop(again);
        assert!(is_elsewhere(), "mapped, and closed");
        // SAFETY: mapped above, and nobody uses it.
        unsafe { munmap(mapping, 4096) }.expect("unmapped");
        assert!(!is_elsewhere(), "only this one again");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec 5<{path}; echo; read end")]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut other = command.spawn().expect("a shell");
        let said = other.stdout.as_mut().map(|it| io::Read::read(it, &mut [0]));
        assert!(matches!(said, Some(Ok(1))), "it has opened it");
        assert!(is_elsewhere(), "opened by another process");
        drop(other.stdin.take());
        other.wait().expect("ended");
        assert!(!is_elsewhere(), "its end");
        assert_eq!(
            is_opened_elsewhere(file.as_fd(), 0, Some(true)),
            Some(false),
            "whom the kernel tells is not looked for"
        );
    }
}
