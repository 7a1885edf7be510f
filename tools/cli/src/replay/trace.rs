//! A trace file, from its first byte to a plan.

use super::parse::{Line, line};
use super::plan::{Plan, Planner};
use anyhow::{Context, Result, anyhow, bail};
use hugemm_inspect::interrupt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// No line of a trace is longer, in bytes: what is longer is no text.
const LONGEST_LINE: u64 = 64 << 10;

/// Lines between looks at Ctrl-C and the progress bar.
const BREATH: u64 = 1 << 14;

const RECORD: &str = "record -e kmem:mm_page_alloc,kmem:mm_page_free,kmem:mm_page_free_batched -a";

/// A plan, and what else was in the file.
#[derive(Debug)]
pub struct Trace {
    pub plan: Plan,
    /// How often the recorder said that it had lost events, and how many where it knew.
    pub lost: (u64, u64),
}

/// Reads a trace file. `progress` is called with the bytes read so far.
pub fn read(path: &Path, progress: impl FnMut(u64)) -> Result<Trace> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        bail!("{} is a directory; name a file with a trace in it", path.display());
    }
    from(BufReader::with_capacity(1 << 20, file), &path.display().to_string(), progress)
}

/// Reads a trace; `name` is for messages.
pub fn from(mut input: impl BufRead, name: &str, mut progress: impl FnMut(u64)) -> Result<Trace> {
    let start = input.fill_buf().with_context(|| format!("cannot read {name}"))?;
    if let Some(remedy) = binary(start, name) {
        bail!(remedy);
    }
    let mut planner = Planner::default();
    let (mut lost, mut bytes, mut buffer) = ((0, 0), 0, Vec::new());
    for number in 1_u64.. {
        buffer.clear();
        let length = (&mut input).take(LONGEST_LINE).read_until(b'\n', &mut buffer);
        let length = length.with_context(|| format!("cannot read {name}"))?;
        if length == 0 {
            break;
        }
        bytes += length as u64;
        if number.is_multiple_of(BREATH) {
            interrupt::check()?;
            progress(bytes);
        }
        let at = |expected: String| anyhow!("{name}, line {number}: {expected}");
        if buffer.contains(&0) || length as u64 == LONGEST_LINE {
            return Err(at(
                "expected a line of text, not binary data; print the recording with perf script or trace-cmd report"
                    .into(),
            ));
        }
        if buffer.pop() != Some(b'\n') {
            let cut = "expected the line to end, but the file does: it is truncated; print the trace again, or delete \
                       this line";
            return Err(at(cut.into()));
        }
        // Names of processes may hold any byte.
        let text = String::from_utf8_lossy(&buffer);
        match line(&text).map_err(at)? {
            Line::Nothing => {}
            Line::Lost(count) => lost = (lost.0 + 1, lost.1 + count.unwrap_or(0)),
            Line::Event(cpu, event) => {
                planner.event(cpu, event).map_err(|why| anyhow!("{name}, line {number}: {why}"))?;
            }
        }
    }
    if planner.is_empty() {
        bail!(nothing(&planner, name, bytes));
    }
    if planner.counts().frees == 0 && planner.counts().batched > 0 {
        bail!(
            "{name} has mm_page_free_batched but no mm_page_free, which Linux emits for every page freed; perf {RECORD}"
        );
    }
    Ok(Trace { plan: planner.finish(), lost })
}

fn nothing(planner: &Planner, name: &str, bytes: u64) -> String {
    let others = &planner.counts().others;
    match others.iter().max_by_key(|(_, count)| **count) {
        _ if bytes == 0 => format!("{name} is empty; record a trace (perf {RECORD}) and print it with perf script"),
        Some((event, count)) => format!(
            "{name} has no mm_page_alloc or mm_page_free event to replay, but {count} of {event}; perf {RECORD}"
        ),
        None => format!("{name} has no event in it; record a trace (perf {RECORD}) and print it with perf script"),
    }
}

/// What to do with a recording that has not been printed yet.
fn binary(start: &[u8], name: &str) -> Option<String> {
    let remedy = |what: &str, command: &str| {
        Some(format!("{name} is {what}, a binary recording; print it first: {command} -i {name} > trace.txt"))
    };
    if start.starts_with(b"PERFILE2") || start.starts_with(b"2ELIFREP") || start.starts_with(b"PERFFILE") {
        remedy("perf.data", "perf script")
    } else if start.starts_with(b"\x17\x08\x44tracing") {
        remedy("trace.dat of trace-cmd", "trace-cmd report")
    } else if start.starts_with(b"\x1f\x8b") || start.starts_with(b"\x28\xb5\x2f\xfd") || start.starts_with(b"\xfd7zXZ")
    {
        Some(format!("{name} is compressed; decompress it first (gunzip, unzstd or unxz)"))
    } else {
        None
    }
}

#[cfg(test)]
#[path = "trace_tests.rs"]
mod tests;
