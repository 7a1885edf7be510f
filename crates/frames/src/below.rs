//! Blocks that lie below an address, for devices that reach no further.
//!
//! What is free is taken from the lowest place that will do, so a node's lowest run of a kind is either below the limit or there
//! is none of that kind.

use crate::arena::BLOCK_ORDER;
use crate::drain::Due;
use crate::frames::{Env, Frames};
use crate::free2m::{Sought, take_run};
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use crate::mobility::Mobility;
use crate::node::Taken;
use crate::page_alloc::{AllocError, AllocRequest, FAULT_ALLOC};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuPin, Pfn};

impl<'m, E: Env> Frames<'m, E> {
    /// Allocates one block of frames below `limit` only: 2^20 for a device that has 32 address bits. Otherwise as
    /// [`alloc`](Frames::alloc), the nodes in the same order. Any context but NMI.
    ///
    /// Never from the CPU's cache: one lock round; a second one and those of a [`drain`](Frames::drain) where nothing is found but with
    /// what is cached.
    /// Everybody else takes low memory first, too. To keep some for such devices, make that memory a node of its own, numbered after the
    /// one that the CPUs are on: they fall back to it. Of several nodes each is asked in the order of
    /// [`Placement`](crate::Placement), so that CPUs on another than the first come to it before they come to that.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`](AllocError::OutOfMemory) if nothing of that order is free below the limit, where it was asked for;
    /// [`NoSuchNode`](AllocError::NoSuchNode).
    pub fn alloc_below<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        limit: Pfn,
        request: impl Into<AllocRequest>,
    ) -> Result<Frozen, AllocError> {
        if self.env().fault(FAULT_ALLOC) {
            return Err(AllocError::OutOfMemory);
        }
        let AllocRequest { order, mobility, from, prefer_zeroed } = request.into();
        let take = |pin: CpuPin<'_>| {
            let own = self.own(pin);
            own.into_iter().for_each(|own| self.serve_own(own));
            let (first, fallback) = self.choose(own, from)?;
            for node in self.nodes_from(first, fallback) {
                let taken = self.with_node(pin, node, |lists| {
                    own.into_iter().for_each(|own| self.return_gathered(lists, own));
                    self.take_below(lists, limit, order.get(), mobility, prefer_zeroed)
                });
                if let Some(Taken { pfn, zero }) = taken.flatten() {
                    return Ok(Ok(Frozen::make(pfn, order, mobility, zero)));
                }
            }
            Ok(Err(self.could_be_made(pin, self.nodes_from(first, fallback), order.get(), limit)))
        };
        match self.after_giving_back(cx, Self::own, Due::Leaving, take)? {
            Ok(block) => return Ok(block),
            Err(false) => return Err(AllocError::OutOfMemory),
            Err(true) => {}
        }
        let again = self.after_giving_back(cx, Self::own, Due::All, take)?;
        if again.is_err() {
            // What others cache can be had the next time.
            self.request_drains();
        }
        again.map_err(|_| AllocError::OutOfMemory)
    }

    /// Takes one block below `limit`: of each content that will do the node's lowest, of the mobility before fresh 2 MiB, and the
    /// other mobility's last.
    fn take_below(
        &self,
        lists: &mut FreeLists,
        limit: Pfn,
        order: u32,
        mobility: Mobility,
        want_zero: bool,
    ) -> Option<Taken> {
        let fits = |first: Pfn| first.number() + (1 << order) <= limit.number();
        let contents = Sought::preferring(want_zero);
        if let Some(log) = order.checked_sub(BLOCK_ORDER) {
            let run = contents.into_iter().find_map(|sought| self.lowest_run(lists, log, sought, fits))?;
            return Some(take_run(lists, log, run));
        }
        let inside = |lists: &FreeLists, mobility, sought| {
            let lowest = |places| self.seek_4k_in(&places, order, mobility, sought).map(|(_, place)| place);
            self.places(lists).filter_map(lowest).find(|place| fits(place.pfn()))
        };
        let mut place = None;
        for sought in contents {
            place = inside(lists, mobility, sought);
            if place.is_none()
                && let Some(run) = self.lowest_run(lists, 0, sought, fits)
            {
                let taken = take_run(lists, 0, run);
                place = self.divide_2m(lists, taken, mobility);
            }
            if place.is_some() {
                break;
            }
        }
        let place = place.or_else(|| inside(lists, mobility.other(), Sought::Any))?;
        self.take_4k(lists, place, order, 1).0.descending().next()
    }
}
