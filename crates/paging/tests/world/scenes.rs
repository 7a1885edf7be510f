//! Short scenes with an outcome, on the same machine.

use super::{World, at};
use hugemm_base::{CpuCx, CpuId, Extent, PageSize, Pfn, VirtAddr, VirtRange, with};
use hugemm_host::mmu::Mmu;
use hugemm_paging::{
    Editing, Flags, KernelSpace, Lookup, Mapping, PageFormat, PageTable, ShootdownBatch, ShootdownPolicy, TableMemory,
    TlbSpace, UserSpace, X86_64,
};

/// How a page gets another size.
#[derive(Clone, Copy, Debug)]
pub enum Resizing {
    /// By one store, and a flush after it.
    InPlace,
    /// Detached, flushed (or not) and attached.
    Broken { flushed: bool },
}

const SMALL: Mapping = Mapping { flags: Flags::WRITE.with(Flags::USER), largest: PageSize::Size4K };

type Cx<'p> = CpuCx<'p, Mmu<'static, 'static>>;

/// CPU 0 changes things, CPU 1 is in the way.
const ME: CpuId = CpuId::new(0);
const OTHER: CpuId = CpuId::new(1);

fn span(first: u64, pages: u64) -> VirtRange {
    VirtRange::new(at(first), pages << 12).expect("a span")
}

impl<F: PageFormat> World<F> {
    fn checked(&self) -> Result<(), String> {
        (0..200).for_each(|_| self.mmu.meanwhile());
        self.mmu.check().map_err(|violation| violation.to_string())
    }

    /// Maps a page in a space and has the other CPU, which has loaded it, use it.
    fn in_use(&self, space: usize, page: u64, frame: Extent) {
        self.spaces[space].table.shared(&self.pool).map(span(page, frame.pages()), [frame], SMALL).expect("free");
        self.mmu.as_cpu(OTHER, |cx| self.spaces[space].tlb.switch_in(&self.shootdown, cx));
        (0..8).for_each(|_| self.mmu.store(OTHER, at(page), 7).expect("mapped"));
    }

