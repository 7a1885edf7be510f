//! What is known of a machine's clearing primitives: which to use, from which size on, and how fast they are.
//!
//! A [`Profile`] is a small plain value. It comes from [`crate::calibrate()`], or from [`Profile::uncalibrated`] where
//! nothing was measured, or from source code: every field is public and every constructor `const`, so that a measured
//! profile can be embedded as a constant (`hugemm probe --profile rust` prints one).

use crate::deny;
use crate::features::Features;
use crate::primitive::{Primitive, PrimitiveClass};

/// How warm the destination is believed to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Warmth {
    /// In this CPU's caches: freed and reallocated a moment ago, as from a per-CPU cache.
    Hot,
    /// In memory: from the buddy lists, or part of something larger than the caches. The default.
    Cold,
}

/// The same job done with and without vector registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Best {
    /// The best that uses general registers only; runs everywhere.
    pub general: Primitive,
    /// The best of all, if it needs vector registers; otherwise the same as `general`.
    pub any: Primitive,
}

impl Best {
    /// The same primitive for both cases.
    pub const fn only(p: Primitive) -> Self {
        Best { general: p, any: p }
    }
}

/// Bandwidths of the two primitives of a [`Best`] on cold memory in MB/s (10^6 bytes per second); 0 if not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mbps {
    /// Of [`Best::general`].
    pub general: u32,
    /// Of [`Best::any`].
    pub any: u32,
}

impl Mbps {
    /// Nothing was measured.
    pub const UNKNOWN: Mbps = Mbps::only(0);

    /// The same bandwidth for both.
    pub const fn only(mbps: u32) -> Self {
        Mbps { general: mbps, any: mbps }
    }
}

/// Request sizes in bytes from which on the bulk primitive beats the cached one. `u64::MAX`: never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossover {
    /// The destination is in the caches.
    pub hot: u64,
    /// The destination is in the caches and will be read as soon as it is cleared.
    pub hot_touched: u64,
    /// The destination is in memory.
    pub cold: u64,
    /// The destination is in memory and will be read as soon as it is cleared.
    pub cold_touched: u64,
}

impl Crossover {
    /// One size for every case.
    pub const fn always(bytes: u64) -> Self {
        Crossover { hot: bytes, hot_touched: bytes, cold: bytes, cold_touched: bytes }
    }

    /// The size for one case.
    pub const fn for_case(&self, warmth: Warmth, touch_soon: bool) -> u64 {
        match (warmth, touch_soon) {
            (Warmth::Hot, false) => self.hot,
            (Warmth::Hot, true) => self.hot_touched,
            (Warmth::Cold, false) => self.cold,
            (Warmth::Cold, true) => self.cold_touched,
        }
    }
}

/// What is known of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The best cached primitives.
    pub cached: Best,
    /// The best bulk (streaming) primitives, if there is any.
    pub bulk: Option<Best>,
    /// From which request size on bulk is better.
    pub crossover: Crossover,
    /// Bandwidths of the cached primitives.
    pub cached_mbps: Mbps,
    /// Bandwidths of the bulk primitives.
    pub bulk_mbps: Mbps,
}

/// The threshold of "huge page clearing optimizations" where the last-level cache's size is not known either: 8 MiB.
const DEFAULT_THRESHOLD: u64 = 8 << 20;

impl Profile {
    /// A guess from features alone, for early boot and machines without a clock: what the kernel's series chose.
    ///
    /// Bulk prefers instructions that write a line whole (CLZERO, MOVDIR64B), then the widest streaming store; the
    /// MOVNT family is left out on CPUs where it is known to be slow. The threshold is the last-level cache's size if `llc` is
    /// given, else 8 MiB.
    pub fn uncalibrated(features: &Features, llc: Option<u64>) -> Self {
        let denied = features.identity().is_some_and(|cpu| deny::movnt_slow(&cpu).is_some());
        let first = |order: &[Primitive]| {
            let usable = |p: &&Primitive| features.contains(**p) && !(denied && p.is_movnt());
            let any = order.iter().find(usable)?;
            let general = order.iter().filter(|p| !p.needs_vector()).find(usable)?;
            Some(Best { general: *general, any: *any })
        };
        use Primitive::*;
        Profile {
            cached: first(&[RepStosb, RepStosq, DcZva, Unrolled, Portable]).unwrap_or(Best::only(Portable)),
            bulk: first(&[Clzero, Movdir64b, Avx512Stream, Avx2Stream, Movnti, Stnp]),
            crossover: Crossover::always(llc.unwrap_or(DEFAULT_THRESHOLD)),
            cached_mbps: Mbps::UNKNOWN,
            bulk_mbps: Mbps::UNKNOWN,
        }
    }

