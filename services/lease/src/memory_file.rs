//! A file of huge pages in memory: made, filled part by part, checked, handed to its one owner.
//!
//! Whose a file is stands on the file itself: mode 0 is nobody's, mode 0600 its one owner's, who alone may open it by a path
//! (`/proc/PID/fd/N`). [`MemoryFile::make_lent`] writes that before anybody else gets the descriptor, so that a daemon that starts
//! anew knows which of its predecessor's files nobody has had.

use hugemm_base::PageSize;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// What a file consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Page {
    /// Pages of the kernel's 2 MiB pool.
    #[serde(rename = "2M")]
    Huge2M,
    /// Pages of the kernel's 1 GiB pool.
    #[serde(rename = "1G")]
    Huge1G,
    /// Transparent huge pages of 2 MiB, where there is no pool.
    #[serde(rename = "thp")]
    Transparent,
}

impl Page {
    /// Bytes of one page.
    pub const fn bytes(self) -> u64 {
        match self {
            Page::Huge2M | Page::Transparent => PageSize::Size2M.bytes(),
            Page::Huge1G => PageSize::Size1G.bytes(),
        }
    }

    /// The pool that the pages come from.
    pub const fn pool(self) -> Option<PageSize> {
        match self {
            Page::Huge2M => Some(PageSize::Size2M),
            Page::Huge1G => Some(PageSize::Size1G),
            Page::Transparent => None,
        }
    }
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Page::Huge2M => "2M",
            Page::Huge1G => "1G",
            Page::Transparent => "thp",
        })
    }
}

/// Why something could not be done with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The pool, or memory, has no page left where one was wanted.
    #[error("no free huge page")]
    NoPages,
    /// The pages are there, but they are not huge.
    #[error(
        "only {huge} of {bytes} bytes are in huge pages; see /sys/kernel/mm/transparent_hugepage/shmem_enabled (`advise` is enough) and free memory"
    )]
    NotHuge {
        /// Bytes in huge pages.
        huge: u64,
        /// Bytes wanted.
        bytes: u64,
    },
    /// A page of it is broken; the kernel answers whoever touches it with SIGBUS.
    #[error("a page of the file is broken (hardware error)")]
    HwPoisoned,
    /// It cannot be another user's.
    #[error("this daemon may not give files to other users, which takes CAP_CHOWN")]
    NotGiven,
    /// It cannot be watched whether anybody has it.
    #[error("{}", crate::left::unknown(*.0))]
    Unwatched(Errno),
    /// The kernel refused.
    #[error("{call}: {errno}")]
    Refused {
        /// Which call.
        call: &'static str,
        /// Its answer.
        errno: Errno,
    },
}

fn refused(call: &'static str) -> impl Fn(Errno) -> FileError {
    move |errno| match errno {
        Errno::NOSPC | Errno::NOMEM => FileError::NoPages,
        Errno::HWPOISON => FileError::HwPoisoned,
        errno => FileError::Refused { call, errno },
    }
}

/// What memory is called, and what follows if all of it is from one node.
const NAME: &str = "hugemm-lease";
const ON_NODE: &str = "-node-";

const READY: Mode = Mode::empty();
const LENT: Mode = Mode::RUSR.union(Mode::WUSR);

/// A file of huge pages. Dropping it gives the pages back to the kernel, once nobody else has it open or mapped.
#[derive(Debug)]
pub struct MemoryFile {
    fd: OwnedFd,
    page: Page,
    bytes: u64,
    /// How much of the machine's memory was broken when no page of the file was.
    broken: Option<u64>,
}

impl MemoryFile {
    /// A file of `bytes`, a multiple of the page, without pages yet, which may come from anywhere.
    ///
    /// # Errors
    ///
    /// [`FileError::Refused`]: no such page size on this machine, no memory for a file.
    pub fn new(page: Page, bytes: u64) -> Result<Self, FileError> {
        Self::on(None, page, bytes)
    }

