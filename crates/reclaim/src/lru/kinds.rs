//! Pages of sources on lists of their own: a page that its source has costs a read at most, and one that has to be stored costs more. So
//! those of sources go first, and what is only streamed through pushes nothing else out. Where a round of them has given nothing, because
//! all are used, as many of the others are looked at as of them.
//!
//! A page of a source that comes back when fewer have been dropped since than there are pages on all lists would have stayed if the others
//! had gone instead. It is young at once, and one of the others is looked at in place of the next of sources: what is idle among them makes
//! room for what is used.

use super::batch::{BATCH, Batch};
use super::lists::Lists;
use super::policy::LruPolicy;
use super::state::State;
use super::{LruEnd, LruStats};
use crate::links::Words;
use crate::words::STATE;
use hugemm_base::Pfn;

/// Of which kind a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    /// Whichever has its turn; `own`: unless swap is full.
    Any {
        /// Those that have to be stored, too.
        own: bool,
    },
    /// This one.
    Of {
        /// Those that sources have.
        sourced: bool,
    },
}

/// Under the lock.
#[derive(Debug)]
pub(crate) struct Kinds {
    pub(crate) own: Lists,
    pub(crate) sourced: Lists,
    /// Pages of the others that are to be looked at before the next of sources.
    owed: u64,
    /// Pages of sources that have been looked at since one went.
    barren: u64,
}

impl Kinds {
    pub(crate) fn new(policy: LruPolicy) -> Self {
        Kinds { own: Lists::new(policy), sourced: Lists::sourced(policy), owed: 0, barren: 0 }
    }

    pub(crate) fn kind(&mut self, sourced: bool) -> &mut Lists {
        if sourced { &mut self.sourced } else { &mut self.own }
    }

    /// The lists that a folio is on.
    pub(crate) fn of(&mut self, words: &impl Words, pfn: Pfn) -> &mut Lists {
        self.kind(State::from_word(words.word(pfn, STATE)).sourced)
    }

    pub(crate) fn inserted(&self) -> u64 {
        self.own.inserted + self.sourced.inserted
    }

    pub(crate) fn promoted(&self) -> u64 {
        self.own.promoted + self.sourced.promoted
    }

    /// `distance`: how many pages of sources have been dropped since one of these was, if one was.
    pub(crate) fn insert_sourced(
        &mut self,
        words: &impl Words,
        heads: impl Iterator<Item = Pfn>,
        distance: Option<u64>,
    ) {
        let soon = distance.is_some_and(|distance| distance <= self.own.len() + self.sourced.len());
        for head in heads {
            if soon {
                self.owed = (self.owed + 1).min(self.own.len());
                self.sourced.insert_young(words, head);
            } else {
                self.sourced.insert(words, head, hugemm_base::Order::ZERO);
            }
        }
    }

    /// Whether it is the turn of sources' pages.
    fn choose(&self, own: bool) -> bool {
        let own = own && self.own.len() > 0;
        self.sourced.len() > 0 && !(own && (self.owed > 0 || self.barren >= self.sourced.len()))
    }

    pub(crate) fn isolate(
        &mut self,
        words: &impl Words,
        (source, take): (LruEnd, Take),
        most_pages: u64,
        batch: &mut Batch,
        hold: impl FnMut(Pfn) -> bool,
    ) {
        let Take::Any { own } = take else {
            batch.sourced = take == Take::Of { sourced: true };
            return self.kind(batch.sourced).isolate(words, source, most_pages, batch, hold);
        };
        batch.sourced = self.choose(own);
        if !own && !batch.sourced {
            return;
        }
        self.kind(batch.sourced).isolate(words, source, most_pages, batch, hold);
        // Where all are young, those are looked at instead.
        let looked_at = match batch.pages() + batch.refused {
            0 => BATCH as u64,
            pages => pages,
        };
        if batch.sourced {
            self.barren = self.barren.saturating_add(looked_at);
        } else if self.owed > 0 {
            self.owed = self.owed.saturating_sub(looked_at);
        } else {
            self.barren = self.barren.saturating_sub(looked_at);
        }
    }

    pub(crate) fn put_back(&mut self, words: &impl Words, batch: &mut Batch) {
        let sourced = batch.sourced;
        for folio in batch.folios_mut() {
            self.kind(sourced).put_back(words, folio);
        }
    }

    /// Some of sources have gone.
    pub(crate) fn gone(&mut self) {
        self.barren = 0;
    }

