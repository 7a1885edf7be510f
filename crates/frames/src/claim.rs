//! Claims: particular frames, not just any.
//!
//! * [`claim_exact`](Frames::claim_exact) takes an extent, aligned or not, if all of it is free in the buddy system right
//!   now. One lock round.
//! * [`claim`](Frames::claim) empties a 2 MiB-aligned range and takes it, in four steps:
//!   1. **Isolate.** Under the lock every 2 MiB block of the range is marked; its free blocks leave the free lists but
//!      stay free. From here on nothing is allocated from the range.
//!   2. **Drain.** Every CPU is asked for its cache; this one's is drained at once. A free that **races** with this
//!      lands in the buddy system in any case: one that began before its CPU served the request is in the cache that is
//!      then drained; one that begins after it sees the mark and bypasses the cache. It is re-checked under the lock, so
//!      it becomes an isolated free block, which the claim finds.
//!   3. **Migrate.** Each block of the range that is in use is offered to the caller's `migrate`, with nothing locked.
//!      What it empties comes back as in step 2.
//!   4. **Take or roll back.** If everything is free it is taken, otherwise the marks go and the free blocks return to
//!      the lists: nothing is lost, and the next free or allocation sees ordinary blocks.
//!
//! Two claims never overlap: the second finds the marks and fails. Source: design §5 frames, checklist C13, C17.

use crate::arena::{Arena, BLOCK_ORDER, in_region};
use crate::blockmap::SPAN;
use crate::buddy::Content;
use crate::frames::{Env, Frames};
use crate::freelist::{FreeLists, Known, List};
use core::fmt;
use hugemm_base::inject::FaultPoint;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::Ordering;
use hugemm_base::{CpuCx, Dirty, Extent, Order, Pfn};

/// Where every claim can be made to fail.
pub const FAULT_CLAIM: FaultPoint = FaultPoint("frames.claim");

/// Why a range could not be claimed. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimError {
    /// Empty, or not in one arena.
    NotManaged,
    /// Not aligned to 2 MiB.
    Misaligned,
    /// Another claim is at work in the range.
    Contended,
    /// This frame is in use (or cached by a CPU that did not answer, reserved, or poisoned) and was not migrated.
    InUse(Pfn),
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClaimError::NotManaged => f.write_str("the range is empty or not inside one arena"),
            ClaimError::Misaligned => f.write_str("the range is not aligned to 2 MiB; align it or use claim_exact"),
            ClaimError::Contended => f.write_str("another claim is at work in the range; try again later"),
            ClaimError::InUse(pfn) => write!(f, "frame {pfn} is in use and was not migrated"),
        }
    }
}

impl core::error::Error for ClaimError {}

/// Moves the content of frames elsewhere and lets go of them.
pub trait Migrate {
    /// Tries to empty the block; true if it may have become free. Called with nothing locked, unpinned; may sleep if the
    /// claimer may.
    fn migrate(&mut self, block: Extent) -> bool;
}

/// Moves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMigration;

impl Migrate for NoMigration {
    fn migrate(&mut self, _block: Extent) -> bool {
        false
    }
}

impl<F: FnMut(Extent) -> bool> Migrate for F {
    fn migrate(&mut self, block: Extent) -> bool {
        self(block)
    }
}

/// How often a claim looks at a block that does not become free before it gives up.
const ATTEMPTS: u32 = 8;

/// How often a claim looks whether another CPU has served its request, before it goes on without.
const PATIENCE: u32 = 10_000;

pub(crate) fn content_of(list: List) -> Content {
    match list {
        List::Small(_, Known::Zero) => Content::Zero,
        List::Small(..) => Content::Dirty,
        // The region's bits know.
        List::Big(_) => Content::AsMapped,
        // What was known is forgotten while a block is isolated.
        List::Isolated => Content::Dirty,
    }
}

