//! Always-on counters.
//!
//! A platform keeps one [`Counters`] per CPU and hands out the caller's own through
//! [`Cpu::counters`](crate::Cpu::counters); reading sums them. A count costs one add to a cache line
//! that no other CPU writes, so counters are never compiled out.
//!
//! There are two kinds. [`Counter`] may be shared by CPUs: a relaxed atomic add. [`CpuCounter`] has one CPU that writes
//! it, and saves the bus lock, which costs more than all the rest of a fast path: one instruction on x86-64, which no
//! interrupt can divide.

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

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One CPU's counters. 128-byte aligned, so that two CPUs' counters never share a line or an adjacent-line
        /// prefetch pair.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct Counters {
            $($(#[$doc])* pub $name: CpuCounter,)*
        }

        /// The values of one or several [`Counters`] at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct CounterSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// All zero, for statics.
            pub const fn new() -> Self {
                Counters { $($name: CpuCounter(AtomicU64::new(0)),)* }
            }

            /// Reads every counter. Not atomic across counters.
            pub fn snapshot(&self) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.get(),)* }
            }
        }

        impl CounterSnapshot {
            /// The sum of two CPUs' values.
            pub fn plus(self, other: CounterSnapshot) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.wrapping_add(other.$name),)* }
            }

            /// What was counted since `earlier`.
            pub fn since(self, earlier: CounterSnapshot) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }

            /// Every counter's name and value, in declaration order.
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
