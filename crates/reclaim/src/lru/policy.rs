//! What becomes of a folio that was looked at: the seam at which policies differ. Pure; the rules are in `two_list.rs`
//! and `generations.rs`.

use super::ring::Ring;
use super::state::Mark;
use super::{generations, two_list};

/// How recency is kept. A value that may be changed at run time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LruPolicy {
    /// An active and an inactive list; a second look before a folio becomes active.
    TwoList,
    /// Up to four generations; a folio found young joins the youngest at once.
    #[default]
    Generations,
}

impl LruPolicy {
    /// Every policy.
    pub const ALL: [LruPolicy; 2] = [LruPolicy::TwoList, LruPolicy::Generations];

    /// As the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            LruPolicy::TwoList => "classic",
            LruPolicy::Generations => "generations",
        }
    }
}

/// What is known of a folio when it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Was {
    /// On the youngest list.
    pub youngest: bool,
    /// What was remembered of it.
    pub mark: Mark,
}

/// What becomes of a folio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LruVerdict {
    /// It leaves the LRU: to be evicted, or given up by its owner.
    Release,
    /// It stays as old as it is, behind the others.
    Rotate {
        /// What is remembered of it.
        mark: Mark,
    },
    /// It becomes as young as can be.
    Activate,
    /// It becomes a candidate for eviction.
    Deactivate,
}

impl LruPolicy {
    /// Judges a folio by whether a mapping has used it since the last look. What did not compress is what it was as long as
    /// nobody uses it.
    pub(crate) const fn judge(self, was: Was, young: bool) -> LruVerdict {
        match (was.mark, self) {
            (mark @ Mark::Incompressible, _) if !young => LruVerdict::Rotate { mark },
            (_, LruPolicy::TwoList) => two_list::judge(was, young),
            (_, LruPolicy::Generations) => generations::judge(young),
        }
    }

    /// The age at which a folio joins.
    pub(crate) const fn entry(self, ring: Ring) -> u64 {
        match self {
            LruPolicy::TwoList => two_list::entry(ring),
            LruPolicy::Generations => generations::entry(ring),
        }
    }

    /// The age that a judged folio gets; `None` if it leaves. What does not compress is no candidate, and is not counted as one: the
    /// two-list policy looks at active folios only if it has few.
    pub(crate) const fn place(self, ring: Ring, was: Was, verdict: LruVerdict) -> Option<u64> {
        match (verdict, self) {
            (LruVerdict::Rotate { mark: Mark::Incompressible }, _) => Some(ring.youngest),
            (_, LruPolicy::TwoList) => two_list::place(ring, was, verdict),
            (_, LruPolicy::Generations) => generations::place(ring, verdict),
        }
    }

    /// The window before candidates are taken, given which lists are empty: after this, the oldest has some if any may be
    /// taken.
    pub(crate) fn prepare(self, ring: Ring, is_empty: impl Fn(u64) -> bool) -> Ring {
        match self {
            LruPolicy::TwoList => two_list::prepare(ring, is_empty),
            LruPolicy::Generations => generations::prepare(ring, is_empty),
        }
    }

    /// Whether folios of the youngest list should be looked at, so that idle ones become candidates.
    pub(crate) fn ageing_due(self, candidates: u64, youngest: u64) -> bool {
        match self {
            LruPolicy::TwoList => two_list::ageing_due(candidates, youngest),
            LruPolicy::Generations => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_spelled_as_on_the_command_line() {
        assert_eq!(LruPolicy::ALL.map(LruPolicy::name), ["classic", "generations"]);
    }

    /// What did not compress stays as young as can be while it is idle, and is as any other when it has been used.
    #[test]
    fn what_does_not_compress_is_no_candidate() {
        let ring = Ring { oldest: 3, youngest: 6 };
        for (policy, youngest) in LruPolicy::ALL.into_iter().flat_map(|policy| [(policy, false), (policy, true)]) {
            let was = |mark| Was { youngest, mark };
            let kept = policy.judge(was(Mark::Incompressible), false);
            assert_eq!(kept, LruVerdict::Rotate { mark: Mark::Incompressible });
            assert_eq!(policy.place(ring, was(Mark::Incompressible), kept), Some(6));
            assert_eq!(policy.judge(was(Mark::Incompressible), true), policy.judge(was(Mark::None), true));
        }
    }
}
