//! What a CPU's cache gives back: when, in which order, and how it is freed.
//!
//! What a class has too much, its highest blocks, and what is freed too high to be allocated again goes [out](crate::outgoing) by words, but for
//! the orders that are only gathered: their blocks are few, and share the lock round of whoever needs one.

use crate::arena::{Arena, in_region};
use crate::bits::one_copy;
use crate::class::Class;
use crate::frames::{Env, Frames};
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use crate::node::Content;
use crate::outgoing::{READY, Word};
use crate::pcp::{PerCpu, is_stocked};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuId, CpuPin, NodeId};

/// Entries of a class that are given back in one pin where nobody needs more.
const PART: u64 = 64;

/// Parts that empty every cache: what interrupts add meanwhile goes too, within reason.
pub(crate) const PARTS: u64 = 256;

/// What a CPU gives back before something is done. Where another CPU has asked for all of it, it is all in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing.
    Nothing,
    /// What is on its way to the node.
    Leaving,
    /// All that is cached, and what others have queued for its node.
    All,
}

impl<'m, E: Env> Frames<'m, E> {
    /// Keeps a freed block of this CPU's node, for which room is made once; gives it back if there is none for its order.
    pub(crate) fn keep(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, block: Frozen) -> Result<(), Frozen> {
        let Some(class) = own.class_of(&block).filter(|class| class.enabled()) else { return Err(block) };
        if own.is_far(class, &block) {
            class.note_given_back();
            self.let_go(pin, own, block.log(), &[block.into_word()]);
            return Ok(());
        }
        class.push(block).or_else(|block| {
            self.drain_class(pin, own, class, block.log(), class.excess());
            class.push(block)
        })
    }

    /// Moves up to `count` of a class's entries to the node, those that lie highest, or on their way there.
    fn drain_class(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, class: &Class<'m>, order: u32, count: u64) {
        class.drain_highest(count, |blocks| {
            if is_stocked(order) {
                self.let_go(pin, own, order, blocks);
            } else {
                self.with_node(pin, own.node, |lists| self.free_few(lists, blocks));
            }
        });
    }

    /// Blocks of an order that is cached are on their way to the node from here on; what has to arrive there does.
    #[inline(never)]
    fn let_go(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, order: u32, blocks: &[u64]) {
        match order {
            // Of an order that is known, so that the loop is as short as can be.
            0 => own.out.add(0, blocks, |word| self.make_ready(pin, own, word)),
            _ => own.out.add(order, blocks, |word| self.make_ready(pin, own, word)),
        }
        if own.out.is_over() {
            self.free_ready(pin, own);
        }
        if own.out.is_over() {
            self.send(pin, own);
        }
    }

    /// A word is to be freed soon: its lines are asked for.
    #[inline(never)]
    fn make_ready(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, word: Word) {
        let first = word.ends().0;
        if let Some(arena) = self.arena(first).filter(|_| !word.is_huge()) {
            arena.block(first).prefetch();
        }
        if own.out.make_ready(word) {
            self.free_ready(pin, own);
        }
    }

    /// Frees what is ready, and [`READY`] words of the table, or as many as there are: three lock rounds at most.
    #[inline(never)]
    fn send(&self, pin: CpuPin<'_>, own: &PerCpu<'m>) {
        let (mut more, mut words) = (true, 0);
        while more && words < READY {
            more = own.out.take_group(|word| {
                words += 1;
                self.make_ready(pin, own, word);
            });
        }
        self.free_ready(pin, own);
    }

    /// Frees the words that are ready, if there are any: one lock round.
    #[inline(never)]
    fn free_ready(&self, pin: CpuPin<'_>, own: &PerCpu<'m>) {
        let pages = own.out.ready().map(|word| word.pages()).sum::<u64>();
        if pages != 0 {
            self.with_node(pin, own.node, |lists| {
                let careful = self.has_suspects();
                let counted = own.out.ready().map(|word| self.free_word(lists, word, careful)).sum::<u64>();
                // Once, because whoever waits for the lock looks at the same line.
                lists.pages += pages - counted;
            });
            own.out.have_left(pages);
        }
    }

    /// Frees a word under the lock, and says how many of its pages have been counted already. `careful`: some may have to be looked at.
    #[inline]
    fn free_word(&self, lists: &mut FreeLists, word: Word, careful: bool) -> u64 {
        let (first, last) = word.ends();
        let as_one = |arena: &&Arena<'m>| arena.contains(last) && !(careful && is_suspect(arena, word));
        let Some(arena) = self.arena(first).filter(as_one) else { return self.free_runs(lists, word) };
        if word.is_huge() {
            self.free_blocks_2m(lists, arena, first, word.bits, word.content());
        } else {
            self.free_pages(lists, arena, first, word);
        }
        0
    }

    /// The same run by run, where arenas meet inside a word or frames must be looked at.
    #[cold]
    #[inline(never)]
    fn free_runs(&self, lists: &mut FreeLists, word: Word) -> u64 {
        let content = word.content();
        for run in word.runs() {
            for (arena, part) in one_copy(self.parts(run)) {
                self.free_chunks(lists, arena, part, content);
            }
        }
        word.pages()
    }

    /// Gives back a part of what is due, in [`ROUNDS_PER_PIN`](crate::ROUNDS_PER_PIN) lock rounds at most; false if there was none. The
    /// caller is pinned to that CPU, or it runs nothing. One copy of it, for all who wait for something.
    #[inline(never)]
    fn give_back(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, due: Due) -> bool {
        let due = if own.mailbox.pending() { Due::All } else { due };
        if due == Due::Nothing {
            return false;
        }
        if due == Due::All
            && let Some((class, order)) = own.first_filled(0)
        {
            self.drain_class(pin, own, class, order, PART);
        } else if own.out.pages() != 0 {
            self.send(pin, own);
        } else {
            return due == Due::All && self.free_queued(pin);
        }
        true
    }

