//! The manager: homes for addresses, and the records of areas.
//!
//! Small areas come from one of eight homes, which is its CPU's unless there are more: eight CPUs share nothing there. A home takes
//! blocks of addresses from the home of all, where large areas come from too, and gives those that are free again back, but one.
//! The first page of a block, and of the range, is never used, and each area's addresses end with a guard page; so there is one on both
//! sides of each.

use crate::addresses::{Addresses, Node, Short, Spare, Taken, Use};
use crate::area::{Area, Request};
use crate::error::KvaError;
use crate::free::{Debt, ENTRIES, Record, Waiting};
use crate::place::AreaKind;
use crate::setup::{Cx, KvaParts, KvaSetup};
use core::fmt;
use core::ptr::NonNull;
use hugemm_base::lock::PinnedLock;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{PAGE_SHIFT, PageSize, VirtRange};
use hugemm_frames::{Env, Slab};
use hugemm_paging::{Editing, Flags, FrameTables, ShootdownBatch};

/// Homes of small areas.
const SHARES: usize = 8;

/// Pages of a block of addresses: 4 MiB.
const BLOCK: u64 = 1024;

/// Pages of a small area at most, guards included.
const SMALL: u64 = 66;

type LockOf<S> = <<S as KvaSetup>::Env as Env>::Lock;

/// On cache lines of its own.
#[repr(align(64))]
pub(crate) struct Home<L, T>(pub(crate) PinnedLock<L, T>);

/// Kernel virtual areas in one range of addresses. See the [crate](crate).
pub struct Kva<'m, S: KvaSetup> {
    pub(crate) parts: KvaParts<'m, S>,
    pub(crate) range: VirtRange,
    pub(crate) records: Slab<LockOf<S>>,
    pub(crate) homes: [Home<LockOf<S>, Addresses<Debt<'m>>>; SHARES + 1],
    pub(crate) waiting: Home<LockOf<S>, Waiting<'m, S>>,
    /// Batches that have been given back.
    pub(crate) given_back: AtomicU64,
}

impl<S: KvaSetup> fmt::Debug for Kva<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kva").field("range", &self.range).finish_non_exhaustive()
    }
}

// SAFETY: what is not shared by itself is behind locks: records and what they owe, which may be sent.
unsafe impl<S: KvaSetup> Sync for Kva<'_, S> where LockOf<S>: Send + Sync {}
// SAFETY: as above.
unsafe impl<S: KvaSetup> Send for Kva<'_, S> where LockOf<S>: Send + Sync {}

impl<'m, S: KvaSetup> Kva<'m, S> {
    /// The home of all.
    pub(crate) const ALL: usize = SHARES;

    /// A manager of the addresses of `range`, in which nothing is mapped. One record is allocated. A task; pins.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](KvaError::OutOfBounds) if the table does not translate all of the range, [`Foreign`](KvaError::Foreign) if the
    /// space is not the table's, [`Empty`](KvaError::Empty) if it has less than three pages, [`NoMemory`](KvaError::NoMemory).
    ///
    /// # Safety
    ///
    /// * Nobody else maps or unmaps anything in the range, as long as this or anything of it is used.
    /// * Every CPU that uses addresses of the table's has joined `space`.
    /// * The platform's [`PhysMap`](hugemm_base::PhysMap) is a direct map that has every frame of `frames`, whose windows stay; so it
    ///   is for all contexts that its methods are given.
    pub unsafe fn new(cx: &Cx<'_, S>, parts: KvaParts<'m, S>, range: VirtRange) -> Result<Self, KvaError> {
        let at = range.start();
        if !parts.table.bounds().covers(range) {
            return Err(KvaError::OutOfBounds { at });
        }
        if parts.space.root() != parts.table.root().start() {
            return Err(KvaError::Foreign { at });
        }
        let records = Slab::of::<Record<'m>>().filter(|_| range.pages() >= 3).ok_or(KvaError::Empty)?;
        let homes = core::array::from_fn(|home| {
            Home(PinnedLock::new(Addresses::new(if home == Self::ALL { 0 } else { BLOCK })))
        });
        let waiting = Home(PinnedLock::new(Waiting::new(parts.space)));
        let kva = Kva { parts, range, records, homes, waiting, given_back: AtomicU64::new(0) };
        let all = kva.record(cx)?;
        // SAFETY: memory for a record, which nobody else has.
        unsafe {
            all.write(Node::new(range.first_page() + 1, range.pages() - 1));
            cx.pinned(|pin| kva.homes[Self::ALL].0.lock(pin).add(all));
        }
        Ok(kva)
    }

    /// Its addresses.
    pub fn range(&self) -> VirtRange {
        self.range
    }

