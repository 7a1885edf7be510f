//! One large clear on several CPUs: who clears what, that everything is cleared once, and what is left when it ends
//! early.

use crate::support::host::{alone, places};
use crate::support::memory::Memory;
use crate::support::{BASE, BULK, Event, PAGE, Script, clearer, extent, span};
use hugemm_base::{
    Cancel, CancelFlag, Clearing, CpuCx, CpuId, Dirty, Extent, Never, NodeId, PreemptModel, Topology, VirtAddr,
};
use hugemm_clear::{Lane, Outcome, ParallelClear, StopReason, Unit};
use hugemm_host::cpu::{CpuPlace, Host};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of a piece.
const PIECE: u64 = 4096;

/// Three pieces and a bit.
const PAGES: u64 = 3 * PIECE + 100;

/// Memory for one test at a time.
struct Arena {
    memory: Memory,
    _alone: MutexGuard<'static, ()>,
}

impl Arena {
    fn new(pages: u64) -> Self {
        Arena::with(|| Memory::heap(pages))
    }

    fn with(memory: impl FnOnce() -> Memory) -> Self {
        let _alone = alone();
        Arena { memory: memory(), _alone }
    }

    /// A machine whose virtual CPU `n` is on node `nodes[n]`, under a cooperative model.
    fn host(&mut self, nodes: &[u32]) -> Host<'_> {
        let on_nodes = places(nodes.len()).into_iter().zip(nodes);
        let places: Vec<_> = on_nodes.map(|(place, node)| CpuPlace { node: NodeId::new(*node), ..place }).collect();
        let host = Host::new(&places, self.memory.bytes()).expect("a machine").strict();
        host.set_preempt_model(PreemptModel::None);
        host
    }
}

/// Frames that change node at each of these page indices, between node 0 and node 1.
struct Borders<'b>(&'b [u64]);

impl Topology for Borders<'_> {
    fn node_of_cpu(&self, _cpu: CpuId) -> NodeId {
        NodeId::new(0)
    }

    fn node_run(&self, run: Extent) -> (NodeId, u64) {
        let from = run.base().get() - BASE.get();
        let passed = self.0.iter().filter(|border| **border <= from).count();
        (NodeId::new(passed as u32 % 2), self.0.get(passed).map_or(u64::MAX, |border| border - from))
    }
}

fn own(pages: u64) -> Dirty {
    // SAFETY: the tests own their arena's frames and look at them only when no clear is running.
    unsafe { Dirty::assume_owned(extent(0, pages)) }
}

fn empty_lanes<const N: usize>() -> [Lane; N] {
    std::array::from_fn(|_| Lane::empty())
}

/// Works on every CPU at once; what each worker cleared, in its order.
fn work(host: &Host<'_>, clear: &ParallelClear<'_>, cpus: u32, cancel: &(impl Cancel + Sync)) -> Vec<Vec<(u64, u64)>> {
    let worker = |cx: &mut CpuCx<'_, Host<'_>>| {
        let mut mine = Vec::new();
        // A worker that is cancelled or finds everything taken says so; the outcome is what the tests look at.
        let _ = clear.work(cx, &clearer(1024), &BULK, cancel, &mut |unit: &Unit| mine.push(span(unit)));
        mine
    };
    host.run_on_each((0..cpus).map(CpuId::new), worker).expect("the CPUs exist")
}

/// Whether the spans cover `pages` pages without overlap.
fn tile(mut spans: Vec<(u64, u64)>, pages: u64) -> bool {
    spans.sort_unstable();
    let end = spans.iter().try_fold(0, |at, (from, to)| (at == *from).then_some(*to));
    end == Some(pages)
}

#[test]
fn every_byte_is_cleared_once_on_one_to_four_cpus() {
    let mut arena = Arena::new(PAGES);
    for cpus in 1..=4 {
        arena.memory.dirty(0..PAGES);
        let host = arena.host(&vec![0; cpus as usize]);
        let mut lanes = empty_lanes::<1>();
        let clear = ParallelClear::new(own(PAGES), &mut lanes, &host).expect("a lane");
        let units = work(&host, &clear, cpus, &Never).concat();
        let Outcome::Zeroed(zeroed) = clear.finish() else { panic!("not zeroed on {cpus} CPUs") };
        assert_eq!(zeroed.into_extent(), extent(0, PAGES));
        assert!(tile(units, PAGES), "on {cpus} CPUs");
        let counted = host.counters_sum();
        assert_eq!(counted.bytes_bulk + counted.bytes_cached, PAGES * PAGE);
        assert_eq!((counted.clears_bulk, counted.units, counted.fences), (4, 13, 13));
        drop(host);
        assert!(arena.memory.zero(0..PAGES), "on {cpus} CPUs");
    }
}