    /// The same, for pages from one node: whoever fills it sees to that ([`memory_from`](crate::background::memory_from)). The file's name
    /// says so to the next daemon.
    pub(crate) fn on(node: Option<u32>, page: Page, bytes: u64) -> Result<Self, FileError> {
        let huge = match page {
            Page::Huge2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            Page::Huge1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
            Page::Transparent => MemfdFlags::empty(),
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
        let name = node.map_or(NAME.to_owned(), |node| format!("{NAME}{ON_NODE}{node}"));
        let fd = rustix::fs::memfd_create(name, flags).map_err(refused("memfd_create"))?;
        rustix::fs::fchmod(&fd, READY).map_err(refused("fchmod"))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(refused("ftruncate"))?;
        // Before it has pages, and the kernel gives nobody a broken one.
        Ok(MemoryFile { fd, page, bytes, broken: hardware_corrupted() })
    }

    /// A file that a predecessor left.
    ///
    /// # Errors
    ///
    /// The descriptor, if it is not one that is filled and nobody's. An owner could write a file's mode back, but not its user.
    pub fn adopt(fd: OwnedFd) -> Result<Self, OwnedFd> {
        let known = page_of(fd.as_fd()).zip(rustix::fs::fstat(&fd).ok());
        let ready = known.filter(|(_, stat)| {
            let filled = stat.st_blocks as u64 * 512 >= stat.st_size as u64 && stat.st_size > 0;
            let ours = stat.st_uid == rustix::process::geteuid().as_raw();
            filled && ours && Mode::from_raw_mode(stat.st_mode) == READY
        });
        match ready {
            // Where nothing is broken, no page of it is.
            Some((page, stat)) => Ok(MemoryFile { fd, page, bytes: stat.st_size as u64, broken: Some(0) }),
            None => Err(fd),
        }
    }

    /// What it consists of.
    pub fn page(&self) -> Page {
        self.page
    }

    /// Its length, filled or not.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `from..to`: the kernel takes the pages from where the calling thread's memory policy says, and zeroes them. Takes
    /// as long as that: about a tenth of a second per GiB. What is there already costs little.
    ///
    /// # Errors
    ///
    /// [`FileError::NoPages`]: part of the range may be filled; try again later. [`FileError::NotHuge`].
    pub fn fill(&self, from: u64, to: u64) -> Result<(), FileError> {
        if self.page == Page::Transparent {
            // `fallocate` would take small pages unless the whole machine prefers huge ones; a mapping can ask for them.
            return self.populate(from, to);
        }
        rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), from, to - from).map_err(refused("fallocate"))
    }

    /// [`fill`](MemoryFile::fill) through a mapping, which several threads can do at once: `fallocate` locks the file.
    ///
    /// # Errors
    ///
    /// As [`fill`](MemoryFile::fill).
    pub fn populate(&self, from: u64, to: u64) -> Result<(), FileError> {
        let window = Window::new(self.fd.as_fd(), from, to - from)?;
        if self.page != Page::Transparent {
            return window.advise(Advice::LinuxPopulateWrite);
        }
        window.advise(Advice::LinuxHugepage)?;
        window.advise(Advice::LinuxPopulateWrite)?;
        match window.huge_bytes() {
            huge if huge >= to - from => Ok(()),
            huge => Err(FileError::NotHuge { huge, bytes: to - from }),
        }
    }

    /// Has a part of it, of whole pages, written by `write`.
    ///
    /// # Errors
    ///
    /// [`FileError::Refused`]: no address space.
    pub(crate) fn with_bytes<R>(&self, from: u64, to: u64, write: impl FnOnce(&mut [u8]) -> R) -> Result<R, FileError> {
        let window = Window::new(self.fd.as_fd(), from, to - from)?;
        // SAFETY: mapped for as long as `window`; a file that is being filled is this thread's alone.
        Ok(write(unsafe { std::slice::from_raw_parts_mut(window.at.as_ptr().cast(), window.bytes) }))
    }

    /// Makes it `bytes` long, by giving pages at the end back, or by making room for more, which are to be
    /// [filled](MemoryFile::fill).
    ///
    /// # Errors
    ///
    /// [`FileError::Refused`].
    pub fn resize(&mut self, bytes: u64) -> Result<(), FileError> {
        rustix::fs::ftruncate(&self.fd, bytes).map_err(refused("ftruncate"))?;
        self.bytes = bytes;
        Ok(())
    }

    /// That no page of it is broken. Looks at every page, without touching its bytes, if any memory of the machine has broken since
    /// the file was made: some tenths of a second per TiB. Else it costs next to nothing. Transparent pages are always looked at, for
    /// they may have been swapped out.
    ///
    /// # Errors
    ///
    /// [`FileError::HwPoisoned`]; [`FileError::NoPages`] if one is missing and could not be had.
    pub fn check(&mut self) -> Result<(), FileError> {
        // Before the look: what breaks meanwhile is found by the next.
        let broken = hardware_corrupted();
        if self.page == Page::Transparent || !is_as_it_was(self.broken, broken) {
            Window::new(self.fd.as_fd(), 0, self.bytes)?.advise(Advice::LinuxPopulateRead)?;
            self.broken = broken;
        }
        Ok(())
    }

    /// Writes on the file that it has an owner, who alone may open it again by a path (`/proc/PID/fd/N`). From here on no daemon
    /// lends it.
    /// Before the descriptor is sent to anybody.
    ///
    /// # Errors
    ///
    /// [`FileError::Refused`]: it must not be lent then.
    pub fn make_lent(&self, uid: u32, gid: u32) -> Result<(), FileError> {
        self.mark_ready(false)?;
        self.give_to(uid, gid)
    }

    /// The first half of it, after which this process may open the file by its path; or undoes that, of a file that nobody has had.
    pub(crate) fn mark_ready(&self, is_ready: bool) -> Result<(), FileError> {
        rustix::fs::fchmod(&self.fd, if is_ready { READY } else { LENT }).map_err(refused("fchmod"))
    }

    /// The other half.
    pub(crate) fn give_to(&self, uid: u32, gid: u32) -> Result<(), FileError> {
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        rustix::fs::fchown(&self.fd, Some(uid), Some(gid)).map_err(|errno| match errno {
            Errno::PERM => FileError::NotGiven,
            errno => refused("fchown")(errno),
        })
    }

    /// The same file, for another thread.
    pub(crate) fn try_clone(&self) -> Result<Self, FileError> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&self.fd, 3).map_err(refused("fcntl"))?;
        Ok(MemoryFile { fd, ..*self })
    }

    /// Gives the descriptor up.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// How much of this machine's memory the kernel has found broken, in KiB: 0 from one that does not look for that, `None` if it cannot
