//! Small objects of one size, carved from the manager's own frames: what there is below in place of a heap.
//!
//! A [`Slab`] hands out pieces of single frames. Each frame begins with a 64-byte header (its number, its free pieces,
//! its place in the list of frames that have some); a piece finds its header by rounding its address down. Frames that
//! become empty go back to the manager, except for one of each share that is kept, so that a slab at the border of two frames does not
//! take and give one at every call.
//!
//! A CPU takes pieces of its own frames: eight CPUs share nothing here, of more every eighth has the same frames. A piece that another
//! CPU frees goes back to its frame.
//!
//! Cost: one lock round per call, two cache lines; a frame every [`per_frame`](Slab::per_frame) calls. Any context but
//! NMI: pins while it holds its lock, calls the manager without. Allocation fails exactly where the manager's does, unless
//! another CPU's frames have room, so that every fault that can be injected there is one here.

use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::looks;
use crate::page_alloc::{AllocError, AllocRequest};
use core::mem::{align_of, size_of};
use core::ptr::{NonNull, null_mut};
use hugemm_base::lock::{PinnedLock, RawLock, SpinLock};
use hugemm_base::platform::{Cpu, PhysMap, Window};
use hugemm_base::{CpuCx, CpuPin, FrameUse, Order, PAGE_BYTES, Pfn};

const FRAME: usize = PAGE_BYTES as usize;
const HEADER: usize = 64;

/// CPUs that have frames of their own.
const SHARES: usize = 8;

/// No free piece.
const NONE: u32 = u32::MAX;

/// At the start of each frame. Under the slab's lock.
struct Header {
    pfn: Pfn,
    /// First free piece, by number; each free piece holds the number of the next in its first four bytes.
    free: u32,
    used: u32,
    /// Whose lock it is under. Constant while it has a piece in use.
    share: usize,
    next: *mut Header,
    prev: *mut Header,
}

const _: () = assert!(size_of::<Header>() <= HEADER);

/// Frames with free pieces.
struct State {
    /// The first of those, in a ring. Those that have no piece in use come last: 1 at most, unless several were taken at once.
    partial: *mut Header,
    frames: u64,
    objects: u64,
}

// SAFETY: the headers are in frames that the slab owns, and are reached under its lock only.
unsafe impl Send for State {}

/// What some CPUs have, on a line of its own.
#[repr(align(64))]
struct Share<L>(PinnedLock<L, State>);

/// A source of objects of one size. It does not know its manager: the same one is passed to every call.
pub struct Slab<L: RawLock = SpinLock> {
    size: usize,
    per_frame: u32,
    first: usize,
    shares: [Share<L>; SHARES],
}

impl<L: RawLock> core::fmt::Debug for Slab<L> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Slab").field("size", &self.size).field("per_frame", &self.per_frame).finish_non_exhaustive()
    }
}

/// What a slab holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlabStats {
    /// Frames taken from the manager.
    pub frames: u64,
    /// Objects handed out.
    pub objects: u64,
}

impl<L: RawLock> Slab<L> {
    /// A slab for objects of `size` bytes aligned to `align`, a power of two; `None` if not even one fits in a frame.
    pub fn new(size: usize, align: usize) -> Option<Self> {
        if !align.is_power_of_two() || align > FRAME / 2 {
            return None;
        }
        let align = align.max(align_of::<u32>());
        let size = size.max(size_of::<u32>()).checked_next_multiple_of(align)?;
        let first = HEADER.next_multiple_of(align);
        let per_frame = FRAME.checked_sub(first)? / size;
        if per_frame == 0 {
            return None;
        }
        let share = |_| Share(PinnedLock::new(State { partial: null_mut(), frames: 0, objects: 0 }));
        Some(Slab { size, per_frame: per_frame as u32, first, shares: core::array::from_fn(share) })
    }

    /// A slab for values of type `T`.
    pub fn of<T>() -> Option<Self> {
        Slab::new(size_of::<T>(), align_of::<T>())
    }

