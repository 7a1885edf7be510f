//! Blocks taken and given back at once, on one to all CPUs at the same time: with interrupts on, so that each step turns them
//! off and on, and with interrupts off throughout; and what a pin costs by itself.

use super::{Cx, Failure, cpu_counts};
use crate::output::{progress, record};
use core::hint::black_box;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::{Clock, Cpu, CpuCx, Order};
use hugemm_kernel::MAX_CPUS;
use hugemm_kernel::memory::frames;
use hugemm_kernel::smp::{self, Rendezvous};
use hugemm_kernel::{percpu, platform::Kernel};
use hugemm_workloads::alloc_free::pairs::{self, Pair};
use hugemm_workloads::alloc_free::{CountedPages, Exhausted, FrozenBlocks, Source, Spent};
use hugemm_workloads::request::Alloc;

/// Pairs between two looks at the clock.
const BATCH: u64 = 1000;

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Alloc) -> Result<(), Failure> {
    let counts = cpu_counts(percpu::count()).count() as u64;
    let of = u64::from(args.runs) * args.orders.iter().count() as u64 * counts;
    let mut done = 0;
    for _ in 0..args.runs {
        record(&Pair { nanos: pin(cx) }, &[("side", (&"kernel").into()), ("pattern", (&"pin").into())]);
        for order in args.orders.iter() {
            for cpus in cpu_counts(percpu::count()) {
                progress(done, of, "alloc");
                done += 1;
                for interrupts in ["on", "off"] {
                    let how = How { order, cpus, millis: args.millis, interrupts };
                    side(cx, "hugemm, frozen", &FrozenBlocks(frames()), how)?;
                    side(cx, "hugemm, counted", &CountedPages(frames()), how)?;
                }
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct How {
    order: Order,
    cpus: u32,
    millis: u64,
    /// While they are made: on, or off.
    interrupts: &'static str,
}

/// Nanoseconds of turning interrupts off and on again: every allocation and every free does it once.
fn pin(cx: Cx<'_>) -> f64 {
    const PINS: u64 = 100_000;
    let start = cx.platform().now_ns();
    for _ in 0..PINS {
        cx.pinned(|pin| black_box(pin.cpu()));
    }
    (cx.platform().now_ns() - start) as f64 / PINS as f64
}

/// Pairs on several CPUs at once: the mean over CPUs of nanoseconds per pair.
fn side<S: Source<Kernel> + Sync>(cx: Cx<'_>, name: &str, source: &S, how: How) -> Result<(), Failure> {
    let How { order, cpus, millis, interrupts } = how;
    let barrier = Rendezvous::new(cpus);
    let nanos = [const { AtomicU64::new(0) }; MAX_CPUS as usize];
    let pairs = [const { AtomicU64::new(0) }; MAX_CPUS as usize];
    let exhausted = AtomicBool::new(false);
    smp::on_cpus(cx, cpus, &|cx: &mut CpuCx<'static, Kernel>, cpu| {
        source.settle(cx);
        // One untimed batch fills the CPU's cache.
        let _ = pairs::run(cx, source, order, BATCH);
        barrier.wait();
        let until = cx.platform().now_ns() + millis * 1_000_000;
        let (mut spent, mut count) = (0, 0);
        while cx.platform().now_ns() < until {
            percpu::beat();
            match batch(cx, source, order, interrupts) {
                Ok(batch) => (spent, count) = (spent + batch.nanos, count + batch.operations),
                Err(_) => exhausted.store(true, Ordering::Relaxed),
            }
        }
        nanos[cpu as usize].store(spent, Ordering::Relaxed);
        pairs[cpu as usize].store(count, Ordering::Relaxed);
    });
    if exhausted.load(Ordering::Relaxed) {
        return Err(Exhausted(order).into());
    }
    let each =
        |cpu: usize| nanos[cpu].load(Ordering::Relaxed) as f64 / pairs[cpu].load(Ordering::Relaxed).max(1) as f64;
    let mean = (0..cpus as usize).map(each).sum::<f64>() / f64::from(cpus);
    let labels = [
        ("side", (&name).into()),
        ("pattern", (&"pair").into()),
        ("order", order.get().into()),
        ("cpus", cpus.into()),
        ("interrupts", (&interrupts).into()),
    ];
    record(&Pair { nanos: mean }, &labels);
    Ok(())
}

fn batch<S: Source<Kernel>>(
    cx: &mut CpuCx<'static, Kernel>,
    source: &S,
    order: Order,
    interrupts: &str,
) -> Result<Spent, Exhausted> {
    if interrupts == "on" {
        return pairs::run(cx, source, order, BATCH);
    }
    let platform = cx.platform();
    // SAFETY: undone below; in between nothing reschedules, and pins nest.
    let state = unsafe { platform.pin() };
    let done = pairs::run(cx, source, order, BATCH);
    // SAFETY: as above.
    unsafe { platform.unpin(state) };
    done
}
