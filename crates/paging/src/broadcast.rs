//! Invalidation on all CPUs by one instruction on x86-64: what to execute for a request. For arm64 see [`tlbi`](crate::tlbi).
//!
//! AMD's INVLPGB (APM vol. 3) takes an address, a count of further pages, a stride of 4 KiB or 2 MiB, and what must match;
//! TLBSYNC then waits until all CPUs have done what this one asked for. Neither a PCID nor an ASID is required to match
//! here, so CPUs may tag spaces as they like, at the price of invalidating the same addresses of other spaces. Which CPUs
//! have it, and how many pages one instruction takes, is in CPUID leaf 0x8000_0008.

#[cfg(target_arch = "x86_64")]
use crate::invalidate;
use hugemm_base::{Invalidation, PageSize, TlbScope, VirtRange};

/// Operands of one INVLPGB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invlpgb {
    /// Address, and in the low bits what must match and whether upper levels are kept.
    pub rax: u64,
    /// Pages beyond the first; bit 31: they are 2 MiB apart.
    pub ecx: u32,
    /// ASID and PCID to match; not used.
    pub edx: u32,
}

/// RAX bit 0: the address must match.
const VALID_VA: u64 = 1 << 0;
/// RAX bit 3: global translations too.
const INCLUDE_GLOBAL: u64 = 1 << 3;
/// RAX bit 4: final translations only; entries of upper levels stay.
const FINAL_ONLY: u64 = 1 << 4;
/// ECX bit 31: 2 MiB between pages.
const STRIDE_2M: u32 = 1 << 31;

/// A CPU's broadcast invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broadcast {
    /// Pages beyond the first that one instruction takes.
    more: u32,
}

impl Broadcast {
    /// From CPUID leaf 0x8000_0008: EBX bit 3 says whether there is INVLPGB, EDX bits 0 to 15 how many pages beyond the
    /// first it takes.
    pub const fn from_cpuid(ebx: u32, edx: u32) -> Option<Self> {
        if ebx & 1 << 3 != 0 { Some(Broadcast { more: edx & 0xffff }) } else { None }
    }

    /// Whether this CPU has it. CPUID is slow, and a hypervisor's to answer: ask once.
    #[cfg(target_arch = "x86_64")]
    #[allow(unused_unsafe, reason = "the oldest supported compiler calls it unsafe")]
    pub fn detect() -> Option<Self> {
        // SAFETY: every x86-64 CPU has the instruction, and answers for leaves that it does not know.
        let cpuid = |leaf| unsafe { core::arch::x86_64::__cpuid(leaf) };
        if cpuid(0x8000_0000).eax < 0x8000_0008 {
            return None;
        }
        let leaf = cpuid(0x8000_0008);
        Self::from_cpuid(leaf.ebx, leaf.edx)
    }

    /// The instructions for a request.
    ///
    /// Global translations are included for the kernel's scope, whose entries are global.
    pub fn plan(self, scope: TlbScope, what: &Invalidation) -> impl Iterator<Item = Invlpgb> + use<> {
        let global = if scope == TlbScope::Kernel { INCLUDE_GLOBAL } else { 0 };
        let upper = if what.tables { 0 } else { FINAL_ONLY };
        // The instruction has no stride of 1 GiB: a shorter one invalidates the same and more often.
        let small = what.stride == PageSize::Size4K;
        let (size, shift, stride) = if small { (PageSize::Size4K, 12, 0) } else { (PageSize::Size2M, 21, STRIDE_2M) };
        let most = u64::from(self.more) + 1;
        let (ranges, all) = (what.ranges, what.ranges.is_all());
        let mut members = 0..if all { 1 } else { ranges.as_slice().len() };
        let mut rest: Option<(u64, u64)> = None;
        core::iter::from_fn(move || {
            if all {
                return members.next().map(|_| Invlpgb { rax: global, ecx: 0, edx: 0 });
            }
            let (page, pages) = match rest.take() {
                Some(left) => left,
                None => {
                    let range: VirtRange = ranges.as_slice()[members.next()?];
                    (range.start().get() >> shift, range.touched(size))
                }
            };
            let now = pages.min(most);
            if now < pages {
                rest = Some((page + now, pages - now));
            }
            Some(Invlpgb { rax: page << shift | VALID_VA | global | upper, ecx: stride | (now - 1) as u32, edx: 0 })
        })
    }

