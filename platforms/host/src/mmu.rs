//! A model of what translates addresses: per-CPU TLBs that are as unhelpful as hardware may be, and an oracle.
//!
//! [`Mmu`] has simulated CPUs over a [`Host`]'s memory. Page tables are real tables in its frames, x86-64's or
//! [arm64's](Tables); what software does to them is what the model walks. Everything is random but repeatable: the same seed and the same calls on one
//! thread give the same run.
//!
//! # What a TLB does here
//!
//! * It keeps every translation, of every tag, until that is invalidated, or evicted at random.
//! * It may walk again although it has a translation; then it has both, and picks one at random for each access.
//! * Of a folded leaf (arm64's contiguous bit) it keeps the leaf or the whole group, and notes accesses in any leaf of that.
//! * It keeps entries of upper levels too, those of the kernel's half under the tag of every space that walked them, and
//!   walks from any of them.
//! * It invalidates exactly what x86-64's instructions for a request do, page by page at the stride it is told; arm64's do so
//!   under every tag, and by broadcast, which reaches nobody before it is waited for; told one size of leaves, they leave others.
//! * A store that it refuses drops the translation, unless it is told to [keep](Mmu::keep_refusals) it.
//! * It walks speculatively, lazy CPUs included, and sets accessed bits, and dirty bits on stores, by locked updates.
//!
//! While a CPU waits for others to acknowledge, and between any two steps if a test calls
//! [`meanwhile`](Mmu::meanwhile), the other CPUs repeat accesses that they have made before.
//!
//! # What the oracle sees
//!
//! Tests say when frames are [allocated](Mmu::allocated) and [freed](Mmu::freed). Then no access may reach a frame, and no
//! walk a table, through something remembered from before it was freed; no store may go through an old translation while
//! the entry says another frame; no CPU may read bytes that another has not published; with arm64's tables no CPU may come to
//! know two translations of one address that differ in size or address, and every folded group is whole and uniform. See [`Violation`].
//!
//! # Use
//!
//! One thread plays all CPUs in turn: [`as_cpu`](Mmu::as_cpu) makes it one for a while (nested, if need be), and requests
//! to other CPUs are served on their behalf. Or one thread per CPU; then each has to call the shootdown's `handle_ipi` between
//! its steps, as real CPUs take interrupts.

mod entries;
mod oracle;
mod platform;
mod tlb;
mod walk;

pub use entries::Tables;
pub use oracle::Violation;

use crate::cpu::{BASE_FRAME, Host};
use crate::crew::replace_held;
use crate::model::StoreModel;
use hugemm_base::random::Random;
use hugemm_base::{Counters, CpuCx, CpuId, Extent, Invalidation, PhysAddr, TlbScope, VirtAddr};
use oracle::Oracle;
use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tlb::CpuTlb;

/// Why an address could not be accessed: what a page fault would say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No present entry, or no tables loaded.
    NotPresent,
    /// A store to what is read-only.
    Protection,
}

/// Loads and stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmuAccess {
    /// A load.
    Load,
    /// A store.
    Store,
}

/// Simulated CPUs with TLBs. See the [module](self).
pub struct Mmu<'h, 'm> {
    host: &'h Host<'m>,
    cpus: Vec<SimCpu>,
    tags: usize,
    walks: Tables,
    kernel_root: AtomicU64,
    keeps_refusals: AtomicBool,
    sees_edits: AtomicBool,
    fills: AtomicU64,
    oracle: Oracle,
    stores: StoreModel,
    random: Mutex<Random>,
}

/// One simulated CPU.
struct SimCpu {
    tlb: Mutex<CpuTlb>,
    /// Which thread plays it; 0 for none.
    player: AtomicU64,
    /// How often interrupts have been turned off.
    pins: AtomicU64,
    /// What it has broadcast and not waited for.
    begun: Mutex<Vec<(TlbScope, Invalidation)>>,
    counters: Counters,
}

/// Takes any one out.
fn take_any<T>(random: &mut Random, all: &mut Vec<T>) -> Option<T> {
    (!all.is_empty()).then(|| all.swap_remove(random.below(all.len() as u64) as usize))
}

thread_local! {
    /// Which CPU of which model this thread plays; model 0 is none.
    static PLAYED: Cell<(usize, CpuId)> = const { Cell::new((0, CpuId::new(0))) };
    /// This thread's number among players; 0 until it is one.
    static PLAYER: Cell<u64> = const { Cell::new(0) };
}

