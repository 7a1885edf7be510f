//! Pages that are taken out of their page tables: they come back as they were, move, or go away, and nobody loses a store.

use crate::support::{
    AT, Cx, Handle, Metered, Model, Rig, SMALL, as_first, at_leaf, bounds, no_faults, span, with_format,
};
use hugemm_base::{Never, Order, PageSize, Pfn, VirtAddr};
use hugemm_frames::{AllocRequest, FolioRef, Frozen};
use hugemm_paging::{Flags, Leaf, Lookup};
use hugemm_vm::{Access, Backing, Protection, Served, UnhookedPage, Usage, VmError, VmaKind};
use std::cell::Cell;
use std::sync::atomic::Ordering;

pub(super) const SIZES: [PageSize; 2] = [PageSize::Size4K, PageSize::Size2M];

pub(super) type Away<'h> = Rig<'h, Metered, true>;
type Page<'d, 'h, const AWAY: bool = true> = UnhookedPage<'d, 'h, Model<'h, Metered, AWAY>>;

pub(super) fn with_rig(mib: u64, seed: u64, test: impl for<'h> FnOnce(&Away<'h>)) {
    with_format(mib, 2, seed, &no_faults(), test);
}

/// A space in use with so many pages at `AT`, all of them written.
pub(super) fn filled<'v, 'h, const AWAY: bool>(
    rig: &'v Rig<'h, Metered, AWAY>,
    cx: &mut Cx<'_, 'h>,
    size: PageSize,
    pages: u64,
) -> Handle<'v, 'h, Metered, AWAY> {
    let space = rig.space(cx, span(AT, pages * size.bytes()), VmaKind::private(size));
    rig.enter(cx, &space);
    (0..pages).for_each(|page| rig.store(cx, &space, AT + page * size.bytes(), page + 1).expect("memory"));
    space
}

fn hold_mapped<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, frame: Pfn) -> Option<FolioRef> {
    // SAFETY: the tests' pager lists nothing, so that `let_go` may drop it.
    unsafe { rig.vm.hold_mapped(cx, frame) }
}

pub(super) fn let_go<'h>(rig: &Away<'h>, cx: &Cx<'_, 'h>, folio: FolioRef) {
    let _ = rig.vm.frames().put(cx, folio);
}

/// Stores a page until there have been so many.
#[allow(clippy::result_large_err, reason = "the page comes back")]
pub(super) fn page_out<'d, 'h>(
    rig: &Away<'h>,
    cx: &mut Cx<'_, 'h>,
    page: Page<'d, 'h>,
    room: u64,
) -> Result<u64, (VmError, Page<'d, 'h>)> {
    let store = |cx: &Cx<'_, 'h>, block: &Frozen, page| rig.vm.pager().store(cx, block, page);
    let evict = |cx: &Cx<'_, 'h>, block| match room {
        0 => Err((VmError::NoMemory, block)),
        _ => Ok((store(cx, &block, 0), Some(block))),
    };
    let store = |cx: &Cx<'_, 'h>, block: &Frozen, page| {
        if page < room { Ok(store(cx, block, page)) } else { Err(VmError::NoMemory) }
    };
    // SAFETY: the slots are new ones of this pager.
    unsafe { page.page_out(cx, evict, store) }
}

