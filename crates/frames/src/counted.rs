//! Counted pages and folios: frames that several users share, freed by whoever lets go last.
//!
//! A [`Frozen`] block becomes counted with [`count`](Frames::count), and each reference to it is a [`FolioRef`] from then
//! on. Its references are on the head alone; tails are never counted. The protocol is in [`refs`](crate::refs).
//!
//! A handle that comes from another manager is given back: this one has no arena with its frames.

use crate::arena::{Arena, BLOCK_ORDER, in_block};
use crate::folio::{FolioRef, FolioRun};
use crate::frames::{Env, Frames};
use crate::frozen::{Frozen, FrozenRun};
use crate::refs::{self, LANES, Put, RefError, WideCounts};
use core::ptr::NonNull;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Order, Pfn};

impl<'m, E: Env> Frames<'m, E> {
    /// Makes a frozen block counted, with one reference. One atomic. Whatever the owner has written to the block or its
    /// descriptor is seen by whoever gets a reference later.
    ///
    /// # Errors
    ///
    /// The block, if it is another manager's.
    #[inline]
    pub fn count(&self, block: Frozen) -> Result<FolioRef, Frozen> {
        let pfn = block.pfn();
        let Some(arena) = self.arena(pfn) else { return Err(block) };
        let meta = arena.block(pfn);
        if block.log() >= BLOCK_ORDER {
            // Smaller blocks have the mobility of their group; for the handle that the last put makes again.
            meta.set_mobility(block.mobility());
        }
        let (word, lane) = meta.refs.word(in_block(pfn));
        refs::hold(word, lane);
        Ok(FolioRef::make(pfn))
    }

    /// Another reference. Any context.
    ///
    /// # Errors
    ///
    /// [`Saturated`](RefError::Saturated): [`widen`](Frames::widen) the block and try again.
    /// [`NotManaged`](RefError::NotManaged): it is another manager's.
    pub fn get(&self, folio: &FolioRef) -> Result<FolioRef, RefError> {
        // SAFETY: the handle is a reference that is not dropped as long as it is borrowed.
        unsafe { self.get_at(folio.pfn()) }
    }

    /// Another reference, where those that there are stand as numbers. Any context.
    ///
    /// # Errors
    ///
    /// As [`get`](Frames::get).
    ///
    /// # Safety
    ///
    /// `pfn` is the first frame of a counted folio that has a reference which nobody drops until this returns. The reference
    /// goes as [`try_get`](Frames::try_get) says.
    pub unsafe fn get_at(&self, pfn: Pfn) -> Result<FolioRef, RefError> {
        let block = self.arena(pfn).ok_or(RefError::NotManaged)?.block(pfn);
        let (word, lane) = block.refs.word(in_block(pfn));
        refs::get(word, lane, &block.refs.side(in_block(pfn), &block.wide))?;
        Ok(FolioRef::make(pfn))
    }

    /// A reference for whoever holds none and only believes that the frame is what it wants; `None` if it is not the head
    /// of anything counted, or just loses its last reference. Check then, and put it if the frame is something else by now.
    /// Any context, locks held or not.
    ///
    /// Cost: as [`get`](Frames::get), a barrier, and a look at the line again.
    ///
    /// # Errors
    ///
    /// [`NotManaged`](RefError::NotManaged) outside every arena, [`Saturated`](RefError::Saturated) as for
    /// [`get`](Frames::get).
    ///
    /// # Safety
    ///
    /// The reference goes the way in which the folio's owner lets its references go, because any may be the last: one to a
    /// page that an LRU lists is dropped under that list's lock, by whoever takes the page off with it. After a plain
    /// [`put`](Frames::put) the frame would be free and listed, and the list would write to its next owner's descriptor. So
    /// safe code cannot have one:
    ///
    /// ```compile_fail,E0133
    /// # use hugemm_frames::{Env, Frames};
    /// fn listed_and_free<E: Env>(frames: &Frames<'_, E>, mapped: hugemm_base::Pfn) {
    ///     let _ = frames.try_get(mapped); // error: call to unsafe function
    /// }
    /// ```
    pub unsafe fn try_get(&self, pfn: Pfn) -> Result<Option<FolioRef>, RefError> {
        let block = self.arena(pfn).ok_or(RefError::NotManaged)?.block(pfn);
        let (word, lane) = block.refs.word(in_block(pfn));
        let got = refs::try_get(word, lane, &block.refs.side(in_block(pfn), &block.wide))?;
        Ok(got.then(|| FolioRef::make(pfn)))
    }

