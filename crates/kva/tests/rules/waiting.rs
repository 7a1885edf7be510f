//! How much waits for its flush, and for how long.

use crate::areas::MANY;
use crate::{World, on_both, page};
use hugemm_base::{Order, PAGE_BYTES};
use hugemm_frames::{AllocError, AllocRequest, Frozen};
use hugemm_kva::{Area, Limits, Request};
use hugemm_paging::{FrameTables, Lookup, PageFormat};

const HUGE: u64 = 2 << 20;

fn take<F: PageFormat>(world: &World<F>, bytes: u64) -> Area {
    world.on(0, |cx| world.kva.alloc(cx, Request::new(bytes, "one"))).expect("memory")
}

fn free<F: PageFormat>(world: &World<F>, area: Area) {
    world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
}

fn block<F: PageFormat>(world: &World<F>, order: Order) -> Result<Frozen, AllocError> {
    world.on(0, |cx| world.frames.alloc(cx, AllocRequest::order(order)))
}

fn waiting_pages<F: PageFormat>(world: &World<F>) -> u64 {
    world.on(0, |cx| world.kva.counts(cx)).waiting_pages
}

on_both! {
    /// What waits is a share of memory: areas of which a thousand are all of it take two flushes.
    fn a_thousandth_of_memory_a_thousand_times(world: World<F>, Limits::of_frames(crate::FRAMES as u64)) {
        let flushes = world.flushes();
        for _ in 0..1000 {
            let area = take(&world, 8 * PAGE_BYTES);
            free(&world, area);
        }
        assert_eq!(world.flushes() - flushes, 1, "at half of memory");
        assert!(waiting_pages(&world) < 4096);
    }

    /// Never more waits than is free, but for a sixteenth of the limit: others need not ask for it.
    fn no_more_waits_than_is_free(world: World<F>, Limits::new(u64::MAX, 4096)) {
        let areas: Vec<_> = (0..20).map(|_| take(&world, 128 * PAGE_BYTES)).collect();
        let mut others = Vec::new();
        let order = Order::new(6).expect("an order");
        while world.free() > 1000 {
            others.push(block(&world, order).expect("there are some"));
        }
        let (mut most, flushes) = (0, world.flushes());
        for area in areas {
            free(&world, area);
            most = most.max(waiting_pages(&world));
            assert!(waiting_pages(&world) <= world.free() + 4096 / 16, "{} beside {}", waiting_pages(&world), world.free());
        }
        // A thousand were free, and more then.
        assert!(most >= 896 && world.flushes() > flushes, "{most}");
        others.into_iter().for_each(|block| world.on(0, |cx| world.frames.free(cx, block)));
    }

    /// A block of 2 MiB that waits is given back before smaller ones are taken.
    fn what_waits_comes_before_smaller_blocks(world: World<F>, MANY) {
        let area = take(&world, HUGE);
        // Of the rest of memory every second page is free: more than 2 MiB, but no 2 MiB.
        let pages: Vec<_> = std::iter::from_fn(|| block(&world, Order::ZERO).ok()).collect();
        let (keep, go): (Vec<_>, Vec<_>) = pages.into_iter().partition(|page| page.pfn().get().is_multiple_of(2));
        go.into_iter().for_each(|page| world.on(0, |cx| world.frames.free(cx, page)));
        free(&world, area);
        assert!(world.free() >= 512, "{}", world.free());
        let area = take(&world, HUGE);
        let size = world.on(0, |cx| {
            // SAFETY: the host's memory is a direct map.
            let found = world.table.shared(unsafe { FrameTables::new(world.frames, cx) }).lookup(page(&area, 0));
            match found {
                Lookup::Mapped(leaf) => leaf.size.bytes(),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(size, HUGE);
        keep.into_iter().for_each(|block| world.on(0, |cx| world.frames.free(cx, block)));
        free(&world, area);
    }

    /// Pages of areas that adjoin are freed as one range, whichever is freed first.
    fn what_adjoins_is_freed_at_once(world: World<F>, MANY) {
        let rounds = || world.on(0, |cx| world.frames.stats(cx)).lock_rounds;
        for backwards in [false, true] {
            let mut areas: Vec<_> = (0..10).map(|_| take(&world, HUGE)).collect();
            if backwards {
                areas.reverse();
            }
            areas.into_iter().for_each(|area| free(&world, area));
            let before = rounds();
            assert_eq!(world.on(0, |cx| world.kva.flush(cx)), 10);
            assert!(rounds() - before < 5, "{backwards}: {} rounds", rounds() - before);
        }
    }

    /// What waited at one call waits no longer at the next, be it detached or not; what came after a flush does.
    fn what_is_old_is_flushed(world: World<F>, MANY) {
        let old = || world.on(1, |cx| world.kva.flush_old(cx));
        assert_eq!([old(), old()], [0, 0], "nothing waits");
        free(&world, take(&world, PAGE_BYTES));
        assert_eq!(old(), 0);
        free(&world, take(&world, PAGE_BYTES));
        assert_eq!([old(), old(), old()], [2, 0, 0]);
        free(&world, take(&world, PAGE_BYTES));
        assert_eq!(old(), 0);
        world.on(0, |cx| world.kva.flush(cx));
        free(&world, take(&world, PAGE_BYTES));
        assert_eq!([old(), old()], [0, 1], "another batch");
        let area = take(&world, PAGE_BYTES);
        world.on(0, |cx| world.kva.free_later(cx, area)).expect("its own");
        assert_eq!([old(), old()], [0, 1]);
    }
}
