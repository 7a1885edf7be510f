//! Which primitive, in which units: the one place where that is decided.
//!
//! The decision is made on the size of the **whole request**, never on one fault's or one extent's: a 2 MiB fault
//! inside a 64 GiB prefault is bulk, the same fault alone is not. It further looks at the destination's warmth and at
//! whether the caller will touch it at once. The part around the first touch is always cached, whatever the rest is
//! ("huge page clearing optimizations", "mm, folio_zero_user: support clearing page ranges").

use crate::primitive::{Primitive, PrimitiveClass};
use crate::profile::{Best, Profile, Warmth};
use hugemm_base::{PAGE_BYTES, PreemptModel, Sweep, VirtAddr};

/// What the caller knows of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClearRequest {
    /// Bytes of the whole request of which the extent at hand is a part: the bulk hint.
    pub total: u64,
    /// Where the destination is believed to be.
    pub warmth: Warmth,
    /// Whether the caller reads or writes most of the extent right after it is cleared.
    pub touch_soon: bool,
    /// The address at which user space will see the extent's first frame, for platforms whose caches alias or whose
    /// memory is tagged.
    pub user: Option<VirtAddr>,
}

impl ClearRequest {
    /// A request of `total` bytes that nobody will touch at once: prefault, pinning, pool fill. Size is the only hint.
    pub const fn bulk(total: u64) -> Self {
        ClearRequest { total, warmth: Warmth::Cold, touch_soon: false, user: None }
    }

    /// A demand fault of `bytes` bytes: the faulting task touches it at once.
    pub const fn fault(bytes: u64) -> Self {
        ClearRequest { total: bytes, warmth: Warmth::Cold, touch_soon: true, user: None }
    }

    /// The same, with a destination of known warmth.
    pub const fn with_warmth(mut self, warmth: Warmth) -> Self {
        self.warmth = warmth;
        self
    }

    /// The same, to be seen by user space at `address`.
    pub const fn seen_at(mut self, address: VirtAddr) -> Self {
        self.user = Some(address);
        self
    }
}

/// Longest time in microseconds that a unit should take under a cooperative model. Half the bound of 4 ms that must
/// hold, because the measured bandwidth is that of a quiet machine.
pub const UNIT_TARGET_US: u64 = 2_000;

/// Unit of a primitive whose bandwidth was not measured: 8 MiB, about 1 ms at 10 GB/s ("mm, folio_zero_user: support
/// clearing page ranges").
const DEFAULT_UNIT: u64 = 8 << 20;

/// The policy: a profile, and values that override what it says. A plain value; change it by replacing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClearPolicy {
    /// What is known of the machine.
    pub profile: Profile,
    /// Request size in bytes from which on bulk is used, instead of the profile's crossovers.
    pub threshold: Option<u64>,
    /// Largest unit in bytes under a cooperative model, instead of the one computed from bandwidth. Rounded down to
    /// whole pages; one page at least. 4096 is the page-at-a-time way of old.
    pub unit: Option<u64>,
    /// Use this primitive for everything. If it needs vector registers and they are not to be had, the profile's general
    /// one takes over.
    pub force: Option<Primitive>,
}

impl ClearPolicy {
    /// What the profile says, overridden nowhere.
    pub const fn new(profile: Profile) -> Self {
        ClearPolicy { profile, threshold: None, unit: None, force: None }
    }

    /// Whether a request is cleared past the cache.
    pub const fn is_bulk(&self, request: &ClearRequest) -> bool {
        if self.profile.bulk.is_none() {
            return false;
        }
        let threshold = match self.threshold {
            Some(bytes) => bytes,
            None => self.profile.crossover.for_case(request.warmth, request.touch_soon),
        };
        request.total >= threshold
    }

    /// The primitives for one part of an extent of such a request.
    pub const fn primitives(&self, request: &ClearRequest, sweep: Sweep) -> Best {
        if let Some(any) = self.force {
            if !any.needs_vector() {
                return Best::only(any);
            }
            // Without vector registers it cannot be run, whoever asks for it.
            let general = match (any.class(), self.profile.bulk) {
                (PrimitiveClass::Streaming, Some(bulk)) => bulk.general,
                _ => self.profile.cached.general,
            };
            return Best { general, any };
        }
        match (self.profile.bulk, sweep) {
            (Some(bulk), Sweep::Far) if self.is_bulk(request) => bulk,
            _ => self.profile.cached,
        }
    }

