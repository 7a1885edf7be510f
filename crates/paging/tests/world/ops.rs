//! What the workload does, rightly and wrongly.

use super::{PAGES, Plant, SPACES, World, at, number};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Cpu, CpuCx, CpuId, Extent, Invalidation, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_host::mmu::{Fault, Mmu};
use hugemm_paging::{
    Change, Detached, Editing, Flags, Leaf, Lookup, Mapping, OwnerNext, PageFormat, ShootdownBatch, ShootdownPolicy,
};

type Cx<'a, 'p> = CpuCx<'p, Mmu<'a, 'a>>;

/// What stands in the entry of a page that moves.
const MOVING: u64 = 1;

fn span(first: u64, pages: u64) -> VirtRange {
    VirtRange::new(at(first), pages * PAGE_BYTES).expect("a span")
}

impl<F: PageFormat> World<F> {
    /// Loads or stores at a page of the space that the CPU has.
    pub(super) fn touch(&self, cx: &Cx<'_, '_>) -> Result<(), String> {
        let cpu = CpuId::new(number(cx) as u32);
        let (space, lazy) = self.state.borrow()[cpu.get() as usize];
        let Some(space) = space else { return self.switch(cx, self.below(SPACES as u64) as usize) };
        if lazy {
            self.wake(cx, space);
        }
        for _ in 0..4 {
            let at = VirtAddr::new(self.page() * PAGE_BYTES + self.below(512) * 8);
            if self.below(2) == 0 {
                let _ = self.mmu.load(cpu, at);
            } else {
                let _ = self.mmu.store(cpu, at, self.below(1 << 20));
            }
        }
        Ok(())
    }

    fn wake(&self, cx: &Cx<'_, '_>, space: usize) {
        self.spaces[space].tlb.switch_in(&self.shootdown, cx);
        self.mmu.pause(CpuId::new(number(cx) as u32), false);
        self.state.borrow_mut()[number(cx)] = (Some(space), false);
    }

    /// Loads a space, leaves one, or becomes lazy.
    pub(super) fn switch(&self, cx: &Cx<'_, '_>, to: usize) -> Result<(), String> {
        let cpu = CpuId::new(number(cx) as u32);
        let (from, _) = self.state.borrow()[cpu.get() as usize];
        match (from, self.below(4)) {
            (Some(from), 0) => {
                self.spaces[from].tlb.switch_out(&self.shootdown, cx);
                self.state.borrow_mut()[cpu.get() as usize] = (None, false);
            }
            (Some(from), 1 | 2) => {
                self.mmu.pause(cpu, true);
                // SAFETY: a paused CPU uses no address.
                unsafe { self.spaces[from].tlb.enter_lazy(&self.shootdown, cx) };
                self.state.borrow_mut()[cpu.get() as usize] = (Some(from), true);
            }
            _ => {
                self.wake(cx, to);
                if let Some(from) = from.filter(|from| *from != to) {
                    self.spaces[from].tlb.switch_out(&self.shootdown, cx);
                }
            }
        }
        Ok(())
    }

    /// Maps a few zeroed frames.
    pub(super) fn map(&self, cx: &Cx<'_, '_>, space: usize) -> Result<(), String> {
        if F::CONTIGUOUS != 0 && self.below(2) == 0 {
            self.map_groups(space);
            return Ok(());
        }
        let (first, pages) = (self.page(), 1 + self.below(8));
        let frames: Vec<Extent> = std::iter::from_fn(|| self.pool.take()).take(pages as usize).collect();
        for frame in &frames {
            let ptr = self.pool.address(frame.base()).as_ptr();
            // SAFETY: our own frame, which nobody reads before the fence below; the planted bug leaves that to luck.
            unsafe { cx.platform().store_buffer().expect("the model has one").zero(ptr, PAGE_BYTES as usize) };
        }
        if !self.planted(Plant::MissingFence) {
            cx.platform().store_fence();
        }
        let flags = Flags::WRITE | Flags::USER;
        let how = Mapping { flags, largest: PageSize::Size4K };
        let enough = frames.len() as u64 == pages;
        let mut table = self.spaces[space].table.shared(&self.pool);
        if !enough || table.map(span(first, pages), frames.iter().copied(), how).is_err() {
            cx.platform().store_fence();
            frames.into_iter().for_each(|frame| self.pool.give(frame));
        }
        Ok(())
    }

