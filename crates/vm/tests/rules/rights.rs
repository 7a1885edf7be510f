//! Other rights for a range: what they mean for what is mapped, what is shared, what is away, what moves and what is pinned; what they
//! cost; and what is refused. On both formats.

use crate::support::{
    AT, Metered, Model, Rig, SMALL, as_first, bounds, no_faults, on_both_formats, span, with_cpu, with_format,
};
use hugemm_base::{CpuId, Extent, Never, Order, PageSize, Pfn, VirtAddr, with};
use hugemm_frames::{AllocRequest, Frozen};
use hugemm_paging::{Aarch64, Flags, Leaf, PageFormat};
use hugemm_vm::{Access, AddressSpace, Backing, FaultAccess, Protection, Served, Usage, VmError, VmaKind};

const READ: Protection = Protection::USER;
const WRITE: Protection = Protection::USER.with(Protection::WRITE);
const EXEC: Protection = Protection::USER.with(Protection::EXEC);

fn denied(at: u64) -> Result<(), VmError> {
    Err(VmError::Denied { at: VirtAddr::new(at) })
}

/// Does `work`; how many flushes it took.
fn flushes<F: PageFormat, const AWAY: bool>(rig: &Rig<'_, F, AWAY>, work: impl FnOnce()) -> u64 {
    let before = rig.flushes();
    work();
    rig.flushes() - before
}

/// What the areas are: where they begin, and what they allow.
fn shape<F: PageFormat, const AWAY: bool>(space: &AddressSpace<Model<'_, F, AWAY>>) -> Vec<(u64, Protection)> {
    space.vmas(bounds()).map(|area| (area.range.start().get() - AT, area.kind.protection)).collect()
}

fn taken_and_given<F: PageFormat>(size: PageSize) {
    let pages = if size == PageSize::Size4K { 1200 } else { 6 };
    with_format::<F, false>(48, 2, 3, &no_faults(), |rig| {
        let space = rig.filled_for_both(size, pages);
        let at = |page: u64| AT + page * size.bytes();
        let (from, to) = (pages / 3, pages / 2);
        let part = span(at(from), (to - from) * size.bytes());
        let protect = |rights| {
            flushes(rig, || {
                rig.on(0, |cx| rig.vm.protect(cx, &space, part, rights).expect("whole pages"));
            })
        };
        assert_eq!(protect(READ), 1, "one for all");
        assert_eq!(shape(&space), [(0, WRITE), (at(from) - AT, READ), (at(to) - AT, WRITE)]);
        for cpu in [0, 1] {
            rig.on(cpu, |cx| {
                for page in 0..pages {
                    let expected = if (from..to).contains(&page) { denied(at(page)) } else { Ok(()) };
                    assert_eq!(rig.store(cx, &space, at(page), page + 1), expected, "page {page}");
                    assert_eq!(rig.load(cx, &space, at(page)), Ok(page + 1));
                }
            });
        }
        // Again: there is nothing to do.
        assert_eq!(protect(READ), 0);
        // A refusal of arm64's drops nothing, so what refused goes by one flush.
        let given = u64::from(!F::FAULT_DROPS);
        assert_eq!(protect(EXEC), given);
        assert_eq!(protect(WRITE), 1);
        assert_eq!(shape(&space), [(0, WRITE)], "joined again");
        let reused = space.counters().reused;
        for cpu in [0, 1] {
            rig.on(cpu, |cx| {
                (0..pages).for_each(|page| assert_eq!(rig.store(cx, &space, at(page), 7), Ok(()), "page {page}"));
            });
        }
        assert_eq!(space.counters().reused, reused, "at once, for who has the only reference");
        assert_eq!((protect(READ), protect(WRITE)), (1, given));
        rig.end_for_both(space);
    });
}

fn shared_by_fork<F: PageFormat>(rights: [Protection; 2]) {
    with_format::<F, false>(32, 2, 4, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 8);
        let all = span(AT, 0x8000);
        let child = rig.on(0, |cx| {
            let child = rig.vm.fork(cx, &space).expect("memory");
            rights.into_iter().for_each(|rights| rig.vm.protect(cx, &space, all, rights).expect("an area"));
            assert_eq!(rig.store(cx, &space, AT, 100), Ok(()));
            child
        });
        assert_eq!(space.counters().copied, 1, "the child has it too");
        rig.on(1, |cx| {
            rig.leave(cx, &space);
            rig.enter(cx, &child);
            (0..8).for_each(|page| assert_eq!(rig.load(cx, &child, AT + page * 0x1000), Ok(page + 1)));
            rig.leave(cx, &child);
            rig.enter(cx, &space);
        });
        rig.on(0, |cx| rig.vm.destroy(cx, child).expect("nobody uses it"));
        rig.end_for_both(space);
    });
}

