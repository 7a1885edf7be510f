//! Calibration from end to end, on this machine and on scripted ones. No test looks at how fast anything is.

use crate::support::host::{alone, places};
use crate::support::memory::Memory;
use crate::support::{Event, Script};
use hugemm_base::{CpuId, PreemptModel};
use hugemm_clear::calibrate::MIN_SCRATCH;
use hugemm_clear::{
    Best, CalibrateError, ClearPolicy, Clearer, Crossover, Features, Mbps, Primitive, PrimitiveClass, Profile,
    calibrate,
};
use hugemm_host::cpu::Host;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

/// Calibrates a scripted machine.
fn scripted(script: &Script, features: &Features, scratch: &mut [u8]) -> Result<Profile, CalibrateError> {
    script.run(|cx| calibrate(cx, features, scratch))
}

fn script() -> Script {
    Script::new(Memory::heap(1))
}

fn scratch() -> Memory {
    Memory::heap(MIN_SCRATCH as u64 / 4096)
}

#[test]
fn a_calibrated_profile_can_be_used_as_it_is() {
    let _alone = alone();
    let mut memory = Memory::heap((64 << 20) / 4096);
    let host = Host::new(&places(1), &mut []).expect("a machine without memory");
    let features = Features::detect();
    let started = Instant::now();
    let profile = host.run_on(CpuId::new(0), |cx| calibrate(cx, &features, memory.bytes())).expect("the CPU exists");
    let profile = profile.expect("64 MiB are enough");
    println!("calibrated in {:?}: {profile:#?}", started.elapsed());

    assert_eq!(profile.check(&features), Ok(()));
    assert!(Clearer::new(features, ClearPolicy::new(profile)).is_ok());
    let named = [Some(profile.cached), profile.bulk].into_iter().flatten().flat_map(|best| [best.general, best.any]);
    assert!(named.into_iter().all(|p| features.contains(p) && p != Primitive::Model));
    assert!(profile.cached_mbps.general > 0 && profile.cached_mbps.any > 0);
    // Units follow from the bandwidths: whole pages, and no more than the largest one can be.
    let policy = ClearPolicy::new(profile);
    let unit = policy.unit_bytes(profile.cached.any, PreemptModel::None, false);
    assert!(unit.is_multiple_of(4096) && unit < 4 << 30);
    let streaming = features.iter().any(|p| p.class() == PrimitiveClass::Streaming);
    assert_eq!(profile.bulk.is_some(), streaming);
    assert_eq!((profile.bulk_mbps.general > 0, profile.bulk_mbps.any > 0), (streaming, streaming));
    let Crossover { hot, hot_touched, cold, cold_touched } = profile.crossover;
    for bytes in [hot, hot_touched, cold, cold_touched] {
        assert!(bytes == u64::MAX || (bytes.is_power_of_two() && (4096..=64 << 20).contains(&bytes)), "{bytes}");
    }
    assert!(cold <= hot && cold_touched <= hot_touched, "cold memory never favours the caches more than hot does");
}

#[test]
fn too_little_scratch_is_refused() {
    let script = script();
    for bytes in [0, 1, 4095, 4096, MIN_SCRATCH - 4096, MIN_SCRATCH - 1] {
        let mut memory = scratch();
        let error = scripted(&script, &Features::detect(), &mut memory.bytes()[..bytes]).expect_err("too small");
        assert_eq!(error, CalibrateError::ScratchTooSmall { bytes: bytes & !4095 });
        assert!(error.to_string().contains(&MIN_SCRATCH.to_string()), "{error}");
        assert!(memory.untouched(0..memory.pages()));
    }
}

/// What lies outside the scratch's whole pages is not touched, and does not count.
#[test]
fn scratch_need_not_be_aligned() {
    let _alone = alone();
    let script = script();
    let pages = MIN_SCRATCH as u64 / 4096;
    let mut memory = Memory::heap(pages + 2);
    let end = (pages as usize + 2) * 4096 - 1;
    assert!(scripted(&script, &Features::none(), &mut memory.bytes()[1..end]).is_ok());
    assert!(memory.untouched(0..1) && memory.untouched(pages + 1..pages + 2) && memory.zero(1..pages + 1));
    memory.dirty(0..pages + 2);
    let short = MIN_SCRATCH - 4096;
    let error = scripted(&script, &Features::none(), &mut memory.bytes()[1..MIN_SCRATCH]).expect_err("a page short");
    assert_eq!(error, CalibrateError::ScratchTooSmall { bytes: short });
    assert!(memory.untouched(0..pages + 2));
}

