//! Interprets bytes as operations on a manager and compares every answer with a simple model: one array with the state
//! of each frame. Shared by the property tests, the corpus replay and the fuzz target.

use super::{Memory, Threads, arena, extent, folio, pages, release};
use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuCx, Dirty, Extent, NodeId, Order, Pfn, Zeroed, with};
use hugemm_frames::{
    AllocContigError, AllocError, AllocRequest, FolioRef, Frames, FramesConfig, Frozen, HwPoisoned, Mobility,
    Placement, Plain, Put, RangeReport, RefError,
};
use std::cell::RefCell;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Reserved,
    Free,
    /// In use without a count.
    Frozen,
    /// A counted order-0 page or the head of a counted folio.
    Counted(u64),
    /// Any other frame of a counted folio.
    Tail,
    /// Out for good.
    Refused,
}

/// The oracle.
struct Model {
    base: u64,
    state: Vec<State>,
    poisoned: Vec<bool>,
    /// Whether the frame's bytes are really all zero.
    zero: Vec<bool>,
    /// A poisoned frame was given back in a block that caches only gather: it is found on the way to the node.
    gathered: bool,
}

impl Model {
    fn at(&mut self, frame: u64) -> &mut State {
        &mut self.state[(frame - self.base) as usize]
    }

    fn used(&self) -> u64 {
        let in_use = |s: &&State| matches!(s, State::Frozen | State::Counted(_) | State::Tail);
        self.state.iter().filter(in_use).count() as u64
    }

    fn is_hwpoisoned(&self, frame: u64) -> bool {
        self.poisoned[(frame - self.base) as usize]
    }

    /// The allocator handed these out.
    fn hand_out(&mut self, range: Extent, zero: bool) {
        for frame in range.base().get()..range.end().get() {
            assert_eq!(*self.at(frame), State::Free, "frame {frame:#x} handed out while not free");
            assert!(!self.is_hwpoisoned(frame), "poisoned frame {frame:#x} handed out");
            let really = self.zero[(frame - self.base) as usize];
            assert!(!zero || really, "frame {frame:#x} is not zero");
            *self.at(frame) = State::Frozen;
        }
    }

    /// These were given back.
    fn take_back(&mut self, range: Extent) {
        let poisoned = (range.base().get()..range.end().get()).any(|frame| self.is_hwpoisoned(frame));
        self.gathered |= poisoned && (16..512).contains(&range.pages());
        for frame in range.base().get()..range.end().get() {
            *self.at(frame) = if self.is_hwpoisoned(frame) { State::Refused } else { State::Free };
        }
    }

    fn write(&mut self, range: Extent, zero: bool) {
        let from = (range.base().get() - self.base) as usize;
        self.zero[from..from + range.pages() as usize].fill(zero);
    }
}

/// The bytes that drive a run; zeroes when they have run out.
struct Bytes<'a>(std::slice::Iter<'a, u8>);

impl Bytes<'_> {
    fn next(&mut self) -> Option<u64> {
        self.0.next().map(|b| u64::from(*b))
    }

    fn below(&mut self, limit: u64) -> u64 {
        let value = self.next().unwrap_or(0) << 8 | self.next().unwrap_or(0);
        value % limit.max(1)
    }
}

/// Where memory is in a run: base frames, sizes, nodes; and what is released of it.
#[allow(clippy::type_complexity)]
fn shapes(which: u64) -> (Vec<(u64, u64, u32)>, Vec<(u64, u64)>) {
    match which % 5 {
        0 => (vec![(0, 2048, 0)], vec![(0, 2048)]),
        // Odd ends, a hole of reserved frames in the middle.
        1 => (vec![(515, 3000, 0)], vec![(517, 1500), (2100, 1400)]),
        // Two adjoining arenas and one far away, on two nodes; the border inside a 2 MiB block.
        2 => (vec![(1024, 700, 0), (1724, 836, 0), (3072, 1024, 1)], vec![(1024, 700), (1724, 836), (3072, 1024)]),
        // Across a 1 GiB border.
        3 => (vec![((1 << 18) - 1024, 3072, 0)], vec![((1 << 18) - 1024, 3072)]),
        _ => (vec![(0, 1024, 0), (1536, 512, 1), (2048, 2048, 2)], vec![(0, 1024), (1536, 512), (2048, 2048)]),
    }
}

