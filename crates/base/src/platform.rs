//! The traits that a platform implements: [`Cpu`] always, the others where a system that needs them is used.
//!
//! | trait | job | who needs it |
//! |---|---|---|
//! | [`Cpu`] | the running task and its CPU: pinning, rescheduling, barriers after stores, vector registers, counters | everything |
//! | [`PhysMap`] | where in virtual memory frames can be reached | everything that touches frames' bytes |
//! | [`LinearMap`] | that they can be reached for good | what keeps its own data in frames |
//! | [`Topology`] | NUMA nodes | parallel work, placement |
//! | [`TlbHw`] | invalidating TLBs, interrupting CPUs, loading tables | paging |
//! | [`Clock`] | time | calibration, budgets |
//!
//! Traits whose contract other code's memory safety rests on are `unsafe` to implement.

use crate::addr::{PhysAddr, VirtAddr};
use crate::counters::Counters;
use crate::extent::Extent;
use crate::tlb_ranges::{Invalidation, TlbScope};
use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u32);

        impl $name {
            /// The one with this number.
            #[inline]
            pub const fn new(number: u32) -> Self {
                $name(number)
            }

            /// The number.
            #[inline]
            pub const fn get(self) -> u32 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.get())
            }
        }
    };
}

id! {
    /// A CPU, numbered from 0 without gaps.
    CpuId, "cpu"
}

id! {
    /// A NUMA node, numbered from 0 without gaps.
    NodeId, "node"
}

/// How tasks give up the CPU. May change at run time; long operations look at it before every unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PreemptModel {
    /// Only where they sleep.
    None,
    /// At reschedule points.
    Voluntary,
    /// Anywhere, but a task that only competes with its equals is left until the next tick.
    Lazy,
    /// Anywhere.
    Full,
}

impl PreemptModel {
    /// Every model.
    pub const ALL: [PreemptModel; 4] =
        [PreemptModel::None, PreemptModel::Voluntary, PreemptModel::Lazy, PreemptModel::Full];

    /// Whether a task that never passes a reschedule point can still be preempted. Under the other, *cooperative*,
    /// models the time between two reschedule points must be bounded.
    pub const fn is_preemptible(self) -> bool {
        matches!(self, PreemptModel::Lazy | PreemptModel::Full)
    }

    /// Lower-case name, as kernels print it.
    pub const fn name(self) -> &'static str {
        match self {
            PreemptModel::None => "none",
            PreemptModel::Voluntary => "voluntary",
            PreemptModel::Lazy => "lazy",
            PreemptModel::Full => "full",
        }
    }
}