/// be known (proc_meminfo(5)).
fn hardware_corrupted() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let Some(broken) = text.lines().find_map(|line| line.strip_prefix("HardwareCorrupted:")) else { return Some(0) };
    broken.split_whitespace().next()?.parse().ok()
}

/// Whether it is known that no memory has broken between two readings.
fn is_as_it_was(before: Option<u64>, now: Option<u64>) -> bool {
    now.is_some() && before == now
}

/// From which node alone a file's pages were taken.
pub(crate) fn node_of(fd: BorrowedFd<'_>) -> Option<u32> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    let node = name.to_str()?.split_once(NAME)?.1.strip_prefix(ON_NODE)?;
    node.split(' ').next()?.parse().ok()
}

/// Of which pages a file is: `None` unless it is one of a huge page file system, or one in memory that may be sealed or has
/// no name.
pub fn page_of(fd: BorrowedFd<'_>) -> Option<Page> {
    page_of_system(&rustix::fs::fstatfs(fd).ok()?)
}

/// The same, of files of that file system.
pub(crate) fn page_of_system(system: &rustix::fs::StatFs) -> Option<Page> {
    const HUGETLBFS: u32 = 0x958458f6;
    const TMPFS: u32 = 0x0102_1994;
    let (kind, block) = (system.f_type as u32, system.f_bsize as u64);
    match kind {
        HUGETLBFS => [Page::Huge2M, Page::Huge1G].into_iter().find(|page| page.bytes() == block),
        TMPFS => Some(Page::Transparent),
        _ => None,
    }
}

/// Gives a lent file the seals of the one whose place it takes, as far as it has not got them from a former start of its owner.
///
/// # Errors
///
/// The kernel's, if the file can't be sealed.
pub fn copy_seals(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::fcntl_get_seals(from) {
        // A file of a mounted file system cannot be sealed at all; nothing is expected of one in its place.
        Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error),
        Ok(seals) => match seals - rustix::fs::fcntl_get_seals(to)? {
            missing if missing.is_empty() => Ok(()),
            missing => rustix::fs::fcntl_add_seals(to, missing),
        },
    }
}

