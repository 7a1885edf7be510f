//! OSTD as a platform of hugemm's.

use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};
use hugemm_base::platform::{Cpu, CpuId, LinearMap, PhysMap, Window};
use hugemm_base::{Counters, CpuCx, Extent, PAGE_BYTES, PAGE_SHIFT, VirtAddr};
use ostd::mm::frame::meta::AnyFrameMeta;
use ostd::mm::io::util::HasVmReaderWriter;
use ostd::mm::{Frame, HasPaddr, PAGE_SIZE, Segment, UniqueFrame};
use ostd::{cpu_local, irq};

const _: () = assert!(PAGE_SIZE as u64 == PAGE_BYTES);

cpu_local! {
    static COUNTERS: Counters = Counters::new();
}

/// The CPUs of an OSTD kernel. Its contexts exist only inside [`with_cx`](Ostd::with_cx), where interrupts are off.
#[derive(Debug)]
pub struct Ostd {
    /// Where frame 0 is mapped, or would be; 0 until it is known.
    base: AtomicUsize,
}

impl Ostd {
    pub(crate) const fn new() -> Self {
        Ostd { base: AtomicUsize::new(0) }
    }

    /// OSTD keeps the address of its direct map to itself, so it is learned from one frame's.
    pub(crate) fn learn(&self, segment: &Segment<()>) -> *mut u8 {
        let first = segment.writer().cursor();
        // Relaxed: whoever uses it has seen the manager that is made afterwards.
        self.base.store(first.expose_provenance() - segment.paddr(), Ordering::Relaxed);
        first
    }

    /// Runs `f` on this CPU with interrupts off.
    #[inline]
    pub(crate) fn with_cx<'a, R>(&'a self, f: impl FnOnce(&CpuCx<'a, Ostd>) -> R) -> R {
        let _off = irq::disable_local();
        // SAFETY: lent to code that passes no reschedule point, which this platform does not have, and leaves no debt.
        f(&unsafe { CpuCx::new(self) })
    }

    fn window(&self, extent: Extent) -> Window {
        let address = self.base.load(Ordering::Relaxed) + ((extent.base().get() as usize) << PAGE_SHIFT);
        Window { ptr: ptr::with_exposed_provenance_mut(address), pages: extent.pages() }
    }
}

// SAFETY: contexts exist only while interrupts are off, so a task neither leaves its CPU nor is interrupted, and `current` is its
// CPU; there is no reschedule point, and OSTD's switch of tasks comes after the interrupts are on again. No vector registers are
// granted.
unsafe impl Cpu for Ostd {
    #[inline]
    fn current(&self) -> CpuId {
        CpuId::new(ostd::cpu::CpuId::current_racy().into())
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        0
    }

    #[inline]
    unsafe fn unpin(&self, _state: usize) {}

    unsafe fn cond_resched(&self) {}

    fn counters(&self) -> &Counters {
        COUNTERS.get_on_cpu(ostd::cpu::CpuId::current_racy())
    }

    fn cpus(&self) -> u32 {
        ostd::cpu::num_cpus() as u32
    }

    fn may_sleep(&self) -> bool {
        false
    }

    fn interrupts_on(&self) -> bool {
        false
    }
}

/// What OSTD's account says about the heap's frames, so that no safe code can take them.
#[derive(Debug)]
struct HeapFrame;

// SAFETY: `on_drop` is the provided one, which does not look at the page.
unsafe impl AnyFrameMeta for HeapFrame {}

fn addresses(extent: Extent) -> impl Iterator<Item = usize> {
    let first = extent.base().get();
    (first..first + extent.pages()).map(|number| (number as usize) << PAGE_SHIFT)
}

/// Gives frames that [`PhysMap::open`] has entered back to nobody.
fn leave(extent: Extent) {
    for address in addresses(extent) {
        let Ok(frame) = Frame::from_in_use(address) else { continue };
        // SAFETY: the account has one reference that `open` forgot, and the one just made: a handle for each.
        drop(unsafe { ptr::read(&frame) });
        // Whoever has guessed the number and holds a reference keeps the frame.
        if let Ok(frame) = UniqueFrame::try_from(frame) {
            frame.reset_as_unused();
        }
    }
}

// SAFETY: OSTD maps all memory at a constant distance, from before it hands any over.
unsafe impl PhysMap for Ostd {
    /// For the heap: the frames are its own from here on, in OSTD's account too.
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        for (pages, address) in (0..).zip(addresses(extent)) {
            match Frame::from_unused(address, HeapFrame) {
                Ok(frame) => core::mem::forget(frame),
                Err(_) => {
                    leave(extent.split_at(pages).0);
                    return None;
                }
            }
        }
        (!extent.is_empty()).then(|| self.window(extent))
    }

    unsafe fn close(&self, window: Window) {
        let address = window.ptr.addr() - self.base.load(Ordering::Relaxed);
        if let Ok(extent) = Extent::from_bytes(hugemm_base::PhysAddr::new(address as u64), window.pages * PAGE_BYTES) {
            leave(extent);
        }
    }
}

// SAFETY: the direct map stays.
unsafe impl LinearMap for Ostd {}
