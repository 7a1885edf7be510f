//! Shootdowns: after page table entries have changed, no CPU may go on using what it remembers of them.
//!
//! # The protocol
//!
//! *Who is asked.* A [`TlbSpace`] has a mask of the CPUs that have it loaded, and a mask of those among them that are
//! lazy: they promised to use none of its addresses until they say so. Its [`FlushDomain`](hugemm_base::FlushDomain)
//! counts flushes; the count is the space's *generation*. Each CPU remembers, for every space of which it may hold
//! translations, the generation up to which these are right.
//!
//! *Issue.* The initiator stores its entries, then: full fence; count the generation; full fence; read the masks. A CPU
//! that joins sets its mask bit, then: full fence; read the generation; load the tables. A CPU that wakes from laziness
//! clears its lazy bit, then: full fence; read the generation. Of two CPUs that each write, fence, and read what the other
//! writes, at least one sees the other's write. So either the initiator asks the CPU, or the CPU sees the generation,
//! knows that it has missed a flush, and invalidates everything. The first fence of the initiator puts the entries before
//! the generation: who sees the generation, and invalidates, walks new entries. The generation is read before the tables
//! are loaded, because loading them is the invalidation; a flush that starts in between finds the mask bit, and its
//! request waits until the CPU has interrupts on.
//!
//! *Who is not asked.* A CPU that has switched away keeps what is tagged as the space's and catches up when it switches
//! back. A lazy CPU catches up when it wakes; but it still walks the tables, speculatively and at any time, so that a
//! flush after which tables are freed does ask it. When a space is retired, its lazy CPUs are made to let go of the
//! tables altogether.
//!
//! *Dispatch.* One request per initiator, in a slot of its own, and a bit in each target's inbox; see the file `ipi.rs`.
//! A target compares the request's generation with its own: an older one has been covered by a full invalidation
//! already; the next one is done as asked; past a gap (requests of two initiators that overtook each other, or a flush
//! for which it was lazy) everything is invalidated. Where an instruction invalidates on all CPUs, it takes the place of
//! dispatch and nobody is interrupted.
//!
//! *Sync.* The initiator waits for all acknowledgements, with interrupts on, and serves the requests of others meanwhile:
//! two CPUs that shoot at each other both get through. Hence a shootdown is never started with interrupts off, or under a
//! lock that somebody takes with interrupts off (debug builds assert it): its holder would wait for a CPU that waits for
//! the lock.
//!
//! *After.* The [`Flushed`] receipt releases what waited for the flush, under the conditions that it checks: same domain,
//! started after the change, addresses covered, and lazy CPUs included if tables are freed. An initiator that finds that
//! somebody else's flush of everything started after its own stores needs none of its own.
//!
//! # What it costs
//!
//! Per batch, whatever the number of pages: 3 full fences, 3 + 2 × targets atomics, one interrupt per target (sent
//! together), and on each CPU at most [`range_limit`](ShootdownPolicy::range_limit) invalidations or one of everything.

use crate::detach::{Detached, Unhooked};
use crate::ipi::Request;
use crate::stale::Stale;
use crate::tlb_shootdown::{TlbShootdown, same_machine};
use crate::tlb_space::{SpaceKind, TlbSpace};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, Flushed, Invalidation, PageSize, Pending, Quarantine, RangeSet, TlbFlush, TlbHw, VirtRange};

/// What was detached, behind the flush of its space.
pub type DetachedBehind<'s, K, Q> = Pending<Detached, TlbFlush<'s, K, Q>>;

/// How batches are flushed: values of one policy, so that the old ways can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShootdownPolicy {
    /// Pages up to which a batch is invalidated one by one; above, everything is. About where the refills of a full
    /// flush cost less than the instructions: x86-64 kernels use a few dozen.
    pub range_limit: u64,
    /// Pages that an operation on a range changes per batch: all of them, or 1 for a flush per page.
    pub pages_per_batch: u64,
}

impl ShootdownPolicy {
    /// One batch per operation, up to 33 pages by page.
    pub const BATCHED: ShootdownPolicy = ShootdownPolicy { range_limit: 33, pages_per_batch: u64::MAX };

    /// One batch per page: what unbatched code does.
    pub const PER_PAGE: ShootdownPolicy = ShootdownPolicy { range_limit: 33, pages_per_batch: 1 };

    /// A range of pages of `size` cut into the parts that make a batch each.
    pub fn batches(&self, range: VirtRange, size: PageSize) -> impl Iterator<Item = VirtRange> + use<> {
        let most = self.pages_per_batch.max(1).saturating_mul(size.pages());
        let mut from = range.first_page();
        core::iter::from_fn(move || {
            let part = VirtRange::from_pages(from, most.min(range.end_page() - from)).ok()?;
            from = part.end_page();
            Some(part)
        })
    }
}

impl Default for ShootdownPolicy {
    fn default() -> Self {
        Self::BATCHED
    }
}

/// Changes to one space that one flush will pay for. 160 bytes; on the stack of whoever changes entries.
///
/// Dropping a batch flushes nothing: its debts stay unpaid and go to the quarantine if they are dropped too.
#[derive(Debug)]
#[must_use = "changes that are not flushed leave stale translations behind: call `flush`"]
pub struct ShootdownBatch<'s, K, Q, M> {
    space: &'s TlbSpace<K, Q, M>,
    what: Invalidation,
    /// The first generation that pays for all of it; 0 while nothing has changed.
    need: u64,
}

impl<'s, K: SpaceKind, Q, M: AsRef<[AtomicU64]>> ShootdownBatch<'s, K, Q, M> {
    /// Nothing yet.
    pub fn new(space: &'s TlbSpace<K, Q, M>) -> Self {
        let what = Invalidation { ranges: RangeSet::EMPTY, stride: PageSize::Size1G, tables: false, uniform: true };
        ShootdownBatch { space, what, need: 0 }
    }