fn player() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if PLAYER.get() == 0 {
        PLAYER.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    PLAYER.get()
}

impl fmt::Debug for Mmu<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mmu").field("cpus", &self.cpus.len()).field("tags", &self.tags).finish_non_exhaustive()
    }
}

impl<'h, 'm> Mmu<'h, 'm> {
    /// `cpus` CPUs over the host's memory, each with `tags` address space tags (1: none).
    pub fn new(host: &'h Host<'m>, cpus: u32, tags: usize, seed: u64) -> Self {
        let cpu = |number: u32| SimCpu {
            tlb: Mutex::new(CpuTlb::new(seed ^ u64::from(number) << 32)),
            player: AtomicU64::new(0),
            pins: AtomicU64::new(0),
            begun: Mutex::new(Vec::new()),
            counters: Counters::default(),
        };
        Mmu {
            host,
            cpus: (0..cpus.max(1)).map(cpu).collect(),
            tags: tags.max(1),
            walks: Tables::X86_64,
            kernel_root: AtomicU64::new(0),
            keeps_refusals: AtomicBool::new(false),
            sees_edits: AtomicBool::new(false),
            fills: AtomicU64::new(0),
            oracle: Oracle::new(host.frames()),
            stores: StoreModel::new(cpus.max(1) as usize, seed),
            random: Mutex::new(Random(seed)),
        }
    }

    /// The same with other tables than x86-64's. With arm64's, translations that refuse a store [stay](Mmu::keep_refusals).
    #[must_use]
    pub fn walking(mut self, walks: Tables) -> Self {
        self.walks = walks;
        *self.keeps_refusals.get_mut() = walks != Tables::X86_64;
        self
    }

    /// The memory.
    pub fn host(&self) -> &'h Host<'m> {
        self.host
    }

    /// The tables that a CPU walks which has no address space loaded. They have to hold what all address spaces share.
    pub fn set_kernel_root(&self, root: PhysAddr) {
        self.kernel_root.store(root.get(), Ordering::Relaxed);
        for cpu in &self.cpus {
            let mut tlb = lock(&cpu.tlb);
            if tlb.root.is_none() {
                tlb.root = Some(root);
            }
        }
    }

    /// From here on a translation that refuses a store stays where it is, as arm64 may have it, instead of being dropped by
    /// the fault, as x86-64 does.
    pub fn keep_refusals(&self) {
        self.keeps_refusals.store(true, Ordering::Relaxed);
    }

    /// From here on CPUs walk beside edits: of a folded group that comes or goes they may find some leaves absent, and keep all of it.
    /// Those that are present agree even then.
    pub fn see_edits(&self) {
        self.sees_edits.store(true, Ordering::Relaxed);
    }

    /// How many translations CPUs have read from the tables.
    pub fn fills(&self) -> u64 {
        self.fills.load(Ordering::Relaxed)
    }

    /// Plays CPU `cpu` for the time of `f`. Waits while another thread plays it.
    ///
    /// # Panics
    ///
    /// If there is no such CPU.
    pub fn as_cpu<R>(&self, cpu: CpuId, f: impl FnOnce(&mut CpuCx<'_, Self>) -> R) -> R {
        let _played = loop {
            match self.try_play(cpu) {
                Some(played) => break played,
                None => std::thread::yield_now(),
            }
        };
        // SAFETY: each call is a task of its own on the simulated CPU; one that was interrupted goes on when it is over.
        let mut cx = unsafe { CpuCx::new(self) };
        f(&mut cx)
    }

    /// Becomes a CPU, unless another thread is it.
    fn try_play(&self, cpu: CpuId) -> Option<Played<'_>> {
        let (player, slot) = (player(), &self.cpus[cpu.get() as usize].player);
        let release = match slot.compare_exchange(0, player, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(slot),
            Err(now) if now == player => None,
            Err(_) => return None,
        };
        let (now, former) = ((self.identity(), cpu), PLAYED.get());
        PLAYED.set(now);
        // Another CPU's task holds what it holds itself.
        let held = (now != former).then(|| replace_held(0));
        Some(Played { former, held, release })
    }

