//! Measures a machine's clearing primitives, in some tens of milliseconds.
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
//! Timings are the median of several runs, because a virtual machine may lose the CPU in one of them.

use crate::features::Features;
use crate::primitive::{Class, Primitive};
use crate::profile::{Best, Crossover, Profile};
use crate::raw;
use hugemm_base::platform::Cpu;
use hugemm_base::{Clock, CpuCx};

const MIB: usize = 1 << 20;

/// Smallest scratch memory in bytes that can be calibrated with.
pub const MIN_SCRATCH: usize = 16 * MIB;

/// Run in which a primitive's hot bandwidth is measured: larger than the second-level caches, smaller than the last.
const HOT_RUN: usize = 2 * MIB;

/// Bytes over which a primitive's cold bandwidth is measured, a run at a time.
const COLD_RUN: usize = 2 * MIB;

/// A vector primitive must beat the best general one by this much in percent to be worth saving vector state for.
const VECTOR_GAIN: u64 = 3;

/// Request sizes in bytes at which hot crossovers are looked for.
const HOT_LADDER: [usize; 13] = [
    MIB / 4,
    MIB / 2,
    MIB,
    2 * MIB,
    4 * MIB,
    6 * MIB,
    8 * MIB,
    12 * MIB,
    16 * MIB,
    24 * MIB,
    32 * MIB,
    48 * MIB,
    64 * MIB,
];

/// Request sizes in bytes at which cold crossovers are looked for.
const COLD_LADDER: [usize; 7] = [4096, 16 << 10, 64 << 10, 256 << 10, MIB, 2 * MIB, 4 * MIB];

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
/// size are not found and reported as its size). Takes about the time of clearing eight times the scratch, passes
/// reschedule points between measurements, and must run on the kind of CPU that the profile is for.
pub fn calibrate<P: Cpu + Clock>(
    cx: &mut CpuCx<'_, P>,
    features: &Features,
    scratch: &mut [u8],
) -> Result<Profile, CalibrateError> {
    let mut bench = Bench::new(cx, scratch)?;
    // Cached primitives are for hot and for small destinations; bulk ones for cold and large.
    let cached = bench.best(features, Class::Cached, Bench::hot_run).unwrap_or(Best::only(Primitive::Portable));
    bench.fill_caches(cached.any);
    let bulk = bench.best(features, Class::Streaming, Bench::cold_run);
    let cached_time = bench.cold_run(cached.any);
    if cached_time == 0 {
        return Err(CalibrateError::ClockTooCoarse);
    }
    let never = Crossover::always(u64::MAX);
    let (crossover, bulk_mbps) = match bulk {
        None => (never, 0),
        Some(bulk) => {
            let bulk_time = bench.cold_run(bulk.any);
            let (c, b) = (cached.any, bulk.any);
            let crossover = Crossover {
                hot: bench.crossover(&HOT_LADDER, c, b, |bench, p, bytes| bench.hot(p, bytes, false)),
                hot_touched: bench.crossover(&HOT_LADDER, c, b, |bench, p, bytes| bench.hot(p, bytes, true)),
                cold: bench.crossover(&COLD_LADDER, c, b, |bench, p, bytes| bench.cold(p, bytes, false)),
                cold_touched: bench.crossover(&COLD_LADDER, c, b, |bench, p, bytes| bench.cold(p, bytes, true)),
            };
            (crossover, mbps(COLD_RUN, bulk_time))
        }
    };
    Ok(Profile { cached, bulk, crossover, cached_mbps: mbps(COLD_RUN, cached_time), bulk_mbps })
}

/// Bandwidth in MB/s of `bytes` in `nanos`; 0 if no time passed.
fn mbps(bytes: usize, nanos: u64) -> u32 {
    let rate = (bytes as u64 * 1000).checked_div(nanos).unwrap_or(0);
    u32::try_from(rate).unwrap_or(u32::MAX)
}

