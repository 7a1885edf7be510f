//! Random operations on a manager, and each answer beside a model that has a byte for each frame: no frame has two owners, none is lost, none
//! is believed zero that is not. The property test, the corpus and the fuzz target decide by bytes on few frames; `scale` by random numbers
//! on gibibytes, by whole arrays of blocks.

use super::{Memory, Threads, arena, extent, folio, release, run_as};
use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuCx, Dirty, Extent, NodeId, Order, Pfn, Zeroed, with};
use hugemm_frames::{
    AllocContigError, AllocError, AllocRequest, FolioRef, FolioRun, Frames, FramesConfig, Frozen, HwPoisoned, Mobility,
    ORDERS, Placement, Plain, Put, RangeReport, RefError,
};
use hugemm_threads::Choices;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::iter::from_fn;
use std::mem::take;

/// Base, frames and node of each arena, and extents of them that are in nobody's hands.
type Shape<'a> = (&'a [(u64, u64, u32)], &'a [(u64, u64)]);

const SHAPES: [Shape<'_>; 5] = [
    (&[(0, 2048, 0)], &[]),
    // Odd ends, a hole of reserved frames in the middle.
    (&[(515, 3000, 0)], &[(515, 2), (2017, 83), (3500, 15)]),
    // Two adjoining arenas and one far away, on two nodes; the border inside a 2 MiB block.
    (&[(1024, 700, 0), (1724, 836, 0), (3072, 1024, 1)], &[]),
    // Across a 1 GiB border.
    (&[((1 << 18) - 1024, 3072, 0)], &[]),
    (&[(0, 1024, 0), (1536, 512, 1), (2048, 2048, 2)], &[]),
];

/// What a frame is.
const FREE: u8 = 0;
const OWNED: u8 = 1;
const REFUSED: u8 = 2;
const NO_FRAME: u8 = 3;

/// What frames of counted pages and folios of an order are.
const fn counted(order: Order) -> u8 {
    4 + order.get() as u8
}

/// Most references that fit a page's own counter.
const MOST: u64 = 15;

/// Frames behind the last that are asked for as well.
const BEYOND: u64 = 0x800;

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

/// The oracle.
struct Model<'a> {
    arenas: &'a [(u64, u64, u32)],
    base: u64,
    state: Vec<u8>,
    /// 1 where bytes are not zero.
    dirty: Vec<u8>,
    free: u64,
    refused: u64,
    poisoned: BTreeSet<u64>,
    /// References to counted frames beyond the first.
    extra: BTreeMap<u64, u64>,
    /// A poisoned frame was given back in a block that caches only gather: it is found on the way to the node.
    gathered: bool,
}

