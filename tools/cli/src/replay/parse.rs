//! One line of a trace.
//!
//! # Layouts
//!
//! ```text
//! perf script            cc  2301 [001]  6012.721314:        kmem:mm_page_alloc: page=… pfn=… order=…
//! … -F comm,tid,cpu,…    cc  2301 [001]        kmem:mm_page_alloc: page=… pfn=… order=…
//! trace-cmd report       cc-2301  [001]  6012.721314: mm_page_alloc:        page=… pfn=… order=…
//! … and ftrace itself    cc-2301  [001] d..1. 6012.721314: mm_page_alloc: page=… pfn=… order=…
//! trace-cmd report -l    cc-2301     1d..1.  6012.721314: mm_page_alloc:        page=… pfn=… order=…
//! ```
//!
//! A process's name may hold anything, blanks and brackets too, so a line is read from the first `[CPU]` after which it
//! makes sense, preferably one after a process number: flags, time and perf's period, each of which may be missing, then
//! the event's name with a colon.
//!
//! # Values
//!
//! Frame numbers are hexadecimal with `0x` (since Linux 5.12) or decimal. A failed allocation has frame -1, printed by
//! newer kernels as a null `page` with frame 0. `page` is otherwise of no use: `perf` cannot compute it.
//! `migratetype` is the kernel's number since 4.4: 0 unmovable, 1 movable, 2 reclaimable; the latter and those that never
//! appear in `mm_page_alloc` are unmovable to us. Compound allocations show `__GFP_COMP` (`GFP_COMP` before 4.5), or a
//! name that includes it (`GFP_TRANSHUGE…`); where the flags are a bare number, its bit is not known, and none is assumed.

use hugemm_base::Order;
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
    Alloc {
        /// First frame; `None` if the allocation failed.
        pfn: Option<u64>,
        order: Order,
        /// What it is for.
        mobility: Mobility,
        /// Whether it is one folio.
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
    let mut past_cpu = None;
    for (cpu, rest) in cpu_fields(trimmed, true).chain(cpu_fields(trimmed, false)) {
        if let Some((name, fields)) = event_name(rest) {
            let cpu = cpu.parse().ok().filter(|cpu| *cpu < MOST_CPUS);
            let cpu = cpu.ok_or_else(|| format!("expected a CPU below {MOST_CPUS} in brackets"))?;
            return event(name, fields).map(|event| Line::Event(cpu, event));
        }
        past_cpu = Some(rest);
    }
    if let Some((cpu, rest)) = latency_cpu(trimmed)
        && let Some((name, fields)) = event_name(rest)
        && let Some(cpu) = cpu.parse().ok().filter(|cpu| *cpu < MOST_CPUS)
    {
        return event(name, fields).map(|event| Line::Event(cpu, event));
    }
    Err(match past_cpu {
        Some(_) => "expected the name of an event and a colon after the CPU".to_owned(),
        None => "expected '[CPU]', then an event such as 'mm_page_alloc:' (with perf script -F, keep comm,tid,cpu,event,trace)"
            .to_owned(),
    })
}

/// Comments, the headings of `trace-cmd report`, entries of call chains.
fn is_idle(text: &str, trimmed: &str) -> bool {
    let word = |prefix: &str| {
        trimmed.strip_prefix(prefix).is_some_and(|rest| rest.trim_start_matches([' ', '=']).parse::<u32>().is_ok())
    };
    let chain = || {
        // Blanks, an address, symbol+0xoffset, (module).
        let mut words = trimmed.split_whitespace();
        text.starts_with([' ', '\t'])
            && words.next().is_some_and(|w| w.len() >= 4 && w.bytes().all(|b| b.is_ascii_hexdigit()))
            && trimmed.ends_with(')')
    };
    trimmed.is_empty()
        || trimmed.starts_with(['#', '='])
        || word("cpus")
        || word("version")
        || (trimmed.starts_with("CPU ") && trimmed.ends_with(" is empty"))
        || chain()
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

/// Every `[digits]` that stands alone, and what follows it. With `process`, only those after the number of a process:
/// `2301`, `cc-2301`, `2301/2302`, or ftrace's group `( 2301)`.
fn cpu_fields(text: &str, process: bool) -> impl Iterator<Item = (&str, &str)> {
    text.match_indices('[').filter_map(move |(at, _)| {
        let before = text[..at].strip_suffix(char::is_whitespace)?.trim_end();
        if process && !before.ends_with(|c: char| c.is_ascii_digit() || c == ')' || c == '-') {
            return None;
        }
        let (cpu, rest) = text[at + 1..].split_once(']')?;
        let digits = !cpu.is_empty() && cpu.bytes().all(|b| b.is_ascii_digit());
        (digits && (rest.is_empty() || rest.starts_with(char::is_whitespace))).then_some((cpu, rest))
    })
}

/// The latency layout: digits and flags in one word, such as `1d..1.`, before a time.
fn latency_cpu(text: &str) -> Option<(&str, &str)> {
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        let (word, after) = rest.split_once(char::is_whitespace)?;
        let digits = word.len() - word.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let flags = &word[digits..];
        let next = after.split_whitespace().next()?;
        if rest.len() < text.len() && digits > 0 && is_flags(flags) && is_time(next) {
            return Some((&word[..digits], after));
        }
        rest = after;
    }
}