fn away<F: PageFormat>() {
    with_format::<F, true>(16, 2, 5, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        rig.on(0, |cx| {
            rig.page_out(cx, &space, AT);
            rig.page_out(cx, &space, AT + 0x1000);
            let there = with!(Usage::default(), present = 2, swapped = 2);
            assert_eq!(rig.vm.usage(cx, &space, span(AT, 0x4000)), Ok(there));
            rig.vm.protect(cx, &space, span(AT, 0x2000), READ).expect("an area");
            assert_eq!(rig.vm.usage(cx, &space, span(AT, 0x4000)), Ok(there), "it stays where it is");
            assert_eq!(rig.load(cx, &space, AT), Ok(1));
            assert_eq!(rig.store(cx, &space, AT, 9), denied(AT), "as its area allows now");
            rig.vm.protect(cx, &space, span(AT, 0x2000), WRITE).expect("an area");
            assert_eq!(rig.store(cx, &space, AT, 9), Ok(()));
            assert_eq!(rig.load(cx, &space, AT + 0x1000), Ok(2));
        });
        rig.end_for_both(space);
    });
}

/// Whether the other CPU still had the old translation.
fn moving<F: PageFormat>(seed: u64) -> bool {
    let mut stale = false;
    with_format::<F, true>(16, 2, seed, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        let deferred = rig.deferred();
        let (page, before) = rig.on(0, |cx| {
            let before = rig.leaf(cx, &space, AT);
            (rig.vm.unhook(cx, rig.hold(before.frame), &deferred).expect("nobody else has it"), before)
        });
        // The other CPU has the old translation, and nobody has flushed.
        stale = rig.mmu.store(CpuId::new(1), VirtAddr::new(AT), 5).is_ok();
        rig.on(0, |cx| rig.vm.protect(cx, &space, span(AT, 0x1000), READ).expect("an area"));
        assert!(rig.mmu.store(CpuId::new(1), VirtAddr::new(AT), 6).is_err(), "no store goes on after that");
        rig.on(0, |cx| {
            page.put_back(cx);
            let after = rig.leaf(cx, &space, AT);
            assert_eq!(after, Leaf { flags: before.flags.without(Flags::WRITE), ..before });
            assert_eq!(rig.store(cx, &space, AT, 9), denied(AT));
            assert_eq!(rig.load(cx, &space, AT), Ok(if stale { 5 } else { 1 }));
        });
        rig.end_for_both(space);
    });
    stale
}

fn pinned<F: PageFormat>(forks: bool) {
    with_format::<F, false>(32, 2, 7, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        rig.on(0, |cx| {
            let first = span(AT, 0x1000);
            let pins = rig.pin(cx, &space, first);
            rig.vm.protect(cx, &space, first, READ).expect("an area");
            let child = forks.then(|| rig.vm.fork(cx, &space).expect("memory"));
            rig.vm.protect(cx, &space, first, WRITE).expect("an area");
            assert_eq!(rig.store(cx, &space, AT, 70), Ok(()));
            assert_eq!(rig.leaf(cx, &space, AT).frame, pins[0].extent().base(), "under its device");
            if let Some(child) = child {
                rig.enter(cx, &child);
                rig.leave(cx, &space);
                assert_eq!(rig.load(cx, &child, AT), Ok(1));
                rig.enter(cx, &space);
                rig.leave(cx, &child);
                rig.vm.destroy(cx, child).expect("nobody uses it");
            }
            rig.unpin(cx, &space, pins);
        });
        assert_eq!(space.counters().copied, 0);
        rig.end_for_both(space);
    });
}

