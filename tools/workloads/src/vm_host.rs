//! The work of a virtual machine host, once through: `hugemm run`.
//!
//! A huge page pool is filled; machines are created from it, by prefault and by pinning; small guests share memory and
//! have their own, until there is none; bad memory and failed requests are met on the way; everything is destroyed, the
//! pool shrunk, and the [accounting] are checked. One course for every platform: what a platform has to add is its
//! [`Site`], and what is done page by page instead of by extent is a value ([`Granularity`]) or belongs to the parts that the
//! caller hands in (the clearing policy, the optimizer's).

pub mod accounting;
mod figures;
pub mod guest;
mod sides;
pub mod walk;

use crate::vm_create::{CreateMethod, Creation};
use accounting::{Accounting, Mismatch, Start};
pub use figures::{FlushCounts, FramesUsed, PhaseFigures, RunPhase, SwapCounts};
use guest::{Guest, Spread};
use hugemm_base::{Clock, CounterSnapshot, Never, PAGE_SHIFT, PageSize, Pfn, VirtAddr, VirtRange, VirtRangeError};
use hugemm_frames::{Env, HwPoisoned};
use hugemm_hugetlb::{DescriptorMap, HugePool, Nodes, PoolError, VmemmapOptimizer};
use hugemm_paging::Lookup;
use hugemm_vm::{Access, AddressSpaceRef, Backing, Cx, Pinned, Setup, SharedRef, Vm, VmError, VmaKind};
pub use sides::{Granularity, HostSide, Ways};
use thiserror::Error;

/// Small guests.
pub const GUESTS: usize = 4;

/// Where a machine's memory begins in its address space.
pub(crate) const AT: u64 = 1 << 40;

/// Pages that a kernel gathers while it unmaps, before it flushes and frees them: about what Linux's gather holds.
pub const GATHERED: u64 = 8192;

/// What a platform adds, for tasks whose contexts borrow the platform for `'c`.
pub trait Site<'c, 'v, 'm, S: Setup> {
    /// Has all CPUs of the site work on a creation, the calling one among them. Returns the nanoseconds that it took.
    fn create(&mut self, cx: &mut Cx<'c, S>, creation: &Creation<'_, '_, 'm, S>) -> Result<u64, VmError>
    where
        S::Platform: Clock;

    /// On how many CPUs.
    fn workers(&self) -> u64;

    /// Keeps a run that was pinned.
    fn keep(&mut self, run: Pinned<'v>);

    /// One of the runs that were kept, until there is none.
    fn pinned(&mut self) -> Option<Pinned<'v>>;

    /// Has the CPUs of a guest, by its number up to and with [`GUESTS`], load its space, so that flushes have to reach them,
    /// or leave it.
    fn load(&mut self, cx: &mut Cx<'c, S>, guest: u32, space: &AddressSpaceRef<'_, S>, on: bool);

    /// Runs `f`, and a worker beside it that keeps memory free, if the site has a CPU for one. `f` resizes no pool, and asks for nothing
    /// that other CPUs have to do.
    fn beside_worker<R>(&mut self, cx: &mut Cx<'c, S>, f: impl FnOnce(&mut Cx<'c, S>) -> R) -> R {
        f(cx)
    }

    /// What flushes have cost so far.
    fn barriers(&self) -> FlushCounts;

    /// The sum of all CPUs' counters.
    fn counters(&self) -> CounterSnapshot;

    /// What reclaim has done so far; `None` if nothing goes to swap here.
    fn reclaimed(&self, _cx: &Cx<'c, S>) -> Option<SwapCounts> {
        None
    }

    /// Frames that swap has now, for its pages and for itself.
    fn swap_frames(&self, _cx: &Cx<'c, S>) -> u64 {
        0
    }
}

/// How large everything is.
#[derive(Clone, Copy, Debug)]
pub struct HostSizes {
    /// 2 MiB pages in the pool; a multiple of 4.
    pub pool: u64,
    /// 4 KiB pages that each guest has for itself.
    pub own: u64,
    /// 4 KiB pages that all guests share.
    pub shared: u64,
    /// 4 KiB pages that one more guest asks for: more than there are.
    pub greedy: u64,
}

