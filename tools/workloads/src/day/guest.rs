//! Guests of 4 KiB pages, and their accesses: translated in software, by the tables that hardware would walk.
//!
//! What a guest writes says whose it is and where, so that a page that is lost, handed out twice or not cleared is found.

use super::books::{Books, Wrong};
use super::{AT, By, Trouble};
use hugemm_base::{Clock, Extent, Never, PAGE_BYTES, PAGE_SHIFT, PageSize, PhysMap, VirtAddr};
use hugemm_paging::{Flags, Lookup, Span, SpanError};
use hugemm_vm::{Access, AreaKind, Backing, Cx, Setup, SharedRef, SpaceRef, Vm, VmError};

/// Where shared memory is.
const SHARED_AT: u64 = AT + (1 << 39);

/// After so many accesses that could not be served, a greedy guest has understood.
const PATIENCE: u64 = 8;

/// The addresses of a machine.
pub(crate) fn lower() -> Result<Span, SpanError> {
    Span::new(VirtAddr::new(0), 1 << 47)
}

/// How much memory a guest has, in 4 KiB pages.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Its own.
    pub own: u64,
    /// Shared with the others.
    pub shared: u64,
}

/// One guest.
pub struct Guest<'v, S: Setup> {
    /// Its address space.
    pub space: SpaceRef<'v, S>,
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
    ) -> Result<Self, Trouble> {
        let space = vm.create(cx, lower()?)?;
        let kind = AreaKind::private(PageSize::Size4K);
        vm.map(cx, &space, pages(AT, spread.own)?, kind, Backing::Private)?;
        let kind = AreaKind { shared: true, ..kind };
        vm.map(cx, &space, pages(SHARED_AT, spread.shared)?, kind, Backing::Shared(shared, 0))?;
        Ok(Guest { space, number, spread })
    }

    /// One that shares nothing and wants `own` pages.
    pub(crate) fn greedy(cx: &mut Cx<'_, S>, vm: &'v Vm<'_, S>, own: u64) -> Result<Self, Trouble> {
        let space = vm.create(cx, lower()?)?;
        vm.map(cx, &space, pages(AT, own)?, AreaKind::private(PageSize::Size4K), Backing::Private)?;
        Ok(Guest { space, number: super::GUESTS as u64, spread: Spread { own, shared: 0 } })
    }

    /// Makes all of its memory be there.
    pub(crate) fn fill(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>, by: By) -> Result<(), Trouble> {
        for (at, count) in [(AT, self.spread.own), (SHARED_AT, self.spread.shared)] {
            match by {
                By::Extent => vm.prefault(&self.space, pages(at, count)?, None).work(cx, &Never)?,
                By::Page => (0..count).try_for_each(|page| {
                    let at = VirtAddr::new(at + page * PAGE_BYTES);
                    vm.fault(cx, &self.space, at, Access::Write).map(|_| ())
                })?,
            }
        }
        Ok(())
    }

    /// The word of page `page`: in shared memory every guest has its own word of a page.
    fn stamp(&self, page: u64) -> u64 {
        (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (self.number + 1) << 56
    }

    fn every_page(&self) -> impl Iterator<Item = (VirtAddr, u64)> + use<S> {
        let Spread { own, shared } = self.spread;
        let word = self.number * 8;
        let own = (0..own).map(move |page| (AT + page * PAGE_BYTES, page));
        let shared = (0..shared).map(move |page| (SHARED_AT + page * PAGE_BYTES, page));
        own.chain(shared).map(move |(at, page)| (VirtAddr::new(at + word), page))
    }

    /// Writes to every page, and finds them zero where it writes.
    pub(crate) fn write(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>) -> Result<(), Trouble> {
        for (at, page) in self.every_page() {
            let before = access(cx, vm, &self.space, at, Some(self.stamp(page)))?;
            if before != 0 {
                return Err(Wrong::new("words of fresh memory that are zero", 0, before).into());
            }
        }
        Ok(())
    }

    /// Finds in every page what was written there.
    pub(crate) fn check(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>) -> Result<(), Trouble> {
        for (at, page) in self.every_page() {
            let found = access(cx, vm, &self.space, at, None)?;
            if found != self.stamp(page) {
                return Err(Wrong::new("what a guest wrote", self.stamp(page), found).into());
            }
        }
        Ok(())
    }

    /// Writes to one page after the other until accesses fail for want of memory. Returns how many pages it got.
    pub(crate) fn take_all(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>, books: &mut Books) -> Result<u64, Trouble> {
        let (mut got, mut failed) = (0, 0);
        for (at, page) in self.every_page() {
            match access(cx, vm, &self.space, at, Some(self.stamp(page))) {
                Ok(_) => got += 1,
                Err(VmError::NoMemory) => failed += 1,
                Err(error) => return Err(error.into()),
            }
            if failed == PATIENCE {
                break;
            }
        }
        books.failed_accesses += failed;
        if failed == 0 { Err(Wrong::new("accesses that found no memory", PATIENCE, 0).into()) } else { Ok(got) }
    }

    /// Unmaps everything, one call for each area.
    pub(crate) fn unmap(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>) -> Result<(), Trouble> {
        for (at, count) in [(AT, self.spread.own), (SHARED_AT, self.spread.shared)] {
            vm.unmap(cx, &self.space, pages(at, count)?)?;
        }
        Ok(())
    }

    /// The same with one call, and one flush, for each page.
    pub(crate) fn unmap_by_page(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>) -> Result<(), Trouble> {
        for (at, count) in [(AT, self.spread.own), (SHARED_AT, self.spread.shared)] {
            for page in 0..count {
                vm.unmap(cx, &self.space, pages(at + page * PAGE_BYTES, 1)?)?;
            }
        }
        Ok(())
    }
}

fn pages(at: u64, count: u64) -> Result<Span, SpanError> {
    Span::new(VirtAddr::new(at), count << PAGE_SHIFT)
}

/// Reads the word at `at`, and replaces it by `store` if that is given; faults as long as it has to.
fn access<S: Setup>(
    cx: &mut Cx<'_, S>,
    vm: &Vm<'_, S>,
    space: &SpaceRef<'_, S>,
    at: VirtAddr,
    store: Option<u64>,
) -> Result<u64, VmError> {
    let kind = if store.is_some() { Access::Write } else { Access::Read };
    let needs = if store.is_some() { Flags::WRITE } else { Flags::NONE };
    loop {
        if let Lookup::Mapped(leaf) = vm.lookup(cx, space, at)
            && leaf.flags.contains(needs)
        {
            let within = at.get() & (leaf.size.bytes() - 1);
            let frame = leaf.frame.checked_add(within >> PAGE_SHIFT).ok_or(VmError::Unreachable)?;
            let extent = Extent::new(frame, 1).map_err(|_| VmError::Unreachable)?;
            let window = cx.platform().open(extent, None).ok_or(VmError::Unreachable)?;
            // SAFETY: the word lies in the frame. The page is mapped and no other task unmaps it; the day has one task but
            // for creations, which concern other pages.
            unsafe {
                let word = window.ptr.add((within & (PAGE_BYTES - 1)) as usize).cast::<u64>();
                let found = word.read_volatile();
                if let Some(value) = store {
                    word.write_volatile(value);
                }
                cx.platform().close(window);
                return Ok(found);
            }
        }
        vm.fault(cx, space, at, kind)?;
    }
}
