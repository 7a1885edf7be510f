//! One test per rule of the checklist that random operations do not single out.

mod support;

use hugemm_base::inject::{FaultPlan, NoFaults, every_fault};
use hugemm_base::platform::{PhysMap, Window};
use hugemm_base::{CpuCx, Dirty, Extent, ExtentChain, NodeId, Order, Pfn, Pressure, Shortfall, VirtAddr, Zeroed};
use hugemm_frames::{
    AllocError, ArenaSpec, ClaimError, Clearing, Config, ConfigError, Descriptor, Frames, From, Frozen, Mobility,
    NoMigration, Plain, Poisoned, Put, RangeReport, RefError, Request, Slab, WideCounts, ZeroPolicy, Zeroer,
};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use support::{Memory, Threads, arena, extent, release, with_one_arena};

fn order(order: u32) -> Order {
    Order::new(order).expect("valid")
}

fn request(o: u32) -> Request {
    Request::order(order(o))
}

/// A 1 GiB region without the cost of one: tests under Miri use less.
const GIB: u64 = 1 << 18;

#[test]
fn metadata_is_within_its_limits() {
    for gib in [1, 8, 64, 1024] {
        let arenas = [arena(GIB, gib * GIB, 0)];
        let config = Config { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
        let bytes = Frames::<Plain>::required_bytes(&config).expect("valid").size() as u64;
        let per_mille = bytes * 100_000 / (gib * GIB * 4096);
        assert!(per_mille <= 1600, "{per_mille} per 100 000 of {gib} GiB");
    }
}

#[test]
fn bad_configurations_are_refused() {
    let need = |arenas: &[ArenaSpec]| Frames::<Plain>::required_bytes(&Config { arenas, cpus: 1, cpu_nodes: &[] });
    assert_eq!(need(&[]), Err(ConfigError::Empty));
    assert_eq!(need(&[arena(0, 0, 0)]), Err(ConfigError::Empty));
    assert_eq!(need(&[arena(0, 10, 0), arena(9, 10, 0)]), Err(ConfigError::Overlap(Pfn::new(9))));
    assert_eq!(need(&[arena(50, 10, 0), arena(9, 10, 0)]), Err(ConfigError::Overlap(Pfn::new(9))));
    let arenas = [arena(0, 512, 0)];
    let config = Config { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
    let mut small = vec![0_u8; 4096];
    // SAFETY: the memory is too small, which is found out before it is used.
    let result = unsafe { Frames::new(&config, Plain(NoFaults), small.as_mut_ptr(), small.len()) };
    assert!(matches!(result, Err(ConfigError::Memory { .. })));
}

/// C11, C6, X5: one lock round for a frozen 1 GiB, and for 1 GiB of counted pages.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn a_gibibyte_is_freed_in_one_lock_round() {
    with_one_arena(GIB, GIB, 1, |frames, threads| {
        let mut cx = threads.cx();
        let rounds = |cx: &CpuCx<'_, Threads>| frames.stats(cx).lock_rounds;
        let block = frames.alloc(&cx, request(18)).expect("memory");
        let before = rounds(&cx);
        frames.free(&cx, block);
        assert_eq!(rounds(&cx) - before, 2, "one, and that of the statistics");
        let block = frames.alloc(&cx, request(18)).expect("memory");
        let whole = frames.count_run(frames.split(block, Order::ZERO)).expect("managed");
        let before = rounds(&cx);
        let report = frames.free_range(&mut cx, whole);
        assert_eq!(report, RangeReport { freed: GIB, runs: 1, ..RangeReport::default() });
        assert_eq!(rounds(&cx) - before, 2);
        let stats = frames.stats(&cx);
        assert_eq!(stats.blocks[18], 1, "C13: largest blocks, not pages");
        // Reschedule points, one per 512 MiB (C12): none after the last.
        assert_eq!(counters(&cx).reschedules, 1);
        // None where nobody may sleep.
        let block = frames.alloc(&cx, request(18)).expect("memory");
        let whole = frames.count_run(frames.split(block, Order::ZERO)).expect("managed");
        threads.atomic.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(frames.free_range(&mut cx, whole).freed, GIB);
        assert_eq!(counters(&cx).reschedules, 1);
    });
}

fn counters(cx: &CpuCx<'_, Threads>) -> hugemm_base::CounterSnapshot {
    use hugemm_base::platform::Instrumented;
    cx.platform().counters().snapshot()
}

/// C3: the page somebody still references splits the run and is freed by its last put.
#[test]
fn extra_references_split_runs() {
    with_one_arena(0, 2048, 1, |frames, threads| {
        let mut cx = threads.cx();
        let block = frames.alloc(&cx, request(9)).expect("memory");
        let whole = frames.count_run(frames.split(block, Order::ZERO)).expect("managed");
        let extra = Pfn::new(whole.base().number() + 77);
        frames.get(extra).expect("held");
        let report = frames.free_range(&mut cx, whole);
        assert_eq!(report, RangeReport { freed: 511, kept: 1, runs: 2, ..RangeReport::default() });
        assert_eq!(frames.stats(&cx).available(), 2047);
        assert_eq!(frames.put(&cx, extra), Ok(Put::Last));
        assert_eq!(frames.put(&cx, extra), Err(RefError::NotCounted));
        assert_eq!(frames.stats(&cx).available(), 2048);
    });
}

/// C4: refused pages split the run and never come back.
#[test]
fn poisoned_pages_split_runs_and_stay_out() {
    with_one_arena(0, 1024, 1, |frames, threads| {
        let mut cx = threads.cx();
        let block = frames.alloc(&cx, request(9)).expect("memory");
        let whole = frames.count_run(frames.split(block, Order::ZERO)).expect("managed");
        let bad = Pfn::new(whole.base().number() + 100);
        assert_eq!(frames.poison(&cx, bad), Poisoned::InUse);
        assert_eq!(frames.poison(&cx, bad), Poisoned::Already);
        let report = frames.free_range(&mut cx, whole);
        assert_eq!(report, RangeReport { freed: 511, refused: 1, runs: 2, ..RangeReport::default() });
        let free = Pfn::new(if whole.base().number() == 0 { 700 } else { 200 });
        assert_eq!(frames.poison(&cx, free), Poisoned::Free);
        let mut held = Vec::new();
        while let Ok(block) = frames.alloc(&cx, request(0)) {
            assert!(block.pfn() != bad && block.pfn() != free);
            held.push(block);
        }
        assert_eq!(held.len(), 1022);
        assert_eq!(frames.poison(&cx, Pfn::new(5000)), Poisoned::NotManaged);
        for block in held {
            frames.free(&cx, block);
        }
        assert_eq!(frames.stats(&cx).refused, 2);
    });
}

/// C7, C8: heads and tails of folios, frozen and free pages and strangers are left alone; nothing is fine.
#[test]
fn ranges_of_other_things_are_left_alone() {
    with_one_arena(0, 2048, 1, |frames, threads| {
        let mut cx = threads.cx();
        let folio = frames.count(frames.alloc(&cx, request(4)).expect("memory")).expect("fresh");
        let frozen = frames.alloc(&cx, request(0)).expect("memory");
        let report = frames.free_range(&mut cx, extent(0, 3000));
        assert_eq!(report, RangeReport { invalid: 3000, ..RangeReport::default() });
        assert_eq!(frames.free_range(&mut cx, extent(0, 0)), RangeReport::default());
        assert_eq!(frames.references(folio), 1);
        // Tails are never counted.
        let tail = Pfn::new(folio.number() + 1);
        assert_eq!(frames.get(tail), Err(RefError::NotCounted));
        assert_eq!(frames.try_get(&cx, tail), Ok(false));
        assert_eq!(frames.head_of(tail), Some((folio, order(4))));
        assert_eq!(frames.put(&cx, folio), Ok(Put::Last));
        frames.free(&cx, frozen);
        assert_eq!(frames.stats(&cx).available(), 2048);
    });
}

/// C15: arrays, sorted or not, with strangers among them.
#[test]
fn arrays_are_freed_by_runs() {
    with_one_arena(0, 4096, 1, |frames, threads| {
        let mut cx = threads.cx();
        let block = frames.alloc(&cx, request(10)).expect("memory");
        let whole = frames.count_run(frames.split(block, Order::ZERO)).expect("managed");
        let mut pages: Vec<Pfn> = (whole.base().number()..whole.end().number()).map(Pfn::new).collect();
        let report = frames.free_array(&mut cx, &pages[..100]);
        assert_eq!((report.freed, report.runs), (100, 1));
        pages.drain(..100);
        pages.reverse();
        pages.push(Pfn::new(1 << 30));
        let report = frames.free_unsorted(&mut cx, &mut pages);
        assert_eq!((report.freed, report.runs, report.invalid), (924, 1, 1));
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).blocks[12], 1);
    });
}

