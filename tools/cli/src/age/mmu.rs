//! What a CPU's memory management unit does, in software, for programs on this machine that use hugemm's page tables: walk
//! them, set accessed and dirty bits, remember translations until told to forget them, take interrupts.
//!
//! It is fast rather than hostile; the hostile one is the model in the tests. Each CPU's translations are touched by the
//! thread that is the CPU alone. Between looking a page up and using it the thread serves no shootdown, so a flush that is
//! complete is complete here as well.

use hugemm_base::{CpuId, Invalidation, PhysAddr, TlbHw, TlbScope, VirtAddr};
use hugemm_host::cpu::Host;
use hugemm_inspect::ipi::MembarrierIpi;
use hugemm_paging::{Flags, PageFormat, X86_64};
use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bit that decides whether hardware uses an entry, in every format.
const PRESENT: u64 = 1;

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
        unsafe { &mut *self.cpus[cpu.0 as usize].0.get() }
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
        let mut table = tlb.root;
        for level in (0..4).rev() {
            let index = at.get() >> (12 + 9 * level) & 511;
            let entry = self.reach(table | index << 3)?.cast::<AtomicU64>();
            // SAFETY: an aligned word of the host's memory, which everybody accesses atomically while it is a table's. A
            // table that is freed has been flushed from this CPU before.
            let entry = unsafe { entry.as_ref() };
            let mut value = entry.load(Ordering::Acquire);
            if value & PRESENT == 0 {
                return None;
            }
            if !X86_64::is_leaf(value, level) {
                table = X86_64::frame(value).start().get();
                continue;
            }
            // As hardware does: a locked update of the entry as it was seen.
            let used = if write { Flags::HARDWARE } else { Flags::ACCESSED };
            let flags = loop {
                let flags = X86_64::flags(value);
                if value & PRESENT == 0 || write && !flags.contains(Flags::WRITE) {
                    return None;
                }
                if flags.contains(used) {
                    break flags;
                }
                let set = X86_64::change(value, used, Flags::NONE);
                match entry.compare_exchange_weak(value, set, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => break flags,
                    Err(now) => value = now,
                }
            };
            // Writable only once it is dirty: the first store has to be noted in the entry.
            let writable = flags.contains(Flags::WRITE) && (write || flags.contains(Flags::DIRTY));
            let reach = 1_u64 << (12 + 9 * level);
            let phys = X86_64::frame(value).start().get();
            if level == 0 {
                let page = at.get() >> 12;
                tlb.small[page as usize % SMALL] = Known { page: page + 1, phys, writable };
            } else {
                let block = at.get() >> 21;
                tlb.huge[block as usize % HUGE] = Known { page: block + 1, phys, writable };
            }
            return self.reach(phys + (at.get() & (reach - 1)));
        }
        None
    }
}

// SAFETY: a CPU forgets what it is told to before the call returns; what it remembers are leaves only. Interrupted CPUs
// are threads that poll.
unsafe impl TlbHw for SoftMmu<'_, '_> {
    fn invalidate(&self, cpu: CpuId, _scope: TlbScope, what: &Invalidation) {
        self.forget(cpu, what);
    }

    fn interrupt(&self, cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        if let Some(interrupts) = self.interrupts {
            interrupts.interrupt(cpu, first, cpus, serve);
        }
    }

    fn load(&self, cpu: CpuId, root: PhysAddr, _tag: usize, keep: bool) {
        let tlb = self.tlb(cpu);
        tlb.root = root.get();
        if !keep {
            tlb.small.fill(NONE);
            tlb.huge.fill(NONE);
        }
    }

    fn unload(&self, cpu: CpuId) {
        let tlb = self.tlb(cpu);
        tlb.root = 0;
        tlb.small.fill(NONE);
        tlb.huge.fill(NONE);
    }
}
