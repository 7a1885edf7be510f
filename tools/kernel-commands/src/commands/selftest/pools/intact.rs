//! Whether every descriptor that somebody owns is memory of its own, on every CPU, and no frame is missing.

use super::super::{free_all, vec_for};
use super::super::{lost, on_all, overwritten};
use super::{Cx, Failure, Finding, Pool};
use crate::commands::selftest::descriptors::WORD;
use crate::commands::selftest::frames_stress::unowned_pages;
use ::alloc::vec::Vec;
use core::ops::Range;
use hugemm_base::random::Random;
use hugemm_base::{Order, PageSize, Pfn};
use hugemm_frames::{AllocRequest, Frozen};
use hugemm_kernel::memory::{self, frames};
use hugemm_kernel::{percpu, vmemmap};

/// Blocks of other owners, which stay through a round.
const OTHERS: usize = 32;
/// Single frames that are taken at most, when no 2 MiB are free any more.
const SINGLES: usize = 4096;
/// What the others' descriptors have marks in: everything.
const ALL: Range<usize> = 0..8;
/// What those of free memory and of pools have theirs in: the word that is the owner's whoever it is.
const ONE: Range<usize> = WORD..WORD + 1;

pub struct Intact {
    /// Blocks of others: what is in their descriptors was written once.
    others: Vec<Frozen>,
    /// Places for all free memory.
    free: Vec<Frozen>,
    /// Frames that are free, or descriptors', with the pools empty.
    frames: u64,
}

fn mark(frame: u64, word: usize) -> u64 {
    !(frame << 8 | word as u64)
}

fn write(frame: u64, words: Range<usize>) {
    // SAFETY: the first frame of a block that the guard holds, frozen or from a pool.
    if let Some(descriptor) = unsafe { frames().descriptor_at(Pfn::new(frame)) } {
        words.for_each(|word| descriptor.store(word, mark(frame, word)));
    }
}

fn read(cpu: u32, frame: u64, mut words: Range<usize>) -> Result<(), Finding> {
    let Some(descriptor) = frames().descriptor(Pfn::new(frame)) else { return Ok(()) };
    let wrong = words.find_map(|word| Some(descriptor.load(word)).filter(|found| *found != mark(frame, word)));
    wrong.map_or(Ok(()), |found| Err(overwritten(frame, found, cpu)))
}

fn huge_order() -> Order {
    Order::new(PageSize::Size2M.order().get()).unwrap_or(Order::ZERO)
}

impl Intact {
    /// With blocks of several orders in use, scattered; the pools are empty.
    pub fn new(cx: Cx<'_>) -> Result<Intact, Failure> {
        let most = memory::managed_bytes() / PageSize::Size2M.bytes();
        let free = vec_for(most as usize + SINGLES)?;
        let mut others = vec_for(OTHERS)?;
        for index in 0..OTHERS {
            let order = Order::new([0, 9, 3, 0, 5, 1, 9, 2][index % 8]).unwrap_or(Order::ZERO);
            let block = frames().alloc(cx, AllocRequest::order(order))?;
            // Another one between this and the next.
            let gap = frames().alloc(cx, AllocRequest::order(order))?;
            write(block.pfn().get(), ALL);
            others.push(block);
            frames().free(cx, gap);
        }
        let frames = unowned_pages(cx) + vmemmap::audit().frames;
        Ok(Intact { others, free, frames })
    }

    /// Looks at one of the others' descriptors, as `cpu`, at any time.
    pub fn look(&self, cpu: u32, random: &mut Random) -> Result<(), Finding> {
        read(cpu, self.others[random.below(OTHERS as u64) as usize].pfn().get(), ALL)
    }

    pub fn check<'m>(&mut self, cx: Cx<'_>, pools: [&Pool<'m>; 2]) -> Result<(), Failure> {
        let pooled: u64 = pools.iter().map(|pool| pool.counts(cx).counts.total * pool.page_size().pages()).sum();
        let found = unowned_pages(cx) + vmemmap::audit().frames + pooled;
        if found != self.frames {
            return Err(lost(self.frames, found).into());
        }
        let mut order = huge_order();
        while self.free.len() < self.free.capacity() {
            percpu::beat();
            match frames().alloc(cx, AllocRequest::order(order)) {
                Ok(block) => self.free.push(block),
                Err(_) if order == Order::ZERO => break,
                Err(_) => order = Order::ZERO,
            }
        }
        let owned = |each: &mut dyn FnMut(u64) -> Result<(), Finding>| {
            let pages = pools.into_iter().flat_map(|pool| {
                // Of a lean page the head's is all that anybody owns.
                pool.pages().map(|(pfn, lean)| (pfn, if lean { 1 } else { pool.page_size().pages() }))
            });
            let free = self.free.iter().map(|block| (block.pfn(), block.extent().pages()));
            for (base, pages) in pages.chain(free) {
                percpu::beat();
                (base.get()..base.get() + pages).try_for_each(&mut *each)?;
            }
            Ok::<_, Finding>(())
        };
        owned(&mut |frame| {
            write(frame, ONE);
            Ok(())
        })?;
        let others = &self.others[..];
        // By every CPU: one that missed a flush finds something else.
        let found = on_all(cx, |_, cpu| {
            others.iter().try_for_each(|block| read(cpu, block.pfn().get(), ALL))?;
            Ok(owned(&mut |frame| read(cpu, frame, ONE))?)
        });
        free_all(cx, self.free.drain(..));
        // Whatever is left in caches, out of the middle of free memory, would keep pages of 1 GiB from being had.
        frames().drain(cx);
        found
    }

    pub fn free(self, cx: Cx<'_>) {
        free_all(cx, self.others);
    }
}
