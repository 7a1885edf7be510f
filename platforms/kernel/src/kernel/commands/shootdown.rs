//! What it costs to take ranges of 4 KiB pages away from all CPUs: unmap and write-protect, as one batch and page by page.
//!
//! The other CPUs have the space loaded and run in it, so that each flush has to reach every one of them. The addresses are
//! mapped to the same 2 MiB of frames over and over: only entries and translations are measured, and no memory is needed.

use super::{Cx, Failure, cpu_counts, region};
use crate::kernel::memory::frames;
use crate::kernel::output::{progress, sample};
use crate::kernel::space::Space;
use crate::kernel::{percpu, smp, tlb};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::{Clock, Extent, PAGE_BYTES, PageSize, VirtAddr};
use hugemm_kernel::request::Shootdown;
use hugemm_paging::{PagingError, ShootdownCounts, ShootdownPolicy, Span};

/// Where ranges are mapped.
const START: u64 = 0x20_0000_0000;

const POLICIES: [(&str, ShootdownPolicy); 2] =
    [("batched", ShootdownPolicy::BATCHED), ("per page", ShootdownPolicy::PER_PAGE)];

/// Runs the command.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Shootdown) -> Result<(), Failure> {
    let block = region(cx, PageSize::Size2M.bytes())?;
    let space = Space::new(cx, None)?;
    let mut result = Ok(());
    'all: for cpus in cpu_counts(percpu::count()) {
        let mut pages = 1;
        while pages <= args.pages {
            for run in 0..args.runs {
                progress(u64::from(run), args.runs.into(), "shootdown");
                for (name, policy) in POLICIES {
                    if pages > args.each && policy.pages_per_batch == 1 {
                        continue;
                    }
                    result = on(cx, &space, block.extent(), cpus, pages, name, &policy);
                    if result.is_err() {
                        break 'all;
                    }
                }
            }
            pages *= 8;
        }
    }
    space.free(cx, |_| ())?;
    frames().free(cx, block);
    result
}

/// One range of `pages` pages on `cpus` CPUs: the boot CPU works, the others stand in the space.
fn on(
    cx: Cx<'_>,
    space: &Space<'_>,
    block: Extent,
    cpus: u32,
    pages: u64,
    name: &str,
    policy: &ShootdownPolicy,
) -> Result<(), Failure> {
    let (ready, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let failed: Lock<SpinLock, Option<PagingError>> = Lock::new(None);
    smp::on_cpus(cx, cpus, &|cx, cpu| {
        space.with(cx, |cx| {
            if cpu != 0 {
                ready.fetch_add(1, Ordering::Release);
                while !stop.load(Ordering::Acquire) {
                    core::hint::spin_loop();
                }
                return;
            }
            while ready.load(Ordering::Acquire) + 1 < cpus {
                core::hint::spin_loop();
            }
            if let Err(error) = both(cx, space, block, cpus, pages, name, policy) {
                *failed.lock() = Some(error);
            }
            stop.store(true, Ordering::Release);
        });
    });
    match failed.lock().take() {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

/// Write-protects and then unmaps the range, by the policy's batches.
fn both(
    cx: Cx<'_>,
    space: &Space<'_>,
    block: Extent,
    cpus: u32,
    pages: u64,
    name: &str,
    policy: &ShootdownPolicy,
) -> Result<(), PagingError> {
    const PAGE: PageSize = PageSize::Size4K;
    let whole = span(START, pages * PAGE_BYTES)?;
    let labels = [("cpus", cpus.into()), ("pages", pages.into()), ("policy", (&name).into())];
    let report = |what: &str, nanos: u64, counts: ShootdownCounts| {
        let sum = |metric: &str, value: u64, unit: &str| sample(metric, value as f64, unit, &labels);
        let [ns, flushes, targets, interrupts] = metrics(what);
        sum(ns, nanos, "ns per range");
        sum(flushes, counts.flushes_all + counts.flushes_range, "per range");
        sum(targets, counts.targets, "per range");
        sum(interrupts, counts.interrupts, "per range");
    };
    space.map(cx, whole, core::iter::repeat(block), PAGE)?;
    for what in ["protect", "unmap"] {
        let before = tlb::tlbs().counts();
        let start = cx.platform().now_ns();
        for batch in policy.batches(whole.range(), PAGE) {
            percpu::beat();
            let part = span(batch.first().get(), batch.last().get() - batch.first().get() + 1)?;
            if what == "protect" {
                space.write_protect(cx, part, PAGE, policy)?;
            } else {
                space.unmap(cx, part, PAGE, policy, |_| ())?;
            }
        }
        let nanos = cx.platform().now_ns() - start;
        report(what, nanos, tlb::tlbs().counts().since(before));
    }
    Ok(())
}

fn metrics(what: &str) -> [&'static str; 4] {
    match what {
        "protect" => [
            "bench.shootdown.protect_ns",
            "bench.shootdown.protect_flushes",
            "bench.shootdown.protect_targets",
            "bench.shootdown.protect_ipis",
        ],
        _ => [
            "bench.shootdown.unmap_ns",
            "bench.shootdown.unmap_flushes",
            "bench.shootdown.unmap_targets",
            "bench.shootdown.unmap_ipis",
        ],
    }
}

fn span(start: u64, bytes: u64) -> Result<Span, PagingError> {
    let at = VirtAddr::new(start);
    Span::new(at, bytes).map_err(|_| PagingError::OutOfBounds { at })
}
