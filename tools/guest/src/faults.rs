//! Populating memory by page faults: touching each page, or one `MADV_POPULATE_WRITE`; by one thread or several.

use crate::record;
use anyhow::{Context, Result, bail};
use hugemm_base::PageSize;
use hugemm_workloads::request::{KERNEL_SIZE, PagesFrom, VmCreate};
use hugemm_workloads::vm_create::{CreateMethod, Created};
use hugemm_workloads::words::{List, Named};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use serde_json::json;
use std::fs;
use std::ptr::{NonNull, null_mut};
use std::sync::Barrier;
use std::time::Instant;

/// Where transparent huge pages are switched on.
const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// A transparent huge page, and its alignment.
const THP_BYTES: usize = 2 << 20;

/// Each run maps, populates and unmaps private memory. The first is not counted. Several threads divide the memory among
/// themselves.
pub fn run(work: &VmCreate) -> Result<()> {
    let bytes = work.size.unwrap_or(KERNEL_SIZE);
    let page = work.page.iter().next().unwrap_or(PageSize::Size2M);
    let huge = Huge::prepare(page, work.from, bytes)?;
    for run in 0..=work.runs {
        for how in work.how.iter() {
            for workers in work.workers.unwrap_or(List::one(1)).iter() {
                let memory = Memory::map(usize::try_from(bytes)?, huge)?;
                let nanos = populate(&memory, usize::try_from(page.bytes())?, how, workers as usize)?;
                memory.verify()?;
                if run > 0 {
                    let created = Created { bytes, nanos, ..Created::default() };
                    record(&created, &json!({"how": how.name(), "workers": workers}));
                }
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Huge {
    Small,
    Transparent,
    Hugetlb(MapFlags),
}

impl Huge {
    fn prepare(page: PageSize, from: PagesFrom, bytes: u64) -> Result<Self> {
        let flag = match (page, from) {
            (PageSize::Size4K, _) => return Ok(Huge::Small),
            (PageSize::Size2M, PagesFrom::Frames) => {
                fs::write(THP, "madvise").with_context(|| format!("cannot write {THP}"))?;
                return Ok(Huge::Transparent);
            }
            (PageSize::Size2M, PagesFrom::Pool) => MapFlags::HUGE_2MB,
            (PageSize::Size1G, PagesFrom::Pool) => MapFlags::HUGE_1GB,
            (PageSize::Size1G, PagesFrom::Frames) => {
                bail!("transparent huge pages have no 1 GiB size; use --from pool")
            }
        };
        let kib = page.bytes() >> 10;
        let size = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
        let pages = bytes.div_ceil(kib << 10);
        fs::write(&size, pages.to_string()).with_context(|| format!("cannot write {pages} to {size}"))?;
        let reached = fs::read_to_string(&size).with_context(|| format!("cannot read {size}"))?;
        if reached.trim() != pages.to_string() {
            bail!("only {} of {pages} pages of {kib} KiB could be had", reached.trim());
        }
        Ok(Huge::Hugetlb(MapFlags::HUGETLB | flag))
    }
}

struct Memory {
    mapped: NonNull<u8>,
    length: usize,
    at: NonNull<u8>,
    bytes: usize,
    huge: Huge,
}

// SAFETY: memory that nobody else knows; threads use parts of their own.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(bytes: usize, huge: Huge) -> Result<Self> {
        // Transparent pages need the alignment, which is looked for in a larger mapping.
        let (length, flags) = match huge {
            Huge::Small => (bytes, MapFlags::PRIVATE),
            Huge::Transparent => (bytes + THP_BYTES, MapFlags::PRIVATE),
            Huge::Hugetlb(flags) => (bytes, MapFlags::PRIVATE | flags),
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let mapped = unsafe { mmap_anonymous(null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags) };
        let mapped = NonNull::new(mapped.context("cannot map memory")?.cast::<u8>());
        let mapped = mapped.context("memory was mapped at address 0")?;
        let skip = if huge == Huge::Transparent { mapped.align_offset(THP_BYTES) } else { 0 };
        // SAFETY: less than what the mapping is longer by.
        let at = unsafe { mapped.add(skip) };
        let memory = Memory { mapped, length, at, bytes, huge };
        let advice = match huge {
            Huge::Small => Some(Advice::LinuxNoHugepage),
            Huge::Transparent => Some(Advice::LinuxHugepage),
            Huge::Hugetlb(_) => None,
        };
        if let Some(advice) = advice {
            // SAFETY: the mapping is ours and empty. A kernel without transparent huge pages knows neither.
            let advised = unsafe { madvise(at.as_ptr().cast(), bytes, advice) };
            if huge == Huge::Transparent {
                advised.context("this kernel has no transparent huge pages")?;
            }
        }
        Ok(memory)
    }

    fn verify(&self) -> Result<()> {
        if self.huge != Huge::Transparent {
            return Ok(());
        }
        let rollup = fs::read_to_string("/proc/self/smaps_rollup").context("cannot read /proc/self/smaps_rollup")?;
        let line = rollup.lines().find_map(|line| line.strip_prefix("AnonHugePages:")).unwrap_or("0 kB");
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().context("AnonHugePages is no number")?;
        if (kib << 10) < self.bytes as u64 / 10 * 9 {
            bail!("only {kib} KiB of {} were huge pages; give the guest more --memory", self.bytes >> 10);
        }
        Ok(())
    }

    fn populate(&self, from: usize, to: usize, page: usize, how: CreateMethod) -> Result<()> {
        match how {
            CreateMethod::Demand => {
                for offset in (from..to).step_by(page) {
                    // SAFETY: within the mapping, which is writable and nobody else's.
                    unsafe { self.at.add(offset).write_volatile(1) };
                }
                Ok(())
            }
            // SAFETY: the mapping is ours; populating changes no content that was seen.
            CreateMethod::Prefault | CreateMethod::Pin => {
                unsafe { madvise(self.at.add(from).as_ptr().cast(), to - from, Advice::LinuxPopulateWrite) }
                    .context("cannot populate memory (MADV_POPULATE_WRITE, Linux 5.14)")
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and no pointer into it is used any more. There is nobody to tell of an error.
        let _ = unsafe { munmap(self.mapped.as_ptr().cast(), self.length) };
    }
}

/// Populates all of it by so many threads, each a share of whole pages; the nanoseconds of the slowest, all having started
/// at once.
fn populate(memory: &Memory, page: usize, how: CreateMethod, threads: usize) -> Result<u64> {
    let pages = memory.bytes / page;
    let start = Barrier::new(threads);
    let share = |thread: usize| {
        let (from, to) = (pages * thread / threads * page, pages * (thread + 1) / threads * page);
        start.wait();
        let begin = Instant::now();
        if from < to {
            memory.populate(from, to, page, how)?;
        }
        Ok(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    };
    let times = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || share(thread))).collect();
        let mut times = vec![share(0)];
        let joined = others.into_iter().map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")));
        times.extend(joined);
        times.into_iter().collect::<Result<Vec<u64>>>()
    })?;
    Ok(times.into_iter().max().unwrap_or(0))
}
