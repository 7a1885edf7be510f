//! The compressed store: rules one by one, then random operations against the model.

use crate::support::{
    CPUS, Content, Machine, Rng, Runs, assert_nothing_lost, evict, machine, ops, run_as, take_back, with_frames,
};
use hugemm_base::inject::{FaultPlan, FaultPoint, Inject, NoFaults, every_fault};
use hugemm_base::{CpuCx, Order};
use hugemm_frames::{AllocRequest, Frames, Frozen, Plain};
use hugemm_reclaim::{Compressed, Compressor, Corrupt, PageBytes, SlotError, StoreError, Swap, SwapSlot, SwapStats};
use proptest::prelude::*;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::Mutex;

type Store<'f, 'm, I> = Compressed<'f, 'm, Plain<I>, Runs>;

fn page<I: Inject>(machine: &Machine, frames: &Frames<'_, Plain<I>>, content: Content) -> Frozen {
    let mut page = frames.alloc(&machine.cx(), AllocRequest::order(Order::ZERO)).expect("memory");
    content.write(machine.page(&mut page));
    page
}

fn with_store(
    pages: u64,
    limit: u64,
    test: impl FnOnce(&Machine, &Frames<'_, Plain>, &Store<'_, '_, NoFaults>, CpuCx<'_, Machine>),
) {
    let machine = machine(pages, u64::MAX);
    run_as(0);
    with_frames(&machine, NoFaults, |frames| {
        let cx = machine.cx();
        let store = Compressed::new(frames, &cx, Runs, CPUS, limit).expect("memory for work");
        test(&machine, frames, &store, machine.cx());
        store.close(&cx).expect("the test frees what it stores");
        assert_nothing_lost(&machine, frames);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..if cfg!(miri) { ProptestConfig::with_cases(2) } else { ProptestConfig::default() } })]

    #[test]
    fn random_operations_agree_with_the_model(data in proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 90 } else { 1500 })) {
        ops::run(&data, Runs);
    }
}

/// A compressor may have its working memory elsewhere: what is closed in the end is what was opened.
#[test]
fn working_memory_of_another_place_changes_nothing() {
    struct Elsewhere;
    impl Compressor for Elsewhere {
        type Scratch = u64;
        const WORST: usize = 64;
        fn init<'a>(&self, _: &'a mut MaybeUninit<u64>) -> &'a mut u64 {
            Box::leak(Box::default())
        }
        fn compress(&self, _: &mut u64, _: &PageBytes, _: &mut [u8]) -> Option<usize> {
            None
        }
        fn decompress(&self, _: &[u8], _: &mut PageBytes) -> Result<(), Corrupt> {
            Err(Corrupt)
        }
    }
    let machine = machine(64, u64::MAX);
    run_as(0);
    with_frames(&machine, NoFaults, |frames| {
        let cx = machine.cx();
        let store: Compressed<'_, '_, Plain<NoFaults>, Elsewhere> =
            Compressed::new(frames, &cx, Elsewhere, CPUS, 64).expect("memory for work");
        store.close(&cx).expect("empty");
        assert_nothing_lost(&machine, frames);
    });
}

#[test]
fn filled_pages_take_no_memory_and_know_no_limit() {
    with_store(64, 64, |machine, frames, store, cx| {
        let before = frames.stats(&cx).available();
        Swap::<Machine>::set_limit(store, 0);
        let words = [0, 1, 0xa5a5_a5a5, u32::MAX];
        let slots: Vec<SwapSlot> = words
            .map(|seed| {
                let page = page(machine, frames, Content { random: 0, seed });
                let slot = store.store(&cx, &page, 0).expect("no memory needed");
                frames.free(&cx, page);
                slot
            })
            .into();
        assert_eq!(frames.stats(&cx).available(), before);
        let mut into = page(machine, frames, Content { random: 9, seed: 9 });
        for (slot, seed) in slots.into_iter().zip(words) {
            store.load(&cx, &slot, &mut into, 0).expect("stored");
            Content { random: 0, seed }.assert_in(machine.page(&mut into));
            store.free(&cx, slot).expect("held");
        }
        frames.free(&cx, into);
    });
}

