//! One task at a time on a CPU that is pinned; an interrupt wherever one could come.

use crate::lock::{locks_held, this_thread};
use crate::memory::Memory;
use hugemm_base::platform::{Cpu, LinearMap, PhysMap, PreemptModel, Window};
use hugemm_base::{Counters, CpuCx, CpuId, Extent, Ram, VirtAddr};
use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How many CPUs there are.
pub const CPUS: usize = 8;

/// An interrupt handler, lent by the call of [`Threads::interrupted`] that runs on this thread.
type Handler = *mut (dyn FnMut() + 'static);

thread_local! {
    static CPU: Cell<u32> = const { Cell::new(0) };
    /// Pins that have not ended. A handler runs with one.
    static PINS: Cell<usize> = const { Cell::new(0) };
    /// CPUs that the thread has to itself.
    static HELD: Cell<usize> = const { Cell::new(0) };
    static HANDLER: RefCell<Option<Handler>> = const { RefCell::new(None) };
}

/// Makes the calling thread a task of the CPU `cpu`. Threads with one number exclude each other where they are pinned. An
/// interrupt handler may be on another CPU meanwhile, as one that came there.
///
/// # Panics
///
/// If `cpu` is not below [`CPUS`], or the thread is pinned or stays.
pub fn run_as(cpu: u32) {
    assert!((cpu as usize) < CPUS, "there are {CPUS} CPUs, and no cpu{cpu}");
    assert_eq!(HELD.get(), 0, "a task that is pinned or stays changes its CPU");
    CPU.set(cpu);
}

/// Which CPU the calling thread is.
pub fn this_cpu() -> usize {
    CPU.get() as usize
}

/// An interrupt may come here: the calling thread's handler runs, unless the CPU is pinned or the thread has none.
pub fn interrupt_point() {
    if PINS.get() != 0 || std::thread::panicking() {
        return;
    }
    let Some(handler) = HANDLER.with_borrow(|handler| *handler) else { return };
    PINS.set(1);
    let _on_again = Restore(&PINS, 0);
    // SAFETY: `interrupted` lends the handler until it returns, on this thread; it is not running already, because it runs
    // pinned.
    unsafe { (*handler)() }
}

/// Puts a thread's word back, also when unwinding.
struct Restore(&'static std::thread::LocalKey<Cell<usize>>, usize);

impl Drop for Restore {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Puts the former handler back.
struct Former(Option<Handler>);

impl Drop for Former {
    fn drop(&mut self) {
        HANDLER.set(self.0);
    }
}

/// A machine whose CPUs are threads, with any idea of memory.
#[derive(Debug, Default)]
pub struct Threads<M = ()> {
    counters: [Counters; CPUS],
    /// Which thread has each CPU to itself; 0 if none.
    occupants: [AtomicUsize; CPUS],
    /// Whether all of them are where nobody may sleep. A pinned one is there anyway.
    pub atomic: AtomicBool,
    memory: M,
}

impl Threads<Memory> {
    /// A machine with so many bytes of zeroed memory, and the memory, owned.
    ///
    /// # Panics
    ///
    /// If that is nothing, or more than there is.
    pub fn with_memory(bytes: u64) -> (Self, Ram) {
        let (memory, ram) = Memory::of_frames(bytes);
        (Threads::new(memory), ram)
    }
}

impl<M> Threads<M> {
    /// A machine with this memory.
    pub fn new(memory: M) -> Self {
        Threads { counters: Default::default(), occupants: Default::default(), atomic: AtomicBool::new(false), memory }
    }

    /// The calling thread's context.
    pub fn cx(&self) -> CpuCx<'_, Threads<M>> {
        // SAFETY: a thread may have several: reschedule points only yield, and refuse to where it is pinned through another
        // one; and the operating system fences when it switches threads. An interrupt's is another task's.
        unsafe { CpuCx::new(self) }
    }

    /// Waits until the thread has its CPU to itself; whether it had not before.
    fn occupy(&self) -> bool {
        let (occupant, me) = (&self.occupants[this_cpu()], this_thread());
        // Relaxed: what this thread itself stored, it sees; nobody else stores its number.
        if occupant.load(Ordering::Relaxed) == me {
            return false;
        }
        // Acquire pairs with the Release in `vacate`: whoever had the CPU has written its per-CPU data before. Relaxed: a
        // failure says only that somebody has it.
        while occupant.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
        HELD.set(HELD.get() + 1);
        true
    }

    /// Ends an `occupy`, of which `began` is the answer.
    fn vacate(&self, began: bool) {
        if began {
            HELD.set(HELD.get() - 1);
            // Release pairs with the Acquire in `occupy`.
            self.occupants[this_cpu()].store(0, Ordering::Release);
        }
    }

    /// Runs `body` on the calling thread, and `handler` at every point of it where an interrupt could come (see the
    /// [crate's documentation](crate)).
    pub fn interrupted<R>(
        &self,
        mut handler: impl FnMut(&mut CpuCx<'_, Threads<M>>),
        body: impl FnOnce(&mut CpuCx<'_, Threads<M>>) -> R,
    ) -> R {
        let mut call = || handler(&mut self.cx());
        let lent: *mut (dyn FnMut() + '_) = &raw mut call;
        // SAFETY: only the lifetime is changed; nobody has the pointer any more when this call ends, for then the former
        // handler is back.
        let lent = unsafe { core::mem::transmute::<*mut (dyn FnMut() + '_), Handler>(lent) };
        let _former = Former(HANDLER.replace(Some(lent)));
        body(&mut self.cx())
    }

    /// The most by which a count of this thread's grows under one pin of `body`: between two points where an interrupt could come.
    pub fn most_in_a_pin(&self, count: impl Fn() -> u64, body: impl FnOnce(&mut CpuCx<'_, Threads<M>>)) -> u64 {
        let (mut last, mut most) = (count(), 0);
        let mut look = || {
            most = most.max(count() - last);
            last = count();
        };
        self.interrupted(|_| look(), body);
        look();
        most
    }
}

impl<M> Deref for Threads<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.memory
    }
}

// SAFETY: staying: a thread that is pinned or stays has its CPU's word in `occupants`, so no other thread that pins or stays
// runs there, and does not change its number; a pinned one runs no interrupt handler. Rescheduling: the operating system
// fences when it switches threads. Barriers: the hardware's. Vector registers: none are granted. Its address is its own.
unsafe impl<M> Cpu for Threads<M> {
    #[inline]
    fn current(&self) -> CpuId {
        interrupt_point();
        CpuId::new(CPU.get())
    }

    unsafe fn pin(&self) -> usize {
        interrupt_point();
        let began = self.occupy();
        PINS.replace(PINS.get() + 1) << 1 | usize::from(began)
    }

    unsafe fn unpin(&self, state: usize) {
        let before = state >> 1;
        let pins = PINS.replace(before);
        self.vacate(state & 1 != 0);
        assert!(pins == before + 1 || std::thread::panicking(), "pin {before} ended while there were {pins}");
        interrupt_point();
    }

    unsafe fn stay(&self) -> usize {
        usize::from(self.occupy())
    }

    unsafe fn unstay(&self, state: usize) {
        self.vacate(state != 0);
    }

    fn cpus(&self) -> u32 {
        CPUS as u32
    }

    fn interrupts_on(&self) -> bool {
        PINS.get() == 0
    }

    fn preempt_model(&self) -> PreemptModel {
        interrupt_point();
        PreemptModel::Full
    }

    fn may_sleep(&self) -> bool {
        interrupt_point();
        // Relaxed: nothing is published by it.
        PINS.get() == 0 && !self.atomic.load(Ordering::Relaxed)
    }

    unsafe fn cond_resched(&self) {
        assert!(PINS.get() == 0 && HELD.get() == 0, "rescheduled while pinned");
        assert_eq!(locks_held(), 0, "rescheduled with locks held");
        interrupt_point();
        std::thread::yield_now();
    }

    fn store_fence(&self) {
        interrupt_point();
        hugemm_base::barriers::hardware_store_fence();
    }

    fn publish_barrier(&self) {
        hugemm_base::barriers::hardware_publish_barrier();
        interrupt_point();
    }

    fn counters(&self) -> &Counters {
        interrupt_point();
        &self.counters[this_cpu()]
    }
}

// SAFETY: the memory's own promises.
unsafe impl<M: PhysMap> PhysMap for Threads<M> {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        interrupt_point();
        self.memory.open(extent, user)
    }

    unsafe fn close(&self, window: Window) {
        // SAFETY: passed on.
        unsafe { self.memory.close(window) }
        interrupt_point();
    }
}

// SAFETY: the memory's own promise.
unsafe impl<M: LinearMap> LinearMap for Threads<M> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TestLock;
    use hugemm_base::lock::{Lock, PinnedLock};

    #[test]
    fn interrupts_come_where_nothing_is_pinned_and_nowhere_else() {
        let threads: Threads = Threads::default();
        let (came, outer) = (Cell::new(0), Cell::new(0));
        let handler = |cx: &mut CpuCx<'_, Threads>| {
            came.set(came.get() + 1);
            assert!(!cx.platform().interrupts_on() && !cx.platform().may_sleep());
            // Not into itself.
            cx.pinned(|_| ());
        };
        threads.interrupted(handler, |cx| {
            cx.pinned(|_| {
                outer.set(came.get());
                assert_eq!(outer.get(), 1, "before the pin");
                cx.pinned(|_| threads.counters().reschedules.add(1));
                threads.preempt_model();
                assert_eq!(came.get(), outer.get(), "pinned, also when an inner pin has ended");
            });
            assert_eq!(came.get(), 2, "after the pin");
            let _ = threads.counters();
            cx.cond_resched();
            assert_eq!(came.get(), 5, "counters, the count of reschedules, and itself");
        });
        threads.counters().reschedules.add(1);
        assert_eq!(came.get(), 5, "nobody handles them any more");
    }

    #[test]
    fn a_lock_that_is_pinned_may_be_wanted_by_interrupts() {
        let threads: Threads = Threads::default();
        let count: PinnedLock<TestLock, u32> = PinnedLock::new(0);
        let handler = |cx: &mut CpuCx<'_, Threads>| cx.pinned(|pin| *count.lock(pin) += 1);
        let seen = threads.interrupted(handler, |cx| {
            cx.pinned(|pin| *count.lock(pin) += 100);
            cx.pinned(|pin| *count.try_lock(pin).expect("nobody has it"))
        });
        assert_eq!(seen, 103, "around the first pin and before the second");
    }

    #[test]
    #[should_panic(expected = "cpu3 wants a lock that it holds")]
    fn a_lock_that_is_not_pinned_must_not() {
        run_as(3);
        let threads: Threads = Threads::default();
        let count: Lock<TestLock, u32> = Lock::new(0);
        threads.interrupted(|_| *count.lock() += 1, |_| *count.lock() += 100);
    }

    #[test]
    #[should_panic(expected = "wants a lock that it holds")]
    fn trying_is_no_better() {
        let threads: Threads = Threads::default();
        let count: Lock<TestLock, u32> = Lock::new(0);
        threads.interrupted(|_| *count.lock() += 1, |_| count.try_lock().map(|mut count| *count += 100));
    }

    #[test]
    #[should_panic(expected = "rescheduled while pinned")]
    fn a_pinned_task_stays() {
        let threads: Threads = Threads::default();
        // SAFETY: none; that is the point, and the platform looks.
        threads.cx().pinned(|_| unsafe { threads.cond_resched() });
    }

    #[test]
    #[should_panic(expected = "rescheduled with locks held")]
    fn a_task_that_has_a_lock_runs_on() {
        let threads: Threads = Threads::default();
        let lock: Lock<TestLock, ()> = Lock::new(());
        let _held = lock.lock();
        threads.cx().cond_resched();
    }

    #[test]
    fn a_pin_ends_when_its_scope_unwinds() {
        let threads: Threads = Threads::default();
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            threads.cx().pinned(|_| std::panic::resume_unwind(Box::new(1)))
        }));
        assert!(unwound.is_err());
        assert!(threads.interrupts_on());
    }

    #[test]
    fn threads_with_one_number_exclude_each_other_where_they_are_pinned_or_stay() {
        let (threads, inside, rounds) =
            (Threads::<()>::default(), AtomicUsize::new(0), if cfg!(miri) { 20 } else { 2000 });
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    run_as(5);
                    let cx = threads.cx();
                    let alone = || {
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0, "another one is on this CPU");
                        cx.pinned(|pin| assert_eq!(pin.cpu(), CpuId::new(5)));
                        inside.fetch_sub(1, Ordering::Relaxed);
                    };
                    for _ in 0..rounds {
                        cx.pinned(|_| alone());
                        cx.staying(alone);
                    }
                });
            }
        });
    }

    #[test]
    fn a_task_that_has_a_cpu_to_itself_keeps_its_number() {
        let threads: Threads = Threads::default();
        let cx = threads.cx();
        let change = || std::panic::catch_unwind(|| run_as(1)).is_err();
        assert!(cx.pinned(|_| change()) && cx.staying(change) && !change());
        assert!(std::panic::catch_unwind(|| run_as(CPUS as u32)).is_err());
    }
}
