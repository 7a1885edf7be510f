//! What the tests run on: threads as CPUs, frames with bytes, a toy compressor, and the operation interpreter.
#![allow(dead_code, unused_imports, unreachable_pub)]

pub mod ops;

use hugemm_base::inject::Inject;
use hugemm_base::platform::{PhysMap, Window};
use hugemm_base::{Dirty, Extent, NodeId, Order, PAGE_BYTES, Pfn, VirtAddr};
use hugemm_frames::{AllocRequest, ArenaSpec, Frames, FramesConfig, Frozen, Plain};
use hugemm_reclaim::{Compressor, Corrupt, PageBytes, StoreError, Swap, SwapSlot};
use hugemm_threads::{Memory, Threads};
pub use hugemm_threads::{Random as Rng, run_as};
use std::alloc::Layout;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

pub const CPUS: u32 = 4;

/// Threads as CPUs, and frames with bytes.
pub type Machine = Threads<Bytes>;

/// Frames from [`BASE`](Bytes::BASE) on.
pub struct Bytes {
    bytes: Memory,
    pages: u64,
    /// Most pages in a window. 0: one, even where a whole block is asked for that has no use in parts.
    window: u64,
    open: AtomicU64,
}

/// A machine with so many pages, in windows of `window` at most.
pub fn machine(pages: u64, window: u64) -> Machine {
    let layout = Layout::from_size_align((pages * PAGE_BYTES) as usize, 4096).expect("valid");
    Threads::new(Bytes { bytes: Memory::new(layout), pages, window, open: AtomicU64::new(0) })
}

impl Bytes {
    pub const BASE: u64 = 512;

    pub fn frames(&self) -> Extent {
        Extent::new(Pfn::new(Self::BASE), self.pages).expect("in range")
    }

    /// The bytes of a page that the caller owns.
    #[allow(clippy::mut_from_ref, reason = "owned through the handle")]
    pub fn page<'a>(&'a self, block: &'a mut Frozen) -> &'a mut PageBytes {
        let index = block.pfn().get() - Self::BASE;
        // SAFETY: inside the memory, and the block's owner is borrowed exclusively.
        unsafe { &mut *self.bytes.ptr().add((index * PAGE_BYTES) as usize).cast() }
    }

    /// Windows that have not been closed.
    pub fn open_windows(&self) -> u64 {
        self.open.load(Ordering::SeqCst)
    }
}

