//! A random program on four CPUs, and an oracle per page: who owns each address and each frame, what is found at each address from
//! every CPU, and that neither is anybody else's before the flush.

use crate::{CPUS, World, page};
use hugemm_base::{Extent, Order, PAGE_BYTES, Pfn, VirtAddr, VirtRange, with};
use hugemm_host::mmu::{Fault, Tables};
use hugemm_kva::{Area, KvaError, Limits, Request};
use hugemm_paging::{Aarch64, Flags, PageFormat, X86_64};
use hugemm_threads::Random;
use std::collections::BTreeMap;

/// A live area, and what is stored in the first word of each of its pages.
struct Live {
    area: Area,
    frames: Vec<Pfn>,
    mark: u64,
    writable: bool,
}

struct Oracle<F: PageFormat> {
    world: World<F>,
    random: Random,
    live: Vec<Live>,
    /// What waits: addresses with a guard page on each side, and frames.
    waiting: Vec<(VirtRange, Vec<Pfn>)>,
    batches: u64,
    /// Who owns a frame, by marks; and it stays so while it waits.
    owners: BTreeMap<Pfn, u64>,
    marks: u64,
}

impl<F: PageFormat> Oracle<F> {
    fn any(&mut self, below: u64) -> u64 {
        self.random.below(below)
    }

    fn step(&mut self) {
        let cpu = self.any(CPUS.into()) as u32;
        match self.any(10) {
            0..3 => self.take(cpu),
            3..5 => self.free(cpu),
            5 => self.protect(cpu),
            6 if self.any(20) == 0 => {
                self.world.on(cpu, |cx| match self.batches % 2 {
                    0 => drop(self.world.kva.flush(cx)),
                    _ => self.world.kva.trim(cx),
                });
                self.notice();
            }
            _ => self.access(cpu),
        }
        self.world.mmu.check().expect("no violation");
    }

    /// Whatever waited is nobody's any more if a batch has been given back.
    fn notice(&mut self) {
        let counts = self.world.on(0, |cx| self.world.kva.counts(cx));
        if counts.batches != self.batches {
            self.batches = counts.batches;
            for frame in self.waiting.drain(..).flat_map(|(_, frames)| frames) {
                self.owners.remove(&frame);
                // In use again at once, for all that the model knows: as whatever the allocator makes of it.
                self.world.mmu.freed(Extent::new(frame, 1).expect("a frame"));
                self.world.mmu.allocated(Extent::new(frame, 1).expect("a frame"));
            }
        }
        assert_eq!(counts.waiting, self.waiting.len() as u64);
    }

    fn take(&mut self, cpu: u32) {
        let pages = if self.any(8) == 0 { 400 + self.any(800) } else { 1 + self.any(40) };
        let zeroed = self.any(2) == 0;
        let mut request = with!(Request::new(pages * PAGE_BYTES, "model"), zeroed);
        if self.any(4) == 0 {
            request = request.aligned(PAGE_BYTES << self.any(10));
        }
        let stack = self.any(8) == 0;
        let kva = &self.world.kva;
        let taken = self.world.on(cpu, |cx| match stack {
            true => kva.alloc_stack(cx, Order::new(2).expect("an order"), "stack").map(|stack| stack.into_area()),
            false => kva.alloc(cx, request),
        });
        self.notice();
        let area = match taken {
            Ok(area) => area,
            Err(error) => {
                assert!(matches!(error, KvaError::NoMemory | KvaError::NoSpace { .. }), "{error}");
                assert!(self.waiting.is_empty(), "what waits is given back first");
                return;
            }
        };
        let range = area.range();
        assert!(stack || range.start().is_aligned(request.align));
        let around = VirtRange::from_pages(range.first_page() - 1, range.pages() + 2).expect("a range");
        let meets = |other: VirtRange| around.first_page() < other.end_page() && other.first_page() < around.end_page();
        assert!(!self.live.iter().any(|live| meets(live.area.range())), "{range} touches another");
        assert!(!self.waiting.iter().any(|(waiting, _)| meets(*waiting)), "{range} before its flush");
        let found = self.world.frames_of(around);
        assert!(found[0].is_none() && found.last() == Some(&None), "guard pages of {range}");
        self.marks += 1;
        let mut frames = Vec::new();
        for (number, frame) in found[1..found.len() - 1].iter().enumerate() {
            let frame = frame.expect("mapped");
            assert_eq!(self.owners.insert(frame, self.marks), None, "{frame} is somebody's, or waits");
            frames.push(frame);
            let (at, cpu) = (page(&area, number as u64), self.any(CPUS.into()) as u32);
            if zeroed && !stack {
                assert_eq!(self.world.load(cpu, at), Ok(0), "{at}");
            }
            self.world.store(cpu, at, self.marks << 16 | number as u64).expect("writable");
        }
        self.live.push(Live { area, frames, mark: self.marks, writable: true });
    }

