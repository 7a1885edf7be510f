//! What a memory abort of arm64 was: what its syndrome says is to be done.
//!
//! Source: Arm ARM, ESR_EL1, "ISS encoding for an exception from a Data Abort" and "… from an Instruction Abort".

/// What was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// To execute.
    Fetch,
    /// To read.
    Read,
    /// To write.
    Write,
}

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
    Fault(Tried, Cause),
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
    pub const fn of(syndrome: u64) -> Option<Self> {
        const WRITTEN: u64 = 1 << 6;
        const CONFLICT: u64 = 0x30;
        let tried = match syndrome >> 26 & 63 {
            FETCH => Tried::Fetch,
            DATA if syndrome & WRITTEN != 0 => Tried::Write,
            DATA => Tried::Read,
            _ => return None,
        };
        // The status' low two bits are the level, in those that have one.
        Some(match syndrome & 63 {
            4..=7 => Abort::Fault(tried, Cause::Absent),
            8..=11 => Abort::Fault(tried, Cause::NotAccessed),
            12..=15 => Abort::Fault(tried, Cause::Denied),
            CONFLICT => Abort::Conflict,
            _ => Abort::Fatal,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_syndrome_has_one_answer() {
        let tries = [(FETCH, 0, Tried::Fetch), (DATA, 0, Tried::Read), (DATA, 1 << 6, Tried::Write)];
        for (class, bits, tried) in tries {
            for status in 0..64 {
                let expected = match status {
                    4..=7 => Abort::Fault(tried, Cause::Absent),
                    8..=11 => Abort::Fault(tried, Cause::NotAccessed),
                    12..=15 => Abort::Fault(tried, Cause::Denied),
                    0x30 => Abort::Conflict,
                    _ => Abort::Fatal,
                };
                // Bit 25 is the instruction's length and bits 7 to 24 say more of some aborts.
                for more in [0, 1 << 25, 0x1ff_ff80] {
                    assert_eq!(Abort::of(class << 26 | more | bits | status), Some(expected), "{class:#x} {status:#x}");
                }
            }
        }
        for class in (0..64).filter(|class| ![FETCH, DATA].contains(class)) {
            assert_eq!(Abort::of(class << 26 | 0x30), None, "{class:#x}");
        }
    }
}
