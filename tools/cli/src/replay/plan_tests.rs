use super::*;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

fn order(order: u32) -> Order {
    Order::new(order).expect("valid")
}

/// An allocation, or a free.
type Event = (bool, u64, Order);

fn alloc(pfn: u64, o: u32) -> Event {
    (true, pfn, order(o))
}

fn free(pfn: u64, o: u32) -> Event {
    (false, pfn, order(o))
}

fn add(planner: &mut Planner, cpu: u32, (allocates, pfn, order): Event) {
    let added = match allocates {
        true => planner.alloc(cpu, Some(pfn), order, Mobility::Movable),
        false => planner.free(cpu, pfn, order),
    };
    added.expect("plannable");
}

fn plan(events: &[Event]) -> Plan {
    let mut planner = Planner::default();
    events.iter().for_each(|event| add(&mut planner, 0, *event));
    planner.finish()
}

/// Checks a plan by itself: each slot filled once, emptied at most once and only when filled; pieces are as large as
/// what they are made of; in the end all are emptied. Returns the pages in use before that.
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
    let pages = orders.values().map(|order| order.pages()).sum();
    for op in &plan.after {
        assert!(matches!(*op, Op::Free { slot, order } if orders.remove(&slot) == Some(order)));
    }
    assert!(orders.is_empty());
    pages
}

#[test]
fn a_folio_is_split_when_its_tails_are_freed() {
    let plan = plan(&[alloc(512, 9), free(513, 0), free(514, 1), free(1023, 0)]);
    assert_eq!((check(&plan), plan.counts.splits), (512 - 4, 1));
    assert_eq!(plan.ops[1], Op::Split { slot: 0, order: order(9), to: Order::ZERO, first: 1 });
}

#[test]
fn a_block_that_is_no_folio_is_freed_in_parts() {
    // As Linux frees the rest of a block whose first page somebody still holds.
    let plan = plan(&[alloc(8, 3), free(12, 2), free(10, 1), free(9, 0), free(8, 0)]);
    assert_eq!((check(&plan), plan.counts.splits), (0, 3));
    assert_eq!((plan.counts.adopted, plan.counts.supplied), (0, 0));
}

#[test]
fn a_free_of_more_than_was_allocated_adopts_the_rest() {
    let plan = plan(&[alloc(2, 0), free(0, 2)]);
    assert_eq!((check(&plan), plan.counts.adopted, plan.counts.adopted_pages), (0, 1, 3));
    assert_eq!(plan.before.len(), 2, "two pages before, one after");
}

#[test]
fn failed_allocations_are_counted() {
    let mut planner = Planner::default();
    assert!(planner.is_empty());
    planner.alloc(0, None, order(9), Mobility::Movable).expect("plannable");
    assert!(!planner.is_empty());
    let plan = planner.finish();
    assert_eq!((check(&plan), plan.counts.failed, plan.ops.len()), (0, 1, 0));
}

fn any_event() -> impl Strategy<Value = (u32, Event)> {
    let block = (0_u32..5, 0_u64..64).prop_map(|(o, n)| (o, (n << o) & 63));
    let event = (block, any::<bool>()).prop_map(|((o, pfn), allocates)| (allocates, pfn, order(o)));
    (0_u32..4, event)
}

proptest! {
    /// Against pages in a set, one by one.
    #[test]
    fn agrees_with_a_map_of_pages(events in proptest::collection::vec(any_event(), 0..200)) {
        let mut planner = Planner::default();
        let (mut pages, mut adopted) = (HashSet::new(), 0);
        let (mut supplied, mut unknown) = (0, 0);
        let mut sizes = Vec::new();
        for (cpu, event) in &events {
            add(&mut planner, *cpu, *event);
            let (allocates, pfn, order) = *event;
            let known = (pfn..pfn + order.pages()).filter(|page| pages.contains(page)).count() as u64;
            supplied += u64::from(allocates && known > 0);
            unknown += u64::from(!allocates && known < order.pages());
            for page in pfn..pfn + order.pages() {
                adopted += u64::from(!if allocates { pages.insert(page); true } else { pages.remove(&page) });
            }
            // Pages that were adopted so far have left the start's stock.
            sizes.push(pages.len() as i64 - adopted as i64);
        }
        let plan = planner.finish();
        prop_assert_eq!(check(&plan), pages.len() as u64);
        prop_assert_eq!((plan.counts.adopted_pages, plan.counts.adopted), (adopted, unknown));
        prop_assert_eq!(plan.counts.supplied, supplied);
        let most = sizes.into_iter().max().unwrap_or(0).max(0) as u64 + adopted;
        prop_assert_eq!(plan.peak_pages, most);
    }
}
