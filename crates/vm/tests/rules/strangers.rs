//! Spaces, objects and pins are taken by the manager and the space that they belong to, and by nobody else; and a space with
//! pinned pages does not end.

use crate::support::{
    AT, Follower, Model, PoolMemory, SMALL, Watched, bounds, map, no_faults, parts, span, with_cpu, with_rig,
};
use hugemm_base::sync::AtomicU64;
use hugemm_base::{Dirty, Never, NodeId, Order, PageSize, VirtAddr, with};
use hugemm_frames::{AllocRequest, ArenaSpec, FolioRef, Frames, FramesConfig, Plain};
use hugemm_hugetlb::{Nodes, VmemmapOptimizer};
use hugemm_paging::{DeferredUnmap, Lookup, TlbCpu, TlbShootdown};
use hugemm_threads::Memory;
use hugemm_vm::{Access, Backing, Pools, Protection, Vm, VmError, VmaKind};
use std::panic::AssertUnwindSafe;

/// A second manager over the same frames refuses what is the first one's, and changes nothing.
#[test]
fn another_managers_things_are_refused() {
    with_rig(16, 1, 51, &no_faults(), |rig| {
        // SAFETY: as the rig's.
        let other: Vm<'_, Model<'_>> = unsafe { Vm::new(parts(rig.vm.frames(), rig.vm.shootdown())) }.expect("small");
        rig.on(0, |cx| {
            let (area, at, kind) = (span(AT, 0x4000), VirtAddr::new(AT), SMALL);
            let space = rig.space(cx, area, kind);
            rig.enter(cx, &space);
            rig.store(cx, &space, AT, 7).expect("a page");
            let mut pins = rig.pin(cx, &space, span(AT, 0x1000));
            let object = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("an object");
            let own = other.create(cx, bounds()).expect("a space");

            let foreign = Err(VmError::Foreign);
            assert_eq!(other.map(cx, &space, span(2 * AT, 0x1000), kind, Backing::Private).map(|_| ()), foreign);
            let shared = Backing::Shared(&object, 0);
            assert_eq!(other.map(cx, &own, area, kind, shared).map(|_| ()), foreign);
            assert_eq!(other.unmap(cx, &space, area).map(|_| ()), foreign);
            assert_eq!(other.protect(cx, &space, area, Protection::USER), foreign);
            assert_eq!(other.usage(cx, &space, area).map(|_| ()), foreign);
            assert_eq!(other.fault(cx, &space, VirtAddr::new(AT + 0x1000), Access::Write).map(|_| ()), foreign);
            assert_eq!(other.fork(cx, &space).map(|_| ()), foreign);
            assert_eq!(other.prefault(&space, area, None).work(cx, &Never), foreign);
            assert_eq!(other.prefault_shared(&object, 0, 4).work(cx, &Never), foreign);
            let pinned = other.pin(cx, &space, area, Access::Write, None, &Never, |_| ());
            assert_eq!(pinned.map_err(|error| (error.pinned, error.cause)), Err((0, VmError::Foreign)));
            assert_eq!(other.test_and_clear_young(cx, &space, area, |_| ()).map(|_| ()), foreign);
            let follower = Follower(std::sync::Arc::new(()));
            assert_eq!(other.follow(cx, &space, follower).map(|_| ()), foreign);
            assert_eq!(other.lookup(cx, &space, at), Lookup::Absent);
            let (error, space) = other.destroy(cx, space).expect_err("not its own");
            assert_eq!(error, VmError::Foreign);
            let (error, object) = other.close(cx, object).expect_err("not its own");
            assert_eq!(error, VmError::Foreign);
            let (error, pin) = other.unpin(cx, &space, pins.remove(0)).expect_err("not its own");
            assert_eq!(error, VmError::Foreign);
            let (error, pin) = other.unpin(cx, &own, pin).expect_err("not its own");
            assert_eq!(error, VmError::Foreign);

            assert_eq!(rig.load(cx, &space, AT), Ok(7));
            assert!(matches!(rig.vm.lookup(cx, &space, VirtAddr::new(AT + 0x1000)), Lookup::Absent));
            rig.vm.unpin(cx, &space, pin).expect("its own");
            rig.vm.close(cx, object).expect("its own");
            rig.end(cx, space);
            other.destroy(cx, own).expect("destroyed");
            other.trim(cx);
        });
    });
}

/// What gathers the flushes of another machine is refused before anything is taken.
#[test]
fn another_machines_flushes_are_refused() {
    with_cpu(16, 1, 56, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x1000), VmaKind::private(PageSize::Size4K));
        rig.enter(cx, &space);
        rig.store(cx, &space, AT, 7).expect("a page");
        let (slots, inboxes) = ([TlbCpu::default()], [const { AtomicU64::new(0) }; 1]);
        // SAFETY: none of its CPUs translates anything.
        let others = unsafe { TlbShootdown::new(&slots, &inboxes, Watched(rig.mmu)) }.expect("enough words");
        // SAFETY: it is used with these only, but for what is refused.
        let deferred: DeferredUnmap = unsafe { DeferredUnmap::new(&others) }.expect("few CPUs");
        let frame = rig.leaf(cx, &space, AT).frame;
        let unhooked = std::panic::catch_unwind(AssertUnwindSafe(|| {
            rig.vm.unhook(cx, rig.hold(frame), &deferred).map(|page| page.put_back(cx))
        }));
        assert!(unhooked.is_err() && matches!(rig.vm.lookup(cx, &space, VirtAddr::new(AT)), Lookup::Mapped(_)));
        assert_eq!(rig.load(cx, &space, AT), Ok(7));
        // SAFETY: the reference that unwinding has lost.
        assert!(rig.vm.frames().put(cx, unsafe { FolioRef::from_pfn(frame) }).is_ok());
        rig.end(cx, space);
    });
}

