//! All CPUs take, pass on and free blocks of all orders; a bitmap beside the allocator knows every frame's owner.

use super::{Cx, Failure, Finding};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::{Clock, Extent, Order, Pfn};
use hugemm_frames::{AllocRequest, Mobility};
use hugemm_kernel::memory::{self, Scratch, frames};
use hugemm_kernel::{percpu, smp};
use hugemm_workloads::alloc_free::stress::{self, Broken, Ownership};
use hugemm_workloads::random::Random;
use hugemm_workloads::request::Plant;

/// Steps of each CPU in a round, at most.
const STEPS: u64 = 5_000;
/// Blocks that a CPU holds at most.
const HELD: usize = 64;
/// Places through which blocks go from one CPU to another.
const EXCHANGE: usize = 16;

/// One round on all CPUs, until `until` at the latest.
pub fn round(cx: Cx<'_>, seed: u64, plant: Plant, until: u64) -> Result<(), Failure> {
    let cpus = percpu::count();
    let area = Extent::new(Pfn::new(0), highest().next_multiple_of(64)).unwrap_or_default();
    let words = Scratch::new(cx, (area.pages() / 64) as usize, || AtomicU64::new(0))?;
    let exchange = Scratch::new(cx, EXCHANGE, || AtomicU64::new(0))?;
    let found: Lock<SpinLock, Option<Broken>> = Lock::new(None);
    let stop = AtomicBool::new(false);
    if let Some(ownership) = Ownership::new(area, &words) {
        smp::on_cpus(cx, cpus, &|cx, cpu| {
            let mut random = Random::new(seed ^ u64::from(cpu) << 32);
            let mut own = [0; HELD];
            let steps = 200;
            for _ in 0..STEPS / steps {
                // Relaxed: only to end sooner.
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                if cx.platform().now_ns() >= until {
                    break;
                }
                percpu::beat();
                if plant == Plant::DoubleFree && cpu == 0 {
                    free_twice(cx);
                }
                if let Err(broken) = stress::run(cx, frames(), &ownership, &exchange, &mut own, steps, &mut random) {
                    stop.store(true, Ordering::Relaxed);
                    found.lock().get_or_insert(broken);
                    return;
                }
            }
            frames().drain(cx);
        });
        if let Some(broken) = found.lock().take() {
            return Err(Finding::Frames(broken).into());
        }
        stress::finish(cx, frames(), &ownership, &exchange, &mut Random::new(seed)).map_err(Finding::Frames)?;
    }
    for scratch in [words, exchange] {
        scratch.free(cx);
    }
    Ok(())
}

/// One past the highest frame that the allocator may hand out.
fn highest() -> u64 {
    memory::end().number()
}

/// Free frames, those in all CPUs' caches included.
pub fn free_pages(cx: Cx<'_>) -> u64 {
    smp::on_cpus(cx, percpu::count(), &|cx, _| frames().drain(cx));
    frames().available(cx)
}

/// The planted bug: a block is given back by two owners.
fn free_twice(cx: Cx<'_>) {
    let Ok(order) = Order::new(3) else { return };
    if let Ok(block) = frames().alloc(cx, AllocRequest::order(order)) {
        let pfn = block.pfn();
        frames().free(cx, block);
        // SAFETY: none: this is the bug that the ownership map must find.
        frames().free(cx, unsafe { hugemm_frames::Frozen::assume_owned(pfn, order, Mobility::Unmovable) });
    }
}
