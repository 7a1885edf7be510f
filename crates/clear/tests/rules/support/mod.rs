//! A platform that follows a script and keeps a record, for one thread; memory to run it and the host on; a clearer
//! that needs nothing of the CPU.

#[cfg(not(miri))]
pub(crate) mod host;
pub(crate) mod memory;

use hugemm_base::{
    Cancel, Clock, CounterSnapshot, Counters, Cpu, CpuCx, CpuId, Dirty, Extent, NodeId, Pfn, PhysMap, PreemptModel,
    Topology, VirtAddr, Window, with,
};
use hugemm_clear::{Best, ClearPolicy, ClearRequest, Clearer, Crossover, Features, Mbps, Primitive, Profile, Unit};
use memory::Memory;
use std::cell::{Cell, RefCell};
use std::time::Instant;

pub(crate) const PAGE: u64 = 4096;

/// The first frame of every memory here.
pub(crate) const BASE: Pfn = Pfn::new(1 << 18);

/// Cached stores and, in the place of streaming ones, the model, which a platform without a store buffer runs as plain
/// stores but owes a fence for. Bulk from 8 MiB on; nothing is measured.
pub(crate) const PROFILE: Profile = Profile {
    cached: Best::only(Primitive::Portable),
    bulk: Some(Best::only(Primitive::Model)),
    crossover: Crossover::always(8 << 20),
    cached_mbps: Mbps::UNKNOWN,
    bulk_mbps: Mbps::UNKNOWN,
};

/// A request that [`PROFILE`] serves with cached stores.
pub(crate) const CACHED: ClearRequest = ClearRequest::fault(2 << 20);

/// A request that [`PROFILE`] serves with streaming stores.
pub(crate) const BULK: ClearRequest = ClearRequest::bulk(64 << 30);

/// What [`PROFILE`] needs.
pub(crate) fn features() -> Features {
    // SAFETY: the model needs no CPU feature: platforms intercept it or it is run as plain stores.
    unsafe { Features::none().with(Primitive::Model) }
}

/// A clearer by [`PROFILE`] with units of so many pages under cooperative models.
pub(crate) fn clearer(unit: u64) -> Clearer {
    let policy = with!(ClearPolicy::new(PROFILE), unit = Some(unit * PAGE));
    Clearer::new(features(), policy).expect("the profile needs no more than the features")
}

/// The frames of a memory here, by page index.
pub(crate) fn extent(from: u64, to: u64) -> Extent {
    Extent::new(Pfn::new(BASE.get() + from), to - from).expect("in range")
}

/// What a unit cleared, in page indices.
pub(crate) fn span(unit: &Unit) -> (u64, u64) {
    let from = unit.extent.base().get() - BASE.get();
    (from, from + unit.extent.pages())
}

/// Asks to stop from the `n`th cancellation point on, counted from 1.
pub(crate) struct StopAt(Cell<u64>);

impl StopAt {
    pub(crate) fn new(n: u64) -> Self {
        StopAt(Cell::new(n))
    }
}

impl Cancel for StopAt {
    fn requested(&self) -> bool {
        self.0.set(self.0.get().saturating_sub(1));
        self.0.get() == 0
    }
}

/// What a platform saw, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Reschedule,
    /// A window of `pages` frames from page index `page` on; `user` is the address it was asked for.
    Open {
        page: u64,
        pages: u64,
        user: Option<u64>,
    },
    /// Nothing could be opened at this page index.
    Refuse(u64),
    /// The window that began at this page index.
    Close(u64),
    Fence,
    Publish,
    VectorBegin,
    VectorRefuse,
    VectorEnd,
    Dropped,
}

/// An opened window without a user address.
pub(crate) const fn open(page: u64, pages: u64) -> Event {
    Event::Open { page, pages, user: None }
}

type Hook<R> = RefCell<Box<dyn FnMut(&Script, u64) -> R>>;

/// The platform. Its memory's frames are numbered from [`BASE`] on.
pub(crate) struct Script {
    pub(crate) memory: Memory,
    pub(crate) counters: Counters,
    events: RefCell<Vec<Event>>,
    /// Windows that are open: address and first page index.
    windows: RefCell<Vec<(usize, u64)>>,
    pub(crate) model: Cell<PreemptModel>,
    pub(crate) may_sleep: Cell<bool>,
    /// How often vector registers will still be granted.
    pub(crate) vector_grants: Cell<u64>,
    /// Largest window in pages.
    pub(crate) window: Cell<u64>,
    /// Index of the first page that cannot be reached.
    pub(crate) reach: Cell<u64>,
    /// Run at every reschedule point with its number, from 1.
    on_reschedule: Hook<()>,
    /// The time, asked with the number of the reading, from 1.
    clock: Hook<u64>,
    readings: Cell<u64>,
}

impl Script {
    /// Not preemptible, no vector registers, a direct map.
    pub(crate) fn new(memory: Memory) -> Self {
        let started = Instant::now();
        Script {
            reach: Cell::new(memory.pages()),
            memory,
            counters: Counters::default(),
            events: RefCell::default(),
            windows: RefCell::default(),
            model: Cell::new(PreemptModel::None),
            may_sleep: Cell::new(true),
            vector_grants: Cell::new(0),
            window: Cell::new(u64::MAX),
            on_reschedule: RefCell::new(Box::new(|_, _| ())),
            clock: RefCell::new(Box::new(move |_, _| started.elapsed().as_nanos() as u64)),
            readings: Cell::new(0),
        }
    }

