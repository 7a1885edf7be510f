//! One anonymous mapping, and the few system calls on it. Each fails with the call that the system refused.

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::ptr::NonNull;

/// `madvise` advice of Linux 6.1: make huge pages of this range now. Not every C library's headers have it.
const MADV_COLLAPSE: libc::c_int = 25;

/// The system call that failed, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallFailed {
    /// The call.
    pub call: &'static str,
    /// What the system said.
    pub errno: Errno,
}

impl std::fmt::Display for CallFailed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.call, self.errno)
    }
}

impl std::error::Error for CallFailed {}

fn failed(call: &'static str) -> impl Fn(Errno) -> CallFailed {
    move |errno| CallFailed { call, errno }
}

/// What stands behind a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Ordinary anonymous memory.
    Anonymous,
    /// Pages of a hugetlb pool.
    Hugetlb {
        /// The pages have 1 << shift bytes.
        shift: u32,
    },
}

/// A private, readable and writable mapping, aligned as asked for, between two guard pages that cannot be touched. The
/// guards also keep the kernel from merging it with a neighbour, so that what smaps says of it is said of it alone.
#[derive(Debug)]
pub struct Mmap {
    start: NonNull<u8>,
    len: usize,
    /// The mapping with its guards.
    outer: NonNull<u8>,
    outer_len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and every access through `&Mmap` is a system call
// that any thread may make.
unsafe impl Send for Mmap {}
// SAFETY: as above; bytes are reached through `&mut Mmap` or raw pointers only.
unsafe impl Sync for Mmap {}

impl Mmap {
    /// Maps `len` bytes at a multiple of `align`. `len` is a multiple of the page size of `kind`, `align` a power of
    /// two and a multiple of that page size, `guard` the base page size. Nothing is populated.
    pub fn new(len: usize, align: usize, guard: usize, kind: Kind) -> Result<Self, CallFailed> {
        let too_large = CallFailed { call: "mmap", errno: Errno::NOMEM };
        let spare = align.checked_add(guard).ok_or(too_large)?;
        let reserved_len = len.checked_add(spare).ok_or(too_large)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory that exists.
        let reserved = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                reserved_len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(failed("mmap"))?
        .cast::<u8>();
        // The first multiple of `align` that leaves room for a guard page; at most `align` bytes are skipped, and a
        // guard page remains behind: reserved_len = align + len + guard.
        let skip = (reserved.addr() + guard).next_multiple_of(align) - reserved.addr();
        let (skip, tail) = (skip, spare - skip);
        let start = reserved.wrapping_add(skip);
        // Give the slack back but for one guard page on either side. Failure only leaves addresses unused.
        let (front, back) = (skip - guard, tail.saturating_sub(guard));
        if front > 0 {
            // SAFETY: these addresses are inside the reservation just made, and nothing else knows them.
            let _ = unsafe { munmap(reserved.cast(), front) };
        }
        if back > 0 {
            // SAFETY: as above.
            let _ = unsafe { munmap(start.wrapping_add(len + guard).cast(), back) };
        }
        let (Some(start), Some(outer)) = (NonNull::new(start), NonNull::new(reserved.wrapping_add(front))) else {
            return Err(too_large);
        };
        // From here on, dropping unmaps whatever there is.
        let mapping = Self { start, len, outer, outer_len: len + guard + tail.min(guard) };
        match kind {
            Kind::Anonymous => {
                // SAFETY: the range is our own reservation.
                unsafe { mprotect(start.as_ptr().cast(), len, MprotectFlags::READ | MprotectFlags::WRITE) }
                    .map_err(failed("mprotect"))?;
            }
            Kind::Hugetlb { shift } => {
                let size = MapFlags::from_bits_retain(shift << libc::MAP_HUGE_SHIFT);
                // SAFETY: the fixed range is our own reservation, which holds nothing.
                unsafe {
                    mmap_anonymous(
                        start.as_ptr().cast(),
                        len,
                        ProtFlags::READ | ProtFlags::WRITE,
                        MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::HUGETLB | size,
                    )
                }
                .map_err(failed("mmap(MAP_HUGETLB)"))?;
            }
        }
        // A child process must neither copy gigabytes of page tables nor hold the pages; a core dump need not either.
        let _ = mapping.advise(0..len, Advice::LinuxDontFork);
        let _ = mapping.advise(0..len, Advice::LinuxDontDump);
        Ok(mapping)
    }

    /// `bytes` of ordinary memory, a multiple of 4 KiB, at a multiple of 2 MiB.
    pub fn anonymous(bytes: usize) -> Result<Self, CallFailed> {
        Mmap::new(bytes, 2 << 20, rustix::param::page_size(), Kind::Anonymous)
    }

    /// First byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "none is empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The mapping's bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is mapped readable and writable for as long as `self` lives, anonymous memory is
        // initialised (to zeros), and `&mut self` makes this the only safe way to it.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), Errno> {
        assert!(range.start <= range.end && range.end <= self.len, "a range of the mapping");
        // SAFETY: the range is inside the mapping. None of the kinds of advice used here changes what memory holds.
        unsafe { madvise(self.start.as_ptr().wrapping_add(range.start).cast(), range.len(), advice) }
    }

    /// Takes the right to store to the first `len` bytes away, and gives it back; how many nanoseconds the first took.
    pub fn forbid_stores(&mut self, len: usize) -> Result<f64, CallFailed> {
        assert!(len <= self.len, "a range of the mapping");
        let at = self.start.as_ptr().cast();
        let start = std::time::Instant::now();
        // SAFETY: the range is in the mapping, which is borrowed exclusively, and can be written to again on return.
        let forbidden = unsafe { mprotect(at, len, MprotectFlags::READ) };
        let nanos = start.elapsed().as_nanos() as f64;
        // SAFETY: as above.
        let allowed = unsafe { mprotect(at, len, MprotectFlags::READ | MprotectFlags::WRITE) };
        forbidden.and(allowed).map(|()| nanos).map_err(failed("mprotect"))
    }

