//! Frames that are poisoned beside the processes, one after the other, and what shows that nobody has them any more.

use anyhow::{Result, bail};
use hugemm_base::{CpuCx, Extent, Order, PageSize, Pfn};
use hugemm_frames::{Frames, Frozen, HwPoisoned, Plain};
use hugemm_host::cpu::Host;
use hugemm_workloads::random::Random;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// One frame of so many is poisoned at most: pages of 2 MiB stay possible.
const FRAMES_PER_POISON: u64 = 1024;

/// What is written into a poisoned frame that nobody has. Whoever got it would clear it, or write something else.
const MARK: u64 = 0x5015_0bad_5015_0bad;

#[derive(Debug, Default)]
pub struct Poison {
    frames: AtomicU64,
    /// Those that hold the mark.
    marked: Mutex<Vec<Pfn>>,
}

fn most(host: &Host<'_>) -> u64 {
    host.frames().pages() / FRAMES_PER_POISON
}

/// A frame of the last quarter.
fn any(host: &Host<'_>, random: &mut Random) -> Extent {
    let all = host.frames();
    Extent::block(Pfn::new(all.end().number() - 1 - random.below(all.pages() / 4)), Order::ZERO)
}

/// A frame's first word. For frames that nobody has.
fn word<'h>(host: &'h Host<'_>, frame: Pfn) -> Option<&'h AtomicU64> {
    // SAFETY: the frame is in the host's memory, which outlives the host, and aligned; nobody has it, so nobody accesses it in
    // another way; if somebody does all the same, that is what the run ends with.
    host.address(frame).map(|at| unsafe { at.cast::<AtomicU64>().as_ref() })
}

impl Poison {
    /// Poisons frames that are free, before anything runs.
    pub fn begin(&self, cx: &CpuCx<'_, Host<'_>>, frames: &Frames<'_, Plain>, random: &mut Random) {
        for _ in 0..most(cx.platform()) / 2 {
            let frame = any(cx.platform(), random);
            let Ok(free) = frames.alloc_contig_range(cx, frame) else { continue };
            frames.free_extent(cx, free);
            let outcome = frames.hwpoison(cx, frame.base());
            self.note(cx.platform(), frame.base(), outcome);
        }
    }

    /// Poisons a frame that nobody uses: a free one that is asked for, or one that the CPU's cache has. A page of a process would
    /// be refused to it from then on, as it should.
    pub fn strike(&self, cx: &CpuCx<'_, Host<'_>>, frames: &Frames<'_, Plain>, random: &mut Random) {
        // Relaxed: a few more do no harm.
        if self.frames.load(Ordering::Relaxed) >= most(cx.platform()) {
            return;
        }
        let page = match random.below(2) {
            0 => frames.alloc(cx, PageSize::Size4K).ok().map(Frozen::into_dirty),
            _ => frames.alloc_contig_range(cx, any(cx.platform(), random)).ok(),
        };
        let Some(page) = page else { return };
        let frame = page.extent().base();
        let outcome = frames.hwpoison(cx, frame);
        self.note(cx.platform(), frame, outcome);
        frames.free_extent(cx, page);
    }

    fn note(&self, host: &Host<'_>, frame: Pfn, outcome: HwPoisoned) {
        if matches!(outcome, HwPoisoned::Free | HwPoisoned::InUse) {
            self.frames.fetch_add(1, Ordering::Relaxed);
            self.mark(host, frame);
        }
    }

    fn mark(&self, host: &Host<'_>, frame: Pfn) {
        if let Some(word) = word(host, frame) {
            word.store(MARK, Ordering::Relaxed);
            self.marked.lock().unwrap_or_else(PoisonError::into_inner).push(frame);
        }
    }

    /// When everything is free: so many frames are out of use as were poisoned, and nobody has got one of them. Whether there
    /// were any.
    pub fn check(self, host: &Host<'_>, refused: u64) -> Result<bool> {
        let (frames, marked) =
            (self.frames.into_inner(), self.marked.into_inner().unwrap_or_else(PoisonError::into_inner));
        if frames != refused {
            bail!("{frames} frames were poisoned, and {refused} are out of use");
        }
        let lost = |frame: &&Pfn| word(host, **frame).is_none_or(|word| word.load(Ordering::Relaxed) != MARK);
        if let Some(frame) = marked.iter().find(lost) {
            bail!("frame {frame} was handed out although it is poisoned");
        }
        Ok(frames > 0)
    }
}
