//! Gibibytes in pieces of every size and alignment, by every way in and out, beside an array with a byte per frame: no frame has two owners,
//! none is lost, none is believed zero that is not.

use super::support::{Threads, arena, extent, run_as, with_arenas};
use super::{GIB, order, request};
use hugemm_base::{CpuCx, Dirty, Extent, NodeId, Order, Pfn, Zeroed, with};
use hugemm_frames::{
    AllocContigError, AllocRequest, FolioRun, Frames, Frozen, HwPoisoned, Mobility, NoMigration, ORDERS, Placement,
    RangeReport,
};
use hugemm_threads::Random;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::iter::from_fn;
use std::mem::take;

/// What a frame is.
const FREE: u8 = 0;
const OWNED: u8 = 1;
const REFUSED: u8 = 2;
const NO_FRAME: u8 = 3;

/// What frames of counted pages and folios of an order are.
const fn counted(order: Order) -> u8 {
    4 + order.get() as u8
}

const BASE: u64 = GIB;
const END: u64 = 4 * GIB;

/// Base, frames and node of each arena: they begin and end inside 2 MiB, 128 MiB and 1 GiB; two adjoin.
const ARENAS: [(u64, u64, u32); 3] = [
    (BASE + 0x155, GIB + 0x4a0e, 0),
    (BASE + GIB + 0x4b63, GIB - 0x9d63, 0),
    (BASE + 2 * GIB - 0x1000, GIB + 0x707, 1),
];

/// Where frames of a value are that ask for no look at each.
fn all_are(frames: &[u8], value: u8) -> bool {
    // Whole parts compare as memory does, without a look at each frame.
    let like = [value; 512];
    frames.chunks(512).all(|part| *part == like[..part.len()])
}

/// How many frames at the beginning are like the first.
fn like_first(frames: &[u8]) -> usize {
    let Some(first) = frames.first() else { return 0 };
    let whole = frames.chunks(512).take_while(|part| all_are(part, *first)).count() * 512;
    let rest = frames.iter().skip(whole).take_while(|other| *other == first).count();
    (whole + rest).min(frames.len())
}

fn part(extent: Extent) -> std::ops::Range<usize> {
    (extent.base().get() - BASE) as usize..(extent.end().get() - BASE) as usize
}

struct Model {
    state: Vec<u8>,
    /// 1 where bytes are not zero.
    dirty: Vec<u8>,
    free: u64,
    refused: u64,
    poisoned: BTreeSet<u64>,
    /// References to counted frames beyond the first.
    extra: BTreeMap<u64, u64>,
}

impl Model {
    fn all(&self, extent: Extent, state: u8) -> bool {
        all_are(&self.state[part(extent)], state)
    }

    /// Runs of frames of one state and one arena, ascending.
    fn runs(&self, of: Extent) -> impl Iterator<Item = (Extent, u8)> {
        let mut rest = of;
        from_fn(move || {
            let first = rest.base().get();
            let state = *self.state.get((first - BASE) as usize).filter(|_| !rest.is_empty())?;
            let mut run = rest;
            for (base, ..) in ARENAS {
                if run.contains(Pfn::new(base)) && base != first {
                    run = run.slice(0, base - first);
                }
            }
            let (run, later) = rest.split_at(like_first(&self.state[part(run)]) as u64);
            rest = later;
            Some((run, state))
        })
    }

    /// The allocator has handed them out; whoever has them writes to them.
    fn hand_out(&mut self, extent: Extent, zero: bool) {
        assert!(self.all(extent, FREE), "{extent} was not free");
        assert!(!zero || all_are(&self.dirty[part(extent)], 0), "{extent} is not zero");
        self.state[part(extent)].fill(OWNED);
        self.dirty[part(extent)].fill(1);
        self.free -= extent.pages();
    }

    fn give_back(&mut self, extent: Extent) {
        assert!(!self.state[part(extent)].contains(&FREE), "{extent} comes back twice");
        self.state[part(extent)].fill(FREE);
        self.free += extent.pages();
        for frame in self.poisoned.range(extent.base().get()..extent.end().get()) {
            self.state[(*frame - BASE) as usize] = REFUSED;
            (self.free, self.refused) = (self.free - 1, self.refused + 1);
        }
    }