    /// Begins to invalidate on all CPUs: what [`TlbHw::broadcast`](hugemm_base::TlbHw::broadcast) of a kernel on such CPUs calls. Returns how
    /// many instructions it took.
    ///
    /// # Safety
    ///
    /// * Privileged: faults outside the kernel. The CPU has the instruction (`self` came from its CPUID), and the platform
    ///   has one guest or host address space identifier for all of its CPUs.
    /// * Nothing relies on it before [`wait`](Broadcast::wait) has returned on the CPU that called this. Another CPU's does not wait for it.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn invalidate(self, scope: TlbScope, what: &Invalidation) -> u64 {
        let mut instructions = 0;
        for operands in self.plan(scope, what) {
            // SAFETY: the caller's promise.
            unsafe { invalidate::invlpgb(operands) };
            instructions += 1;
        }
        instructions
    }

    /// Waits until all that the calling CPU has begun to invalidate is done: [`TlbHw::sync`](hugemm_base::TlbHw::sync).
    ///
    /// # Safety
    ///
    /// Privileged, and the CPU has the instruction, as for [`invalidate`](Broadcast::invalidate).
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn wait(self) {
        // SAFETY: the caller's promise.
        unsafe { invalidate::tlbsync() };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use hugemm_base::{RangeSet, VirtAddr};
    use proptest::prelude::*;

    fn what(start: u64, bytes: u64, stride: PageSize, tables: bool) -> Invalidation {
        let range = VirtRange::new(VirtAddr::new(start), bytes).expect("a range");
        Invalidation { ranges: range.into(), stride, tables, uniform: false }
    }

    #[test]
    fn cpuid_says_whether_and_how_many() {
        assert_eq!(Broadcast::from_cpuid(0, 7), None);
        assert_eq!(Broadcast::from_cpuid(1 << 3, 0x5_0007), Some(Broadcast { more: 7 }));
    }

    #[test]
    fn operands_follow_the_manual() {
        let cpu = Broadcast { more: 7 };
        let plan = |scope, what: Invalidation| cpu.plan(scope, &what).collect::<Vec<_>>();
        let ten = what(0x7000_0000, 10 << 12, PageSize::Size4K, false);
        // The address must match (bit 0), final translations only (bit 4).
        let expected = [Invlpgb { rax: 0x7000_0011, ecx: 7, edx: 0 }, Invlpgb { rax: 0x7000_8011, ecx: 1, edx: 0 }];
        assert_eq!(plan(TlbScope::Space, ten), expected);
        let huge = what(0x4000_0000, 3 << 21, PageSize::Size2M, true);
        // Global ones too (bit 3); in steps of 2 MiB (bit 31 of ECX).
        let expected = [Invlpgb { rax: 0x4000_0009, ecx: 0x8000_0002, edx: 0 }];
        assert_eq!(plan(TlbScope::Kernel, huge), expected);
        assert_eq!(plan(TlbScope::Space, Invalidation::ALL), [Invlpgb { rax: 0, ecx: 0, edx: 0 }]);
        assert_eq!(plan(TlbScope::Kernel, Invalidation::ALL), [Invlpgb { rax: 8, ecx: 0, edx: 0 }]);
    }

    proptest! {
        /// Every page of every range is named exactly once, whatever one instruction takes.
        #[test]
        fn plans_cover_exactly(starts in proptest::collection::vec((0u64..4000, 1u64..40), 1..6), more in 0u32..10) {
            let mut ranges = RangeSet::EMPTY;
            for (page, pages) in starts {
                ranges.add(VirtRange::new(VirtAddr::new(page << 12), pages << 12).expect("a range"));
            }
            let request = Invalidation { ranges, stride: PageSize::Size4K, tables: false, uniform: false };
            let mut named = Vec::new();
            for one in (Broadcast { more }).plan(TlbScope::Space, &request) {
                prop_assert!(one.ecx <= more);
                named.extend((0..=u64::from(one.ecx)).map(|page| (one.rax >> 12) + page));
            }
            named.sort_unstable();
            let mut expected: Vec<u64> =
                ranges.as_slice().iter().flat_map(|r| r.first_page()..r.end_page()).collect();
            expected.sort_unstable();
            prop_assert_eq!(named, expected);
        }
    }
}
