//! Which folios have not been used for long: lists by age, with the policy a value.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `lru/ring.rs` | lists by age: the shape that both policies share |
//! | `lru/policy.rs` | the seam: what becomes of a folio that was looked at |
//! | `lru/two_list.rs` | active and inactive, with a second look |
//! | `lru/generations.rs` | up to four generations |
//! | `lru/state.rs` | a folio's state, one descriptor word |
//! | `lru/new_pages.rs` | pages that wait for a list, by CPU |
//! | `lru/lists.rs` | what is done under the lock |
//! | `lru/kinds.rs` | sources' pages apart from the others: which of them go |
//! | `lru/batch.rs` | folios on their way through |
//!
//! Folios of every order are on one kind of list: an order-9 folio is one entry that counts 512 pages. Links and state are
//! in the head's descriptor (words 2 to 4).
//!
//! # Protocol
//!
//! All of it is for this crate alone, because numbers are taken for folios that somebody holds, and links are written into
//! their descriptors.
//!
//! * The pager inserts a folio when it is told of it (single pages of 4 KiB by way of the CPU's new pages), and drops references with `let_go`, which takes the folio off with the
//!   last. Nobody else drops one: a page's owner drops its own through the pager, and getting one by number is `unsafe`, with
//!   that promise. So what is on a list has references, or is just frozen by whoever moves it, and has some again then.
//! * `isolate` takes up to [`BATCH`] folios off in one lock round, with a speculative get of each under the lock; they are
//!   judged without it; `put_back` takes one more round. The isolator then drops its references, so nothing goes meanwhile.
//! * A folio that may be named to `promote` or `let_go` without being on the LRU (a locked one) has been left out.
//!
//! Context: any but NMI. The lock is held for 64 folios at most, or what waits in all places of new pages, and pinned; `promote` takes it under a
//! page table's. One lock per node: faults of single pages take a round for 15, others one per insertion of up to a batch, reclaim two per batch.

mod batch;
mod generations;
mod kinds;
mod lists;
mod new_pages;
mod policy;
mod ring;
mod state;
#[cfg(test)]
mod tests;
mod two_list;

pub use batch::BATCH;
pub(crate) use batch::{Batch, Folio};
pub(crate) use kinds::Take;
pub use policy::LruPolicy;
pub(crate) use policy::LruVerdict;
pub(crate) use state::Mark;

use crate::links::Words;
use crate::wake::Wake;
use crate::words::STATE;
use core::fmt;
use hugemm_base::cpu::CpuPin;
use hugemm_base::lock::{PinnedLock, RawLock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Order, Pfn};
use hugemm_frames::{Env, Frames};
use kinds::Kinds;
use new_pages::NewPages;
use state::{Standing, State};

/// Where to take folios from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LruEnd {
    /// The coldest: candidates for eviction.
    Oldest,
    /// The youngest list's oldest, to see whether they still are young; when [`Batch::ageing_due`] says so.
    Youngest,
}

/// What is on an LRU and what has happened to it, in base pages unless it says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LruStats {
    /// Folios on the lists now.
    pub folios: u64,
    /// Pages on all lists but the youngest now.
    pub candidates: u64,
    /// Pages on the youngest list now.
    pub youngest: u64,
    /// Pages isolated now.
    pub isolated: u64,
    /// Put on from outside.
    pub inserted: u64,
    /// Taken off for a look.
    pub scanned: u64,
    /// Put back as old as they were.
    pub rotated: u64,
    /// Put back as young as can be.
    pub activated: u64,
    /// Put back as candidates.
    pub deactivated: u64,
    /// Made younger because a neighbour was looked at.
    pub promoted: u64,
    /// Not put back.
    pub released: u64,
    /// Folios that could not be held.
    pub busy: u64,
    /// Generations begun.
    pub generations: u64,
    /// How often the lock has been taken.
    pub lock_rounds: u64,
}

impl LruStats {
    /// Pages on all lists.
    pub const fn pages(&self) -> u64 {
        self.candidates + self.youngest
    }
}

/// The LRU of one node. See the [module's documentation](self). Its functions may be called in any context but NMI: what they
/// take is one lock, pinned, for a bounded time.
#[repr(C, align(64))]
pub struct Lru<'f, 'm, E: Env, L: RawLock = SpinLock> {
    lists: PinnedLock<L, Kinds>,
    read: Read<'f, 'm, E>,
    new: NewPages<L>,
}

