//! Threads as CPUs.
//!
//! A [`Host`] is one machine: a number of CPUs, the frames it was given, a preemption model that can be switched, and a
//! counter set per CPU. A thread becomes a CPU for the time of [`Host::run_on`]: it is bound to one of the process's
//! real CPUs, and no other thread can be the same CPU meanwhile, so per-CPU data needs no atomics. There may be more
//! CPUs than real ones (they share them, for tests of protocols); timings are only meaningful when there are not.
//!
//! Physical memory is one mapping; frame [`BASE_FRAME`] is its first. Under Linux a thread may be preempted anywhere but
//! resumes on the CPU it is bound to, and the kernel's context switch orders its streaming stores, so the contract of
//! [`Cpu`] holds.

use crate::model::StoreModel;
use hugemm_base::platform::StoreBuffer;
use hugemm_base::{
    Clock, CounterSnapshot, Counters, Cpu, CpuCx, CpuId, Dirty, Extent, LinearMap, NodeId, PAGE_BYTES, Pfn, PhysMap,
    PreemptModel, Topology, VirtAddr, Window,
};
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Number of the first frame of a host's memory: 1 GiB, so that frame numbers have the alignment of the addresses and
/// frame 0 is nobody's.
pub const BASE_FRAME: Pfn = Pfn::new(1 << 18);

/// A real CPU for a virtual one, and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuPlace {
    /// The operating system's number of the CPU to bind to.
    pub os_cpu: u32,
    /// Its NUMA node, numbered from 0 without gaps.
    pub node: NodeId,
}

/// The operating system's numbers of the CPUs that the calling thread may run on, ascending.
///
/// # Errors
///
/// The system has more CPUs than a mask of the C library's can say.
pub fn allowed_cpus() -> std::io::Result<Vec<u32>> {
    let mask = rustix::thread::sched_getaffinity(None)?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| mask.is_set(*cpu)).map(|cpu| cpu as u32).collect())
}

/// A host machine: CPUs over threads, frames over a mapping.
pub struct Host<'m> {
    cpus: Vec<Slot>,
    base: NonNull<u8>,
    frames: Extent,
    node: NodeId,
    preempt: AtomicU8,
    vectors: AtomicBool,
    store_model: Option<StoreModel>,
    strict: bool,
    started: Instant,
    memory: PhantomData<&'m mut [u8]>,
}

/// One CPU: aligned so that two CPUs share no cache line.
#[repr(align(128))]
struct Slot {
    place: CpuPlace,
    counters: Counters,
    /// Held by the thread that is this CPU.
    occupied: Mutex<()>,
}

// SAFETY: the mapping behind `base` is borrowed exclusively for 'm and reached only through `PhysMap` windows, whose
// users own the frames they open; everything else is atomics, locks or constants.
unsafe impl Sync for Host<'_> {}
// SAFETY: as above; nothing is tied to the creating thread.
unsafe impl Send for Host<'_> {}

thread_local! {
    /// Which CPU of which host this thread is, while it is one; host 0 is none. Two words that are read at every pin.
    static CURRENT: Cell<(usize, CpuId)> = const { Cell::new((0, CpuId::new(0))) };

    /// What it is beneath that: the machines in whose turns the present one was begun, innermost last.
    static BENEATH: RefCell<Vec<(usize, CpuId)>> = const { RefCell::new(Vec::new()) };
}

/// Why a host could not be made or a thread could not become one of its CPUs.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// No CPU was given.
    #[error("a machine needs at least one CPU")]
    NoCpus,
    /// The memory is not page-aligned or has more frames than physical addresses allow.
    #[error("the memory at {address:#x} of {bytes} bytes is no run of whole 4 KiB pages")]
    Misaligned {
        /// Address of its first byte.
        address: usize,
        /// Its length.
        bytes: usize,
    },
    /// No such CPU.
    #[error("{cpu} does not exist: this machine has {cpus} CPUs")]
    NoSuchCpu {
        /// The CPU asked for.
        cpu: CpuId,
        /// How many there are.
        cpus: u32,
    },
    /// The thread is a CPU of this host already.
    #[error("the thread is {cpu} of this machine already; leave it before becoming another")]
    Nested {
        /// Which.
        cpu: CpuId,
    },
    /// Binding failed.
    #[error("cannot bind the thread to the system's CPU {os_cpu}: {source}; check the affinity mask (taskset -p $$)")]
    Bind {
        /// The operating system's number of the CPU.
        os_cpu: u32,
        /// What the system said.
        source: std::io::Error,
    },
}