/// C5, C19: arenas that adjoin share nothing.
#[test]
fn ranges_split_at_the_border_of_arenas() {
    let arenas = [arena(0, 768, 0), arena(768, 768, 1)];
    let config = Config { arenas: &arenas, cpus: 1, cpu_nodes: &[NodeId(0)] };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, 1536));
    let threads = Threads::default();
    Threads::run_as(0);
    let mut cx = threads.cx();
    let left = frames.claim_exact(&cx, extent(512, 256)).expect("free").into_extent();
    let right = frames.claim_exact(&cx, extent(768, 256)).expect("free").into_extent();
    assert_eq!(frames.claim_exact(&cx, extent(400, 512)), Err(ClaimError::NotManaged));
    let both = left.join(right).expect("adjoining");
    // SAFETY: claimed above.
    assert_eq!(frames.free_extent(&cx, unsafe { Dirty::assume_owned(both) }), 512);
    assert_eq!(frames.node_stats(&cx, NodeId(0)).available(), 768);
    assert_eq!(frames.node_stats(&cx, NodeId(1)).available(), 768);
    // And of counted ones: two runs.
    let mut held: Vec<Pfn> = Vec::new();
    for node in [0, 1] {
        while let Ok(block) = frames.alloc(&cx, request(0).from(From::Only(NodeId(node)))) {
            held.push(frames.count(block).expect("fresh"));
        }
    }
    assert_eq!(held.len(), 1536);
    let report = frames.free_range(&mut cx, extent(0, 1536));
    assert_eq!(report, RangeReport { freed: 1536, runs: 2, ..RangeReport::default() });
}