fn is_flags(word: &str) -> bool {
    (4..=8).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.' || b == b'#')
}

fn is_time(word: &str) -> bool {
    word.strip_suffix(':').is_some_and(|time| {
        time.starts_with(|c: char| c.is_ascii_digit()) && time.bytes().all(|b| b.is_ascii_digit() || b == b'.')
    })
}

/// The event's name, after at most a word of flags, a time and a period; and its fields.
fn event_name(rest: &str) -> Option<(&str, &str)> {
    let mut rest = rest.trim_start();
    for _ in 0..4 {
        let (word, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let name = word.strip_suffix(':').filter(|name| {
            name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_:-.".contains(&b))
        });
        if let Some(name) = name {
            return Some((name, after));
        }
        if word.starts_with("PERF_RECORD_") {
            return Some((word, after));
        }
        let period = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
        if !(is_flags(word) || is_time(word) || period) {
            return None;
        }
        rest = after.trim_start();
    }
    None
}

fn event<'t>(name: &'t str, fields: &str) -> Result<Event<'t>, String> {
    match name.strip_prefix("kmem:").unwrap_or(name) {
        "mm_page_alloc" => {
            let order = order(fields)?;
            let pfn = pfn(fields, order)?;
            let migratetype: i64 = number(fields, "migratetype")?;
            let mobility = if migratetype == 1 { Mobility::Movable } else { Mobility::Unmovable };
            let flags = field(fields, "gfp_flags").ok_or("expected 'gfp_flags='")?;
            Ok(Event::Alloc { pfn, order, mobility, compound: is_compound(flags) })
        }
        "mm_page_free" => {
            let order = order(fields)?;
            let pfn = pfn(fields, order)?.ok_or("expected a frame, which 'pfn=' is not")?;
            Ok(Event::Free { pfn, order })
        }
        "mm_page_free_batched" => {
            pfn(fields, Order::ZERO)?;
            Ok(Event::FreeBatched)
        }
        name => Ok(Event::Other(name)),
    }
}

fn is_compound(flags: &str) -> bool {
    flags.split('|').any(|flag| matches!(flag, "__GFP_COMP" | "GFP_COMP") || flag.starts_with("GFP_TRANSHUGE"))
}

fn field<'t>(fields: &'t str, name: &str) -> Option<&'t str> {
    fields.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')).filter(|v| !v.is_empty())
}

fn number(fields: &str, name: &str) -> Result<i64, String> {
    let value = field(fields, name).ok_or_else(|| format!("expected '{name}='"))?;
    value.parse().map_err(|_| format!("expected a number after '{name}=', not '{value}'"))
}

fn order(fields: &str) -> Result<Order, String> {
    let value = number(fields, "order")?;
    let order = u32::try_from(value).ok().and_then(|order| Order::new(order).ok());
    order.ok_or_else(|| format!("expected an order of 0 to {}, not {value}", Order::MAX.get()))
}

/// The first frame of a block; `None` for a failed allocation.
fn pfn(fields: &str, order: Order) -> Result<Option<u64>, String> {
    let value = field(fields, "pfn").ok_or("expected 'pfn='")?;
    let number = match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if value == "-1" => Some(u64::MAX),
        None => value.parse().ok(),
    };
    let number = number.ok_or_else(|| format!("expected a frame number after 'pfn=', not '{value}'"))?;
    // "(nil)", "(null)", "0x0", "0000000000000000"
    let null = |page: &str| page.starts_with("(n") || page.trim_start_matches("0x").bytes().all(|b| b == b'0');
    if number == u64::MAX || (number == 0 && field(fields, "page").is_none_or(null)) {
        return Ok(None);
    }
    if number >= hugemm_base::Pfn::LIMIT.number() {
        return Err(format!("expected a frame number that fits a physical address, not {value}"));
    }
    if !number.is_multiple_of(order.pages()) {
        return Err(format!("expected a frame aligned to its order {}, not {value}", order.get()));
    }
    Ok(Some(number))
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
