//! What a manager of kernel areas is built on, in one place.

use hugemm_base::platform::Cpu;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, PhysMap, TlbHw};
use hugemm_clear::Clearer;
use hugemm_frames::{Env, Frames};
use hugemm_paging::{Keep, KernelSpace, PageFormat, PageTable, RawEditLock, ShootdownPolicy, TlbShootdown, TlbSpace};

/// The types that an embedder chooses once.
pub trait KvaSetup: Sized {
    /// The CPUs, and how frames are reached: a direct map, whose windows stay valid.
    type Platform: Cpu + PhysMap;
    /// Of the frame allocator. Its lock guards addresses too.
    type Env: Env;
    /// Of the page tables.
    type Format: PageFormat;
    /// Of the page table. Never taken with interrupts off.
    type Lock: RawEditLock;
    /// TLBs.
    type Tlb: TlbHw;
    /// Where the kernel space's masks live: `[AtomicU64; 2]` for up to 64 CPUs.
    type Masks: AsRef<[AtomicU64]>;
}

/// The context of a task under a setup.
pub type Cx<'p, S> = CpuCx<'p, <S as KvaSetup>::Platform>;

/// What may wait for its flush, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Areas. 1 flushes at each free.
    pub areas: u64,
    /// 4 KiB pages of their own that they have. Never more than are free, either: that is looked at for each sixteenth of this.
    pub pages: u64,
}

impl Limits {
    /// So many areas, and so many pages.
    pub const fn new(areas: u64, pages: u64) -> Self {
        Limits { areas, pages }
    }

    /// For this many frames: 1024 areas, and half of the frames.
    pub const fn of_frames(frames: u64) -> Self {
        Limits { areas: 1024, pages: frames / 2 }
    }

    /// Whether so many areas with so many pages, `more` of them new, are a full batch, if `free` pages are.
    pub(crate) fn are_met(&self, areas: u64, pages: u64, more: u64, free: impl FnOnce() -> u64) -> bool {
        let step = (self.pages / 16).max(1);
        areas >= self.areas || pages > self.pages || (pages / step > (pages - more) / step && pages > free())
    }
}

/// What a manager is made of.
#[derive(Debug)]
#[non_exhaustive]
pub struct KvaParts<'m, S: KvaSetup> {
    /// Pages, tables and records come from here.
    pub frames: &'m Frames<'m, S::Env>,
    /// Translates the range; has [a fixed top](PageTable::with_fixed_top) where several spaces share it.
    pub table: &'m PageTable<S::Format, S::Lock>,
    /// Which CPUs use it.
    pub space: &'m TlbSpace<KernelSpace, Keep, S::Masks>,
    /// Their TLBs.
    pub shootdown: &'m TlbShootdown<'m, S::Tlb>,
    /// Clears what is to be zero.
    pub clearer: Clearer,
    /// How flushes are made.
    pub shootdown_policy: ShootdownPolicy,
    /// What may wait for its flush.
    pub limits: Limits,
}

impl<'m, S: KvaSetup> KvaParts<'m, S> {
    /// What there has to be; batches are flushed [once](ShootdownPolicy::BATCHED), and as much may wait as
    /// [`of_frames`](Limits::of_frames) says of what `frames` manages.
    pub fn new(
        frames: &'m Frames<'m, S::Env>,
        table: &'m PageTable<S::Format, S::Lock>,
        space: &'m TlbSpace<KernelSpace, Keep, S::Masks>,
        shootdown: &'m TlbShootdown<'m, S::Tlb>,
        clearer: Clearer,
    ) -> Self {
        let (shootdown_policy, limits) = (ShootdownPolicy::BATCHED, Limits::of_frames(frames.managed()));
        KvaParts { frames, table, space, shootdown, clearer, shootdown_policy, limits }
    }
}
