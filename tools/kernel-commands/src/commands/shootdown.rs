//! What it costs to take ranges of 4 KiB pages away from all CPUs: unmap and write-protect, as one batch and page by page.
//!
//! The boot CPU works; the others have the space loaded and stand in it, so that each flush has to reach every one of them.
//! Where an instruction invalidates on all CPUs (arm64), the same is measured with it and with interrupts.
//!
//! The working CPU uses 512 other pages before and after: translating them anew is what a flush of everything costs besides.

use super::{Cx, Failure, cpu_counts, region};
use crate::output::{note, progress, record};
use crate::space::BareSpace;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::{Extent, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_kernel::memory::frames;
use hugemm_kernel::tlb::{BROADCASTS, interrupt_instead};
use hugemm_kernel::{percpu, smp};
use hugemm_paging::{PagingError, ShootdownPolicy};
use hugemm_workloads::request::Shootdown;
use hugemm_workloads::shootdown::{Operation, POLICIES, PROBE, Shot, too_long};
use hugemm_workloads::words::Named;

/// Where ranges are mapped.
const START: u64 = 0x20_0000_0000;

/// Where the working set is, and how many pages it has.
const WORKING_SET: u64 = 0x10_0000_0000;
const WORKING_PAGES: u64 = 512;

#[derive(Clone, Copy)]
struct Cell {
    cpus: u32,
    pages: u64,
    operation: Operation,
    name: &'static str,
    policy: ShootdownPolicy,
    /// Whether other CPUs are interrupted, where an instruction would reach them too.
    interrupts: bool,
}

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Shootdown) -> Result<(), Failure> {
    let block = region(cx, PAGE_BYTES)?;
    let space = BareSpace::new(cx, None)?;
    let working = VirtRange::new(VirtAddr::new(WORKING_SET), WORKING_PAGES * PAGE_BYTES)
        .map_err(|_| PagingError::OutOfBounds { at: VirtAddr::new(WORKING_SET) })?;
    let one = (0..WORKING_PAGES).filter_map(|_| Extent::new(block.pfn(), 1).ok());
    space.map(cx, working, one, PageSize::Size4K)?;
    let of = (args.pages.iter().count() * cpu_counts(percpu::count()).count()) as u64;
    let (mut done, mut longest) = (0, 0.0);
    for cpus in cpu_counts(percpu::count()) {
        for pages in args.pages.iter() {
            progress(done, of, "shootdown");
            done += 1;
            let ways: &[bool] = if BROADCASTS { &[false, true] } else { &[true] };
            for (operation, &interrupts) in Operation::ALL.iter().flat_map(|it| ways.iter().map(move |way| (*it, way)))
            {
                let cell = |(name, policy)| Cell { cpus, pages, operation, name, policy, interrupts };
                let mut policies = &POLICIES[..];
                if pages > PROBE {
                    let probe = Cell { pages: PROBE, ..cell(POLICIES[1]) };
                    let probed = measure(cx, &space, block.pfn(), probe)?.nanos;
                    if let Some(seconds) = too_long(probed, pages, args.limit) {
                        policies = &POLICIES[..1];
                        longest = seconds.max(longest);
                    }
                }
                for _ in 0..args.runs {
                    for &policy in policies {
                        let cell = cell(policy);
                        report(cell, measure(cx, &space, block.pfn(), cell)?);
                    }
                }
            }
        }
    }
    if longest > 0.0 {
        note(format_args!(
            "a flush per page for the largest ranges would have taken up to {longest:.0} s; use a larger --limit"
        ));
    }
    space.free(cx, |_| ());
    frames().free(cx, block);
    Ok(())
}

fn measure(cx: Cx<'_>, space: &BareSpace<'_>, frame: Pfn, cell: Cell) -> Result<Shot, PagingError> {
    let at = VirtAddr::new(START);
    let span = VirtRange::new(at, cell.pages * PAGE_BYTES).map_err(|_| PagingError::OutOfBounds { at })?;
    let (ready, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let result: Lock<SpinLock, _> = Lock::new(Err(PagingError::NotMapped { at }));
    // SAFETY: there is no pool.
    unsafe { interrupt_instead(cell.interrupts) };
    smp::on_cpus(cx, cell.cpus, &|cx, cpu| {
        space.with(cx, |cx| {
            if cpu != 0 {
                // Release and Acquire: the space is loaded before it counts.
                ready.fetch_add(1, Ordering::Release);
                while !stop.load(Ordering::Acquire) {
                    core::hint::spin_loop();
                }
                return;
            }
            while ready.load(Ordering::Acquire) + 1 < cell.cpus {
                core::hint::spin_loop();
            }
            let shot = space.shootdown(cx, frame, span, cell.operation, &cell.policy, &use_working_set);
            *result.lock() = shot;
            stop.store(true, Ordering::Release);
        });
    });
    // SAFETY: as above.
    unsafe { interrupt_instead(false) };
    *result.lock()
}

/// Reads a word of each page, of the same frame but in different lines of it.
fn use_working_set() {
    for page in 0..WORKING_PAGES {
        let at = WORKING_SET + page * PAGE_BYTES + page % 64 * 64;
        // SAFETY: mapped in the space that this CPU has loaded; nobody writes there.
        unsafe { core::ptr::with_exposed_provenance::<u64>(at as usize).read_volatile() };
    }
}

fn report(cell: Cell, shot: Shot) {
    let operation = cell.operation.name();
    let labels = [
        ("operation", (&operation).into()),
        ("pages", cell.pages.into()),
        ("cpus", cell.cpus.into()),
        ("policy", (&cell.name).into()),
        ("interrupts", (if cell.interrupts { &"sent" } else { &"none" }).into()),
    ];
    record(&shot, &labels);
}