/// Also while another process's page of the same place is just moving, which may be any page: whoever stores waits until that is over.
#[test]
fn a_pinned_page_stays_while_anothers_moves() {
    for moves in [false, true] {
        with_format::<Metered, true>(32, 2, 8, &no_faults(), |rig| {
            let space = rig.filled_for_both(PageSize::Size4K, 1);
            rig.on(0, |cx| {
                let (first, at) = (span(AT, 0x1000), VirtAddr::new(AT));
                let child = rig.vm.fork(cx, &space).expect("memory");
                // From here on each has its own.
                let pins = rig.pin(cx, &space, first);
                rig.vm.protect(cx, &space, first, READ).expect("an area");
                rig.vm.protect(cx, &space, first, WRITE).expect("an area");
                let pinned = rig.leaf(cx, &space, AT);
                assert_eq!(pinned.frame, pins[0].extent().base());
                assert!(!pinned.flags.contains(Flags::WRITE), "the next store asks whose it is");
                let deferred = rig.deferred();
                let away = rig.unhook(cx, &child, AT, &deferred);
                assert_eq!(rig.vm.fault(cx, &space, at, Access::Write), Ok(Served::Meanwhile));
                assert_eq!(rig.leaf(cx, &space, AT).frame, pinned.frame, "under its device");
                if moves {
                    assert!(away.move_elsewhere(cx));
                } else {
                    away.put_back(cx);
                }
                assert_eq!(rig.vm.fault(cx, &space, at, Access::Write), Ok(Served::Reused));
                assert_eq!(rig.leaf(cx, &space, AT).frame, pinned.frame, "under its device");
                rig.vm.destroy(cx, child).expect("nobody uses it");
                rig.unpin(cx, &space, pins);
            });
            rig.end_for_both(space);
        });
    }
}

/// Who shares a page, pinned or not, does not see what others store: a page that another process has too is copied though the space has
/// pins.
#[test]
fn what_others_have_is_copied_beside_pins() {
    with_format::<Metered, true>(32, 2, 8, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        rig.on(0, |cx| {
            let child = rig.vm.fork(cx, &space).expect("memory");
            let pins = rig.pin(cx, &space, span(AT + 0x3000, 0x1000));
            assert_eq!(rig.store(cx, &space, AT, 50), Ok(()));
            rig.enter(cx, &child);
            rig.leave(cx, &space);
            assert_eq!(rig.load(cx, &child, AT), Ok(1));
            rig.enter(cx, &space);
            rig.leave(cx, &child);
            rig.vm.destroy(cx, child).expect("nobody uses it");
            rig.unpin(cx, &space, pins);
        });
        rig.end_for_both(space);
    });
}

fn of_shared_objects<F: PageFormat>() {
    as_first::<F, false>(16, 2, 9, |rig, cx| {
        let object = rig.vm.create_shared(cx, 16, PageSize::Size4K, false).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        for at in [AT, 2 * AT] {
            rig.vm.map(cx, &space, span(at, 0x1_0000), SMALL, Backing::Shared(&object, 0)).expect("an area");
        }
        rig.enter(cx, &space);
        (0..16).for_each(|page| rig.store(cx, &space, AT + page * 0x1000, page + 1).expect("memory"));
        rig.vm.protect(cx, &space, span(AT, 0x1_0000), READ).expect("an area");
        assert_eq!(rig.store(cx, &space, AT, 9), denied(AT));
        assert_eq!(rig.store(cx, &space, 2 * AT, 9), Ok(()), "the other area is as it was");
        assert_eq!(rig.load(cx, &space, AT), Ok(9));
        rig.vm.protect(cx, &space, span(AT, 0x1_0000), WRITE).expect("an area");
        let reused = space.counters().reused;
        assert_eq!(rig.store(cx, &space, AT + 0x5000, 10), Ok(()));
        assert_eq!(space.counters().reused, reused, "writable at once");
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// Several areas, some with the rights already, of several objects: those that show adjoining pages of one object become one.
#[test]
fn neighbours_that_say_the_same_are_one() {
    with_cpu(16, 1, 10, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x8000), SMALL);
        rig.vm.map(cx, &space, span(AT + 0x8000, 0x4000), SMALL.allowing(READ), Backing::Private).expect("an area");
        rig.enter(cx, &space);
        let mut protect = |page: u64, pages: u64, rights| {
            rig.vm.protect(cx, &space, span(AT + page * 0x1000, pages * 0x1000), rights).expect("areas");
            shape(&space)
        };
        assert_eq!(protect(2, 4, READ), [(0, WRITE), (0x2000, READ), (0x6000, WRITE), (0x8000, READ)]);
        assert_eq!(protect(4, 1, EXEC).len(), 6);
        assert_eq!(protect(3, 3, READ), [(0, WRITE), (0x2000, READ), (0x6000, WRITE), (0x8000, READ)]);
        assert_eq!(protect(1, 2, READ), [(0, WRITE), (0x1000, READ), (0x6000, WRITE), (0x8000, READ)], "at its left");
        // Two objects: what a page belongs to is another.
        assert_eq!(protect(0, 12, READ), [(0, READ), (0x8000, READ)]);
        assert_eq!(protect(5, 5, WRITE), [(0, READ), (0x5000, WRITE), (0x8000, WRITE), (0xa000, READ)]);
        assert_eq!(protect(0, 12, WRITE), [(0, WRITE), (0x8000, WRITE)]);
        rig.end(cx, space);
    });
}

