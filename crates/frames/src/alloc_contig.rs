//! Particular frames, not just any: a *claim* is such a call while it is at work.
//!
//! * [`take_range`](Frames::take_range) takes an extent, aligned or not, if all of it is free in its node right
//!   now. One lock round.
//! * [`alloc_contig_range`](Frames::alloc_contig_range) empties a 2 MiB-aligned range and takes it, in four steps:
//!   1. **Isolate.** Under the lock every 2 MiB block of the range is marked; its free blocks are found no more but
//!      stay free. From here on nothing is allocated from the range.
//!   2. **Drain.** Every CPU is asked for its cache; this one's is drained at once. A free that **races** with this
//!      lands in the node in any case: one that began before its CPU served the request is in the cache that is
//!      then drained; one that begins after it sees the mark and bypasses the cache. It is re-checked under the lock, so
//!      it becomes an isolated free block, which the claim finds.
//!   3. **Migrate.** Each block of the range that is in use is offered to the caller's `migrate`, with nothing locked.
//!      What it empties comes back as in step 2.
//!   4. **Take or roll back.** If everything is free it is taken, otherwise the marks go and the free blocks are
//!      found again: nothing is lost, and the next free or allocation sees ordinary blocks.
//!
//! Two claims never overlap: the second finds the marks and fails.

use crate::arena::{Arena, BLOCK, BLOCK_ORDER, in_block, in_region};
use crate::bits::{one_copy, ones};
use crate::blockmap::{Pages, Position, SPAN, spans};
use crate::drain::Due;
use crate::frames::{Env, Frames};
use crate::free2m::{pages, take_word};
use crate::freelist::FreeLists;
use crate::node::Content;
use core::cell::Cell;
use core::fmt;
use hugemm_base::inject::FaultPoint;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuPin, Dirty, Extent, NodeId, Order, Pfn};

/// Where every claim can be made to fail.
pub const FAULT_CLAIM: FaultPoint = FaultPoint("frames.claim");

/// Why a range could not be claimed. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocContigError {
    /// Empty, or not in one arena.
    NotManaged,
    /// Not aligned to 2 MiB.
    Misaligned,
    /// Another claim is at work in the range.
    Contended,
    /// This frame is in use (or cached by a CPU that did not answer, reserved, or poisoned) and was not migrated.
    InUse(Pfn),
}

impl fmt::Display for AllocContigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AllocContigError::NotManaged => f.write_str("the range is empty or not inside one arena"),
            AllocContigError::Misaligned => {
                f.write_str("the range is not aligned to 2 MiB; align it or use take_range")
            }
            AllocContigError::Contended => f.write_str("another claim is at work in the range; try again later"),
            AllocContigError::InUse(pfn) => write!(f, "frame {pfn} is in use and was not migrated"),
        }
    }
}

impl core::error::Error for AllocContigError {}

/// Moves the content of frames elsewhere and lets go of them.
pub trait Migrate<P: Cpu> {
    /// Tries to empty the block; true if it may have become free. Called with nothing locked, unpinned; may sleep if the
    /// claimer may.
    fn migrate(&mut self, cx: &mut CpuCx<'_, P>, block: Extent) -> bool;
}

/// Moves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMigration;

impl<P: Cpu> Migrate<P> for NoMigration {
    fn migrate(&mut self, _cx: &mut CpuCx<'_, P>, _block: Extent) -> bool {
        false
    }
}

impl<P: Cpu, F: FnMut(&mut CpuCx<'_, P>, Extent) -> bool> Migrate<P> for F {
    fn migrate(&mut self, cx: &mut CpuCx<'_, P>, block: Extent) -> bool {
        self(cx, block)
    }
}

/// How often a claim looks at a block that does not become free before it gives up.
const ATTEMPTS: u32 = 8;

/// How often a claim looks whether another CPU has served its request, before it goes on without.
const PATIENCE: u32 = 10_000;

/// A claim at work. What it has isolated is found again when it ends, also if the caller's `migrate` or the platform unwinds.
struct Claim<'a, 'm, 'p, E: Env, P: Cpu> {
    frames: &'a Frames<'m, E>,
    cx: &'a mut CpuCx<'p, P>,
    node: NodeId,
    extent: Extent,
    /// The arena, while it has marks, which keep it from going. Written under the node's lock.
    isolated: Cell<Option<&'m Arena<'m>>>,
}

