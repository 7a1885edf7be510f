//! Areas from one page to many GiB at any alignment, up to the last address there is, beside a list of who has which addresses: none has
//! two owners, or one before its flush; all lead where they should; all are free at last. And nobody is kept off a CPU by what is large.

use crate::{CPUS, HALF, World, extent};
use hugemm_base::{Cpu, Extent, Order, PAGE_BYTES, Pfn, VirtAddr, VirtRange};
use hugemm_frames::AllocRequest;
use hugemm_host::mmu::Tables;
use hugemm_kva::{Area, AreaKind, KvaError, Limits, Place, Request};
use hugemm_paging::{Aarch64, PageFormat, X86_64};
use hugemm_threads::Random;

/// In pages.
const MIB2: u64 = 512;
const GIB: u64 = 1 << 18;

/// The upper half of all addresses, and what of it is for areas: all but the first pages.
const ALL: u64 = 1 << 47;
const FIRST: u64 = (HALF >> 12) + 3;
const END: u64 = 1 << 52;

/// Tables that the range has only a part of: they stay.
const BEGIN: u64 = 2;

struct Owned {
    area: Option<Area>,
    range: VirtRange,
    kind: AreaKind,
    /// Frames of somebody else, that it shows.
    runs: Vec<Extent>,
}

struct Run<F: PageFormat> {
    world: World<F>,
    random: Random,
    /// Areas, and what waits: those without.
    owned: Vec<Owned>,
    batches: u64,
}

fn at(page: u64) -> VirtAddr {
    VirtAddr::new(page << 12)
}

impl<F: PageFormat> Run<F> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound.max(1))
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// Whatever waited is nobody's any more if a batch has been given back.
    fn notice(&mut self) {
        let counts = self.world.on(0, |cx| self.world.kva.counts(cx));
        if counts.batches != self.batches {
            self.batches = counts.batches;
            self.owned.retain(|owned| owned.area.is_some());
        }
        let own = |owned: &&Owned| owned.area.is_none() && owned.runs.is_empty();
        let own: u64 = self.owned.iter().filter(own).map(|owned| owned.range.pages()).sum();
        assert!(counts.waiting_pages <= own, "{counts:?}");
    }

    fn take(&mut self, cpu: u32) {
        let pages = match self.below(6) {
            0 => 1 + self.below(70),
            1 => MIB2 - 1 + self.below(3),
            2 => self.one_of(&[GIB, GIB - 1, 2 * GIB + MIB2]),
            3 => 9 * GIB,
            _ => 1 + self.below(3 * MIB2),
        };
        let align = self.one_of(&[1, 1, 1, 64, MIB2, GIB, 512 * GIB, 1 << 33]);
        let request = Request::new(pages * PAGE_BYTES, "scale").aligned(align * PAGE_BYTES);
        let (kva, how) = (&self.world.kva, self.random.below(8));
        // The frames lie as the addresses will, or do not.
        let alike = if pages > 3 * MIB2 { 0 } else { self.random.below(2) };
        let cut = self.random.below(pages);
        let cut = if pages > 3 * MIB2 { cut / MIB2 * MIB2 } else { cut };
        let first = (1 << 30) + self.random.below(1 << 10) * GIB + alike;
        let runs = [(first, cut), (first + cut + 64 * GIB, pages - cut)];
        let runs: Vec<Extent> = runs.iter().filter(|run| run.1 > 0).map(|run| extent(Pfn::new(run.0), run.1)).collect();
        let (taken, kind) = match how {
            0 => {
                let order = Order::new(self.random.below(5) as u32).expect("small");
                let stack = self.world.on(cpu, |cx| kva.alloc_stack(cx, order, "scale"));
                (stack.map(|stack| stack.into_area()), AreaKind::Stack)
            }
            1 if pages < 800 => (self.world.on(cpu, |cx| kva.alloc(cx, request)), AreaKind::Pages),
            2 => {
                let first = self.world.on(cpu, |cx| kva.map_device(cx, runs[0], request));
                (first, AreaKind::Device)
            }
            _ => (self.world.on(cpu, |cx| kva.map_pages(cx, &runs, request)), AreaKind::Mapped),
        };
        self.notice();
        let area = match taken {
            Ok(area) => area,
            Err(KvaError::NoMemory) => return,
            // There are three such places.
            Err(KvaError::NoSpace { .. }) if align == 1 << 33 => return,
            Err(error) => panic!("{error}"),
        };
        let range = area.range();
        assert!(kind == AreaKind::Stack || range.start().is_aligned(request.align));
        assert!(range.first_page() > FIRST && range.end_page() < END);
        let meets = |other: VirtRange| other.first_page() <= range.end_page() && range.first_page() <= other.end_page();
        assert!(!self.owned.iter().any(|owned| meets(owned.range)), "{range} touches another");
        let runs = match kind {
            AreaKind::Mapped => runs,
            AreaKind::Device => runs[..1].to_vec(),
            AreaKind::Pages | AreaKind::Stack => Vec::new(),
        };
        assert!(runs.is_empty() || range.pages() == runs.iter().map(|run| run.pages()).sum::<u64>());
        self.owned.push(Owned { area: Some(area), range, kind, runs });
    }

    fn free(&mut self, cpu: u32) {
        let index = self.below(self.owned.len() as u64) as usize;
        let Some(area) = self.owned.get_mut(index).and_then(|owned| owned.area.take()) else { return };
        let kva = &self.world.kva;
        match self.random.below(4) {
            0 => self.world.on(cpu, |cx| kva.free_later(cx, area)).expect("its own"),
            _ => self.world.on(cpu, |cx| kva.free(cx, area)).expect("its own"),
        }
        self.notice();
    }

    /// What the tables and the manager say of a page.
    fn look(&mut self) {
        let index = self.below(self.owned.len() as u64) as usize;
        let Some(Owned { area, range, kind, runs }) = self.owned.get(index) else { return };
        let (first, end) = (range.first_page(), range.end_page());
        let middle = first + self.random.below(end - first);
        for page in [first, middle, end - 1] {
            let what = self.world.on(0, |cx| self.world.kva.what_is(cx, at(page)));
            let live = area.is_some();
            let (info, is_live) = match what {
                Some(Place::Area(info)) => (info, true),
                Some(Place::Freed(info)) => (info, false),
                other => panic!("{other:?} at {}", at(page)),
            };
            let is = (is_live, info.name, info.kind, info.range);
            assert_eq!(is, (live, "scale", *kind, *range), "{}", at(page));
            let found = self.world.frames_of(VirtRange::from_pages(page, 1).expect("a page"))[0];
            let mut into = page - first;
            for run in runs.iter().filter(|_| live) {
                if into < run.pages() {
                    assert_eq!(found, Some(Pfn::new(run.base().get() + into)), "{}", at(page));
                    break;
                }
                into -= run.pages();
            }
            assert!(!live || found.is_some());
        }
        for guard in [first - 1, end] {
            assert_eq!(self.world.frames_of(VirtRange::from_pages(guard, 1).expect("a page")), [None]);
            let what = self.world.on(0, |cx| self.world.kva.what_is(cx, at(guard)));
            assert!(!matches!(what, Some(Place::Area(_))), "{what:?}");
        }
    }

    fn step(&mut self) {
        let cpu = self.below(CPUS.into()) as u32;
        match self.below(16) {
            0..6 => self.take(cpu),
            6..11 => self.free(cpu),
            11 if self.random.below(6) == 0 => {
                let kva = &self.world.kva;
                match self.random.below(2) {
                    0 => self.world.on(cpu, |cx| kva.trim(cx)),
                    _ => _ = self.world.on(cpu, |cx| kva.flush(cx)),
                }
                self.notice();
            }
            _ => self.look(),
        }
    }
}