// SAFETY: every frame's window is its own part of the memory, which lives as long as the machine.
unsafe impl PhysMap for Bytes {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        if extent.is_empty() || !self.frames().covers(extent) {
            return None;
        }
        self.open.fetch_add(1, Ordering::SeqCst);
        let index = extent.base().get() - Self::BASE;
        // SAFETY: inside the memory.
        let ptr = unsafe { self.bytes.ptr().add((index * PAGE_BYTES) as usize) };
        // Scratch areas need one window for all of a block, which the store asks for as a whole; pieces can do without.
        let whole = extent.pages() > 4 && self.window > 0;
        let pages = if whole { extent.pages() } else { extent.pages().min(self.window.max(1)) };
        Some(Window { ptr, pages })
    }

    unsafe fn close(&self, window: Window) {
        let offset = window.ptr.addr().wrapping_sub(self.bytes.ptr().addr()) as u64;
        assert!(offset < self.pages * PAGE_BYTES && offset.is_multiple_of(PAGE_BYTES), "never opened");
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A manager of all of a machine's frames, and the machine, for a test.
pub fn with_frames<I: Inject, R>(machine: &Machine, inject: I, test: impl FnOnce(&Frames<'_, Plain<I>>) -> R) -> R {
    with_frames_for(CPUS, machine, inject, test)
}

/// The same for so many CPUs.
pub fn with_frames_for<I: Inject, R>(
    cpus: u32,
    machine: &Machine,
    inject: I,
    test: impl FnOnce(&Frames<'_, Plain<I>>) -> R,
) -> R {
    let arenas = [ArenaSpec::new(machine.frames(), NodeId::new(0))];
    let config = FramesConfig::new(&arenas, cpus);
    let memory = Memory::new(Frames::<Plain<I>>::required_bytes(&config).expect("valid"));
    // SAFETY: zeroed, of the size asked for, used for this manager only, whose contexts all come from `machine`.
    let frames = unsafe { Frames::new(&config, Plain(inject), memory.ptr(), memory.bytes()) }.expect("large enough");
    // SAFETY: released once; the bytes are the machine's.
    unsafe { frames.release(&machine.cx(), Dirty::assume_owned(machine.frames())) };
    test(&frames)
}

/// Every frame is free again and every window closed.
pub fn assert_nothing_lost<I: Inject>(machine: &Machine, frames: &Frames<'_, Plain<I>>) {
    let cx = machine.cx();
    assert_eq!(frames.stats(&cx).available(), frames.managed(), "frames lost");
    assert_eq!(machine.open_windows(), 0, "windows left open");
}

/// A page, where allocations fail now and then.
pub fn page<I: Inject>(machine: &Machine, frames: &Frames<'_, Plain<I>>) -> Frozen {
    let request = AllocRequest::order(Order::ZERO);
    std::iter::repeat_with(|| frames.alloc(&machine.cx(), request)).find_map(Result::ok).expect("sooner or later")
}

/// Evicts a page that brings its own frame, or says why not; what is left of it is free again.
pub fn evict<I: Inject>(
    machine: &Machine,
    frames: &Frames<'_, Plain<I>>,
    store: &impl Swap<Machine>,
    (page, content): (Frozen, Content),
) -> Result<SwapSlot, StoreError> {
    let cx = machine.cx();
    let (slot, left) = match store.evict(&cx, page) {
        Ok(evicted) => (Ok(evicted.slot), evicted.freed),
        Err((error, mut page)) => {
            assert!(content.may_be_refused(error), "{content:?}: {error}");
            content.assert_in(machine.page(&mut page));
            (Err(error), Some(page))
        }
    };
    left.into_iter().for_each(|page| frames.free(&cx, page));
    slot
}

/// What was stored is still there, and goes.
pub fn take_back(
    machine: &Machine,
    store: &impl Swap<Machine>,
    (slot, content): (SwapSlot, Content),
    into: &mut Frozen,
) {
    store.load(&machine.cx(), &slot, into, 0).expect("stored");
    content.assert_in(machine.page(into));
    store.free(&machine.cx(), slot).expect("held");
}

/// Runs of equal bytes as pairs of count and byte: simple enough to trust, small enough for the interpreter.
pub struct Runs;

impl Compressor for Runs {
    /// As large as a real one's table.
    type Scratch = [u64; 2100];

    const WORST: usize = 4096;

    fn init<'a>(&self, place: &'a mut MaybeUninit<[u64; 2100]>) -> &'a mut [u64; 2100] {
        place.write([0; 2100])
    }

    fn compress(&self, scratch: &mut [u64; 2100], from: &PageBytes, into: &mut [u8]) -> Option<usize> {
        // Nobody else uses this CPU's working memory meanwhile.
        scratch[0] += 1;
        let mine = scratch[0];
        let mut len = 0;
        let mut at = 0;
        while at < from.len() {
            let run = from[at..].iter().take(255).take_while(|byte| **byte == from[at]).count();
            let pair = into.get_mut(len..len + 2).filter(|_| len + 2 < 4096)?;
            pair.copy_from_slice(&[run as u8, from[at]]);
            len += 2;
            at += run;
        }
        assert_eq!(scratch[0], mine);
        Some(len)
    }

    fn decompress(&self, from: &[u8], into: &mut PageBytes) -> Result<(), Corrupt> {
        let mut at = 0;
        for pair in from.as_chunks::<2>().0 {
            into.get_mut(at..at + usize::from(pair[0])).ok_or(Corrupt)?.fill(pair[1]);
            at += usize::from(pair[0]);
        }
        if at == into.len() { Ok(()) } else { Err(Corrupt) }
    }
}

/// What is in a page: so many random bytes, then one byte; or one word all over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    pub random: u16,
    pub seed: u32,
}

impl Content {
    pub fn write(self, page: &mut PageBytes) {
        if self.random == 0 {
            page.as_chunks_mut::<4>().0.fill(self.seed.to_ne_bytes());
            return;
        }
        let mut random = Rng(u64::from(self.seed) << 16 | u64::from(self.random));
        let (head, tail) = page.split_at_mut(usize::from(self.random).min(4096));
        head.fill_with(|| random.word() as u8);
        tail.fill(self.seed as u8);
        // Else one random byte in 256 would make it a page of one byte, of which a store keeps nothing.
        if let Some(first) = head.first_mut().filter(|first| **first == self.seed as u8) {
            *first = !*first;
        }
    }

    /// Whether [`Runs`] makes half of it, so that any frame of its own has room for another one.
    pub fn is_half(self) -> bool {
        self.random <= 1000
    }

    /// What may come of an eviction that brings its own frame, if it is not stored. Some sizes need four frames in a row.
    pub fn may_be_refused(self, error: StoreError) -> bool {
        match error {
            StoreError::Full => self.random > 0,
            StoreError::NoMemory => !self.is_half(),
            StoreError::Incompressible => self.random > 1600,
            _ => false,
        }
    }

    pub fn assert_in(self, page: &PageBytes) {
        let mut expected = [0; 4096];
        self.write(&mut expected);
        assert!(*page == expected, "{self:?} came back differently");
    }
}
