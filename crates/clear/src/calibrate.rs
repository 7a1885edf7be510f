//! Measures a machine's clearing primitives, in a tenth to a third of a second.
//!
//! CPUID cannot answer what this asks. Hypervisors report the whole socket's cache to a guest that gets an eighth of it;
//! emulators claim fast string stores that are seven times slower than plain ones; streaming stores are 2.5 times faster
//! than cached ones on one core and slower on its predecessor. So each primitive is run, and what is measured decides.
//!
//! **Hot**: the same run of memory is cleared again and again. **Cold**: clears move through memory that is larger than
//! the caches and full of dirty lines, so that each cached store also pays for the line it evicts, as in a machine
//! that has been up for a while. *Touched* adds reading the run right after it was cleared, which is what a faulting
//! task does: a clear past the cache then pays for its misses.
//!
//! Of several timings on cold memory the shortest counts: whatever else the machine does only makes a run longer. Primitives
//! take turns there, so that what disturbs for a millisecond disturbs all of them.

use crate::features::Features;
use crate::primitive::{Primitive, PrimitiveClass};
use crate::profile::{Best, Crossover, Mbps, Profile};
use crate::raw;
use hugemm_base::platform::Cpu;
use hugemm_base::{Clock, CpuCx};

const MIB: usize = 1 << 20;

/// Smallest scratch memory in bytes that can be calibrated with.
pub const MIN_SCRATCH: usize = 16 * MIB;

/// Run in which a primitive's hot bandwidth is measured: larger than the second-level caches, smaller than the last.
const HOT_RUN: usize = 2 * MIB;

/// How often a hot run is measured once the caches have settled.
const HOT_RUNS: usize = 7;

/// How often primitives take turns on cold memory.
const COLD_ROUNDS: usize = 9;

/// Bytes over which a primitive's cold bandwidth is measured, a run at a time.
const COLD_RUN: usize = 2 * MIB;

/// The time in ns of what could not be run: 18 minutes, so that it never wins and sums of it do not overflow.
const NOT_RUN: u64 = 1 << 40;

/// A vector primitive must beat the best general one by this much in percent to be worth saving vector state for.
const VECTOR_GAIN: u64 = 2;

/// Request sizes in bytes at which hot crossovers are looked for.
const HOT_SIZES: [usize; 8] = [MIB / 4, MIB / 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB];

/// Request sizes in bytes at which cold crossovers are looked for.
const COLD_SIZES: [usize; 7] = [4096, 16 << 10, 64 << 10, 256 << 10, MIB, 2 * MIB, 4 * MIB];

/// After how many passes over memory the caches have settled on it, if it fits: a Xeon with a last level of 260 MiB takes two for
/// 4 MiB, three for 16 MiB, and eleven for 32 MiB, during which cached stores become three times as fast.
const HOT_PASSES: usize = 12;

/// What cached stores' time counts for in percent on cold memory: they must be 2 % better to be chosen, because streaming
/// ones leave the caches to others.
const COLD_TIE: u64 = 102;

/// The same on hot memory: they may be 5 % worse, because streaming stores would push the lines out of the caches.
const HOT_TIE: u64 = 95;

/// Why nothing could be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CalibrateError {
    /// The scratch memory is too small.
    ScratchTooSmall {
        /// Its size in bytes, from its first 4 KiB boundary on.
        bytes: usize,
    },
    /// The clock stood still over a run of 2 MiB.
    ClockTooCoarse,
}

impl core::fmt::Display for CalibrateError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            CalibrateError::ScratchTooSmall { bytes } => write!(
                f,
                "{bytes} bytes of scratch memory are too few to calibrate with; give at least {MIN_SCRATCH}, and \
                 twice the last-level cache for cold figures that deserve the name"
            ),
            CalibrateError::ClockTooCoarse => {
                f.write_str("the platform's clock did not advance while 2 MiB were cleared; give it a finer one")
            }
        }
    }
}

