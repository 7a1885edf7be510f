//! Per-CPU caches: why an allocation usually costs a few loads and stores and no atomic.
//!
//! # Protocol
//!
//! * A CPU's cache is touched only by code that runs on that CPU under a pin ([`CpuPin`](hugemm_base::CpuPin)):
//!   interrupts off, or a bound thread. So every access is a relaxed load or store, never a read-modify-write; the words
//!   are atomics only so that others may *read* lengths for statistics.
//! * Nobody takes frames out of another CPU's cache. Whoever needs them posts a request ([`Mailbox`]); the owner serves
//!   it at its next operation, or when its platform calls [`Frames::serve`](crate::Frames::serve) (from its idle loop
//!   or an inter-processor interrupt), and acknowledges.
//! * Orders 0 to 3 and 9 are cached, per mobility; an order-9 block that was freed as the other mobility is taken before
//!   the node is asked. Everything else goes to the node.
//! * Orders 4 to 8 are only gathered when they are freed, so that the lock is taken once for a few and the next allocation: a
//!   cache that hands the same places out again and again keeps 2 MiB blocks from ever becoming free. They are allocated from the
//!   node, from its lowest addresses, unless that would give the same block back: what is gathered lies no higher than the block
//!   that this CPU took at its last visit there, and that was the lowest.
//! * A refill brings half a cache in one lock round, or all of it if the last one was followed by another. A drain takes
//!   three quarters, those that lie highest, so that low memory is used first; or all, where drains follow one another.
//! * The high watermark moves: three refills, or three drains, without the other in between mean that the cache is too
//!   small for how this CPU works, and double it. A change of direction means that a small one will do, and so does
//!   [`Frames::drain`](crate::Frames::drain) or exhaustion: it shrinks to the smallest. Who finds another CPU at the node when it refills
//!   pages of 4 KiB, again and again, has twice as large a cache as usual: 1024 pages.
//! * A cache hands the places that were freed last out again, wherever they lie, while the node has room in lower ones. So what is freed
//!   above the 2 MiB where the class's last refill found room is not cached. That, and what a drain takes of the orders that are cached, is
//!   on its way (`outgoing.rs`) to the node: it counts as cached, no block of it is handed out, and it leaves before this CPU
//!   takes anything from the node: it may be the lowest place, or make a larger block with what is there. Every path that drains the cache
//!   drains it too; so a request that is served leaves nothing there. Whether pages must be looked at is seen under the lock.
//! * What is given back before something else is done goes in parts, each in a pin of its own: nobody has interrupts off for a whole
//!   cache who had them on before. [`ROUNDS_PER_PIN`](crate::ROUNDS_PER_PIN) says for how long at most.
//!
//! Cost of a hit: three lines, of the mailbox, of the class and of its entries; 5 loads and 1 store to allocate, 6 and 2
//! to free. Nothing of the frame itself is touched.

use crate::arena::{BLOCK_ORDER, REGION_ORDER};
use crate::bits::one_loop;
use crate::class::Class;
use crate::frozen::Frozen;
use crate::mobility::Mobility;
use crate::outgoing::Outgoing;
use crate::takers::Chunks;
use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering, fence};
use hugemm_base::{Extent, NodeId, Pfn};

/// A class per order up to 9 and mobility, at [`Frozen::class`].
pub(crate) const CLASSES: usize = 20;

/// Entries per class, by order, that a watermark rises to. Of orders that are only gathered so many that two CPUs that free at once spend their time on
/// what they free, and not on each other's lines of what is kept per region and per node.
const MOST: [u64; CLASSES / 2] = [512, 128, 64, 32, 8, 8, 8, 8, 8, 256];

/// The same of pages of 4 KiB where CPUs meet at the node: as many as a lock round can bring.
const WIDEST: u64 = 2 * MOST[0];

/// Watermarks start, and shrink, to this.
const LEAST: u64 = 8;

