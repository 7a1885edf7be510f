//! What one area is, and what becomes of it.

use crate::{CPUS, RANGE, START, World, extent, on_both, page};
use hugemm_base::{Extent, FrameUse, Order, PAGE_BYTES, Pfn, VirtAddr, VirtRange};
use hugemm_host::mmu::{Fault, Tables};
use hugemm_kva::{AreaKind, KvaError, Limits, Place, Request};
use hugemm_paging::{Flags, FrameTables, Lookup, PagingError, X86_64};

pub(crate) const MANY: Limits = Limits::new(1000, 1 << 20);
const HUGE: u64 = 2 << 20;

on_both! {
    /// Guard pages on both sides, of a small area and a large one, of the first and of neighbours.
    fn nothing_is_mapped_on_either_side(world: World<F>, MANY) {
        for bytes in [1, 5 * PAGE_BYTES, 5 * PAGE_BYTES, HUGE, 3 * HUGE + 1, 100 * PAGE_BYTES] {
            let area = world.on(1, |cx| world.kva.alloc(cx, Request::new(bytes, "one"))).expect("memory");
            let range = area.range();
            assert_eq!(range.pages(), bytes.div_ceil(PAGE_BYTES));
            let around = VirtRange::from_pages(range.first_page() - 1, range.pages() + 2).expect("a range");
            let found = world.frames_of(around);
            assert!(found[1..found.len() - 1].iter().all(Option::is_some), "{range}");
            assert!(found[0].is_none() && found[found.len() - 1].is_none(), "{range}");
            for at in [range.first_page() - 1, range.end_page()] {
                assert_eq!(world.load(2, VirtAddr::new(at << 12)), Err(Fault::NotPresent));
            }
        }
    }

    /// 2 MiB by one leaf, the rest by pages.
    fn the_largest_leaves_are_used(world: World<F>, MANY) {
        let area = world.on(0, |cx| world.kva.alloc(cx, Request::new(2 * HUGE + 3 * PAGE_BYTES, "large"))).expect("memory");
        let sizes = world.on(0, |cx| {
            // SAFETY: the host's memory is a direct map.
            let table = world.table.shared(unsafe { FrameTables::new(world.frames, cx) });
            [0, 512, 1024].map(|number| match table.lookup(page(&area, number)) {
                Lookup::Mapped(leaf) => (leaf.size.bytes(), leaf.flags.contains(Flags::GLOBAL | Flags::WRITE), leaf.flags.contains(Flags::EXEC)),
                other => panic!("{other:?}"),
            })
        });
        assert_eq!(sizes, [(HUGE, true, false), (HUGE, true, false), (PAGE_BYTES, true, false)]);
    }

    /// Many frees, one flush; until then neither addresses nor pages are anybody's; then both are.
    fn many_frees_are_one_flush(world: World<F>, Limits::new(64, 1 << 20)) {
        // Records and tables that stay are there after the first round.
        for round in 0..3 {
            let free = world.free();
            let areas: Vec<_> = (0..64)
                .map(|_| world.on(1, |cx| world.kva.alloc(cx, Request::new(3 * PAGE_BYTES, "one"))).expect("memory"))
                .collect();
            let (flushes, used) = (world.flushes(), world.free());
            for (number, area) in areas.into_iter().enumerate() {
                let at = area.range().start();
                assert_eq!((world.flushes(), world.on(0, |cx| world.kva.counts(cx)).waiting), (flushes, number as u64));
                assert!(matches!(world.on(0, |cx| world.kva.what_is(cx, at)), Some(Place::Area(_))));
                world.on(2, |cx| world.kva.free(cx, area)).expect("its own");
                assert_eq!(world.frames_of(VirtRange::new(at, PAGE_BYTES).expect("a page")), [None], "at once");
                if number < 63 {
                    assert!(matches!(world.on(0, |cx| world.kva.what_is(cx, at)), Some(Place::Freed(info)) if info.name == "one"));
                    assert_eq!(world.free(), used, "before the flush");
                }
            }
            assert_eq!((world.flushes(), world.on(0, |cx| world.kva.counts(cx)).waiting), (flushes + 1, 0));
            assert!(round == 0 || world.free() == free, "{} of {free}", world.free());
        }
        let uses: i64 = (0..CPUS).map(|cpu| world.on(cpu, |cx| hugemm_base::Cpu::counters(cx.platform()).snapshot().frames.of(FrameUse::AREAS))).sum();
        assert_eq!(uses, 0);
    }

    /// What all CPUs have taken and freed leaves no frame behind with any of them, be it for a record.
    fn trim_leaves_nothing_behind(world: World<F>, MANY) {
        let first = world.on(3, |cx| world.kva.alloc_stack(cx, Order::new(5).expect("an order"), "stays")).expect("memory");
        let free = world.trimmed();
        for cpu in 0..CPUS {
            // Small ones from two tables of a block, of which one has the stack.
            let small = [32 * PAGE_BYTES; 20];
            let areas: Vec<_> = [HUGE, PAGE_BYTES, 200 * PAGE_BYTES]
                .into_iter()
                .chain(small)
                .map(|bytes| world.on(cpu, |cx| world.kva.alloc(cx, Request::new(bytes, "one"))).expect("memory"))
                .collect();
            areas.into_iter().for_each(|area| world.on(CPUS - 1 - cpu, |cx| world.kva.free(cx, area)).expect("its own"));
            assert_eq!(world.trimmed(), free, "cpu{cpu}");
        }
        world.on(0, |cx| world.kva.free(cx, first.into_area())).expect("its own");
    }

    /// When it returns, nobody stores there any more, nor by what he remembers; then everybody does again.
    fn protect_is_flushed(world: World<F>, MANY) {
        let mut area = world.on(0, |cx| world.kva.alloc(cx, Request::new(4 * PAGE_BYTES, "module"))).expect("memory");
        let all = area.range();
        for cpu in 0..CPUS {
            (0..4).for_each(|number| world.store(cpu, page(&area, number), number).expect("writable"));
        }
        let flushes = world.flushes();
        world.on(0, |cx| world.kva.protect(cx, &mut area, all, Flags::EXEC)).expect("its own");
        assert_eq!(world.flushes(), flushes + 1);
        for cpu in 0..CPUS {
            for number in 0..4 {
                assert_eq!(world.store(cpu, page(&area, number), 9), Err(Fault::Protection), "cpu{cpu}");
                assert_eq!(world.load(cpu, page(&area, number)), Ok(number));
            }
        }
        let part = VirtRange::new(page(&area, 1), PAGE_BYTES).expect("a page");
        world.on(0, |cx| world.kva.protect(cx, &mut area, part, Flags::WRITE)).expect("its own");
        for cpu in 0..CPUS {
            assert_eq!(world.store(cpu, page(&area, 1), 9), Ok(()), "cpu{cpu}");
            assert_eq!(world.store(cpu, page(&area, 0), 9), Err(Fault::Protection), "cpu{cpu}");
        }
    }

    /// A stack is the upper half of what is aligned to twice its size, and one step over its end says whose it was.
    fn a_stack_says_when_it_runs_over(world: World<F>, MANY) {
        let order = Order::new(2).expect("an order");
        let stacks: Vec<_> = ["one", "two"].map(|name| world.on(0, |cx| world.kva.alloc_stack(cx, order, name)).expect("memory")).into();
        for (stack, name) in stacks.iter().zip(["one", "two"]) {
            let (bottom, top) = (stack.bottom().get(), stack.top().get());
            assert_eq!((top - bottom, top % 0x8000), (0x4000, 0));
            for into in [1, 0x1000, 0x4000] {
                let at = VirtAddr::new(bottom - into);
                assert_eq!(world.store(1, at, 1), Err(Fault::NotPresent));
                let place = world.on(1, |cx| world.kva.what_is(cx, at)).expect("no lock is held");
                assert!(matches!(place, Place::Guard { above: Some(info), .. } if info.name == name && info.kind == AreaKind::Stack), "{place}");
                assert_eq!(place.to_string(), format!("it is a guard page below the stack '{name}' at {bottom:#x}+0x4000"));
            }
            world.store(1, VirtAddr::new(bottom), 1).expect("the last that is mapped");
        }
        for stack in stacks {
            world.on(0, |cx| world.kva.free(cx, stack.into_area())).expect("its own");
        }
    }

    /// What an address is, everywhere.
    fn every_address_is_something(world: World<F>, MANY) {
        let is = |at: u64| world.on(3, |cx| world.kva.what_is(cx, VirtAddr::new(at))).expect("no lock is held");
        assert_eq!((is(START - 1), is(START + RANGE), is(0)), (Place::Outside, Place::Outside, Place::Outside));
        assert_eq!((is(START), is(START + RANGE - 1)), (Place::Unused, Place::Unused));
        let [small, large] = [3 * PAGE_BYTES, HUGE].map(|bytes| world.on(0, |cx| world.kva.alloc(cx, Request::new(bytes, "it"))).expect("memory"));
        for area in [&small, &large] {
            let (first, end) = (area.range().start().get(), area.end().get());
            assert!(matches!(is(first), Place::Area(info) if info.range == area.range()));
            assert!(matches!(is(end - 1), Place::Area(info) if info.range == area.range()));
            assert!(matches!(is(first - 1), Place::Guard { above: Some(info), .. } if info.range == area.range()));
            assert!(matches!(is(end), Place::Guard { below: Some(info), .. } if info.range == area.range()));
            assert!(matches!(is(end + PAGE_BYTES), Place::Unused), "{:?}", is(end + PAGE_BYTES));
        }
        // Beside what has been freed.
        let [gone, next] = [(); 2].map(|()| {
            world.on(0, |cx| world.kva.alloc(cx, Request::new(PAGE_BYTES, "next"))).expect("memory")
        });
        let freed = gone.end().get();
        world.on(0, |cx| world.kva.free(cx, gone)).expect("its own");
        assert_eq!(freed + PAGE_BYTES, next.range().start().get());
        assert!(matches!(is(freed), Place::Guard { above: Some(info), .. } if info.range == next.range()));
        assert!(matches!(is(freed - 1), Place::Freed(_)));
        world.on(0, |cx| world.kva.flush(cx));
        for area in [small, large] {
            let at = area.range().start().get();
            world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
            assert!(matches!(is(at), Place::Freed(info) if info.name == "it"));
            world.on(0, |cx| world.kva.flush(cx));
            assert_eq!(is(at), Place::Unused);
        }
    }

    /// Given pages stay whose they are, device memory has its attributes, and an interrupt's frees wait to be detached.
    fn others_pages_and_devices(world: World<F>, MANY) {
        let block = world.on(0, |cx| world.frames.alloc(cx, Order::new(3).expect("an order"))).expect("memory");
        let base = block.pfn();
        let runs = [extent(Pfn::new(base.get() + 4), 2), extent(base, 2)];
        let area = world.map_pages(0, &runs, Request::new(0, "ring")).expect("tables");
        let found = world.frames_of(area.range());
        assert_eq!(found, [4, 5, 0, 1].map(|place| Some(Pfn::new(base.get() + place))));
        let request = Request::new(0, "uart").allowing(Flags::WRITE);
        let uart = world.map_device(0, extent(Pfn::new(0xfed00), 1), request).expect("tables");
        let through = Request::new(0, "ram").allowing(Flags::WRITE | Flags::WRITE_THROUGH);
        let ram = world.map_device(0, extent(Pfn::new(0xfee00), 1), through).expect("tables");
        let flags = |at| world.on(0, |cx| {
            // SAFETY: the host's memory is a direct map.
            let found = world.table.shared(unsafe { FrameTables::new(world.frames, cx) }).lookup(at);
            match found {
                Lookup::Mapped(leaf) => leaf.flags & (Flags::UNCACHED | Flags::WRITE_THROUGH),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!((flags(uart.range().start()), flags(ram.range().start())), (Flags::UNCACHED, Flags::WRITE_THROUGH));
        let at = area.range().start();
        world.on(1, |cx| world.kva.free_later(cx, area)).expect("its own");
        assert!(world.load(1, at).is_ok(), "no task has come by yet");
        assert!(matches!(world.on(1, |cx| world.kva.what_is(cx, at)), Some(Place::Freed(_))));
        let free = world.free();
        for area in [uart, ram] {
            world.on(1, |cx| world.kva.free(cx, area)).expect("its own");
        }
        // The first of those took the interrupt's along, and all that waited.
        assert_eq!(world.on(0, |cx| world.kva.flush(cx)), 1);
        assert_eq!(world.load(1, at), Err(Fault::NotPresent));
        assert!(world.free() - free < 8, "the pages are whose they were");
        world.on(0, |cx| world.frames.free(cx, block));
    }

    /// Bad requests are refused, with what is wrong, and change nothing.
    fn bad_input_changes_nothing(world: World<F>, MANY) {
        let alloc = |request| world.on(0, |cx| world.kva.alloc(cx, request)).expect_err("bad");
        // The records' slab has its frame.
        let free = world.free();
        let one = Request::new(PAGE_BYTES, "bad");
        assert_eq!(alloc(Request::new(0, "bad")), KvaError::Empty);
        assert_eq!(alloc(one.aligned(3)), KvaError::Align { align: 3 });
        assert_eq!(alloc(one.aligned(0)), KvaError::Align { align: 0 });
        assert_eq!(alloc(one.aligned(1 << 40)), KvaError::Align { align: 1 << 40 });
        for flags in [Flags::WRITE | Flags::EXEC, Flags::USER, Flags::GLOBAL, Flags::UNCACHED] {
            assert_eq!(alloc(one.allowing(flags)), KvaError::Rights { flags });
        }
        assert_eq!(alloc(Request::new(RANGE, "bad")), KvaError::NoSpace { pages: RANGE / PAGE_BYTES + 1 });
        assert_eq!(alloc(Request::new(u64::MAX, "bad")), KvaError::NoSpace { pages: (1 << 52) + 1 });
        assert_eq!(alloc(Request::new(64 << 20, "more than there is")), KvaError::NoMemory);
        let bad = extent(Pfn::new((1 << 40) - 2), 2);
        if F::PHYS_BITS < 52 {
            let refused = world.map_pages(0, &[bad], one).expect_err("bad");
            assert_eq!(refused, KvaError::Paging(PagingError::BadFrame { frame: bad.base() }));
        }
        assert_eq!(world.map_pages(0, &[], one).expect_err("bad"), KvaError::Empty);
        let endless = [Extent::new(Pfn::new(0), (1 << 40) - 1).expect("frames"); 3];
        assert!(matches!(world.map_pages(0, &endless, one), Err(KvaError::NoSpace { .. })));
        assert!(world.free() + 2 >= free, "{} of {free}", world.free());

        let mut area = world.on(0, |cx| world.kva.alloc(cx, Request::new(HUGE, "it"))).expect("memory");
        let span = |first: u64, pages| VirtRange::from_pages(area.range().first_page() + first, pages).expect("a range");
        let (half, over, before) = (span(0, 256), span(1, 512), VirtRange::from_pages(area.range().first_page() - 1, 2).expect("a range"));
        let end = area.end();
        let mut protect = |span, rights| world.on(0, |cx| world.kva.protect(cx, &mut area, span, rights));
        assert_eq!(protect(over, Flags::NONE), Err(KvaError::OutOfBounds { at: end }));
        assert_eq!(protect(before, Flags::NONE), Err(KvaError::OutOfBounds { at: before.start() }));
        assert_eq!(protect(half, Flags::USER), Err(KvaError::Rights { flags: Flags::USER }));
        let cut = VirtAddr::new(half.start().get() + (1 << 20));
        assert_eq!(protect(half, Flags::NONE), Err(KvaError::Paging(PagingError::NeedsSplit { at: cut })));
        // Another manager, of the same addresses and of others.
        let other = World::<F>::new(if F::BREAK_BEFORE_MAKE { hugemm_host::mmu::Tables::Arm64 { resizes: false } } else { hugemm_host::mmu::Tables::X86_64 }, MANY, 1);
        let theirs = other.on(0, |cx| other.kva.alloc(cx, Request::new(HUGE, "theirs"))).expect("memory");
        let at = theirs.range().start();
        let (error, theirs) = world.on(0, |cx| world.kva.free(cx, theirs)).expect_err("another's");
        assert_eq!(error, KvaError::Foreign { at });
        let (error, theirs) = world.on(0, |cx| world.kva.free_later(cx, theirs)).expect_err("another's");
        assert_eq!(error, KvaError::Foreign { at });
        other.on(0, |cx| other.kva.free(cx, theirs)).expect("its own");
        world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
    }
}

/// Each says what is wrong, and what to do.
#[test]
fn errors_say_what_and_where() {
    let at = VirtAddr::new(0x7000);
    for (error, word) in [
        (KvaError::NoSpace { pages: 77 }, "77"),
        (KvaError::Align { align: 0x30 }, "0x30"),
        (KvaError::Rights { flags: Flags::USER }, "USER"),
        (KvaError::OutOfBounds { at }, "0x7000"),
        (KvaError::Foreign { at }, "0x7000"),
        (KvaError::Unreachable { frame: Pfn::new(0x55) }, "0x55"),
        (KvaError::Paging(PagingError::NeedsSplit { at }), "0x7000"),
        (KvaError::from(PagingError::NoTable), "no frames are left"),
        (KvaError::from(PagingError::OutOfBounds { at }), "outside"),
        (KvaError::Empty, "one byte"),
    ] {
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(Limits::of_frames(1 << 20), Limits::new(1024, 1 << 19));
}

/// Where no CPU can have a block to itself, of a small range, or of one that others have shared out, there is room for small areas as long
/// as there are addresses.
#[test]
fn a_range_without_a_block_is_used_up() {
    const MIB: u64 = 1 << 20;
    for pages in [3, 1000, 16 * MIB / PAGE_BYTES] {
        let range = VirtRange::from_pages(START >> 12, pages).expect("a range");
        let world = World::<X86_64>::of(Tables::X86_64, MANY, 7, 1 << 39, range);
        for _ in 0..2 {
            let mut areas = Vec::new();
            let refused = loop {
                match world.on(areas.len() as u32 % CPUS, |cx| world.kva.alloc(cx, Request::new(PAGE_BYTES, "small"))) {
                    Ok(area) => areas.push(area),
                    Err(error) => break error,
                }
            };
            assert_eq!(refused, KvaError::NoSpace { pages: 2 }, "what was asked for");
            // Each has a guard page behind it.
            assert!(areas.len() as u64 + 5 > pages / 2, "{} areas in {pages} pages", areas.len());
            areas.into_iter().for_each(|area| world.on(0, |cx| world.kva.free(cx, area)).expect("its own"));
            world.on(0, |cx| world.kva.flush(cx));
        }
    }
}