    /// Objects per frame.
    pub fn per_frame(&self) -> u32 {
        self.per_frame
    }

    /// What it holds now. Any context but NMI; eight lock rounds.
    pub fn stats<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> SlabStats {
        cx.pinned(|pin| {
            self.shares.iter().fold(SlabStats::default(), |sum, share| {
                let state = share.0.lock(pin);
                SlabStats { frames: sum.frames + state.frames, objects: sum.objects + state.objects }
            })
        })
    }

    /// One object, uninitialised.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`](AllocError::OutOfMemory) if there is neither room nor a frame that `map` reaches; other errors
    /// as of [`Frames::alloc`].
    ///
    /// # Safety
    ///
    /// `frames` and `map` are those that the slab has always been used with, and its frames stay in reach of `map`: what it knows of them is
    /// in them.
    pub unsafe fn alloc<E: Env, P: Cpu>(
        &self,
        frames: &Frames<'_, E>,
        cx: &CpuCx<'_, P>,
        map: &impl PhysMap,
    ) -> Result<NonNull<u8>, AllocError> {
        loop {
            if let Some(object) = cx.pinned(|pin| self.take(pin, own_share(pin))) {
                return Ok(object);
            }
            // Others may take all of the new frame's pieces before this does, or the task moves; each time, somebody got ahead.
            if let Err(error) = self.grow(frames, cx, map) {
                let others = || (0..SHARES).find_map(|share| cx.pinned(|pin| self.take(pin, share)));
                return others().ok_or(error);
            }
        }
    }

    /// Takes a frame from the manager.
    fn grow<E: Env, P: Cpu>(
        &self,
        frames: &Frames<'_, E>,
        cx: &CpuCx<'_, P>,
        map: &impl PhysMap,
    ) -> Result<(), AllocError> {
        let block = frames.alloc_for(cx, FrameUse::SLABS, AllocRequest::order(Order::ZERO))?;
        let (pfn, extent) = (block.pfn(), block.extent());
        let mut spare = Spare { frames, cx, block: Some(block) };
        let window = map.open(extent, None).ok_or(AllocError::OutOfMemory)?;
        let header = window.ptr.cast::<Header>();
        // SAFETY: the window is the frame's bytes, writable, 4 KiB-aligned and nobody else's; it stays open until the
        // frame is given back. All pieces are inside the frame by the choice of `per_frame`.
        unsafe {
            header.write(Header { pfn, free: 0, used: 0, share: 0, next: null_mut(), prev: null_mut() });
            for index in 0..self.per_frame {
                let next = if index + 1 == self.per_frame { NONE } else { index + 1 };
                self.piece(header, index).cast::<u32>().write(next);
            }
        }
        cx.pinned(|pin| {
            let share = own_share(pin);
            let mut state = self.shares[share].0.lock(pin);
            // The header keeps the frame from here on.
            let _ = spare.block.take().map(|block| block.into_dirty().into_extent());
            state.frames += 1;
            // SAFETY: just initialised, on no list.
            unsafe {
                (*header).share = share;
                state.link_last(header);
            }
        });
        Ok(())
    }

    /// A piece of a frame of a share that has one.
    fn take(&self, pin: CpuPin<'_>, share: usize) -> Option<NonNull<u8>> {
        let mut state = self.shares[share].0.lock(pin);
        let header = state.partial;
        if header.is_null() {
            return None;
        }
        // SAFETY: headers on the list are in frames that the slab owns and have a free piece; the lock is held.
        unsafe {
            let index = (*header).free;
            let piece = self.piece(header, index);
            (*header).free = piece.cast::<u32>().read();
            (*header).used += 1;
            if (*header).free == NONE {
                state.unlink(header);
            }
            state.objects += 1;
            NonNull::new(piece)
        }
    }

