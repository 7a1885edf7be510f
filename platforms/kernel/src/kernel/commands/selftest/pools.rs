//! Huge page pools grow, shrink and are demoted at random, beyond what memory has, while the other CPUs look at
//! descriptors of frames that are not theirs, and write into those of frames that are.
//!
//! Afterwards the pools are empty, every descriptor has a frame of its own again, and every descriptor of free memory
//! keeps what is written into it. A store into a shared tail would be a page fault.

use super::descriptors::{WORD, stamp};
use super::{Cx, Failure, Finding};
use crate::kernel::irq_lock::IrqLock;
use crate::kernel::memory::{self, Scratch, frames};
use crate::kernel::vmemmap::{self, KernelEconomy};
use crate::kernel::{percpu, smp};
use core::hint::black_box;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::{Clock, Never, Order, PageSize, Pfn};
use hugemm_frames::{Frozen, Request};
use hugemm_hugetlb::{Counts, FlushPolicy, Group, HugePool, Nodes, Policy, PoolError, Report};
use hugemm_workloads::alloc_free::random::Random;

/// Resizes in a round, at most.
const TURNS: u64 = 100;
/// Descriptors that a walker looks at between two stamps.
const LOOKS: u64 = 1000;

type Pool<'m> = HugePool<'m, IrqLock>;

/// One round on all CPUs, until `until` at the latest; returns how many resizes there were.
pub fn round(cx: Cx<'_>, seed: u64, until: u64) -> Result<u64, Failure> {
    let ((mut areas, count), (mut gigantic_areas, _)) = (vmemmap::areas(), vmemmap::areas());
    let (areas, gigantic_areas) = (&mut areas[..count], &mut gigantic_areas[..count]);
    let groups = Scratch::new(cx, Pool::groups(areas, PageSize::Size2M), Group::default)?;
    let gigantic_groups = Scratch::new(cx, Pool::groups(areas, PageSize::Size1G), Group::default)?;
    let (mut counts, mut gigantic_counts) = ([Counts::default()], [Counts::default()]);
    let huge = Pool::new(PageSize::Size2M, areas, &mut *groups.items, &mut counts)?;
    let gigantic = Pool::new(PageSize::Size1G, gigantic_areas, &mut *gigantic_groups.items, &mut gigantic_counts)?;
    let (stop, turns) = (AtomicBool::new(false), Lock::<SpinLock, _>::new(Ok(0)));
    let wrong: Lock<SpinLock, Option<Finding>> = Lock::new(None);
    smp::on_cpus(cx, percpu::count(), &|cx, cpu| {
        let mut random = Random::new(seed ^ u64::from(cpu) << 40);
        if cpu == 0 {
            let result = resizes(cx, &huge, &gigantic, &mut random, until);
            *turns.lock() = result;
            // Relaxed: only to end the others.
            stop.store(true, Ordering::Relaxed);
            return;
        }
        let mut turn = 0;
        while !stop.load(Ordering::Relaxed) {
            look(&mut random);
            if let Err(finding) = stamp(cx, cpu, turn, &mut random) {
                *wrong.lock() = Some(finding);
                return;
            }
            turn += 1;
        }
    });
    groups.free(cx);
    gigantic_groups.free(cx);
    if let Some(finding) = wrong.lock().take() {
        return Err(finding.into());
    }
    let turns = (*turns.lock())?;
    if let Some(at) = vmemmap::audit().lean {
        return Err(Finding::Lean { at: at.get() }.into());
    }
    write_all(cx)?;
    Ok(turns)
}

/// Loads words of any frames' descriptors, as a walker by frame number does.
fn look(random: &mut Random) {
    percpu::beat();
    for _ in 0..LOOKS {
        let frame = Pfn::new(random.below(memory::end().number()));
        if let Some(descriptor) = frames().descriptor(frame) {
            black_box(descriptor.load(random.below(8) as usize));
            black_box(frames().head_of(frame));
        }
    }
}

