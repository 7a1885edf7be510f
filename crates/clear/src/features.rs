//! Which primitives this CPU runs, and what it says about itself.
//!
//! Detection is by CPUID and XCR0 on x86-64 and by DCZID_EL0 on arm64. Both can lie in a virtual machine in the safe
//! direction (a feature hidden) and neither says what is fast; the calibration does.

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod aarch64;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod portable;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64;

#[cfg(all(target_arch = "aarch64", not(miri)))]
use aarch64 as arch;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
use portable as arch;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use x86_64 as arch;

use crate::primitive::Primitive;

/// Who made an x86-64 CPU.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// `GenuineIntel`.
    Intel,
    /// `AuthenticAMD`.
    Amd,
    /// `HygonGenuine`, AMD Zen derivatives.
    Hygon,
    /// Anyone else.
    Other,
}

/// A CPU's name in numbers, with the extended family and model already folded in (Intel SDM vol. 2, "CPUID", leaf 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CpuIdentity {
    /// The maker.
    pub vendor: Vendor,
    /// Family, e.g. 6 for Intel's cores, 0x19 for Zen 3 and 4.
    pub family: u16,
    /// Model within the family.
    pub model: u16,
    /// Stepping within the model.
    pub stepping: u8,
}

/// The set of primitives that may be run on this CPU, and the CPU's identity.
///
/// A plain value of a few words: copy it, mask it, keep one per machine. On a machine with unequal cores, intersect
/// what each detects by [`Features::without`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Bit `p as u8` for each member.
    bits: u32,
    identity: Option<CpuIdentity>,
}

impl Features {
    /// Only the primitive that needs nothing of the CPU: [`Primitive::Portable`].
    #[must_use]
    pub const fn none() -> Self {
        Self { bits: bit(Primitive::Portable), identity: None }
    }

    /// Asks the CPU that runs this.
    ///
    /// Costs a few CPUID instructions, each of which traps to the hypervisor in a virtual machine (microseconds): ask
    /// once. Callable from any context. A vector primitive is reported only where the operating system has enabled the
    /// registers (OSXSAVE and XCR0; Intel SDM vol. 1, "Detection of Intel AVX2" and "Detection of AVX-512 Foundation
    /// Instructions") and the target is not soft-float. Never contains [`Primitive::Model`].
    #[must_use]
    pub fn detect() -> Self {
        arch::detect()
    }

    /// Whether `p` is a member.
    #[inline]
    #[must_use]
    pub const fn contains(&self, p: Primitive) -> bool {
        self.bits & bit(p) != 0
    }

    /// The same set without `p`: a guest without the feature, or one that was denied. [`Primitive::Portable`] cannot be
    /// taken out, so that there is always one left.
    #[must_use]
    pub const fn without(mut self, p: Primitive) -> Self {
        self.bits &= !bit(p) | bit(Primitive::Portable);
        self
    }

    /// The same set with `p`.
    ///
    /// # Safety
    /// From now on safe code may run `p`. The caller promises that the CPU has it although it was not detected, that a
    /// fault handler carries out its instructions, or that the platform intercepts it ([`Primitive::Model`]). Primitives
    /// of another architecture are run as [`Primitive::Portable`] and are no danger.
    #[must_use]
    pub const unsafe fn with(mut self, p: Primitive) -> Self {
        self.bits |= bit(p);
        self
    }

    /// The members, in the order of [`Primitive::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = Primitive> + use<> {
        let set = *self;
        Primitive::ALL.into_iter().filter(move |&p| set.contains(p))
    }

    /// The CPU's identity; `None` where it has no CPUID.
    #[must_use]
    pub const fn identity(&self) -> Option<CpuIdentity> {
        self.identity
    }
}

const fn bit(p: Primitive) -> u32 {
    1 << (p as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masking_removes_one_and_keeps_portable() {
        let all = Features::detect();
        for p in all.iter() {
            let masked = all.without(p);
            assert_eq!(masked.contains(p), p == Primitive::Portable);
            for q in all.iter().filter(|&q| q != p) {
                assert!(masked.contains(q), "{q} went with {p}");
            }
        }
        let nothing = Primitive::ALL.into_iter().fold(all, Features::without);
        assert!(nothing.iter().eq([Primitive::Portable]));
    }

    #[test]
    fn with_adds_exactly_one() {
        assert_eq!(Features::none().identity(), None);
        for p in Primitive::ALL {
            // SAFETY: the set is only looked at; no primitive is run from it.
            let f = unsafe { Features::none().with(p) };
            assert!(f.contains(p) && f.contains(Primitive::Portable));
            assert_eq!(f.iter().count(), if p == Primitive::Portable { 1 } else { 2 });
        }
    }

    #[test]
    fn detection_reports_only_what_was_compiled() {
        use Primitive::*;
        let x86 = cfg!(target_arch = "x86_64");
        let others = if x86 { [Model, DcZva, Stnp] } else { [Model, RepStosb, Movnti] };
        for p in Features::detect().iter() {
            assert!(!others.contains(&p), "{p}");
        }
    }
}
