//! Memory that has been read and never written: all spaces show one page of zeroes there, until somebody stores.
//!
//! There is one of 4 KiB and one of 2 MiB, each made when an area first wants it, and given back by [`Vm::trim`] when no space has shown
//! either. Entries say [`LENT`] of it. Such an entry has no reference and the page no object and no place on any list of the pager's,
//! so a read fault writes no line that another's writes, and whoever takes the entry away drops nothing: each place that does so asks. The
//! first store, and whoever needs a page that stays (a pin, a lock), puts a page of the area's own there, with one flush. If the page's memory
//! becomes bad, reads get pages of their own.

use crate::address_space::{AddressSpace, Site};
use crate::cow::Old;
use crate::cpu_lines::Here;
use crate::discard::may_go_unstored;
use crate::error::VmError;
use crate::fault::Served;
use crate::object::Owner;
use crate::phases::{Phase, Phases};
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::vm::Vm;
use crate::vma::{Pattern, VmaInfo};
use core::fmt;
use hugemm_base::lock::PinnedLock;
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::{CpuPin, Extent, Never, PageSize, Pfn, VirtAddr};
use hugemm_clear::ClearRequest;
use hugemm_frames::{Env, Frozen, Placement};
use hugemm_paging::{Flags, Leaf, Lookup};

/// Of an entry, as [`Vm::lookup`] shows it: nobody has stored there, and the frame is the page of zeroes, or, of an area that
/// [copies](crate::Backing::Copied) a file, the file's. The entry has no reference, and nobody may store by it.
pub const LENT: Flags = Flags::OWNER0;

/// Sizes that there is a page of.
const SIZES: [PageSize; 2] = [PageSize::Size4K, PageSize::Size2M];

/// The pages of zeroes of one manager.
pub(crate) struct ZeroPages<S: Setup> {
    /// Their heads' numbers, and one more; 0 where there is none. None changes while a space is counted.
    heads: [AtomicU64; SIZES.len()],
    kept: PinnedLock<<S::Env as Env>::Lock, Kept>,
}

struct Kept {
    blocks: [Option<Frozen>; SIZES.len()],
    /// Spaces that show some, or may have.
    spaces: u64,
}

impl<S: Setup> fmt::Debug for ZeroPages<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroPages").field("heads", &self.heads).finish_non_exhaustive()
    }
}

impl<S: Setup> ZeroPages<S> {
    pub(crate) fn new() -> Self {
        let kept = PinnedLock::new(Kept { blocks: [const { None }; SIZES.len()], spaces: 0 });
        ZeroPages { heads: Default::default(), kept }
    }

    fn with<R>(&self, pin: CpuPin<'_>, f: impl FnOnce(&mut Kept) -> R) -> R {
        f(&mut self.kept.lock(pin))
    }

    fn of(&self, size: PageSize) -> Option<Extent> {
        let at = SIZES.iter().position(|known| *known == size)?;
        // Acquire pairs with the Release of `make_zeroes`.
        let head = self.heads[at].load(Ordering::Acquire).checked_sub(1)?;
        Some(Extent::block(Pfn::new(head), size.order()))
    }
}

/// Whether a leaf shows what is not the area's.
pub(crate) fn is_lent(leaf: &Leaf) -> bool {
    leaf.flags.contains(LENT)
}

/// Whether a page of an entry may be taken from under whoever has a reference: it is everybody's, or given up and stores need not be
/// noted, if there may be some.
pub(crate) fn may_be_taken(flags: Flags, needs: Flags) -> bool {
    flags.contains(LENT) || needs.contains(Flags::WRITE) && may_go_unstored(flags)
}