/// What user mode may not reach is refused it, mapped or not, and served to the kernel, which runs nothing that user mode may reach.
#[test]
fn user_mode_is_denied_what_is_the_kernels() {
    const ALL: Protection = Protection::WRITE.with(Protection::EXEC);
    with_cpu(16, 1, 12, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x4000), SMALL.allowing(ALL));
        for (page, access) in [Access::Read, Access::Write, Access::Exec].into_iter().enumerate() {
            let at = VirtAddr::new(AT + ((page as u64) << 12));
            let user = FaultAccess { access, user: true };
            assert_eq!(rig.vm.fault(cx, &space, at, user), Err(VmError::Denied { at }), "{access:?}");
            assert!(rig.vm.fault(cx, &space, at, access).is_ok(), "{access:?}");
            assert_eq!(rig.vm.fault(cx, &space, at, user), Err(VmError::Denied { at }), "{access:?} of what is there");
            rig.vm.protect(cx, &space, span(at.get(), 0x1000), ALL.with(Protection::USER)).expect("an area");
            assert_eq!(rig.vm.fault(cx, &space, at, user), Ok(Served::Meanwhile), "{access:?}");
            let kernel = if access == Access::Exec { Err(VmError::Denied { at }) } else { Ok(Served::Meanwhile) };
            assert_eq!(rig.vm.fault(cx, &space, at, access), kernel, "{access:?} by the kernel");
        }
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A refusal says where and why, and nothing is different after it.
#[test]
fn what_cannot_be_is_refused() {
    with_cpu(32, 1, 11, |rig, cx| {
        rig.fill_pool(cx, 2);
        let space = rig.vm.create(cx, span(AT, 1 << 30)).expect("memory");
        let large = VmaKind::private(PageSize::Size2M).pooled();
        let device = SMALL.allowing(WRITE.with(Protection::UNCACHED));
        for (at, bytes, kind) in [(0, 0x4000, SMALL), (0x5000, 0x3000, SMALL), (4 << 20, 4 << 20, large)] {
            rig.vm.map(cx, &space, span(AT + at, bytes), kind, Backing::Private).expect("an area");
        }
        let frames = Extent::new(Pfn::new(1 << 24), 2).expect("in range");
        // SAFETY: there is no such memory, and nobody accesses it.
        let registers = unsafe { rig.vm.create_given(cx, frames, PageSize::Size4K) }.expect("two pages");
        rig.vm.map(cx, &space, span(AT + (8 << 20), 0x2000), device, Backing::Shared(&registers, 0)).expect("an area");
        rig.enter(cx, &space);
        [0, 0x7000, 4 << 20].into_iter().for_each(|at| rig.store(cx, &space, AT + at, 5).expect("memory"));
        let before: Vec<_> = space.vmas(span(AT, 1 << 30)).collect();
        let mut refused = |at: u64, bytes, rights, error| {
            let refused = rig.vm.protect(cx, &space, span(at, bytes), rights);
            assert_eq!(refused, Err(error), "{at:#x}");
            assert!(space.vmas(span(AT, 1 << 30)).eq(before.iter().copied()));
            [0, 0x7000, 4 << 20].into_iter().for_each(|at| assert_eq!(rig.store(cx, &space, AT + at, 5), Ok(())));
        };
        let at = |at: u64| VirtAddr::new(AT + at);
        refused(AT - 0x1000, 0x2000, READ, VmError::OutOfBounds { at: VirtAddr::new(AT - 0x1000) });
        refused(AT + (1 << 30) - 0x1000, 0x2000, READ, VmError::OutOfBounds { at: at((1 << 30) - 0x1000) });
        refused(AT, 0x8000, READ, VmError::NoArea { at: at(0x4000) });
        refused(AT + 0x4000, 0x2000, READ, VmError::NoArea { at: at(0x4000) });
        refused(AT + 0x7000, 0x2000, READ, VmError::NoArea { at: at(0x8000) });
        refused(AT + (4 << 20), 0x1000, READ, VmError::Misaligned { at: at((4 << 20) + 0x1000) });
        refused(AT + (6 << 20) + 0x1000, (2 << 20) - 0x1000, READ, VmError::Misaligned { at: at((6 << 20) + 0x1000) });
        refused(AT, 0x2000, WRITE.with(Protection::UNCACHED), VmError::Denied { at: at(0) });
        refused(AT + 0x5000, 0x1000, READ.with(Protection::WRITE_THROUGH), VmError::Denied { at: at(0x5000) });
        // Attributes are kept by those that have them.
        rig.vm.protect(cx, &space, span(AT + (8 << 20), 0x1000), READ).expect("an area");
        let kept = space.find_vma(cx, at(8 << 20)).expect("an area").kind.protection;
        assert_eq!(kept, READ.with(Protection::UNCACHED));
        rig.end(cx, space);
        rig.vm.close(cx, registers).expect("its own");
    });
}