    /// Memory for a record.
    fn record(&self, cx: &Cx<'_, S>) -> Result<NonNull<Record<'m>>, KvaError> {
        // SAFETY: the slab is used with these frames and this platform's map only, whose windows stay by the contract of `new`.
        let memory = unsafe { self.records.alloc(self.parts.frames, cx, cx.platform()) };
        memory.map(NonNull::cast).map_err(|_| KvaError::NoMemory)
    }

    /// Gives the memory of records back.
    pub(crate) fn forget(&self, cx: &Cx<'_, S>, records: impl IntoIterator<Item = Option<NonNull<Record<'m>>>>) {
        for record in records.into_iter().flatten() {
            // SAFETY: it came from the slab; it is on no tree, and what it owed has been paid.
            unsafe { self.records.free(self.parts.frames, cx, cx.platform(), record.cast()) };
        }
    }

    /// The task's way to tables.
    pub(crate) fn tables<'a, 'p>(&self, cx: &'a Cx<'p, S>) -> FrameTables<'a, 'p, 'm, S::Platform, S::Env>
    where
        'm: 'a,
    {
        // SAFETY: the promise made to `new`.
        unsafe { FrameTables::new(self.parts.frames, cx) }
    }

    /// Takes addresses for an area.
    pub(crate) fn take(&self, cx: &Cx<'_, S>, request: &Request, kind: AreaKind) -> Result<Area, KvaError> {
        let mut spare = [None; 2];
        let taken = self.take_with(cx, request, kind, &mut spare);
        self.forget(cx, spare);
        taken
    }

    fn take_with(
        &self,
        cx: &Cx<'_, S>,
        request: &Request,
        kind: AreaKind,
        spare: &mut Spare<Debt<'m>>,
    ) -> Result<Area, KvaError> {
        let shape = request.shape(kind, self.range)?;
        let mut home = match shape.pages <= SMALL && shape.align <= SMALL {
            true => cx.pinned(|pin| pin.cpu().get() as usize % SHARES),
            false => Self::ALL,
        };
        let mut behind = None;
        loop {
            let taken = cx.pinned(|pin| {
                let (size, usage) = ((shape.pages, shape.align), |first| shape.usage(first));
                self.homes[home].0.lock(pin).take(size, behind.take(), spare, usage)
            });
            match taken {
                Ok(record) => return Ok(Area::new(record, home as u8, &shape)),
                Err(Short::Nodes(count)) => self.bring(cx, spare, count)?,
                Err(Short::Behind(node)) => behind = Some(node),
                Err(Short::Space) if home != Self::ALL => match self.widen(cx, home as u8, spare) {
                    // There is no block left, but there may be room between those that others have.
                    Err(KvaError::NoSpace { .. }) => home = Self::ALL,
                    widened => widened?,
                },
                Err(Short::Space) => return Err(KvaError::NoSpace { pages: shape.pages }),
            }
        }
    }

    fn bring(&self, cx: &Cx<'_, S>, spare: &mut Spare<Debt<'m>>, count: usize) -> Result<(), KvaError> {
        for place in spare.iter_mut().take(count).filter(|place| place.is_none()) {
            *place = Some(self.record(cx)?);
        }
        Ok(())
    }

    /// Gives a home one more block.
    fn widen(&self, cx: &Cx<'_, S>, home: u8, spare: &mut Spare<Debt<'m>>) -> Result<(), KvaError> {
        let own = self.record(cx)?;
        let mut behind = None;
        let block = loop {
            let (size, usage) = ((BLOCK, BLOCK), |_| Use::Block(home));
            match cx.pinned(|pin| self.homes[Self::ALL].0.lock(pin).take(size, behind.take(), spare, usage)) {
                Ok(block) => break Ok(block),
                Err(Short::Space) => break Err(KvaError::NoSpace { pages: BLOCK }),
                Err(Short::Behind(node)) => behind = Some(node),
                Err(Short::Nodes(count)) => {
                    if let Err(error) = self.bring(cx, spare, count) {
                        break Err(error);
                    }
                }
            }
        };
        match block {
            Ok(block) => {
                // SAFETY: both are records: one on the tree, where nobody takes a home's block away, and one of our own.
                unsafe {
                    own.write(Node::new(block.as_ref().first() + 1, BLOCK - 1));
                    cx.pinned(|pin| self.homes[usize::from(home)].0.lock(pin).add(own));
                }
                Ok(())
            }
            Err(error) => {
                self.forget(cx, [Some(own)]);
                Err(error)
            }
        }
    }

    /// Makes addresses free, and the record.
    ///
    /// # Safety
    ///
    /// The record is in that home and not free; no CPU translates any of its addresses, or may remember that.
    pub(crate) unsafe fn give(&self, cx: &Cx<'_, S>, home: u8, record: NonNull<Record<'m>>) {
        // SAFETY: the caller's promise.
        let left = cx.pinned(|pin| unsafe { self.homes[usize::from(home)].0.lock(pin).give(record) });
        if let Some(block) = left[2] {
            self.give_block(cx, block);
        }
        self.forget(cx, left);
    }

    /// Gives the block that a home's node was back to the home of all. The record of the node stays the caller's.
    fn give_block(&self, cx: &Cx<'_, S>, node: NonNull<Record<'m>>) {
        // SAFETY: it is off the home's tree; nobody else has it.
        let first = unsafe { node.as_ref() }.first() - 1;
        let left = cx.pinned(|pin| {
            let mut all = self.homes[Self::ALL].0.lock(pin);
            let block = all.at(first).filter(|node| matches!(node.usage(), Use::Block(_))).map(NonNull::from);
            // SAFETY: it is in the home of all, and nobody's now.
            block.map(|block| unsafe { all.give(block) })
        });
        self.forget(cx, left.into_iter().flatten());
    }

    /// Runs `f` with the record of an area, if it is one of this manager's, under its home's lock.
    pub(crate) fn with_record<R>(
        &self,
        cx: &Cx<'_, S>,
        area: &Area,
        f: impl FnOnce(&Record<'m>, Taken) -> R,
    ) -> Result<R, KvaError> {
        let foreign = KvaError::Foreign { at: area.range().start() };
        let home = self.homes.get(usize::from(area.home())).ok_or(foreign)?;
        cx.pinned(|pin| {
            let addresses = home.0.lock(pin);
            let record = addresses.at(area.first()).ok_or(foreign)?;
            let taken = area.taken(record).ok_or(foreign)?;
            Ok(f(record, taken))
        })
    }

    /// [Flushes](Kva::flush), and gives back what is kept for the next area: blocks of addresses, tables that map nothing, frames of
    /// records. Whoever takes a large area meanwhile may be refused addresses that are there. Context as of [`flush`](Kva::flush); a
    /// flush for each run of free addresses that has tables.
    pub fn trim(&self, cx: &mut Cx<'_, S>) {
        self.flush(cx);
        for home in &self.homes[..Self::ALL] {
            while let Some(block) = cx.pinned(|pin| home.0.lock(pin).take_block()) {
                self.give_block(cx, block);
                self.forget(cx, [Some(block)]);
                cx.resched_if_may_sleep();
            }
        }
        (0..self.homes.len()).for_each(|home| self.trim_home(cx, home));
        // SAFETY: the slab is used with these frames and this platform's map only.
        unsafe { self.records.trim(self.parts.frames, cx, cx.platform()) };
    }

    /// Takes the tables of a home's free addresses: of all, or between the areas of its blocks.
    fn trim_home(&self, cx: &mut Cx<'_, S>, home: usize) {
        let mut before = (u64::MAX, u64::MAX);
        while let Some(held) = cx.pinned(|pin| self.homes[home].0.lock(pin).hold(before)) {
            // SAFETY: it is held, so nobody else changes it.
            let (first, end) = unsafe { (held.as_ref().first(), held.as_ref().end()) };
            before = (end - first, first);
            // The page that is never used, of the range or a block, goes with what is behind it.
            let unused = match home {
                Self::ALL => first == self.range.first_page() + 1,
                _ => (first - 1).is_multiple_of(BLOCK),
            };
            let first = first - u64::from(unused);
            if let Ok(span) = VirtRange::from_pages(first, end - first)
                && span.pages() >= PageSize::Size2M.pages()
            {
                self.take_tables(cx, span);
            }
            // SAFETY: it is the home's, held, and nothing is mapped there.
            unsafe { self.give(cx, home as u8, held) };
            cx.resched_if_may_sleep();
        }
    }

    /// Takes the tables of a span in which nothing is mapped, nor will be until this returns.
    fn take_tables(&self, cx: &mut Cx<'_, S>, span: VirtRange) {
        let unhooked = {
            let mut table = self.parts.table.exclusive(self.tables(cx));
            // SAFETY: the caller has the addresses, and the harvest is below.
            unsafe { table.detach_apart(span, Editing::LIVE) }
        };
        let mut batch = ShootdownBatch::new(self.parts.space);
        let debt = unhooked.ok().and_then(|unhooked| batch.detached(unhooked).ok().flatten());
        let Some(debt) = debt else { return };
        let receipt = batch.flush(self.parts.shootdown, cx, &self.parts.shootdown_policy);
        let mut rest = debt.release(&receipt).ok();
        while let Some(detached) = rest {
            let mut table = self.parts.table.exclusive(self.tables(cx));
            // It is this table's, so it is not refused.
            let done = table.harvest_some(detached, ENTRIES, Flags::NONE, |_| (), |_, _, _| ());
            drop(table);
            rest = done.ok().and_then(|(_, rest)| rest);
            cx.resched_if_may_sleep();
        }
    }
}

/// Bytes as pages, rounded up.
pub(crate) const fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(1 << PAGE_SHIFT)
}