    /// Largest number of bytes to clear with `p` between two reschedule points; a multiple of the page size. `p` is the
    /// primitive that the unit will really be cleared with: without vector registers that is a slower one.
    ///
    /// Unbounded under a preemptible model, unless the caller can be `cancelled`: a request to stop is only seen
    /// between units. Otherwise what [`UNIT_TARGET_US`] allows at the measured bandwidth, as a power of two; one page
    /// if `p` is the portable primitive and was not measured.
    pub const fn unit_bytes(&self, p: Primitive, model: PreemptModel, cancellable: bool) -> u64 {
        if model.is_preemptible() && !cancellable {
            return !(PAGE_BYTES - 1);
        }
        if let Some(bytes) = self.unit {
            let whole = bytes & !(PAGE_BYTES - 1);
            return if whole == 0 { PAGE_BYTES } else { whole };
        }
        let mbps = self.profile.mbps(p);
        if mbps == 0 {
            return if matches!(p, Primitive::Portable) { PAGE_BYTES } else { DEFAULT_UNIT };
        }
        // MB/s are bytes per microsecond.
        let bytes = mbps as u64 * UNIT_TARGET_US;
        1 << (bytes | PAGE_BYTES).ilog2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Crossover, Mbps};

    fn profile() -> Profile {
        Profile {
            cached: Best::only(Primitive::RepStosb),
            bulk: Some(Best::only(Primitive::Clzero)),
            crossover: Crossover { hot: 64 << 20, hot_touched: 128 << 20, cold: 1 << 20, cold_touched: 8 << 20 },
            cached_mbps: Mbps::only(10_000),
            bulk_mbps: Mbps::only(40_000),
        }
    }

    /// A 2 MiB fault inside a hinted 64 GiB request is bulk, a single one is not; the neighbourhood of the first touch is cached even then,
    /// and so is all without a bulk primitive.
    #[test]
    fn the_whole_request_decides() {
        let hinted = ClearRequest { total: 64 << 30, ..ClearRequest::fault(2 << 20) };
        let hot = ClearRequest::bulk(2 << 20).with_warmth(Warmth::Hot);
        let (policy, cached) = (ClearPolicy::new(profile()), ClearPolicy::new(Profile { bulk: None, ..profile() }));
        for (policy, request, sweep, expected) in [
            (policy, ClearRequest::fault(2 << 20), Sweep::Far, Primitive::RepStosb),
            (policy, hinted, Sweep::Far, Primitive::Clzero),
            (policy, hinted, Sweep::Near, Primitive::RepStosb),
            (policy, ClearRequest::bulk(2 << 20), Sweep::Far, Primitive::Clzero),
            (policy, hot, Sweep::Far, Primitive::RepStosb),
            (cached, ClearRequest::bulk(1 << 40), Sweep::Far, Primitive::RepStosb),
        ] {
            assert_eq!(policy.primitives(&request, sweep).any, expected, "{request:?} {sweep:?}");
        }
    }

    #[test]
    fn a_fixed_threshold_overrides_the_measured_one() {
        let policy = ClearPolicy { threshold: Some(8 << 20), ..ClearPolicy::new(profile()) };
        assert!(!policy.is_bulk(&ClearRequest::bulk((8 << 20) - 1)));
        assert!(policy.is_bulk(&ClearRequest::bulk(8 << 20)));
        let never = ClearPolicy { threshold: Some(u64::MAX), ..policy };
        assert!(!never.is_bulk(&ClearRequest::bulk(u64::MAX - 1)));
    }

    /// At the crossover, of each case, a request is bulk; below it is not.
    #[test]
    fn each_case_has_its_crossover() {
        let policy = ClearPolicy::new(profile());
        let cases =
            [(Warmth::Hot, false, 64), (Warmth::Hot, true, 128), (Warmth::Cold, false, 1), (Warmth::Cold, true, 8)];
        for (warmth, touch_soon, mib) in cases {
            let request = ClearRequest { total: mib << 20, warmth, touch_soon, user: None };
            assert!(policy.is_bulk(&request) && !policy.is_bulk(&ClearRequest { total: request.total - 1, ..request }));
        }
        assert_eq!(
            ClearRequest::bulk(5),
            ClearRequest { total: 5, warmth: Warmth::Cold, touch_soon: false, user: None }
        );
        let user = Some(VirtAddr::new(0x7000));
        let seen = ClearRequest { total: 5, warmth: Warmth::Hot, touch_soon: true, user };
        assert_eq!(ClearRequest::fault(5).with_warmth(Warmth::Hot).seen_at(VirtAddr::new(0x7000)), seen);
        assert_eq!(DEFAULT_UNIT, 8 * 1024 * 1024);
    }