#[test]
fn nodes_are_preferred_and_fallen_back_from() {
    let arenas = [arena(0, 512, 0), arena(512, 512, 1)];
    let config = Config { arenas: &arenas, cpus: 2, cpu_nodes: &[NodeId(1), NodeId(0)] };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, 1024));
    let threads = Threads::default();
    Threads::run_as(0);
    let cx = threads.cx();
    let node = |block: &Frozen| frames.node_of(block.pfn()).expect("managed").0;
    let local = frames.alloc(&cx, request(0)).expect("memory");
    let other = frames.alloc(&cx, request(0).from(From::Prefer(NodeId(0)))).expect("memory");
    assert_eq!((node(&local), node(&other)), (1, 0));
    frames.free(&cx, local);
    frames.free(&cx, other);
    frames.drain(&cx);
    let all = frames.alloc(&cx, request(9).from(From::Only(NodeId(1)))).expect("memory");
    assert_eq!(frames.alloc(&cx, request(0).from(From::Only(NodeId(1)))), Err(AllocError::OutOfMemory));
    assert_eq!(frames.alloc(&cx, request(0).from(From::Only(NodeId(2)))), Err(AllocError::NoSuchNode));
    let fallen = frames.alloc(&cx, request(0)).expect("fallback");
    assert_eq!(node(&fallen), 0);
    frames.free(&cx, fallen);
    frames.free(&cx, all);
}

#[test]
fn counts_grow_without_limit_once_widened() {
    with_one_arena(0, 512, 1, |frames, threads| {
        let cx = threads.cx();
        let page = frames.count(frames.alloc(&cx, request(0)).expect("memory")).expect("fresh");
        for _ in 0..14 {
            frames.get(page).expect("fits");
        }
        assert_eq!(frames.get(page), Err(RefError::Saturated));
        assert_eq!(frames.references(page), 15);
        let mut wide = Box::new(WideCounts::new());
        // SAFETY: the box outlives the manager's use of it, which ends with this test.
        assert_eq!(unsafe { frames.widen(page, NonNull::from(&mut *wide)) }, Ok(true));
        for _ in 0..5000 {
            frames.get(page).expect("wide");
        }
        assert_eq!(frames.references(page), 5015);
        for _ in 0..5014 {
            assert_eq!(frames.put(&cx, page), Ok(Put::Kept));
        }
        assert_eq!(frames.put(&cx, page), Ok(Put::Last));
        // And again in the frame's next life.
        let block = frames.alloc(&cx, request(0)).expect("memory");
        assert_eq!(block.pfn(), page);
        let page = frames.count(block).expect("fresh");
        frames.get(page).expect("wide");
        assert_eq!(frames.put(&cx, page), Ok(Put::Kept));
        assert_eq!(frames.put(&cx, page), Ok(Put::Last));
    });
}

struct CountingZeroer {
    cleared: RefCell<Vec<Extent>>,
    refuse: Cell<bool>,
}

impl CountingZeroer {
    fn new() -> Self {
        CountingZeroer { cleared: RefCell::default(), refuse: Cell::new(false) }
    }
}

