//! What is known of every word, and programs that find out.
//!
//! In each page each CPU has words of its own. Nobody else stores to them, so what is in one is known, but for what others do to the page
//! as a whole meanwhile: then it is one of a few values, until it is read.

#![allow(unreachable_pub, reason = "one test's modules")]

mod book;
mod changes;
mod devices;
mod fork;
mod guests;
mod holes;
mod words;
mod worker;

pub use book::SHARED_PAGES;

use crate::file::File;
use crate::world::{Cx, Follower, Handle, Model, Surroundings, World, span};
use hugemm_base::{CpuCx, CpuId, Extent, Never, NodeId, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::{Frames, HwPoisoned, NoMigration, RemoveError};
use hugemm_paging::{Flags, Lookup, PageFormat};
use hugemm_reclaim::{Ageing, LruPolicy, ShrinkBudget, Swap};
use hugemm_schedule::{Machine, has_loaded, point, progress, step};
use hugemm_threads::{Memory, Random};
use hugemm_vm::{
    Access, Advice, Backing, Discard, Following, LENT, Notifier, Pinned, Protection, SharedRef, VmError, ZeroTurn,
    ZeroWorker,
};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex};

use book::{AREAS, Area, Book, COPIED, Changes, Fork, PRIVATE, Rights, SHARED, area_of};
use devices::Device;
use guests::Guest;

/// CPUs that programs run on; two more are the workers.
pub const CPUS: u32 = 6;
/// Processes at a time.
const PROCESSES: usize = 3;
/// Pages that are poisoned in a run.
const POISON: u32 = 3;
/// Devices at a time.
const DEVICES: usize = 5;
/// Bytes of a page, at its end, that are filled with anything.
const NOISE: u64 = 3584;
/// Runs use all pages, or every eighth: few, of which two are claimed at one place.
const STRIDES: [u64; 2] = [1, 8];

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
    /// How often a fork of it began or ended.
    forks: Cell<u64>,
    /// Pins that are being made, and changes of rights: a device that stores is given what the process may store to.
    pinning: Cell<u32>,
    protecting: Cell<u32>,
    guest: Arc<Guest>,
    follower: RefCell<Option<hugemm_vm::Follower<Model<'h, F>>>>,
}

/// How often what has happened, in all runs of a test.
pub type Deeds = RefCell<BTreeMap<&'static str, u64>>;

/// What has to happen in some run, for a test to say anything.
pub const ALL_DEEDS: [&str; 35] = [
    "punched",
    "shortened",
    "lent",
    "copied",
    "read across",
    "written across",
    "stopped at a hole",
    "written from outside",
    "found used",
    "zeroed ahead",
    "zeroes",
    "given up",
    "advised",
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
    "pinned of a file",
    "pinned and shared",
    "poisoned",
    "stored by guests",
    "arenas removed",
    "swapped out",
    "swapped in",
    "moved",
    "unhooked",
    "compressed",
];

/// What has been done to a page of a process, and to what all share there.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Both {
    own: Changes,
    shared: Changes,
}

impl Both {
    fn are_under_way(&self) -> bool {
        self.own.under_way || self.shared.under_way
    }
}

/// In whose book, where, and what.
type InFlight = (*const RefCell<Book>, u64, u64);

/// Which pages of the file are gone, and whose copies of them go.
struct Shortened<'v, 'h, F: PageFormat> {
    gone: Range<u64>,
    whose: Vec<Weak<Process<'v, 'h, F>>>,
}

/// Pages of a process.
type Pages<'v, 'h, F> = (Rc<Process<'v, 'h, F>>, Range<u64>);

/// What all CPUs share.
pub struct Test<'v, 'h, F: PageFormat> {
    world: &'v World<'h, F>,
    object: &'v SharedRef<'v, Model<'h, F>>,
    /// What the object is over, if it is.
    file: Option<&'static File>,
    /// Somebody changes it; by making it shorter.
    file_changes: Cell<bool>,
    shortened: RefCell<Option<Shortened<'v, 'h, F>>>,
    /// Those that are being made, too.
    all: RefCell<Vec<Weak<Process<'v, 'h, F>>>>,
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
    /// Programs use every so many pages of an area. Of few they meet at each, and at what is done to it.
    stride: u64,
    /// Pages of a process, one of whose users the wish is, that somebody would have away, and whether he still waits for it.
    wish: RefCell<Option<Pages<'v, 'h, F>>>,
    wished: Cell<bool>,
    deeds: &'v Deeds,
}

/// A request that may be refused: for want of memory, or because it would have to read what is poisoned.
#[track_caller]
fn refused(error: VmError) {
    assert!(matches!(error, VmError::NoMemory | VmError::NoPool | VmError::HwPoisoned { .. }), "{error}");
}

