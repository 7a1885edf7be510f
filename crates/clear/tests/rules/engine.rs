//! The loop over units: reschedule and cancellation points, what is returned when it ends early, what is counted, and
//! how it uses the platform's map and vector registers.

use crate::support::memory::Memory;
use crate::support::{BULK, CACHED, Event, PAGE, PROFILE, Script, StopAt, clearer, extent, features, open, span};
use hugemm_base::{CounterSnapshot, Never, PreemptModel, Zeroed, with};
use hugemm_clear::folio::begin_around;
use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Primitive, ProfileError, StopReason, Unit};

fn script(pages: u64) -> Script {
    Script::new(Memory::heap(pages))
}

/// How many units a clear of `pages` heap pages takes under a model.
fn units(script: &Script, unit: u64, request: &ClearRequest) -> Vec<(u64, u64)> {
    let mut seen = Vec::new();
    let mut observer = |unit: &Unit| seen.push(span(unit));
    let zeroed = script.run(|cx| clearer(unit).clear_observed(cx, script.dirty(), request, &Never, &mut observer));
    assert_eq!(zeroed.expect("cleared").into_extent(), extent(0, script.memory.pages()));
    assert!(script.memory.zero(0..script.memory.pages()));
    seen
}

/// A 1 GiB extent is one call of the primitive.
#[test]
#[cfg(not(miri))]
fn a_gib_is_one_unit_under_a_preemptible_model() {
    let script = Script::new(Memory::repeated(1 << 18, 512));
    for model in [PreemptModel::Full, PreemptModel::Lazy] {
        script.model.set(model);
        script.memory.dirty(0..512);
        let before = script.counted();
        let dirty = script.dirty();
        assert!(script.run(|cx| clearer(8192).clear(cx, dirty, &BULK, &Never)).is_ok());
        assert!(script.memory.zero(0..512));
        assert_eq!(script.events(), [Event::Reschedule, open(0, 1 << 18), Event::Close(0), Event::Fence]);
        let counted = script.counted().since(before);
        assert_eq!((counted.units, counted.bytes_bulk, counted.reschedules), (1, 1 << 30, 1));
    }
}

/// ⌈n/8192⌉ reschedule points for a part of n pages when a unit is 32 MiB.
#[test]
#[cfg(not(miri))]
fn a_gib_is_cut_into_units_of_32_mib_under_a_cooperative_model() {
    let script = Script::new(Memory::repeated(1 << 18, 512));
    for model in [PreemptModel::None, PreemptModel::Voluntary] {
        script.model.set(model);
        let clearing = begin_around(script.dirty(), 100_000);
        assert!(script.run(|cx| clearer(8192).clear(cx, clearing, &BULK, &Never)).is_ok());
        let right = ((1 << 18) - 100_003_u64).div_ceil(8192);
        let left = 99_998_u64.div_ceil(8192);
        assert_eq!(script.count(Event::Reschedule), right + left + 1);
        script.events();
    }
}

/// Units tile the extent in ascending order, none longer than the bound. A reschedule point stands before each, the first included, and each
/// unit's barrier before the next one; a fence for streaming stores, none for cached ones.
#[test]
fn a_reschedule_point_comes_before_every_unit_and_a_barrier_after() {
    let cases: [&[(u64, u64)]; 3] = [&[(0, 4), (4, 8), (8, 10)], &[(0, 4), (4, 8)], &[(0, 1)]];
    for (expected, (request, barrier)) in
        cases.into_iter().flat_map(|case| [(case, (BULK, Event::Fence)), (case, (CACHED, Event::Publish))])
    {
        let script = script(expected.last().map_or(0, |unit| unit.1));
        assert_eq!(units(&script, 4, &request), expected);
        let unit = |(from, to)| [Event::Reschedule, open(from, to - from), Event::Close(from), barrier];
        assert!(script.events().into_iter().eq(expected.iter().copied().flat_map(unit)));
    }
}