impl Zeroer<Threads> for CountingZeroer {
    fn zero(&self, _cx: &mut CpuCx<'_, Threads>, frames: Dirty) -> Result<Zeroed, Dirty> {
        if self.refuse.get() {
            return Err(frames);
        }
        self.cleared.borrow_mut().push(frames.extent());
        // SAFETY: there is no memory behind the frames.
        Ok(unsafe { Zeroed::assume_owned(frames.into_extent()) })
    }
}

/// X2, A20, C18: known-zero first, never twice, one call per run; a zero 2 MiB is found again inside a merged block.
#[test]
fn zero_is_remembered() {
    with_one_arena(0, 4096, 1, |frames, threads| {
        let mut cx = threads.cx();
        let zeroer = CountingZeroer::new();
        let calls = || zeroer.cleared.borrow_mut().drain(..).map(|e| e.pages()).collect::<Vec<_>>();
        let a = frames.alloc_zeroed(&mut cx, request(9), &zeroer).expect("memory");
        assert_eq!((a.is_zero(), calls()), (true, vec![512]));
        let place = a.pfn();
        frames.free_zeroed(&cx, a.into_content().expect("zero"));
        frames.drain(&cx);
        // Merged with seven dirty ones into one block, and still found.
        assert_eq!(frames.stats(&cx).blocks[12], 1);
        let dirty = frames.alloc(&cx, request(10)).expect("memory");
        assert!(!dirty.extent().contains(place), "dirty requests leave zero memory alone");
        let again = frames.alloc_zeroed(&mut cx, request(9), &zeroer).expect("memory");
        assert_eq!((again.pfn(), again.is_zero(), calls()), (place, true, vec![]));
        assert_eq!(counters(&cx).clears_skipped, 1);
        frames.free(&cx, again);
        frames.free(&cx, dirty);
        // Freed as dirty: cleared again.
        let third = frames.alloc_zeroed(&mut cx, request(9), &zeroer).expect("memory");
        assert_eq!(calls(), [512]);
        frames.free(&cx, third);
        // Policies: on free, by run.
        let policy = ZeroPolicy { on_alloc: true, on_free: true };
        let clearing = Clearing { frames, zeroer: &zeroer, policy };
        let block = clearing.alloc(&mut cx, request(9)).expect("memory");
        let _ = calls();
        let whole = frames.count_run(frames.split(block, Order::ZERO)).expect("managed");
        let extra = Pfn::new(whole.base().number() + 300);
        frames.get(extra).expect("held");
        assert_eq!(clearing.free_range(&mut cx, whole).freed, 511);
        assert_eq!(calls(), [300, 211], "by run, not by page");
        let _ = frames.put(&cx, extra);
        // What was cleared on free is not cleared on allocation; what one dirty page has merged with is.
        let half = clearing.alloc(&mut cx, request(8)).expect("memory");
        assert_eq!((half.is_zero(), calls()), (true, vec![]));
        assert_eq!(half.pfn(), whole.base());
        clearing.free_extent(&mut cx, half.into_dirty());
        assert_eq!(calls(), [256]);
        // A zeroer that cannot: nothing is lost.
        zeroer.refuse.set(true);
        assert_eq!(frames.alloc_zeroed(&mut cx, request(11), &zeroer), Err(AllocError::OutOfMemory));
        assert_eq!(frames.stats(&cx).available(), 4096);
    });
}

#[test]
fn mobility_groups_by_2_mib() {
    with_one_arena(0, 4096, 1, |frames, threads| {
        let cx = threads.cx();
        let mut held: Vec<Frozen> = Vec::new();
        for round in 0..600 {
            let request = if round % 2 == 0 { request(0) } else { request(0).movable() };
            held.push(frames.alloc(&cx, request).expect("memory"));
        }
        for a in &held {
            for b in held.iter().take(50) {
                let same_block = a.pfn().number() / 512 == b.pfn().number() / 512;
                assert!(!same_block || a.mobility() == b.mobility(), "{a:?} and {b:?} share a block");
            }
        }
        let scattered = frames.stats(&cx).fragmentation_permille(order(12));
        assert_eq!(scattered, 1000);
        for block in held {
            frames.free(&cx, block);
        }
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).fragmentation_permille(order(12)), 0);
        assert_eq!(frames.stats(&cx).extents(order(9)), 8);
    });
}

