//! How far passes, a worker's turns and direct reclaim go: idle pages go, others stay, and each ends where it should.

use crate::rig::{Cpus, Cx, Handle, Model, NODE, Rig, Size, span, with_cpu, with_either};
use crate::rules::{AT, SIZE, filled, size_for};
use hugemm_base::lock::SpinLock;
use hugemm_base::{CancelFlag, Never, NodeId, Order, PageSize, Shortfall, VirtAddr, with};
use hugemm_frames::{AllocRequest, FolioRun, Put};
use hugemm_paging::Lookup;
use hugemm_reclaim::{
    BATCH, Lru, LruPolicy, Reclaim, ShrinkBudget, ShrinkProgress, Step, Steps, Swap, Turn, Watermarks,
};
use hugemm_vm::{Backing, Pager, VmError, VmaKind};
use std::sync::atomic::{AtomicU64, Ordering};

fn at(index: u64) -> u64 {
    AT + (index << 12)
}

/// A space of so many pages of 4 KiB, each touched once, with either policy.
fn with_pages(
    pages: u64,
    size: Size,
    test: impl for<'v, 'h> Fn(LruPolicy, &'v Rig<'h>, &mut Cx<'_, 'h>, &Handle<'v, 'h>),
) {
    with_either(size, 17, |policy, rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, pages);
        test(policy, rig, cx, &space);
        for index in 0..pages {
            assert_eq!(rig.get(cx, &space, at(index) + 8), Ok(index + 1), "{policy:?}");
        }
        rig.end(cx, space);
    });
}

fn pass<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, free: u64, scan: u64) -> ShrinkProgress {
    rig.vm.pager().shrink(&rig.vm, cx, NODE, ShrinkBudget::new(free, scan), &Never)
}

fn away<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, index: u64) -> bool {
    matches!(rig.vm.lookup(cx, space, VirtAddr::new(at(index))), Lookup::Owner(_))
}

/// Idle pages go, used ones stay; at most one flush per batch, and none for ageing.
#[test]
fn a_pass_evicts_what_is_idle() {
    with_pages(200, SIZE, |policy, rig, cx, space| {
        // First look, a batch and a part of one: all were just touched.
        let look = pass(rig, cx, u64::MAX, 40);
        assert_eq!(look.looked_at(), 40, "{policy:?} {look:?}");
        assert_eq!((look.freed, look.flushes, look.failed), (0, 0, 0), "{policy:?} {look:?}");
        assert!(!look.empty, "there is more to look at: {policy:?}");
        assert!(look.young > 0);
        // One in four is used again in every period.
        let (mut done, mut batches) = (0, 0);
        while done < 100 {
            (0..200).step_by(4).for_each(|index| assert_eq!(rig.get(cx, space, at(index) + 8), Ok(index + 1)));
            // What TLBs hide from ageing has tests of its own.
            rig.leave(cx, space);
            rig.enter(cx, space);
            let pass = pass(rig, cx, 16, 64);
            assert!(pass.flushes <= pass.batches);
            done += pass.freed;
            batches += pass.batches;
            assert!(batches < 10_000, "{policy:?} stands still");
        }
        assert!((0..200).step_by(4).all(|index| !away(rig, cx, space, index)), "{policy:?}: used pages were evicted");
    });
}

/// A page that cannot be held is looked at and kept, and a pass over nothing else ends with its budget. Here it has as many
/// references as fit without counters, for which there is no memory.
#[test]
fn what_cannot_be_held_is_kept() {
    with_pages(1, SIZE, |policy, rig, cx, space| {
        let frames = rig.vm.frames();
        let Lookup::Mapped(leaf) = rig.vm.lookup(cx, space, VirtAddr::new(AT)) else { panic!("not mapped") };
        let memory: Vec<_> = core::iter::from_fn(|| frames.alloc(cx, AllocRequest::order(Order::ZERO)).ok()).collect();
        // SAFETY: it is mapped, and nobody else is there to let it go.
        let held: Vec<_> = core::iter::from_fn(|| unsafe { frames.get_at(leaf.frame) }.ok()).collect();
        let expected = with!(ShrinkProgress::default(), scanned = 10, kept = 10);
        assert_eq!(pass(rig, cx, u64::MAX, 10), expected, "{policy:?}");
        held.into_iter().for_each(|folio| assert_eq!(frames.put(cx, folio), Ok(Put::Kept)));
        memory.into_iter().for_each(|block| frames.free(cx, block));
    });
}

