//! loom runs the shipped shootdown protocol through every interleaving (bounded by `LOOM_MAX_PREEMPTIONS`):
//! `RUSTFLAGS="--cfg loom" cargo test --release -p hugemm-paging --test loom_shootdown`.
//!
//! The TLB of a CPU is one remembered translation per entry, kept until invalidated. The rule is always the same: when a
//! flush is over, no CPU uses an old translation any more. Each fence of the protocol has a test that shows the rule
//! broken without it.
#![cfg(loom)]

use hugemm_base::sync::{AtomicU64, FencePoint, Ordering, spin_loop};
use hugemm_base::{
    Counters, Cpu, CpuCx, CpuId, Invalidation, PageSize, PhysAddr, PreemptModel, TlbHw, TlbScope, VirtAddr, VirtRange,
};
use hugemm_paging::{DeferredUnmap, ShootdownBatch, ShootdownPolicy, TlbCpu, TlbShootdown, TlbSpace, UserSpace};
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
        let slot = &self.remembered[cpu.0 as usize][entry];
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
                self.remembered[cpu.0 as usize][entry].store(0, Ordering::Relaxed);
            }
        }
    }

    fn interrupt(&self, _cpu: CpuId, _first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        if cpus & 1 << PASSIVE != 0 {
            let _one = self.passive.lock().unwrap();
            serve(CpuId(PASSIVE));
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
}

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
        let (done, lock) = (AtomicU64::new(0), Mutex::new(()));
        Arc::new(Machine { cpus: each, inboxes, hw, space, deferred, done, lock })
    }

    /// Runs `f` as a CPU.
    fn on<R>(&self, cpu: u32, f: impl FnOnce(&TlbShootdown<'_, &Hw>, &CpuCx<'_, Player>) -> R) -> R {
        let platform = Player(CpuId(cpu), Counters::default());
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
                assert_eq!(self.hw.translate(CpuId(cpu), entry), OLD);
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

fn check(bound: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(bound));
    model.max_branches = 20_000;
    model.check(f);
}

/// CPU 1 remembers the old entry under the space's tag and loads the space while CPU 0 changes the entry and flushes.
fn joining() {
    check(3, || {
        let machine = Machine::new(2);
        machine.warm(1);
        machine.on(1, |shootdown, cx| machine.space.switch_out(shootdown, cx));
        let other = Arc::clone(&machine);
        let joiner = thread::spawn(move || {
            other.on(1, |shootdown, cx| other.space.switch_in(shootdown, cx));
            other.hw.translate(CpuId(1), 0);
            other.serve_until(1, 1);
            other.assert_not_stale(1, 0);
        });
        machine.change(0, 0, false);
        machine.finish();
        joiner.join().unwrap();
    });
}

#[test]
fn a_cpu_that_joins_is_asked_or_sees_the_generation() {
    joining();
}

#[test]
#[should_panic(expected = "stale")]
fn joining_without_the_fence_after_the_mask_bit() {
    let _removed = FencePoint::AfterJoining.remove();
    joining();
}

#[test]
#[should_panic(expected = "stale")]
fn joining_without_the_fence_after_the_generation() {
    let _removed = FencePoint::AfterGeneration.remove();
    joining();
}

#[test]
#[should_panic(expected = "stale")]
fn joining_without_the_fence_before_the_generation() {
    // Both: that of `due` comes before the count as well, and would do its work.
    let _removed = FencePoint::remove_all(&[FencePoint::BeforeGeneration, FencePoint::Unhooked]);
    joining();
}

/// CPU 1 is lazy and wakes while CPU 0 changes the entry and flushes.
fn waking() {
    check(3, || {
        let machine = Machine::new(2);
        machine.warm(1);
        // SAFETY: it uses no address before it wakes.
        machine.on(1, |shootdown, cx| unsafe { machine.space.enter_lazy(shootdown, cx) });
        let other = Arc::clone(&machine);
        let waker = thread::spawn(move || {
            other.on(1, |shootdown, cx| other.space.switch_in(shootdown, cx));
            other.hw.translate(CpuId(1), 0);
            other.serve_until(1, 1);
            other.assert_not_stale(1, 0);
        });
        machine.change(0, 0, false);
        machine.finish();
        waker.join().unwrap();
    });
}