    /// What dropping a reference of each does.
    fn drop_run(&mut self, of: Extent, order: Order) -> RangeReport {
        let (mut report, mut last) = (RangeReport::default(), None);
        let parts: Vec<_> = self.runs(of).collect();
        for (run, state) in parts {
            if state != counted(order) {
                report.invalid += run.pages();
                continue;
            }
            // What stays in use, and what is out for good; of folios each is a run.
            let (from, to) = (run.base().get(), run.end().get());
            let mut ends = BTreeSet::new();
            if order != Order::ZERO {
                ends.extend((from..=to).step_by(order.pages() as usize));
            }
            let special: Vec<u64> = self.extra.range(from..to).map(|(frame, _)| *frame).collect();
            ends.extend(special.iter().flat_map(|frame| [*frame, *frame + order.pages()]));
            if order == Order::ZERO {
                ends.extend(self.poisoned.range(from..to).flat_map(|frame| [*frame, *frame + 1]));
            }
            ends.extend([from, to]);
            let ends: Vec<u64> = ends.into_iter().collect();
            for pair in ends.windows(2) {
                let piece = extent(pair[0], pair[1] - pair[0]);
                if let Some(more) = self.extra.get_mut(&pair[0]) {
                    *more -= 1;
                    report.kept += piece.pages();
                    if *more == 0 {
                        self.extra.remove(&pair[0]);
                    }
                    continue;
                }
                let refused = self.poisoned.range(pair[0]..pair[1]).count() as u64;
                self.give_back(piece);
                report.refused += refused;
                report.freed += piece.pages() - refused;
                if order == Order::ZERO && refused != 0 {
                    continue;
                }
                let goes_on = order == Order::ZERO && last == Some(pair[0]);
                let border = ARENAS.iter().any(|(base, ..)| *base == pair[0]);
                report.runs += u64::from(!goes_on || border);
                last = Some(pair[1]);
            }
        }
        report
    }
}

struct Run<'a, 'm> {
    frames: &'a Frames<'m>,
    threads: &'a Threads,
    random: Random,
    model: Model,
    blocks: Vec<Frozen>,
    /// Frozen extents that are anything.
    parts: Vec<Extent>,
    /// Counted pages and folios, some of them gone.
    counted: Vec<(Extent, Order)>,
}