    /// Entries in `range`, leaves of `stride` or larger, have been changed (demoted, cleaned, removed). Call it after
    /// the entry stores. Any context; one full fence.
    pub fn changed(&mut self, range: VirtRange, stride: PageSize) {
        self.note(range, stride, None, false);
        self.need = self.need.max(self.space.domain.due());
    }

    /// The same for what an operation says it has left [stale](Stale), upper levels included if it changed any. Nothing
    /// if it changed nothing.
    pub fn stale(&mut self, stale: Stale) {
        let Some(range) = stale.flush() else { return };
        self.note(range, stale.stride(), stale.leaf_size(), stale.tables());
        self.need = self.need.max(self.space.domain.due());
    }

    /// The same where `value` may be used otherwise after the flush. `tables`: page tables have been unhooked in the range.
    pub fn unhooked<T>(
        &mut self,
        value: T,
        range: VirtRange,
        stride: PageSize,
        tables: bool,
    ) -> Pending<T, TlbFlush<'s, K, Q>>
    where
        Q: Quarantine<T>,
    {
        self.note(range, stride, None, tables);
        let domain = &self.space.domain;
        let debt = if tables { domain.unhooked_tables(value, range) } else { domain.unhooked(value, range) };
        self.need = self.need.max(debt.barrier().need());
        debt
    }

    /// What was [detached](crate::detach) from the space's tables, behind this batch; `None` if nothing was mapped
    /// there, and then there is nothing to flush or harvest. What comes from another table is handed back: no flush of
    /// this space pays for it.
    ///
    /// # Errors
    ///
    /// What was detached, if it is another table's.
    pub fn detached(&mut self, unhooked: Unhooked) -> Result<Option<DetachedBehind<'s, K, Q>>, Unhooked>
    where
        Q: Quarantine<Detached>,
    {
        if unhooked.root().start() != self.space.root() {
            return Err(unhooked);
        }
        let Some(range) = unhooked.flush() else { return Ok(None) };
        self.note(range, unhooked.stride(), unhooked.leaf_size(), unhooked.tables());
        let debt = unhooked.behind(&self.space.domain);
        self.need = self.need.max(debt.barrier().need());
        Ok(Some(debt))
    }

    /// `leaf_size`: of all leaves there that CPUs may have, if it is known.
    fn note(&mut self, range: VirtRange, stride: PageSize, leaf_size: Option<PageSize>, tables: bool) {
        let first = self.what.ranges.is_empty();
        self.what.uniform &= leaf_size.is_some_and(|size| first || size == self.what.stride);
        self.what.ranges.add(range);
        self.what.stride = self.what.stride.min(stride);
        self.what.tables |= tables;
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.what.ranges.is_empty()
    }

    /// Flushes what has changed on every CPU that may use it and returns the receipt for it. Nothing is flushed if
    /// nothing has changed, or if somebody else's flush has covered it. Waits for other CPUs: may not be called with
    /// interrupts off, nor under a lock that is taken with interrupts off.
    ///
    /// # Panics
    ///
    /// If `shootdown` is another machine's than the space's.
    pub fn flush<P: Cpu, H: TlbHw>(
        self,
        shootdown: &TlbShootdown<'_, H>,
        cx: &CpuCx<'_, P>,
        policy: &ShootdownPolicy,
    ) -> Flushed<'s, K, Q> {
        let (space, mut what) = (self.space, self.what);
        same_machine(space.machine, shootdown.machine());
        let latest = space.domain.latest(what.tables);
        if latest.generation() >= self.need {
            if !what.ranges.is_empty() {
                shootdown.cpus[cx.platform().current().get() as usize].counters.elided.add(1);
            }
            return latest;
        }
        if what.ranges.touched(what.stride) > policy.range_limit {
            (what.ranges, what.uniform) = (RangeSet::ALL, false);
        }
        let invalidate = |generation| {
            let request = Request { space: space.id, generation, scope: K::SCOPE, unload: false, what };
            shootdown.shoot(cx, space.users(), (!what.tables).then(|| space.lazy()), &request);
        };
        // SAFETY: the space's machine is asked, as was asserted. `shoot` reads the masks after the count, and returns when every CPU in them has invalidated `what` or
        // has seen this or a later generation. CPUs not in them, and lazy ones, use nothing of the space before they see
        // the generation (`TlbSpace::switch_in`), and lazy ones are left out only if no table was unhooked.
        unsafe { space.domain.flush(&what, invalidate) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn range(start: u64, bytes: u64) -> VirtRange {
        VirtRange::new(hugemm_base::VirtAddr::new(start), bytes).expect("a range")
    }

    #[test]
    fn policies_cut_ranges() {
        let whole = range(0x20_0000, 5 << 12);
        let parts = |policy: ShootdownPolicy| policy.batches(whole, PageSize::Size4K).collect::<Vec<_>>();
        assert_eq!(parts(ShootdownPolicy::BATCHED), [whole]);
        let pages: Vec<_> = (0..5).map(|i| range(0x20_0000 + (i << 12), 1 << 12)).collect();
        assert_eq!(parts(ShootdownPolicy::PER_PAGE), pages);
        let twos = [range(0x20_0000, 2 << 12), range(0x20_2000, 2 << 12), range(0x20_4000, 1 << 12)];
        assert_eq!(parts(ShootdownPolicy { pages_per_batch: 2, range_limit: 33 }), twos);
        let top = range(u64::MAX - 0x1fff, 0x2000);
        assert_eq!(ShootdownPolicy::PER_PAGE.batches(top, PageSize::Size4K).count(), 2);
    }
}