impl<S: Setup> Vm<'_, S> {
    /// Serves a load where nothing is mapped, if the area may show zeroes there.
    pub(crate) fn fault_zeroes(
        &self,
        cx: &mut Cx<'_, S>,
        here: Here<'_, S>,
        area: &VmaInfo,
        at: VirtAddr,
    ) -> Result<Option<Served>, VmError> {
        let kind = &area.kind;
        if kind.shared || kind.sourced || kind.pooled || kind.locked {
            return Ok(None);
        }
        let Some(zeroes) = self.zeroes_for(cx, here.space(), kind.page) else { return Ok(None) };
        let flags = kind.flags().without(Flags::WRITE) | Flags::ACCESSED | LENT;
        self.enter(cx, here, area, area.page_at(at), [zeroes], flags).map(Some)
    }

    /// Puts a page of the area's own where it shows zeroes. One flush.
    pub(crate) fn replace_zeroes(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        at: VirtAddr,
    ) -> Result<Served, VmError> {
        let Site { space, area, phases } = site;
        let page = area.page_at(at);
        let Some(_claim) = space.claim(area, page, || self.cond_resched(cx)) else { return Ok(Served::Meanwhile) };
        // The space is counted, so this is the one that it shows.
        let Some(zeroes) = self.zeroes().of(area.kind.page) else { return Ok(Served::Meanwhile) };
        let zeroes = Old { page: zeroes, kept: space.kept().load(Ordering::Acquire) };
        let want = Want::of_fault(area, at);
        let owner = Owner { object: area.object, offset: area.offset_of(page.first_page()) };
        let own = match self.new_page(cx, &want, owner, &Never, phases) {
            Ok(Some(own)) => own,
            Ok(None) => return Ok(Served::Meanwhile),
            Err(error) => {
                // Another CPU that stored to the same page had what was missing.
                let still = matches!(self.lookup(cx, space, at), Lookup::Mapped(leaf) if is_lent(&leaf));
                return if still { Err(error) } else { Ok(Served::Meanwhile) };
            }
        };
        phases.enter(Phase::Map);
        let served = space.changing(cx, page, |cx| self.replace(cx, space, area, page, &zeroes, own));
        phases.enter(Phase::Other);
        if served == Ok(Served::Copied) {
            return Ok(Served::Mapped);
        }
        self.return_pages(cx, own, &want);
        served
    }

    /// The page of zeroes for a space to show, if there is one of that size or can be, and its memory is good.
    fn zeroes_for(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, size: PageSize) -> Option<Extent> {
        self.count_zeroes(cx, space);
        let zeroes = self.zeroes().of(size).or_else(|| self.make_zeroes(cx, size))?;
        self.frames().first_hwpoisoned(zeroes).is_none().then_some(zeroes)
    }

    /// From here on the pages of zeroes stay, until the space ends. One lock round the first time.
    pub(crate) fn count_zeroes(&self, cx: &Cx<'_, S>, space: &AddressSpace<S>) {
        // Acquire pairs with the Release below: whoever finds the space counted finds it among those that are.
        if space.shows_zeroes.load(Ordering::Acquire) {
            return;
        }
        cx.pinned(|pin| {
            self.zeroes().with(pin, |kept| {
                if !space.shows_zeroes.load(Ordering::Relaxed) {
                    kept.spaces += 1;
                    space.shows_zeroes.store(true, Ordering::Release);
                }
            });
        });
    }

    /// A space ends that shows nothing any more.
    pub(crate) fn discount_zeroes(&self, cx: &Cx<'_, S>, shows_zeroes: &AtomicBool) {
        // Relaxed: the space is the caller's alone.
        if shows_zeroes.load(Ordering::Relaxed) {
            cx.pinned(|pin| self.zeroes().with(pin, |kept| kept.spaces -= 1));
        }
    }

    /// Asks nobody for relief: without it there are pages of the areas' own.
    fn make_zeroes(&self, cx: &mut Cx<'_, S>, size: PageSize) -> Option<Extent> {
        let at = SIZES.iter().position(|known| *known == size)?;
        let (page, order, clear) = (size, size.order(), ClearRequest::bulk(size.bytes()));
        let (from, pattern) = (Placement::Local, Pattern::Normal);
        let want = Want { page, pooled: false, reserved: false, from, clear, touched: None, pattern };
        let block = self.new_block(cx, hugemm_frames::AllocRequest::order(order).prefer_zeroed()).ok()?;
        let mut block = self.clear_block(cx, block.into_content(), order, &want, &Never, &()).ok()?;
        let extent = block.extent();
        // Nobody's, and on no list.
        if let Some(desc) = self.frames().descriptor_mut(&mut block) {
            desc.reset();
        }
        let other = cx.pinned(|pin| {
            self.zeroes().with(pin, |kept| {
                if kept.blocks[at].is_some() {
                    return Some(block);
                }
                kept.blocks[at] = Some(block);
                // Release: pairs with the Acquire in `of`.
                self.zeroes().heads[at].store(extent.base().get() + 1, Ordering::Release);
                None
            })
        });
        if let Some(block) = other {
            self.frames().free(cx, block);
        }
        self.zeroes().of(size)
    }

    /// Gives the pages of zeroes back if no space shows any.
    pub(crate) fn trim_zeroes(&self, cx: &Cx<'_, S>) {
        let blocks = cx.pinned(|pin| {
            self.zeroes().with(pin, |kept| {
                if kept.spaces > 0 {
                    return [const { None }; SIZES.len()];
                }
                // Relaxed: whoever gets one of the frames next has been given it after this.
                self.zeroes().heads.iter().for_each(|head| head.store(0, Ordering::Relaxed));
                core::mem::replace(&mut kept.blocks, [const { None }; SIZES.len()])
            })
        });
        blocks.into_iter().flatten().for_each(|block| self.frames().free(cx, block));
    }
}
