//! Every system's stress on the real machine. It runs for a time and fails at the first thing that is wrong; bugs planted
//! on purpose show that it would.

mod address_spaces;
mod areas;
mod conflict;
mod convoy;
#[cfg(feature = "debug")]
mod debug;
mod descriptors;
mod file;
mod frames_stress;
mod heap_stress;
mod hotplug;
mod pools;
mod pressure;
mod rights;
mod translations;

use super::swapped::HELD_BACK;
use super::{Cx, Failure, free_all, on_cpus, vec_for, vec_of};
use crate::output::{note, progress, sample};
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use hugemm_base::{Clock, FrameUse, FramesInUse};
use hugemm_kernel::{percpu, stack, tables, tlb, vmemmap};
use hugemm_workloads::request::{Part, Plant, Selftest};

/// Nanoseconds of each part of a round.
const SLICE_LEAST: u64 = 100_000_000;
const SLICE_MOST: u64 = 2_000_000_000;

/// How many parts there are.
const PARTS: u64 = 11;

/// That a part has found something wrong. The words are in [`FOUND`]: whoever finds that memory is wrong takes none to say so.
#[derive(Debug)]
pub struct Finding(());

/// What was found first, in ASCII; how much of it; whether somebody says it.
static FOUND: [AtomicU8; 512] = [const { AtomicU8::new(0) }; 512];
static LENGTH: AtomicUsize = AtomicUsize::new(0);
static IS_FOUND: AtomicBool = AtomicBool::new(false);

/// Writes to [`FOUND`]. What does not fit is left out.
struct Say;

impl Write for Say {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        // Relaxed: one CPU says something, and others read it after they have waited for that.
        let from = LENGTH.fetch_add(part.len(), Ordering::Relaxed).min(FOUND.len());
        FOUND[from..].iter().zip(part.bytes()).for_each(|(place, byte)| place.store(byte, Ordering::Relaxed));
        Ok(())
    }
}

impl Finding {
    /// `of` is the part of the self-test.
    pub fn new(of: &str, what: fmt::Arguments<'_>) -> Self {
        // Relaxed: as above.
        if !IS_FOUND.swap(true, Ordering::Relaxed) {
            let _ = write!(Say, "self-test, {of}: {what}");
        }
        Finding(())
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Relaxed: as above.
        let said = FOUND.iter().take(LENGTH.load(Ordering::Relaxed));
        said.map(|byte| char::from(byte.load(Ordering::Relaxed))).try_for_each(|letter| f.write_char(letter))
    }
}

impl core::error::Error for Finding {}

/// What the parts have done so far, all rounds together.
macro_rules! done {
    ($($name:ident: $metric:literal, $unit:literal;)+) => {
        /// One thing that is counted.
        #[derive(Clone, Copy)]
        pub enum Done { $($name,)+ }

        impl Done {
            const ALL: &'static [(Done, &'static str, &'static str)] =
                &[$((Done::$name, concat!("selftest.", $metric), $unit),)+];
        }
    };
}

done! {
    Rounds: "rounds", "rounds";
    Unplugged: "unplugged", "times";
    Poisoned: "poisoned", "frames";
    Offline: "offline", "times";
    Unmaps: "unmaps", "ranges";
    Resized: "resized", "pieces of 2 MiB";
    Accesses: "accesses", "steps in address spaces";
    ZeroedAhead: "zeroed_ahead", "bytes";
    PagedOut: "paged_out", "pages of a file";
    Checked: "checked", "pages";
    Stored: "stored", "pages";
    Refaults: "refaults", "pages";
    Refused: "refused", "touches, forks and unmaps";
    Areas: "areas", "areas";
    Seals: "seals", "ranges";
    Resizes: "resizes", "resizes";
    Demoted: "demoted", "pages";
    Dissolved: "dissolved", "pages";
    Surplus: "surplus", "pages";
    Faults: "faults", "allocations";
    Conflicts: "conflicts", "aborts";
}

static COUNTS: [AtomicU64; Done::ALL.len()] = [const { AtomicU64::new(0) }; Done::ALL.len()];

impl Done {
    /// So much more of it. Any CPU.
    pub fn add(self, more: u64) {
        // Relaxed: only the number counts.
        COUNTS[self as usize].fetch_add(more, Ordering::Relaxed);
    }

