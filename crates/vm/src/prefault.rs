//! Filling a range, or an object that is mapped nowhere, before anybody touches it.
//!
//! The whole request decides how each page is cleared: 2 MiB out of 64 GiB are cleared past the cache, the same 2 MiB alone
//! are not. Any number of CPUs work on one [`Prefault`], each with pages of its own node; a piece is what one of them takes
//! at a time. What was done when it is cancelled or runs out of memory stays done.
//!
//! Pages of 4 KiB are made from 2 MiB blocks where there are any: one clear, one split, one table filled front to back.

mod space;

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::mapping::SharedRef;
use crate::phases::{Phase, Phases};
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::vm::Vm;
use crate::vma::Pattern;
use core::cell::RefCell;
use core::fmt;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Cancel, PAGE_BYTES, PAGE_SHIFT, PageSize, VirtAddr, VirtRange};
use hugemm_clear::ClearRequest;
use hugemm_frames::Placement;
use hugemm_paging::Lookup;

/// 4 KiB pages that a worker takes at a time, at least one page of the area: 16 MiB.
const PIECE: u64 = 1 << 12;

/// What is filled.
enum Target<'a, 'v, S: Setup> {
    AddressSpace(&'a AddressSpace<S>),
    Object(&'a SharedRef<'v, S>),
}

/// One request to fill a range, on which several CPUs may work.
pub struct Prefault<'a, 'v, 'm, S: Setup> {
    vm: &'v Vm<'m, S>,
    target: Target<'a, 'v, S>,
    /// In 4 KiB pages: of addresses, or of the object.
    first: u64,
    end: u64,
    /// Bytes of the request of which this is all or a part.
    total: u64,
    /// Pages are to be the space's own, for stores from outside.
    writable: bool,
    /// Which node an object's pages come from.
    from: Placement,
    next: AtomicU64,
    done: AtomicU64,
    /// A worker has met an error: the others stop.
    failed: AtomicU64,
}

impl<S: Setup> fmt::Debug for Prefault<'_, '_, '_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefault").field("first", &self.first).field("end", &self.end).finish_non_exhaustive()
    }
}

impl<'m, S: Setup> Vm<'m, S> {
    /// A request to map every page of `span`, which lies in areas throughout. `total` is the size in bytes of the whole
    /// request if this is a part of a larger one: it decides how pages are cleared. Nothing happens until CPUs
    /// [work](Prefault::work) on it.
    pub fn prefault<'a, 'v>(
        &'v self,
        space: &'a AddressSpace<S>,
        span: VirtRange,
        total: Option<u64>,
    ) -> Prefault<'a, 'v, 'm, S> {
        self.filling(Target::AddressSpace(space), span.first_page(), span.end_page(), total)
    }

    /// A request to make pages `from` to `to` (in 4 KiB pages, aligned to the object's) of a shared object exist, mapped or
    /// not; of what it has.
    pub fn prefault_shared<'a, 'v>(
        &'v self,
        object: &'a SharedRef<'v, S>,
        from: u64,
        to: u64,
    ) -> Prefault<'a, 'v, 'm, S> {
        self.filling(Target::Object(object), from, to.min(object.pages().max(from)), None)
    }

    fn filling<'a, 'v>(
        &'v self,
        target: Target<'a, 'v, S>,
        first: u64,
        end: u64,
        total: Option<u64>,
    ) -> Prefault<'a, 'v, 'm, S> {
        let own = end.saturating_sub(first) << PAGE_SHIFT;
        Prefault {
            vm: self,
            target,
            first,
            end,
            total: total.unwrap_or(own).max(own),
            writable: false,
            from: Placement::Local,
            next: AtomicU64::new(first),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }
}

impl<'m, S: Setup> Prefault<'_, '_, 'm, S> {
    /// The same for pages that somebody will store to behind the page table's back, as devices do.
    pub(crate) fn writable(mut self) -> Self {
        self.writable = true;
        self
    }

    /// Where an object's pages come from: each worker's own node if nothing is said. A space's areas say so themselves.
    pub fn from(mut self, from: Placement) -> Self {
        self.from = from;
        self
    }

    /// 4 KiB pages filled so far by all workers, those found mapped included.
    pub fn done(&self) -> u64 {
        // Relaxed: a statistic.
        self.done.load(Ordering::Relaxed)
    }