impl Model<'_> {
    fn part(&self, extent: Extent) -> std::ops::Range<usize> {
        (extent.base().get() - self.base) as usize..(extent.end().get() - self.base) as usize
    }

    fn at(&self, frame: u64) -> u8 {
        frame.checked_sub(self.base).and_then(|at| self.state.get(at as usize).copied()).unwrap_or(NO_FRAME)
    }

    fn all(&self, extent: Extent, state: u8) -> bool {
        all_are(&self.state[self.part(extent)], state)
    }

    fn set(&mut self, extent: Extent, state: u8) {
        let part = self.part(extent);
        self.state[part].fill(state);
    }

    fn write(&mut self, extent: Extent, dirty: u8) {
        let part = self.part(extent);
        self.dirty[part].fill(dirty);
    }

    fn is_border(&self, frame: u64) -> bool {
        self.arenas.iter().any(|(base, ..)| *base == frame)
    }

    /// Runs of frames of one state and one arena, ascending.
    fn runs(&self, of: Extent) -> impl Iterator<Item = (Extent, u8)> {
        let mut rest = of;
        from_fn(move || {
            let first = rest.base().get();
            let state = *self.state.get((first - self.base) as usize).filter(|_| !rest.is_empty())?;
            let mut run = rest;
            for (base, ..) in self.arenas {
                if run.contains(Pfn::new(*base)) && *base != first {
                    run = run.slice(0, base - first);
                }
            }
            let (run, later) = rest.split_at(like_first(&self.state[self.part(run)]) as u64);
            rest = later;
            Some((run, state))
        })
    }

    /// Those that are free, of arenas that a request may have.
    fn free_runs(&self, of: Placement) -> Vec<Extent> {
        let may = |(.., node): &&(u64, u64, u32)| !matches!(of, Placement::Only(only) if only != NodeId::new(*node));
        let arenas = self.arenas.iter().filter(may).flat_map(|(base, pages, _)| self.runs(extent(*base, *pages)));
        arenas.filter(|(_, state)| *state == FREE).map(|(run, _)| run).collect()
    }

    /// The allocator has handed them out; whoever has them writes to them.
    fn hand_out(&mut self, extent: Extent, zero: bool) {
        assert!(self.all(extent, FREE), "{extent} was not free");
        assert!(!zero || all_are(&self.dirty[self.part(extent)], 0), "{extent} is not zero");
        self.set(extent, OWNED);
        self.write(extent, 1);
        self.free -= extent.pages();
    }

    fn give_back(&mut self, extent: Extent) {
        assert!(!self.state[self.part(extent)].contains(&FREE), "{extent} comes back twice");
        self.set(extent, FREE);
        self.free += extent.pages();
        for frame in self.poisoned.range(extent.base().get()..extent.end().get()) {
            self.state[(*frame - self.base) as usize] = REFUSED;
            (self.free, self.refused) = (self.free - 1, self.refused + 1);
            self.gathered |= (16..512).contains(&extent.pages());
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
                let refused = self.poisoned.range(pair[0]..pair[1]).count() as u64;
                if !self.drop_one(piece) {
                    report.kept += piece.pages();
                    continue;
                }
                report.refused += refused;
                report.freed += piece.pages() - refused;
                if order == Order::ZERO && refused != 0 {
                    continue;
                }
                let goes_on = order == Order::ZERO && last == Some(pair[0]);
                report.runs += u64::from(!goes_on || self.is_border(pair[0]));
                last = Some(pair[1]);
            }
        }
        report
    }

    /// Drops a reference of a folio, or of pages that are alike; whether it was the last.
    fn drop_one(&mut self, piece: Extent) -> bool {
        let head = piece.base().get();
        let Some(more) = self.extra.get_mut(&head) else {
            self.give_back(piece);
            return true;
        };
        *more -= 1;
        if *more == 0 {
            self.extra.remove(&head);
        }
        false
    }

    fn references(&self, head: Pfn) -> u64 {
        1 + self.extra.get(&head.get()).copied().unwrap_or(0)
    }
}

struct Run<'a, 'm> {
    frames: &'a Frames<'m>,
    threads: &'a Threads,
    choices: Choices<'a>,
    model: Model<'a>,
    /// From the first frame to the end.
    everywhere: Extent,
    blocks: Vec<Frozen>,
    /// Frozen extents that are anything.
    parts: Vec<Extent>,
    /// Counted pages and folios, some of them gone.
    counted: Vec<(Extent, Order)>,
}

impl Run<'_, '_> {
    fn below(&mut self, limit: u64) -> u64 {
        self.choices.below(limit)
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
        let (base, pages, _) = self.one_of(self.model.arenas);
        self.part_of(extent(base, pages), 1)
    }

    fn any_block(&mut self) -> Option<Frozen> {
        let at = self.below(self.blocks.len() as u64) as usize;
        (at < self.blocks.len()).then(|| self.blocks.swap_remove(at))
    }

