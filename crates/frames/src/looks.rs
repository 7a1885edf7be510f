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

    /// However many arenas have been added, and wherever among them what is freed lies: its arena is found in a few steps.
    #[test]
    #[cfg_attr(miri, ignore = "a thousand arenas")]
    fn the_arena_of_a_frame_is_one_of_a_few_slots() {
        const ADDED: u64 = 1023;
        const PAGES: u64 = 128;
        let given = [spec(0, 1 << 15)];
        let config = FramesConfig::new(&given, 1);
        let memory = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
        // SAFETY: zeroed, as large and aligned as asked for, used once, and with one platform.
        let frames: Frames<'_> =
            unsafe { Frames::new(&config, Plain::default(), memory.ptr(), memory.bytes()) }.expect("enough");
        let threads: Threads = Threads::new(());
        run_as(0);
        let cx = threads.cx();
        release(&frames, &cx, given[0].extent);
        // In an order that is neither ascending nor descending; nothing adjoins.
        let added: Vec<ArenaSpec> = (1..=ADDED).map(|at| spec((at * 7 % (ADDED + 1)) << 15, PAGES)).collect();
        let pieces: Vec<Memory> =
            added.iter().map(|spec| Memory::new(Frames::<Plain>::added_bytes(spec).expect("valid"))).collect();
        for (spec, piece) in added.iter().zip(&pieces) {
            // SAFETY: as above; the memory stays as long as the manager.
            unsafe { frames.add(&cx, spec, piece.ptr(), piece.bytes()) }.expect("room");
            release(&frames, &cx, spec.extent);
        }
        let request = AllocRequest::order(Order::ZERO);
        let pages: Vec<Frozen> = core::iter::from_fn(|| frames.alloc(&cx, request).ok()).collect();
        assert_eq!(pages.len() as u64, (1 << 15) + ADDED * PAGES);
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
            most = most.max(most_in_a_pin(&threads, |cx| frames.free(cx, page)));
        }
        most = most.max(most_in_a_pin(&threads, |cx| frames.drain(cx)));
        // Of each of the 64 words of a round, when it is made ready and when it is freed.
        let steps = u64::from((ADDED + 1).ilog2());
        assert!(most <= ROUNDS_PER_PIN * 64 * 2 * steps, "{most} slots looked at in one pin");
        assert!(most > 64 * steps / 2, "only {most}: nothing is measured");
    }
}
