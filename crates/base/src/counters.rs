//! Always-on counters.
//!
//! A platform keeps one [`Counters`] per CPU and hands out the caller's own through
//! [`Cpu::counters`](crate::Cpu::counters); reading sums them. A count costs one add to a cache line
//! that no other CPU writes, so counters are never compiled out.
//!
//! There are two kinds. [`Counter`] may be shared by CPUs: a relaxed atomic add. [`CpuCounter`] has one CPU that writes
//! it, and saves the bus lock, which costs more than all the rest of a fast path: one instruction on x86-64, which no
//! interrupt can divide.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

/// A monotonic count of events, bytes or pages.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`: one relaxed atomic add.
    #[inline]
    pub fn add(&self, n: u64) {
        // Relaxed: a statistic orders nothing.
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A monotonic count that one CPU writes and any CPU reads.
///
/// Exact while the writer is the CPU that the counter belongs to. A task that is moved to another CPU in the few
/// nanoseconds between fetching its counters and adding may add to its former CPU's counter at the very moment that the
/// new task there does; then one of the two counts is lost. Pinned writers lose none.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct CpuCounter(AtomicU64);

impl CpuCounter {
    /// Zero, for statics.
    pub const fn new() -> Self {
        CpuCounter(AtomicU64::new(0))
    }

    /// Adds `n`, without a bus lock where the architecture can.
    #[inline]
    pub fn add(&self, n: u64) {
        #[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
        // SAFETY: the address is that of a live, aligned atomic. The instruction reads and writes those 8 bytes, which
        // to other CPUs looks like a relaxed load and a relaxed store.
        unsafe {
            core::arch::asm!("add qword ptr [{at}], {n}", at = in(reg) self.0.as_ptr(), n = in(reg) n, options(nostack));
        }
        #[cfg(any(not(target_arch = "x86_64"), miri, loom))]
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What frames are in use for: a small number that whoever takes frames chooses, and repeats when they are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameUse(u8);

impl FrameUse {
    /// Page tables.
    pub const TABLES: FrameUse = FrameUse(0);
    /// Small objects of the manager of address spaces and others that have slabs.
    pub const SLABS: FrameUse = FrameUse(1);
    /// A kernel's heap.
    pub const HEAP: FrameUse = FrameUse(2);
    /// Pages in swap in memory, and its own data.
    pub const SWAP: FrameUse = FrameUse(3);
    /// Frames behind descriptors, and the tables that map those.
    pub const DESCRIPTORS: FrameUse = FrameUse(4);
    /// Pages of kernel virtual areas.
    pub const AREAS: FrameUse = FrameUse(5);

    /// How many there can be.
    const COUNT: usize = 16;

    /// How many of them are the caller's own.
    const OWN: u8 = 8;

    /// The number of the use, below 16.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// The use of that number.
    pub const fn from_number(number: u8) -> Option<FrameUse> {
        if (number as usize) < FrameUse::COUNT { Some(FrameUse(number)) } else { None }
    }

    /// One of the caller's own, by a number below 8.
    pub const fn own(number: u8) -> Option<FrameUse> {
        if number < FrameUse::OWN { Some(FrameUse(FrameUse::COUNT as u8 - FrameUse::OWN + number)) } else { None }
    }
}

impl fmt::Display for FrameUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            FrameUse::TABLES => "page tables",
            FrameUse::SLABS => "small objects",
            FrameUse::HEAP => "the heap",
            FrameUse::SWAP => "swap",
            FrameUse::DESCRIPTORS => "descriptors",
            FrameUse::AREAS => "kernel areas",
            FrameUse(number) => return write!(f, "use {number}"),
        })
    }
}

/// One CPU's counts of frames by use: those that it has taken, less those that it has given back. Only the sum over all CPUs says
/// how many are in use.
#[derive(Debug, Default)]
pub struct FrameUses([CpuCounter; FrameUse::COUNT]);

impl FrameUses {
    /// All zero, for statics.
    pub const fn new() -> Self {
        FrameUses([const { CpuCounter::new() }; FrameUse::COUNT])
    }

    /// Counts `pages` frames as taken for a use; below zero, as given back. By the CPU that this belongs to, pinned.
    #[inline]
    pub fn add(&self, of: FrameUse, pages: i64) {
        self.0[of.0 as usize].add(pages as u64);
    }

    /// Reads every count.
    pub fn snapshot(&self) -> FramesInUse {
        FramesInUse(core::array::from_fn(|of| self.0[of].get()))
    }
}

/// Frames in use by use, at one moment: exact while nobody takes or gives back frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FramesInUse([u64; FrameUse::COUNT]);

impl FramesInUse {
    /// How many there are of a use. Below zero: more were given back under that name than were taken, and those of another
    /// use seem to be lost.
    #[inline]
    pub const fn of(&self, of: FrameUse) -> i64 {
        self.0[of.0 as usize] as i64
    }