/// Locked pages stay; what cannot be written is mapped again and stays on the LRU; a full swap ends the pass.
#[test]
fn what_cannot_go_stays() {
    with_pages(150, SIZE, |policy, rig, cx, space| {
        let (kind, locked) = (VmaKind::private(PageSize::Size4K), span(2 * AT, 15 << 12));
        rig.vm.map(cx, space, locked, kind, Backing::Private).expect("an area");
        rig.vm.lock(cx, space, locked, 15).expect("within the limit");
        (0..15).for_each(|index| rig.put(cx, space, 2 * AT + (index << 12), index).expect("memory"));
        let limit = rig.store.stats(cx).limit;
        // Random words, of which swap can keep none without a frame.
        Swap::<Cpus<'_>>::set_limit(rig.store, 0);
        let mut rng = crate::support::Rng(5);
        for index in 0..150 {
            (0..100)
                .for_each(|word| rig.put(cx, space, at(index) + 16 + word * 40, rng.below(1 << 32)).expect("there"));
        }
        let (mut full, mut failed) = (0, 0);
        for _ in 0..20 {
            let pass = pass(rig, cx, u64::MAX, 1000);
            assert_eq!(pass.freed, 0, "{policy:?} {pass:?}");
            assert!(!pass.full || (pass.failed <= 32 && !pass.empty), "went on: {policy:?} {pass:?}");
            (full, failed) = (full + u64::from(pass.full), failed + pass.failed);
        }
        assert!(full > 0 && failed > 0, "{policy:?}");
        assert_eq!(rig.vm.pager().lru(NODE).expect("one").stats(cx).pages(), 165);
        assert!((0..150).all(|index| !away(rig, cx, space, index)));
        Swap::<Cpus<'_>>::set_limit(rig.store, limit);
        let kept: u64 = (0..20).map(|_| pass(rig, cx, 1000, 1000).kept).sum();
        assert!(kept > 0);
        assert!((0..150).all(|index| away(rig, cx, space, index)), "{policy:?}");
        for index in 0..15 {
            let found = rig.vm.lookup(cx, space, VirtAddr::new(2 * AT + (index << 12)));
            assert!(matches!(found, Lookup::Mapped(_)), "{policy:?}: {found:?}");
        }
    });
}

/// The policy is changed while memory is reclaimed; nothing is lost.
#[test]
fn the_policy_can_be_changed_at_any_time() {
    with_pages(200, SIZE, |_, rig, cx, space| {
        let lru = rig.vm.pager().lru(NODE).expect("one");
        let mut freed = 0;
        for round in 0..40 {
            let policy = LruPolicy::ALL[round as usize % 2];
            lru.set_policy(cx, policy);
            assert_eq!(lru.policy(cx), policy);
            freed += pass(rig, cx, 7, 50).freed;
            (round..200).step_by(3).for_each(|index| assert_eq!(rig.get(cx, space, at(index) + 8), Ok(index + 1)));
        }
        assert!(freed > 0);
        let on = (0..200).filter(|index| !away(rig, cx, space, *index)).count() as u64;
        assert_eq!(lru.stats(cx).pages(), on);
    });
}

/// A worker brings free memory from below *low* to *high*, to the page, and then rests; with nothing to evict it says so.
#[test]
fn a_worker_balances_its_node() {
    with_pages(240, SIZE, |policy, rig, cx, space| {
        let (frames, pager) = (rig.vm.frames(), rig.vm.pager());
        let free = |cx: &Cx<'_, '_>| frames.node_available(cx, NODE);
        let high = pager.marks().high();
        let mut hoard = Vec::new();
        let mut take = |cx: &Cx<'_, '_>, left: u64| {
            while free(cx) > left {
                hoard.push(frames.alloc(cx, AllocRequest::order(Order::ZERO)).expect("there is some"));
            }
        };
        take(cx, high);
        let rests = pager.balance(&rig.vm, cx, NODE, 1000, &Never);
        assert_eq!(rests, (Turn::Balanced, ShrinkProgress::default()), "enough is free, to the page");
        take(cx, high - 50);
        let (turn, done) = pager.balance(&rig.vm, cx, NODE, 32, &Never);
        assert!(turn == Turn::Unfinished && (32..128).contains(&done.looked_at()), "{turn:?} {done:?}");
        let stop = CancelFlag::new();
        stop.raise();
        assert_eq!(pager.balance(&rig.vm, cx, NODE, 1_000_000, &stop).0, Turn::Cancelled);
        let (turn, done) = pager.balance(&rig.vm, cx, NODE, 1_000_000, &Never);
        assert_eq!(turn, Turn::Balanced, "{policy:?} {done:?}");
        assert!(done.freed > 0 && free(cx) >= high);
        // Stored pages take frames too: less free than all of them could give.
        take(cx, high / 4);
        while pager.balance(&rig.vm, cx, NODE, 10_000_000, &Never).0 != Turn::Hopeless {
            take(cx, high / 4);
        }
        assert!((0..240).all(|index| away(rig, cx, space, index)), "{policy:?}");
        hoard.into_iter().for_each(|block| frames.free(cx, block));
    });
}