    fn free(&mut self, cpu: u32) {
        if self.live.is_empty() {
            return;
        }
        let at = self.any(self.live.len() as u64) as usize;
        let Live { area, frames, .. } = self.live.swap_remove(at);
        self.waiting.push((area.range(), frames));
        let range = area.range();
        self.world.on(cpu, |cx| self.world.kva.free(cx, area)).expect("its own");
        assert!(self.world.frames_of(range).iter().all(Option::is_none), "{range} is still mapped");
        self.notice();
    }

    fn protect(&mut self, cpu: u32) {
        if self.live.is_empty() {
            return;
        }
        let at = self.any(self.live.len() as u64) as usize;
        let live = &mut self.live[at];
        if live.area.range().pages() == 4 {
            return; // It may be a stack, which is never read-only but is as good as others otherwise.
        }
        let all = live.area.range();
        live.writable = !live.writable;
        let rights = if live.writable { Flags::WRITE } else { Flags::NONE };
        self.world.on(cpu, |cx| self.world.kva.protect(cx, &mut live.area, all, rights)).expect("its own");
    }

    /// Everybody finds at a live address what its owner stored, and stores if that is allowed.
    fn access(&mut self, cpu: u32) {
        if self.live.is_empty() {
            return;
        }
        let at = self.any(self.live.len() as u64) as usize;
        let number = self.any(self.live[at].frames.len() as u64);
        let Live { area, mark, writable, .. } = &self.live[at];
        let (at, word) = (page(area, number), mark << 16 | number);
        assert_eq!(self.world.load(cpu, at), Ok(word), "cpu{cpu} at {at}");
        let stored = self.world.store(cpu, at, word);
        assert_eq!(stored, if *writable { Ok(()) } else { Err(Fault::Protection) }, "cpu{cpu} at {at}");
        let guard = VirtAddr::new(area.end().get());
        assert_eq!(self.world.load(cpu, guard), Err(Fault::NotPresent), "a guard page at {guard}");
    }
}

fn run<F: PageFormat>(walks: Tables, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let limits = Limits::new(1 + seed * 7 % 40, 3000);
        let (world, random) = (World::<F>::new(walks, limits, seed), Random(seed + 1));
        let free = world.trimmed();
        let mut oracle = Oracle {
            world,
            random,
            live: Vec::new(),
            waiting: Vec::new(),
            batches: 0,
            owners: BTreeMap::new(),
            marks: 0,
        };
        (0..500).for_each(|_| oracle.step());
        while !oracle.live.is_empty() {
            oracle.free(0);
        }
        oracle.world.on(0, |cx| oracle.world.kva.flush(cx));
        oracle.notice();
        assert_eq!(oracle.world.trimmed(), free, "frames are lost");
        assert!(oracle.owners.is_empty() && oracle.batches > 2 && oracle.marks > 40);
    }
}

#[test]
fn a_random_program_x86_64() {
    run::<X86_64>(Tables::X86_64, 0..6);
}

#[test]
fn a_random_program_arm64() {
    run::<Aarch64>(Tables::Arm64 { resizes: false }, 10..16);
}