impl Run<'_, '_> {
    fn below(&mut self, limit: u64) -> u64 {
        self.random.below(limit.max(1))
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// A number of frames up to a limit: of pages, 2 MiB or 128 MiB, or nearly.
    fn some(&mut self, limit: u64) -> u64 {
        let unit = self.one_of(&[1, 32, 512, 512 * 64]);
        let most = if unit == 1 { self.one_of(&[700, limit]) } else { limit };
        let number = self.below(most.min(limit) / unit + 1) * unit;
        match self.below(4) {
            0 => (number + 1).min(limit),
            1 => number.saturating_sub(1),
            _ => number,
        }
    }

    /// Part of an extent of whole `unit`s, not empty.
    fn part_of(&mut self, whole: Extent, unit: u64) -> Extent {
        let units = whole.pages() / unit;
        let from = self.some(units - 1);
        let count = self.some(units - from).max(1);
        whole.slice(from * unit, (from + count) * unit)
    }

    fn anywhere(&mut self) -> Extent {
        let (base, pages, _) = self.one_of(&ARENAS);
        self.part_of(extent(base, pages), 1)
    }

    fn take(&mut self, cx: &CpuCx<'_, Threads>) {
        let log = self.one_of(&[0, 0, 3, 5, 7, 9, 9, 9, 10, 13, 15, 16, 16, 17, 17, 18]);
        let mobility = self.one_of(&Mobility::ALL);
        let from = self.one_of(&[Placement::Local, Placement::Local, Placement::Only(NodeId::new(1))]);
        let mut request = with!(request(log), mobility, from);
        request.prefer_zeroed = self.below(3) == 0;
        let most = match log {
            0..9 => 300,
            9 => 700,
            _ => (GIB >> log).div_ceil(2),
        };
        for _ in 0..=self.below(most) {
            let Ok(block) = self.frames.alloc(cx, request) else { return self.overlooked(cx, request) };
            self.model.hand_out(block.extent(), block.is_zero());
            self.blocks.push(block);
        }
    }

    /// Nothing of that size, where it was asked for, is free.
    fn overlooked(&mut self, cx: &CpuCx<'_, Threads>, request: AllocRequest) {
        self.drain();
        if let Ok(block) = self.frames.alloc(cx, request) {
            self.model.hand_out(block.extent(), block.is_zero());
            return self.blocks.push(block);
        }
        let asked = |node| request.from == Placement::Local || request.from == Placement::Only(NodeId::new(node));
        for (base, pages, _) in ARENAS.into_iter().filter(|(.., node)| asked(*node)) {
            for (run, _) in self.model.runs(extent(base, pages)).filter(|(_, state)| *state == FREE) {
                assert!(run.chunks(Order::MAX).all(|(_, order)| order < request.order), "{run} is overlooked");
            }
        }
    }

    /// What adjoins becomes one.
    fn join(&mut self) {
        let mut all = take(&mut self.parts);
        all.extend(self.blocks.drain(..).map(|block| block.into_dirty().into_extent()));
        all.sort_by_key(|part| part.base());
        for next in all {
            match self.parts.last_mut() {
                Some(last) if last.end() == next.base() => *last = last.join(next).expect("they adjoin"),
                _ => self.parts.push(next),
            }
        }
    }

    /// Any of what is owned goes, by part.
    fn free(&mut self, cx: &CpuCx<'_, Threads>) {
        if self.below(2) == 0 {
            self.join();
        }
        for _ in 0..=self.below(8) {
            let at = self.below((self.blocks.len() + self.parts.len()) as u64) as usize;
            if at < self.blocks.len() {
                let block = self.blocks.swap_remove(at);
                self.model.give_back(block.extent());
                self.frames.free(cx, block);
            } else if let Some(whole) = self.parts.get(at - self.blocks.len()).copied() {
                self.parts.swap_remove(at - self.blocks.len());
                let gone = self.part_of(whole, 1);
                let before = gone.base().get() - whole.base().get();
                let rest = [whole.slice(0, before), whole.slice(before + gone.pages(), whole.pages())];
                self.parts.extend(rest.into_iter().filter(|rest| !rest.is_empty()));
                self.give(cx, gone);
            }
        }
    }

    fn give(&mut self, cx: &CpuCx<'_, Threads>, gone: Extent) {
        self.model.give_back(gone);
        if self.below(2) == 0 {
            self.model.dirty[part(gone)].fill(0);
        }
        self.free_as_it_is(cx, gone);
    }

    /// Frees frames that are all zero, or count as dirty.
    fn free_as_it_is(&self, cx: &CpuCx<'_, Threads>, gone: Extent) {
        let freed = match all_are(&self.model.dirty[part(gone)], 0) {
            // SAFETY: the model says that they are nobody's any more, and what is in them.
            true => self.frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(gone) }),
            // SAFETY: as above.
            false => self.frames.free_extent(cx, unsafe { Dirty::assume_owned(gone) }),
        };
        assert_eq!(freed, gone.pages());
    }

    fn count(&mut self) {
        let at = self.below(self.blocks.len() as u64) as usize;
        if at >= self.blocks.len() {
            return;
        }
        let block = self.blocks.swap_remove(at);
        let to = order(self.one_of(&[0, 0, 0, 2, 9, 10, 15]));
        let run = self.frames.count_run(self.frames.split(block, to).expect("managed")).expect("managed");
        let (to, all) = (run.order(), run.into_extent());
        self.model.state[part(all)].fill(counted(to));
        for _ in 0..self.below(4) {
            let head = Pfn::new(all.base().get() + self.below(all.pages() / to.pages()) * to.pages());
            // SAFETY: counted just now, and the model has the reference.
            let _ = unsafe { self.frames.get_at(head) }.expect("counted").into_pfn();
            *self.model.extra.entry(head.get()).or_default() += 1;
        }
        self.counted.push((all, to));
    }

    /// References of any part of what is counted, or has been, go.
    fn put(&mut self, cx: &mut CpuCx<'_, Threads>) {
        let at = self.below(self.counted.len() as u64) as usize;
        let Some((whole, order)) = self.counted.get(at).copied() else { return };
        let mut gone = if self.below(2) == 0 { whole } else { self.part_of(whole, order.pages()) };
        if order == Order::ZERO && self.below(3) == 0 {
            // Whatever lies before it is left alone, or goes too, and so does whatever is behind another arena's border.
            gone = extent(gone.base().get() - self.some(gone.base().get() - BASE), gone.pages());
        }
        if order != Order::ZERO && !self.model.all(gone, counted(order)) {
            // Heads that are not heads any more are for pages only.
            return;
        }
        let expected = self.model.drop_run(gone, order);
        // SAFETY: the model has a reference to each, or there are none.
        let run = unsafe { FolioRun::from_extent(gone, order) };
        let report = if self.below(3) == 0 {
            let (frames, cleared) = (self.frames, RefCell::new(&mut self.model.dirty));
            frames.put_range(cx, run, |cx, owned| {
                let owned = owned.into_extent();
                cleared.borrow_mut()[part(owned)].fill(0);
                // SAFETY: owned until here, and cleared.
                frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(owned) });
            })
        } else {
            self.frames.free_range(cx, run)
        };
        assert_eq!(report, expected, "{gone} of {order:?}");
    }

    /// Particular frames, if all are free.
    fn take_these(&mut self, cx: &mut CpuCx<'_, Threads>) {
        let mut asked = self.anywhere();
        if self.below(2) == 0 {
            // About as much as is free there, or a little more.
            let free = self.model.runs(asked).filter(|(_, state)| *state == FREE).max_by_key(|(run, _)| run.pages());
            let (run, _) = free.unwrap_or((asked, FREE));
            let first = (run.base().get() - self.below(3) * 100).max(asked.base().get());
            let pages = self.one_of(&[run.pages(), run.pages() / 512 * 512, run.pages() + 77]);
            asked = extent(first, pages.min(asked.end().get() - first));
        }
        let claimed = self.below(2) == 0;
        if claimed {
            self.drain();
            let base = asked.base().get().next_multiple_of(512);
            asked = extent(base, asked.end().get().saturating_sub(base) / 512 * 512);
        }
        let used = self.model.runs(asked).find(|(_, state)| *state != FREE).map(|(run, _)| run.base());
        let taken = match claimed {
            true => self.frames.alloc_contig_range(cx, asked, &mut NoMigration),
            false => self.frames.take_range(cx, asked),
        };
        match taken {
            Ok(taken) => {
                self.model.hand_out(asked, false);
                self.parts.push(taken.into_extent());
                // What is left of what its ends were parts of is no more zero than it was.
                for log in [0, 5, 8] {
                    if let Ok(block) = self.frames.alloc(cx, request(log).prefer_zeroed()) {
                        self.model.hand_out(block.extent(), block.is_zero());
                        self.blocks.push(block);
                    }
                }
            }
            Err(AllocContigError::NotManaged) => assert!(asked.is_empty()),
            Err(AllocContigError::InUse(_)) if !claimed => {}
            Err(error) => assert!(used.is_some(), "{asked}: {error:?}"),
        }
    }

    fn take_exactly(&mut self, cx: &CpuCx<'_, Threads>) {
        let (pages, align) = (self.some(2 * GIB), order(self.one_of(&[0, 0, 4, 9])));
        if let Ok(row) = self.frames.alloc_exact(cx, pages, align) {
            let row = row.into_extent();
            assert!(row.pages() == pages && row.base().get().is_multiple_of(align.pages()));
            self.model.hand_out(row, false);
            self.parts.push(row);
        }
    }

    fn poison(&mut self, cx: &CpuCx<'_, Threads>) {
        self.drain();
        let whole = self.anywhere();
        let pfn = Pfn::new(whole.base().get() + self.below(whole.pages()));
        let state = self.model.state[part(extent(pfn.get(), 1))][0];
        let expected = match state {
            _ if !self.model.poisoned.insert(pfn.get()) => HwPoisoned::Already,
            FREE => HwPoisoned::Free,
            _ => HwPoisoned::InUse,
        };
        assert_eq!(self.frames.hwpoison(cx, pfn), expected);
        if expected == HwPoisoned::Free {
            self.model.state[part(extent(pfn.get(), 1))][0] = REFUSED;
            (self.model.free, self.model.refused) = (self.model.free - 1, self.model.refused + 1);
        }
    }

    fn drain(&self) {
        for cpu in [1, 0] {
            run_as(cpu);
            self.frames.drain(&self.threads.cx());
        }
    }

    /// Exactly what the model says is free can be had, in blocks as large as can be.
    fn check(&mut self) {
        self.drain();
        let cx = self.threads.cx();
        let stats = self.frames.stats(&cx);
        let mut blocks = [0; ORDERS];
        for (base, pages, _) in ARENAS {
            for (run, _) in self.model.runs(extent(base, pages)).filter(|(_, state)| *state == FREE) {
                run.chunks(Order::MAX).for_each(|(_, order)| blocks[order.get() as usize] += 1);
                let taken = self.frames.take_range(&cx, run).unwrap_or_else(|error| panic!("{run}: {error}"));
                let mut rest = taken.into_extent();
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(like_first(&self.model.dirty[part(rest)]) as u64);
                    rest = later;
                    self.free_as_it_is(&cx, now);
                }
            }
        }
        self.drain();
        assert_eq!((stats.free, stats.cached, stats.refused), (self.model.free, 0, self.model.refused));
        assert_eq!((stats.blocks, stats.isolated), (blocks, 0));
        let after = self.frames.stats(&cx);
        assert_eq!((after.blocks, after.free), (blocks, stats.free));
    }

    fn finish(mut self) {
        let mut cx = self.threads.cx();
        self.join();
        for gone in take(&mut self.parts) {
            self.give(&cx, gone);
        }
        for (all, order) in take(&mut self.counted) {
            loop {
                let left = self.model.runs(all).find(|(_, state)| *state == counted(order));
                let Some((run, _)) = left else { break };
                // SAFETY: as in `put`.
                let report = self.frames.free_range(&mut cx, unsafe { FolioRun::from_extent(run, order) });
                assert_eq!(report, self.model.drop_run(run, order));
            }
        }
        self.check();
        assert_eq!(self.model.free + self.model.refused, ARENAS.iter().map(|(_, pages, _)| pages).sum::<u64>());
        // What is known of all of it is so, and all of a size can be had.
        for (log, most) in [(0, 500), (5, 500), (9, 500)] {
            let blocks = from_fn(|| self.frames.alloc(&cx, request(log).prefer_zeroed()).ok());
            blocks.take(most).for_each(|block| self.model.hand_out(block.extent(), block.is_zero()));
        }
        let large = request(16);
        from_fn(|| self.frames.alloc(&cx, large).ok())
            .for_each(|block| self.model.hand_out(block.extent(), block.is_zero()));
        self.overlooked(&cx, large);
    }
}