    fn unmap_page(&self, cx: &Cx<'_>, space: usize, page: u64) {
        let this = &self.spaces[space];
        let unhooked = this.table.exclusive(&self.pool).detach(span(page, 1), Editing::LIVE).expect("mapped");
        let mut batch = ShootdownBatch::new(&this.tlb);
        let debt = batch.detached(unhooked).expect("its own").expect("something");
        let detached = debt.release(&batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED)).expect("paid");
        let give = |run: hugemm_paging::Run| self.pool.give(run.extent);
        this.table.exclusive(&self.pool).harvest(detached, Flags::NONE, give).expect("its own");
    }

    /// How many translations one CPU reads from the tables for 20000 loads from random pages of 1 MiB, folded or not.
    pub fn fills(&self, folded: bool) -> u64 {
        const PAGES: u64 = 256;
        let how = Mapping { flags: SMALL.flags | Flags::HARDWARE, ..SMALL };
        let groups = std::iter::from_fn(|| self.pool.take_group()).take(PAGES as usize / 16);
        let mut table = self.spaces[0].table.shared(&self.pool);
        let mapped = match folded {
            true => table.map_folded(span(0, PAGES), groups, how),
            false => table.map(span(0, PAGES), groups, how),
        };
        mapped.expect("free");
        drop(table);
        self.mmu.as_cpu(ME, |cx| self.spaces[0].tlb.switch_in(&self.shootdown, cx));
        let before = self.mmu.fills();
        for _ in 0..20_000 {
            self.mmu.load(ME, at(self.below(PAGES))).expect("mapped");
        }
        self.checked().expect("nothing changes");
        self.mmu.fills() - before
    }

    /// A page of 2 MiB becomes pages of 4 KiB and the other way round, as `how` says, while the other CPU uses it.
    pub fn resize(&self, how: Resizing) -> Result<(), String> {
        let (this, block) = (&self.spaces[0], self.block());
        let large = Mapping { largest: PageSize::Size2M, ..SMALL };
        this.table.shared(&self.pool).map(span(512, 512), [block], large).expect("free");
        self.mmu.as_cpu(OTHER, |cx| this.tlb.switch_in(&self.shootdown, cx));
        for turn in 0..12 {
            let use_it = |page| _ = self.mmu.store(OTHER, at(512 + page % 512), page);
            (0..8).for_each(|page| use_it(turn * 77 + page));
            let to = if turn % 2 == 0 { PageSize::Size4K } else { PageSize::Size2M };
            self.mmu.as_cpu(ME, |cx| match how {
                Resizing::InPlace => self.resize_in_place(cx, to),
                Resizing::Broken { flushed } => self.break_and_make(cx, to, flushed),
            });
            self.mmu.meanwhile();
        }
        let whole = this.table.shared(&self.pool).lookup(at(512));
        assert!(matches!(whole, Lookup::Mapped(leaf) if leaf.size == PageSize::Size2M && leaf.frame == block.base()));
        self.checked()
    }

    fn resize_in_place(&self, cx: &Cx<'_>, to: PageSize) {
        let this = &self.spaces[0];
        // SAFETY: what the model's hardware can is the test's subject.
        let editing = unsafe { Editing::live_resizing() };
        let mut old: Option<Pfn> = None;
        let mut table = this.table.exclusive(&self.pool);
        let stale = match to {
            PageSize::Size4K => table.split(span(512, 512), to, editing),
            _ => table.collapse(at(512), to, editing, |table| old = Some(table)),
        };
        drop(table);
        let mut batch = ShootdownBatch::new(&this.tlb);
        batch.stale(stale.expect("one page, or one table"));
        self.mmu.meanwhile();
        batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
        // SAFETY: every CPU that could walk it has been flushed.
        old.into_iter().for_each(|old| unsafe { (&self.pool).free(old) });
    }

    /// A page of 2 MiB is divided in place, and before that has been flushed one of its parts goes: the other CPU may still have all of it.
    pub fn unmap_part_of_a_split(&self) -> Result<(), String> {
        let (this, block) = (&self.spaces[0], self.block());
        let large = Mapping { largest: PageSize::Size2M, ..SMALL };
        this.table.shared(&self.pool).map(span(512, 512), [block], large).expect("free");
        self.mmu.as_cpu(OTHER, |cx| this.tlb.switch_in(&self.shootdown, cx));
        (0..8).for_each(|_| self.mmu.store(OTHER, at(517), 7).expect("mapped"));
        // SAFETY: what the model's hardware can is the test's subject.
        let editing = unsafe { Editing::live_resizing() };
        let stale = this.table.exclusive(&self.pool).split(span(512, 512), PageSize::Size4K, editing);
        self.mmu.as_cpu(ME, |cx| {
            self.unmap_page(cx, 0, 517);
            (0..8).for_each(|_| _ = self.mmu.load(OTHER, at(517)));
            let mut batch = ShootdownBatch::new(&this.tlb);
            batch.stale(stale.expect("a page"));
            batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
        });
        self.checked()
    }

    fn break_and_make(&self, cx: &Cx<'_>, to: PageSize, flushed: bool) {
        let this = &self.spaces[0];
        let unhooked = this.table.exclusive(&self.pool).detach(span(512, 512), Editing::LIVE).expect("all of it");
        self.mmu.meanwhile();
        let detached = if flushed {
            let mut batch = ShootdownBatch::new(&this.tlb);
            let debt = batch.detached(unhooked).expect("its own").expect("something");
            debt.release(&batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED)).expect("paid")
        } else {
            // SAFETY: none: this is the bug.
            unsafe { unhooked.assume_flushed() }
        };
        this.table.exclusive(&self.pool).attach(detached, to).expect("its own");
    }

    /// The other CPU idles lazily in a space, loads another one, returns, and a page goes.
    pub fn come_back(&self) -> Result<(), String> {
        self.in_use(0, 5, self.pool.take().expect("a frame"));
        self.mmu.as_cpu(OTHER, |cx| {
            self.mmu.pause(OTHER, true);
            // SAFETY: it is paused.
            unsafe { self.spaces[0].tlb.enter_lazy(&self.shootdown, cx) };
            self.spaces[1].tlb.switch_in(&self.shootdown, cx);
            self.spaces[0].tlb.switch_in(&self.shootdown, cx);
            self.mmu.pause(OTHER, false);
        });
        (0..8).for_each(|_| self.mmu.store(OTHER, at(5), 8).expect("mapped"));
        self.mmu.as_cpu(ME, |cx| self.unmap_page(cx, 0, 5));
        let _ = self.mmu.load(OTHER, at(5));
        self.checked()
    }

    /// The other CPU leaves a space, whose translations it keeps under their tag, and comes back after a page has gone by a deferred
    /// unmap, whose flush has not asked it.
    pub fn come_back_after_a_deferred_unmap(&self) -> Result<(), String> {
        self.in_use(0, 5, self.pool.take().expect("a frame"));
        self.mmu.as_cpu(OTHER, |cx| {
            self.spaces[0].tlb.switch_out(&self.shootdown, cx);
            self.spaces[1].tlb.switch_in(&self.shootdown, cx);
        });
        self.mmu.as_cpu(ME, |cx| {
            let this = &self.spaces[0];
            let unhooked = this.table.exclusive(&self.pool).detach(span(5, 1), Editing::LIVE).expect("mapped");
            let range = unhooked.flush().expect("something");
            // SAFETY: the deferred flush stands in for the space's.
            let detached = unsafe { unhooked.assume_flushed() };
            let debt = self.deferred.unmapped(&this.tlb, detached, range);
            let before = self.shootdown.counts();
            let detached = debt.release(&self.deferred.flush(&self.shootdown, cx)).expect("paid");
            assert_eq!(self.shootdown.counts().since(before).targets, 0, "it is elsewhere");
            let give = |run: hugemm_paging::Run| self.pool.give(run.extent);
            this.table.exclusive(&self.pool).harvest(detached, Flags::NONE, give).expect("its own");
        });
        self.mmu.as_cpu(OTHER, |cx| self.spaces[0].tlb.switch_in(&self.shootdown, cx));
        let _ = self.mmu.load(OTHER, at(5));
        self.checked()
    }

    /// An aligned block of 2 MiB of frames.
    fn block(&self) -> Extent {
        loop {
            let frame = self.pool.take().expect("a block").base();
            if frame.get().is_multiple_of(512) {
                (1..512).for_each(|_| _ = self.pool.take().expect("a block"));
                return Extent::new(frame, 512).expect("a block");
            }
        }
    }

    /// The other CPU idles lazily while the table that it has walked gives way to a larger page and is freed.
    pub fn collapse_beside_a_lazy_cpu(&self) -> Result<(), String> {
        self.in_use(0, 512, self.block());
        (512..528).for_each(|page| _ = self.mmu.load(OTHER, at(page)));
        self.mmu.as_cpu(OTHER, |cx| {
            self.mmu.pause(OTHER, true);
            // SAFETY: it is paused.
            unsafe { self.spaces[0].tlb.enter_lazy(&self.shootdown, cx) };
        });
        self.mmu.as_cpu(ME, |cx| self.collapse(cx, 0, 512));
        self.checked()
    }

    fn collapse(&self, cx: &Cx<'_>, space: usize, page: u64) {
        let this = &self.spaces[space];
        let mut old: Option<Pfn> = None;
        let mut table = this.table.exclusive(&self.pool);
        let stale =
            table.collapse(at(page), PageSize::Size2M, Editing::LIVE, |table| old = Some(table)).expect("uniform");
        drop(table);
        let mut batch = ShootdownBatch::new(&this.tlb);
        batch.stale(stale);
        batch.flush(&self.shootdown, cx, &ShootdownPolicy::BATCHED);
        // SAFETY: every CPU that could walk it has been flushed.
        unsafe { (&self.pool).free(old.expect("a table")) };
    }

    /// The other CPU walks a table of the kernel's half under the tags of two spaces. It gives way to a larger page by a
    /// flush page by page, and is freed, while the CPU has the one loaded; then it goes back to the other.
    pub fn collapse_in_the_kernels_half(&self) -> Result<(), String> {
        let upper = VirtRange::new(VirtAddr::new(0xffff_8000_0000_0000), 1 << 39).expect("a slot");
        let lower = VirtRange::new(VirtAddr::new(0), 1 << 46).expect("the lower half");
        let mut memory = &self.pool;
        // SAFETY: one pool; what goes is behind the kernel's flush domain.
        let kernel: PageTable<X86_64> = unsafe { PageTable::with_fixed_top(&mut memory, upper) }.expect("tables");
        let block = self.block();
        let small = Mapping { flags: Flags::WRITE | Flags::GLOBAL, largest: PageSize::Size4K };
        let at = |page: u64| VirtAddr::new(upper.start().get() + (page << 12));
        let range = VirtRange::new(upper.start(), PageSize::Size2M.bytes()).expect("a block");
        kernel.shared(&self.pool).map(range, [block], small).expect("free");
        // SAFETY: as above, and the kernel's table stays.
        let tables = [(); 2].map(|()| unsafe { PageTable::beside(&mut memory, lower, &kernel) }.expect("a root"));
        // SAFETY: each has a table of its own, which stays.
        let half: TlbSpace<KernelSpace> =
            unsafe { TlbSpace::new(&self.shootdown, kernel.root().start()) }.expect("fits");
        let spaces = tables.each_ref().map(|table: &PageTable<X86_64>| {
            // SAFETY: as above.
            let space: TlbSpace<UserSpace> =
                unsafe { TlbSpace::new(&self.shootdown, table.root().start()) }.expect("fits");
            space
        });
        let walk = |cpu| (0..64).for_each(|page| _ = self.mmu.load(cpu, at(page * 8)));
        self.mmu.as_cpu(ME, |cx| half.online(&self.shootdown, cx));
        self.mmu.as_cpu(OTHER, |cx| {
            half.online(&self.shootdown, cx);
            spaces[0].switch_in(&self.shootdown, cx);
            walk(OTHER);
            spaces[1].switch_in(&self.shootdown, cx);
            spaces[0].switch_out(&self.shootdown, cx);
            walk(OTHER);
        });
        let mut old: Option<Pfn> = None;
        let mut table = kernel.exclusive(&self.pool);
        let stale = table.collapse(at(0), PageSize::Size2M, Editing::LIVE, |table| old = Some(table)).expect("uniform");
        drop(table);
        self.mmu.as_cpu(ME, |cx| {
            let mut batch = ShootdownBatch::new(&half);
            batch.stale(stale);
            batch.flush(
                &self.shootdown,
                cx,
                &with!(ShootdownPolicy::BATCHED, range_limit = u64::MAX, pages_per_batch = u64::MAX),
            );
        });
        // SAFETY: every CPU that could walk it has been flushed.
        unsafe { (&self.pool).free(old.expect("a table")) };
        self.mmu.as_cpu(OTHER, |cx| {
            walk(OTHER);
            spaces[0].switch_in(&self.shootdown, cx);
            spaces[1].switch_out(&self.shootdown, cx);
            walk(OTHER);
        });
        self.checked()
    }
}