/// Direct reclaim frees what was asked for and no more than a batch besides, of the node that was asked for, and counts it.
#[test]
fn direct_reclaim_frees_what_is_missing() {
    with_pages(240, SIZE, |policy, rig, cx, _| {
        let pager = rig.vm.pager();
        let mut sum = 0;
        for (calls, (pages, node)) in (1..).zip([(1, None), (40, Some(NODE)), (70, None), (1, Some(NodeId::new(2)))]) {
            let need = Shortfall::frames(pages).only(node);
            let freed = pager.relieve(&rig.vm, cx, need);
            match node {
                Some(node) if node == NodeId::new(2) => assert_eq!(freed, 0, "another node"),
                _ => assert!((pages.max(32)..pages.max(32) + 32).contains(&freed), "{policy:?}: {freed} of {pages}"),
            }
            sum += freed;
            assert_eq!((pager.counts().direct.get(), pager.counts().direct_freed.get()), (calls, sum));
        }
        let need = Shortfall::frames(1000);
        assert_eq!(pager.relieve(&rig.vm, cx, need), 240 - sum, "all that is left");
    });
}

/// Out of memory and out of swap: one access fails, nothing is wedged, and what is there stays right.
#[test]
fn out_of_everything_is_an_error_of_one_access() {
    with_cpu(Size { mib: 4, swap: 100, ..SIZE }, 18, |rig, cx| {
        const PAGES: u64 = 4000;
        let space = filled(rig, cx, PageSize::Size4K, 1);
        let kind = VmaKind::private(PageSize::Size4K);
        rig.vm.map(cx, &space, span(at(1), PAGES << 12), kind, Backing::Private).expect("an area");
        let mut rng = crate::support::Rng(6);
        let mut known = Vec::new();
        // Hardly compressible.
        let mut error = None;
        'pages: for index in 1..PAGES {
            for word in 0..60 {
                let (at, value) = (at(index) + word * 64, rng.below(1 << 32));
                match rig.put(cx, &space, at, value) {
                    Ok(()) => known.push((at, value)),
                    Err(found) => {
                        error = Some(found);
                        break 'pages;
                    }
                }
            }
        }
        assert_eq!(error, Some(VmError::NoMemory));
        // One word or two of each page: each looks for memory where there is none.
        for (at, value) in known.iter().step_by(37) {
            // May fail again, but what it finds is right.
            match rig.get(cx, &space, *at) {
                Ok(found) => assert_eq!(found, *value),
                Err(error) => assert_eq!(error, VmError::NoMemory),
            }
        }
        // Memory comes back, and so does service.
        let half = known.len() as u64 / 120;
        rig.vm.unmap(cx, &space, span(at(1), half << 12)).expect("whole pages of an area");
        assert_eq!(rig.get(cx, &space, at(PAGES)), Ok(0));
        for (at, value) in known.iter().filter(|(at, _)| *at >= self::at(1 + half)) {
            assert_eq!(rig.get(cx, &space, *at), Ok(*value));
        }
        rig.end(cx, space);
    });
}

/// Its LRUs say nothing of this machine's pages, and its swap is not where they go.
#[test]
fn the_pager_of_another_machine_reclaims_nothing() {
    with_pages(100, SIZE, |policy, rig, cx, _| {
        let lrus = [Lru::new(rig.vm.frames(), policy)];
        let own = rig.vm.pager();
        let other: Reclaim<_, _> = Reclaim::new(&lrus, rig.store, own.marks(), ());
        assert_eq!(own.balance(&rig.vm, cx, NODE, 1000, &Never).0, Turn::Balanced);
        assert_eq!(other.balance(&rig.vm, cx, NODE, 1000, &Never).0, Turn::Hopeless);
        assert!(!other.compact(&rig.vm, cx, NODE));
    });
}

/// So many pages of one CPU come to the lists in one lock round.
const NEW: u64 = 15;