    /// Asks for (or against) transparent huge pages.
    pub fn transparent_huge(&self, wanted: bool) -> Result<(), CallFailed> {
        let (call, advice) = match wanted {
            true => ("madvise(MADV_HUGEPAGE)", Advice::LinuxHugepage),
            false => ("madvise(MADV_NOHUGEPAGE)", Advice::LinuxNoHugepage),
        };
        self.advise(0..self.len, advice).map_err(failed(call))
    }

    /// Gives memory to every page of the range, which is a multiple of `page`. A page that cannot be had is an error,
    /// never a signal. Before Linux 5.14 what the pages held is lost.
    pub fn populate(&mut self, range: Range<usize>, page: usize) -> Result<(), CallFailed> {
        loop {
            match self.advise(range.clone(), Advice::LinuxPopulateWrite) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Before Linux 5.14.
                Err(Errno::INVAL) => return self.touch(range, page),
                Err(errno) => return Err(CallFailed { call: "madvise(MADV_POPULATE_WRITE)", errno }),
            }
        }
    }

    /// Populates memory that holds nothing yet by having the kernel write a zero to each page: where a store of our own
    /// would be answered by SIGBUS, the system call returns an error.
    fn touch(&mut self, range: Range<usize>, page: usize) -> Result<(), CallFailed> {
        let error = |e: std::io::Error| CallFailed {
            call: "read(/dev/zero)",
            errno: Errno::from_io_error(&e).unwrap_or(Errno::IO),
        };
        let mut zero = File::open("/dev/zero").map_err(error)?;
        let bytes = self.bytes_mut();
        for at in range.step_by(page) {
            zero.read_exact(&mut bytes[at..at + 1]).map_err(error)?;
        }
        Ok(())
    }

    /// Has the kernel put 2 MiB pages in place of small ones, now (Linux 6.1). Contents are kept.
    pub fn collapse(&self, range: Range<usize>) -> Result<(), CallFailed> {
        assert!(range.start <= range.end && range.end <= self.len, "a range of the mapping");
        // SAFETY: the range is inside the mapping, and collapsing keeps its contents.
        let result =
            unsafe { libc::madvise(self.start.as_ptr().wrapping_add(range.start).cast(), range.len(), MADV_COLLAPSE) };
        if result == 0 { Ok(()) } else { Err(last_error("madvise(MADV_COLLAPSE)")) }
    }

    /// Binds the mapping to one NUMA node, before it is populated.
    pub fn bind(&self, node: u32) -> Result<(), CallFailed> {
        const MPOL_BIND: libc::c_long = 2;
        let bits = libc::c_ulong::BITS;
        let mut mask: Vec<libc::c_ulong> = vec![0; node as usize / bits as usize + 1];
        mask[(node / bits) as usize] = 1 << (node % bits);
        // The kernel looks at one bit less than it is told.
        let max_node = mask.len() * bits as usize + 1;
        // SAFETY: the range is the mapping, the mask has the bits that `max_node` says, and the kernel only reads it.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.len,
                MPOL_BIND,
                mask.as_ptr(),
                max_node,
                0 as libc::c_long,
            )
        };
        if result == 0 { Ok(()) } else { Err(last_error("mbind")) }
    }
}

impl Drop for Mmap {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and whoever holds pointers into it promised not to use them after this.
        let result = unsafe { munmap(self.outer.as_ptr().cast(), self.outer_len) };
        debug_assert!(result.is_ok(), "munmap of our own mapping: {result:?}");
    }
}

fn last_error(call: &'static str) -> CallFailed {
    let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
    CallFailed { call, errno }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    #[test]
    fn mappings_are_aligned_zero_and_writable() {
        for align in [PAGE, 1 << 21, 1 << 30] {
            let mut m = Mmap::new(1 << 21, align, PAGE, Kind::Anonymous).unwrap();
            assert_eq!(m.start().as_ptr() as usize % align, 0);
            m.populate(0..1 << 21, PAGE).unwrap();
            let bytes = m.bytes_mut();
            assert!(bytes.iter().all(|&b| b == 0));
            bytes[0] = 1;
            bytes[(1 << 21) - 1] = 2;
        }
    }

    #[test]
    fn touching_populates_too() {
        let mut m = Mmap::new(16 * PAGE, PAGE, PAGE, Kind::Anonymous).unwrap();
        m.touch(0..16 * PAGE, PAGE).unwrap();
        m.bytes_mut().fill(7);
        assert!(m.bytes_mut().iter().all(|byte| *byte == 7));
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let err = Mmap::new(1 << 60, 1 << 21, PAGE, Kind::Anonymous).unwrap_err();
        assert_eq!(err, CallFailed { call: "mmap", errno: Errno::NOMEM });
        assert!(Mmap::new(usize::MAX - 4095, 1 << 21, PAGE, Kind::Anonymous).is_err());
    }

    #[test]
    fn a_node_that_does_not_exist_cannot_be_bound_to() {
        let m = Mmap::new(PAGE, PAGE, PAGE, Kind::Anonymous).unwrap();
        // A kernel without NUMA says ENOSYS, a sandbox EPERM; none says yes.
        assert_eq!(m.bind(1000).unwrap_err().call, "mbind");
    }
}