/// Runs the operations in `data`; panics if an answer differs from the model's.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data.iter());
    let (places, released) = shapes(bytes.next().unwrap_or(0));
    let arenas: Vec<_> = places.iter().map(|&(base, pages, node)| arena(base, pages, node)).collect();
    let config = FramesConfig::new(&arenas, 1).on_nodes(&const { [NodeId::new(0)] });
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    let threads: Threads = Threads::default();
    hugemm_threads::run_as(0);
    let base = places[0].0;
    let end = places.iter().map(|p| p.0 + p.1).max().unwrap_or(base);
    let size = (end - base) as usize;
    let model = RefCell::new(Model {
        gathered: false,
        base,
        state: vec![State::Reserved; size],
        poisoned: vec![false; size],
        zero: vec![false; size],
    });
    for &(from, pages) in &released {
        release(&frames, extent(from, pages));
        model.borrow_mut().take_back(extent(from, pages));
    }
    let mut run = Run {
        frames: &frames,
        threads: &threads,
        model: &model,
        frozen: vec![],
        parts: vec![],
        heads: vec![],
        base,
        end,
        borders: places.iter().map(|p| p.0).collect(),
    };
    while let Some(op) = bytes.next() {
        run.step(op, &mut bytes);
        run.check();
    }
    run.finish();
}

struct Run<'a> {
    frames: &'a Frames<'a, Plain<NoFaults>>,
    threads: &'a Threads,
    model: &'a RefCell<Model>,
    frozen: Vec<Frozen>,
    /// Frozen extents that are no blocks any more.
    parts: Vec<Extent>,
    /// Heads of counted pages and folios.
    heads: Vec<(Pfn, Order)>,
    base: u64,
    end: u64,
    /// Where arenas begin.
    borders: Vec<u64>,
}

fn pick<T>(list: &mut Vec<T>, at: u64) -> Option<T> {
    if list.is_empty() { None } else { Some(list.swap_remove(at as usize % list.len())) }
}

