//! An allocator over numbered frames, and several CPUs that use it at once.
//!
//! The allocators never look into a frame, so the frames need not exist: only their own data do, in verified huge pages
//! (a kernel's direct map is made of those).

use crate::frames::peers::{Managed, Peer, Visit};
use crate::machine::Machine;
use crate::options::Kind;
use crate::sides::{Run, Side};
use anyhow::{Context, Result, anyhow, bail};
use hugemm_base::{CpuCx, CpuId, Dirty, Extent, NodeId, Order, PAGE_SHIFT, PageSize};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_host::cpu::{BASE_FRAME, CpuPlace, Host};
use hugemm_inspect::memory::Region;
use hugemm_workloads::alloc_free::Source;
use hugemm_workloads::size::Size;
use std::alloc::Layout;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub struct AreaPlan {
    pub extent: Extent,
    cpus: u32,
    pub metadata: Layout,
}

impl AreaPlan {
    /// Checks the user's size: whole 2 MiB pages, at least one block of `largest`.
    pub fn new(machine: &Machine, size: Size, cpus: u32, largest: Order) -> Result<Self> {
        let bytes = machine.whole_pages(size, PageSize::Size2M)?;
        if bytes < largest.bytes() {
            let block = Size(largest.bytes());
            bail!("a block of order {largest} is {block}, more than the {size} to manage; use --size {block} or more");
        }
        let extent = Extent::new(BASE_FRAME, bytes >> PAGE_SHIFT)
            .map_err(|_| anyhow!("{size} is more than physical addresses can number; use a smaller --size"))?;
        AreaPlan::over(extent, cpus)
    }

    pub fn over(extent: Extent, cpus: u32) -> Result<Self> {
        let arenas = [arena(extent)];
        let metadata = Frames::<Plain>::required_bytes(&FramesConfig::new(&arenas, cpus))?;
        Ok(AreaPlan { extent, cpus, metadata })
    }

    pub fn memory(&self, machine: &Machine) -> Result<Region> {
        let bytes = (self.metadata.size() as u64).next_multiple_of(PageSize::Size2M.bytes());
        let managed = Size(self.extent.bytes());
        machine
            .memory(bytes, PageSize::Size2M, Kind::Thp)
            .with_context(|| format!("the allocator's data for {managed}"))
    }

    /// The allocator in that memory, everything free.
    ///
    /// # Safety
    ///
    /// Nobody else has the frames, and what is behind them, if anything is, is initialised. All contexts that reach the manager are
    /// `host`'s.
    pub unsafe fn frames<'m>(&self, host: &Host<'_>, memory: &'m mut [u8]) -> Result<Frames<'m>> {
        let arenas = [arena(self.extent)];
        let config = FramesConfig::new(&arenas, self.cpus);
        // SAFETY: the caller's promise.
        let frames = unsafe { Frames::in_slice(&config, Plain::default(), memory) }?;
        // SAFETY: released once, here; the caller's promise.
        host.run_on(CpuId::new(0), |cx| unsafe { frames.release(cx, Dirty::assume_owned(self.extent)) })?;
        Ok(frames)
    }

    pub fn area<'m>(&self, machine: &Machine, memory: &'m mut Region) -> Result<Area<'m>> {
        self.area_on(&machine.places(self.cpus as usize)?, memory)
    }

    /// The same on these CPUs.
    pub fn area_on<'m>(&self, places: &[CpuPlace], memory: &'m mut Region) -> Result<Area<'m>> {
        let host = Host::new(places, &mut [])?;
        // SAFETY: there is no memory behind the numbers that anybody could own; the area has one host, and only its contexts reach
        // the manager.
        let frames = unsafe { self.frames(&host, memory.as_mut_slice()) }?;
        Ok(Area { host, frames, extent: self.extent })
    }
}

fn arena(extent: Extent) -> ArenaSpec {
    ArenaSpec::new(extent, NodeId::new(0))
}

pub struct Area<'m> {
    pub host: Host<'m>,
    pub frames: Frames<'m>,
    pub extent: Extent,
}

impl<'m> Area<'m> {
    pub fn lock_rounds(&self) -> Result<u64> {
        // The question itself takes it once.
        Ok(self.host.run_on(CpuId::new(0), |cx| self.frames.stats(cx).lock_rounds)?.saturating_sub(1))
    }

