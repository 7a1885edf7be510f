//! The lists themselves: what is done under the LRU's lock.

use super::batch::{BATCH, Batch, Folio};
use super::policy::{LruPolicy, LruVerdict, Was};
use super::ring::{LABELS, Ring, label};
use super::state::{Mark, Standing, State};
use super::{LruEnd, LruStats};
use crate::links::{List, Words};
use crate::words::STATE;
use hugemm_base::{Order, Pfn};

/// Folios that are looked at in one lock round, those that cannot be held included.
const MOST_LOOKS: u64 = 2 * BATCH as u64;

/// Under the lock. In this order: a folio that is put on writes the line of its list, and the last one, where the lock is.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Lists {
    lists: [List; LABELS],
    /// All but what is counted below.
    stats: LruStats,
    ring: Ring,
    pub(crate) promoted: u64,
    pub(crate) policy: LruPolicy,
    pub(crate) inserted: u64,
    pub(crate) lock_rounds: u64,
    /// They are sources' pages.
    sourced: bool,
}

fn state(words: &impl Words, pfn: Pfn) -> State {
    State::from_word(words.word(pfn, STATE))
}

impl Lists {
    pub(crate) fn new(policy: LruPolicy) -> Self {
        let (lists, stats, ring) = (Default::default(), LruStats::default(), Ring::new());
        Lists { lists, stats, ring, promoted: 0, policy, inserted: 0, lock_rounds: 0, sourced: false }
    }

    /// For sources' pages.
    pub(crate) fn sourced(policy: LruPolicy) -> Self {
        Lists { sourced: true, ..Lists::new(policy) }
    }

    fn link(&mut self, words: &impl Words, pfn: Pfn, order: Order, age: u64, mark: Mark) {
        let label = label(age);
        self.say(words, pfn, Standing::On { label }, order, mark);
        self.lists[label].push_front(words, pfn);
        self.lists[label].pages += order.pages();
    }

    fn say(&self, words: &impl Words, pfn: Pfn, standing: Standing, order: Order, mark: Mark) {
        words.set_word(pfn, STATE, State { standing, order, mark, sourced: self.sourced }.word());
    }

    fn unlink(&mut self, words: &impl Words, pfn: Pfn, order: Order, label: usize) {
        self.lists[label].remove(words, pfn);
        self.lists[label].pages = self.lists[label].pages.saturating_sub(order.pages());
    }

    pub(crate) fn insert(&mut self, words: &impl Words, pfn: Pfn, order: Order) {
        self.inserted += order.pages();
        self.link(words, pfn, order, self.policy.entry(self.ring), Mark::None);
    }

    /// The same of a page that came back too soon to be as old as others.
    pub(crate) fn insert_young(&mut self, words: &impl Words, pfn: Pfn) {
        self.inserted += 1;
        self.link(words, pfn, Order::ZERO, self.ring.youngest, Mark::None);
    }

    /// Pages on all lists.
    pub(crate) fn len(&self) -> u64 {
        self.lists.iter().map(|list| list.pages).sum()
    }

    /// Makes a folio as old as can be: the next to be looked at.
    pub(crate) fn demote(&mut self, words: &impl Words, pfn: Pfn) {
        let State { standing, order, mark, .. } = state(words, pfn);
        let Standing::On { label: from } = standing else { return };
        let mark = if mark == Mark::Referenced { Mark::None } else { mark };
        self.unlink(words, pfn, order, from);
        let to = label(self.ring.oldest);
        self.say(words, pfn, Standing::On { label: to }, order, mark);
        self.lists[to].push_back(words, pfn);
        self.lists[to].pages += order.pages();
    }

    /// Takes a folio off that lost its last reference; nothing if it had been left out.
    pub(crate) fn remove(&mut self, words: &impl Words, pfn: Pfn) {
        let State { standing, order, .. } = state(words, pfn);
        debug_assert!(standing != Standing::Isolated, "whoever looks at it has a reference");
        if let Standing::On { label } = standing {
            self.unlink(words, pfn, order, label);
            words.set_word(pfn, STATE, 0);
        }
    }

    /// Pages that may be taken as candidates, and those of the youngest list.
    fn sizes(&self) -> (u64, u64) {
        let youngest = self.lists[label(self.ring.youngest)].pages;
        (self.lists.iter().map(|list| list.pages).sum::<u64>() - youngest, youngest)
    }

    fn was(&self, label_of: usize, mark: Mark) -> Was {
        Was { youngest: label_of == label(self.ring.youngest), mark }
    }

