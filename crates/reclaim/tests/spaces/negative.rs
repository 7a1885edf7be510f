//! What a forgotten flush does, and that it is seen: the same runs with flushes, and with CPUs that do not hear of them.

use crate::rig::{Cx, Handle, Rig, Size, no_faults, span, with_rig};
use hugemm_base::{CpuId, PageSize, VirtAddr};
use hugemm_reclaim::LruPolicy;
use hugemm_vm::VmaKind;
use std::sync::atomic::Ordering;

const AT: u64 = 0x4000_0000;
const PAGES: u64 = 64;
const SIZE: Size =
    Size { mib: 16, swap: 2000, cpus: 2, policy: LruPolicy::Generations, nodes: 1, marks: None, strange: false };

fn space<'v, 'h>(rig: &'v Rig<'h>, cx: &mut Cx<'_, 'h>) -> Handle<'v, 'h> {
    let kind = VmaKind::private(PageSize::Size4K);
    rig.space(cx, span(AT, PAGES << 12), kind)
}

fn at(index: u64) -> u64 {
    AT + (index << 12)
}

/// CPU 1 stores to pages and keeps their translations; CPU 0 does something; CPU 1 stores once more. Then how many of the
/// pages, as `see` finds them, are not as they should be.
fn wrong(deaf: bool, act: impl Fn(&Rig<'_>, bool) -> u64) -> u64 {
    wrong_on(SIZE, deaf, act)
}

fn wrong_on(size: Size, deaf: bool, act: impl Fn(&Rig<'_>, bool) -> u64) -> u64 {
    let wrong = std::cell::Cell::new(0);
    with_rig(size, 21, &no_faults(), |rig| wrong.set(act(rig, deaf)));
    wrong.get()
}

/// Written out while a CPU could still store into the page.
fn evict_under_a_writer(rig: &Rig<'_>, deaf: bool) -> u64 {
    let writer = CpuId::new(rig.cpus() - 1);
    let space = rig.mmu.as_cpu(CpuId::new(0), |cx| space(rig, cx));
    rig.mmu.as_cpu(writer, |cx| {
        rig.enter(cx, &space);
        (0..PAGES).for_each(|index| rig.put(cx, &space, at(index), 1).expect("memory"));
    });
    rig.vm.shootdown().hw().deaf.store(deaf, Ordering::Relaxed);
    rig.mmu.as_cpu(CpuId::new(0), |cx| (0..3).for_each(|_| _ = rig.evict_all(cx)));
    // Whoever has the translation uses it; whoever faults stores to the page that comes back.
    let through_stale = rig.mmu.as_cpu(writer, |_| {
        (0..PAGES).filter(|index| rig.mmu.store(writer, VirtAddr::new(at(*index)), 2).is_ok()).count()
    });
    rig.vm.shootdown().hw().deaf.store(false, Ordering::Relaxed);
    assert_eq!(through_stale > 0, deaf);
    rig.mmu.as_cpu(writer, |cx| {
        rig.leave(cx, &space);
        if !deaf {
            rig.enter(cx, &space);
            (0..PAGES).for_each(|index| rig.put(cx, &space, at(index), 2).expect("memory"));
            rig.leave(cx, &space);
        }
    });
    rig.mmu.as_cpu(CpuId::new(0), |cx| {
        rig.enter(cx, &space);
        let lost = (0..PAGES).filter(|index| rig.get(cx, &space, at(*index)) != Ok(2)).count();
        rig.end(cx, space);
        lost as u64
    })
}

/// Unmapped by its owner while reclaim has unhooked it and not flushed.
fn unmap_under_a_reader(rig: &Rig<'_>, deaf: bool) -> u64 {
    let space = rig.mmu.as_cpu(CpuId::new(0), |cx| space(rig, cx));
    rig.mmu.as_cpu(CpuId::new(1), |cx| {
        rig.enter(cx, &space);
        (0..PAGES).for_each(|index| rig.put(cx, &space, at(index), 1).expect("memory"));
    });
    rig.mmu.as_cpu(CpuId::new(0), |cx| {
        // SAFETY: one machine.
        let deferred = unsafe { hugemm_paging::DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
        let mut unhooked = Vec::new();
        for index in 0..PAGES {
            let found = rig.vm.lookup(cx, &space, VirtAddr::new(at(index)));
            let hugemm_paging::Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
            // SAFETY: mapped, and nobody else is there to take it away.
            let held = unsafe { rig.vm.frames().get_at(leaf.frame) }.expect("mapped");
            unhooked.extend(rig.vm.unhook(cx, held, &deferred));
            assert_eq!(unhooked.len() as u64, index + 1);
        }
        rig.vm.shootdown().hw().deaf.store(deaf, Ordering::Relaxed);
        rig.vm.unmap(cx, &space, span(AT, PAGES << 12)).expect("unmapped");
        rig.vm.shootdown().hw().deaf.store(false, Ordering::Relaxed);
        let used = (0..PAGES).filter(|index| rig.mmu.load(CpuId::new(1), VirtAddr::new(at(*index))).is_ok()).count();
        unhooked.into_iter().for_each(|page| page.put_back(cx));
        rig.mmu.as_cpu(CpuId::new(1), |cx| rig.leave(cx, &space));
        rig.vm.destroy(cx, space).expect("destroyed");
        used as u64
    })
}

#[test]
fn a_page_written_out_before_its_flush_loses_stores() {
    assert_eq!(wrong(false, evict_under_a_writer), 0);
    assert!(wrong(true, evict_under_a_writer) > 0);
}

/// The last of many CPUs hears of a flush too: a mask has a word for each 64.
#[test]
fn the_last_of_many_cpus_is_flushed() {
    for cpus in [65, 256] {
        // Each CPU has 32 KiB to compress in.
        let size = Size { mib: 32, swap: 4000, cpus, ..SIZE };
        assert_eq!(wrong_on(size, false, evict_under_a_writer), 0);
        assert!(wrong_on(size, true, evict_under_a_writer) > 0);
    }
}

#[test]
fn an_unmap_that_meets_unflushed_pages_flushes_them() {
    assert_eq!(wrong(false, unmap_under_a_reader), 0);
    assert!(wrong(true, unmap_under_a_reader) > 0);
}
