//! Nobody is kept off a CPU by what is large.

use crate::model::{ALL, BEGIN, everywhere};
use crate::{World, extent};
use hugemm_base::{Cpu, Order, PAGE_BYTES, Pfn};
use hugemm_frames::AllocRequest;
use hugemm_host::mmu::Tables;
use hugemm_kva::{Limits, Request};
use hugemm_paging::{PageFormat, X86_64};

/// How often others may run while `work` is done.
fn points<F: PageFormat>(world: &World<F>, work: impl FnOnce()) -> u64 {
    let points = || world.on(0, |cx| cx.platform().counters().reschedules.get());
    let before = points();
    work();
    points() - before
}

/// A large area is given back in parts.
#[test]
fn others_run_while_a_large_area_is_given_back() {
    let world = World::<X86_64>::of(Tables::X86_64, Limits::new(100, 3000), 7, ALL, everywhere());
    let (pages, free) = (64 << 18, world.trimmed());
    let runs = [extent(Pfn::new(1 << 30), pages)];
    let area = world.map_pages(0, &runs, Request::new(0, "large")).expect("tables");
    world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
    let given = points(&world, || assert_eq!(world.on(0, |cx| world.kva.flush(cx)), 1));
    assert!(given >= 7, "{given} for {pages} pages");
    assert!(free - world.trimmed() <= BEGIN);
}

/// So are the tables of addresses that have become free one after the other.
#[test]
fn others_run_while_tables_are_given_back() {
    const TABLES: u64 = 1600;
    let world = World::<X86_64>::of(Tables::X86_64, Limits::new(100, 3000), 7, ALL, everywhere());
    // Less than a table has, and not at its beginning.
    let pages = 400;
    let areas: Vec<_> = (0..TABLES * 512 / (pages + 2))
        .map(|_| {
            world.map_pages(0, &[extent(Pfn::new((1 << 30) + 1), pages)], Request::new(0, "small")).expect("tables")
        })
        .collect();
    areas.into_iter().for_each(|area| world.on(0, |cx| world.kva.free(cx, area)).expect("its own"));
    world.on(0, |cx| world.kva.flush(cx));
    let free = world.free();
    let given = points(&world, || world.on(0, |cx| world.kva.trim(cx)));
    assert!(world.free() - free > 1000 && given >= 3, "{given} for {} frames", world.free() - free);
}

/// So is one taken from memory that is in pieces.
#[test]
fn others_run_while_a_large_area_is_taken() {
    let world = World::<X86_64>::of(Tables::X86_64, Limits::new(100, 3000), 7, ALL, everywhere());
    let pieces = world.on(0, |cx| {
        let mut pieces = Vec::new();
        while let Ok(block) = world.frames.alloc(cx, AllocRequest::order(Order::ZERO)) {
            pieces.push(block);
        }
        let (kept, freed): (Vec<_>, Vec<_>) = pieces.into_iter().partition(|block| block.pfn().get() % 2 == 0);
        freed.into_iter().for_each(|block| world.frames.free(cx, block));
        kept
    });
    let taken = points(&world, || {
        let area = world.on(0, |cx| world.kva.alloc(cx, Request::new(3500 * PAGE_BYTES, "pieces"))).expect("memory");
        world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
    });
    assert!(taken >= 3, "{taken}");
    world.on(0, |cx| pieces.into_iter().for_each(|block| world.frames.free(cx, block)));
}
