//! The seam to whoever takes pages away that nobody uses, and brings them back: reclaim and swap.
//!
//! A pager with [`ACTIVE`](Pager::ACTIVE) is told of every page when it becomes somebody's, drops the references to it, so
//! that it can forget a page in the moment in which the last reference goes, and stores pages' contents in *slots*. What
//! it does with pages it does through the manager's [`evict`](crate::evict) operations.
//!
//! [`relieve`](Pager::relieve) is given the manager, and so is a cycle: a fault that finds no memory reclaims, and reclaim takes pages
//! away through the manager that faulted. All else is about frames and slots and knows no manager.

use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use hugemm_base::{Extent, NodeId, Order, Pfn, Shortfall};
use hugemm_frames::{FolioRun, Frames, Frozen};

/// Bits of a slot.
pub const SLOT_BITS: u32 = 50;

/// What is stored in a slot cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostPage;

/// See the [module](self). A slot is a number below `1 << 50` with one holder, who frees it once.
///
/// Only [`relieve`](Pager::relieve), which is called with nothing locked, may use the manager: fault, unmap, reclaim. A fault at the
/// very page that is being made says [`Meanwhile`](crate::Served::Meanwhile).
/// Everything else may be called under a page table's lock, or by a task that is waited for, and calls nothing of the manager.
///
/// What takes numbers is `unsafe`: they stand for references and slots that somebody holds.
///
/// ```compile_fail,E0133
/// # use hugemm_vm::{Cx, Pager, Setup, Vm};
/// # fn any<S: Setup>(vm: &Vm<'_, S>, cx: &Cx<'_, S>) {
/// vm.pager().free(cx, 7); // whose?
/// # }
/// ```
///
/// # Safety
///
/// The block that [`load`](Pager::load) is given is the same afterwards, whatever is in it: it is mapped as a page of its size. While a
/// content has a holder, no number that has stood for it is given to another: an entry that says what it said when somebody
/// [shared](Pager::share) it stands for what he has read since.
///
/// ```compile_fail,E0200
/// # use hugemm_base::{Extent, Order, Shortfall};
/// # use hugemm_frames::{FolioRun, Frames, Frozen};
/// # use hugemm_vm::{Cx, LostPage, Pager, Setup, Vm};
/// # use std::sync::Mutex;
/// struct Swapping(Mutex<Frozen>);
/// impl<S: Setup> Pager<S> for Swapping { // error: `unsafe impl`: does the block stay what it is?
///     unsafe fn load(&self, _: &Cx<'_, S>, _: u64, into: &mut Frozen, _: u64) -> Result<(), LostPage> {
///         Ok(core::mem::swap(into, &mut self.0.lock().expect("unpoisoned")))
///     }
///     # const ACTIVE: bool = true;
///     # unsafe fn lru_add(&self, _: &Frames<'_, S::Env>, _: &Cx<'_, S>, _: Extent, _: Order) {}
///     # unsafe fn drop_references(&self, _: &Frames<'_, S::Env>, _: &Cx<'_, S>, _: impl IntoIterator<Item = FolioRun>) {}
///     # unsafe fn share(&self, _: &Cx<'_, S>, _: u64) -> Option<u64> { None }
///     # unsafe fn free(&self, _: &Cx<'_, S>, _: u64) {}
///     # fn may_take(&self, _: &Frames<'_, S::Env>, _: &Cx<'_, S>, _: Order) -> bool { true }
///     # fn relieve(&self, _: &Vm<'_, S>, _: &mut Cx<'_, S>, _: Shortfall) -> u64 { 0 }
/// }
/// ```
pub unsafe trait Pager<S: Setup> {
    /// Whether it takes pages away at all. If not, nothing of this costs anything.
    const ACTIVE: bool;

    /// Blocks of `order` have become counted pages of their objects, with one reference each: the caller's. No lock is
    /// held that a reclaiming task takes.
    ///
    /// # Safety
    ///
    /// They are, of `frames`; the pager is told once, and gets every reference to them that goes, through
    /// [`drop_references`](Pager::drop_references) or by holding it itself.
    unsafe fn lru_add(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, pages: Extent, order: Order);

    /// The same of pages of 4 KiB that were read from a source, which has what they have. `dropped`: what
    /// [`drops_sourced`](Pager::drops_sourced) said when reclaim dropped one of them last, if it has.
    ///
    /// # Safety
    ///
    /// As [`lru_add`](Pager::lru_add).
    unsafe fn lru_add_sourced(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, pages: Extent, dropped: Option<u64>) {
        let _ = dropped;
        // SAFETY: the caller's promise.
        unsafe { self.lru_add(frames, cx, pages, Order::ZERO) }
    }

    /// A page that its source has too is dropped: what is to be remembered of it where it was, below `1 << 50`. Each call says more than
    /// those before it, and what these callers did has happened before: who reads a source knows by it that a page went meanwhile.
    fn drops_sourced(&self) -> u64;