    /// Bandwidth of `p` in MB/s; 0 if it was not measured.
    pub const fn mbps(&self, p: Primitive) -> u32 {
        let (best, mbps) = match (p.class(), self.bulk) {
            (PrimitiveClass::Streaming, Some(bulk)) => (bulk, self.bulk_mbps),
            (PrimitiveClass::Streaming, None) => return 0,
            (PrimitiveClass::Cached, _) => (self.cached, self.cached_mbps),
        };
        if best.general as u8 == p as u8 {
            mbps.general
        } else if best.any as u8 == p as u8 {
            mbps.any
        } else {
            0
        }
    }

    /// The first field that names a primitive of the wrong class or one that `features` does not have.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](ProfileError::Unavailable), [`WrongClass`](ProfileError::WrongClass) or
    /// [`NeedsVector`](ProfileError::NeedsVector), with the primitive: calibrate again on this machine.
    pub fn check(&self, features: &Features) -> Result<(), ProfileError> {
        let bests = [(PrimitiveClass::Cached, Some(self.cached)), (PrimitiveClass::Streaming, self.bulk)];
        for (class, best) in bests {
            let Some(best) = best else { continue };
            for p in [best.general, best.any] {
                if !features.contains(p) {
                    return Err(ProfileError::Unavailable(p));
                }
                if p.class() != class {
                    return Err(ProfileError::WrongClass(p));
                }
            }
            if best.general.needs_vector() {
                return Err(ProfileError::NeedsVector(best.general));
            }
        }
        Ok(())
    }
}

/// Why a profile cannot be used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProfileError {
    /// This CPU does not have the primitive.
    Unavailable(Primitive),
    /// A cached primitive stands where a streaming one belongs, or the reverse.
    WrongClass(Primitive),
    /// A vector primitive stands where one without vector registers belongs.
    NeedsVector(Primitive),
}

impl core::fmt::Display for ProfileError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            ProfileError::Unavailable(p) => {
                write!(f, "this CPU does not have {p}; calibrate again on this machine")
            }
            ProfileError::WrongClass(p) => write!(f, "{p} is in the wrong class for its field; calibrate again"),
            ProfileError::NeedsVector(p) => {
                write!(f, "{p} needs vector registers and stands where none may be used; calibrate again")
            }
        }
    }
}

impl core::error::Error for ProfileError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(list: &[Primitive]) -> Features {
        list.iter().fold(Features::none(), |f, p| {
            // SAFETY: the set is only looked at; no primitive is run from it.
            unsafe { f.with(*p) }
        })
    }

    #[test]
    fn guesses_prefer_whole_line_stores_and_keep_a_general_fallback() {
        use Primitive::*;
        let milan = features(&[Unrolled, RepStosq, RepStosb, Movnti, Avx2Stream, Clzero]);
        let p = Profile::uncalibrated(&milan, None);
        assert_eq!((p.cached, p.bulk), (Best::only(RepStosb), Some(Best::only(Clzero))));
        assert_eq!(p.crossover, Crossover::always(DEFAULT_THRESHOLD));
        // The same as a guest that does not see CLZERO.
        let p = Profile::uncalibrated(&milan.without(Clzero), Some(32 << 20));
        assert_eq!(p.bulk, Some(Best { general: Movnti, any: Avx2Stream }));
        assert_eq!(p.crossover.cold, 32 << 20);
        assert_eq!(p.check(&milan), Ok(()));
        assert_eq!(p.check(&milan.without(Movnti)), Err(ProfileError::Unavailable(Movnti)));
    }

    #[test]
    fn errors_name_the_primitive_and_are_told_apart() {
        use Primitive::Movnti;
        let all =
            [ProfileError::Unavailable(Movnti), ProfileError::WrongClass(Movnti), ProfileError::NeedsVector(Movnti)];
        let said = all.map(|error| error.to_string());
        assert!(said.iter().all(|said| said.contains("movnti")));
        assert!(said[0] != said[1] && said[1] != said[2] && said[0] != said[2]);
        assert_eq!(DEFAULT_THRESHOLD, 8 * 1024 * 1024);
    }

    #[test]
    fn a_cpu_without_anything_clears_with_plain_stores() {
        let p = Profile::uncalibrated(&Features::none(), None);
        assert_eq!((p.cached, p.bulk), (Best::only(Primitive::Portable), None));
    }

    #[test]
    fn classes_are_checked() {
        use Primitive::*;
        let all = features(&[RepStosb, Movnti, Avx2Store]);
        let good = Profile::uncalibrated(&all, None);
        assert_eq!(Profile { cached: Best::only(Movnti), ..good }.check(&all), Err(ProfileError::WrongClass(Movnti)));
        assert_eq!(
            Profile { bulk: Some(Best::only(RepStosb)), ..good }.check(&all),
            Err(ProfileError::WrongClass(RepStosb))
        );
        assert_eq!(
            Profile { cached: Best::only(Avx2Store), ..good }.check(&all),
            Err(ProfileError::NeedsVector(Avx2Store))
        );
    }
}
