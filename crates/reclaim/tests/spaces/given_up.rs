//! What is given up when memory is short is lost only where nobody has stored since.

use crate::rig::{Size, no_faults, span, with_rig};
use crate::rules::{AT, SIZE};
use hugemm_base::{CpuId, PageSize, VirtAddr};
use hugemm_paging::{Flags, Lookup};
use hugemm_vm::{Discard, VmaKind};

/// What another CPU stores to a page that was given up, while a fork runs, the child has for good or not at all.
#[test]
fn what_is_stored_during_a_fork_stays_the_childs() {
    let mut met = 0;
    for seed in 0..200 {
        with_rig(Size { cpus: 2, ..SIZE }, seed, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId::new(0), |cx| {
                // Many parts of a fork.
                let parent = rig.space(cx, span(AT, 1 << 30), VmaKind::private(PageSize::Size4K));
                rig.mmu.as_cpu(CpuId::new(1), |cx| {
                    rig.enter(cx, &parent);
                    for page in 1..4 {
                        rig.put(cx, &parent, AT + (page << 12), page).expect("memory");
                    }
                    rig.put(cx, &parent, AT, 7).expect("memory");
                });
                rig.mmu.pause(CpuId::new(1), true);
                rig.vm.discard(cx, &parent, span(AT, 1 << 12), Discard::WhenShort).expect("an area");
                (0..20).for_each(|_| rig.mmu.meanwhile());
                let before = rig.vm.lookup(cx, &parent, VirtAddr::new(AT));
                assert!(matches!(before, Lookup::Mapped(leaf) if leaf.flags.contains(Flags::OWNER1) && !leaf.flags.contains(Flags::DIRTY)));
                rig.mmu.pause(CpuId::new(1), false);
                let child = rig.vm.fork(cx, &parent).expect("memory");
                let leaf = |found| match found {
                    Lookup::Mapped(leaf) => leaf,
                    other => panic!("{other:?}"),
                };
                let mine = leaf(rig.vm.lookup(cx, &parent, VirtAddr::new(AT)));
                rig.mmu.as_cpu(CpuId::new(1), |cx| rig.leave(cx, &parent));
                // CPU 1 has stored there before the fork was over.
                let stored = mine.flags.contains(Flags::DIRTY);
                // The parent stores, and has a page of its own from here on.
                rig.enter(cx, &parent);
                rig.put(cx, &parent, AT, 8).expect("memory");
                rig.leave(cx, &parent);
                rig.enter(cx, &child);
                assert_eq!(rig.get(cx, &child, AT), Ok(7), "the child sees it");
                rig.leave(cx, &child);
                rig.enter(cx, &child);
                (0..4).for_each(|_| _ = rig.evict_all(cx));
                let seen = rig.get(cx, &child, AT);
                if stored {
                    met += 1;
                    assert_eq!(seen, Ok(7), "seed {seed}: what was stored before the fork was over is gone from the child");
                }
                rig.end(cx, child);
                rig.enter(cx, &parent);
                rig.end(cx, parent);
            });
        });
    }
    assert!(met > 0, "nobody stored during a fork");
}
