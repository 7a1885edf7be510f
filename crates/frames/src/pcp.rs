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
//! * Orders 0 to 3 are cached per mobility, order 9 for both together. Everything else goes to the node (checklist C13).
//! * A refill brings half a cache in one lock round; a drain takes three quarters of one, 64 blocks in a round: those
//!   that were freed longest ago, sorted, so that neighbours are freed as the largest blocks they make.
//! * The high watermark moves: two refills, or two drains, without the other in between mean that the cache is too small
//!   for how this CPU works, and double it; [`Frames::drain`](crate::Frames::drain) and exhaustion shrink it to the
//!   smallest.
//!
//! Cost of a hit: one line of the class, one of the entries. Nothing of the frame itself is touched.
//!
//! Source of the rules: design §4.7, checklist C9, C10.

use crate::blockmap::Mobility;
use crate::frozen::Frozen;
use hugemm_base::NodeId;
use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering};

/// Orders 0..=3 twice, order 9 once.
pub(crate) const CLASSES: usize = 9;

/// The order of each class's blocks.
const ORDERS: [u32; CLASSES] = [0, 1, 2, 3, 0, 1, 2, 3, 9];

/// Watermarks start, and shrink, to this.
const LEAST: u64 = 8;

/// Entries per class at most: order 0, 1, 2, 3, 9.
const MOST: [u64; 5] = [512, 128, 64, 32, 64];

/// A request to one CPU and its answer: two counters.
///
/// Generic over the word so that loom runs it.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Mailbox<W = AtomicU64> {
    /// Requests posted. Anybody adds.
    posted: W,
    /// Value of `posted` up to which the owner has drained. Owner only.
    served: W,
}

impl<W: AtomicWord> Mailbox<W> {
    /// A mailbox made of two words that are zero.
    pub const fn new(posted: W, served: W) -> Self {
        Mailbox { posted, served }
    }

    /// Posts a request and returns its number.
    pub fn post(&self) -> u64 {
        // Release pairs with the Acquire in `serve`: what was done before posting (a block marked as isolated) is seen
        // by the owner when it drains, and by every operation of the owner after that.
        self.posted.fetch_add(1, Ordering::Release) + 1
    }

    /// Whether something is posted: one relaxed load of each word, for the owner's fast path.
    #[inline]
    pub fn pending(&self) -> bool {
        // Relaxed: `serve` acquires; seeing a request late only means serving it later.
        self.posted.load(Ordering::Relaxed) != self.served.load(Ordering::Relaxed)
    }

    /// The owner's side: runs `drain` if something is posted and acknowledges all that was posted before it started.
    pub fn serve(&self, drain: impl FnOnce()) -> bool {
        // Acquire pairs with the Release in `post`.
        let upto = self.posted.load(Ordering::Acquire);
        if upto == self.served.load(Ordering::Relaxed) {
            return false;
        }
        drain();
        // Release pairs with the Acquire in `is_served`.
        self.served.store(upto, Ordering::Release);
        true
    }

    /// Whether the request with this number has been served.
    pub fn is_served(&self, number: u64) -> bool {
        // Acquire pairs with the Release in `serve`.
        self.served.load(Ordering::Acquire) >= number
    }
}

/// Which way a class last went to its node.
const NEITHER: u64 = 0;
const REFILLED: u64 = 1;
const DRAINED: u64 = 2;

/// A stack of blocks of one order (and mobility). Owner only, but for `len`, which others may read.
#[derive(Debug)]
pub(crate) struct Class<'m> {
    len: AtomicU64,
    high: AtomicU64,
    last: AtomicU64,
    entries: &'m [AtomicU64],
}

// Relaxed throughout: only the owner writes, and nobody draws a conclusion from what they read (see the protocol).
impl<'m> Class<'m> {
    fn new(entries: &'m [AtomicU64]) -> Self {
        let high = LEAST.min(entries.len() as u64);
        Class { len: AtomicU64::new(0), high: AtomicU64::new(high), last: AtomicU64::new(NEITHER), entries }
    }

    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// The most recently freed block: three loads and a store.
    #[inline]
    pub(crate) fn pop(&self) -> Option<Frozen> {
        let len = self.len.load(Ordering::Relaxed).checked_sub(1)?;
        let word = self.entries.get(len as usize)?.load(Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        Some(Frozen::from_word(word))
    }

    /// Whether the block that `pop` would return is known to be zero.
    pub(crate) fn next_is_zero(&self) -> bool {
        let last = self.len.load(Ordering::Relaxed).checked_sub(1);
        let word = last.and_then(|last| self.entries.get(last as usize)).map(|entry| entry.load(Ordering::Relaxed));
        word.is_some_and(|word| Frozen::from_word(word).is_zero())
    }

    /// Whether there is room for another block below the watermark.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.len.load(Ordering::Relaxed) < self.high.load(Ordering::Relaxed)
    }