/// Nothing runs where sleeping is not allowed, and the frames come back.
#[test]
fn a_context_that_may_not_sleep_gets_its_frames_back() {
    let script = script(4);
    script.may_sleep.set(false);
    let stopped = script.run(|cx| clearer(4).clear(cx, script.dirty(), &BULK, &Never)).expect_err("may not sleep");
    assert_eq!(stopped.reason, StopReason::MayNotSleep);
    assert_eq!((stopped.clearing.remaining(), stopped.clearing.extent()), (4, extent(0, 4)));
    assert!(script.memory.untouched(0..4));
    assert_eq!(script.counted(), CounterSnapshot::default());
    assert_eq!(script.events(), []);

    // Half way through: what was done stays done.
    script.may_sleep.set(true);
    script.on_reschedule(|script, _| script.may_sleep.set(false));
    let stopped = script.run(|cx| clearer(1).clear(cx, stopped.clearing, &BULK, &Never)).expect_err("now it may not");
    assert_eq!((stopped.reason, stopped.clearing.remaining()), (StopReason::MayNotSleep, 3));
    assert!(script.memory.zero(0..1) && script.memory.untouched(1..4));
}

/// `clear_now` is for such contexts: no reschedule point, one window, one fence.
#[test]
fn clearing_now_never_reschedules() {
    let script = script(8);
    script.may_sleep.set(false);
    let zeroed = script.run(|cx| clearer(2).clear_now(cx, script.dirty(), &BULK).fence());
    assert_eq!(zeroed.expect("cleared").extent(), extent(0, 8));
    assert!(script.memory.zero(0..8));
    assert_eq!(script.events(), [open(0, 8), Event::Close(0), Event::Fence]);
    let expected = with!(CounterSnapshot::default(), clears_bulk = 1, bytes_bulk = 8 * PAGE, units = 1, fences = 1);
    assert_eq!(script.counted(), expected);
}

/// From cooperative to preemptible the rest of a part becomes one unit; back, the next part is cut into units.
#[test]
fn a_model_that_changes_is_honoured_at_the_next_unit() {
    use PreemptModel::{Full, Lazy, None, Voluntary};
    let (ascending, around) =
        (&[(0, 4), (4, 8), (8, 20)][..], &[(15, 20), (0, 4), (4, 8), (8, 10), (10, 14), (14, 15)][..]);
    for (first, at, next, touched, expected) in
        [(None, 3, Full, Option::None, ascending), (Lazy, 2, Voluntary, Some(12), around)]
    {
        let script = script(20);
        script.model.set(first);
        script.on_reschedule(move |script, number| {
            if number == at {
                script.model.set(next);
            }
        });
        let mut seen = Vec::new();
        let clearing = touched.map_or_else(|| script.dirty().begin(), |touched| begin_around(script.dirty(), touched));
        let mut observer = |unit: &Unit| seen.push(span(unit));
        assert!(script.run(|cx| clearer(4).clear_observed(cx, clearing, &BULK, &Never, &mut observer)).is_ok());
        assert_eq!(seen, expected);
    }
}

/// What is known to be zero is not written again.
#[test]
fn zero_extents_are_skipped() {
    let script = script(4);
    script.may_sleep.set(false);
    // SAFETY: the test owns the frames. That they hold canaries instead shows that nobody writes.
    let zeroed = unsafe { Zeroed::assume_owned(extent(0, 4)) };
    let zeroed = script.run(|cx| clearer(4).clear(cx, zeroed, &BULK, &StopAt::new(1))).expect("nothing to do");
    assert_eq!(zeroed.into_extent(), extent(0, 4));
    assert!(script.memory.untouched(0..4));
    assert_eq!(script.events(), []);
    assert_eq!(script.counted(), with!(CounterSnapshot::default(), clears_skipped = 1));
}

