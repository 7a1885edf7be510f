//! Worker, direct reclaim and swap together, over a space of pages that knows its own mappings: a data oracle under
//! pressure, on several threads, with failing allocations.
#![cfg(not(loom))]

mod support;

use hugemm_base::inject::{FaultPlan, Inject, NoFaults};
use hugemm_base::{Cancel, CancelFlag, CpuCx, Never, NoPressure, NodeId, Order, Pfn, Pressure, Shortfall};
use hugemm_frames::{AllocRequest, FolioRef, Frames, Frozen, Plain, Put};
use hugemm_reclaim::{
    Age, Compressed, DirectReclaim, Folio, Lru, LruPolicy, LruStats, Neighbours, NodeReclaim, Reclaimer, ShrinkBudget,
    ShrinkProgress, StoreError, Swap, SwapSlot, Turn, Wake, Watermarks, WriteError, shrink,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use support::{CPUS, Content, Machine, Rng, Runs, assert_nothing_lost, machine, run_as, with_frames};

/// The word of a head's descriptor that is its owner's: which page of the space it is, plus 1.
const INDEX: usize = 5;

enum Entry {
    Empty,
    /// Mapped, with a reference; and the accessed bit.
    Present {
        pfn: Pfn,
        young: bool,
    },
    /// Unhooked before this many flushes had started; whoever touches it waits.
    Detached {
        pfn: Pfn,
        flushes: u64,
    },
    Swapped(SwapSlot),
}

struct Page {
    entry: Entry,
    content: Content,
    locked: bool,
}

/// A space of single pages with an oracle of what is in them.
struct Space<'f, 'm, I: Inject> {
    machine: &'f Machine,
    frames: &'f Frames<'m, Plain<I>>,
    lru: &'f Lru<'f, 'm, Plain<I>>,
    store: Compressed<'f, 'm, Plain<I>, Runs>,
    pages: Vec<Mutex<Page>>,
    flushes: AtomicU64,
    /// Whether writing out fails as if swap were full.
    jam: AtomicBool,
    look_around: bool,
}

struct Flushed(u64);

impl<'f, 'm, I: Inject> Space<'f, 'm, I> {
    fn new(
        machine: &'f Machine,
        frames: &'f Frames<'m, Plain<I>>,
        lru: &'f Lru<'f, 'm, Plain<I>>,
        pages: usize,
        limit: u64,
    ) -> Self {
        let store = Compressed::new(frames, &machine.cx(), Runs, CPUS, limit).expect("memory for work");
        let page = || Mutex::new(Page { entry: Entry::Empty, content: Content { random: 0, seed: 0 }, locked: false });
        Space {
            machine,
            frames,
            lru,
            store,
            pages: (0..pages).map(|_| page()).collect(),
            flushes: AtomicU64::new(0),
            jam: AtomicBool::new(false),
            look_around: true,
        }
    }

    fn page(&self, index: usize) -> MutexGuard<'_, Page> {
        self.pages[index].lock().expect("alive")
    }

    /// The page that a mapped or unhooked folio is.
    fn of(&self, head: Pfn) -> (usize, MutexGuard<'_, Page>) {
        let index = self.frames.descriptor(head).expect("managed").load(INDEX) as usize - 1;
        (index, self.page(index))
    }

    /// Bytes of a frame that the caller has mapped, under the page's lock.
    fn check(&self, pfn: Pfn, content: Content) {
        // SAFETY: mapped here, and the lock of its page is held: nobody writes to it.
        let mut view = unsafe { Frozen::assume_owned(pfn, Order::ZERO, hugemm_frames::Mobility::Unmovable) };
        content.assert_in(self.machine.page(&mut view));
        let _ = view.into_dirty().into_extent();
    }

    /// Touches a page as a task would, faulting it in; false if there is no memory for it. Checks what is in it, and
    /// writes something else if `write` says what.
    fn touch(
        &self,
        cx: &mut CpuCx<'_, Machine>,
        index: usize,
        write: Option<Content>,
        pressure: &impl Pressure<Machine>,
    ) -> bool {
        loop {
            {
                let mut page = self.page(index);
                match &mut page.entry {
                    Entry::Present { pfn, young } => {
                        *young = true;
                        let pfn = *pfn;
                        self.check(pfn, page.content);
                        if let Some(content) = write {
                            // SAFETY: mapped here; the page's lock is held.
                            let mut view =
                                unsafe { Frozen::assume_owned(pfn, Order::ZERO, hugemm_frames::Mobility::Unmovable) };
                            content.write(self.machine.page(&mut view));
                            let _ = view.into_dirty().into_extent();
                            page.content = content;
                        }
                        return true;
                    }
                    Entry::Detached { .. } => {
                        drop(page);
                        std::thread::yield_now();
                        continue;
                    }
                    Entry::Empty | Entry::Swapped(_) => {}
                }
            }
            let Ok(mut block) = self.frames.alloc_or_relieve(cx, AllocRequest::order(Order::ZERO).movable(), pressure)
            else {
                return false;
            };
            let mut page = self.page(index);
            match std::mem::replace(&mut page.entry, Entry::Empty) {
                Entry::Empty => page.content.write(self.machine.page(&mut block)),
                Entry::Swapped(slot) => {
                    self.store.load(cx, &slot, &mut block, 0).expect("stored");
                    self.store.free(cx, slot).expect("held");
                }
                entry => {
                    // Somebody else was faster.
                    page.entry = entry;
                    self.frames.free(cx, block);
                    continue;
                }
            }
            self.frames.descriptor_mut(&mut block).expect("managed").store(INDEX, index as u64 + 1);
            let pfn = self.frames.count(block).expect("managed").into_pfn();
            self.lru.leave_out(pfn);
            page.entry = Entry::Present { pfn, young: true };
            self.lru.insert(cx, &[(pfn, Order::ZERO)]);
        }
    }

    /// Unmaps a page for good, as its owner; its content is lost.
    fn discard(&self, cx: &CpuCx<'_, Machine>, index: usize) {
        loop {
            let mut page = self.page(index);
            match std::mem::replace(&mut page.entry, Entry::Empty) {
                Entry::Empty => {}
                Entry::Swapped(slot) => self.store.free(cx, slot).expect("held"),
                Entry::Present { pfn, .. } => {
                    self.lru.remove(cx, pfn);
                    // SAFETY: the entry's reference.
                    let _ = self.frames.put(cx, unsafe { FolioRef::from_pfn(pfn) }).expect("mapped");
                }
                detached @ Entry::Detached { .. } => {
                    page.entry = detached;
                    drop(page);
                    std::thread::yield_now();
                    continue;
                }
            }
            return;
        }
    }

    fn age_one(&self, folio: &Folio, neighbours: &mut Neighbours) -> Age {
        let index = {
            let (index, mut page) = self.of(folio.pfn);
            let locked = page.locked;
            match &mut page.entry {
                Entry::Present { pfn, young } if *pfn == folio.pfn => {
                    if locked {
                        return Age::Keep;
                    }
                    if !std::mem::take(young) {
                        return Age::Idle;
                    }
                }
                _ => return Age::Idle,
            }
            index
        };
        for near in index.saturating_sub(2)..(index + 3).min(self.pages.len()) {
            let mut page = self.page(near);
            if let Entry::Present { pfn, young } = &mut page.entry
                && self.look_around
                && *young
                && neighbours.has_room()
                && self.hold(*pfn)
            {
                *young = false;
                assert!(neighbours.push(*pfn));
            }
        }
        Age::Young
    }

    fn finish(self, cx: &CpuCx<'_, Machine>) {
        (0..self.pages.len()).for_each(|index| self.discard(cx, index));
        let LruStats { folios, isolated, .. } = self.lru.stats(cx);
        assert_eq!((folios, isolated), (0, 0));
        self.store.close(cx).expect("empty");
    }
}

