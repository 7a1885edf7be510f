//! What a context asks of its platform, and when: on a platform that writes it down.

use hugemm_base::lock::{PinnedLock, SpinLock};
use hugemm_base::platform::{Cpu, PreemptModel};
use hugemm_base::{Counters, CpuCx, CpuId, Never, Unfenced};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::AtomicBool;

#[derive(Default)]
struct Recorder {
    asked: RefCell<Vec<String>>,
    counters: Counters,
    vector: bool,
    states: Cell<usize>,
    pins: Cell<usize>,
}

impl Recorder {
    fn note(&self, what: impl Into<String>) {
        self.asked.borrow_mut().push(what.into());
    }

    fn state(&self, what: &str) -> usize {
        self.states.set(self.states.get() + 1);
        self.note(format!("{what} {}", self.states.get()));
        self.states.get()
    }

    fn cx(&self) -> CpuCx<'_, Recorder> {
        // SAFETY: each test has one at a time.
        unsafe { CpuCx::new(self) }
    }

    /// What was asked since the last look.
    fn asked(&self) -> Vec<String> {
        self.asked.take()
    }
}

// SAFETY: each test runs on one thread, and nothing interrupts it. The operating system fences when it switches
// threads. Nobody else reads what the tests store. A process's registers are its own, and the operating system saves
// them.
unsafe impl Cpu for Recorder {
    fn current(&self) -> CpuId {
        CpuId::new(3)
    }

    unsafe fn pin(&self) -> usize {
        self.pins.set(self.pins.get() + 1);
        self.state("pin")
    }

    unsafe fn unpin(&self, state: usize) {
        self.pins.set(self.pins.get() - 1);
        self.note(format!("unpin {state}"));
    }

    fn cpus(&self) -> u32 {
        4
    }

    fn interrupts_on(&self) -> bool {
        self.pins.get() == 0
    }

    unsafe fn stay(&self) -> usize {
        self.state("stay")
    }

    unsafe fn unstay(&self, state: usize) {
        self.note(format!("unstay {state}"));
    }

    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::Lazy
    }

    unsafe fn cond_resched(&self) {
        self.note("reschedule");
    }

    unsafe fn migrate(&self, to: CpuId) -> bool {
        self.note(format!("migrate to {to}"));
        to != CpuId::new(9)
    }

    fn store_fence(&self) {
        self.note("fence");
    }

    fn publish_barrier(&self) {
        self.note("publish");
    }

    unsafe fn vector_begin(&self) -> bool {
        self.note("vector begin");
        self.vector
    }

    unsafe fn vector_end(&self) {
        self.note("vector end");
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn debt_dropped(&self, barrier: &'static str) {
        self.note(format!("dropped {barrier}"));
    }
}

#[test]
fn scopes_end_in_reverse_order_and_give_their_own_state_back() {
    let platform = Recorder::default();
    let cx = platform.cx();
    let cpu = cx.pinned(|outer| cx.staying(|| cx.pinned(|inner| (outer.cpu(), inner.cpu()))));
    assert_eq!(cpu, (CpuId::new(3), CpuId::new(3)));
    assert_eq!(platform.asked(), ["pin 1", "stay 2", "pin 3", "unpin 3", "unstay 2", "unpin 1"]);
}

/// A fault of the kernel's own where it may be interrupted has a context, after a fence for what streamed; a pinned one has none.
#[test]
fn a_fault_under_a_pin_has_no_context() {
    let platform = Recorder::default();
    // SAFETY: the test waits for it, and its interrupts are as the recorder says.
    let of_fault = || unsafe { CpuCx::of_fault(&platform) }.is_some();
    assert!(of_fault());
    assert_eq!(platform.asked(), ["fence"]);
    assert!(!platform.cx().pinned(|_| of_fault()));
    assert_eq!(platform.asked(), ["pin 1", "unpin 1"]);
}

#[test]
fn scopes_end_when_they_unwind() {
    let platform = Recorder { vector: true, ..Recorder::default() };
    let cx = platform.cx();
    let end = || resume_unwind(Box::new(()));
    let scopes = || cx.pinned(|_| cx.staying(|| cx.with_vector(true, |_| end())));
    assert!(catch_unwind(AssertUnwindSafe(scopes)).is_err());
    assert_eq!(platform.asked(), ["pin 1", "stay 2", "vector begin", "vector end", "unstay 2", "unpin 1"]);
}

#[test]
fn vector_registers_are_asked_for_if_wanted_and_ended_if_granted() {
    for (vector, wanted, expected) in
        [(true, false, &[][..]), (false, true, &["vector begin"]), (true, true, &["vector begin", "vector end"])]
    {
        let platform = Recorder { vector, ..Recorder::default() };
        assert_eq!(platform.cx().with_vector(wanted, |token| token.is_some()), vector && wanted);
        assert_eq!(platform.asked(), expected);
    }
}

#[test]
fn points_where_a_task_may_leave_are_the_platforms_and_are_counted() {
    let platform = Recorder::default();
    let mut cx = platform.cx();
    cx.cond_resched();
    assert!(cx.migrate(CpuId::new(1)) && !cx.migrate(CpuId::new(9)));
    assert_eq!(platform.asked(), ["reschedule", "migrate to cpu1", "migrate to cpu9"]);
    assert_eq!(cx.preempt_model(), PreemptModel::Lazy);
    assert!(!cx.cancelled(&Never) && !cx.cancelled(&AtomicBool::new(false)));
    assert!(cx.cancelled(&AtomicBool::new(true)));
    let counts = platform.counters.snapshot();
    assert_eq!((counts.reschedules, counts.cancellations), (1, 1));
}

#[test]
fn a_fence_is_paid_once_and_by_whom_it_is_owed_to() {
    let (platform, other) = (Recorder::default(), Recorder::default());
    let (cx, another) = (platform.cx(), other.cx());
    assert_eq!(Unfenced::streaming(1, &cx).fence(), 1);
    assert_eq!(Unfenced::cached(2, &cx).fence(), 2);
    assert_eq!(platform.asked(), ["fence", "publish"]);
    assert_eq!(Unfenced::cached(1, &cx).join(Unfenced::streaming(2, &cx)).fence(), (1, 2));
    assert_eq!(platform.asked(), ["fence"], "the stronger pays both");
    let both = Unfenced::cached(1, &cx).join(Unfenced::streaming(2, &another));
    assert_eq!(other.asked(), ["fence"], "one platform's fence is not another's");
    both.fence();
    drop(Unfenced::streaming((), &cx));
    drop(Unfenced::cached((), &cx));
    assert_eq!(platform.asked(), ["fence", "fence", "dropped store fence", "publish", "dropped store fence"]);
    let counts = platform.counters.snapshot();
    assert_eq!((counts.fences, counts.fences_on_drop), (4, 1));
}

#[test]
fn a_pinned_lock_excludes_and_is_given_back() {
    let platform = Recorder::default();
    let cx = platform.cx();
    let lock: PinnedLock<SpinLock, u64> = PinnedLock::new(5);
    cx.pinned(|pin| {
        let mut held = lock.lock(pin);
        *held += 2;
        assert!(lock.try_lock(pin).is_none());
    });
    assert_eq!(cx.pinned(|pin| lock.try_lock(pin).map(|value| *value)), Some(7));
    assert_eq!(cx.pinned(|pin| *lock.lock(pin)), 7);
}