/// That of 2 MiB: what is cached of them is hidden from smaller blocks, which would go to higher memory instead.
const LEAST_2M: u64 = 2;

/// Bits for a class beside a frame's number.
const LOWEST_SHIFT: u32 = 8;

/// log2 of the frames of which all are near to a class of blocks of `order` if one is: 2 MiB; of 2 MiB blocks 128 MiB, because
/// a refill brings many.
const fn near_shift(order: u32) -> u32 {
    if order == BLOCK_ORDER { 15 } else { BLOCK_ORDER }
}

/// Orders, as bits, that are allocated from the cache. The others are only gathered there on their way to the node.
const STOCKED: u32 = 0b10_0000_1111;

/// Whether blocks of `order` are allocated from caches.
#[inline]
pub(crate) const fn is_stocked(order: u32) -> bool {
    STOCKED >> order & 1 != 0
}

/// What keeps a CPU off its fast paths: a word that allocations look at, and one for frees.
///
/// Generic over the words so that loom runs it.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Mailbox<W = AtomicU64> {
    /// [`REQUEST`] times the requests not yet served, plus [`CAREFUL`]. Anybody adds a request; the rest is the owner's.
    attention: W,
    /// Bits of the [places](Frozen::place) whose blocks may not be freed on the fast path: all of them while `attention` is
    /// not 0. Anybody sets all; the rest is the owner's.
    closed: W,
}

/// Something is isolated: every block must be looked at before it is cached or handed out.
const CAREFUL: u64 = 1;
const REQUEST: u64 = 2;

/// What an owner has to look out for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// All blocks, allocated and freed: something is isolated.
    Everything,
    /// Frees of blocks with these places, as bits: something there is poisoned, and in use.
    Places(u64),
}

impl<W: AtomicWord> Mailbox<W> {
    /// A mailbox made of words that are zero.
    pub const fn new(attention: W, closed: W) -> Self {
        Mailbox { attention, closed }
    }

    /// Posts a request.
    pub fn post(&self) {
        // Release pairs with the Acquire in `serve`: what was done before posting (a block marked as isolated) is seen
        // by the owner when it drains, and by every operation of the owner after that.
        self.attention.fetch_add(REQUEST, Ordering::Release);
        // SeqCst: after the request, before the path is closed; pairs with the fence in `reopen`.
        fence(Ordering::SeqCst);
        // Relaxed: whoever sees it serves the request.
        let _ = self.closed.transition(Ordering::Relaxed, Ordering::Relaxed, |_| Some(u64::MAX));
    }

