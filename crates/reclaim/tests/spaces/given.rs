//! Given frames are mapped, counted or not, and their descriptors stay the giver's.

use crate::rig::{span, with_cpu};
use crate::rules::{AT, SIZE};
use hugemm_base::{Extent, Order, PageSize, Pfn};
use hugemm_vm::{Advice, Backing, VmaKind};

/// Given pages of the kernel's are counted, and their descriptors are the kernel's.
#[test]
fn descriptors_of_given_pages_stay_the_kernels() {
    with_cpu(SIZE, 18, |rig, cx| {
        let frames = rig.vm.frames();
        let take = |words: [(usize, u64); 3]| {
            let mut block = frames.alloc(cx, Order::ZERO).expect("memory");
            {
                let desc = frames.descriptor_mut(&mut block).expect("managed");
                desc.reset();
                words.into_iter().for_each(|(word, value)| desc.store(word, value));
            }
            frames.count(block).expect("managed")
        };
        let other = take([(2, 1), (3, 0x5555), (4, 0)]);
        let other_head = other.pfn();
        // What the kernel notes there: a link, and some flags.
        let given = take([(2, other_head.get() + 1), (3, 0), (4, 1 << 16)]);
        let extent = Extent::block(given.pfn(), Order::ZERO);
        // SAFETY: the test's own, until the object is gone.
        let object = unsafe { rig.vm.create_given(cx, extent, PageSize::Size4K) }.expect("a page");
        let space = rig.vm.create(cx, span(0, 1 << 47)).expect("memory");
        rig.vm
            .map(cx, &space, span(AT, 1 << 12), VmaKind::private(PageSize::Size4K), Backing::Shared(&object, 0))
            .expect("an area");
        rig.enter(cx, &space);
        rig.get(cx, &space, AT).expect("mapped");
        rig.vm.advise(cx, &space, span(AT, 1 << 12), Advice::Cold).expect("an area");
        let word = |pfn: Pfn, word| frames.descriptor(pfn).expect("managed").load(word);
        assert_eq!((word(given.pfn(), 2), word(given.pfn(), 4)), (other_head.get() + 1, 1 << 16), "the kernel's");
        assert_eq!(word(other_head, 3), 0x5555, "another's");
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
        let _ = frames.put(cx, given);
        let _ = frames.put(cx, other);
    });
}
