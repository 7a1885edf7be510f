//! Areas of given frames: they are shown, and stay their owner's whatever is done with the areas.

use crate::support::{AT, SMALL, span, with_cpu, with_rig};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{Extent, Order, PageSize, Pfn, VirtAddr, with};
use hugemm_paging::{Flags, Lookup};
use hugemm_vm::{Access, Backing, Discard, Protection, Usage, VmError, VmaKind};

/// A page of the kernel's is seen in parent and child, is in no count, and is the kernel's when all of them are gone.
#[test]
fn a_page_of_the_kernels_is_shown_and_stays_the_kernels() {
    with_cpu(16, 1, 31, |rig, cx| {
        let block = rig.vm.frames().alloc(cx, Order::new(2).expect("valid")).expect("memory");
        let pages = rig.vm.frames().split(block, Order::ZERO).expect("managed");
        let pages = rig.vm.frames().count_run(pages).expect("managed");
        let (first, used) = (pages.extent().base(), rig.used(cx));
        // SAFETY: the test's own, until the object is gone.
        let object = unsafe { rig.vm.create_given(cx, pages.extent(), PageSize::Size4K) }.expect("four pages");
        assert_eq!(object.pages(), 4);
        let parent = rig.space(cx, span(2 * AT, 1 << 20), SMALL);
        let kind = SMALL.allowing(Protection::WRITE.with(Protection::USER));
        let area =
            rig.vm.map(cx, &parent, span(AT, 3 << 12), kind, Backing::Shared(&object, 1)).expect("three of them");
        assert_eq!((area.kind.given, area.kind.shared), (true, true));
        assert_eq!(parent.vmas(span(AT, 3 << 12)).next(), Some(area));
        rig.enter(cx, &parent);
        rig.store(cx, &parent, AT + 0x1008, 77).expect("the kernel's second page but one");
        let leaf = |found| match found {
            Lookup::Mapped(leaf) => leaf.frame,
            other => panic!("{other:?}"),
        };
        assert_eq!(leaf(rig.vm.lookup(cx, &parent, VirtAddr::new(AT + 0x1008))), Pfn::new(first.get() + 2));
        let usage = rig.vm.usage(cx, &parent, span(AT, 3 << 12)).expect("counted");
        assert_eq!(usage, with!(Usage::default(), given = 1));
        let mut bytes = [0; 8];
        rig.vm.read(cx, &parent, VirtAddr::new(AT + 0x1008), &mut bytes).expect("reached");
        assert_eq!(u64::from_ne_bytes(bytes), 77);
        let refused =
            rig.vm.pin(cx, &parent, span(AT, 3 << 12), Access::Write, None, &hugemm_base::Never, |_| unreachable!());
        assert_eq!(refused.map_err(|error| error.cause), Err(VmError::Denied { at: VirtAddr::new(AT) }));
        let child = rig.vm.fork(cx, &parent).expect("forked");
        rig.leave(cx, &parent);
        rig.enter(cx, &child);
        rig.store(cx, &child, AT + 0x1008, 78).expect("the same page");
        rig.end(cx, child);
        rig.enter(cx, &parent);
        assert_eq!(rig.load(cx, &parent, AT + 0x1008), Ok(78), "nothing was copied");
        assert_eq!(rig.vm.discard(cx, &parent, span(AT, 3 << 12), Discard::Now), Ok(1));
        assert_eq!(rig.load(cx, &parent, AT + 0x1008), Ok(78), "it is there again");
        rig.vm.close(cx, object).expect("its own");
        rig.end(cx, parent);
        rig.vm.trim(cx);
        assert_eq!(rig.used(cx), used, "they are in use as before, and nothing else is");
        let references = (0..4).map(|page| rig.vm.frames().references(Pfn::new(first.get() + page)));
        assert!(references.eq([1; 4]), "the kernel's");
        assert_eq!(rig.vm.frames().free_range(cx, pages).freed, 4);
    });
}