    /// What the CPU uses for an access to `at`: the address where the host finds the byte. Its 8 bytes must not cross a
    /// page.
    pub fn translate(&self, cpu: CpuId, at: VirtAddr, access: MmuAccess) -> Result<NonNull<u8>, Fault> {
        let phys = {
            let mut tlb = self.tlb(cpu);
            let phys = self.access(cpu, &mut tlb, at, access)?;
            tlb.remember(at, access);
            phys
        };
        let frame = hugemm_base::Pfn::containing(phys);
        let base = self.host.address(frame).ok_or(Fault::NotPresent)?;
        // SAFETY: within the frame.
        Ok(unsafe { base.add((phys.get() & 0xfff) as usize) })
    }

    /// Loads the 8 bytes at `at`, which is a multiple of 8.
    pub fn load(&self, cpu: CpuId, at: VirtAddr) -> Result<u64, Fault> {
        let ptr = self.translate(cpu, VirtAddr::new(at.get() & !7), MmuAccess::Load)?;
        if self.stores.pending_elsewhere(cpu, ptr.addr().get(), 8) {
            self.oracle.report(format!("{cpu} read {at} before it was published"));
        }
        // SAFETY: 8 aligned bytes of the host's memory, which all CPUs access atomically.
        Ok(unsafe { ptr.cast::<AtomicU64>().as_ref() }.load(Ordering::Relaxed))
    }

    /// Stores 8 bytes at `at`, which is a multiple of 8.
    pub fn store(&self, cpu: CpuId, at: VirtAddr, value: u64) -> Result<(), Fault> {
        let ptr = self.translate(cpu, VirtAddr::new(at.get() & !7), MmuAccess::Store)?;
        // SAFETY: as for `load`.
        unsafe { ptr.cast::<AtomicU64>().as_ref() }.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// The CPU's program stops using addresses (it idles), or goes on; until then it repeats accesses meanwhile.
    pub fn pause(&self, cpu: CpuId, paused: bool) {
        self.tlb(cpu).paused = paused;
    }

    /// Lets every CPU that has interrupts on, or is played by nobody, do something: repeat an access of its own, walk
    /// speculatively, evict.
    pub fn meanwhile(&self) {
        for number in 0..self.cpus.len() as u32 {
            let cpu = CpuId::new(number);
            if self.cpus[number as usize].pins.load(Ordering::Relaxed) > 0 {
                continue;
            }
            let Some(_played) = self.try_play(cpu) else { continue };
            self.repeat(cpu, &mut self.tlb(cpu));
        }
    }

    /// Frames come into use. Before anything maps them.
    pub fn allocated(&self, extent: Extent) {
        self.oracle.allocated(extent);
    }

    /// Frames, page tables included, are about to be free: from here on nothing may use them by what it remembers.
    pub fn freed(&self, extent: Extent) {
        self.oracle.freed(extent);
    }

    /// Whether the frame has been stored to, through any translation, since the last call.
    pub fn take_written(&self, frame: hugemm_base::Pfn) -> bool {
        self.oracle.take_written(frame)
    }

    /// Marks a frame as stored to: the content of one that was has moved here.
    pub fn mark_written(&self, frame: hugemm_base::Pfn) {
        self.oracle.wrote(frame);
    }

    /// The first thing that went wrong.
    pub fn check(&self) -> Result<(), Violation> {
        self.oracle.first().map_or(Ok(()), Err)
    }

    fn tlb(&self, cpu: CpuId) -> MutexGuard<'_, CpuTlb> {
        lock(&self.cpus[cpu.get() as usize].tlb)
    }

    fn identity(&self) -> usize {
        self.cpus.as_ptr().addr()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends a thread's time as a CPU.
struct Played<'a> {
    former: (usize, CpuId),
    /// Locks that the former one's task holds, where it is another CPU.
    held: Option<u32>,
    release: Option<&'a AtomicU64>,
}

impl Drop for Played<'_> {
    fn drop(&mut self) {
        PLAYED.set(self.former);
        if let Some(held) = self.held {
            replace_held(held);
        }
        if let Some(slot) = self.release {
            slot.store(0, Ordering::Release);
        }
    }
}

/// Index of a frame in the host's memory.
fn index(frame: hugemm_base::Pfn) -> usize {
    frame.get().wrapping_sub(BASE_FRAME.get()) as usize
}
