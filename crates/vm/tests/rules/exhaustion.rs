//! Memory can run out at every allocation: whatever was going on, the space stays right, and every frame comes back.

use crate::support::{AT, Cpus, Cx, Handle, Metered, Rig, SMALL, as_first, bounds, parts, span, with_cpu, with_rig};
use hugemm_base::inject::{FaultPlan, every_fault};
use hugemm_base::{Never, Order, PageSize, Relief, Shortfall, VirtAddr, with};
use hugemm_frames::{AllocRequest, Frames, Frozen, Plain};
use hugemm_paging::Lookup;
use hugemm_vm::{Access, Backing, Protection, Served, Vm, VmError, VmaKind};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// Stores, and remembers what was stored.
fn store<'h>(
    rig: &Rig<'h>,
    cx: &mut Cx<'_, 'h>,
    space: &Handle<'_, 'h>,
    known: &mut BTreeMap<u64, u64>,
    at: u64,
    value: u64,
) {
    match rig.store(cx, space, at, value) {
        Ok(()) => {
            known.insert(at, value);
        }
        Err(error) => assert!(matches!(error, VmError::NoMemory | VmError::NoArea { .. }), "{error}"),
    }
}

fn check<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, known: &BTreeMap<u64, u64>) {
    for (at, value) in known {
        match rig.load(cx, space, *at) {
            Ok(found) => assert_eq!(found, *value, "at {at:#x}"),
            // A page of a shared object can be there, and the table for it not.
            Err(error) => assert_eq!(error, VmError::NoMemory),
        }
    }
}

fn scenario(rig: &Rig<'_>) {
    rig.on(0, |cx| {
        let Ok(space) = rig.vm.create(cx, bounds()) else { return };
        let mut known = BTreeMap::new();
        let small = SMALL;
        let _ = rig.vm.map(cx, &space, span(AT, 1 << 20), small, Backing::Private);
        let large = VmaKind::private(PageSize::Size2M);
        let _ = rig.vm.map(cx, &space, span(2 * AT, 4 << 20), large, Backing::Private);
        let object = rig.vm.create_shared(cx, 512, PageSize::Size4K, false);
        if let Ok(object) = &object {
            let _ = rig.vm.map(cx, &space, span(3 * AT, 1 << 20), small, Backing::Shared(object, 0));
            let _ = rig.vm.prefault_shared(object, 0, 16).work(cx, &Never);
        }
        // From a pool, which may have got none: what it promised is taken back.
        rig.try_fill_pool(cx, 1);
        let pooled = rig.vm.create_shared(cx, 512, PageSize::Size2M, true);
        let of_pool = rig.vm.map(cx, &space, span(4 * AT, 2 << 20), large.pooled(), Backing::Private);
        assert!(pooled.is_err() || of_pool.is_err(), "one page, promised twice");
        rig.enter(cx, &space);
        for (index, at) in [AT, AT + 0x5000, 2 * AT, 3 * AT, 3 * AT + 0x2_0000, 4 * AT].into_iter().enumerate() {
            store(rig, cx, &space, &mut known, at, index as u64 + 1);
        }
        let _ = rig.vm.prefault(&space, span(AT + 0x1_0000, 0x2_0000), None).work(cx, &Never);
        let mut pinned = Vec::new();
        let _ = rig.vm.pin(cx, &space, span(AT, 0x4000), Access::Write, None, &Never, |run| pinned.push(run));
        check(rig, cx, &space, &known);
        let child = rig.vm.fork(cx, &space);
        if let Ok(child) = &child {
            let mut theirs = known.clone();
            rig.enter(cx, child);
            rig.leave(cx, &space);
            check(rig, cx, child, &theirs);
            store(rig, cx, child, &mut theirs, AT + 0x5000, 99);
            store(rig, cx, child, &mut theirs, 2 * AT, 98);
            check(rig, cx, child, &theirs);
            rig.enter(cx, &space);
            rig.leave(cx, child);
        }
        check(rig, cx, &space, &known);
        store(rig, cx, &space, &mut known, AT, 50);
        let area = space.find_vma(cx, VirtAddr::new(AT + 0x1000)).map(|area| area.kind.protection);
        let read_only = span(AT + 0x1000, 0x1000);
        if rig.vm.protect(cx, &space, read_only, Protection::USER).is_ok() {
            let refused = VmError::Denied { at: VirtAddr::new(AT + 0x1000) };
            assert_eq!(rig.store(cx, &space, AT + 0x1000, 1), Err(refused));
        } else {
            assert_eq!(space.find_vma(cx, VirtAddr::new(AT + 0x1000)).map(|area| area.kind.protection), area);
        }
        let part = span(AT + 0x2000, 0x2000);
        match rig.vm.lock(cx, &space, part, 4) {
            Ok(()) => assert_eq!(space.locked(), 2),
            Err(error) => assert_eq!(error, VmError::NoMemory),
        }
        if rig.vm.unlock(cx, &space, part).is_ok() {
            assert_eq!(space.locked(), 0);
        }
        // To where the tables are others, and back.
        let (here, there) = (span(AT + 0x1_0000, 0x2_0000), span(40 * AT + 0x1f_0000, 0x3_0000));
        if rig.vm.move_to(cx, &space, here, there).is_ok() {
            assert!(space.find_vma(cx, VirtAddr::new(AT + 0x1_0000)).is_err());
            check(rig, cx, &space, &known);
            let _ = rig.vm.move_to(cx, &space, there, here);
        }
        let hole = span(AT + 0x4000, 0x8000);
        if rig.vm.unmap(cx, &space, hole).is_ok() {
            known.retain(|at, _| !(hole.start().get()..hole.start().get() + hole.bytes()).contains(at));
            assert!(space.find_vma(cx, VirtAddr::new(AT + 0x5000)).is_err());
        }
        check(rig, cx, &space, &known);
        rig.unpin(cx, &space, pinned);
        rig.leave(cx, &space);
        if let Ok(child) = child {
            rig.vm.destroy(cx, child).expect("destroying takes no memory");
        }
        rig.vm.destroy(cx, space).expect("destroying takes no memory");
        for object in [object, pooled].into_iter().flatten() {
            rig.vm.close(cx, object).expect("its own");
        }
    });
}