    /// Drops a reference, and frees the page or folio if it was the last; says whether it was. Any
    /// context but NMI.
    ///
    /// Cost if it was: one atomic, 4 cache lines, and that of [`free`](Frames::free).
    ///
    /// # Errors
    ///
    /// The reference, if it is another manager's.
    #[inline]
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn put<P: Cpu>(&self, cx: &CpuCx<'_, P>, folio: FolioRef) -> Result<Put, FolioRef> {
        let Some(mine) = self.put_page(folio.pfn()) else { return self.put_any(cx, folio) };
        self.free(cx, mine);
        Ok(Put::Last)
    }

    /// Drops the only reference to a page of order 0 in the first arena; `None` says nothing. Calls nothing, so that there is
    /// nothing to save before the atomic, which would have to wait for that.
    #[inline]
    fn put_page(&self, pfn: Pfn) -> Option<Frozen> {
        let arena = self.arena_table().first().filter(|arena| arena.contains(pfn) && arena.is_page(pfn))?;
        let block = arena.block(pfn);
        let mine = Frozen::make(pfn, Order::ZERO, block.mobility(), false);
        let (word, lane) = block.refs.word(in_block(pfn));
        refs::put_only(word, lane).then_some(mine)
    }

    /// Drops a reference to anything.
    #[inline(never)]
    fn put_any<P: Cpu>(&self, cx: &CpuCx<'_, P>, folio: FolioRef) -> Result<Put, FolioRef> {
        Ok(match self.put_frozen(folio)? {
            Some(mine) => {
                self.free(cx, mine);
                Put::Last
            }
            None => Put::Kept,
        })
    }

    /// Drops a reference; the page or folio is the caller's, frozen, if it was the last. For pages that go back to a pool.
    ///
    /// # Errors
    ///
    /// The reference, if it is another manager's.
    #[inline]
    pub fn put_frozen(&self, folio: FolioRef) -> Result<Option<Frozen>, FolioRef> {
        match self.put_only(folio.pfn()) {
            Some(mine) => Ok(Some(mine)),
            None => self.put_shared(folio),
        }
    }

    /// Drops the only reference to a page or folio; `None` says nothing. What comes back fits in a register, and whatever
    /// others' references need is elsewhere: little enough to be part of the caller.
    #[inline]
    fn put_only(&self, pfn: Pfn) -> Option<Frozen> {
        let arena = self.arena(pfn)?;
        let block = arena.block(pfn);
        let (word, lane) = block.refs.word(in_block(pfn));
        // Looked up while the reference still holds the block together, and before the atomic, which would delay it. A
        // reference is on the head, so the block is where it says.
        let (_, order) = arena.block_of(pfn);
        let mine = Frozen::make(pfn, Order::new(order).unwrap_or(Order::ZERO), block.mobility(), false);
        refs::put_only(word, lane).then_some(mine)
    }

    /// Drops a reference to a page or folio that others may share.
    #[cold]
    #[inline(never)]
    fn put_shared(&self, folio: FolioRef) -> Result<Option<Frozen>, FolioRef> {
        let pfn = folio.pfn();
        let Some(arena) = self.arena(pfn) else { return Err(folio) };
        let block = arena.block(pfn);
        let (word, lane) = block.refs.word(in_block(pfn));
        let mine = self.block_at(arena, pfn);
        // The other error, that there is no reference to drop, contradicts the handle.
        let put = refs::put(word, lane, &block.refs.side(in_block(pfn), &block.wide)).map_err(|_| folio)?;
        Ok((put == Put::Last).then_some(mine))
    }

    /// How many references there are. A guess unless the caller holds the only one.
    pub fn references(&self, pfn: Pfn) -> u64 {
        self.arena(pfn).map_or(0, |arena| {
            let block = arena.block(pfn);
            block.refs.count(in_block(pfn), &block.wide)
        })
    }