/// And a window on a part of it is closed again.
#[test]
fn a_working_area_needs_one_window_on_all_of_it() {
    let machine = machine(64, 0);
    with_frames(&machine, NoFaults, |frames| {
        let store = Compressed::<_, _>::new(frames, &machine.cx(), Runs, CPUS, 64);
        assert!(matches!(store, Err(StoreError::NoMemory)));
        assert_nothing_lost(&machine, frames);
    });
}

#[test]
fn pages_of_a_larger_block_are_stored_one_by_one() {
    with_store(64, 64, |machine, frames, store, cx| {
        let mut block = frames.alloc(&cx, AllocRequest::order(Order::new(2).expect("valid"))).expect("memory");
        let run = |block: Frozen| frames.split(block, Order::ZERO).expect("managed");
        // Fill its four pages through single handles, then store them through the whole.
        let mut pages = run(block);
        let mut bases = Vec::new();
        for seed in 0..4 {
            let mut page = pages.pop().expect("four");
            Content { random: 50, seed }.write(machine.page(&mut page));
            bases.push(page.pfn());
            let _ = page.into_dirty().into_extent();
        }
        // SAFETY: the four pages that were just given up are one aligned block, never divided elsewhere.
        block = unsafe {
            Frozen::assume_owned(bases[0], Order::new(2).expect("valid"), hugemm_frames::Mobility::Unmovable)
        };
        let slots: Vec<SwapSlot> = (0..4).map(|index| store.store(&cx, &block, index).expect("room")).collect();
        assert_eq!(store.store(&cx, &block, 4), Err(StoreError::NoSuchPage));
        assert_eq!(store.store(&cx, &block, u64::MAX), Err(StoreError::NoSuchPage));
        let mut into = page(machine, frames, Content { random: 9, seed: 9 });
        assert_eq!(store.load(&cx, &slots[0], &mut into, 1), Err(SlotError::NoSuchPage));
        for (slot, seed) in slots.into_iter().zip(0..) {
            store.load(&cx, &slot, &mut into, 0).expect("stored");
            Content { random: 50, seed }.assert_in(machine.page(&mut into));
            store.free(&cx, slot).expect("held");
        }
        frames.free(&cx, into);
        frames.free_extent(&cx, block.into_dirty());
    });
}

/// The limit counts every frame of the store; what was refused is unchanged and can be stored when there is room.
#[test]
fn a_full_store_refuses_and_loses_nothing() {
    let limit = if cfg!(miri) { 38 } else { 100 };
    with_store(256, limit, |machine, frames, store, cx| {
        let mut slots = Vec::new();
        let mut seed = 0;
        let mut refused = loop {
            let mut page = page(machine, frames, Content { random: 500, seed });
            match store.store(&cx, &page, 0) {
                Ok(slot) => slots.push((slot, Content { random: 500, seed })),
                Err(error) => {
                    assert_eq!(error, StoreError::Full);
                    Content { random: 500, seed }.assert_in(machine.page(&mut page));
                    break page;
                }
            }
            frames.free(&cx, page);
            seed += 1;
        };
        let stats = Swap::stats(store, &cx);
        assert_eq!((stats.frames, stats.refused_full), (limit, 1));
        // The limit grows: there is room again. It shrinks: what is there stays.
        Swap::<Machine>::set_limit(store, limit + 1);
        let slot = store.store(&cx, &refused, 0).expect("room");
        Swap::<Machine>::set_limit(store, 10);
        slots.push((slot, Content { random: 500, seed }));
        slots.into_iter().for_each(|stored| take_back(machine, store, stored, &mut refused));
        frames.free(&cx, refused);
    });
}