impl core::error::Error for CalibrateError {}

/// Measures `features`' primitives in `scratch` and returns the profile.
///
/// `scratch` is ordinary write-back memory that is already backed by frames, preferably by huge pages; its content is
/// lost. At least [`MIN_SCRATCH`] bytes; twice the last-level cache or more for true cold figures (crossovers beyond its
/// size are not found and reported as its size). Clears all of it once and some 4 or 5 GiB in its parts, most of them again and again
/// where they are in the caches; passes reschedule points between measurements, and must run on the kind of CPU that the profile is for.
///
/// # Errors
///
/// [`ScratchTooSmall`](CalibrateError::ScratchTooSmall): give at least [`MIN_SCRATCH`] bytes.
/// [`ClockTooCoarse`](CalibrateError::ClockTooCoarse): use [`Profile::uncalibrated`] or a saved profile.
pub fn calibrate<P: Cpu + Clock>(
    cx: &mut CpuCx<'_, P>,
    features: &Features,
    scratch: &mut [u8],
) -> Result<Profile, CalibrateError> {
    let mut bench = Bench::new(cx, scratch)?;
    // Cached primitives are for hot and for small destinations; bulk ones for cold and large.
    let cached =
        bench.best(features, PrimitiveClass::Cached, Bench::hot_run).unwrap_or(Best::only(Primitive::Portable));
    bench.fill_caches(cached.any);
    let bulk = bench.best(features, PrimitiveClass::Streaming, |bench, of| bench.cold(of, COLD_RUN, false));
    let cached_mbps = bench.bandwidths(cached)?;
    let (crossover, bulk_mbps) = match bulk {
        None => (Crossover::always(u64::MAX), Mbps::UNKNOWN),
        Some(bulk) => (bench.crossovers(cached.any, bulk.any), bench.bandwidths(bulk)?),
    };
    Ok(Profile { cached, bulk, crossover, cached_mbps, bulk_mbps })
}

/// Bandwidth in MB/s of `bytes` in `nanos`; 0 if no time passed.
fn mbps(bytes: usize, nanos: u64) -> u32 {
    let rate = (bytes as u64 * 1000).checked_div(nanos).unwrap_or(0);
    u32::try_from(rate).unwrap_or(u32::MAX)
}

/// What is measured side by side.
type Primitives = [Option<Primitive>; Primitive::ALL.len()];

/// The scratch memory and where in it cold measurements have got to.
struct Bench<'b, 'p, P> {
    cx: &'b mut CpuCx<'p, P>,
    base: *mut u8,
    runs: Runs,
}

/// Runs of memory one behind the other, so that each was not used for as long as there is memory.
struct Runs {
    /// Bytes of all of it.
    bytes: usize,
    /// Where the last run ended.
    end: usize,
}

impl Runs {
    /// The offset of the next run: behind the last one, or at the start again where it would not fit.
    fn next(&mut self, bytes: usize) -> usize {
        let offset = if self.end + bytes > self.bytes { 0 } else { self.end };
        self.end = offset + bytes;
        offset
    }
}

impl<'b, 'p, P: Cpu + Clock> Bench<'b, 'p, P> {
    fn new(cx: &'b mut CpuCx<'p, P>, scratch: &'b mut [u8]) -> Result<Self, CalibrateError> {
        let base = scratch.as_mut_ptr();
        let skip = base.align_offset(4096).min(scratch.len());
        // Whole pages only, so that every primitive's granule divides every run.
        let bytes = (scratch.len() - skip) & !4095;
        if bytes < MIN_SCRATCH {
            return Err(CalibrateError::ScratchTooSmall { bytes });
        }
        // SAFETY: `skip` is at most the slice's length.
        let base = unsafe { base.add(skip) };
        Ok(Bench { cx, base, runs: Runs { bytes, end: 0 } })
    }

