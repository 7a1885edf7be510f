//! Kernel areas on real page faults: CPUs take them, write to them, pass them on and free them.
//!
//! Whoever has an area finds in every page what was written there last, by whatever CPU; a CPU that goes by a translation of what was
//! there before finds something else. Guard pages fault, and say whose they are; so does a store to what has become read-only. What is
//! freed is nobody's before its flush.

use super::{Cx, Done, Failure, Finding, Steps, on_all};
use crate::space;
use core::sync::atomic::Ordering;
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::random::Random;
use hugemm_base::{Clock, Extent, Order, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange, with};
use hugemm_kernel::kva::{AGE_NS, areas};
use hugemm_kernel::{page_fault, percpu, smp, tables};
use hugemm_kva::{Area, KvaError, Place, Request};
use hugemm_paging::{Flags, Mapping};
use hugemm_workloads::request::Plant;

/// Steps of each CPU in a round, at most.
const STEPS: u64 = 3000;
/// Places through which areas go from one CPU to another.
const SHELF: usize = 16;

/// An area, and what is written into it.
struct Marked {
    area: Area,
    mark: u64,
}

fn found(what: core::fmt::Arguments<'_>) -> Finding {
    Finding::new("areas", what)
}

fn refused(error: KvaError) -> Finding {
    found(format_args!("{error}"))
}

impl Marked {
    /// None if there is no memory.
    fn take(cx: Cx<'_>, random: &mut Random) -> Option<Marked> {
        let pages = if random.below(16) == 0 { 500 + random.below(600) } else { 1 + random.below(20) };
        let request = with!(Request::new(pages * PAGE_BYTES, "area"), zeroed = random.below(4) == 0);
        let area = match random.below(8) {
            0 => areas().alloc_stack(cx, Order::new(random.below(4) as u32).ok()?, "stack").ok()?.into_area(),
            _ => areas().alloc(cx, request).ok()?,
        };
        let marked = Marked { area, mark: random.word() };
        // SAFETY: the area's own pages; so below.
        marked.words().for_each(|(at, word)| unsafe { (at as *mut u64).write_volatile(word) });
        Some(marked)
    }

    /// A word of each page, another one in each, and what is in it.
    fn words(&self) -> impl Iterator<Item = (u64, u64)> {
        let (first, mark) = (self.area.range().start().get(), self.mark);
        (0..self.area.range().pages()).map(move |page| (first + page * PAGE_BYTES + page * 8 % PAGE_BYTES, mark ^ page))
    }

    fn check(&self, cpu: u32) -> Result<(), Finding> {
        for (at, expected) in self.words() {
            // SAFETY: as above.
            let word = unsafe { (at as *const u64).read_volatile() };
            if word != expected {
                return Err(found(format_args!("cpu{cpu} found {word:#x} at {at:#x}, not {expected:#x}")));
            }
        }
        Ok(())
    }

    /// The planted bug: the page after it shows its first one.
    fn map_guard(&self, cx: Cx<'_>) -> Result<(), Failure> {
        let mut table = tables::kernel().shared(space::memory(cx));
        let first = table.translate(self.area.range().start()).map(Pfn::containing);
        let frame = first.and_then(|first| Extent::new(first, 1).ok());
        let (Ok(guard), Some(frame)) = (VirtRange::new(self.area.end(), PAGE_BYTES), frame) else {
            return Err(found(format_args!("an area is not mapped")).into());
        };
        let how = Mapping { flags: Flags::WRITE | Flags::GLOBAL | Flags::HARDWARE, largest: PageSize::Size4K };
        Ok(table.map(guard, [frame], how)?)
    }

    /// The pages on both sides fault, and say whose they are.
    fn check_guards(&self, cx: Cx<'_>) -> Result<(), Finding> {
        let range = self.area.range();
        for at in [range.start().get() - 8, self.area.end().get()] {
            // SAFETY: a guard page: nobody has anything there.
            if unsafe { page_fault::load(VirtAddr::new(at)) }.is_some() {
                return Err(found(format_args!("a guard page is mapped at {at:#x}")));
            }
            match areas().what_is(cx, VirtAddr::new(at)) {
                Some(Place::Guard { above, below })
                    if [above, below].iter().flatten().any(|info| info.range == range) => {}
                // Others hold the lock, on as many CPUs.
                None => {}
                Some(place) => return Err(found(format_args!("{at:#x} beside an area: {place}"))),
            }
        }
        Ok(())
    }

    /// Nobody stores there while it is read-only.
    fn check_rights(&mut self, cx: Cx<'_>) -> Result<(), Finding> {
        let (all, at) = (self.area.range(), VirtAddr::new(self.words().next().map_or(0, |(at, _)| at)));
        // Writable to this CPU as it remembers.
        // SAFETY: the word that is there.
        unsafe { page_fault::store(at, self.mark) };
        areas().protect(cx, &mut self.area, all, Flags::NONE).map_err(refused)?;
        // SAFETY: as above: the word that is there.
        let stored = unsafe { page_fault::store(at, self.mark) };
        areas().protect(cx, &mut self.area, all, Flags::WRITE).map_err(refused)?;
        // SAFETY: as above.
        let again = unsafe { page_fault::store(at, self.mark) };
        if stored || !again {
            return Err(found(format_args!("{at} is stored to: read-only {stored}, writable {again}")));
        }
        Ok(())
    }

    fn free(self, cx: Cx<'_>) -> Result<(), Finding> {
        let at = self.area.range().start();
        areas().free(cx, self.area).map_err(|(error, _)| refused(error))?;
        match areas().what_is(cx, at) {
            Some(Place::Outside) => Err(found(format_args!("{at} was an area's"))),
            _ => Ok(()),
        }
    }
}

