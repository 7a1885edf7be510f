//! Clearing by chunk and by region: the tables of "huge page clearing optimizations", hot and cold.

use anyhow::{Context, Result, ensure};
use hugemm_base::{Clock, CpuCx, Dirty, Extent, Never, Owed, PAGE_SHIFT, PhysMap, Unfenced, with};
use hugemm_clear::{ClearRequest, Clearer, Primitive, PrimitiveClass, Warmth, raw};
use hugemm_host::cpu::Host;

/// Bytes that are cleared untimed before a hot measurement, at least.
const SETTLE: u64 = 64 << 20;

/// Passes over the region before it, of regions that a cache may hold: a last level of 260 MiB takes eleven to settle on 32 MiB.
const SETTLE_PASSES: u64 = 12;

/// Where that ends: what is larger than 64 MiB has fewer passes, and one at least.
const SETTLE_MOST: u64 = 768 << 20;

/// What clears: a primitive, its fence after every chunk and nothing else; or the engine with its policy, which chooses.
pub type Subject = Option<Primitive>;

pub fn name(subject: Subject) -> &'static str {
    subject.map_or("policy", Primitive::name)
}

/// One line of a table: what is cleared, and how.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub size: u64,
    /// Bytes that a run clears, at least.
    total: u64,
    warmth: Warmth,
    /// One word of each line is read right after it is cleared, as a faulting task would.
    touch: bool,
}

impl Field {
    /// Regions of a size one after the other through memory, `enough` bytes of it in all.
    pub fn cold(region: u64, enough: u64, touch: bool) -> Self {
        Field { size: region, total: region.max(enough), warmth: Warmth::Cold, touch }
    }

    /// One region again and again, until `enough` bytes have been cleared.
    pub fn hot(region: u64, enough: u64) -> Self {
        Field { size: region, total: region.max(enough), warmth: Warmth::Hot, touch: false }
    }
}

/// The bandwidth of one run in GB/s. Cold runs move through memory: each starts at `cursor`, where the one before ended.
pub fn run(
    cx: &mut CpuCx<'_, Host<'_>>,
    clearer: &Clearer,
    subject: Subject,
    field: &Field,
    memory: Dirty,
    cursor: &mut u64,
) -> Result<(Dirty, f64)> {
    let all = memory.into_extent();
    let mut pass = |part| pass(cx, clearer, subject, field, part);
    let (mut bytes, mut nanos) = (0, 0);
    match field.warmth {
        Warmth::Cold => {
            let span = (field.total >> PAGE_SHIFT).min(all.pages());
            let from = if *cursor + span > all.pages() { 0 } else { *cursor };
            *cursor = from + span;
            (bytes, nanos) = (span << PAGE_SHIFT, pass(all.slice(from, from + span))?);
        }
        // The first passes are untimed: whoever came before may have pushed it out of the caches.
        Warmth::Hot => {
            let untimed = ((SETTLE_PASSES * field.size).clamp(SETTLE, SETTLE_MOST) / field.size).max(1);
            for turn in 0..untimed + field.total / field.size {
                let spent = pass(all.slice(0, field.size >> PAGE_SHIFT))?;
                if turn >= untimed {
                    (bytes, nanos) = (bytes + field.size, nanos + spent);
                }
            }
        }
    }
    // SAFETY: `memory` was the owner, and nobody has a part of it any more.
    Ok((unsafe { Dirty::assume_owned(all) }, bytes as f64 / nanos.max(1) as f64))
}

/// Clears a part of what [`run`] owns once, a request for each of the field's regions; in so many nanoseconds.
fn pass(cx: &mut CpuCx<'_, Host<'_>>, clearer: &Clearer, subject: Subject, field: &Field, part: Extent) -> Result<u64> {
    let (clock, pages) = (cx.platform(), field.size >> PAGE_SHIFT);
    ensure!(part.pages().is_multiple_of(pages), "the sizes do not divide the memory; use powers of two that fit");
    let start = clock.now_ns();
    for at in (0..part.pages()).step_by(pages as usize) {
        let piece = part.slice(at, at + pages);
        match subject {
            Some(primitive) => clear_with(cx, primitive, piece)?,
            None => {
                let request = with!(ClearRequest::bulk(field.size).with_warmth(field.warmth), touch_soon = field.touch);
                // SAFETY: `run` owns it, and the pieces are one after the other.
                let zeroed = clearer.clear(cx, unsafe { Dirty::assume_owned(piece) }, &request, &Never);
                zeroed.map_err(|stopped| stopped.reason)?.into_extent();
            }
        }
        if field.touch {
            read(cx, piece)?;
        }
    }
    Ok(clock.now_ns().saturating_sub(start))
}

/// Clears a piece with one primitive that the CPU has, and pays its fence.
fn clear_with(cx: &CpuCx<'_, Host<'_>>, primitive: Primitive, piece: Extent) -> Result<()> {
    let owed = if primitive.class() == PrimitiveClass::Streaming { Owed::Fence } else { Owed::Publish };
    cx.with_vector(primitive.needs_vector(), |vector| {
        ensure!(vector.is_some() || !primitive.needs_vector(), "{primitive} needs vector registers");
        each_window(cx, piece, |ptr, bytes| {
            // SAFETY: the window maps frames that `run` owns; the subjects are what the CPU has; vector registers are usable if the
            // primitive needs them; the fence follows.
            unsafe { raw::zero(primitive, ptr, bytes) }
        })
    })?;
    Unfenced::owing(owed, (), cx).fence();
    Ok(())
}

/// Reads one word of every line of a piece.
fn read(cx: &CpuCx<'_, Host<'_>>, piece: Extent) -> Result<()> {
    let mut sum = 0_u64;
    each_window(cx, piece, |ptr, bytes| {
        for offset in (0..bytes).step_by(64) {
            // SAFETY: within the window, aligned, initialised by the clear before.
            sum = sum.wrapping_add(unsafe { ptr.add(offset).cast::<u64>().read_volatile() });
        }
    })?;
    std::hint::black_box(sum);
    Ok(())
}

/// Calls `f` with every window of a piece.
fn each_window(cx: &CpuCx<'_, Host<'_>>, mut rest: Extent, mut f: impl FnMut(*mut u8, usize)) -> Result<()> {
    while !rest.is_empty() {
        let window = cx.platform().open(rest, None).context("a frame cannot be reached")?;
        let pages = window.pages.min(rest.pages());
        f(window.ptr, (pages << PAGE_SHIFT) as usize);
        // SAFETY: opened above, not used again.
        unsafe { cx.platform().close(window) };
        (_, rest) = rest.split_at(pages);
    }
    Ok(())
}
