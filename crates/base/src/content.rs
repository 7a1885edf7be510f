//! What is known of an extent's bytes: `Dirty → Clearing → (unfenced) → Zeroed`.
//!
//! Each type owns its frames and each step consumes the one before, so an extent is never cleared twice and never
//! believed to be zero before it is. Progress lives in the extent: a [`Clearing`] that was interrupted is simply gone on
//! with (as in seL4's untyped reset), and one that is given up becomes [`Dirty`] again.
//!
//! The state between the last store and the fence has no type of its own: it is `Pending<Clearing, StoreFence>`.
//!
//! ```compile_fail,E0599
//! # use hugemm_base::{platform::Cpu, Clearing, Unfenced, Zeroed};
//! fn rule<P: Cpu>(unit: Unfenced<'_, Clearing, P>) -> Result<Zeroed, Clearing> {
//!     unit.finish() // error: no such method before `fence()`
//! }
//! ```
//!
//! ```
//! # use hugemm_base::{platform::Cpu, Clearing, Unfenced, Zeroed};
//! fn rule<P: Cpu>(unit: Unfenced<'_, Clearing, P>) -> Result<Zeroed, Clearing> {
//!     unit.fence().finish()
//! }
//! ```
//!
//! Steps consume: nothing can be cleared while it is also handed on as dirty.
//!
//! ```compile_fail,E0382
//! # use hugemm_base::{Clearing, Dirty};
//! fn rule(dirty: Dirty) -> (Clearing, Dirty) {
//!     (dirty.begin(), dirty) // error: use of moved value
//! }
//! ```

use crate::extent::Extent;

/// Frames that are exclusively the holder's and may contain anything.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "whoever drops this forgets that it owns frames"]
pub struct Dirty(Extent);

impl Dirty {
    /// Takes ownership of frames.
    ///
    /// # Safety
    ///
    /// Nobody else reads, writes or owns the frames until the last of the values made from this one is gone or has
    /// been turned back with `into_extent`.
    pub const unsafe fn assume_owned(extent: Extent) -> Self {
        Dirty(extent)
    }

    /// Which frames.
    pub const fn extent(&self) -> Extent {
        self.0
    }

    /// Gives up ownership and the record of it.
    pub fn into_extent(self) -> Extent {
        self.0
    }

    /// The first `pages` frames and the rest.
    pub fn split_at(self, pages: u64) -> (Dirty, Dirty) {
        let (left, right) = self.0.split_at(pages);
        (Dirty(left), Dirty(right))
    }

    /// The two as one if `next` begins where this ends; otherwise both back.
    ///
    /// # Errors
    ///
    /// Both as they came, if they do not adjoin in this order.
    pub fn join(self, next: Dirty) -> Result<Dirty, (Dirty, Dirty)> {
        match self.0.join(next.0) {
            Some(extent) => Ok(Dirty(extent)),
            None => Err((self, next)),
        }
    }

    /// Starts clearing in ascending order.
    pub fn begin(self) -> Clearing {
        let (near, far) = self.0.split_at(0);
        Clearing { extent: self.0, far: [far, near], near }
    }

    /// Starts clearing in the order `far[0]`, `far[1]`, `near`; `near` is the part that will be touched first and is
    /// therefore written last, and through the cache. The three must make up the extent without overlap; if not, the
    /// frames are handed back untouched.
    ///
    /// # Errors
    ///
    /// The frames, untouched, if the three parts are not the extent without overlap.
    pub fn begin_around(self, far: [Extent; 2], near: Extent) -> Result<Clearing, Dirty> {
        // Sorted by base, three disjoint parts that fill the extent join up end to end; empty ones are skipped.
        let mut parts = [far[0], far[1], near];
        parts.sort_unstable_by_key(|part| part.base());
        let mut joined = self.0.split_at(0).0;
        for part in parts.into_iter().filter(|part| !part.is_empty()) {
            match joined.join(part) {
                Some(longer) => joined = longer,
                None => return Err(self),
            }
        }
        if joined != self.0 {
            return Err(self);
        }
        Ok(Clearing { extent: self.0, far, near })
    }
}

/// Memory that is exclusively the holder's and that no manager of frames knows: what one is made of. Frames that come out of
/// a manager are [`Dirty`] or zeroed, and go back to it; a second manager of theirs would take them for its own.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "whoever drops this forgets that it owns memory"]
pub struct Ram(Dirty);

