//! CPUs as threads.

use super::{World, at};
use hugemm_base::platform::CpuId;
use hugemm_base::{PAGE_BYTES, PageSize, Pfn, VirtRange};
use hugemm_paging::{Editing, Flags, Mapping, PageFormat, ShootdownBatch, ShootdownPolicy};
use std::sync::atomic::{AtomicBool, Ordering};

/// Rounds of mapping, ageing and unmapping.
const ROUNDS: usize = 200;

/// Pages that everybody uses.
const PAGES: u64 = 16;

/// The machine, for several threads: each plays other CPUs, and everything that they share here is made for that.
struct Shared<'w, F: PageFormat>(&'w World<F>);

// SAFETY: threads use the model, the tables, the spaces and the pool, all of which are shareable; the workload's own state
// (cells) is left alone.
unsafe impl<F: PageFormat> Sync for Shared<'_, F> {}

/// Stops the others at its end.
struct Stops<'s>(&'s AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl<F: PageFormat> World<F> {
    /// One CPU maps, ages and unmaps pages, folded ones in turns with single ones where the format has those, while the others store
    /// to them.
    pub fn race(&self, manager: CpuId, users: [CpuId; 2]) {
        self.mmu.see_edits();
        let (shared, stop) = (Shared(self), AtomicBool::new(false));
        let _watched = hugemm_threads::Watchdog::new();
        std::thread::scope(|scope| {
            for cpu in users {
                let (shared, stop) = (&shared, &stop);
                scope.spawn(move || shared.use_pages(cpu, stop));
            }
            // Also when it fails: the others would go on for ever.
            let _stops = Stops(&stop);
            shared.manage(manager);
        });
    }
}

impl<F: PageFormat> Shared<'_, F> {
    fn use_pages(&self, cpu: CpuId, stop: &AtomicBool) {
        let (world, space) = (self.0, &self.0.spaces[0]);
        world.mmu.as_cpu(cpu, |cx| {
            space.tlb.switch_in(&world.shootdown, cx);
            let mut page = u64::from(cpu.get());
            while !stop.load(Ordering::SeqCst) {
                page = (page * 5 + 3) % PAGES;
                let _ = world.mmu.store(cpu, at(page), page);
                if page == 7 && world.is_hole(cpu, page) {
                    std::thread::yield_now();
                }
                world.shootdown.handle_ipi(cx);
            }
            space.tlb.switch_out(&world.shootdown, cx);
            world.shootdown.handle_ipi(cx);
        });
    }

    fn manage(&self, cpu: CpuId) {
        let (world, space) = (self.0, &self.0.spaces[0]);
        let span = VirtRange::new(at(0), PAGES * PAGE_BYTES).expect("a span");
        let how = Mapping { flags: Flags::WRITE | Flags::USER, largest: PageSize::Size4K };
        let mut written = 0;
        world.mmu.as_cpu(cpu, |cx| {
            // On a busy machine the others may not have had a turn by then.
            for round in 0..50 * ROUNDS {
                if round >= ROUNDS && written > 0 {
                    break;
                }
                let fold = F::CONTIGUOUS != 0 && round % 2 == 0;
                if fold {
                    let group = world.pool.take_group().expect("frames in a row");
                    let written = Mapping { flags: how.flags | Flags::DIRTY, ..how };
                    space.table.shared(&world.pool).map_folded(span, [group], written).expect("room");
                } else {
                    let frames = std::iter::from_fn(|| world.pool.take());
                    space.table.shared(&world.pool).map(span, frames.take(PAGES as usize), how).expect("room");
                }
                let part = VirtRange::new(at(3), PAGE_BYTES).expect("a page");
                assert_eq!(space.table.exclusive(&world.pool).folded(part).is_some(), fold);
                for _ in 0..20 {
                    space.table.shared(&world.pool).test_and_clear_young(span, |_| ()).expect("mapped");
                    space.table.exclusive(&world.pool).test_and_clear_young(span, |_| ()).expect("mapped");
                    std::thread::yield_now();
                }
                let unhooked = space.table.exclusive(&world.pool).detach(span, Editing::LIVE).expect("mapped");
                let mut batch = ShootdownBatch::new(&space.tlb);
                let debt = batch.detached(unhooked).expect("its own").expect("mapped");
                let receipt = batch.flush(&world.shootdown, cx, &ShootdownPolicy::BATCHED);
                let detached = debt.release(&receipt).expect("paid");
                let done = space.table.exclusive(&world.pool).harvest(detached, Flags::NONE, |run| {
                    for frame in (run.extent.base().get()..run.extent.end().get()).map(Pfn::new) {
                        let wrote = world.mmu.take_written(frame);
                        assert!(!wrote || run.flags.contains(Flags::DIRTY), "{frame}: a dirty bit was lost");
                        written += u64::from(wrote);
                    }
                    world.pool.give(run.extent);
                });
                done.expect("harvested");
            }
        });
        assert!(written > 0, "nobody met anybody");
    }
}
