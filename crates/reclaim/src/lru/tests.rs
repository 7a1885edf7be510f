//! The lists against an oracle that keeps them as vectors, and the protocol's corners.

use super::lists::Lists;
use super::policy::Was;
use super::ring::Ring;
use super::*;
use crate::links::Map;
use proptest::prelude::*;

fn mark(referenced: bool) -> Mark {
    if referenced { Mark::Referenced } else { Mark::None }
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
    policy: LruPolicy,
    first: u64,
    lists: Vec<Vec<Entry>>,
    /// What has happened.
    seen: LruStats,
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
            (LruPolicy::TwoList, None) => Some(if was_youngest { last } else { last - 1 }),
            (LruPolicy::Generations, None) => Some(1),
            (LruPolicy::Generations, Some(true)) => {
                entry.referenced = false;
                Some(last)
            }
            (LruPolicy::Generations, Some(false)) => None,
            (LruPolicy::TwoList, Some(young)) => {
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
        let pages = entry.order.pages();
        // Who could not be evicted is as old as before, also in a generation of his own.
        let counter = match to {
            None => &mut self.seen.released,
            Some(to) if young.is_some() && to == last && !(was_youngest && self.policy == LruPolicy::TwoList) => {
                &mut self.seen.activated
            }
            Some(_) if was_youngest && young == Some(false) => &mut self.seen.deactivated,
            Some(_) => &mut self.seen.rotated,
        };
        *counter += pages;
        if let Some(to) = to {
            self.lists[to].push(entry);
        }
    }

    fn prepare(&mut self) {
        let all_empty = self.lists.iter().all(Vec::is_empty);
        match self.policy {
            LruPolicy::TwoList => {
                while self.lists.len() > 2 && self.lists[0].is_empty() {
                    self.lists.remove(0);
                    self.first += 1;
                }
            }
            LruPolicy::Generations if all_empty => {}
            LruPolicy::Generations => loop {
                if self.lists.len() == 2 {
                    self.lists.push(Vec::new());
                    self.seen.generations += 1;
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
        let policy = if generations { LruPolicy::Generations } else { LruPolicy::TwoList };
        let words = <Map>::default();
        let mut lists = Lists::new(policy);
        let lists_of_none = vec![Vec::new(), Vec::new()];
        let mut model = Model { policy, first: 0, lists: lists_of_none, seen: LruStats::default() };
        let mut next = 1_u64;
        for (op, pick) in ops {
            let on: Vec<u64> = model.lists.iter().flatten().map(|entry| entry.pfn).collect();
            match op {
                0..=3 => {
                    let order = Order::new(ORDERS[usize::from(pick) % 3]).expect("valid");
                    lists.insert(&words, Pfn::new(next), order);
                    let to = if model.policy == LruPolicy::TwoList { model.youngest() - 1 } else { model.youngest() };
                    model.lists[to].push(Entry { pfn: next, order, referenced: false });
                    model.seen.inserted += order.pages();
                    next += 1;
                }
                4 if !on.is_empty() => {
                    let pfn = on[usize::from(pick) % on.len()];
                    // What is not there is not taken off again.
                    (0..2).for_each(|_| lists.remove(&words, Pfn::new(pfn)));
                    model.lists.iter_mut().for_each(|list| list.retain(|entry| entry.pfn != pfn));
                }
                5 if !on.is_empty() => {
                    let pfn = on[usize::from(pick) % on.len()];
                    prop_assert!(!lists.promote(&words, Pfn::new(pfn)), "nobody looks at it");
                    let from = model.lists.iter().position(|list| list.iter().any(|entry| entry.pfn == pfn)).expect("on");
                    let at = model.lists[from].iter().position(|entry| entry.pfn == pfn).expect("on");
                    let last = model.youngest();
                    let entry = model.lists[from].remove(at);
                    let promoted = model.seen.promoted + entry.order.pages();
                    let before = model.seen;
                    model.settle(entry, from == last, Some(true));
                    model.seen = LruStats { promoted, ..before };
                }
                6 => {
                    model.policy = LruPolicy::ALL[usize::from(pick) % 2];
                    lists.policy = model.policy;
                }
                _ => {
                    let source = if op == 7 { LruEnd::Youngest } else { LruEnd::Oldest };
                    let most = [1, 3, 600, u64::MAX][usize::from(pick) % 4];
                    // Every so manieth cannot be held.
                    let refuse = u64::from(pick >> 2) % 5;
                    let hold = |pfn: Pfn| refuse == 0 || !pfn.get().is_multiple_of(refuse + 1);
                    let mut batch = Batch::new();
                    lists.isolate(&words, source, most, &mut batch, hold);
                    if source == LruEnd::Oldest {
                        model.prepare();
                    }
                    let from = if source == LruEnd::Oldest { 0 } else { model.youngest() };
                    let was_youngest = from == model.youngest();
                    let mut taken = Vec::new();
                    let (mut pages, mut refused) = (0, 0);
                    for _ in 0..model.lists[from].len() {
                        if taken.len() == BATCH || pages >= most {
                            break;
                        }
                        let entry = model.lists[from].remove(0);
                        if hold(Pfn::new(entry.pfn)) {
                            pages += entry.order.pages();
                            taken.push(entry);
                        } else {
                            model.seen.busy += 1;
                            refused += entry.order.pages();
                            model.lists[from].push(entry);
                        }
                    }
                    let isolated: Vec<u64> = batch.folios().iter().map(|folio| folio.pfn.get()).collect();
                    prop_assert_eq!(isolated, taken.iter().map(|entry| entry.pfn).collect::<Vec<_>>());
                    prop_assert_eq!(lists.stats().isolated, pages);
                    prop_assert_eq!((batch.pages(), batch.refused), (pages, refused));
                    model.seen.scanned += pages;
                    for (index, (folio, entry)) in batch.folios_mut().iter_mut().zip(taken).enumerate() {
                        prop_assert_eq!(folio.was, Was { youngest: was_youngest, mark: mark(entry.referenced) });
                        prop_assert_eq!(folio.order, entry.order);
                        let young = [None, Some(true), Some(false)][(usize::from(pick) + index) % 3];
                        if let Some(young) = young {
                            folio.verdict = lists.policy.judge(folio.was, young);
                        }
                        prop_assert!(lists.promote(&words, folio.pfn), "who looks at it decides");
                        model.settle(entry, was_youngest, young);
                        lists.put_back(&words, folio);
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
            let LruStats { folios, candidates, youngest, .. } = stats;
            prop_assert_eq!(stats, LruStats { folios, candidates, youngest, ..model.seen });
        }
    }
}

/// A folio that is used in every period is never offered for eviction before those that are not, under either policy.
#[test]
fn used_folios_outlive_idle_ones() {
    for policy in LruPolicy::ALL {
        let words = <Map>::default();
        let mut lists = Lists::new(policy);
        (1..=64).for_each(|pfn| lists.insert(&words, Pfn::new(pfn), Order::ZERO));
        let hot = |pfn: Pfn| pfn.get().is_multiple_of(4);
        let mut evicted = Vec::new();
        while evicted.len() < 48 {
            let mut batch = Batch::new();
            lists.isolate(&words, LruEnd::Oldest, u64::MAX, &mut batch, |_| true);
            assert!(!batch.is_empty());
            for folio in batch.folios_mut() {
                folio.verdict = policy.judge(folio.was, hot(folio.pfn));
                if folio.verdict == LruVerdict::Release {
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
    for policy in LruPolicy::ALL {
        let words = <Map>::default();
        let mut lists = Lists::new(policy);
        (1..=FOLIOS).for_each(|pfn| lists.insert(&words, Pfn::new(pfn), Order::ZERO));
        let mut seen = 0;
        while seen < FOLIOS {
            let mut batch = Batch::new();
            let before = seen;
            lists.isolate(&words, LruEnd::Oldest, u64::MAX, &mut batch, |pfn| {
                seen += 1;
                assert_eq!(pfn.get(), seen, "each once a round");
                false
            });
            assert!(batch.is_empty() && batch.refused == seen - before);
            assert!(batch.refused > 0 && batch.refused <= 2 * super::BATCH as u64);
        }
        assert_eq!((lists.stats().busy, lists.stats().folios), (FOLIOS, FOLIOS));
    }
}

/// A batch takes as many as it has room for, and no more.
#[test]
fn a_batch_has_room_for_so_many() {
    let order = Order::new(9).expect("valid");
    let was = Was { youngest: false, mark: Mark::Referenced };
    let folio = |pfn| Folio { pfn: Pfn::new(pfn), order, was, verdict: LruVerdict::Release, released: false };
    let mut batch = Batch::new();
    assert!(batch.is_empty());
    for pfn in 0..BATCH as u64 + 2 {
        assert_eq!(batch.is_full(), pfn >= BATCH as u64);
        batch.push(folio(pfn));
        assert!(!batch.is_empty());
    }
    let heads: Vec<u64> = batch.folios().iter().map(|folio| folio.pfn.get()).collect();
    assert_eq!(heads, (0..BATCH as u64).collect::<Vec<_>>());
    assert_eq!(batch.pages(), BATCH as u64 * 512);
}

/// Only what was released to be evicted comes on again, when it could not go.
#[test]
fn what_could_not_go_comes_on_again() {
    for policy in LruPolicy::ALL {
        let words = <Map>::default();
        let mut lists = Lists::new(policy);
        (1..=4).for_each(|pfn| lists.insert(&words, Pfn::new(pfn), Order::ZERO));
        let mut batch = Batch::new();
        lists.isolate(&words, LruEnd::Oldest, u64::MAX, &mut batch, |_| true);
        assert_eq!(batch.folios().len(), 4);
        for folio in batch.folios_mut() {
            folio.verdict = match folio.pfn.get() {
                3 => LruVerdict::Rotate { mark: Mark::None },
                _ => LruVerdict::Release,
            };
            lists.put_back(&words, folio);
        }
        assert_eq!((lists.stats().released, lists.stats().rotated, lists.stats().folios), (3, 1, 1));
        for folio in batch.folios_mut() {
            // It could not be written; the last one was not tried.
            if folio.pfn.get() != 4 {
                folio.verdict = LruVerdict::Rotate { mark: Mark::Referenced };
            }
            lists.put_again(&words, folio);
        }
        let mut on: Vec<u64> = lists.order(&words).concat();
        on.sort_unstable();
        assert_eq!(on, [1, 2, 3], "{policy:?}");
        assert_eq!((lists.stats().released, lists.stats().rotated, lists.stats().folios), (1, 3, 3));
    }
}

/// A hundred thousand folios of both sizes, up to the last frame that there can be: each is on one list, all are counted, and each goes once.
#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter")]
fn many_folios_are_on_one_list_each() {
    const FOLIOS: u64 = 100_000;
    for policy in LruPolicy::ALL {
        let (words, mut lists, mut random) = (<Map>::default(), Lists::new(policy), hugemm_threads::Random(5));
        let large = Order::new(9).expect("valid");
        let order = |pfn: u64| if pfn.is_multiple_of(512) { large } else { Order::ZERO };
        // From the end of all frames down, at multiples of 512 where they are large.
        let first = Pfn::LIMIT.get() - 512 * FOLIOS;
        let mut on: Vec<u64> = (0..FOLIOS).map(|number| first + number * 512 + u64::from(number % 10 != 0)).collect();
        on.iter().for_each(|pfn| lists.insert(&words, Pfn::new(*pfn), order(*pfn)));
        let all: u64 = on.iter().map(|pfn| order(*pfn).pages()).sum();
        let mut gone = std::collections::HashSet::new();
        let mut gone_pages = 0;
        let mut round = |lists: &mut Lists, idle: bool| {
            let source = if !idle && random.below(4) == 0 { LruEnd::Youngest } else { LruEnd::Oldest };
            let mut batch = Batch::new();
            lists.isolate(&words, source, u64::MAX, &mut batch, |_| true);
            for folio in batch.folios_mut() {
                assert_eq!(folio.order, order(folio.pfn.get()));
                let young = !idle && random.below(8) > 0;
                folio.verdict = match policy.judge(folio.was, young) {
                    LruVerdict::Release if source == LruEnd::Youngest => LruVerdict::Deactivate,
                    verdict => verdict,
                };
                lists.put_back(&words, folio);
                if folio.released {
                    assert!(gone.insert(folio.pfn.get()), "{} goes twice", folio.pfn);
                    gone_pages += folio.order.pages();
                }
            }
            // Others are met on the way.
            for _ in 0..BATCH {
                let pfn = on[random.below(on.len() as u64) as usize];
                match random.below(3) {
                    0 if idle => lists.demote(&words, Pfn::new(pfn)),
                    1 if !idle => assert!(!lists.promote(&words, Pfn::new(pfn))),
                    _ => {}
                }
            }
            let stats = lists.stats();
            assert_eq!((stats.pages(), stats.folios), (all - gone_pages, FOLIOS - gone.len() as u64));
            assert_eq!((stats.released, stats.isolated), (gone_pages, 0));
            batch.is_empty()
        };
        (0..2500).for_each(|_| _ = round(&mut lists, false));
        let left: Vec<u64> = lists.order(&words).concat();
        let mut rounds = 0;
        while !round(&mut lists, true) || lists.stats().folios > 0 {
            if policy == LruPolicy::TwoList && lists.stats().candidates == 0 {
                // Only those are taken, and what is idle of the active ones becomes one.
                let mut batch = Batch::new();
                lists.isolate(&words, LruEnd::Youngest, u64::MAX, &mut batch, |_| true);
                for folio in batch.folios_mut() {
                    folio.verdict = policy.judge(folio.was, false);
                    lists.put_back(&words, folio);
                }
            }
            rounds += 1;
            assert!(rounds < FOLIOS, "{policy:?} {:?}", lists.stats());
        }
        let mut each = left.clone();
        each.sort_unstable();
        each.dedup();
        assert!(left.len() == each.len() && left.len() > 20_000, "one folio is on two lists");
        assert_eq!(lists.stats().released, all);
        on.clear();
    }
}
