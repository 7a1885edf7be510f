//! Lists of extents threaded through storage that the extents themselves pay for.
//!
//! There is no heap below a memory manager, so a list of extents keeps its links in the extents' own descriptors (or,
//! for free memory, in the frames). [`ExtentChain`] is the list's head; [`ExtentLinks`] is whoever owns the storage.
//! Appending and joining are O(1), so a thousand deferred frees merge into one without being walked.

use crate::addr::Pfn;
use crate::extent::Extent;

/// Storage for one link per extent, addressed by the extent's first frame.
///
/// An implementation may keep the link in the frame's descriptor or in the frame itself; a chain uses only the links of
/// extents that are on it, and an extent is on at most one chain.
pub trait ExtentLinks {
    /// Records that the extent at `frame` is `pages` long and followed by the one at `next`.
    ///
    /// # Safety
    ///
    /// The caller owns the extent, which begins at `frame`.
    unsafe fn set(&self, frame: Pfn, pages: u64, next: Option<Pfn>);

    /// What [`set`](ExtentLinks::set) recorded last for `frame`.
    fn get(&self, frame: Pfn) -> (u64, Option<Pfn>);
}

/// The head of a list of extents: first, last, and how much there is.
#[derive(Debug, Default)]
#[must_use = "dropping a chain forgets its extents"]
pub struct ExtentChain {
    ends: Option<(Pfn, Pfn)>,
    extents: u64,
    pages: u64,
}

impl ExtentChain {
    /// An empty chain.
    pub const fn new() -> Self {
        ExtentChain { ends: None, extents: 0, pages: 0 }
    }

    /// How many extents are on it.
    pub const fn len(&self) -> u64 {
        self.extents
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_none()
    }

    /// Base pages in all of them.
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Appends an extent; an empty one is dropped. O(1), one link written or two.
    ///
    /// # Safety
    ///
    /// The caller owns the extent, and the chain does from here on. It is linked through the same `links` as all others on
    /// the chain.
    pub unsafe fn push(&mut self, links: &impl ExtentLinks, extent: Extent) {
        if extent.is_empty() {
            return;
        }
        let frame = extent.base();
        // SAFETY: the caller's promise, here and below.
        unsafe {
            links.set(frame, extent.pages(), None);
            self.append(links, ExtentChain { ends: Some((frame, frame)), extents: 1, pages: extent.pages() });
        }
    }

    /// Appends all of `other`. O(1), one link written.
    ///
    /// # Safety
    ///
    /// The extents on both chains are linked through `links`.
    pub unsafe fn append(&mut self, links: &impl ExtentLinks, other: ExtentChain) {
        self.ends = match (self.ends, other.ends) {
            (Some((first, last)), Some((next, end))) => {
                let (pages, _) = links.get(last);
                // SAFETY: the chain owns its extents, and this is where they are linked.
                unsafe { links.set(last, pages, Some(next)) };
                Some((first, end))
            }
            (mine, theirs) => mine.or(theirs),
        };
        self.extents += other.extents;
        self.pages += other.pages;
    }

    /// Takes the first extent. O(1). `None` when the chain is empty, or if the links recorded no valid extent.
    pub fn pop(&mut self, links: &impl ExtentLinks) -> Option<Extent> {
        let (first, last) = self.ends?;
        let (pages, next) = links.get(first);
        // What the storage says is believed as far as the counts go.
        self.extents = self.extents.saturating_sub(1);
        self.ends = next.filter(|_| self.extents != 0).map(|next| (next, last));
        self.pages = self.pages.saturating_sub(pages);
        Extent::new(first, pages).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::HashMap;

    /// Counts link writes, so that "O(1)" is asserted and not claimed.
    #[derive(Default)]
    struct Links {
        map: RefCell<HashMap<u64, (u64, Option<Pfn>)>>,
        writes: RefCell<u64>,
    }

    impl ExtentLinks for Links {
        unsafe fn set(&self, frame: Pfn, pages: u64, next: Option<Pfn>) {
            *self.writes.borrow_mut() += 1;
            self.map.borrow_mut().insert(frame.get(), (pages, next));
        }

        fn get(&self, frame: Pfn) -> (u64, Option<Pfn>) {
            self.map.borrow()[&frame.get()]
        }
    }

    fn extent(base: u64, pages: u64) -> Extent {
        Extent::new(Pfn::new(base), pages).expect("in range")
    }

    /// Storage that says what it likes.
    struct Endless;

    impl ExtentLinks for Endless {
        unsafe fn set(&self, _frame: Pfn, _pages: u64, _next: Option<Pfn>) {}

        fn get(&self, frame: Pfn) -> (u64, Option<Pfn>) {
            (1, Some(frame))
        }
    }

    #[test]
    fn a_chain_ends_whatever_its_storage_says() {
        let mut chain = ExtentChain::new();
        // SAFETY: nobody else has the extents.
        unsafe {
            chain.push(&Endless, extent(1, 1));
            chain.push(&Endless, extent(2, 1));
        }
        let popped = std::iter::from_fn(|| chain.pop(&Endless)).take(3).count();
        assert_eq!((popped, chain.len(), chain.pages()), (2, 0, 0));
    }

    #[test]
    fn a_thousand_extents_join_with_one_write() {
        let links = Links::default();
        let (mut a, mut b) = (ExtentChain::new(), ExtentChain::new());
        for i in 0..1000 {
            // SAFETY: nobody else has the extents, here and below, and all are linked through `links`.
            unsafe {
                a.push(&links, extent(i * 10, 3));
                b.push(&links, extent(100_000 + i * 10, 4));
            }
        }
        // SAFETY: as above.
        unsafe { b.push(&links, extent(5, 0)) };
        let before = *links.writes.borrow();
        // SAFETY: as above.
        unsafe { a.append(&links, b) };
        assert_eq!(*links.writes.borrow() - before, 1);
        assert_eq!((a.is_empty(), a.len(), a.pages()), (false, 2000, 7000));
        let bases: Vec<u64> = std::iter::from_fn(|| a.pop(&links)).map(|e| e.base().get()).collect();
        let expected: Vec<u64> = (0..1000).map(|i| i * 10).chain((0..1000).map(|i| 100_000 + i * 10)).collect();
        assert_eq!(bases, expected);
        assert_eq!((a.is_empty(), a.len(), a.pages()), (true, 0, 0));
    }
}
