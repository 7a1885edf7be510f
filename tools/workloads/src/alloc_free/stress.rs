//! Whether anything is ever handed out twice: blocks of all orders up to 10, from one area, by several CPUs at once,
//! each frame's owner kept in a bitmap beside the allocator. Parts of blocks are freed as pages, as ranges and by
//! another CPU than the one that took them. Some are asked for below a frame, some taken and freed without waiting. Meanwhile frames may be poisoned, and
//! aligned ranges isolated and claimed, and pieces of memory may come and go.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::random::Random;
use hugemm_base::{CpuCx, Extent, NodeId, Order, Pfn};
use hugemm_frames::{
    AllocRequest, ArenaSpec, Env, FolioRef, FolioRun, Frames, FramesConfigError, HwPoisoned, NoMigration, Put,
    RemoveError,
};

/// Largest order that is asked for.
pub const LARGEST: u32 = 10;

/// A bit per frame of an area: whether somebody owns it. Any CPU.
pub struct Ownership<'a> {
    area: Extent,
    /// What of it does not go: only there are frames chosen by their numbers.
    stays: Extent,
    words: &'a [AtomicU64],
    /// Frames that have been poisoned, + 1; 0 behind the last.
    poisoned: &'a [AtomicU64],
}

/// A frame that was handed out while somebody else owned it, or freed while nobody did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Handed out twice.
    #[error("frame {frame} was handed out twice, the second time in a block of order {order}")]
    Twice {
        /// The first frame that has two owners.
        frame: Pfn,
        /// Order of the block that was handed out second.
        order: Order,
    },
    /// What was done to a frame, or was not.
    #[error("frame {0} {1}")]
    Frame(Pfn, &'static str),
    /// A piece of memory was not plugged in.
    #[error("memory was not plugged in: {0}")]
    NotAdded(FramesConfigError),
    /// One that belongs to nobody was not unplugged.
    #[error("memory was not unplugged: {0}")]
    NotRemoved(RemoveError),
}

fn not_freed(extent: Extent) -> Broken {
    Broken::Frame(extent.base(), "was not taken back")
}

impl<'a> Ownership<'a> {
    /// Nobody owns anything. `words` are zero, and one for each 64 frames of the area, whose number of frames is a
    /// multiple of 64.
    pub fn new(area: Extent, words: &'a [AtomicU64]) -> Option<Self> {
        (words.len() as u64 * 64 == area.pages()).then_some(Ownership { area, stays: area, words, poisoned: &[] })
    }

    /// The last frames of the area, from `first` on, come and go.
    pub fn with_plugged(self, first: Pfn) -> Self {
        let stays = self.area.slice(0, first.get().saturating_sub(self.area.base().get()));
        Ownership { stays, ..self }
    }

    /// The same with room for frames that are [poisoned](Self::poison) meanwhile: one for each of `places`, which are zero.
    pub fn with_poison(self, places: &'a [AtomicU64]) -> Self {
        Ownership { poisoned: places, ..self }
    }

    /// Poisons a frame: one that the calling CPU's cache has got a moment ago, or a random one of the area's last quarter, so
    /// that large blocks stay possible elsewhere. False if there is no room for more, or it is poisoned already.
    pub fn poison<P: Cpu, E: Env>(&self, cx: &CpuCx<'_, P>, frames: &Frames<'_, E>, random: &mut Random) -> bool {
        if self.poisoned() == self.poisoned.len() {
            return false;
        }
        let some = self.stays.end().get() - 1 - random.below((self.stays.pages() / 4).max(1));
        let mut frame = Pfn::new(some);
        if random.below(2) == 0
            && let Ok(page) = frames.alloc(cx, AllocRequest::order(Order::ZERO))
        {
            frame = if self.stays.contains(page.pfn()) { page.pfn() } else { frame };
            frames.free(cx, page);
        }
        match frames.hwpoison(cx, frame) {
            HwPoisoned::Free | HwPoisoned::InUse => {}
            HwPoisoned::Already | HwPoisoned::NotManaged => return false,
        }
        self.note_poison(frame)
    }

    /// Notes that a frame is poisoned. False if there is no room.
    pub fn note_poison(&self, frame: Pfn) -> bool {
        // Release pairs with the Acquire in `poisoned`: whoever sees the frame here allocates after it was poisoned.
        let note = |place: &&AtomicU64| {
            place.compare_exchange(0, frame.get() + 1, Ordering::Release, Ordering::Relaxed).is_ok()
        };
        self.poisoned.iter().find(note).is_some()
    }

    /// How many frames have been poisoned.
    pub fn poisoned(&self) -> usize {
        self.poisoned.iter().take_while(|place| place.load(Ordering::Acquire) != 0).count()
    }