/// What all nodes' CPUs look at, on a line of its own.
#[repr(align(64))]
struct Read<'f, 'm, E: Env> {
    frames: &'f Frames<'m, E>,
    wake: Wake,
}

impl<E: Env, L: RawLock> fmt::Debug for Lru<'_, '_, E, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lru").finish_non_exhaustive()
    }
}

impl<'f, 'm, E: Env, L: RawLock> Lru<'f, 'm, E, L> {
    /// Whether it is for folios of these frames. Others' it would link through descriptors that are not theirs.
    pub(crate) fn is_of(&self, frames: &Frames<'_, E>) -> bool {
        core::ptr::from_ref(self.read.frames).addr() == core::ptr::from_ref(frames).addr()
    }

    /// An empty LRU for folios of `frames`.
    pub fn new(frames: &'f Frames<'m, E>, policy: LruPolicy) -> Self {
        let read = Read { frames, wake: Wake::new() };
        Lru { lists: PinnedLock::new(Kinds::new(policy)), read, new: NewPages::new() }
    }

    /// One lock round.
    fn locked<P: Cpu, R>(&self, cx: &CpuCx<'_, P>, f: impl FnOnce(&mut Kinds) -> R) -> R {
        cx.pinned(|pin| self.locked_by(pin, f))
    }

    /// The same for whoever is pinned already.
    fn locked_by<R>(&self, pin: CpuPin<'_>, f: impl FnOnce(&mut Kinds) -> R) -> R {
        let mut lists = self.lists.lock(pin);
        lists.own.lock_rounds += 1;
        f(&mut lists)
    }

    /// The same for whoever looks at what there is: with all new pages.
    fn locked_with_all<P: Cpu, R>(&self, cx: &CpuCx<'_, P>, f: impl FnOnce(&mut Kinds) -> R) -> R {
        cx.pinned(|pin| {
            self.locked_by(pin, |lists| {
                self.new.enter_all(pin, self.read.frames, &mut lists.own);
                f(lists)
            })
        })
    }

    /// What is noted of its node's free memory.
    pub(crate) fn wake(&self) -> &Wake {
        &self.read.wake
    }

    /// One lock round that puts folios on. Whether the level is to be looked at: once per [`BATCH`] base pages and one for each CPU, since a
    /// look goes over all CPUs.
    fn add<P: Cpu>(&self, cx: &CpuCx<'_, P>, pin: CpuPin<'_>, f: impl FnOnce(&mut Kinds)) -> bool {
        let look_each = BATCH as u64 + u64::from(cx.platform().cpus());
        self.locked_by(pin, |lists| {
            let before = lists.inserted();
            f(lists);
            before / look_each != lists.inserted() / look_each
        })
    }

    /// Puts folios of `order` on that are not: at most [`BATCH`]. For their owner, who holds references to them. One lock round.
    /// Whether the level is to be looked at.
    pub(crate) fn insert<P: Cpu>(&self, cx: &CpuCx<'_, P>, heads: impl Iterator<Item = Pfn>, order: Order) -> bool {
        let put = |lists: &mut Kinds| heads.for_each(|head| lists.own.insert(self.read.frames, head, order));
        cx.pinned(|pin| self.add(cx, pin, put))
    }

    /// The same of one page of 4 KiB: one lock round for 15 of a CPU.
    pub(crate) fn insert_page<P: Cpu>(&self, cx: &CpuCx<'_, P>, head: Pfn) -> bool {
        let frames = self.read.frames;
        cx.pinned(|pin| {
            let put = |lists: &mut Kinds| {
                self.new.enter_own(pin, frames, &mut lists.own);
                lists.own.insert(frames, head, Order::ZERO);
            };
            !self.new.push(pin, frames, head) && self.add(cx, pin, put)
        })
    }