/// A clock that stands still, goes backwards, as unsynchronised ones do, or jumps as far as it can, and stands still at times: an error or a
/// profile, and no panic.
#[test]
fn a_wrong_clock_does_no_harm() {
    let clocks: [fn(u64) -> u64; 5] = [
        |_| 42,
        |reading| u64::MAX - reading * 1000,
        |reading| if (reading - reading / 2).is_multiple_of(2) { 0 } else { u64::MAX },
        |reading| if (reading - reading / 3).is_multiple_of(2) { 0 } else { u64::MAX },
        |reading| if (reading - reading / 7).is_multiple_of(2) { 0 } else { u64::MAX },
    ];
    for (clock, is_coarse) in clocks.into_iter().zip([true, true, false, false, false]) {
        let script = script();
        script.set_clock(move |_, reading| clock(reading));
        match scripted(&script, &Features::detect(), scratch().bytes()) {
            Ok(profile) => assert!(!is_coarse && profile.check(&Features::detect()).is_ok()),
            Err(error) => assert_eq!(error, CalibrateError::ClockTooCoarse),
        }
    }
}

/// A scripted machine on which measurement `n` (from 1) of a calibration takes `time(streaming, vector, n)` ns: what it
/// finds, and how many measurements it made.
fn timed(
    features: &Features,
    vector_grants: u64,
    time: impl FnMut(bool, bool, u64) -> u64 + 'static,
) -> (Profile, u64) {
    timed_in(scratch(), features, vector_grants, time)
}

/// The same in such scratch memory.
fn timed_in(
    mut scratch: Memory,
    features: &Features,
    vector_grants: u64,
    mut time: impl FnMut(bool, bool, u64) -> u64 + 'static,
) -> (Profile, u64) {
    let _alone = alone();
    let script = script();
    script.vector_grants.set(vector_grants);
    let measurements = Rc::new(Cell::new(0));
    let (mut now, count) = (0, measurements.clone());
    script.set_clock(move |script, reading| {
        // Every other reading ends a measurement.
        if reading.is_multiple_of(2) {
            count.set(reading / 2);
            let streaming = script.last_event() == Some(Event::Fence);
            let vector =
                script.events().iter().rev().find(|event| **event != Event::Fence) == Some(&Event::VectorBegin);
            now += time(streaming, vector, reading / 2);
        }
        now
    });
    let profile = scripted(&script, features, scratch.bytes()).expect("calibrated");
    (profile, measurements.get())
}

/// How long calibration takes is bounded: a hot run is measured until five in a row were no faster, and seven times more;
/// a cold one nine times.
#[test]
fn measurements_end_when_they_get_no_better() {
    let portable = Features::none();
    // The cached run, filling the caches, the bandwidth.
    let (profile, count) = timed(&portable, 0, |_, _, _| 1000);
    assert_eq!(count, (6 + 7) + 1 + 9);
    assert_eq!(profile.cached_mbps, Mbps::only(2 << 20), "2 MiB in 1 µs");
    // Twenty times faster by 2 %: that is progress. By 1 %: that is not.
    let falling = |percent: u64| {
        let mut time = 1_000_000;
        timed(&portable, 0, move |_, _, n| {
            time -= if n <= 20 { time * percent / 100 } else { 0 };
            time
        })
    };
    assert_eq!(falling(2).1, (20 + 5 + 7) + 1 + 9);
    assert_eq!(falling(1).1, (6 + 7) + 1 + 9);
    // By exactly a 64th: that is none.
    let (_, count) = timed(&portable, 0, |_, _, n| if n == 1 { 64_000 } else { 63_000 });
    assert_eq!(count, (6 + 7) + 1 + 9);
    // Faster for ever: until 96 MiB are cleared.
    let mut time = 1_000_000;
    let (_, count) = timed(&portable, 0, move |_, _, _| {
        time -= time * 3 / 100;
        time
    });
    assert_eq!(count, (48 + 7) + 1 + 9);
}

