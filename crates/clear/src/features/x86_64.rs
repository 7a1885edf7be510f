//! By CPUID and XCR0.

use raw_cpuid::{CpuId, CpuIdReader, CpuIdReaderNative};

use super::{CpuIdentity, Features, Vendor, bit};
use crate::primitive::Primitive;

/// XCR0 bits that AVX needs: SSE and AVX state.
const XCR0_AVX: u32 = 0x06;
/// XCR0 bits that AVX-512 needs besides: opmask and both ZMM parts.
const XCR0_AVX512: u32 = 0xE6;

pub(super) fn detect() -> Features {
    from_cpuid(CpuIdReaderNative, xcr0)
}

/// Reads the low half of XCR0, where all that is asked about stands. Only to be called where CPUID reports OSXSAVE.
fn xcr0() -> u32 {
    let low;
    // SAFETY: `from_cpuid` calls this only where OSXSAVE is set, so XGETBV is enabled; XCR0 (ECX = 0) always exists
    // then, at every privilege level.
    unsafe {
        core::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _,
            options(nomem, nostack, preserves_flags));
    }
    low
}

/// Detection over any source of CPUID leaves, so that tests can be another CPU.
fn from_cpuid<R: CpuIdReader>(read: R, xcr0: impl FnOnce() -> u32) -> Features {
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

    Features { bits, identity: identity(&cpuid) }
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

    /// A guest that does not see CLZERO; CLZERO for lines of 64 bytes only; MOVDIR64B by its bit.
    #[test]
    fn whole_lines_are_found_by_their_bits() {
        let (movdir64b, others) = (Fake { ecx7: 1 << 28, ..CASCADE_LAKE }, Fake { ecx7: !(1 << 28), ..CASCADE_LAKE });
        let found = |cpu, p| from_cpuid(cpu, || XCR0_AVX).contains(p);
        assert!(found(MILAN, Primitive::Clzero) && found(movdir64b, Primitive::Movdir64b));
        let without = [Fake { capacity: 0, ..MILAN }, Fake { line: 16, ..MILAN }];
        assert!(!without.map(|cpu| found(cpu, Primitive::Clzero)).contains(&true));
        assert!(!found(others, Primitive::Movdir64b));
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

    /// Detection on this CPU, against the standard library's.
    #[test]
    fn this_cpu_is_asked() {
        let here = Features::detect();
        let vector = std::is_x86_feature_detected!("avx2");
        assert_eq!([Primitive::Avx2Store, Primitive::Avx2Stream].map(|p| here.contains(p)), [vector; 2]);
        assert_eq!(here.contains(Primitive::Avx512Stream), std::is_x86_feature_detected!("avx512f"));
        assert_eq!(here.contains(Primitive::RepStosb), std::is_x86_feature_detected!("ermsb"));
    }

    #[test]
    fn makers_are_told_apart() {
        let maker = |vendor| from_cpuid(Fake { vendor, ..MILAN }, || XCR0_AVX).identity().map(|cpu| cpu.vendor);
        assert_eq!(maker(b"HygonGenuine"), Some(Vendor::Hygon));
        assert_eq!(maker(b"CentaurHauls"), Some(Vendor::Other));
    }
}