/// A pin is counted in its space, and in no other of the same manager.
#[test]
fn another_spaces_pins_are_refused() {
    with_cpu(16, 1, 52, |rig, cx| {
        let [first, second] = [0, 1].map(|_| rig.vm.create(cx, bounds()).expect("a space"));
        for space in [&first, &second] {
            rig.vm.map(cx, space, span(AT, 0x4000), SMALL, Backing::Private).expect("an area");
        }
        let mut pins = rig.pin(cx, &first, span(AT, 0x1000));
        let (error, pin) = rig.vm.unpin(cx, &second, pins.remove(0)).expect_err("another's");
        assert_eq!(error, VmError::Foreign);
        let copied = second.counters().copied;
        let child = rig.vm.fork(cx, &second).expect("forked");
        assert_eq!(second.counters().copied, copied);
        rig.vm.unpin(cx, &first, pin).expect("its own");
        for space in [first, second, child] {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
    });
}

/// A space with pinned pages comes back as it was, also when they have been unmapped: their frames are its until the pins
/// are given back.
#[test]
fn a_space_with_pins_does_not_end() {
    for page in [PageSize::Size4K, PageSize::Size2M] {
        with_cpu(16, 1, 53, |rig, cx| {
            let area = span(AT, 2 * page.bytes());
            let space = rig.space(cx, area, VmaKind::private(page));
            rig.enter(cx, &space);
            rig.store(cx, &space, AT, 7).expect("a page");
            let mut pins = rig.pin(cx, &space, span(AT, page.bytes()));
            rig.leave(cx, &space);
            let (error, space) = rig.vm.destroy(cx, space).expect_err("pinned");
            assert_eq!(error, VmError::InUse);
            rig.enter(cx, &space);
            assert_eq!(rig.load(cx, &space, AT), Ok(7), "it is as it was");
            rig.leave(cx, &space);
            rig.vm.unmap(cx, &space, area).expect("unmapped");
            let (error, space) = rig.vm.destroy(cx, space).expect_err("still pinned");
            assert_eq!(error, VmError::InUse);
            let used = rig.used(cx);
            rig.vm.unpin(cx, &space, pins.remove(0)).expect("its own");
            assert!(rig.used(cx) < used, "the pin kept the page");
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    }
}

/// A space that somebody follows comes back as it was.
#[test]
fn a_followed_space_does_not_end() {
    with_cpu(16, 1, 54, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x1000), SMALL);
        rig.enter(cx, &space);
        rig.store(cx, &space, AT, 7).expect("a page");
        let follower = rig.vm.follow(cx, &space, Follower(std::sync::Arc::new(()))).expect("memory");
        rig.leave(cx, &space);
        let (error, space) = rig.vm.destroy(cx, space).expect_err("followed");
        assert_eq!(error, VmError::InUse);
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT), Ok(7), "it is as it was");
        rig.leave(cx, &space);
        // SAFETY: the follower is this space's.
        let _ = unsafe { rig.vm.unfollow(cx, &space, follower) };
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A pool may be filled from another allocator's frames, even of the same memory. Its page goes back to it, promised as
/// before, and nothing is mapped: at a fault, and when a range is filled.
#[test]
fn a_pool_of_other_frames_is_refused() {
    with_cpu(32, 1, 55, |rig, cx| {
        let block = rig.vm.frames().alloc(cx, AllocRequest::order(Order::new(11).expect("valid"))).expect("8 MiB");
        let arenas = [ArenaSpec::new(block.extent(), NodeId::new(0))];
        let config = FramesConfig::new(&arenas, 1);
        let metadata = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
        // SAFETY: zeroed, of this size, used once; one platform.
        let others = unsafe { Frames::new(&config, Plain::default(), metadata.ptr(), metadata.bytes()) };
        let others: Frames<'_, Plain> = others.expect("large enough");
        // SAFETY: the block is this test's.
        unsafe { others.release(cx, Dirty::assume_owned(block.extent())) };
        let map = map(rig.mmu, block.extent());
        // SAFETY: nothing is mapped by it.
        let optimizer = unsafe { VmemmapOptimizer::new(&others, &map, &[], Default::default()) };
        optimizer.set_enabled(false);
        let mut pool = PoolMemory::new(block.extent());
        let pool = pool.pool();
        {
            pool.resize(cx, &optimizer, 3, Nodes::All, &Never).expect("nobody else resizes");
            let parts = parts(rig.vm.frames(), rig.vm.shootdown());
            let parts = with!(parts, pools = Pools::default().with(&pool));
            // SAFETY: as the rig's own.
            let vm: Vm<'_, Model<'_>> = unsafe { Vm::new(parts) }.expect("small objects");
            let space = vm.create(cx, bounds()).expect("a space");
            let kind = VmaKind::private(PageSize::Size2M).pooled();
            let area = span(AT, 4 << 20);
            vm.map(cx, &space, area, kind, Backing::Private).expect("promised");
            assert_eq!(vm.fault(cx, &space, area.start(), Access::Write), Err(VmError::OtherKind));
            assert_eq!(vm.prefault(&space, area, None).work(cx, &Never), Err(VmError::OtherKind));
            assert_eq!(vm.lookup(cx, &space, area.start()), Lookup::Absent);
            assert_eq!(pool.counts(cx).reserved, 2);
            vm.destroy(cx, space).expect("destroyed");
            vm.trim(cx);
            assert_eq!((pool.counts(cx).reserved, pool.counts(cx).counts.free), (0, 3));
        }
        rig.vm.frames().free(cx, block);
    });
}
