//! The manager: what it consists of, and how frames come to it in the first place.

use crate::arena::{Arena, ArenaSpec};
use crate::arenas::{Arenas, RemoveError, RemovedArena};
use crate::bits::one_copy;
use crate::descriptor::{DescMut, DescRef, Descriptor};
use crate::freelist::FreeLists;
use crate::frozen::{Frozen, FrozenRun};
use crate::layout::{self, FramesConfig, FramesConfigError, Parts};
use crate::node::{Content, Node};
use crate::pcp::PerCpu;
use crate::range::per_pin;
use crate::refs::WideCounts;
use crate::relief::Reserve;
use crate::suspects::Suspects;
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use hugemm_base::inject::{FaultPoint, Inject};
use hugemm_base::lock::{PinnedLock, RawLock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{CpuCx, CpuPin, Dirty, Extent, ExtentLinks, NodeId, Order, Pfn};

/// What the surroundings supply: a lock, where descriptors are, and faults to test with. [`Plain`] is the ordinary case.
///
/// # Safety
///
/// [`descriptor`](Env::descriptor) returns a pointer to 64 initialised bytes, aligned to 64, that stay readable, and
/// writable while the frame is the head of a block; different indices never overlap.
/// [`has_cache`](Env::has_cache) is true for one platform's CPUs only, unless whoever makes the manager promises that it sees
/// no others.
pub unsafe trait Env: Inject {
    /// The lock of a node.
    type Lock: RawLock + Send + Sync;

    /// Where descriptor number `index` of an array is. Plain arithmetic, unless the array is reached some other way
    /// (a walk of model page tables).
    #[inline]
    fn descriptor(&self, array: *mut Descriptor, index: usize) -> *mut Descriptor {
        array.wrapping_add(index)
    }

    /// What watches the manager's memory: nothing, unless the surroundings have a [`Watch`](crate::debug::Watch).
    #[cfg(feature = "debug")]
    fn watch(&self) -> Option<&crate::debug::Watch<'_>> {
        None
    }

    /// Whether the CPU may have a cache of this manager's: those of other platforms than the manager's may not. The provided
    /// method trusts the contract of [`Frames::new`].
    #[inline]
    fn has_cache(&self, _pin: CpuPin<'_>) -> bool {
        true
    }
}

/// Spin locks, descriptors where they were put, and the faults of `I`: none, ordinarily.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain<I = hugemm_base::inject::NoFaults>(pub I);

impl<I: Inject> Inject for Plain<I> {
    #[inline]
    fn fault(&self, point: FaultPoint) -> bool {
        self.0.fault(point)
    }
}

// SAFETY: arithmetic within the array that the manager was given, which `Frames::new` requires to be valid.
unsafe impl<I: Inject> Env for Plain<I> {
    type Lock = SpinLock;
}

/// A manager of page frames. See the [crate's documentation](crate).
///
/// All methods take `&self` and may be called from several CPUs at once. A [`CpuCx`](hugemm_base::CpuCx) says which CPU
/// calls. [`Frames::carve`] makes one out of nothing but memory; [`Frames::new`] gives more choice, and every context that
/// is given to such a manager must come from one platform.
pub struct Frames<'m, E: Env = Plain> {
    arenas: Arenas<'m>,
    nodes: &'m [Node<'m, E::Lock>],
    caches: &'m [PerCpu<'m>],
    /// How many frames have been released.
    managed: AtomicU64,
    suspects: Suspects,
    /// Held by whoever changes the list of arenas. Before a node's lock.
    changes: PinnedLock<E::Lock, ()>,
    reserve: Reserve<E::Lock>,
    env: E,
    memory: PhantomData<&'m mut u8>,
}

impl<E: Env> fmt::Debug for Frames<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frames")
            .field("arenas", &self.arenas.count())
            .field("frames", &self.frames())
            .finish_non_exhaustive()
    }
}

impl<'m, E: Env> Frames<'m, E> {
    /// Size and alignment of the metadata that a manager needs: 1.6 % of each arena of 128 MiB or more, 1.8 % of one of 2 MiB, 9 % of one of
    /// 64 KiB, because what is kept per GiB is the same for all; and what the CPUs' caches need: 92 KiB each at most, less where a CPU's
    /// share of memory is less than 8 GiB.
    ///
    /// # Errors
    ///
    /// [`Empty`](FramesConfigError::Empty), [`Overlap`](FramesConfigError::Overlap) or
    /// [`TooLarge`](FramesConfigError::TooLarge): the arenas cannot be managed as given.
    pub fn required_bytes(config: &FramesConfig<'_>) -> Result<Layout, FramesConfigError> {
        layout::required::<E::Lock>(config)
    }

