//! What somebody knows of a range is heeded where it costs or saves something, and changes no content. On both formats.

use crate::sources::File;
use crate::support::{AT, Metered, SMALL, as_first, bounds, on_both_formats, span, with_cpu, with_format};
use hugemm_base::inject::every_fault;
use hugemm_base::{PageSize, VirtAddr};
use hugemm_paging::{Flags, Lookup, PageFormat};
use hugemm_vm::{Access, Advice, Backing, Pattern, Usage, VmError, VmaKind};
use std::sync::atomic::Ordering;

fn read_ahead<F: PageFormat>() {
    for (advice, around) in [(Advice::Normal, 16), (Advice::Sequential, 64), (Advice::Random, 1)] {
        as_first::<F, false>(32, 1, 3, |rig, cx| {
            let file = File::new(200 << 12);
            let object = rig.vm.open_source(cx, file).expect("memory");
            let space = rig.vm.create(cx, bounds()).expect("memory");
            let area = span(AT, 200 << 12);
            rig.vm.map(cx, &space, area, SMALL, Backing::Shared(&object, 0)).expect("an area");
            rig.vm.advise(cx, &space, area, advice).expect("an area");
            let at = |page: u64| VirtAddr::new(AT + (page << 12));
            rig.vm.fault(cx, &space, at(64), Access::Read).expect("memory");
            assert_eq!(file.fills(), [(64, around << 12)], "{advice:?}");
            let usage = rig.vm.usage(cx, &space, area).expect("in the space");
            assert_eq!(usage.present, around as u64, "what was read is shown");
            let mut word = [0; 8];
            rig.vm.read(cx, &space, at(66), &mut word).expect("memory");
            assert_eq!(u64::from_le_bytes(word), 66 << 12);
            rig.end_shown(cx, (object, space));
        });
    }
}

/// Areas are cut where it is said, and are one again when it is not so any more; nothing is said of a range with a hole.
#[test]
fn a_pattern_is_a_word_of_an_area() {
    with_cpu(16, 1, 4, |rig, cx| {
        let space = rig.vm.create(cx, span(AT, 1 << 30)).expect("memory");
        rig.vm.map(cx, &space, span(AT, 0x8000), SMALL, Backing::Private).expect("an area");
        let large = VmaKind::private(PageSize::Size2M);
        rig.vm.map(cx, &space, span(AT + (2 << 20), 2 << 20), large, Backing::Private).expect("an area");
        rig.enter(cx, &space);
        (0..8).for_each(|page| rig.store(cx, &space, AT + (page << 12), page).expect("memory"));
        let patterns =
            || space.vmas(span(AT, 0x8000)).map(|area| (area.range.pages(), area.kind.pattern)).collect::<Vec<_>>();
        let flushes = rig.flushes();
        rig.vm.advise(cx, &space, span(AT + 0x2000, 0x3000), Advice::Random).expect("an area");
        assert_eq!(patterns(), [(2, Pattern::Normal), (3, Pattern::Random), (3, Pattern::Normal)]);
        for advice in [Advice::Sequential, Advice::WillNeed, Advice::Cold, Advice::Normal] {
            let mut refused = |at: u64, bytes, error| {
                assert_eq!(rig.vm.advise(cx, &space, span(at, bytes), advice), Err(error), "{advice:?}");
            };
            let at = |at: u64| VirtAddr::new(AT + at);
            refused(AT - 0x1000, 0x2000, VmError::OutOfBounds { at: VirtAddr::new(AT - 0x1000) });
            refused(AT, 0x9000, VmError::NoArea { at: at(0x8000) });
            refused(AT + (2 << 20), 0x1000, VmError::Misaligned { at: at((2 << 20) + 0x1000) });
            assert_eq!(patterns().len(), 3);
        }
        rig.vm.advise(cx, &space, span(AT, 0x8000), Advice::Normal).expect("an area");
        assert_eq!(patterns(), [(8, Pattern::Normal)]);
        assert_eq!(rig.flushes(), flushes);
        (0..8).for_each(|page| assert_eq!(rig.load(cx, &space, AT + (page << 12)), Ok(page)));
        rig.end(cx, space);
    });
}

