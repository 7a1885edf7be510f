//! Kernel areas taken and freed in the ways of Linux's `test_vmalloc`, by its names; and many areas of one size freed, with one flush for
//! all that wait and pages as ranges, beside page by page, with as few flushes and with one for each area.
//!
//! Nothing touches the memory, unless that is asked for: what is measured is addresses, blocks, tables and flushes.

use crate::record::{Better, Metric, record};
use crate::words::{Named, named};
use hugemm_base::random::Random;
use hugemm_base::{Clock, Extent, Order, PAGE_BYTES};
use hugemm_frames::{AllocRequest, Frames, Frozen, Mobility};
use hugemm_kva::{Area, Cx, Kva, KvaError, KvaSetup, Request};

named! {
    /// What is taken and freed, in a loop.
    Test {
        /// Ten pages.
        FixSizeAlloc = "fix_size_alloc",
        /// One page, where all holes are as large as that.
        FullFitAlloc = "full_fit_alloc",
        /// A hundred pages and one, beside thousands of areas.
        LongBusyListAlloc = "long_busy_list_alloc",
        /// One to a hundred pages.
        RandomSizeAlloc = "random_size_alloc",
        /// Five stacks' worth, aligned to two.
        FixAlignAlloc = "fix_align_alloc",
        /// One to ten pages, aligned to any power of two up to 4 MiB.
        RandomSizeAlignAlloc = "random_size_align_alloc",
        /// One to four pages, many at a time.
        Pcpu = "pcpu",
        /// A page each, many at a time, freed as from an interrupt and given back as a batch.
        Kvfree = "kvfree",
        /// 512 KiB.
        Area512K = "area_512k",
        /// 16 MiB.
        Area16M = "area_16m",
    }
}

impl Test {
    /// Pages of the next area, and the pages that its address is a multiple of, after so many others.
    pub fn shape(self, done: u64, random: &mut Random) -> (u64, u64) {
        match self {
            Test::FixSizeAlloc => (10, 1),
            Test::FullFitAlloc | Test::Kvfree => (1, 1),
            Test::LongBusyListAlloc => (if done.is_multiple_of(2) { 100 } else { 1 }, 1),
            Test::RandomSizeAlloc => (1 + random.below(100), 1),
            Test::FixAlignAlloc => (20, 8),
            Test::RandomSizeAlignAlloc => (1 + random.below(10), 1 << random.below(11)),
            Test::Pcpu => (1 + random.below(4), 1),
            Test::Area512K => ((512 << 10) / PAGE_BYTES, 1),
            Test::Area16M => ((16 << 20) / PAGE_BYTES, 1),
        }
    }

    /// Whether a program can have stock Linux do it: one at a time, aligned to nothing.
    pub fn is_of_linux(self) -> bool {
        use Test::{Area16M, Area512K, FixSizeAlloc, FullFitAlloc, LongBusyListAlloc, RandomSizeAlloc};
        matches!(self, FixSizeAlloc | FullFitAlloc | LongBusyListAlloc | RandomSizeAlloc | Area512K | Area16M)
    }
}

/// Areas that are held at a time, at most.
pub const HELD: usize = 2048;

/// What a loop took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looped {
    /// Areas taken and freed.
    pub areas: u64,
    /// Nanoseconds.
    pub nanos: u64,
    /// Flushes.
    pub flushes: u64,
    /// Lock rounds of the page allocator's nodes.
    pub lock_rounds: u64,
}

record! {
    Looped = "vmalloc" { areas: u64, nanos: u64, flushes: u64, lock_rounds: u64, }
}

/// What is said of a loop.
pub const LOOPED: [Metric<Looped>; 3] = [
    Metric::new("bench.vmalloc.pair", "ns", |it: &Looped| it.nanos as f64 / it.areas as f64)
        .column("ns per area")
        .better(Better::Lower),
    Metric::new("bench.vmalloc.flushes", "count", |it: &Looped| it.flushes as f64 * 1000.0 / it.areas as f64)
        .column("flushes per 1000 frees"),
    Metric::new("bench.vmalloc.lock_rounds", "count", |it: &Looped| it.lock_rounds as f64 / it.areas as f64)
        .column("the allocator's lock rounds per area"),
];

named! {
    /// How areas are freed.
    Way {
        /// One flush for all that wait; pages as ranges.
        Batched = "batched",
        /// One flush for all that are held; page by page.
        OneFlush = "page by page, one flush",
        /// A flush for each area; page by page.
        EachPage = "page by page",
    }
}

