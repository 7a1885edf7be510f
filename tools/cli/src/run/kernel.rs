//! What this machine's kernel can be asked to do of the run, from a process: fill a hugetlb pool, populate memory, unmap it.

use crate::kernel_side::{self, Took};
use anyhow::Result;
use hugemm_base::PageSize;
use hugemm_inspect::interrupt;
use hugemm_inspect::memory::RegionBacking;
use hugemm_inspect::pool::HugetlbPool;
use hugemm_workloads::vm_create::CreateMethod;
use hugemm_workloads::vm_host::{GUESTS, HostSizes, PhaseFigures, RunPhase};
use std::time::Instant;

/// Does it, and notes what could not be asked for.
pub fn run(
    sizes: &HostSizes,
    workers: u32,
    tell: &mut impl FnMut(RunPhase, &PhaseFigures),
    notes: &mut Vec<String>,
) -> Result<()> {
    let huge = PageSize::Size2M.bytes();
    let start = Instant::now();
    match HugetlbPool::new().ensure(PageSize::Size2M, sizes.pool, None) {
        Ok(pool) => {
            tell(RunPhase::Fill, &figures(start.elapsed().as_nanos() as u64, sizes.pool, 0));
            let start = Instant::now();
            drop(pool);
            tell(RunPhase::Shrink, &figures(start.elapsed().as_nanos() as u64, sizes.pool, 0));
        }
        Err(error) => notes.push(format!("this kernel's hugetlb pool was not asked: {error}")),
    }
    interrupt::check()?;
    let bytes = sizes.pool / 2 * huge;
    let machine = touched(bytes, PageSize::Size2M, RegionBacking::Thp, workers);
    interrupt::check()?;
    match &machine {
        Ok(machine) => tell(RunPhase::Prefault, &figures(machine.populate, sizes.pool / 2, 0)),
        Err(error) => notes.push(format!("this kernel's machine is left out: {error}")),
    }
    let small = sizes.shared + GUESTS as u64 * sizes.own;
    let guests = touched(small << 12, PageSize::Size4K, RegionBacking::Small, 1)?;
    tell(RunPhase::Guests, &figures(guests.populate, 0, small));
    if let Ok(machine) = machine {
        tell(RunPhase::Destroy, &figures(machine.unmap + guests.unmap, sizes.pool / 2, small));
    }
    Ok(())
}

/// So many pages of 2 MiB, and so many of 4 KiB.
fn figures(nanos: u64, large: u64, small: u64) -> PhaseFigures {
    let bytes = large * PageSize::Size2M.bytes() + small * PageSize::Size4K.bytes();
    PhaseFigures { nanos, bytes, pages: large + small, ..PhaseFigures::default() }
}

/// One request for each thread's share; the time of the slowest.
fn touched(bytes: u64, page: PageSize, backing: RegionBacking, threads: u32) -> Result<Took> {
    kernel_side::together(bytes, page, backing, CreateMethod::Prefault, threads)
}
