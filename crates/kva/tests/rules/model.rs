//! A random program on four CPUs, beside a list of who owns each address and each frame: what is found at each address from every CPU, and that
//! neither is anybody else's before its flush. In a GiB; and in all addresses of the upper half, by areas from one page to many GiB at any
//! alignment, over frames of somebody else.

use crate::{CPUS, HALF, RANGE, START, World, extent, page};
use hugemm_base::{Extent, Order, PAGE_BYTES, Pfn, VirtAddr, VirtRange, with};
use hugemm_host::mmu::{Fault, Tables};
use hugemm_kva::{Area, AreaKind, KvaError, Limits, Place, Request};
use hugemm_paging::{Aarch64, Flags, PageFormat, X86_64};
use hugemm_threads::Random;
use std::collections::BTreeMap;

/// In pages.
const MIB2: u64 = 512;
const GIB: u64 = 1 << 18;

/// The upper half of all addresses, and what of it is for areas: all but the first pages, up to the last.
pub(crate) const ALL: u64 = 1 << 47;
const FIRST: u64 = (HALF >> 12) + 3;
const END: u64 = 1 << 52;

/// Tables that this has only a part of: they stay.
pub(crate) const BEGIN: u64 = 2;

pub(crate) fn everywhere() -> VirtRange {
    VirtRange::from_pages(FIRST, END - FIRST).expect("a range")
}

struct Owned {
    /// None: it waits.
    area: Option<Area>,
    range: VirtRange,
    kind: AreaKind,
    /// Frames of somebody else, that it shows.
    shown: Vec<Extent>,
    /// Its own, and what is stored in the first word of each.
    frames: Vec<Pfn>,
    mark: u64,
    writable: bool,
}