/// Areas of one size that are freed in a run, at most: enough for a rate of a thousand.
pub const FREES: u64 = 1000;

/// Bytes of the areas that are freed.
pub const SIZES: [u64; 3] = [512 << 10, 2 << 20, 16 << 20];

/// What freeing took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Areas.
    pub areas: u64,
    /// Nanoseconds.
    pub nanos: u64,
    /// Flushes.
    pub flushes: u64,
}

record! {
    Freed = "vmalloc-free" { areas: u64, nanos: u64, flushes: u64, }
}

/// What is said of it.
pub const FREED: [Metric<Freed>; 2] = [
    Metric::new("bench.vmalloc.freed", "areas/s", |it: &Freed| it.areas as f64 * 1e9 / it.nanos as f64)
        .column("areas/s")
        .better(Better::Higher),
    Metric::new("bench.vmalloc.free_flushes", "count", |it: &Freed| it.flushes as f64 * 1000.0 / it.areas as f64)
        .column("flushes per 1000"),
];

/// A manager of areas as the workload uses it.
pub struct Rig<'a, 'm, S: KvaSetup> {
    /// The manager.
    pub kva: &'a Kva<'m, S>,
    /// The allocator below it.
    pub frames: &'a Frames<'m, S::Env>,
    /// How many flushes there have been.
    pub flushes: &'a dyn Fn() -> u64,
    /// What is done with an area before it is freed, where one is taken and freed at a time.
    pub touch: &'a dyn Fn(&Area),
}

