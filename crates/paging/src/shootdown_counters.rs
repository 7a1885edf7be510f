//! What shootdowns cost: always-on counts, per CPU.

use hugemm_base::counters::CpuCounter;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One CPU's counts. Written by that CPU alone.
        #[derive(Debug, Default)]
        pub(crate) struct ShootdownCounters {
            $(pub(crate) $name: CpuCounter,)*
        }

        /// How many shootdowns there were, and what they cost: the sum over CPUs.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct ShootdownCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl ShootdownCounters {
            pub(crate) fn read(&self) -> ShootdownCounts {
                ShootdownCounts { $($name: self.$name.get(),)* }
            }
        }

        impl ShootdownCounts {
            /// The sum of both.
            pub fn plus(self, other: Self) -> Self {
                ShootdownCounts { $($name: self.$name.wrapping_add(other.$name),)* }
            }

            /// What was counted since `earlier`.
            pub fn since(self, earlier: Self) -> Self {
                ShootdownCounts { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }

            /// How many flushes were started, of whatever kind.
            pub fn flushes(self) -> u64 {
                self.flushes_all + self.flushes_range
            }

            /// Every count's name and value.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counts! {
    /// Flushes of everything in a domain.
    flushes_all,
    /// Flushes of ranges.
    flushes_range,
    /// Of those, flushes of leaves of one size and of nothing else: a TLBI of arm64 names their level where it can (FEAT_TTL).
    flushes_uniform,
    /// Flushes that were not needed because somebody else's had started late enough.
    elided,
    /// Pages that flushes of ranges named.
    pages,
    /// Flushes done by instructions that reach all CPUs.
    broadcasts,
    /// How many instructions those took.
    instructions,
    /// CPUs that were asked.
    targets,
    /// Of those, CPUs that had to be interrupted; the others had an interrupt under way.
    interrupts,
    /// CPUs that were not asked because they were lazy.
    skipped_lazy,
    /// Requests served for other CPUs.
    served,
    /// Of those, requests that a later flush on this CPU had covered already.
    late,
    /// Full invalidations because flushes had been missed: when a space was loaded again, or no longer lazily, or when
    /// requests overtook each other.
    caught_up,
}
