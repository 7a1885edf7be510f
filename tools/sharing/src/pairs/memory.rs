//! Blocks, counted pages, pieces of the heap, kernel areas and pages of a pool.

use super::{Context, NODES, Pairs};
use crate::machine::{CPUS, FIRST, MEMORY, Machine, keep};
use anyhow::{Result, anyhow};
use hugemm::base::{Extent, Never, Order, PageSize, Pfn, VirtAddr};
use hugemm::frames::{Frames, Frozen, Plain};
use hugemm::heap::Heap;
use hugemm::hugetlb::{FlatMemory, HugePage, Nodes, SoftMap, VmemmapOptimizer, WalkCache};
use hugemm::kva::Request;
use hugemm::paging::Keep;
use hugemm_threads::run_as;
use std::alloc::Layout;

impl Pairs<'_> {
    /// Traces a pair of the page allocator on a machine of its own.
    fn of_frames<T>(
        &self,
        nodes: u32,
        name: &str,
        operations: usize,
        prepare: impl Fn(&'static Frames<'static>, &mut Context) -> T,
        operate: impl Fn(&'static Frames<'static>, &mut Context, T),
    ) -> Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        let machine = Machine::bare(self.ground, nodes)?;
        let frames = machine.roots.frames;
        self.trace(
            &machine,
            name,
            operations as u64,
            |cx, _, _| prepare(frames, cx),
            |cx, _, ready| operate(frames, cx, ready),
        )
    }

    pub(super) fn blocks(&self) -> Result<()> {
        for (nodes, on) in NODES {
            for (what, order) in [("4 KiB", 0), ("2 MiB", 9), ("order 6", 6)] {
                let order = Order::new(order).map_err(|error| anyhow!("{error}"))?;
                // More than a CPU keeps.
                let many = if order == Order::ZERO { 8192 } else { 64 };
                for (count, done) in [(1, "taken and freed"), (many, "taken, then all freed")] {
                    self.of_frames(
                        nodes,
                        &format!("{what} {done}, {on}"),
                        count,
                        |_, _| Vec::<Frozen>::with_capacity(count),
                        |frames, cx, mut blocks| {
                            blocks.extend((0..count).map(|_| frames.alloc(cx, order).expect("memory")));
                            blocks.into_iter().for_each(|block| frames.free(cx, block));
                        },
                    )?;
                }
            }
            let counted = |frames: &'static Frames<'static>, cx: &mut Context| {
                let block = frames.alloc(cx, PageSize::Size2M).expect("memory");
                let run = frames.split(block, Order::ZERO).expect("a block");
                frames.count_run(run).expect("nobody else's")
            };
            for (count, many) in [(1, ""), (64, ", many")] {
                self.of_frames(
                    nodes,
                    &format!("512 counted pages freed as a range{many}, {on}"),
                    count,
                    |frames, cx| (0..count).map(|_| counted(frames, cx)).collect::<Vec<_>>(),
                    |frames, cx, runs| runs.into_iter().for_each(|run| _ = frames.free_range(cx, run)),
                )?;
            }
        }
        Ok(())
    }

    pub(super) fn heap(&self) -> Result<()> {
        for (name, elsewhere) in [
            ("heap: a piece of each size taken and freed", false),
            ("heap: a piece of each size freed that the other CPU took", true),
        ] {
            for (nodes, name) in self.on_nodes(name) {
                let machine = Machine::bare(self.ground, nodes)?;
                let cx = self.ground.cpus.cx();
                let heap: &'static Heap<'static, Plain> =
                    keep(Heap::new(machine.roots.frames, &cx, CPUS).map_err(|error| anyhow!("{error}"))?);
                machine.roots.heap.set(heap);
                let sizes = || sizes_of_pieces().map(|size| Layout::from_size_align(size, 8).expect("small"));
                let take = |cx: &mut Context| {
                    sizes().map(|layout| heap.alloc(cx, layout).expect("memory")).collect::<Vec<_>>()
                };
                let prepare = |cx: &mut Context, cpu: u64, _| {
                    if elsewhere {
                        run_as(1 - cpu as u32);
                        take(cx)
                    } else {
                        Vec::with_capacity(sizes_of_pieces().count())
                    }
                };
                self.trace(&machine, &name, sizes_of_pieces().count() as u64, prepare, |cx, _, mut pieces| {
                    if !elsewhere {
                        pieces.extend(sizes().map(|layout| heap.alloc(cx, layout).expect("memory")));
                    }
                    for (piece, layout) in pieces.into_iter().zip(sizes()) {
                        // SAFETY: taken with this layout, and freed once.
                        unsafe { heap.free(cx, piece, layout) };
                    }
                })?;
            }
        }
        Ok(())
    }

    pub(super) fn areas(&self) -> Result<()> {
        for (nodes, name) in self.on_nodes("kva: an area of 16 KiB taken and freed each") {
            let machine = Machine::bare(self.ground, nodes)?;
            let kva = machine.kva(&self.ground.cpus.cx())?;
            self.trace(
                &machine,
                &name,
                64,
                |_, _, _| (),
                |cx, _, ()| {
                    for _ in 0..64 {
                        let area = kva.alloc(cx, Request::new(16 << 10, "a pair")).expect("memory");
                        assert!(kva.free(cx, area).is_ok());
                    }
                },
            )?;
        }
        Ok(())
    }

    pub(super) fn pool(&self) -> Result<()> {
        let name = "pool: a huge page taken and put back each";
        if !self.wants(name) {
            return Ok(());
        }
        let machine = Machine::bare(self.ground, 1)?;
        let (pool, frames, mut cx) = (machine.roots.pool, machine.roots.frames, self.ground.cpus.cx());
        struct Flat;
        // SAFETY: nothing is remembered.
        unsafe impl WalkCache for Flat {}
        let memory = Extent::new(Pfn::new(FIRST), MEMORY >> 12).map_err(|error| anyhow!("{error}"))?;
        let start = std::ptr::with_exposed_provenance_mut(self.ground.base as usize);
        let start = std::ptr::NonNull::new(start).ok_or_else(|| anyhow!("mapped"))?;
        // SAFETY: all of memory is mapped there, for ever.
        let map = SoftMap::new(VirtAddr::new(0), &mut [], unsafe { FlatMemory::new(start, memory) }, Flat, Keep);
        // SAFETY: nothing is mapped by it.
        let optimizer = unsafe { VmemmapOptimizer::new(frames, &map, &[], Default::default()) };
        optimizer.set_enabled(false);
        pool.resize(&mut cx, &optimizer, 16, Nodes::All, &Never).map_err(|error| anyhow!("{error}"))?;
        self.trace(
            &machine,
            name,
            1,
            |_, _, _| (),
            |cx, _, ()| {
                let page: HugePage = pool.take(cx, Nodes::All, false).expect("a page");
                assert!(pool.put(cx, page, false).is_ok());
            },
        )
    }
}

/// One of each class of the heap.
fn sizes_of_pieces() -> impl Iterator<Item = usize> {
    let large = (5..=10).flat_map(|log| [5, 6, 7, 8].map(|part| part << log)).filter(|size| *size <= 6144);
    [8].into_iter().chain((1..=8).map(|part| 16 * part)).chain(large)
}