    fn take(&mut self, cx: &CpuCx<'_, Threads>) {
        let log = self.one_of(&[0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 10, 11, 13, 15, 16, 16, 17, 17, 18]);
        let mobility = self.one_of(&Mobility::ALL);
        let last = NodeId::new(self.frames.nodes() - 1);
        let from = self.one_of(&[
            Placement::Local,
            Placement::Local,
            Placement::Only(NodeId::new(0)),
            Placement::Only(last),
            Placement::Prefer(last),
            Placement::Only(NodeId::new(7)),
        ]);
        let mut request = with!(AllocRequest::order(order(log)), mobility, from);
        request.prefer_zeroed = self.below(3) == 0;
        let most = ((self.everywhere.pages() / 2) >> log).min(if log < 9 { 300 } else { 700 });
        let (count, how) = (self.one_of(&[1, most]), self.below(4));
        let limit = Pfn::new(self.everywhere.base().get() + self.below(self.everywhere.pages() + 2));
        for _ in 0..=self.below(count) {
            let taken = match how {
                0 => self.frames.alloc_below(cx, limit, request),
                1 => self.frames.alloc_nowait(cx, request),
                _ => self.frames.alloc(cx, request),
            };
            let below = if how == 0 { limit } else { Pfn::new(u64::MAX) };
            match taken {
                Ok(block) => self.taken(block, request, below),
                Err(AllocError::NoSuchNode) => return assert_eq!(request.from, Placement::Only(NodeId::new(7))),
                Err(AllocError::OutOfMemory) => return self.overlooked(cx, request, below),
                Err(AllocError::WouldWait) => panic!("nobody holds a lock"),
            }
        }
    }

    fn taken(&mut self, block: Frozen, request: AllocRequest, below: Pfn) {
        assert_eq!(block.order(), request.order);
        assert!(block.pfn().get().is_multiple_of(request.order.pages()) && block.extent().end() <= below, "{block:?}");
        assert_eq!(self.frames.head_of(block.pfn()), Some((block.pfn(), block.order())));
        if let Placement::Only(node) = request.from {
            assert_eq!(self.frames.node_of(block.pfn()), Some(node));
        }
        self.model.hand_out(block.extent(), block.is_zero());
        self.blocks.push(block);
    }

    /// Nothing of that size, where it was asked for, is free: in the node, and when all is in the node.
    fn overlooked(&mut self, cx: &CpuCx<'_, Threads>, request: AllocRequest, below: Pfn) {
        let stats = match request.from {
            Placement::Only(node) => self.frames.node_stats(cx, node),
            _ => self.frames.stats(cx),
        };
        let anywhere = below == Pfn::new(u64::MAX);
        assert!(!anywhere || stats.extents(request.order) == 0, "free blocks were overlooked: {stats:?}");
        self.drain();
        let again = if anywhere { self.frames.alloc(cx, request) } else { self.frames.alloc_below(cx, below, request) };
        if let Ok(block) = again {
            return self.taken(block, request, below);
        }
        for run in self.model.free_runs(request.from) {
            let run = run.slice(0, below.get().saturating_sub(run.base().get()).min(run.pages()));
            assert!(run.chunks(Order::MAX).all(|(_, order)| order < request.order), "{run} is overlooked");
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
                self.free_block(cx, block);
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

    fn free_block(&mut self, cx: &CpuCx<'_, Threads>, block: Frozen) {
        let extent = block.extent();
        match self.below(4) {
            // As it was taken: what was zero, and was not written, stays known.
            0 => match block.into_content() {
                Ok(zeroed) => {
                    self.model.write(extent, 0);
                    self.model.give_back(extent);
                    assert_eq!(self.frames.free_zeroed(cx, zeroed), extent.pages());
                }
                Err(dirty) => self.parts.push(dirty.into_extent()),
            },
            1 => {
                self.model.give_back(extent);
                self.frames.free_nowait(cx, block);
            }
            _ => {
                self.model.give_back(extent);
                self.frames.free(cx, block);
            }
        }
    }

    fn give(&mut self, cx: &CpuCx<'_, Threads>, gone: Extent) {
        self.model.give_back(gone);
        if self.below(2) == 0 {
            self.model.write(gone, 0);
        }
        self.free_as_it_is(cx, gone);
    }

    /// Frees frames that are all zero, or count as dirty.
    fn free_as_it_is(&self, cx: &CpuCx<'_, Threads>, gone: Extent) {
        let freed = match all_are(&self.model.dirty[self.model.part(gone)], 0) {
            // SAFETY: the model says that they are nobody's any more, and what is in them.
            true => self.frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(gone) }),
            // SAFETY: as above.
            false => self.frames.free_extent(cx, unsafe { Dirty::assume_owned(gone) }),
        };
        assert_eq!(freed, gone.pages());
    }