impl<S: KvaSetup> Rig<'_, '_, S>
where
    S::Platform: Clock,
{
    /// `f`, timed and counted; it returns how many areas it took and freed.
    fn counted(
        &self,
        cx: &mut Cx<'_, S>,
        f: impl FnOnce(&Self, &mut Cx<'_, S>) -> Result<u64, KvaError>,
    ) -> Result<Looped, KvaError> {
        let (flushes, rounds) = ((self.flushes)(), self.frames.stats(cx).lock_rounds);
        let start = cx.platform().now_ns();
        let areas = f(self, cx)?;
        let nanos = cx.platform().now_ns().saturating_sub(start);
        // The question itself takes each lock once.
        let lock_rounds = self.frames.stats(cx).lock_rounds.saturating_sub(rounds + u64::from(self.frames.nodes()));
        Ok(Looped { areas, nanos, flushes: (self.flushes)() - flushes, lock_rounds })
    }

    fn pair(&self, cx: &mut Cx<'_, S>, request: Request) -> Result<(), KvaError> {
        let area = self.kva.alloc(cx, request)?;
        (self.touch)(&area);
        self.kva.free(cx, area).map_err(|(error, _)| error)
    }

    fn take_all(&self, cx: &mut Cx<'_, S>, request: Request, held: &mut [Option<Area>]) -> Result<(), KvaError> {
        held.iter_mut().try_for_each(|place| {
            *place = Some(self.kva.alloc(cx, request)?);
            Ok(())
        })
    }

    fn free_all<'h>(
        &self,
        cx: &mut Cx<'_, S>,
        held: impl IntoIterator<Item = &'h mut Option<Area>>,
    ) -> Result<(), KvaError> {
        held.into_iter()
            .filter_map(Option::take)
            .try_for_each(|area| self.kva.free(cx, area).map_err(|(error, _)| error))
    }

    /// One test, in which about `areas` areas are taken and freed. `held` has [`HELD`] places, all empty, as they are afterwards.
    ///
    /// # Errors
    ///
    /// What a request was refused for.
    pub fn run(
        &self,
        cx: &mut Cx<'_, S>,
        test: Test,
        areas: u64,
        held: &mut [Option<Area>],
    ) -> Result<Looped, KvaError> {
        let pages = |pages: u64| Request::new(pages * PAGE_BYTES, test.name());
        let mut random = Random(areas);
        self.kva.flush(cx);
        match test {
            Test::FullFitAlloc => {
                self.take_all(cx, pages(1), held)?;
                self.free_all(cx, held.iter_mut().step_by(2))?;
                self.kva.flush(cx);
            }
            Test::LongBusyListAlloc => self.take_all(cx, pages(1), held)?,
            _ => {}
        }
        let looped = self.counted(cx, |rig, cx| {
            let mut done = 0;
            while done < areas {
                let mut next = |done| {
                    let (count, align) = test.shape(done, &mut random);
                    pages(count).aligned(align * PAGE_BYTES)
                };
                if !matches!(test, Test::Pcpu | Test::Kvfree) {
                    rig.pair(cx, next(done))?;
                    done += 1;
                    continue;
                }
                for place in held.iter_mut() {
                    *place = Some(rig.kva.alloc(cx, next(done))?);
                    done += 1;
                }
                if test == Test::Pcpu {
                    rig.free_all(cx, held.iter_mut())?;
                    continue;
                }
                for area in held.iter_mut().filter_map(Option::take) {
                    rig.kva.free_later(cx, area).map_err(|(error, _)| error)?;
                }
                rig.kva.flush(cx);
            }
            Ok(done)
        });
        self.free_all(cx, held)?;
        self.kva.flush(cx);
        looped
    }

    /// Takes an area of `bytes` for each place of `held` and frees all of them, until about `areas` are freed. Freeing is timed, and of taking
    /// what gave freed ones back. `pages` has an extent for each of their pages.
    ///
    /// # Errors
    ///
    /// What a request was refused for.
    pub fn free(
        &self,
        cx: &mut Cx<'_, S>,
        (bytes, way): (u64, Way),
        areas: u64,
        held: &mut [Option<Area>],
        pages: &mut [Extent],
    ) -> Result<Freed, KvaError> {
        self.kva.flush(cx);
        let (flushes, mut freed) = ((self.flushes)(), Freed::default());
        let each = (bytes / PAGE_BYTES) as usize;
        while freed.areas < areas {
            match way {
                Way::Batched => freed.nanos += self.take_batched(cx, bytes, held)?,
                Way::OneFlush | Way::EachPage => self.take_pages(cx, bytes, held, pages)?,
            }
            let start = cx.platform().now_ns();
            for (place, pages) in held.iter_mut().zip(pages.chunks(each)) {
                let Some(area) = place.take() else { continue };
                self.kva.free(cx, area).map_err(|(error, _)| error)?;
                if way == Way::EachPage {
                    self.kva.flush(cx);
                    self.free_pages(cx, pages);
                }
            }
            freed.areas += held.len() as u64;
            if freed.areas >= areas || way == Way::OneFlush {
                self.kva.flush(cx);
            }
            if way == Way::OneFlush {
                self.free_pages(cx, &pages[..held.len() * each]);
            }
            freed.nanos += cx.platform().now_ns().saturating_sub(start);
        }
        freed.flushes = (self.flushes)() - flushes;
        Ok(freed)
    }

    /// Takes areas; how long it took to take those that waited for a flush.
    fn take_batched(&self, cx: &mut Cx<'_, S>, bytes: u64, held: &mut [Option<Area>]) -> Result<u64, KvaError> {
        let mut nanos = 0;
        for place in held {
            let (flushes, start) = ((self.flushes)(), cx.platform().now_ns());
            *place = Some(self.kva.alloc(cx, Request::new(bytes, "freed"))?);
            if (self.flushes)() != flushes {
                nanos += cx.platform().now_ns().saturating_sub(start);
            }
        }
        Ok(nanos)
    }

    /// Takes pages one by one, and areas that map them. Nothing waits for a flush.
    fn take_pages(
        &self,
        cx: &mut Cx<'_, S>,
        bytes: u64,
        held: &mut [Option<Area>],
        pages: &mut [Extent],
    ) -> Result<(), KvaError> {
        for (place, pages) in held.iter_mut().zip(pages.chunks_mut((bytes / PAGE_BYTES) as usize)) {
            for page in pages.iter_mut() {
                let frame = self.frames.alloc(cx, AllocRequest::order(Order::ZERO));
                *page = frame.map_err(|_| KvaError::NoMemory)?.into_dirty().into_extent();
            }
            // SAFETY: this benchmark's, which frees them when the area has been flushed; memory.
            *place = Some(unsafe { self.kva.map_pages(cx, pages, Request::new(bytes, "freed")) }?);
        }
        Ok(())
    }

    fn free_pages(&self, cx: &mut Cx<'_, S>, pages: &[Extent]) {
        for page in pages {
            // SAFETY: taken as a block of order 0; nothing maps it since the flush.
            let page = unsafe { Frozen::assume_owned(page.base(), Order::ZERO, Mobility::Unmovable) };
            self.frames.free(cx, page);
        }
    }
}

impl<S: KvaSetup> core::fmt::Debug for Rig<'_, '_, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Rig").field("kva", self.kva).finish_non_exhaustive()
    }
}
