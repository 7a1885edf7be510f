//! A thread on each CPU.

use std::os::arceos::api::task::{AxCpuMask, ax_set_current_affinity};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::vec::Vec;

/// How many there are.
pub(crate) fn count() -> usize {
    thread::available_parallelism().map_or(1, |cpus| cpus.get())
}

/// Moves the caller.
pub(crate) fn go_to(cpu: usize) {
    ax_set_current_affinity(AxCpuMask::one_shot(cpu)).expect("a CPU");
    while ax_hal::percpu::this_cpu_id() != cpu {
        thread::yield_now();
    }
}

/// Runs `f` on the first `cpus` CPUs, all beginning together: what each says.
pub(crate) fn on_each<T: Send + 'static>(cpus: usize, f: impl Fn(usize) -> T + Send + Sync + 'static) -> Vec<T> {
    let (f, ready) = (Arc::new(f), Arc::new(AtomicUsize::new(0)));
    let threads: Vec<_> = (0..cpus)
        .map(|cpu| {
            let (f, ready) = (f.clone(), ready.clone());
            thread::spawn(move || {
                go_to(cpu);
                ready.fetch_add(1, Ordering::AcqRel);
                while ready.load(Ordering::Acquire) < cpus {
                    thread::yield_now();
                }
                f(cpu)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("it ends")).collect()
}