/// With no frame left anywhere, plain stores fail and evictions still free memory.
#[test]
fn eviction_frees_memory_when_none_is_left() {
    with_store(if cfg!(miri) { 50 } else { 256 }, 256, |machine, frames, store, cx| {
        let mut pages: Vec<(Frozen, Content)> = Vec::new();
        while let Ok(mut page) = frames.alloc(&cx, AllocRequest::order(Order::ZERO)) {
            let content = Content { random: 200, seed: pages.len() as u32 };
            content.write(machine.page(&mut page));
            pages.push((page, content));
        }
        assert_eq!(frames.stats(&cx).available(), 0);
        assert_eq!(store.store(&cx, &pages[0].0, 0), Err(StoreError::NoMemory));
        let count = pages.len() as u64;
        let mut slots = Vec::new();
        for (page, content) in pages {
            // What is left is kept from the store, so that every block is one of the evicted frames or one of these.
            slots.push((evict(machine, frames, store, (page, content)).expect("brings its own frame"), content));
        }
        // 200 random bytes are 400 in runs: a class of 448 bytes, nine pages to a frame.
        let available = frames.stats(&cx).available();
        assert_eq!(available, count - count.div_ceil(9), "of {count} pages");
        let mut into = page(machine, frames, Content { random: 1, seed: 1 });
        slots.into_iter().for_each(|stored| take_back(machine, store, stored, &mut into));
        frames.free(&cx, into);
    });
}

thread_local! {
    /// What happens at this thread's next allocation, which fails then.
    static AT_ALLOCATION: Cell<Option<&'static dyn Fn()>> = const { Cell::new(None) };
}

struct Then;

impl Inject for Then {
    fn fault(&self, _: FaultPoint) -> bool {
        AT_ALLOCATION.take().inspect(|then| then()).is_some()
    }
}

