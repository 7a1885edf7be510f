//! Clearing a region page by page, as demand faults and prefault do: hugemm's side of the workload of
//! "mm, folio_zero_user: support clearing page ranges".
//!
//! Here a fault is a function call without a trap: a *software fault*. It clears the page in the order around the
//! address that will be touched, and then touches it. The page tables' part comes with the address spaces.

use crate::{Interrupted, Loan, Pass, Reason, timed};
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, Clock, CpuCx, Dirty, PAGE_SHIFT, PageSize, PhysMap};
use hugemm_clear::{ClearRequest, Clearer, Observer, folio};

/// Who asks for the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Populate {
    /// A task that touches one byte of each page, in ascending order: each page is a request of its own.
    Demand,
    /// A prefault of a region of which this is all or a worker's part; nobody touches it yet.
    Prefault {
        /// Bytes of the whole request.
        total: u64,
    },
}

/// Clears `memory` once, a `page` at a time.
///
/// `touched` gives, for each page's index, the byte offset at which the page is touched (`perf bench` touches offset 0,
/// or a random one); it is called outside nothing and inside the timed loop, so it must be cheap. Passes reschedule and
/// cancellation points.
#[allow(clippy::too_many_arguments, reason = "a workload's parameters, each independent")]
pub fn pass<P: Cpu + PhysMap + Clock>(
    cx: &mut CpuCx<'_, P>,
    clearer: &Clearer,
    memory: Dirty,
    page: PageSize,
    populate: Populate,
    touched: impl Fn(u64) -> u64,
    cancel: &impl Cancel,
    observer: &mut impl Observer,
) -> Result<(Dirty, Pass), Interrupted> {
    let whole = memory.extent();
    if !whole.bytes().is_multiple_of(page.bytes()) {
        return Err(Interrupted { memory, reason: Reason::BadSize });
    }
    let request = match populate {
        Populate::Demand => ClearRequest::fault(page.bytes()),
        Populate::Prefault { total } => ClearRequest::bulk(total),
    };
    let mut loan = Loan::new(memory);
    let platform = cx.platform();
    let (stopped, nanos) = timed(platform, || {
        for index in 0..whole.pages() / page.pages() {
            let frames = whole.slice(index * page.pages(), (index + 1) * page.pages());
            let offset = touched(index) & (page.bytes() - 1);
            let dirty = loan.piece(index * page.pages(), (index + 1) * page.pages());
            let clearing = match populate {
                Populate::Demand => folio::begin_around(dirty, offset >> PAGE_SHIFT),
                Populate::Prefault { .. } => dirty.begin(),
            };
            let zeroed = clearer.clear_observed(cx, clearing, &request, cancel, observer);
            zeroed.map_err(|stopped| stopped.reason)?.into_extent();
            if populate == Populate::Demand
                && let Some(window) = platform.open(frames.slice(offset >> PAGE_SHIFT, u64::MAX), None)
            {
                // SAFETY: the byte lies in the window's first frame, which the workload owns and has just cleared.
                unsafe {
                    let byte = window.ptr.add((offset & 4095) as usize);
                    byte.write_volatile(byte.read_volatile().wrapping_add(1));
                    platform.close(window);
                }
            }
        }
        Ok(())
    });
    let memory = loan.end();
    match stopped {
        Ok(()) => Ok((memory, Pass { bytes: whole.bytes(), nanos })),
        Err(reason) => Err(Interrupted { memory, reason: Reason::Stopped(reason) }),
    }
}
