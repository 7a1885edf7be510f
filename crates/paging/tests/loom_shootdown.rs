//! loom runs the shipped shootdown protocol through every interleaving (bounded by `LOOM_MAX_PREEMPTIONS`):
//! `RUSTFLAGS="--cfg loom" cargo test --release -p hugemm-paging --test loom_shootdown`.
//!
//! The TLB of a CPU is one remembered translation per entry, kept until invalidated. The rule is always the same: when a
//! flush is over, no CPU uses an old translation any more. Each fence of the protocol has a test that shows the rule
//! broken without it.
#![cfg(loom)]

use hugemm_base::sync::{AtomicU64, FencePoint, Ordering, spin_loop};
use hugemm_base::{
    Counters, Cpu, CpuCx, CpuId, Invalidation, PageSize, Pending, PhysAddr, PreemptModel, TlbFlush, TlbHw, TlbScope,
    VirtAddr, VirtRange,
};
use hugemm_paging::{
    Deferred, DeferredUnmap, Keep, ShootdownBatch, ShootdownPolicy, TlbCpu, TlbShootdown, TlbSpace, UserSpace,
};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;

/// Entries' values. A remembered translation is the value; 0 is none.
const OLD: u64 = 1;
const NEW: u64 = 2;

/// The CPU without a thread: loom is not fair to more than two that spin.
const PASSIVE: u32 = 2;

/// A CPU, which the thread that holds this plays.
struct Player(CpuId, Counters);

// SAFETY: each thread plays one CPU of its own. Loom's threads store nothing but atomics.
unsafe impl Cpu for Player {
    fn current(&self) -> CpuId {
        self.0
    }

    unsafe fn pin(&self) -> usize {
        0
    }

    unsafe fn unpin(&self, _state: usize) {}

    fn cpus(&self) -> u32 {
        PASSIVE + 1
    }

    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::None
    }

    unsafe fn cond_resched(&self) {}

    fn counters(&self) -> &Counters {
        &self.1
    }
}

/// Two page table entries, and what each CPU remembers of them.
struct Hw {
    entries: [AtomicU64; 2],
    remembered: Vec<[AtomicU64; 2]>,
    /// CPU 2 has no thread: whoever interrupts it runs its handler, one at a time.
    passive: Mutex<()>,
}

impl Hw {
    fn entry_range(entry: usize) -> VirtRange {
        VirtRange::new(VirtAddr::new((entry as u64) << 12), 4096).expect("a page")
    }

    /// What an access through the entry uses: what is remembered, or what a walk finds and remembers.
    fn translate(&self, cpu: CpuId, entry: usize) -> u64 {
        let slot = &self.remembered[cpu.get() as usize][entry];
        match slot.load(Ordering::Relaxed) {
            0 => {
                let found = self.entries[entry].load(Ordering::Relaxed);
                slot.store(found, Ordering::Relaxed);
                found
            }
            known => known,
        }
    }
}

// SAFETY: a remembered translation is gone when `invalidate` or `load` returns; interrupted CPUs poll, or are served for.
unsafe impl TlbHw for Hw {
    unsafe fn invalidate(&self, cpu: CpuId, _scope: TlbScope, what: &Invalidation) {
        for entry in 0..2 {
            if what.ranges.covers(Hw::entry_range(entry)) {
                self.remembered[cpu.get() as usize][entry].store(0, Ordering::Relaxed);
            }
        }
    }

    fn interrupt(&self, _cpu: CpuId, _first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        if cpus & 1 << PASSIVE != 0 {
            let _one = self.passive.lock().unwrap();
            serve(CpuId::new(PASSIVE));
        }
    }

    fn tags(&self) -> usize {
        2
    }

    unsafe fn load(&self, cpu: CpuId, _root: PhysAddr, _tag: usize, keep: bool) {
        if !keep {
            // SAFETY: the caller's promise, passed on.
            unsafe { self.invalidate(cpu, TlbScope::Space, &Invalidation::ALL) };
        }
    }

    unsafe fn unload(&self, _cpu: CpuId) {}
}

