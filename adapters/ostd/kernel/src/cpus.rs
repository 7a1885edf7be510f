//! Work on several CPUs at once. OSTD's scheduler puts all tasks on the first CPU; the others wait here.

use core::sync::atomic::{AtomicUsize, Ordering};
use ostd::cpu::{CpuId, CpuSet, num_cpus};
use ostd::smp::inter_processor_call;

type Work = fn(usize);

/// Which work, or 0: a function's address.
static WORK: AtomicUsize = AtomicUsize::new(0);
/// How often there was work.
static TURN: AtomicUsize = AtomicUsize::new(0);
/// CPUs that take part.
static WANTED: AtomicUsize = AtomicUsize::new(0);
/// CPUs that are there, and those that are done.
static READY: AtomicUsize = AtomicUsize::new(0);
static DONE: AtomicUsize = AtomicUsize::new(0);

/// Lets the other CPUs wait for work.
pub(crate) fn start() {
    ostd::boot::smp::register_ap_entry(|| {
        let cpu = u32::from(CpuId::current_racy()) as usize;
        let mut seen = 0;
        loop {
            let turn = TURN.load(Ordering::Acquire);
            if turn == seen {
                crate::allocators::idle();
                ostd::task::halt_cpu();
                continue;
            }
            seen = turn;
            take_part(cpu);
        }
    });
}

fn take_part(cpu: usize) {
    let wanted = WANTED.load(Ordering::Acquire);
    if cpu < wanted {
        READY.fetch_add(1, Ordering::AcqRel);
        while READY.load(Ordering::Acquire) < wanted {
            core::hint::spin_loop();
        }
        // SAFETY: `on` stored such a function before it announced the turn.
        let work: Work = unsafe { core::mem::transmute(WORK.load(Ordering::Acquire)) };
        work(cpu);
        DONE.fetch_add(1, Ordering::AcqRel);
    }
}

/// Runs `work` on the first `count` CPUs at once, this one among them, and waits until all are done.
pub(crate) fn on(count: usize, work: Work) {
    let count = count.min(num_cpus());
    WORK.store(work as usize, Ordering::Release);
    READY.store(0, Ordering::Release);
    DONE.store(0, Ordering::Release);
    WANTED.store(count, Ordering::Release);
    TURN.fetch_add(1, Ordering::AcqRel);
    let mut others = CpuSet::new_empty();
    (1..count).for_each(|cpu| others.add(CpuId::new(cpu as u32)));
    // Out of `halt_cpu`.
    inter_processor_call(&others, || {}).wait();
    take_part(0);
    while DONE.load(Ordering::Acquire) < count {
        core::hint::spin_loop();
    }
}