#[test]
fn a_worker_clears_its_own_node_first() {
    let mut arena = Arena::new(PAGES);
    let borders = Borders(&[PIECE, 2 * PIECE]);
    // The middle run is on node 1, the others on node 0.
    let middle = |(from, to): &(u64, u64)| PIECE <= *from && *to <= 2 * PIECE;
    for home in [0, 1] {
        let host = arena.host(&[home]);
        let mut lanes = empty_lanes::<3>();
        let clear = ParallelClear::new(own(PAGES), &mut lanes, &borders).expect("lanes");
        let units = work(&host, &clear, 1, &Never).concat();
        assert!(matches!(clear.finish(), Outcome::Zeroed(_)));
        let own_first = units.iter().map(|unit| middle(unit) == (home == 1));
        assert!(own_first.is_sorted_by_key(|own| !own), "home {home}: {units:?}");
        assert!(tile(units, PAGES));
    }
    assert!(arena.memory.zero(0..PAGES));
}

/// Nobody touches the other node's frames while there are own ones left. Node 0 has so few that its workers help.
#[test]
fn workers_help_the_other_node_last() {
    let mut arena = Arena::with(|| Memory::repeated(16 * PIECE, 512));
    let host = arena.host(&[0, 1, 0, 1]);
    let border = 2 * PIECE;
    let mut lanes = empty_lanes::<2>();
    let clear = ParallelClear::new(own(16 * PIECE), &mut lanes, &Borders(&[border])).expect("lanes");
    let workers = work(&host, &clear, 4, &Never);
    assert!(matches!(clear.finish(), Outcome::Zeroed(_)));
    for (cpu, units) in workers.iter().enumerate() {
        let own = units.iter().map(|(from, _)| (*from < border) == (cpu % 2 == 0));
        assert!(own.is_sorted_by_key(|own| !own), "cpu {cpu}: {units:?}");
    }
    assert!(tile(workers.concat(), 16 * PIECE));
}

#[test]
fn the_last_lane_takes_the_runs_that_have_none() {
    let mut arena = Arena::new(PAGES);
    let borders = Borders(&[100, 200, 5000, 6000]);
    let host = arena.host(&[0, 1]);
    let cancelled = CancelFlag::new();
    cancelled.raise();
    let mut lanes = empty_lanes::<2>();
    let clear = ParallelClear::new(own(PAGES), &mut lanes, &borders).expect("lanes");
    work(&host, &clear, 2, &cancelled);
    let Outcome::Partly(parts) = clear.finish() else { panic!("cancelled before the first piece") };
    let parts: Vec<_> = parts.map(|part| (part.extent(), part.remaining())).collect();
    assert_eq!(parts, [(extent(0, 100), 100), (extent(100, PAGES), PAGES - 100)]);

    let clear = ParallelClear::new(own(PAGES), &mut lanes, &borders).expect("lanes");
    let units = work(&host, &clear, 2, &Never).concat();
    assert!(matches!(clear.finish(), Outcome::Zeroed(_)));
    assert!(tile(units, PAGES));
}

#[test]
fn without_lanes_the_frames_are_handed_back() {
    let host = Script::new(Memory::heap(1));
    let dirty = ParallelClear::new(own(1), &mut [], &host).expect_err("no lanes");
    assert_eq!(dirty.into_extent(), extent(0, 1));
    let mut lanes = empty_lanes::<1>();
    let nothing = ParallelClear::new(own(0), &mut lanes, &host).expect("a lane");
    assert!(matches!(nothing.finish(), Outcome::Zeroed(zeroed) if zeroed.extent().is_empty()));
}

/// Each lane comes back with a zero prefix and an untouched rest, and going on stores to the rest only.
#[test]
fn a_cancelled_clear_leaves_exact_prefixes() {
    let mut arena = Arena::new(PAGES);
    let host = arena.host(&[0, 1]);
    let cancel = CancelFlag::new();
    let mut lanes = empty_lanes::<2>();
    let border = PIECE + 7;
    let clear = ParallelClear::new(own(PAGES), &mut lanes, &Borders(&[border])).expect("lanes");
    let units = AtomicU64::new(0);
    let worker = |cx: &mut CpuCx<'_, Host<'_>>| {
        let mut observer = |_: &Unit| {
            // Relaxed: a count. Raised in the middle of somebody's piece.
            if units.fetch_add(1, Ordering::Relaxed) == 2 {
                cancel.raise();
            }
        };
        clear.work(cx, &clearer(1024), &BULK, &cancel, &mut observer)
    };
    let ended = host.run_on_each([CpuId::new(0), CpuId::new(1)], worker).expect("the CPUs exist");
    assert!(ended.contains(&Err(StopReason::Cancelled)));
    let Outcome::Partly(parts) = clear.finish() else { panic!("cancelled half way") };
    let parts: Vec<Clearing> = parts.collect();
    assert_eq!(parts.iter().map(Clearing::extent).collect::<Vec<_>>(), [extent(0, border), extent(border, PAGES)]);
    let remaining: u64 = parts.iter().map(Clearing::remaining).sum();
    assert!((1..PAGES).contains(&remaining), "{remaining}");
    let counted = host.counters_sum();
    assert_eq!(counted.bytes_bulk, (PAGES - remaining) * PAGE);
    let progress: Vec<_> = parts
        .iter()
        .map(|part| {
            let from = part.extent().base().get() - BASE.get();
            let to = from + part.extent().pages();
            (from..to - part.remaining(), to - part.remaining()..to)
        })
        .collect();
    let zero = |pages: &std::ops::Range<u64>, byte| {
        let base = host.address(extent(0, 1).base()).expect("memory").as_ptr();
        let bytes = (pages.end - pages.start) * PAGE;
        let word = u64::from_ne_bytes([byte; 8]);
        // SAFETY: within the memory, initialised; the workers have returned.
        unsafe { crate::support::memory::words_are(base.add((pages.start * PAGE) as usize), bytes as usize, word) }
    };
    for (done, rest) in progress {
        assert!(zero(&done, 0) && zero(&rest, 0xA5), "{done:?} {rest:?}");
    }

    for part in parts {
        let zeroed =
            host.run_on(CpuId::new(0), |cx| clearer(1024).clear(cx, part, &BULK, &Never)).expect("the CPU exists");
        assert!(zeroed.is_ok());
    }
    assert_eq!(host.counters_sum().bytes_bulk, PAGES * PAGE);
    drop(host);
    assert!(arena.memory.zero(0..PAGES));
}

