//! One extent cleared by several CPUs at once, each near its node.

use anyhow::{Result, anyhow};
use hugemm_base::{Clock, CpuId, Dirty};
use hugemm_clear::{ClearRequest, Clearer, Lane, Outcome, ParallelClear, Unit};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

/// Lanes for runs of frames on one node: more than any machine has, unless its nodes are interleaved by page.
const LANES: usize = 64;

/// Clears all memory once with `workers` CPUs, in so many nanoseconds.
pub fn once(host: &Host<'_>, clearer: &Clearer, memory: Dirty, workers: u32) -> Result<(Dirty, u64)> {
    let request = ClearRequest::bulk(memory.extent().bytes());
    let mut lanes: [Lane; LANES] = std::array::from_fn(|_| Lane::empty());
    let clear = ParallelClear::new(memory, &mut lanes, host).map_err(|_| anyhow!("no lanes"))?;
    let start = Barrier::new(workers as usize);
    let stop = AtomicBool::new(false);
    let results = host.run_on_each((0..workers).map(CpuId::new), |cx| {
        start.wait();
        let from = host.now_ns();
        // Ctrl-C is seen here, between units, by the worker that passes next.
        let mut observer = |_: &Unit| stop.store(interrupt::requested(), Ordering::Relaxed);
        let result = clear.work(cx, clearer, &request, &stop, &mut observer);
        (result, from, host.now_ns())
    })?;
    let from = results.iter().map(|(_, from, _)| *from).min().unwrap_or(0);
    let to = results.iter().map(|(.., to)| *to).max().unwrap_or(0);
    match clear.finish() {
        Outcome::Zeroed(zeroed) => Ok((zeroed.into_dirty(), to - from)),
        Outcome::Partly(_) | Outcome::Dirty(_) => {
            interrupt::check()?;
            let reason = results.into_iter().find_map(|(result, ..)| result.err());
            Err(anyhow!("the clear ended early: {}", reason.map_or("no reason given".into(), |r| r.to_string())))
        }
    }
}
