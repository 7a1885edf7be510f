//! Folded groups of leaves (arm64's contiguous bit): areas that nobody ages page by page have them, and whoever changes a part
//! unfolds it first. The model MMU reports a group that is not whole, and two translations of one address that differ.

use crate::support::{AT, Cx, Model, Rig, SMALL, as_first, at_supply, no_faults, span, with_format};
use hugemm_base::{CpuId, Never, VirtAddr};
use hugemm_paging::{Aarch64, DeferredUnmap, Flags, Lookup};
use hugemm_vm::{Access, AddressSpace, Discard, Protection};

/// 64 KiB-aligned; four groups.
const PAGES: u64 = 64;

/// Pages that hardware would find to be of a folded group.
fn folded<'h, const AWAY: bool>(rig: &Rig<'h, Aarch64, AWAY>, space: &AddressSpace<Model<'h, Aarch64, AWAY>>) -> u64 {
    let entry = |page: u64| {
        let mut table = hugemm_base::Pfn::containing(space.root());
        for level in (0..4).rev() {
            let index = ((AT >> 12) + page) >> (9 * level) & 511;
            let place = rig.mmu.host().address(table).expect("a table").cast::<u64>();
            // SAFETY: an entry of a table that stays; nobody else is at work.
            let entry = unsafe { place.add(index as usize).read() };
            if level == 0 || entry & 1 == 0 {
                return entry;
            }
            table = hugemm_base::Pfn::new((entry & 0xffff_ffff_f000) >> 12);
        }
        0
    };
    (0..PAGES).filter(|page| entry(*page) & (1 << 52 | 1) == 1 << 52 | 1).count() as u64
}

/// A page is pinned and its area forked.
fn pin_and_fork<'h>(rig: &Rig<'h, Aarch64>, cx: &mut Cx<'_, 'h>) {
    let all = span(AT, PAGES * 4096);
    let space = rig.space(cx, all, SMALL);
    rig.vm.prefault(&space, all, None).work(cx, &Never).expect("memory");
    assert_eq!(folded(rig, &space), PAGES);
    // A fork of an area with a pinned page goes page by page.
    let mut pinned = Vec::new();
    let count = rig.vm.pin(cx, &space, span(AT + 9 * 4096, 4096), Access::Write, None, &Never, |run| pinned.push(run));
    assert_eq!((count, folded(rig, &space)), (Ok(1), PAGES));
    let child = rig.vm.fork(cx, &space).expect("a child");
    assert_eq!(folded(rig, &space), 0);
    rig.unpin(cx, &space, pinned);
    rig.vm.destroy(cx, child).expect("nobody uses it");
    rig.vm.destroy(cx, space).expect("nobody uses it");
}

/// A page is taken out of its entry, and comes back.
fn take_away<'h>(rig: &Rig<'h, Aarch64>, cx: &mut Cx<'_, 'h>) {
    let all = span(AT, PAGES * 4096);
    let space = rig.space(cx, all, SMALL);
    rig.vm.prefault(&space, all, None).work(cx, &Never).expect("memory");
    assert_eq!(folded(rig, &space), PAGES);
    let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT + 3 * 4096)) else { panic!("prefaulted") };
    // SAFETY: mapped, and nobody else is there to let it go.
    let folio = unsafe { rig.vm.frames().get_at(leaf.frame) }.expect("it has a reference");
    // SAFETY: used with this manager's TLBs only.
    let deferred = unsafe { DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
    let page = rig.vm.unhook(cx, folio, &deferred).expect("nobody else has it");
    assert_eq!(folded(rig, &space), PAGES - 16);
    page.put_back(cx);
    rig.vm.destroy(cx, space).expect("nobody uses it");
}

/// A pager ages pages one by one, so what it may take is not folded. What comes to an area when that is locked already is: others have
/// taken away what it was filled with before.
#[test]
fn what_is_aged_page_by_page_is_not_folded() {
    with_format::<Aarch64, true>(32, 2, 1, &no_faults(), |rig| {
        let (all, first) = (span(AT, 4 << 20), span(AT, PAGES * 4096));
        let space = rig.on(0, |cx| {
            let space = rig.space(cx, all, SMALL);
            rig.vm.prefault(&space, first, None).work(cx, &Never).expect("memory");
            assert_eq!(folded(rig, &space), 0);
            space
        });
        let take_away = || {
            rig.on(1, |cx| rig.vm.discard(cx, &space, first, Discard::Now).expect("not locked yet"));
            true
        };
        rig.on(0, |cx| {
            at_supply(&take_away, || rig.vm.lock(cx, &space, all, 1024).expect("within the limit"));
            assert_eq!(folded(rig, &space), PAGES);
        });
        rig.on(0, |cx| rig.vm.destroy(cx, space).expect("nobody uses it"));
    });
}

