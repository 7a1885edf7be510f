//! Reaching bytes of frames through the platform's map: all `unsafe` access to stored data is here.

use crate::compressor::PageBytes;
use core::ptr::copy_nonoverlapping;
use hugemm_base::{Extent, PAGE_BYTES, PhysMap, Window};

/// Opens the page at the start of `extent` for the duration of `f`. `None` if it cannot be reached.
pub(crate) fn with_page<R>(map: &impl PhysMap, extent: Extent, f: impl FnOnce(*mut PageBytes) -> R) -> Option<R> {
    let window = map.open(extent, None)?;
    let result = f(window.ptr.cast());
    close(map, window);
    Some(result)
}

fn close(map: &impl PhysMap, window: Window) {
    // SAFETY: opened by the caller, closed here once, and the caller does not use it any more.
    unsafe { map.close(window) };
}

/// A run of bytes in an extent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) extent: Extent,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl Span {
    /// `len` bytes from `from` on within this span.
    pub(crate) fn part(self, from: usize, len: usize) -> Span {
        Span { offset: self.offset + from, len: len.min(self.len.saturating_sub(from)), ..self }
    }

    /// Calls `f` on all bytes at once if one window reaches them; `None` if not.
    ///
    /// `f` gets a pointer that is valid for reads and writes of `len` bytes while it runs, as far as the caller may
    /// access those bytes at all.
    pub(crate) fn with<R>(self, map: &impl PhysMap, f: impl FnOnce(*mut u8) -> R) -> Option<R> {
        let (first, offset) = self.first_frame();
        let pages = (offset + self.len).div_ceil(PAGE_BYTES as usize) as u64;
        let window = map.open(self.extent.slice(first, first + pages), None)?;
        let result = (window.pages >= pages).then(|| f(window.ptr.wrapping_add(offset)));
        close(map, window);
        result
    }

    fn first_frame(self) -> (u64, usize) {
        ((self.offset as u64) / PAGE_BYTES, self.offset % PAGE_BYTES as usize)
    }

    /// Calls `f` with each part that one window of one page reaches: pointer, position in the span, length. False if a
    /// part cannot be reached; earlier parts have been visited then.
    fn each(self, map: &impl PhysMap, mut f: impl FnMut(*mut u8, usize, usize)) -> bool {
        let mut done = 0;
        while done < self.len {
            let (frame, offset) = self.part(done, self.len).first_frame();
            let len = (self.len - done).min(PAGE_BYTES as usize - offset);
            let Some(window) = map.open(self.extent.slice(frame, frame + 1), None) else { return false };
            f(window.ptr.wrapping_add(offset), done, len);
            close(map, window);
            done += len;
        }
        true
    }

    /// Writes the span. False if not all of it can be reached.
    ///
    /// # Safety
    ///
    /// The bytes of the span are in the extent and the caller's alone; `from` is as long as the span and elsewhere.
    pub(crate) unsafe fn write(self, map: &impl PhysMap, from: &[u8]) -> bool {
        debug_assert_eq!(from.len(), self.len);
        // SAFETY: `each` visits parts inside the span, whose bytes are the caller's, and `from` has the same length.
        self.each(map, |at, done, len| unsafe { copy_nonoverlapping(from.as_ptr().add(done), at, len) })
    }

    /// Reads the span. False if not all of it can be reached.
    ///
    /// # Safety
    ///
    /// The bytes of the span are in the extent, initialised, and nobody writes to them; `into` is as long as the span
    /// and elsewhere.
    pub(crate) unsafe fn read(self, map: &impl PhysMap, into: &mut [u8]) -> bool {
        debug_assert_eq!(into.len(), self.len);
        // SAFETY: as in `write`, the other way round.
        self.each(map, |at, done, len| unsafe { copy_nonoverlapping(at, into.as_mut_ptr().add(done), len) })
    }
}