struct Run<F: PageFormat> {
    world: World<F>,
    random: Random,
    /// Everywhere, not in a GiB: some addresses lead to frames that are none, so no CPU may look at any.
    wide: bool,
    owned: Vec<Owned>,
    batches: u64,
    /// Who owns a frame, by marks; and it stays so while it waits.
    owners: BTreeMap<Pfn, u64>,
    marks: u64,
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
            for frame in self.owned.extract_if(.., |owned| owned.area.is_none()).flat_map(|owned| owned.frames) {
                self.owners.remove(&frame);
                // In use again at once, for all that the model knows: as whatever the allocator makes of it.
                self.world.mmu.freed(extent(frame, 1));
                self.world.mmu.allocated(extent(frame, 1));
            }
        }
        let waiting = || self.owned.iter().filter(|owned| owned.area.is_none());
        let own = waiting().filter(|owned| owned.shown.is_empty()).map(|owned| owned.range.pages());
        assert!(counts.waiting_pages <= own.sum::<u64>(), "{counts:?}");
        assert!(self.wide || counts.waiting == waiting().count() as u64, "{counts:?}");
    }

    fn pages(&mut self) -> u64 {
        match self.below(8) {
            0 if self.wide => self.one_of(&[GIB, GIB - 1, 2 * GIB + MIB2, 9 * GIB]),
            1 if self.wide => MIB2 - 1 + self.below(3),
            2 if self.wide => 1 + self.below(3 * MIB2),
            0 => 400 + self.below(800),
            _ => 1 + self.below(60),
        }
    }

    fn take(&mut self, cpu: u32) {
        let (pages, zeroed) = (self.pages(), self.below(2) == 0);
        let align = match self.wide {
            true => self.one_of(&[1, 1, 1, 64, MIB2, GIB, 512 * GIB, 1 << 33]),
            false => 1 << self.one_of(&[0, 0, 0, 2, 5, 9]),
        };
        let request = with!(Request::new(pages * PAGE_BYTES, "model"), zeroed).aligned(align * PAGE_BYTES);
        let how = self.below(8);
        // The frames lie as the addresses will, or do not.
        let (alike, cut) = match pages > 3 * MIB2 {
            true => (0, self.below(pages) / MIB2 * MIB2),
            false => (self.below(2), self.below(pages)),
        };
        let first = (1 << 30) + self.below(1 << 10) * GIB + alike;
        let runs = [(first, cut), (first + cut + 64 * GIB, pages - cut)];
        let runs: Vec<Extent> = runs.iter().filter(|run| run.1 > 0).map(|run| extent(Pfn::new(run.0), run.1)).collect();
        let kva = &self.world.kva;
        let (taken, kind, shown) = match how {
            0 => {
                let order = Order::new(self.random.below(5) as u32).expect("small");
                let stack = self.world.on(cpu, |cx| kva.alloc_stack(cx, order, "model"));
                (stack.map(|stack| stack.into_area()), AreaKind::Stack, vec![])
            }
            1 if self.wide => {
                let device = self.world.map_device(cpu, runs[0], request);
                (device, AreaKind::Device, runs[..1].to_vec())
            }
            _ if pages > 1200 || self.wide && how < 5 => {
                (self.world.map_pages(cpu, &runs, request), AreaKind::Mapped, runs)
            }
            _ => (self.world.on(cpu, |cx| kva.alloc(cx, request)), AreaKind::Pages, vec![]),
        };
        self.notice();
        let area = match taken {
            Ok(area) => area,
            Err(KvaError::NoMemory) if self.wide => return,
            // There are three such places.
            Err(KvaError::NoSpace { .. }) if self.wide && align == 1 << 33 => return,
            Err(KvaError::NoMemory | KvaError::NoSpace { .. }) if !self.wide => {
                let waits = self.owned.iter().any(|owned| owned.area.is_none());
                return assert!(!waits, "what waits is given back first");
            }
            Err(error) => panic!("{error}"),
        };
        let range = area.range();
        assert!(kind == AreaKind::Stack || range.start().is_aligned(request.align));
        assert!(!self.wide || range.first_page() > FIRST && range.end_page() < END);
        let meets = |other: VirtRange| other.first_page() <= range.end_page() && range.first_page() <= other.end_page();
        assert!(!self.owned.iter().any(|owned| meets(owned.range)), "{range} touches another, or one before its flush");
        assert!(shown.is_empty() || range.pages() == shown.iter().map(|run| run.pages()).sum::<u64>());
        self.marks += 1;
        let mut owned = Owned { area: None, range, kind, shown, frames: vec![], mark: self.marks, writable: true };
        if owned.shown.is_empty() {
            for (number, frame) in (0..).zip(self.world.frames_of(range)) {
                let frame = frame.expect("mapped");
                assert_eq!(self.owners.insert(frame, self.marks), None, "{frame} is somebody's, or waits");
                owned.frames.push(frame);
                if self.wide {
                    continue;
                }
                let (at, cpu) = (page(&area, number), self.below(CPUS.into()) as u32);
                if zeroed && kind == AreaKind::Pages {
                    assert_eq!(self.world.load(cpu, at), Ok(0), "{at}");
                }
                self.world.store(cpu, at, self.marks << 16 | number).expect("writable");
            }
        }
        self.owned.push(Owned { area: Some(area), ..owned });
    }

    fn free(&mut self, cpu: u32) {
        let index = self.below(self.owned.len() as u64) as usize;
        let Some(owned) = self.owned.get_mut(index) else { return };
        let (Some(area), range) = (owned.area.take(), owned.range) else { return };
        let kva = &self.world.kva;
        if self.wide && self.random.below(4) == 0 {
            self.world.on(cpu, |cx| kva.free_later(cx, area)).expect("its own");
        } else {
            self.world.on(cpu, |cx| kva.free(cx, area)).expect("its own");
            let some = VirtRange::from_pages(range.first_page(), range.pages().min(1200)).expect("a range");
            assert!(self.world.frames_of(some).iter().all(Option::is_none), "{range} is still mapped");
        }
        self.notice();
    }

    fn protect(&mut self, cpu: u32) {
        let index = self.below(self.owned.len() as u64) as usize;
        let Some(owned) = self.owned.get_mut(index).filter(|owned| owned.kind == AreaKind::Pages) else { return };
        let Some(area) = &mut owned.area else { return };
        owned.writable = !owned.writable;
        let rights = if owned.writable { Flags::WRITE } else { Flags::NONE };
        self.world.on(cpu, |cx| self.world.kva.protect(cx, area, owned.range, rights)).expect("its own");
    }

    /// Everybody finds at a live address what its owner stored, and stores if that is allowed.
    fn access(&mut self, cpu: u32) {
        let index = self.below(self.owned.len() as u64) as usize;
        let Some(owned) = self.owned.get(index).filter(|owned| !owned.frames.is_empty() && !self.wide) else { return };
        let Some(area) = &owned.area else { return };
        let number = self.random.below(owned.frames.len() as u64);
        let (at, word) = (page(area, number), owned.mark << 16 | number);
        assert_eq!(self.world.load(cpu, at), Ok(word), "cpu{cpu} at {at}");
        let stored = self.world.store(cpu, at, word);
        assert_eq!(stored, if owned.writable { Ok(()) } else { Err(Fault::Protection) }, "cpu{cpu} at {at}");
        let guard = VirtAddr::new(area.end().get());
        assert_eq!(self.world.load(cpu, guard), Err(Fault::NotPresent), "a guard page at {guard}");
    }

    /// What the tables and the manager say of a page.
    fn look(&mut self) {
        let index = self.below(self.owned.len() as u64) as usize;
        let Some(Owned { area, range, kind, shown, frames, .. }) = self.owned.get(index) else { return };
        let (first, end, live) = (range.first_page(), range.end_page(), area.is_some());
        let middle = first + self.random.below(end - first);
        for page in [first, middle, end - 1] {
            let (info, is_live) = match self.world.on(0, |cx| self.world.kva.what_is(cx, at(page))) {
                Some(Place::Area(info)) => (info, true),
                Some(Place::Freed(info)) => (info, false),
                other => panic!("{other:?} at {}", at(page)),
            };
            assert_eq!((is_live, info.name, info.kind, info.range), (live, "model", *kind, *range), "{}", at(page));
            let mut into = page - first;
            let mut expected = frames.get(into as usize).copied();
            for run in shown {
                if expected.is_none() && into < run.pages() {
                    expected = Some(Pfn::new(run.base().get() + into));
                }
                into = into.saturating_sub(run.pages());
            }
            let found = self.world.frames_of(VirtRange::from_pages(page, 1).expect("a page"))[0];
            assert!(!live || found == expected, "{found:?} at {}", at(page));
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
            0..5 => self.take(cpu),
            5..9 => self.free(cpu),
            9 => self.protect(cpu),
            10 if self.below(12) == 0 => {
                let kva = &self.world.kva;
                match self.random.below(2) {
                    0 => self.world.on(cpu, |cx| kva.trim(cx)),
                    _ => _ = self.world.on(cpu, |cx| kva.flush(cx)),
                }
                self.notice();
            }
            10..13 => self.look(),
            _ => self.access(cpu),
        }
        self.world.mmu.check().expect("no violation");
    }
}

