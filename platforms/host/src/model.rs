//! A software store buffer: streaming stores that are visible when the model pleases, and at the latest at the fence.
//!
//! Hardware hides a missing fence almost always. Here every line stored through the buffer stays out of memory until it
//! is drained, in random order, so a reader on any CPU sees the old bytes and a test fails.

use hugemm_base::CpuId;
use hugemm_base::platform::StoreBuffer;
use hugemm_base::random::Random;
use std::sync::{Mutex, PoisonError};

/// Bytes that drain as one.
const LINE: usize = 64;

/// Lines that a CPU's buffer holds before it must drain some; more than a 4 KiB page, so that whole pages linger.
const CAPACITY: usize = 256;

/// The store buffers of a machine's CPUs.
pub(crate) struct StoreModel {
    cpus: Vec<CpuBuffer>,
}

/// One CPU's buffer.
struct CpuBuffer(Mutex<Lines>);

struct Lines {
    /// First byte and length of runs still to be stored; a run never crosses a line.
    pending: Vec<(usize, usize)>,
    random: Random,
}

impl StoreModel {
    pub(crate) fn new(cpus: usize, seed: u64) -> Self {
        let buffer = |cpu: usize| {
            let random = Random(seed ^ (cpu as u64) << 32);
            CpuBuffer(Mutex::new(Lines { pending: Vec::new(), random }))
        };
        StoreModel { cpus: (0..cpus).map(buffer).collect() }
    }

    pub(crate) fn of(&self, cpu: CpuId) -> &dyn StoreBuffer {
        &self.cpus[cpu.get() as usize]
    }

    /// Whether another CPU's buffer holds stores to any of these bytes. The CPU's own are drained: it sees them.
    pub(crate) fn pending_elsewhere(&self, cpu: CpuId, at: usize, len: usize) -> bool {
        self.drain(cpu);
        self.cpus.iter().any(|buffer| {
            let lines = buffer.0.lock().unwrap_or_else(PoisonError::into_inner);
            lines.pending.iter().any(|&(start, run)| start < at + len && at < start + run)
        })
    }

    /// Drains a CPU's buffer.
    pub(crate) fn drain(&self, cpu: CpuId) {
        let mut lines = self.cpus[cpu.get() as usize].0.lock().unwrap_or_else(PoisonError::into_inner);
        while lines.drain_one() {}
    }
}

impl StoreBuffer for CpuBuffer {
    unsafe fn zero(&self, ptr: *mut u8, len: usize) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut at, end) = (ptr.expose_provenance(), ptr.addr() + len);
        while at < end {
            let run = (LINE - at % LINE).min(end - at);
            lines.pending.push((at, run));
            at += run;
            while lines.pending.len() > CAPACITY {
                lines.drain_one();
            }
        }
    }
}

impl Lines {
    /// Stores one pending run, chosen at random; false if there is none.
    fn drain_one(&mut self) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        let next = self.random.below(self.pending.len() as u64);
        let (at, run) = self.pending.swap_remove(next as usize);
        let ptr = std::ptr::with_exposed_provenance_mut::<u8>(at);
        for offset in 0..run {
            // SAFETY: the caller of `zero` promised that the bytes stay writable and unread by their own CPU until the
            // fence, which drains everything. Atomic, because tests read them from other CPUs on purpose.
            unsafe {
                (*ptr.add(offset).cast::<std::sync::atomic::AtomicU8>()).store(0, std::sync::atomic::Ordering::Relaxed)
            };
        }
        true
    }
}
