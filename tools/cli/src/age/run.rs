//! Processes on one machine of `hugemm bench age`, with a worker that reclaims; each window of each process is checked.

use crate::age::config::RunConfig;
use crate::age::rig::{NODE, OnHost, Rig, Touches, on_machine};
use crate::machine::Machine;
use crate::worker::{self, OnDrop};
use anyhow::Result;
use hugemm_base::random::Random;
use hugemm_base::{Cpu, CpuCx, CpuId, Never};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_inspect::interrupt;
use hugemm_inspect::ipi::MembarrierIpi;
use hugemm_reclaim::Steps;
use hugemm_vm::AddressSpaceRef;
use hugemm_workloads::age::{AgeFigures, Part, Turn};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

/// Windows that each process gets at least, however short the time.
const LEAST_WINDOWS: usize = 16;

/// Runs the processes for a while on fresh frames.
pub fn run(
    machine: &Machine,
    memory: &mut [u8],
    places: &[CpuPlace],
    interrupts: Option<&MembarrierIpi>,
    config: &RunConfig,
) -> Result<AgeFigures> {
    on_machine(machine, memory, places, interrupts, config, |rig| rig.processes(config))
}

impl<'h> Rig<'_, 'h> {
    fn processes(&self, config: &RunConfig) -> Result<AgeFigures> {
        let (object, spaces) = self.spaces(config)?;
        // All end with the first that does. Relaxed: a hint.
        let (start, over) = (Barrier::new(self.host.cpus() as usize), AtomicBool::new(false));
        let total: Mutex<AgeFigures> = Mutex::default();
        let pager = self.vm.pager();
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            // The last CPU, if it has no process.
            let worker = (config.cpus < self.host.cpus()).then(|| {
                scope.spawn(|| {
                    self.as_cpu(CpuId::new(config.cpus), |cx| {
                        pager.steps().work();
                        start.wait();
                        worker::work(cx, self.vm, pager, NODE, || !over.load(Ordering::Relaxed));
                    })
                })
            });
            let cpus: Vec<_> = (0..config.cpus)
                .map(|cpu| {
                    let (spaces, start, over, total) = (&spaces, &start, &over, &total);
                    scope.spawn(move || {
                        let done = self.as_cpu(CpuId::new(cpu), |cx| {
                            start.wait();
                            let _ends = OnDrop(|| {
                                over.store(true, Ordering::Relaxed);
                                pager.steps().wake(NODE);
                            });
                            // Said at once: others may wait for ever because of it.
                            self.play(cx, config, spaces, over).inspect_err(|error| match interrupt::requested() {
                                true => {}
                                false => eprintln!("hugemm: {error:#}"),
                            })
                        })??;
                        let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                        total.windows += done.windows;
                        total.touched = total.touched.plus(done.touched);
                        total.seconds = total.seconds.max(done.seconds);
                        Ok(())
                    })
                })
                .collect();
            let join =
                |cpu: ScopedJoinHandle<'_, _>| cpu.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            cpus.into_iter().chain(worker).map(join).collect()
        });
        results.into_iter().collect::<Result<()>>()?;
        let AgeFigures { seconds, windows, touched, .. } = total.into_inner().unwrap_or_else(PoisonError::into_inner);
        let reclaimed = self.as_cpu(CpuId::new(0), |cx| {
            AgeFigures::of_reclaim(cx, pager, self.store, NODE, |step| pager.steps().of(step))
        })?;
        let shootdowns = self.vm.shootdown().counts();
        let figures = AgeFigures { seconds, windows, touched, shootdowns, ..reclaimed };
        self.end(object, spaces)?;
        Ok(figures)
    }

    /// Plays a CPU: its processes in turn, a window each; on CPU 0 the worker too, between two windows, if that has no CPU of its own.
    fn play(
        &self,
        cx: &mut CpuCx<'_, Host<'h>>,
        config: &RunConfig,
        spaces: &[AddressSpaceRef<'_, OnHost<'h>>],
        over: &AtomicBool,
    ) -> Result<AgeFigures> {
        let cpu = cx.platform().current();
        let touches = Touches(self.mmu);
        let mine = (0..config.procs).filter(|process| process % config.cpus == cpu.get());
        let mut records: Vec<(u32, Vec<u32>)> =
            mine.map(|process| (process, vec![0; (config.shared >> 12) as usize])).collect();
        let mut parts: Vec<Part<'_, '_>> =
            records.iter_mut().map(|(process, shared)| Part::new(*process, shared, &mut [], &mut [])).collect();
        let mut random = Random(u64::from(cpu.get()) + 7);
        let (pager, is_worker) = (self.vm.pager(), cpu.get() == 0 && config.cpus == self.host.cpus());
        let mut done = AgeFigures::default();
        let begin = Instant::now();
        let mut turn = 0;
        // On a machine that is busy with other things, however little time they leave, memory runs short all the same.
        let least = LEAST_WINDOWS * parts.len();
        while (begin.elapsed() < config.time || turn < least) && !over.load(Ordering::Relaxed) {
            interrupt::check()?;
            if is_worker && pager.take_wake(NODE) {
                pager.balance(self.vm, cx, NODE, u64::MAX, &Never);
            }
            if parts.is_empty() {
                self.vm.shootdown().handle_ipi(cx);
                continue;
            }
            let part = turn % parts.len();
            let part = &mut parts[part];
            turn += 1;
            let space = &spaces[part.number as usize];
            let (page, random, touched) = (config.page, &mut random, &mut done.touched);
            let result = part.turn(cx, self.vm, space, &touches, Turn { page, hot: 0, forks: false, random, touched });
            done.windows += 1;
            result?;
        }
        done.seconds = begin.elapsed().as_secs_f64();
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Common, Kind};
    use anyhow::Context;
    use hugemm_base::{PageSize, Pfn, VirtAddr, VirtRange};
    use hugemm_reclaim::{Ageing, LruPolicy};
    use hugemm_vm::{Backing, VmaKind};
    use hugemm_workloads::age::{Failed, OWN_AT, Process, Touched};
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    /// What comes of a machine of one CPU on which `f` does something.
    fn checked(f: impl for<'h> FnOnce(&Rig<'_, 'h>, &mut CpuCx<'_, Host<'h>>) -> Result<()>) -> Result<()> {
        let config = RunConfig {
            page: PageSize::Size4K,
            policy: LruPolicy::Generations,
            ageing: Ageing::Batch,
            procs: 1,
            cpus: 1,
            shared: 0,
            swap: 1 << 20,
            time: Duration::ZERO,
        };
        let machine = Machine::new(&Common { json: None })?;
        let mut memory = machine.memory(32 << 20, PageSize::Size2M, Kind::Thp)?;
        on_machine(&machine, memory.as_mut_slice(), &machine.places(1)?, None, &config, |rig| {
            rig.as_cpu(CpuId::new(0), |cx| f(rig, cx))?
        })
    }

    /// The first word of a frame, past all page tables.
    fn word<'a>(rig: &'a Rig<'_, '_>, frame: Pfn) -> &'a AtomicU64 {
        let at = rig.host.address(frame).expect("memory").cast::<AtomicU64>();
        // SAFETY: in the host's memory, aligned; who has the frame accesses it atomically.
        unsafe { at.as_ref() }
    }

    /// What reclaim could do to a page that a device has is done here by hand.
    #[test]
    fn a_lost_pin_and_a_lost_store_are_found() {
        checked(|rig, cx| {
            let (vm, touches, mut touched) = (rig.vm, Touches(rig.mmu), Touched::default());
            let span = VirtRange::new(OWN_AT, 64 << 12)?;
            let space = vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
            let kind = VmaKind::private(PageSize::Size4K);
            vm.map(cx, &space, span, kind, Backing::Private)?;
            space.tlb().switch_in(vm.shootdown(), cx);
            let (mut wrote, random) = (vec![0; 64], Random(1));
            let mut process = Process { number: 0, at: OWN_AT, wrote: &mut wrote, alone: true, random, stores: 0 };
            for page in 0..64 {
                process.touch(cx, vm, &space, &touches, page, true, &mut touched)?;
            }
            let pinned = process.pin(cx, vm, &space, PageSize::Size4K, &mut touched)?.context("memory")?;
            let page = (pinned.at().get() - OWN_AT.get()) >> 12;
            assert_eq!(process.look_at_pinned(cx, vm, &space, &pinned), Ok(true));

            // The process's last store is not there any more, and the one before it is.
            let stored = word(rig, pinned.extent().base()).fetch_sub(1, Ordering::Relaxed);
            let lost = |failed| matches!(failed, Failed::Wrong(wrong) if (wrong.page, wrong.word, wrong.expected) == (page, 0, stored));
            assert!(process.look_at_pinned(cx, vm, &space, &pinned).is_err_and(lost));
            assert!(process.touch(cx, vm, &space, &touches, page, false, &mut touched).is_err_and(lost));
            word(rig, pinned.extent().base()).store(stored, Ordering::Relaxed);

            // The process has another page there, behind its back.
            vm.unmap(cx, &space, VirtRange::new(pinned.at(), 1 << 12)?)?;
            vm.map(cx, &space, VirtRange::new(pinned.at(), 1 << 12)?, kind, Backing::Private)?;
            vm.fault(cx, &space, pinned.at(), hugemm_vm::Access::Write)?;
            let torn = |failed| matches!(failed, Failed::Torn(torn) if torn.pinned == pinned.extent().base());
            assert!(process.look_at_pinned(cx, vm, &space, &pinned).is_err_and(torn));

            vm.unpin(cx, &space, pinned).map_err(|(error, _)| error)?;
            space.tlb().switch_out(vm.shootdown(), cx);
            vm.destroy(cx, space).map_err(|(error, _)| error)?;
            Ok(())
        })
        .expect("nothing else");
    }
}