    pub(crate) fn on_reschedule(&self, hook: impl FnMut(&Script, u64) + 'static) {
        *self.on_reschedule.borrow_mut() = Box::new(hook);
    }

    pub(crate) fn set_clock(&self, clock: impl FnMut(&Script, u64) -> u64 + 'static) {
        *self.clock.borrow_mut() = Box::new(clock);
    }

    /// The running task's context, for the time of `f`.
    pub(crate) fn run<R>(&self, f: impl FnOnce(&mut CpuCx<'_, Self>) -> R) -> R {
        // SAFETY: the tests do not nest calls, so the thread has one context of this platform.
        f(&mut unsafe { CpuCx::new(self) })
    }

    /// Every frame, and those past the memory's end that `reach` leaves out.
    pub(crate) fn dirty(&self) -> Dirty {
        self.own(0, self.memory.pages())
    }

    /// Frames by page index.
    pub(crate) fn own(&self, from: u64, to: u64) -> Dirty {
        // SAFETY: a test owns the memory of its platform and looks at it only when no clear is running.
        unsafe { Dirty::assume_owned(extent(from, to)) }
    }

    /// The record since the last call.
    pub(crate) fn events(&self) -> Vec<Event> {
        assert!(self.windows.borrow().is_empty(), "windows left open");
        self.events.take()
    }

    /// The latest event on record.
    pub(crate) fn last_event(&self) -> Option<Event> {
        self.events.borrow().last().copied()
    }

    /// How many events of a kind are on record.
    pub(crate) fn count(&self, event: Event) -> u64 {
        self.events.borrow().iter().filter(|e| **e == event).count() as u64
    }

    pub(crate) fn counted(&self) -> CounterSnapshot {
        self.counters.snapshot()
    }

    fn record(&self, event: Event) {
        self.events.borrow_mut().push(event);
    }
}

// SAFETY: one thread, one CPU. The operating system fences when it switches threads. The hardware's barriers, recorded.
// A process's registers are its own, and the operating system saves them.
unsafe impl Cpu for Script {
    fn current(&self) -> CpuId {
        CpuId::new(0)
    }

    unsafe fn pin(&self) -> usize {
        0
    }

    unsafe fn unpin(&self, _state: usize) {}

    fn preempt_model(&self) -> PreemptModel {
        self.model.get()
    }

    fn may_sleep(&self) -> bool {
        self.may_sleep.get()
    }

    unsafe fn cond_resched(&self) {
        assert!(self.may_sleep.get(), "a reschedule point in a context that may not sleep");
        self.record(Event::Reschedule);
        let number = self.count(Event::Reschedule);
        (self.on_reschedule.borrow_mut())(self, number);
    }

    fn store_fence(&self) {
        self.record(Event::Fence);
        hugemm_base::barriers::hardware_store_fence();
    }

    fn publish_barrier(&self) {
        self.record(Event::Publish);
        hugemm_base::barriers::hardware_publish_barrier();
    }

    unsafe fn vector_begin(&self) -> bool {
        let left = self.vector_grants.get();
        self.vector_grants.set(left.saturating_sub(1));
        self.record(if left > 0 { Event::VectorBegin } else { Event::VectorRefuse });
        left > 0
    }

    unsafe fn vector_end(&self) {
        self.record(Event::VectorEnd);
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn debt_dropped(&self, _barrier: &'static str) {
        self.record(Event::Dropped);
    }
}

impl Clock for Script {
    fn now_ns(&self) -> u64 {
        self.readings.set(self.readings.get() + 1);
        (self.clock.borrow_mut())(self, self.readings.get())
    }
}

impl Topology for Script {
    fn node_of_cpu(&self, _cpu: CpuId) -> NodeId {
        NodeId::new(0)
    }

    fn node_run(&self, extent: Extent) -> (NodeId, u64) {
        (NodeId::new(0), extent.pages())
    }
}

// SAFETY: the memory's windows are its frames' bytes, writable until closed; frames outside it are refused.
unsafe impl PhysMap for Script {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        let page = extent.base().get() - BASE.get();
        let reachable = self.reach.get().min(self.memory.pages()).saturating_sub(page);
        let pages = extent.pages().min(reachable).min(self.window.get());
        if pages == 0 {
            self.record(Event::Refuse(page));
            return None;
        }
        let ptr = self.memory.window(page, pages);
        self.windows.borrow_mut().push((ptr.addr(), page));
        self.record(Event::Open { page, pages, user: user.map(VirtAddr::get) });
        Some(Window { ptr, pages })
    }

    unsafe fn close(&self, window: Window) {
        let mut windows = self.windows.borrow_mut();
        let at = windows.iter().position(|(address, _)| *address == window.ptr.addr()).expect("opened, closed once");
        let (_, page) = windows.swap_remove(at);
        self.memory.close_window(window.ptr, window.pages);
        self.record(Event::Close(page));
    }
}
