//! A trace: text as `perf script`, `trace-cmd report` and ftrace itself print it, read into a plan.
//!
//! ```text
//!           cc  2301 [001]  6012.721314: kmem:mm_page_alloc: page=… pfn=0x1200 order=2 migratetype=1 gfp_flags=…
//!           cc-2301  [001] d..1. 6012.721314: mm_page_free: page=… pfn=4608 order=2
//! ```
//!
//! Of each line the last `[CPU]` before the event's name counts: a process's name may hold anything. Every other line is passed over, but
//! those that say that events were lost.
//!
//! `mm_page_free` is emitted for **every** page or folio freed. `mm_page_free_batched` comes *in addition* for pages freed as part of a
//! list, so it frees nothing here (kernel documentation, `trace/events-kmem.rst`). Frame numbers are hexadecimal with `0x` (since Linux
//! 5.12) or decimal; a failed allocation has -1, or 0. `migratetype` is the kernel's number since 4.4: 1 is movable; the others that
//! appear in `mm_page_alloc` are unmovable to us.

use super::plan::{Plan, Planner};
use anyhow::{Context, Result, anyhow, bail};
use hugemm_base::{Order, Pfn};
use hugemm_frames::Mobility;
use hugemm_inspect::interrupt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Linux's own limit on CPUs (NR_CPUS).
const MOST_CPUS: u32 = 8192;

/// Lines between looks at Ctrl-C and the progress bar.
const BREATH: usize = 1 << 14;

const PRINT: &str =
    "print a recording of kmem:mm_page_alloc and kmem:mm_page_free with perf script or trace-cmd report";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Nothing,
    /// The recorder lost events here.
    Lost,
    /// By a CPU. Of the frames from `pfn` on; `None` if it failed.
    Alloc {
        cpu: u32,
        pfn: Option<u64>,
        order: Order,
        mobility: Mobility,
    },
    Free {
        cpu: u32,
        pfn: u64,
        order: Order,
    },
}

/// Reads a trace file; also how often its recorder says that it has lost events. `progress` is called with the bytes read so far.
pub fn read(path: &Path, progress: impl FnMut(u64)) -> Result<(Plan, u64)> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    from(BufReader::with_capacity(1 << 20, file), &path.display().to_string(), progress)
}

/// Reads a trace; `name` is for messages.
fn from(input: impl BufRead, name: &str, mut progress: impl FnMut(u64)) -> Result<(Plan, u64)> {
    let (mut planner, mut lost, mut bytes) = (Planner::default(), 0, 0);
    for (index, text) in input.split(b'\n').enumerate() {
        let text = text.with_context(|| format!("cannot read {name}"))?;
        bytes += text.len() as u64 + 1;
        if index.is_multiple_of(BREATH) {
            interrupt::check()?;
            progress(bytes);
        }
        let at = |why: String| anyhow!("{name}, line {}: {why}", index + 1);
        if text.contains(&0) {
            return Err(at(format!("binary data; {PRINT}")));
        }
        match line(&String::from_utf8_lossy(&text)).map_err(at)? {
            Line::Nothing => {}
            Line::Lost => lost += 1,
            Line::Alloc { cpu, pfn, order, mobility } => planner.alloc(cpu, pfn, order, mobility).map_err(at)?,
            Line::Free { cpu, pfn, order } => planner.free(cpu, pfn, order).map_err(at)?,
        }
    }
    if planner.is_empty() {
        bail!("{name} has no mm_page_alloc or mm_page_free event; {PRINT}");
    }
    Ok((planner.finish(), lost))
}

/// Reads a line without its end. The error says what was expected.
fn line(text: &str) -> Result<Line, String> {
    let event = |name| text.split_once(name).filter(|(head, _)| head.ends_with([' ', '\t', ':']));
    let cpu = |head: &str| {
        let number = |word: &str| word.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
        let cpu = head.split_whitespace().rev().find_map(number).filter(|cpu| *cpu < MOST_CPUS);
        cpu.ok_or_else(|| format!("expected a CPU below {MOST_CPUS} in brackets before the event"))
    };
    if let Some((head, fields)) = event("mm_page_alloc:") {
        let (cpu, order) = (cpu(head)?, order(fields)?);
        let mobility = if field(fields, "migratetype")? == "1" { Mobility::Movable } else { Mobility::Unmovable };
        Ok(Line::Alloc { cpu, pfn: pfn(fields, order)?, order, mobility })
    } else if let Some((head, fields)) = event("mm_page_free:") {
        let (cpu, order) = (cpu(head)?, order(fields)?);
        Ok(Line::Free { cpu, pfn: pfn(fields, order)?.ok_or("expected a frame, which 'pfn=' is not")?, order })
    } else if ["LOST ", "EVENTS DROPPED"].iter().any(|word| text.contains(word)) {
        // `CPU:1 [LOST 17 EVENTS]` of ftrace, `CPU:1 [17 EVENTS DROPPED]` of trace-cmd, perf's `PERF_RECORD_LOST … lost 17`.
        Ok(Line::Lost)
    } else {
        Ok(Line::Nothing)
    }
}

fn field<'t>(fields: &'t str, name: &str) -> Result<&'t str, String> {
    let value = |word: &'t str| word.strip_prefix(name)?.strip_prefix('=').filter(|value| !value.is_empty());
    fields.split_whitespace().find_map(value).ok_or_else(|| format!("expected '{name}='"))
}

fn order(fields: &str) -> Result<Order, String> {
    let value = field(fields, "order")?;
    let order = value.parse().ok().and_then(|order| Order::new(order).ok());
    order.ok_or_else(|| format!("expected an order of 0 to {}, not {value}", Order::MAX.get()))
}

/// The first frame of a block; `None` for a failed allocation.
fn pfn(fields: &str, order: Order) -> Result<Option<u64>, String> {
    let value = field(fields, "pfn")?;
    let number = match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if value == "-1" => Some(u64::MAX),
        None => value.parse().ok(),
    };
    match number {
        None => Err(format!("expected a frame number after 'pfn=', not '{value}'")),
        Some(0 | u64::MAX) => Ok(None),
        Some(number) if number >= Pfn::LIMIT.get() || !number.is_multiple_of(order.pages()) => Err(format!(
            "expected a frame aligned to its order {}, below {}, not {value}",
            order.get(),
            Pfn::LIMIT.get()
        )),
        number => Ok(number),
    }
}

#[cfg(test)]
#[path = "trace_tests.rs"]
mod tests;