#[test]
#[cfg_attr(miri, ignore = "gibibytes of descriptors")]
fn gibibytes_have_one_owner() {
    let arenas = ARENAS.map(|(base, pages, node)| arena(base, pages, node));
    for seed in 0..8 {
        with_arenas(&arenas, 2, &[NodeId::new(0), NodeId::new(1)], |frames, threads| {
            let mut state = vec![NO_FRAME; (END - BASE) as usize + 0x800];
            ARENAS.iter().for_each(|(base, pages, _)| state[part(extent(*base, *pages))].fill(FREE));
            let model = Model {
                dirty: vec![1; state.len()],
                free: state.iter().filter(|state| **state == FREE).count() as u64,
                state,
                refused: 0,
                poisoned: BTreeSet::new(),
                extra: BTreeMap::new(),
            };
            let random = Random(seed);
            let mut run = Run { frames, threads, random, model, blocks: vec![], parts: vec![], counted: vec![] };
            for step in 0..120 {
                run_as(run.below(2) as u32);
                let mut cx = threads.cx();
                match run.below(12) {
                    0..3 => run.take(&cx),
                    3..6 => run.free(&cx),
                    6 => run.count(),
                    7 | 8 => run.put(&mut cx),
                    9 => run.take_these(&mut cx),
                    10 => run.take_exactly(&cx),
                    // Every other time nothing is.
                    _ if seed % 2 == 0 && step > 50 => run.poison(&cx),
                    _ => run.check(),
                }
            }
            run.finish();
        });
    }
}