    /// Whether the owner may allocate on its fast path: one relaxed load.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        // Relaxed: `serve` acquires; seeing a request late only means serving it later.
        self.attention.load(Ordering::Relaxed) == 0
    }

    /// Whether the owner may free a block of this place on its fast path: one relaxed load.
    #[inline]
    pub fn admits_place(&self, place: u32) -> bool {
        // Relaxed: as in `is_quiet`.
        self.closed.load(Ordering::Relaxed) >> (place & 63) & 1 == 0
    }

    /// The same of a block.
    #[inline]
    pub(crate) fn admits(&self, block: &Frozen) -> bool {
        self.admits_place(block.place())
    }

    /// Whether the owner should [`serve`](Mailbox::serve): something is asked, or frees are kept off the fast path for
    /// nothing. `watching` says whether there are places to look out for.
    pub(crate) fn wants_service(&self, watching: bool) -> bool {
        let closed = self.closed.load(Ordering::Relaxed);
        // All closed without a request: whoever posted it was late with the second step.
        !self.is_quiet() || closed == u64::MAX || closed != 0 && !watching
    }

    /// Whether a request has not been served yet.
    pub fn pending(&self) -> bool {
        // Acquire pairs with the Release in `serve`: what the owner drained is in its node.
        self.attention.load(Ordering::Acquire) >= REQUEST
    }

    /// The owner's side: runs `drain` if something is posted, and acknowledges all that was posted before it started.
    /// `watch` says, after that, what the owner has to look out for all the same. Returns whether it drained.
    pub fn serve(&self, drain: impl FnOnce(), watch: impl FnOnce() -> Watch) -> bool {
        // Acquire pairs with the Release in `post`.
        let seen = self.attention.load(Ordering::Acquire);
        let posted = seen >= REQUEST;
        if posted {
            drain();
        }
        // What `watch` reads was written before the requests seen above were posted, or else before one that is still
        // in the word afterwards and asks again.
        let (keep, closed) = match watch() {
            Watch::Everything => (CAREFUL, u64::MAX),
            Watch::Places(places) => (0, places),
        };
        if seen != keep {
            // Release pairs with the Acquire in `pending`.
            self.attention.fetch_add(keep.wrapping_sub(seen), Ordering::Release);
        }
        self.reopen(keep, closed);
        posted
    }

    /// Closes what has to be closed, and opens the rest unless more has been asked meanwhile.
    fn reopen(&self, keep: u64, closed: u64) {
        if self.closed.load(Ordering::Relaxed) == closed {
            return;
        }
        self.closed.store(closed, Ordering::Relaxed);
        // SeqCst: after the store, before the look at the requests; pairs with the fence in `post`: either the request is
        // seen here, or whoever posted it closes the path after this.
        fence(Ordering::SeqCst);
        if self.attention.load(Ordering::Relaxed) != keep {
            self.closed.store(u64::MAX, Ordering::Relaxed);
        }
    }
}

/// How large a CPU's cache may become.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacities {
    /// Entries of each order's two classes.
    blocks: [u64; CLASSES / 2],
    /// Slots for words.
    words: u64,
}

/// Entries of each of an order's two classes, for a CPU whose share of memory is so many frames: see [`PerCpu::capacities`].
#[inline(never)]
fn capacity(share: u64, order: usize) -> u64 {
    let large = order as u32 == BLOCK_ORDER && share >> REGION_ORDER != 0;
    let most = if order == 0 { WIDEST } else { MOST[order] };
    let most = most.min((if large { share / 16 } else { share / 64 }) >> order);
    if is_stocked(order as u32) { most } else { most.min(((share / 256) >> order).max(1)) }
}

/// One CPU's cache. On lines of its own.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct PerCpu<'m> {
    pub(crate) mailbox: Mailbox,
    pub(crate) number: u32,
    pub(crate) node: NodeId,
    /// Where it was filled from last.
    pub(crate) chunks: Chunks,
    /// The first of the frames that are known to be this manager's and on the node for as long as it lives, and how many: adjoining arenas
    /// that it was made with, those where the last refill found room. Of any other frame both are looked up.
    local: [AtomicU64; 2],
    /// What this CPU took at its last visit to a node, if its own had no lower block of an order that is only gathered: its first
    /// frame plus 1 from bit [`LOWEST_SHIFT`] on, and its class; 0 otherwise.
    lowest: AtomicU64,
    /// What is not to be allocated from here again.
    pub(crate) out: Outgoing<'m>,
    classes: [Class<'m>; CLASSES],
}

impl<'m> PerCpu<'m> {
    /// Entries of each order's two classes, for a manager of `frames` frames: no class may hold more than 1/64 of a CPU's
    /// share, so that a small memory is not swallowed by caches. That of 2 MiB may hold 1/16 where a CPU's share is 1 GiB or
    /// more: CPUs that take or free many at once would wait for each other's lines if the batches were smaller, and only
    /// who does that ever has so many. What is only gathered is one block, or 1/256.
    pub(crate) fn capacities(frames: u64, cpus: u32) -> Capacities {
        let share = frames / u64::from(cpus.max(1));
        Capacities { blocks: core::array::from_fn(|order| capacity(share, order)), words: Outgoing::slots(share) }
    }

