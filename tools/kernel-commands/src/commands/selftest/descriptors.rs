//! The descriptors' own mapping is split, put together again, and flushed on all CPUs, while all CPUs use descriptors.
//!
//! The boot CPU divides a 2 MiB leaf of the descriptor area into 512 and joins them again, both times with a flush of the
//! kernel's half, and frees the table that has become unused. Meanwhile every CPU takes single frames, writes a stamp of its
//! own into their descriptors and finds it again: a translation of the old or the new kind leads to the same bytes, and a
//! table that was freed too early leads anywhere. Only where CPUs let leaves change their size in place: nobody who uses a
//! descriptor can wait for it.

use super::{Cx, Failure, Finding, on_all, overwritten};
use crate::space;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::random::Random;
use hugemm_base::{Clock, Order, PageSize, VirtAddr, VirtRange};
use hugemm_frames::{AllocRequest, Frozen};
use hugemm_kernel::memory::{self, frames};
use hugemm_kernel::tlb::{kernel_half, shootdown};
use hugemm_kernel::{layout, percpu, tables, vmemmap};
use hugemm_paging::{PagingError, ShootdownBatch, ShootdownPolicy, TableMemory};

/// Leaves that are divided and joined in a round, at most.
const TURNS: u64 = 20;
/// Frames that a CPU holds.
const HELD: usize = 16;
/// The descriptor's word that gets the stamp: the owner's, like all of a head's.
pub const WORD: usize = 5;

/// One round on all CPUs, until `until` at the latest.
pub fn round(cx: Cx<'_>, seed: u64, until: u64) -> Result<(), Failure> {
    let stop = AtomicBool::new(false);
    on_all(cx, |cx, cpu| {
        let mut random = Random(seed ^ u64::from(cpu) << 24);
        if cpu == 0 {
            let mut turns = || -> Result<(), Failure> {
                for turn in 0..TURNS {
                    divide_and_join(cx, &mut random)?;
                    stamp(cx, cpu, turn, &mut random)?;
                    if cx.platform().now_ns() >= until {
                        break;
                    }
                }
                Ok(())
            };
            let done = turns();
            // Relaxed: only to end the others.
            stop.store(true, Ordering::Relaxed);
            return done;
        }
        let mut turn = 0;
        while !stop.load(Ordering::Relaxed) {
            stamp(cx, cpu, turn, &mut random)?;
            turn += 1;
        }
        Ok(())
    })
}

/// Takes frames, stamps their descriptors, looks again, and gives them back.
pub fn stamp(cx: Cx<'_>, cpu: u32, turn: u64, random: &mut Random) -> Result<(), Finding> {
    percpu::beat();
    let mut held: [Option<Frozen>; HELD] = [const { None }; HELD];
    let value = |frame: &Frozen| frame.pfn().get() << 32 | u64::from(cpu) << 24 | turn & 0xff_ffff;
    for place in &mut held {
        let order = Order::new(2 * random.below(2) as u32).unwrap_or(Order::ZERO);
        *place = frames().alloc(cx, AllocRequest::order(order)).ok();
        if let Some(frame) = place
            && let word = value(frame)
            && let Some(descriptor) = frames().descriptor_mut(frame)
        {
            descriptor.store(WORD, word);
        }
    }
    let mut result = Ok(());
    for frame in held.into_iter().flatten() {
        let found = frames().descriptor(frame.pfn()).map(|descriptor| descriptor.load(WORD));
        if found != Some(value(&frame)) {
            result = Err(overwritten(frame.pfn().get(), found.unwrap_or(0), cpu));
        }
        frames().free(cx, frame);
    }
    result
}

/// Divides a leaf of the descriptor area, and joins it again.
fn divide_and_join(cx: Cx<'_>, random: &mut Random) -> Result<(), PagingError> {
    const LEAF: PageSize = PageSize::Size2M;
    let leaves = memory::end().get() * layout::DESCRIPTOR_BYTES / LEAF.bytes();
    let at = VirtAddr::new(layout::DESCRIPTORS + random.below(leaves.max(1)) * LEAF.bytes());
    let span = VirtRange::new(at, LEAF.bytes()).map_err(|_| PagingError::OutOfBounds { at })?;
    if !vmemmap::is_whole(at) {
        // No memory there, hence no descriptors; or a pool has left the block divided.
        return Ok(());
    }
    let Some(editing) = tables::resizing() else { return Err(PagingError::NeedsBreak { at }) };
    let policy = ShootdownPolicy::BATCHED;
    let stale = tables::kernel().exclusive(space::memory(cx)).split(span, PageSize::Size4K, editing)?;
    if let Some(range) = stale.flush() {
        let mut batch = ShootdownBatch::new(kernel_half());
        batch.changed(range, PageSize::Size4K);
        let _receipt = batch.flush(shootdown(), cx, &policy);
    }
    let mut old = None;
    let joined =
        tables::kernel().exclusive(space::memory(cx)).collapse(at, LEAF, editing, |table| old = Some(table))?;
    if let (Some(range), Some(table)) = (joined.flush(), old) {
        let mut batch = ShootdownBatch::new(kernel_half());
        let debt = batch.unhooked(table, range, PageSize::Size4K, true);
        let receipt = batch.flush(shootdown(), cx, &policy);
        let table = debt.release(&receipt).unwrap_or_else(|_| panic!("a flush that does not pay its own debt"));
        // SAFETY: it was the divided leaf's table, from this memory; no CPU walks it after the flush.
        unsafe { space::memory(cx).free(table) };
    }
    Ok(())
}