    /// Slow primitives have units of a page, however slow.
    #[test]
    fn a_measured_unit_is_a_power_of_two_of_at_least_a_page() {
        for (mbps, bytes) in [(1, 4096), (2, 4096), (3, 4096), (4, 4096), (5, 8192), (10, 16384), (1000, 1 << 20)] {
            let policy = ClearPolicy::new(Profile { cached_mbps: Mbps::only(mbps), ..profile() });
            assert_eq!(policy.unit_bytes(Primitive::RepStosb, PreemptModel::None, false), bytes, "{mbps}");
        }
    }

    #[test]
    fn units_follow_the_preemption_model() {
        let policy = ClearPolicy::new(profile());
        for model in PreemptModel::ALL {
            let unit = policy.unit_bytes(Primitive::RepStosb, model, false);
            let bulk = policy.unit_bytes(Primitive::Clzero, model, false);
            if model.is_preemptible() {
                assert!(unit > 1 << 60 && bulk > 1 << 60 && unit.is_multiple_of(PAGE_BYTES));
                // Cancellable: bounded all the same.
                assert_eq!(policy.unit_bytes(Primitive::RepStosb, model, true), 16 << 20);
            } else {
                // 2 ms at 10 and 40 GB/s are 20 and 80 MB.
                assert_eq!((unit, bulk), (16 << 20, 64 << 20));
            }
        }
    }

    /// Each of the four is sized by its own bandwidth, and what is none of them by nobody's.
    #[test]
    fn a_unit_is_sized_by_the_primitive_that_clears_it() {
        use Primitive::{Avx2Store, Avx2Stream, Avx512Stream, Movnti, RepStosb};
        let policy = ClearPolicy::new(Profile {
            cached: Best { general: RepStosb, any: Avx2Store },
            bulk: Some(Best { general: Movnti, any: Avx2Stream }),
            cached_mbps: Mbps { general: 5_000, any: 10_000 },
            bulk_mbps: Mbps { general: 20_000, any: 40_000 },
            ..profile()
        });
        let unit = |p| policy.unit_bytes(p, PreemptModel::None, false);
        let units = [RepStosb, Avx2Store, Movnti, Avx2Stream, Avx512Stream].map(unit);
        assert_eq!(units, [8 << 20, 16 << 20, 32 << 20, 64 << 20, DEFAULT_UNIT]);
        let cached_only = ClearPolicy::new(Profile { bulk: None, ..policy.profile });
        assert_eq!(cached_only.unit_bytes(Movnti, PreemptModel::None, false), DEFAULT_UNIT);
    }

    /// What is forced and needs vector registers has somebody to stand in for it, who does not and is of its class.
    #[test]
    fn a_forced_vector_primitive_has_a_general_one_behind_it() {
        use Primitive::{Avx2Store, Avx2Stream, Movnti, RepStosb};
        let bulk = Some(Best { general: Movnti, any: Avx2Stream });
        let forced = |force, bulk| {
            let policy = ClearPolicy { force: Some(force), ..ClearPolicy::new(Profile { bulk, ..profile() }) };
            policy.primitives(&ClearRequest::bulk(1 << 40), Sweep::Far)
        };
        assert_eq!(forced(Avx2Stream, bulk), Best { general: Movnti, any: Avx2Stream });
        assert_eq!(forced(Avx2Stream, None), Best { general: RepStosb, any: Avx2Stream });
        assert_eq!(forced(Avx2Store, bulk), Best { general: RepStosb, any: Avx2Store });
        assert_eq!(forced(RepStosb, bulk), Best::only(RepStosb));
    }

    #[test]
    fn units_without_a_measurement() {
        let unmeasured =
            ClearPolicy::new(Profile { cached_mbps: Mbps::UNKNOWN, bulk_mbps: Mbps::UNKNOWN, ..profile() });
        assert_eq!(unmeasured.unit_bytes(Primitive::RepStosb, PreemptModel::None, false), DEFAULT_UNIT);
        assert_eq!(unmeasured.unit_bytes(Primitive::Portable, PreemptModel::None, false), PAGE_BYTES);
        let fixed = ClearPolicy { unit: Some(32 << 20), ..unmeasured };
        assert_eq!(fixed.unit_bytes(Primitive::RepStosb, PreemptModel::Voluntary, false), 32 << 20);
        let odd = ClearPolicy { unit: Some(3 * PAGE_BYTES + 5), ..unmeasured };
        assert_eq!(odd.unit_bytes(Primitive::RepStosb, PreemptModel::Voluntary, false), 3 * PAGE_BYTES);
        let tiny = ClearPolicy { unit: Some(1), ..unmeasured };
        assert_eq!(tiny.unit_bytes(Primitive::RepStosb, PreemptModel::Voluntary, false), PAGE_BYTES);
    }
}