struct Machine {
    cpus: Vec<TlbCpu>,
    inboxes: Vec<AtomicU64>,
    hw: Hw,
    space: TlbSpace<UserSpace>,
    deferred: DeferredUnmap,
    /// CPUs that have nothing more to ask.
    done: AtomicU64,
    lock: Mutex<()>,
    /// What a translation, or a walk, leads to: loom reports accesses that are not ordered.
    memory: UnsafeCell<()>,
}

/// A page's flush that is owed.
type Debt<'m> = Pending<(), TlbFlush<'m, Deferred, Keep>>;

impl Machine {
    fn new(cpus: usize) -> Arc<Self> {
        let hw = Hw {
            entries: [AtomicU64::new(OLD), AtomicU64::new(OLD)],
            remembered: (0..cpus).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
            passive: Mutex::new(()),
        };
        let (each, inboxes): (Vec<_>, Vec<_>) = (0..cpus).map(|_| (TlbCpu::default(), AtomicU64::new(0))).unzip();
        // SAFETY: these are the CPUs of the tests' contexts.
        let shootdown = unsafe { TlbShootdown::new(&each, &inboxes, &hw) }.expect("fits");
        // SAFETY: the only space; what is walked is the model's own.
        let space = unsafe { TlbSpace::new(&shootdown, PhysAddr::new(0x1000)) }.expect("fits");
        // SAFETY: one machine.
        let deferred = unsafe { DeferredUnmap::new(&shootdown) }.expect("fits");
        let (done, lock, memory) = (AtomicU64::new(0), Mutex::new(()), UnsafeCell::new(()));
        Arc::new(Machine { cpus: each, inboxes, hw, space, deferred, done, lock, memory })
    }

    /// Runs `f` as a CPU.
    fn on<R>(&self, cpu: u32, f: impl FnOnce(&TlbShootdown<'_, &Hw>, &CpuCx<'_, Player>) -> R) -> R {
        let platform = Player(CpuId::new(cpu), Counters::default());
        // SAFETY: the only context on this thread; and the slices belong together.
        let (cx, shootdown) =
            unsafe { (CpuCx::new(&platform), TlbShootdown::new(&self.cpus, &self.inboxes, &self.hw)) };
        f(&shootdown.expect("fits"), &cx)
    }

    /// Has a CPU load the space and use both entries.
    fn warm(&self, cpu: u32) {
        self.on(cpu, |shootdown, cx| {
            self.space.switch_in(shootdown, cx);
            for entry in 0..2 {
                assert_eq!(self.hw.translate(CpuId::new(cpu), entry), OLD);
            }
        });
    }

    /// Changes an entry and flushes it.
    fn change(&self, cpu: u32, entry: usize, tables: bool) {
        self.on(cpu, |shootdown, cx| {
            self.hw.entries[entry].store(NEW, Ordering::Relaxed);
            let mut batch = ShootdownBatch::new(&self.space);
            let debt = batch.unhooked((), Hw::entry_range(entry), PageSize::Size4K, tables);
            let receipt = batch.flush(shootdown, cx, &ShootdownPolicy::BATCHED);
            debt.release(&receipt).expect("paid");
        });
    }

    /// Changes an entry as reclaim does, which flushes later.
    fn unmap(&self, entry: usize) -> Debt<'_> {
        self.hw.entries[entry].store(NEW, Ordering::Relaxed);
        self.deferred.unmapped(&self.space, (), Hw::entry_range(entry))
    }

    fn pay(&self, cpu: u32, debt: Debt<'_>) {
        self.on(cpu, |shootdown, cx| debt.release(&self.deferred.flush(shootdown, cx)).expect("paid"));
    }

    fn unmap_deferred(&self, cpu: u32, entry: usize) {
        let debt = self.unmap(entry);
        self.pay(cpu, debt);
    }

    fn finish(&self) {
        self.done.fetch_add(1, Ordering::AcqRel);
    }

    /// Serves until `asking` CPUs have nothing more to ask.
    fn serve_until(&self, cpu: u32, asking: u64) {
        self.on(cpu, |shootdown, cx| {
            // A read-modify-write always sees the latest value; a load may see an old one for ever.
            while self.done.fetch_add(0, Ordering::AcqRel) < asking {
                shootdown.handle_ipi(cx);
                spin_loop();
            }
        });
    }

    fn assert_not_stale(&self, cpu: u32, entry: usize) {
        assert_ne!(self.hw.remembered[cpu as usize][entry].load(Ordering::Relaxed), OLD, "stale translation in use");
    }
}