    /// Maps two groups of frames that may be folded, which counts as written.
    fn map_groups(&self, space: usize) {
        let first = self.page() & !15;
        let groups: Vec<Extent> = std::iter::from_fn(|| self.pool.take_group()).take(2).collect();
        let how = Mapping { flags: Flags::WRITE | Flags::USER | Flags::DIRTY, largest: PageSize::Size4K };
        let mut table = self.spaces[space].table.shared(&self.pool);
        let taken = groups.len() < 2 || table.map_folded(span(first, 32), groups.iter().copied(), how).is_err();
        drop(table);
        if taken {
            groups.into_iter().for_each(|group| self.pool.give(group));
        } else if self.planted(Plant::PartOfAGroup) {
            // One page of a group goes, and nobody has unfolded it.
            let entry = self.entry(space, first + 3).expect("mapped");
            entry.fetch_and(!1, Ordering::Relaxed);
        }
    }

    /// Unfolds what reaches over the ends of a part that is to be changed; false if the part is busy.
    fn unfold(&self, cx: &Cx<'_, '_>, space: usize, part: VirtRange) -> bool {
        let this = &self.spaces[space];
        let mut table = this.table.exclusive(&self.pool);
        while let Some(group) = table.folded(part) {
            let Ok(unhooked) = table.detach(group, Editing::LIVE) else { return false };
            let detached = if self.planted(Plant::UnfoldWithoutFlush) {
                // SAFETY: none: this is the bug.
                unsafe { unhooked.assume_flushed() }
            } else {
                let mut batch = ShootdownBatch::new(&this.tlb);
                let debt = batch.detached(unhooked).expect("its own").expect("something");
                debt.release(&batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED)).expect("paid")
            };
            table.attach(detached, PageSize::Size4K).expect("takes no table");
        }
        true
    }

    /// Reads off what was mapped, checks that every written page is known as such, and frees the frames.
    fn harvest(&self, space: usize, detached: Detached) -> Result<(), String> {
        let mut lost = None;
        let mut table = self.spaces[space].table.exclusive(&self.pool);
        let done = table.harvest(detached, Flags::NONE, |run| {
            for frame in (run.extent.base().get()..run.extent.end().get()).map(Pfn::new) {
                if self.mmu.take_written(frame) && !run.flags.contains(Flags::DIRTY) {
                    lost = Some(frame);
                }
            }
            self.pool.give(run.extent);
        });
        done.map_err(|(error, _)| error.to_string())?;
        lost.map_or(Ok(()), |frame| Err(format!("dirty bit lost: {frame} was written and is reported clean")))
    }

    /// Unmaps a few spans with one flush.
    pub(super) fn unmap(&self, cx: &Cx<'_, '_>, space: usize) -> Result<(), String> {
        let this = &self.spaces[space];
        this.tlb.settle(&self.shootdown, cx);
        let mut batch = ShootdownBatch::new(&this.tlb);
        let mut debts = Vec::new();
        let before = this.tlb.domain().generation();
        if self.planted(Plant::LateComer) {
            // Somebody else's flush of everything, over before the entries change.
            let mut other = ShootdownBatch::new(&this.tlb);
            other.changed(hugemm_base::VirtRange::ALL, PageSize::Size4K);
            other.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
        }
        for _ in 0..1 + self.below(3) {
            // Whole tables now and then.
            let part = match self.below(4) {
                0 => span(self.below(3) * 512, 512),
                1 => span(0, PAGES),
                _ => span(self.page(), 1 + self.below(16)),
            };
            self.unfold(cx, space, part);
            let unhooked = this.table.exclusive(&self.pool).detach(part, Editing::LIVE);
            let Ok(unhooked) = unhooked else { continue };
            if self.planted(Plant::FreeBeforeFlush)
                || self.planted(Plant::LateComer) && this.tlb.domain().generation() > before
            {
                // SAFETY: none: this is the bug.
                self.harvest(space, unsafe { unhooked.assume_flushed() })?;
                self.mmu.meanwhile();
                continue;
            }
            if self.planted(Plant::LazyCpuSkipped)
                && let Some(range) = unhooked.flush()
            {
                // The batch is not told of the tables. SAFETY: none: this is the bug.
                let detached = unsafe { unhooked.assume_flushed() };
                debts.push(batch.unhooked(detached, range, PageSize::Size4K, false));
                continue;
            }
            debts.extend(batch.detached(unhooked).map_err(|_| "another table's")?);
            self.mmu.meanwhile();
        }
        let receipt = batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
        for debt in debts {
            let detached = debt.release(&receipt).map_err(|debt| format!("unpaid: {debt:?}"))?;
            self.harvest(space, detached)?;
        }
        Ok(())
    }

    /// Unmaps a few pages; their frames wait for a flush that comes later and pays for all spaces.
    pub(super) fn unmap_later(&self, cx: &Cx<'_, '_>, space: usize) -> Result<(), String> {
        let this = &self.spaces[space];
        let part = span(self.page(), 1 + self.below(4));
        self.unfold(cx, space, part);
        {
            let mut table = this.table.exclusive(&self.pool);
            if let Ok(unhooked) = table.detach(part, Editing::LIVE)
                && let Some(range) = unhooked.flush()
            {
                assert!(!unhooked.tables(), "a few pages");
                // SAFETY: the deferred flush stands in for the space's.
                let detached = unsafe { unhooked.assume_flushed() };
                self.late.borrow_mut().push((space, self.deferred.unmapped(&this.tlb, detached, range)));
            }
        }
        if self.late.borrow().len() > 5 { self.flush_late(cx) } else { Ok(()) }
    }

    pub(super) fn flush_late(&self, cx: &Cx<'_, '_>) -> Result<(), String> {
        let late = self.late.take();
        if self.planted(Plant::FreeBeforeDeferredFlush) {
            // Everybody is asked for a receipt, and nobody is flushed.
            // SAFETY: none: this is the bug.
            let receipt = unsafe { self.deferred.domain().flush(&Invalidation::ALL_LEAVES, |_generation| ()) };
            for (space, debt) in late {
                self.harvest(space, debt.release(&receipt).map_err(|_| "unpaid")?)?;
            }
            return Ok(());
        }
        let receipt = self.deferred.flush(&self.shootdown, cx);
        for (space, debt) in late {
            self.harvest(space, debt.release(&receipt).map_err(|_| "unpaid")?)?;
        }
        Ok(())
    }

    /// Takes the right to write away, flushes, sees that nobody has it any more, and gives it back.
    pub(super) fn protect(&self, cx: &Cx<'_, '_>, space: usize) -> Result<(), String> {
        let this = &self.spaces[space];
        this.tlb.settle(&self.shootdown, cx);
        let by_table = self.below(2) == 0 || self.planted(Plant::UpperLevelsKept);
        let part = if by_table { span(0, 512 + self.below(512)) } else { span(self.below(16), 1 + self.below(16)) };
        self.unfold(cx, space, part);
        let stale = if by_table {
            this.table.exclusive(&self.pool).write_protect(part)
        } else {
            let change = Change { set: Flags::NONE, clear: Flags::WRITE };
            this.table.shared(&self.pool).protect(part, change)
        };
        let Ok(stale) = stale else { return Ok(()) };
        self.mmu.meanwhile();
        let mut batch = ShootdownBatch::new(&this.tlb);
        if self.planted(Plant::UpperLevelsKept) {
            stale.flush().into_iter().for_each(|range| batch.changed(range, PageSize::Size4K));
        } else if !self.planted(Plant::ProtectWithoutFlush) {
            batch.stale(stale);
        }
        batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
        for cpu in 0..self.shootdown.cpus() {
            if self.state.borrow()[cpu] == (Some(space), false) {
                for page in (part.first_page()..part.end_page()).step_by(if by_table { 3 } else { 1 }) {
                    if self.mmu.store(CpuId::new(cpu as u32), at(page), 7).is_ok() {
                        return Err(format!("cpu{cpu} stored to a read-only page"));
                    }
                }
            }
        }
        // Rights that are given need no flush: a fault looks again.
        let change = Change { set: Flags::WRITE, clear: Flags::NONE };
        this.table.shared(&self.pool).protect(part, change).map(|_| ()).map_err(|error| error.to_string())
    }

    /// Clears accessed bits, without a flush.
    pub(super) fn age(&self, _cx: &Cx<'_, '_>, space: usize) -> Result<(), String> {
        let before = self.shootdown.counts();
        if self.planted(Plant::LostDirty) {
            for page in 0..16 {
                let Some(entry) = self.entry(space, page) else { continue };
                let seen = entry.load(Ordering::Relaxed);
                // A CPU writes here: the entry is not what was read.
                for (cpu, state) in self.state.borrow().iter().enumerate() {
                    if *state == (Some(space), false) {
                        let _ = self.mmu.store(CpuId::new(cpu as u32), at(page), page);
                    }
                }
                if seen & 1 != 0 {
                    entry.store(seen & !(1 << 5), Ordering::Relaxed);
                }
            }
            return Ok(());
        }
        let table = &self.spaces[space].table;
        let aged = if self.below(2) == 0 {
            table.shared(&self.pool).test_and_clear_young(span(0, PAGES), |_| ())
        } else {
            table.exclusive(&self.pool).test_and_clear_young(span(0, PAGES), |_| ())
        };
        aged.map_err(|e| e.to_string())?;
        if self.shootdown.counts() == before { Ok(()) } else { Err("ageing flushed".to_owned()) }
    }

    /// Moves a page to another frame while the programs of all CPUs are stopped.
    pub(super) fn move_page(&self, cx: &Cx<'_, '_>, space: usize) -> Result<(), String> {
        let this = &self.spaces[space];
        this.tlb.settle(&self.shootdown, cx);
        let page = self.below(16);
        let Some(new) = self.pool.take() else { return Ok(()) };
        let paused: Vec<bool> = self.state.borrow().iter().map(|(_, lazy)| *lazy).collect();
        let stop = !self.planted(Plant::StoreIntoMoved);
        if stop {
            (0..paused.len()).for_each(|cpu| self.mmu.pause(CpuId::new(cpu as u32), true));
        }
        let mut old = None;
        if !self.unfold(cx, space, span(page, 1)) {
            self.pool.give(new);
            return Ok(());
        }
        let found = this.table.shared(&self.pool).lookup(at(page));
        if let Lookup::Mapped(leaf) = found {
            let taken = this.table.exclusive(&self.pool).take_leaf(at(page), leaf.frame, |_| Some(MOVING));
            let leaf = taken.map_err(|found| format!("{found:?}"))?;
            let (from, to) = (self.pool.address(leaf.frame), self.pool.address(new.base()));
            // SAFETY: whole frames; nobody stores to either while the programs are stopped.
            unsafe { to.copy_from_nonoverlapping(from, PAGE_BYTES as usize) };
            old = Some(leaf);
        }
        let enter = || match old {
            Some(leaf) => {
                let next = OwnerNext::Leaf(Leaf { frame: new.base(), ..leaf });
                let entered = this.table.shared(&self.pool).replace_owner(at(page), MOVING, next);
                entered.map_err(|found| format!("{found:?}"))
            }
            None => Ok(()),
        };
        // Where an entry may change its frame, nobody minds which of the two a CPU uses that has been stopped.
        let early = !F::BREAK_BEFORE_MAKE || self.planted(Plant::MapBeforeFlush);
        if early {
            enter()?;
        }
        self.mmu.meanwhile();
        let mut batch = ShootdownBatch::new(&this.tlb);
        let debt = old.map(|old| batch.unhooked(old.frame, span(page, 1), PageSize::Size4K, false));
        let receipt = batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
        if !early {
            enter()?;
        }
        for (cpu, paused) in paused.into_iter().enumerate().filter(|_| stop) {
            self.mmu.pause(CpuId::new(cpu as u32), paused);
        }
        let free = match debt {
            Some(debt) => {
                let old = debt.release(&receipt).map_err(|debt| format!("unpaid: {debt:?}"))?;
                // What was written is known of the page, which has another frame.
                if self.mmu.take_written(old) {
                    self.mmu.mark_written(new.base());
                }
                Extent::new(old, 1).map_err(|error| error.to_string())?
            }
            None => new,
        };
        self.pool.give(free);
        Ok(())
    }

    /// Moves pages to other addresses, and sees that nobody reaches them at the old ones any more.
    pub(super) fn relocate(&self, cx: &Cx<'_, '_>, space: usize) -> Result<(), String> {
        let this = &self.spaces[space];
        this.tlb.settle(&self.shootdown, cx);
        let (first, pages, to) = match self.below(3) {
            0 => (self.below(3) * 512, 512, (3 + self.below(3)) * 512),
            1 => ((3 + self.below(3)) * 512, 512, self.below(3) * 512),
            _ => (self.page(), 1 + self.below(16), self.page()),
        };
        let part = span(first, pages);
        if !self.unfold(cx, space, part) {
            return Ok(());
        }
        if self.planted(Plant::RelocateLosesDirty) {
            self.relocate_plainly(cx, space, first, to);
            return Ok(());
        }
        let moved = this.table.exclusive(&self.pool).relocate(part, at(to), Editing::LIVE);
        let Ok(stale) = moved else { return Ok(()) };
        self.mmu.meanwhile();
        let mut batch = ShootdownBatch::new(&this.tlb);
        if !self.planted(Plant::RelocateWithoutFlush) {
            batch.stale(stale);
        }
        batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
        for cpu in 0..self.shootdown.cpus() {
            let runs = self.state.borrow()[cpu] == (Some(space), false);
            if runs && (first..first + pages).any(|page| !self.is_hole(CpuId::new(cpu as u32), page)) {
                return Err(format!("cpu{cpu} reaches what has moved away"));
            }
        }
        Ok(())
    }

    /// One page, by a load and a store, between which hardware sets the dirty bit: a planted bug.
    fn relocate_plainly(&self, cx: &Cx<'_, '_>, space: usize, first: u64, to: u64) {
        let (Some(from), Some(there)) = (self.entry(space, first), self.entry(space, to)) else { return };
        let seen = from.load(Ordering::Relaxed);
        if seen & 1 == 0 || there.load(Ordering::Relaxed) != 0 {
            return;
        }
        for (cpu, state) in self.state.borrow().iter().enumerate() {
            if *state == (Some(space), false) {
                let _ = self.mmu.store(CpuId::new(cpu as u32), at(first), 1);
            }
        }
        there.store(seen, Ordering::Relaxed);
        from.store(0, Ordering::Relaxed);
        let mut batch = ShootdownBatch::new(&self.spaces[space].tlb);
        batch.changed(span(first, 1), PageSize::Size4K);
        batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
    }

    /// The entry of a page of 4 KiB, found as hardware does; `None` where there is no table.
    fn entry(&self, space: usize, page: u64) -> Option<&'static AtomicU64> {
        let mut table = self.spaces[space].table.root();
        for level in (0..4).rev() {
            let index = (page >> (9 * level) & 511) as usize;
            // SAFETY: a table of the pool, whose words are accessed atomically while it is hooked in.
            let entry: &'static AtomicU64 = unsafe { self.pool.address(table).cast::<AtomicU64>().add(index).as_ref() };
            let value = entry.load(Ordering::Relaxed);
            if level == 0 {
                return Some(entry);
            }
            if value & 1 == 0 || value & 1 << 7 != 0 {
                return None;
            }
            table = Pfn::new((value & 0x000f_ffff_ffff_f000) >> 12);
        }
        None
    }

    /// Whether an access to a page faults for lack of an entry.
    pub(super) fn is_hole(&self, cpu: CpuId, page: u64) -> bool {
        self.mmu.load(cpu, at(page)) == Err(Fault::NotPresent)
    }
}
