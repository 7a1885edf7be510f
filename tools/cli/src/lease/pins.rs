//! How long memory takes to be pinned, as for a device: by io_uring's registered buffers, which take the same pins and need none.

use anyhow::{Context, Result};
use hugemm_lease::memory_file::{MemoryFile, Page};
use io_uring::IoUring;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Which memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Leased, and not touched yet.
    Leased,
    /// Of these pages, if not small ones, and filled before or not.
    Own(Option<Page>, bool),
}

impl Memory {
    pub(super) const ALL: [Memory; 7] = [
        Memory::Leased,
        Memory::Own(Some(Page::Huge2M), true),
        Memory::Own(Some(Page::Huge2M), false),
        Memory::Own(Some(Page::Transparent), true),
        Memory::Own(Some(Page::Transparent), false),
        Memory::Own(None, true),
        Memory::Own(None, false),
    ];

    pub(super) fn name(self) -> String {
        match self {
            Memory::Leased => "2M, leased".to_owned(),
            Memory::Own(page, filled) => {
                let page = page.map_or("4K".to_owned(), |page| page.to_string());
                format!("{page}, {}", if filled { "populated" } else { "fresh" })
            }
        }
    }
}

/// Mapped memory.
struct Region {
    at: *mut c_void,
    bytes: usize,
}

impl Region {
    fn of_file(file: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        // SAFETY: at an address of the kernel's choice; no memory that exists is touched.
        let at =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
        Ok(Region { at: at?, bytes })
    }

    fn anonymous(bytes: usize, advice: Advice) -> Result<Self> {
        // SAFETY: as above; the advice is about pages that are not there yet.
        unsafe {
            let at =
                mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?;
            let region = Region { at, bytes };
            madvise(at, bytes, advice)?;
            Ok(region)
        }
    }

    fn populate(&self) -> Result<()> {
        // SAFETY: pages of a mapping that is ours become present; no byte changes.
        Ok(unsafe { madvise(self.at, self.bytes, Advice::LinuxPopulateWrite) }?)
    }

    /// The time that all of it takes.
    fn pin(&self) -> Result<Duration> {
        const MOST: usize = 1 << 30;
        let part = |at| libc::iovec { iov_base: self.at.wrapping_byte_add(at), iov_len: MOST.min(self.bytes - at) };
        let parts: Vec<_> = (0..self.bytes).step_by(MOST).map(part).collect();
        let ring = IoUring::new(2).context("no io_uring: the kernel has none, or kernel.io_uring_disabled")?;
        let from = Instant::now();
        // SAFETY: the memory is mapped until the ring is gone, and no request reads or writes it.
        unsafe { ring.submitter().register_buffers(&parts) }.context("memory cannot be pinned (ulimit -l)")?;
        Ok(from.elapsed())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by the functions above; nobody else has the address.
        let _ = unsafe { munmap(self.at, self.bytes) };
    }
}

/// How long `bytes` of such memory take; `leased` is a file for the first kind.
pub(super) fn pin(
    memory: Memory,
    bytes: u64,
    leased: impl FnOnce() -> Result<std::os::fd::OwnedFd>,
) -> Result<Duration> {
    let len = usize::try_from(bytes)?;
    let (region, filled) = match memory {
        Memory::Leased => (Region::of_file(leased()?.as_fd(), len)?, false),
        Memory::Own(Some(Page::Transparent), filled) => (Region::anonymous(len, Advice::LinuxHugepage)?, filled),
        Memory::Own(Some(page), filled) => (Region::of_file(MemoryFile::new(page, bytes)?.as_fd(), len)?, filled),
        Memory::Own(None, filled) => (Region::anonymous(len, Advice::LinuxNoHugepage)?, filled),
    };
    if filled {
        region.populate()?;
    }
    region.pin()
}