/// What lies high is not handed out again while there is room below: not from a cache, and not from the holes of a higher
/// 1 GiB either, unless one is just as large as a larger block.
#[test]
#[cfg_attr(miri, ignore = "more than a gibibyte of descriptors")]
fn low_memory_is_used_first() {
    with_one_arena(GIB, GIB + 4096, 1, |frames, threads| {
        let cx = threads.cx();
        let mut blocks: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok()).collect();
        blocks.sort_by_key(|block| block.pfn());
        let (high, low) = (blocks.pop().expect("some"), blocks.remove(0));
        let (high_extent, low_extent) = (high.extent(), low.extent());
        frames.free(&cx, low);
        frames.drain(&cx);
        let first = frames.alloc(&cx, request(0)).expect("memory");
        assert!(low_extent.contains(first.pfn()));
        // Freed last, but high: the cache does not hand it out again.
        let mut pages = frames.split(high, Order::ZERO);
        frames.free(&cx, pages.pop().expect("a page"));
        let mut held = vec![first];
        for _ in 0..100 {
            let page = frames.alloc(&cx, request(0)).expect("memory");
            assert!(low_extent.contains(page.pfn()), "{page:?}");
            held.push(page);
        }
        // Holes in the second 1 GiB, a whole 2 MiB in the first: that is divided.
        let kept = pages.pop().expect("a page");
        frames.free_extent(&cx, pages.into_dirty());
        held.drain(..).for_each(|page| frames.free(&cx, page));
        frames.drain(&cx);
        let block = frames.alloc(&cx, request(3)).expect("memory");
        assert!(low_extent.contains(block.pfn()) && !high_extent.contains(block.pfn()), "{block:?}");
        frames.free(&cx, block);
        frames.drain(&cx);
        // A hole that is filled by just one block of an order that is never cached is worth more than a fresh 2 MiB.
        let exact = frames.alloc(&cx, request(4)).expect("memory");
        assert!(high_extent.contains(exact.pfn()), "{exact:?}");
        frames.free(&cx, exact);
        frames.free(&cx, kept);
        blocks.into_iter().for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).blocks[18], 1);
    });
}

/// Several 2 MiB blocks of a cache, from different words and regions, refused ones among them, reach the node as they are.
#[test]
#[cfg_attr(miri, ignore = "more than a gibibyte of descriptors")]
fn cached_2_mib_blocks_come_back_whole() {
    with_one_arena(GIB, 2 * GIB, 1, |frames, threads| {
        let cx = threads.cx();
        let mut blocks: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok()).collect();
        assert_eq!(blocks.len(), 1024);
        // Every second one, from all over the place: no two of them adjoin.
        let poisoned = blocks[700].pfn();
        let (even, odd): (Vec<_>, Vec<_>) = blocks.drain(..).partition(|block| block.pfn().number() / 512 % 2 == 0);
        even.into_iter().rev().for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        let stats = frames.stats(&cx);
        assert_eq!((stats.blocks[9], stats.free), (512, 512 * 512));
        frames.poison(&cx, poisoned);
        odd.into_iter().for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        let stats = frames.stats(&cx);
        assert_eq!((stats.refused, stats.available()), (1, 2 * GIB - 1));
        assert_eq!((stats.blocks[18], stats.extents(order(9))), (1, 1023));
    });
}

/// C17 in small, and what a claim does with what is in the way.
#[test]
fn claims_take_migrate_or_roll_back() {
    with_one_arena(0, 4096, 1, |frames, threads| {
        let mut cx = threads.cx();
        let range = extent(1024, 1024);
        let taken = frames.claim(&mut cx, range, &mut NoMigration).expect("free").into_extent();
        assert_eq!(frames.claim(&mut cx, range, &mut NoMigration), Err(ClaimError::InUse(range.base())));
        assert_eq!(frames.stats(&cx).isolated, 0, "rolled back");
        // SAFETY: claimed above.
        frames.free_extent(&cx, unsafe { Dirty::assume_owned(taken) });
        assert_eq!(frames.stats(&cx).blocks[12], 1);
        assert_eq!(frames.claim(&mut cx, extent(1, 512), &mut NoMigration), Err(ClaimError::Misaligned));
        assert_eq!(frames.claim(&mut cx, extent(4096, 512), &mut NoMigration), Err(ClaimError::NotManaged));
        // A page in use, a page in the cache.
        let mut held = Some(frames.alloc(&cx, request(0).movable()).expect("memory"));
        let at = held.as_ref().map(|b| b.pfn()).expect("held");
        let around = Extent::block(at, order(9));
        assert!(frames.claim(&mut cx, around, &mut NoMigration).is_err());
        let mut migrate = |_: &mut CpuCx<'_, Threads>, block: Extent| {
            assert!(block.contains(at));
            held.take().map(|b| frames.free(&threads.cx(), b)).is_some()
        };
        let taken = frames.claim(&mut cx, around, &mut migrate).expect("migrated");
        assert_eq!(taken.extent(), around);
        frames.free_extent(&cx, taken);
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).blocks[12], 1);
    });
}