    /// Runs `f` on the first `threads` CPUs at once, after each has given back what it had cached in `source`. Results
    /// in the order of the CPUs.
    pub fn on_cpus<S, R>(
        &self,
        threads: u32,
        source: &S,
        f: impl Fn(&mut CpuCx<'_, Host<'m>>, u32) -> Result<R> + Sync,
    ) -> Result<Vec<R>>
    where
        S: Source<Host<'m>> + Sync,
        R: Send,
    {
        together(&self.host, threads, |cx, gate| {
            source.settle(cx);
            gate.pass();
            let cpu = cx.pinned(|pin| pin.cpu().get());
            f(cx, cpu)
        })
    }
}

/// Runs `f` on the first `threads` CPUs of a host at once. Results in the order of the CPUs. Who fails or panics opens the gate for the
/// others for good.
pub fn together<'s, 'h, R: Send>(
    host: &'s Host<'h>,
    threads: u32,
    f: impl Fn(&mut CpuCx<'s, Host<'h>>, &Gate) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let gate = Gate { cpus: u64::from(threads), came: AtomicU64::new(0), broken: AtomicBool::new(false) };
    let results = host.run_on_each((0..threads).map(CpuId::new), |cx| {
        let broken = Broken(&gate);
        let result = f(cx, &gate);
        if result.is_ok() {
            std::mem::forget(broken);
        }
        result
    })?;
    results.into_iter().collect()
}

/// Lets several threads go on within nanoseconds of each other, again and again.
pub struct Gate {
    cpus: u64,
    came: AtomicU64,
    broken: AtomicBool,
}

impl Gate {
    /// Waits for all of them.
    pub fn pass(&self) {
        // Release and Acquire: what each did before is seen by all after.
        let all = (self.came.fetch_add(1, Ordering::AcqRel) + 1).next_multiple_of(self.cpus);
        let mut spins = 0_u32;
        while self.came.load(Ordering::Acquire) < all && !self.broken.load(Ordering::Relaxed) {
            spins += 1;
            // Somebody may share a real CPU with whoever is missing.
            if spins.is_multiple_of(1 << 14) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

/// Opens the gate for the others when one thread will never come.
struct Broken<'a>(&'a Gate);

impl Drop for Broken<'_> {
    fn drop(&mut self) {
        self.0.broken.store(true, Ordering::Relaxed);
    }
}

/// What a comparison has every side do.
pub trait Work<'a>: Copy {
    type Record;

    /// Whether there will be so many holes that whoever looks at each is left out.
    fn makes_many_holes(&self) -> bool {
        false
    }

    /// Whether parts of blocks are freed: whoever cannot do that is left out.
    fn divides(&self) -> bool {
        false
    }

    /// One run of it with an allocator. `own` says that it is the area's, whose lock rounds are then counted.
    fn with<S>(self, area: &'a Area<'a>, source: S, own: bool) -> Run<'a, Self::Record>
    where
        S: Source<Host<'a>> + Sync + 'a,
        S::Block: Send;
}

pub struct Sides<'a, W: Work<'a>> {
    area: &'a Area<'a>,
    work: W,
    pub sides: Vec<Side<'a, W::Record>>,
}

impl<'a, W: Work<'a> + 'a> Sides<'a, W> {
    pub fn new(area: &'a Area<'a>, work: W) -> Self {
        Sides { area, work, sides: Vec::new() }
    }

    /// Adds a side; see [`Work::with`].
    pub fn add<S>(&mut self, name: &'static str, source: S, own: bool)
    where
        S: Source<Host<'a>> + Sync + 'a,
        S::Block: Send,
    {
        self.sides.push(Side::new(name, self.work.with(self.area, source, own)));
    }
}

impl<'a, W: Work<'a> + 'a> Visit for Sides<'a, W> {
    fn visit<T: Peer>(&mut self) -> Result<()> {
        if !(T::SCANS_HOLES && self.work.makes_many_holes() || !T::DIVISIBLE && self.work.divides()) {
            let peer = Managed::<T>::new(self.area.extent)?;
            self.add(T::NAME, peer, false);
        }
        Ok(())
    }
}