    /// How many entries those are.
    #[inline(never)]
    pub(crate) fn entries(capacities: &Capacities) -> u64 {
        2 * capacities.blocks.iter().sum::<u64>() + Outgoing::entries(capacities.words)
    }

    /// A CPU's empty cache over `entries`, as many as [`entries`](PerCpu::entries) says. No frames are local yet.
    pub(crate) fn new(number: u32, node: NodeId, capacities: &Capacities, entries: &'m [AtomicU64]) -> Self {
        let mut rest = entries;
        let classes = core::array::from_fn(|class| {
            let most = capacities.blocks[class / 2];
            let (own, others) = rest.split_at_checked(most as usize).unwrap_or((&[], rest));
            rest = others;
            let least = if class / 2 == BLOCK_ORDER as usize { LEAST_2M } else { LEAST };
            Class::new(own, least, MOST[class / 2], 0)
        });
        PerCpu {
            mailbox: Mailbox::new(AtomicU64::new(0), AtomicU64::new(0)),
            number,
            node,
            chunks: Chunks::default(),
            local: [AtomicU64::new(0), AtomicU64::new(0)],
            lowest: AtomicU64::new(0),
            out: Outgoing::new(rest, capacities.words),
            classes,
        }
    }

    /// Whether a freed frame may be allocated again from a class: it is on the node at the first look, and no higher than the
    /// 2 MiB (128 MiB for blocks of 2 MiB) where the class's last refill found room. What lies higher is given back, so that
    /// high memory empties.
    #[inline]
    pub(crate) fn is_near(&self, class: &Class<'m>, pfn: Pfn) -> bool {
        // One comparison: what is below the base wraps.
        pfn.get().wrapping_sub(self.local[0].load(Ordering::Relaxed)) < class.near()
    }

    /// Whether a freed block is of an order that is allocated from here and lies higher than near, as far as that is known at the first look.
    pub(crate) fn is_far(&self, class: &Class<'m>, block: &Frozen) -> bool {
        is_stocked(block.log()) && self.is_local(block.pfn()) && !self.is_near(class, block.pfn())
    }

    /// Whether a frame is known to be on the node at the first look.
    #[inline]
    pub(crate) fn is_local(&self, pfn: Pfn) -> bool {
        let [base, pages] = &self.local;
        pfn.get().wrapping_sub(base.load(Ordering::Relaxed)) < pages.load(Ordering::Relaxed)
    }

    /// From now on these frames are, and near to all classes: some of this manager's that are on the node for good.
    #[inline(never)]
    pub(crate) fn settle(&self, frames: Extent) {
        self.local[0].store(frames.base().get(), Ordering::Relaxed);
        self.local[1].store(frames.pages(), Ordering::Relaxed);
        one_loop(&self.classes[..]).iter().for_each(|class| class.set_near(frames.pages()));
    }

    /// A refill of a class of blocks of `order` found room at a frame: that is as far as near is.
    pub(crate) fn found(&self, class: &Class<'m>, order: u32, pfn: Pfn) {
        if self.is_local(pfn) {
            let [base, pages] = self.local.each_ref().map(|word| word.load(Ordering::Relaxed));
            let shift = near_shift(order);
            let end = ((pfn.get() >> shift) + 1) << shift;
            class.set_near((end - base).min(pages));
        }
    }

