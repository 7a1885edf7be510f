//! CPUs that go on refusing by what they keep, as arm64's may: rights that are given reach them all the same.

use crate::support::{AT, Metered, SMALL, as_first, no_faults, span, with_format};
use hugemm_base::{CpuId, Never, PageSize, VirtAddr};
use hugemm_host::mmu::Fault;
use hugemm_vm::{Access, Served, VmaKind};

/// After a fork the child is gone, so the parent's next store makes its page writable again where it is. Every CPU that has
/// looked at the page while it was read-only can store to it then.
#[test]
fn a_page_that_is_reused_can_be_written_on_every_cpu() {
    for (seed, size) in (0..8).flat_map(|seed| [PageSize::Size4K, PageSize::Size2M].map(|size| (seed, size))) {
        with_format::<Metered<false>, false>(32, 2, seed, &no_faults(), |rig| {
            rig.mmu.keep_refusals();
            let at = VirtAddr::new(AT);
            let (parent, child) = rig.on(0, |cx| {
                let area = span(AT, size.bytes());
                let parent = rig.space(cx, area, VmaKind::private(size));
                rig.enter(cx, &parent);
                rig.store(cx, &parent, AT, 1).expect("served");
                let child = rig.vm.fork(cx, &parent).expect("a child");
                (parent, child)
            });
            for cpu in [CpuId::new(0), CpuId::new(1)] {
                rig.mmu.as_cpu(cpu, |cx| {
                    rig.enter(cx, &parent);
                    assert_eq!(rig.load(cx, &parent, AT), Ok(1));
                    assert_eq!(rig.mmu.store(cpu, at, 2), Err(Fault::Protection));
                });
            }
            rig.on(0, |cx| {
                rig.vm.destroy(cx, child).expect("nobody uses it");
                assert_eq!(rig.vm.fault(cx, &parent, at, Access::Write), Ok(Served::Reused));
            });
            assert_eq!(rig.mmu.store(CpuId::new(0), at, 3), Ok(()));
            assert_eq!(rig.mmu.store(CpuId::new(1), at, 4), Ok(()), "seed {seed}, {size}");
            for cpu in [CpuId::new(0), CpuId::new(1)] {
                rig.mmu.as_cpu(cpu, |cx| rig.leave(cx, &parent));
            }
            rig.on(0, |cx| rig.vm.destroy(cx, parent).expect("nobody uses it"));
        });
    }
}

/// A page is writable, and nothing has noted a write. The fault that notes it flushes where faults drop nothing: a CPU may have
/// kept the entry as one that refuses writes until they are noted.
fn flushes_to_note<const DROPS: bool>(access: Access) -> u64 {
    let mut flushes = 0;
    as_first::<Metered<DROPS>, false>(16, 1, 3, |rig, cx| {
        let space = rig.space(cx, span(AT, 4096), SMALL);
        rig.vm.prefault(&space, span(AT, 4096), None).work(cx, &Never).expect("memory");
        rig.vm.test_and_clear_young(cx, &space, span(AT, 4096), |_| ()).expect("in the space");
        let before = rig.vm.shootdown().counts();
        assert_eq!(rig.vm.fault(cx, &space, VirtAddr::new(AT), access), Ok(Served::Meanwhile));
        flushes = rig.vm.shootdown().counts().since(before).flushes();
        rig.vm.destroy(cx, space).expect("nobody uses it");
    });
    flushes
}

#[test]
fn a_noted_write_is_flushed_where_faults_drop_nothing() {
    assert_eq!([Access::Read, Access::Write].map(flushes_to_note::<false>), [0, 1]);
    assert_eq!([Access::Read, Access::Write].map(flushes_to_note::<true>), [0, 0]);
}