/// One round on all CPUs, until `until` at the latest. `alone` takes some seconds more, in which nobody frees.
#[inline(never)]
pub fn round(cx: Cx<'_>, seed: u64, plant: Plant, alone: bool, until: u64) -> Result<(), Failure> {
    cpus_have_theirs(cx)?;
    let shelf: [Lock<SpinLock, Option<Marked>>; SHELF] = core::array::from_fn(|_| Lock::new(None));
    let steps = Steps::until(until);
    let ran = on_all(cx, |cx, cpu| {
        let mut random = Random(seed ^ u64::from(cpu) << 32);
        steps.each(cx, STEPS, |cx, step| {
            if plant == Plant::UnflushedArea {
                // What this CPU flushes, stays: here and on all others.
                percpu::own().unflushed.store(true, Ordering::Relaxed);
            }
            let stepped = one(cx, (cpu, step), plant, &mut random, &shelf);
            percpu::own().unflushed.store(false, Ordering::Relaxed);
            stepped
        })
    });
    for place in &shelf {
        let old = place.lock().take();
        if let Some(old) = old {
            old.free(cx)?;
        }
    }
    ran?;
    waits_for_its_flush(cx)?;
    if alone {
        waits_no_longer(cx)?;
    }
    areas().trim(cx);
    Ok(())
}

fn one(
    cx: Cx<'_>,
    (cpu, step): (u32, u64),
    plant: Plant,
    random: &mut Random,
    shelf: &[Lock<SpinLock, Option<Marked>>; SHELF],
) -> Result<(), Failure> {
    let new = Marked::take(cx, random);
    let place = &shelf[random.below(SHELF as u64) as usize];
    let Some(mut old) = core::mem::replace(&mut *place.lock(), new) else { return Ok(()) };
    old.check(cpu)?;
    match step % 4 {
        0 => {
            if plant == Plant::MappedGuard {
                old.map_guard(cx)?;
            }
            old.check_guards(cx)?;
        }
        // Stacks are as good as others.
        1 => old.check_rights(cx)?,
        _ => {}
    }
    old.free(cx)?;
    Done::Areas.add(1);
    if step % 64 == 63 {
        areas().flush(cx);
    }
    Ok(())
}

/// What each CPU but the first has for itself is in an area, above a guard page.
fn cpus_have_theirs(cx: Cx<'_>) -> Result<(), Finding> {
    for cpu in 1..percpu::count() {
        let at = core::ptr::from_ref(percpu::of(cpu)).addr() as u64;
        // Others may hold the lock, and none may be found.
        let place = areas().what_is(cx, VirtAddr::new(at));
        let below = match place {
            Some(Place::Area(info)) => areas().what_is(cx, VirtAddr::new(info.range.start().get() - 8)),
            None => None,
            Some(_) => return Err(found(format_args!("cpu{cpu} has its own data at {at:#x}, which is no area's"))),
        };
        if !matches!(below, None | Some(Place::Guard { .. })) {
            return Err(found(format_args!("there is no guard page below what cpu{cpu} has at {at:#x}")));
        }
    }
    Ok(())
}

/// What nobody flushes is given back all the same: by an idle CPU, and where none idles, by one that reschedules.
fn waits_no_longer(cx: Cx<'_>) -> Result<(), Failure> {
    for all_busy in [false, true] {
        if !all_busy && percpu::count() == 1 {
            continue;
        }
        let Ok(area) = areas().alloc(cx, Request::new(PAGE_BYTES, "old")) else { return Ok(()) };
        areas().free(cx, area).map_err(|(error, _)| refused(error))?;
        let since = cx.platform().now_ns();
        // Ten times as long, of an emulated CPU.
        let waits = |cx: Cx<'_>| areas().counts(cx).waiting > 0 && cx.platform().now_ns() - since < 20 * AGE_NS;
        let busy = if all_busy { percpu::count() } else { 1 };
        smp::on_cpus(cx, busy, &|cx, _| {
            while waits(cx) {
                percpu::beat();
                if all_busy {
                    cx.cond_resched();
                }
            }
        });
        if areas().counts(cx).waiting > 0 {
            let who = if all_busy { "CPUs reschedule" } else { "CPUs idle" };
            return Err(found(format_args!("an area waits for its flush for ever while {who}")).into());
        }
    }
    Ok(())
}

/// Addresses that were freed are not taken again before their flush, and nobody finds anything there after it.
fn waits_for_its_flush(cx: Cx<'_>) -> Result<(), Failure> {
    areas().flush(cx);
    let batches = areas().counts(cx).batches;
    let request = Request::new(PAGE_BYTES, "waits");
    let mut ranges = [None; 8];
    for place in &mut ranges {
        let Ok(area) = areas().alloc(cx, request) else { return Ok(()) };
        *place = Some(area.range());
        areas().free(cx, area).map_err(|(error, _)| refused(error))?;
    }
    if areas().counts(cx).batches != batches {
        // It was time to look.
        return Ok(());
    }
    for (number, range) in ranges.iter().enumerate() {
        if ranges[..number].contains(range) {
            return Err(found(format_args!("{range:?} was taken again before its flush")).into());
        }
    }
    areas().flush(cx);
    for range in ranges.into_iter().flatten() {
        // SAFETY: nobody's address.
        if unsafe { page_fault::load(range.start()) }.is_some() {
            return Err(found(format_args!("{range:?} is mapped after its flush")).into());
        }
    }
    Ok(())
}
