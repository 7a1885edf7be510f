//! Handles that reach a manager they are not of come back, and make no second owner.

use super::request;
use super::support::{Memory, Threads, arena, counted_pages, extent, pages, release};
use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuCx, Order, Pfn, with};
use hugemm_frames::{FolioRun, Frames, FramesConfig, Plain, RangeReport, RefError};

/// One manager of the first 1024 frames and another of the next.
fn with_two(f: impl FnOnce(&Frames<'_, Plain<NoFaults>>, &Frames<'_, Plain<NoFaults>>, &Threads, CpuCx<'_, Threads>)) {
    let specs = [[arena(0, 1024, 0)], [arena(1024, 1024, 0)]];
    let configs = [0, 1].map(|n: usize| FramesConfig::new(&specs[n], 1));
    let memories = configs.each_ref().map(Memory::for_config);
    let one = memories[0].manager(&configs[0], NoFaults);
    let other = memories[1].manager(&configs[1], NoFaults);
    release(&one, extent(0, 1024));
    release(&other, extent(1024, 1024));
    let threads: Threads = Threads::default();
    hugemm_threads::run_as(0);
    f(&one, &other, &threads, threads.cx());
}

/// Pages that another manager had split would be freed one by one into a map that knows the whole block: the block would
/// be handed out beside its pages.
#[test]
fn a_block_is_split_by_its_manager_alone() {
    with_two(|one, other, _, cx| {
        let block = one.alloc(&cx, request(9)).expect("memory");
        let back = other.split(block, Order::ZERO).expect_err("not its own");
        let mut run = one.split(back, Order::ZERO).expect("its own");
        assert_eq!(one.head_of(Pfn::new(run.extent().base().get() + 1)).map(|(_, order)| order), Some(Order::ZERO));
        assert_eq!(other.descriptors_mut(&mut run).count(), 0);
        assert_eq!(one.descriptors_mut(&mut run).count(), 512);
        let run = other.count_run(run).expect_err("not its own");
        assert_eq!(one.free_extent(&cx, run.into_dirty()), 512);
        assert_eq!((one.stats(&cx).available(), other.stats(&cx).available()), (1024, 1024));
    });
}

#[test]
fn a_reference_is_dropped_by_its_manager_alone() {
    with_two(|one, other, _, mut cx| {
        let mut block = one.alloc(&cx, request(2)).expect("memory");
        assert!(other.descriptor_mut(&mut block).is_none() && one.descriptor_mut(&mut block).is_some());
        let block = other.count(block).expect_err("not its own");
        let folio_ref = one.count(block).expect("its own");
        assert_eq!(other.get(&folio_ref), Err(RefError::NotManaged));
        let folio_ref = other.put(&cx, folio_ref).expect_err("not its own");
        let folio_ref = other.put_frozen(folio_ref).expect_err("not its own");
        let folio_ref = other.freeze(folio_ref).expect_err("not its own");
        let folio_ref = other.split_counted(folio_ref, Order::ZERO).expect_err("not its own");
        assert_eq!(one.references(folio_ref.pfn()), 1);
        let run = one.split_counted(folio_ref, Order::ZERO).expect("alone");
        assert_eq!((run.extent().pages(), run.order()), (4, Order::ZERO));
        assert_eq!(one.free_range(&mut cx, run).freed, 4);
        // What cannot come back is left alone.
        let strange = counted_pages(one, one.alloc(&cx, request(0)).expect("memory"));
        assert_eq!(other.free_range(&mut cx, pages(strange)), with!(RangeReport::default(), invalid = 1));
        assert_eq!(one.free_range(&mut cx, pages(strange)).freed, 1);
        let stranger = one.alloc(&cx, request(0)).expect("memory");
        let lost = stranger.extent();
        other.free(&cx, stranger);
        // SAFETY: nobody has it any more.
        one.free_extent(&cx, unsafe { hugemm_base::Dirty::assume_owned(lost) });
        assert_eq!((one.stats(&cx).available(), other.stats(&cx).available()), (1024, 1024));
    });
}

/// A run of folios is freed as such, whatever their order, and poisoned frames in them stay out.
#[test]
fn runs_of_folios_are_freed_one_by_one() {
    with_two(|one, _, _, mut cx| {
        let block = one.alloc(&cx, request(9)).expect("memory");
        let run = one.count_run(one.split(block, super::order(3)).expect("managed")).expect("managed");
        let base = run.extent().base().get();
        // SAFETY: the run holds a reference to each.
        let other = unsafe { one.get_at(Pfn::new(base + 8)) }.expect("held");
        let _ = one.hwpoison(&cx, Pfn::new(base + 21));
        let report = one.free_range(&mut cx, run);
        assert_eq!(
            report,
            with!(RangeReport::default(), freed = 512 - 8 - 1, kept = 8, refused = 1, runs = 63, invalid = 0)
        );
        let _ = one.put(&cx, other);
        assert_eq!((one.stats(&cx).available(), one.stats(&cx).refused), (1023, 1));
        // SAFETY: nobody has a reference to these any more, and what has none is left alone.
        let gone = unsafe { FolioRun::from_extent(extent(base + 32, 16), super::order(3)) };
        assert_eq!(one.free_range(&mut cx, gone), with!(RangeReport::default(), invalid = 16));
    });
}
