//! What a page table says of a page that is not there.
//!
//! | word | the page | the entry holds |
//! |---|---|---|
//! | moving | [unhooked](crate::unhook), and what its leaf was | nothing: who unhooked it has the reference |
//! | slot | 4 KiB, in a slot | the slot |
//! | slots | 2 MiB, in 512 slots that stand in a frame of their own | a reference to that frame |
//! | dropped | a source's, which has it: when reclaim dropped it | nothing |
//!
//! A word is the kind in two bits and a number of 50; a frame's has 40 of them. A page of 2 MiB goes away and comes back as a whole.

use crate::discard::GIVEN_UP;
use crate::error::VmError;
use crate::pager::{Pager, SLOT_BITS};
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use core::ptr::NonNull;
use hugemm_base::{Extent, FrameUse, PAGE_SHIFT, Pfn, PhysMap};
use hugemm_frames::{FolioRef, Frozen};
use hugemm_paging::Flags;

/// Pages in a 2 MiB page, hence slots in a frame.
pub(crate) const SLOTS: u64 = 512;

/// Places at which one stored page may be missing: more than that many slots cannot be shared out for certain. Nor are more areas looked at
/// for the places of a private page.
pub(crate) const MOST_PLACES: usize = 1 << 12;

/// References that a frame can have without counters of their own: see [`RefError::Saturated`](hugemm_frames::RefError).
pub(crate) const FEW_REFERENCES: u64 = 15;

/// Bits of a frame's number: physical addresses have 52.
const FRAME_BITS: u32 = 40;

/// What is kept of a leaf, in the bits above the frame.
const KEPT: [Flags; 4] = [Flags::WRITE, Flags::ACCESSED, Flags::DIRTY, GIVEN_UP];

/// A word, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SwapEntry {
    Moving { head: Pfn, was: Flags },
    Slot(u64),
    Slots(Pfn),
    Dropped(u64),
}

impl SwapEntry {
    pub(crate) fn word(self) -> u64 {
        match self {
            SwapEntry::Moving { head, was } => {
                let kept = (FRAME_BITS..).zip(KEPT).filter(|(_, flag)| was.contains(*flag));
                kept.fold(head.get(), |number, (bit, _)| number | 1 << bit) << 2
            }
            SwapEntry::Slot(slot) => slot << 2 | 1,
            SwapEntry::Slots(frame) => frame.get() << 2 | 2,
            SwapEntry::Dropped(when) => when << 2 | 3,
        }
    }

    pub(crate) fn of(word: u64) -> Self {
        let number = word >> 2 & ((1 << SLOT_BITS) - 1);
        match word & 3 {
            0 => {
                let kept = (FRAME_BITS..).zip(KEPT).filter(|(bit, _)| number >> bit & 1 != 0);
                let was = kept.fold(Flags::NONE, |was, (_, flag)| was | flag);
                SwapEntry::Moving { head: Pfn::new(number & ((1 << FRAME_BITS) - 1)), was }
            }
            1 => SwapEntry::Slot(number),
            2 => SwapEntry::Slots(Pfn::new(number)),
            _ => SwapEntry::Dropped(number),
        }
    }
}

impl<S: Setup> Vm<'_, S> {
    /// Another holder's word; for whoever keeps the word from being dropped meanwhile.
    pub(crate) fn share_away(&self, cx: &mut Cx<'_, S>, word: u64) -> Result<u64, VmError> {
        match SwapEntry::of(word) {
            SwapEntry::Moving { .. } | SwapEntry::Dropped(_) => Err(VmError::InUse),
            SwapEntry::Slot(slot) => {
                // SAFETY: the word's slot; the caller keeps the word from being dropped.
                let share = unsafe { self.pager().share(cx, slot) };
                share.map(|slot| SwapEntry::Slot(slot).word()).ok_or(VmError::NoMemory)
            }
            SwapEntry::Slots(frame) => self.get_page_for(cx, frame, false).map(|()| word),
        }
    }

    /// Gives up what an entry held.
    pub(crate) fn drop_away(&self, cx: &Cx<'_, S>, word: u64) {
        match SwapEntry::of(word) {
            SwapEntry::Moving { .. } | SwapEntry::Dropped(_) => {}
            // SAFETY: the entry held it, and is gone.
            SwapEntry::Slot(slot) => unsafe { self.pager().free(cx, slot) },
            SwapEntry::Slots(frame) => {
                // SAFETY: the entry's word was a reference to the frame of slots, and the entry is gone.
                if let Ok(Some(block)) = self.frames().put_frozen(unsafe { FolioRef::from_pfn(frame) }) {
                    // SAFETY: filled with slots before anybody could see it, and nobody else's any more.
                    for slot in self.slots(cx, frame).iter().flat_map(|slots| unsafe { slots.as_ref() }) {
                        // SAFETY: the frame held it, of which that was the last reference.
                        unsafe { self.pager().free(cx, *slot) };
                    }
                    self.frames().free_for(cx, FrameUse::SWAP, block);
                }
            }
        }
    }

    /// Loads what a word stands for, which the caller holds, into a block of as many pages.
    pub(crate) fn load_away(&self, cx: &Cx<'_, S>, word: u64, into: &mut Frozen) -> Result<(), VmError> {
        let lost = |_| VmError::Lost;
        match SwapEntry::of(word) {
            SwapEntry::Moving { .. } | SwapEntry::Dropped(_) => Err(VmError::InUse),
            // SAFETY: the caller holds the word, hence its slots, here and below.
            SwapEntry::Slot(slot) => unsafe { self.pager().load(cx, slot, into, 0) }.map_err(lost),
            SwapEntry::Slots(frame) => {
                let slots = self.slots(cx, frame).ok_or(VmError::Unreachable)?;
                // SAFETY: filled before anybody could see it, and unchanged since; the caller holds it.
                (0..).zip(unsafe { slots.as_ref() }).try_for_each(|(page, slot)| {
                    // SAFETY: as above.
                    unsafe { self.pager().load(cx, *slot, into, page) }.map_err(lost)
                })
            }
        }
    }

    /// Where the slots of a frame are.
    pub(crate) fn slots(&self, cx: &Cx<'_, S>, frame: Pfn) -> Option<NonNull<[u64; SLOTS as usize]>> {
        // The direct map's windows stay valid without being closed.
        let window = cx.platform().open(Extent::new(frame, 1).ok()?, None)?;
        NonNull::new(window.ptr.cast())
    }
}

const _: () = assert!(SLOTS * 8 == 1 << PAGE_SHIFT);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_what_is_put_in() {
        let same = |away: SwapEntry| {
            assert_eq!(SwapEntry::of(away.word()), away);
            assert!(away.word() < 1 << hugemm_paging::OWNER_BITS);
        };
        for number in [0, 1, 512, (1 << SLOT_BITS) - 1] {
            same(SwapEntry::Slot(number));
            same(SwapEntry::Slots(Pfn::new(number)));
            same(SwapEntry::Dropped(number));
        }
        for head in [0, 1, 512, (1 << FRAME_BITS) - 1].map(Pfn::new) {
            for kept in 0..16 {
                let has = |(bit, flag): (usize, Flags)| if kept >> bit & 1 != 0 { flag } else { Flags::NONE };
                let was = KEPT.into_iter().enumerate().map(has).fold(Flags::NONE, Flags::with);
                same(SwapEntry::Moving { head, was });
            }
        }
    }
}