fn run<F: PageFormat>(walks: Tables, wide: bool, seed: u64) {
    let limits = Limits::new(1 + seed * 13 % 50, 3000);
    let (half, range) = match wide {
        true => (ALL, everywhere()),
        false => (1 << 39, VirtRange::new(VirtAddr::new(START), RANGE).expect("a range")),
    };
    let world = World::<F>::of(walks, limits, seed, half, range);
    let (free, owners) = (world.trimmed(), BTreeMap::new());
    let mut run = Run { world, random: Random(seed + 1), wide, owned: vec![], batches: 0, owners, marks: 0 };
    (0..500).for_each(|_| run.step());
    while run.owned.iter().any(|owned| owned.area.is_some()) {
        run.free(0);
    }
    run.world.on(0, |cx| run.world.kva.flush(cx));
    run.notice();
    assert!(run.owners.is_empty() && run.batches > 2 && run.marks > 40);
    assert!(free - run.world.trimmed() <= if wide { BEGIN } else { 0 }, "frames are lost");
    if wide {
        // All addresses are free, in one piece.
        let most = |pages| run.world.on(0, |cx| run.world.kva.alloc(cx, Request::new(pages * PAGE_BYTES, "all")).err());
        let last = END - (FIRST + 1).next_multiple_of(MIB2) - 1;
        assert_eq!(most(last), Some(KvaError::NoMemory));
        assert!(matches!(most(last + 1), Some(KvaError::NoSpace { .. })));
    }
    run.world.mmu.check().expect("no violation");
}

#[test]
fn a_random_program_in_a_gib() {
    for seed in 0..6 {
        run::<X86_64>(Tables::X86_64, false, seed);
        run::<Aarch64>(Tables::Arm64 { resizes: false }, false, seed + 10);
    }
}

#[test]
fn a_random_program_everywhere() {
    for seed in 0..4 {
        run::<X86_64>(Tables::X86_64, true, seed);
        run::<Aarch64>(Tables::Arm64 { resizes: false }, true, seed + 10);
    }
}
