//! One line of a trace.
//!
//! # Layouts
//!
//! ```text
//! perf script            cc  2301 [001]  6012.721314:        kmem:mm_page_alloc: page=… pfn=… order=…
//! … -F comm,tid,cpu,…    cc  2301 [001]        kmem:mm_page_alloc: page=… pfn=… order=…
//! trace-cmd report       cc-2301  [001]  6012.721314: mm_page_alloc:        page=… pfn=… order=…
//! … and ftrace itself    cc-2301  [001] d..1. 6012.721314: mm_page_alloc: page=… pfn=… order=…
//! ```
//!
//! A process's name may hold anything, blanks and brackets too, so a line is read from the first `[CPU]` behind which an event's name
//! follows, preferably one behind a process number. Between them may be flags, a time and perf's period.
//!
//! # Values
//!
//! Frame numbers are hexadecimal with `0x` (since Linux 5.12) or decimal. A failed allocation has frame -1, printed by
//! newer kernels as a null `page` with frame 0. `page` is otherwise of no use: `perf` cannot compute it.
//! `migratetype` is the kernel's number since 4.4: 0 unmovable, 1 movable, 2 reclaimable; the latter and those that never
//! appear in `mm_page_alloc` are unmovable to us. Compound allocations show `__GFP_COMP` (`GFP_COMP` before 4.5), or a
//! name that includes it (`GFP_TRANSHUGE…`); where the flags are a bare number, its bit is not known, and none is assumed.

use hugemm_base::{Order, Pfn};
use hugemm_frames::Mobility;

/// Linux's own limit on CPUs (NR_CPUS).
const MOST_CPUS: u32 = 8192;

/// What a line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line<'t> {
    /// Nothing that matters: a comment, a heading, an entry of a call chain.
    Nothing,
    /// The recorder lost events here: how many, if it knows.
    Lost(Option<u64>),
    /// An event on a CPU.
    Event(u32, Event<'t>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'t> {
    /// Of the frames from `pfn` on; `None` if it failed. `compound`: it is one folio.
    Alloc {
        pfn: Option<u64>,
        order: Order,
        mobility: Mobility,
        compound: bool,
    },
    Free {
        pfn: u64,
        order: Order,
    },
    FreeBatched,
    /// Any other, by name.
    Other(&'t str),
}

/// Reads a line without its end. The error says what was expected.
pub fn line(text: &str) -> Result<Line<'_>, String> {
    let trimmed = text.trim();
    if is_idle(text, trimmed) {
        return Ok(Line::Nothing);
    }
    if let Some(lost) = lost(trimmed) {
        return Ok(lost);
    }
    let of_process =
        |(before, ..): &(&str, &str, &str)| before.ends_with(|c: char| c.is_ascii_digit() || c == ')' || c == '-');
    let found = cpus(trimmed).filter(of_process).chain(cpus(trimmed));
    let found = found.into_iter().find_map(|(_, cpu, rest)| Some((cpu, event_name(rest)?, rest)));
    match found {
        Some((cpu, name, fields)) => {
            let cpu = cpu.parse().ok().filter(|cpu| *cpu < MOST_CPUS);
            let cpu = cpu.ok_or_else(|| format!("expected a CPU below {MOST_CPUS} in brackets"))?;
            event(name, fields).map(|event| Line::Event(cpu, event))
        }
        None if cpus(trimmed).next().is_some() => {
            Err("expected the name of an event and a colon after the CPU".to_owned())
        }
        None => Err("expected '[CPU]', then an event such as 'mm_page_alloc:' (with perf script -F, keep \
                     comm,tid,cpu,event,trace)"
            .to_owned()),
    }
}

/// Comments, the headings of `trace-cmd report`, entries of call chains: blanks, an address, symbol+0xoffset, (module).
fn is_idle(text: &str, trimmed: &str) -> bool {
    let heading = |(prefix, number): (&str, &str)| {
        ["cpus", "version"].contains(&prefix.trim()) && number.trim().parse::<u32>().is_ok()
    };
    let address = |word: &str| word.len() >= 4 && word.bytes().all(|b| b.is_ascii_hexdigit());
    trimmed.is_empty()
        || trimmed.starts_with(['#', '='])
        || trimmed.split_once('=').is_some_and(heading)
        || (trimmed.starts_with("CPU ") && trimmed.ends_with(" is empty"))
        || (text.starts_with([' ', '\t'])
            && trimmed.ends_with(')')
            && trimmed.split_whitespace().next().is_some_and(address))
}

/// `CPU:1 [LOST 17 EVENTS]` of ftrace, `CPU:1 [17 EVENTS DROPPED]` of trace-cmd, perf's `PERF_RECORD_LOST … lost 17`.
fn lost(trimmed: &str) -> Option<Line<'_>> {
    let number = |text: &str| text.split_whitespace().find_map(|word| word.trim_end_matches(']').parse().ok());
    if let Some((_, rest)) = trimmed.split_once("PERF_RECORD_LOST") {
        return Some(Line::Lost(rest.split_once("lost ").and_then(|(_, count)| number(count))));
    }
    let (_, rest) = trimmed.strip_prefix("CPU:")?.split_once('[')?;
    let told = rest.ends_with("EVENTS]") || rest.ends_with("EVENTS DROPPED]");
    told.then(|| Line::Lost(number(rest)))
}