impl<'m> Host<'m> {
    /// A machine with these CPUs and this memory (which may be empty).
    ///
    /// The memory's node is that of the first CPU.
    pub fn new(places: &[CpuPlace], memory: &'m mut [u8]) -> Result<Self, CpuError> {
        let first = places.first().ok_or(CpuError::NoCpus)?;
        let (address, bytes) = (memory.as_ptr().addr(), memory.len());
        let misaligned = CpuError::Misaligned { address, bytes };
        if bytes > 0 && !(address as u64).is_multiple_of(PAGE_BYTES) {
            return Err(misaligned);
        }
        let frames = Extent::from_bytes(BASE_FRAME.start(), bytes as u64).map_err(|_| misaligned)?;
        let slot = |place: &CpuPlace| Slot { place: *place, counters: Counters::default(), occupied: Mutex::new(()) };
        Ok(Host {
            cpus: places.iter().map(slot).collect(),
            base: NonNull::from(memory).cast(),
            frames,
            node: first.node,
            preempt: AtomicU8::new(PreemptModel::Full as u8),
            vectors: AtomicBool::new(true),
            store_model: None,
            strict: false,
            started: Instant::now(),
            memory: PhantomData,
        })
    }

    /// The same with a software store buffer per CPU: the `model` primitive's stores then reach memory in random order,
    /// at the latest at the fence. `seed` makes the order repeatable per CPU.
    pub fn with_store_model(mut self, seed: u64) -> Self {
        self.store_model = Some(StoreModel::new(self.cpus.len(), seed));
        self
    }

    /// The same, but a barrier's debt that is dropped panics (never while unwinding): for tests.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Every frame.
    pub fn frames(&self) -> Extent {
        self.frames
    }

    /// Takes ownership of every frame.
    ///
    /// # Safety
    ///
    /// At most one owner of the frames exists at a time.
    pub unsafe fn own_frames(&self) -> Dirty {
        // SAFETY: the mapping is borrowed exclusively for 'm, and the caller promises to be its only user.
        unsafe { Dirty::assume_owned(self.frames) }
    }

    /// Address of a frame's first byte, for looking at its content.
    pub fn address(&self, frame: Pfn) -> Option<NonNull<u8>> {
        let offset = frame.get().checked_sub(BASE_FRAME.get())?;
        // SAFETY: the frame is in the mapping, so the offset is within it.
        self.frames.contains(frame).then(|| unsafe { self.base.add((offset * PAGE_BYTES) as usize) })
    }

    /// Switches the preemption model; running clears honour it at their next unit.
    pub fn set_preempt_model(&self, model: PreemptModel) {
        // Relaxed: nothing is published by it.
        self.preempt.store(model as u8, Ordering::Relaxed);
    }

    /// Whether vector registers are to be had from now on, as they are at first. In a kernel they often are not, and
    /// what then takes over can be measured here.
    pub fn grant_vectors(&self, granted: bool) {
        // Relaxed: nothing is published by it.
        self.vectors.store(granted, Ordering::Relaxed);
    }

    /// The sum of all CPUs' counters.
    pub fn counters_sum(&self) -> CounterSnapshot {
        let each = self.cpus.iter().map(|slot| slot.counters.snapshot());
        each.fold(CounterSnapshot::default(), CounterSnapshot::plus)
    }

    /// Makes the calling thread the CPU `cpu` for the time of `f`. Waits while another thread is that CPU.
    ///
    /// The thread's former CPU binding is restored afterwards, also when `f` panics. Within `f` the thread may take a turn on
    /// another machine; it is then bound to that one's real CPU, and still the same CPU of this one.
    ///
    /// What `f` returns may live as long as the machine, such as a manager carved out of its memory.
    pub fn run_on<'s, R>(&'s self, cpu: CpuId, f: impl FnOnce(&mut CpuCx<'s, Self>) -> R) -> Result<R, CpuError> {
        let slot =
            self.cpus.get(cpu.get() as usize).ok_or(CpuError::NoSuchCpu { cpu, cpus: self.cpus.len() as u32 })?;
        if let Some(cpu) = self.occupant() {
            return Err(CpuError::Nested { cpu });
        }
        let _occupied = slot.occupied.lock().unwrap_or_else(PoisonError::into_inner);
        let _binding = Binding::bind(slot.place.os_cpu)?;
        let _current = Current::set((self.identity(), cpu));
        // SAFETY: the thread is no CPU of this host yet (checked above), so it has no context of it.
        let mut cx = unsafe { CpuCx::new(self) };
        let _drained = Drained(self);
        Ok(f(&mut cx))
    }