#[test]
fn every_allocation_can_fail() {
    let runs = every_fault(|plan| with_rig(8, 2, 21, plan, scenario));
    assert!(runs > 50, "{runs} allocations");
}

/// A steady share of failures, so that failures meet in one run.
#[test]
fn several_allocations_can_fail() {
    for period in [2, 3, 5, 7, 11, 17, 29] {
        for first in 0..period.min(8) {
            let plan = FaultPlan::periodic(first, period);
            with_rig(8, 2, first, &plan, scenario);
        }
    }
}

/// What the operations below have to do, in a rig whose memory is all taken but for a few frames.
#[derive(Clone, Copy, Debug)]
enum Needs {
    Space,
    Object,
    Vma,
    Cut,
    Rights,
    Page,
    Table,
    SharedPage,
    Fill,
    Fork,
}

/// Whatever runs out of memory asks the pager for relief: once if it has none, three times if it says that it helped, and then it is
/// final; what has been asked for is done or not at all.
#[test]
fn exhaustion_asks_for_relief() {
    use Needs::*;
    let needs = [Space, Object, Vma, Cut, Rights, Page, Table, SharedPage, Fill, Fork];
    for (needs, room) in needs.into_iter().flat_map(|needs| (0..6).map(move |room| (needs, room))) {
        for helps in [false, true] {
            with_cpu(8, 1, 22, |rig, cx| {
                let object = rig.vm.create_shared(cx, 8, PageSize::Size4K, false).expect("an object");
                let space = rig.space(cx, span(AT, 4 << 20), SMALL);
                rig.vm.map(cx, &space, span(8 * AT, 0x8000), SMALL, Backing::Shared(&object, 0)).expect("an area");
                rig.vm.prefault_shared(&object, 0, 4).work(cx, &Never).expect("memory");
                rig.vm.prefault(&space, span(AT + (1 << 20), 2 << 20), None).work(cx, &Never).expect("memory");
                let mut taken = Vec::new();
                while let Ok(block) = rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)) {
                    taken.push(block);
                }
                taken.drain(..room).for_each(|block| rig.vm.frames().free(cx, block));
                rig.vm.pager().helps.store(helps, Ordering::Relaxed);
                rig.vm.pager().asked.store(0, Ordering::Relaxed);
                let (mut spaces, mut objects) = (Vec::new(), Vec::new());
                let done = match needs {
                    Space => rig.vm.create(cx, bounds()).map(|space| spaces.push(space)),
                    Object => rig.vm.create_shared(cx, 4, PageSize::Size4K, false).map(|object| objects.push(object)),
                    Vma => rig.vm.map(cx, &space, span(9 * AT, 0x1000), SMALL, Backing::Private).map(|_| ()),
                    Cut => rig.vm.unmap(cx, &space, span(AT + 0x1000, 0x1000)).map(|_| ()),
                    Rights => rig.vm.protect(cx, &space, span(AT + 0x1000, 0x1000), Protection::USER),
                    Page => rig.vm.fault(cx, &space, VirtAddr::new(AT), Access::Write).map(|_| ()),
                    Table => rig.vm.fault(cx, &space, VirtAddr::new(8 * AT), Access::Write).map(|_| ()),
                    SharedPage => rig.vm.fault(cx, &space, VirtAddr::new(8 * AT + 0x5000), Access::Write).map(|_| ()),
                    Fill => rig.vm.prefault_shared(&object, 6, 7).work(cx, &Never),
                    Fork => rig.vm.fork(cx, &space).map(|space| spaces.push(space)),
                };
                let asked = rig.vm.pager().asked.load(Ordering::Relaxed);
                let expected = if done.is_ok() {
                    0
                } else if helps {
                    3
                } else {
                    1
                };
                assert_eq!(asked, expected, "{needs:?} with {room} frames: {done:?}");
                assert!(done.is_ok() || done == Err(VmError::NoMemory), "{done:?}");
                // Slabs may have room for small objects; everything else needs a frame, and six are enough.
                assert!(done.is_err() || room > 0 || matches!(needs, Object | Vma | Cut | Rights), "{needs:?}");
                taken.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
                for space in spaces.into_iter().chain([space]) {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
                for object in objects.into_iter().chain([object]) {
                    rig.vm.close(cx, object).expect("its own");
                }
            });
        }
    }
}

