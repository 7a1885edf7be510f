//! What `perf bench mem mmap` measures: map, populate, time; then unmap. The kernel's side, on memory that the machine has at hand: hugemm's
//! has been touched before, and so has this.
//!
//! A virtual machine whose kernel reports its free pages loses those of 2 MiB and more to the hypervisor as soon as nobody uses them. Their
//! next touch is then the hypervisor's work, which may take ten times as long as the kernel's own. So each pass comes right after
//! one more whose memory it gets: what came back last is handed out first.

use crate::results::Line;
use anyhow::{Context, Result, bail};
use hugemm_base::PageSize;
use hugemm_inspect::memory::{Region, RegionBacking, RegionRequest, again_if_short};
use hugemm_inspect::roots::Roots;
use hugemm_workloads::vm_create::CreateMethod;
use std::sync::Barrier;
use std::time::Instant;

/// What tables call the side of a line: this machine's kernel, or how hugemm cleared.
pub fn title<R>(line: &Line<R>) -> &'static str {
    match line.label("side").as_str() {
        "kernel" => "this machine's kernel",
        "hugemm-page" => "hugemm, page at a time",
        "hugemm-batch" => "hugemm, 8 MiB units, cached",
        "hugemm-extent" => "hugemm, whole extents, cached",
        _ => "hugemm, calibrated policy",
    }
}

/// Nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    pub populate: u64,
    /// Unmapping as much, and whatever is put back with it.
    pub unmap: u64,
}

/// By several threads at once, each its share of whole pages: the times of the slowest.
pub fn together(bytes: u64, page: PageSize, backing: RegionBacking, how: CreateMethod, threads: u32) -> Result<Took> {
    let (pages, threads) = (bytes / page.bytes(), u64::from(threads));
    let start = Barrier::new(threads as usize);
    std::thread::scope(|scope| {
        let spawn = |thread| {
            let share = (pages * (thread + 1) / threads - pages * thread / threads) * page.bytes();
            let start = &start;
            scope.spawn(move || {
                start.wait();
                let before = populated(share, page, backing, how);
                start.wait();
                let timer = Instant::now();
                let before = before.map(drop);
                let unmap = timer.elapsed().as_nanos() as u64;
                start.wait();
                before?;
                let (_region, populate) = populated(share, page, backing, how)?;
                anyhow::Ok(Took { populate, unmap })
            })
        };
        let all: Vec<_> = (0..threads).map(spawn).collect();
        let mut slowest = Took::default();
        for thread in all {
            let took = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            slowest.populate = slowest.populate.max(took.populate);
            slowest.unmap = slowest.unmap.max(took.unmap);
        }
        Ok(slowest)
    })
}

/// Maps `bytes` of fresh memory and populates it as `how` says, in so many nanoseconds. Where too little comes in huge pages, it is done
/// once more, after the kernel has put together what is free.
fn populated(bytes: u64, page: PageSize, backing: RegionBacking, how: CreateMethod) -> Result<(Option<Region>, u64)> {
    let attempt = |_| populated_once(bytes, page, backing, how);
    let lacks = |(region, _): &(Option<Region>, u64)| {
        let verified = region.as_ref().filter(|_| backing != RegionBacking::Small).map(Region::verified);
        verified.filter(|verified| verified.huge_share() < 0.9)
    };
    let populated = again_if_short(&Roots::default(), attempt, |populated| lacks(populated).is_some())?;
    if let Some(verified) = lacks(&populated) {
        bail!(
            "the kernel gave only part of the memory in huge pages ({verified}); free some memory, or use --kind hugetlb"
        );
    }
    Ok(populated)
}

fn populated_once(
    bytes: u64,
    page: PageSize,
    backing: RegionBacking,
    how: CreateMethod,
) -> Result<(Option<Region>, u64)> {
    if bytes == 0 {
        return Ok((None, 0));
    }
    let request = RegionRequest { bytes, backing, populate: false, ..RegionRequest::default() };
    // Reserving the mapping is part of neither side: it costs microseconds, and the checks of what may be taken more.
    let mut region = Region::allocate(&request)?;
    let start = Instant::now();
    match how {
        CreateMethod::Demand => {
            let memory = region.as_ptr().as_ptr();
            for index in 0..bytes / page.bytes() {
                // SAFETY: within the region; a byte that this thread alone uses.
                unsafe {
                    let byte = memory.add((index * page.bytes()) as usize);
                    byte.write_volatile(byte.read_volatile().wrapping_add(1));
                }
            }
        }
        // SAFETY: the range is the region's own mapping.
        CreateMethod::Prefault | CreateMethod::Pin => unsafe {
            rustix::mm::madvise(region.as_ptr().as_ptr().cast(), region.len(), rustix::mm::Advice::LinuxPopulateWrite)
        }
        .context("the kernel refused MADV_POPULATE_WRITE (it needs Linux 5.14); use --how demand")?,
    }
    let nanos = start.elapsed().as_nanos() as u64;
    region.verify()?;
    Ok((Some(region), nanos))
}
