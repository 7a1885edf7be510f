//! Which pages of a range have been used: exactly those, once, and whoever takes pages away is told.

#![allow(clippy::single_range_in_vec_init, reason = "runs of pages are what is compared")]

use crate::support::{AT, Cx, Follower, Metered, Model, Rig, SMALL, as_first, bounds, span};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Never, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_paging::Lookup;
use hugemm_vm::{Access, AddressSpace, Backing, Notifier, Phase, VmError, VmaKind};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Page number of `AT`.
const FIRST: u64 = AT >> 12;

type Away<'h> = Rig<'h, Metered, true>;
type Process<'h> = AddressSpace<Model<'h, Metered, true>>;

/// Uses pages of a size, by their numbers from `AT` on. No CPU is in the space afterwards, so none of them is used again.
fn use_pages<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Process<'h>, size: PageSize, pages: &[u64]) {
    rig.enter(cx, space);
    pages.iter().for_each(|page| rig.store(cx, space, AT + page * size.bytes(), 1).expect("memory"));
    rig.leave(cx, space);
}

/// What has been used in a range of 4 KiB pages, counted from `AT`.
fn look<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Process<'h>, range: Range<u64>) -> Vec<Range<u64>> {
    let asked = span(AT + (range.start << 12), (range.end - range.start) << 12);
    let mut runs: Vec<Range<u64>> = Vec::new();
    let show = |run: VirtRange| runs.push(run.first_page() - FIRST..run.first_page() - FIRST + run.pages());
    let flushes = rig.flushes();
    let pages = rig.vm.test_and_clear_young(cx, space, asked, show).expect("in the space");
    assert_eq!(rig.flushes(), flushes, "no TLB is touched");
    assert_eq!(runs.iter().map(|run| run.end - run.start).sum::<u64>(), pages);
    runs
}

fn frame<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Process<'h>, at: u64) -> Pfn {
    match rig.vm.lookup(cx, space, VirtAddr::new(at)) {
        Lookup::Mapped(leaf) => leaf.frame,
        found => panic!("{found:?}"),
    }
}

