//! All CPUs shoot at each other, and between two shots all want the same lock, whose holder has interrupts off. If a CPU
//! that waits answered no requests, or a shot were fired with interrupts off, this would stand still, and the watchdog
//! would say where.

use super::{Cx, Failure, Finding};
use crate::space::BareSpace;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::lock::Lock;
use hugemm_base::{Clock, PAGE_BYTES, PageSize, VirtAddr, VirtRange};
use hugemm_kernel::irq_lock::IrqLock;
use hugemm_kernel::{percpu, smp};

/// Shots of each CPU in a round, at most.
const SHOTS: u64 = 200;

/// One round on all CPUs, until `until` at the latest.
pub fn round(cx: Cx<'_>, until: u64) -> Result<(), Failure> {
    let cpus = percpu::count();
    let space = BareSpace::new(cx, None)?;
    let total: Lock<IrqLock, u64> = Lock::new(0);
    let taken = AtomicU64::new(0);
    let done = AtomicU64::new(0);
    smp::on_cpus(cx, cpus, &|cx, cpu| {
        space.with(cx, |cx| {
            for shot in 0..SHOTS {
                if cx.platform().now_ns() >= until {
                    break;
                }
                percpu::beat();
                *total.lock() += 1;
                taken.fetch_add(1, Ordering::Relaxed);
                let at = VirtAddr::new((u64::from(cpu) * SHOTS + shot) * PAGE_BYTES);
                if let Ok(span) = VirtRange::new(at, PAGE_BYTES) {
                    space.flush(cx, span, PageSize::Size4K);
                }
            }
            done.fetch_add(1, Ordering::Relaxed);
            // Until all have fired, so that the last ones have somebody to shoot at.
            while done.load(Ordering::Relaxed) < u64::from(cpus) {
                core::hint::spin_loop();
            }
        });
    });
    let (expected, found) = (taken.load(Ordering::Relaxed), *total.lock());
    space.free(cx, |_| ());
    let what = format_args!("{found} turns were counted under a lock that was taken {expected} times");
    if found == expected { Ok(()) } else { Err(Finding::new("locks", what).into()) }
}
