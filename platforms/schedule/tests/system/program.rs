//! What is known of every word, and programs that find out.
//!
//! In each page each CPU has words of its own. Nobody else stores to them, so what is in one is known, but for what others do to the page
//! as a whole meanwhile: then it is one of a few values, until it is read.

#![allow(unreachable_pub, reason = "one test's modules")]

use crate::world::{Cx, Follower, Handle, Model, Surroundings, World, span};
use hugemm_base::{CpuCx, CpuId, Extent, Never, NodeId, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::{Frames, HwPoisoned, NoMigration};
use hugemm_paging::{Flags, Lookup, PageFormat};
use hugemm_reclaim::{Ageing, LruPolicy, ShrinkBudget, Swap};
use hugemm_schedule::{Machine, has_loaded, point, progress, step};
use hugemm_threads::{Memory, Random};
use hugemm_vm::{Access, Backing, Following, Notifier, Pinned, Protection, SharedRef, VmError, VmaKind};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

/// CPUs that programs run on; one more is the worker.
pub const CPUS: u32 = 6;
/// Processes at a time.
const PROCESSES: usize = 3;
/// Pages that are poisoned in a run.
const POISON: u32 = 3;
/// Devices at a time.
const DEVICES: usize = 5;

struct Area {
    start: u64,
    pages: u64,
    kind: VmaKind,
}

impl Area {
    fn bytes(&self) -> u64 {
        self.pages * self.kind.page.bytes()
    }

    fn end(&self) -> u64 {
        self.start + self.bytes()
    }

    fn holds(&self, at: u64) -> bool {
        (self.start..self.end()).contains(&at)
    }

    /// Where the page begins that an address is in.
    fn page(&self, at: u64) -> u64 {
        at & !(self.kind.page.bytes() - 1)
    }
}

const SMALL: VmaKind = VmaKind::private(PageSize::Size4K);
const LARGE: VmaKind = VmaKind::private(PageSize::Size2M);

/// Private ones, and one that all processes share, which adjoins the first.
static AREAS: [Area; 4] = [
    Area { start: 0x4000_0000, pages: 24, kind: SMALL },
    Area { start: 0x4001_8000, pages: 10, kind: VmaKind { shared: true, ..SMALL } },
    Area { start: 0x8000_0000, pages: 1, kind: LARGE },
    Area { start: 0xc000_0000, pages: 1, kind: LARGE.pooled() },
];
const PRIVATE: &Area = &AREAS[0];
pub const SHARED_PAGES: u64 = 10;

fn area_of(at: u64) -> &'static Area {
    AREAS.iter().find(|area| area.holds(at)).expect("in an area")
}

/// Stores while a process is forked.
struct Fork {
    id: u64,
    /// By whom; `None`: a device.
    stores: Vec<(Option<u32>, u64, u64)>,
}

/// How often a page has been unmapped, and whether it is just now.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Changes {
    begun: u64,
    under_way: bool,
}

/// How often a page has got other rights, whether it gets some just now, and whether it may not be stored to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Rights {
    begun: u64,
    under_way: bool,
    read_only: bool,
}

/// What is known of some words.
#[derive(Default)]
struct Book {
    /// What may be in each; 0 in those that are not here.
    words: BTreeMap<u64, BTreeSet<u64>>,
    changes: BTreeMap<u64, Changes>,
    rights: BTreeMap<u64, Rights>,
    /// What was stored during a change.
    fresh: BTreeMap<u64, BTreeSet<u64>>,
    /// Pages that could not be mapped again.
    gone: BTreeSet<u64>,
    forks: Vec<Fork>,
}

impl Book {
    fn changes(&self, page: u64) -> Changes {
        self.changes.get(&page).copied().unwrap_or_default()
    }

    fn rights(&self, page: u64) -> Rights {
        self.rights.get(&page).copied().unwrap_or_default()
    }

    fn may_be(&self, at: u64) -> BTreeSet<u64> {
        self.words.get(&at).cloned().unwrap_or_else(|| [0].into())
    }

    /// A value has been stored; `torn`: the page was changed meanwhile.
    fn stored(&mut self, by: Option<u32>, at: u64, value: u64, torn: bool) {
        if torn {
            let mut may = self.may_be(at);
            may.extend([0, value]);
            self.words.insert(at, may);
            self.fresh.entry(at).or_default().insert(value);
        } else {
            self.words.insert(at, [value].into());
        }
        self.forks.iter_mut().for_each(|fork| fork.stores.push((by, at, value)));
    }
}

/// A process.
struct Process<'v, 'h, F: PageFormat> {
    space: Handle<'v, 'h, F>,
    book: RefCell<Book>,
    /// CPUs that are in it, or about to do something with it.
    users: Cell<u32>,
    doomed: Cell<bool>,
    ending: Cell<bool>,
    /// Pins of it, and those that are being made.
    pins: Cell<u32>,
    /// How many were ever begun.
    pins_begun: Cell<u64>,
    /// Pins that are being made, and changes of rights: a device that stores is given what the process may store to.
    pinning: Cell<u32>,
    protecting: Cell<u32>,
    guest: Arc<Guest>,
    follower: RefCell<Option<hugemm_vm::Follower<Model<'h, F>>>>,
}

/// Another machine's view of a process's memory: translations of its own.
#[derive(Default)]
struct Guest {
    /// The frame, and whether it may be stored to.
    pages: Mutex<BTreeMap<u64, (Pfn, bool)>>,
    following: Following,
}

impl<'h> Notifier<Machine<'h>> for Guest {
    fn begin(&self, _cx: &mut CpuCx<'_, Machine<'h>>, range: VirtRange) {
        self.following.begin();
        let (first, last) = (range.start().get(), range.last().get());
        self.pages.lock().expect("one thread").retain(|page, _| page + 0xfff < first || last < *page);
    }

    fn end(&self, _cx: &mut CpuCx<'_, Machine<'h>>, _range: VirtRange) {
        self.following.end();
    }
}