/// Cancelled between units under every model, with the progress made; going on stores to the rest only.
#[test]
fn a_cancelled_clear_goes_on_where_it_stopped() {
    for model in PreemptModel::ALL {
        let script = script(20);
        script.model.set(model);
        let clearer = clearer(4);
        let stopped =
            script.run(|cx| clearer.clear(cx, script.dirty(), &BULK, &StopAt::new(3))).expect_err("cancelled");
        assert_eq!(stopped.reason, StopReason::Cancelled);
        assert_eq!((stopped.clearing.remaining(), stopped.clearing.extent()), (12, extent(0, 20)));
        assert!(script.memory.zero(0..8) && script.memory.untouched(8..20), "{model:?}");
        let so_far = script.counted();
        assert_eq!((so_far.units, so_far.fences, so_far.cancellations), (2, 2, 1));
        assert_eq!(script.events().last(), Some(&Event::Reschedule), "the cancellation point follows it");

        // What is zero already may be in use by nobody; canaries there show whether it is stored to again.
        script.memory.dirty(0..8);
        let zeroed = script.run(|cx| clearer.clear(cx, stopped.clearing, &BULK, &Never)).expect("the rest");
        assert_eq!(zeroed.extent(), extent(0, 20));
        assert!(script.memory.untouched(0..8) && script.memory.zero(8..20), "{model:?}");
        assert_eq!(script.counted().bytes_bulk, 20 * PAGE, "{model:?}");
    }
}

/// The frame that cannot be reached is named, and what was reached stays done.
#[test]
fn an_unreachable_frame_ends_the_clear_with_the_progress_made() {
    let script = script(16);
    script.reach.set(10);
    let stopped = script.run(|cx| clearer(8).clear(cx, script.dirty(), &BULK, &Never)).expect_err("out of reach");
    assert_eq!(stopped.reason, StopReason::Unreachable(extent(10, 11).base()));
    assert_eq!(stopped.clearing.remaining(), 6);
    let said = [stopped.reason, StopReason::Cancelled, StopReason::MayNotSleep].map(|reason| reason.to_string());
    assert!(said[0].contains(&extent(10, 11).base().to_string()));
    assert!(said[1] != said[2] && said.iter().all(|said| !said.is_empty()));
    assert!(script.memory.zero(0..10) && script.memory.untouched(10..16));
    assert_eq!(script.counted().bytes_bulk, 10 * PAGE);
    script.reach.set(16);
    assert!(script.run(|cx| clearer(8).clear(cx, stopped.clearing, &BULK, &Never)).is_ok());
    assert!(script.memory.zero(0..16));
    assert_eq!(script.counted().bytes_bulk, 16 * PAGE);
}

/// Every counter, after a folio whose far parts are bulk and whose neighbourhood is cached.
#[test]
#[cfg_attr(miri, ignore = "2 MiB take minutes")]
fn counters_are_exact() {
    let script = script(512);
    let around = begin_around(script.dirty(), 100);
    assert!(script.run(|cx| clearer(128).clear(cx, around, &BULK, &Never)).is_ok());
    let expected = with!(
        CounterSnapshot::default(),
        clears_bulk = 1,
        bytes_bulk = 507 * PAGE,
        bytes_cached = 5 * PAGE,
        units = 4 + 1 + 1,
        fences = 5,
        reschedules = 6
    );
    assert_eq!(script.counted(), expected);
    let before = script.counted();
    assert!(script.run(|cx| clearer(128).clear(cx, script.own(0, 1), &CACHED, &Never)).is_ok());
    let expected =
        with!(CounterSnapshot::default(), clears_cached = 1, bytes_cached = PAGE, units = 1, reschedules = 1);
    assert_eq!(script.counted().since(before), expected);
}

/// Without a direct map each page goes through a window of its own, at addresses that are gone afterwards; the
/// fence stays one per unit.
#[test]
#[cfg(not(miri))]
fn temporary_windows_are_opened_and_closed_once_each() {
    let script = Script::new(Memory::high(6));
    script.window.set(1);
    assert!(script.run(|cx| clearer(4).clear(cx, script.dirty(), &BULK, &Never)).is_ok());
    assert!(script.memory.zero(0..6));
    let window = |page| [open(page, 1), Event::Close(page)];
    let first = [window(0), window(1), window(2), window(3)].concat();
    let second = [window(4), window(5)].concat();
    let expected = [&[Event::Reschedule], &first[..], &[Event::Fence, Event::Reschedule], &second, &[Event::Fence]];
    assert_eq!(script.events(), expected.concat());
    assert_eq!((script.counted().units, script.counted().fences), (2, 2));
}

