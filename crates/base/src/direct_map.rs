//! Frames that are all mapped at one distance.

use crate::PAGE_SHIFT;
use crate::extent::Extent;
use crate::platform::Window;

/// A direct map: frames that are mapped one after the other from an address on, for good. What a platform's
/// [`PhysMap::open`](crate::PhysMap::open) answers from. A frame at address 0 is not reached: no pointer leads there.
#[derive(Clone, Copy, Debug)]
pub struct DirectMap {
    frames: Extent,
    at: usize,
}

impl DirectMap {
    /// `frames`, the first of which is mapped at address `at`, a multiple of 4096: one to one, that is its own address. Touches nothing.
    pub const fn new(frames: Extent, at: usize) -> Self {
        DirectMap { frames, at }
    }

    /// The window on the first frames of `extent`: as many as adjoin and are mapped; `None` if the first is not. O(1).
    #[inline]
    pub fn open(&self, extent: Extent) -> Option<Window> {
        let seen = self.frames.intersection(extent);
        if seen.is_empty() || seen.base() != extent.base() {
            return None;
        }
        let offset = (seen.base().get() - self.frames.base().get()) << PAGE_SHIFT;
        let ptr: *mut u8 = core::ptr::with_exposed_provenance_mut(self.at.wrapping_add(offset as usize));
        (!ptr.is_null()).then_some(Window { ptr, pages: seen.pages() })
    }
}