/// A shared mapping of a part of a file.
struct Window {
    at: NonNull<c_void>,
    bytes: usize,
}

impl Window {
    fn new(fd: BorrowedFd<'_>, from: u64, bytes: u64) -> Result<Self, FileError> {
        let len = usize::try_from(bytes).map_err(|_| FileError::NoPages)?;
        // SAFETY: at an address of the kernel's choice; no memory that exists is touched.
        let at = unsafe {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), len, rights, MapFlags::SHARED | MapFlags::NORESERVE, fd, from)
        }
        .map_err(refused("mmap"))?;
        let at = NonNull::new(at).ok_or(FileError::NoPages)?;
        Ok(Window { at, bytes: len })
    }

    fn advise(&self, advice: Advice) -> Result<(), FileError> {
        loop {
            // SAFETY: the mapping is ours; the advice makes pages present or asks for their size, and changes no byte.
            match unsafe { rustix::mm::madvise(self.at.as_ptr(), self.bytes, advice) } {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::FAULT) => return Err(FileError::NoPages),
                other => return other.map_err(refused("madvise")),
            }
        }
    }

    /// How many of the bytes are mapped by huge pages, as the kernel says.
    fn huge_bytes(&self) -> u64 {
        let start = format!("{:x}-", self.at.as_ptr().addr());
        let Ok(smaps) = std::fs::read_to_string("/proc/self/smaps") else { return 0 };
        smaps
            .lines()
            .skip_while(|line| !line.starts_with(&start))
            .find_map(|line| line.strip_prefix("ShmemPmdMapped:"))
            .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
            .map_or(0, |kib| kib << 10)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody else has the address.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::SealFlags;

    #[test]
    fn pages_are_looked_at_unless_nothing_can_have_broken() {
        assert!(is_as_it_was(Some(0), Some(0)) && is_as_it_was(Some(2048), Some(2048)));
        for (before, now) in [(Some(0), Some(4)), (Some(0), None), (None, Some(0)), (None, None)] {
            assert!(!is_as_it_was(before, now), "{before:?}, {now:?}");
        }
        assert!(hardware_corrupted().is_some(), "this machine says how it is");
    }

    /// Kept memory takes the place of a file at each start of its program.
    #[test]
    fn seals_are_copied_as_often_as_a_program_starts() {
        let flags = MemfdFlags::CLOEXEC;
        // Without MFD_ALLOW_SEALING a file is born with the seal that forbids others.
        let unsealable = rustix::fs::memfd_create(c"unsealable", flags).expect("a file");
        let sealed = rustix::fs::memfd_create(c"sealed", flags | MemfdFlags::ALLOW_SEALING).expect("a file");
        rustix::fs::fcntl_add_seals(&sealed, SealFlags::GROW | SealFlags::SEAL).expect("sealed");
        let leased = MemoryFile::new(Page::Transparent, Page::Transparent.bytes()).expect("a file");
        let seals = || rustix::fs::fcntl_get_seals(&leased);
        assert_eq!(seals(), Ok(SealFlags::empty()));
        for _ in 0..2 {
            assert_eq!(copy_seals(unsealable.as_fd(), leased.as_fd()), Ok(()));
            assert_eq!(seals(), Ok(SealFlags::SEAL));
        }
        assert_eq!(copy_seals(sealed.as_fd(), leased.as_fd()), Err(Errno::PERM), "one is missing, and cannot be had");
    }

    /// What is lent says so by its mode, and whose it is: nobody else opens it by a path, and no daemon takes it for a ready one.
    #[test]
    fn a_lent_file_has_an_owner() {
        let file = MemoryFile::new(Page::Transparent, Page::Transparent.bytes()).expect("a file");
        let found = || {
            let found = rustix::fs::fstat(&file).expect("a file");
            (Mode::from_raw_mode(found.st_mode), found.st_uid, found.st_gid)
        };
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        assert_eq!(found(), (Mode::empty(), uid, gid), "ready");
        // Root may give it to anybody.
        let (uid, gid) = if uid == 0 { (65534, 65533) } else { (uid, gid) };
        file.make_lent(uid, gid).expect("its own");
        assert_eq!(found(), (Mode::RUSR | Mode::WUSR, uid, gid));
    }
}