/// Every interleaving, of so many preemptions, of what CPU 0 does with what `other` does, on a machine that has been `set` up.
fn two(bound: usize, cpus: usize, set: fn(&Machine), other: fn(&Machine), own: fn(&Machine)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(bound));
    model.max_branches = 20_000;
    model.check(move || {
        let machine = Machine::new(cpus);
        set(&machine);
        let others = Arc::clone(&machine);
        let thread = thread::spawn(move || other(&others));
        own(&machine);
        thread.join().unwrap();
    });
}

/// A test of a scenario, and one for each set of fences without which it has to show the rule broken.
macro_rules! scenario {
    ($(#[$about:meta])* $name:ident: $run:expr; $($without:ident: $fences:expr),*) => {
        $(#[$about])*
        #[test]
        fn $name() {
            $run
        }
        $(#[test]
        #[should_panic(expected = "stale")]
        fn $without() {
            let _removed = FencePoint::remove_all(&$fences);
            $run
        })*
    };
}

/// CPU 1 has used the space and left it.
fn left(machine: &Machine) {
    machine.warm(1);
    machine.on(1, |shootdown, cx| machine.space.switch_out(shootdown, cx));
}

/// CPU 1 is lazy in the space that it has used.
fn lazy(machine: &Machine) {
    machine.warm(1);
    // SAFETY: it uses no address before it wakes.
    machine.on(1, |shootdown, cx| unsafe { machine.space.enter_lazy(shootdown, cx) });
}

/// CPU 1 loads the space and uses the entry that is changed meanwhile.
fn enter(machine: &Machine) {
    machine.on(1, |shootdown, cx| machine.space.switch_in(shootdown, cx));
    machine.hw.translate(CpuId::new(1), 0);
    machine.serve_until(1, 1);
    machine.assert_not_stale(1, 0);
}

fn change(machine: &Machine) {
    machine.change(0, 0, false);
    machine.finish();
}

// Both: that of `due` comes before the count as well, and would do its work.
const BEFORE: [FencePoint; 2] = [FencePoint::BeforeGeneration, FencePoint::Unhooked];

scenario! {
    /// CPU 1 remembers the old entry under the space's tag and loads the space while CPU 0 changes the entry and flushes.
    a_cpu_that_joins_is_asked_or_sees_the_generation: two(3, 2, left, enter, change);
    joining_without_the_fence_after_the_mask_bit: [FencePoint::AfterJoining],
    joining_without_the_fence_after_the_generation: [FencePoint::AfterGeneration],
    joining_without_the_fence_before_the_generation: BEFORE
}

scenario! {
    /// CPU 1 is lazy and wakes while CPU 0 changes the entry and flushes.
    a_lazy_cpu_is_asked_or_catches_up: two(3, 2, lazy, enter, change);
    waking_without_its_fence: [FencePoint::AfterWaking],
    waking_without_the_fence_after_the_generation: [FencePoint::AfterGeneration],
    waking_without_the_fence_before_the_generation: BEFORE
}

/// A lazy CPU still walks: a batch that frees tables asks it, and its answer comes before the table is used otherwise.
#[test]
fn tables_are_freed_after_lazy_cpus_have_answered() {
    let walk = |machine: &Machine| {
        // A speculative walk, while the table is remembered.
        if machine.hw.remembered[1][0].load(Ordering::Relaxed) == OLD {
            machine.memory.with(|_| ());
        }
        machine.serve_until(1, 1);
    };
    two(3, 2, lazy, walk, |machine| {
        machine.change(0, 0, true);
        machine.assert_not_stale(1, 0);
        // loom reports an access of the walker that is not ordered before this one.
        machine.memory.with_mut(|_| ());
        machine.finish();
    });
}

/// What a CPU did through its translations before it became lazy, or left, comes before the frame is used otherwise.
#[test]
fn accesses_before_laziness_come_before_the_reuse() {
    fn use_and(machine: &Machine, ends: impl FnOnce(&TlbShootdown<'_, &Hw>, &CpuCx<'_, Player>)) {
        machine.memory.with_mut(|_| ());
        machine.on(1, ends);
        machine.serve_until(1, 1);
    }
    let reuse = |machine: &Machine| {
        machine.change(0, 0, false);
        machine.memory.with_mut(|_| ());
        machine.finish();
    };
    let leave = |machine: &Machine| use_and(machine, |shootdown, cx| machine.space.switch_out(shootdown, cx));
    // SAFETY: it uses no address any more.
    let idle = |machine: &Machine| use_and(machine, |shootdown, cx| unsafe { machine.space.enter_lazy(shootdown, cx) });
    two(3, 2, |machine| machine.warm(1), leave, reuse);
    two(3, 2, |machine| machine.warm(1), idle, reuse);
}

/// All targets have answered, and have done so before the initiator goes on; its next request is another one.
#[test]
fn acknowledgements_are_complete() {
    two(
        2,
        2,
        |machine| machine.warm(1),
        |machine| machine.serve_until(1, 1),
        |machine| {
            for entry in 0..2 {
                machine.change(0, entry, false);
                machine.assert_not_stale(1, entry);
            }
            machine.finish();
        },
    );
}

/// Two CPUs shoot at each other at the same time: each serves while it waits, so both get through.
#[test]
fn two_initiators_serve_each_other() {
    fn shoot(machine: &Machine, cpu: u32) {
        machine.change(cpu, cpu as usize, false);
        machine.assert_not_stale(1 - cpu, cpu as usize);
        machine.finish();
        machine.serve_until(cpu, 2);
    }
    two(
        3,
        2,
        |machine| (0..2).for_each(|cpu| machine.warm(cpu)),
        |machine| shoot(machine, 1),
        |machine| shoot(machine, 0),
    );
}

/// Requests of two initiators may reach a CPU in either order, the later generation first.
#[test]
fn overtaking_requests_leave_nothing_stale() {
    fn shoot(machine: &Machine, cpu: u32) {
        machine.change(cpu, cpu as usize, false);
        machine.assert_not_stale(PASSIVE, cpu as usize);
    }
    two(3, 3, |machine| machine.warm(PASSIVE), |machine| shoot(machine, 1), |machine| shoot(machine, 0));
}

/// Two reclaimers share a batch: whichever flush takes a CPU out of the mask has its answer before either page is freed.
#[test]
fn deferred_unmaps_are_flushed_before_their_pages_are_freed() {
    fn reclaim(machine: &Machine, cpu: u32) {
        machine.unmap_deferred(cpu, cpu as usize);
        machine.assert_not_stale(PASSIVE, cpu as usize);
    }
    two(3, 3, |machine| machine.warm(PASSIVE), |machine| reclaim(machine, 1), |machine| reclaim(machine, 0));
}

/// A CPU loads the space while its page is unmapped and the flush deferred.
#[test]
fn a_cpu_that_joins_during_a_deferred_unmap_catches_up() {
    two(3, 2, left, enter, |machine| {
        machine.unmap_deferred(0, 0);
        machine.finish();
    });
}

/// Whoever finds an entry changed by a deferred unmap settles it before relying on it.
fn rely(machine: &Machine) {
    machine.on(1, |shootdown, cx| {
        let _locked = machine.lock.lock().unwrap();
        if machine.hw.entries[0].load(Ordering::Relaxed) == NEW {
            machine.space.settle(shootdown, cx);
            machine.assert_not_stale(PASSIVE, 0);
        }
    });
}

#[test]
fn whoever_relies_on_an_entry_settles_it_first() {
    two(
        3,
        3,
        |machine| machine.warm(PASSIVE),
        rely,
        |machine| {
            let locked = machine.lock.lock().unwrap();
            let debt = machine.unmap(0);
            drop(locked);
            machine.pay(0, debt);
        },
    );
}

/// Unmapping is done under the lock, as it must be.
#[test]
#[should_panic(expected = "stale")]
fn unmapping_outside_the_lock() {
    two(3, 3, |machine| machine.warm(PASSIVE), rely, |machine| machine.unmap_deferred(0, 0));
}
