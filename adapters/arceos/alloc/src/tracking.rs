use alloc::collections::BTreeMap;
use ax_sync::SpinLock;
use axbacktrace::Backtrace;
use core::alloc::Layout;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};

static ENABLED: AtomicBool = AtomicBool::new(false);

/// Whether this CPU is at work here: what is kept is itself allocated, and is not looked at.
#[ax_percpu::def_percpu]
static WITHIN: bool = false;

/// What is kept about memory in use.
#[derive(Debug)]
pub struct AllocationInfo {
    /// What was asked for.
    pub layout: Layout,
    /// By whom.
    pub backtrace: Backtrace,
    /// The how many-th it was.
    pub generation: u64,
}

struct State {
    in_use: BTreeMap<usize, AllocationInfo>,
    generation: u64,
}

static STATE: SpinLock<State> = SpinLock::new(State { in_use: BTreeMap::new(), generation: 0 });

/// From here on allocations are kept.
pub fn enable_tracking() {
    ENABLED.store(true, Ordering::SeqCst);
}

/// From here on they are not.
pub fn disable_tracking() {
    ENABLED.store(false, Ordering::SeqCst);
}

/// Whether they are.
pub fn tracking_enabled() -> bool {
    ENABLED.load(Ordering::SeqCst)
}

/// Runs `f` with what is kept, or with nothing if nothing is to be kept here.
fn with_state<R>(f: impl FnOnce(Option<&mut State>) -> R) -> R {
    let _stays = ax_sync::PreemptGuard::new();
    let within = |set: Option<bool>| {
        // SAFETY: the guard keeps the task on its CPU.
        let before = unsafe {
            ax_percpu::with_cpu_pin(|pin| {
                let before = WITHIN.read_current(pin);
                set.into_iter().for_each(|within| WITHIN.write_current(pin, within));
                before
            })
        };
        before.expect("ArceOS gives each CPU its area before the CPU allocates")
    };
    if !tracking_enabled() || within(None) {
        return f(None);
    }
    within(Some(true));
    let result = f(Some(&mut STATE.lock_irqsave()));
    within(Some(false));
    result
}

pub(crate) fn allocated(layout: Layout, allocate: impl FnOnce() -> *mut u8) -> *mut u8 {
    with_state(|state| {
        let memory = allocate();
        if let Some(state) = state.filter(|_| !memory.is_null()) {
            let (backtrace, generation) = (Backtrace::capture(), state.generation);
            state.generation += 1;
            state.in_use.insert(memory.expose_provenance(), AllocationInfo { layout, backtrace, generation });
        }
        memory
    })
}

pub(crate) fn freed(memory: *mut u8, free: impl FnOnce()) {
    with_state(|state| {
        state.and_then(|state| state.in_use.remove(&memory.addr()));
        free();
    });
}

/// How many allocations have been kept.
pub fn current_generation() -> u64 {
    STATE.lock_irqsave().generation
}

/// Shows those still in use of a range of generations; none while tracking is off.
pub fn allocations_in(range: Range<u64>, visitor: impl FnMut(&AllocationInfo)) {
    with_state(|state| {
        let state = state.into_iter().flat_map(|state| state.in_use.values());
        state.filter(|info| range.contains(&info.generation)).for_each(visitor);
    });
}