    /// The sum of two CPUs' counts.
    #[must_use]
    pub fn plus(self, other: FramesInUse) -> FramesInUse {
        FramesInUse(core::array::from_fn(|of| self.0[of].wrapping_add(other.0[of])))
    }

    /// How many more there are than there were.
    #[must_use]
    pub fn since(self, earlier: FramesInUse) -> FramesInUse {
        FramesInUse(core::array::from_fn(|of| self.0[of].wrapping_sub(earlier.0[of])))
    }

    /// All uses together.
    pub fn all(&self) -> i64 {
        self.0.iter().fold(0, |sum: u64, pages| sum.wrapping_add(*pages)) as i64
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One CPU's counters. 128-byte aligned, so that two CPUs' counters never share a line or an adjacent-line
        /// prefetch pair.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct Counters {
            $($(#[$doc])* pub $name: CpuCounter,)*
            /// Frames in use by use.
            pub frames: FrameUses,
        }

        /// The values of one or several [`Counters`] at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct CounterSnapshot {
            $($(#[$doc])* pub $name: u64,)*
            /// Frames in use by use.
            pub frames: FramesInUse,
        }

        impl Counters {
            /// All zero, for statics.
            pub const fn new() -> Self {
                Counters { $($name: CpuCounter::new(),)* frames: FrameUses::new() }
            }

            /// Reads every counter. Not atomic across counters.
            pub fn snapshot(&self) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.get(),)* frames: self.frames.snapshot() }
            }
        }

        impl CounterSnapshot {
            /// The sum of two CPUs' values.
            pub fn plus(self, other: CounterSnapshot) -> CounterSnapshot {
                let frames = self.frames.plus(other.frames);
                CounterSnapshot { $($name: self.$name.wrapping_add(other.$name),)* frames }
            }

            /// What was counted since `earlier`.
            pub fn since(self, earlier: CounterSnapshot) -> CounterSnapshot {
                let frames = self.frames.since(earlier.frames);
                CounterSnapshot { $($name: self.$name.wrapping_sub(earlier.$name),)* frames }
            }

            /// Every count of events: its name and value, in declaration order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Extents that were finished with cached primitives alone (since they were begun or gone on with).
    clears_cached,
    /// Extents that were finished with at least one unit past the cache.
    clears_bulk,
    /// Extents that needed no clearing because they were known to be zero.
    clears_skipped,
    /// Bytes cleared with cached primitives.
    bytes_cached,
    /// Bytes cleared past the cache.
    bytes_bulk,
    /// Units: what was cleared between two reschedule points, or at once where there are none.
    units,
    /// Store fences executed after streaming stores, whoever asked for them.
    fences,
    /// Of those, fences executed because a [`Pending`](crate::Pending) value was dropped instead of discharged.
    fences_on_drop,
    /// Reschedule points passed.
    reschedules,
    /// Operations stopped half way by their [`Cancel`](crate::Cancel).
    cancellations,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_add_subtract_and_name_their_fields() {
        let (a, b) = (Counters::default(), Counters::default());
        a.units.add(3);
        let before = a.snapshot();
        a.units.add(4);
        b.fences.add(1);
        let sum = a.snapshot().since(before).plus(b.snapshot());
        let named: Vec<_> = sum.iter().filter(|(_, value)| *value != 0).collect();
        assert_eq!(named, [("units", 4), ("fences", 1)]);
    }

    /// What one CPU has taken and another has given back is in use no more, and uses are apart.
    #[test]
    fn frames_by_use_add_up_over_cpus() {
        let (a, b) = (Counters::new(), Counters::default());
        let own = FrameUse::own(0).expect("one of eight");
        assert_eq!((FrameUse::own(7), FrameUse::own(8)), (Some(FrameUse(15)), None));
        a.frames.add(FrameUse::TABLES, 5);
        let before = a.snapshot();
        a.frames.add(own, 3);
        b.frames.add(FrameUse::TABLES, -4);
        let sum = a.snapshot().plus(b.snapshot());
        assert_eq!((sum.frames.of(FrameUse::TABLES), sum.frames.of(own), sum.frames.all()), (1, 3, 4));
        let since = sum.since(before).frames;
        assert_eq!((since.of(FrameUse::TABLES), since.of(own), since.all()), (-4, 3, -1));
    }

    #[test]
    fn counters_count_from_nothing() {
        let (shared, own) = (Counter::default(), CpuCounter::default());
        assert_eq!((shared.get(), own.get()), (0, 0));
        for (add, sum) in [(2, 2), (0, 2), (5, 7)] {
            shared.add(add);
            own.add(add);
            assert_eq!((shared.get(), own.get()), (sum, sum));
        }
    }

    #[test]
    fn two_cpus_never_share_a_line() {
        assert_eq!(align_of::<Counters>(), 128);
        assert_eq!(size_of::<[Counters; 2]>() % 128, 0);
    }
}
