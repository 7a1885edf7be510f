//! Guests of 4 KiB pages, and their accesses: translated in software, by the tables that hardware would walk.
//!
//! What a guest writes says whose it is and where, so that a page that is lost, handed out twice or not cleared is found.

use super::accounting::{Accounting, Mismatch};
use super::walk::{Reached, reach};
use super::{AT, GATHERED, Granularity, HostRunError};
use hugemm_base::{Clock, CpuCx, Never, PAGE_BYTES, PAGE_SHIFT, PageSize, VirtAddr, with};
use hugemm_base::{VirtRange, VirtRangeError, platform::Cpu};
use hugemm_vm::{Access, AddressSpaceRef, Backing, Cx, Setup, SharedRef, Vm, VmError, VmaKind};

/// Where shared memory is.
const SHARED_AT: u64 = AT + (1 << 39);

/// After so many accesses that could not be served, a greedy guest has understood.
const PATIENCE: u64 = 8;

/// The addresses of a machine.
pub(crate) fn lower() -> Result<VirtRange, VirtRangeError> {
    VirtRange::new(VirtAddr::new(0), 1 << 47)
}

/// How much memory a guest has, in 4 KiB pages.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Its own.
    pub own: u64,
    /// Shared with the others.
    pub shared: u64,
}

/// One of a guest's pages.
#[derive(Clone, Copy)]
struct Page {
    /// Among its own, or among those that it shares.
    number: u64,
    own: bool,
}

impl Page {
    fn at(self) -> VirtAddr {
        let first = if self.own { AT } else { SHARED_AT };
        VirtAddr::new(first + self.number * PAGE_BYTES)
    }
}

/// One guest.
pub struct Guest<'v, S: Setup> {
    /// Its address space.
    pub space: AddressSpaceRef<'v, S>,
    number: u64,
    spread: Spread,
}