/// What a CPU does for the task that runs on it. A platform implements it once; five methods have no default, because
/// nothing would be right everywhere.
///
/// Code other than platforms calls the `unsafe` methods through a [`CpuCx`](crate::CpuCx).
///
/// # Safety
///
/// ## Staying on a CPU
///
/// Between [`pin`](Cpu::pin) and the matching [`unpin`](Cpu::unpin) the calling task stays on one CPU and nothing else
/// that pins runs on it, interrupt handlers included, so that per-CPU data may be accessed with plain loads and stores; and
/// [`current`](Cpu::current) answers that CPU, below [`cpus`](Cpu::cpus).
///
/// ## Rescheduling
///
/// Streaming stores are ordered only by a fence on the CPU that issued them. So a task that is switched out anywhere but in
/// [`cond_resched`](Cpu::cond_resched) or [`migrate`](Cpu::migrate) goes on on the same CPU, or the CPU that it leaves
/// executes a store fence before it goes on (every x86-64 and arm64 kernel does, through the serialising or barrier
/// instructions of its switch).
///
/// ## Barriers after stores
///
/// After [`store_fence`](Cpu::store_fence), every earlier store of this CPU, streaming ones included, is visible to every CPU
/// that sees any later store of this CPU. After [`publish_barrier`](Cpu::publish_barrier) the same holds for all but
/// streaming stores. The provided methods are right on x86-64 and arm64 hardware.
///
/// ## Vector registers
///
/// From a `true` of [`vector_begin`](Cpu::vector_begin) to its [`vector_end`](Cpu::vector_end) the task may execute every
/// vector instruction that the CPU says is enabled (CPUID and XCR0; on arm64 its ID registers): none traps, nobody else
/// changes what the registers hold, interrupt handlers included, and nobody misses what they held before. The provided
/// methods grant nothing.
///
/// ## One address, one platform
///
/// Two platforms at one address (one that begins with the other, or has no size) have the same CPUs under the same numbers:
/// whoever keeps things per CPU tells by [`CpuPin::platform`](crate::CpuPin::platform) whose CPU it is.
///
/// Whoever implements it has to promise all that:
///
/// ```compile_fail,E0200
/// # use hugemm_base::{Counters, Cpu, CpuId};
/// struct Careless(Counters);
/// impl Cpu for Careless { // error: `unsafe impl`: is there a fence where it switches tasks?
///     # fn current(&self) -> CpuId { CpuId::new(0) }
///     # unsafe fn pin(&self) -> usize { 0 }
///     # unsafe fn unpin(&self, _: usize) {}
///     # fn counters(&self) -> &Counters { &self.0 }
///     unsafe fn cond_resched(&self) {}
/// }
/// ```
///
/// ```compile_fail,E0200
/// # use hugemm_base::{Counters, Cpu, CpuId};
/// struct Generous(Counters);
/// impl Cpu for Generous { // error: `unsafe impl`: do vector instructions really not trap?
///     # fn current(&self) -> CpuId { CpuId::new(0) }
///     # unsafe fn pin(&self) -> usize { 0 }
///     # unsafe fn unpin(&self, _: usize) {}
///     # fn counters(&self) -> &Counters { &self.0 }
///     # unsafe fn cond_resched(&self) {}
///     unsafe fn vector_begin(&self) -> bool {
///         true
///     }
/// }
/// ```
pub unsafe trait Cpu {
    /// The CPU that runs the caller. A hint unless pinned.
    fn current(&self) -> CpuId;

    /// Pins the caller: interrupts off in a kernel, nothing at all where a thread is bound to its CPU. Nests. Returns
    /// what `unpin` needs to restore the previous state. Contexts call it: [`CpuCx::pinned`](crate::CpuCx::pinned).
    ///
    /// # Safety
    ///
    /// It is undone before the task passes a reschedule or migration point.
    unsafe fn pin(&self) -> usize;

    /// Undoes the matching `pin`.
    ///
    /// # Safety
    ///
    /// `state` is what the latest not yet undone `pin` on this task returned.
    unsafe fn unpin(&self, state: usize);

    /// A point where the platform may run something else; nothing at all where there is nothing else. May sleep. Contexts
    /// call it: [`CpuCx::cond_resched`](crate::CpuCx::cond_resched).
    ///
    /// # Safety
    ///
    /// The task is not pinned, owes no store fence and uses nothing else that belongs to this CPU: what borrows its
    /// [`CpuCx`](crate::CpuCx) has ended.
    unsafe fn cond_resched(&self);

    /// The calling CPU's counters.
    fn counters(&self) -> &Counters;

    /// How many CPUs there are; at least 1, which is what is provided. What is kept per CPU is sized by it.
    fn cpus(&self) -> u32 {
        1
    }

