//! Clearing by chunk and by region: the tables of "huge page clearing optimizations", hot and cold.

use crate::{Pass, Reason, timed};
use hugemm_base::platform::Cpu;
use hugemm_base::{Clock, CpuCx, Dirty, Extent, Never, Owed, PAGE_BYTES, PAGE_SHIFT, PhysMap, Unfenced, with};
use hugemm_clear::{ClearRequest, Clearer, Features, Primitive, PrimitiveClass, Warmth, raw};

/// What does the clearing.
#[derive(Clone, Copy, Debug)]
pub enum ClearWith<'a> {
    /// One primitive, its fence after every chunk, and nothing else.
    Primitive {
        /// Which; one that is not in `features` is refused.
        primitive: Primitive,
        /// What the CPU has.
        features: &'a Features,
    },
    /// The engine, which chooses.
    Policy {
        /// The engine.
        clearer: &'a Clearer,
        /// What the policy is told of the destination.
        warmth: Warmth,
    },
}

/// Clears `memory` once, `chunk` bytes at a time, each chunk a request of its own.
///
/// With `touch`, one word of each line of a chunk is read right after it is cleared, as a faulting task would. `chunk`
/// is a multiple of 4 KiB that divides the memory. Reschedule points between chunks under `ClearWith::Policy` only; a pass
/// takes as long as clearing takes.
pub fn pass<P: Cpu + PhysMap + Clock>(
    cx: &mut CpuCx<'_, P>,
    how: ClearWith<'_>,
    memory: Dirty,
    chunk: u64,
    touch: bool,
) -> Result<(Dirty, Pass), Reason> {
    let whole = memory.into_extent();
    let divides = chunk != 0 && chunk.is_multiple_of(PAGE_BYTES) && whole.bytes().is_multiple_of(chunk);
    let available = match how {
        ClearWith::Primitive { primitive, features } => features.contains(primitive),
        ClearWith::Policy { .. } => true,
    };
    if !divides || !available {
        return Err(Reason::BadSize);
    }
    // SAFETY: `memory` was the owner; the pieces of `whole` are, one after the other, until its end.
    let owned = |part| unsafe { Dirty::assume_owned(part) };
    let pages = chunk >> PAGE_SHIFT;
    let platform = cx.platform();
    let (result, nanos) = timed(platform, || {
        let mut at = 0;
        while at < whole.pages() {
            let piece = whole.slice(at, at + pages);
            match how {
                ClearWith::Primitive { primitive, features: _ } => clear_with(cx, primitive, piece)?,
                ClearWith::Policy { clearer, warmth } => {
                    let request = with!(ClearRequest::bulk(chunk).with_warmth(warmth), touch_soon = touch);
                    let zeroed = clearer.clear(cx, owned(piece), &request, &Never);
                    zeroed.map_err(|stopped| Reason::Stopped(stopped.reason))?.into_extent();
                }
            }
            if touch {
                read(cx, piece)?;
            }
            at += pages;
        }
        Ok(())
    });
    result.map(|()| (owned(whole), Pass { bytes: whole.bytes(), nanos }))
}

/// Clears a piece with one primitive and pays its fence.
fn clear_with<P: Cpu + PhysMap>(cx: &CpuCx<'_, P>, primitive: Primitive, piece: Extent) -> Result<(), Reason> {
    let owed = if primitive.class() == PrimitiveClass::Streaming { Owed::Fence } else { Owed::Publish };
    cx.with_vector(primitive.needs_vector(), |vector| {
        if primitive.needs_vector() && vector.is_none() {
            return Err(Reason::BadSize);
        }
        each_window(cx, piece, |ptr, bytes| {
            // SAFETY: the window maps frames of `memory`, which the workload owns; `pass` checked that the CPU has the
            // primitive; vector registers are usable if it needs them; the fence follows.
            unsafe { raw::zero(primitive, ptr, bytes) }
        })
    })?;
    Unfenced::owing(owed, (), cx).fence();
    Ok(())
}

/// Reads one word of every line of a piece.
fn read<P: Cpu + PhysMap>(cx: &CpuCx<'_, P>, piece: Extent) -> Result<(), Reason> {
    let mut sum = 0_u64;
    each_window(cx, piece, |ptr, bytes| {
        for offset in (0..bytes).step_by(64) {
            // SAFETY: within the window, aligned, initialised by the clear before.
            sum = sum.wrapping_add(unsafe { ptr.add(offset).cast::<u64>().read_volatile() });
        }
    })?;
    core::hint::black_box(sum);
    Ok(())
}

/// Calls `f` with every window of a piece.
fn each_window<P: Cpu + PhysMap>(
    cx: &CpuCx<'_, P>,
    piece: Extent,
    mut f: impl FnMut(*mut u8, usize),
) -> Result<(), Reason> {
    let mut rest = piece;
    while !rest.is_empty() {
        let unreachable = Reason::Stopped(hugemm_clear::StopReason::Unreachable(rest.base()));
        let window = cx.platform().open(rest, None).ok_or(unreachable)?;
        let pages = window.pages.min(rest.pages());
        f(window.ptr, (pages << PAGE_SHIFT) as usize);
        // SAFETY: opened above, not used again.
        unsafe { cx.platform().close(window) };
        (_, rest) = rest.split_at(pages);
    }
    Ok(())
}