    /// Looks that a block holds none of the frames that were the first `known` to be poisoned before it was allocated.
    fn check_sound(&self, extent: Extent, known: usize) -> Result<(), Broken> {
        // Relaxed: they were seen when they were counted.
        let frames = self.poisoned.iter().take(known).map(|place| Pfn::new(place.load(Ordering::Relaxed) - 1));
        match frames.into_iter().find(|frame| extent.contains(*frame)) {
            Some(frame) => Err(Broken::Frame(frame, "was handed out although it is poisoned")),
            None => Ok(()),
        }
    }

    /// The words and masks of an extent.
    fn masks(&self, extent: Extent) -> impl Iterator<Item = (u64, &'a AtomicU64, u64)> {
        let base = self.area.base().get();
        let (mut at, end) = (extent.base().get() - base, extent.end().get() - base);
        let words = self.words;
        core::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (word, bit) = (at / 64, at % 64);
            let count = (64 - bit).min(end - at);
            at += count;
            Some((word * 64, words.get(word as usize)?, u64::MAX >> (64 - count) << bit))
        })
    }

    /// Notes that a block was handed out.
    pub fn take(&self, extent: Extent, order: Order) -> Result<(), Broken> {
        if !self.area.covers(extent) {
            return Err(Broken::Frame(extent.base(), "was handed out and is not in the area"));
        }
        for (first, word, mask) in self.masks(extent) {
            // Relaxed: each bit is a question of its own; the allocator orders its owners.
            let before = word.fetch_or(mask, Ordering::Relaxed) & mask;
            if before != 0 {
                let frame = self.area.base().get() + first + u64::from(before.trailing_zeros());
                return Err(Broken::Twice { frame: Pfn::new(frame), order });
            }
        }
        Ok(())
    }

    /// Notes that frames are about to be freed.
    pub fn give(&self, extent: Extent) {
        for (_, word, mask) in self.masks(extent) {
            // Relaxed: as above; the free that follows publishes.
            word.fetch_and(!mask, Ordering::Relaxed);
        }
    }
}

/// Blocks on their way from one CPU to another: places that hold a first frame + 1 and, in the low byte, an order.
pub type Exchange<'a> = &'a [AtomicU64];

/// What a CPU did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stressed {
    /// Blocks taken, by order.
    pub taken: [u64; LARGEST as usize + 1],
    /// Requests that found nothing.
    pub failed: u64,
}

/// Makes `steps` steps on this CPU with up to `held.len()` blocks in hand, and frees all in the end. `held` entries are
/// as in [`Exchange`], 0 for none. Stops at the first frame that has two owners.
pub fn run<P: Cpu, E: Env>(
    cx: &mut CpuCx<'_, P>,
    frames: &Frames<'_, E>,
    ownership: &Ownership<'_>,
    exchange: Exchange<'_>,
    held: &mut [u64],
    steps: u64,
    random: &mut Random,
) -> Result<Stressed, Broken> {
    let mut done = Stressed::default();
    for _ in 0..steps {
        let index = random.below(held.len() as u64) as usize;
        let Some(place) = held.get_mut(index) else { break };
        if *place == 0 {
            let order = Order::new(random.below(u64::from(LARGEST) + 1) as u32).unwrap_or(Order::ZERO);
            let poisoned = ownership.poisoned();
            let area = ownership.area;
            let limit = (random.below(4) == 0).then(|| Pfn::new(area.end().get() - random.below(area.pages().max(1))));
            let request = AllocRequest::order(order);
            let block = match limit {
                Some(limit) => frames.alloc_below(cx, limit, request),
                None if random.below(8) == 0 => frames.alloc_nowait(cx, request),
                None => frames.alloc(cx, request),
            };
            match block.ok().and_then(|block| frames.count(block).ok()) {
                Some(folio) => {
                    let head = folio.into_pfn();
                    let extent = Extent::block(head, order);
                    if let Some(limit) = limit.filter(|limit| extent.end() > *limit) {
                        return Err(Broken::Frame(limit, "was the limit of a block that does not end there"));
                    }
                    ownership.check_sound(extent, poisoned)?;
                    ownership.take(extent, order)?;
                    done.taken[order.get() as usize] += 1;
                    *place = (head.get() + 1) << 8 | u64::from(order.get());
                }
                None => {
                    done.failed += 1;
                    // Memory is short: the others may need what this CPU has cached.
                    frames.serve(cx);
                }
            }
        } else if random.below(8) == 0
            && let Some(slot) = exchange.get(random.below(exchange.len() as u64) as usize)
        {
            // Acquire and Release: whoever gets a block here sees everything its former owner did to it.
            *place = slot.swap(*place, Ordering::AcqRel);
        } else {
            release(cx, frames, ownership, core::mem::take(place), random)?;
        }
    }
    for place in held {
        release(cx, frames, ownership, core::mem::take(place), random)?;
    }
    Ok(done)
}

