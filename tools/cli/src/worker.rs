//! A node's worker as a thread that is a CPU of its own, and parks when it has nothing to do.

use hugemm_base::lock::RawLock;
use hugemm_base::{Never, NodeId};
use hugemm_reclaim::{Reclaim, Step, Steps, Swap};
use hugemm_vm::{Cx, Setup, Vm};
use std::sync::OnceLock;
use std::thread::Thread;

/// Wakes it.
#[derive(Debug, Default)]
pub struct Wakes(OnceLock<Thread>);

impl Wakes {
    /// Ends its sleep; if it does not sleep yet, it will not.
    pub fn wake(&self) {
        if let Some(worker) = self.0.get() {
            worker.unpark();
        }
    }

    /// The calling thread is the worker.
    pub fn begin(&self) {
        let _ = self.0.set(std::thread::current());
    }
}

impl Steps for Wakes {
    fn enter(&self, _step: Step) {}

    fn wake(&self, _node: NodeId) {
        Wakes::wake(self);
    }
}

/// Calls it in the end, however that comes.
pub struct OnDrop<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// The worker's work, until it does not go on: who ends it wakes it too.
pub fn work<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps>(
    cx: &mut Cx<'_, S>,
    vm: &Vm<'_, S>,
    pager: &Reclaim<'_, '_, S, W, L, O>,
    node: NodeId,
    goes_on: impl Fn() -> bool,
) {
    while goes_on() {
        match pager.take_wake(node) {
            true => drop(pager.balance(vm, cx, node, u64::MAX, &Never)),
            false => {
                // Who has run out may have asked for what this CPU has cached.
                vm.frames().serve(cx);
                std::thread::park();
            }
        }
    }
}