    /// Freezes a page or folio to which the caller holds the only reference: it is the caller's then, and speculative
    /// gets fail.
    ///
    /// # Errors
    ///
    /// The reference, if there are others, or it is another manager's.
    pub fn freeze(&self, folio: FolioRef) -> Result<Frozen, FolioRef> {
        let pfn = folio.pfn();
        let Some(arena) = self.arena(pfn) else { return Err(folio) };
        let block = arena.block(pfn);
        let (word, lane) = block.refs.word(in_block(pfn));
        match refs::freeze(word, lane, &block.refs.side(in_block(pfn), &block.wide)) {
            true => Ok(self.block_at(arena, pfn)),
            false => Err(folio),
        }
    }

    /// A handle on the block that `pfn` heads. Whoever calls this owns the block, or forgets the handle.
    #[inline]
    fn block_at(&self, arena: &Arena<'m>, pfn: Pfn) -> Frozen {
        let (head, order) = arena.block_of(pfn);
        // The map has no larger orders.
        let order = Order::new(order).unwrap_or(Order::ZERO);
        Frozen::make(head, order, arena.block(head).mobility(), false)
    }

    /// Gives the 2 MiB block of `pfn` wide reference counters, which [`RefError::Saturated`] asks for. False if it has
    /// some already; the memory is the caller's again then.
    ///
    /// # Errors
    ///
    /// [`NotManaged`](RefError::NotManaged) outside every arena; the memory is the caller's again.
    ///
    /// # Safety
    ///
    /// `counts` is initialised to zero ([`WideCounts::new`]), and nobody else's for as long as the manager lives, or until
    /// [`remove`](Frames::remove) hands them back with the arena of `pfn`.
    pub unsafe fn widen(&self, pfn: Pfn, counts: NonNull<WideCounts>) -> Result<bool, RefError> {
        let arena = self.arena(pfn).ok_or(RefError::NotManaged)?;
        Ok(refs::install_wide(&arena.block(pfn).wide, counts.as_ptr()))
    }

    /// Splits a frozen block evenly into smaller ones. Their heads' descriptors are the caller's, their words unspecified, as
    /// after an allocation. Splitting into larger ones changes nothing. A line per 2 MiB, or one per 1 GiB down to 2 MiB.
    ///
    /// # Errors
    ///
    /// The block, if it is another manager's.
    pub fn split(&self, block: Frozen, to: Order) -> Result<FrozenRun, Frozen> {
        let (pfn, order, mobility) = (block.pfn(), block.order(), block.mobility());
        let Some(arena) = self.arena(pfn) else { return Err(block) };
        let to = to.min(order);
        arena.map_split_even(pfn, order.get(), to.get(), mobility);
        Ok(FrozenRun::make(block.extent(), to, mobility))
    }

    /// Makes every block of a run counted, with one reference each: one atomic per 32 frames for order 0, one per block
    /// otherwise. Any context.
    ///
    /// # Errors
    ///
    /// The run, if it is another manager's.
    pub fn count_run(&self, run: FrozenRun) -> Result<FolioRun, FrozenRun> {
        let (extent, order, mobility) = (run.extent(), run.order(), run.mobility());
        let Some(arena) = self.arena(extent.base()) else { return Err(run) };
        let (mut at, end) = (extent.base().get(), extent.end().get());
        while at < end {
            let pfn = Pfn::new(at);
            let meta = arena.block(pfn);
            let (word, lane) = meta.refs.word(in_block(pfn));
            if order == Order::ZERO {
                let count = u64::from(LANES as u32 - lane).min(end - at);
                refs::hold_lanes(word, u32::MAX >> (LANES as u64 - count) << lane);
                at += count;
            } else {
                if order.get() >= BLOCK_ORDER {
                    // As in `count`.
                    meta.set_mobility(mobility);
                }
                refs::hold(word, lane);
                at += order.pages();
            }
        }
        Ok(FolioRun::make(extent, order))
    }

    /// Splits a counted folio, to which the caller holds the only reference, into counted ones with one reference each.
    ///
    /// # Errors
    ///
    /// The reference, if there are others, or it is another manager's.
    pub fn split_counted(&self, folio: FolioRef, to: Order) -> Result<FolioRun, FolioRef> {
        let head = folio.pfn();
        let run = self.split(self.freeze(folio)?, to).ok().and_then(|run| self.count_run(run).ok());
        // Both know the block: it has just been frozen here.
        run.ok_or(FolioRef::make(head))
    }
}