    /// A block becomes smaller ones.
    fn split(&mut self) {
        let Some(block) = self.any_block() else { return };
        let to = order(self.below(10) as u32);
        let mut run = self.frames.split(block, to).expect("managed");
        while let Some(piece) = run.pop() {
            assert_eq!(self.frames.head_of(piece.pfn()), Some((piece.pfn(), piece.order())));
            self.blocks.push(piece);
        }
    }

    fn count(&mut self) {
        let Some(block) = self.any_block() else { return };
        let (all, whole) = (block.extent(), block.order());
        let to = order(self.one_of(&[0, 0, 0, 2, 9, 10, 15])).min(whole);
        if to == whole {
            assert_eq!(self.frames.count(block).expect("managed").into_pfn(), all.base());
        } else {
            let run = self.frames.count_run(self.frames.split(block, to).expect("managed")).expect("managed");
            assert_eq!((run.order(), run.into_extent()), (to, all));
        }
        self.model.set(all, counted(to));
        for _ in 0..self.below(4) {
            let head = Pfn::new(all.base().get() + self.below(all.pages() / to.pages()) * to.pages());
            self.get(head);
        }
        self.counted.push((all, to));
    }

    /// One reference more, if it fits.
    fn get(&mut self, head: Pfn) {
        // SAFETY: counted, and the model has the reference.
        let got = unsafe { self.frames.get_at(head) }.map(FolioRef::into_pfn);
        assert_eq!(got, if self.model.references(head) < MOST { Ok(head) } else { Err(RefError::Saturated) });
        *self.model.extra.entry(head.get()).or_default() += u64::from(got.is_ok());
        assert_eq!(self.frames.references(head), self.model.references(head));
    }

    /// What is done with one counted page or folio, or with any frame.
    fn refer(&mut self, cx: &CpuCx<'_, Threads>) {
        let (what, at) = (self.below(4), self.below(self.counted.len() as u64) as usize);
        if what == 0 {
            return self.try_get();
        }
        let Some((all, order)) = self.counted.get(at).copied() else { return };
        let head = Pfn::new(all.base().get() + self.below(all.pages() / order.pages()) * order.pages());
        if self.model.at(head.get()) != counted(order) {
            return;
        }
        let (whole, alone) = (Extent::block(head, order), self.model.references(head) == 1);
        match what {
            1 => self.get(head),
            2 => {
                assert_eq!(self.frames.put(cx, folio(head)), Ok(if alone { Put::Last } else { Put::Kept }));
                assert_eq!(self.model.drop_one(whole), alone);
                assert!(alone || self.frames.references(head) == self.model.references(head));
            }
            _ => {
                let to = Order::new(self.below(4) as u32).expect("valid").min(order);
                let split = self.frames.split_counted(folio(head), to);
                let numbers = split.map(|run| (run.order(), run.into_extent())).map_err(FolioRef::into_pfn);
                assert_eq!(numbers, if alone { Ok((to, whole)) } else { Err(head) });
                if alone {
                    self.model.set(whole, counted(to));
                    self.counted.push((whole, to));
                }
            }
        }
    }