impl<'m, E: Env, P: Cpu> Claim<'_, 'm, '_, E, P> {
    /// Step 1.
    fn isolate(&self) -> Result<&'m Arena<'m>, AllocContigError> {
        let result = self.locked(|lists| {
            let arena = self.frames.arena_of(lists, self.extent)?;
            if self.frames.any_isolated(arena, self.extent) {
                return Err(AllocContigError::Contended);
            }
            self.frames.mark(lists, arena, self.extent, true);
            self.isolated.set(Some(arena));
            Ok(arena)
        });
        result.unwrap_or(Err(AllocContigError::NotManaged))
    }

    /// The marks go.
    fn unmark(&self, lists: &mut FreeLists) {
        if let Some(arena) = self.isolated.take() {
            self.frames.mark(lists, arena, self.extent, false);
        }
    }

    fn locked<R>(&self, f: impl FnOnce(&mut FreeLists) -> R) -> Option<R> {
        self.cx.pinned(|pin| self.frames.with_node(pin, self.node, f))
    }
}

impl<E: Env, P: Cpu> Drop for Claim<'_, '_, '_, E, P> {
    fn drop(&mut self) {
        if self.isolated.get().is_some() {
            self.locked(|lists| self.unmark(lists));
        }
    }
}

/// The parts of an extent that are not whole free 2 MiB, each inside 2 MiB: what lies at its ends, and between them what is divided or in use.
/// One step for all free ones of a word.
fn not_whole(arena: &Arena<'_>, extent: Extent) -> impl Iterator<Item = Extent> {
    let mut rest = extent;
    one_copy(core::iter::from_fn(move || {
        while !rest.is_empty() {
            let (first, at, left) = (rest.base(), in_region(rest.base()), in_block(rest.base()).left());
            let free = (arena.region(first).free.load(at.word()) >> at.bit()).trailing_ones();
            let whole = if left == SPAN { (rest.pages() >> BLOCK_ORDER).min(free.into()) } else { 0 };
            let (now, later) = rest.split_at(if whole == 0 { left as u64 } else { whole << BLOCK_ORDER });
            rest = later;
            if whole == 0 {
                return Some(now);
            }
        }
        None
    }))
}

impl<'m, E: Env> Frames<'m, E> {
    /// The node of an extent that is in one arena. Not more, since nobody says that any frame is his: the arena may go, until its
    /// node's lock is held.
    fn node_of_all(&self, extent: Extent) -> Result<NodeId, AllocContigError> {
        let place =
            self.arena_table().place_of(extent.base()).filter(|(all, _)| !extent.is_empty() && all.covers(extent));
        place.map(|(_, node)| node).ok_or(AllocContigError::NotManaged)
    }

    /// The arena that holds all of it, of a node whose lock the caller holds.
    fn arena_of(&self, lists: &FreeLists, extent: Extent) -> Result<&'m Arena<'m>, AllocContigError> {
        let arena = self.arena_table().of_any(extent.base(), lists).filter(|arena| arena.extent.covers(extent));
        arena.ok_or(AllocContigError::NotManaged)
    }