impl<I: Inject> Reclaimer<Machine> for Space<'_, '_, I> {
    type Flushed = Flushed;
    type Unhooked = Pfn;

    fn hold(&self, head: Pfn) -> bool {
        // SAFETY: under the LRU's lock: what is on a list has a reference.
        unsafe { self.frames.get_at(head) }.map(FolioRef::into_pfn).is_ok()
    }

    fn refused(&self, _cx: &CpuCx<'_, Machine>, head: Pfn) {
        panic!("{head:?} has one owner");
    }

    fn release(&self, cx: &CpuCx<'_, Machine>, heads: impl Iterator<Item = Pfn>) {
        for head in heads {
            // SAFETY: the reference that `hold` took.
            let _ = self.frames.put(cx, unsafe { FolioRef::from_pfn(head) }).expect("held");
        }
    }

    fn age(&self, _cx: &mut CpuCx<'_, Machine>, folios: &[Folio], looks: &mut [Age], neighbours: &mut Neighbours) {
        for (folio, look) in folios.iter().zip(looks) {
            *look = self.age_one(folio, neighbours);
        }
    }

    fn unmap(&self, _cx: &mut CpuCx<'_, Machine>, folio: &Folio) -> Option<Pfn> {
        let (_, mut page) = self.of(folio.pfn);
        match page.entry {
            // Touched since the look.
            Entry::Present { pfn, young } if pfn == folio.pfn && !young => {
                page.entry = Entry::Detached { pfn, flushes: self.flushes.load(Ordering::SeqCst) };
                Some(pfn)
            }
            _ => None,
        }
    }