/// What a leaf allowed and what was known of its use comes back with it, whether it was put back, could not be stored, or
/// moved; and so does its content.
#[test]
fn a_leaf_comes_back_as_it_was() {
    for size in SIZES {
        as_first::<Metered, true>(32, 2, 91, |rig, cx| {
            let space = filled(rig, cx, size, 4);
            let at = |index: u64| AT + index * size.bytes();
            // From here on no CPU looks at any of them.
            rig.leave(cx, &space);
            // Written; written and not used since; never; of an area that may only be read.
            rig.vm.unmap(cx, &space, span(at(2), 2 * size.bytes())).expect("unmapped");
            let read_only = VmaKind::private(size).allowing(Protection::USER);
            for (index, kind) in [(2, VmaKind::private(size)), (3, read_only)] {
                rig.vm.map(cx, &space, span(at(index), size.bytes()), kind, Backing::Private).expect("an area");
                let page = span(at(index), size.bytes());
                rig.vm.prefault(&space, page, None).work(cx, &Never).expect("memory");
            }
            assert_eq!(rig.vm.test_and_clear_young(cx, &space, span(at(1), size.bytes()), |_| ()), Ok(size.pages()));
            let deferred = rig.deferred();
            let bits = [Flags::HARDWARE, Flags::DIRTY, Flags::ACCESSED, Flags::ACCESSED];
            for (index, bits) in (0..).zip(bits) {
                let before = rig.leaf(cx, &space, at(index));
                assert_eq!(before.flags & Flags::HARDWARE, bits);
                assert_eq!(before.flags.contains(Flags::WRITE), index < 3);
                let page = rig.unhook(cx, &space, at(index), &deferred);
                assert!(matches!(rig.vm.lookup(cx, &space, VirtAddr::new(at(index))), Lookup::Owner(_)));
                page.put_back(cx);
                assert_eq!(rig.leaf(cx, &space, at(index)), before);
                // Also when there is no room for it, or for the last of it.
                for room in [0, size.pages() - 1] {
                    let page = rig.unhook(cx, &space, at(index), &deferred);
                    let (error, page) = page_out(rig, cx, page, room).expect_err("no room");
                    assert_eq!(error, VmError::NoMemory);
                    assert_eq!(rig.vm.pager().used(), 0, "what was stored of it is given up");
                    page.put_back(cx);
                    assert_eq!(rig.leaf(cx, &space, at(index)), before);
                }
                if size == PageSize::Size4K {
                    let page = rig.unhook(cx, &space, at(index), &deferred);
                    assert!(page.move_elsewhere(cx));
                    let moved = rig.leaf(cx, &space, at(index));
                    assert_ne!(moved.frame, before.frame);
                    assert_eq!(Leaf { frame: before.frame, ..moved }, before);
                    assert_eq!(rig.vm.frames().references(before.frame), 0, "the old frame is free");
                }
                let now = rig.leaf(cx, &space, at(index));
                assert_eq!(rig.vm.frames().references(now.frame), 1);
            }
            rig.enter(cx, &space);
            for index in 0..4 {
                let expected = if index < 2 { index + 1 } else { 0 };
                assert_eq!(rig.load(cx, &space, at(index)), Ok(expected));
            }
            rig.leave(cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
            assert_eq!(rig.vm.pages_lost(), 0);
        });
    }
}

/// While pages are counted one that is away comes back: it is in memory throughout, and counted once.
#[test]
fn a_page_that_comes_back_meanwhile_is_counted() {
    for (size, moves) in [(PageSize::Size4K, false), (PageSize::Size4K, true), (PageSize::Size2M, false)] {
        as_first::<Metered, true>(32, 2, 90, |rig, cx| {
            let space = filled(rig, cx, size, 3);
            rig.leave(cx, &space);
            let deferred = rig.deferred();
            let away = Cell::new(Some(rig.unhook(cx, &space, AT, &deferred)));
            let back = || {
                let page = away.take().expect("once");
                rig.on(1, |cx| if moves { assert!(page.move_elsewhere(cx)) } else { page.put_back(cx) });
            };
            let whole = span(AT, 3 * size.bytes());
            let mut usage = Usage::default();
            at_leaf(&back, || usage = rig.vm.usage(cx, &space, whole).expect("in the space"));
            assert_eq!((usage.present, usage.swapped), (whole.pages(), 0));
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    }
}

/// A page of several processes leaves all of them and comes back to all, read-only as it was; whoever has unmapped it
/// meanwhile does not get it, and nobody's references are left over.
#[test]
fn a_page_comes_back_where_it_is_still_wanted() {
    for size in SIZES {
        for moves in [false, true].into_iter().take(if size == PageSize::Size4K { 2 } else { 1 }) {
            as_first::<Metered, true>(32, 2, 92, |rig, cx| {
                let parent = filled(rig, cx, size, 1);
                let children = [0, 1].map(|_| rig.vm.fork(cx, &parent).expect("forked"));
                let deferred = rig.deferred();
                let spaces = [&children[0], &children[1], &parent];
                for gone in 0..=3 {
                    let still = &spaces[gone.min(2)..];
                    let page = rig.unhook(cx, still[0], AT, &deferred);
                    let old = page.head();
                    for space in still {
                        assert!(matches!(rig.vm.lookup(cx, space, VirtAddr::new(AT)), Lookup::Owner(_)));
                    }
                    if gone < 3 {
                        rig.vm.unmap(cx, spaces[gone], span(AT, size.bytes())).expect("unmapped");
                    }
                    if moves {
                        assert!(page.move_elsewhere(cx));
                        assert_eq!(rig.vm.frames().references(old), 0);
                    } else {
                        page.put_back(cx);
                    }
                    let left = &spaces[(gone + 1).min(3)..];
                    for space in left {
                        let leaf = rig.leaf(cx, space, AT);
                        assert_eq!(rig.vm.frames().references(leaf.frame), left.len() as u64);
                        assert!(!leaf.flags.contains(Flags::WRITE), "it was shared");
                    }
                    if left.is_empty() {
                        assert_eq!(rig.vm.frames().references(old), 0, "nobody wants it");
                        break;
                    }
                }
                rig.leave(cx, &parent);
                for space in [parent].into_iter().chain(children) {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
            });
        }
    }
}

/// A page to which somebody else has a reference stays where it is: nothing is taken if that is known before, and it comes
/// back as it was if it is found out after the flush.
#[test]
fn a_page_that_somebody_holds_stays() {
    for size in SIZES {
        as_first::<Metered, true>(32, 2, 93, |rig, cx| {
            let space = filled(rig, cx, size, 1);
            let deferred = rig.deferred();
            let object = rig.vm.create_shared(cx, size.pages(), size, false).expect("an object");
            let shared = span(AT << 1, size.bytes());
            rig.vm.map(cx, &space, shared, VmaKind::private(size), Backing::Shared(&object, 0)).expect("an area");
            rig.store(cx, &space, AT << 1, 1).expect("memory");
            for (at, moves) in [AT, AT << 1].into_iter().flat_map(|at| [(at, false), (at, size == PageSize::Size4K)]) {
                let before = rig.leaf(cx, &space, at);
                let late = {
                    let page = rig.unhook(cx, &space, at, &deferred);
                    let late = rig.hold(before.frame);
                    if moves {
                        assert!(!page.move_elsewhere(cx), "somebody came late");
                    } else {
                        let (error, page) = page_out(rig, cx, page, size.pages()).expect_err("somebody came late");
                        assert_eq!(error, VmError::InUse);
                        page.put_back(cx);
                    }
                    late
                };
                if at == AT {
                    assert_eq!(rig.leaf(cx, &space, at), before);
                }
                let refused = rig.vm.unhook(cx, rig.hold(before.frame), &deferred).expect_err("held");
                assert_eq!(refused.pfn(), before.frame);
                let_go(rig, cx, refused);
                let_go(rig, cx, late);
                rig.store(cx, &space, at, 9).expect("it is there");
                assert_eq!(rig.leaf(cx, &space, at).frame, before.frame);
                let page = rig.unhook(cx, &space, at, &deferred);
                page.put_back(cx);
                assert_eq!(rig.load(cx, &space, at), Ok(9));
            }
            assert_eq!(space.counters().copied, 0);
            // What no object has is nobody's to take away.
            let block = rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)).expect("memory");
            let own = rig.vm.frames().count(block).expect("a page");
            let own = rig.vm.unhook(cx, own, &deferred).expect_err("of no object");
            let_go(rig, cx, own);
            rig.vm.close(cx, object).expect("its own");
            rig.leave(cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    }
}

/// A shared object's page leaves every space that shows it, is stored once, and comes back once, wherever it is touched
/// first: by a fault, by filling the object, or by filling one of its areas.
#[test]
fn a_shared_page_goes_away_once() {
    for (way, size) in (0..3).flat_map(|way| SIZES.map(|size| (way, size))) {
        as_first::<Metered, true>(32, 2, 94, |rig, cx| {
            let object = rig.vm.create_shared(cx, 2 * size.pages(), size, false).expect("an object");
            let spaces = [0, 1].map(|_| rig.vm.create(cx, bounds()).expect("a space"));
            let area = span(AT, 2 * size.bytes());
            for space in &spaces {
                rig.vm.map(cx, space, area, VmaKind::private(size), Backing::Shared(&object, 0)).expect("an area");
                rig.enter(cx, space);
                for index in 0..2 {
                    rig.store(cx, space, AT + index * size.bytes(), index + 7).expect("memory");
                }
                rig.leave(cx, space);
            }
            let second = AT + size.bytes();
            let deferred = rig.deferred();
            let page = rig.unhook(cx, &spaces[0], second, &deferred);
            for space in &spaces {
                assert_eq!(rig.vm.lookup(cx, space, VirtAddr::new(second)), Lookup::Absent);
            }
            assert_eq!(page_out(rig, cx, page, size.pages()).ok(), Some(size.pages()));
            assert_eq!(rig.vm.pager().used() as u64, size.pages());
            match way {
                0 => {
                    rig.enter(cx, &spaces[1]);
                    assert_eq!(rig.load(cx, &spaces[1], second), Ok(8));
                    rig.leave(cx, &spaces[1]);
                }
                1 => {
                    let filling = rig.vm.prefault_shared(&object, 0, 2 * size.pages());
                    filling.work(cx, &hugemm_base::Never).expect("memory");
                    assert_eq!(filling.done(), 2 * size.pages());
                }
                _ => rig.vm.prefault(&spaces[1], area, None).work(cx, &hugemm_base::Never).expect("memory"),
            }
            assert_eq!(rig.vm.pager().used(), 0, "it is back");
            rig.enter(cx, &spaces[0]);
            for index in 0..2 {
                assert_eq!(rig.load(cx, &spaces[0], AT + index * size.bytes()), Ok(index + 7));
            }
            rig.leave(cx, &spaces[0]);
            for space in spaces {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
            rig.vm.close(cx, object).expect("its own");
        });
    }
}

/// A page of 2 MiB does not move: where it was asked to, it is back, with all that is in it.
#[test]
fn a_large_page_stays_where_it_is() {
    as_first::<Metered, true>(32, 2, 98, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size2M, 1);
        let last = AT + PageSize::Size2M.bytes() - 8;
        rig.store(cx, &space, last, 7).expect("it is there");
        let (before, used) = (rig.leaf(cx, &space, AT), rig.used(cx));
        let deferred = rig.deferred();
        let page = rig.unhook(cx, &space, AT, &deferred);
        assert!(!page.move_elsewhere(cx));
        assert_eq!((rig.leaf(cx, &space, AT), rig.used(cx)), (before, used));
        assert_eq!((rig.load(cx, &space, AT), rig.load(cx, &space, last)), (Ok(1), Ok(7)));
        rig.leave(cx, &space);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A frame that may be anything is held only if it is a small page of some object, mapped where its descriptor says.
#[test]
fn only_mapped_pages_are_held_for_moving() {
    as_first::<Metered, true>(32, 2, 98, |rig, cx| {
        rig.fill_pool(cx, 1);
        let space = filled(rig, cx, PageSize::Size4K, 4);
        let at = |index: u64| AT + (index << 12);
        let head = rig.leaf(cx, &space, at(1)).frame;
        let held = hold_mapped(rig, cx, head).expect("a page");
        assert_eq!((held.pfn(), rig.vm.frames().references(head)), (head, 2));
        let_go(rig, cx, held);
        // Its descriptor still names its owner, which has another page there or none.
        let other = rig.leaf(cx, &space, at(2)).frame;
        rig.vm.unmap(cx, &space, span(at(1), 0x1000)).expect("unmapped");
        assert_eq!(hold_mapped(rig, cx, head).map(|held| held.pfn()), None);
        let child = rig.vm.fork(cx, &space).expect("forked");
        rig.store(cx, &space, at(2), 9).expect("a copy");
        let copy = rig.leaf(cx, &space, at(2)).frame;
        for (page, space) in [(copy, &space), (other, &child)] {
            let held = hold_mapped(rig, cx, page).expect("either's own");
            assert_eq!(rig.leaf(cx, space, at(2)).frame, held.pfn());
            let_go(rig, cx, held);
        }
        // Large pages, pages of the pool, and what is no page at all.
        let large = VmaKind::private(PageSize::Size2M);
        rig.vm.map(cx, &space, span(2 * AT, 2 << 20), large, Backing::Private).expect("an area");
        rig.vm.map(cx, &space, span(3 * AT, 2 << 20), large.pooled(), Backing::Private).expect("an area");
        for at in [2 * AT, 3 * AT] {
            rig.store(cx, &space, at, 1).expect("memory");
            let head = rig.leaf(cx, &space, at).frame;
            assert_eq!(hold_mapped(rig, cx, head).map(|held| held.pfn()), None);
            assert_eq!(rig.vm.frames().references(head), 1);
        }
        assert_eq!(hold_mapped(rig, cx, Pfn::new(1 << 40)).map(|held| held.pfn()), None);
        // A shared object's, as long as the object has it.
        let object = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("an object");
        let small = SMALL;
        rig.vm.map(cx, &space, span(4 * AT, 0x4000), small, Backing::Shared(&object, 0)).expect("an area");
        rig.store(cx, &space, 4 * AT + 0x2000, 1).expect("memory");
        let shared = rig.leaf(cx, &space, 4 * AT + 0x2000).frame;
        let held = hold_mapped(rig, cx, shared).expect("the object's");
        assert_eq!(held.pfn(), shared);
        let_go(rig, cx, held);
        // But no large one's.
        let pages = rig.vm.create_shared(cx, 512, PageSize::Size2M, false).expect("an object");
        rig.vm.map(cx, &space, span(5 * AT, 2 << 20), large, Backing::Shared(&pages, 0)).expect("an area");
        rig.store(cx, &space, 5 * AT, 1).expect("memory");
        let head = rig.leaf(cx, &space, 5 * AT).frame;
        assert_eq!(hold_mapped(rig, cx, head).map(|held| held.pfn()), None);
        rig.vm.close(cx, pages).expect("its own");
        rig.vm.close(cx, object).expect("its own");
        rig.leave(cx, &space);
        for space in [space, child] {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
        assert_eq!(hold_mapped(rig, cx, shared).map(|held| held.pfn()), None, "its object is gone");
    });
}

/// A page that cannot move, because no frame is free or its memory is bad, is where it was.
#[test]
fn a_page_that_cannot_move_stays() {
    as_first::<Metered, true>(8, 2, 99, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, 2);
        let before = rig.leaf(cx, &space, AT);
        let deferred = rig.deferred();
        let mut taken = Vec::new();
        while let Ok(block) = rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)) {
            taken.push(block);
        }
        let page = rig.unhook(cx, &space, AT, &deferred);
        let asked = || rig.vm.pager().asked.load(Ordering::Relaxed);
        let before_that = asked();
        assert!(!page.move_elsewhere(cx), "there is no frame");
        // Whoever reclaimed might wait for the page that is moving.
        assert_eq!(asked(), before_that, "somebody was asked for relief");
        assert_eq!(rig.leaf(cx, &space, AT), before);
        taken.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
        let page = rig.unhook(cx, &space, AT, &deferred);
        let _ = rig.vm.frames().hwpoison(cx, before.frame);
        assert!(!page.move_elsewhere(cx), "its content has gone bad");
        assert_eq!(rig.leaf(cx, &space, AT), before);
        // From then on nobody begins.
        let refused = rig.vm.unhook(cx, rig.hold(before.frame), &deferred);
        let Err(folio) = refused else { panic!("its content is bad") };
        let_go(rig, cx, folio);
        assert_eq!(rig.leaf(cx, &space, AT), before);
        assert_eq!(rig.vm.frames().references(before.frame), 1);
        rig.leave(cx, &space);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// An unhooked page that is dropped, which is a mistake, is counted; its process can go away all the same.
#[test]
fn lost_pages_are_counted() {
    as_first::<Metered, true>(8, 2, 100, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, 2);
        let deferred = rig.deferred();
        for lost in 1..=2 {
            drop(rig.unhook(cx, &space, AT + ((lost - 1) << 12), &deferred));
            assert_eq!(rig.vm.pages_lost(), lost);
            // Nobody waits for it in a fault.
            let again = rig.vm.fault(cx, &space, VirtAddr::new(AT + ((lost - 1) << 12)), Access::Read);
            assert_eq!(again, Ok(Served::Meanwhile));
        }
        deferred.flush(rig.vm.shootdown(), cx);
        rig.leave(cx, &space);
        rig.vm.destroy(cx, space).expect("destroyed");
        // The pages, and the frame with their object.
        rig.keep(3);
    });
}
