//! Populating memory by page faults: touching each page, or one `MADV_POPULATE_WRITE`.

use crate::{number, say};
use anyhow::{Context, Result, bail};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use serde_json::json;
use std::fs;
use std::ptr::{NonNull, null_mut};
use std::time::Instant;

/// `faults BYTES RUNS 4|2048|1048576 demand|populate,…`: each run maps, populates and unmaps `BYTES` of private memory in
/// pages of that many KiB: hugetlb pages above 4 KiB. Run 0 warms up.
pub fn run(words: &[&str]) -> Result<()> {
    let (bytes, runs, kib) = (number(words, 0, "BYTES")?, number(words, 1, "RUNS")?, number(words, 2, "PAGE_KIB")?);
    let hows = words.get(3).context("the functions are missing: demand, populate or both")?;
    let flags = match kib {
        4 => MapFlags::PRIVATE,
        2048 => MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
        1_048_576 => MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_1GB,
        _ => bail!("there are no pages of {kib} KiB"),
    };
    if kib > 4 {
        let size = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
        let pages = bytes.div_ceil(kib << 10);
        fs::write(&size, pages.to_string()).with_context(|| format!("cannot write {pages} to {size}"))?;
        let reached = fs::read_to_string(&size).with_context(|| format!("cannot read {size}"))?;
        if reached.trim() != pages.to_string() {
            bail!("only {} of {pages} pages of {kib} KiB could be had", reached.trim());
        }
    }
    for run in 0..=runs {
        for how in hows.split(',') {
            let nanos = once(usize::try_from(bytes)?, usize::try_from(kib << 10)?, flags, how)?;
            say(json!({"event": "faults", "run": run, "function": how, "page_kib": kib, "bytes": bytes, "ns": nanos}));
        }
    }
    Ok(())
}

fn once(bytes: usize, page: usize, flags: MapFlags, how: &str) -> Result<u64> {
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let at = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) };
    let at = NonNull::new(at.context("cannot map memory")?.cast::<u8>()).context("memory was mapped at address 0")?;
    let start = Instant::now();
    match how {
        "demand" => {
            for offset in (0..bytes).step_by(page) {
                // SAFETY: within the mapping, which is writable and nobody else's.
                unsafe { at.add(offset).write_volatile(1) };
            }
        }
        // SAFETY: the mapping is ours; populating changes no content that was seen.
        "populate" => unsafe { madvise(at.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) }
            .context("cannot populate memory (MADV_POPULATE_WRITE, Linux 5.14)")?,
        other => bail!("'{other}' is neither demand nor populate"),
    }
    let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: mapped above, and no pointer into it is used any more.
    unsafe { munmap(at.as_ptr().cast(), bytes) }.context("cannot unmap memory")?;
    Ok(nanos)
}