    pub(crate) fn isolate(
        &mut self,
        words: &impl Words,
        source: LruEnd,
        most_pages: u64,
        batch: &mut Batch,
        mut hold: impl FnMut(Pfn) -> bool,
    ) {
        let age = match source {
            LruEnd::Youngest => self.ring.youngest,
            LruEnd::Oldest => {
                let before = self.ring.youngest;
                self.ring = self.policy.prepare(self.ring, |age| self.lists[label(age)].len() == 0);
                self.stats.generations += self.ring.youngest - before;
                self.ring.oldest
            }
        };
        let from = label(age);
        let mut left = self.lists[from].len().min(MOST_LOOKS);
        while !batch.is_full() && batch.pages() < most_pages && left > 0 {
            let Some(pfn) = self.lists[from].last() else { break };
            left -= 1;
            let State { order, mark, .. } = state(words, pfn);
            self.unlink(words, pfn, order, from);
            if !hold(pfn) {
                self.stats.busy += 1;
                batch.refused += order.pages();
                self.link(words, pfn, order, age, mark);
                continue;
            }
            self.say(words, pfn, Standing::Isolated, order, mark);
            self.stats.scanned += order.pages();
            self.stats.isolated += order.pages();
            let verdict = LruVerdict::Rotate { mark };
            let was = self.was(from, mark);
            batch.push(Folio { pfn, order, was, verdict, released: false });
        }
        let (candidates, youngest) = self.sizes();
        batch.ageing_due = self.policy.ageing_due(candidates, youngest);
    }

    /// Counts a verdict and returns the mark that goes with it.
    fn count(&mut self, verdict: LruVerdict, pages: u64) -> Mark {
        let (counter, mark) = match verdict {
            LruVerdict::Release => (&mut self.stats.released, Mark::None),
            LruVerdict::Rotate { mark } => (&mut self.stats.rotated, mark),
            LruVerdict::Activate => (&mut self.stats.activated, Mark::None),
            LruVerdict::Deactivate => (&mut self.stats.deactivated, Mark::None),
        };
        *counter += pages;
        mark
    }

    pub(crate) fn put_back(&mut self, words: &impl Words, folio: &mut Folio) {
        let pages = folio.order.pages();
        self.stats.isolated = self.stats.isolated.saturating_sub(pages);
        match self.policy.place(self.ring, folio.was, folio.verdict) {
            Some(age) => {
                let mark = self.count(folio.verdict, pages);
                self.link(words, folio.pfn, folio.order, age, mark);
            }
            None => {
                self.count(LruVerdict::Release, pages);
                words.set_word(folio.pfn, STATE, 0);
                folio.released = true;
            }
        }
    }

    /// Puts a folio on again that was released and could not go.
    pub(crate) fn put_again(&mut self, words: &impl Words, folio: &Folio) {
        let age = self.policy.place(self.ring, folio.was, folio.verdict).filter(|_| folio.returns());
        if let Some(age) = age {
            let pages = folio.order.pages();
            self.stats.released = self.stats.released.saturating_sub(pages);
            let mark = self.count(folio.verdict, pages);
            self.link(words, folio.pfn, folio.order, age, mark);
        }
    }

    /// Treats a folio as if it had been looked at and found young. True if somebody is looking at it, who decides.
    pub(crate) fn promote(&mut self, words: &impl Words, pfn: Pfn) -> bool {
        let State { standing, order, mark, .. } = state(words, pfn);
        let Standing::On { label: from } = standing else { return standing == Standing::Isolated };
        let was = self.was(from, mark);
        let verdict = self.policy.judge(was, true);
        let Some(age) = self.policy.place(self.ring, was, verdict) else { return false };
        self.promoted += order.pages();
        let mark = if let LruVerdict::Rotate { mark } = verdict { mark } else { Mark::None };
        // To the front even of the same list: its accessed bit is gone, so its own look must be a round away.
        self.unlink(words, pfn, order, from);
        self.link(words, pfn, order, age, mark);
        false
    }

    pub(crate) fn stats(&self) -> LruStats {
        let (candidates, youngest) = self.sizes();
        let Lists { promoted, inserted, lock_rounds, .. } = *self;
        let folios = self.lists.iter().map(List::len).sum();
        LruStats { candidates, youngest, folios, promoted, inserted, lock_rounds, ..self.stats }
    }

    /// Every list from the oldest on, each from its cold end: for the oracle.
    #[cfg(test)]
    pub(crate) fn order(&self, words: &impl Words) -> Vec<Vec<u64>> {
        self.ring
            .ages()
            .map(|age| {
                let mut list = Vec::new();
                let mut at = self.lists[label(age)].last();
                while let Some(pfn) = at {
                    list.push(pfn.get());
                    at = words.word(pfn, crate::words::PREV).checked_sub(1).map(Pfn::new);
                }
                assert_eq!(list.len() as u64, self.lists[label(age)].len());
                list
            })
            .collect()
    }

    #[cfg(test)]
    pub(crate) fn ring(&self) -> Ring {
        self.ring
    }
}
