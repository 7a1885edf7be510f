//! Nobody stores to what has been made read-only, and no store is forgotten.
//!
//! CPUs count, each in a word of its own in every page. One of them takes the right to store away from all pages, by whole
//! tables or leaf by leaf, waits until all know, and looks: no counter moves, and every page in which one has moved since the
//! last time is known to have been written. Then it gives the right back, to one page first and then to all, while the
//! others wait in their page faults.

use super::{Cx, Done, Failure, Finding, stored, vec_of};
use crate::space::rights::Way;
use crate::space::{BareSpace, Pages};
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::random::Random;
use hugemm_base::{Clock, Dirty, Extent, PAGE_BYTES, PageSize, VirtAddr, VirtRange};
use hugemm_kernel::memory::frames;
use hugemm_kernel::{percpu, smp};
use hugemm_paging::PagingError;
use hugemm_workloads::request::Plant;

/// Where the pages are.
const START: u64 = 0x20_0000_0000;
/// Bytes of addresses: tables that become read-only as a whole, and a piece of one more.
const BYTES: u64 = 5 << 20;
/// Pages that are used, so many pages apart.
const PAGES: u64 = 24;
const APART: u64 = 53;
/// Turns of a round, at most.
const TURNS: u64 = 60;
/// Looks at a page that somebody is about to write, at most.
const PATIENCE: u64 = 1_000_000;
/// Loops between two looks.
const WAIT: u64 = 3000;

/// Zeroes come where somebody counts.
struct Counters;

impl Pages for Counters {
    fn size(&self, at: VirtAddr) -> Option<PageSize> {
        (at.get().wrapping_sub(START) < BYTES).then_some(PageSize::Size4K)
    }

    fn fill(&self, _at: VirtAddr, bytes: &mut [u8]) {
        bytes.fill(0);
    }
}

fn page(number: u64) -> u64 {
    START + number * APART * PAGE_BYTES
}

fn word(number: u64, index: u64) -> *mut u64 {
    ptr::without_provenance_mut((page(number) + 8 * index) as usize)
}

/// What the CPUs have counted in a page.
fn sum(number: u64) -> u64 {
    // SAFETY: the loaded space's pages; the fault handler maps them. Others store whole words.
    (0..u64::from(percpu::count())).map(|cpu| unsafe { word(number, cpu).read_volatile() }).sum()
}

fn span(at: u64, bytes: u64) -> Result<VirtRange, PagingError> {
    VirtRange::new(VirtAddr::new(at), bytes).map_err(|_| PagingError::NoTable)
}

/// One round on all CPUs, until `until` at the latest.
pub fn round(cx: Cx<'_>, seed: u64, plant: Plant, until: u64) -> Result<(), Failure> {
    let mut runs = vec_of(PAGES as usize, Extent::default)?;
    let space = BareSpace::new(cx, Some(&Counters))?;
    let stop = AtomicBool::new(false);
    let outcome: Lock<SpinLock, _> = Lock::new(None);
    smp::on_cpus(cx, percpu::count(), &|cx, cpu| {
        space.with(cx, |cx| {
            if cpu == 0 {
                let judged = judge(cx, &space, &mut Random(seed), plant, until);
                // Whatever was found, nobody is left waiting in a page fault.
                let unsealed = all().and_then(|all| space.unseal(cx, all));
                *outcome.lock() = Some(judged.and_then(|()| Ok(unsealed?)));
                // Relaxed: only to end.
                stop.store(true, Ordering::Relaxed);
            } else {
                count(u64::from(cpu), &stop);
            }
        });
    });
    let mut found = 0;
    space.free(cx, |run| {
        runs[found] = run.extent;
        found += 1;
    });
    for run in &runs[..found] {
        // SAFETY: the space that had them is gone, and each was shown once.
        frames().free_extent(cx, unsafe { Dirty::assume_owned(*run) });
    }
    outcome.lock().take().unwrap_or(Ok(()))
}

/// Counts in every page until it is told to stop.
fn count(cpu: u64, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        percpu::beat();
        for number in 0..PAGES {
            let word = word(number, cpu);
            // SAFETY: this CPU's word in a page of the loaded space; the fault handler maps it, or comes back until it may be
            // written.
            unsafe { word.write_volatile(word.read_volatile() + 1) };
        }
    }
}

/// Takes the right away, looks, and gives it back, again and again.
fn judge(cx: Cx<'_>, space: &BareSpace<'_>, random: &mut Random, plant: Plant, until: u64) -> Result<(), Failure> {
    let all = all()?;
    // All pages are there before anything is judged: what is mapped later may be written.
    let mut counted: [u64; PAGES as usize] = core::array::from_fn(|_| 0);
    (0..PAGES).for_each(|number| _ = core::hint::black_box(sum(number)));
    for _ in 0..TURNS {
        if cx.platform().now_ns() >= until {
            break;
        }
        percpu::beat();
        let way = match (plant, random.below(3)) {
            (Plant::UnflushedProtect, _) => Way::Untold,
            (_, 0) => Way::Leaves,
            _ => Way::Tables,
        };
        space.seal(cx, all, way)?;
        Done::Seals.add(1);
        let before: [u64; PAGES as usize] = core::array::from_fn(|number| sum(number as u64));
        let moved = |number: &u64| sum(*number) != before[*number as usize];
        wait(WAIT);
        if let Some(number) = (0..PAGES).find(moved) {
            return Err(stored(page(number)).into());
        }
        for number in 0..PAGES {
            let (before, counted) = (before[number as usize], &mut counted[number as usize]);
            if before != *counted && space.is_dirty(cx, VirtAddr::new(page(number))) == Some(false) {
                let at = page(number);
                let what = format_args!("the page at {at:#x} was written and is taken for clean");
                return Err(Finding::new("rights", what).into());
            }
            *counted = before;
        }
        space.clean(cx, all)?;
        let chosen = random.below(PAGES);
        space.unseal(cx, span(page(chosen), PAGE_BYTES)?)?;
        if plant == Plant::LostDirty {
            space.age_plainly(VirtAddr::new(page(chosen)), || {
                let unsealed = space.unseal(cx, all);
                (0..PATIENCE).take_while(|_| unsealed.is_ok() && !moved(&chosen)).for_each(|_| wait(1));
            });
            continue;
        }
        space.age(cx, all)?;
        if let Some(number) = (0..PAGES).filter(|number| *number != chosen).find(moved) {
            return Err(stored(page(number)).into());
        }
        space.unseal(cx, all)?;
        wait(random.below(4 * WAIT));
    }
    Ok(())
}

fn all() -> Result<VirtRange, PagingError> {
    span(START, BYTES)
}

fn wait(loops: u64) {
    (0..loops).for_each(|_| core::hint::spin_loop());
}