impl Ram {
    /// Takes ownership of memory.
    ///
    /// # Safety
    ///
    /// As [`Dirty::assume_owned`]; and no manager whose handles can meet with those of this one's manager has an arena over
    /// any of the frames' numbers.
    pub const unsafe fn assume_unmanaged(extent: Extent) -> Self {
        // SAFETY: the caller's promise.
        Ram(unsafe { Dirty::assume_owned(extent) })
    }

    /// Which frames.
    pub const fn extent(&self) -> Extent {
        self.0.extent()
    }

    /// The first `pages` frames, at most all, and the rest.
    pub fn split_at(self, pages: u64) -> (Ram, Ram) {
        let (left, right) = self.0.split_at(pages);
        (Ram(left), Ram(right))
    }

    /// The frames, for a use without a manager.
    pub fn into_dirty(self) -> Dirty {
        self.0
    }
}

/// Where in the clearing order a part stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Anywhere in the extent.
    Far,
    /// The frames around the one that will be touched first.
    Near,
}

/// Frames that are being cleared: what has been done is zero, what remains is known.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "whoever drops this forgets that it owns frames"]
pub struct Clearing {
    extent: Extent,
    /// What remains, in clearing order.
    far: [Extent; 2],
    near: Extent,
}

impl Clearing {
    /// Which frames, done and not.
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    /// How many frames remain.
    pub const fn remaining(&self) -> u64 {
        self.far[0].pages() + self.far[1].pages() + self.near.pages()
    }

    /// The next contiguous part to clear, or `None` when nothing remains.
    pub fn next_part(&self) -> Option<(Extent, Sweep)> {
        let far = self.far.into_iter().map(|part| (part, Sweep::Far));
        far.chain([(self.near, Sweep::Near)]).find(|(part, _)| !part.is_empty())
    }

    /// Records that the first `pages` frames of [`next_part`](Clearing::next_part) are done.
    ///
    /// # Safety
    ///
    /// Zeroes have been stored to all of their bytes, and what those stores owe is discharged before the value that
    /// results from this is used: it is put behind a [`StoreFence`](crate::StoreFence) or fenced already.
    pub unsafe fn advance(&mut self, pages: u64) {
        let part = match &mut self.far {
            [first, _] if !first.is_empty() => first,
            [_, second] if !second.is_empty() => second,
            _ => &mut self.near,
        };
        (_, *part) = part.split_at(pages);
    }

    /// The cleared extent, or the value itself if frames remain.
    ///
    /// # Errors
    ///
    /// The value itself, while frames remain: clear them and finish again.
    pub fn finish(self) -> Result<Zeroed, Clearing> {
        if self.remaining() == 0 { Ok(Zeroed(self.extent)) } else { Err(self) }
    }

    /// Gives up: the frames count as dirty again.
    pub fn abandon(self) -> Dirty {
        Dirty(self.extent)
    }
}

/// Frames that are exclusively the holder's, all of whose bytes are zero and visible as such to whoever sees a later
/// store of this CPU.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "whoever drops this forgets that it owns frames"]
pub struct Zeroed(Extent);

impl Zeroed {
    /// Takes ownership of frames that are known to be zero, for instance because a host promises it.
    ///
    /// # Safety
    ///
    /// As [`Dirty::assume_owned`], and every byte is zero and visible as such.
    pub const unsafe fn assume_owned(extent: Extent) -> Self {
        Zeroed(extent)
    }

    /// Which frames.
    pub const fn extent(&self) -> Extent {
        self.0
    }

    /// Gives up ownership and the record of it.
    pub fn into_extent(self) -> Extent {
        self.0
    }

    /// Forgets that the frames are zero, as whoever lets somebody write to them must.
    pub fn into_dirty(self) -> Dirty {
        Dirty(self.0)
    }

    /// The first `pages` frames and the rest.
    pub fn split_at(self, pages: u64) -> (Zeroed, Zeroed) {
        let (left, right) = self.0.split_at(pages);
        (Zeroed(left), Zeroed(right))
    }

