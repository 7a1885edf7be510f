//! The frames to map: runs taken from an iterator, cut as the tables need them.

use hugemm_base::Extent;

/// Runs of frames with a place in them.
pub(crate) struct Source<I> {
    rest: I,
    current: Extent,
}

impl<I: Iterator<Item = Extent>> Source<I> {
    pub(crate) fn new(runs: I) -> Self {
        Source { rest: runs, current: Extent::default() }
    }

    /// What is left of the current run; `None` when all are used up.
    #[inline]
    pub(crate) fn peek(&mut self) -> Option<Extent> {
        while self.current.is_empty() {
            self.current = self.rest.next()?;
        }
        Some(self.current)
    }

    /// Takes up to `pages` frames from the current run.
    #[inline]
    pub(crate) fn take(&mut self, pages: u64) -> Option<Extent> {
        self.peek()?;
        let (taken, left) = self.current.split_at(pages);
        self.current = left;
        Some(taken)
    }

    /// Takes up to `pages` frames, run by run, and shows each part to `put`, which may refuse it; how many it took. The place in
    /// the runs stays in registers meanwhile.
    #[inline]
    pub(crate) fn take_each<E>(&mut self, pages: u64, mut put: impl FnMut(Extent) -> Result<(), E>) -> Result<u64, E> {
        let (mut run, mut taken, mut done) = (self.current, 0, Ok(()));
        while taken < pages && done.is_ok() {
            if run.is_empty() {
                match self.rest.next() {
                    Some(next) => run = next,
                    None => break,
                }
                continue;
            }
            let (part, left) = run.split_at(pages - taken);
            done = put(part);
            taken += part.pages();
            run = left;
        }
        self.current = run;
        done.map(|()| taken)
    }

    /// How many leaves of `pages` pages (a power of two) the current run can fill from here on: 0 if it is not aligned.
    #[inline]
    pub(crate) fn leaves(&mut self, pages: u64) -> u64 {
        match self.peek() {
            Some(run) if run.base().get() & (pages - 1) == 0 => run.pages() / pages,
            _ => 0,
        }
    }
}