/// A profile of another machine is refused, and so is a forced primitive that this one lacks.
#[test]
fn what_the_cpu_lacks_is_refused() {
    let refused = |features, policy| Clearer::new(features, policy).expect_err("not available");
    let masked = features().without(Primitive::Model);
    assert_eq!(refused(masked, ClearPolicy::new(PROFILE)), ProfileError::Unavailable(Primitive::Model));
    let force = Some(Primitive::Clzero);
    let forced = with!(ClearPolicy::new(PROFILE), force);
    assert_eq!(refused(features(), forced), ProfileError::Unavailable(Primitive::Clzero));
    assert!(Clearer::new(masked, with!(forced, profile = hugemm_clear::Profile { bulk: None, ..PROFILE })).is_err());
}

/// What a unit takes at the bandwidth of the primitive that clears it stays within the bound, also where a fast
/// vector primitive was asked for and its registers are not to be had.
#[test]
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn a_unit_without_vector_registers_is_no_longer_than_with_them() {
    use hugemm_clear::policy::UNIT_TARGET_US;
    use hugemm_clear::{Best, Features, Mbps};
    // Nothing is run that this CPU may lack: where registers are refused, the vector primitive is only named.
    let (general, any) = (Primitive::Movnti, Primitive::Avx512Stream);
    // SAFETY: the script grants no vector registers, so the primitive is never run.
    let features = unsafe { Features::detect().with(any) };
    let bulk_mbps = Mbps { general: 50, any: 40_000 };
    let profile = hugemm_clear::Profile { bulk: Some(Best { general, any }), bulk_mbps, ..PROFILE };
    for force in [None, Some(any)] {
        let clearer = Clearer::new(features, with!(ClearPolicy::new(profile), force)).expect("valid");
        let script = Script::new(Memory::heap(64));
        let mut longest = 0;
        let mut observer = |unit: &Unit| {
            assert_eq!(unit.primitive, general);
            longest = longest.max(unit.extent.bytes() / u64::from(bulk_mbps.general));
        };
        assert!(script.run(|cx| clearer.clear_observed(cx, script.dirty(), &BULK, &Never, &mut observer)).is_ok());
        assert!(script.memory.zero(0..64));
        assert!(longest <= UNIT_TARGET_US && longest > UNIT_TARGET_US / 4, "{longest} us, {force:?}");
        // At once, too, nobody runs what needs registers without having them.
        script.memory.dirty(0..64);
        assert!(script.run(|cx| clearer.clear_now(cx, script.dirty(), &BULK).fence()).is_ok());
        assert!(script.memory.zero(0..64));
    }
}

/// Vector registers are held for a unit, not across its barrier, and where they are not to be had the general
/// primitive takes over.
#[test]
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn without_vector_registers_the_general_primitive_is_used() {
    use hugemm_clear::{Best, Features};
    let (general, any) = (Primitive::Movnti, Primitive::Avx2Stream);
    let features = Features::detect();
    if !features.contains(any) {
        println!("this CPU has no {any}: nothing to show");
        return;
    }
    let profile = hugemm_clear::Profile { bulk: Some(Best { general, any }), ..PROFILE };
    let clearer = Clearer::new(features, with!(ClearPolicy::new(profile), unit = Some(2 * PAGE))).expect("valid");
    let script = script(4);
    script.vector_grants.set(1);
    let mut seen = Vec::new();
    let mut observer = |unit: &Unit| seen.push(unit.primitive);
    assert!(script.run(|cx| clearer.clear_observed(cx, script.dirty(), &BULK, &Never, &mut observer)).is_ok());
    assert_eq!(seen, [any, general]);
    assert!(script.memory.zero(0..4));
    use Event::{Close, Fence, Reschedule, VectorBegin, VectorEnd, VectorRefuse};
    let granted = [Reschedule, VectorBegin, open(0, 2), Close(0), VectorEnd, Fence];
    let refused = [Reschedule, VectorRefuse, open(2, 2), Close(2), Fence];
    assert_eq!(script.events(), [&granted[..], &refused].concat());
}