/// Frames without descriptors, by large pages and as device memory; what the platform's map does not reach is not read from outside.
#[test]
fn device_memory_is_mapped_with_its_attributes() {
    with_cpu(16, 1, 32, |rig, cx| {
        let frames = Extent::new(Pfn::new(1 << 24), 1024).expect("in range");
        // SAFETY: there is no such memory, and nobody accesses it.
        let object = unsafe { rig.vm.create_given(cx, frames, PageSize::Size2M) }.expect("two pages");
        let device = VmaKind::private(PageSize::Size2M).allowing(Protection::WRITE.with(Protection::UNCACHED));
        let space = rig.vm.create(cx, super::support::bounds()).expect("a space");
        rig.vm.map(cx, &space, span(AT, 4 << 20), device, Backing::Shared(&object, 0)).expect("an area");
        let plain = VmaKind::private(PageSize::Size2M);
        rig.vm.map(cx, &space, span(2 * AT, 2 << 20), plain, Backing::Shared(&object, 512)).expect("an area");
        for (area, frame, flags) in [(AT + (2 << 20), 512, Flags::UNCACHED), (2 * AT, 512, Flags::NONE)] {
            let at = VirtAddr::new(area + 0x3000);
            rig.vm.fault(cx, &space, at, hugemm_vm::Access::Write).expect("there");
            let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, at) else { panic!("mapped") };
            assert_eq!((leaf.frame.get(), leaf.size), ((1 << 24) + frame, PageSize::Size2M));
            assert_eq!(leaf.flags & Flags::UNCACHED, flags);
            let read = rig.vm.read(cx, &space, at, &mut [0; 16]);
            assert_eq!(read.map_err(|error| error.cause), Err(VmError::Unreachable));
        }
        let usage = rig.vm.usage(cx, &space, span(AT, 4 << 20)).expect("counted");
        assert_eq!(usage, with!(Usage::default(), given = 512));
        rig.vm.unmap(cx, &space, span(AT, 4 << 20)).expect("unmapped");
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// Cache attributes are of given frames only: all other memory is in the platform's map too, as another type.
#[test]
fn only_given_frames_have_attributes() {
    with_cpu(16, 1, 35, |rig, cx| {
        let space = rig.vm.create(cx, super::support::bounds()).expect("a space");
        let frames = Extent::new(Pfn::new(1 << 24), 4).expect("in range");
        // SAFETY: there is no such memory, and nobody accesses it.
        let registers = unsafe { rig.vm.create_given(cx, frames, PageSize::Size4K) }.expect("four pages");
        let file = rig.vm.open_source(cx, crate::sources::File::new(0x4000)).expect("memory");
        let shared = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("memory");
        let (uncached, through) = (Protection::UNCACHED, Protection::WRITE_THROUGH);
        for attributes in [uncached, through, uncached.with(through)] {
            let kind = SMALL.allowing(Protection::WRITE.with(Protection::USER).with(attributes));
            let own =
                [Backing::Shared(&shared, 0), Backing::Shared(&file, 0), Backing::Copied(&file, 0), Backing::Private];
            for backing in own {
                let refused = rig.vm.map(cx, &space, span(AT, 0x4000), kind, backing);
                assert_eq!(refused, Err(VmError::OtherKind), "{attributes:?}");
            }
            let area = rig.vm.map(cx, &space, span(AT, 0x4000), kind, Backing::Shared(&registers, 0));
            assert_eq!(area.map(|area| area.kind.protection), Ok(kind.protection));
            rig.vm.unmap(cx, &space, span(AT, 0x4000)).expect("unmapped");
        }
        rig.end(cx, space);
        [registers, file, shared].into_iter().for_each(|object| rig.vm.close(cx, object).expect("its own"));
    });
}

/// What cannot be shown is refused, and costs nothing; so does a lack of memory at every place.
#[test]
fn what_cannot_be_given_is_refused() {
    with_cpu(16, 1, 33, |rig, cx| {
        let used = rig.used(cx);
        for (base, pages, page) in [(1 << 24 | 1, 512, PageSize::Size2M), (1 << 24, 500, PageSize::Size2M)] {
            let frames = Extent::new(Pfn::new(base), pages).expect("in range");
            // SAFETY: nothing is shown.
            let refused = unsafe { rig.vm.create_given(cx, frames, page) };
            assert_eq!(refused.err(), Some(VmError::Misaligned { at: VirtAddr::new(base << 12) }), "{base:#x}");
        }
        // SAFETY: as above.
        let none = unsafe { rig.vm.create_given(cx, Extent::default(), PageSize::Size4K) };
        assert_eq!(none.err(), Some(VmError::OutOfBounds { at: VirtAddr::new(0) }));
        rig.vm.trim(cx);
        assert_eq!(rig.used(cx), used);
    });
    for nth in 0.. {
        let plan = FaultPlan::periodic(nth, 1);
        let mut failed = true;
        with_rig(16, 1, 34, &plan, |rig| {
            rig.on(0, |cx| {
                let frames = Extent::new(Pfn::new(1 << 24), 2048).expect("in range");
                // SAFETY: as above.
                match unsafe { rig.vm.create_given(cx, frames, PageSize::Size4K) } {
                    Ok(object) => {
                        failed = false;
                        rig.vm.close(cx, object).expect("its own");
                    }
                    Err(error) => assert_eq!(error, VmError::NoMemory),
                }
            });
        });
        if !failed {
            assert!(nth > 3, "{nth} allocations");
            break;
        }
    }
}