/// Claims a random 2 MiB range of the area, which isolates it meanwhile, and frees it; whether it was to be had. Waits for other
/// CPUs.
pub fn claim<P: Cpu, E: Env>(
    cx: &mut CpuCx<'_, P>,
    frames: &Frames<'_, E>,
    ownership: &Ownership<'_>,
    random: &mut Random,
) -> Result<bool, Broken> {
    let size = Order::new(9).unwrap_or(Order::ZERO);
    let first = ownership.stays.base().get().next_multiple_of(size.pages());
    let count = ownership.stays.end().get().saturating_sub(first) / size.pages();
    let extent = Extent::block(Pfn::new(first + random.below(count.max(1)) * size.pages()), size);
    let poisoned = ownership.poisoned();
    let Ok(claimed) = frames.alloc_contig_range(cx, extent, &mut NoMigration) else { return Ok(false) };
    ownership.check_sound(extent, poisoned)?;
    ownership.take(extent, size)?;
    ownership.give(extent);
    // What was poisoned since is not free again.
    match frames.free_extent(cx, claimed) {
        pages if pages == size.pages() => Ok(true),
        _ => Err(not_freed(extent)),
    }
}

/// So many adjoin each other.
pub const PIECES: usize = 3;

/// Pieces that adjoin, one after another.
pub type Pieces = [Lock<SpinLock, Plugged>; PIECES];

/// A piece of memory that is plugged in and unplugged again and again.
#[derive(Debug)]
pub struct Plugged {
    extent: Extent,
    node: NodeId,
    memory: NonNull<[u8]>,
    there: bool,
    /// How often it was unplugged.
    unplugged: u64,
}

// SAFETY: the memory is nobody else's, by the contract of `new`.
unsafe impl Send for Plugged {}

impl Plugged {
    /// Bytes that the manager needs to keep about such a piece, aligned to 4096; 0 if it cannot be one.
    pub fn bytes<E: Env>(extent: Extent) -> usize {
        // 4 KiB stay with the manager each time when one more piece is there than ever before, and all of those may be of one piece.
        Frames::<E>::added_bytes(&Self::spec(extent, NodeId::new(0))).map_or(0, |layout| layout.size() + PIECES * 4096)
    }

    /// One of a node that is not there yet: whole 2 MiB, aligned.
    ///
    /// # Safety
    ///
    /// The frames are no manager's, and nobody but [`replug`] asks about their numbers. The memory is nobody else's as long as the manager
    /// is used that this is plugged into, always the same.
    pub unsafe fn new(extent: Extent, node: NodeId, memory: NonNull<[u8]>) -> Self {
        Plugged { extent, node, memory, there: false, unplugged: 0 }
    }

    fn spec(extent: Extent, node: NodeId) -> ArenaSpec {
        ArenaSpec::new(extent, node)
    }
}

/// Plugs one of the pieces in or unplugs it, if nobody else is at it; then claims two that adjoin, if nothing of them is in use, and frees
/// both in one call: each may be unplugged as soon as it is free, and plugged in behind the others. Waits for other CPUs.
pub fn replug<P: Cpu, E: Env>(
    cx: &mut CpuCx<'_, P>,
    frames: &Frames<'_, E>,
    ownership: &Ownership<'_>,
    pieces: &Pieces,
    random: &mut Random,
) -> Result<(), Broken> {
    if let Some(mut piece) = pieces[random.below(PIECES as u64) as usize].try_lock() {
        plug(cx, frames, &mut piece)?;
    }
    let first = random.below(PIECES as u64 - 1) as usize;
    let mut own = |piece: &Plugged| {
        piece.there.then(|| frames.alloc_contig_range(cx, piece.extent, &mut NoMigration).ok()).flatten()
    };
    let (a, b) = {
        let (Some(a), Some(b)) = (pieces[first].try_lock(), pieces[first + 1].try_lock()) else { return Ok(()) };
        let Some(first) = own(&a) else { return Ok(()) };
        (first, own(&b))
    };
    let joined = match b {
        Some(b) => a.join(b),
        None => Ok(a),
    };
    let both = match joined {
        Ok(both) => both,
        Err((a, b)) => {
            frames.free_extent(cx, b);
            a
        }
    };
    let extent = both.extent();
    ownership.take(extent, Order::ZERO)?;
    ownership.give(extent);
    if frames.free_extent(cx, both) == extent.pages() { Ok(()) } else { Err(not_freed(extent)) }
}