    fn flush(&self, _cx: &mut CpuCx<'_, Machine>) -> Flushed {
        Flushed(self.flushes.fetch_add(1, Ordering::SeqCst) + 1)
    }

    fn write_out(&self, cx: &mut CpuCx<'_, Machine>, head: Pfn, after: &Flushed) -> Result<u64, (WriteError, Pfn)> {
        let (_, mut page) = self.of(head);
        let Entry::Detached { pfn, flushes } = page.entry else { panic!("not unmapped") };
        assert!(pfn == head && after.0 > flushes, "written before the flush");
        if self.jam.load(Ordering::SeqCst) {
            return Err((WriteError::Swap(StoreError::Full), head));
        }
        // The mapping's reference, then reclaim's, must be the only ones.
        // SAFETY: the two references that there are.
        let [mapping, own] = [0; 2].map(|_| unsafe { FolioRef::from_pfn(pfn) });
        assert_ne!(self.frames.put(cx, mapping).expect("held"), Put::Last);
        let again = |own: FolioRef| {
            let _ = self.frames.get(&own).expect("held").into_pfn();
            let _ = own.into_pfn();
        };
        let block = match self.frames.freeze(own) {
            Ok(block) => block,
            Err(own) => {
                again(own);
                return Err((WriteError::InUse, head));
            }
        };
        match self.store.evict(cx, block) {
            Ok(evicted) => {
                page.entry = Entry::Swapped(evicted.slot);
                Ok(evicted.freed.map_or(0, |block| {
                    self.frames.free(cx, block);
                    1
                }))
            }
            Err((error, block)) => {
                again(self.frames.count(block).expect("managed"));
                Err((WriteError::Swap(error), head))
            }
        }
    }

    fn restore(&self, cx: &mut CpuCx<'_, Machine>, head: Pfn, _after: &Flushed) {
        {
            let (_, mut page) = self.of(head);
            assert!(matches!(page.entry, Entry::Detached { pfn, .. } if pfn == head));
            page.entry = Entry::Present { pfn: head, young: false };
        }
        self.release(cx, std::iter::once(head));
    }

    fn available(&self, cx: &CpuCx<'_, Machine>) -> u64 {
        self.frames.node_stats(cx, NodeId(0)).available()
    }
}

const SMALL: Content = Content { random: 40, seed: 0 };

fn small(seed: u32) -> Content {
    Content { seed, ..SMALL }
}