/// A page whose own frame was to become a block, when a piece became free, comes back as it was: an LRU reads what it was said to be there.
#[test]
fn a_page_whose_frame_was_not_needed_says_nothing_of_a_store() {
    let machine = machine(64, u64::MAX);
    run_as(0);
    with_frames(&machine, Then, |frames| {
        let cx = machine.cx();
        let store: Store<'_, '_, Then> = Compressed::new(frames, &cx, Runs, CPUS, 64).expect("memory for work");
        let mut pages = (0..10).map(|seed| page(&machine, frames, Content { random: 200, seed }));
        // As many as a frame has.
        let mut slots: Vec<_> = pages
            .by_ref()
            .take(9)
            .map(|page| {
                let slot = store.store(&cx, &page, 0).expect("room");
                frames.free(&cx, page);
                slot
            })
            .collect();
        let first = Cell::new(slots.pop());
        let frees = || store.free(&machine.cx(), first.take().expect("once")).expect("held");
        let frees: &dyn Fn() = &frees;
        let last = pages.next().expect("ten");
        // SAFETY: taken before `frees` ends, as is seen below.
        AT_ALLOCATION.set(Some(unsafe { std::mem::transmute::<&dyn Fn(), &'static dyn Fn()>(frees) }));
        let evicted = store.evict(&cx, last).expect("a piece");
        assert!(AT_ALLOCATION.take().is_none());
        let freed = evicted.freed.expect("it was not needed");
        assert_eq!(frames.descriptor(freed.pfn()).expect("managed").load(4), 0);
        frames.free(&cx, freed);
        slots.into_iter().chain([evicted.slot]).for_each(|slot| store.free(&cx, slot).expect("held"));
        store.close(&cx).expect("empty");
        assert_nothing_lost(&machine, frames);
    });
}

/// A page that does not compress stays where it is, since its own frame is what it would take; as a part of more, it is copied.
#[test]
fn an_incompressible_page_is_refused_or_copied() {
    with_store(64, 64, |machine, frames, store, cx| {
        let content = Content { random: 4096, seed: 3 };
        let page = page(machine, frames, content);
        let free = frames.stats(&cx).available();
        let (error, mut page) = store.evict(&cx, page).expect_err("it frees nothing");
        assert_eq!((error, frames.stats(&cx).available()), (StoreError::Incompressible, free));
        content.assert_in(machine.page(&mut page));
        let slot = store.store(&cx, &page, 0).expect("room");
        assert_eq!((Swap::<Machine>::is_whole(store, &slot), frames.stats(&cx).available()), (true, free - 1));
        let other = store.share(&cx, &slot).expect("few holders");
        store.free(&cx, slot).expect("held");
        Content { random: 7, seed: 3 }.write(machine.page(&mut page));
        store.load(&cx, &other, &mut page, 0).expect("held");
        content.assert_in(machine.page(&mut page));
        store.free(&cx, other).expect("held");
        Content { random: 7, seed: 3 }.write(machine.page(&mut page));
        let evicted = store.evict(&cx, page).expect("room");
        assert!(!Swap::<Machine>::is_whole(store, &evicted.slot));
        store.free(&cx, evicted.slot).expect("held");
        frames.free(&cx, evicted.freed.expect("a piece"));
    });
}

/// A back end that needs no frames says nothing of them: nothing that it has is whole, and a page that goes leaves its frame.
#[test]
fn a_back_end_on_a_device_takes_no_frames() {
    struct Device;
    // SAFETY: it loads nothing and hands every page back.
    unsafe impl Swap<Machine> for Device {
        fn store(&self, _: &CpuCx<'_, Machine>, _: &Frozen, page: u64) -> Result<SwapSlot, StoreError> {
            // SAFETY: a place of its own.
            Ok(unsafe { SwapSlot::from_bits(page) })
        }
        fn load(&self, _: &CpuCx<'_, Machine>, _: &SwapSlot, _: &mut Frozen, _: u64) -> Result<(), SlotError> {
            Err(SlotError::Corrupt)
        }
        fn share(&self, _: &CpuCx<'_, Machine>, _: &SwapSlot) -> Result<SwapSlot, SlotError> {
            Err(SlotError::Saturated)
        }
        fn free(&self, _: &CpuCx<'_, Machine>, _: SwapSlot) -> Result<(), (SlotError, SwapSlot)> {
            Ok(())
        }
        fn set_limit(&self, _: u64) {}
        fn stats(&self, _: &CpuCx<'_, Machine>) -> SwapStats {
            SwapStats::default()
        }
    }
    with_store(64, 64, |machine, frames, _, cx| {
        let evicted = Device.evict(&cx, page(machine, frames, Content { random: 4096, seed: 3 })).expect("room");
        assert!(!Device.is_whole(&evicted.slot));
        Device.free(&cx, evicted.slot).expect("held");
        frames.free(&cx, evicted.freed.expect("not its own"));
    });
}

/// The frame of a page that has become bad on its way out is no block for others.
#[test]
fn a_poisoned_page_is_not_evicted() {
    let machine = machine(64, u64::MAX);
    run_as(0);
    with_frames(&machine, NoFaults, |frames| {
        let cx = machine.cx();
        let store: Store<'_, '_, NoFaults> = Compressed::new(frames, &cx, Runs, CPUS, 64).expect("memory for work");
        let page = page(&machine, frames, Content { random: 50, seed: 3 });
        let hoard: Vec<_> = core::iter::from_fn(|| frames.alloc(&cx, AllocRequest::order(Order::ZERO)).ok()).collect();
        frames.hwpoison(&cx, page.pfn());
        let (error, page) = store.evict(&cx, page).expect_err("nobody may read it");
        assert_eq!(error, StoreError::Unreachable);
        frames.free(&cx, page);
        hoard.into_iter().for_each(|block| frames.free(&cx, block));
        store.close(&cx).expect("empty");
        let stats = frames.stats(&cx);
        assert_eq!((stats.refused, stats.available() + 1), (1, frames.managed()));
    });
}

#[test]
fn holders_are_counted_up_to_a_limit() {
    with_store(64, 64, |machine, frames, store, cx| {
        for random in [100, 4096] {
            let page = page(machine, frames, Content { random, seed: 1 });
            let mut slots = vec![store.store(&cx, &page, 0).expect("room")];
            if cfg!(miri) {
                slots.push(store.share(&cx, &slots[0]).expect("few holders"));
            } else {
                while slots.len() < usize::from(u16::MAX) {
                    slots.push(store.share(&cx, &slots[0]).expect("few holders"));
                }
                assert_eq!(store.share(&cx, &slots[0]), Err(SlotError::Saturated));
            }
            assert_eq!(Swap::stats(store, &cx).pages, 1);
            slots.into_iter().for_each(|slot| store.free(&cx, slot).expect("held"));
            assert_eq!(Swap::stats(store, &cx).pages, 0);
            frames.free(&cx, page);
        }
    });
}

/// A slot of another store is refused and stays with its owner.
#[test]
fn slots_of_another_store_are_refused() {
    with_store(128, 64, |machine, frames, store, cx| {
        let other: Store<'_, '_, NoFaults> = Compressed::new(frames, &cx, Runs, 1, 64).expect("memory for work");
        for random in [100, 4096] {
            let mut page = page(machine, frames, Content { random, seed: 1 });
            let slot = store.store(&cx, &page, 0).expect("room");
            assert_eq!(other.load(&cx, &slot, &mut page, 0), Err(SlotError::NotMine));
            assert_eq!(other.share(&cx, &slot), Err(SlotError::NotMine));
            let (error, slot) = other.free(&cx, slot).expect_err("not its own");
            assert_eq!(error, SlotError::NotMine);
            store.free(&cx, slot).expect("held");
            frames.free(&cx, page);
        }
        // A CPU without working memory is told so.
        run_as(1);
        let mut page = page(machine, frames, Content { random: 10, seed: 1 });
        assert_eq!(other.store(&cx, &page, 0), Err(StoreError::NoSuchCpu));
        frames.drain(&cx);
        run_as(0);
        // Nor has the CPU of that number of another platform any, beside which it runs.
        let stranger = crate::support::machine(64, u64::MAX);
        Content { random: 10, seed: 1 }.write(stranger.page(&mut page));
        assert_eq!(store.store(&stranger.cx(), &page, 0), Err(StoreError::NoSuchCpu));
        frames.free(&cx, page);
        other.close(&cx).expect("empty");
    });
}

/// A slot whose page has been freed is nobody's, whichever piece of its frame it was; nor is one beyond the frame's last.
#[test]
fn slots_that_are_free_are_refused() {
    with_store(64, 64, |machine, frames, store, cx| {
        let mut into = page(machine, frames, Content { random: 1, seed: 1 });
        let mut slots = Vec::new();
        for seed in 0..6 {
            let source = page(machine, frames, Content { random: 40, seed });
            slots.push(store.store(&cx, &source, 0).expect("room"));
            frames.free(&cx, source);
        }
        let first = slots[0].bits();
        assert!((0..).zip(&slots).all(|(index, slot)| slot.bits() == first + index), "in one frame");
        // SAFETY: to be refused.
        let stray = |bits| unsafe { SwapSlot::from_bits(bits) };
        let refused = |bits, into: &mut Frozen| {
            assert_eq!(store.load(&cx, &stray(bits), into, 0), Err(SlotError::NotMine));
            assert_eq!(store.share(&cx, &stray(bits)).err(), Some(SlotError::NotMine));
            assert_eq!(store.free(&cx, stray(bits)).expect_err("nobody's").0, SlotError::NotMine);
        };
        refused(first + 6, &mut into);
        refused(first + 63, &mut into);
        for index in [4, 1, 3] {
            let slot = slots.remove(slots.iter().position(|slot| slot.bits() == first + index).expect("held"));
            store.free(&cx, slot).expect("held");
            refused(first + index, &mut into);
        }
        assert_eq!(Swap::stats(store, &cx).pages, 3);
        for slot in slots {
            store.load(&cx, &slot, &mut into, 0).expect("stored");
            store.free(&cx, slot).expect("held");
        }
        frames.free(&cx, into);
    });
}

/// Pages of every kind are counted once, with the frames that they take, up to the limit; what was refused is counted too.
#[test]
fn what_is_stored_is_counted() {
    with_store(64, 64, |machine, frames, store, cx| {
        let kinds =
            [Content { random: 0, seed: 7 }, Content { random: 40, seed: 1 }, Content { random: 4096, seed: 2 }];
        let sources = kinds.map(|content| page(machine, frames, content));
        let stats = || Swap::stats(store, &cx);
        let work = stats().frames;
        Swap::<Machine>::set_limit(store, work + 3);
        let slots: Vec<_> = sources.iter().map(|source| store.store(&cx, source, 0).expect("room")).collect();
        assert_eq!((stats().pages, stats().frames, stats().limit, stats().stores), (3, work + 2, work + 3, 3));
        let whole = store.store(&cx, &sources[2], 0).expect("one more frame");
        assert_eq!(store.store(&cx, &sources[2], 0), Err(StoreError::Full));
        assert_eq!((stats().pages, stats().frames, stats().refused_full), (4, work + 3, 1));
        let usage = store.usage(&cx).find(|class| class.used > 0).expect("one small page");
        assert_eq!((usage.blocks, usage.used), (1, 1));
        assert_eq!(usage.pieces, u64::from(4096 / usage.piece_bytes));
        store.free(&cx, whole).expect("held");
        assert_eq!((stats().pages, stats().frames), (3, work + 2));
        for slot in slots {
            store.free(&cx, slot).expect("held");
        }
        assert_eq!((stats().pages, stats().frames), (0, work));
        sources.into_iter().for_each(|source| frames.free(&cx, source));
    });
}

/// Damage is an error, never an access outside: every byte of every piece is changed in turn.
#[test]
fn damaged_pieces_are_errors_or_wrong_pages() {
    with_store(64, 64, |machine, frames, store, cx| {
        let source = page(machine, frames, Content { random: 20, seed: 7 });
        let slot = store.store(&cx, &source, 0).expect("room");
        let mut into = page(machine, frames, Content { random: 1, seed: 1 });
        // Where the piece is: bits 8 to 47, and it is the first of its frame.
        let pfn = hugemm_base::Pfn::new(slot.bits() >> 8 & ((1 << 40) - 1));
        assert_eq!(slot.bits() & 255, 0);
        // SAFETY: the store owns the frame and does nothing meanwhile; the handle is forgotten below.
        let mut inside = unsafe { Frozen::assume_owned(pfn, Order::ZERO, hugemm_frames::Mobility::Unmovable) };
        let mut corrupt = 0;
        for at in (0..2).chain(4..if cfg!(miri) { 8 } else { 40 }) {
            for flip in [1, 0x80, 0xff] {
                machine.page(&mut inside)[at] ^= flip;
                match store.load(&cx, &slot, &mut into, 0) {
                    Ok(()) => {}
                    Err(error) => {
                        assert_eq!(error, SlotError::Corrupt);
                        corrupt += 1;
                    }
                }
                machine.page(&mut inside)[at] ^= flip;
            }
        }
        assert!(corrupt > 5, "{corrupt}");
        // A length that goes past the piece is damage, also where what follows there would do.
        let page = machine.page(&mut inside);
        let before = *page;
        let data = usize::from(u16::from_ne_bytes([page[0], page[1]]));
        page[4 + data..].fill(0);
        for length in [4000_u16, 4092] {
            machine.page(&mut inside)[..2].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(store.load(&cx, &slot, &mut into, 0), Err(SlotError::Corrupt));
            corrupt += 1;
        }
        *machine.page(&mut inside) = before;
        assert_eq!(Swap::stats(store, &cx).corrupt, corrupt);
        let _ = inside.into_dirty().into_extent();
        store.free(&cx, slot).expect("held");
        frames.free(&cx, source);
        frames.free(&cx, into);
    });
}

/// Invariant 7: every allocation fails once, at the store's making and at every store, and nothing is lost.
#[test]
fn every_allocation_point_can_fail() {
    let runs = every_fault(|plan| {
        let machine = machine(if cfg!(miri) { 64 } else { 128 }, u64::MAX);
        run_as(0);
        with_frames::<&FaultPlan, _>(&machine, plan, |frames| {
            let cx = machine.cx();
            let Ok(store) = Compressed::<'_, '_, _, Runs>::new(frames, &cx, Runs, CPUS, 1000) else {
                return assert_nothing_lost(&machine, frames);
            };
            let mut slots = Vec::new();
            for (seed, random) in [30, 1000, 1300, 1500, 4096, 31].into_iter().enumerate() {
                let content = Content { random, seed: seed as u32 };
                let Ok(mut page) = frames.alloc(&cx, AllocRequest::order(Order::ZERO)) else { continue };
                content.write(machine.page(&mut page));
                match store.store(&cx, &page, 0) {
                    Ok(slot) => slots.push((slot, content)),
                    Err(error) => assert_eq!(error, StoreError::NoMemory),
                }
                content.assert_in(machine.page(&mut page));
                slots.extend(evict(&machine, frames, &store, (page, content)).map(|slot| (slot, content)));
            }
            let mut into = crate::support::page(&machine, frames);
            slots.into_iter().for_each(|stored| take_back(&machine, &store, stored, &mut into));
            frames.free(&cx, into);
            store.close(&cx).expect("empty");
            assert_nothing_lost(&machine, frames);
        });
    });
    assert!(runs > 10, "{runs}");
}

/// The data oracle: several CPUs store, load, share and free at once, with failing allocations and too little memory;
/// every page is checked at every load. Slots wander between the threads.
#[test]
fn pages_survive_on_several_cpus() {
    let soak: u64 = std::env::var("HUGEMM_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let steps = if cfg!(miri) { 30 } else { 30_000 * soak };
    let machine = machine(600, u64::MAX);
    run_as(0);
    with_frames(&machine, FaultPlan::periodic(100, 13), |frames| {
        let store: Store<'_, '_, FaultPlan> =
            Compressed::new(frames, &machine.cx(), Runs, CPUS, 400).expect("memory for work");
        let common: Mutex<Vec<(SwapSlot, Content)>> = Mutex::new(Vec::new());
        let _watched = hugemm_threads::Watchdog::new();
        std::thread::scope(|scope| {
            for cpu in 0..CPUS {
                let (machine, store, common) = (&machine, &store, &common);
                scope.spawn(move || {
                    run_as(cpu);
                    let cx = machine.cx();
                    let mut rng = Rng(u64::from(cpu) + 1);
                    let mut held: Vec<(SwapSlot, Content)> = Vec::new();
                    let mut into = crate::support::page(machine, frames);
                    for _ in 0..steps {
                        match rng.below(8) {
                            0..=2 => {
                                let Ok(mut page) = frames.alloc(&cx, AllocRequest::order(Order::ZERO)) else {
                                    continue;
                                };
                                let random = [0, 10, 200, 900, 1500, 4096][rng.below(6) as usize];
                                let content = Content { random, seed: rng.below(1 << 30) as u32 };
                                content.write(machine.page(&mut page));
                                if rng.below(2) == 0 {
                                    if let Ok(slot) = store.store(&cx, &page, 0) {
                                        held.push((slot, content));
                                    }
                                    frames.free(&cx, page);
                                } else {
                                    held.extend(
                                        evict(machine, frames, store, (page, content)).map(|slot| (slot, content)),
                                    );
                                }
                            }
                            3 | 4 if !held.is_empty() => {
                                let (slot, content) = &held[rng.below(held.len() as u64) as usize];
                                store.load(&cx, slot, &mut into, 0).expect("held");
                                content.assert_in(machine.page(&mut into));
                            }
                            5 if !held.is_empty() => {
                                let (slot, content) = &held[rng.below(held.len() as u64) as usize];
                                let again = store.share(&cx, slot).expect("few holders");
                                common.lock().expect("alive").push((again, *content));
                            }
                            6 => held.extend(common.lock().expect("alive").pop()),
                            _ if !held.is_empty() => {
                                let (slot, _) = held.swap_remove(rng.below(held.len() as u64) as usize);
                                store.free(&cx, slot).expect("held");
                            }
                            _ => {}
                        }
                    }
                    frames.free(&cx, into);
                    common.lock().expect("alive").extend(held);
                    frames.drain(&cx);
                });
            }
        });
        let cx = machine.cx();
        let mut into = crate::support::page(&machine, frames);
        common
            .into_inner()
            .expect("alive")
            .into_iter()
            .for_each(|stored| take_back(&machine, &store, stored, &mut into));
        frames.free(&cx, into);
        store.close(&cx).expect("empty");
        assert_nothing_lost(&machine, frames);
    });
}

#[test]
fn errors_say_what_to_do() {
    let stores = [
        (StoreError::Full, "swap is full; raise its limit or free slots"),
        (StoreError::Incompressible, "the page does not compress, so evicting it frees nothing"),
        (StoreError::NoMemory, "swap needs a frame and none is free"),
        (StoreError::NoSuchCpu, "the swap back end was made for fewer CPUs"),
    ];
    for (error, text) in stores {
        assert_eq!(error.to_string(), text);
    }
    let slots = [
        (SlotError::NotMine, "the slot belongs to another swap back end"),
        (SlotError::Corrupt, "the stored page is damaged; its user must be told that it is lost"),
        (SlotError::Saturated, "the slot has too many holders; give this one a page of its own"),
    ];
    for (error, text) in slots {
        assert_eq!(error.to_string(), text);
    }
}

/// A hundred thousand pages at once, of many sizes, some with hundreds of holders: none is lost or mixed up, and the numbers add up.
#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter")]
fn a_hundred_thousand_pages_come_back() {
    const PAGES: usize = 100_000;
    with_store(16 << 10, 12 << 10, |machine, frames, store, cx| {
        let mut random = Rng(3);
        let mut block = frames.alloc(&cx, AllocRequest::order(Order::ZERO)).expect("memory");
        let mut back = frames.alloc(&cx, AllocRequest::order(Order::ZERO)).expect("memory");
        let mut stored: Vec<(SwapSlot, Content)> = Vec::new();
        let mut pages = 0;
        while stored.len() < PAGES {
            let bytes = [0, 0, 0, 1, 9, 70][random.below(6) as usize];
            let content = Content { random: bytes, seed: random.below(1 << 31) as u32 };
            content.write(machine.page(&mut block));
            let slot = store.store(&cx, &block, 0).expect("room");
            pages += 1;
            if random.below(3000) == 0 {
                (0..300).for_each(|_| stored.push((store.share(&cx, &slot).expect("few"), content)));
                // Each handle of a page of one word counts.
                pages += if bytes == 0 { 300 } else { 0 };
            }
            stored.push((slot, content));
        }
        let stats = Swap::<Machine>::stats(store, &cx);
        assert_eq!(stats.pages, pages);
        assert!(stats.frames < 12 << 10, "{stats:?}");
        // In any order, some of them read before they go.
        while !stored.is_empty() {
            let (slot, content) = stored.swap_remove(random.below(stored.len() as u64) as usize);
            if random.below(8) == 0 {
                store.load(&cx, &slot, &mut back, 0).expect("there");
                content.assert_in(machine.page(&mut back));
            }
            store.free(&cx, slot).expect("its own");
        }
        assert!(store.usage(&cx).all(|class| (class.blocks, class.used, class.data_bytes) == (0, 0, 0)));
        [block, back].into_iter().for_each(|block| frames.free(&cx, block));
    });
}