    pub fn so_far(self) -> u64 {
        COUNTS[self as usize].load(Ordering::Relaxed)
    }
}

/// Runs `f` on all CPUs; the first failure of any.
fn on_all(cx: Cx<'_>, f: impl Fn(Cx<'_>, u32) -> Result<(), Failure> + Sync) -> Result<(), Failure> {
    on_cpus(cx, percpu::count(), f, |(), ()| ())
}

/// When the steps of a round end on all CPUs: at a time, or once something is wrong on any.
struct Steps {
    until: u64,
    stop: AtomicBool,
}

impl Steps {
    fn until(until: u64) -> Self {
        Steps { until, stop: AtomicBool::new(false) }
    }

    /// A CPU's steps, `most` at most.
    fn each(
        &self,
        cx: Cx<'_>,
        most: u64,
        mut step: impl FnMut(Cx<'_>, u64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for number in 0..most {
            // Relaxed: only to end sooner.
            if self.stop.load(Ordering::Relaxed) || cx.platform().now_ns() >= self.until {
                break;
            }
            percpu::beat();
            step(cx, number).inspect_err(|_| self.stop.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    }
}

/// Pages of spaces that have ended are in swap.
pub fn in_swap(pages: u64) -> Finding {
    Finding::new("swap", format_args!("{pages} pages are in swap though all address spaces have ended"))
}

/// A store went through after the right to it had gone, or where nobody had it.
fn stored(at: u64) -> Finding {
    Finding::new("rights", format_args!("{at:#x} was stored to although it is read-only on all CPUs"))
}

/// A descriptor does not contain what its owner wrote.
fn overwritten(frame: u64, found: u64, cpu: u32) -> Finding {
    Finding::new(
        "descriptors",
        format_args!("cpu{cpu} found {found:#x} in that of frame {frame:#x}, not what was written"),
    )
}

/// Frames are missing, or there are too many.
fn lost(expected: u64, found: u64) -> Finding {
    Finding::new("frames", format_args!("{found} are free, bad or descriptors' at the end instead of {expected}"))
}

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Selftest) -> Result<(), Failure> {
    let start = cx.platform().now_ns();
    let of = u64::from(args.seconds.max(1)) * 1_000_000_000;
    let mut seed = 1_u64;
    let before = tlb::shootdown().counts();
    #[cfg(feature = "debug")]
    let found = debug::planted(cx)?;
    // As it is at the end of each round.
    hugemm_kernel::kva::areas().trim(cx);
    let (pieces, bad) = (frames_stress::pieces()?, frames_stress::bad()?);
    // A planted bug has the time to itself.
    let only = if args.plant == Plant::None { args.only } else { args.plant.part() };
    // It divides leaves of live tables by one store.
    let here = |part| part != Part::Descriptors || tables::resizing().is_some();
    if !here(only) {
        return Err(Failure::NotHere(
            "these CPUs let no leaf in use change its size in place (FEAT_BBM level 2); use --only pools, which breaks them \
             first",
        ));
    }
    if only == Part::All && !here(Part::Descriptors) {
        note(format_args!(
            "the part 'descriptors' is left out: these CPUs let no leaf in use change its size in place (FEAT_BBM level 2), \
             and who uses a descriptor cannot wait"
        ));
    }
    if args.plant == Plant::LazyCpu && tlb::BROADCASTS {
        return Err(Failure::NotHere("a broadcast reaches lazy CPUs too: to leave them out is no bug on arm64"));
    }
    let runs = |part| (only == Part::All || only == part) && here(part);
    let most = if only == Part::All { SLICE_MOST } else { SLICE_MOST * PARTS };
    loop {
        let spent = cx.platform().now_ns() - start;
        progress((spent / 1_000_000_000).min(of / 1_000_000_000), of / 1_000_000_000, "selftest");
        // On a busy host the time may be over before anything has been unmapped, or anybody of many has met a descriptor on its way to
        // another frame; nothing would have been shown.
        let met = !vmemmap::BREAKS || percpu::count() < 4 || vmemmap::faults() > 0;
        let shown = Done::Unmaps.so_far() > 0 && met || only != Part::All;
        if Done::Rounds.so_far() > 0 && spent >= of && shown {
            break;
        }
        let records = record_frames(cx);
        let free = frames_stress::unowned_pages(cx) + vmemmap::audit().frames + records;
        let uses = percpu::counters().frames;
        let slice = ((of - spent.min(of)) / PARTS).clamp(SLICE_LEAST, most);
        let clock = cx.platform();
        if runs(Part::Frames) {
            let until = clock.now_ns() + slice;
            frames_stress::round(cx, seed, args.plant, until, &pieces, &bad)?;
        }
        if runs(Part::Heap) {
            heap_stress::round(cx, seed, args.plant, clock.now_ns() + slice)?;
        }
        if runs(Part::Rights) {
            rights::round(cx, seed, args.plant, clock.now_ns() + slice)?;
        }
        if runs(Part::Translations) {
            translations::round(cx, seed, args.plant, clock.now_ns() + slice)?;
            conflict::round(cx)?;
        }
        if runs(Part::Descriptors) {
            descriptors::round(cx, seed, clock.now_ns() + slice)?;
        }
        if runs(Part::Convoy) {
            convoy::round(cx, clock.now_ns() + slice)?;
        }
        if runs(Part::Hotplug) {
            hotplug::round(cx, seed, clock.now_ns() + slice)?;
        }
        if runs(Part::AddressSpaces) {
            address_spaces::round(cx, seed, clock.now_ns() + slice)?;
            file::paged_out(cx)?;
        }
        if runs(Part::Pressure) {
            pressure::round(cx, seed, args.plant, clock.now_ns() + slice)?;
        }
        if runs(Part::Areas) {
            let alone = only == Part::Areas && args.plant == Plant::None;
            areas::round(cx, seed, args.plant, alone, clock.now_ns() + slice)?;
        }
        if runs(Part::Pools) {
            pools::round(cx, seed, clock.now_ns() + slice, args.resizes)?;
        }
        // Blocks of descriptors that pools have left divided keep a table each.
        let descriptors = vmemmap::audit().frames;
        let new_records = record_frames(cx);
        let found = frames_stress::unowned_pages(cx) + descriptors + new_records;
        check_uses(uses, descriptors, new_records as i64 - records as i64)?;
        if found != free {
            return Err(lost(free, found).into());
        }
        Done::Rounds.add(1);
        seed = seed.wrapping_mul(31).wrapping_add(7);
    }
    for (done, metric, unit) in Done::ALL {
        if !matches!(done, Done::Conflicts) || tlb::CONFLICTS {
            sample(metric, done.so_far() as f64, unit, &[]);
        }
    }
    #[cfg(feature = "debug")]
    debug::nothing_else(found)?;
    sample("selftest.stack", stack::deepest() as f64, "bytes", &[]);
    if vmemmap::BREAKS {
        sample("selftest.descriptor_faults", vmemmap::faults() as f64, "faults", &[]);
    }
    for (name, count) in tlb::shootdown().counts().since(before).iter() {
        sample("selftest.shootdowns", count as f64, "counted", &[("what", (&name).into())]);
    }
    Ok(())
}

/// Frames that hold records of kernel areas: as many as it happens, of those that stay.
fn record_frames(cx: Cx<'_>) -> u64 {
    hugemm_kernel::kva::areas().counts(cx).record_frames
}

/// Each use has as many frames as before the round, but for so many more records of areas; descriptors may have more or fewer, and as many
/// as they are seen to have.
fn check_uses(before: FramesInUse, descriptors: u64, records: i64) -> Result<(), Finding> {
    let now = percpu::counters().frames;
    let uses = [
        ("page tables", FrameUse::TABLES),
        ("small objects", FrameUse::SLABS),
        ("the heap", FrameUse::HEAP),
        ("swap", FrameUse::SWAP),
        ("memory held back", HELD_BACK),
        ("kernel areas", FrameUse::AREAS),
    ];
    let more = |of| if of == FrameUse::SLABS { records } else { 0 };
    let kept = uses.map(|(name, of)| (name, before.of(of) + more(of), now.of(of)));
    let seen = ("descriptors", descriptors as i64, now.of(FrameUse::DESCRIPTORS));
    match kept.into_iter().chain([seen]).find(|(_, expected, found)| expected != found) {
        Some((of, expected, found)) => Err(Finding::new(
            "frames",
            format_args!("{found} are counted as in use for {of} at the end instead of {expected}"),
        )),
        None => Ok(()),
    }
}