fn store<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, index: u64) {
    rig.put(cx, space, at(index) + 8, index + 1).expect("memory");
}

/// Faults of single pages meet at the LRU's lock once for so many; whoever looks sees all of them; what goes before it has come to a list is
/// on none.
#[test]
fn new_pages_come_to_the_lists_together() {
    with_either(SIZE, 23, |policy, rig, cx| {
        let lru = rig.vm.pager().lru(NODE).expect("one");
        let kind = VmaKind::private(PageSize::Size4K);
        let space = rig.space(cx, span(at(0), 200 << 12), kind);
        rig.enter(cx, &space);
        (0..4 * NEW).for_each(|index| store(rig, cx, &space, index));
        let stats = lru.stats(cx);
        // The last round is that of who asks.
        assert_eq!((stats.folios, stats.inserted, stats.lock_rounds), (4 * NEW, 4 * NEW, 4 + 1));
        // The first, one in between, and the last of those that wait.
        for gone in [0, 2, 4] {
            (100..105).for_each(|index| store(rig, cx, &space, index));
            rig.vm.unmap(cx, &space, span(at(100 + gone), 1 << 12)).expect("a page of an area");
            assert_eq!(lru.stats(cx).folios, 4 * NEW + 4, "{gone}");
            rig.vm.unmap(cx, &space, span(at(100), 8 << 12)).expect("they are there, or gone");
            rig.vm.map(cx, &space, span(at(100), 8 << 12), kind, Backing::Private).expect("room");
        }
        // Those that wait are looked at as all others are.
        rig.vm.unmap(cx, &space, span(at(0), (4 * NEW) << 12)).expect("pages of an area");
        (100..103).for_each(|index| store(rig, cx, &space, index));
        let looked_at = pass(rig, cx, u64::MAX, 100).looked_at();
        assert!(looked_at >= 3, "{policy:?}: {looked_at}");
        (100..103).for_each(|index| assert_eq!(rig.get(cx, &space, at(index) + 8), Ok(index + 1)));
        rig.end(cx, space);
        assert_eq!(lru.stats(cx).folios, 0);
    });
}

/// Faults take what is above *min* without reclaiming, and wake the worker once there is less than *low*; below *min* they reclaim for
/// themselves, wait for no worker, and leave *min* free. Nothing of that where nothing can be freed.
#[test]
fn who_faults_reclaims_below_min_only() {
    with_cpu(Size { policy: LruPolicy::TwoList, ..SIZE }, 31, |rig, cx| {
        let (frames, pager) = (rig.vm.frames(), rig.vm.pager());
        let free = |cx: &Cx<'_, '_>| frames.node_available(cx, NODE);
        // A level is looked at once for so many, when a CPU's new pages come to the lists.
        let (marks, late) = (pager.marks(), BATCH as u64 + u64::from(rig.cpus()) + NEW);
        let pages = free(cx) + 500;
        let kind = VmaKind::private(PageSize::Size4K);
        let space = rig.space(cx, span(at(0), pages << 12), kind);
        rig.enter(cx, &space);
        let (mut woken, mut direct, mut touched) = (Vec::new(), Vec::new(), 0);
        for index in 0..pages {
            let (before, asked) = (free(cx), pager.counts().direct.get());
            rig.put(cx, &space, at(index) + 8, index).expect("memory");
            touched += 1;
            woken.extend(pager.take_wake(NODE).then_some(before));
            direct.extend((pager.counts().direct.get() > asked).then_some(before));
            assert!(free(cx) + late + 1 >= marks.min(), "{} of {} are free", free(cx), marks.min());
        }
        assert_eq!(touched, pages);
        let first = *woken.first().expect("the worker is woken");
        assert!(first <= marks.low() && first + late + 1 >= marks.low(), "woken with {first} free, {marks:?}");
        assert!(!direct.is_empty() && direct.iter().all(|free| *free <= marks.min()), "{direct:?}, {marks:?}");
        assert!(direct.len() as u64 <= pages / 16, "one reclaims for a batch");
        rig.end(cx, space);
    });
}