fn run<F: PageFormat>(walks: Tables, seed: u64) {
    let range = VirtRange::from_pages(FIRST, END - FIRST).expect("a range");
    let limits = Limits::new(1 + seed * 13 % 50, 3000);
    let world = World::<F>::of(walks, limits, seed, ALL, range);
    let free = world.trimmed();
    let mut run = Run { world, random: Random(seed + 1), owned: Vec::new(), batches: 0 };
    (0..300).for_each(|_| run.step());
    assert!(run.batches > 2);
    while run.owned.iter().any(|owned| owned.area.is_some()) {
        run.free(0);
    }
    run.world.on(0, |cx| run.world.kva.flush(cx));
    assert!(free - run.world.trimmed() <= BEGIN, "frames are lost");
    // All addresses are free, in one piece.
    let most = |pages| run.world.on(0, |cx| run.world.kva.alloc(cx, Request::new(pages * PAGE_BYTES, "all")).err());
    let last = END - (FIRST + 1).next_multiple_of(MIB2) - 1;
    assert_eq!(most(last), Some(KvaError::NoMemory));
    assert!(matches!(most(last + 1), Some(KvaError::NoSpace { .. })));
    run.world.mmu.check().expect("no violation");
}

#[test]
fn areas_of_gigabytes_are_where_they_say() {
    for seed in 0..4 {
        run::<X86_64>(Tables::X86_64, seed);
        run::<Aarch64>(Tables::Arm64 { resizes: false }, seed + 10);
    }
}

/// How often others may run while `work` is done.
fn points<F: PageFormat>(world: &World<F>, work: impl FnOnce()) -> u64 {
    let points = || world.on(0, |cx| cx.platform().counters().reschedules.get());
    let before = points();
    work();
    points() - before
}

/// A large area is given back in parts.
#[test]
fn others_run_while_a_large_area_is_given_back() {
    let range = VirtRange::from_pages(FIRST, END - FIRST).expect("a range");
    let world = World::<X86_64>::of(Tables::X86_64, Limits::new(100, 3000), 7, ALL, range);
    let (pages, free) = (64 * GIB, world.trimmed());
    let runs = [extent(Pfn::new(1 << 30), pages)];
    let area = world.on(0, |cx| world.kva.map_pages(cx, &runs, Request::new(0, "large"))).expect("tables");
    world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
    let given = points(&world, || assert_eq!(world.on(0, |cx| world.kva.flush(cx)), 1));
    assert!(given >= 7, "{given} for {pages} pages");
    assert!(free - world.trimmed() <= BEGIN);
}

/// So is one taken from memory that is in pieces.
#[test]
fn others_run_while_a_large_area_is_taken() {
    let range = VirtRange::from_pages(FIRST, END - FIRST).expect("a range");
    let world = World::<X86_64>::of(Tables::X86_64, Limits::new(100, 3000), 7, ALL, range);
    let pieces = world.on(0, |cx| {
        let mut pieces = Vec::new();
        while let Ok(block) = world.frames.alloc(cx, AllocRequest::order(Order::ZERO)) {
            pieces.push(block);
        }
        let (kept, freed): (Vec<_>, Vec<_>) = pieces.into_iter().partition(|block| block.pfn().get() % 2 == 0);
        freed.into_iter().for_each(|block| world.frames.free(cx, block));
        kept
    });
    let taken = points(&world, || {
        let area = world.on(0, |cx| world.kva.alloc(cx, Request::new(3500 * PAGE_BYTES, "pieces"))).expect("memory");
        world.on(0, |cx| world.kva.free(cx, area)).expect("its own");
    });
    assert!(taken >= 3, "{taken}");
    world.on(0, |cx| pieces.into_iter().for_each(|block| world.frames.free(cx, block)));
}
