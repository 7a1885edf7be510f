//! Microarchitectures whose streaming stores are known to be slow.
//!
//! Trust, but verify: streaming stores are taken to be good, and only those CPUs are listed on which somebody measured
//! them to be worse than `rep stosb`. The list decides where nothing better is known, at early boot and where there is
//! no clock; **a calibrated measurement on the machine itself overrides it, in both directions**.

use crate::features::{CpuIdentity, Vendor};

/// A group of CPUs whose MOVNT-type stores lose, and who says so.
struct Slow {
    vendor: Vendor,
    family: u16,
    models: &'static [u16],
    reason: &'static str,
}

/// Provenance of each entry:
///
/// **Skylake.** Linux patch series "Use uncached stores while clearing huge pages", version 3 (June 2022), patch 21 by
/// Ankur Arora (Oracle), which listed the same three models. Measured there on a Xeon Platinum 8270CL (Cascade Lake,
/// family 6, model 0x55, stepping 7): `movnti` 6.3 GB/s at every size, against `rep stosb` 20.4 GB/s for 16 MiB and
/// 6.5 GB/s from 128 MiB up. So past the last-level cache the loss is 3 to 4 %, and it is three-fold inside it.
///
/// * 0x55 is Skylake-X and -SP (steppings up to 4), Cascade Lake (5 to 7) and Cooper Lake (10, 11). All steppings are
///   listed: they share the core and the mesh, and the measured part is Cascade Lake. Cooper Lake itself was not
///   measured.
/// * 0x4E and 0x5E are the Skylake client parts: the same core on a ring. Listed by the patch, not measured there.
/// * Not listed: Kaby, Coffee and Comet Lake (0x8E, 0x9E, 0xA5, 0xA6), the same core again, but nobody has shown a
///   loss; Broadwell before and Ice Lake after, where the same series shows a gain.
static SLOW: [Slow; 1] = [Slow {
    vendor: Vendor::Intel,
    family: 6,
    models: &[0x4E, 0x5E, 0x55],
    reason: "Skylake and Cascade Lake: MOVNT stores measured 4 % slower than rep stosb past the last-level cache",
}];

/// Why the MOVNT family (`Primitive::is_movnt`) should not be used on this CPU; `None` if nothing
/// speaks against it. CLZERO and MOVDIR64B are not meant.
///
/// A short scan of a constant table; callable from any context.
pub(crate) fn movnt_slow(cpu: &CpuIdentity) -> Option<&'static str> {
    SLOW.iter()
        .find(|s| s.vendor == cpu.vendor && s.family == cpu.family && s.models.contains(&cpu.model))
        .map(|s| s.reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(vendor: Vendor, family: u16, model: u16, stepping: u8) -> CpuIdentity {
        CpuIdentity { vendor, family, model, stepping }
    }

    #[test]
    fn skylake_is_denied_at_every_stepping() {
        for model in [0x4E, 0x5E, 0x55] {
            for stepping in 0..16 {
                assert!(movnt_slow(&cpu(Vendor::Intel, 6, model, stepping)).is_some(), "{model:#x}");
            }
        }
    }

    #[test]
    fn others_are_trusted() {
        // Broadwell-X, Ice Lake-X, Sapphire Rapids, Kaby Lake.
        for model in [0x4F, 0x6A, 0x8F, 0x9E] {
            assert_eq!(movnt_slow(&cpu(Vendor::Intel, 6, model, 4)), None);
        }
        // The same numbers of another vendor or family mean another CPU.
        assert_eq!(movnt_slow(&cpu(Vendor::Amd, 6, 0x55, 4)), None);
        assert_eq!(movnt_slow(&cpu(Vendor::Intel, 0x19, 0x55, 4)), None);
        assert_eq!(movnt_slow(&cpu(Vendor::Amd, 0x19, 0x01, 1)), None);
    }
}