/// A space of `pages` pages over 300 frames, all touched once, without pressure.
fn with_space(policy: LruPolicy, pages: usize, test: impl FnOnce(&mut CpuCx<'_, Machine>, &Space<'_, '_, NoFaults>)) {
    let machine = machine(300, u64::MAX);
    run_as(0);
    with_frames(&machine, NoFaults, |frames| {
        let mut cx = machine.cx();
        let lru = Lru::new(frames, policy);
        let space = Space::new(&machine, frames, &lru, pages, 300);
        for index in 0..pages {
            assert!(space.touch(&mut cx, index, Some(small(index as u32)), &NoPressure));
        }
        test(&mut cx, &space);
        space.finish(&cx);
        assert_nothing_lost(&machine, frames);
    });
}

fn swapped(space: &Space<'_, '_, NoFaults>, index: usize) -> bool {
    matches!(space.page(index).entry, Entry::Swapped(_))
}

/// Idle pages go, used ones stay; one flush per batch and none for ageing; every page comes back as it was.
#[test]
fn a_pass_evicts_what_is_idle() {
    for policy in LruPolicy::ALL {
        with_space(policy, 200, |cx, space| {
            // First look, less than a round: all were just touched. Nothing is evicted, and nothing is flushed.
            let look = shrink(cx, space.lru, space, ShrinkBudget { free: u64::MAX, scan: 160 }, &Never);
            assert_eq!((look.freed, look.flushes, look.failed), (0, 0, 0), "{policy:?} {look:?}");
            assert!(look.young > 0);
            // One in four is used again in every period.
            let mut done = look;
            while done.freed < 100 {
                (0..200).step_by(4).for_each(|index| assert!(space.touch(cx, index, None, &NoPressure)));
                let pass = shrink(cx, space.lru, space, ShrinkBudget { free: 16, scan: 64 }, &Never);
                assert!(pass.flushes <= pass.batches);
                done = done.plus(pass);
                assert!(done.batches < 10_000, "{policy:?} stands still: {done:?}");
            }
            assert_eq!(done.flushes, space.flushes.load(Ordering::SeqCst));
            let hot = (0..200).step_by(4).filter(|index| swapped(space, *index)).count();
            assert_eq!(hot, 0, "{policy:?}: used pages were evicted");
            (0..200).for_each(|index| assert!(space.touch(cx, index, None, &NoPressure)));
        });
    }
}

/// Locked pages stay; what cannot be written is mapped again and stays on the LRU; a full swap ends the pass.
#[test]
fn what_cannot_go_stays() {
    for policy in LruPolicy::ALL {
        with_space(policy, 150, |cx, space| {
            (0..150).step_by(10).for_each(|index| space.page(index).locked = true);
            space.jam.store(true, Ordering::SeqCst);
            let mut done = shrink(cx, space.lru, space, ShrinkBudget { free: 10, scan: 1000 }, &Never);
            assert!(done.full && done.freed == 0 && done.failed > 0, "{policy:?} {done:?}");
            assert_eq!(space.lru.stats(cx).pages(), 150);
            assert!((0..150).all(|index| matches!(space.page(index).entry, Entry::Present { .. })));
            space.jam.store(false, Ordering::SeqCst);
            for _ in 0..100 {
                done = done.plus(shrink(cx, space.lru, space, ShrinkBudget { free: 1000, scan: 1000 }, &Never));
            }
            assert!(done.kept > 0);
            for index in 0..150 {
                assert_eq!(swapped(space, index), index % 10 != 0, "{policy:?}: page {index}");
            }
        });
    }
}

/// The policy is changed while memory is reclaimed; nothing is lost.
#[test]
fn the_policy_can_be_changed_at_any_time() {
    with_space(LruPolicy::TwoList, 200, |cx, space| {
        for round in 0..40 {
            space.lru.set_policy(cx, LruPolicy::ALL[round % 2]);
            assert_eq!(space.lru.policy(cx), LruPolicy::ALL[round % 2]);
            shrink(cx, space.lru, space, ShrinkBudget { free: 7, scan: 50 }, &Never);
            (0..200).skip(round).step_by(3).for_each(|index| assert!(space.touch(cx, index, None, &NoPressure)));
        }
        let on = (0..200).filter(|index| !swapped(space, *index)).count() as u64;
        assert_eq!(space.lru.stats(cx).pages(), on);
    });
}

/// Look-around: neighbours found young beside a look are younger than those that nobody asked about.
#[test]
fn look_around_promotes_neighbours() {
    with_space(LruPolicy::Generations, 100, |cx, space| {
        let before = space.lru.stats(cx).promoted;
        (0..100).for_each(|index| assert!(space.touch(cx, index, None, &NoPressure)));
        shrink(cx, space.lru, space, ShrinkBudget { free: 1, scan: 32 }, &Never);
        let stats = space.lru.stats(cx);
        assert!(stats.promoted > before, "{stats:?}");
    });
}

/// A worker brings free memory from below *low* to *high* and then rests; with nothing to evict it says so.
#[test]
fn a_worker_balances_its_node() {
    for policy in LruPolicy::ALL {
        with_space(policy, 240, |cx, space| {
            let free = space.available(cx);
            let marks = Watermarks::new(free, free + 1, free + 50).expect("in order");
            let node = NodeReclaim { node: NodeId(0), lru: space.lru, side: space, marks };
            let (turn, done) = node.balance(cx, 32, &Never);
            assert!(turn == Turn::Unfinished && (32..128).contains(&done.looked_at()), "{turn:?} {done:?}");
            let enough = Watermarks::new(0, 0, space.available(cx)).expect("in order");
            let rests = NodeReclaim { marks: enough, ..node }.balance(cx, 1000, &Never);
            assert_eq!(rests, (Turn::Balanced, ShrinkProgress::default()), "enough is free, to the page");
            let (turn, done) = node.balance(cx, 1_000_000, &Never);
            assert_eq!(turn, Turn::Balanced, "{policy:?} {done:?}");
            assert!(space.available(cx) >= marks.high());
            let raised = CancelFlag::new();
            raised.raise();
            let marks = Watermarks::new(0, 0, 10_000).expect("in order");
            let node = NodeReclaim { marks, ..node };
            assert_eq!(node.balance(cx, 1_000_000, &raised).0, Turn::Cancelled);
            assert_eq!(node.balance(cx, 10_000_000, &Never).0, Turn::Hopeless);
            assert!((0..240).all(|index| swapped(space, index)), "{policy:?}");
        });
    }
}

/// Far more pages than frames: every fault is served by direct reclaim alone, and every page is right.
#[test]
fn direct_reclaim_serves_faults() {
    let pages = 800;
    for policy in LruPolicy::ALL {
        let machine = machine(300, u64::MAX);
        run_as(0);
        with_frames(&machine, NoFaults, |frames| {
            let mut cx = machine.cx();
            let lru = Lru::new(frames, policy);
            let space = Space::new(&machine, frames, &lru, pages, 300);
            {
                let marks = Watermarks::for_node(300);
                let node = NodeReclaim { node: NodeId(0), lru: &lru, side: &space, marks };
                let pressure = DirectReclaim::new(&node);
                for index in (0..pages).chain((0..pages).rev()) {
                    assert!(space.touch(&mut cx, index, Some(small(index as u32)), &pressure), "{policy:?}: {index}");
                }
                let (calls, freed) = pressure.stats();
                assert!(calls > 0 && freed >= calls);
                // A caller that may not sleep is refused, and so is one that needs another node.
                let need = Shortfall { order: Order::ZERO, pages: 1, node: None, may_sleep: false };
                assert_eq!(pressure.relieve(&mut cx, need), 0);
                assert_eq!(pressure.relieve(&mut cx, Shortfall { node: Some(NodeId(1)), may_sleep: true, ..need }), 0);
            }
            space.finish(&cx);
            assert_nothing_lost(&machine, frames);
        });
    }
}

/// Direct reclaim frees what was asked for and no more than a batch besides, of the node that was asked for, and counts it.
#[test]
fn direct_reclaim_frees_what_is_missing() {
    for policy in LruPolicy::ALL {
        with_space(policy, 240, |cx, space| {
            let marks = Watermarks::for_node(300);
            let node = NodeReclaim { node: NodeId(1), lru: space.lru, side: space, marks };
            let pressure = DirectReclaim::new(&node);
            let (mut calls, mut sum) = (0, 0);
            for (pages, node) in [(1, None), (40, Some(NodeId(1))), (70, None), (1, Some(NodeId(2)))] {
                let need = Shortfall { order: Order::ZERO, pages, node, may_sleep: true };
                let freed = pressure.relieve(cx, need);
                match node {
                    Some(NodeId(2)) => assert_eq!(freed, 0, "another node"),
                    _ => {
                        assert!((pages.max(32)..pages.max(32) + 32).contains(&freed), "{policy:?}: {freed} of {pages}");
                        calls += 1;
                    }
                }
                sum += freed;
                assert_eq!(pressure.stats(), (calls, sum));
            }
            let need = Shortfall { order: Order::ZERO, pages: 1000, node: None, may_sleep: true };
            assert_eq!(pressure.relieve(cx, need), 240 - sum, "all that is left");
        });
    }
}

/// Out of memory and out of swap: one access fails, nothing is wedged, and what is there stays right.
#[test]
fn out_of_everything_is_an_error_of_one_access() {
    let machine = machine(120, u64::MAX);
    run_as(0);
    with_frames(&machine, NoFaults, |frames| {
        let mut cx = machine.cx();
        let lru = Lru::new(frames, LruPolicy::Generations);
        let space = Space::new(&machine, frames, &lru, 400, 60);
        {
            let marks = Watermarks::for_node(120);
            let node = NodeReclaim { node: NodeId(0), lru: &lru, side: &space, marks };
            let pressure = DirectReclaim::new(&node);
            // Hardly compressible: a third of a page each.
            let content = |index: usize| Content { random: 700, seed: index as u32 };
            let held =
                (0..400).take_while(|index| space.touch(&mut cx, *index, Some(content(*index)), &pressure)).count();
            assert!((87..400).contains(&held), "{held}");
            for index in 0..held {
                // May fail again, but what it finds is right.
                space.touch(&mut cx, index, None, &pressure);
            }
            // Memory comes back, and so does service.
            (0..held / 2).for_each(|index| space.discard(&cx, index));
            assert!(space.touch(&mut cx, 399, None, &pressure));
        }
        space.finish(&cx);
        assert_nothing_lost(&machine, frames);
    });
}

/// Three tasks and a worker, on a quarter of the memory they want, with failing allocations, discards and policy changes.
#[test]
fn data_survives_pressure_on_several_cpus() {
    let soak: usize = std::env::var("HUGEMM_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let steps = if cfg!(miri) { 20 } else { 5000 * soak };
    let (count, machine) = if cfg!(miri) { (60, machine(100, u64::MAX)) } else { (1200, machine(340, u64::MAX)) };
    run_as(0);
    with_frames(&machine, FaultPlan::periodic(60, 17), |frames| {
        let lru = Lru::new(frames, LruPolicy::Generations);
        let space = Space::new(&machine, frames, &lru, count, 340);
        {
            let marks = Watermarks::new(16, 32, 48).expect("in order");
            let node = NodeReclaim { node: NodeId(0), lru: &lru, side: &space, marks };
            let pressure = DirectReclaim::new(&node);
            let (wake, stop) = (Wake::new(), CancelFlag::new());
            let served = AtomicU64::new(0);
            std::thread::scope(|scope| {
                let tasks: Vec<_> = (1..CPUS)
                    .map(|cpu| {
                        let (machine, space, pressure, wake, served) = (&machine, &space, &pressure, &wake, &served);
                        scope.spawn(move || {
                            run_as(cpu);
                            let mut cx = machine.cx();
                            let mut rng = Rng(u64::from(cpu));
                            for step in 0..steps {
                                // A window that moves, as in "Don't flush TLB after checking PTE young".
                                let start = rng.below(count as u64) as usize;
                                for index in (start..count).take(8) {
                                    let random = [0, 30, 300, 900][rng.below(4) as usize];
                                    let content = Content { random, seed: rng.below(1 << 30) as u32 };
                                    let write = (rng.below(3) == 0).then_some(content);
                                    let ok = space.touch(&mut cx, index, write, pressure);
                                    served.fetch_add(u64::from(ok), Ordering::SeqCst);
                                }
                                if rng.below(50) == 0 {
                                    space.discard(&cx, rng.below(count as u64) as usize);
                                }
                                if step % 1000 == 999 {
                                    space.lru.set_policy(&cx, LruPolicy::ALL[rng.below(2) as usize]);
                                }
                                wake.needed(marks, space.available(&cx));
                            }
                            space.frames.drain(&cx);
                        })
                    })
                    .collect();
                let (machine, space, node, wake, stop) = (&machine, &space, &node, &wake, &stop);
                let worker = scope.spawn(move || {
                    run_as(0);
                    let mut cx = machine.cx();
                    loop {
                        let (turn, _) = node.balance(&mut cx, 500, stop);
                        if turn == Turn::Cancelled || stop.requested() {
                            break;
                        }
                        if turn != Turn::Unfinished && wake.rests(marks, || space.available(&cx)) {
                            std::thread::yield_now();
                        }
                    }
                    space.frames.drain(&cx);
                });
                for task in tasks {
                    task.join().expect("no task fails");
                }
                stop.raise();
                worker.join().expect("the worker does not fail");
            });
            run_as(0);
            let total = (steps * 8) as u64 * u64::from(CPUS - 1);
            let served = served.into_inner();
            assert!(served > total / 2, "{served} of {total}");
        }
        let cx = machine.cx();
        space.finish(&cx);
        assert_nothing_lost(&machine, frames);
    });
}

/// Passes add up: each figure, and what any of them has met.
#[test]
fn passes_add_up() {
    let of = |factor: u64| ShrinkProgress {
        scanned: 2 * factor,
        young: 3 * factor,
        kept: 5 * factor,
        failed: 7 * factor,
        freed: 11 * factor,
        aged: 13 * factor,
        flushes: 17 * factor,
        batches: 19 * factor,
        ..ShrinkProgress::default()
    };
    assert_eq!(of(3).plus(of(10)), of(13));
    assert_eq!(of(3).looked_at(), 3 * (2 + 13));
    let [full, cancelled, empty] = [(true, false, false), (false, true, false), (false, false, true)]
        .map(|(full, cancelled, empty)| ShrinkProgress { full, cancelled, empty, ..ShrinkProgress::default() });
    for met in [full, cancelled, empty] {
        assert_eq!(met.plus(ShrinkProgress::default()), met);
        assert_eq!(ShrinkProgress::default().plus(met), met);
    }
}