/// A device of a CPU's, with a pinned page.
struct Device<'v, 'h, F: PageFormat> {
    of: u32,
    process: Rc<Process<'v, 'h, F>>,
    pinned: Pinned<'v>,
    /// If the page has been unmapped, what may be in the CPU's word of it.
    apart: Option<BTreeSet<u64>>,
}

/// How often what has happened, in all runs of a test.
pub type Deeds = RefCell<BTreeMap<&'static str, u64>>;

/// What has to happen in some run, for a test to say anything.
pub const ALL_DEEDS: [&str; 18] = [
    "forked",
    "forked beside pins",
    "unmapped",
    "discarded",
    "relocated",
    "locked",
    "written back",
    "protected",
    "denied",
    "ended",
    "ended beside idle CPUs",
    "pinned",
    "poisoned",
    "stored by guests",
    "arenas removed",
    "swapped out",
    "swapped in",
    "moved",
];

/// In whose book, where, and what.
type InFlight = (*const RefCell<Book>, u64, u64);

/// What all CPUs share.
pub struct Test<'v, 'h, F: PageFormat> {
    world: &'v World<'h, F>,
    object: &'v SharedRef<'v, Model<'h, F>>,
    processes: RefCell<Vec<Rc<Process<'v, 'h, F>>>>,
    /// Of the shared area.
    shared: RefCell<Book>,
    devices: RefCell<Vec<Device<'v, 'h, F>>>,
    /// What each CPU is about to store, and where.
    in_flight: RefCell<Vec<Option<InFlight>>>,
    value: Cell<u64>,
    poison: Cell<u32>,
    ended: Cell<u32>,
    has_guest: Cell<bool>,
    deeds: &'v Deeds,
}

/// A request that may be refused: for want of memory, or because it would have to read what is poisoned.
#[track_caller]
fn refused(error: VmError) {
    assert!(matches!(error, VmError::NoMemory | VmError::NoPool | VmError::HwPoisoned { .. }), "{error}");
}

impl<'v, 'h, F: PageFormat> Test<'v, 'h, F> {
    pub fn new(world: &'v World<'h, F>, object: &'v SharedRef<'v, Model<'h, F>>, deeds: &'v Deeds) -> Self {
        let test = Test {
            world,
            object,
            processes: RefCell::default(),
            shared: RefCell::default(),
            devices: RefCell::default(),
            in_flight: RefCell::new(vec![None; CPUS as usize + 1]),
            value: Cell::new(0),
            poison: Cell::new(POISON),
            ended: Cell::new(0),
            has_guest: Cell::new(false),
            deeds,
        };
        let cx = &mut world.machine.cx();
        world.resize_pool(cx, 2);
        let first = world.vm.create(cx, crate::world::bounds()).expect("memory");
        let first = test.process(cx, first, Book::default());
        for area in &AREAS {
            test.map(cx, &first, area, area.start..area.end());
        }
        test.processes.borrow_mut().push(first);
        test
    }

    fn process(&self, cx: &mut Cx<'_, 'h>, space: Handle<'v, 'h, F>, book: Book) -> Rc<Process<'v, 'h, F>> {
        let guest = Arc::new(Guest::default());
        let follower = self.world.vm.follow(cx, &space, Follower(guest.clone())).ok();
        let (book, follower) = (RefCell::new(book), RefCell::new(follower));
        Rc::new(Process {
            space,
            book,
            users: Cell::new(0),
            doomed: Cell::new(false),
            ending: Cell::new(false),
            pins: Cell::new(0),
            pins_begun: Cell::new(0),
            pinning: Cell::new(0),
            protecting: Cell::new(0),
            guest,
            follower,
        })
    }

    /// Makes an area, or a part of one. Nobody changes these pages meanwhile.
    fn map(&self, cx: &mut Cx<'_, 'h>, process: &Process<'v, 'h, F>, area: &Area, part: Range<u64>) {
        let whole = span(part.start, part.end - part.start);
        loop {
            let from = (part.start - area.start) / 4096;
            let backing = if area.kind.shared { Backing::Shared(self.object, from) } else { Backing::Private };
            match self.world.vm.map(cx, &process.space, whole, area.kind, backing) {
                Ok(_) => return,
                Err(VmError::NoPool) => break,
                Err(error) => assert_eq!(error, VmError::NoMemory),
            }
            cx.cond_resched();
        }
        process.book.borrow_mut().gone.extend(part.step_by(area.kind.page.bytes() as usize));
    }

    fn did(&self, what: &'static str, times: u64) {
        *self.deeds.borrow_mut().entry(what).or_default() += times;
    }

    fn next_value(&self) -> u64 {
        self.value.set(self.value.get() + 1);
        self.value.get()
    }

    fn book<'a>(&'a self, process: &'a Process<'v, 'h, F>, area: &Area) -> &'a RefCell<Book> {
        if area.kind.shared { &self.shared } else { &process.book }
    }

    /// Ends a process that nobody is in any more.
    fn end(&self, cx: &mut Cx<'_, 'h>, process: Rc<Process<'v, 'h, F>>) {
        self.processes.borrow_mut().retain(|other| !Rc::ptr_eq(other, &process));
        loop {
            let mut devices = self.devices.borrow_mut();
            let Some(at) = devices.iter().position(|device| Rc::ptr_eq(&device.process, &process)) else { break };
            let device = devices.swap_remove(at);
            drop(devices);
            self.unpin(cx, &process, device.pinned);
        }
        // Somebody may be about to let go of a device of his.
        while process.users.get() > 0 {
            cx.cond_resched();
        }
        if let Some(follower) = process.follower.take() {
            // SAFETY: it follows this space.
            drop(unsafe { self.world.vm.unfollow(cx, &process.space, follower) });
        }
        let process = Rc::into_inner(process).expect("nobody's any more");
        let (root, begun) = (process.space.root(), step());
        self.world.vm.destroy(cx, process.space).map_err(|(error, _)| error).expect("destroyed");
        assert!(!has_loaded(root, begun), "a CPU walks tables that are free");
        self.did("ended", 1);
    }