/// Random resizes; at the end the pools are empty.
fn resizes<'m>(
    cx: Cx<'_>,
    huge: &Pool<'m>,
    gigantic: &Pool<'m>,
    random: &mut Random,
    until: u64,
) -> Result<u64, PoolError> {
    // More than there are, so that memory runs out now and then.
    let most = memory::managed_bytes() / PageSize::Size2M.bytes() + 16;
    let mut turns = 0;
    while turns < TURNS && cx.platform().now_ns() < until {
        let economy = any_economy(random);
        match random.below(4) {
            0 => {
                let pages = random.below(3);
                set(cx, gigantic, &economy, pages)?;
                let demoted = gigantic.demote(cx, &economy, huge, Nodes::All, random.below(2));
                // Busy: there was none.
                if demoted != Err(PoolError::Busy) {
                    out_of_memory_is_no_error(demoted)?;
                }
            }
            // Mostly small ones, so that there are many.
            _ => {
                let pages = random.below(most) >> random.below(8);
                set(cx, huge, &economy, pages)?;
            }
        }
        turns += 1;
    }
    let economy = any_economy(random);
    set(cx, gigantic, &economy, 0)?;
    set(cx, huge, &economy, 0)?;
    Ok(turns)
}

/// Economy on, in one of its ways, or now and then off.
fn any_economy(random: &mut Random) -> KernelEconomy {
    let flush = if random.below(8) == 0 { FlushPolicy::Page } else { FlushPolicy::Batch };
    let economy = vmemmap::economy(Policy { flush, swap: random.below(3) != 0, carve: true });
    economy.set_enabled(random.below(8) != 0);
    economy
}

fn set(cx: Cx<'_>, pool: &Pool<'_>, economy: &KernelEconomy, pages: u64) -> Result<(), PoolError> {
    percpu::beat();
    out_of_memory_is_no_error(pool.set_size(cx, economy, pages, Nodes::All, &Never))
}

fn out_of_memory_is_no_error(result: Result<Report, PoolError>) -> Result<(), PoolError> {
    match result {
        Ok(_) | Err(PoolError::OutOfMemory) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Takes all free memory by 2 MiB, writes into every descriptor of it, and lets every CPU look: two that share a frame are
/// found, and a CPU that missed a flush.
fn write_all(cx: Cx<'_>) -> Result<(), Failure> {
    let most = memory::managed_bytes() / PageSize::Size2M.bytes();
    let held = Scratch::new(cx, most as usize, || None::<Frozen>)?;
    let order = Order::new(PageSize::Size2M.order().get()).unwrap_or(Order::ZERO);
    for place in &mut *held.items {
        let Ok(block) = frames().alloc(cx, Request::order(order)) else { break };
        percpu::beat();
        for frame in block.extent().base().number()..block.extent().end().number() {
            if let Some(descriptor) = frames().descriptor(Pfn::new(frame)) {
                descriptor.store(WORD, !frame);
            }
        }
        *place = Some(block);
    }
    let wrong: Lock<SpinLock, Option<Finding>> = Lock::new(None);
    let blocks = &*held.items;
    // By every CPU: one that missed a flush finds something else.
    smp::on_cpus(cx, percpu::count(), &|_, cpu| {
        for block in blocks.iter().map_while(Option::as_ref) {
            percpu::beat();
            for frame in block.extent().base().number()..block.extent().end().number() {
                let found = frames().descriptor(Pfn::new(frame)).map_or(0, |descriptor| descriptor.load(WORD));
                if found != !frame {
                    *wrong.lock() = Some(Finding::Descriptor { frame, found, cpu });
                    return;
                }
            }
        }
    });
    for block in held.items.iter_mut().map_while(Option::take) {
        frames().free(cx, block);
    }
    held.free(cx);
    match wrong.lock().take() {
        Some(finding) => Err(finding.into()),
        None => Ok(()),
    }
}
