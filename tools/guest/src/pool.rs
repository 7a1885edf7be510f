//! Growing and shrinking Linux's hugetlb pool, with vmemmap optimization off and on.

use crate::interrupts::Interrupts;
use crate::record;
use anyhow::{Context, Result, bail};
use hugemm_workloads::pool::Cycle;
use hugemm_workloads::request::{Optimization, Pool};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The run-time switch of vmemmap optimization.
const SWITCH: &str = "/proc/sys/vm/hugetlb_optimize_vmemmap";

/// Each run grows the pool from nothing to so many pages and back. Both sides' runs alternate; the first of each, which pays for splits
/// that later ones find done, is not counted.
pub fn run(work: &Pool) -> Result<()> {
    let pages = work.n.and_then(|n| n.iter().next()).context("the number of pages is missing")?;
    let kib = work.page.bytes() >> 10;
    let size = PathBuf::from(format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"));
    if !size.exists() {
        bail!("this kernel has no pool of {kib} KiB pages ({} is missing)", size.display());
    }
    let has_switch = Path::new(SWITCH).exists();
    for run in 0..=work.runs {
        for side in work.hvo.iter() {
            let on = side != Optimization::Off;
            match (on, has_switch) {
                (_, true) => {
                    fs::write(SWITCH, if on { "1" } else { "0" }).with_context(|| format!("cannot write {SWITCH}"))?
                }
                (false, false) => {}
                // What is not there has no runs.
                (true, false) if work.hvo.contains(Optimization::Off) => continue,
                (true, false) => bail!("this kernel has no vmemmap optimization ({SWITCH} is missing)"),
            }
            let mut cycle = Cycle::default();
            (cycle.up.nanos, cycle.up.interrupts) = resize(&size, pages)?;
            cycle.up.report.entered = read(&size)?;
            (cycle.down.nanos, cycle.down.interrupts) = resize(&size, 0)?;
            cycle.down.report.left = cycle.up.report.entered.saturating_sub(read(&size)?);
            if run > 0 {
                record(&cycle, &json!({"hvo": on}));
            }
        }
    }
    Ok(())
}

/// Nanoseconds of one resize, and interrupts.
fn resize(size: &Path, pages: u64) -> Result<(u64, u64)> {
    let before = Interrupts::read()?;
    let start = Instant::now();
    fs::write(size, pages.to_string()).with_context(|| format!("cannot write {pages} to {}", size.display()))?;
    let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let ipis = Interrupts::read()?.since(before);
    Ok((nanos, ipis.function_calls + ipis.tlb))
}

fn read(size: &Path) -> Result<u64> {
    let text = fs::read_to_string(size).with_context(|| format!("cannot read {}", size.display()))?;
    text.trim().parse().with_context(|| format!("{} says '{}'", size.display(), text.trim()))
}