    /// How tasks give up the CPU at present. The provided answer is `Voluntary`: at reschedule points.
    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::Voluntary
    }

    /// Whether the caller is in a context that may sleep. Long operations refuse to start where it is false.
    fn may_sleep(&self) -> bool {
        true
    }

    /// Whether the caller can be interrupted by other CPUs: never between `pin` and `unpin` where page faults are served by
    /// [`CpuCx::of_fault`](crate::CpuCx::of_fault), which relies on it. Whoever waits for other CPUs asserts it in debug builds. The
    /// provided answer is for platforms without interrupts.
    fn interrupts_on(&self) -> bool {
        true
    }

    /// Keeps the caller on its CPU, and other tasks off it, with interrupts on: preemption off in a kernel that has
    /// preemption. Nests. Returns what `unstay` needs. The provided one does nothing, which is right only where a task
    /// leaves its CPU at reschedule and migration points alone. Contexts call it:
    /// [`CpuCx::staying`](crate::CpuCx::staying).
    ///
    /// # Safety
    ///
    /// It is undone before the task passes a reschedule or migration point.
    unsafe fn stay(&self) -> usize {
        0
    }

    /// Undoes the matching `stay`.
    ///
    /// # Safety
    ///
    /// `state` is what the latest not yet undone `stay` on this task returned.
    unsafe fn unstay(&self, _state: usize) {}

    /// Moves the caller to another CPU; false if that is not possible (no such CPU, or not allowed). Contexts call it:
    /// [`CpuCx::migrate`](crate::CpuCx::migrate).
    ///
    /// # Safety
    ///
    /// As for [`cond_resched`](Cpu::cond_resched).
    unsafe fn migrate(&self, _to: CpuId) -> bool {
        false
    }

    /// Orders streaming and ordinary stores: `sfence`, `dmb ishst`.
    #[inline]
    fn store_fence(&self) {
        crate::barriers::hardware_store_fence();
    }

    /// Orders ordinary stores: nothing but a compiler barrier on x86-64, `dmb ishst` on arm64.
    #[inline]
    fn publish_barrier(&self) {
        crate::barriers::hardware_publish_barrier();
    }

    /// The software store buffer through which the `model` clearing primitive goes, where the platform has one.
    fn store_buffer(&self) -> Option<&dyn StoreBuffer> {
        None
    }

    /// Makes the vector registers usable for the caller; false if they are not to be had here and now, which may be
    /// because they are in use. Uses that are granted nest. Does not sleep. Contexts call it:
    /// [`CpuCx::with_vector`](crate::CpuCx::with_vector).
    ///
    /// # Safety
    ///
    /// A use that is granted is ended before the task passes a reschedule or migration point.
    unsafe fn vector_begin(&self) -> bool {
        false
    }

    /// Ends the use.
    ///
    /// # Safety
    ///
    /// Ends the latest use on this task that was granted and has not ended.
    unsafe fn vector_end(&self) {}

    /// A barrier's debt was dropped instead of discharged; by now it has been paid. Production platforms have nothing
    /// to do here; test platforms panic, unless the thread is already unwinding.
    fn debt_dropped(&self, _barrier: &'static str) {}
}

/// A software model of a weakly ordered store buffer: stores reach memory in any order, at the latest at the fence.
pub trait StoreBuffer {
    /// Accepts stores of zeroes to `len` bytes from `ptr` on.
    ///
    /// # Safety
    ///
    /// The bytes are writable, and stay so and unread by this CPU until the platform's store fence.
    unsafe fn zero(&self, ptr: *mut u8, len: usize);
}

/// NUMA nodes.
pub trait Topology {
    /// The node of a CPU.
    fn node_of_cpu(&self, cpu: CpuId) -> NodeId;

    /// The node of the extent's first frame, and how many of its frames from there on are on that node (at least 1 for
    /// an extent that is not empty).
    fn node_run(&self, extent: Extent) -> (NodeId, u64);
}

/// Where in virtual memory frames can be reached.
///
/// # Safety
///
/// An open window's bytes are the frames' bytes, mapped writable, from [`open`](PhysMap::open) until
/// [`close`](PhysMap::close).
pub unsafe trait PhysMap {
    /// Opens a window on the first frames of `extent`: on all of them where there is a direct map, on as few as one
    /// where windows are temporary (highmem) or must have the cache colour or tags of the address at which user space
    /// will see them. `user` is that address for the extent's first frame, if it is known.
    ///
    /// `None` if no frame of the extent can be reached, or `extent` is empty. Does not sleep.
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window>;

    /// Closes a window. Streaming stores through it need not have been fenced.
    ///
    /// # Safety
    ///
    /// `window` came from `open` on this map, or is a part of one and this a [`LinearMap`]; it is closed once, and nobody uses its bytes
    /// any more.
    unsafe fn close(&self, _window: Window) {}
}

/// A [`PhysMap`] that maps memory for good: what is kept in frames, such as their manager's own metadata, needs one. A window may be
/// closed in parts, as the frames that it shows go.
///
/// # Safety
///
/// The bytes of a window stay the frames', initialised and mapped at the same address, as long as the platform can be
/// borrowed, whether the window is closed or not.
pub unsafe trait LinearMap: PhysMap {}

/// Frames made reachable by [`PhysMap::open`].
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// First byte of the first frame; 4 KiB-aligned.
    pub ptr: *mut u8,
    /// How many frames are reachable through `ptr`; at least 1 and at most what was asked for.
    pub pages: u64,
}