    /// A manager with nothing free yet: see [`release`](Frames::release). O(2 MiB blocks).
    ///
    /// # Errors
    ///
    /// As [`required_bytes`](Frames::required_bytes), and [`Memory`](FramesConfigError::Memory), which says how much
    /// is needed and how aligned.
    ///
    /// # Safety
    ///
    /// * `memory` points to `bytes` initialised bytes (of any value) that are readable and writable and nobody else's
    ///   for `'m`; so do the descriptor arrays of the arenas, if any are given.
    /// * No two managers whose handles ([`Frozen`], [`FolioRef`](crate::FolioRef), ownership of extents) can meet have an
    ///   arena over the same frame number: it is by their numbers that a manager knows its own.
    /// * The contexts that are passed to this manager's methods all come from one platform, so that a pinned CPU number
    ///   names at most one thread at a time, unless [`Env::has_cache`] tells them apart.
    pub unsafe fn new(
        config: &FramesConfig<'_>,
        env: E,
        memory: *mut u8,
        bytes: usize,
    ) -> Result<Self, FramesConfigError>
    where
        E::Lock: 'm,
    {
        // SAFETY: the caller's promise, passed on.
        let Parts { arenas, nodes, cpus, frames } = unsafe { layout::build::<E::Lock>(config, memory, bytes) }?;
        let arenas = Arenas::new(arenas, frames);
        // Where each will take first.
        for own in cpus {
            arenas.first_on(own.node).into_iter().for_each(|frames| own.settle(frames));
        }
        Ok(Frames {
            arenas,
            nodes,
            caches: cpus,
            managed: AtomicU64::new(0),
            suspects: Suspects::new(),
            changes: PinnedLock::new(()),
            reserve: Reserve::new(),
            env,
            memory: PhantomData,
        })
    }

    /// [`new`](Frames::new) in a slice, which is initialised and nobody else's by its type.
    ///
    /// # Errors
    ///
    /// As [`new`](Frames::new).
    ///
    /// # Safety
    ///
    /// As [`new`](Frames::new), but for `memory`: all contexts come from one platform, no frame number is in two managers
    /// whose handles can meet, and descriptor arrays that arenas bring along are valid for `'m` and nobody else's.
    pub unsafe fn in_slice(config: &FramesConfig<'_>, env: E, memory: &'m mut [u8]) -> Result<Self, FramesConfigError>
    where
        E::Lock: 'm,
    {
        // SAFETY: the slice is what `new` asks for; the rest is the caller's promise.
        unsafe { Self::new(config, env, memory.as_mut_ptr(), memory.len()) }
    }

    /// Size and alignment of the metadata that [`add`](Frames::add) needs for an arena: 1.6 % of one of 128 MiB or more, 2.0 % of one of 2 MiB,
    /// 16 % of one of 64 KiB.
    ///
    /// # Errors
    ///
    /// [`Empty`](FramesConfigError::Empty) or [`TooLarge`](FramesConfigError::TooLarge).
    pub fn added_bytes(spec: &ArenaSpec) -> Result<Layout, FramesConfigError> {
        Arenas::added_bytes(spec)
    }

