//! What a CPU's memory management unit does, in software, for programs on this machine that use hugemm's page tables: walk
//! them, set accessed and dirty bits, remember translations until told to forget them, take interrupts.
//!
//! It is fast rather than hostile; the hostile one is the model in the tests. Each CPU's translations are touched by the
//! thread that is the CPU alone. Between looking a page up and using it the thread serves no shootdown, so a flush that is
//! complete is complete here as well.

use hugemm_base::{CpuId, Invalidation, PhysAddr, TlbHw, TlbScope, VirtAddr};
use hugemm_host::cpu::Host;
use hugemm_inspect::ipi::MembarrierIpi;
use hugemm_paging::{Flags, X86_64};
use hugemm_workloads::vm_host::walk::walk;
use std::cell::UnsafeCell;
use std::ptr::NonNull;

/// Translations of 4 KiB that a CPU remembers, and of 2 MiB: about what second-level TLBs hold.
const SMALL: usize = 2048;
const HUGE: usize = 64;

#[derive(Clone, Copy)]
struct Known {
    /// Page number + 1; 0 is none.
    page: u64,
    phys: u64,
    writable: bool,
}

const NONE: Known = Known { page: 0, phys: 0, writable: false };

struct Tlb {
    root: u64,
    small: Box<[Known; SMALL]>,
    huge: [Known; HUGE],
}

/// One CPU's, apart from the others'.
#[repr(align(128))]
struct SoftCpu(UnsafeCell<Tlb>);

// SAFETY: a CPU's part is used by the thread that is the CPU: see `SoftMmu`.
unsafe impl Sync for SoftCpu {}

pub struct SoftMmu<'a, 'h> {
    host: &'a Host<'h>,
    cpus: Vec<SoftCpu>,
    interrupts: Option<&'a MembarrierIpi>,
}

impl<'a, 'h> SoftMmu<'a, 'h> {
    /// For the host's first `cpus` CPUs. `interrupts` are sent where there are any to send.
    pub fn new(host: &'a Host<'h>, cpus: u32, interrupts: Option<&'a MembarrierIpi>) -> Self {
        let cpu = |_| SoftCpu(UnsafeCell::new(Tlb { root: 0, small: Box::new([NONE; SMALL]), huge: [NONE; HUGE] }));
        SoftMmu { host, cpus: (0..cpus).map(cpu).collect(), interrupts }
    }

    fn forget(&self, cpu: CpuId, what: &Invalidation) {
        let tlb = self.tlb(cpu);
        let pages = what.ranges.touched(hugemm_base::PageSize::Size4K);
        if what.ranges.is_all() || pages > 1024 {
            tlb.small.fill(NONE);
            tlb.huge.fill(NONE);
            return;
        }
        for range in what.ranges.as_slice() {
            for page in range.first_page()..range.end_page() {
                tlb.small[page as usize % SMALL] = NONE;
                tlb.huge[(page >> 9) as usize % HUGE] = NONE;
            }
        }
    }

    #[allow(clippy::mut_from_ref, reason = "the CPU's own part")]
    fn tlb(&self, cpu: CpuId) -> &mut Tlb {
        // SAFETY: called by the thread that is the CPU (of translations, by the contract of `TlbHw`; of accesses, by
        // `access`), and no reference outlives a call.
        unsafe { &mut *self.cpus[cpu.get() as usize].0.get() }
    }

    /// Where the calling CPU finds the byte at `at`, for an access that happens before the next shootdown is served;
    /// `None` is a page fault.
    ///
    /// # Safety
    ///
    /// The calling thread is CPU `cpu` of the host.
    pub unsafe fn access(&self, cpu: CpuId, at: VirtAddr, write: bool) -> Option<NonNull<u8>> {
        let tlb = self.tlb(cpu);
        let (page, block) = (at.get() >> 12, at.get() >> 21);
        let small = tlb.small[page as usize % SMALL];
        let huge = tlb.huge[block as usize % HUGE];
        let known = if small.page == page + 1 {
            Some(small.phys + (at.get() & 0xfff))
        } else if huge.page == block + 1 && (!write || huge.writable) {
            return self.reach(huge.phys + (at.get() & 0x1f_ffff));
        } else {
            None
        };
        match known {
            Some(phys) if !write || small.writable => self.reach(phys),
            _ => self.walk(tlb, at, write),
        }
    }

    fn reach(&self, phys: u64) -> Option<NonNull<u8>> {
        let base = self.host.address(hugemm_base::Pfn::new(phys >> 12))?;
        // SAFETY: within the frame.
        Some(unsafe { base.add((phys & 0xfff) as usize) })
    }

    fn walk(&self, tlb: &mut Tlb, at: VirtAddr, write: bool) -> Option<NonNull<u8>> {
        // SAFETY: the host's memory is a direct map. A table that is freed has been flushed from this CPU before.
        let leaf = unsafe { walk::<X86_64>(self.host, PhysAddr::new(tlb.root), at, write) }?;
        // Writable only once it is dirty: the first store has to be noted in the entry.
        let writable = leaf.flags.contains(Flags::WRITE) && (write || leaf.flags.contains(Flags::DIRTY));
        let shift = 12 + 9 * leaf.level;
        let page = at.get() >> shift;
        let known = Known { page: page + 1, phys: leaf.start, writable };
        match leaf.level {
            0 => tlb.small[page as usize % SMALL] = known,
            1 => tlb.huge[page as usize % HUGE] = known,
            _ => {}
        }
        self.reach(leaf.start + (at.get() & ((1 << shift) - 1)))
    }
}

// SAFETY: a CPU forgets what it is told to before the call returns; what it remembers are leaves only. Interrupted CPUs
// are threads that poll.
unsafe impl TlbHw for SoftMmu<'_, '_> {
    unsafe fn invalidate(&self, cpu: CpuId, _scope: TlbScope, what: &Invalidation) {
        self.forget(cpu, what);
    }

    fn interrupt(&self, _cpu: CpuId, _first: CpuId, _cpus: u64, _serve: &mut dyn FnMut(CpuId)) {
        if let Some(interrupts) = self.interrupts {
            interrupts.interrupt();
        }
    }

    unsafe fn load(&self, cpu: CpuId, root: PhysAddr, _tag: usize, keep: bool) {
        let tlb = self.tlb(cpu);
        tlb.root = root.get();
        if !keep {
            tlb.small.fill(NONE);
            tlb.huge.fill(NONE);
        }
    }

    unsafe fn unload(&self, cpu: CpuId) {
        let tlb = self.tlb(cpu);
        tlb.root = 0;
        tlb.small.fill(NONE);
        tlb.huge.fill(NONE);
    }
}
