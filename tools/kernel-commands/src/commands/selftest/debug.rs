//! The feature `debug`: a use after free, double frees of a frame and in the heap, and a leak are planted, and found.

use super::{Cx, Failure, Finding};
use crate::output::sample;
use core::alloc::Layout;
use hugemm_base::{FrameUse, Order, Pfn};
use hugemm_frames::{Frozen, Mobility};
use hugemm_kernel::heap::heap;
use hugemm_kernel::layout;
use hugemm_kernel::memory::{findings, frames, watch};

/// What leaks.
const LEAK: FrameUse = FrameUse::own(7).expect("one of eight");

fn missed(what: &str) -> Failure {
    Finding::new("debug", format_args!("{what} was planted and not found")).into()
}

/// Takes a frame by number, which this CPU has just freed.
fn take(cx: Cx<'_>, pfn: Pfn) -> Result<Frozen, Failure> {
    let block = frames().alloc(cx, Order::ZERO).map_err(|_| Failure::Memory)?;
    if block.pfn() == pfn { Ok(block) } else { Err(missed("what was freed last comes first; the planted frame")) }
}

/// Plants each; how much has been found.
pub fn planted(cx: Cx<'_>) -> Result<u64, Failure> {
    let watch = watch().ok_or_else(|| missed("the watch"))?;
    let before = findings();

    let block = frames().alloc(cx, Order::ZERO).map_err(|_| Failure::Memory)?;
    let pfn = block.pfn();
    frames().free(cx, block);
    // SAFETY: none: this is what is to be found. The direct map has the frame, which this CPU's cache holds.
    unsafe { layout::direct(pfn.start().get()).cast::<u64>().add(7).write_volatile(1) };
    let block = take(cx, pfn)?;
    if findings() != before + 1 {
        return Err(missed("a use after free"));
    }

    frames().free(cx, block);
    // SAFETY: none: this is what is to be found. The cache has it twice then, and gives both back here.
    frames().free(cx, unsafe { Frozen::assume_owned(pfn, Order::ZERO, Mobility::Unmovable) });
    let _ = take(cx, pfn)?.into_dirty();
    let block = take(cx, pfn)?;
    frames().free(cx, block);
    if findings() != before + 2 {
        return Err(missed("a double free of a frame"));
    }

    let (heap, layout) = (heap().ok_or(Failure::Memory)?, Layout::new::<[u64; 8]>());
    let refused = heap.stats().misused;
    let memory = heap.alloc(cx, layout).map_err(|_| Failure::Memory)?;
    // SAFETY: none: the second is what is to be found, and is refused.
    unsafe {
        heap.free(cx, memory, layout);
        heap.free(cx, memory, layout);
    }
    if heap.stats().misused != refused + 1 {
        return Err(missed("a double free in the heap"));
    }

    let began = watch.begin();
    let leaked = frames().alloc_for(cx, LEAK, Order::ZERO).map_err(|_| Failure::Memory)?;
    let mut rows = [None; 8];
    let found = watch.in_use_by_caller(began, &mut rows);
    let leak = rows.into_iter().flatten().find(|(holder, _)| holder.of == Some(LEAK));
    let named = leak.and_then(|(holder, pages)| Some((holder.taken?.line(), pages)));
    frames().free_for(cx, LEAK, leaked);
    let Some((line, 1)) = named else { return Err(missed("a leak")) };
    sample("selftest.found", (findings() - before) as f64, "planted bugs of frames", &[]);
    sample("selftest.leak", f64::from(line), "line of the one who leaked", &[]);
    sample("selftest.leaks", found as f64, "callers", &[]);
    Ok(findings())
}

/// The rest of the self-test is sound.
pub fn nothing_else(found: u64) -> Result<(), Failure> {
    match findings() - found {
        0 => Ok(()),
        more => Err(Finding::new("debug", format_args!("{more} were found that nobody planted")).into()),
    }
}
