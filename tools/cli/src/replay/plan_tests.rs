use super::*;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

fn order(order: u32) -> Order {
    Order::new(order).expect("valid")
}

fn alloc(pfn: u64, o: u32, compound: bool) -> Event<'static> {
    Event::Alloc { pfn: Some(pfn), order: order(o), mobility: Mobility::Movable, compound }
}

fn free(pfn: u64, o: u32) -> Event<'static> {
    Event::Free { pfn, order: order(o) }
}

fn plan(events: &[Event<'_>]) -> Plan {
    let mut planner = Planner::default();
    for event in events {
        planner.event(0, *event).expect("plannable");
    }
    planner.finish()
}

/// Checks a plan by itself: each slot filled once, emptied at most once and only when filled; pieces are as large as
/// what they are made of. Returns the pages in use at the end.
fn check(plan: &Plan) -> u64 {
    let mut orders: HashMap<u32, Order> = HashMap::new();
    let mut seen = HashSet::new();
    for op in plan.before.iter().chain(&plan.ops) {
        match *op {
            Op::Alloc { slot, order, .. } => {
                assert!(seen.insert(slot));
                orders.insert(slot, order);
            }
            Op::Free { slot, order } => assert_eq!(orders.remove(&slot), Some(order)),
            Op::Split { slot, order, to, first } => {
                assert_eq!(orders.remove(&slot), Some(order));
                for slot in first..first + (1 << (order.get() - to.get())) {
                    assert!(seen.insert(slot) && slot < plan.slots);
                    orders.insert(slot, to);
                }
            }
        }
    }
    assert_eq!(plan.turns.last().map_or(0, |turn| turn.end), plan.ops.len());
    orders.values().map(|order| order.pages()).sum()
}

#[test]
fn a_batched_free_is_not_another_free() {
    let plan = plan(&[alloc(8, 0, true), free(8, 0), Event::FreeBatched]);
    assert_eq!((check(&plan), plan.counts.frees, plan.counts.batched, plan.ops.len()), (0, 1, 1, 2));
    assert_eq!((plan.counts.adopted, plan.peak_pages, plan.peak_at), (0, 1, 1));
}

#[test]
fn a_folio_is_split_when_its_tails_are_freed() {
    let plan = plan(&[alloc(512, 9, true), free(513, 0), free(514, 1), free(1023, 0)]);
    assert_eq!((check(&plan), plan.counts.folio_splits, plan.counts.block_splits), (512 - 4, 1, 0));
    assert_eq!(plan.ops[1], Op::Split { slot: 0, order: order(9), to: Order::ZERO, first: 1 });
}

#[test]
fn a_block_that_is_no_folio_is_freed_in_parts() {
    // As Linux frees the rest of a block whose first page somebody still holds.
    let plan = plan(&[alloc(8, 3, false), free(12, 2), free(10, 1), free(9, 0), free(8, 0)]);
    assert_eq!((check(&plan), plan.counts.folio_splits, plan.counts.block_splits), (0, 0, 3));
    assert_eq!((plan.counts.adopted, plan.counts.supplied), (0, 0));
}

#[test]
fn unknown_frees_are_adopted_and_in_use_from_the_start() {
    let plan = plan(&[free(64, 2), alloc(0, 0, true), free(64, 2)]);
    assert_eq!((check(&plan), plan.counts.adopted, plan.counts.adopted_pages), (1, 2, 8));
    assert_eq!((plan.before.len(), plan.peak_pages), (2, 8));
}

#[test]
fn a_free_of_more_than_was_allocated_adopts_the_rest() {
    let plan = plan(&[alloc(2, 0, false), free(0, 2)]);
    assert_eq!((check(&plan), plan.counts.adopted, plan.counts.adopted_pages), (0, 1, 3));
    assert_eq!(plan.before.len(), 2, "two pages before, one after");
}

#[test]
fn a_missing_free_is_supplied() {
    let events = [alloc(8, 1, true), alloc(8, 0, true)];
    let lax = plan(&events);
    assert_eq!((check(&lax), lax.counts.supplied), (2, 1));
}

#[test]
fn failed_allocations_and_others_are_counted() {
    let failed = Event::Alloc { pfn: None, order: order(9), mobility: Mobility::Movable, compound: true };
    let plan = plan(&[failed, Event::Other("sched:sched_switch"), Event::Other("sched:sched_switch")]);
    assert_eq!((check(&plan), plan.counts.failed, plan.ops.len()), (0, 1, 0));
    assert_eq!(plan.counts.others.get("sched:sched_switch"), Some(&2));
}

fn any_event() -> impl Strategy<Value = (u32, Event<'static>)> {
    let block = (0_u32..5, 0_u64..64).prop_map(|(o, n)| (o, (n << o) & 63));
    let event = (block, 0..5, any::<bool>()).prop_map(|((o, pfn), kind, compound)| match kind {
        0 | 1 => alloc(pfn, o, compound),
        2 | 3 => free(pfn, o),
        _ => Event::FreeBatched,
    });
    (0_u32..4, event)
}

proptest! {
    /// Against pages in a set, one by one.
    #[test]
    fn agrees_with_a_map_of_pages(events in proptest::collection::vec(any_event(), 0..200)) {
        let mut planner = Planner::default();
        let (mut pages, mut adopted) = (HashSet::new(), 0);
        let mut sizes = Vec::new();
        for (cpu, event) in &events {
            planner.event(*cpu, *event).expect("plannable");
            match *event {
                Event::Alloc { pfn: Some(pfn), order, .. } => pages.extend(pfn..pfn + order.pages()),
                Event::Free { pfn, order } => {
                    for page in pfn..pfn + order.pages() {
                        adopted += u64::from(!pages.remove(&page));
                    }
                }
                _ => {}
            }
            // Pages that were adopted so far have left the start's stock.
            sizes.push(pages.len() as i64 - adopted as i64);
        }
        let plan = planner.finish();
        prop_assert_eq!(check(&plan), pages.len() as u64);
        prop_assert_eq!(plan.counts.adopted_pages, adopted);
        let most = sizes.into_iter().max().unwrap_or(0).max(0) as u64 + adopted;
        prop_assert_eq!(plan.peak_pages, most);
    }
}