    /// Gives an object back.
    ///
    /// # Safety
    ///
    /// As of [`alloc`](Slab::alloc), from which the object came; it is given back once, and nobody uses it any more.
    pub unsafe fn free<E: Env, P: Cpu>(
        &self,
        frames: &Frames<'_, E>,
        cx: &CpuCx<'_, P>,
        map: &impl PhysMap,
        object: NonNull<u8>,
    ) {
        let object = object.as_ptr();
        let header = object.map_addr(|address| address & !(FRAME - 1)).cast::<Header>();
        let index = ((object.addr() - header.addr() - self.first) / self.size) as u32;
        // SAFETY: the object is a piece of a frame of this slab, so its header is where the frame begins; it says so as long as the
        // object is in use.
        let share = unsafe { (*header).share };
        let gone = cx.pinned(|pin| {
            let mut state = self.shares[share].0.lock(pin);
            // SAFETY: as above; the lock is held.
            unsafe {
                let (free, used) = ((*header).free, (*header).used - 1);
                object.cast::<u32>().write(free);
                (*header).free = index;
                (*header).used = used;
                state.objects -= 1;
                match (free == NONE, used == 0) {
                    (false, true) => state.unlink(header),
                    (true, false) => state.link_first(header),
                    _ => {}
                }
                // More than one if two took a frame at once.
                if used == 0 && state.empty().is_some() {
                    state.frames -= 1;
                    return Some((*header).pfn);
                }
                if used == 0 {
                    state.link_last(header);
                }
                None
            }
        });
        if let Some(pfn) = gone {
            // SAFETY: the slab owned the frame, nothing of it is in use, and it is off the list.
            unsafe { self.give_back(frames, cx, map, header, pfn) };
        }
    }

    /// Gives back the frames of which nothing is used: each CPU keeps one. Any context but NMI; a lock round for each, and eight more.
    ///
    /// # Safety
    ///
    /// As of [`alloc`](Slab::alloc).
    pub unsafe fn trim<E: Env, P: Cpu>(&self, frames: &Frames<'_, E>, cx: &CpuCx<'_, P>, map: &impl PhysMap) {
        let kept = |share: &Share<L>| {
            cx.pinned(|pin| {
                let mut state = share.0.lock(pin);
                // SAFETY: headers on the list are the slab's; the lock is held.
                unsafe {
                    let header = state.empty()?;
                    state.unlink(header);
                    state.frames -= 1;
                    Some(header)
                }
            })
        };
        for share in &self.shares {
            while let Some(header) = kept(share) {
                // SAFETY: the frame is the slab's, off the list, and nothing of it is in use.
                unsafe { self.give_back(frames, cx, map, header, (*header).pfn) };
            }
        }
    }

    /// # Safety
    ///
    /// The frame is the slab's, off the list, and nothing of it is in use.
    unsafe fn give_back<E: Env, P: Cpu>(
        &self,
        frames: &Frames<'_, E>,
        cx: &CpuCx<'_, P>,
        map: &impl PhysMap,
        header: *mut Header,
        pfn: Pfn,
    ) {
        // SAFETY: opened by `alloc` and closed here once; the frame was allocated as an unmovable block of order 0.
        unsafe {
            map.close(Window { ptr: header.cast(), pages: 1 });
            let block = Frozen::assume_owned(pfn, Order::ZERO, crate::Mobility::Unmovable);
            frames.free_for(cx, FrameUse::SLABS, block);
        }
    }

    /// Where a piece is.
    ///
    /// # Safety
    ///
    /// `header` begins a frame of this slab and `index` is below `per_frame`.
    unsafe fn piece(&self, header: *mut Header, index: u32) -> *mut u8 {
        // SAFETY: inside the frame by the contract.
        unsafe { header.cast::<u8>().add(self.first + index as usize * self.size) }
    }
}

/// The share of the CPU.
fn own_share(pin: CpuPin<'_>) -> usize {
    pin.cpu().get() as usize % SHARES
}

/// A frame that goes back unless a slab keeps it, also if the platform unwinds.
struct Spare<'a, 'm, 'p, E: Env, P: Cpu> {
    frames: &'a Frames<'m, E>,
    cx: &'a CpuCx<'p, P>,
    block: Option<Frozen>,
}