    pub(crate) fn stats(&self) -> LruStats {
        let (own, sourced) = (self.own.stats(), self.sourced.stats());
        LruStats {
            folios: own.folios + sourced.folios,
            candidates: own.candidates + sourced.candidates,
            youngest: own.youngest + sourced.youngest,
            isolated: own.isolated + sourced.isolated,
            inserted: own.inserted + sourced.inserted,
            scanned: own.scanned + sourced.scanned,
            rotated: own.rotated + sourced.rotated,
            activated: own.activated + sourced.activated,
            deactivated: own.deactivated + sourced.deactivated,
            promoted: own.promoted + sourced.promoted,
            released: own.released + sourced.released,
            busy: own.busy + sourced.busy,
            generations: own.generations + sourced.generations,
            lock_rounds: own.lock_rounds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::policy::LruVerdict;
    use super::*;
    use crate::links::Map;
    use hugemm_base::Order;

    const MANY: u64 = 4 * BATCH as u64;

    fn filled(policy: LruPolicy, words: &Map) -> Kinds {
        let mut kinds = Kinds::new(policy);
        (1..=MANY).for_each(|pfn| kinds.own.insert(words, Pfn::new(pfn), Order::ZERO));
        kinds.insert_sourced(words, (MANY + 1..=2 * MANY).map(Pfn::new), None);
        kinds
    }

    /// Takes a batch and puts it back; whether it was of sources, and its pages.
    fn turn(kinds: &mut Kinds, words: &Map, own: bool, verdict: LruVerdict) -> (bool, Vec<u64>) {
        let mut batch = Batch::new();
        kinds.isolate(words, (LruEnd::Oldest, Take::Any { own }), u64::MAX, &mut batch, |_| true);
        batch.folios_mut().iter_mut().for_each(|folio| folio.verdict = verdict);
        kinds.put_back(words, &mut batch);
        if batch.sourced && verdict == LruVerdict::Release {
            kinds.gone();
        }
        (batch.sourced, batch.folios().iter().map(|folio| folio.pfn.get()).collect())
    }

    #[test]
    fn sources_pages_go_first_and_then_every_other_batch() {
        for policy in LruPolicy::ALL {
            let words = <Map>::default();
            let mut kinds = filled(policy, &words);
            let kept = LruVerdict::Rotate { mark: crate::lru::Mark::None };
            let round: Vec<bool> = (0..8).map(|_| turn(&mut kinds, &words, true, kept).0).collect();
            assert_eq!(round, [true, true, true, true, false, true, false, true], "{policy:?}");
            // One that goes begins a round.
            while !turn(&mut kinds, &words, true, LruVerdict::Release).0 {}
            assert!(turn(&mut kinds, &words, true, kept).0);
            while kinds.sourced.len() > 0 {
                assert!(turn(&mut kinds, &words, false, LruVerdict::Release).0, "only those where swap is full");
            }
            assert_eq!(turn(&mut kinds, &words, false, kept), (false, vec![]));
        }
    }

    #[test]
    fn others_have_their_turn_though_all_of_sources_are_young() {
        for policy in LruPolicy::ALL {
            let words = <Map>::default();
            let mut kinds = filled(policy, &words);
            let own = (0..32).filter(|_| !turn(&mut kinds, &words, true, LruVerdict::Activate).0).count();
            assert!(own >= 10, "{policy:?}: {own}");
        }
    }

    #[test]
    fn a_page_that_comes_back_soon_is_paid_for_by_others() {
        for policy in LruPolicy::ALL {
            let words = <Map>::default();
            for (distance, soon) in [(0, true), (2 * MANY, true), (2 * MANY + 1, false)] {
                let mut kinds = filled(policy, &words);
                let young = kinds.sourced.stats().youngest;
                kinds.insert_sourced(&words, [Pfn::new(1000)].into_iter(), Some(distance));
                assert!(!soon || kinds.sourced.stats().youngest == young + 1);
                assert_eq!(turn(&mut kinds, &words, true, LruVerdict::Activate).0, !soon, "{policy:?} {distance}");
                assert!(turn(&mut kinds, &words, true, LruVerdict::Activate).0, "it is paid for");
            }
        }
    }

    #[test]
    fn what_is_cold_is_looked_at_first() {
        for policy in LruPolicy::ALL {
            let words = <Map>::default();
            let mut kinds = filled(policy, &words);
            let cold = [7, 3, MANY + 9, MANY + 2];
            cold.into_iter().for_each(|pfn| kinds.of(&words, Pfn::new(pfn)).demote(&words, Pfn::new(pfn)));
            // What is on no list stays so.
            kinds.of(&words, Pfn::new(5000)).demote(&words, Pfn::new(5000));
            assert_eq!(kinds.stats().folios, 2 * MANY);
            let (sourced, pages) = turn(&mut kinds, &words, true, LruVerdict::Release);
            assert!(sourced && pages.starts_with(&[MANY + 2, MANY + 9]), "{policy:?} {pages:?}");
            kinds.owed = 1;
            assert!(turn(&mut kinds, &words, true, LruVerdict::Release).1.starts_with(&[3, 7]));
        }
    }
}