    fn unpin(&self, cx: &mut Cx<'_, 'h>, process: &Process<'v, 'h, F>, pinned: Pinned<'v>) {
        self.world.vm.unpin(cx, &process.space, pinned).expect("its own");
        process.pins.set(process.pins.get() - 1);
    }

    /// A CPU has nothing to do with a process any more.
    fn let_go(&self, cx: &mut Cx<'_, 'h>, process: Rc<Process<'v, 'h, F>>) {
        process.users.set(process.users.get() - 1);
        if process.doomed.get() && process.users.get() == 0 && !process.ending.replace(true) {
            self.end(cx, process);
        }
    }

    /// After all CPUs have ended. What may be in each word of the shared object.
    pub fn finish(self) -> BTreeMap<u64, BTreeSet<u64>> {
        let cx = &mut self.world.machine.cx();
        let left = self.processes.take();
        for process in left {
            self.is_in_reverse_map(cx, &process);
            self.end(cx, process);
        }
        let stats = Swap::stats(self.world.store, cx);
        self.did("swapped out", stats.stores);
        self.did("swapped in", stats.loads);
        self.did("moved", self.world.vm.pager().counts().moved.get());
        let words = self.shared.into_inner().words;
        words.into_iter().map(|(at, may)| (at - AREAS[1].start, may)).collect()
    }

    /// What the page table has, the reverse map finds.
    fn is_in_reverse_map(&self, cx: &mut Cx<'_, 'h>, process: &Process<'v, 'h, F>) {
        let vm = &self.world.vm;
        for at in AREAS.iter().flat_map(|area| (area.start..area.end()).step_by(area.kind.page.bytes() as usize)) {
            let Lookup::Mapped(leaf) = vm.lookup(cx, &process.space, VirtAddr::new(at)) else { continue };
            let mut here = 0;
            vm.walk_mappings(cx, leaf.frame, |_, place| {
                here += u32::from(std::ptr::eq(place.space, &raw const *process.space) && place.at.get() == at);
            });
            assert_eq!(here, 1, "{at:#x}");
        }
    }

    /// What the worker does: it takes memory away, moves pages, changes its ways, and has pools and arenas come and go.
    pub fn work(&self, seed: u64) {
        let (world, mut random) = (self.world, Random(seed ^ 0x776f_726b));
        let cx = &mut world.machine.cx();
        while self.ended.get() < CPUS {
            let pager = world.vm.pager();
            let node = NodeId(random.below(2) as u32);
            match random.below(16) {
                0..=5 => {
                    let budget = ShrinkBudget { free: 1 << random.below(8), scan: 1 << random.below(9) };
                    pager.shrink(&world.vm, cx, node, budget, &Never);
                }
                6 => drop(pager.balance(&world.vm, cx, node, 256, &Never)),
                7 => {
                    // All of it, a few times.
                    let budget = ShrinkBudget { free: u64::MAX, scan: 1 << 8 };
                    for _ in 0..16 {
                        pager.shrink(&world.vm, cx, node, budget, &Never);
                        progress();
                    }
                }
                8 => drop(pager.compact(&world.vm, cx, node)),
                9 => pager.set_ageing(Ageing::ALL[random.below(2) as usize]),
                10 => pager.lru(node).expect("one").set_policy(cx, LruPolicy::ALL[random.below(2) as usize]),
                11 => world.resize_pool(cx, random.below(4)),
                12 => self.come_and_go(cx),
                _ => (0..200).for_each(|_| point()),
            }
            cx.cond_resched();
        }
    }

    /// Memory that comes if it is not there, and goes if it can be had.
    fn come_and_go(&self, cx: &mut Cx<'_, 'h>) {
        let (frames, spec) = (self.world.vm.frames(), &self.world.guest);
        if !self.has_guest.replace(true) {
            // What is kept about arenas stays, in part, when they have gone.
            let memory = ManuallyDrop::new(Memory::new(self.added_bytes()));
            // SAFETY: of this size, and never given back; the frames are nobody else's.
            unsafe {
                frames.add(cx, spec, memory.ptr(), memory.bytes()).expect("room");
                frames.release_extent(cx, spec.extent);
            }
        } else if let Ok(all) = frames.alloc_contig_range(cx, spec.extent, &mut NoMigration) {
            // SAFETY: no program asks for these frames by number, and nobody else is at it.
            let removed = unsafe { frames.remove(cx, all, |_| panic!("no frame was widened")) };
            drop(removed.expect("all of one that was added"));
            self.has_guest.set(false);
            self.did("arenas removed", 1);
        }
    }

    fn added_bytes(&self) -> std::alloc::Layout {
        Frames::<Surroundings<'h>>::added_bytes(&self.world.guest).expect("valid")
    }
}

/// What a CPU does.
pub struct Program<'t, 'v, 'h, F: PageFormat> {
    test: &'t Test<'v, 'h, F>,
    cpu: u32,
    random: Random,
    process: Rc<Process<'v, 'h, F>>,
}

impl<'t, 'v, 'h, F: PageFormat> Program<'t, 'v, 'h, F> {
    pub fn run(test: &'t Test<'v, 'h, F>, cpu: u32, seed: u64, steps: u64) {
        let cx = &mut test.world.machine.cx();
        let process = test.processes.borrow()[0].clone();
        process.users.set(process.users.get() + 1);
        test.world.enter(cx, &process.space);
        let mut program = Program { test, cpu, random: Random(seed << 8 | u64::from(cpu)), process };
        for _ in 0..steps {
            program.step(cx);
            test.world.vm.frames().serve(cx);
            progress();
        }
        let words: Vec<u64> = program.own_words(&program.process.clone());
        for at in words {
            program.get(cx, at);
            progress();
        }
        test.world.leave(cx, &program.process.space);
        let Program { process, .. } = program;
        test.let_go(cx, process);
        test.ended.set(test.ended.get() + 1);
        // Idle: what others want of its cache they get.
        while test.ended.get() < CPUS {
            test.world.vm.frames().serve(cx);
            cx.cond_resched();
        }
    }

