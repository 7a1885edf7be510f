//! The smallest start: one thread, one allocation. `cargo run -p hugemm-example-std-platform`
use hugemm::prelude::*;
use std::alloc::{Layout, alloc_zeroed};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (ram, layout) = (Extent::new(Pfn::new(0), 16 << 8)?, Layout::from_size_align(16 << 20, 2 << 20)?);
    // SAFETY: the layout has a size.
    let base = unsafe { alloc_zeroed(layout) };
    assert!(!base.is_null(), "no memory");
    // SAFETY: nobody else uses the memory, which stays where it is; there is no other.
    let (mut cx, ram) = unsafe { SingleCpu::start(ram, base) };
    let cx = &mut cx;
    let frames = Frames::carve(cx, ram)?;
    let clearer = Clearer::uncalibrated();
    let block = frames.alloc(cx, PageSize::Size2M)?;
    let zeroed = clearer.clear(cx, block.into_content(), &ClearRequest::bulk(2 << 20), &Never);
    frames.free_zeroed(cx, zeroed.map_err(|stopped| stopped.reason)?);
    let block = frames.alloc(cx, FrameRequest::order(PageSize::Size2M.order()).prefer_zeroed())?;
    assert!(block.is_zero());
    // The errors are handles on another manager's frames.
    let pages = frames.split(block, Order::ZERO).map_err(|_| "not split")?;
    let pages = frames.count_run(pages).map_err(|_| "not counted")?;
    let first = pages.extent().base();
    println!("512 pages from frame {first} on, freed as a range: {:?}", frames.free_range(cx, pages));
    assert_eq!(frames.stats(cx).available(), frames.managed());
    Ok(())
}
