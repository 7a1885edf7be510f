//! A ring of lists by age: the shape that both policies share.
//!
//! Folios are on one of four lists, labelled by age modulo 4. The ages in use are a window that only moves up, of two to
//! four lists. The two-list policy is this ring with a window of two; so changing the policy moves no folio.

/// How many lists there are.
pub(crate) const LABELS: usize = 4;

/// Which ages are in use: `oldest..=youngest`. Pure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    pub(crate) oldest: u64,
    pub(crate) youngest: u64,
}

/// The list of an age.
pub(crate) const fn label(age: u64) -> usize {
    age as usize % LABELS
}

impl Ring {
    pub(crate) const fn new() -> Self {
        Ring { oldest: 0, youngest: 1 }
    }

    /// How many lists are in use.
    pub(crate) const fn len(self) -> u64 {
        self.youngest - self.oldest + 1
    }

    /// One younger list, if there is a label for it.
    pub(crate) const fn grow(self) -> Self {
        if self.len() < LABELS as u64 { Ring { youngest: self.youngest + 1, ..self } } else { self }
    }

    /// Without the oldest list, which must be empty; two always stay.
    pub(crate) const fn retire(self) -> Self {
        if self.len() > 2 { Ring { oldest: self.oldest + 1, ..self } } else { self }
    }

    /// The list next to the youngest.
    pub(crate) const fn second(self) -> u64 {
        self.youngest - 1
    }

    /// Ages from the oldest on.
    pub(crate) fn ages(self) -> impl Iterator<Item = u64> {
        self.oldest..=self.youngest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_keeps_two_to_four_lists_with_labels_of_their_own() {
        // Every sequence of ten steps.
        for steps in 0..1_u32 << 10 {
            let mut ring = Ring::new();
            for step in 0..10 {
                let next = if steps >> step & 1 == 0 { ring.grow() } else { ring.retire() };
                assert!(next.oldest >= ring.oldest && next.youngest >= ring.youngest);
                let lists = if steps >> step & 1 == 0 { ring.len() + 1 } else { ring.len() - 1 };
                assert_eq!(next.len(), lists.clamp(2, 4));
                ring = next;
                let mut labels: Vec<usize> = ring.ages().map(label).collect();
                labels.sort_unstable();
                labels.dedup();
                assert_eq!(labels.len() as u64, ring.len());
            }
        }
    }
}