    /// The class of a block, if there is one for its order.
    #[inline]
    pub(crate) fn class_of(&self, block: &Frozen) -> Option<&Class<'m>> {
        // SAFETY: below the number of classes.
        block.class_is_below(CLASSES).then(|| unsafe { self.classes.get_unchecked(block.class()) })
    }

    /// The class from which blocks of `order` are allocated, if there is one.
    #[inline]
    pub(crate) fn stock(&self, order: u32, mobility: Mobility) -> Option<&Class<'m>> {
        if !is_stocked(order) {
            return None;
        }
        self.class(order, mobility)
    }

    /// The class to which blocks of `order` are freed, if there is one.
    #[inline]
    pub(crate) fn class(&self, order: u32, mobility: Mobility) -> Option<&Class<'m>> {
        self.classes.get(2 * order as usize + mobility.index())
    }

    /// This CPU is about to take or free at a node.
    pub(crate) fn forget_lowest(&self) {
        self.lowest.store(0, Ordering::Relaxed);
    }

    /// This CPU's node had no block of this order and mobility below this one, which was just taken there; or none at all, and this is
    /// another's.
    pub(crate) fn note_lowest(&self, block: &Frozen) {
        if block.log() < BLOCK_ORDER && !is_stocked(block.log()) {
            let frame = (block.pfn().get() + 1) << LOWEST_SHIFT;
            self.lowest.store(frame | block.class() as u64, Ordering::Relaxed);
        }
    }

    /// The lowest of the gathered blocks of an order, if the node has none below it as far as this CPU knows.
    #[inline]
    pub(crate) fn take_gathered(&self, order: u32, mobility: Mobility) -> Option<Frozen> {
        let (lowest, class) = (self.lowest.load(Ordering::Relaxed), self.class(order, mobility)?);
        let of_class = lowest & ((1 << LOWEST_SHIFT) - 1) == 2 * u64::from(order) + mobility.index() as u64;
        if lowest != 0 && of_class { class.pop_lowest(Pfn::new(lowest >> LOWEST_SHIFT)) } else { None }
    }

    /// The classes of orders that are only gathered here, those that have some.
    pub(crate) fn gathered(&self) -> impl Iterator<Item = &Class<'m>> {
        let orders = STOCKED.trailing_ones() as usize..BLOCK_ORDER as usize;
        let classes = self.classes.get(2 * orders.start..2 * orders.end).unwrap_or(&[]);
        classes.iter().filter(|class| class.len() != 0)
    }

    /// Every class is as small as it was at first. One copy of it, and of the others that look at all classes.
    #[inline(never)]
    pub(crate) fn shrink(&self) {
        one_loop(&self.classes[..]).iter().for_each(Class::shrink);
    }

    /// Every class with its order.
    fn all(&self) -> impl Iterator<Item = (&Class<'m>, u32)> {
        self.classes.iter().enumerate().map(|(index, class)| (class, index as u32 / 2))
    }

    /// The first class of an order or more that has a block, with its order.
    #[inline(never)]
    pub(crate) fn first_filled(&self, order: u32) -> Option<(&Class<'m>, u32)> {
        self.all().skip(2 * order as usize).find(|(class, _)| class.len() != 0)
    }

    /// Whether there is a block of an order or more, or anything.
    #[inline(never)]
    pub(crate) fn has(&self, order: Option<u32>) -> bool {
        match order {
            Some(order) => self.first_filled(order).is_some(),
            None => self.pages() != 0,
        }
    }

    /// Frames in the cache: exact for the owner, a snapshot for others.
    #[inline(never)]
    pub(crate) fn pages(&self) -> u64 {
        self.all().map(|(class, order)| class.len() << order).sum::<u64>() + self.out.pages()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::outgoing::READY;
    use hugemm_base::Order;

    const GIB: u64 = 1 << REGION_ORDER;

    #[test]
    fn orders_up_to_3_and_9_are_allocated_from_caches() {
        assert!((0..=18).filter(|order| is_stocked(*order)).eq([0, 1, 2, 3, 9]));
    }

    /// At most 1/64 of a CPU's share, 1/16 in 2 MiB blocks where the share is 1 GiB, and so many in any case: pages, where CPUs meet.
    #[test]
    fn caches_hold_a_small_part_of_a_share() {
        let large = |gathered: [u64; 2], blocks: u64| -> Vec<u64> {
            [1024, 128, 64, 32, 8, 8, 8].into_iter().chain(gathered).chain([blocks]).collect()
        };
        for cpus in [1, 2] {
            let sizes = |share: u64| PerCpu::capacities(share * u64::from(cpus), cpus);
            let capacities = |share: u64| sizes(share).blocks.to_vec();
            assert_eq!(capacities(GIB), large([8, 4], 32));
            assert_eq!(capacities(GIB - 1), large([7, 3], 7));
            assert_eq!(capacities(64 * GIB), large([8, 8], 256));
            assert_eq!(capacities(6400), [100, 50, 25, 12, 1, 1, 1, 0, 0, 0]);
            assert_eq!([6400, GIB].map(|share| sizes(share).words), [8, 512]);
        }
        assert_eq!(PerCpu::capacities(6400, 0).blocks, PerCpu::capacities(6400, 1).blocks);
        // Two mobilities. Two words for each slot and each word that is ready, and a bit.
        let sizes = Capacities { blocks: [8, 4, 3, 0, 0, 0, 0, 0, 0, 1], words: 8 };
        assert_eq!(PerCpu::entries(&sizes), 2 * (8 + 4 + 3 + 1) + 2 * 8 + 1 + 2 * READY as u64);
    }

    /// A cache over these frames, with eight entries in each class and eight slots for words.
    fn with_cache(local: Extent, test: impl FnOnce(&PerCpu<'_>)) {
        let capacities = Capacities { blocks: [8; CLASSES / 2], words: 8 };
        let entries: Vec<AtomicU64> = (0..PerCpu::entries(&capacities)).map(|_| AtomicU64::new(0)).collect();
        assert_eq!(entries.len(), CLASSES * 8 + 2 * 8 + 1 + 2 * READY);
        let own = PerCpu::new(0, NodeId::new(0), &capacities, &entries);
        own.settle(local);
        test(&own);
    }

    fn block(pfn: u64, order: u32) -> Frozen {
        Frozen::make(Pfn::new(pfn), Order::new(order).expect("valid"), Mobility::Movable, false)
    }

    /// Near is what lies no higher than the 2 MiB, or for 2 MiB blocks the 128 MiB, where the last refill found room.
    #[test]
    fn near_ends_with_the_block_where_the_last_refill_found_room() {
        let local = Extent::new(Pfn::new(1000), 1 << 16).expect("in range");
        with_cache(local, |own| {
            let class = own.class(0, Mobility::Movable).expect("order 0");
            let ends_at = |end: u64| {
                let near = |pfn| own.is_near(class, Pfn::new(pfn));
                !near(999) && near(1000) && near(end - 1) && !near(end)
            };
            assert!(ends_at(1000 + (1 << 16)), "all of it at first");
            own.found(class, 0, Pfn::new(2000));
            assert!(ends_at(2048));
            own.found(class, 0, Pfn::new(999));
            own.found(class, 0, local.end());
            assert!(ends_at(2048), "frames elsewhere say nothing");
            own.found(class, BLOCK_ORDER, Pfn::new(2000));
            assert!(ends_at(1 << 15));
            own.found(class, 0, Pfn::new(999 + (1 << 16)));
            assert!(ends_at(1000 + (1 << 16)), "nor what lies beyond");

            own.found(class, 0, Pfn::new(2000));
            let far = |pfn, order| own.is_far(class, &block(pfn, order));
            assert_eq!([far(2047, 0), far(2048, 0), far(2048, 4), far(900, 0)], [false, true, false, false]);
        });
    }

    #[test]
    fn a_cache_counts_the_frames_of_all_its_classes() {
        with_cache(Extent::default(), |own| {
            assert!(own.all().map(|(_, order)| order).eq((0..20).map(|index| index / 2)));
            for (number, order) in [0, 0, 3, 9].into_iter().enumerate() {
                let block = block((number as u64) << 9, order);
                let class = own.class_of(&block).expect("cached");
                assert!(core::ptr::eq(class, own.class(order, Mobility::Movable).expect("cached")));
                assert_eq!(class.push(block), Ok(()));
            }
            own.out.add(1, &[block(1 << 20, 1).into_word()], |_| ());
            assert!(own.gathered().next().is_none());
            assert_eq!(own.pages(), 1 + 1 + 8 + 512 + 2);
            assert!(own.class(10, Mobility::Unmovable).is_none() && own.class_of(&block(0, 10)).is_none());
            assert!(own.stock(4, Mobility::Movable).is_none());
            let stock = own.stock(3, Mobility::Movable).expect("stocked");
            assert_eq!(stock.pop(), Some(block(2 << 9, 3)));
            for order in [4, 8] {
                assert_eq!(own.class(order, Mobility::Movable).expect("cached").push(block(0, order)), Ok(()));
            }
            let orders = own.gathered().map(|class| class.pop().expect("one").log());
            assert!(orders.eq([4, 8]));
        });
    }

    fn mailbox(attention: u64, closed: u64) -> Mailbox {
        Mailbox::new(AtomicU64::new(attention), AtomicU64::new(closed))
    }

    fn admitted(mailbox: &Mailbox) -> Vec<u32> {
        (0..64).filter(|place| mailbox.admits_place(*place)).collect()
    }

    /// A request closes every path until it is served, and what is watched for stays closed to frees.
    #[test]
    fn a_request_is_served_once() {
        let mailbox = mailbox(0, 0);
        assert!(mailbox.is_quiet() && !mailbox.pending() && !mailbox.wants_service(false));
        assert_eq!(admitted(&mailbox).len(), 64);
        mailbox.post();
        mailbox.post();
        assert!(
            !mailbox.is_quiet() && mailbox.pending() && mailbox.wants_service(true) && admitted(&mailbox).is_empty()
        );
        let mut drained = 0;
        assert!(mailbox.serve(|| drained += 1, || Watch::Places(!(1 << 5 | 1 << 63))));
        assert!(mailbox.is_quiet() && !mailbox.pending() && drained == 1);
        assert_eq!(admitted(&mailbox), [5, 63]);
        assert!(mailbox.admits_place(64 + 5) && !mailbox.admits_place(64 + 4), "places are modulo 64");
        // Nobody watches for them any more: that is a reason to serve, and none to drain.
        assert!(!mailbox.wants_service(true) && mailbox.wants_service(false));
        assert!(!mailbox.serve(|| drained += 1, || Watch::Places(0)));
        assert_eq!((admitted(&mailbox).len(), drained), (64, 1));
    }

    #[test]
    fn while_something_is_isolated_every_path_is_closed_without_a_request() {
        let mailbox = mailbox(0, 0);
        assert!(!mailbox.serve(|| unreachable!("nothing is asked"), || Watch::Everything));
        assert!(!mailbox.is_quiet() && !mailbox.pending() && admitted(&mailbox).is_empty());
        assert!(!mailbox.serve(|| unreachable!("nothing is asked"), || Watch::Places(0)));
        assert!(mailbox.is_quiet() && admitted(&mailbox).len() == 64);
    }

    #[test]
    fn a_request_that_comes_while_another_is_served_stays() {
        let mailbox = mailbox(0, 0);
        mailbox.post();
        assert!(mailbox.serve(|| mailbox.post(), || Watch::Places(0)));
        assert!(mailbox.pending() && !mailbox.is_quiet() && admitted(&mailbox).is_empty());
        assert!(mailbox.serve(|| (), || Watch::Places(0)));
        assert!(mailbox.is_quiet() && admitted(&mailbox).len() == 64);
    }

    /// Whoever posted closed the paths after the request had been served: nobody would open them again.
    #[test]
    fn paths_that_were_closed_late_are_opened() {
        let late = mailbox(0, u64::MAX);
        assert!(late.wants_service(true) && late.wants_service(false));
        assert!(!late.serve(|| unreachable!("nothing is asked"), || Watch::Places(0)));
        assert_eq!(admitted(&late).len(), 64);
    }
}