/// TLB hardware: invalidation here, a way to reach other CPUs, and the register with the tables' root.
///
/// Real CPUs know who they are; `cpu`, always the calling one, is for simulated ones.
///
/// # Safety
///
/// * When [`invalidate`](TlbHw::invalidate) returns, the CPU holds no translation of the scope and addresses that was
///   derived from entries as they were before the call, and, if `what.tables` is set, no entry of a table cache. If
///   [one leaf size](Invalidation::leaf_size) is said, translations of other leaves may stay.
/// * When [`broadcast`](TlbHw::broadcast) has returned a number, and then [`sync`](TlbHw::sync) has returned on the same CPU, that is
///   so on every CPU and under every tag.
/// * After [`interrupt`](TlbHw::interrupt), each of the CPUs calls the shootdown's `serve` with a bounded delay once it
///   has interrupts on (a CPU that waits for a shootdown of its own does so by itself).
/// * After [`load`](TlbHw::load) the CPU walks `root` and uses only translations tagged with `tag`, and, unless `keep`,
///   none made before. After [`unload`](TlbHw::unload) it walks no address space's tables but the kernel's own.
/// * Nothing of it unwinds, nor an interrupt handler that runs meanwhile: nobody could say which CPUs have been asked, and a
///   flush that is left would be waited for for ever. A shootdown that is left by unwinding ends the program.
pub unsafe trait TlbHw {
    /// Invalidates on the calling CPU.
    ///
    /// # Safety
    ///
    /// Interrupts are off.
    unsafe fn invalidate(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation);

    /// Begins to invalidate on all CPUs by instructions that reach them (INVLPGB, TLBI … IS), and says how many it took; `None` if
    /// there is no such instruction, and then nothing has happened. It is done when [`sync`](TlbHw::sync) returns. Interrupts are on;
    /// they may be off where entries are broken before they are made (arm64).
    fn broadcast(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) -> Option<u64> {
        None
    }

    /// Waits until all that the calling CPU has [broadcast](TlbHw::broadcast) is done (TLBSYNC, DSB ISH). Context: as there.
    fn sync(&self, _cpu: CpuId) {}

    /// Interrupts CPU `first + n` for each set bit `n`. Does not wait. Where CPUs are simulated or stand still, `serve`
    /// does for the CPU it is given what its interrupt handler would do; hardware has no use for it.
    fn interrupt(&self, cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId));

    /// How many address spaces' translations one CPU can tell apart; 1 without tags (PCID, ASID).
    fn tags(&self) -> usize {
        1
    }

    /// Makes `root` the tables that the calling CPU walks, under `tag`. `keep`: what the TLB has under that tag is still right.
    ///
    /// # Safety
    ///
    /// Interrupts are off; `root` is the root of an address space's tables, which stay until another is loaded or this one
    /// [unloaded](TlbHw::unload); `tag` is less than [`tags`](TlbHw::tags).
    unsafe fn load(&self, cpu: CpuId, root: PhysAddr, tag: usize, keep: bool);

    /// Makes the calling CPU walk the kernel's tables only.
    ///
    /// # Safety
    ///
    /// Interrupts are off.
    unsafe fn unload(&self, cpu: CpuId);
}

// SAFETY: the same hardware.
unsafe impl<H: TlbHw> TlbHw for &H {
    unsafe fn invalidate(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        // SAFETY: the caller's promise, passed on.
        unsafe { (**self).invalidate(cpu, scope, what) };
    }

    fn broadcast(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) -> Option<u64> {
        (**self).broadcast(cpu, scope, what)
    }

    fn sync(&self, cpu: CpuId) {
        (**self).sync(cpu);
    }

    fn interrupt(&self, cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        (**self).interrupt(cpu, first, cpus, serve);
    }

    fn tags(&self) -> usize {
        (**self).tags()
    }

    unsafe fn load(&self, cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
        // SAFETY: the caller's promise, passed on.
        unsafe { (**self).load(cpu, root, tag, keep) };
    }

    unsafe fn unload(&self, cpu: CpuId) {
        // SAFETY: the caller's promise, passed on.
        unsafe { (**self).unload(cpu) };
    }
}

/// A monotonic clock.
pub trait Clock {
    /// Nanoseconds since an arbitrary moment.
    fn now_ns(&self) -> u64;
}
