//! arm64's TLBI: which instructions a request takes.
//!
//! By address they name one page for every ASID (`VAAE1`), or a range of them where the CPU has FEAT_TLBIRANGE (`RVAAE1`): a
//! multiple of 2, 64, 2048 or 65536 pages, up to 32 times that. Where no tables changed, only what the last level says goes
//! (`VAALE1`, `RVAALE1`), and CPUs keep what they know of the levels above.
//!
//! Where all leaves of a request are of one size ([`Invalidation::leaf_size`]) and CPUs have FEAT_TTL, each instruction says at which
//! level they are. What is at another level may stay.
//!
//! Source: Arm ARM, C5.5 "A64 system instructions for TLB maintenance", the operands of TLBI VAAE1 and TLBI RVAAE1.

use hugemm_base::Invalidation;

/// Bits of a page's number in an operand: VA[55:12], and VA[48:12] of a range.
const PAGE: u64 = (1 << 44) - 1;
const RANGE_PAGE: u64 = (1 << 37) - 1;
/// NUM, SCALE and TG of a range's operand; the granule is 4 KiB.
const NUM_SHIFT: u32 = 39;
const SCALE_SHIFT: u32 = 44;
const GRANULE_4K: u64 = 1 << 46;
/// TTL: of a page's operand the granule is part of it.
const PAGE_LEVEL_SHIFT: u32 = 44;
const RANGE_LEVEL_SHIFT: u32 = 37;
/// Units that one range can have, and the largest scale.
const MOST_UNITS: u64 = 32;
const LARGEST_SCALE: u32 = 3;

/// What an arm64 CPU has of TLBI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tlbi {
    /// Ranges: FEAT_TLBIRANGE.
    pub ranges: bool,
    /// At which level an entry is: FEAT_TTL.
    pub levels: bool,
}

/// One TLBI, with its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlbiStep {
    /// Everything.
    All,
    /// What translates one address, for every ASID.
    Page(u64),
    /// What translates a range of addresses, for every ASID.
    Range(u64),
}

impl Tlbi {
    /// From ID_AA64ISAR0_EL1, of which bits 56 to 59 are 2 or more where there are ranges, and ID_AA64MMFR2_EL1, of which bits 48 to 51
    /// are 1 or more where levels are known. What is broadcast has to be known to every CPU that it reaches.
    pub const fn from_registers(isar0: u64, mmfr2: u64) -> Self {
        Tlbi { ranges: isar0 >> 56 & 15 >= 2, levels: mmfr2 >> 48 & 15 >= 1 }
    }

    /// Pages one by one and no levels, which every CPU has.
    pub const PAGES: Tlbi = Tlbi { ranges: false, levels: false };

    /// All of it.
    pub const ALL: Tlbi = Tlbi { ranges: true, levels: true };