    /// A speculative get succeeds exactly on heads with references.
    fn try_get(&mut self) {
        let pfn = self.everywhere.base().get() + self.below(self.everywhere.pages() + 3);
        let order = self.model.at(pfn).checked_sub(4).map(|log| order(log.into()));
        // SAFETY: no LRU lists these frames.
        let got = unsafe { self.frames.try_get(Pfn::new(pfn)) }.map(|folio| folio.map(FolioRef::into_pfn));
        match order.filter(|order| pfn.is_multiple_of(order.pages())) {
            Some(_) if self.model.references(Pfn::new(pfn)) == MOST => assert_eq!(got, Err(RefError::Saturated)),
            Some(_) => {
                assert_eq!(got, Ok(Some(Pfn::new(pfn))));
                *self.model.extra.entry(pfn).or_default() += 1;
            }
            None => assert!(matches!(got, Ok(None) | Err(RefError::NotManaged)), "{pfn:#x}: {got:?}"),
        }
    }

    /// References of any part of what is counted, or has been, go; or of anything, which is left alone.
    fn put(&mut self, cx: &mut CpuCx<'_, Threads>) {
        let at = self.below(self.counted.len() as u64 + 1) as usize;
        let (whole, order) = self.counted.get(at).copied().unwrap_or((self.everywhere, Order::ZERO));
        let mut gone = if self.below(2) == 0 { whole } else { self.part_of(whole, order.pages()) };
        if order == Order::ZERO && self.below(3) == 0 {
            // Whatever lies before it is left alone, or goes too, and so does whatever is behind another arena's border.
            gone = extent(gone.base().get() - self.some(gone.base().get() - self.model.base), gone.pages());
        }
        if order != Order::ZERO && !self.model.all(gone, counted(order)) {
            // Heads that are not heads any more are for pages only.
            return;
        }
        let expected = self.model.drop_run(gone, order);
        // SAFETY: the model has a reference to each, or there are none.
        let run = unsafe { FolioRun::from_extent(gone, order) };
        let report = if self.below(3) == 0 {
            let (frames, cleared) = (self.frames, RefCell::new(&mut self.model));
            frames.put_range(cx, run, |cx, owned| {
                let owned = owned.into_extent();
                cleared.borrow_mut().write(owned, 0);
                // SAFETY: owned until here, and cleared.
                frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(owned) });
            })
        } else {
            self.frames.free_range(cx, run)
        };
        assert_eq!(report, expected, "{gone} of {order:?}");
    }

    /// Particular frames, if all are free or become so.
    fn take_these(&mut self, cx: &mut CpuCx<'_, Threads>) {
        let mut asked = self.anywhere();
        if self.below(2) == 0 {
            // About as much as is free there, or a little more.
            let free = self.model.runs(asked).filter(|(_, state)| *state == FREE).max_by_key(|(run, _)| run.pages());
            let (run, _) = free.unwrap_or((asked, FREE));
            let first = run.base().get().saturating_sub(self.below(3) * 100).max(asked.base().get());
            let pages = self.one_of(&[run.pages(), run.pages() / 512 * 512, run.pages() + 77]);
            asked = extent(first, pages.min(asked.end().get() - first));
        }
        let (claimed, moves) = (self.below(2) == 0, self.below(2) == 0);
        if claimed {
            self.drain();
            let base = asked.base().get().next_multiple_of(512);
            asked = extent(base, asked.end().get().saturating_sub(base) / 512 * 512);
        }
        let used = self.model.runs(asked).find(|(_, state)| *state != FREE).map(|(run, _)| run.base());
        let (frames, model, blocks) = (self.frames, &mut self.model, &mut self.blocks);
        // Lets go of blocks in the way.
        let mut migrate = |cx: &mut CpuCx<'_, Threads>, block: Extent| {
            let found = blocks.iter().position(|held| block.covers(held.extent()));
            let Some(at) = found.filter(|_| moves) else { return false };
            let held = blocks.swap_remove(at);
            model.give_back(held.extent());
            frames.free(cx, held);
            true
        };
        let taken = match claimed {
            true => frames.alloc_contig_range(cx, asked, &mut migrate),
            false => frames.take_range(cx, asked),
        };
        match taken {
            Ok(taken) => {
                self.model.hand_out(asked, false);
                self.parts.push(taken.into_extent());
                // What is left of what its ends were parts of is no more zero than it was.
                for log in [0, 5, 8] {
                    let request = AllocRequest::order(order(log)).prefer_zeroed();
                    if let Ok(block) = frames.alloc(cx, request) {
                        self.taken(block, request, Pfn::new(u64::MAX));
                    }
                }
            }
            Err(AllocContigError::NotManaged) => assert!(asked.is_empty()),
            Err(AllocContigError::InUse(_)) if !claimed => {}
            Err(error) => assert!(used.is_some(), "{asked}: {error:?}"),
        }
    }

    fn take_exactly(&mut self, cx: &CpuCx<'_, Threads>) {
        let (pages, align) = (self.some(self.everywhere.pages()), order(self.one_of(&[0, 0, 4, 9])));
        if let Ok(row) = self.frames.alloc_exact(cx, pages, align) {
            let row = row.into_extent();
            assert!(row.pages() == pages && row.base().get().is_multiple_of(align.pages()));
            self.model.hand_out(row, false);
            self.parts.push(row);
        }
    }

    /// In a cache a frame is found by its owner.
    fn poison(&mut self, cx: &CpuCx<'_, Threads>) {
        let (cached, at) = (self.below(2) == 0, self.below(self.everywhere.pages() + 2));
        if !cached {
            self.drain();
        }
        let pfn = Pfn::new(self.everywhere.base().get() + at);
        let outcome = self.frames.hwpoison(cx, pfn);
        if outcome == HwPoisoned::NotManaged {
            return assert_eq!(self.model.at(pfn.get()), NO_FRAME);
        }
        let (is_new, free) = (self.model.poisoned.insert(pfn.get()), self.model.at(pfn.get()) == FREE);
        match outcome {
            HwPoisoned::Already => assert!(!is_new),
            HwPoisoned::Free => assert!(is_new && free),
            _ => assert!(is_new && (cached || !free)),
        }
        assert!(self.frames.is_hwpoisoned(pfn));
        self.drain();
        if is_new && free {
            self.model.set(extent(pfn.get(), 1), REFUSED);
            (self.model.free, self.model.refused) = (self.model.free - 1, self.model.refused + 1);
        }
    }

    fn drain(&self) {
        let here = hugemm_threads::this_cpu() as u32;
        for cpu in [1, 0] {
            run_as(cpu);
            self.frames.drain(&self.threads.cx());
        }
        run_as(here);
    }

    /// sum(free) + sum(used) = total, after every step.
    fn count_all(&mut self) {
        if take(&mut self.model.gathered) {
            self.drain();
        }
        let stats = self.frames.stats(&self.threads.cx());
        assert_eq!((stats.available(), stats.refused), (self.model.free, self.model.refused), "{stats:?}");
        assert_eq!(stats.isolated, 0);
    }

    /// Exactly what the model says is free can be had, in blocks as large as can be.
    fn check(&mut self) {
        self.drain();
        let cx = self.threads.cx();
        let stats = self.frames.stats(&cx);
        let mut blocks = [0; ORDERS];
        for run in self.model.free_runs(Placement::Local) {
            run.chunks(Order::MAX).for_each(|(_, order)| blocks[order.get() as usize] += 1);
            let taken = self.frames.take_range(&cx, run).unwrap_or_else(|error| panic!("{run}: {error}"));
            let mut rest = taken.into_extent();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(like_first(&self.model.dirty[self.model.part(rest)]) as u64);
                rest = later;
                self.free_as_it_is(&cx, now);
            }
        }
        self.drain();
        assert_eq!((stats.free, stats.cached, stats.refused), (self.model.free, 0, self.model.refused));
        assert_eq!((stats.blocks, stats.isolated, stats.deferred), (blocks, 0, 0), "free memory is not merged");
        assert!((0..=9).all(|log| stats.fragmentation_permille(order(log)) <= 1000));
        let after = self.frames.stats(&cx);
        assert_eq!((after.blocks, after.free), (blocks, stats.free));
    }

    fn step(&mut self, poisons: bool) {
        run_as(self.below(2) as u32);
        let mut cx = self.threads.cx();
        match self.below(14) {
            0..3 => self.take(&cx),
            3..6 => self.free(&cx),
            6 => self.count(),
            7 => self.split(),
            8 => self.refer(&cx),
            9 | 10 => self.put(&mut cx),
            11 => self.take_these(&mut cx),
            12 => self.take_exactly(&cx),
            _ if poisons => self.poison(&cx),
            _ => self.check(),
        }
        self.count_all();
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
        assert_eq!(self.model.free + self.model.refused, self.frames.managed());
        // What is known of all of it is so, and all of a size can be had.
        for (log, most) in [(0, 500), (5, 500), (9, 500), (16, usize::MAX)] {
            let request = AllocRequest::order(order(log)).prefer_zeroed();
            let blocks: Vec<_> = from_fn(|| self.frames.alloc(&cx, request).ok()).take(most).collect();
            let all = blocks.len() < most;
            blocks.into_iter().for_each(|block| self.model.hand_out(block.extent(), block.is_zero()));
            if all {
                self.overlooked(&cx, request, Pfn::new(u64::MAX));
            }
        }
    }
}

