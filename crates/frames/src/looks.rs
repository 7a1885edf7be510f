//! Counts what loops look at, for this crate's own tests of how much that is under one pin. Nothing otherwise.

/// A loop looks at one more.
#[inline(always)]
pub(crate) fn count() {
    #[cfg(all(test, not(loom)))]
    tests::LOOKS.set(tests::LOOKS.get() + 1);
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use crate::arena::ArenaSpec;
    use crate::frames::{Env, Frames, Plain};
    use crate::frozen::Frozen;
    use crate::layout::FramesConfig;
    use crate::page_alloc::{AllocRequest, ROUNDS_PER_PIN};
    use core::cell::Cell;
    use hugemm_base::{CpuCx, Dirty, Extent, NodeId, Order, Pfn};
    use hugemm_threads::{Memory, Threads, run_as};

    std::thread_local! {
        pub(crate) static LOOKS: Cell<u64> = const { Cell::new(0) };
    }

    /// The most that are looked at in one pin of `body`.
    pub(crate) fn most_in_a_pin<M: Sync>(threads: &Threads<M>, body: impl FnOnce(&mut CpuCx<'_, Threads<M>>)) -> u64 {
        threads.most_in_a_pin(|| LOOKS.get(), body)
    }

    fn spec(base: u64, pages: u64) -> ArenaSpec {
        ArenaSpec::new(Extent::new(Pfn::new(base), pages).expect("in range"), NodeId::new(0))
    }

    fn release<E: Env>(frames: &Frames<'_, E>, cx: &CpuCx<'_, Threads>, extent: Extent) {
        // SAFETY: once; there is no memory behind the numbers.
        let _ = unsafe { frames.release(cx, Dirty::assume_owned(extent)) };
    }

    const ADDED: u64 = 1023;
    const PAGES: u64 = 128;
    const GIVEN: u64 = 1 << 15;

    /// Steps to one of as many arenas.
    const STEPS: u64 = (ADDED + 1).ilog2() as u64;

    /// A manager to which arenas have been added in an order that is neither ascending nor descending; nothing adjoins. All is free.
    fn with_many_arenas(test: impl FnOnce(&Frames<'_>, &Threads, u64)) {
        let added: Vec<ArenaSpec> = (1..=ADDED).map(|at| spec((at * 7 % (ADDED + 1)) << 15, PAGES)).collect();
        with_arenas(&added, test);
    }

    /// A manager of so many frames from 0 on, on one CPU; all are free.
    pub(crate) fn with_frames(pages: u64, test: impl FnOnce(&Frames<'_>, &Threads)) {
        let given = [spec(0, pages)];
        let config = FramesConfig::new(&given, 1);
        let memory = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
        // SAFETY: zeroed, as large and aligned as asked for, used once, and with one platform.
        let frames: Frames<'_> =
            unsafe { Frames::new(&config, Plain::default(), memory.ptr(), memory.bytes()) }.expect("enough");
        let threads: Threads = Threads::new(());
        run_as(0);
        release(&frames, &threads.cx(), given[0].extent);
        test(&frames, &threads);
    }

    /// The same with arenas that have been added, and how many slots were looked at in one pin of that.
    fn with_arenas(added: &[ArenaSpec], test: impl FnOnce(&Frames<'_>, &Threads, u64)) {
        with_frames(GIVEN, |frames, threads| {
            let pieces: Vec<Memory> =
                added.iter().map(|spec| Memory::new(Frames::<Plain>::added_bytes(spec).expect("valid"))).collect();
            let mut most = 0;
            for (spec, piece) in added.iter().zip(&pieces) {
                // SAFETY: zeroed, as large as asked for, and used once; it stays as long as anybody uses the manager.
                let add = |cx: &mut CpuCx<'_, Threads>| unsafe {
                    frames.add(cx, spec, piece.ptr(), piece.bytes()).expect("room");
                };
                most = most.max(most_in_a_pin(threads, add));
                release(frames, &threads.cx(), spec.extent);
            }
            test(frames, threads, most);
        });
    }

    /// However many arenas have been added, and wherever among them what is freed lies: its arena is found in a few steps.
    #[test]
    #[cfg_attr(miri, ignore = "a thousand arenas")]
    fn the_arena_of_a_frame_is_one_of_a_few_slots() {
        with_many_arenas(|frames, threads, _| {
            let cx = threads.cx();
            let request = AllocRequest::order(Order::ZERO);
            let pages: Vec<Frozen> = core::iter::from_fn(|| frames.alloc(&cx, request).ok()).collect();
            assert_eq!(pages.len() as u64, GIVEN + ADDED * PAGES);
            // One page of each arena in turn.
            let (mut pages, mut most): (Vec<Option<Frozen>>, u64) = (pages.into_iter().map(Some).collect(), 0);
            let others = pages.split_off(1 << 15);
            let mut turns: Vec<Vec<Frozen>> = Vec::new();
            let mut seen = std::collections::HashMap::new();
            for page in others.into_iter().flatten() {
                let turn = seen.entry(page.pfn().get() >> 15).or_insert(0_usize);
                if turns.len() == *turn {
                    turns.push(Vec::new());
                }
                turns[*turn].push(page);
                *turn += 1;
            }
            for page in turns.into_iter().flatten() {
                most = most.max(most_in_a_pin(threads, |cx| frames.free(cx, page)));
            }
            most = most.max(most_in_a_pin(threads, |cx| frames.drain(cx)));
            // Of each of the 64 words of a round, when it is made ready, when it is freed, and where its arena may have more of two kinds then.
            assert!(most <= ROUNDS_PER_PIN * 64 * 4 * STEPS, "{most} slots looked at in one pin");
            assert!(most > 64 * STEPS / 2, "only {most}: nothing is measured");
        });
    }

    /// Most slots that are looked at in one pin of a request of an order, of any kind, which fails if it is so for one below a frame.
    fn most_of(frames: &Frames<'_>, threads: &Threads, order: u32, below: Pfn, fails: bool) -> u64 {
        let request = AllocRequest::order(Order::new(order).expect("valid"));
        let requests = [request, request.movable(), request.prefer_zeroed()];
        let looks = requests.map(|request| {
            most_in_a_pin(threads, |cx| {
                let found = frames.alloc_below(cx, below, request);
                assert_eq!(found.is_err(), fails, "{below}: {request:?}");
                found.into_iter().for_each(|block| frames.free(cx, block));
            })
            .max(most_in_a_pin(threads, |cx| {
                let found = frames.alloc(cx, request);
                assert!(fails || found.is_ok(), "{request:?}");
                found.into_iter().for_each(|block| frames.free(cx, block));
            }))
        });
        looks.into_iter().fold(0, u64::max)
    }

    /// However many arenas have been added, an allocation looks only at those that may have what is sought: at none of those that are full,
    /// or have only less, or lie above what it may take. What there is, is found.
    #[test]
    #[cfg_attr(miri, ignore = "a thousand arenas")]
    fn an_allocation_looks_at_few_of_many_arenas() {
        // As often as a search looks in vain in one round.
        const FEW: u64 = 64 * STEPS;
        const HIGH: Pfn = Pfn::new((ADDED + 1) << 15);
        with_many_arenas(|frames, threads, added| {
            let cx = threads.cx();
            assert!(added <= FEW, "{added} slots looked at to add one");
            let request = AllocRequest::order(Order::ZERO);
            let pages = Vec::from_iter(core::iter::from_fn(|| frames.alloc(&cx, request).ok()));
            assert_eq!(pages.len() as u64, GIVEN + ADDED * PAGES);
            let stats = most_in_a_pin(threads, |cx| _ = frames.node_stats(cx, NodeId::new(0)));
            assert!(stats <= 2 * FEW, "{stats} slots looked at to count");
            for order in [0, 1, 3, 6, 9, 10] {
                let most = most_of(frames, threads, order, HIGH, true);
                assert!(most <= FEW, "all is full: {most} slots looked at for order {order}");
            }
            // A page of each arena, then all of the highest.
            let kept = |page: &Frozen| page.pfn().get() < GIVEN || page.pfn().get() % GIVEN != 5;
            let (pages, ones): (Vec<_>, Vec<_>) = pages.into_iter().partition(kept);
            ones.into_iter().for_each(|page| frames.free(&cx, page));
            frames.drain(&cx);
            for (order, below) in [(1, HIGH), (3, HIGH), (6, HIGH), (0, Pfn::new(GIVEN)), (9, HIGH), (10, HIGH)] {
                let most = most_of(frames, threads, order, below, true);
                assert!(most <= 2 * FEW, "a page is free in each: {most} slots looked at for order {order}");
            }
            let (_pages, highest): (Vec<_>, Vec<_>) =
                pages.into_iter().partition(|page| page.pfn().get() < HIGH.get() - GIVEN);
            highest.into_iter().for_each(|page| frames.free(&cx, page));
            frames.drain(&cx);
            for order in [0, 1, 3, 6] {
                let most = most_of(frames, threads, order, HIGH, false);
                assert!(most <= 2 * FEW, "some is free: {most} slots looked at for order {order}");
            }
        });
    }

    /// Arenas that are free as a whole, as those of most machines that were given memory, have no place that is broken, and are not asked for
    /// one each time a page is sought.
    #[test]
    #[cfg_attr(miri, ignore = "130 GiB of arenas")]
    fn a_page_is_not_sought_in_all_arenas_that_are_whole() {
        let added: Vec<ArenaSpec> = (1..=130).map(|at| spec(at << 18, 1 << 18)).collect();
        with_arenas(&added, |frames, threads, _| {
            let cx = threads.cx();
            let given = frames.take_range(&cx, spec(0, GIVEN).extent).expect("free").into_extent();
            // Some pages in each word of two groups.
            for page in (0..1024).step_by(64).map(|at| given.slice(at, at + 1)) {
                // SAFETY: part of what was taken.
                frames.free_extent(&cx, unsafe { Dirty::assume_owned(page) });
            }
            frames.drain(&cx);
            let request = AllocRequest::order(Order::ZERO);
            let most = most_in_a_pin(threads, |cx| drop(frames.alloc(cx, request).expect("a page").into_dirty()));
            assert!(most <= 2 * 64 * STEPS, "{most} slots looked at");
        });
    }
}
