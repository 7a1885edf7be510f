//! Populating memory by page faults: touching each page, or one `MADV_POPULATE_WRITE`; by one thread or several.

use crate::record;
use anyhow::{Context, Result, bail};
use hugemm_base::PageSize;
use hugemm_host::mmap::{Kind, Mmap};
use hugemm_workloads::request::{KERNEL_SIZE, PagesFrom, VmCreate};
use hugemm_workloads::vm_create::{CreateMethod, Created};
use hugemm_workloads::words::{List, Named};
use rustix::mm::{Advice, madvise};
use serde_json::json;
use std::fs;
use std::sync::Barrier;
use std::time::Instant;

/// Where transparent huge pages are switched on.
const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Each run maps, populates and unmaps private memory. The first is not counted. Several threads divide the memory among
/// themselves.
pub fn run(work: &VmCreate) -> Result<()> {
    let bytes = work.size.unwrap_or(KERNEL_SIZE);
    let page = work.page.iter().next().unwrap_or(PageSize::Size2M);
    prepare(page, work.from, bytes)?;
    for run in 0..=work.runs {
        for how in work.how.iter() {
            for workers in work.workers.unwrap_or(List::one(1)).iter() {
                let mut memory = map(usize::try_from(bytes)?, page, work.from)?;
                let nanos = populate(memory.bytes_mut(), page, how, workers as usize)?;
                if is_transparent(page, work.from) {
                    verify(bytes)?;
                }
                if run > 0 {
                    let created = Created { bytes, nanos, ..Created::default() };
                    record(&created, &json!({"how": how.name(), "workers": workers}));
                }
            }
        }
    }
    Ok(())
}

fn is_transparent(page: PageSize, from: PagesFrom) -> bool {
    (page, from) == (PageSize::Size2M, PagesFrom::Frames)
}

/// Switches transparent huge pages on, or fills the pool.
fn prepare(page: PageSize, from: PagesFrom, bytes: u64) -> Result<()> {
    if page == PageSize::Size4K {
        return Ok(());
    }
    if is_transparent(page, from) {
        return fs::write(THP, "madvise").with_context(|| format!("cannot write {THP}"));
    }
    if from == PagesFrom::Frames {
        bail!("transparent huge pages have no 1 GiB size; use --from pool");
    }
    let kib = page.bytes() >> 10;
    let size = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
    let pages = bytes.div_ceil(page.bytes());
    fs::write(&size, pages.to_string()).with_context(|| format!("cannot write {pages} to {size}"))?;
    let reached = fs::read_to_string(&size).with_context(|| format!("cannot read {size}"))?;
    if reached.trim() != pages.to_string() {
        bail!("only {} of {pages} pages of {kib} KiB could be had", reached.trim());
    }
    Ok(())
}

fn map(bytes: usize, page: PageSize, from: PagesFrom) -> Result<Mmap> {
    let kind = match page {
        PageSize::Size4K => Kind::Anonymous,
        _ if is_transparent(page, from) => Kind::Anonymous,
        _ => Kind::Hugetlb { shift: page.bytes().trailing_zeros() },
    };
    let memory = Mmap::new(bytes, page.bytes() as usize, 4096, kind).context("cannot map memory")?;
    if is_transparent(page, from) {
        memory.transparent_huge(true).context("this kernel has no transparent huge pages")?;
    } else if page == PageSize::Size4K {
        // A kernel without them does not know what to leave.
        let _ = memory.transparent_huge(false);
    }
    Ok(memory)
}

fn verify(bytes: u64) -> Result<()> {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").context("cannot read /proc/self/smaps_rollup")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("AnonHugePages:")).unwrap_or("0 kB");
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().context("AnonHugePages is no number")?;
    if (kib << 10) < bytes / 10 * 9 {
        bail!("only {kib} KiB of {} were huge pages; give the guest more --memory", bytes >> 10);
    }
    Ok(())
}

/// Populates all of it by so many threads, each a share of whole pages; the nanoseconds of the slowest, all having started
/// at once.
fn populate(mut memory: &mut [u8], page: PageSize, how: CreateMethod, threads: usize) -> Result<u64> {
    let page = page.bytes() as usize;
    let pages = memory.len() / page;
    let start = Barrier::new(threads);
    std::thread::scope(|scope| {
        let mut all = Vec::new();
        for thread in 0..threads {
            let share = pages * (thread + 1) / threads - pages * thread / threads;
            let (share, rest) = std::mem::take(&mut memory).split_at_mut(share * page);
            memory = rest;
            let start = &start;
            all.push(scope.spawn(move || {
                start.wait();
                let begin = Instant::now();
                match how {
                    // SAFETY: a byte of the share, which this thread alone has.
                    CreateMethod::Demand => share.iter_mut().step_by(page).for_each(|byte| unsafe {
                        std::ptr::from_mut(byte).write_volatile(1);
                    }),
                    CreateMethod::Prefault | CreateMethod::Pin if share.is_empty() => {}
                    // SAFETY: the share is this thread's; populating changes no content that was seen.
                    _ => unsafe { madvise(share.as_mut_ptr().cast(), share.len(), Advice::LinuxPopulateWrite) }
                        .context("cannot populate memory (MADV_POPULATE_WRITE, Linux 5.14)")?,
                }
                Ok(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX))
            }));
        }
        let joined = all.into_iter().map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")));
        Ok(joined.collect::<Result<Vec<u64>>>()?.into_iter().max().unwrap_or(0))
    })
}