/// A pager that needs what is free for storing pages is asked before that is taken, once; then what is free serves, whether it had
/// anything to give or not. If there is nothing, a pager that had nothing to give is not asked again.
#[test]
fn what_the_pager_needs_is_taken_last() {
    as_first::<Metered, true>(8, 1, 23, |rig, cx| {
        let space = rig.space(cx, span(AT, 1 << 20), SMALL);
        let (pager, frames) = (rig.vm.pager(), rig.vm.frames());
        let mut fault = |at, is_left, asked| {
            let rest = core::iter::from_fn(|| frames.alloc(cx, AllocRequest::order(Order::ZERO)).ok());
            let taken: Vec<_> = rest.take(if is_left { 0 } else { usize::MAX }).collect();
            pager.asked.store(0, Ordering::Relaxed);
            let served = rig.vm.fault(cx, &space, VirtAddr::new(at), Access::Write);
            assert_eq!(pager.asked.load(Ordering::Relaxed), asked);
            assert_eq!(served, if is_left { Ok(Served::Mapped) } else { Err(VmError::NoMemory) });
            taken.into_iter().for_each(|block| frames.free(cx, block));
        };
        fault(AT, true, 0);
        pager.reserves.store(true, Ordering::Relaxed);
        fault(AT + 0x1000, true, 1);
        fault(AT + 0x2000, false, 1);
        pager.helps.store(true, Ordering::Relaxed);
        fault(AT + 0x2000, true, 1);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A page that is pinned so often that its references want counters of their own, for which there is no memory: none of the run
/// is pinned, and the page before it has lost nothing.
#[test]
fn a_run_is_pinned_as_a_whole_or_not_at_all() {
    with_cpu(8, 1, 24, |rig, cx| {
        let area = span(AT, 0x3000);
        let space = rig.space(cx, area, SMALL);
        rig.vm.prefault(&space, area, None).work(cx, &Never).expect("memory");
        let mut pins = Vec::new();
        let second = span(AT + 0x1000, 0x1000);
        for _ in 0..14 {
            rig.vm.pin(cx, &space, second, Access::Write, None, &Never, |pin| pins.push(pin)).expect("few references");
        }
        let all = core::iter::from_fn(|| rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)).ok());
        let held: Vec<_> = all.collect();
        let error = rig
            .vm
            .pin(cx, &space, area, Access::Write, None, &Never, |_| panic!("not all of them"))
            .expect_err("no memory");
        assert_eq!((error.pinned, error.cause), (0, VmError::NoMemory));
        let references = [0, 1, 2].map(|page| {
            let found = rig.vm.lookup(cx, &space, VirtAddr::new(AT + (page << 12)));
            let Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
            rig.vm.frames().references(leaf.frame)
        });
        assert_eq!(references, [1, 15, 1]);
        held.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
        rig.unpin(cx, &space, pins);
        rig.vm.destroy(cx, space).expect("nothing is pinned");
    });
}

/// Whoever else allocates asks the manager, as the manager does itself: the pager first, and the last resort when that has nothing.
#[test]
fn the_last_resort_is_asked_last() {
    struct Balloon<'a, 'm, 'h>(&'a Frames<'m, Plain<&'h FaultPlan>>, Mutex<Vec<Frozen>>);
    impl<'h> Relief<Cpus<'h>> for Balloon<'_, '_, '_> {
        fn relieve(&self, cx: &mut Cx<'_, 'h>, _: Shortfall) -> u64 {
            let all = core::mem::take(&mut *self.1.lock().expect("whole"));
            let pages = all.len() as u64;
            all.into_iter().for_each(|block| self.0.free(cx, block));
            pages
        }
    }
    with_cpu(8, 1, 29, |rig, cx| {
        let frames = rig.vm.frames();
        let balloon = Balloon(frames, Mutex::default());
        let parts = with!(parts::<Metered, false>(frames, rig.vm.shootdown()), last_resort = Some(&balloon));
        // SAFETY: as the rig's.
        let vm = unsafe { Vm::new(parts) }.expect("small objects");
        let space = vm.create(cx, bounds()).expect("a space");
        vm.map(cx, &space, span(AT, 1 << 20), SMALL, Backing::Private).expect("an area");
        let inflate = |cx: &Cx<'_, '_>| {
            let all = core::iter::from_fn(|| frames.alloc(cx, AllocRequest::order(Order::ZERO)).ok());
            balloon.1.lock().expect("whole").extend(all);
        };
        inflate(cx);
        vm.fault(cx, &space, VirtAddr::new(AT), Access::Write).expect("the balloon's");
        inflate(cx);
        let own = frames.alloc_or_relieve(cx, &vm, Order::ZERO).expect("the balloon's");
        frames.free(cx, own);
        inflate(cx);
        assert_eq!(vm.pager().asked.load(Ordering::Relaxed), 2);
        vm.pager().helps.store(true, Ordering::Relaxed);
        assert!(frames.alloc_or_relieve(cx, &vm, Order::ZERO).is_err(), "the pager says that it helps");
        assert!(!balloon.1.lock().expect("whole").is_empty());
        balloon.1.lock().expect("whole").drain(..).for_each(|block| frames.free(cx, block));
        vm.destroy(cx, space).expect("destroyed");
        vm.trim(cx);
    });
}