impl<E: Env, P: Cpu> Drop for Spare<'_, '_, '_, E, P> {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.frames.free_for(self.cx, FrameUse::SLABS, block);
        }
    }
}

impl State {
    /// A frame with no piece in use, if there is one.
    ///
    /// # Safety
    ///
    /// The lock is held.
    unsafe fn empty(&self) -> Option<*mut Header> {
        looks::count();
        // SAFETY: all headers on the list are valid while the lock is held.
        unsafe {
            let last = self.partial.as_ref()?.prev;
            ((*last).used == 0).then_some(last)
        }
    }

    /// # Safety
    ///
    /// As for [`link_last`](State::link_last).
    unsafe fn link_first(&mut self, header: *mut Header) {
        // SAFETY: passed on. What comes last in a ring comes before the first.
        unsafe { self.link_last(header) };
        self.partial = header;
    }

    /// # Safety
    ///
    /// `header` is a frame of the slab, on no list, and the lock is held.
    unsafe fn link_last(&mut self, header: *mut Header) {
        let first = self.partial;
        // SAFETY: all headers on the list are valid while the lock is held.
        unsafe {
            if first.is_null() {
                ((*header).next, (*header).prev) = (header, header);
                self.partial = header;
                return;
            }
            let last = (*first).prev;
            ((*header).next, (*header).prev) = (first, last);
            (*last).next = header;
            (*first).prev = header;
        }
    }

    /// # Safety
    ///
    /// `header` is on the list, and the lock is held.
    unsafe fn unlink(&mut self, header: *mut Header) {
        // SAFETY: as for `link_last`.
        unsafe {
            let (next, prev) = ((*header).next, (*header).prev);
            (*prev).next = next;
            (*next).prev = prev;
            if self.partial == header {
                self.partial = if next == header { null_mut() } else { next };
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::looks::tests::most_in_a_pin;
    use hugemm_base::Ram;
    use hugemm_threads::{Memory, Threads, run_as};
    use std::alloc::Layout;

    /// However many frames have free pieces, those of which nothing is used are found at once, where ever they were linked.
    #[test]
    #[cfg_attr(miri, ignore = "a thousand frames")]
    fn trimming_looks_at_few_frames() {
        let layout = Layout::from_size_align(8 << 20, 2 << 20).expect("valid");
        let threads: Threads<Memory> = Threads::new(Memory::new(layout));
        run_as(0);
        // SAFETY: the memory is the test's; frame numbers are its own.
        let (cx, ram) = (threads.cx(), unsafe { Ram::assume_unmanaged(threads.frames()) });
        let frames = Frames::carve(&cx, ram).expect("enough memory");
        let slab: Slab = Slab::new(2000, 16).expect("fits");
        assert_eq!(slab.per_frame(), 2);
        let pairs: Vec<[NonNull<u8>; 2]> =
            // SAFETY: the slab's only manager and map.
            (0..1000).map(|_| [(); 2].map(|()| unsafe { slab.alloc(&frames, &cx, &*threads) }.expect("memory"))).collect();
        // SAFETY: the slab's, once.
        let free = |object| unsafe { slab.free(&frames, &cx, &*threads, object) };
        let (first, others) = pairs.split_at(1);
        first.as_flattened().iter().for_each(|object| free(*object));
        others.iter().for_each(|[object, _]| free(*object));
        assert_eq!(slab.stats(&cx), SlabStats { frames: 1000, objects: 999 });
        // SAFETY: the slab's frames and map.
        let most = most_in_a_pin(&threads, |cx| unsafe { slab.trim(&frames, cx, &*threads) });
        assert_eq!((slab.stats(&cx), most), (SlabStats { frames: 999, objects: 999 }, 1), "frames looked at in a pin");
        others.iter().for_each(|[_, object]| free(*object));
        assert_eq!(slab.stats(&cx), SlabStats { frames: 1, objects: 0 });
    }
}