#[test]
fn a_lazy_cpu_is_asked_or_catches_up() {
    waking();
}

#[test]
#[should_panic(expected = "stale")]
fn waking_without_its_fence() {
    let _removed = FencePoint::AfterWaking.remove();
    waking();
}

#[test]
#[should_panic(expected = "stale")]
fn waking_without_the_fence_after_the_generation() {
    let _removed = FencePoint::AfterGeneration.remove();
    waking();
}

#[test]
#[should_panic(expected = "stale")]
fn waking_without_the_fence_before_the_generation() {
    let _removed = FencePoint::remove_all(&[FencePoint::BeforeGeneration, FencePoint::Unhooked]);
    waking();
}

/// A lazy CPU still walks: a batch that frees tables asks it, and its answer comes before the table is used otherwise.
#[test]
fn tables_are_freed_after_lazy_cpus_have_answered() {
    check(3, || {
        let machine = Machine::new(2);
        machine.warm(1);
        // SAFETY: it uses no address before it wakes.
        machine.on(1, |shootdown, cx| unsafe { machine.space.enter_lazy(shootdown, cx) });
        let table = Arc::new(UnsafeCell::new(0));
        let (other, walked) = (Arc::clone(&machine), Arc::clone(&table));
        let lazy = thread::spawn(move || {
            // A speculative walk, while the table is remembered.
            if other.hw.remembered[1][0].load(Ordering::Relaxed) == OLD {
                walked.with(|_| ());
            }
            other.serve_until(1, 1);
        });
        machine.change(0, 0, true);
        machine.assert_not_stale(1, 0);
        // loom reports an access of the walker that is not ordered before this one.
        table.with_mut(|_| ());
        machine.finish();
        lazy.join().unwrap();
    });
}

/// What a CPU did through its translations before it became lazy, or left, comes before the frame is used otherwise.
#[test]
fn accesses_before_laziness_come_before_the_reuse() {
    for leaves in [false, true] {
        check(3, move || {
            let machine = Machine::new(2);
            machine.warm(1);
            let frame = Arc::new(UnsafeCell::new(0));
            let (other, used) = (Arc::clone(&machine), Arc::clone(&frame));
            let user = thread::spawn(move || {
                used.with_mut(|_| ());
                other.on(1, |shootdown, cx| match leaves {
                    true => other.space.switch_out(shootdown, cx),
                    // SAFETY: it uses no address any more.
                    false => unsafe { other.space.enter_lazy(shootdown, cx) },
                });
                other.serve_until(1, 1);
            });
            machine.change(0, 0, false);
            frame.with_mut(|_| ());
            machine.finish();
            user.join().unwrap();
        });
    }
}

/// All targets have answered, and have done so before the initiator goes on; its next request is another one.
#[test]
fn acknowledgements_are_complete() {
    check(2, || {
        let machine = Machine::new(2);
        machine.warm(1);
        let other = Arc::clone(&machine);
        let target = thread::spawn(move || other.serve_until(1, 1));
        for entry in 0..2 {
            machine.change(0, entry, false);
            machine.assert_not_stale(1, entry);
        }
        machine.finish();
        target.join().unwrap();
    });
}

/// Two CPUs shoot at each other at the same time: each serves while it waits, so both get through.
#[test]
fn two_initiators_serve_each_other() {
    check(3, || {
        let machine = Machine::new(2);
        machine.warm(0);
        machine.warm(1);
        let other = Arc::clone(&machine);
        let peer = thread::spawn(move || {
            other.change(1, 1, false);
            other.assert_not_stale(0, 1);
            other.finish();
            other.serve_until(1, 2);
        });
        machine.change(0, 0, false);
        machine.assert_not_stale(1, 0);
        machine.finish();
        machine.serve_until(0, 2);
        peer.join().unwrap();
    });
}