/// Nothing waits: what cannot be freed at once is queued and counted, and freed by whoever has the lock next.
#[test]
fn nothing_is_lost_by_not_waiting() {
    with_one_arena(0, 1024, 1, |frames, threads| {
        let cx = threads.cx();
        let block = frames.alloc_nowait(request(3)).expect("nobody holds the lock");
        frames.free_nowait(block);
        assert_eq!(frames.alloc_nowait(request(18)), Err(AllocError::OutOfMemory));
        assert_eq!(frames.stats(&cx).free, 1024);
    });
}

/// Descriptors of tails may be anything, and are never written: here they do not even exist for all but the first
/// frame of each 2 MiB while it is allocated as one block.
#[test]
fn tails_are_dont_care() {
    let pages = 2048_usize;
    let mut descriptors: Vec<Descriptor> = (0..pages).map(|_| Descriptor::default()).collect();
    let spec = ArenaSpec { descriptors: NonNull::new(descriptors.as_mut_ptr()), ..arena(0, pages as u64, 0) };
    let arenas = [spec];
    let config = Config { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, pages as u64));
    let threads = Threads::default();
    Threads::run_as(0);
    let cx = threads.cx();
    let garbage = 0xdead_beef_dead_beef;
    let held: Vec<Frozen> = (0..4).map(|_| frames.alloc(&cx, request(9)).expect("memory")).collect();
    for block in &held {
        for tail in block.extent().base().number() + 1..block.extent().end().number() {
            for word in 0..8 {
                frames.descriptor(Pfn::new(tail)).expect("managed").store(word, garbage);
            }
        }
    }
    // Freed, merged, allocated as one, freed in part: all without a look at a tail.
    for block in held {
        frames.free(&cx, block);
    }
    frames.drain(&cx);
    let whole = frames.alloc(&cx, request(11)).expect("merged");
    let counted = frames.count(whole).expect("fresh");
    assert_eq!(frames.put(&cx, counted), Ok(Put::Last));
    for tail in (0..pages as u64).filter(|tail| tail % 512 != 0) {
        assert_eq!(frames.descriptor(Pfn::new(tail)).expect("managed").load(3), garbage, "tail {tail} was written");
    }
    // Nor does a split write any: what the heads that it makes say is their owner's business, as after an allocation.
    let run = frames.split(frames.alloc(&cx, request(9)).expect("memory"), Order::ZERO);
    for frame in run.extent().base().number() + 1..run.extent().end().number() {
        assert_eq!(frames.descriptor(Pfn::new(frame)).expect("managed").load(3), garbage, "page {frame} was written");
    }
    frames.free_extent(&cx, run.into_dirty());
}

#[test]
fn chains_of_extents_live_in_descriptors() {
    with_one_arena(0, 2048, 1, |frames, threads| {
        let cx = threads.cx();
        let mut chain = ExtentChain::new();
        for _ in 0..100 {
            let block = frames.alloc(&cx, request(2)).expect("memory");
            chain.push(frames, block.into_dirty().into_extent());
        }
        assert_eq!(chain.pages(), 400);
        while let Some(extent) = chain.pop(frames) {
            // SAFETY: on the chain, hence owned.
            frames.free_extent(&cx, unsafe { Dirty::assume_owned(extent) });
        }
        assert_eq!(frames.stats(&cx).available(), 2048);
    });
}

#[test]
fn pressure_is_asked_with_nothing_locked() {
    struct Hoard<'a, 'm>(&'a Frames<'m, Plain<NoFaults>>, RefCell<Vec<Frozen>>);
    impl Pressure<Threads> for Hoard<'_, '_> {
        fn relieve(&self, cx: &mut CpuCx<'_, Threads>, need: Shortfall) -> u64 {
            assert_eq!((need.order, need.pages, need.node), (Order::ZERO, 1, None));
            // Would wait for ever if a lock were held.
            self.1.borrow_mut().pop().map_or(0, |block| {
                self.0.free(cx, block);
                1
            })
        }
    }
    with_one_arena(0, 512, 1, |frames, threads| {
        let mut cx = threads.cx();
        let mut held = Vec::new();
        while let Ok(block) = frames.alloc(&cx, request(0)) {
            held.push(block);
        }
        let hoard = Hoard(frames, RefCell::new(held));
        let block = frames.alloc_or_relieve(&mut cx, request(0), &hoard).expect("relieved");
        frames.free(&cx, block);
        for block in hoard.1.take() {
            frames.free(&cx, block);
        }
        assert_eq!(frames.stats(&cx).available(), 512);
    });
}