/// Every `[digits]` that stands alone, between what stands before it and what follows.
fn cpus(text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    text.match_indices('[').filter_map(move |(at, _)| {
        let before = text[..at].strip_suffix(char::is_whitespace)?.trim_end();
        let (cpu, rest) = text[at + 1..].split_once(']')?;
        let digits = !cpu.is_empty() && cpu.bytes().all(|b| b.is_ascii_digit());
        (digits && (rest.is_empty() || rest.starts_with(char::is_whitespace))).then_some((before, cpu, rest))
    })
}

/// The event's name, after at most flags, a time and a period.
fn event_name(rest: &str) -> Option<&str> {
    rest.split_whitespace().take(4).find_map(|word| {
        let name = word.strip_suffix(':').or(word.starts_with("PERF_RECORD_").then_some(word))?;
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_').then_some(name)
    })
}

fn event<'t>(name: &'t str, fields: &str) -> Result<Event<'t>, String> {
    match name.strip_prefix("kmem:").unwrap_or(name) {
        "mm_page_alloc" => {
            let order = order(fields)?;
            let pfn = pfn(fields, order)?;
            let mobility = if number(fields, "migratetype")? == 1 { Mobility::Movable } else { Mobility::Unmovable };
            let mut flags = field(fields, "gfp_flags")?.split('|');
            let compound = |flag: &str| matches!(flag, "__GFP_COMP" | "GFP_COMP") || flag.starts_with("GFP_TRANSHUGE");
            Ok(Event::Alloc { pfn, order, mobility, compound: flags.any(compound) })
        }
        "mm_page_free" => {
            let order = order(fields)?;
            let pfn = pfn(fields, order)?.ok_or("expected a frame, which 'pfn=' is not")?;
            Ok(Event::Free { pfn, order })
        }
        "mm_page_free_batched" => pfn(fields, Order::ZERO).map(|_| Event::FreeBatched),
        name => Ok(Event::Other(name)),
    }
}

fn field<'t>(fields: &'t str, name: &str) -> Result<&'t str, String> {
    let value = |word: &'t str| word.strip_prefix(name)?.strip_prefix('=').filter(|value| !value.is_empty());
    fields.split_whitespace().find_map(value).ok_or_else(|| format!("expected '{name}='"))
}

fn number(fields: &str, name: &str) -> Result<i64, String> {
    let value = field(fields, name)?;
    value.parse().map_err(|_| format!("expected a number after '{name}=', not '{value}'"))
}

fn order(fields: &str) -> Result<Order, String> {
    let value = number(fields, "order")?;
    let order = u32::try_from(value).ok().and_then(|order| Order::new(order).ok());
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
    // "(nil)", "(null)", "0x0", "0000000000000000"
    let null = |page: &str| page.starts_with("(n") || page.trim_start_matches("0x").bytes().all(|b| b == b'0');
    match number {
        None => Err(format!("expected a frame number after 'pfn=', not '{value}'")),
        Some(u64::MAX) => Ok(None),
        Some(0) if field(fields, "page").map_or(true, null) => Ok(None),
        Some(number) if number >= Pfn::LIMIT.get() => {
            Err(format!("expected a frame number that fits a physical address, not {value}"))
        }
        Some(number) if !number.is_multiple_of(order.pages()) => {
            Err(format!("expected a frame aligned to its order {}, not {value}", order.get()))
        }
        number => Ok(number),
    }
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