/// Where no memory is left to cut an area, nothing has changed, though another end could have been cut.
#[test]
fn without_memory_for_a_cut_nothing_changes() {
    with_cpu(8, 1, 12, |rig, cx| {
        let space = rig.space(cx, span(AT, 1 << 20), SMALL);
        rig.enter(cx, &space);
        rig.store(cx, &space, AT + 0x1000, 5).expect("memory");
        let mut taken: Vec<Frozen> = Vec::new();
        let mut refusals = 0;
        // Slabs have room for some; then for one of two cuts; then for none.
        for page in (1..250).step_by(2) {
            while let Ok(block) = rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)) {
                taken.push(block);
            }
            let before = shape(&space);
            let part = span(AT + page * 0x1000, 0x1000);
            match rig.vm.protect(cx, &space, part, READ) {
                Ok(()) => assert_eq!(refusals, 0),
                Err(error) => {
                    assert_eq!((error, shape(&space)), (VmError::NoMemory, before));
                    refusals += 1;
                }
            }
        }
        assert!(refusals > 0 && shape(&space).len() > 2, "{refusals}");
        taken.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
        rig.end(cx, space);
    });
}

/// Folded groups lose and get the right to store as they are; for other rights all of them are unfolded by one flush.
#[test]
fn folded_groups_cost_one_flush_more() {
    with_format::<Aarch64, false>(32, 2, 13, &no_faults(), |rig| {
        let all = span(AT, 64 * 4096);
        let space = rig.on(0, |cx| {
            let space = rig.space(cx, all, SMALL);
            rig.vm.prefault(&space, all, None).work(cx, &Never).expect("memory");
            space
        });
        let look = || {
            for cpu in [0, 1] {
                (0..64).for_each(|page| _ = rig.mmu.load(CpuId::new(cpu), VirtAddr::new(AT + page * 4096)));
                assert_eq!(rig.mmu.check(), Ok(()));
            }
        };
        [0, 1].into_iter().for_each(|cpu| rig.on(cpu, |cx| rig.enter(cx, &space)));
        look();
        let protect = |range, rights| {
            let flushes = flushes(rig, || {
                rig.on(0, |cx| rig.vm.protect(cx, &space, range, rights).expect("an area"));
            });
            look();
            flushes
        };
        assert_eq!((protect(all, READ), protect(all, WRITE)), (1, 1));
        assert_eq!(protect(all, EXEC), 2, "unfolded, then changed");
        assert_eq!(protect(all, WRITE), 1, "they are single now");
        rig.on(1, |cx| assert_eq!(rig.vm.fault(cx, &space, VirtAddr::new(AT), Access::Write).map(|_| ()), Ok(())));
        rig.end_for_both(space);
    });
}

on_both_formats! {
    fn rights_are_taken_by_one_flush_and_given_by_none: taken_and_given (each [PageSize::Size4K, PageSize::Size2M]);
    /// What fork has made read-only in an area that allows stores is copied by the next one, whatever rights there were meanwhile.
    fn what_a_fork_shares_is_still_copied: shared_by_fork (each [[READ, WRITE], [EXEC, WRITE], [READ, WRITE.with(Protection::EXEC)]]);
    fn pages_in_swap_stay_there: away ();
    /// A page that is just moving comes back with what its area still allows, and what its flush is owed for is paid.
    fn a_page_that_moves_comes_back_with_the_rights_of_now: moving (stale);
    fn a_pinned_page_stays_under_its_device: pinned (each [false, true]);
    fn areas_of_one_object_have_rights_of_their_own: of_shared_objects ();
}