/// Frames with bytes: 4 KiB each, from a vector.
struct Bytes(Vec<Page>);

#[repr(C, align(4096))]
struct Page(std::cell::UnsafeCell<[u8; 4096]>);

// SAFETY: every frame's window is its own page of the vector, which lives as long as the map.
unsafe impl PhysMap for Bytes {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        let page = self.0.get(extent.base().number() as usize)?;
        Some(Window { ptr: page.0.get().cast(), pages: 1 })
    }
}

#[test]
fn slabs_take_and_give_frames_and_never_overlap() {
    with_one_arena(0, 64, 1, |frames, threads| {
        let cx = threads.cx();
        let map = Bytes((0..64).map(|_| Page(std::cell::UnsafeCell::new([0; 4096]))).collect());
        assert!(Slab::<hugemm_base::lock::SpinLock>::new(4096, 8).is_none());
        assert!(Slab::<hugemm_base::lock::SpinLock>::new(8, 3).is_none());
        for (size, align) in [(1, 1), (24, 8), (64, 64), (100, 4), (1000, 8), (2000, 16), (4032, 64)] {
            let slab: Slab = Slab::new(size, align).expect("fits");
            let mut held: Vec<NonNull<u8>> = Vec::new();
            while let Ok(object) = slab.alloc(frames, &cx, &map) {
                assert_eq!(object.as_ptr().addr() % align, 0);
                // SAFETY: the object is `size` bytes of ours.
                unsafe { object.write_bytes(held.len() as u8, size) };
                held.push(object);
                if held.len() == if cfg!(miri) { 9 } else { 3000 } {
                    break;
                }
            }
            let stats = slab.stats(&cx);
            assert_eq!(stats.objects, held.len() as u64);
            assert_eq!(stats.frames, stats.objects.div_ceil(slab.per_frame().into()));
            for (index, object) in held.iter().enumerate() {
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts(object.as_ptr(), size) };
                assert!(bytes.iter().all(|b| *b == index as u8), "objects overlap");
            }
            // In an order that is neither first nor last in, first out.
            while !held.is_empty() {
                let object = held.swap_remove(held.len() * 7 % held.len().max(1) / 2);
                // SAFETY: ours, once.
                unsafe { slab.free(frames, &cx, &map, object) };
            }
            assert_eq!(slab.stats(&cx).frames, 1, "one is kept");
            // SAFETY: the only manager and map.
            unsafe { slab.trim(frames, &cx, &map) };
            assert_eq!(slab.stats(&cx).frames, 0);
            assert_eq!(frames.stats(&cx).available(), 64);
        }
    });
}

