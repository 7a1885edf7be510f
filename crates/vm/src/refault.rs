//! Faults on pages that reclaim has taken away.
//!
//! As any fault: look, then with nothing locked make the page, then look again and enter it. Whoever brings a page back
//! holds what it reads from with a share of its own, because the entry may go away meanwhile. A page that is just moving
//! is waited for. A shared object's page comes back into the index, once, wherever the fault was; the pages of a process
//! and of those that it forked come back one by one, each to its own.

use crate::address_space::Site;
use crate::error::VmError;
use crate::fault::{Access, Served, fresh_flags};
use crate::object::{Object, Owner};
use crate::phases::Phases;
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::swap_entry::SwapEntry;
use crate::vm::Vm;
use core::cell::RefCell;
use hugemm_base::{Extent, PAGE_SHIFT, VirtAddr};
use hugemm_paging::{Flags, Leaf, Lookup, OwnerNext, PageTable};

impl<S: Setup> Vm<'_, S> {
    /// Serves a fault at a private page that is away.
    pub(crate) fn refault_private(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        at: VirtAddr,
        word: u64,
    ) -> Result<Served, VmError> {
        let Site { space, area, .. } = site;
        let page = area.page_at(at);
        let want = &Want::of_fault(area, at);
        let Some(_claim) = space.claim_any(page, || self.cond_resched(cx)) else {
            return Ok(Served::Meanwhile);
        };
        let Some(held) = self.hold_away(cx, space.table(), page.start(), word)? else { return Ok(Served::Meanwhile) };
        let owner = Owner { object: area.object, offset: area.offset_of(page.first_page()) };
        let brought = self.page_from(cx, held, want, owner);
        let entered = brought.map(|extent| {
            let areas = self.here(cx, space).areas();
            let there = areas.admit(area, page).is_some();
            // Nobody else has its content any more, so it is as if written.
            let flags = fresh_flags(area, Access::Write);
            let entered = there && self.enter_back(cx, space.table(), page.start(), word, extent, want, flags);
            drop(areas);
            if entered {
                self.drop_away(cx, word);
                Served::Refaulted
            } else {
                self.drop_pages(cx, extent, want.page, false);
                Served::Meanwhile
            }
        });
        self.drop_away(cx, held);
        entered
    }

    /// Brings a shared object's page back into its index; false if somebody else is at it.
    pub(crate) fn refault_index(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        offset: u64,
        want: &Want,
        word: u64,
    ) -> Result<bool, VmError> {
        let Some(index) = &object.index else { return Err(VmError::OtherKind) };
        let Some(_claim) = index.inflight.claim(offset, || self.cond_resched(cx)) else { return Ok(false) };
        let at = VirtAddr::new(offset << PAGE_SHIFT);
        let Some(held) = self.hold_away(cx, &index.table, at, word)? else { return Ok(false) };
        let brought = self.page_from(cx, held, want, Owner { object: object.id, offset });
        let entered = brought.map(|extent| {
            let entered = self.enter_back(cx, &index.table, at, word, extent, want, Flags::NONE);
            if entered {
                self.drop_away(cx, word);
            } else {
                self.drop_pages(cx, extent, want.page, false);
            }
            entered
        });
        self.drop_away(cx, held);
        entered
    }

    /// A share of the caller's own in what the entry says, if it still does and the page is not just moving.
    fn hold_away(
        &self,
        cx: &mut Cx<'_, S>,
        table: &PageTable<S::Format, S::Lock>,
        at: VirtAddr,
        word: u64,
    ) -> Result<Option<u64>, VmError> {
        if let SwapEntry::Moving { .. } = SwapEntry::of(word) {
            self.cond_resched(cx);
            return Ok(None);
        }
        let task = RefCell::new(cx);
        // Alone: others bring pages back under the shared lock, and then drop what the entry held. Claims do not keep them
        // out, because two pages may have one place.
        let table = table.exclusive(self.tables(&task));
        if table.lookup(at) != Lookup::Owner(word) {
            return Ok(None);
        }
        let mut cx = task.borrow_mut();
        self.share_away(&mut cx, word).map(Some)
    }

    /// A page with the content that `held` stands for.
    fn page_from(&self, cx: &mut Cx<'_, S>, held: u64, want: &Want, owner: Owner) -> Result<Extent, VmError> {
        let mut block = self.block_for_refault(cx, want)?;
        if let Err(error) = self.load_away(cx, held, &mut block) {
            self.frames().free(cx, block);
            return Err(error);
        }
        self.adopt(cx, block, want, owner)
    }

    #[allow(clippy::too_many_arguments, reason = "what an entry is")]
    fn enter_back(
        &self,
        cx: &mut Cx<'_, S>,
        table: &PageTable<S::Format, S::Lock>,
        at: VirtAddr,
        word: u64,
        extent: Extent,
        want: &Want,
        flags: Flags,
    ) -> bool {
        let leaf = Leaf { frame: extent.base(), size: want.page, flags };
        self.exchange(cx, table, at, word, OwnerNext::Leaf(leaf))
    }
}
