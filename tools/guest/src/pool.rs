//! Growing and shrinking Linux's hugetlb pool, with vmemmap optimization off and on.

use crate::interrupts::Interrupts;
use crate::{number, say};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The run-time switch of vmemmap optimization.
const SWITCH: &str = "/proc/sys/vm/hugetlb_optimize_vmemmap";

/// `pool PAGES PAGE_KIB RUNS off|on|off,on`: each run grows the pool from nothing to `PAGES` pages and back.
///
/// Both sides' runs alternate. The first run of each side is numbered 0: it pays for splits that later ones find done.
pub fn run(words: &[&str]) -> Result<()> {
    let (pages, kib, runs) = (number(words, 0, "PAGES")?, number(words, 1, "PAGE_KIB")?, number(words, 2, "RUNS")?);
    let sides = words.get(3).context("the sides are missing: off, on or off,on")?;
    let size = PathBuf::from(format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"));
    if !size.exists() {
        bail!("this kernel has no pool of {kib} KiB pages ({} is missing)", size.display());
    }
    let has_switch = Path::new(SWITCH).exists();
    for run in 0..=runs {
        for side in sides.split(',') {
            match (side, has_switch) {
                ("on" | "off", true) => fs::write(SWITCH, if side == "on" { "1" } else { "0" })
                    .with_context(|| format!("cannot write {SWITCH}"))?,
                ("off", false) => {}
                // What is not there has no runs.
                ("on", false) if sides != &"on" => continue,
                ("on", false) => bail!("this kernel has no vmemmap optimization ({SWITCH} is missing)"),
                (other, _) => bail!("'{other}' is neither on nor off"),
            }
            let up = resize(&size, pages)?;
            let reached = read(&size)?;
            let down = resize(&size, 0)?;
            let left = read(&size)?;
            say(json!({
                "event": "pool", "run": run, "hvo": side, "page_kib": kib, "wanted": pages, "pages": reached,
                "left": left,
                "up_ns": up.nanos, "up_function_calls": up.ipis.function_calls, "up_tlb": up.ipis.tlb,
                "down_ns": down.nanos, "down_function_calls": down.ipis.function_calls, "down_tlb": down.ipis.tlb,
            }));
        }
    }
    Ok(())
}

/// What one resize took.
struct Spent {
    nanos: u64,
    ipis: Interrupts,
}

fn resize(size: &Path, pages: u64) -> Result<Spent> {
    let before = Interrupts::read()?;
    let start = Instant::now();
    fs::write(size, pages.to_string()).with_context(|| format!("cannot write {pages} to {}", size.display()))?;
    let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(Spent { nanos, ipis: Interrupts::read()?.since(before) })
}

fn read(size: &Path) -> Result<u64> {
    let text = fs::read_to_string(size).with_context(|| format!("cannot read {}", size.display()))?;
    text.trim().parse().with_context(|| format!("{} says '{}'", size.display(), text.trim()))
}