/// X4: every place where an allocation can fail, failed in turn; each time everything is there afterwards.
#[test]
fn every_allocation_point_can_fail() {
    let runs = every_fault(|plan: &FaultPlan| {
        let arenas = [arena(0, 1024, 0)];
        let config = Config { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
        let memory = Memory::for_config(&config);
        let frames = memory.manager(&config, plan);
        release(&frames, extent(0, 1024));
        let threads = Threads::default();
        Threads::run_as(0);
        let mut cx = threads.cx();
        let map = Bytes((0..1024).map(|_| Page(std::cell::UnsafeCell::new([0; 4096]))).collect());
        let zeroer = CountingZeroer::new();
        let slab: Slab = Slab::new(100, 4).expect("fits");
        let mut blocks = Vec::new();
        blocks.extend(frames.alloc(&cx, request(0)).ok());
        blocks.extend(frames.alloc(&cx, request(5).movable()).ok());
        blocks.extend(frames.alloc_zeroed(&mut cx, request(3), &zeroer).ok());
        blocks.extend(frames.alloc_nowait(request(1)).ok());
        let object = slab.alloc(&frames, &cx, &map).ok();
        let exact = frames.claim_exact(&cx, extent(1000, 10)).ok();
        let claimed = frames.claim(&mut cx, extent(512, 512), &mut NoMigration).ok();
        for block in blocks {
            frames.free(&cx, block);
        }
        if let Some(object) = object {
            // SAFETY: ours, once.
            unsafe { slab.free(&frames, &cx, &map, object) };
        }
        // SAFETY: the only manager and map.
        unsafe { slab.trim(&frames, &cx, &map) };
        for dirty in exact.into_iter().chain(claimed) {
            frames.free_extent(&cx, dirty);
        }
        frames.drain(&cx);
        let stats = frames.stats(&cx);
        assert_eq!(stats.free, 1024, "{stats:?}");
        assert_eq!(stats.blocks[10], 1, "{stats:?}");
        let _ = Mobility::ALL;
    });
    assert_eq!(runs, 8, "seven points, and the run in which none fails");
}

/// A folio that becomes frozen again is what it was allocated for, however large it is.
#[test]
fn a_count_keeps_the_mobility() {
    with_one_arena(0, 4096, 1, |frames, threads| {
        let cx = threads.cx();
        for order in [0, 3, 9, 10] {
            for wanted in [request(order), request(order).movable()] {
                let block = frames.alloc(&cx, wanted).expect("memory");
                let pfn = frames.count(block).expect("frozen");
                let block = frames.freeze(pfn).expect("counted").expect("alone");
                assert_eq!(block.mobility(), wanted.mobility, "order {order}");
                frames.free(&cx, block);
            }
        }
    });
}

/// What a claim has isolated is free and yet not to be had, though it lies lowest and other blocks of its kind are free.
#[test]
fn isolated_blocks_are_not_allocated() {
    with_one_arena(0, 2048, 1, |frames, threads| {
        let cx = threads.cx();
        let held: Vec<Frozen> = (0..4).map(|_| frames.alloc(&cx, request(9)).expect("memory")).collect();
        // The first of the two that are claimed is free, the second in use until it is migrated.
        let mut left: Vec<Option<Frozen>> = held.into_iter().map(Some).collect();
        left.sort_by_key(|block| block.as_ref().map(|block| block.pfn()));
        frames.free(&cx, left[0].take().expect("held"));
        frames.free(&cx, left[3].take().expect("held"));
        frames.drain(&cx);
        let mut claimer = threads.cx();
        let mut got = None;
        let mut migrate = |_: &mut CpuCx<'_, Threads>, _: Extent| {
            // Twice: one is free elsewhere, and the isolated one is not given instead of the other.
            got = frames.alloc(&cx, request(9)).ok();
            assert_eq!(frames.alloc(&cx, request(9)), Err(AllocError::OutOfMemory));
            frames.free(&cx, left[1].take().expect("in use"));
            true
        };
        let claimed = frames.claim(&mut claimer, extent(0, 1024), &mut migrate).expect("emptied");
        assert_eq!(got.as_ref().map(|block| block.pfn()), Some(Pfn::new(1536)));
        frames.free_extent(&cx, claimed);
        for block in [got, left[2].take()].into_iter().flatten() {
            frames.free(&cx, block);
        }
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).extents(order(11)), 1);
    });
}

/// Pages that two CPUs take by turns have their references on different lines, also where memory has holes; and where
/// nothing else is left, they share.
#[test]
fn two_cpus_fill_their_caches_from_different_chunks() {
    let arenas = [arena(0, 4096, 0)];
    let config = Config { arenas: &arenas, cpus: 2, cpu_nodes: &[] };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, 4096));
    let threads = Threads::default();
    let cx = threads.cx();
    let mut held: [Vec<Frozen>; 2] = [Vec::new(), Vec::new()];
    let chunks = |held: &[Vec<Frozen>; 2]| -> [std::collections::BTreeSet<u64>; 2] {
        [0, 1].map(|cpu| held[cpu].iter().map(|block| block.pfn().number() >> 8).collect())
    };
    let take = |held: &mut [Vec<Frozen>; 2], count: usize| {
        for step in 0..count {
            for (cpu, held) in held.iter_mut().enumerate() {
                Threads::run_as(cpu as u32);
                held.push(frames.alloc(&cx, request(step as u32 % 4)).expect("memory"));
            }
        }
    };
    take(&mut held, 40);
    let [zero, one] = chunks(&held);
    assert!(zero.is_disjoint(&one), "{zero:?} {one:?}");
    // Both 2 MiB in use stay few: a CPU goes on where it was.
    assert!(zero.len() + one.len() <= 4, "{zero:?} {one:?}");
    // All of the memory can be had.
    let mut rest = Vec::new();
    for cpu in [0, 1, 0, 1] {
        Threads::run_as(cpu);
        rest.extend(std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()));
    }
    let pages: u64 = held.iter().flatten().chain(&rest).map(|block| block.order().pages()).sum();
    let cached = frames.stats(&cx).cached;
    assert_eq!(pages + cached, 4096);
    held.into_iter().flatten().chain(rest).for_each(|block| frames.free(&cx, block));
}