fn order(log: u32) -> Order {
    Order::new(log).expect("valid")
}

/// Makes so many operations, or as many as the bytes are; panics if an answer differs from the model's. From step `poisons` on frames are
/// poisoned.
pub fn play((arenas, reserved): Shape<'_>, choices: Choices<'_>, steps: u64, poisons: u64) {
    let specs: Vec<_> = arenas.iter().map(|&(base, pages, node)| arena(base, pages, node)).collect();
    let nodes = [0, 1].map(|cpu| NodeId::new(cpu.min(arenas[arenas.len() - 1].2)));
    let config = FramesConfig::new(&specs, 2).on_nodes(&nodes);
    let memory = Memory::for_config(&config);
    let frames: Frames<'_, Plain<NoFaults>> = memory.manager(&config, NoFaults);
    let threads = Threads::default();
    run_as(0);
    let base = arenas[0].0;
    let end = arenas.iter().map(|(base, pages, _)| base + pages).max().unwrap_or(base);
    let state = vec![NO_FRAME; (end - base + BEYOND) as usize];
    let mut model = Model {
        arenas,
        base,
        dirty: vec![1; state.len()],
        state,
        free: 0,
        refused: 0,
        poisoned: BTreeSet::new(),
        extra: BTreeMap::new(),
        gathered: false,
    };
    specs.iter().for_each(|spec| model.set(spec.extent, FREE));
    reserved.iter().for_each(|(base, pages)| model.set(extent(*base, *pages), NO_FRAME));
    for run in model.free_runs(Placement::Local) {
        release(&frames, run);
        model.free += run.pages();
    }
    let everywhere = extent(base, end - base);
    let (frames, threads) = (&frames, &threads);
    let mut run = Run { frames, threads, choices, model, everywhere, blocks: vec![], parts: vec![], counted: vec![] };
    for step in 0..steps {
        if run.choices.are_over() {
            break;
        }
        let poison = step >= poisons && run.choices.below(2) == 0;
        run.step(poison);
    }
    run.finish();
}

/// Makes the operations that the bytes say, on few frames.
pub fn run(data: &[u8]) {
    let mut bytes = data.iter();
    let shape = SHAPES[usize::from(bytes.next().copied().unwrap_or(0)) % SHAPES.len()];
    play(shape, Choices::Bytes(bytes), u64::MAX, 0);
}
