//! Faults beside each other, step by step.

use crate::rig::{Rig, Size, bounds, no_faults, span, with_rig};
use hugemm_base::{CpuId, PageSize};
use hugemm_reclaim::LruPolicy;
use hugemm_vm::{Backing, VmaKind};
use std::sync::atomic::{AtomicBool, Ordering};

const AT: u64 = 0x4000_0000;
const SIZE: Size =
    Size { mib: 16, swap: 2000, cpus: 3, policy: LruPolicy::Generations, nodes: 1, marks: None, strange: false };

/// The place that a page number has among the claims of a space or an object.
fn place(page: u64) -> u64 {
    page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61
}

/// CPU 0 looks at a page's entry and is about to take its share of the slot; CPU 1 faults at the same page, whose claim
/// is another page's place, taken by CPU 2, so it is not kept out by that. The page may come back and its slot go only
/// when CPU 0 has its share.
fn two_faults_at_a_page(rig: &Rig<'_>, shared: bool) {
    let page = PageSize::Size4K;
    // Claims are by page number in a space, by offset in an object.
    let first = if shared { 0 } else { AT >> 12 };
    let other = (1..64).find(|index| place(first + index) == place(first)).expect("of 8 places");
    let at = |index: u64| AT + (index << 12);
    let (space, object) = rig.mmu.as_cpu(CpuId::new(0), |cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let object = rig.vm.create_shared(cx, 64, page, false).expect("an object");
        let backing = if shared { Backing::Shared(&object, 0) } else { Backing::Private };
        rig.vm.map(cx, &space, span(AT, 64 << 12), VmaKind::private(page), backing).expect("an area");
        rig.enter(cx, &space);
        // Two different words: they take a place in the store each.
        for index in [0, other] {
            rig.put(cx, &space, at(index), index + 1).expect("memory");
            rig.put(cx, &space, at(index) + 8, 100).expect("memory");
        }
        (0..3).for_each(|_| _ = rig.evict_all(cx));
        rig.leave(cx, &space);
        (space, object)
    });
    let read = |cpu: u32, index: u64, waits: &AtomicBool, over: &AtomicBool| {
        rig.beside_others(cpu, waits, |cx| {
            rig.enter(cx, &space);
            assert_eq!(rig.get(cx, &space, at(index)), Ok(index + 1));
            assert_eq!(rig.get(cx, &space, at(index) + 8), Ok(100));
            rig.leave(cx, &space);
            over.store(true, Ordering::SeqCst);
        });
    };
    let [waits, over, unused] = [const { AtomicBool::new(false) }; 3];
    rig.store.loading.arm(2);
    rig.store.sharing.arm(0);
    std::thread::scope(|scope| {
        scope.spawn(|| read(2, other, &unused, &unused));
        rig.store.loading.wait();
        scope.spawn(|| read(0, 0, &unused, &unused));
        rig.store.sharing.wait();
        scope.spawn(|| read(1, 0, &waits, &over));
        // Until CPU 1 waits for a lock, or has been served.
        while !waits.load(Ordering::SeqCst) && !over.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        rig.store.sharing.open();
        rig.store.loading.open();
    });
    rig.mmu.as_cpu(CpuId::new(0), |cx| {
        rig.vm.destroy(cx, space).expect("destroyed");
        rig.vm.close(cx, object).expect("its own");
    });
}

#[test]
fn a_slot_is_shared_before_it_can_go() {
    for shared in [false, true] {
        with_rig(SIZE, 51, &no_faults(), |rig| two_faults_at_a_page(rig, shared));
    }
}
