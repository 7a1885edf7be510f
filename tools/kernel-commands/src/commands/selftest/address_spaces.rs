//! Address spaces keep what is stored in them: all CPUs fault, prefault, unmap, discard, protect, fork and write in one space at once,
//! read and write it from outside, and clear free memory ahead of need.
//!
//! Each CPU has a plot of its own, an area of 4 KiB pages and one of 2 MiB pages: it knows what it stored in every page, and that a page
//! which it has unmapped is zero again. In the common area, which maps a file in memory, each CPU has a word of its own in every page; what
//! it has stored there is in the file when that has been written back. A third area can be read, and nobody may store there. A child of a
//! fork has to show its maker's plot as it was, and must not be seen by the parent.

use super::file::{self, FILE, WORDS};
use super::{Cx, Done, Failure, Finding, Steps, on_all, stored, vec_of};
use core::sync::atomic::{AtomicU32, Ordering};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::random::Random;
use hugemm_base::{Never, PAGE_BYTES, PageSize, VirtAddr, VirtRange};
use hugemm_clear::{ClearPolicy, Clearer, Features, Profile};
use hugemm_kernel::page_fault::{load, store};
use hugemm_kernel::percpu;
use hugemm_kernel::vm::{self, OnKernel};
use hugemm_paging::ShootdownPolicy;
use hugemm_vm::{
    AccessError, AddressSpace, Advice, Backing, Discard, NoPager, Pools, Protection, SharedRef, Vm, VmError, VmaKind,
    ZeroTurn, ZeroWorker,
};

/// Where the plots are.
const PLOTS: u64 = 0x20_0000_0000;
/// From one plot to the next.
const STRIDE: u64 = 1 << 30;
/// Where a plot's huge pages are.
const HUGE: u64 = 512 << 20;
/// How far away a part of a plot goes.
const ELSEWHERE: u64 = 0x40_0000_0000;
/// Small pages of a plot, and of the common area.
const SMALL_PAGES: u64 = file::PAGES;
/// Huge pages of a plot.
const HUGE_PAGES: u64 = 2;
/// Where the common area is.
const COMMON: u64 = 0x10_0000_0000;
/// Where an area is that nobody may store to, as large.
const READ_ONLY: u64 = 0x18_0000_0000;
/// Steps of each CPU in a round, at most.
const STEPS: u64 = 300;
/// Accesses of a step.
const ACCESSES: u64 = 32;
/// Forks at a time: pages with more references than sixteen take a frame for a counter, for ever.
const FORKS: u32 = 4;

type Own = OnKernel;
type Manager = Vm<'static, Own>;

/// What a CPU knows of its pages: the word that it stored last, 0 for none.
struct Known {
    small: [u64; SMALL_PAGES as usize],
    huge: [u64; HUGE_PAGES as usize],
    common: [u64; SMALL_PAGES as usize],
}

struct Round<'v> {
    vm: &'v Manager,
    common: &'v SharedRef<'v, Own>,
    space: &'v AddressSpace<Own>,
    steps: Steps,
    forks: AtomicU32,
    zeroes: ZeroWorker,
}

struct Task<'r> {
    round: &'r Round<'r>,
    cpu: u32,
    known: &'r mut Known,
    random: Random,
}

/// One round on all CPUs, until `until` at the latest.
pub fn round(cx: Cx<'_>, seed: u64, until: u64) -> Result<(), Failure> {
    file::with(cx, |cx| in_common(cx, seed, until))
}