/// Plugs the memory in if it is not there, and unplugs it if none of it is in use. Waits for other CPUs.
fn plug<P: Cpu, E: Env>(cx: &mut CpuCx<'_, P>, frames: &Frames<'_, E>, plugged: &mut Plugged) -> Result<(), Broken> {
    let Plugged { extent, node, memory, .. } = *plugged;
    if !plugged.there {
        let bytes = memory.len();
        // SAFETY: by the contract of `new`.
        unsafe {
            frames.add(cx, &Plugged::spec(extent, node), memory.as_ptr().cast(), bytes).map_err(Broken::NotAdded)?;
            frames.release_extent(cx, extent);
        }
        plugged.there = true;
    } else if let Ok(all) = frames.alloc_contig_range(cx, extent, &mut NoMigration) {
        // SAFETY: nobody asks about their numbers, by the contract of `new`.
        let removed = unsafe { frames.remove(cx, all, |_| ()) }.map_err(|(_, error)| Broken::NotRemoved(error))?;
        // SAFETY: nobody's any more. Whoever still looks there should see it.
        unsafe { removed.memory.cast::<u8>().write_bytes(0xff, removed.memory.len()) };
        (plugged.memory, plugged.there) = (removed.memory, false);
        plugged.unplugged += 1;
    }
    Ok(())
}

/// Unplugs all of them for good; how often they were unplugged. When no CPU is in [`run`], nor has anything cached.
pub fn unplug<P: Cpu, E: Env>(cx: &mut CpuCx<'_, P>, frames: &Frames<'_, E>, pieces: &Pieces) -> Result<u64, Broken> {
    let mut times = 0;
    for piece in pieces {
        let mut piece = piece.lock();
        if piece.there {
            plug(cx, frames, &mut piece)?;
        }
        if piece.there {
            return Err(not_freed(piece.extent));
        }
        times += piece.unplugged;
    }
    Ok(times)
}

/// Frees what is on its way between CPUs. When no CPU is in [`run`].
pub fn finish<P: Cpu, E: Env>(
    cx: &mut CpuCx<'_, P>,
    frames: &Frames<'_, E>,
    ownership: &Ownership<'_>,
    exchange: Exchange<'_>,
    random: &mut Random,
) -> Result<(), Broken> {
    for slot in exchange {
        release(cx, frames, ownership, slot.swap(0, Ordering::AcqRel), random)?;
    }
    Ok(())
}

/// Frees a block in one of the ways there are.
fn release<P: Cpu, E: Env>(
    cx: &mut CpuCx<'_, P>,
    frames: &Frames<'_, E>,
    ownership: &Ownership<'_>,
    entry: u64,
    random: &mut Random,
) -> Result<(), Broken> {
    let Some(head) = (entry >> 8).checked_sub(1).map(Pfn::new) else { return Ok(()) };
    let Ok(order) = Order::new((entry & 0xff) as u32) else { return Ok(()) };
    let whole = Extent::block(head, order);
    // SAFETY: the entry was made of the only reference, and was taken out of where it stood.
    let folio = unsafe { FolioRef::from_pfn(head) };
    let last = |put| if put == Ok(Put::Last) { Ok(()) } else { Err(not_freed(whole)) };
    match random.below(8) {
        0 => {
            let block = frames.freeze(folio).map_err(|_| not_freed(whole))?;
            ownership.give(whole);
            frames.free_nowait(cx, block);
            return Ok(());
        }
        1..4 => {
            ownership.give(whole);
            return last(frames.put(cx, folio));
        }
        _ => {}
    }
    let pages = frames.split_counted(folio, Order::ZERO).map_err(|_| not_freed(whole))?;
    // A border anywhere: a range on one side, the other page by page or as a second range.
    let (first, mut second) = pages.split_at(random.below(whole.pages() + 1));
    let free = |cx: &mut CpuCx<'_, P>, run: FolioRun| {
        let extent = run.extent();
        let done = frames.free_range(cx, run);
        if done.freed + done.refused == extent.pages() { Ok(()) } else { Err(not_freed(extent)) }
    };
    ownership.give(first.extent());
    free(cx, first)?;
    ownership.give(second.extent());
    if random.below(2) == 0 {
        return free(cx, second);
    }
    while let Some(page) = second.pop() {
        last(frames.put(cx, page))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_owner_is_noticed() {
        let words: [AtomicU64; 4] = core::array::from_fn(|_| AtomicU64::new(0));
        let area = Extent::new(Pfn::new(1024), 256).expect("valid");
        let ownership = Ownership::new(area, &words).expect("fits");
        let order = |n| Order::new(n).expect("valid");
        ownership.take(area.slice(64, 192), order(7)).expect("free");
        let broken = Broken::Twice { frame: Pfn::new(1024 + 191), order: order(0) };
        assert_eq!(ownership.take(area.slice(191, 193), order(0)), Err(broken));
        ownership.give(area.slice(64, 192));
        ownership.take(area.slice(100, 101), order(0)).expect("free again");
        assert!(ownership.take(Extent::new(Pfn::new(0), 1).expect("valid"), order(0)).is_err());
        assert!(Ownership::new(area, &words[1..]).is_none());
    }
}