impl Run<'_> {
    fn request(&self, bytes: &mut Bytes<'_>) -> AllocRequest {
        let byte = bytes.below(1 << 16);
        // Small orders are likelier.
        let order = [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 0][byte as usize % 16];
        let mobility = Mobility::ALL[byte as usize >> 4 & 1];
        let from = match byte >> 5 & 7 {
            0 => Placement::Only(NodeId::new(0)),
            1 => Placement::Prefer(NodeId::new(self.frames.nodes() - 1)),
            2 => Placement::Only(NodeId::new(7)),
            _ => Placement::Local,
        };
        with!(AllocRequest::order(Order::new(order).expect("valid")), mobility, from)
    }

    fn allocated(&mut self, request: AllocRequest, result: Result<Frozen, AllocError>) {
        match result {
            Ok(block) => {
                assert_eq!(block.order(), request.order);
                assert_eq!(block.pfn().get() % request.order.pages(), 0);
                let (head, order) = self.frames.head_of(block.pfn()).expect("managed");
                assert_eq!((head, order), (block.pfn(), block.order()));
                if let Placement::Only(node) = request.from {
                    assert_eq!(self.frames.node_of(block.pfn()), Some(node));
                }
                self.model.borrow_mut().hand_out(block.extent(), block.is_zero());
                self.frozen.push(block);
            }
            Err(AllocError::NoSuchNode) => assert_eq!(request.from, Placement::Only(NodeId::new(7))),
            Err(AllocError::OutOfMemory) => {
                let cx = self.threads.cx();
                let stats = match request.from {
                    Placement::Only(node) => self.frames.node_stats(&cx, node),
                    _ => self.frames.stats(&cx),
                };
                assert_eq!(stats.extents(request.order), 0, "free blocks were overlooked: {stats:?}");
            }
            Err(AllocError::WouldWait) => panic!("nobody holds a lock"),
        }
    }

    fn allocated_below(&mut self, request: AllocRequest, limit: Pfn, result: Result<Frozen, AllocError>) {
        match result {
            Ok(block) => {
                assert!(block.extent().end() <= limit, "{block:?} is not below {limit}");
                self.allocated(request, Ok(block));
            }
            Err(AllocError::OutOfMemory) => {
                let (model, size) = (self.model.borrow(), request.order.pages());
                let mut firsts = (self.base.next_multiple_of(size)..limit.get().min(self.end)).step_by(size as usize);
                let overlooked = firsts.find(|&first| {
                    let range = first..first + size;
                    let free = |frame: u64| {
                        let at = (frame - self.base) as usize;
                        model.state.get(at) == Some(&State::Free) && !model.poisoned[at]
                    };
                    let there = match request.from {
                        Placement::Only(node) => self.frames.node_of(Pfn::new(first)) == Some(node),
                        _ => true,
                    };
                    let whole = !self.borders.iter().any(|border| *border > first && range.contains(border));
                    range.end <= limit.get() && there && whole && range.clone().all(free)
                });
                assert_eq!(overlooked, None, "{request:?} below {limit}");
            }
            Err(error) => self.allocated(request, Err(error)),
        }
    }

    fn step(&mut self, op: u64, bytes: &mut Bytes<'_>) {
        let mut cx = self.threads.cx();
        let frames = self.frames;
        match op % 21 {
            0 | 1 => {
                let request = self.request(bytes);
                self.allocated(request, frames.alloc(&cx, request));
            }
            2 => {
                let request = self.request(bytes);
                let result = frames.alloc(&cx, request.prefer_zeroed());
                let zeroed = result.as_ref().is_ok_and(Frozen::is_zero);
                let handed_out = result.is_ok();
                self.allocated(request, result);
                // Cleared by whoever asked, and free as zero.
                if handed_out && !zeroed {
                    let extent = self.frozen.pop().expect("the last").extent();
                    let mut model = self.model.borrow_mut();
                    model.write(extent, true);
                    model.take_back(extent);
                    // SAFETY: the handle owned the frames; the model's are zero now.
                    assert_eq!(frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(extent) }), extent.pages());
                }
            }
            3 => {
                let request = self.request(bytes);
                self.allocated(request, frames.alloc_nowait(&cx, request));
            }
            4 => {
                if let Some(block) = pick(&mut self.frozen, bytes.below(1 << 16)) {
                    self.model.borrow_mut().take_back(block.extent());
                    frames.free(&cx, block);
                }
            }
            5 => {
                if let Some(block) = pick(&mut self.frozen, bytes.below(1 << 16)) {
                    self.model.borrow_mut().take_back(block.extent());
                    frames.free_nowait(&cx, block);
                }
            }
            6 => {
                // Somebody writes to a block.
                if let Some(block) = pick(&mut self.frozen, bytes.below(1 << 16)) {
                    self.model.borrow_mut().write(block.extent(), false);
                    self.parts.push(block.into_dirty().into_extent());
                }
            }
            7 => {
                if let Some(block) = pick(&mut self.frozen, bytes.below(1 << 16)) {
                    let extent = block.extent();
                    // A freed block is dirty for the allocator, whatever it was.
                    match block.into_content() {
                        Ok(zeroed) => {
                            self.model.borrow_mut().take_back(extent);
                            assert_eq!(frames.free_zeroed(&cx, zeroed), extent.pages());
                        }
                        Err(dirty) => self.parts.push(dirty.into_extent()),
                    }
                }
            }
            8 | 9 => {
                // Part of a frozen extent goes, the rest stays.
                if let Some(whole) = pick(&mut self.parts, bytes.below(1 << 16)) {
                    let (from, to) = (bytes.below(whole.pages()), bytes.below(whole.pages() + 1));
                    let part = whole.slice(from, to);
                    for rest in [whole.slice(0, from), whole.slice(from + part.pages(), whole.pages())] {
                        if !rest.is_empty() {
                            self.parts.push(rest);
                        }
                    }
                    self.model.borrow_mut().take_back(part);
                    // SAFETY: the model says that it is in use and nobody else's.
                    assert_eq!(frames.free_extent(&cx, unsafe { Dirty::assume_owned(part) }), part.pages());
                }
            }
            10 => {
                if let Some(block) = pick(&mut self.frozen, bytes.below(1 << 16)) {
                    self.count(block);
                }
            }
            11 => {
                if let Some(block) = pick(&mut self.frozen, bytes.below(1 << 16)) {
                    let to = Order::new(bytes.below(10) as u32).expect("valid");
                    self.model.borrow_mut().write(block.extent(), false);
                    let mut run = frames.split(block, to).expect("managed");
                    while let Some(piece) = run.pop() {
                        assert_eq!(frames.head_of(piece.pfn()), Some((piece.pfn(), piece.order())));
                        self.frozen.push(piece);
                    }
                }
            }
            12 => {
                if !self.heads.is_empty() {
                    let (head, _) = self.heads[bytes.below(1 << 16) as usize % self.heads.len()];
                    // SAFETY: the model counts references to it.
                    let got = unsafe { frames.get_at(head) }.map(FolioRef::into_pfn);
                    if matches!(*self.model.borrow_mut().at(head.get()), State::Counted(n) if n < 15) {
                        assert_eq!(got, Ok(head));
                        self.reference(head, 1);
                    } else {
                        assert_eq!(got, Err(RefError::Saturated));
                    }
                }
            }
            13 => {
                if !self.heads.is_empty() {
                    let at = bytes.below(1 << 16) as usize % self.heads.len();
                    let (head, _) = self.heads[at];
                    let expected = match *self.model.borrow_mut().at(head.get()) {
                        State::Counted(1) => Put::Last,
                        _ => Put::Kept,
                    };
                    assert_eq!(frames.put(&cx, folio(head)), Ok(expected));
                    self.reference(head, -1);
                }
            }
            14 => {
                // Any frame: a speculative get succeeds exactly on heads with references.
                let pfn = Pfn::new(self.base + bytes.below(self.end - self.base + 3));
                let state = (pfn.get() < self.end).then(|| *self.model.borrow_mut().at(pfn.get()));
                // SAFETY: no LRU lists these frames.
                let got = unsafe { frames.try_get(pfn) };
                match state {
                    Some(State::Counted(15)) => assert_eq!(got, Err(RefError::Saturated)),
                    Some(State::Counted(_)) => {
                        assert_eq!(got.map(|folio| folio.map(FolioRef::into_pfn)), Ok(Some(pfn)));
                        self.reference(pfn, 1);
                    }
                    _ => assert!(matches!(got, Ok(None) | Err(RefError::NotManaged))),
                }
            }
            15 => self.split_counted(bytes),
            16 => {
                let from = self.base + bytes.below(self.end - self.base);
                let range = extent(from, bytes.below(1100));
                let expected = self.drop_range(range);
                assert_eq!(frames.free_range(&mut cx, pages(range)), expected);
            }
            17 => {
                let pfn = Pfn::new(self.base + bytes.below(self.end - self.base + 2));
                self.poison(&cx, pfn);
            }
            18 => {
                let from = self.base + bytes.below(self.end - self.base);
                let range = extent(from, 1 + bytes.below(1100));
                match frames.take_range(&cx, range) {
                    Ok(taken) => {
                        let taken = taken.into_extent();
                        self.model.borrow_mut().hand_out(taken, false);
                        self.parts.push(taken);
                    }
                    Err(AllocContigError::InUse(_) | AllocContigError::NotManaged) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
            19 => {
                let request = self.request(bytes);
                let limit = Pfn::new(self.base + bytes.below(self.end - self.base + 2));
                self.allocated_below(request, limit, frames.alloc_below(&cx, limit, request));
            }
            _ => {
                frames.drain(&cx);
                let from = (self.base + bytes.below(self.end - self.base)) / 512 * 512;
                self.claim(&mut cx, extent(from, 512 * (1 + bytes.below(3))), bytes.below(2) == 0);
            }
        }
    }

    fn count(&mut self, block: Frozen) {
        let (extent, order) = (block.extent(), block.order());
        let head = self.frames.count(block).expect("managed").into_pfn();
        let mut model = self.model.borrow_mut();
        model.write(extent, false);
        for frame in extent.base().get()..extent.end().get() {
            *model.at(frame) = State::Tail;
        }
        *model.at(head.get()) = State::Counted(1);
        self.heads.push((head, order));
    }

    /// References come or go; with the last the frames do.
    fn reference(&mut self, head: Pfn, change: i64) {
        let mut model = self.model.borrow_mut();
        let State::Counted(count) = *model.at(head.get()) else { panic!("not counted") };
        let count = count.saturating_add_signed(change);
        assert_eq!(self.frames.references(head), count);
        *model.at(head.get()) = State::Counted(count);
        if count == 0 {
            let at = self.heads.iter().position(|(h, _)| *h == head).expect("known");
            let (_, order) = self.heads.swap_remove(at);
            model.take_back(Extent::block(head, order));
        }
    }

    fn split_counted(&mut self, bytes: &mut Bytes<'_>) {
        if self.heads.is_empty() {
            return;
        }
        let at = bytes.below(1 << 16) as usize % self.heads.len();
        let (head, order) = self.heads[at];
        let to = Order::new(bytes.below(4) as u32).expect("valid").min(order);
        let alone = *self.model.borrow_mut().at(head.get()) == State::Counted(1);
        let split = self.frames.split_counted(folio(head), to);
        let numbers = split.map(|run| (run.order(), run.into_extent())).map_err(FolioRef::into_pfn);
        assert_eq!(numbers, if alone { Ok((to, Extent::block(head, order))) } else { Err(head) });
        if alone {
            self.heads.swap_remove(at);
            for piece in (0..order.pages()).step_by(to.pages() as usize) {
                let pfn = Pfn::new(head.get() + piece);
                *self.model.borrow_mut().at(pfn.get()) = State::Counted(1);
                self.heads.push((pfn, to));
            }
        }
    }

    /// What freeing a range must do, one frame at a time.
    fn drop_range(&mut self, range: Extent) -> RangeReport {
        let (mut report, mut next) = (RangeReport::default(), None);
        for frame in range.base().get()..range.end().get() {
            let freed = report.freed;
            let head = self.heads.iter().position(|(h, order)| h.get() == frame && order.get() == 0);
            let state = (frame < self.end).then(|| *self.model.borrow_mut().at(frame));
            match (head, state) {
                (Some(at), Some(State::Counted(1))) => {
                    self.heads.swap_remove(at);
                    if self.model.borrow().is_hwpoisoned(frame) {
                        report.refused += 1;
                    } else {
                        report.freed += 1;
                    }
                    self.model.borrow_mut().take_back(extent(frame, 1));
                }
                (Some(_), Some(State::Counted(count))) => {
                    *self.model.borrow_mut().at(frame) = State::Counted(count - 1);
                    report.kept += 1;
                }
                _ => report.invalid += 1,
            }
            if report.freed != freed {
                // A run goes on where the one before ends, but not over the border of an arena.
                report.runs += u64::from(next != Some(frame) || self.borders.contains(&frame));
                next = Some(frame + 1);
            }
        }
        report
    }

    fn poison(&mut self, cx: &CpuCx<'_, Threads>, pfn: Pfn) {
        let outcome = self.frames.hwpoison(cx, pfn);
        if outcome == HwPoisoned::NotManaged {
            return;
        }
        let mut model = self.model.borrow_mut();
        assert_eq!(outcome == HwPoisoned::Already, model.is_hwpoisoned(pfn.get()));
        let at = (pfn.get() - self.base) as usize;
        model.poisoned[at] = true;
        if outcome == HwPoisoned::Free {
            assert_eq!(model.state[at], State::Free);
            model.state[at] = State::Refused;
        }
        drop(model);
        assert!(self.frames.is_hwpoisoned(pfn));
        // What is in this CPU's cache is only found by its owner.
        self.frames.drain(cx);
        let mut model = self.model.borrow_mut();
        if model.state[at] == State::Free {
            model.state[at] = State::Refused;
        }
    }

    fn claim(&mut self, cx: &mut CpuCx<'_, Threads>, range: Extent, migrate: bool) {
        let frames = self.frames;
        let (model, frozen) = (self.model, &mut self.frozen);
        let threads = self.threads;
        let mut migrate = |_: &mut CpuCx<'_, Threads>, block: Extent| {
            // Lets go of frozen blocks in the way.
            let found = frozen.iter().position(|b| block.covers(b.extent()));
            match found.filter(|_| migrate) {
                None => false,
                Some(at) => {
                    let block = frozen.swap_remove(at);
                    model.borrow_mut().take_back(block.extent());
                    frames.free(&threads.cx(), block);
                    true
                }
            }
        };
        match frames.alloc_contig_range(cx, range, &mut migrate) {
            Ok(taken) => {
                let taken = taken.into_extent();
                assert_eq!(taken, range);
                self.model.borrow_mut().hand_out(taken, false);
                self.parts.push(taken);
            }
            Err(AllocContigError::InUse(_) | AllocContigError::NotManaged) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    /// sum(free) + sum(used) = total, after every step.
    fn check(&self) {
        let cx = self.threads.cx();
        if core::mem::take(&mut self.model.borrow_mut().gathered) {
            self.frames.drain(&cx);
        }
        let stats = self.frames.stats(&cx);
        let total = stats.available() + stats.refused + self.model.borrow().used();
        assert_eq!(total, self.frames.managed(), "{stats:?}");
        assert_eq!(stats.isolated, 0);
        let refused = self.model.borrow().state.iter().filter(|s| **s == State::Refused).count() as u64;
        assert_eq!(stats.refused, refused);
    }

    /// Everything goes back: what is free is then as large as it can be.
    fn finish(mut self) {
        let cx = self.threads.cx();
        for block in self.frozen.drain(..) {
            self.model.borrow_mut().take_back(block.extent());
            self.frames.free(&cx, block);
        }
        for part in self.parts.drain(..) {
            self.model.borrow_mut().take_back(part);
            // SAFETY: as above.
            self.frames.free_extent(&cx, unsafe { Dirty::assume_owned(part) });
        }
        for (head, order) in self.heads.drain(..) {
            while self.frames.put(&cx, folio(head)) == Ok(Put::Kept) {}
            self.model.borrow_mut().take_back(Extent::block(head, order));
        }
        self.frames.drain(&cx);
        let stats = self.frames.stats(&cx);
        assert_eq!(stats.cached + stats.deferred + stats.isolated, 0);
        let mut expected = [0_u64; hugemm_frames::ORDERS];
        let model = self.model.borrow();
        let mut at = self.base;
        let free = |frame: u64| model.state[(frame - self.base) as usize] == State::Free;
        let arena_of = |frame: u64| self.frames.node_of(Pfn::new(frame)).is_some();
        while at < self.end {
            if !free(at) {
                at += 1;
                continue;
            }
            // A run of free frames that stays in one arena.
            let mut end = at + 1;
            while end < self.end && free(end) && arena_of(end) && !self.borders.contains(&end) {
                end += 1;
            }
            for (_, order) in extent(at, end - at).chunks(Order::MAX) {
                expected[order.get() as usize] += 1;
            }
            at = end;
        }
        assert_eq!(stats.blocks, expected, "free memory is not merged");
        for order in 0..=9 {
            let order = Order::new(order).expect("valid");
            assert!(stats.fragmentation_permille(order) <= 1000);
        }
    }
}