impl<'v, 'h, F: PageFormat> Test<'v, 'h, F> {
    pub fn new(
        world: &'v World<'h, F>,
        object: &'v SharedRef<'v, Model<'h, F>>,
        file: Option<&'static File>,
        seed: u64,
        deeds: &'v Deeds,
    ) -> Self {
        let test = Test {
            world,
            object,
            file,
            file_changes: Cell::new(false),
            shortened: RefCell::default(),
            all: RefCell::default(),
            processes: RefCell::default(),
            shared: RefCell::default(),
            devices: RefCell::default(),
            in_flight: RefCell::new(vec![None; CPUS as usize + 1]),
            value: Cell::new(0),
            poison: Cell::new(POISON),
            ended: Cell::new(0),
            has_guest: Cell::new(false),
            stride: STRIDES[(seed / 2 % 2) as usize],
            wish: RefCell::default(),
            wished: Cell::new(false),
            deeds,
        };
        let cx = &mut world.machine.cx();
        world.resize_pool(cx, 2);
        let first = world.vm.create(cx, crate::world::bounds()).expect("memory");
        let first = test.process(cx, first, Book::default());
        for area in &AREAS {
            test.map(cx, &first, area, area.start..area.end());
        }
        let copied = || (COPIED.start..COPIED.end()).step_by(4096);
        test.begin_changes(&first, copied());
        test.end_changes(&first, copied());
        test.processes.borrow_mut().push(first);
        test
    }

    /// Whether programs meet at few pages, where more comes and goes.
    fn is_narrow(&self) -> bool {
        self.stride > 1
    }

    fn process(&self, cx: &mut Cx<'_, 'h>, space: Handle<'v, 'h, F>, book: Book) -> Rc<Process<'v, 'h, F>> {
        let guest = Arc::new(Guest::default());
        let follower = self.world.vm.follow(cx, &space, Follower(guest.clone())).ok();
        let (book, follower) = (RefCell::new(book), RefCell::new(follower));
        let process = Rc::new(Process {
            space,
            book,
            users: Cell::new(0),
            doomed: Cell::new(false),
            ending: Cell::new(false),
            pins: Cell::new(0),
            pins_begun: Cell::new(0),
            forks: Cell::new(0),
            pinning: Cell::new(0),
            protecting: Cell::new(0),
            guest,
            follower,
        });
        self.all.borrow_mut().push(Rc::downgrade(&process));
        process
    }