impl<'m, E: Env> Frames<'m, E> {
    /// The arena that holds all of an extent.
    fn arena_of(&self, extent: Extent) -> Result<&'m Arena<'m>, ClaimError> {
        let arena = self.arena(extent.base()).filter(|_| !extent.is_empty());
        arena.filter(|arena| arena.extent.covers(extent)).ok_or(ClaimError::NotManaged)
    }

    /// Takes exactly these frames if all of them are free in the buddy system. One lock round, O(blocks in the range).
    /// Frames in CPUs' caches count as in use: [`claim`](Frames::claim) gets those too.
    pub fn claim_exact<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent) -> Result<Dirty, ClaimError> {
        let arena = self.arena_of(extent)?;
        if self.env.fault(FAULT_CLAIM) {
            return Err(ClaimError::InUse(extent.base()));
        }
        let _pin = cx.pin();
        let result = self.with_node(arena.node, |lists| {
            self.all_free(arena, extent)?;
            if self.any_isolated(arena, extent) {
                return Err(ClaimError::Contended);
            }
            self.take_free(lists, arena, extent);
            Ok(())
        });
        result.unwrap_or(Err(ClaimError::NotManaged))?;
        // SAFETY: the frames were free and have just been taken out, so they are the caller's.
        Ok(unsafe { Dirty::assume_owned(extent) })
    }

    /// The first block of the extent that is not free.
    fn all_free(&self, arena: &Arena<'m>, extent: Extent) -> Result<(), ClaimError> {
        match self.blocks(arena, extent).find(|(pfn, order)| !self.is_free(arena, *pfn, *order)) {
            None => Ok(()),
            Some((pfn, _)) => Err(ClaimError::InUse(pfn.max(extent.base()))),
        }
    }

    /// The blocks that an extent touches.
    fn blocks<'a>(&'a self, arena: &'a Arena<'m>, extent: Extent) -> impl Iterator<Item = (Pfn, u32)> + 'a {
        let mut at = extent.base().number();
        core::iter::from_fn(move || {
            if at >= extent.end().number() {
                return None;
            }
            let (head, order) = arena.block_of(Pfn::new(at));
            at = head.number() + (1 << order);
            Some((head, order))
        })
    }

    fn any_isolated(&self, arena: &Arena<'m>, extent: Extent) -> bool {
        self.blocks_2m(extent).any(|pfn| arena.region(pfn).isolated.get(in_region(pfn)))
    }

    /// The first frames of the 2 MiB blocks that an extent touches.
    fn blocks_2m(&self, extent: Extent) -> impl Iterator<Item = Pfn> + use<E> {
        let first = extent.base().number() >> BLOCK_ORDER << BLOCK_ORDER;
        (first..extent.end().number()).step_by(SPAN).map(Pfn::new)
    }

    /// Takes an extent that is free throughout; what its first and last blocks have beyond it goes back.
    fn take_free(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent) {
        let (mut at, end) = (extent.base().number(), extent.end().number());
        while at < end {
            let (head, order) = arena.block_of(Pfn::new(at));
            let list = self.remove_block(lists, arena, head, order);
            let Ok(order) = Order::new(order) else { return };
            let whole = Extent::block(head, order);
            let inside = whole.intersection(extent);
            if inside != whole {
                self.cut_ends(arena, inside);
                let content = content_of(list);
                let before = inside.base().number() - head.number();
                for part in [whole.slice(0, before), whole.slice(before + inside.pages(), whole.pages())] {
                    self.free_chunks(lists, arena, part, content);
                }
            }
            at = head.number() + order.pages();
        }
    }

    /// Empties a 2 MiB-aligned range of one arena, with the help of `migrate`, and takes it. Needs a context that may
    /// sleep if it is to wait for other CPUs; without, it takes what it finds. The other CPUs must run, or
    /// [`serve`](Frames::serve), for their caches to be had.
    pub fn claim<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        extent: Extent,
        migrate: &mut impl Migrate,
    ) -> Result<Dirty, ClaimError> {
        let arena = self.arena_of(extent)?;
        let aligned = |number: u64| number.is_multiple_of(SPAN as u64);
        if !aligned(extent.base().number()) || !aligned(extent.pages()) {
            return Err(ClaimError::Misaligned);
        }
        if self.env.fault(FAULT_CLAIM) {
            return Err(ClaimError::InUse(extent.base()));
        }
        self.isolate(cx, arena, extent)?;
        self.drain_everywhere(cx);
        let result = self.empty(cx, arena, extent, migrate);
        let _pin = cx.pin();
        let taken = self.with_node(arena.node, |lists| {
            let result = result.and_then(|()| self.all_free(arena, extent));
            if result.is_ok() {
                self.take_free(lists, arena, extent);
            }
            self.unisolate(lists, arena, extent);
            result
        });
        taken.unwrap_or(Err(ClaimError::NotManaged))?;
        // SAFETY: as in `claim_exact`.
        Ok(unsafe { Dirty::assume_owned(extent) })
    }

    /// Step 1.
    fn isolate<P: Cpu>(&self, cx: &CpuCx<'_, P>, arena: &Arena<'m>, extent: Extent) -> Result<(), ClaimError> {
        let _pin = cx.pin();
        let result = self.with_node(arena.node, |lists| {
            if self.any_isolated(arena, extent) {
                return Err(ClaimError::Contended);
            }
            // Free blocks that reach beyond the range are divided at its ends.
            for end in [extent.base(), Pfn::new(extent.end().number() - 1)] {
                let (head, order) = arena.block_of(end);
                let whole = Order::new(order).map(|order| Extent::block(head, order));
                if let Ok(whole) = whole
                    && self.is_free(arena, head, order)
                    && !extent.covers(whole)
                {
                    self.remove_block(lists, arena, head, order);
                    let inside = whole.intersection(extent);
                    self.cut_ends(arena, inside);
                    let before = inside.base().number() - head.number();
                    let outside = [whole.slice(0, before), whole.slice(before + inside.pages(), whole.pages())];
                    // Marked before it goes back, so that it does not merge with its old neighbours again.
                    self.mark(arena, inside, true);
                    self.free_around_isolation(lists, arena, inside, Content::AsMapped);
                    for part in outside {
                        self.free_chunks(lists, arena, part, Content::AsMapped);
                    }
                }
            }
            let mut at = extent.base().number();
            while at < extent.end().number() {
                let (head, order) = arena.block_of(Pfn::new(at));
                let Ok(order) = Order::new(order) else { break };
                let whole = Extent::block(head, order);
                let block = whole.intersection(extent);
                if order.get() < BLOCK_ORDER {
                    at = self.mark_group(lists, arena, Pfn::new(at), true);
                } else if self.is_free(arena, head, order.get()) {
                    let list = self.remove_block(lists, arena, head, order.get());
                    self.mark(arena, block, true);
                    self.free_around_isolation(lists, arena, whole, content_of(list));
                    at = whole.end().number();
                } else {
                    self.mark(arena, block, true);
                    at = whole.end().number();
                }
            }
            Ok(())
        });
        result.unwrap_or(Err(ClaimError::NotManaged))
    }

    /// Marks a group of small blocks, or takes the mark off: its free blocks stay free, as blocks of another kind. Returns
    /// the first frame after it.
    fn mark_group(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, isolated: bool) -> u64 {
        let group = Extent::block(Pfn::new(pfn.number() >> BLOCK_ORDER << BLOCK_ORDER), crate::arena::BLOCK);
        let group = group.intersection(arena.extent);
        let free = |(pfn, order): &(Pfn, u32)| self.is_free(arena, *pfn, *order);
        for (pfn, order) in self.blocks(arena, group).filter(free) {
            lists.remove(arena, pfn, order);
        }
        self.mark(arena, group, isolated);
        for (pfn, order) in self.blocks(arena, group).filter(free) {
            let mobility = arena.block(pfn).mobility();
            // What was known is forgotten while a block is isolated.
            let list = if isolated { List::Isolated } else { List::Small(mobility, Known::Dirty) };
            lists.push(arena, pfn, order, list);
        }
        group.end().number()
    }

    fn mark(&self, arena: &Arena<'m>, extent: Extent, isolated: bool) {
        for pfn in self.blocks_2m(extent) {
            let bits = &arena.region(pfn).isolated;
            if bits.get(in_region(pfn)) != isolated {
                bits.put_locked(in_region(pfn), isolated);
                // Relaxed: see `is_careful`.
                match isolated {
                    true => self.careful.fetch_add(1, Ordering::Relaxed),
                    false => self.careful.fetch_sub(1, Ordering::Relaxed),
                };
            }
        }
    }

    /// Step 2. Waits for the others within reason: a CPU that is idle and never serves keeps what it has.
    fn drain_everywhere<P: Cpu>(&self, cx: &mut CpuCx<'_, P>) {
        for cpu in self.cpus {
            cpu.mailbox.post();
        }
        for _ in 0..PATIENCE {
            // Again and again: two claimers wait for each other's caches.
            self.serve(cx);
            // An empty cache has nothing to give, even if its owner has not answered; what its owner frees from now on
            // may still go there, which is why steps 3 and 4 look at the blocks and not at the answers.
            if self.cpus.iter().all(|cpu| !cpu.mailbox.pending() || cpu.pages() == 0) {
                return;
            }
            if cx.platform().may_sleep() {
                cx.reschedule();
            } else {
                hugemm_base::sync::spin_loop();
            }
        }
    }

    /// Step 3.
    fn empty<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        arena: &Arena<'m>,
        extent: Extent,
        migrate: &mut impl Migrate,
    ) -> Result<(), ClaimError> {
        let mut at = extent.base().number();
        let mut attempts = 0;
        while at < extent.end().number() {
            // A look without the lock, at blocks that may be changing: only a hint of what to migrate. Step 4 decides.
            let (head, order) = arena.block_of(Pfn::new(at));
            let next = head.number() + (1 << order);
            let Ok(whole) = Order::new(order).map(|order| Extent::block(head, order)) else { break };
            let free = {
                let _pin = cx.pin();
                self.with_node(arena.node, |_| self.is_free(arena, head, order)).unwrap_or(false)
            };
            if free || self.next_refused(arena, whole).is_some() && attempts != 0 {
                if !free {
                    return Err(ClaimError::InUse(head));
                }
                (at, attempts) = (next.max(at + 1), 0);
                continue;
            }
            attempts += 1;
            if attempts > ATTEMPTS || !migrate.migrate(whole) {
                return Err(ClaimError::InUse(head));
            }
            // What was let go of may be in a cache that was filled before its CPU saw the marks.
            self.drain_everywhere(cx);
            if cx.platform().may_sleep() {
                cx.reschedule();
            }
        }
        Ok(())
    }

    /// Step 4's other half: the marks go, and what is free becomes ordinary again.
    fn unisolate(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent) {
        let mut at = extent.base().number();
        while at < extent.end().number() {
            let (head, order) = arena.block_of(Pfn::new(at));
            let Ok(order) = Order::new(order) else { return };
            let whole = Extent::block(head, order);
            if order.get() < BLOCK_ORDER {
                at = self.mark_group(lists, arena, Pfn::new(at), false);
                continue;
            }
            if self.is_free(arena, head, order.get()) {
                self.remove_block(lists, arena, head, order.get());
                self.mark(arena, whole, false);
                self.free_block(lists, arena, head, order.get(), Content::AsMapped);
            } else {
                self.mark(arena, whole.intersection(extent), false);
            }
            at = whole.end().number();
        }
    }
}
