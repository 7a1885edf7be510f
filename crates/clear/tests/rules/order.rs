//! In which order a folio is cleared, as the engine does it: right part, left part, and the five pages around the first
//! touch last, through the cache.

use crate::support::memory::Memory;
use crate::support::{BULK, CACHED, Event, PAGE, Script, clearer, span};
use hugemm_base::{Never, PreemptModel, Sweep, VirtAddr};
use hugemm_clear::folio::{begin_around, touched_page};
use hugemm_clear::{ClearRequest, Primitive, Unit};

/// The parts of a folio of all the memory that is touched at page `touched` first, in the order they were cleared.
fn trace(script: &Script, touched: u64, unit: u64, request: &ClearRequest) -> Vec<((u64, u64), Sweep, Primitive)> {
    let mut seen = Vec::new();
    let mut observer = |unit: &Unit| seen.push((span(unit), unit.sweep, unit.primitive));
    let folio = begin_around(script.dirty(), touched);
    let zeroed = script.run(|cx| clearer(unit).clear_observed(cx, folio, request, &Never, &mut observer));
    assert_eq!(zeroed.expect("cleared").extent().pages(), script.memory.pages());
    seen
}

/// The same, but only which pages.
fn parts(script: &Script, touched: u64, unit: u64, request: &ClearRequest) -> Vec<(u64, u64)> {
    trace(script, touched, unit, request).into_iter().map(|(part, ..)| part).collect()
}

/// The rule: right part, left part, and last the neighbourhood, two pages on each side.
fn rule(pages: u64, touched: u64) -> Vec<(u64, u64)> {
    let (from, to) = (touched.saturating_sub(2), (touched + 3).min(pages));
    [(to, pages), (0, from), (from, to)].into_iter().filter(|(a, b)| a < b).collect()
}

fn preemptible(memory: Memory) -> Script {
    let script = Script::new(memory);
    script.model.set(PreemptModel::Full);
    script
}

/// And the platform's windows are opened in the same order.
#[test]
#[cfg_attr(miri, ignore = "2 MiB take minutes")]
fn a_huge_page_is_cleared_right_left_and_around_the_touch() {
    let script = preemptible(Memory::heap(512));
    assert_eq!(rule(512, 100), [(103, 512), (0, 98), (98, 103)]);
    for (hint, touched) in
        [0, 1, 2, 3, 100, 508, 509, 510, 511].map(|page| (page, page)).into_iter().chain([(9999, 511)])
    {
        script.memory.dirty(0..512);
        assert_eq!(parts(&script, hint, 512, &BULK), rule(512, touched), "touched {hint}");
        assert!(script.memory.zero(0..512));
        let opened = script.events().into_iter().filter_map(|event| match event {
            Event::Open { page, pages, .. } => Some((page, page + pages)),
            _ => None,
        });
        assert!(opened.eq(rule(512, touched)), "touched {touched}");
    }
}

/// Every first touch of every small folio, with units smaller than the parts, and every byte checked.
#[test]
fn every_page_of_every_small_folio_is_cleared_once() {
    for pages in 1..=if cfg!(miri) { 6 } else { 16 } {
        let script = Script::new(Memory::heap(pages));
        for touched in 0..pages {
            script.memory.dirty(0..pages);
            let before = script.counted();
            let mut times = vec![0; pages as usize];
            for ((from, to), ..) in trace(&script, touched, 3, &CACHED) {
                assert!(to - from <= 3);
                (from..to).for_each(|page| times[page as usize] += 1);
            }
            assert!(times.iter().all(|n| *n == 1), "{pages} pages, touched {touched}: {times:?}");
            assert!(script.memory.zero(0..pages));
            assert_eq!(script.counted().since(before).bytes_cached, pages * PAGE);
        }
    }
}

/// A fault's address, aligned or not, leads to its page; no address, to page 0.
#[test]
#[cfg_attr(miri, ignore = "2 MiB take minutes")]
fn fault_addresses_need_not_be_aligned() {
    let script = preemptible(Memory::heap(512));
    let folio = 0x7f12_3460_0000;
    for (hint, touched) in [(folio + 0x64_000, 100), (folio + 0x64_fff, 100), (folio, 0), (0, 0)] {
        let page = touched_page(VirtAddr::new(hint), 512);
        assert_eq!(parts(&script, page, 512, &CACHED), rule(512, touched), "{hint:#x}");
    }
    assert_eq!(touched_page(VirtAddr::new((1 << 30) + (700 << 12) + 1), 1 << 18), 700, "of 1 GiB");
    assert!(begin_around(script.own(0, 0), 0).finish().is_ok());
}

/// The rule has no size limit.
#[test]
#[cfg(not(miri))]
fn a_gib_is_cleared_in_the_same_order() {
    let script = preemptible(Memory::repeated(1 << 18, 512));
    let parts = parts(&script, 100_000, 1, &BULK);
    assert_eq!(parts, [(100_003, 1 << 18), (0, 99_998), (99_998, 100_003)]);
    assert!(script.memory.zero(0..512));
    assert_eq!(script.counted().units, 3);
}

/// Far parts past the cache, the neighbourhood through it, and last.
#[test]
fn the_neighbourhood_is_cached_and_last() {
    let script = Script::new(Memory::heap(64));
    let parts = trace(&script, 20, 16, &BULK);
    let near = parts.iter().position(|(_, sweep, _)| *sweep == Sweep::Near).expect("there is one");
    assert!(parts[..near].iter().all(|(_, sweep, p)| (*sweep, *p) == (Sweep::Far, Primitive::Model)));
    assert_eq!(parts[near..], [((18, 23), Sweep::Near, Primitive::Portable)]);
    // The far parts' fences come before the neighbourhood's stores.
    let events = script.events();
    let last_open = events.iter().rposition(|event| matches!(event, Event::Open { .. })).expect("there is one");
    let fence = |event: &Event| *event == Event::Fence;
    assert!(!events[last_open..].iter().any(fence) && events[..last_open].iter().any(fence));
}

/// The address at which user space will see a part follows the part, not the order.
#[test]
fn user_addresses_follow_the_parts() {
    let script = Script::new(Memory::heap(16));
    script.window.set(1);
    let base = 0x7f00_0000_0000;
    trace(&script, 5, 4, &CACHED.seen_at(VirtAddr::new(base)));
    let mut pages = 0;
    for event in script.events() {
        if let Event::Open { page, user, .. } = event {
            assert_eq!(user, Some(base + page * PAGE));
            pages += 1;
        }
    }
    assert_eq!(pages, 16);
}