#[test]
fn single_pages_of_groups() {
    with_format::<Aarch64, false>(32, 1, 1, &no_faults(), |rig| rig.on(0, |cx| pin_and_fork(rig, cx)));
    with_format::<Aarch64, false>(32, 1, 1, &no_faults(), |rig| rig.on(0, |cx| take_away(rig, cx)));
}

#[test]
fn a_part_that_changes_is_unfolded_first() {
    for seed in 0..12 {
        with_format::<Aarch64, false>(32, 2, seed, &no_faults(), |rig| {
            let at = |page: u64| AT + page * 4096;
            let all = || span(AT, PAGES * 4096);
            let look = |cpu: u32| {
                (0..PAGES).for_each(|page| _ = rig.mmu.load(CpuId::new(cpu), VirtAddr::new(at(page))));
                assert_eq!(rig.mmu.check(), Ok(()), "seed {seed}");
            };
            let (parent, child) = rig.on(0, |cx| {
                let parent = rig.space(cx, all(), SMALL);
                rig.vm.prefault(&parent, all(), None).work(cx, &Never).expect("memory");
                assert_eq!(folded(rig, &parent), PAGES, "in blocks, so in groups");
                rig.enter(cx, &parent);
                (0..PAGES).for_each(|page| rig.store(cx, &parent, at(page), page).expect("served"));
                let child = rig.vm.fork(cx, &parent).expect("a child");
                (parent, child)
            });
            rig.on(1, |cx| rig.enter(cx, &parent));
            [0, 1].into_iter().for_each(look);
            assert_eq!(folded(rig, &parent), PAGES, "all of it became read-only");
            rig.on(0, |cx| {
                // Copied, as the child has it too.
                rig.store(cx, &parent, at(5), 105).expect("served");
                look(1);
                assert_eq!(folded(rig, &parent), PAGES - 16);
                rig.vm.destroy(cx, child).expect("nobody uses it");
                // Where it is.
                rig.store(cx, &parent, at(20), 120).expect("served");
                look(1);
                assert_eq!(folded(rig, &parent), PAGES - 32);
                rig.vm.unmap(cx, &parent, span(at(40), 4096)).expect("a part of the area");
                look(1);
                assert_eq!(folded(rig, &parent), PAGES - 48);
                for (page, value) in [(4, 4), (5, 105), (19, 19), (20, 120), (39, 39), (41, 41), (63, 63)] {
                    assert_eq!(rig.load(cx, &parent, at(page)), Ok(value), "page {page}");
                }
                let used = rig.vm.test_and_clear_young(cx, &parent, all(), |_| ()).expect("in the space");
                assert!(used > 0 && folded(rig, &parent) == 16);
            });
            rig.on(1, |cx| rig.leave(cx, &parent));
            rig.on(0, |cx| {
                rig.leave(cx, &parent);
                rig.vm.destroy(cx, parent).expect("nobody uses it");
            });
        });
    }
}

/// Groups whose tables lie in a range as a whole get other rights too, and are given up.
#[test]
fn what_concerns_whole_tables_concerns_their_groups() {
    as_first::<Aarch64, false>(32, 1, 1, |rig, cx| {
        let all = span(AT, 5 << 20);
        let space = rig.space(cx, all, SMALL);
        rig.vm.prefault(&space, all, None).work(cx, &Never).expect("memory");
        assert_eq!(folded(rig, &space), PAGES);
        rig.enter(cx, &space);
        let rights = Protection::USER.with(Protection::WRITE).with(Protection::EXEC);
        rig.vm.protect(cx, &space, all, rights).expect("an area");
        assert_eq!(folded(rig, &space), 0);
        let mut is_mapped = |page: u64| {
            matches!(rig.vm.lookup(cx, &space, VirtAddr::new(AT + page * 4096)), Lookup::Mapped(leaf)
                if leaf.flags.contains(Flags::EXEC | Flags::WRITE))
        };
        assert_eq!((0..5 << 8).find(|page| !is_mapped(*page)), None);
        rig.leave(cx, &space);
        rig.vm.destroy(cx, space).expect("nobody uses it");
    });
}