/// The median of the last seven decides, and of two as fast the first one.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_faster_one_by_the_median_is_chosen() {
    // SAFETY: every x86-64 CPU has it.
    let two = unsafe { Features::none().with(Primitive::Unrolled) };
    assert_eq!(timed(&two, 0, |_, _, _| 1000).0.cached, Best::only(Primitive::Portable));
    let median = |last: [u64; 7]| {
        let time = move |_, _, n: u64| match n {
            // Six of the first and its last seven; then the second's.
            7..=13 => last[n as usize - 7],
            _ if n <= 6 => 1000,
            _ => 400,
        };
        timed(&two, 0, time).0.cached
    };
    assert_eq!(median([1, 500, 1, 900, 1, 900, 900]), Best::only(Primitive::Unrolled));
    assert_eq!(median([1, 300, 1, 900, 1, 900, 900]), Best::only(Primitive::Portable));
}

/// Which request sizes are measured how often, and what follows from the times.
#[test]
#[cfg(target_arch = "x86_64")]
fn crossovers_follow_from_the_times() {
    const MIB: u64 = 1 << 20;
    // SAFETY: every x86-64 CPU has it.
    let both = unsafe { Features::none().with(Primitive::Movnti) };
    // As fast everywhere: bulk is preferred on cold memory, cached in the caches, which end at twice the largest size.
    let (profile, count) = timed(&both, 0, |_, _, _| 1000);
    let expected = Crossover { hot: 64 * MIB, hot_touched: 64 * MIB, cold: 4096, cold_touched: 4096 };
    assert_eq!(profile.crossover, expected);
    assert_eq!((profile.cached, profile.bulk), (Best::only(Primitive::Portable), Some(Best::only(Primitive::Movnti))));
    assert_eq!((profile.cached_mbps, profile.bulk_mbps), (Mbps::only(2 << 20), Mbps::only(2 << 20)));
    // Each until five are no faster, and seven times.
    let hot = 7 * 13;
    // Nine batches of 256 KiB, or of one.
    let cold = 9 * (64 + 16 + 4 + 1 + 1 + 1 + 1);
    let choosing = 13 + 1 + 9;
    let bandwidths = 9 + 9;
    let small = choosing + bandwidths + 2 * (2 * hot + 2 * cold);
    assert_eq!(count, small);
    // 32 MiB, where the scratch has as much: caches settle on it as they do on less.
    let larger = Memory::heap((32 << 20) / 4096);
    assert_eq!(timed_in(larger, &both, 0, |_, _, _| 1000).1, small + 2 * (13 + 13));
    let never = timed(&both, 0, |streaming, _, _| if streaming { 2000 } else { 1000 }).0;
    assert_eq!(never.crossover, Crossover::always(u64::MAX));
    let always = timed(&both, 0, |streaming, _, _| if streaming { 500 } else { 1000 }).0;
    let expected = Crossover { hot: MIB / 4, hot_touched: MIB / 4, cold: 4096, cold_touched: 4096 };
    assert_eq!(always.crossover, expected);
    assert_eq!((always.cached_mbps, always.bulk_mbps), (Mbps::only(2 << 20), Mbps::only(4 << 20)));
}

/// What disturbs a machine for as long as one primitive's measurements take does not decide between two on cold memory.
#[test]
#[cfg(target_arch = "x86_64")]
fn primitives_take_turns_on_cold_memory() {
    if !Features::detect().contains(Primitive::Avx2Stream) {
        return;
    }
    // SAFETY: the CPU has both.
    let features = unsafe { Features::none().with(Primitive::Movnti).with(Primitive::Avx2Stream) };
    let expected = Some(Best { general: Primitive::Movnti, any: Primitive::Avx2Stream });
    // Choosing begins after 14: the cached run, and filling the caches.
    for from in 15..=24 {
        let disturbed = move |n: u64| (from..from + 9).contains(&n);
        let time = move |_, vector: bool, n| (if vector { 900 } else { 1000 }) * (if disturbed(n) { 3 } else { 1 });
        assert_eq!(timed(&features, u64::MAX, time).0.bulk, expected, "disturbed from {from}");
    }
}