    /// The same of pages of sources. `distance`: so many of those have been dropped since one of these was, if one was.
    pub(crate) fn insert_sourced<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        heads: impl Iterator<Item = Pfn>,
        distance: Option<u64>,
    ) -> bool {
        cx.pinned(|pin| self.add(cx, pin, |lists| lists.insert_sourced(self.read.frames, heads, distance)))
    }

    /// Makes folios as old as can be. The caller sees to it that each has a reference. One lock round: at most [`BATCH`] of them.
    pub(crate) fn demote<P: Cpu>(&self, cx: &CpuCx<'_, P>, heads: &[Pfn]) {
        if !heads.is_empty() {
            self.locked_with_all(cx, |lists| {
                heads.iter().for_each(|head| lists.of(self.read.frames, *head).demote(self.read.frames, *head))
            });
        }
    }

    /// Drops references to folios, with `put`, which says what it gets when the reference was the last: then the folio is
    /// taken off in the same breath, so that nobody finds it here without references. What `put` got is in `last`. At most
    /// [`BATCH`] of them; one lock round.
    pub(crate) fn let_go<P: Cpu, T>(
        &self,
        cx: &CpuCx<'_, P>,
        heads: &[Pfn],
        mut put: impl FnMut(Pfn) -> Option<T>,
        last: &mut [Option<T>; BATCH],
    ) {
        let frames = self.read.frames;
        cx.pinned(|pin| {
            self.locked_by(pin, |lists| {
                for (head, last) in heads.iter().zip(last) {
                    *last = put(*head);
                    if last.is_none() {
                        continue;
                    }
                    match State::from_word(frames.word(*head, STATE)).standing {
                        Standing::New { place } => self.new.remove(place, pin, frames, *head),
                        _ => lists.of(frames, *head).remove(frames, *head),
                    }
                }
            });
        });
    }

    /// Takes folios off for a look, into an empty batch: at most [`BATCH`], and none more once there are `most_pages`.
    /// `hold` takes a reference, under the lock, and says whether it could; folios that cannot be held are passed over, and
    /// counted in [`Batch::refused`]. One lock round, in which at most twice as many folios are looked at as a batch holds.
    pub(crate) fn isolate<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        source: LruEnd,
        take: Take,
        most_pages: u64,
        batch: &mut Batch,
        hold: impl FnMut(Pfn) -> bool,
    ) {
        self.locked_with_all(cx, |lists| lists.isolate(self.read.frames, (source, take), most_pages, batch, hold));
    }

    /// Does with each folio of a batch what its verdict says. One lock round. The batch keeps the folios, so that their
    /// references can be dropped.
    pub(crate) fn put_back<P: Cpu>(&self, cx: &CpuCx<'_, P>, batch: &mut Batch) {
        if batch.is_empty() {
            return;
        }
        self.locked(cx, |lists| lists.put_back(self.read.frames, batch));
    }

    /// Whether any pages are sources'. One lock round.
    pub(crate) fn has_sourced<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        self.locked(cx, |lists| lists.sourced.len() > 0)
    }

    /// Pages of sources have gone. One lock round.
    pub(crate) fn sourced_gone<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        self.locked(cx, |lists| lists.gone());
    }

    /// Puts those folios of a batch on again that were released and whose verdict has been changed since. For the isolator,
    /// while it is the only one to know them. One lock round.
    pub(crate) fn put_again<P: Cpu>(&self, cx: &CpuCx<'_, P>, batch: &Batch) {
        self.locked(cx, |lists| {
            let lists = lists.kind(batch.sourced);
            for folio in batch.folios() {
                lists.put_again(self.read.frames, folio);
            }
        });
    }

    /// Look-around: treats folios as looked at and found young; how many base pages of them were on the LRU. Those that somebody is
    /// looking at are shown to `isolated`. The caller sees to it that each has a reference. One lock round: at most 64 of them.
    pub(crate) fn promote<P: Cpu>(&self, cx: &CpuCx<'_, P>, heads: &[Pfn], mut isolated: impl FnMut(Pfn)) -> u64 {
        if heads.is_empty() {
            return 0;
        }
        // Nobody has looked at these for long: all of their lines are asked for at once, and before the lock, so that promotions do
        // not wait for them one after the other.
        core::hint::black_box(heads.iter().fold(0, |seen, head| seen ^ self.read.frames.word(*head, STATE)));
        self.locked(cx, |lists| {
            let before = lists.promoted();
            let mut promote = |head: &&Pfn| lists.of(self.read.frames, **head).promote(self.read.frames, **head);
            heads.iter().filter(|head| promote(head)).for_each(|head| isolated(*head));
            lists.promoted() - before
        })
    }

    /// The policy now in force.
    pub fn policy<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> LruPolicy {
        self.locked(cx, |lists| lists.own.policy)
    }

    /// Changes the policy. Folios stay where they are: the youngest list is the active one, all others are inactive. O(1);
    /// safe at any time.
    pub fn set_policy<P: Cpu>(&self, cx: &CpuCx<'_, P>, policy: LruPolicy) {
        self.locked(cx, |lists| (lists.own.policy, lists.sourced.policy) = (policy, policy));
    }

    /// Numbers. One lock round (counted).
    pub fn stats<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> LruStats {
        self.locked_with_all(cx, |lists| lists.stats())
    }
}