fn needed<F: PageFormat>() {
    as_first::<F, true>(32, 1, 5, |rig, cx| {
        let file = File::new(40 << 12);
        let object = rig.vm.open_source(cx, file).expect("memory");
        let memory = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("memory");
        let space = rig.space(cx, span(AT, 0x4000), SMALL);
        rig.vm.map(cx, &space, span(AT + 0x4000, 0x4000), SMALL, Backing::Shared(&memory, 0)).expect("an area");
        rig.vm.map(cx, &space, span(AT + 0x8000, 40 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        for page in 0..8 {
            rig.store(cx, &space, AT + (page << 12), page + 1).expect("memory");
            rig.page_out(cx, &space, AT + (page << 12));
        }
        assert_eq!(rig.vm.pager().used(), 8);
        let all = span(AT, 48 << 12);
        rig.vm.pager().reserves.store(true, Ordering::Relaxed);
        rig.vm.advise(cx, &space, all, Advice::WillNeed).expect("areas");
        assert_eq!((rig.vm.pager().used(), file.fills().len()), (8, 0), "not when memory is short");
        rig.vm.pager().reserves.store(false, Ordering::Relaxed);
        rig.vm.advise(cx, &space, span(AT, 0x2000), Advice::WillNeed).expect("a part of one");
        assert_eq!(rig.vm.pager().used(), 6);
        rig.vm.advise(cx, &space, all, Advice::WillNeed).expect("areas");
        assert_eq!(rig.vm.pager().used(), 0);
        assert_eq!(file.fills(), [(0, 16 << 12), (16, 16 << 12), (32, 8 << 12)]);
        assert!((8..48).all(|page| rig.vm.lookup(cx, &space, VirtAddr::new(AT + (page << 12))) == Lookup::Absent));
        (0..8).for_each(|page| assert_eq!(rig.load(cx, &space, AT + (page << 12)), Ok(page + 1)));
        assert_eq!(rig.load(cx, &space, AT + (9 << 12)), Ok(1 << 12));
        assert_eq!(file.fills(), [], "it was there");
        // A source that fails says so to whoever touches its pages.
        rig.vm.punch(cx, &object, 0, 40).expect("its own");
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
        rig.vm.close(cx, memory).expect("its own");
    });
}

fn cold<F: PageFormat>(size: PageSize) {
    as_first::<F, true>(32, 1, 6, |rig, cx| {
        let at = |page: u64| AT + page * size.bytes();
        let space = rig.space(cx, span(AT, 6 * size.bytes()), VmaKind::private(size));
        rig.enter(cx, &space);
        (0..5).for_each(|page| rig.store(cx, &space, at(page), page + 1).expect("memory"));
        assert_eq!(rig.load(cx, &space, at(5)), Ok(0));
        rig.leave(cx, &space);
        let flushes = rig.flushes();
        rig.vm.advise(cx, &space, span(at(1), 5 * size.bytes()), Advice::Cold).expect("an area");
        let heads: Vec<_> = (1..5).map(|page| rig.leaf(cx, &space, at(page)).frame).collect();
        assert_eq!(rig.vm.pager().unused_pages(), heads, "of those that are somebody's");
        let young = (0..6).map(|page| rig.leaf(cx, &space, at(page)).flags.contains(Flags::ACCESSED));
        assert!(young.eq([true, false, false, false, false, false]));
        assert_eq!(rig.flushes(), flushes, "no CPU was asked");
        rig.enter(cx, &space);
        (0..5).for_each(|page| assert_eq!(rig.load(cx, &space, at(page)), Ok(page + 1)));
        rig.end(cx, space);
    });
}

/// Memory may be lacking everywhere: advice is taken or it is not.
#[test]
fn every_allocation_may_fail() {
    every_fault(|plan| {
        with_format::<Metered, true>(16, 1, 7, plan, |rig| {
            rig.on(0, |cx| {
                let Ok(space) = rig.vm.create(cx, bounds()) else { return };
                let Ok(object) = rig.vm.open_source(cx, File::new(40 << 12)) else {
                    return rig.vm.destroy(cx, space).expect("destroyed");
                };
                let _ = rig.vm.map(cx, &space, span(AT, 40 << 12), SMALL, Backing::Shared(&object, 0));
                for advice in [Advice::Sequential, Advice::WillNeed, Advice::Cold, Advice::Random] {
                    let done = rig.vm.advise(cx, &space, span(AT + 0x4000, 0x8000), advice);
                    let lacks = |error| matches!(error, VmError::NoMemory | VmError::NoArea { .. });
                    assert!(done.map_or_else(lacks, |()| true));
                }
                let usage = rig.vm.usage(cx, &space, span(AT, 40 << 12));
                assert_eq!(usage, Ok(Usage::default()));
                rig.end_shown(cx, (object, space));
            });
        });
    });
}

on_both_formats! {
    fn readahead_is_as_the_area_is_read: read_ahead ();
    fn what_is_needed_is_brought_and_not_shown: needed ();
    fn cold_pages_are_old_and_stay: cold (each [PageSize::Size4K, PageSize::Size2M]);
}