fn in_common(cx: Cx<'_>, seed: u64, until: u64) -> Result<(), Failure> {
    let features = Features::detect();
    let clearer = Clearer::new(features, ClearPolicy::new(Profile::uncalibrated(&features, None)))?;
    let cpus = percpu::count();
    let mut known = vec_of(cpus as usize, || Known {
        small: [0; SMALL_PAGES as usize],
        huge: [0; HUGE_PAGES as usize],
        common: [0; SMALL_PAGES as usize],
    })?;
    // SAFETY: the clearer is made from what `Features::detect` finds.
    let manager = unsafe { vm::manager(clearer, ShootdownPolicy::BATCHED, NoPager, Pools::default()) }?;
    let space = manager.create(cx, vm::lower_half()?)?;
    let result = match set_up(cx, &manager, &space, cpus) {
        Ok(common) => {
            let round = Round {
                vm: &manager,
                common: &common,
                space: &space,
                steps: Steps::until(until),
                forks: AtomicU32::new(0),
                zeroes: ZeroWorker::new(&clearer, PageSize::Size2M, 100),
            };
            let parts: Lock<SpinLock, _> = Lock::new(known.iter_mut());
            let found = on_all(cx, |cx, cpu| {
                let Some(known) = parts.lock().next() else { return Ok(()) };
                let random = Random(seed ^ u64::from(cpu) << 40);
                let mut task = Task { round: &round, cpu, known, random };
                task.run(cx)
            });
            manager.close(cx, common).map_err(|(error, _)| error)?;
            found
        }
        Err(error) => Err(error.into()),
    };
    manager.destroy(cx, space).map_err(|(error, _)| error)?;
    manager.trim(cx);
    result
}

/// Every CPU's plot, and the common area.
fn set_up<'v>(
    cx: Cx<'_>,
    manager: &'v Manager,
    space: &AddressSpace<Own>,
    cpus: u32,
) -> Result<SharedRef<'v, Own>, VmError> {
    for cpu in 0..cpus {
        for (part, kind) in [plot(cpu), huge_plot(cpu)] {
            manager.map(cx, space, part, kind, Backing::Private)?;
        }
    }
    let read_only = VmaKind::private(PageSize::Size4K).allowing(Protection::USER);
    manager.map(cx, space, span(READ_ONLY, SMALL_PAGES), read_only, Backing::Private)?;
    let common = manager.open_source(cx, &FILE)?;
    let span = span(COMMON, SMALL_PAGES);
    match manager.map(cx, space, span, VmaKind::private(PageSize::Size4K), Backing::Shared(&common, 0)) {
        Ok(_) => Ok(common),
        Err(error) => {
            manager.close(cx, common).map_err(|(error, _)| error)?;
            Err(error)
        }
    }
}

/// A CPU's area of small pages.
fn plot(cpu: u32) -> (VirtRange, VmaKind) {
    (span(PLOTS + u64::from(cpu) * STRIDE, SMALL_PAGES), VmaKind::private(PageSize::Size4K))
}

/// A CPU's area of huge pages.
fn huge_plot(cpu: u32) -> (VirtRange, VmaKind) {
    let pages = HUGE_PAGES * PageSize::Size2M.pages();
    (span(PLOTS + u64::from(cpu) * STRIDE + HUGE, pages), VmaKind::private(PageSize::Size2M))
}

fn span(start: u64, pages: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), pages * PAGE_BYTES).unwrap_or_else(|error| panic!("{error}"))
}

