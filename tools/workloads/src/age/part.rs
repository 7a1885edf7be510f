//! A process from one turn to the next, as the CPU that plays it keeps it.

use super::{Failed, Process, Touch, Touched};
use hugemm_base::random::Random;
use hugemm_base::{Order, PageSize, VirtAddr, VirtRange};
use hugemm_vm::{AddressSpace, Backing, Cx, Pinned, Setup, SharedRef, Vm, VmError, VmaKind};

/// Where the region that processes share begins in every space.
pub const SHARED_AT: VirtAddr = VirtAddr::new(1 << 40);

/// Where a process's own memory begins.
pub const OWN_AT: VirtAddr = VirtAddr::new(2 << 40);

/// One of so many forks ends a pin.
const PIN_EACH: u64 = 16;

/// What a process knows: what it wrote last into each page that it shares, and of its own; a child's.
#[derive(Debug)]
pub struct Part<'b, 'v> {
    /// As `Guest::number`.
    pub number: u32,
    /// Of the shared region.
    pub shared: &'b mut [u32],
    /// Of its own; empty if it has none.
    pub own: &'b mut [u32],
    /// As long as that.
    pub spare: &'b mut [u32],
    /// As [`Process::stores`].
    pub stores: u32,
    /// A page of its own that a device has.
    pub pinned: Option<Pinned<'v>>,
}

/// What a turn consists of.
#[derive(Debug)]
pub struct Turn<'t> {
    /// The size of the regions' pages.
    pub page: PageSize,
    /// As of [`Process::window`]; so many are read from end to end after it.
    pub hot: u64,
    /// A page of the process's own is pinned, and it forks, and unmaps and maps anew.
    pub forks: bool,
    /// Choices of its player.
    pub random: &'t mut Random,
    /// What comes of it.
    pub touched: &'t mut Touched,
}

/// Maps both regions: so many bytes that are shared, and so many of the process's own.
pub fn set_up<S: Setup>(
    cx: &mut Cx<'_, S>,
    vm: &Vm<'_, S>,
    space: &AddressSpace<S>,
    object: &SharedRef<'_, S>,
    [shared, own]: [u64; 2],
    page: PageSize,
) -> Result<(), VmError> {
    let kind = VmaKind::private(page);
    let span = |at, bytes| VirtRange::new(at, bytes).map_err(|_| VmError::OutOfBounds { at });
    vm.map(cx, space, span(SHARED_AT, shared)?, kind, Backing::Shared(object, 0))?;
    if own > 0 {
        vm.map(cx, space, span(OWN_AT, own)?, kind, Backing::Private)?;
    }
    Ok(())
}

impl<'b, 'v> Part<'b, 'v> {
    /// The part of process `number`, which has written nothing yet.
    pub fn new(number: u32, shared: &'b mut [u32], own: &'b mut [u32], spare: &'b mut [u32]) -> Self {
        Part { number, shared, own, spare, stores: 0, pinned: None }
    }

    /// A window of each region, and the rest of the turn.
    pub fn turn<S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &'v Vm<'_, S>,
        space: &AddressSpace<S>,
        touch: &impl Touch<S>,
        turn: Turn<'_>,
    ) -> Result<(), Failed> {
        let Turn { page, hot, forks, random, touched } = turn;
        // What a kernel takes for itself meanwhile is reclaimed for like what processes have.
        match vm.frames().alloc_or_relieve(cx, vm, Order::ZERO) {
            Ok(own) => vm.frames().free(cx, own),
            Err(_) => touched.refused += 1,
        }
        for (at, wrote, alone) in [(SHARED_AT, &mut *self.shared, false), (OWN_AT, &mut *self.own, true)] {
            if wrote.is_empty() {
                continue;
            }
            let random = Random(random.below(u64::MAX));
            let mut process = Process { number: self.number, at, wrote, alone, random, stores: self.stores };
            let mut result = Ok(());
            touch.with(cx, vm, space, &mut |cx| {
                result = process
                    .window(cx, vm, space, touch, hot, touched)
                    .and_then(|()| process.read_whole(cx, vm, space, touch, hot, touched));
            });
            self.stores = process.stores;
            result?;
        }
        if !forks {
            return Ok(());
        }
        let random = Random(random.below(u64::MAX));
        let (number, wrote, stores) = (self.number, &mut *self.own, self.stores);
        let mut process = Process { number, at: OWN_AT, wrote, alone: true, random, stores };
        // A device has a page while others reclaim, and while the process touches, forks and unmaps.
        if self.pinned.is_none() {
            self.pinned = process.pin(cx, vm, space, page, touched)?;
        }
        let result = process.fork_and_unmap(cx, vm, space, touch, page, self.spare, touched);
        let looked = self.pinned.as_ref().map_or(Ok(false), |pinned| process.look_at_pinned(cx, vm, space, pinned));
        let ends = looked != Ok(true) || process.random.below(PIN_EACH) == 0;
        self.stores = process.stores;
        looked?;
        if ends {
            self.unpin(cx, vm, space)?;
        }
        result
    }

    /// Takes its page from the device.
    pub fn unpin<S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        space: &AddressSpace<S>,
    ) -> Result<(), Failed> {
        self.pinned.take().map_or(Ok(()), |pinned| vm.unpin(cx, space, pinned).map_err(|(error, _)| error.into()))
    }
}
