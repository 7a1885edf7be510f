//! How much is done between two reschedule points: entries of page tables, counted as they are changed or looked at, and those of
//! a table that is made.

use hugemm_base::{Counters, Pfn, VirtAddr};
use hugemm_paging::{Flags, PageFormat, X86_64};
use std::cell::Cell;
use std::ptr;

/// The entries of [`X86_64`], counted. `DROPS`: whether the hardware's faults drop what refused the access, as x86-64's do.
#[derive(Clone, Copy, Debug)]
pub struct Metered<const DROPS: bool = true>;

#[derive(Clone, Copy)]
struct Meter {
    counters: *const Counters,
    /// Reschedule points when something was last counted.
    points: u64,
    since: u64,
    most: u64,
}

thread_local! {
    static METER: Cell<Meter> = const { Cell::new(Meter { counters: ptr::null(), points: 0, since: 0, most: 0 }) };
}

/// Entries of a table.
pub const TABLE: u64 = 512;

/// The most entries that `work` makes or reads on this thread between two reschedule points of the CPU whose counters these
/// are.
pub fn most_between_reschedules(counters: &Counters, work: impl FnOnce()) -> u64 {
    METER.set(Meter { counters, points: counters.reschedules.get(), since: 0, most: 0 });
    work();
    METER.replace(Meter { counters: ptr::null(), points: 0, since: 0, most: 0 }).most
}

thread_local! {
    /// What happens when this thread first looks at a leaf.
    pub static AT_LEAF: super::Hook = const { super::Hook::new(None) };
}

fn note(entries: u64) {
    let mut meter = METER.get();
    // SAFETY: null, or borrowed by whoever measures, on this thread.
    let Some(counters) = (unsafe { meter.counters.as_ref() }) else { return };
    let points = counters.reschedules.get();
    if points != meter.points {
        (meter.points, meter.since) = (points, 0);
    }
    meter.since += entries;
    meter.most = meter.most.max(meter.since);
    METER.set(meter);
}

// SAFETY: passes everything on.
unsafe impl<const DROPS: bool> PageFormat for Metered<DROPS> {
    const NAME: &'static str = X86_64::NAME;
    const LEVELS: u32 = X86_64::LEVELS;
    const PHYS_BITS: u32 = X86_64::PHYS_BITS;
    const DETACHED: u64 = X86_64::DETACHED;
    const RESERVED: u64 = X86_64::RESERVED;
    const OWNER: u64 = X86_64::OWNER;
    const ACCESSED: u64 = X86_64::ACCESSED;
    const CLEAN: u64 = X86_64::CLEAN;
    const READ_ONLY_TABLE: u64 = X86_64::READ_ONLY_TABLE;
    const CLAIMED: u64 = X86_64::CLAIMED;
    const FAULT_DROPS: bool = DROPS;
    const BREAK_BEFORE_MAKE: bool = X86_64::BREAK_BEFORE_MAKE;

    fn leaf(frame: Pfn, level: u32, flags: Flags) -> u64 {
        note(if frame == Pfn::new(0) { 0 } else { 1 });
        X86_64::leaf(frame, level, flags)
    }

    fn table(frame: Pfn) -> u64 {
        // What fills it works out a leaf's bits once for all of them. Frame 0 is asked for to see the bits of any table, and of any leaf.
        note(if frame == Pfn::new(0) { 0 } else { TABLE });
        X86_64::table(frame)
    }

    fn is_leaf(entry: u64, level: u32) -> bool {
        X86_64::is_leaf(entry, level)
    }

    fn flags(entry: u64) -> Flags {
        if entry & 1 != 0 {
            super::come_to(&AT_LEAF);
        }
        X86_64::flags(entry)
    }

    fn change(entry: u64, set: Flags, clear: Flags) -> u64 {
        note(1);
        X86_64::change(entry, set, clear)
    }

    fn mask(flags: Flags) -> u64 {
        X86_64::mask(flags)
    }

    fn owner(word: u64) -> u64 {
        note(1);
        X86_64::owner(word)
    }

    fn word(entry: u64) -> u64 {
        note(1);
        X86_64::word(entry)
    }

    fn is_settled(entry: u64) -> bool {
        X86_64::is_settled(entry)
    }

    fn one_root(first: VirtAddr, last: VirtAddr) -> bool {
        X86_64::one_root(first, last)
    }
}