/// Vector registers are saved and restored for it, so it must be worth more than 2 %.
#[test]
fn a_vector_primitive_must_be_worth_its_registers() {
    if !Features::detect().contains(Primitive::Avx2Store) {
        return;
    }
    // SAFETY: the CPU has it.
    let both = unsafe { Features::none().with(Primitive::Avx2Store) };
    let any = |general| timed(&both, u64::MAX, move |_, vector, _| if vector { 1000 } else { general }).0;
    assert_eq!(any(1020).cached, Best::only(Primitive::Portable));
    let worth = any(1021);
    assert_eq!(worth.cached, Best { general: Primitive::Portable, any: Primitive::Avx2Store });
    assert_eq!(worth.cached_mbps, Mbps { general: 2_054_017, any: 2 << 20 });
    assert!(!CalibrateError::ClockTooCoarse.to_string().is_empty());
}

/// A CPU that has nothing special clears with plain stores and has no bulk; the model primitive is for tests of platforms, its speed says
/// nothing.
#[test]
fn without_streaming_stores_there_is_no_bulk() {
    let _alone = alone();
    for features in [Features::none(), crate::support::features()] {
        let script = script();
        let profile = scripted(&script, &features, scratch().bytes()).expect("calibrated");
        assert_eq!((profile.cached, profile.bulk), (Best::only(Primitive::Portable), None));
        assert_eq!((profile.crossover, profile.bulk_mbps), (Crossover::always(u64::MAX), Mbps::UNKNOWN));
        assert!(profile.cached_mbps.general > 0);
        assert_eq!(script.count(Event::Fence), 0);
    }
}

/// Whatever is hidden is neither run nor named.
#[test]
fn hidden_primitives_are_not_named() {
    let _alone = alone();
    let script = script();
    script.set_clock(|_, reading| reading * 1000);
    let all = Features::detect();
    for hidden in all.iter().filter(|p| *p != Primitive::Portable) {
        let left = all.without(hidden);
        let profile = scripted(&script, &left, scratch().bytes()).expect("calibrated");
        assert_eq!(profile.check(&left), Ok(()), "without {hidden}");
    }
}

/// Vector registers that are granted for a while and then refused: nothing is timed without those it needs. The clock
/// makes vector primitives the fastest, so that they are chosen and timed again until the grants end.
#[test]
fn nothing_is_timed_without_the_registers_it_needs() {
    let _alone = alone();
    let features = Features::detect();
    for grants in [0, 1, 5, 9, 50, 120] {
        let script = script();
        script.vector_grants.set(grants);
        let mut now = 0;
        script.set_clock(move |script, reading| {
            assert_ne!(script.last_event(), Some(Event::VectorRefuse), "timed after {grants} grants and a refusal");
            // Every other reading ends a measurement.
            let vector = script.last_event() == Some(Event::VectorBegin);
            now += if reading % 2 == 1 {
                0
            } else if vector {
                100
            } else {
                1000
            };
            now
        });
        let profile = scripted(&script, &features, scratch().bytes()).expect("calibrated");
        assert_eq!(profile.check(&features), Ok(()));
        let is_general = |best: Best| best.any == best.general;
        assert!(grants > 0 || is_general(profile.cached) && profile.bulk.is_none_or(is_general), "none is named");
    }
}

/// Calibration may take longer than a unit: it passes reschedule points, and never with a fence owed.
#[test]
fn measurements_are_fenced_and_pass_reschedule_points() {
    let script = script();
    let profile = scripted(&script, &Features::detect(), scratch().bytes()).expect("calibrated");
    assert!(script.count(Event::Reschedule) > 10);
    assert_eq!(script.counted().reschedules, script.count(Event::Reschedule));
    assert_eq!(script.count(Event::Fence) > 0, profile.bulk.is_some());
    assert_eq!(script.counted().units, 0, "calibration is no clear");
}