    /// The two as one if `next` begins where this ends; otherwise both back.
    ///
    /// # Errors
    ///
    /// Both as they came, if they do not adjoin in this order.
    pub fn join(self, next: Zeroed) -> Result<Zeroed, (Zeroed, Zeroed)> {
        match self.0.join(next.0) {
            Some(extent) => Ok(Zeroed(extent)),
            None => Err((self, next)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Pfn;

    fn extent(base: u64, pages: u64) -> Extent {
        Extent::new(Pfn::new(base), pages).expect("in range")
    }

    fn dirty(base: u64, pages: u64) -> Dirty {
        // SAFETY: the tests touch no memory; the numbers stand for frames nobody uses.
        unsafe { Dirty::assume_owned(extent(base, pages)) }
    }

    #[test]
    fn progress_survives_interruption() {
        let mut clearing = dirty(0, 10).begin();
        assert_eq!(clearing.next_part(), Some((extent(0, 10), Sweep::Far)));
        // SAFETY: no memory is behind the frames.
        unsafe { clearing.advance(4) };
        let mut clearing = clearing.finish().expect_err("six frames remain");
        assert_eq!(clearing.next_part(), Some((extent(4, 6), Sweep::Far)));
        // SAFETY: as above.
        unsafe { clearing.advance(6) };
        assert_eq!(clearing.finish().expect("all done").into_extent(), extent(0, 10));
    }

    #[test]
    fn parts_come_in_the_order_given() {
        let mut clearing =
            dirty(100, 10).begin_around([extent(107, 3), extent(100, 2)], extent(102, 5)).expect("a partition");
        let mut seen = Vec::new();
        while let Some((part, sweep)) = clearing.next_part() {
            seen.push((part, sweep));
            // SAFETY: no memory is behind the frames.
            unsafe { clearing.advance(2) };
        }
        assert_eq!(
            seen,
            [
                (extent(107, 3), Sweep::Far),
                (extent(109, 1), Sweep::Far),
                (extent(100, 2), Sweep::Far),
                (extent(102, 5), Sweep::Near),
                (extent(104, 3), Sweep::Near),
                (extent(106, 1), Sweep::Near),
            ]
        );
        assert!(clearing.finish().is_ok());
    }

    #[test]
    fn what_remains_is_counted_in_all_parts() {
        let mut clearing =
            dirty(100, 10).begin_around([extent(107, 3), extent(100, 2)], extent(102, 5)).expect("a partition");
        let mut remaining = Vec::new();
        while let Some((part, _)) = clearing.next_part() {
            remaining.push(clearing.remaining());
            // SAFETY: no memory is behind the frames.
            unsafe { clearing.advance(part.pages() - 1) };
            remaining.push(clearing.remaining());
            // SAFETY: as above.
            unsafe { clearing.advance(1) };
        }
        assert_eq!(remaining, [10, 8, 7, 6, 5, 1]);
        assert_eq!((clearing.remaining(), clearing.extent()), (0, extent(100, 10)));
        assert_eq!(clearing.abandon(), dirty(100, 10));
    }

    #[test]
    fn ownership_is_divided_and_put_together() {
        let (left, right) = dirty(4, 6).split_at(2);
        assert_eq!((left.extent(), right.extent()), (extent(4, 2), extent(6, 4)));
        let (right, left) = right.join(left).expect_err("the wrong way round");
        assert_eq!(left.join(right), Ok(dirty(4, 6)));
        // SAFETY: no memory is behind the frames.
        let zeroed = unsafe { Zeroed::assume_owned(extent(4, 6)) };
        let (left, right) = zeroed.split_at(5);
        assert_eq!((left.extent(), right.extent()), (extent(4, 5), extent(9, 1)));
        let (right, left) = right.join(left).expect_err("the wrong way round");
        let whole = left.join(right).expect("they adjoin");
        assert_eq!((whole.extent(), whole.into_dirty()), (extent(4, 6), dirty(4, 6)));
    }

    #[test]
    fn parts_that_are_no_partition_are_refused() {
        for (far, near) in [
            ([extent(0, 4), extent(4, 4)], extent(7, 3)),
            ([extent(0, 4), extent(5, 4)], extent(9, 1)),
            ([extent(0, 4), extent(4, 4)], extent(8, 3)),
            ([extent(1, 4), extent(5, 4)], extent(9, 1)),
            ([extent(0, 0), extent(0, 0)], extent(0, 0)),
        ] {
            let handed_back = dirty(0, 10).begin_around(far, near).expect_err("no partition");
            assert_eq!(handed_back.into_extent(), extent(0, 10));
        }
        assert!(dirty(0, 0).begin_around([extent(5, 0), extent(0, 0)], extent(0, 0)).is_ok());
    }
}