impl<'v, S: Setup> Guest<'v, S>
where
    S::Platform: Clock,
{
    /// A guest whose memory is promised, and not there yet.
    pub(crate) fn new(
        cx: &mut Cx<'_, S>,
        vm: &'v Vm<'_, S>,
        number: u64,
        spread: Spread,
        shared: &SharedRef<'v, S>,
    ) -> Result<Self, HostRunError> {
        let space = vm.create(cx, lower()?)?;
        let kind = VmaKind::private(PageSize::Size4K);
        vm.map(cx, &space, pages(AT, spread.own)?, kind, Backing::Private)?;
        let kind = with!(kind, shared = true);
        vm.map(cx, &space, pages(SHARED_AT, spread.shared)?, kind, Backing::Shared(shared, 0))?;
        Ok(Guest { space, number, spread })
    }

    /// One that shares nothing and wants `own` pages.
    pub(crate) fn greedy(cx: &mut Cx<'_, S>, vm: &'v Vm<'_, S>, own: u64) -> Result<Self, HostRunError> {
        let space = vm.create(cx, lower()?)?;
        vm.map(cx, &space, pages(AT, own)?, VmaKind::private(PageSize::Size4K), Backing::Private)?;
        Ok(Guest { space, number: super::GUESTS as u64, spread: Spread { own, shared: 0 } })
    }

    /// Its number; that of a greedy one is the number of the others.
    pub(crate) fn number(&self) -> u32 {
        self.number as u32
    }

    /// Makes all of its memory be there.
    pub(crate) fn fill(
        &self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        granularity: Granularity,
    ) -> Result<(), HostRunError> {
        for (at, count) in [(AT, self.spread.own), (SHARED_AT, self.spread.shared)] {
            match granularity {
                Granularity::Extent => vm.prefault(&self.space, pages(at, count)?, None).work(cx, &Never)?,
                Granularity::Page => (0..count).try_for_each(|page| {
                    cond_resched(cx, page);
                    let at = VirtAddr::new(at + page * PAGE_BYTES);
                    vm.fault(cx, &self.space, at, Access::Write).map(|_| ())
                })?,
            }
        }
        Ok(())
    }

    /// What it writes to a word of a page.
    fn stamp(&self, page: u64, word: usize) -> u64 {
        (page * 512 + word as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((self.number + 1) << 56)
    }

    /// Every page, its own first.
    fn every_page(&self) -> impl Iterator<Item = Page> + use<S> {
        let Spread { own, shared } = self.spread;
        let own = (0..own).map(|number| Page { number, own: true });
        own.chain((0..shared).map(|number| Page { number, own: false }))
    }

    /// Writes to every page, and finds it zero where it writes.
    pub(crate) fn write(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>) -> Result<(), HostRunError> {
        self.every_page().try_for_each(|page| self.write_page(cx, vm, page))
    }

    fn write_page(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>, page: Page) -> Result<(), HostRunError> {
        cond_resched(cx, page.number);
        access(cx, vm, &self.space, page.at(), true, |reached| {
            for word in words(self.number, page.own) {
                let before = reached.replace(word, self.stamp(page.number, word));
                if before != 0 {
                    return Err(Mismatch::new("words of fresh memory that are zero", 0, before).into());
                }
            }
            Ok(())
        })?
    }

    /// Finds in every page what was written there.
    pub(crate) fn check(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>) -> Result<(), HostRunError> {
        self.every_page().try_for_each(|page| self.check_page(cx, vm, page))
    }

    /// The same for the first pages of its own.
    pub(crate) fn check_own(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>, pages: u64) -> Result<(), HostRunError> {
        self.every_page().take(pages as usize).try_for_each(|page| self.check_page(cx, vm, page))
    }

    fn check_page(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>, page: Page) -> Result<(), HostRunError> {
        cond_resched(cx, page.number);
        access(cx, vm, &self.space, page.at(), false, |reached| {
            for word in words(self.number, page.own) {
                let (found, expected) = (reached.read(word), self.stamp(page.number, word));
                if found != expected {
                    return Err(Mismatch::new("what a guest wrote", expected, found).into());
                }
            }
            Ok(())
        })?
    }

    /// How many pages it has used since this was asked last: in one walk of each area, or in one of each page table.
    pub(crate) fn working_set(
        &self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        granularity: Granularity,
    ) -> Result<u64, HostRunError> {
        let most = if granularity == Granularity::Extent { u64::MAX } else { PageSize::Size2M.pages() };
        let mut used = 0;
        for span in self.parts(most) {
            used += vm.test_and_clear_young(cx, &self.space, span?, |_| ())?;
        }
        Ok(used)
    }

    /// All of its memory, in parts of so many pages at most.
    fn parts(&self, most: u64) -> impl Iterator<Item = Result<VirtRange, VirtRangeError>> + use<S> {
        let areas = [(AT, self.spread.own), (SHARED_AT, self.spread.shared)];
        areas.into_iter().flat_map(move |(at, count)| {
            let step = most.clamp(1, count.max(1));
            let parts = (0..count).step_by(step as usize);
            parts.map(move |page| pages(at + page * PAGE_BYTES, step.min(count - page)))
        })
    }

    /// Makes its first page be there.
    pub(crate) fn touch(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>) -> Result<(), HostRunError> {
        access(cx, vm, &self.space, VirtAddr::new(AT), false, |_| ())?;
        Ok(())
    }

    /// Writes to one page after the other until accesses fail for want of memory. Returns how many pages it got.
    pub(crate) fn take_all(
        &self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        accounting: &mut Accounting,
    ) -> Result<u64, HostRunError> {
        let (mut got, mut failed) = (0, 0);
        for page in self.every_page() {
            match self.write_page(cx, vm, page) {
                Ok(()) => got += 1,
                Err(HostRunError::Vm(VmError::NoMemory)) => failed += 1,
                Err(error) => return Err(error),
            }
            if failed == PATIENCE {
                break;
            }
        }
        accounting.failed_accesses += failed;
        if failed == 0 { Err(Mismatch::new("accesses that found no memory", PATIENCE, 0).into()) } else { Ok(got) }
    }

    /// Unmaps everything: one call, and one flush, for each area, or for as much as a kernel gathers.
    pub(crate) fn unmap(
        &self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        granularity: Granularity,
    ) -> Result<(), HostRunError> {
        for span in self.parts(if granularity == Granularity::Extent { u64::MAX } else { GATHERED }) {
            vm.unmap(cx, &self.space, span?)?;
        }
        Ok(())
    }
}

/// A reschedule point, every so many pages.
fn cond_resched<P: Cpu>(cx: &mut CpuCx<'_, P>, page: u64) {
    if page.is_multiple_of(256) {
        cx.cond_resched();
    }
}

fn pages(at: u64, count: u64) -> Result<VirtRange, VirtRangeError> {
    VirtRange::new(VirtAddr::new(at), count << PAGE_SHIFT)
}

/// The words of a page that are a guest's: of shared memory one, of its own so many that a page compresses to about a tenth.
fn words(guest: u64, own: bool) -> core::iter::StepBy<core::ops::Range<usize>> {
    let first = guest as usize;
    if own { (first..512).step_by(16) } else { (first..first + 1).step_by(1) }
}

/// What `f` makes of the page at `at`, with the CPU pinned from the walk to the end of the use. Faults as long as it has to.
fn access<S: Setup, R>(
    cx: &mut Cx<'_, S>,
    vm: &Vm<'_, S>,
    space: &AddressSpaceRef<'_, S>,
    at: VirtAddr,
    write: bool,
    f: impl Fn(Reached<'_>) -> R,
) -> Result<R, VmError> {
    let kind = if write { Access::Write } else { Access::Read };
    loop {
        vm.shootdown().handle_ipi(cx);
        let used = cx.pinned(|pin| {
            // SAFETY: the tables are the space's, and go with it. Either nobody else takes pages away (`Site::beside_worker`), or the CPU has
            // the space loaded (`HostRun::pressure`), and whoever does waits for it: it answers above, or by an interrupt, and not while it is pinned.
            unsafe { reach::<S::Format>(cx.platform(), pin, space.root(), at, write) }.map(&f)
        });
        match used {
            Some(result) => return Ok(result),
            None => vm.fault(cx, space, at, kind)?,
        };
    }
}