    /// Clears `bytes` from `offset` on, fence included, and reads them afterwards if `touch`; the time in ns, or
    /// [`NOT_RUN`] if `p` needs vector registers and they are not to be had at the moment.
    fn time(&mut self, p: Primitive, offset: usize, bytes: usize, touch: bool) -> u64 {
        let cx = &*self.cx;
        cx.with_vector(p.needs_vector(), |vector| match vector {
            None if p.needs_vector() => NOT_RUN,
            _ => self.time_with(p, offset, bytes, touch),
        })
    }

    /// The same. Vector registers are usable if `p` needs them.
    fn time_with(&self, p: Primitive, offset: usize, bytes: usize, touch: bool) -> u64 {
        let platform = self.cx.platform();
        let start = platform.now_ns();
        // SAFETY: `offset + bytes` is within the scratch (the callers cut it down to size), which is borrowed mutably;
        // `p` is a member of the features that the caller of `calibrate` vouches for; both numbers are multiples of
        // 4096; vector registers are held if needed.
        unsafe { raw::zero(p, self.base.add(offset), bytes) };
        if p.class() == PrimitiveClass::Streaming {
            platform.store_fence();
        }
        if touch {
            // SAFETY: as above; the bytes were just initialised.
            unsafe { read_lines(self.base.add(offset), bytes) };
        }
        // Whatever the clock says, sums of it do not overflow.
        platform.now_ns().saturating_sub(start).min(NOT_RUN)
    }

    /// Leaves the caches full of dirty lines of the scratch's end.
    fn fill_caches(&mut self, cached: Primitive) {
        self.cx.cond_resched();
        self.time(cached, 0, self.runs.bytes, false);
        self.runs.end = 0;
    }

    /// Time to clear a run that was cleared just before by the same primitive: the median of several, because a shared
    /// last-level cache does not treat all primitives alike, and in a virtual machine it is not always as large.
    ///
    /// Before that, passes go on until they no longer become shorter, or until enough was cleared. Where the last level only receives what the level above
    /// evicts, the caches take a dozen passes to settle on memory that a streaming primitive has pushed out of them, however
    /// large it is.
    fn hot(&mut self, p: Primitive, bytes: usize, touch: bool) -> u64 {
        self.cx.cond_resched();
        let (mut shortest, mut in_vain, mut done) = (u64::MAX, 0, 0);
        let most = if touch { 24 * MIB } else { 96 * MIB };
        while in_vain < 5 && done < most.max(HOT_PASSES * bytes) {
            let time = self.time(p, 0, bytes, touch);
            in_vain = if time < shortest - shortest / 64 { 0 } else { in_vain + 1 };
            shortest = shortest.min(time);
            done += bytes;
        }
        let mut times = [0; HOT_RUNS];
        times.fill_with(|| self.time(p, 0, bytes, touch));
        times.sort_unstable();
        times[HOT_RUNS / 2]
    }

    /// Times of primitives to clear a run that was not used for as long as the scratch allows: the shortest of several each.
    fn cold<const N: usize>(&mut self, of: [Option<Primitive>; N], bytes: usize, touch: bool) -> [u64; N] {
        // Small runs are timed by the dozen, or the clock would be most of the time.
        let batch = (COLD_RUN / 8).max(bytes);
        let mut shortest = [u64::MAX; N];
        for _ in 0..COLD_ROUNDS {
            for (p, shortest) in of.iter().zip(&mut shortest).filter_map(|(p, shortest)| Some(((*p)?, shortest))) {
                self.cx.cond_resched();
                let mut sum = 0;
                for _ in 0..batch / bytes {
                    let offset = self.runs.next(bytes);
                    sum += self.time(p, offset, bytes, touch);
                }
                *shortest = sum.min(*shortest);
            }
        }
        shortest
    }

