//! Every allocation fails once, and what there was is what there is.

use crate::areas::MANY;
use crate::{Faults, Machine, Task, World, on_both};
use hugemm_base::inject::every_fault;
use hugemm_base::{Order, PAGE_BYTES, Relief, Shortfall};
use hugemm_frames::{Frames, Frozen};
use hugemm_kva::{KvaError, Limits, Request};
use std::cell::RefCell;

on_both! {
    /// A scenario that takes small, large, zeroed and aligned areas and a stack, with each allocation failing in turn.
    fn whatever_fails_is_undone(world: World<F>, MANY) {
        let requests = [
            Request::new(3 * PAGE_BYTES, "small").zeroed(),
            Request::new(PAGE_BYTES, "aligned").aligned(16 * PAGE_BYTES),
            Request::new((2 << 20) + 5 * PAGE_BYTES, "large"),
            Request::new(700 * PAGE_BYTES, "aligned and large").aligned(4 << 20),
        ];
        let scenario = |world: &World<F>| {
            let mut areas = Vec::new();
            let mut failed = 0;
            for request in requests {
                match world.on(2, |cx| world.kva.alloc(cx, request)) {
                    Ok(area) => areas.push(area),
                    Err(error) => {
                        assert_eq!(error, KvaError::NoMemory);
                        failed += 1;
                    }
                }
            }
            match world.on(2, |cx| world.kva.alloc_stack(cx, Order::new(2).expect("an order"), "stack")) {
                Ok(stack) => areas.push(stack.into_area()),
                Err(error) => {
                    assert_eq!(error, KvaError::NoMemory);
                    failed += 1;
                }
            }
            for area in areas {
                assert!(world.frames_of(area.range()).iter().all(Option::is_some));
                world.on(2, |cx| world.kva.free(cx, area)).expect("its own");
            }
            world.on(2, |cx| world.kva.flush(cx));
            failed
        };
        let free = world.trimmed();
        let mut failures = 0;
        let runs = every_fault(|plan| {
            failures += world.failing(plan, || scenario(&world));
            assert_eq!(world.trimmed(), free, "{plan:?}");
        });
        // A failed block is a smaller one; of order 0, of a record and of a table it is the end.
        assert!(runs > 20 && failures > 8, "{failures} failures in {runs} runs");
    }

    /// Memory and addresses that wait for their flush are given back before anything is refused.
    fn what_waits_is_given_back_first(world: World<F>, Limits::new(u64::MAX, u64::MAX)) {
        let most = 28 << 20;
        for _ in 0..3 {
            let area = world.on(0, |cx| world.kva.alloc(cx, Request::new(most, "most"))).expect("what waits");
            world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
        }
        // More addresses than there are, of which all wait.
        let runs = [world.mmu.host().frames()];
        for _ in 0..3 * crate::RANGE / runs[0].bytes() {
            let area = world.map_pages(0, &runs, Request::new(0, "all")).expect("what waits");
            world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
        }
        let counts = world.on(0, |cx| world.kva.counts(cx));
        assert!(counts.batches >= 4 && counts.waiting_pages == 0, "{counts:?}");
    }

    /// An area for which there is no memory asks who frees some, if its caller has somebody.
    fn relief_serves_areas(world: World<F>, MANY) {
        struct Hoard<'a>(&'a Frames<'static, Faults>, RefCell<Vec<Frozen>>);
        impl Relief<Machine> for Hoard<'_> {
            fn relieve(&self, cx: &mut Task<'_>, need: Shortfall) -> u64 {
                let most = self.1.borrow().len().min(need.pages as usize);
                self.1.borrow_mut().drain(..most).for_each(|block| self.0.free(cx, block));
                most as u64
            }
        }
        let free = world.trimmed();
        world.on(1, |cx| {
            let hook = Hoard(world.frames, RefCell::default());
            while let Ok(block) = world.frames.alloc(cx, Order::ZERO) {
                hook.1.borrow_mut().push(block);
            }
            let request = Request::new(5 * PAGE_BYTES, "relieved");
            assert_eq!(world.kva.alloc(cx, request).err(), Some(KvaError::NoMemory));
            // Its record and tables besides.
            let need = Shortfall::frames(10);
            let area = world.frames.or_relieve(cx, &hook, need, |cx| world.kva.alloc(cx, request)).expect("freed");
            assert!(hook.1.borrow().len() >= 30, "more was freed than was missing");
            world.kva.free(cx, area).expect("its own");
            hook.1.take().into_iter().for_each(|block| world.frames.free(cx, block));
        });
        assert_eq!(world.trimmed(), free);
    }
}