#[test]
fn an_unreachable_frame_leaves_everything_dirty() {
    let mut arena = Arena::new(PAGES);
    let host = arena.host(&[0, 0]);
    let mut lanes = empty_lanes::<1>();
    let clear = ParallelClear::new(own(PAGES + PIECE), &mut lanes, &host).expect("a lane");
    let worker = |cx: &mut CpuCx<'_, Host<'_>>| clear.work(cx, &clearer(1024), &BULK, &Never, &mut ());
    let ended = host.run_on_each([CpuId::new(0), CpuId::new(1)], worker).expect("the CPUs exist");
    let first_missing = extent(PAGES, PAGES + 1).base();
    assert!(ended.contains(&Err(StopReason::Unreachable(first_missing))), "{ended:?}");
    let Outcome::Dirty(dirty) = clear.finish() else { panic!("the last piece cannot be zero") };
    assert_eq!(dirty.into_extent(), extent(0, PAGES + PIECE));
    assert_eq!(host.counters_sum().fences_on_drop, 0);
}

/// A worker that unwinds in the middle of a piece leaves a hole that nobody may take for zero.
#[test]
fn a_worker_that_panics_leaves_everything_dirty() {
    let mut arena = Arena::new(PIECE);
    let host = arena.host(&[0]);
    let mut lanes = empty_lanes::<1>();
    let clear = ParallelClear::new(own(PIECE), &mut lanes, &host).expect("a lane");
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        host.run_on(CpuId::new(0), |cx| {
            clear.work(cx, &clearer(1024), &BULK, &Never, &mut |_: &Unit| panic!("planned")).is_ok()
        })
    }));
    assert!(unwound.is_err());
    assert!(matches!(clear.finish(), Outcome::Dirty(_)));
}

#[test]
fn a_worker_that_may_not_sleep_says_so() {
    let script = Script::new(Memory::heap(4));
    script.may_sleep.set(false);
    let mut lanes = empty_lanes::<1>();
    let clear = ParallelClear::new(script.dirty(), &mut lanes, &script).expect("a lane");
    let ended = script.run(|cx| clear.work(cx, &clearer(1), &BULK, &Never, &mut ()));
    assert_eq!(ended, Err(StopReason::MayNotSleep));
    // It took no piece, so what it did is known: nothing.
    let Outcome::Partly(mut parts) = clear.finish() else { panic!("neither zero nor unknown") };
    let rest = parts.next().expect("the lane");
    assert_eq!((rest.extent(), rest.remaining()), (extent(0, 4), 4));
    assert!(script.memory.untouched(0..4));
}

/// Pieces are cleared like any extent: by unit, fenced, and with their user addresses.
#[test]
fn pieces_keep_units_fences_and_user_addresses() {
    let script = Script::new(Memory::repeated(2 * PIECE, 512));
    let mut lanes = empty_lanes::<1>();
    let clear = ParallelClear::new(script.dirty(), &mut lanes, &script).expect("a lane");
    let seen_at = BULK.seen_at(VirtAddr::new(0x7f00_0000_0000));
    assert_eq!(script.run(|cx| clear.work(cx, &clearer(2048), &seen_at, &Never, &mut ())), Ok(()));
    assert!(matches!(clear.finish(), Outcome::Zeroed(_)));
    let unit = |page| {
        let user = Some(0x7f00_0000_0000 + page * PAGE);
        [Event::Reschedule, Event::Open { page, pages: 2048, user }, Event::Close(page), Event::Fence]
    };
    assert_eq!(script.events(), [unit(0), unit(2048), unit(4096), unit(6144)].concat());
}