    /// The instructions for a request. One for each leaf of the smallest size without ranges; with them at most five for each
    /// range of up to 8 GiB, and one more for each 8 GiB beyond.
    pub fn plan(self, what: &Invalidation) -> impl Iterator<Item = TlbiStep> + use<> {
        let (ranges, stride, all) = (what.ranges, what.stride, what.ranges.is_all());
        // 3 for the last level, 1 for leaves of 1 GiB; 0 says nothing.
        let level = what.leaf_size().filter(|_| self.levels).map_or(0, |size| u64::from(3 - size.pages().ilog2() / 9));
        let page_level = if level == 0 { 0 } else { GRANULE_4K | level << PAGE_LEVEL_SHIFT };
        let mut members = 0..if all { 1 } else { ranges.as_slice().len() };
        let (mut page, mut pages) = (0_u64, 0_u64);
        core::iter::from_fn(move || {
            if all {
                return members.next().map(|_| TlbiStep::All);
            }
            if pages == 0 {
                let range = ranges.as_slice()[members.next()?];
                page = range.start().align_down(stride.bytes()).get() >> hugemm_base::PAGE_SHIFT;
                pages = range.touched(stride) * stride.pages();
            }
            let first = page;
            let unit = |scale: u32| 5 * scale + 1;
            let step = match (0..=LARGEST_SCALE).rev().find(|scale| pages >> unit(*scale) != 0) {
                Some(scale) if self.ranges && pages > stride.pages() => {
                    let units = (pages >> unit(scale)).min(MOST_UNITS);
                    page += units << unit(scale);
                    pages -= units << unit(scale);
                    let (num, scale) = (units - 1, u64::from(scale));
                    let range = first & RANGE_PAGE | num << NUM_SHIFT | scale << SCALE_SHIFT | GRANULE_4K;
                    TlbiStep::Range(range | level << RANGE_LEVEL_SHIFT)
                }
                _ => {
                    page += stride.pages();
                    pages -= stride.pages();
                    TlbiStep::Page(first & PAGE | page_level)
                }
            };
            Some(step)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use hugemm_base::{PageSize, RangeSet, VirtAddr, VirtRange};
    use proptest::prelude::*;

    const RANGES: Tlbi = Tlbi { ranges: true, levels: false };

    fn what(ranges: &[(u64, u64)], stride: PageSize) -> Invalidation {
        let mut set = RangeSet::EMPTY;
        for (page, pages) in ranges {
            set.add(VirtRange::new(VirtAddr::new(page << 12), pages << 12).expect("a range"));
        }
        Invalidation { ranges: set, stride, tables: false, uniform: false }
    }

    /// The pages that a step names, as the manual has it: NUM + 1 units of 2^(5 × SCALE + 1) pages of 4 KiB. `level`: what it has to
    /// say of the level, or 0.
    fn named(step: TlbiStep, stride: PageSize, level: u64) -> std::ops::Range<u64> {
        match step {
            TlbiStep::All => 0..1 << 52,
            TlbiStep::Page(operand) => {
                assert_eq!(operand >> 44, if level == 0 { 0 } else { 4 | level }, "4 KiB, that level");
                let page = operand & ((1 << 44) - 1);
                page..page + stride.pages()
            }
            TlbiStep::Range(operand) => {
                assert_eq!((operand >> 46, operand >> 37 & 3), (1, level), "4 KiB, that level");
                // Nothing has to go if a range begins within a leaf of the level that it names.
                assert!(level == 0 || (operand & ((1 << 37) - 1)).is_multiple_of(stride.pages()));
                let (base, num, scale) = (operand & ((1 << 37) - 1), operand >> 39 & 31, operand >> 44 & 3);
                base..base + ((num + 1) << (5 * scale + 1))
            }
        }
    }

    #[test]
    fn registers_and_operands_follow_the_manual() {
        assert_eq!(Tlbi::from_registers(1 << 56, !(15 << 48)), Tlbi::PAGES);
        assert_eq!((Tlbi::from_registers(2 << 56, 0), Tlbi::from_registers(2 << 56, 1 << 48)), (RANGES, Tlbi::ALL));
        let plan = |tlbi: Tlbi, what: Invalidation| tlbi.plan(&what).collect::<Vec<_>>();
        let five = what(&[(0x7000, 5)], PageSize::Size4K);
        assert_eq!(plan(Tlbi::PAGES, five), [0, 1, 2, 3, 4].map(|page| TlbiStep::Page(0x7000 + page)));
        // Two units of two pages from VA[48:12] on, in 4 KiB granules; then one page.
        let expected = [TlbiStep::Range(1 << 46 | 1 << 39 | 0x7000), TlbiStep::Page(0x7004)];
        assert_eq!(plan(RANGES, five), expected);
        assert_eq!(plan(RANGES, what(&[(512, 512)], PageSize::Size2M)), [TlbiStep::Page(512)]);
        assert_eq!(plan(RANGES, Invalidation::ALL), [TlbiStep::All]);
        assert_eq!(plan(Tlbi::PAGES, Invalidation::ALL), [TlbiStep::All]);
        // The upper half: the top bits of the number are not the operand's.
        let top = (1 << 52) - 4;
        assert_eq!(plan(Tlbi::PAGES, what(&[(top, 1)], PageSize::Size4K)), [TlbiStep::Page(top & ((1 << 44) - 1))]);
        let expected = [TlbiStep::Range(1 << 46 | 1 << 39 | top & ((1 << 37) - 1))];
        assert_eq!(plan(RANGES, what(&[(top, 4)], PageSize::Size4K)), expected);
        assert_eq!(
            plan(RANGES, what(&[(0, 1 << 21)], PageSize::Size4K)),
            [TlbiStep::Range(1 << 46 | 3 << 44 | 31 << 39)]
        );
        // TTL: of a page TG and the level, which is 3 for 4 KiB; of a range the level in bits 37 and 38.
        let uniform = |ranges, stride| Invalidation { uniform: true, ..what(ranges, stride) };
        let expected = [TlbiStep::Range(1 << 46 | 1 << 39 | 3 << 37 | 0x7000), TlbiStep::Page(7 << 44 | 0x7004)];
        assert_eq!(plan(Tlbi::ALL, uniform(&[(0x7000, 5)], PageSize::Size4K)), expected);
        assert_eq!(plan(RANGES, uniform(&[(0x7000, 5)], PageSize::Size4K)), plan(RANGES, five));
        assert_eq!(plan(Tlbi::ALL, five), plan(RANGES, five));
        assert_eq!(plan(Tlbi::ALL, uniform(&[(512, 512)], PageSize::Size2M)), [TlbiStep::Page(6 << 44 | 512)]);
        assert_eq!(plan(Tlbi::ALL, uniform(&[(1 << 18, 1)], PageSize::Size1G)), [TlbiStep::Page(5 << 44 | 1 << 18)]);
        let tables = Invalidation { tables: true, ..uniform(&[(0x7000, 1)], PageSize::Size4K) };
        assert_eq!(plan(Tlbi::ALL, tables), [TlbiStep::Page(0x7000)], "upper levels too");
        // 8 GiB is the most that one takes.
        let more = [TlbiStep::Range(1 << 46 | 3 << 44 | 31 << 39), TlbiStep::Range(1 << 46 | 3 << 44 | 1 << 21)];
        assert_eq!(plan(RANGES, what(&[(0, (1 << 21) + (1 << 16))], PageSize::Size4K)), more);
    }

    proptest! {
        /// Every page of every range is named once and no other, by a handful of instructions where there are ranges.
        #[test]
        fn plans_cover_exactly(
            given in proptest::collection::vec((0_u64..4000, prop_oneof![1_u64..40, 1_u64..5000]), 1..6),
            huge in any::<bool>(),
            ranges in any::<bool>(),
            levels in any::<bool>(),
        ) {
            let stride = if huge { PageSize::Size2M } else { PageSize::Size4K };
            let request = Invalidation { uniform: true, ..what(&given, stride) };
            let steps: Vec<_> = Tlbi { ranges, levels }.plan(&request).collect();
            let level = if !levels { 0 } else if huge { 2 } else { 3 };
            let mut pages: Vec<u64> = steps.iter().flat_map(|step| named(*step, stride, level)).collect();
            pages.sort_unstable();
            let members = request.ranges.as_slice().iter();
            let mut expected: Vec<u64> = members
                .flat_map(|range| {
                    let first = range.start().align_down(stride.bytes()).get() >> 12;
                    first..first + range.touched(stride) * stride.pages()
                })
                .collect();
            expected.sort_unstable();
            prop_assert_eq!(pages, expected);
            if ranges {
                prop_assert!(steps.len() <= 4 * request.ranges.as_slice().len(), "{steps:?}");
            }
        }
    }
}
