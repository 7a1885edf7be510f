//! Memory for tests: page-aligned, full of canaries, and looked at by page index.

use std::alloc::Layout;
use std::ops::Range;

const PAGE: usize = 4096;

/// What every byte holds that nobody has cleared.
const CANARY: u8 = 0xA5;

/// A run of pages.
pub(crate) struct Memory {
    ptr: *mut u8,
    pages: u64,
    kind: Kind,
}

enum Kind {
    Heap,
    /// One block of a file mapped again and again: its length in bytes.
    #[cfg(not(miri))]
    Repeated(usize),
    /// A file of which parts are mapped for the time of a window.
    #[cfg(not(miri))]
    High(libc::c_int),
}

fn layout(pages: u64) -> Layout {
    Layout::from_size_align(pages as usize * PAGE, PAGE).expect("a size that fits")
}

impl Memory {
    /// Ordinary memory.
    pub(crate) fn heap(pages: u64) -> Self {
        assert!(pages > 0);
        // SAFETY: the layout is not empty.
        let ptr = unsafe { std::alloc::alloc(layout(pages)) };
        assert!(!ptr.is_null());
        let memory = Memory { ptr, pages, kind: Kind::Heap };
        memory.dirty(0..pages);
        memory
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// All of it, for [`hugemm_host::cpu::Host`].
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `pages` long, initialised and borrowed mutably through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.pages as usize * PAGE) }
    }

    /// Puts the canaries back.
    pub(crate) fn dirty(&self, pages: Range<u64>) {
        assert!(pages.end <= self.pages);
        let bytes = (pages.end - pages.start) as usize * PAGE;
        // SAFETY: within the mapping; tests do this only while no clear is running.
        unsafe { self.ptr.add(pages.start as usize * PAGE).write_bytes(CANARY, bytes) };
    }

    /// Whether every byte of the pages is zero.
    pub(crate) fn zero(&self, pages: Range<u64>) -> bool {
        self.all(pages, 0)
    }

    /// Whether every byte of the pages is as it was.
    pub(crate) fn untouched(&self, pages: Range<u64>) -> bool {
        self.all(pages, u64::from_ne_bytes([CANARY; 8]))
    }

    fn all(&self, pages: Range<u64>, word: u64) -> bool {
        assert!(pages.end <= self.pages);
        // SAFETY: within the mapping, aligned, initialised; tests look only while nobody writes there.
        unsafe { words_are(self.ptr.add(pages.start as usize * PAGE), (pages.end - pages.start) as usize * PAGE, word) }
    }

    /// Where the pages can be reached until [`close_window`](Memory::close_window).
    pub(crate) fn window(&self, page: u64, pages: u64) -> *mut u8 {
        assert!(page + pages <= self.pages);
        #[cfg(not(miri))]
        if let Kind::High(fd) = self.kind {
            return map(std::ptr::null_mut(), pages as usize * PAGE, fd, page as usize * PAGE);
        }
        self.ptr.wrapping_add(page as usize * PAGE)
    }

    pub(crate) fn close_window(&self, _ptr: *mut u8, _pages: u64) {
        #[cfg(not(miri))]
        if let Kind::High(_) = self.kind {
            // SAFETY: the window was a mapping of its own, and it is closed once.
            assert_eq!(unsafe { libc::munmap(_ptr.cast(), _pages as usize * PAGE) }, 0);
        }
    }
}

/// Whether the bytes are repetitions of `word`.
///
/// # Safety
///
/// They are initialised, aligned to 8, a multiple of 8 long, and nobody writes them meanwhile.
pub(crate) unsafe fn words_are(ptr: *const u8, bytes: usize, word: u64) -> bool {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(ptr.cast::<u64>(), bytes / 8) }.iter().all(|w| *w == word)
}

#[cfg(not(miri))]
impl Memory {
    /// So many pages of addresses that all lead to the same `block` pages.
    pub(crate) fn repeated(pages: u64, block: u64) -> Self {
        let (bytes, block) = (pages as usize * PAGE, block as usize * PAGE);
        assert_eq!(bytes % block, 0);
        let fd = file(block);
        let ptr = map(std::ptr::null_mut(), bytes, -1, 0);
        for at in (0..bytes).step_by(block) {
            map(ptr.wrapping_add(at), block, fd, 0);
        }
        // SAFETY: the mappings keep the file.
        unsafe { libc::close(fd) };
        let memory = Memory { ptr, pages, kind: Kind::Repeated(bytes) };
        memory.dirty(0..(block / PAGE) as u64);
        memory
    }

    /// Memory that a platform reaches through temporary windows only.
    pub(crate) fn high(pages: u64) -> Self {
        let bytes = pages as usize * PAGE;
        let fd = file(bytes);
        let memory = Memory { ptr: map(std::ptr::null_mut(), bytes, fd, 0), pages, kind: Kind::High(fd) };
        memory.dirty(0..pages);
        memory
    }
}

/// A file of so many bytes.
#[cfg(not(miri))]
pub(crate) fn file(bytes: usize) -> libc::c_int {
    // SAFETY: the name is a C string and the descriptor is the caller's own.
    let fd = unsafe { libc::memfd_create(c"frames".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: as above.
    assert_eq!(unsafe { libc::ftruncate(fd, bytes as libc::off_t) }, 0);
    fd
}

/// Maps a file, or reserves addresses without one; over an own mapping at `at`, or anywhere.
#[cfg(not(miri))]
pub(crate) fn map(at: *mut u8, bytes: usize, fd: libc::c_int, offset: usize) -> *mut u8 {
    let (access, kind) = match fd {
        -1 => (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
        _ => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED),
    };
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED };
    // SAFETY: fresh addresses, or some that the caller has reserved and not handed out.
    let ptr = unsafe { libc::mmap(at.cast(), bytes, access, kind | fixed, fd, offset as libc::off_t) };
    assert_ne!(ptr, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    ptr.cast()
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.kind {
            // SAFETY: allocated with this layout, and nobody holds a window any more.
            Kind::Heap => unsafe { std::alloc::dealloc(self.ptr, layout(self.pages)) },
            #[cfg(not(miri))]
            Kind::Repeated(bytes) => {
                // SAFETY: the mapping is this value's own.
                unsafe { libc::munmap(self.ptr.cast(), bytes) };
            }
            #[cfg(not(miri))]
            Kind::High(fd) => {
                // SAFETY: mapping and descriptor are this value's own.
                unsafe {
                    libc::munmap(self.ptr.cast(), self.pages as usize * PAGE);
                    libc::close(fd);
                }
            }
        }
    }
}