    /// Runs `f` on several CPUs at once, one thread each, and returns the results in the order of `cpus`.
    pub fn run_on_each<'s, R: Send>(
        &'s self,
        cpus: impl IntoIterator<Item = CpuId>,
        f: impl Fn(&mut CpuCx<'s, Self>) -> R + Sync,
    ) -> Result<Vec<R>, CpuError> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = cpus
                .into_iter()
                .map(|cpu| {
                    scope.spawn({
                        let f = &f;
                        move || self.run_on(cpu, f)
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }

    fn identity(&self) -> usize {
        self.cpus.as_ptr().addr()
    }

    /// Which CPU of this host the thread is.
    #[inline]
    fn occupant(&self) -> Option<CpuId> {
        let (host, cpu) = CURRENT.get();
        if host == self.identity() { Some(cpu) } else { self.occupant_beneath() }
    }

    #[cold]
    fn occupant_beneath(&self) -> Option<CpuId> {
        BENEATH.with_borrow(|turns| turns.iter().find(|(host, _)| *host == self.identity()).map(|(_, cpu)| *cpu))
    }

    fn slot(&self) -> &Slot {
        &self.cpus[self.current().get() as usize]
    }
}

/// Drains the model's store buffer at the end of a thread's turn as a CPU, as a real CPU does in a context switch.
struct Drained<'h, 'm>(&'h Host<'m>);

impl Drop for Drained<'_, '_> {
    fn drop(&mut self) {
        self.0.store_fence();
    }
}

/// Restores which CPU the thread is.
struct Current((usize, CpuId));

impl Current {
    fn set(to: (usize, CpuId)) -> Self {
        let former = CURRENT.replace(to);
        BENEATH.with_borrow_mut(|turns| turns.push(former));
        Current(former)
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        BENEATH.with_borrow_mut(|turns| turns.pop());
        CURRENT.set(self.0);
    }
}

/// A thread's binding to a CPU, undone on drop.
struct Binding(rustix::thread::CpuSet);

impl Binding {
    fn bind(os_cpu: u32) -> Result<Self, CpuError> {
        let error = |source: rustix::io::Errno| CpuError::Bind { os_cpu, source: source.into() };
        let former = rustix::thread::sched_getaffinity(None).map_err(error)?;
        let mut one = rustix::thread::CpuSet::new();
        if os_cpu as usize >= rustix::thread::CpuSet::MAX_CPU {
            return Err(error(rustix::io::Errno::INVAL));
        }
        one.set(os_cpu as usize);
        rustix::thread::sched_setaffinity(None, &one).map_err(error)?;
        Ok(Binding(former))
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        // The former mask was valid; if the system has taken those CPUs away since, staying put is all there is.
        let _ = rustix::thread::sched_setaffinity(None, &self.0);
    }
}

// SAFETY: a thread that is a CPU is bound to one real CPU and holds the slot's lock, so no other thread is the same
// CPU; pinning therefore needs nothing more. The operating system fences when it switches threads. A process's
// registers are its own, and the operating system saves them.
unsafe impl Cpu for Host<'_> {
    #[inline]
    fn current(&self) -> CpuId {
        // Not one of this host's CPUs: counts go to the first. Contexts exist only on threads that are CPUs.
        self.occupant().unwrap_or(CpuId::new(0))
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        0
    }

    #[inline]
    unsafe fn unpin(&self, _state: usize) {}

    fn cpus(&self) -> u32 {
        self.cpus.len() as u32
    }

    fn preempt_model(&self) -> PreemptModel {
        let number = self.preempt.load(Ordering::Relaxed);
        PreemptModel::ALL.into_iter().find(|m| *m as u8 == number).unwrap_or(PreemptModel::Full)
    }

    /// Linux preempts threads by itself; a reschedule point has nothing to add.
    #[inline]
    unsafe fn cond_resched(&self) {
        if cfg!(debug_assertions) {
            crate::crew::assert_none_held();
        }
    }

    fn store_fence(&self) {
        if let Some(model) = &self.store_model {
            // Before the hardware fence, which orders what this stores.
            model.drain(self.current());
        }
        hugemm_base::barriers::hardware_store_fence();
    }

    fn store_buffer(&self) -> Option<&dyn StoreBuffer> {
        self.store_model.as_ref().map(|model| model.of(self.current()))
    }

    /// User space owns its vector registers always; a host can be told not to grant them.
    #[inline]
    unsafe fn vector_begin(&self) -> bool {
        self.vectors.load(Ordering::Relaxed)
    }

    #[inline]
    fn counters(&self) -> &Counters {
        &self.slot().counters
    }

    fn debt_dropped(&self, barrier: &'static str) {
        if self.strict && !std::thread::panicking() {
            panic!("a pending {barrier} was dropped instead of discharged");
        }
    }
}

impl Clock for Host<'_> {
    #[inline]
    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

impl Topology for Host<'_> {
    fn node_of_cpu(&self, cpu: CpuId) -> NodeId {
        self.cpus.get(cpu.get() as usize).map_or(self.node, |slot| slot.place.node)
    }

    fn node_run(&self, extent: Extent) -> (NodeId, u64) {
        (self.node, extent.pages())
    }
}

// SAFETY: frames of the extent given to `new` are the mapping's pages, which stay mapped writable for 'm.
unsafe impl PhysMap for Host<'_> {
    #[inline]
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        // A frame before the first is as far away as any behind the last.
        let offset = extent.base().get().wrapping_sub(self.frames.base().get());
        let pages = self.frames.pages().saturating_sub(offset).min(extent.pages());
        // SAFETY: the extent's first frame is in the mapping, so the offset is within it.
        (pages > 0).then(|| Window { ptr: unsafe { self.base.add((offset * PAGE_BYTES) as usize) }.as_ptr(), pages })
    }
}

// SAFETY: the mapping is borrowed, initialised, for longer than the host can be.
unsafe impl LinearMap for Host<'_> {}
