//! Bit-exact checks of a primitive, for the tests: every byte it owns is zeroed, no other is touched.

use crate::support::memory::map;
use hugemm_clear::primitive::Primitive;
use hugemm_clear::raw;

pub(crate) const PAGE: usize = 4096;

/// The canary at offset `i`: never zero, and different from its neighbours and from the same place in other pages.
fn canary(i: usize) -> u8 {
    ((i ^ (i >> 8) ^ (i >> 16)).wrapping_mul(167) as u8) | 1
}

/// Runs `p` as its contract asks: fenced before anybody looks.
///
/// # Safety
/// As [`raw::zero`], without the fence.
pub(crate) unsafe fn clear(p: Primitive, ptr: *mut u8, len: usize) {
    // SAFETY: the caller's promises, and the fence follows.
    unsafe { raw::zero(p, ptr, len) };
    raw::store_fence();
}

/// Memory between two pages that fault on any access.
pub(crate) struct Guarded {
    map: *mut u8,
    pages: usize,
    /// What the memory holds where nothing was cleared.
    canaries: Vec<u8>,
}

impl Guarded {
    /// `pages` pages of canaries.
    pub(crate) fn new(pages: usize) -> Self {
        let bytes = (pages + 2) * PAGE;
        let map = map(core::ptr::null_mut(), bytes, -1, 0);
        // SAFETY: the pages between the guards belong to the mapping just made.
        let rc = unsafe { libc::mprotect(map.add(PAGE).cast(), pages * PAGE, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(rc, 0);
        let canaries: Vec<u8> = (0..pages * PAGE).map(canary).collect();
        let mut memory = Self { map, pages, canaries };
        memory.restore(0, pages * PAGE);
        memory
    }

    /// The first byte after the left guard.
    pub(crate) fn base(&self) -> *mut u8 {
        self.map.wrapping_add(PAGE)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the pages between the guards are mapped and initialised, and nobody writes while the slice lives.
        unsafe { core::slice::from_raw_parts(self.base(), self.pages * PAGE) }
    }

    fn restore(&mut self, at: usize, len: usize) {
        // SAFETY: `at..at + len` lies between the guards (the slice index checks it), and `self` owns it.
        unsafe { self.base().add(at).copy_from_nonoverlapping(self.canaries[at..at + len].as_ptr(), len) }
    }

    /// Clears `at..at + len`, checks it and `margin` canaries on each side, and puts the canaries back.
    fn check(&mut self, p: Primitive, at: usize, len: usize, margin: usize) {
        assert!(at + len <= self.pages * PAGE);
        // SAFETY: the range lies between the guards and `self` owns it; callers pass only what the granule allows and
        // primitives that run here.
        unsafe { clear(p, self.base().add(at), len) };
        let (now, before) = (self.bytes(), &self.canaries);
        if let Some(i) = now[at..at + len].iter().position(|&b| b != 0) {
            panic!("{p}: byte {i} of {len} at offset {at} was not cleared");
        }
        let left = at.saturating_sub(margin)..at;
        let right = at + len..(at + len + margin).min(now.len());
        assert!(now[left.clone()] == before[left], "{p}: wrote before {at}, length {len}");
        assert!(now[right.clone()] == before[right], "{p}: wrote past {at}, length {len}");
        self.restore(at, len);
    }

    /// No canary anywhere has changed.
    fn check_intact(&self, p: Primitive) {
        assert!(self.bytes() == self.canaries, "{p}: a byte far outside its run was written");
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no reference into it is left.
        unsafe { libc::munmap(self.map.cast(), (self.pages + 2) * PAGE) };
    }
}

/// Every length up to a page, at every alignment: at all offsets in a page for primitives that work on lines, at all
/// offsets next to a page's ends for those with a smaller granule. Returns how many bytes were cleared.
pub(crate) fn every_length_and_alignment(p: Primitive) -> usize {
    let granule = p.granule();
    let mut memory = Guarded::new(4);
    let mut cleared = 0;
    for offset in (0..PAGE).step_by(granule) {
        if granule < 64 && (128..PAGE - 128).contains(&offset) {
            continue;
        }
        for len in (0..=PAGE).step_by(granule) {
            memory.check(p, PAGE + offset, len, 256);
            cleared += len;
        }
        memory.check_intact(p);
    }
    cleared
}

/// Page multiples up to `all` pages, once with a guard right before and once with a guard right behind. Returns how
/// many bytes were cleared.
pub(crate) fn whole_pages(p: Primitive, all: usize) -> usize {
    let mut memory = Guarded::new(all);
    let mut cleared = 0;
    let sizes = (1..=33).chain([63, 64, 65, 127, 255, 511, 512, 513, 1000, 1023, 1024]);
    for pages in sizes.filter(|&n| n <= all) {
        let len = pages * PAGE;
        for at in [0, (all - pages) * PAGE] {
            memory.check(p, at, len, all * PAGE);
            cleared += len;
        }
    }
    cleared
}