    /// This CPU's words of which something is known.
    fn own_words(&self, process: &Process<'v, 'h, F>) -> Vec<u64> {
        let own = |at: &u64| *at % 4096 / 8 == u64::from(self.cpu);
        let (book, shared) = (process.book.borrow(), self.test.shared.borrow());
        book.words.keys().chain(shared.words.keys()).copied().filter(own).collect()
    }

    fn any_area(&mut self) -> &'static Area {
        &AREAS[[0, 0, 0, 0, 0, 1, 1, 2, 3][self.random.below(9) as usize]]
    }

    fn any_at(&mut self) -> u64 {
        let area = self.any_area();
        let within = if area.kind.page == PageSize::Size4K { 0 } else { self.random.below(4) * 0x7_f000 };
        area.start + self.random.below(area.pages) * area.kind.page.bytes() + within + u64::from(self.cpu) * 8
    }

    fn step(&mut self, cx: &mut Cx<'_, 'h>) {
        if self.process.doomed.get() {
            self.go_elsewhere(cx);
        }
        match self.random.below(200) {
            0..=3 => self.fork(cx),
            4..=9 => self.change(cx),
            10..=13 => self.go_elsewhere(cx),
            14 => self.doom(),
            15..=18 => self.pin(cx),
            19 | 20 => self.unpin(cx),
            21..=34 => self.device_acts(),
            35 => self.poison(cx),
            36..=38 => self.prefault(cx),
            39..=52 => self.guest_acts(cx),
            53..=58 => self.protect(cx),
            59..=64 => self.relocate(cx),
            65..=68 => self.lock(cx),
            69..=71 => self.write_back(cx),
            72..=115 => {
                let at = self.any_at();
                self.get(cx, at);
            }
            _ => {
                let at = self.any_at();
                self.put(cx, at);
            }
        }
    }

    fn put(&mut self, cx: &mut Cx<'_, 'h>, at: u64) {
        let process = self.process.clone();
        self.storing(&process, at, |program, value| {
            program.test.world.put(cx, &process.space, at, value).map(|()| true)
        });
        // A guest that has the page has what was stored.
        if process.guest.pages.lock().expect("one thread").contains_key(&(at & !0xfff)) {
            self.guest_loads(cx, &process, at);
        }
    }

    /// Stores by some way, which says whether it has.
    fn storing(
        &mut self,
        process: &Process<'v, 'h, F>,
        at: u64,
        store: impl FnOnce(&mut Self, u64) -> Result<bool, VmError>,
    ) {
        let (test, area, value) = (self.test, area_of(at), self.test.next_value());
        let page = area.page(at);
        let before = process.book.borrow().changes(page);
        let rights = process.book.borrow().rights(page);
        let book = test.book(process, area);
        test.in_flight.borrow_mut()[self.cpu as usize] = Some((book, at, value));
        let stored = store(self, value);
        test.in_flight.borrow_mut()[self.cpu as usize] = None;
        let after = process.book.borrow().changes(page);
        let torn = before.under_way || before != after;
        let known = !torn && !rights.under_way && rights == process.book.borrow().rights(page);
        match stored {
            Ok(true) => {
                assert!(!known || !rights.read_only, "cpu{} at {at:#x}: stored what may not be", self.cpu);
                book.borrow_mut().stored(Some(self.cpu), at, value, torn && !area.kind.shared);
                // A page that leaves may have got it.
                for device in test.devices.borrow_mut().iter_mut().filter(|device| torn && device.of == self.cpu) {
                    if device.pinned.at().get() == page
                        && std::ptr::eq(&*device.process, process)
                        && let Some(apart) = &mut device.apart
                    {
                        apart.insert(value);
                    }
                }
            }
            Ok(false) => {}
            Err(VmError::Denied { .. }) if !known || rights.read_only => test.did("denied", 1),
            Err(error) => self.missed(process, page, torn, error),
        }
    }

    /// Some pages may be stored to no longer, or again.
    fn protect(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let size = area.kind.page.bytes();
        let first = self.random.below(area.pages);
        let pages = (1 + self.random.below(6)).min(area.pages - first);
        let start = area.start + first * size;
        let all = || (0..pages).map(|page| start + page * size);
        let read_only = self.random.below(2) == 0;
        {
            let mut book = process.book.borrow_mut();
            let busy = |page| book.changes(page).under_way || book.rights(page).under_way || book.gone.contains(&page);
            if process.pinning.get() > 0 || all().any(busy) {
                return;
            }
            for page in all() {
                let rights = book.rights(page);
                book.rights.insert(page, Rights { begun: rights.begun + 1, under_way: true, ..rights });
            }
        }
        process.protecting.set(process.protecting.get() + 1);
        let rights = if read_only { Protection::USER } else { area.kind.protection };
        let done = self.test.world.vm.protect(cx, &process.space, span(start, pages * size), rights);
        process.protecting.set(process.protecting.get() - 1);
        let mut book = process.book.borrow_mut();
        for page in all() {
            let rights = book.rights.get_mut(&page).expect("begun");
            rights.under_way = false;
            rights.read_only = if done.is_ok() { read_only } else { rights.read_only };
        }
        match done {
            Ok(()) => self.test.did("protected", 1),
            Err(error) => assert_eq!(error, VmError::NoMemory),
        }
    }

    /// An access that was refused.
    #[track_caller]
    fn missed(&self, process: &Process<'v, 'h, F>, page: u64, torn: bool, error: VmError) {
        if torn || process.book.borrow().gone.contains(&page) {
            assert!(!matches!(error, VmError::Lost | VmError::Paging(_) | VmError::Foreign), "{error}");
        } else {
            refused(error);
        }
    }

    fn get(&mut self, cx: &mut Cx<'_, 'h>, at: u64) -> Option<u64> {
        let process = self.process.clone();
        self.loading(&process, at, |program| program.test.world.get(cx, &process.space, at).map(Some))
    }

    /// Loads by some way, which says what it has found; what that is, if nobody changed the page meanwhile.
    fn loading(
        &mut self,
        process: &Process<'v, 'h, F>,
        at: u64,
        load: impl FnOnce(&mut Self) -> Result<Option<u64>, VmError>,
    ) -> Option<u64> {
        let (area, page) = (area_of(at), area_of(at).page(at));
        let before = process.book.borrow().changes(page);
        let found = load(self);
        let after = process.book.borrow().changes(page);
        let torn = before.under_way || before != after;
        let book = self.test.book(process, area);
        match found {
            Ok(Some(found)) => {
                let may = book.borrow().may_be(at);
                let zero = torn && !area.kind.shared && found == 0;
                assert!(may.contains(&found) || zero, "cpu{} at {at:#x}: {found}, which may be {may:?}", self.cpu);
                if !torn {
                    book.borrow_mut().words.insert(at, [found].into());
                }
                (!torn).then_some(found)
            }
            Ok(None) => None,
            Err(error) => {
                self.missed(process, page, torn, error);
                None
            }
        }
    }

    /// Some pages are given up, or unmapped and mapped again, of areas that adjoin too: private ones read as zeroes, and shared ones as
    /// before.
    fn change(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let size = area.kind.page.bytes();
        let start = area.start + self.random.below(area.pages) * size;
        let end = if area.end() == AREAS[1].start { AREAS[1].end() } else { area.end() };
        let end = end.min(start + (1 + self.random.below(6)) * size);
        let gives_up = self.random.below(3) == 0;
        self.change_pages(cx, &process, start..end, gives_up);
    }

    fn change_pages(&self, cx: &mut Cx<'_, 'h>, process: &Process<'v, 'h, F>, range: Range<u64>, gives_up: bool) {
        let part = |area: &'static Area| (area, range.start.max(area.start)..range.end.min(area.end()));
        let parts: Vec<_> = AREAS.iter().map(part).filter(|(_, part)| !part.is_empty()).collect();
        let all = || parts.iter().flat_map(|(area, part)| part.clone().step_by(area.kind.page.bytes() as usize));
        let stays;
        {
            let mut book = process.book.borrow_mut();
            if all().any(|page| book.changes(page).under_way || book.rights(page).under_way) {
                return;
            }
            stays = gives_up
                && parts.iter().all(|(area, _)| !area.kind.pooled)
                && !all().any(|page| book.gone.contains(&page));
            for page in all() {
                let changes = book.changes(page);
                book.changes.insert(page, Changes { begun: changes.begun + 1, under_way: true });
            }
            book.fresh.retain(|at, _| !range.contains(at));
            // A device keeps the page as it is.
            for device in self.test.devices.borrow_mut().iter_mut() {
                let at = device.pinned.at().get();
                if std::ptr::eq(&*device.process, process) && range.contains(&at) && device.apart.is_none() {
                    let at = at + u64::from(device.of) * 8;
                    let mut apart = book.may_be(at);
                    let in_flight = self.test.in_flight.borrow()[device.of as usize];
                    apart.extend(
                        in_flight.filter(|(of, to, _)| std::ptr::eq(*of, &process.book) && *to == at).map(|of| of.2),
                    );
                    device.apart = Some(apart);
                }
            }
        }
        let whole = span(range.start, range.end - range.start);
        if stays {
            self.test.world.vm.discard(cx, &process.space, whole).expect("areas");
            self.test.did("discarded", 1);
        } else {
            while let Err(error) = self.test.world.vm.unmap(cx, &process.space, whole) {
                assert_eq!(error, VmError::NoMemory);
                cx.cond_resched();
            }
            self.test.did("unmapped", 1);
            process.book.borrow_mut().gone.retain(|page| !range.contains(page));
            for (area, part) in &parts {
                self.test.map(cx, process, area, part.clone());
            }
        }
        let mut book = process.book.borrow_mut();
        if !stays {
            book.rights.retain(|page, _| !range.contains(page));
        }
        for page in all() {
            book.changes.get_mut(&page).expect("begun").under_way = false;
        }
        for (_, part) in parts.iter().filter(|(area, _)| !area.kind.shared) {
            let fresh: Vec<_> = book.fresh.range(part.clone()).map(|(at, values)| (*at, values.clone())).collect();
            book.words.retain(|at, _| !part.contains(at));
            for (at, mut values) in fresh {
                values.insert(0);
                book.words.insert(at, values);
            }
        }
    }

    /// What has been stored to the file goes to it, if there is one.
    fn write_back(&mut self, cx: &mut Cx<'_, 'h>) {
        match self.test.world.vm.sync(cx, self.test.object, 0, SHARED_PAGES) {
            Ok(pages) => self.test.did("written back", pages),
            Err(VmError::OtherKind) => {}
            Err(error) => refused(error),
        }
    }

    /// Some pages are locked for a while: all of them are there, whatever reclaim does.
    fn lock(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let size = area.kind.page.bytes();
        let first = self.random.below(area.pages);
        let pages = (1 + self.random.below(6)).min(area.pages - first);
        let part = span(area.start + first * size, pages * size);
        let all = || (0..pages).map(|page| area.start + (first + page) * size);
        {
            let mut book = process.book.borrow_mut();
            let busy = |page| book.changes(page).under_way || book.rights(page).under_way || book.gone.contains(&page);
            if all().any(busy) {
                return;
            }
            for page in all() {
                let rights = book.rights(page);
                book.rights.insert(page, Rights { begun: rights.begun + 1, under_way: true, ..rights });
            }
        }
        let vm = &self.test.world.vm;
        match vm.lock(cx, &process.space, part, u64::MAX) {
            Ok(()) => {
                (0..self.random.below(400)).for_each(|_| point());
                let usage = vm.usage(cx, &process.space, part).expect("in the space");
                if !area.kind.shared {
                    assert_eq!((usage.present, usage.swapped), (part.pages(), 0), "{part:?}");
                }
                self.test.did("locked", 1);
            }
            Err(error) => refused(error),
        }
        while let Err(error) = vm.unlock(cx, &process.space, part) {
            assert_eq!(error, VmError::NoMemory);
            cx.cond_resched();
        }
        let mut book = process.book.borrow_mut();
        for page in all() {
            book.rights.get_mut(&page).expect("begun").under_way = false;
        }
    }

    /// Some pages are elsewhere for a while, where nobody looks, and come back as they were.
    fn relocate(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let size = area.kind.page.bytes();
        let first = self.random.below(area.pages);
        let pages = (1 + self.random.below(6)).min(area.pages - first);
        let here = span(area.start + first * size, pages * size);
        let all = || (0..pages).map(|page| area.start + (first + page) * size);
        {
            let mut book = process.book.borrow_mut();
            let busy = |page| book.changes(page).under_way || book.rights(page).under_way || book.gone.contains(&page);
            if all().any(busy) {
                return;
            }
            for page in all() {
                let changes = book.changes(page);
                book.changes.insert(page, Changes { begun: changes.begun + 1, under_way: true });
            }
        }
        let vm = &self.test.world.vm;
        // By whole tables or not.
        let there = 0x10_0000_0000 + (u64::from(self.cpu) << 32) + here.start().get();
        let there = span(there + if size == 4096 { self.random.below(3) * size } else { 0 }, here.bytes());
        // A fork may have come between, once.
        while let Err(error) = vm.unmap(cx, &process.space, there) {
            assert_eq!(error, VmError::NoMemory);
            cx.cond_resched();
        }
        match vm.move_to(cx, &process.space, here, there) {
            Ok(()) => {
                (0..self.random.below(100)).for_each(|_| point());
                while let Err(error) = vm.move_to(cx, &process.space, there, here) {
                    assert_eq!(error, VmError::NoMemory);
                    cx.cond_resched();
                }
                self.test.did("relocated", 1);
            }
            Err(error) => assert_eq!(error, VmError::NoMemory),
        }
        let mut book = process.book.borrow_mut();
        for page in all() {
            book.changes.get_mut(&page).expect("begun").under_way = false;
        }
    }

    /// Into another process, or this one again.
    fn go_elsewhere(&mut self, cx: &mut Cx<'_, 'h>) {
        let test = self.test;
        let to = {
            let processes = test.processes.borrow();
            let open: Vec<_> = processes.iter().filter(|process| !process.doomed.get()).collect();
            open[self.random.below(open.len() as u64) as usize].clone()
        };
        to.users.set(to.users.get() + 1);
        // Idle for a while, over its own tables or those of one that it has left; or from one to the other.
        if Rc::ptr_eq(&to, &self.process) {
            self.idle_over(cx, &to);
            (0..self.random.below(200)).for_each(|_| point());
            test.world.enter(cx, &to.space);
            self.wake_up();
        } else if self.random.below(2) == 0 {
            // Idle over tables that may go meanwhile.
            let from = std::mem::replace(&mut self.process, to);
            self.idle_over(cx, &from);
            let left = Rc::downgrade(&from);
            self.test.let_go(cx, from);
            (0..self.random.below(2000)).for_each(|_| point());
            test.world.enter(cx, &self.process.space);
            self.wake_up();
            test.did("ended beside idle CPUs", u64::from(left.strong_count() == 0));
            return;
        } else {
            test.world.enter(cx, &to.space);
            test.world.leave(cx, &self.process.space);
        }
        let from = std::mem::replace(&mut self.process, to);
        self.test.let_go(cx, from);
    }

    /// Promises to use no address, and keeps the tables.
    fn idle_over(&self, cx: &Cx<'_, 'h>, process: &Process<'v, 'h, F>) {
        self.test.world.machine.mmu().pause(CpuId(self.cpu), true);
        // SAFETY: it enters a space before it uses an address.
        unsafe { process.space.tlb().enter_lazy(self.test.world.vm.shootdown(), cx) };
    }

    fn wake_up(&self) {
        self.test.world.machine.mmu().pause(CpuId(self.cpu), false);
    }

    fn doom(&mut self) {
        let processes = self.test.processes.borrow();
        if processes.iter().filter(|process| !process.doomed.get()).count() > 1 {
            self.process.doomed.set(true);
        }
    }

    /// A child has the private words as they are at one moment, whatever others do.
    fn fork(&mut self, cx: &mut Cx<'_, 'h>) {
        let (test, parent) = (self.test, self.process.clone());
        if test.processes.borrow().len() >= PROCESSES {
            return;
        }
        let (id, pins, begun) = (test.next_value(), parent.pins.get(), parent.pins_begun.get());
        let (before, mut words, gone) = {
            let mut book = parent.book.borrow_mut();
            book.forks.push(Fork { id, stores: Vec::new() });
            (book.changes.clone(), book.words.clone(), book.gone.clone())
        };
        let forked = test.world.vm.fork(cx, &parent.space);
        let (stores, torn) = {
            let mut book = parent.book.borrow_mut();
            let at = book.forks.iter().position(|fork| fork.id == id).expect("its own");
            let mut stores = book.forks.swap_remove(at).stores;
            // What is about to be stored may have been in time.
            for (cpu, store) in test.in_flight.borrow().iter().enumerate() {
                let of_this = store.filter(|(of, ..)| std::ptr::eq(*of, &parent.book));
                stores.extend(of_this.map(|(_, at, value)| (Some(cpu as u32), at, value)));
            }
            let unlike = |(page, now): (&u64, &Changes)| {
                (now.under_way || before.get(page).copied().unwrap_or_default() != *now).then_some(*page)
            };
            let torn: BTreeSet<u64> = book.changes.iter().filter_map(unlike).collect();
            (stores, torn)
        };
        let child = match forked {
            Ok(child) => child,
            Err(error) => return refused(error),
        };
        for (_, at, value) in &stores {
            words.entry(*at).or_insert_with(|| [0].into()).insert(*value);
        }
        test.did("forked", 1);
        let pages =
            AREAS.iter().flat_map(|area| (0..area.pages).map(|page| area.start + page * area.kind.page.bytes()));
        let rights = pages.filter_map(|page| {
            let allowed = child.find_vma(cx, VirtAddr::new(page)).ok()?.kind.protection;
            Some((page, Rights { read_only: !allowed.contains(Protection::WRITE), ..Rights::default() }))
        });
        let rights = rights.collect();
        let child = test.process(cx, child, Book { words, gone, rights, ..Book::default() });
        child.users.set(1);
        test.world.enter(cx, &child.space);
        test.world.leave(cx, &parent.space);
        // What came or went meanwhile is there or not.
        for page in torn {
            self.change_pages(cx, &child, page..page + area_of(page).kind.page.bytes(), false);
        }
        self.process = child.clone();
        // What may be pinned is copied for the child, each page at its own moment.
        let pinned = pins != 0 || parent.pins_begun.get() != begun;
        self.is_one_moment(cx, &stores, pinned.then_some(&*parent));
        if self.random.below(2) == 0 {
            let own = child.book.borrow().words.keys().copied().collect::<Vec<_>>();
            for at in own {
                self.get(cx, at);
            }
        }
        test.processes.borrow_mut().push(child);
        self.test.let_go(cx, parent);
    }

    /// Of the stores of one CPU, the child has seen the first so many; beside pins, of those to pages that it has with the parent.
    fn is_one_moment(
        &mut self,
        cx: &mut Cx<'_, 'h>,
        stores: &[(Option<u32>, u64, u64)],
        pinned: Option<&Process<'_, 'h, F>>,
    ) {
        let by_devices: BTreeSet<u64> = stores.iter().filter(|store| store.0.is_none()).map(|store| store.1).collect();
        for cpu in 0..=CPUS {
            let own: Vec<(u64, u64)> =
                stores.iter().filter(|store| store.0 == Some(cpu)).map(|store| (store.1, store.2)).collect();
            let places: BTreeSet<u64> = own.iter().map(|store| store.0).filter(|at| !by_devices.contains(at)).collect();
            let (mut least, mut most) = (0, own.len());
            for at in places {
                let changed = self.process.book.borrow().changes(area_of(at).page(at)).begun > 0;
                if let Some(parent) = pinned {
                    if !self.has_with(cx, parent, at) {
                        continue;
                    }
                    self.test.did("forked beside pins", 1);
                }
                let Some(found) = self.get(cx, at).filter(|_| !changed) else { continue };
                let here =
                    || own.iter().enumerate().filter(|(_, store)| store.0 == at).map(|(index, store)| (index, store.1));
                let seen = here().find(|(_, value)| *value == found).map(|(index, _)| index);
                least = least.max(seen.map_or(0, |index| index + 1));
                most = most.min(
                    here()
                        .map(|(index, _)| index)
                        .find(|index| seen.is_none_or(|seen| *index > seen))
                        .unwrap_or(own.len()),
                );
            }
            assert!(least <= most, "the child has store {least} of cpu{cpu}, and not the one after {most}: {own:x?}");
        }
    }

    /// Whether the page there is one that both processes have.
    fn has_with(&self, cx: &mut Cx<'_, 'h>, other: &Process<'_, 'h, F>, at: u64) -> bool {
        let mut frame =
            |process: &Process<'_, 'h, F>| match self.test.world.vm.lookup(cx, &process.space, VirtAddr::new(at)) {
                Lookup::Mapped(leaf) => Some(leaf.frame),
                _ => None,
            };
        let own = frame(&self.process);
        own.is_some() && own == frame(other)
    }

    /// A device gets a private page.
    fn pin(&mut self, cx: &mut Cx<'_, 'h>) {
        let (test, process) = (self.test, self.process.clone());
        let at = PRIVATE.start + self.random.below(PRIVATE.pages) * 4096;
        let rights = process.book.borrow().rights(at);
        if test.devices.borrow().len() >= DEVICES || rights.read_only || process.protecting.get() > 0 {
            return;
        }
        let before = process.book.borrow().changes(at);
        process.pins.set(process.pins.get() + 1);
        process.pins_begun.set(process.pins_begun.get() + 1);
        process.pinning.set(process.pinning.get() + 1);
        let mut pins = Vec::new();
        let done = test.world.vm.pin(cx, &process.space, span(at, 4096), None, &Never, |pinned| pins.push(pinned));
        process.pinning.set(process.pinning.get() - 1);
        let after = process.book.borrow().changes(at);
        if let Err(error) = done {
            let torn = before.under_way || before != after;
            assert!(
                torn || error.cause == VmError::InUse
                    || matches!(error.cause, VmError::NoMemory | VmError::HwPoisoned { .. }),
                "{error}"
            );
        }
        if pins.is_empty() {
            process.pins.set(process.pins.get() - 1);
        }
        for pinned in pins {
            if before.under_way || before != after {
                // Nobody knows which page it is.
                test.unpin(cx, &process, pinned);
            } else {
                test.did("pinned", 1);
                test.devices.borrow_mut().push(Device { of: self.cpu, process: process.clone(), pinned, apart: None });
            }
        }
    }

    fn unpin(&mut self, cx: &mut Cx<'_, 'h>) {
        let mut devices = self.test.devices.borrow_mut();
        let Some(own) = devices.iter().position(|device| device.of == self.cpu) else { return };
        let Device { process, pinned, .. } = devices.swap_remove(own);
        drop(devices);
        process.users.set(process.users.get() + 1);
        self.test.unpin(cx, &process, pinned);
        self.test.let_go(cx, process);
    }

    /// A device finds in its page what it and the program stored last, and stores something else.
    fn device_acts(&mut self) {
        let value = self.test.next_value();
        let mut devices = self.test.devices.borrow_mut();
        let Some(device) = devices.iter().find(|device| device.of == self.cpu) else { return };
        let (page, within) = (device.pinned.at().get(), u64::from(self.cpu) * 8);
        let process = device.process.clone();
        let mut book = process.book.borrow_mut();
        let may = device.apart.clone().unwrap_or_else(|| book.may_be(page + within));
        let frame = device.pinned.extent().base();
        let found = self.test.world.device_get(frame, within);
        assert!(may.contains(&found), "a device of cpu{} at {page:#x}: {found}, which may be {may:?}", self.cpu);
        self.test.world.device_put(frame, within, value);
        let under_way = book.changes(page).under_way;
        if device.apart.is_some() {
            // The CPU's other device may have the same page.
            let same = |other: &&mut Device<'v, 'h, F>| other.of == self.cpu && other.pinned.extent().base() == frame;
            devices
                .iter_mut()
                .filter(same)
                .filter_map(|other| other.apart.as_mut())
                .for_each(|apart| *apart = [value].into());
            if under_way {
                // It may be the page that is mapped, still.
                let mut may = book.may_be(page + within);
                may.insert(value);
                book.words.insert(page + within, may);
                book.forks.iter_mut().for_each(|fork| fork.stores.push((None, page + within, value)));
            }
        } else {
            book.stored(None, page + within, value, false);
        }
    }

    /// A page is found to be bad.
    fn poison(&mut self, cx: &mut Cx<'_, 'h>) {
        let at = PRIVATE.start + self.random.below(PRIVATE.pages) * 4096;
        let (test, process) = (self.test, &self.process);
        if test.poison.get() == 0 {
            return;
        }
        let Lookup::Mapped(leaf) = test.world.vm.lookup(cx, &process.space, VirtAddr::new(at)) else { return };
        if test.world.guest.extent.contains(leaf.frame) {
            return;
        }
        // Others have used it up meanwhile, or may while the frame goes bad.
        let Some(left) = test.poison.get().checked_sub(1) else { return };
        test.poison.set(left);
        // It may be gone by now: what is free, or somebody else's, is as good.
        let done = test.world.vm.frames().hwpoison(cx, leaf.frame);
        let is_new = matches!(done, HwPoisoned::Free | HwPoisoned::InUse);
        test.poison.set(test.poison.get() + u32::from(!is_new));
        test.did("poisoned", u64::from(is_new));
    }

    fn prefault(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let pages = || (0..area.pages).map(|page| area.start + page * area.kind.page.bytes());
        let look = || {
            let book = process.book.borrow();
            pages().map(|page| (book.changes(page), book.gone.contains(&page))).collect::<Vec<_>>()
        };
        let before = look();
        let done = self.test.world.vm.prefault(&process.space, span(area.start, area.bytes()), None).work(cx, &Never);
        let whole = before.iter().all(|(changes, gone)| !changes.under_way && !gone) && look() == before;
        if let Err(error) = done {
            assert!(
                !whole || matches!(error, VmError::NoMemory | VmError::NoPool | VmError::HwPoisoned { .. }),
                "{error}"
            );
        }
    }

    /// A guest accesses the process's memory through translations of its own.
    fn guest_acts(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        if process.follower.borrow().is_none() {
            return;
        }
        let area = &AREAS[self.random.below(2) as usize];
        let at = area.start + self.random.below(area.pages) * 4096 + u64::from(self.cpu) * 8;
        let world = self.test.world;
        if self.random.below(2) == 0 {
            self.guest_loads(cx, &process, at);
            return;
        }
        self.storing(&process, at, |program, value| {
            let Some(frame) = translated(world, cx, &process, at, true)? else { return Ok(false) };
            world.device_put(frame, at & 0xfff, value);
            program.test.did("stored by guests", 1);
            Ok(true)
        });
    }

    fn guest_loads(&mut self, cx: &mut Cx<'_, 'h>, process: &Process<'v, 'h, F>, at: u64) {
        let world = self.test.world;
        let load = |_: &mut Self| {
            Ok(translated(world, cx, process, at, false)?.map(|frame| world.device_get(frame, at & 0xfff)))
        };
        self.loading(process, at, load);
    }
}

