//! Frames and descriptors come up: arenas from the memory map, descriptors in their own virtual area, the allocator.

use super::irq_lock::IrqLock;
use super::platform::Kernel;
use super::tlb::{self, Hardware};
use super::{layout, percpu, set_up, tables};
use crate::memory_map::{MOST, MemoryMap};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::inject::{FaultPlan, FaultPoint, Inject};
use hugemm_base::{CpuCx, Dirty, Extent, NodeId, Order, PAGE_BYTES, PageSize, Pfn, with};
#[cfg(feature = "debug")]
use hugemm_frames::debug::{Finding, Record, Watch};
use hugemm_frames::{ArenaSpec, Env, Frames, FramesConfig};
use hugemm_paging::{TlbCpu, TlbShootdown};
use spin::Once;

/// The allocator's surroundings in this kernel: locks that spin with interrupts off.
#[derive(Clone, Copy, Debug)]
pub struct KernelEnv;

impl Inject for KernelEnv {
    #[inline]
    fn fault(&self, point: FaultPoint) -> bool {
        // Relaxed: this CPU has set it.
        let plan = percpu::own().faults.load(Ordering::Relaxed);
        // SAFETY: a plan outlives the time that it is set for, by `with_faults`.
        unsafe { plan.as_ref() }.is_some_and(|plan| plan.fault(point))
    }
}

/// Runs `f`, with the calling CPU's allocations failing where the plan says.
pub fn with_faults<R>(plan: &FaultPlan, f: impl FnOnce() -> R) -> R {
    let own = percpu::own();
    // Relaxed: this CPU's own. There is no unwinding, so what is set is taken away.
    let before = own.faults.swap(core::ptr::from_ref(plan).cast_mut(), Ordering::Relaxed);
    let result = f();
    own.faults.store(before, Ordering::Relaxed);
    result
}

// SAFETY: descriptors are reached by arithmetic within the array that `init` has mapped.
unsafe impl Env for KernelEnv {
    type Lock = IrqLock;

    #[cfg(feature = "debug")]
    fn watch(&self) -> Option<&Watch<'_>> {
        // What is filled and looked at is work too, and on a busy host it takes long.
        percpu::beat();
        watch()
    }
}

#[cfg(feature = "debug")]
static WATCH: Once<Watch<'static>> = Once::new();

#[cfg(feature = "debug")]
static FINDINGS: AtomicU64 = AtomicU64::new(0);

/// What watches this kernel's memory, after [`init`].
#[cfg(feature = "debug")]
pub fn watch() -> Option<&'static Watch<'static>> {
    WATCH.get()
}

/// How much it has found.
#[cfg(feature = "debug")]
pub fn findings() -> u64 {
    FINDINGS.load(Ordering::Relaxed)
}

#[cfg(feature = "debug")]
fn report(finding: &Finding) {
    FINDINGS.fetch_add(1, Ordering::Relaxed);
    super::console::print(format_args!("{finding}"));
}

/// The allocator of this kernel.
pub type KernelFrames = Frames<'static, KernelEnv>;

static FRAMES: Once<KernelFrames> = Once::new();

static END: AtomicU64 = AtomicU64::new(0);

/// The allocator. After [`init`].
pub fn frames() -> &'static KernelFrames {
    set_up(&FRAMES)
}

/// Bytes that the allocator manages.
pub fn managed_bytes() -> u64 {
    frames().managed() * PAGE_BYTES
}

/// One past the highest frame that the allocator knows. After [`init`].
pub fn end() -> Pfn {
    Pfn::new(END.load(Ordering::Relaxed))
}

/// The pieces of the memory map that are arenas, in ascending order. Smaller ones than 2 MiB are left out.
pub(crate) fn arenas(map: &MemoryMap) -> impl Iterator<Item = Extent> {
    map.pieces().iter().copied().filter(|piece| piece.bytes() >= PageSize::Size2M.bytes())
}

/// Brings the allocator up on the memory of `map`, of which `free` is not yet in use. The boot CPU, once, alone.
pub(crate) fn init(cx: &CpuCx<'static, Kernel>, map: &MemoryMap, mut free: MemoryMap, cpus: u32) {
    let none = ArenaSpec::new(Default::default(), NodeId::new(0));
    let mut specs = [none; MOST];
    let mut count = 0;
    let mut mapped = 0;
    for piece in arenas(map) {
        mapped = tables::map_descriptors(&mut free, piece, mapped);
        let first = layout::DESCRIPTORS + piece.base().get() * layout::DESCRIPTOR_BYTES;
        specs[count] = with!(ArenaSpec::new(piece, NodeId::new(0)), descriptors = NonNull::new(first as *mut _));
        count += 1;
        END.store(piece.end().get(), Ordering::Relaxed);
    }
    let config = FramesConfig::new(&specs[..count], cpus);
    let need = KernelFrames::required_bytes(&config).unwrap_or_else(|error| panic!("{error}"));
    let pages = (need.size() as u64).div_ceil(PAGE_BYTES);
    let metadata = free.take(pages, Order::ZERO).unwrap_or_else(|error| panic!("{error}"));
    let at = layout::direct(metadata.start().get());
    // SAFETY: the metadata's frames have just been taken, the descriptors mapped; both stay. Contexts of this kernel all
    // have the one platform.
    let frames = unsafe { KernelFrames::new(&config, KernelEnv, at, metadata.bytes() as usize) };
    let frames = frames.unwrap_or_else(|error| panic!("{error}"));
    tlb::init(carve(&mut free, cpus.into(), TlbCpu::default), {
        let words = TlbShootdown::<Hardware>::inbox_words(cpus as usize);
        carve(&mut free, words as u64, AtomicU64::default)
    });
    #[cfg(feature = "debug")]
    {
        let records = carve(&mut free, END.load(Ordering::Relaxed), Record::default);
        let offset = layout::direct(0).expose_provenance();
        // SAFETY: the direct map has all frames, for good.
        WATCH.call_once(|| unsafe { Watch::new(Pfn::new(0), records, offset, report) });
    }
    for piece in free.pieces() {
        // SAFETY: nobody has taken these frames; each is released once.
        unsafe { frames.release(cx, Dirty::assume_owned(*piece)) };
    }
    FRAMES.call_once(|| frames);
}

/// An array of `count` values for ever, on frames of `free`. The boot CPU, on the kernel's tables.
fn carve<T>(free: &mut MemoryMap, count: u64, mut make: impl FnMut() -> T) -> &'static [T] {
    let pages = (count * size_of::<T>() as u64).div_ceil(PAGE_BYTES);
    let frames = free.take(pages, Order::ZERO).unwrap_or_else(|error| panic!("{error}"));
    let first = layout::direct(frames.start().get()).cast::<T>();
    // SAFETY: the frames have just been taken; page-aligned, large enough, and every value is written before the slice
    // exists.
    unsafe {
        for index in 0..count as usize {
            first.add(index).write(make());
        }
        core::slice::from_raw_parts(first, count as usize)
    }
}