    /// What `f` does, pinned, when the CPU that `of` names has given back what is due: a pin for each part, so that interrupts that were on
    /// are off for a part, and not for all of it. One pin where nothing is.
    #[inline]
    pub(crate) fn after_giving_back<P: Cpu, R>(
        &self,
        cx: &CpuCx<'_, P>,
        of: impl Fn(CpuPin<'_>) -> Option<&'m PerCpu<'m>>,
        due: Due,
        f: impl FnOnce(CpuPin<'_>) -> R,
    ) -> R {
        let (mut f, mut parts) = (Some(f), 0);
        loop {
            let done = cx.pinned(|pin| match of(pin).filter(|own| parts < PARTS && self.give_back(pin, own, due)) {
                Some(_) => None,
                None => f.take().map(|f| f(pin)),
            });
            if let Some(done) = done {
                return done;
            }
            parts += 1;
        }
    }

    /// Frees a few blocks, less than 2 MiB, under the lock.
    #[inline(never)]
    pub(crate) fn free_few(&self, lists: &mut FreeLists, batch: &[u64]) {
        // SAFETY: a cache's, which gives them up.
        for block in batch.iter().map(|word| unsafe { Frozen::from_word(*word) }) {
            if let Some(arena) = self.arena(block.pfn()) {
                self.free_handle(lists, arena, block);
            }
        }
    }

    /// Frees one block under its node's lock.
    pub(crate) fn free_handle(&self, lists: &mut FreeLists, arena: &Arena<'m>, block: Frozen) {
        let content = Content::of(block.is_zero());
        match self.has_suspects() {
            true => self.free_suspects_locked(lists, arena, block.extent(), content),
            false => self.free_mapped(lists, arena, block.pfn(), block.log(), content),
        }
    }

    /// Under the node's lock: gives back the blocks of orders that are only gathered, which need no lock round of their own.
    pub(crate) fn return_gathered(&self, lists: &mut FreeLists, own: &PerCpu<'m>) {
        if lists.node == own.node {
            own.gathered().for_each(|class| self.return_class(lists, class));
        }
    }

    #[inline(never)]
    fn return_class(&self, lists: &mut FreeLists, class: &Class<'m>) {
        class.drain_highest(class.len(), |words| self.free_few(lists, words));
    }

    /// Serves what others have asked this CPU for, if it has given back all that it had: what it still has goes before the next call.
    #[inline(never)]
    pub(crate) fn serve_own(&self, own: &PerCpu<'m>) {
        let asked = own.mailbox.wants_service(self.suspects().is_watching());
        if asked {
            self.serve_asked(own);
        }
    }

    #[cold]
    #[inline(never)]
    fn serve_asked(&self, own: &PerCpu<'m>) {
        if !own.mailbox.pending() || own.pages() == 0 {
            own.mailbox.serve(|| own.shrink(), || self.suspects().watch());
        }
    }

    /// How many frames CPUs have cached of a node.
    #[inline(never)]
    pub(crate) fn cached_on(&self, node: NodeId) -> u64 {
        self.caches().iter().filter(|cpu| cpu.node == node).map(PerCpu::pages).sum()
    }

    /// For a CPU that has nothing to do, or that others have asked: gives everything that it has cached back to its node, and says that it
    /// has. To be called from idle loops, before interrupts go off there, because nobody wakes a CPU for what it has; and from an interrupt
    /// sent for the purpose. Cheap when there is nothing. Otherwise as [`drain`](Frames::drain).
    pub fn serve<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        self.empty_cache(cx, |pin| self.own(pin), |_| ());
    }

    /// Gives everything that this CPU has cached back to its node, and shrinks the cache. Any context but NMI; a lock round
    /// per 64 words of pages or 2 MiB blocks, a pin for each few of them.
    pub fn drain<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        self.empty_cache(cx, |pin| self.own(pin), PerCpu::shrink);
    }

    /// Gives everything that a CPU has cached back, on its behalf. Any context but NMI.
    ///
    /// # Safety
    ///
    /// The CPU runs nothing that uses this manager until this returns: it is offline, or has never been started. Nobody else drains it
    /// meanwhile.
    pub unsafe fn drain_offline<P: Cpu>(&self, cx: &CpuCx<'_, P>, cpu: CpuId) {
        self.empty_cache(cx, |_| self.caches().get(cpu.get() as usize), PerCpu::shrink);
    }

    /// Empties the cache of the CPU that `of` names, and says that it has if others have asked.
    fn empty_cache<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        of: impl Fn(CpuPin<'_>) -> Option<&'m PerCpu<'m>>,
        then: impl FnOnce(&PerCpu<'m>),
    ) {
        self.after_giving_back(cx, &of, Due::All, |pin| {
            if let Some(cpu) = of(pin) {
                self.serve_own(cpu);
                then(cpu);
            }
        })
    }
}

/// Whether some of a word's 2 MiB blocks have refused frames or are isolated.
fn is_suspect(arena: &Arena<'_>, word: Word) -> bool {
    let (region, index) = (arena.region(word.ends().0), in_region(word.ends().0));
    let bits = if word.is_huge() { word.bits } else { 1 << index.bit() };
    (region.refused.load(index.word()) | region.isolated.load(index.word())) & bits != 0
}
