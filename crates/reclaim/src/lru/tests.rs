//! The lists against an oracle that keeps them as vectors, and the protocol's corners.

use super::lists::Lists;
use super::ring::Ring;
use super::*;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;

#[derive(Default)]
struct Map(RefCell<HashMap<(u64, usize), u64>>);

impl Words for Map {
    fn word(&self, pfn: Pfn, word: usize) -> u64 {
        self.0.borrow().get(&(pfn.number(), word)).copied().unwrap_or(0)
    }

    fn set_word(&self, pfn: Pfn, word: usize, value: u64) {
        self.0.borrow_mut().insert((pfn.number(), word), value);
    }
}

/// A folio of the oracle.
#[derive(Clone, Debug)]
struct Entry {
    pfn: u64,
    order: Order,
    referenced: bool,
}

/// Lists from the oldest on, each from its cold end.
struct Model {
    policy: Policy,
    first: u64,
    lists: Vec<Vec<Entry>>,
}

impl Model {
    fn youngest(&self) -> usize {
        self.lists.len() - 1
    }

    /// The rules in other words than the code's: by position from the young end.
    fn settle(&mut self, mut entry: Entry, was_youngest: bool, young: Option<bool>) {
        let last = self.youngest();
        let to = match (self.policy, young) {
            // Could not be evicted.
            (Policy::TwoList, None) => Some(if was_youngest { last } else { last - 1 }),
            (Policy::Generations, None) => Some(1),
            (Policy::Generations, Some(true)) => {
                entry.referenced = false;
                Some(last)
            }
            (Policy::Generations, Some(false)) => None,
            (Policy::TwoList, Some(young)) => {
                let again = entry.referenced;
                entry.referenced = young && !was_youngest && !again;
                match (was_youngest, young) {
                    (true, true) => Some(last),
                    (true, false) => Some(last - 1),
                    (false, true) => Some(if again { last } else { last - 1 }),
                    (false, false) => None,
                }
            }
        };
        if let Some(to) = to {
            self.lists[to].push(entry);
        }
    }

    fn prepare(&mut self) {
        let all_empty = self.lists.iter().all(Vec::is_empty);
        match self.policy {
            Policy::TwoList => {
                while self.lists.len() > 2 && self.lists[0].is_empty() {
                    self.lists.remove(0);
                    self.first += 1;
                }
            }
            Policy::Generations if all_empty => {}
            Policy::Generations => loop {
                if self.lists.len() == 2 {
                    self.lists.push(Vec::new());
                } else if self.lists[0].is_empty() {
                    self.lists.remove(0);
                    self.first += 1;
                } else {
                    break;
                }
            },
        }
    }
}

