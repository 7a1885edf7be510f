//! Spaces with a pager.

use super::{Context, FAR, Pairs, area};
use crate::machine::{Machine, span};
use anyhow::Result;
use hugemm::base::{Never, NodeId, VirtAddr};
use hugemm::reclaim::ShrinkBudget;
use hugemm::vm::{Access, Served};
use hugemm_threads::run_as;

impl Pairs<'_> {
    pub(super) fn reclaim(&self) -> Result<()> {
        let machine = |nodes| Machine::paged(self.ground, nodes);
        self.faults("a fault each in two spaces, with a pager", machine, 2, 2, FAR, true)?;
        self.faults("a fault each in one space, with a pager", machine, 1, 2, FAR, true)?;
        let page = |cpu: u64, round: u64| VirtAddr::new(area(cpu) + round * 4096);
        self.of_space(
            machine,
            "accessed bits of 64 pages taken each in one space, far apart",
            1,
            |_, _, cpu, round| page(cpu, 64 * round),
            |used, cx, cpu, at| {
                used.vm.test_and_clear_young(cx, used.space(cpu), span(at.get(), 64 << 12), drop).expect("an area");
            },
        )?;
        self.of_space(
            machine,
            "accessed bits of 64 pages taken, and a fault in the same space, far apart",
            1,
            |_, _, cpu, round| page(cpu, 512 * cpu + 64 * round),
            |used, cx, cpu, at| {
                if cpu == 0 {
                    used.vm.test_and_clear_young(cx, used.space(cpu), span(at.get(), 64 << 12), drop).expect("an area");
                } else {
                    used.vm.fault(cx, used.space(cpu), at, Access::Write).expect("memory");
                }
            },
        )?;
        // Each CPU reclaims from its node and faults in its space.
        for (name, away, back) in [
            ("32 pages looked at for reclaim each", 0, false),
            ("32 pages written out each", 1, false),
            ("a page brought back each in two spaces", u64::MAX, true),
        ] {
            for (nodes, name) in self.on_nodes(name) {
                let machine = machine(nodes)?;
                let (vm, spaces) = (machine.roots.vm, [(); 2].map(|()| self.shared(&machine)));
                let node = |cpu: u64| NodeId::new(cpu as u32 % nodes);
                let shrink = |cx: &mut Context, cpu, pages| {
                    let budget = ShrinkBudget::new(pages, pages);
                    vm.pager().shrink(vm, cx, node(cpu), budget, &Never)
                };
                for cpu in 0..2 {
                    run_as(cpu);
                    let mut cx = self.ground.cpus.cx();
                    if away > 0 {
                        for index in 0..512 {
                            let bytes = [index as u8 | 1; 64];
                            vm.write(&mut cx, &spaces[cpu as usize], page(cpu.into(), index), &bytes).expect("memory");
                        }
                    }
                    // Until pages are idle, and some go, or all.
                    let mut gone = 0;
                    for _ in 0..64 {
                        if gone < away {
                            gone += shrink(&mut cx, cpu.into(), if back { 512 } else { 32 }).freed;
                        }
                    }
                }
                self.trace(
                    &machine,
                    &name,
                    if back { 1 } else { 32 },
                    |_, cpu, round| page(cpu, round),
                    |cx, cpu, at| {
                        if back {
                            let served = vm.fault(cx, &spaces[cpu as usize], at, Access::Read);
                            assert_eq!(served.expect("memory"), Served::Refaulted, "it was away");
                        } else {
                            let done = shrink(cx, cpu, 32);
                            assert!(away == 0 || done.freed > 0, "{done:?}");
                        }
                    },
                )?;
            }
        }
        Ok(())
    }
}