    /// The fastest primitives of a class, by `time` in ns; `None` if there is none.
    fn best(
        &mut self,
        features: &Features,
        class: PrimitiveClass,
        time: fn(&mut Self, Primitives) -> [u64; Primitive::ALL.len()],
    ) -> Option<Best> {
        let vectors = self.cx.with_vector(true, |vector| vector.is_some());
        let members =
            features.iter().filter(|p| p.class() == class && *p != Primitive::Model && (vectors || !p.needs_vector()));
        let mut of = [None; Primitive::ALL.len()];
        of.iter_mut().zip(members).for_each(|(slot, p)| *slot = Some(p));
        let times = time(self, of);
        // Of two as fast the first.
        let fastest = |vector: bool| {
            let timed = of.iter().zip(times).filter_map(|(p, time)| Some(((*p)?, time)));
            timed.filter(|(p, _)| vector || !p.needs_vector()).min_by_key(|(_, time)| *time)
        };
        let (general, slow) = fastest(false)?;
        let (any, fast) = fastest(true)?;
        let worth = fast * (100 + VECTOR_GAIN) < slow * 100;
        Some(Best { general, any: if worth { any } else { general } })
    }

    fn hot_run(&mut self, of: Primitives) -> [u64; Primitive::ALL.len()] {
        of.map(|p| p.map_or(NOT_RUN, |p| self.hot(p, HOT_RUN, false)))
    }

    /// Bandwidths of two primitives on cold memory.
    fn bandwidths(&mut self, of: Best) -> Result<Mbps, CalibrateError> {
        let other = (of.any != of.general).then_some(of.any);
        match self.cold([Some(of.general), other], COLD_RUN, false) {
            [0, _] | [_, 0] => Err(CalibrateError::ClockTooCoarse),
            [general, any] => {
                let general = mbps(COLD_RUN, general);
                Ok(Mbps { general, any: if other.is_some() { mbps(COLD_RUN, any) } else { general } })
            }
        }
    }

    /// The crossovers between two primitives.
    fn crossovers(&mut self, cached: Primitive, bulk: Primitive) -> Crossover {
        let of = [cached, bulk];
        let hot = |bench: &mut Self, touch| {
            threshold(HOT_TIE, HOT_SIZES.map(|bytes| bench.rung(bytes, |b| of.map(|p| b.hot(p, bytes, touch)))))
        };
        let (hot, hot_touched) = (hot(self, false), hot(self, true));
        let cold = |bench: &mut Self, touch| {
            threshold(COLD_TIE, COLD_SIZES.map(|bytes| bench.rung(bytes, |b| b.cold(of.map(Some), bytes, touch))))
        };
        let (cold, cold_touched) = (cold(self, false), cold(self, true));
        // Where streaming pays on cold memory at all, it also pays beyond what was measured hot: nothing of twice the
        // largest size that fitted stays in a cache. And cold memory never favours cached stores more than hot does.
        let beyond = if cold.is_some() { 2 * HOT_SIZES[HOT_SIZES.len() - 1] as u64 } else { u64::MAX };
        let (hot, hot_touched) = (hot.unwrap_or(beyond), hot_touched.unwrap_or(beyond));
        Crossover {
            hot,
            hot_touched,
            cold: cold.unwrap_or(hot).min(hot),
            cold_touched: cold_touched.unwrap_or(hot_touched).min(hot_touched),
        }
    }

    /// A request size and the times of both primitives at it; no times if the scratch is too small for it.
    fn rung(&mut self, bytes: usize, time: impl Fn(&mut Self) -> [u64; 2]) -> Rung {
        Rung { bytes, times: if bytes <= self.runs.bytes { time(self) } else { [0, 0] } }
    }
}

/// What was measured at one request size.
#[derive(Clone, Copy)]
struct Rung {
    bytes: usize,
    /// Of the cached and the bulk primitive, in ns; 0 if not measured.
    times: [u64; 2],
}