const ORDERS: [u32; 3] = [0, 9, 18];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..if cfg!(miri) { ProptestConfig::with_cases(4) } else { ProptestConfig::with_cases(512) } })]

    #[test]
    fn the_lists_agree_with_vectors(
        generations: bool,
        ops in proptest::collection::vec((0..12_u8, any::<u16>()), 0..if cfg!(miri) { 60 } else { 400 }),
    ) {
        let policy = if generations { Policy::Generations } else { Policy::TwoList };
        let words = Map::default();
        let mut lists = Lists::new(policy);
        let mut model = Model { policy, first: 0, lists: vec![Vec::new(), Vec::new()] };
        let mut next = 1_u64;
        for (op, pick) in ops {
            let on: Vec<u64> = model.lists.iter().flatten().map(|entry| entry.pfn).collect();
            match op {
                0..=3 => {
                    let order = Order::new(ORDERS[usize::from(pick) % 3]).expect("valid");
                    lists.insert(&words, Pfn::new(next), order);
                    let to = if model.policy == Policy::TwoList { model.youngest() - 1 } else { model.youngest() };
                    model.lists[to].push(Entry { pfn: next, order, referenced: false });
                    next += 1;
                }
                4 if !on.is_empty() => {
                    let pfn = on[usize::from(pick) % on.len()];
                    prop_assert_eq!(lists.remove(&words, Pfn::new(pfn)), Removed::Yes);
                    prop_assert_eq!(lists.remove(&words, Pfn::new(pfn)), Removed::NotThere);
                    model.lists.iter_mut().for_each(|list| list.retain(|entry| entry.pfn != pfn));
                }
                5 if !on.is_empty() => {
                    let pfn = on[usize::from(pick) % on.len()];
                    prop_assert!(lists.promote(&words, Pfn::new(pfn)));
                    let from = model.lists.iter().position(|list| list.iter().any(|entry| entry.pfn == pfn)).expect("on");
                    let at = model.lists[from].iter().position(|entry| entry.pfn == pfn).expect("on");
                    let last = model.youngest();
                    let entry = model.lists[from].remove(at);
                    model.settle(entry, from == last, Some(true));
                }
                6 => {
                    model.policy = Policy::ALL[usize::from(pick) % 2];
                    lists.policy = model.policy;
                }
                _ => {
                    let source = if op == 7 { Source::Youngest } else { Source::Oldest };
                    let most = [1, 3, 600, u64::MAX][usize::from(pick) % 4];
                    // Every so manieth cannot be held.
                    let refuse = u64::from(pick >> 2) % 5;
                    let hold = |pfn: Pfn| refuse == 0 || !pfn.number().is_multiple_of(refuse + 1);
                    let mut batch = Batch::new();
                    lists.isolate(&words, source, most, &mut batch, hold);
                    if source == Source::Oldest {
                        model.prepare();
                    }
                    let from = if source == Source::Oldest { 0 } else { model.youngest() };
                    let was_youngest = from == model.youngest();
                    let mut taken = Vec::new();
                    let mut pages = 0;
                    for _ in 0..model.lists[from].len() {
                        if taken.len() == BATCH || pages >= most {
                            break;
                        }
                        let entry = model.lists[from].remove(0);
                        if hold(Pfn::new(entry.pfn)) {
                            pages += entry.order.pages();
                            taken.push(entry);
                        } else {
                            model.lists[from].push(entry);
                        }
                    }
                    let isolated: Vec<u64> = batch.folios().iter().map(|folio| folio.pfn.number()).collect();
                    prop_assert_eq!(isolated, taken.iter().map(|entry| entry.pfn).collect::<Vec<_>>());
                    prop_assert_eq!(lists.stats().isolated, pages);
                    for (index, (folio, entry)) in batch.folios_mut().iter_mut().zip(taken).enumerate() {
                        prop_assert_eq!(folio.was, Was { youngest: was_youngest, referenced: entry.referenced });
                        prop_assert_eq!(folio.order, entry.order);
                        let young = [None, Some(true), Some(false)][(usize::from(pick) + index) % 3];
                        if let Some(young) = young {
                            folio.verdict = lists.policy.judge(folio.was, young);
                        }
                        // Some leave while they are looked at.
                        if (usize::from(pick) + index).is_multiple_of(7) {
                            prop_assert_eq!(lists.remove(&words, folio.pfn), Removed::Isolated);
                            prop_assert_eq!(lists.remove(&words, folio.pfn), Removed::NotThere);
                            prop_assert!(!lists.promote(&words, folio.pfn));
                        } else {
                            model.settle(entry, was_youngest, young);
                        }
                        lists.put_back(&words, folio);
                        prop_assert_eq!(folio.left, (usize::from(pick) + index).is_multiple_of(7));
                    }
                }
            }
            let expected: Vec<Vec<u64>> =
                model.lists.iter().map(|list| list.iter().map(|entry| entry.pfn).collect()).collect();
            prop_assert_eq!(lists.order(&words), expected);
            let youngest = model.first + model.youngest() as u64;
            prop_assert_eq!(lists.ring(), Ring { oldest: model.first, youngest });
            let stats = lists.stats();
            let pages = |list: &Vec<Entry>| list.iter().map(|entry| entry.order.pages()).sum::<u64>();
            prop_assert_eq!(stats.youngest, pages(&model.lists[model.youngest()]));
            prop_assert_eq!(stats.pages(), model.lists.iter().map(pages).sum::<u64>());
            prop_assert_eq!(stats.folios, model.lists.iter().map(Vec::len).sum::<usize>() as u64);
            prop_assert_eq!(stats.isolated, 0);
        }
    }
}

/// A folio that is used in every period is never offered for eviction before those that are not, under either policy.
#[test]
fn used_folios_outlive_idle_ones() {
    for policy in Policy::ALL {
        let words = Map::default();
        let mut lists = Lists::new(policy);
        (1..=64).for_each(|pfn| lists.insert(&words, Pfn::new(pfn), Order::ZERO));
        let hot = |pfn: Pfn| pfn.number().is_multiple_of(4);
        let mut evicted = Vec::new();
        while evicted.len() < 48 {
            let mut batch = Batch::new();
            lists.isolate(&words, Source::Oldest, u64::MAX, &mut batch, |_| true);
            assert!(!batch.is_empty());
            for folio in batch.folios_mut() {
                folio.verdict = policy.judge(folio.was, hot(folio.pfn));
                if folio.verdict == Verdict::Release {
                    evicted.push(folio.pfn);
                }
                lists.put_back(&words, folio);
            }
        }
        assert!(!evicted.into_iter().any(hot), "{policy:?}");
    }
}

/// What cannot be held is passed over, a bounded number of folios per lock round, and does not make the list look empty.
#[test]
fn folios_that_cannot_be_held_are_passed_over_bit_by_bit() {
    // Whole rounds of looks.
    const FOLIOS: u64 = 1024;
    for policy in Policy::ALL {
        let words = Map::default();
        let mut lists = Lists::new(policy);
        (1..=FOLIOS).for_each(|pfn| lists.insert(&words, Pfn::new(pfn), Order::ZERO));
        let mut seen = 0;
        while seen < FOLIOS {
            let mut batch = Batch::new();
            let before = seen;
            lists.isolate(&words, Source::Oldest, u64::MAX, &mut batch, |pfn| {
                seen += 1;
                assert_eq!(pfn.number(), seen, "each once a round");
                false
            });
            assert!(batch.is_empty() && batch.refused == seen - before);
            assert!(batch.refused > 0 && batch.refused <= 2 * super::BATCH as u64);
        }
        assert_eq!((lists.stats().busy, lists.stats().folios), (FOLIOS, FOLIOS));
    }
}
