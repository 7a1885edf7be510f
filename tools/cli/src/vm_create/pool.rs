//! A pool of huge pages on the host's frames, for virtual machines. Their descriptors are ordinary memory of this process,
//! so there is no optimizer.

use crate::ground::{CountedFlushes, pool_over};
use anyhow::{Result, anyhow, bail};
use hugemm_base::{CpuId, Never, NodeId, PageSize, PhysMap, VirtAddr};
use hugemm_frames::{Frames, Plain};
use hugemm_host::cpu::Host;
use hugemm_hugetlb::{FlatMemory, HugePool, Nodes, OptimizerPolicy, PoolArena, SoftMap, VmemmapOptimizer};
use hugemm_paging::Keep;
use std::ptr::NonNull;

/// Runs `f` with a pool of `pages` pages, and empties it again.
pub fn with_pool<R>(
    host: &Host<'_>,
    frames: &Frames<'_, Plain>,
    size: PageSize,
    pages: u64,
    f: impl FnOnce(&HugePool<'_>) -> Result<R>,
) -> Result<R> {
    let all = host.frames();
    let window = host.open(all, None).and_then(|window| NonNull::new(window.ptr));
    let start = window.ok_or_else(|| anyhow!("the host's frames cannot be reached"))?;
    // SAFETY: the host's memory outlives the pool, and is one mapping of exactly these frames.
    let memory = unsafe { FlatMemory::new(start, all) };
    let map = SoftMap::new(VirtAddr::new(0), &mut [], memory, CountedFlushes::default(), Keep);
    // SAFETY: nothing is mapped by it.
    let optimizer = unsafe { VmemmapOptimizer::new(frames, &map, &[], OptimizerPolicy::default()) };
    optimizer.set_enabled(false);
    pool_over(vec![PoolArena::new(all, NodeId::new(0))], size, |pool| {
        let resize = |pages| host.run_on(CpuId::new(0), |cx| pool.resize(cx, &optimizer, pages, Nodes::All, &Never));
        let entered = resize(pages)??.entered;
        let result = if entered < pages {
            Err(anyhow!("only {entered} of {pages} pages of {size} fit; use a smaller --size"))
        } else {
            f(pool)
        };
        if resize(0)??.left < entered {
            bail!("the pool's pages did not all come back");
        }
        result
    })
}