impl HostSizes {
    /// For a machine with so many free frames: 5/8 of them in the pool, all but 512 MiB of a large one; and of the rest a
    /// quarter shared and half the guests' own. `None` if that is too little to show anything.
    pub fn of(free: u64) -> Option<HostSizes> {
        let rest = (free / 8 * 3).min(1 << 17);
        let pool = ((free - rest) / 512) & !3;
        let rest = free - pool * 512;
        let sizes = HostSizes { pool, own: (rest / 8) & !511, shared: (rest / 4) & !511, greedy: rest };
        (pool >= 4 && sizes.own > 0).then_some(sizes)
    }
}

/// The system under test.
pub struct HostRun<'d, 'm, 'p, 'e, S: Setup, V: DescriptorMap> {
    /// Address spaces, over frames.
    pub vm: &'d Vm<'m, S>,
    /// The pool, empty, from which `vm` takes pooled areas' pages.
    pub pool: &'d HugePool<'p, <S::Env as Env>::Lock>,
    /// What gives descriptors back.
    pub optimizer: &'d VmemmapOptimizer<'e, S::Env, V>,
    /// How work is handed over.
    pub granularity: Granularity,
    /// How large everything is.
    pub sizes: HostSizes,
}

/// Why a run ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HostRunError {
    /// An address space refused something.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The pool refused something.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The sizes make no addresses.
    #[error(transparent)]
    Range(#[from] VirtRangeError),
    /// Something is not what it should be.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// The pool got fewer pages than planned.
    #[error("the pool got only {got} pages; use a larger size")]
    Short {
        /// How many it got.
        got: u64,
    },
}

/// What there is while the guests run.
struct Cast<'v, S: Setup> {
    prefaulted: AddressSpaceRef<'v, S>,
    pinned: AddressSpaceRef<'v, S>,
    shared: SharedRef<'v, S>,
    guests: [Guest<'v, S>; GUESTS],
}

/// Who is told of phases, and what there was when the run began.
struct Told<'t, F> {
    start: Start,
    tell: &'t mut F,
}