    /// Adds a block; the caller has made sure that there is [room](Class::has_room). Two loads, two stores.
    #[inline]
    pub(crate) fn push(&self, block: Frozen) {
        let len = self.len.load(Ordering::Relaxed);
        // The watermark is never above the capacity.
        if let Some(slot) = self.entries.get(len as usize) {
            slot.store(block.into_word(), Ordering::Relaxed);
            self.len.store(len + 1, Ordering::Relaxed);
        }
    }

    /// The cache ran empty: raises the watermark if that keeps happening, and says how many to fetch.
    pub(crate) fn want(&self) -> u64 {
        self.note(REFILLED);
        (self.high.load(Ordering::Relaxed) / 2).max(1)
    }

    /// The cache is full: raises the watermark if that keeps happening, and says how many must go. 0: there is room now.
    pub(crate) fn excess(&self) -> u64 {
        self.note(DRAINED);
        let high = self.high.load(Ordering::Relaxed);
        if self.len() < high { 0 } else { (high - high / 4).min(self.len()) }
    }

    fn note(&self, event: u64) {
        let high = self.high.load(Ordering::Relaxed);
        if self.last.load(Ordering::Relaxed) == event {
            self.high.store((high * 2).min(self.entries.len() as u64), Ordering::Relaxed);
        }
        self.last.store(event, Ordering::Relaxed);
    }

    /// Back to the smallest size.
    pub(crate) fn shrink(&self) {
        self.high.store(LEAST.min(self.entries.len() as u64), Ordering::Relaxed);
        self.last.store(NEITHER, Ordering::Relaxed);
    }

    /// Whether the class caches anything at all.
    pub(crate) fn enabled(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Takes up to `out.len()` of the oldest entries into `out`; the rest moves down. O(len).
    pub(crate) fn take_oldest(&self, out: &mut [u64]) -> usize {
        let len = self.len() as usize;
        let count = out.len().min(len);
        for (slot, entry) in out.iter_mut().zip(self.entries) {
            *slot = entry.load(Ordering::Relaxed);
        }
        for index in count..len {
            self.entries[index - count].store(self.entries[index].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.len.store((len - count) as u64, Ordering::Relaxed);
        count
    }
}

/// One CPU's cache. On lines of its own.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct PerCpu<'m> {
    pub(crate) mailbox: Mailbox,
    pub(crate) node: NodeId,
    pub(crate) classes: [Class<'m>; CLASSES],
}

impl<'m> PerCpu<'m> {
    /// Entries of each class, for a manager of `frames` frames: no class may hold more than 1/64 of a CPU's share (1/32
    /// for order 9), so that a small memory is not swallowed by caches.
    pub(crate) fn capacities(frames: u64, cpus: u32) -> [u64; CLASSES] {
        let share = frames / u64::from(cpus.max(1)) / 64;
        let [a, b, c, d, block] = MOST;
        let mut entries = [a, b, c, d, a, b, c, d, block];
        for (entries, order) in entries.iter_mut().zip(ORDERS) {
            *entries = (*entries).min(share >> order << u32::from(order == 9));
        }
        entries
    }

    /// A CPU's empty cache over `entries`, as many as the sum of `capacities`.
    pub(crate) fn new(node: NodeId, capacities: &[u64; CLASSES], entries: &'m [AtomicU64]) -> Self {
        let mut rest = entries;
        let classes = capacities.map(|capacity| {
            let (own, others) = rest.split_at_checked(capacity as usize).unwrap_or((&[], rest));
            rest = others;
            Class::new(own)
        });
        PerCpu { mailbox: Mailbox::new(AtomicU64::new(0), AtomicU64::new(0)), node, classes }
    }

    /// The class of blocks of `order`, if they are cached.
    #[inline]
    pub(crate) fn class(&self, order: u32, mobility: Mobility) -> Option<&Class<'m>> {
        match order {
            0..=3 => self.classes.get(mobility.index() * 4 + order as usize),
            9 => self.classes.get(CLASSES - 1),
            _ => None,
        }
    }

    /// Every class with its order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&Class<'m>, u32)> {
        self.classes.iter().zip(ORDERS)
    }

    /// Frames in the cache: exact for the owner, a snapshot for others.
    pub(crate) fn pages(&self) -> u64 {
        self.all().map(|(class, order)| class.len() << order).sum()
    }
}