/// Nothing if there was no memory for it.
fn unless_short<T>(result: Result<T, VmError>) -> Result<Option<T>, Failure> {
    match result {
        Ok(done) => Ok(Some(done)),
        Err(VmError::NoMemory) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Tries again while there is no memory for it: others give some back, since forks end.
fn until_it_can(mut f: impl FnMut() -> Result<(), VmError>) -> Result<(), Failure> {
    while unless_short(f())?.is_none() {
        percpu::beat();
    }
    Ok(())
}

impl Task<'_> {
    fn run(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        // Once in any case: a busy host may leave time for a few steps only.
        if self.cpu == 0 {
            self.zero_ahead(cx);
        }
        self.round.steps.each(cx, STEPS, |cx, step| {
            match self.random.below(19) {
                0 => self.fork(cx)?,
                1..=3 => self.renew(cx)?,
                4 => self.prefault(cx)?,
                5 => self.protect(cx)?,
                6 => self.zero_ahead(cx),
                7 => self.read_and_write(cx)?,
                8 => self.move_away(cx)?,
                9 => self.lock(cx)?,
                10 => self.write_back(cx)?,
                11 => self.advise(cx)?,
                _ => vm::with(cx, self.round.vm, self.round.space, |_| self.access(step + 1))?,
            }
            Done::Accesses.add(1);
            Ok(())
        })
    }

    /// Any page of the plot or of the common area: where this CPU's word of it is, and what is known of it.
    fn any_page(&mut self) -> (VirtAddr, &mut u64) {
        let (small, huge) = (plot(self.cpu).0.start().get(), huge_plot(self.cpu).0.start().get());
        // One of a page's 512 words for each CPU; there are 64 CPUs at most.
        let own = u64::from(self.cpu) * 8;
        let page = self.random.below(SMALL_PAGES);
        let index = page as usize;
        match self.random.below(3) {
            0 => (VirtAddr::new(small + page * PAGE_BYTES + own), &mut self.known.small[index]),
            1 => (VirtAddr::new(COMMON + page * PAGE_BYTES + own), &mut self.known.common[index]),
            _ => {
                let page = page % HUGE_PAGES;
                let at = VirtAddr::new(huge + page * PageSize::Size2M.bytes() + own);
                (at, &mut self.known.huge[page as usize])
            }
        }
    }

    /// Stores and loads; what cannot be served for lack of memory, or is not allowed, has changed nothing.
    fn access(&mut self, word: u64) -> Result<(), Failure> {
        let at = VirtAddr::new(READ_ONLY + self.random.below(SMALL_PAGES) * PAGE_BYTES);
        check(self.cpu, at, 0)?;
        // SAFETY: nobody has anything there.
        if unsafe { store(at, word) } {
            return Err(stored(at.get()).into());
        }
        for _ in 0..ACCESSES {
            let (cpu, writes) = (self.cpu, self.random.below(2) == 0);
            let (at, known) = self.any_page();
            check(cpu, at, *known)?;
            // SAFETY: the word is this CPU's, in a space that is for this.
            if writes && unsafe { store(at, word) } {
                *known = word;
                check(cpu, at, word)?;
            }
        }
        Ok(())
    }

    /// Any part of the plot, its kind, and what is known of its pages.
    fn any_part(&mut self) -> (VirtRange, VmaKind, &mut [u64]) {
        let huge = self.random.below(4) == 0;
        let ((area, kind), known) = match huge {
            true => (huge_plot(self.cpu), &mut self.known.huge[..]),
            false => (plot(self.cpu), &mut self.known.small[..]),
        };
        let (first, pages) = (self.random.below(known.len() as u64), self.random.below(known.len() as u64) + 1);
        let known = &mut known[first as usize..];
        let pages = pages.min(known.len() as u64);
        let (bytes, start) = (kind.page.bytes(), area.start().get());
        (span(start + first * bytes, pages * kind.page.pages()), kind, &mut known[..pages as usize])
    }

    /// Nobody may store to a part of the plot, for a while.
    fn protect(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let (round, cpu) = (self.round, self.cpu);
        let (part, kind, known) = self.any_part();
        let places = (part.start().get() + u64::from(cpu) * 8..).step_by(kind.page.bytes() as usize).map(VirtAddr::new);
        // Where it had to be cut, and could not be, nothing has changed.
        let Some(()) = unless_short(round.vm.protect(cx, round.space, part, Protection::USER))? else { return Ok(()) };
        vm::with(cx, round.vm, round.space, |_| -> Result<(), Failure> {
            for (at, known) in places.clone().zip(&*known) {
                check(cpu, at, *known)?;
                // SAFETY: the word is this CPU's, in a space that is for this.
                if unsafe { store(at, !*known) } {
                    return Err(stored(at.get()).into());
                }
            }
            Ok(())
        })?;
        round.vm.protect(cx, round.space, part, kind.protection)?;
        vm::with(cx, round.vm, round.space, |_| {
            for (at, known) in places.zip(known) {
                check(cpu, at, *known)?;
                // SAFETY: as above.
                if unsafe { store(at, !*known) } {
                    *known = !*known;
                }
            }
            Ok(())
        })
    }

    /// A part of the plot is elsewhere for a while, with what is in it, and comes back.
    fn move_away(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let (round, cpu) = (self.round, self.cpu);
        // By whole tables and huge pages, or by entries.
        let aside = self.random.below(2) * PAGE_BYTES;
        let (part, kind, known) = self.any_part();
        let aside = if kind.page == PageSize::Size4K { aside } else { 0 };
        let there = span(part.start().get() + ELSEWHERE + aside, part.pages());
        let places = |from: VirtRange| {
            let word = from.start().get() + u64::from(cpu) * 8;
            (word..).step_by(kind.page.bytes() as usize).map(VirtAddr::new)
        };
        // The same where there was no table.
        let Some(()) = unless_short(round.vm.move_to(cx, round.space, part, there))? else { return Ok(()) };
        vm::with(cx, round.vm, round.space, |_| -> Result<(), Failure> {
            for ((at, old), known) in places(there).zip(places(part)).zip(&mut *known) {
                check(cpu, at, *known)?;
                // SAFETY: the word is this CPU's, in a space that is for this.
                if unsafe { store(at, !*known) } {
                    *known = !*known;
                }
                // SAFETY: as above; nothing is there.
                if unsafe { load(old) }.is_some() {
                    let what = format_args!("cpu{cpu} reaches what has moved away from {:#x}", old.get());
                    return Err(Finding::new("address spaces", what).into());
                }
            }
            Ok(())
        })?;
        until_it_can(|| round.vm.move_to(cx, round.space, there, part))?;
        vm::with(cx, round.vm, round.space, |_| {
            places(part).zip(known).try_for_each(|(at, known)| check(cpu, at, *known))
        })
    }

    /// What this CPU has stored to a page of the common area is in the file.
    fn write_back(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let (round, page) = (self.round, self.random.below(SMALL_PAGES));
        let Some(_) = unless_short(round.vm.sync(cx, round.common, page, page + 1))? else { return Ok(()) };
        let (known, written) = (self.known.common[page as usize], FILE.word(page * WORDS + u64::from(self.cpu)));
        let written = written.load(Ordering::Relaxed);
        if written != known {
            let what = format_args!("cpu{} has {written:#x} in page {page} of a file, not {known:#x}", self.cpu);
            return Err(Finding::new("address spaces", what).into());
        }
        Ok(())
    }

    /// A part of the plot is locked for a while: all of it is there.
    fn lock(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let round = self.round;
        let (part, ..) = self.any_part();
        if unless_short(round.vm.lock(cx, round.space, part, u64::MAX))?.is_some() {
            let present = round.vm.usage(cx, round.space, part)?.present;
            if present != part.pages() {
                let what = format_args!("{present} pages of {} are locked at {}", part.pages(), part.start());
                return Err(Finding::new("address spaces", what).into());
            }
        }
        until_it_can(|| round.vm.unlock(cx, round.space, part))
    }

    /// A word is read and written through the direct map.
    fn read_and_write(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let (round, cpu, word) = (self.round, self.cpu, self.random.below(u64::MAX));
        let (at, known) = self.any_page();
        let mut found = [0; 8];
        let cause = |error: AccessError| error.cause;
        let read = unless_short(round.vm.read(cx, round.space, at, &mut found).map_err(cause))?;
        if read.is_some() && found != known.to_ne_bytes() {
            let found = u64::from_ne_bytes(found);
            let what = format_args!("cpu{cpu} read {found:#x} from outside at {:#x}, not {known:#x}", at.get());
            return Err(Finding::new("address spaces", what).into());
        }
        if unless_short(round.vm.write(cx, round.space, at, &word.to_ne_bytes()).map_err(cause))?.is_some() {
            *known = word;
        }
        let known = *known;
        vm::with(cx, round.vm, round.space, |_| check(cpu, at, known))
    }

    /// How a part of the plot is used changes nothing of what is in it. Nobody takes pages away here, so neither does that it may go.
    fn advise(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let (round, advice) = (self.round, self.random.below(6));
        let all = [Advice::Normal, Advice::Sequential, Advice::Random, Advice::WillNeed, Advice::Cold];
        let (part, ..) = self.any_part();
        let done = match all.get(advice as usize) {
            Some(advice) => round.vm.advise(cx, round.space, part, *advice),
            None => round.vm.discard(cx, round.space, part, Discard::WhenShort).map(|_| ()),
        };
        match done {
            Ok(()) | Err(VmError::NoMemory) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives up what a part of the plot has, or unmaps it and makes it anew: it is zero then.
    fn renew(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let (round, stays) = (self.round, self.random.below(2) == 0);
        let (part, kind, known) = self.any_part();
        if stays {
            round.vm.discard(cx, round.space, part, Discard::Now)?;
            known.fill(0);
            return Ok(());
        }
        let Some(_) = unless_short(round.vm.unmap(cx, round.space, part))? else { return Ok(()) };
        known.fill(0);
        until_it_can(|| round.vm.map(cx, round.space, part, kind, Backing::Private).map(|_| ()))
    }

    fn prefault(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let (area, _) = if self.random.below(2) == 0 { plot(self.cpu) } else { huge_plot(self.cpu) };
        unless_short(self.round.vm.prefault(self.round.space, area, None).work(cx, &Never)).map(|_| ())
    }

    /// What is known to be zero from here on is not cleared again when somebody's page is made of it.
    fn zero_ahead(&mut self, cx: Cx<'_>) {
        if let ZeroTurn::Cleared { bytes, .. } = self.round.vm.zero_ahead(cx, &self.round.zeroes, &Never) {
            Done::ZeroedAhead.add(bytes);
        }
    }

    /// A child shows the plot as it is, and keeps what it stores to itself.
    fn fork(&mut self, cx: Cx<'_>) -> Result<(), Failure> {
        let round = self.round;
        // Relaxed: only the number counts.
        if round.forks.fetch_add(1, Ordering::Relaxed) < FORKS
            && let Some(child) = unless_short(round.vm.fork(cx, round.space))?
        {
            let result = vm::with(cx, round.vm, &child, |_| self.look_at_child());
            round.vm.destroy(cx, child).map_err(|(error, _)| error)?;
            result?;
        }
        round.forks.fetch_sub(1, Ordering::Relaxed);
        vm::with(cx, round.vm, round.space, |_| self.access(u64::MAX))
    }

    fn look_at_child(&mut self) -> Result<(), Failure> {
        for _ in 0..ACCESSES {
            let cpu = self.cpu;
            let (at, known) = self.any_page();
            // The common area is the parent's too.
            if at.get() < PLOTS {
                continue;
            }
            let known = *known;
            check(cpu, at, known)?;
            // SAFETY: a space that is for this; put back, so that it can be looked at again.
            if unsafe { store(at, !known) } {
                check(cpu, at, !known)?;
                // SAFETY: as above.
                let _ = unsafe { store(at, known) };
            }
        }
        Ok(())
    }
}

/// A word has to be there; nothing is said if it cannot be loaded for lack of memory.
fn check(cpu: u32, at: VirtAddr, expected: u64) -> Result<(), Failure> {
    // SAFETY: a word of the loaded space, which this part's tasks alone access.
    match unsafe { load(at) } {
        Some(found) if found != expected => Err(Finding::new(
            "address spaces",
            format_args!("cpu{cpu} found {found:#x} at {:#x}, not {expected:#x}", at.get()),
        )
        .into()),
        // A page whose content is known to be something is there, or can be read from where it was taken to.
        _ => Ok(()),
    }
}