    /// Makes an area, or a part of one. Nobody changes these pages meanwhile.
    fn map(&self, cx: &mut Cx<'_, 'h>, process: &Process<'v, 'h, F>, area: &Area, part: Range<u64>) {
        let whole = span(part.start, part.end - part.start);
        loop {
            let from = (part.start - area.start) / 4096;
            let backing = match area {
                _ if area.kind.shared => Backing::Shared(self.object, from),
                _ if self.is_lent(area) => Backing::Copied(self.object, from),
                _ => Backing::Private,
            };
            match self.world.vm.map(cx, &process.space, whole, area.kind, backing) {
                Ok(_) => return,
                Err(VmError::NoPool) => break,
                // The file is shorter just now.
                Err(VmError::OutOfBounds { .. }) if area.kind.shared || area.copies => progress(),
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

    /// Whether an area copies the file.
    fn is_lent(&self, area: &Area) -> bool {
        area.copies && self.file.is_some()
    }

    /// What may be in a word of a process.
    fn may_be(&self, process: &Process<'v, 'h, F>, at: u64) -> BTreeSet<u64> {
        self.book(process, area_of(at)).borrow().may_be(at)
    }

    /// What has been done to a page of a process, and to what all share.
    fn changes(&self, process: &Process<'v, 'h, F>, page: u64) -> Both {
        let shared = if area_of(page).kind.shared { self.shared.borrow().changes(page) } else { Changes::default() };
        Both { own: process.book.borrow().changes(page), shared }
    }

    /// The file's word at an address of the shared area may be this, for those who copy it.
    fn lend(&self, at: u64, value: u64) {
        let copy = at - AREAS[1].start + COPIED.start;
        self.all.borrow_mut().retain(|process| process.strong_count() > 0);
        for process in self.all.borrow().iter().filter_map(Weak::upgrade) {
            process.book.borrow_mut().lent.entry(copy).or_default().insert(value);
        }
    }

    /// Something begins to be done to pages of a process, after which private ones are as new.
    fn begin_changes(&self, process: &Process<'v, 'h, F>, pages: impl Iterator<Item = u64> + Clone) {
        let mut book = process.book.borrow_mut();
        book.begin_changes(pages.clone());
        for page in pages {
            book.fresh.retain(|at, _| area_of(*at).page(*at) != page);
            if !self.is_lent(area_of(page)) {
                continue;
            }
            book.own.remove(&page);
            for cpu in 0..u64::from(CPUS) {
                let (at, of) = (page + cpu * 8, page - COPIED.start + AREAS[1].start + cpu * 8);
                let mut has = self.shared.borrow().may_be(of);
                if self.shared.borrow().changes(area_of(of).page(of)).under_way {
                    has.insert(0);
                }
                let stores = self.in_flight.borrow();
                has.extend(stores.iter().flatten().filter(|store| store.1 == of).map(|store| store.2));
                let before = book.lent.insert(at, has).unwrap_or_default();
                book.words.entry(at).or_default().extend(before);
            }
        }
    }

    /// That has been done.
    fn end_changes(&self, process: &Process<'v, 'h, F>, pages: impl Iterator<Item = u64> + Clone) {
        let mut book = process.book.borrow_mut();
        book.end_changes(pages.clone());
        for page in pages.filter(|page| !area_of(*page).kind.shared) {
            let range = page..page + area_of(page).kind.page.bytes();
            book.given_up.remove(&page);
            book.empty(&range);
        }
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
            let lent = leaf.flags.contains(LENT);
            if lent && !self.is_lent(area_of(at)) {
                self.did("zeroes", 1);
                continue;
            }
            self.did("lent", u64::from(lent));
            let mut here = 0;
            vm.walk_mappings(cx, leaf.frame, |_, place| {
                here += u32::from(std::ptr::eq(place.space, &raw const *process.space) && place.at.get() == at);
            });
            assert_eq!(here, 1, "{at:#x}");
        }
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
        &AREAS[[0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 4][self.random.below(12) as usize]]
    }

    /// Where a page of an area is.
    fn any_page(&mut self, area: &Area) -> u64 {
        let stride = self.test.stride;
        area.start + self.random.below(area.pages.div_ceil(stride)) * stride * area.kind.page.bytes()
    }

    fn any_at(&mut self) -> u64 {
        let area = self.any_area();
        let within = if area.kind.page == PageSize::Size4K { 0 } else { self.random.below(4) * 0x7_f000 };
        self.any_page(area) + within + u64::from(self.cpu) * 8
    }

    fn step(&mut self, cx: &mut Cx<'_, 'h>) {
        if self.process.doomed.get() {
            self.go_elsewhere(cx);
        }
        let narrow = self.test.is_narrow();
        match self.random.below(200) {
            116..=135 if narrow => self.change(cx),
            136..=155 if narrow => self.protect(cx),
            156..=163 if narrow => self.fork(cx),
            164..=166 if narrow => self.doom(),
            0..=3 => self.fork(cx),
            4..=9 => self.change(cx),
            10..=13 => self.go_elsewhere(cx),
            14 => self.doom(),
            15..=18 => self.pin(cx),
            19 | 20 => self.unpin(cx),
            21..=34 => self.device_acts(),
            35 => self.poison(cx),
            36 | 37 => self.prefault(cx),
            38 => self.working_set(cx),
            39..=52 => self.guest_acts(cx),
            53..=58 => self.protect(cx),
            59..=62 => self.relocate(cx),
            63 | 64 => self.give_up(cx),
            73 | 74 if narrow => self.give_up(cx),
            75 => self.advise(cx),
            65..=68 => self.lock(cx),
            69..=71 => self.write_back(cx),
            72..=74 => self.scramble(cx),
            76..=78 => self.punch(cx),
            79 => self.truncate(cx),
            80..=83 => self.read_across(cx),
            84..=86 => self.write_across(cx),
            87..=115 => {
                let at = self.any_at();
                self.get(cx, at);
            }
            _ => {
                let at = self.any_at();
                // What is never stored to stays lent.
                if COPIED.holds(at) && self.random.below(6) > 0 {
                    self.get(cx, at);
                } else {
                    self.put(cx, at);
                }
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
        self.test.world.uses_nothing();
        self.test.world.machine.mmu().pause(CpuId::new(self.cpu), true);
        // SAFETY: it enters a space before it uses an address.
        unsafe { process.space.tlb().enter_lazy(self.test.world.vm.shootdown(), cx) };
    }

    fn wake_up(&self) {
        self.test.world.machine.mmu().pause(CpuId::new(self.cpu), false);
    }

    fn doom(&mut self) {
        let processes = self.test.processes.borrow();
        if processes.iter().filter(|process| !process.doomed.get()).count() > 1 {
            self.process.doomed.set(true);
        }
    }

    fn prefault(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let pages = || (0..area.pages).map(|page| area.start + page * area.kind.page.bytes());
        let look = || {
            let gone = process.book.borrow().gone.clone();
            pages().map(|page| (self.test.changes(&process, page), gone.contains(&page))).collect::<Vec<_>>()
        };
        let before = look();
        let done = self.test.world.vm.prefault(&process.space, span(area.start, area.bytes()), None).work(cx, &Never);
        let whole = before.iter().all(|(changes, gone)| !changes.are_under_way() && !gone) && look() == before;
        if let Err(error) = done {
            assert!(
                !whole || matches!(error, VmError::NoMemory | VmError::NoPool | VmError::HwPoisoned { .. }),
                "{error}"
            );
        }
    }
}