/// The frame that a guest finds at an address, to be used at once; `None` if others change it all the time.
fn translated<'h, F: PageFormat>(
    world: &World<'h, F>,
    cx: &mut Cx<'_, 'h>,
    process: &Process<'_, 'h, F>,
    at: u64,
    store: bool,
) -> Result<Option<Pfn>, VmError> {
    let (page, guest) = (at & !0xfff, &process.guest);
    for _ in 0..20 {
        point();
        let known = guest.pages.lock().expect("one thread").get(&page).copied();
        if let Some((frame, writable)) = known
            && (writable || !store)
        {
            return Ok(Some(frame));
        }
        let state = guest.following.state();
        match world.vm.lookup(cx, &process.space, VirtAddr::new(page)) {
            Lookup::Mapped(leaf) if !store || leaf.flags.contains(Flags::WRITE) => {
                point();
                let first = Extent::block(leaf.frame, leaf.size.order()).base().number();
                let frame = Pfn::new(first + (page >> 12) % leaf.size.pages());
                if guest.following.is_unchanged(state) {
                    let writable = leaf.flags.contains(Flags::WRITE);
                    guest.pages.lock().expect("one thread").insert(page, (frame, writable));
                }
            }
            _ => {
                let access = if store { Access::Write } else { Access::Read };
                world.vm.fault(cx, &process.space, VirtAddr::new(page), access)?;
            }
        }
    }
    Ok(None)
}