/// Requests of two initiators may reach a CPU in either order, the later generation first.
#[test]
fn overtaking_requests_leave_nothing_stale() {
    check(3, || {
        let machine = Machine::new(3);
        machine.warm(PASSIVE);
        let other = Arc::clone(&machine);
        let initiator = thread::spawn(move || {
            other.change(1, 1, false);
            other.assert_not_stale(PASSIVE, 1);
        });
        machine.change(0, 0, false);
        machine.assert_not_stale(PASSIVE, 0);
        initiator.join().unwrap();
    });
}

/// Two reclaimers share a batch: whichever flush takes a CPU out of the mask has its answer before either page is freed.
#[test]
fn deferred_unmaps_are_flushed_before_their_pages_are_freed() {
    check(3, || {
        let machine = Machine::new(3);
        machine.warm(PASSIVE);
        let reclaim = |machine: &Machine, cpu: u32, entry: usize| {
            machine.on(cpu, |shootdown, cx| {
                machine.hw.entries[entry].store(NEW, Ordering::Relaxed);
                let debt = machine.deferred.unmapped(&machine.space, (), Hw::entry_range(entry));
                let receipt = machine.deferred.flush(shootdown, cx);
                debt.release(&receipt).expect("paid");
            });
            machine.assert_not_stale(PASSIVE, entry);
        };
        let second = Arc::clone(&machine);
        let other = thread::spawn(move || reclaim(&second, 1, 1));
        reclaim(&machine, 0, 0);
        other.join().unwrap();
    });
}

/// A CPU loads the space while its page is unmapped and the flush deferred.
#[test]
fn a_cpu_that_joins_during_a_deferred_unmap_catches_up() {
    check(3, || {
        let machine = Machine::new(2);
        machine.warm(1);
        machine.on(1, |shootdown, cx| machine.space.switch_out(shootdown, cx));
        let other = Arc::clone(&machine);
        let joiner = thread::spawn(move || {
            other.on(1, |shootdown, cx| other.space.switch_in(shootdown, cx));
            other.hw.translate(CpuId(1), 0);
            other.serve_until(1, 1);
            other.assert_not_stale(1, 0);
        });
        machine.on(0, |shootdown, cx| {
            machine.hw.entries[0].store(NEW, Ordering::Relaxed);
            let debt = machine.deferred.unmapped(&machine.space, (), Hw::entry_range(0));
            debt.release(&machine.deferred.flush(shootdown, cx)).expect("paid");
        });
        machine.finish();
        joiner.join().unwrap();
    });
}

/// Whoever finds an entry changed by a deferred unmap settles it before relying on it. `locked`: unmapping is done under
/// the lock, as it must be.
fn relying(locked: bool) {
    check(3, move || {
        let machine = Machine::new(3);
        machine.warm(PASSIVE);
        let other = Arc::clone(&machine);
        let relier = thread::spawn(move || {
            other.on(1, |shootdown, cx| {
                let _locked = other.lock.lock().unwrap();
                if other.hw.entries[0].load(Ordering::Relaxed) == NEW {
                    other.space.settle(shootdown, cx);
                    other.assert_not_stale(PASSIVE, 0);
                }
            });
        });
        let debt = {
            let _guard = locked.then(|| machine.lock.lock().unwrap());
            machine.hw.entries[0].store(NEW, Ordering::Relaxed);
            machine.deferred.unmapped(&machine.space, (), Hw::entry_range(0))
        };
        machine.on(0, |shootdown, cx| debt.release(&machine.deferred.flush(shootdown, cx)).expect("paid"));
        relier.join().unwrap();
    });
}

#[test]
fn whoever_relies_on_an_entry_settles_it_first() {
    relying(true);
}

#[test]
#[should_panic(expected = "stale")]
fn unmapping_outside_the_lock() {
    relying(false);
}