/// The scratch memory and where in it cold measurements have got to.
struct Bench<'b, 'p, P> {
    cx: &'b mut CpuCx<'p, P>,
    base: *mut u8,
    bytes: usize,
    cursor: usize,
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
        Ok(Bench { cx, base, bytes, cursor: 0 })
    }

    /// Clears `bytes` from `offset` on, fence included, and reads them afterwards if `touch`; the time in ns.
    fn time(&mut self, p: Primitive, offset: usize, bytes: usize, touch: bool) -> u64 {
        let vector = p.needs_vector().then(|| self.cx.vector());
        let platform = self.cx.platform();
        let start = platform.now_ns();
        // SAFETY: `offset + bytes` is within the scratch (the callers cut it down to size), which is borrowed mutably;
        // `p` is a member of the features that the caller of `calibrate` vouches for; both numbers are multiples of
        // 4096; vector registers are held if needed (primitives for which they cannot be had are never tried).
        unsafe { raw::zero(p, self.base.add(offset), bytes) };
        if p.class() == Class::Streaming {
            platform.store_fence();
        }
        if touch {
            // SAFETY: as above; the bytes were just initialised.
            unsafe { read_lines(self.base.add(offset), bytes) };
        }
        let time = platform.now_ns().saturating_sub(start);
        drop(vector);
        time
    }

    /// Leaves the caches full of dirty lines of the scratch's end.
    fn fill_caches(&mut self, cached: Primitive) {
        self.cx.reschedule();
        self.time(cached, 0, self.bytes, false);
        self.cursor = 0;
    }

    /// Time to clear a run that was cleared just before by the same primitive.
    ///
    /// Small runs are repeated first until the caches have settled on them, which takes several passes where the last
    /// level only receives what the level above evicts, and are then timed three times for the median. Large runs are
    /// long enough to average over noise by themselves.
    fn hot(&mut self, p: Primitive, bytes: usize, touch: bool) -> u64 {
        self.cx.reschedule();
        for _ in 0..(12 * MIB / bytes).clamp(1, 6) {
            self.time(p, 0, bytes, touch);
        }
        if bytes > 8 * MIB {
            return self.time(p, 0, bytes, touch);
        }
        let mut times = [0; 3];
        times.fill_with(|| self.time(p, 0, bytes, touch));
        median(times)
    }

    /// Time to clear a run that was not used for as long as the scratch allows: median of several.
    fn cold(&mut self, p: Primitive, bytes: usize, touch: bool) -> u64 {
        self.cx.reschedule();
        // Small runs are timed by the dozen, or the clock would be most of the time.
        let batch = (COLD_RUN / 8).max(bytes);
        let mut times = [0; 5];
        for time in &mut times {
            let mut sum = 0;
            for _ in 0..batch / bytes {
                if self.cursor + bytes > self.bytes {
                    self.cursor = 0;
                }
                sum += self.time(p, self.cursor, bytes, touch);
                self.cursor += bytes;
            }
            *time = sum;
        }
        median(times)
    }

    /// The fastest primitives of a class, by `time` in ns; `None` if there is none.
    fn best(&mut self, features: &Features, class: Class, time: fn(&mut Self, Primitive) -> u64) -> Option<Best> {
        let mut general: Option<(Primitive, u64)> = None;
        let mut any: Option<(Primitive, u64)> = None;
        for p in features.iter().filter(|p| p.class() == class && *p != Primitive::Model) {
            if p.needs_vector() && self.cx.vector().is_none() {
                continue;
            }
            let time = time(self, p);
            if any.is_none_or(|(_, least)| time < least) {
                any = Some((p, time));
            }
            if !p.needs_vector() && general.is_none_or(|(_, least)| time < least) {
                general = Some((p, time));
            }
        }
        let (general, slow) = general?;
        let (any, fast) = any?;
        let worth = fast * (100 + VECTOR_GAIN) < slow * 100;
        Some(Best { general, any: if worth { any } else { general } })
    }

    fn hot_run(&mut self, p: Primitive) -> u64 {
        self.hot(p, HOT_RUN, false)
    }

    fn cold_run(&mut self, p: Primitive) -> u64 {
        self.cold(p, COLD_RUN, false)
    }

    /// The smallest size on the ladder at which `bulk` is at least as fast as `cached`, by bisection: below it cached
    /// stores win, above it streaming ones do. `u64::MAX` if there is none within the scratch.
    fn crossover(
        &mut self,
        ladder: &[usize],
        cached: Primitive,
        bulk: Primitive,
        time: impl Fn(&mut Self, Primitive, usize) -> u64,
    ) -> u64 {
        let fits = ladder.partition_point(|bytes| *bytes <= self.bytes);
        let (mut low, mut high) = (0, fits);
        while low < high {
            let middle = low.midpoint(high);
            let wins = match ladder.get(middle) {
                // A tie goes to bulk: it leaves the caches to others.
                Some(bytes) => time(self, bulk, *bytes) * 100 <= time(self, cached, *bytes) * 102,
                None => false,
            };
            if wins {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        ladder.get(low).filter(|_| low < fits).map_or(u64::MAX, |bytes| *bytes as u64)
    }
}

fn median<const N: usize>(mut times: [u64; N]) -> u64 {
    times.sort_unstable();
    times[N / 2]
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