    /// Takes exactly these frames if all of them are free in the node. One lock round, a line per 2 MiB of which parts are free; and one
    /// for 64 words of pages that this CPU has on their way there. Other frames in CPUs' caches count as in use:
    /// [`alloc_contig_range`](Frames::alloc_contig_range) gets those too.
    ///
    /// # Errors
    ///
    /// [`InUse`](AllocContigError::InUse) names the first frame that is not free,
    /// [`NotManaged`](AllocContigError::NotManaged) is a range that is empty or not in one arena,
    /// [`Contended`](AllocContigError::Contended) one in which another call is at work. Nothing has changed.
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn take_range<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent) -> Result<Dirty, AllocContigError> {
        let node = self.node_of_all(extent)?;
        if self.env().fault(FAULT_CLAIM) {
            return Err(AllocContigError::InUse(extent.base()));
        }
        self.after_giving_back(cx, |pin| self.own(pin), Due::Leaving, |pin| self.take_pinned(pin, node, extent))?;
        #[cfg(feature = "debug")]
        self.note_taken(extent, Order::ZERO, core::panic::Location::caller());
        // SAFETY: the frames were free and have just been taken out, so they are the caller's.
        Ok(unsafe { Dirty::assume_owned(extent) })
    }

    /// The same in one lock round.
    fn take_pinned(&self, pin: CpuPin<'_>, node: NodeId, extent: Extent) -> Result<(), AllocContigError> {
        let taken = self.with_node(pin, node, |lists| {
            let arena = self.arena_of(lists, extent)?;
            self.all_free(arena, extent)?;
            if self.any_isolated(arena, extent) {
                return Err(AllocContigError::Contended);
            }
            self.take_free(lists, arena, extent);
            Ok(())
        });
        taken.unwrap_or(Err(AllocContigError::NotManaged))
    }

    /// The first frame of the extent that is not free.
    #[inline(never)]
    fn all_free(&self, arena: &Arena<'m>, extent: Extent) -> Result<(), AllocContigError> {
        for part in not_whole(arena, extent) {
            let pfn = part.base();
            if !arena.region(pfn).free.get(in_region(pfn)) {
                let free = &arena.block(pfn).free;
                let mut used =
                    spans(in_block(pfn), part.pages() as usize).map(|(at, bits)| (at, bits & !free.load(at)));
                if let Some((at, used)) = used.find(|(_, used)| *used != 0) {
                    let index = Position::<Pages>::in_word(at, used.trailing_zeros());
                    return Err(AllocContigError::InUse(index.pfn(pfn)));
                }
            }
        }
        Ok(())
    }

    /// Whether a claim is at work in any of the 2 MiB that an extent, which is not empty, touches.
    pub(crate) fn any_isolated(&self, arena: &Arena<'m>, extent: Extent) -> bool {
        let (first, end) = (extent.base().get() >> BLOCK_ORDER, ((extent.end().get() - 1) >> BLOCK_ORDER) + 1);
        arena.words_2m(first, end).any(|(region, _, at, bits)| region.isolated.load(at) & bits != 0)
    }

    /// Takes an extent that is free throughout; what its first and last blocks have beyond it goes back.
    #[inline(never)]
    fn take_free(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent) {
        for inside in not_whole(arena, extent) {
            let pfn = inside.base();
            if arena.region(pfn).free.get(in_region(pfn)) {
                // A part of free 2 MiB.
                let whole = Extent::block(Position::<Pages>::FIRST.pfn(pfn), BLOCK);
                let content = self.remove_block(lists, arena, whole.base(), BLOCK_ORDER);
                self.cut_ends(arena, inside);
                let before = inside.base().get() - whole.base().get();
                for part in [whole.slice(0, before), whole.slice(before + inside.pages(), whole.pages())] {
                    self.free_chunks(lists, arena, part, content);
                }
            } else {
                self.take_particular(lists, arena, pfn, inside.pages() as usize);
            }
        }
        for (region, first, at, bits) in arena.whole_2m(extent) {
            let free = region.free.load(at) & bits;
            take_word(lists, arena, first.max(extent.base()), free, true);
            lists.pages -= pages(free);
        }
    }

    /// Empties a 2 MiB-aligned range of one arena, with the help of `migrate`, and takes it. Needs a context that may
    /// sleep if it is to wait for other CPUs; without, it takes what it finds. The other CPUs must run, or
    /// [`serve`](Frames::serve), for their caches to be had. Three lock rounds and one per block that is to be emptied, each O(2 MiB
    /// blocks of the range).
    ///
    /// # Errors
    ///
    /// As [`take_range`](Frames::take_range), and [`Misaligned`](AllocContigError::Misaligned). What
    /// was free is free again; what was migrated stays where it is now.
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn alloc_contig_range<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        extent: Extent,
        migrate: &mut impl Migrate<P>,
    ) -> Result<Dirty, AllocContigError> {
        let node = self.node_of_all(extent)?;
        let aligned = |number: u64| number.is_multiple_of(SPAN as u64);
        if !aligned(extent.base().get()) || !aligned(extent.pages()) {
            return Err(AllocContigError::Misaligned);
        }
        if self.env().fault(FAULT_CLAIM) {
            return Err(AllocContigError::InUse(extent.base()));
        }
        let claim = Claim { frames: self, cx, node, extent, isolated: Cell::new(None) };
        let arena = claim.isolate()?;
        self.drain_everywhere(claim.cx);
        let result = self.empty(claim.cx, arena, extent, migrate);
        let taken = claim.locked(|lists| {
            let result = result.and_then(|()| self.all_free(arena, extent));
            if result.is_ok() {
                self.take_free(lists, arena, extent);
            }
            claim.unmark(lists);
            result
        });
        taken.unwrap_or(Err(AllocContigError::NotManaged))?;
        #[cfg(feature = "debug")]
        self.note_taken(extent, Order::ZERO, core::panic::Location::caller());
        // SAFETY: as in `take_range`.
        Ok(unsafe { Dirty::assume_owned(extent) })
    }

    /// Marks the 2 MiB blocks of an aligned extent, or takes the marks off. What is free of them stays free.
    fn mark(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent, isolated: bool) {
        for (region, first, at, bits) in arena.whole_2m(extent) {
            let mut groups = region.split.load(at) & bits;
            let changed = ones(bits & !groups);
            region.isolated.set_locked(at, bits & !groups, isolated);
            let free = pages(region.free.load(at) & bits);
            if isolated {
                lists.isolated += free;
                self.suspects().isolate(changed, true);
            } else {
                lists.isolated -= free;
                self.suspects().isolate(changed, false);
                self.hint(arena, first.max(extent.base()), Content::AsMapped);
            }
            while groups != 0 {
                let group = first.get() + (u64::from(groups.trailing_zeros()) << BLOCK_ORDER);
                self.mark_group(lists, arena, Pfn::new(group), isolated);
                groups &= groups - 1;
            }
        }
    }

    /// The same for a group of single pages.
    fn mark_group(&self, lists: &mut FreeLists, arena: &Arena<'m>, group: Pfn, isolated: bool) {
        arena.region(group).isolated.put_locked(in_region(group), isolated);
        let free = arena.block(group).count();
        if isolated {
            lists.isolated += free;
            self.suspects().isolate(1, true);
        } else {
            lists.isolated -= free;
            self.suspects().isolate(1, false);
            self.raise_all(arena, group);
        }
    }

    /// Step 2. Waits for the others within reason: a CPU that is idle and never serves keeps what it has.
    fn drain_everywhere<P: Cpu>(&self, cx: &mut CpuCx<'_, P>) {
        for cpu in self.caches() {
            cpu.mailbox.post();
        }
        for _ in 0..PATIENCE {
            // Again and again: two claimers wait for each other's caches.
            self.serve(cx);
            // An empty cache has nothing to give, even if its owner has not answered; what its owner frees from now on
            // may still go there, which is why steps 3 and 4 look at the blocks and not at the answers.
            if self.caches().iter().all(|cpu| !cpu.mailbox.pending() || cpu.pages() == 0) {
                return;
            }
            if cx.platform().may_sleep() {
                cx.cond_resched();
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
        migrate: &mut impl Migrate<P>,
    ) -> Result<(), AllocContigError> {
        let mut at = extent.base().get();
        let (mut attempts, mut drained) = (0, true);
        while at < extent.end().get() {
            // A look without the lock, at blocks that may be changing: only a hint of what to migrate. Step 4 decides.
            let rest = extent.slice(at - extent.base().get(), extent.pages());
            let used =
                cx.pinned(|pin| self.with_node(pin, arena.node, |_| self.all_free(arena, rest)).unwrap_or(Ok(())));
            let Err(AllocContigError::InUse(used)) = used else { return Ok(()) };
            if used.get() != at {
                (at, attempts, drained) = (used.get(), 0, true);
            }
            if !drained {
                // What was let go of may be in a cache that was filled before its CPU saw the marks.
                self.drain_everywhere(cx);
                drained = true;
                continue;
            }
            let (head, order) = arena.block_of(used);
            let Ok(whole) = Order::new(order).map(|order| Extent::block(head, order)) else { break };
            if self.next_refused(arena, whole).is_some() && attempts != 0 {
                return Err(AllocContigError::InUse(head));
            }
            attempts += 1;
            if attempts > ATTEMPTS || !migrate.migrate(cx, whole) {
                return Err(AllocContigError::InUse(head));
            }
            drained = false;
            cx.resched_if_may_sleep();
        }
        Ok(())
    }
}