/// What was hopeless once is not for ever. Nothing is on the LRU when the worker looks, so nobody wakes it for the pages that are put
/// there and become idle; who runs out frees some of them by itself, no access fails, and from then on the worker is woken again.
#[test]
fn what_was_hopeless_is_tried_again_when_memory_is_out() {
    with_either(SIZE, 33, |policy, rig, cx| {
        let (frames, pager) = (rig.vm.frames(), rig.vm.pager());
        let free = |cx: &Cx<'_, '_>| frames.node_available(cx, NODE);
        let mut others = Vec::new();
        while free(cx) >= pager.marks().min() {
            others.push(frames.alloc(cx, AllocRequest::order(Order::ZERO)).expect("memory"));
        }
        assert_eq!(pager.balance(&rig.vm, cx, NODE, u64::MAX, &Never).0, Turn::Hopeless);

        let pages = 2 * free(cx);
        let space = rig.space(cx, span(at(0), pages << 12), VmaKind::private(PageSize::Size4K));
        rig.enter(cx, &space);
        let (mut least, mut woken) = (u64::MAX, None);
        for index in 0..pages {
            rig.put(cx, &space, at(index) + 8, index).expect("memory, or idle pages");
            least = least.min(free(cx));
            if pager.take_wake(NODE) {
                woken = woken.or(Some((index, pager.counts().direct_freed.get())));
            }
        }
        let (index, freed) = woken.expect("the worker is woken");
        let most = pager.marks().reserve() + BATCH as u64;
        assert!(freed > 0 && least < most, "woken at page {index}, {freed} freed, {least} were left");
        let turn = pager.balance(&rig.vm, cx, NODE, u64::MAX, &Never);
        assert!(turn.1.freed > 0, "{turn:?}");
        for index in 0..pages {
            assert_eq!(rig.get(cx, &space, at(index) + 8), Ok(index), "{policy:?}");
        }
        others.into_iter().for_each(|block| frames.free(cx, block));
        rig.end(cx, space);
    });
}

/// Is told of wakes.
#[derive(Default)]
struct Bell(AtomicU64);

impl Steps for &Bell {
    fn enter(&self, _: Step) {}

    fn wake(&self, node: NodeId) {
        assert_eq!(node, NODE);
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The worker is woken once until it has taken the wake, and again after that; never where enough is free.
#[test]
fn a_worker_is_woken_by_who_adds_pages() {
    with_cpu(SIZE, 32, |rig, cx| {
        let (frames, bell) = (rig.vm.frames(), Bell::default());
        for (low, wakes) in [(u64::MAX, 1), (u64::MAX, 2), (0, 2)] {
            let lrus = [Lru::new(frames, SIZE.policy)];
            let marks = Watermarks::new(0, low, low).expect("in order");
            let pager: Reclaim<'_, '_, Model<'_>, _, SpinLock, _> = Reclaim::new(&lrus, rig.store, marks, &bell);
            let pages = [(); 3 * BATCH].map(|()| frames.alloc(cx, AllocRequest::order(Order::ZERO)).expect("memory"));
            let pages = pages.map(|page| {
                let extent = page.extent();
                let _ = frames.count(page).expect("managed").into_pfn();
                // SAFETY: counted just now, and it is told once.
                unsafe { pager.lru_add(frames, cx, extent, Order::ZERO) };
                extent
            });
            assert_eq!(bell.0.load(Ordering::Relaxed), wakes);
            assert_eq!(pager.take_wake(NODE), low > 0);
            assert!(!pager.take_wake(NODE) && !pager.take_wake(NodeId::new(7)));
            for page in pages {
                // SAFETY: the reference that became a number above.
                unsafe { pager.drop_references(frames, cx, [FolioRun::from_extent(page, Order::ZERO)]) };
            }
        }
    });
}

/// As many processes share pages as their references fit without counters, and more: the pages go away and come back.
#[test]
fn pages_of_many_processes_go_away() {
    for (page, pages) in [(PageSize::Size4K, 200), (PageSize::Size2M, 2)] {
        for children in [13, 14, 15, 30] {
            with_cpu(Size { mib: 32, ..size_for(page) }, 67, |rig, cx| {
                // A frame for each 2 MiB whose pages have so many.
                rig.kept.store(12, Ordering::Relaxed);
                let mut spaces = vec![filled(rig, cx, page, pages)];
                for _ in 0..children {
                    spaces.push(rig.vm.fork(cx, &spaces[0]).expect("forked"));
                }
                let freed: u64 = (0..5).map(|_| rig.evict_all(cx)).sum();
                assert_eq!(freed, pages * page.pages(), "{page:?} of {children} children");
                rig.leave(cx, &spaces[0]);
                for space in spaces {
                    rig.enter(cx, &space);
                    for index in [0, pages - 1] {
                        assert_eq!(rig.get(cx, &space, AT + index * page.bytes() + 8), Ok(index + 1));
                    }
                    rig.leave(cx, &space);
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
            });
        }
    }
}