    /// Drops references, frees the pages that lose their last, and forgets them before anybody can get them anew. The runs come
    /// together because they go together, whether they adjoin or not. May be called under a page table's lock; passes no reschedule
    /// point.
    ///
    /// # Safety
    ///
    /// The pager has been told of the pages.
    unsafe fn drop_references(
        &self,
        frames: &Frames<'_, S::Env>,
        cx: &Cx<'_, S>,
        pages: impl IntoIterator<Item = FolioRun>,
    );

    /// Pages have been used, as somebody else found out who has taken their accessed bits: they are as young as if reclaim
    /// had found it. No lock is held.
    ///
    /// # Safety
    ///
    /// The caller holds a reference to each, and the pager has been told of them.
    unsafe fn used(&self, _frames: &Frames<'_, S::Env>, _cx: &Cx<'_, S>, _heads: &[Pfn]) {}

    /// Nobody is going to use pages soon, as somebody says who knows: they are as old as can be. No lock is held.
    ///
    /// # Safety
    ///
    /// As [`used`](Pager::used).
    unsafe fn unused(&self, _frames: &Frames<'_, S::Env>, _cx: &Cx<'_, S>, _heads: &[Pfn]) {}

    /// Copies what is in a slot into page number `page` of the block. The slot stays.
    ///
    /// # Errors
    ///
    /// [`LostPage`]: the content cannot be had again. The slot stays.
    ///
    /// # Safety
    ///
    /// The caller holds the slot, or a lock that keeps its holder from freeing it.
    unsafe fn load(&self, cx: &Cx<'_, S>, slot: u64, into: &mut Frozen, page: u64) -> Result<(), LostPage>;

    /// Another holder's handle on the slot; `None` if there are too many. May be called under a page table's lock.
    ///
    /// # Safety
    ///
    /// As [`load`](Pager::load).
    unsafe fn share(&self, cx: &Cx<'_, S>, slot: u64) -> Option<u64>;

    /// Gives a slot back. May be called under a page table's lock.
    ///
    /// # Safety
    ///
    /// The caller holds the slot, and does not any more.
    unsafe fn free(&self, cx: &Cx<'_, S>, slot: u64);

    /// Whether a block of `order` may be taken without reclaiming first: not if what is free then is needed to store pages. If not,
    /// [`relieve`](Pager::relieve) is called, once for a page of 4 KiB, for a larger one up to three times while it helps and the answer
    /// is no; then the block is taken if there is one.
    fn may_take(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, order: Order) -> bool;

    /// Whether what is free of a node is kept for pages that come back, whose content nobody has elsewhere: nothing new of `order` is
    /// made of it, although the pager has nothing to [relieve](Pager::relieve). May be called under a page table's lock.
    fn holds_back(&self, _frames: &Frames<'_, S::Env>, _cx: &Cx<'_, S>, _node: NodeId, _order: Order) -> bool {
        false
    }

    /// Makes memory free: direct reclaim; how many frames became free. Called with nothing locked, by tasks that may sleep, as a
    /// [`Relief`](hugemm_base::Relief) is.
    fn relieve(&self, vm: &Vm<'_, S>, cx: &mut Cx<'_, S>, need: Shortfall) -> u64;
}

/// Pages stay where they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPager;

// SAFETY: it changes no block.
unsafe impl<S: Setup> Pager<S> for NoPager {
    const ACTIVE: bool = false;

    unsafe fn lru_add(&self, _frames: &Frames<'_, S::Env>, _cx: &Cx<'_, S>, _pages: Extent, _order: Order) {}

    fn drops_sourced(&self) -> u64 {
        // It drops none.
        0
    }

    unsafe fn drop_references(
        &self,
        frames: &Frames<'_, S::Env>,
        cx: &Cx<'_, S>,
        pages: impl IntoIterator<Item = FolioRun>,
    ) {
        for mut run in pages {
            while let Some(folio) = run.pop() {
                let _ = frames.put(cx, folio);
            }
        }
    }

    unsafe fn load(&self, _cx: &Cx<'_, S>, _slot: u64, _into: &mut Frozen, _page: u64) -> Result<(), LostPage> {
        Err(LostPage)
    }

    unsafe fn share(&self, _cx: &Cx<'_, S>, _slot: u64) -> Option<u64> {
        None
    }

    unsafe fn free(&self, _cx: &Cx<'_, S>, _slot: u64) {}

    fn may_take(&self, _frames: &Frames<'_, S::Env>, _cx: &Cx<'_, S>, _order: Order) -> bool {
        true
    }

    fn relieve(&self, _vm: &Vm<'_, S>, _cx: &mut Cx<'_, S>, _need: Shortfall) -> u64 {
        0
    }
}
