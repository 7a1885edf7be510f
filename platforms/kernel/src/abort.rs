//! What a memory abort of arm64 was: what its syndrome says is to be done.
//!
//! Source: Arm ARM, ESR_EL1, "ISS encoding for an exception from a Data Abort" and "… from an Instruction Abort".

use hugemm_vm::FaultAccess;

/// Why translation tables did not allow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// There is no entry.
    Absent,
    /// The entry is not marked as accessed.
    NotAccessed,
    /// The entry, or one above it, does not allow it.
    Denied,
}

/// What to do about an abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// A page fault.
    Fault(FaultAccess, Cause),
    /// The CPU has two translations of the address, as it may where leaves change their size in place (FEAT_BBM level 2): both go, and it
    /// tries again.
    Conflict,
    /// Nothing that can be mended.
    Fatal,
}

/// Classes of the syndrome (ESR_EL1.EC) for aborts at the level of the kernel: of a fetch, of data.
pub const FETCH: u64 = 0x21;
/// See [`FETCH`].
pub const DATA: u64 = 0x25;

impl Abort {
    /// What a syndrome says; `None` if it is no abort's.
    pub fn of(syndrome: u64) -> Option<Self> {
        const CONFLICT: u64 = 0x30;
        if !matches!(syndrome >> 26 & 63, FETCH | DATA) {
            return None;
        }
        // The status' low two bits are the level, in those that have one.
        let cause = match syndrome & 63 {
            4..=7 => Cause::Absent,
            8..=11 => Cause::NotAccessed,
            12..=15 => Cause::Denied,
            CONFLICT => return Some(Abort::Conflict),
            _ => return Some(Abort::Fatal),
        };
        FaultAccess::from_arm64_syndrome(syndrome).map(|tried| Abort::Fault(tried, cause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_vm::Access;

    #[test]
    fn every_syndrome_has_one_answer() {
        let tries = [(FETCH, 0, Access::Exec), (DATA, 0, Access::Read), (DATA, 1 << 6, Access::Write)];
        for (class, bits, tried) in tries.map(|(class, bits, access)| (class, bits, access.into())) {
            for status in 0..64 {
                let expected = match status {
                    4..=7 => Abort::Fault(tried, Cause::Absent),
                    8..=11 => Abort::Fault(tried, Cause::NotAccessed),
                    12..=15 => Abort::Fault(tried, Cause::Denied),
                    0x30 => Abort::Conflict,
                    _ => Abort::Fatal,
                };
                // Bit 25 is the instruction's length, and others from 9 on say more of some aborts.
                for more in [0, 1 << 25, 0x1ff_fe00] {
                    assert_eq!(Abort::of(class << 26 | more | bits | status), Some(expected), "{class:#x} {status:#x}");
                }
            }
        }
        for class in (0..64).filter(|class| ![FETCH, DATA].contains(class)) {
            assert_eq!(Abort::of(class << 26 | 0x30), None, "{class:#x}");
        }
    }
}
