//! Doubly linked lists of blocks through words of their heads' descriptors.
//!
//! A list is its two ends and a length; it is under whatever lock its owner keeps. A block is on at most one list. Links
//! are frame numbers plus 1, so that 0 is the end.

use crate::words::{NEXT, PREV};
use hugemm_base::Pfn;
use hugemm_frames::{Env, Frames};

/// Words of blocks' heads' descriptors.
pub(crate) trait Words {
    fn word(&self, pfn: Pfn, word: usize) -> u64;
    fn set_word(&self, pfn: Pfn, word: usize, value: u64);
}

/// A frame outside every arena reads as zeroes and keeps nothing; only blocks that were allocated get here.
impl<E: Env> Words for Frames<'_, E> {
    #[inline]
    fn word(&self, pfn: Pfn, word: usize) -> u64 {
        self.descriptor(pfn).map_or(0, |desc| desc.load(word))
    }

    #[inline]
    fn set_word(&self, pfn: Pfn, word: usize, value: u64) {
        // SAFETY: what is on a list is allocated: the list's owner's, or a page of which the pager was told, which promised
        // that it is counted and that its references go through the pager, as whoever gets one by number does: it is taken
        // off with the last. Its users leave these words to the list, whose lock is held.
        if let Some(desc) = unsafe { self.descriptor_at(pfn) } {
            desc.store(word, value);
        }
    }
}

#[inline]
fn link(pfn: Option<Pfn>) -> u64 {
    pfn.map_or(0, |pfn| pfn.get() + 1)
}

#[inline]
fn follow(link: u64) -> Option<Pfn> {
    link.checked_sub(1).map(Pfn::new)
}

/// The ends of a list, as links. Half a cache line.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub(crate) struct List {
    first: u64,
    last: u64,
    len: u64,
    /// Base pages of all blocks, for whoever counts them.
    pub(crate) pages: u64,
}

impl List {
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn first(&self) -> Option<Pfn> {
        follow(self.first)
    }

    pub(crate) fn last(&self) -> Option<Pfn> {
        follow(self.last)
    }

    /// O(1), two or three words written.
    pub(crate) fn push_front(&mut self, words: &impl Words, pfn: Pfn) {
        words.set_word(pfn, PREV, 0);
        words.set_word(pfn, NEXT, self.first);
        let own = link(Some(pfn));
        match follow(self.first) {
            Some(first) => words.set_word(first, PREV, own),
            None => self.last = own,
        }
        self.first = own;
        self.len += 1;
    }

    /// The same at the other end.
    pub(crate) fn push_back(&mut self, words: &impl Words, pfn: Pfn) {
        words.set_word(pfn, NEXT, 0);
        words.set_word(pfn, PREV, self.last);
        match follow(self.last) {
            Some(last) => words.set_word(last, NEXT, link(Some(pfn))),
            None => self.first = link(Some(pfn)),
        }
        self.last = link(Some(pfn));
        self.len += 1;
    }

    /// Takes a block off that is on this list. O(1).
    pub(crate) fn remove(&mut self, words: &impl Words, pfn: Pfn) {
        let (prev, next) = (follow(words.word(pfn, PREV)), follow(words.word(pfn, NEXT)));
        match prev {
            Some(prev) => words.set_word(prev, NEXT, link(next)),
            None => self.first = link(next),
        }
        match next {
            Some(next) => words.set_word(next, PREV, link(prev)),
            None => self.last = link(prev),
        }
        self.len = self.len.saturating_sub(1);
    }
}

/// Words in a map, for tests. What was never written reads as `FRESH`.
#[cfg(test)]
#[derive(Default)]
pub(crate) struct Map<const FRESH: u64 = 0>(std::cell::RefCell<std::collections::HashMap<(u64, usize), u64>>);

#[cfg(test)]
impl<const FRESH: u64> Words for Map<FRESH> {
    fn word(&self, pfn: Pfn, word: usize) -> u64 {
        self.0.borrow().get(&(pfn.get(), word)).copied().unwrap_or(FRESH)
    }

    fn set_word(&self, pfn: Pfn, word: usize, value: u64) {
        self.0.borrow_mut().insert((pfn.get(), word), value);
    }
}