/// The size from which on to use the bulk primitive so that all sizes measured together take least, each size's times
/// counted in the better one's: one noisy measurement then moves it by little. `tie` is what the cached primitive's time counts
/// for, in percent. `None`: never.
fn threshold<const N: usize>(tie: u64, rungs: [Rung; N]) -> Option<u64> {
    let measured = rungs.iter().take_while(|rung| rung.times != [0, 0]).count();
    // The cost of choosing bulk (1) or cached (0) at a rung, in thousandths of the better one's time.
    let cost = |rung: &Rung, choice: usize| {
        let times = [rung.times[0] * tie / 100, rung.times[1]];
        times[choice] * 1000 / times[0].min(times[1]).max(1)
    };
    let total = |from: usize| {
        let below: u64 = rungs[..from].iter().map(|rung| cost(rung, 0)).sum();
        let above: u64 = rungs[from..measured].iter().map(|rung| cost(rung, 1)).sum();
        below + above
    };
    let best = (0..=measured).min_by_key(|from| total(*from))?;
    (best < measured).then(|| rungs[best].bytes as u64)
}

/// Reads one word of every 64-byte line.
///
/// # Safety
///
/// The bytes are readable and initialised; `ptr` is 8-aligned.
unsafe fn read_lines(ptr: *const u8, bytes: usize) {
    let mut sum = 0_u64;
    for offset in (0..bytes).step_by(64) {
        // SAFETY: within the run that the caller vouches for. Volatile, so that the reads are not optimised away one by
        // one; the sum keeps them from being folded into nothing.
        sum = sum.wrapping_add(unsafe { ptr.add(offset).cast::<u64>().read_volatile() });
    }
    core::hint::black_box(sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where bulk begins to win, counted by how much slower a choice is at a size, not by how long the size takes.
    #[test]
    fn the_threshold_is_where_bulk_begins_to_win() {
        let beside = |large| [[20, 10], large, large, large, large];
        for (tie, times, expected) in [
            (COLD_TIE, [[10, 20], [20, 30], [40, 41], [90, 80], [200, 160]], Some(4096 << 3)),
            (COLD_TIE, [[10, 5]; 5], Some(4096)),
            (COLD_TIE, [[10, 20]; 5], None),
            // Twice the time for 4 KiB outweighs 1 % at each larger size, and not half more.
            (100, beside([10_000, 10_100]), Some(4096)),
            (100, beside([10_000, 15_000]), None),
            // Bulk lost the CPU at the second largest size, cached at the smallest.
            (COLD_TIE, [[30, 20], [20, 30], [40, 60], [90, 95], [200, 100]], Some(4096 << 4)),
            // A tie goes to bulk on cold memory, and unmeasured sizes count for nothing.
            (HOT_TIE, [[103, 100]; 5], None),
            (COLD_TIE, [[100, 101]; 5], Some(4096)),
            (COLD_TIE, [[10, 20], [10, 20], [0, 0], [0, 0], [0, 0]], None),
        ] {
            let mut bytes = 2048;
            let rungs = times.map(|times| {
                bytes *= 2;
                Rung { bytes, times }
            });
            assert_eq!(threshold(tie, rungs), expected, "{times:?}");
        }
    }

    #[test]
    fn crossovers_are_looked_for_at_every_power_of_two() {
        assert!((18..26).map(|shift| 1 << shift).eq(HOT_SIZES), "256 KiB to 32 MiB");
        let from_a_page = COLD_SIZES.is_sorted() && COLD_SIZES[0] == 4096 && COLD_SIZES[6] == 4 << 20;
        assert!(from_a_page && COLD_SIZES.iter().all(|bytes| bytes.is_power_of_two()));
        assert_eq!(MIN_SCRATCH, 16 << 20);
    }

    #[test]
    fn cold_runs_follow_each_other_through_all_the_memory() {
        let mut runs = Runs { bytes: 100, end: 0 };
        let offsets = [40, 40, 20, 40, 61, 39, 100, 1].map(|bytes| runs.next(bytes));
        assert_eq!(offsets, [0, 40, 80, 0, 0, 61, 0, 0]);
    }
}
