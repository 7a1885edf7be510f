//! A line of a space for each CPU: whoever changes areas or takes entries away waits for readers on all of them, what is counted adds up,
//! and without memory for a line everything goes on.

use crate::support::{AT, Cx, Follower, Metered, Rig, SMALL, no_faults, span, with_format, with_rig};
use hugemm_base::inject::FaultPlan;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuId, Never, VirtAddr, VirtRange};
use hugemm_vm::{Access, Notifier, Served, VmError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// Looks back, in the middle of a look at the areas, at what another CPU has done by then.
#[derive(Default)]
struct Meanwhile {
    /// 1: somebody looks. 2: another begins to change. 3: it has changed.
    step: AtomicU64,
    seen: AtomicU64,
}

impl<P: Cpu> Notifier<P> for Meanwhile {
    fn begin(&self, _cx: &mut CpuCx<'_, P>, _range: VirtRange) {}
    fn end(&self, _cx: &mut CpuCx<'_, P>, _range: VirtRange) {}

    fn young(&self, _range: VirtRange) -> bool {
        if self.step.compare_exchange(0, 1, SeqCst, SeqCst).is_ok() {
            while self.step.load(SeqCst) == 1 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            self.seen.store(self.step.load(SeqCst), SeqCst);
        }
        false
    }
}

/// Whoever takes an area away waits for a reader of the areas: one on the space's first line, on one of its own, and one that could have
/// none.
#[test]
fn who_cuts_areas_waits_for_readers_on_all_lines() {
    for reader in [0, 1, 2] {
        let other = if reader == 0 { 1 } else { 0 };
        with_format::<Metered, true>(32, 3, 91, &no_faults(), |rig: &Rig<'_, Metered, true>| {
            let looking = Arc::new(Meanwhile::default());
            let (space, follower) = rig.on(0, |cx| {
                let space = rig.space(cx, span(AT, 0x4000), SMALL);
                let follower = rig.vm.follow(cx, &space, Follower(looking.clone())).expect("memory");
                (space, follower)
            });
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    rig.beside_others(reader, |cx| {
                        rig.vm.fault(cx, &space, VirtAddr::new(AT), Access::Write).expect("memory");
                        rig.vm.test_and_clear_young(cx, &space, span(AT, 0x4000), |_| ()).expect("in the space");
                    });
                });
                scope.spawn(|| {
                    rig.beside_others(other, |cx| {
                        while looking.step.load(SeqCst) == 0 {
                            rig.vm.shootdown().handle_ipi(cx);
                            std::thread::yield_now();
                        }
                        looking.step.store(2, SeqCst);
                        rig.vm.unmap(cx, &space, span(AT, 0x1000)).expect("unmapped");
                        looking.step.store(3, SeqCst);
                    });
                });
            });
            assert_eq!((looking.seen.load(SeqCst), looking.step.load(SeqCst)), (2, 3), "CPU {reader}");
            rig.on(0, |cx| {
                // SAFETY: the follower is this space's.
                let _ = unsafe { rig.vm.unfollow(cx, &space, follower) };
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

/// What is pinned on one CPU may be given back on another; until all is, the space does not end, and a fork copies.
#[test]
fn what_cpus_count_adds_up() {
    const CPUS: u32 = 4;
    with_rig(32, CPUS, 92, &no_faults(), |rig| {
        let space = rig.on(0, |cx| rig.space(cx, span(AT, 0x10_0000), SMALL));
        let used = rig.on(0, |cx| rig.used(cx));
        let mut pinned = Vec::new();
        for cpu in 0..CPUS {
            rig.on(cpu, |cx| {
                let area = span(AT + (u64::from(cpu) << 14), 0x2000);
                rig.vm.fault(cx, &space, area.start(), Access::Write).expect("memory");
                rig.vm.pin(cx, &space, area, Access::Write, None, &Never, |run| pinned.push(run)).expect("memory");
            });
        }
        assert_eq!((space.counters().mapped, space.counters().waited), (u64::from(CPUS), 0));
        let mut space = space;
        for cpu in 0..CPUS {
            rig.mmu.as_cpu(CpuId::new((cpu + 1) % CPUS), |cx| {
                let child = rig.vm.fork(cx, &space).expect("memory");
                assert_eq!(child.counters(), Default::default());
                let theirs = span(AT + (u64::from(cpu) << 14), 0x1000).start();
                assert_ne!(rig.vm.lookup(cx, &child, theirs), rig.vm.lookup(cx, &space, theirs), "copied");
                rig.vm.destroy(cx, child).expect("destroyed");
            });
            for run in pinned.extract_if(.., |run| run.at().get() >> 14 == (AT >> 14) + u64::from(cpu)) {
                space = rig.mmu.as_cpu(CpuId::new((cpu + 1) % CPUS), |cx| {
                    let (error, space) = rig.vm.destroy(cx, space).expect_err("pinned");
                    assert_eq!(error, VmError::InUse);
                    rig.vm.unpin(cx, &space, run).expect("its own");
                    space
                });
            }
        }
        rig.on(3, |cx| {
            rig.vm.destroy(cx, space).expect("nothing is pinned");
            rig.vm.trim(cx);
            assert!(rig.used(cx) <= used, "lines come back");
        });
    });
}

/// A CPU that gets no line because there is no memory uses the first: nothing fails that would not fail otherwise. With memory, it gets
/// one by its next fault.
#[test]
fn without_memory_for_a_line_everything_goes_on() {
    // The line is the first thing that CPU 1 asks for.
    let fault = |plan: &FaultPlan, at: u64| {
        let mut asked = 0;
        with_rig(16, 2, 93, plan, |rig| {
            let space = rig.on(0, |cx| rig.space(cx, span(AT, 0x4000), SMALL));
            asked = plan.asked();
            rig.on(1, |cx: &mut Cx<'_, '_>| {
                assert_eq!(rig.vm.fault(cx, &space, VirtAddr::new(at), Access::Write), Ok(Served::Mapped));
                assert!(plan.asked() > asked);
                assert_eq!(rig.vm.fault(cx, &space, VirtAddr::new(at + 0x1000), Access::Write), Ok(Served::Mapped));
                rig.vm.unmap(cx, &space, span(at, 0x1000)).expect("unmapped");
                assert_eq!(space.counters().mapped, 2);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
        asked
    };
    let asked = fault(&no_faults(), AT);
    let plan = FaultPlan::nth(asked);
    fault(&plan, AT);
    assert_eq!(plan.failed(), 1);
}
