//! Which primitives this CPU runs, and what it says about itself.
//!
//! Detection is by CPUID and XCR0 on x86-64 and by DCZID_EL0 on arm64. Both can lie in a virtual machine in the safe
//! direction (a feature hidden) and neither says what is fast; the calibration does.

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
    /// Bytes that one `dc zva` zeroes; 0 if it may not be used.
    zva_block: u16,
}

impl Features {
    /// Only the primitive that needs nothing of the CPU: [`Primitive::Portable`].
    #[must_use]
    pub const fn none() -> Self {
        Self { bits: bit(Primitive::Portable), identity: None, zva_block: 0 }
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
    /// that are not [`for_this_arch`](Primitive::for_this_arch) are run as [`Primitive::Portable`] and are no danger.
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

    /// Bytes that one `dc zva` zeroes on this CPU; `None` if there is none or it is prohibited.
    #[must_use]
    pub const fn dc_zva_block(&self) -> Option<usize> {
        if self.zva_block == 0 { None } else { Some(self.zva_block as usize) }
    }

    /// Size in bytes of the last-level cache that this CPU shares, as CPUID tells it; `None` if it does not.
    ///
    /// A hint only: hypervisors pass on the whole socket's cache to a guest that gets a share of it, and the size at
    /// which streaming stores begin to win has been seen at an eighth of it. Traps as [`Features::detect`] does.
    #[must_use]
    pub fn llc_bytes() -> Option<u64> {
        arch::llc_bytes()
    }
}

const fn bit(p: Primitive) -> u32 {
    1 << (p as u8)
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod arch {
    use raw_cpuid::{CacheType, CpuId, CpuIdReader, CpuIdReaderNative};

    use super::{CpuIdentity, Features, Vendor, bit};
    use crate::primitive::Primitive;

    /// XCR0 bits that AVX needs: SSE and AVX state.
    const XCR0_AVX: u64 = 0x06;
    /// XCR0 bits that AVX-512 needs besides: opmask and both ZMM parts.
    const XCR0_AVX512: u64 = 0xE6;

    pub(super) fn detect() -> Features {
        from_cpuid(CpuIdReaderNative, xcr0)
    }

    pub(super) fn llc_bytes() -> Option<u64> {
        llc_from_cpuid(CpuIdReaderNative)
    }

    /// Reads XCR0. Only to be called where CPUID reports OSXSAVE.
    fn xcr0() -> u64 {
        let (lo, hi): (u32, u32);
        // SAFETY: `from_cpuid` calls this only where OSXSAVE is set, so XGETBV is enabled; XCR0 (ECX = 0) always exists
        // then, at every privilege level.
        unsafe {
            core::arch::asm!("xgetbv", in("ecx") 0, out("eax") lo, out("edx") hi,
                options(nomem, nostack, preserves_flags));
        }
        u64::from(hi) << 32 | u64::from(lo)
    }

    /// Detection over any source of CPUID leaves, so that tests can be another CPU.
    fn from_cpuid<R: CpuIdReader>(read: R, xcr0: impl FnOnce() -> u64) -> Features {
        let cpuid = CpuId::with_cpuid_reader(read.clone());
        // Architectural in 64-bit mode: SSE2, hence MOVNTI, and the string stores.
        let mut bits =
            bit(Primitive::Portable) | bit(Primitive::Unrolled) | bit(Primitive::RepStosq) | bit(Primitive::Movnti);
        let info = cpuid.get_feature_info();

        if let Some(ext) = cpuid.get_extended_feature_info() {
            if ext.has_rep_movsb_stosb() {
                bits |= bit(Primitive::RepStosb);
            }
            // CPUID.(EAX=07H,ECX=0):ECX.MOVDIR64B[28], which the crate has no accessor for.
            if read.cpuid2(7, 0).ecx & (1 << 28) != 0 {
                bits |= bit(Primitive::Movdir64b);
            }
            let os_avx = info.as_ref().is_some_and(|i| i.has_oxsave() && i.has_avx());
            if cfg!(target_feature = "sse2") && os_avx {
                let enabled = xcr0();
                if ext.has_avx2() && enabled & XCR0_AVX == XCR0_AVX {
                    bits |= bit(Primitive::Avx2Store) | bit(Primitive::Avx2Stream);
                }
                if ext.has_avx512f() && enabled & XCR0_AVX512 == XCR0_AVX512 {
                    bits |= bit(Primitive::Avx512Stream);
                }
            }
        }
        // CLZERO zeroes a cache line, whose size CPUID gives in 8-byte units; our code counts on 64 bytes.
        let line_is_64 = info.as_ref().is_some_and(|i| i.cflush_cache_line_size() == 8);
        if line_is_64 && cpuid.get_processor_capacity_feature_info().is_some_and(|c| c.has_cl_zero()) {
            bits |= bit(Primitive::Clzero);
        }

        Features { bits, identity: identity(&cpuid), zva_block: 0 }
    }

    fn identity<R: CpuIdReader>(cpuid: &CpuId<R>) -> Option<CpuIdentity> {
        let vendor = match cpuid.get_vendor_info()?.as_str() {
            "GenuineIntel" => Vendor::Intel,
            "AuthenticAMD" => Vendor::Amd,
            "HygonGenuine" => Vendor::Hygon,
            _ => Vendor::Other,
        };
        let info = cpuid.get_feature_info()?;
        Some(CpuIdentity {
            vendor,
            family: u16::from(info.family_id()),
            model: u16::from(info.model_id()),
            stepping: info.stepping_id(),
        })
    }

    fn llc_from_cpuid<R: CpuIdReader>(read: R) -> Option<u64> {
        let cpuid = CpuId::with_cpuid_reader(read);
        let deepest = cpuid
            .get_cache_parameters()
            .into_iter()
            .flatten()
            .take(16) // a broken hypervisor may never say that there are no more
            .filter(|c| matches!(c.cache_type(), CacheType::Data | CacheType::Unified))
            .max_by_key(|c| c.level());
        if let Some(c) = deepest {
            return [c.associativity(), c.physical_line_partitions(), c.coherency_line_size(), c.sets()]
                .into_iter()
                .try_fold(1u64, |n, factor| n.checked_mul(factor as u64));
        }
        // AMD's older way, in units of 512 KiB (AMD APM vol. 3, Fn8000_0006_EDX).
        let l3 = cpuid.get_l2_l3_cache_and_tlb_info()?.l3cache_size();
        (l3 != 0).then(|| u64::from(l3) << 19)
    }

    #[cfg(test)]
    mod tests {
        use raw_cpuid::CpuIdResult;

        use super::*;
        use crate::deny::movnt_slow;

        /// A made-up CPU: vendor words, leaf 1 EAX, leaf 1 ECX, leaf 7 EBX and ECX, 8000_0008 EBX.
        #[derive(Clone, Copy)]
        struct Fake {
            vendor: &'static [u8; 12],
            signature: u32,
            ecx1: u32,
            ebx7: u32,
            ecx7: u32,
            capacity: u32,
            line: u32,
        }

        const OSXSAVE_AVX: u32 = 1 << 27 | 1 << 28;
        const AVX2: u32 = 1 << 5;
        const ERMS: u32 = 1 << 9;
        const AVX512F: u32 = 1 << 16;

        impl CpuIdReader for Fake {
            fn cpuid2(&self, leaf: u32, sub: u32) -> CpuIdResult {
                let word = |i: usize| u32::from_le_bytes(self.vendor[i..i + 4].try_into().unwrap());
                let (eax, ebx, ecx, edx) = match (leaf, sub) {
                    (0, _) => (0x10, word(0), word(8), word(4)),
                    (1, _) => (self.signature, self.line << 8, self.ecx1, 0),
                    (4, 3) => (3 | 3 << 5, 15 << 22 | 63, 32767, 0),
                    (4, 0..3) => (1 | 1 << 5, 7 << 22 | 63, 63, 0),
                    (7, 0) => (0, self.ebx7, self.ecx7, 0),
                    (0x8000_0000, _) => (0x8000_0008, 0, 0, 0),
                    (0x8000_0006, _) => (0, 0, 0, 64 << 18),
                    (0x8000_0008, _) => (0, self.capacity, 0, 0),
                    _ => (0, 0, 0, 0),
                };
                CpuIdResult { eax, ebx, ecx, edx }
            }
        }

        const MILAN: Fake = Fake {
            vendor: b"AuthenticAMD",
            signature: 0x00A0_0F11,
            ecx1: OSXSAVE_AVX,
            ebx7: AVX2 | ERMS,
            ecx7: 0,
            capacity: 1,
            line: 8,
        };
        const CASCADE_LAKE: Fake = Fake {
            vendor: b"GenuineIntel",
            signature: 0x0005_0657,
            ecx1: OSXSAVE_AVX,
            ebx7: AVX2 | ERMS | AVX512F,
            ecx7: 0,
            capacity: 0,
            line: 8,
        };

        #[test]
        fn milan() {
            let f = from_cpuid(MILAN, || XCR0_AVX);
            let names: Vec<_> = f.iter().map(Primitive::name).collect();
            let expected =
                ["portable", "unrolled", "rep-stosq", "rep-stosb", "avx2-store", "movnti", "clzero", "avx2-stream"];
            assert_eq!(names, expected);
            let id = f.identity().unwrap();
            assert_eq!((id.vendor, id.family, id.model, id.stepping), (Vendor::Amd, 0x19, 1, 1));
            assert_eq!(movnt_slow(&id), None);
        }

        #[test]
        fn cascade_lake_is_known_as_slow() {
            let f = from_cpuid(CASCADE_LAKE, || XCR0_AVX512);
            assert!(f.contains(Primitive::Avx512Stream) && !f.contains(Primitive::Clzero));
            let id = f.identity().unwrap();
            assert_eq!((id.vendor, id.family, id.model, id.stepping), (Vendor::Intel, 6, 0x55, 7));
            assert!(movnt_slow(&id).is_some());
        }

        /// What CPUID says of the model decides what is used before anything is measured: on a listed one no MOVNT store,
        /// on its neighbours the widest.
        #[test]
        fn movnt_is_not_guessed_to_be_good_where_it_is_known_to_be_slow() {
            use crate::profile::{Best, Profile};
            let guess = |cpu| Profile::uncalibrated(&from_cpuid(cpu, || XCR0_AVX512), None).bulk;
            // Skylake client parts, Skylake-SP, Cascade Lake, Cooper Lake.
            for signature in [0x0004_06E3, 0x0005_06E3, 0x0005_0654, 0x0005_0657, 0x0005_065B] {
                let cpu = Fake { signature, ..CASCADE_LAKE };
                assert_eq!(guess(cpu), None, "{signature:#x}");
                // The list is about MOVNT alone.
                let whole_lines = Fake { ecx7: 1 << 28, ..cpu };
                assert_eq!(guess(whole_lines), Some(Best::only(Primitive::Movdir64b)), "{signature:#x}");
            }
            // Broadwell-X, Ice Lake-SP, Sapphire Rapids; Cascade Lake's numbers in another family; AMD's Milan.
            for signature in [0x0004_06F1, 0x0006_06A6, 0x0008_06F8, 0x0015_0F57] {
                let best = Best { general: Primitive::Movnti, any: Primitive::Avx512Stream };
                assert_eq!(guess(Fake { signature, ..CASCADE_LAKE }), Some(best), "{signature:#x}");
            }
            let best = Best { general: Primitive::Movnti, any: Primitive::Avx2Stream };
            assert_eq!(guess(Fake { capacity: 0, ..MILAN }), Some(best));
        }

        #[test]
        fn guest_without_clzero() {
            let f = from_cpuid(Fake { capacity: 0, ..MILAN }, || XCR0_AVX);
            assert!(!f.contains(Primitive::Clzero));
        }

        #[test]
        fn clzero_needs_64_byte_lines() {
            let f = from_cpuid(Fake { line: 16, ..MILAN }, || XCR0_AVX);
            assert!(!f.contains(Primitive::Clzero));
        }

        #[test]
        fn movdir64b_is_bit_28() {
            let f = from_cpuid(Fake { ecx7: 1 << 28, ..CASCADE_LAKE }, || 0);
            assert!(f.contains(Primitive::Movdir64b));
            let f = from_cpuid(Fake { ecx7: !(1 << 28), ..CASCADE_LAKE }, || 0);
            assert!(!f.contains(Primitive::Movdir64b));
        }

        #[test]
        fn vector_state_must_be_enabled_by_the_system() {
            let vector = |f: Features| f.iter().filter(|p| p.needs_vector()).count();
            assert_eq!(vector(from_cpuid(CASCADE_LAKE, || XCR0_AVX512)), 3);
            assert_eq!(vector(from_cpuid(CASCADE_LAKE, || XCR0_AVX)), 2);
            assert_eq!(vector(from_cpuid(CASCADE_LAKE, || 0x02)), 0);
            // Any AVX-512 part missing takes AVX-512 away, and nothing else.
            for part in [0x20, 0x40, 0x80] {
                assert_eq!(vector(from_cpuid(CASCADE_LAKE, || XCR0_AVX512 & !part)), 2);
            }
            // Without OSXSAVE, XGETBV would fault: it must not even be tried.
            let no_os = Fake { ecx1: 1 << 28, ..CASCADE_LAKE };
            assert_eq!(vector(from_cpuid(no_os, || panic!("xgetbv without OSXSAVE"))), 0);
        }

        #[test]
        fn a_cpu_that_answers_nothing_still_clears() {
            let f = from_cpuid(|_: u32, _: u32| CpuIdResult { eax: 0, ebx: 0, ecx: 0, edx: 0 }, || 0);
            let names: Vec<_> = f.iter().map(Primitive::name).collect();
            assert_eq!(names, ["portable", "unrolled", "rep-stosq", "movnti"]);
        }

        #[test]
        fn last_level_cache() {
            assert_eq!(llc_from_cpuid(CASCADE_LAKE), Some(16 * 64 * 32768));
            // AMD without the topology leaf: the older leaf.
            assert_eq!(llc_from_cpuid(MILAN), Some(32 << 20));
        }
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod arch {
    use super::{Features, bit};
    use crate::primitive::Primitive;

    pub(super) fn detect() -> Features {
        let block = crate::raw::dc_zva_block();
        let mut bits = bit(Primitive::Portable) | bit(Primitive::Unrolled) | bit(Primitive::Stnp);
        if block.is_some() {
            bits |= bit(Primitive::DcZva);
        }
        // At most 2048, so it fits.
        Features { bits, identity: None, zva_block: block.unwrap_or(0) as u16 }
    }

    pub(super) fn llc_bytes() -> Option<u64> {
        None // the cache geometry registers are not readable at EL0
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod arch {
    use super::Features;

    pub(super) fn detect() -> Features {
        Features::none()
    }

    pub(super) fn llc_bytes() -> Option<u64> {
        None
    }
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
        for p in Primitive::ALL {
            // SAFETY: the set is only looked at; no primitive is run from it.
            let f = unsafe { Features::none().with(p) };
            assert!(f.contains(p) && f.contains(Primitive::Portable));
            assert_eq!(f.iter().count(), if p == Primitive::Portable { 1 } else { 2 });
        }
    }

    #[test]
    fn detection_reports_only_what_was_compiled() {
        for p in Features::detect().iter() {
            assert!(p.for_this_arch() && p != Primitive::Model, "{p}");
        }
    }
}