/// Pages that adjoin are one run, wherever 64 of them end; what is not asked for stays young; what was shown is not shown
/// again.
#[test]
fn what_was_used_is_shown_once() {
    as_first::<Metered, true>(16, 1, 81, |rig, cx| {
        let space = rig.space(cx, span(AT, 300 << 12), SMALL);
        rig.vm.map(cx, &space, span(AT + (400 << 12), 100 << 12), SMALL, Backing::Private).expect("another");
        let used = [0, 1, 2, 60, 62, 63, 64, 65, 126, 127, 128, 200, 299, 400, 401, 499];
        use_pages(rig, cx, &space, PageSize::Size4K, &used);
        let all = 0..1000;
        assert_eq!(
            look(rig, cx, &space, all.clone()),
            [0..3, 60..61, 62..66, 126..129, 200..201, 299..300, 400..402, 499..500]
        );
        assert_eq!(look(rig, cx, &space, all.clone()), [], "their bits are taken");
        // CPUs may keep what they have used: they are made to look again.
        rig.vm.unmap(cx, &space, span(AT, 300 << 12)).expect("unmapped");
        rig.vm.map(cx, &space, span(AT, 300 << 12), SMALL, Backing::Private).expect("an area");
        use_pages(rig, cx, &space, PageSize::Size4K, &(10..150).collect::<Vec<_>>());
        assert_eq!(look(rig, cx, &space, 20..100), [20..100]);
        assert_eq!(look(rig, cx, &space, 0..21), [10..20]);
        assert_eq!(look(rig, cx, &space, all), [100..150]);
        let beyond = span((1 << 47) - 0x1000, 0x2000);
        let found = rig.vm.test_and_clear_young(cx, &space, beyond, |_| ());
        assert_eq!(found, Err(VmError::OutOfBounds { at: beyond.start() }));
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A page of 2 MiB is used as a whole, as far as it was asked for.
#[test]
fn large_pages_are_used_as_a_whole() {
    as_first::<Metered, true>(32, 1, 82, |rig, cx| {
        let page = PageSize::Size2M;
        let space = rig.space(cx, span(AT, 100 << 21), VmaKind::private(page));
        use_pages(rig, cx, &space, page, &[0, 1, 63, 64, 70]);
        // From the middle of one page to that of another.
        assert_eq!(look(rig, cx, &space, 100..700), [100..700]);
        assert_eq!(look(rig, cx, &space, 0..100 * 512), [63 * 512..65 * 512, 70 * 512..71 * 512]);
        assert_eq!(look(rig, cx, &space, 0..100 * 512), []);
        for index in [0, 1, 63, 64, 70] {
            let head = frame(rig, cx, &space, AT + (index << 21));
            assert_eq!(rig.vm.frames().references(head), 1, "nothing is held for longer than the look");
        }
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Has used the pages of this size with these numbers from `AT` on, since it was last asked.
struct Device(PageSize, Mutex<BTreeSet<u64>>);

impl<P: Cpu> Notifier<P> for Device {
    fn begin(&self, _cx: &mut CpuCx<'_, P>, _range: VirtRange) {}
    fn end(&self, _cx: &mut CpuCx<'_, P>, _range: VirtRange) {}
    fn young(&self, range: VirtRange) -> bool {
        assert_eq!(range.last().get() - range.start().get() + 1, self.0.bytes(), "page by page");
        self.1.lock().expect("pages").remove(&((range.start().get() - AT) / self.0.bytes()))
    }
}

/// What followers have used counts, whichever of them it was; pages that are not there have been used by nobody.
#[test]
fn followers_use_pages_too() {
    for size in [PageSize::Size4K, PageSize::Size2M] {
        as_first::<Metered, true>(32, 1, 83, |rig, cx| {
            let area = span(AT, 100 * size.bytes());
            let space = rig.space(cx, area, VmaKind::private(size));
            use_pages(rig, cx, &space, size, &[2, 3, 5, 66, 70]);
            let pages = size.pages();
            let all = 0..100 * pages;
            assert_eq!(look(rig, cx, &space, all.clone()).len(), 4);
            let devices = [0, 1].map(|_| Arc::new(Device(size, Mutex::default())));
            let followers =
                [0, 1].map(|index| rig.vm.follow(cx, &space, Follower(devices[index].clone())).expect("memory"));
            let used = |index: usize, pages: &[u64]| devices[index].1.lock().expect("pages").extend(pages);
            used(0, &[3, 4, 70]);
            used(1, &[5, 70]);
            let page = |page: u64| page * pages..(page + 1) * pages;
            assert_eq!(look(rig, cx, &space, all.clone()), [page(3), page(5), page(70)]);
            assert!(devices.iter().all(|device| device.1.lock().expect("pages").is_empty()), "all were asked");
            assert_eq!(look(rig, cx, &space, all), []);
            let held = rig.vm.pager().used_pages();
            let heads: Vec<_> = [3, 5, 70].map(|page| frame(rig, cx, &space, AT + page * size.bytes())).into();
            assert_eq!(held[5..], heads, "after those that the space had used itself");
            for follower in followers {
                // SAFETY: the followers are this space's.
                let _ = unsafe { rig.vm.unfollow(cx, &space, follower) };
            }
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    }
}

/// Whoever takes pages away is told of each page that was found used, once, and is not asked where nothing was; pages of the
/// pool are not its business. Their references are dropped again, however their frames lie.
#[test]
fn whoever_takes_pages_away_is_told() {
    as_first::<Metered, true>(32, 1, 84, |rig, cx| {
        rig.fill_pool(cx, 1);
        let space = rig.space(cx, span(AT, 200 << 12), SMALL);
        let pooled = VmaKind::private(PageSize::Size2M).pooled();
        rig.vm.map(cx, &space, span(AT + (4 << 20), 2 << 20), pooled, Backing::Private).expect("one page");
        // Adjoining frames, in both directions and with gaps.
        let order = (0..40).chain((60..100).rev()).chain((100..190).step_by(3));
        let order: Vec<u64> = order.collect();
        use_pages(rig, cx, &space, PageSize::Size4K, &order);
        use_pages(rig, cx, &space, PageSize::Size2M, &[2]);
        let before = rig.vm.pager().drops();
        assert_eq!(look(rig, cx, &space, 0..1536).last(), Some(&(1024..1536)), "it is shown");
        // Of frames that adjoin in either order; pages that lie apart may have frames that adjoin too.
        let drops = rig.vm.pager().drops() - before;
        assert!(drops < 80, "{drops} for {} pages", order.len());
        let mut expected: Vec<Pfn> = order.iter().map(|page| frame(rig, cx, &space, AT + (page << 12))).collect();
        let mut told = rig.vm.pager().used_pages();
        expected.sort_unstable();
        told.sort_unstable();
        assert_eq!(told, expected);
        for page in &order {
            let head = frame(rig, cx, &space, AT + (page << 12));
            assert_eq!(rig.vm.frames().references(head), 1);
        }
        assert_eq!(look(rig, cx, &space, 0..1536), []);
        assert_eq!(rig.vm.pager().used_pages(), [], "nobody is told of nothing");
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Whoever takes pages away is told of a page before it is mapped: from then on others may unmap it, and drop its last reference.
#[test]
fn a_page_is_known_before_it_is_mapped() {
    as_first::<Metered, true>(8, 1, 85, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let object = rig.vm.create_shared(cx, 8, PageSize::Size4K, false).expect("an object");
        for (at, backing) in [(AT, Backing::Private), (2 * AT, Backing::Shared(&object, 0))] {
            rig.vm.map(cx, &space, span(at, 0x8000), SMALL, backing).expect("an area");
        }
        let told = Cell::new(Vec::new());
        let note = |phase| {
            if phase == Phase::Map {
                told.set([told.take(), vec![rig.vm.pager().known()]].concat());
            }
        };
        for at in [AT, 2 * AT].map(VirtAddr::new) {
            rig.vm.fault_observed(cx, &space, at, Access::Write, &note).expect("memory");
        }
        rig.vm.prefault(&space, span(AT + 0x1000, 0x3000), None).work_observed(cx, &Never, &note).expect("memory");
        assert_eq!(told.take(), [1, 2, 5]);
        rig.end_shown(cx, (object, space));
    });
}