    /// Works until nothing is left, or somebody stops: this CPU by `cancel`, any by an error, which the one that met it
    /// returns. May be called on any number of CPUs at once. Passes reschedule points; may sleep.
    ///
    /// # Errors
    ///
    /// [`Cancelled`](VmError::Cancelled), and whatever a [fault](Vm::fault) at one of the pages may meet. What was
    /// entered stays. [`OutOfBounds`](VmError::OutOfBounds) if an object's pages end before they begin.
    pub fn work(&self, cx: &mut Cx<'_, S>, cancel: &impl Cancel) -> Result<(), VmError> {
        self.work_observed(cx, cancel, &())
    }

    /// [`work`](Prefault::work), telling `phases` what it is doing.
    ///
    /// # Errors
    ///
    /// As [`work`](Prefault::work).
    pub fn work_observed(&self, cx: &mut Cx<'_, S>, cancel: &impl Cancel, phases: &impl Phases) -> Result<(), VmError> {
        match &self.target {
            Target::AddressSpace(space) => self.vm.check_own(space)?,
            Target::Object(object) => self.vm.check_own_object(object)?,
        }
        if self.end < self.first {
            return Err(VmError::OutOfBounds { at: VirtAddr::new(self.first.saturating_mul(PAGE_BYTES)) });
        }
        if self.end == self.first {
            // No piece is taken of nothing: the next may not be a number any more.
            return Ok(());
        }
        loop {
            if cancel.requested() {
                return Err(VmError::Cancelled);
            }
            // Relaxed: nothing is published by it; others look at it between pieces.
            if self.failed.load(Ordering::Relaxed) != 0 {
                return Ok(());
            }
            // Relaxed: only the number counts, and a read-modify-write never gives a piece twice.
            let from = self.next.fetch_add(PIECE, Ordering::Relaxed);
            if from >= self.end {
                return Ok(());
            }
            // Pieces end at multiples of their size, so that large pages belong to one: the one they begin in.
            let filled = match &self.target {
                Target::AddressSpace(space) => self.fill_space(cx, space, from, cancel, phases),
                Target::Object(object) => self.fill_object(cx, object, from, cancel, phases),
            };
            if let Err(error) = filled {
                self.failed.store(1, Ordering::Relaxed);
                return Err(error);
            }
            phases.enter(Phase::Other);
            cx.resched_if_may_sleep();
        }
    }

    /// Of the pages of `size` in `first..end`, those that begin in the piece at `from`.
    fn own_part(&self, from: u64, first: u64, end: u64, size: PageSize) -> (u64, u64) {
        // The first piece has the page that the request begins in, wherever that begins.
        let begin = |at: u64| if at <= first.max(self.first) { first } else { at.next_multiple_of(size.pages()) };
        let to = from + PIECE;
        (begin(from), if to >= self.end { end } else { begin(to).min(end) })
    }

    fn fill_object(
        &self,
        cx: &mut Cx<'_, S>,
        object: &SharedRef<'_, S>,
        from: u64,
        cancel: &impl Cancel,
        phases: &impl Phases,
    ) -> Result<(), VmError> {
        let object = object.object();
        let Some(index) = &object.index else { return Err(VmError::OtherKind) };
        let size = index.page;
        let at = VirtAddr::new(self.first << PAGE_SHIFT);
        if !self.first.is_multiple_of(size.pages()) || !self.end.is_multiple_of(size.pages()) {
            return Err(VmError::Misaligned { at });
        }
        let (mut next, end) = self.own_part(from, self.first, self.end, size);
        let clear = ClearRequest::bulk(self.total);
        let pooled = index.pooled;
        let pattern = Pattern::Normal;
        let want = Want { page: size, pooled, reserved: pooled, from: self.from, clear, touched: None, pattern };
        while next < end {
            if cancel.requested() {
                return Err(VmError::Cancelled);
            }
            let there = {
                let task = RefCell::new(&mut *cx);
                index.table.shared(self.vm.tables(&task)).lookup(VirtAddr::new(next << PAGE_SHIFT))
            };
            let filled = match there {
                Lookup::Absent | Lookup::Owner(_) => self.vm.supply_index(cx, object, next, &want, phases)?,
                _ => true,
            };
            if !filled {
                // Somebody is at the page, or holds what the pool has promised for it.
                self.vm.cond_resched(cx);
                continue;
            }
            self.done.fetch_add(size.pages(), Ordering::Relaxed);
            next += size.pages();
        }
        Ok(())
    }
}