impl<'v, 'm, S, V> HostRun<'v, 'm, '_, '_, S, V>
where
    S: Setup,
    S::Platform: Clock,
    V: DescriptorMap,
{
    /// Runs it. `tell` is told of each phase when it is over. An error leaves everything as it is: the caller's memory is
    /// then not to be used any more.
    pub fn run<'c>(
        &self,
        cx: &mut Cx<'c, S>,
        site: &mut impl Site<'c, 'v, 'm, S>,
        tell: &mut impl FnMut(RunPhase, &PhaseFigures),
    ) -> Result<Accounting, HostRunError> {
        let mut accounting = Accounting::open(cx, self, site);
        let tell = &mut Told { start: accounting.start(), tell };
        self.phase(cx, site, RunPhase::Fill, tell, |cx, _, figures| self.fill(cx, &mut accounting, figures))?;
        let prefaulted = self.machine(cx, site, tell, RunPhase::Prefault, self.sizes.pool / 2)?;
        let pinned = self.machine(cx, site, tell, RunPhase::Pin, self.sizes.pool / 4)?;
        accounting.given += (self.sizes.pool / 2 + self.sizes.pool / 4) * PageSize::Size2M.bytes();
        let (shared, guests) = self.phase(cx, site, RunPhase::Guests, tell, |cx, site, figures| {
            let made = self.guests(cx, site)?;
            figures.small(self.sizes.shared + GUESTS as u64 * self.sizes.own);
            Ok(made)
        })?;
        accounting.given += (self.sizes.shared + GUESTS as u64 * self.sizes.own) << PAGE_SHIFT;
        let cast = Cast { prefaulted, pinned, shared, guests };
        for guest in &cast.guests {
            guest.check(cx, self.vm)?;
        }
        self.phase(cx, site, RunPhase::WorkingSets, tell, |cx, _, figures| {
            self.working_sets(cx, &cast, &mut accounting, figures)
        })?;
        if site.reclaimed(cx).is_some() {
            self.phase(cx, site, RunPhase::Pressure, tell, |cx, site, figures| {
                self.pressure(cx, site, &cast, &mut accounting, figures)
            })?;
        }
        self.phase(cx, site, RunPhase::Failures, tell, |cx, site, figures| {
            self.failures(cx, site, &cast, &mut accounting, figures)
        })?;
        for guest in &cast.guests {
            guest.check(cx, self.vm)?;
        }
        self.phase(cx, site, RunPhase::Destroy, tell, |cx, site, figures| {
            // What there is then: what greedy guests had has gone before.
            let small = self.sizes.shared + GUESTS as u64 * self.sizes.own;
            let large = self.sizes.pool / 2 + self.sizes.pool / 4;
            figures.pages = large + small;
            figures.bytes = large * PageSize::Size2M.bytes() + (small << PAGE_SHIFT);
            self.destroy(cx, site, cast, &mut accounting)
        })?;
        self.phase(cx, site, RunPhase::Shrink, tell, |cx, _, figures| {
            figures.large(self.sizes.pool);
            let tidied = self.pool.tidy(cx, self.optimizer)?;
            let shrunk = self.pool.resize(cx, self.optimizer, 0, Nodes::All, &Never)?;
            figures.saved = accounting.descriptors(&tidied) + accounting.descriptors(&shrunk);
            Ok(())
        })?;
        accounting.close(cx, self, site)?;
        Ok(accounting)
    }

    /// Times a phase, counts its flushes, and tells of it.
    fn phase<'c, T, P: Site<'c, 'v, 'm, S>>(
        &self,
        cx: &mut Cx<'c, S>,
        site: &mut P,
        phase: RunPhase,
        tell: &mut Told<'_, impl FnMut(RunPhase, &PhaseFigures)>,
        run: impl FnOnce(&mut Cx<'c, S>, &mut P, &mut PhaseFigures) -> Result<T, HostRunError>,
    ) -> Result<T, HostRunError> {
        let (mut figures, before, reclaimed) = (PhaseFigures::default(), site.barriers(), site.reclaimed(cx));
        let start = cx.platform().now_ns();
        let result = run(cx, site, &mut figures)?;
        let whole = cx.platform().now_ns().saturating_sub(start);
        // A phase that knows better has set its own time.
        if figures.nanos == 0 {
            figures.nanos = whole;
        }
        let after = site.barriers();
        figures.flushes = after.flushes - before.flushes;
        figures.interrupts = after.interrupts - before.interrupts;
        if let (Some(before), Some(after)) = (reclaimed, site.reclaimed(cx)) {
            figures.reclaimed = after.since(before);
        }
        figures.used = tell.start.used(self.vm.frames().stats(cx), site.counters().frames);
        (tell.tell)(phase, &figures);
        Ok(result)
    }

    fn fill(
        &self,
        cx: &mut Cx<'_, S>,
        accounting: &mut Accounting,
        figures: &mut PhaseFigures,
    ) -> Result<(), HostRunError> {
        let report = self.pool.resize(cx, self.optimizer, self.sizes.pool, Nodes::All, &Never)?;
        figures.large(report.entered);
        figures.saved = accounting.descriptors(&report);
        if report.entered == self.sizes.pool { Ok(()) } else { Err(HostRunError::Short { got: report.entered }) }
    }

    /// A machine of `pages` pages of the pool.
    fn machine<'c>(
        &self,
        cx: &mut Cx<'c, S>,
        site: &mut impl Site<'c, 'v, 'm, S>,
        tell: &mut Told<'_, impl FnMut(RunPhase, &PhaseFigures)>,
        phase: RunPhase,
        pages: u64,
    ) -> Result<AddressSpaceRef<'v, S>, HostRunError> {
        self.phase(cx, site, phase, tell, |cx, site, figures| {
            figures.large(pages);
            let space = self.vm.create(cx, guest::lower()?)?;
            let span = VirtRange::new(VirtAddr::new(AT), figures.bytes)?;
            let kind = VmaKind::private(PageSize::Size2M).pooled();
            let area = self.vm.map(cx, &space, span, kind, Backing::Private)?;
            let creation = Creation::new(self.vm, &space, area, CreateMethod::Prefault, site.workers());
            figures.nanos = site.create(cx, &creation)?;
            if phase == RunPhase::Pin {
                let start = cx.platform().now_ns();
                let pinned =
                    self.vm.pin(cx, &space, span, Access::Write, Some(figures.bytes), &Never, |run| site.keep(run));
                pinned.map_err(|error| error.cause)?;
                figures.nanos += cx.platform().now_ns().saturating_sub(start);
            }
            Ok(space)
        })
    }

    #[allow(clippy::type_complexity, reason = "the object and its guests")]
    fn guests<'c>(
        &self,
        cx: &mut Cx<'c, S>,
        site: &mut impl Site<'c, 'v, 'm, S>,
    ) -> Result<(SharedRef<'v, S>, [Guest<'v, S>; GUESTS]), HostRunError> {
        let shared = self.vm.create_shared(cx, self.sizes.shared, PageSize::Size4K, false)?;
        if self.granularity == Granularity::Extent {
            self.vm.prefault_shared(&shared, 0, self.sizes.shared).work(cx, &Never)?;
        }
        let mut made: [Option<Guest<'v, S>>; GUESTS] = [const { None }; GUESTS];
        for (number, place) in (0..).zip(&mut made) {
            let spread = Spread { own: self.sizes.own, shared: self.sizes.shared };
            let guest = Guest::new(cx, self.vm, number, spread, &shared)?;
            site.load(cx, guest.number(), &guest.space, true);
            guest.fill(cx, self.vm, self.granularity)?;
            *place = Some(guest);
        }
        for guest in made.iter().flatten() {
            guest.write(cx, self.vm)?;
        }
        match made {
            [Some(a), Some(b), Some(c), Some(d)] => Ok((shared, [a, b, c, d])),
            // Every place was filled above, or an error returned.
            _ => Err(HostRunError::Short { got: 0 }),
        }
    }

    /// Which pages guests have used: all of them, since they have just looked at all; then a quarter of one's own.
    fn working_sets(
        &self,
        cx: &mut Cx<'_, S>,
        cast: &Cast<'_, S>,
        accounting: &mut Accounting,
        figures: &mut PhaseFigures,
    ) -> Result<(), HostRunError> {
        let each = self.sizes.own + self.sizes.shared;
        for guest in &cast.guests {
            accounting.check("pages that a guest has used", each, guest.working_set(cx, self.vm, self.granularity)?)?;
        }
        let some = self.sizes.own / 4;
        cast.guests[0].check_own(cx, self.vm, some)?;
        for (guest, used) in cast.guests.iter().zip([some, 0, 0, 0]) {
            accounting.check(
                "pages that a guest has used since",
                used,
                guest.working_set(cx, self.vm, self.granularity)?,
            )?;
        }
        figures.small(2 * GUESTS as u64 * each);
        Ok(())
    }

    /// A guest writes to as much memory as all have together, and then everybody looks for what they wrote.
    fn pressure<'c>(
        &self,
        cx: &mut Cx<'c, S>,
        site: &mut impl Site<'c, 'v, 'm, S>,
        cast: &Cast<'_, S>,
        accounting: &mut Accounting,
        figures: &mut PhaseFigures,
    ) -> Result<(), HostRunError> {
        let greedy = Guest::greedy(cx, self.vm, self.sizes.greedy)?;
        site.load(cx, greedy.number(), &greedy.space, true);
        site.beside_worker(cx, |cx| {
            let mut play = |cx: &mut Cx<'c, S>, guest: &Guest<'_, S>, writes: bool| {
                // It has the guest's space loaded, so that who takes its pages away meanwhile waits for it.
                guest.space.tlb().switch_in(self.vm.shootdown(), cx);
                accounting.check(
                    "CPUs that have loaded the guest that they play",
                    1,
                    guest.space.tlb().asks_this_cpu(cx).into(),
                )?;
                let played = if writes { guest.write(cx, self.vm) } else { guest.check(cx, self.vm) };
                guest.space.tlb().switch_out(self.vm.shootdown(), cx);
                played
            };
            play(cx, &greedy, true)?;
            cast.guests.iter().try_for_each(|guest| play(cx, guest, false))?;
            play(cx, &greedy, false)
        })?;
        figures.small(self.sizes.greedy + self.sizes.shared + GUESTS as u64 * self.sizes.own);
        accounting.given += self.sizes.greedy << PAGE_SHIFT;
        accounting.end_guest(&greedy);
        site.load(cx, greedy.number(), &greedy.space, false);
        self.vm.destroy(cx, greedy.space).map_err(|(error, _)| error.into())
    }

    fn failures<'c>(
        &self,
        cx: &mut Cx<'c, S>,
        site: &mut impl Site<'c, 'v, 'm, S>,
        cast: &Cast<'_, S>,
        accounting: &mut Accounting,
        figures: &mut PhaseFigures,
    ) -> Result<(), HostRunError> {
        // A machine larger than what is left of the pool is refused whole, before it has anything.
        let free = self.pool.counts(cx).counts.free;
        let space = self.vm.create(cx, guest::lower()?)?;
        let span = VirtRange::new(VirtAddr::new(AT), (free + 1) * PageSize::Size2M.bytes())?;
        let kind = VmaKind::private(PageSize::Size2M).pooled();
        match self.vm.map(cx, &space, span, kind, Backing::Private) {
            Err(VmError::NoPool) => accounting.refused_machines += 1,
            Err(error) => return Err(error.into()),
            Ok(_) => return Err(Mismatch::new("machines that the pool cannot hold", 0, 1).into()),
        }
        self.vm.destroy(cx, space).map_err(|(error, _)| error)?;

        // A guest that takes all there is: accesses fail one by one, and nobody else loses anything.
        let greedy = Guest::greedy(cx, self.vm, 2 * self.sizes.greedy)?;
        site.load(cx, greedy.number(), &greedy.space, true);
        let got = greedy.take_all(cx, self.vm, accounting)?;
        figures.small(got);
        accounting.given += got << PAGE_SHIFT;
        accounting.end_guest(&greedy);
        site.load(cx, greedy.number(), &greedy.space, false);
        self.vm.destroy(cx, greedy.space).map_err(|(error, _)| error)?;

        // Memory goes bad under a machine and under a guest: neither frame is ever handed out again.
        let at = |space: &AddressSpaceRef<'_, S>, cx: &mut Cx<'_, S>, at: u64| match self.vm.lookup(
            cx,
            space,
            VirtAddr::new(at),
        ) {
            Lookup::Mapped(leaf) => Ok(leaf.frame),
            _ => Err(Mismatch::new("pages of a machine that is running", 1, 0)),
        };
        let in_pool = at(&cast.prefaulted, cx, AT)?.checked_add(77).unwrap_or(Pfn::new(0));
        self.pool.note_hwpoison(cx, in_pool)?;
        cast.guests[0].touch(cx, self.vm)?;
        for (space, frame) in [(&cast.prefaulted, in_pool), (&cast.guests[0].space, at(&cast.guests[0].space, cx, AT)?)]
        {
            match self.vm.frames().hwpoison(cx, frame) {
                HwPoisoned::InUse => accounting.poisoned += 1,
                _ => return Err(Mismatch::new("bad frames that were in use", 1, 0).into()),
            }
            accounting.check("frames known as bad", 1, self.vm.frames().is_hwpoisoned(frame).into())?;
            let (mut told, head) = (0, self.vm.frames().head_of(frame).map_or(frame, |(head, _)| head));
            self.vm.walk_mappings(cx, head, |_, place| told += u64::from(core::ptr::eq(place.space, &**space)));
            accounting.check("machines to be told of a bad frame", 1, told)?;
        }
        Ok(())
    }

    fn destroy<'c>(
        &self,
        cx: &mut Cx<'c, S>,
        site: &mut impl Site<'c, 'v, 'm, S>,
        cast: Cast<'_, S>,
        accounting: &mut Accounting,
    ) -> Result<(), HostRunError> {
        while let Some(run) = site.pinned() {
            self.vm.unpin(cx, &cast.pinned, run).map_err(|(error, _)| error)?;
        }
        for guest in cast.guests {
            accounting.end_guest(&guest);
            guest.unmap(cx, self.vm, self.granularity)?;
            site.load(cx, guest.number(), &guest.space, false);
            self.vm.destroy(cx, guest.space).map_err(|(error, _)| error)?;
        }
        self.vm.close(cx, cast.shared).map_err(|(error, _)| error)?;
        for space in [cast.prefaulted, cast.pinned] {
            accounting.end_space(&space);
            self.vm.destroy(cx, space).map_err(|(error, _)| error)?;
        }
        Ok(())
    }
}