    /// Adds an arena to a manager that is in use, with nothing free in it yet: see [`release`](Frames::release). Any number can be
    /// added, from any CPU; a frame's arena is looked for in O(log arenas). O(2 MiB blocks) without a lock or a pin, then
    /// O(log arenas), during which others that [add](Frames::add) or [remove](Frames::remove) wait. Any context but NMI.
    ///
    /// **Arenas do not join**: a block lies in one arena, also where two adjoin. What is kept about an arena is its own, because it may go
    /// again without the others. So eight pieces of 1 MiB that are added one by one give blocks of 1 MiB. Where memory comes in small
    /// pieces, add once what they will fill, and [release](Frames::release) each when it is there: what has not been released is
    /// reserved, and pieces of one arena become one block. Such a piece goes again as a range that somebody
    /// [takes](Frames::take_range) and keeps.
    ///
    /// The CPUs' caches stay as large as they were made: whoever knows all of memory at the start gives all of it to
    /// [`new`](Frames::new).
    ///
    /// # Errors
    ///
    /// [`Empty`](FramesConfigError::Empty); [`Overlap`](FramesConfigError::Overlap) with an arena that there is;
    /// [`NoSuchNode`](FramesConfigError::NoSuchNode) for one that no arena was on when the manager was made;
    /// [`Memory`](FramesConfigError::Memory) and [`TooLarge`](FramesConfigError::TooLarge). Nothing has changed then, and the memory, of
    /// any content, is the caller's again.
    ///
    /// # Safety
    ///
    /// As [`new`](Frames::new) of the memory, the descriptors and the frame numbers; and the memory and the descriptors stay valid as
    /// long as anybody uses the manager, not only for the `'m` that is seen here, or until [`remove`](Frames::remove) gives them back.
    pub unsafe fn add<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        spec: &ArenaSpec,
        memory: *mut u8,
        bytes: usize,
    ) -> Result<(), FramesConfigError> {
        let node = self.node(spec.node).filter(|_| self.arenas.is_on(spec.node));
        let node = node.ok_or(FramesConfigError::NoSuchNode(spec.node))?;
        // SAFETY: the caller's promise, passed on.
        let filled = unsafe { Arenas::fill(spec, memory, bytes) }?;
        cx.pinned(|pin| {
            let _one = self.changes.lock(pin);
            let mut lists = node.lists.lock(pin);
            // SAFETY: filled for this; the locks are held.
            unsafe { self.arenas.add(filled, &mut lists, &node.added) }
        })
    }

    /// Removes an arena that was [added](Frames::add): the owner of all its frames, `frames`, says which. What was kept about it comes
    /// back. O(log arenas); then a word per 128 MiB, with the node's lock held; then, without a lock, a line per 2 MiB. Any context but NMI.
    ///
    /// The counters with which frames of the arena were [widened](Frames::widen) go to `wide`, one after another: they are the caller's again.
    ///
    /// How one comes to own all of them: [`alloc_contig_range`](Frames::alloc_contig_range), and whatever was never released.
    ///
    /// # Errors
    ///
    /// The frames, and why: [`NotAdded`](RemoveError::NotAdded) if they are no arena that was added, all of it;
    /// [`HwPoisoned`](RemoveError::HwPoisoned) if one of them is, which the manager remembers; [`Contended`](RemoveError::Contended) while
    /// a claim is at work in them. Nothing has changed; they are the caller's, to keep or to free.
    ///
    /// # Safety
    ///
    /// From now on nobody asks the manager by number about a frame of the arena that is not his: no such call is at work, or comes until an
    /// arena with the frame has been added again, and no [descriptor](Frames::descriptor) of one is in use. Such calls are
    /// [`try_get`](Frames::try_get), [`head_of`](Frames::head_of), [`node_of`](Frames::node_of), [`references`](Frames::references),
    /// [`hwpoison`](Frames::hwpoison) and the like, and those with runs of numbers of which not all are the caller's.
    ///
    /// Nobody has to wait for calls that were given frames of the arena, or references to them, and are still returning: frees, puts,
    /// [`free_range`](Frames::free_range). They look at nothing of the arena when they have let go of the last. Nor for allocations and claims
    /// ([`take_range`](Frames::take_range), [`alloc_contig_range`](Frames::alloc_contig_range)), which find or refuse it under its node's lock.
    pub unsafe fn remove<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        frames: Dirty,
        wide: impl FnMut(NonNull<WideCounts>),
    ) -> Result<RemovedArena, (Dirty, RemoveError)> {
        let extent = frames.extent();
        let removed = cx.pinned(|pin| {
            let _one = self.changes.lock(pin);
            // SAFETY: the lock is held.
            let leaver = unsafe { self.arenas.exactly(extent) }.ok_or(RemoveError::NotAdded)?;
            let arena = leaver.arena();
            let Some(node) = self.node(arena.node) else { return Err(RemoveError::NotAdded) };
            let remove = |lists: &mut FreeLists| {
                if let Some(pfn) = self.next_refused(arena, extent) {
                    return Err(RemoveError::HwPoisoned(pfn));
                }
                if self.any_isolated(arena, extent) {
                    return Err(RemoveError::Contended);
                }
                // Relaxed: statistics.
                self.managed.fetch_sub(arena.released.load(Ordering::Relaxed), Ordering::Relaxed);
                // SAFETY: the caller's promise; the list's lock is held too.
                Ok(unsafe { leaver.leave(lists, &node.added) })
            };
            self.with_node(pin, arena.node, remove).unwrap_or(Err(RemoveError::NotAdded))
        });
        match removed {
            Ok(kept) => {
                kept.wide().for_each(wide);
                Ok(RemovedArena { frames, memory: kept.memory() })
            }
            Err(error) => Err((frames, error)),
        }
    }

    /// [`release`](Frames::release) for frames that are known by their numbers alone.
    ///
    /// # Safety
    ///
    /// As [`release`](Frames::release), and nobody owns any of the frames.
    pub unsafe fn release_extent<P: Cpu>(&self, cx: &CpuCx<'_, P>, frames: Extent) -> u64 {
        self.free_new(cx, frames)
    }

    /// Hands frames over: they become free. Frames that are never released are reserved. Frames outside every arena are
    /// left out; returns how many were taken. One lock round per arena and 64 GiB, O(18 + pages / 2^18) each. Any context but NMI.
    ///
    /// # Safety
    ///
    /// None of the frames has been released before, to this manager or to another whose handles can meet with its.
    pub unsafe fn release<P: Cpu>(&self, cx: &CpuCx<'_, P>, frames: Dirty) -> u64 {
        self.free_new(cx, frames.into_extent())
    }

    fn free_new<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent) -> u64 {
        let mut sum = 0;
        let parts = one_copy(self.parts(extent));
        for (arena, part) in parts.flat_map(|(arena, part)| per_pin(part).map(move |part| (arena, part))) {
            cx.pinned(|pin| {
                self.with_node(pin, arena.node, |lists| {
                    self.free_chunks(lists, arena, part, Content::Dirty);
                    // Relaxed: the lock orders.
                    let released = arena.released.load(Ordering::Relaxed);
                    arena.released.store(released + part.pages(), Ordering::Relaxed);
                    // Relaxed: a statistic. Here, because the arena may go as soon as the lock is free.
                    self.managed.fetch_add(part.pages(), Ordering::Relaxed);
                })
            });
            sum += part.pages();
        }
        sum
    }

    /// The surroundings.
    pub fn env(&self) -> &E {
        &self.env
    }

    /// Frames in all arenas, reserved ones included.
    pub fn frames(&self) -> u64 {
        self.arenas.frames()
    }

    /// Frames that have been released to the manager.
    pub fn managed(&self) -> u64 {
        // Relaxed: a statistic.
        self.managed.load(Ordering::Relaxed)
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// A node, if there is one of this number.
    #[inline]
    pub(crate) fn node(&self, node: NodeId) -> Option<&'m Node<'m, E::Lock>> {
        self.nodes.get(node.get() as usize)
    }

    /// Whether known-zero blocks may be free: a hint, which saves a lock round where there are none.
    pub(crate) fn may_have_zero(&self) -> bool {
        // Relaxed: a hint.
        self.nodes.iter().any(|node| node.zero_hint.load(Ordering::Relaxed) != 0)
    }

    /// What the manager knows of its arenas.
    #[inline]
    pub(crate) fn arena_table(&self) -> &Arenas<'m> {
        &self.arenas
    }

    /// The arena of a frame: see [`Arenas::of`].
    #[inline]
    pub(crate) fn arena(&self, pfn: Pfn) -> Option<&'m Arena<'m>> {
        self.arenas.of(pfn)
    }

    /// The arenas' parts of an extent.
    pub(crate) fn parts(&self, extent: Extent) -> impl Iterator<Item = (&'m Arena<'m>, Extent)> {
        self.arenas.parts(extent)
    }

    #[inline]
    pub(crate) fn desc_in(&self, arena: &Arena<'m>, pfn: Pfn) -> DescRef<'m> {
        let index = (pfn.get() - arena.extent.base().get()) as usize;
        // SAFETY: `Env::descriptor` returns a valid pointer for every index of the array, and the frame is in the arena.
        unsafe { DescRef::new(self.env.descriptor(arena.descriptors, index)) }
    }

    #[inline]
    pub(crate) fn desc(&self, pfn: Pfn) -> Option<DescRef<'m>> {
        Some(self.desc_in(self.arena(pfn)?, pfn))
    }

    /// The descriptor of a frame, to read it. Its words belong to the owner of the block that the frame heads (see
    /// [`descriptor`](crate::descriptor)). `None` outside every arena.
    pub fn descriptor(&self, pfn: Pfn) -> Option<DescRef<'m>> {
        self.desc(pfn)
    }

    /// The descriptor of a frozen block's head. `None` if the block is another manager's.
    pub fn descriptor_mut<'a>(&self, block: &'a mut Frozen) -> Option<DescMut<'a>>
    where
        'm: 'a,
    {
        // SAFETY: a handle on a block that is allocated, and that nobody gives back as long as it is borrowed.
        self.desc(block.pfn()).map(|desc| unsafe { DescMut::new(desc) })
    }

    /// The descriptor of each block of a run, in ascending order: none if the run is another manager's.
    pub fn descriptors_mut<'a>(&self, run: &'a mut FrozenRun) -> impl Iterator<Item = DescMut<'a>>
    where
        'm: 'a,
    {
        // SAFETY: as in `descriptor_mut`; every block of a run has a head.
        run.extent().chunks(run.order()).filter_map(|(head, _)| Some(unsafe { DescMut::new(self.desc(head)?) }))
    }

    /// The descriptor of a block's head that is known by its number. `None` outside every arena.
    ///
    /// # Safety
    ///
    /// `head` is the first frame of a block that is allocated, frozen or counted, and that stays so for `'a`. Whoever has
    /// the block, or the references to it, agrees.
    pub unsafe fn descriptor_at<'a>(&self, head: Pfn) -> Option<DescMut<'a>>
    where
        'm: 'a,
    {
        // SAFETY: the caller's promise.
        self.desc(head).map(|desc| unsafe { DescMut::new(desc) })
    }

    /// The node of a frame.
    pub fn node_of(&self, pfn: Pfn) -> Option<NodeId> {
        self.arena(pfn).map(|arena| arena.node)
    }

    /// Head and order of the block that a frame belongs to. Right if the caller owns or has a reference to the block; a
    /// guess otherwise, to be checked after taking one. Any context. Two to four cache lines.
    pub fn head_of(&self, pfn: Pfn) -> Option<(Pfn, Order)> {
        let (head, order) = self.arena(pfn)?.block_of(pfn);
        Some((head, Order::new(order).ok()?))
    }

    /// The node of the CPU that the caller runs on, where a request for the [local](crate::Placement::Local) node begins. Any
    /// context.
    pub fn local_node<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> NodeId {
        cx.pinned(|pin| self.node_of_cache(self.own(pin)))
    }

    /// A CPU's node; the first arena's if the CPU has no cache.
    pub(crate) fn node_of_cache(&self, own: Option<&PerCpu<'m>>) -> NodeId {
        own.map_or_else(|| self.arenas.first().map_or(NodeId::new(0), |arena| arena.node), |own| own.node)
    }

    /// The cache of the CPU that the caller is pinned to.
    #[inline]
    pub(crate) fn own(&self, pin: CpuPin<'_>) -> Option<&'m PerCpu<'m>> {
        if self.env.has_cache(pin) { self.caches.get(pin.cpu().get() as usize) } else { None }
    }

    /// The caches of all CPUs, by number.
    #[inline]
    pub(crate) fn caches(&self) -> &'m [PerCpu<'m>] {
        self.caches
    }

    #[inline]
    pub(crate) fn reserve(&self) -> &Reserve<E::Lock> {
        &self.reserve
    }

    /// What has to be looked at.
    #[inline]
    pub(crate) fn suspects(&self) -> &Suspects {
        &self.suspects
    }

    /// Whether a block of 2 MiB is isolated.
    #[inline]
    pub(crate) fn is_isolating(&self) -> bool {
        // Whoever isolates posts a request to every cache afterwards, whose serving acquires.
        self.suspects.is_isolating()
    }

    /// Whether frames that are freed have to be looked at: some are isolated, or refused and still in use.
    #[inline]
    pub(crate) fn has_suspects(&self) -> bool {
        self.suspects.is_isolating() || self.suspects.is_watching()
    }
}

/// Links of chains of extents, in words 0 and 1 of the descriptor of each extent's first frame. For extents whose owner
/// has put them on a chain; frames outside every arena have no storage and end the chain.
impl<E: Env> ExtentLinks for Frames<'_, E> {
    unsafe fn set(&self, frame: Pfn, pages: u64, next: Option<Pfn>) {
        // SAFETY: the extent is the caller's, who has put it on a chain, so its words are too.
        if let Some(desc) = unsafe { self.descriptor_at(frame) } {
            desc.store(0, pages);
            desc.store(1, next.map_or(0, |next| next.get() + 1));
        }
    }

    fn get(&self, frame: Pfn) -> (u64, Option<Pfn>) {
        match self.desc(frame) {
            None => (0, None),
            Some(desc) => (desc.load(0), desc.load(1).checked_sub(1).map(Pfn::new)),
        }
    }
}
