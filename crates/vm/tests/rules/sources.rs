//! Files: what is read, and how often; what is dirty, and what of that is written back; what goes when a file becomes shorter; copies of it;
//! and sources that fail. On both formats.

use crate::support::{
    AT, Cx, Metered, Model, Rig, SMALL, Shown, as_first, bounds, called_back, on_both_formats, span, with_format,
};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{CpuId, Never, PageSize, PhysMap, VirtAddr};
use hugemm_frames::Frozen;
use hugemm_paging::PageFormat;
use hugemm_vm::{
    Access, AddressSpace, Backing, Discard, FaultAccess, Owner, PageSource, Pinned, Protection, SourceError,
    StoredPages, UnhookedPage, VmError, VmaKind,
};
use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

const READ: Protection = Protection::USER;
const THERE: u64 = 0x70_0000_0000;

/// What a write panics with.
const PANICS: u32 = 999;

/// A file in memory.
#[derive(Default)]
pub(crate) struct File {
    bytes: Mutex<Vec<u8>>,
    /// Pages that were asked for together, and that were written together: from where on, and how many bytes.
    fills: Mutex<Vec<(u64, usize)>>,
    writes: Mutex<Vec<(u64, usize)>>,
    /// What it fails with; 0: it does not. More than a hundred: it fills so many bytes less, and one write; [`PANICS`]: that panics.
    fails: AtomicU32,
    pub(crate) closed: AtomicU64,
    /// Where the manager is that it calls.
    pub(crate) calls: AtomicUsize,
    /// 1: the next write says 2, and that nobody says 3 for a while. 4: the next fill says 5 when it has read, and waits for 6. 7: the
    /// next write says 8, and waits for 9.
    pub(crate) gate: AtomicU32,
    /// A dirty page of another file, which reclaim is asked to write while this one is written.
    beside: Mutex<Option<Owner>>,
    pub(crate) read_only: bool,
}

impl File {
    /// Of so many bytes, each word of which is its number, for ever.
    pub(crate) fn new(bytes: usize) -> &'static File {
        let words = (0..bytes as u64).step_by(8).flat_map(u64::to_le_bytes).take(bytes).collect();
        Box::leak(Box::new(File { bytes: Mutex::new(words), ..File::default() }))
    }

    /// The same, for nobody to store to.
    pub(crate) fn read_only(bytes: usize) -> &'static File {
        let bytes = Mutex::new(Self::new(bytes).bytes().clone());
        Box::leak(Box::new(File { bytes, read_only: true, ..File::default() }))
    }

    pub(crate) fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().expect("nobody panics")
    }

    pub(crate) fn word(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.bytes()[at as usize..][..8].try_into().expect("eight"))
    }

    /// What has been read since somebody asked.
    pub(crate) fn fills(&self) -> Vec<(u64, usize)> {
        std::mem::take(&mut *self.fills.lock().expect("nobody panics"))
    }

    pub(crate) fn writes(&self) -> Vec<(u64, usize)> {
        std::mem::take(&mut *self.writes.lock().expect("nobody panics"))
    }

    pub(crate) fn wait_for(&self, gate: u32) {
        while self.gate.load(Ordering::SeqCst) != gate {
            std::thread::yield_now();
        }
    }

    /// If the gate says so, says the next number, and waits for the one after it.
    fn stop_at<'h, F: PageFormat, const AWAY: bool>(&self, gate: u32, cx: &Cx<'_, 'h>) {
        if self.gate.compare_exchange(gate, gate + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            let vm = self.calls.load(Ordering::Relaxed) as *const hugemm_vm::Vm<'_, Model<'h, F, AWAY>>;
            while self.gate.load(Ordering::SeqCst) != gate + 2 {
                // SAFETY: the test's, which goes on.
                unsafe { &*vm }.shootdown().handle_ipi(cx);
                std::thread::yield_now();
            }
        }
    }

    fn fails(&self, code: u32) {
        self.fails.store(code, Ordering::Relaxed);
    }
}

impl<'h, F: PageFormat, const AWAY: bool> PageSource<Model<'h, F, AWAY>> for File {
    fn bytes(&self) -> u64 {
        File::bytes(self).len() as u64
    }

    fn fill(&self, cx: &mut Cx<'_, 'h>, first: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        self.fills.lock().expect("nobody panics").push((first, pages.len()));
        let code = self.fails.load(Ordering::Relaxed);
        if (1..100).contains(&code) {
            return Err(SourceError(code));
        }
        let short = pages.len().saturating_sub(code as usize);
        pages[..short].copy_from_slice(&File::bytes(self)[(first << 12) as usize..][..short]);
        self.stop_at::<F, AWAY>(4, cx);
        Ok(short)
    }

    fn write_back(&self, cx: &mut Cx<'_, 'h>, first: u64, pages: &StoredPages<'_>) -> Result<(), SourceError> {
        let vm = self.calls.load(Ordering::Relaxed) as *const hugemm_vm::Vm<'_, Model<'h, F, AWAY>>;
        let beside = self.beside.lock().expect("nobody panics").take();
        if let Some(owner) = beside {
            // SAFETY: the test's, which goes on.
            assert_eq!(unsafe { &*vm }.write_back(cx, owner), 0, "somebody writes back already");
        }
        if self.gate.compare_exchange(1, 2, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            for _ in 0..1000 {
                // SAFETY: as above.
                unsafe { &*vm }.shootdown().handle_ipi(cx);
                std::thread::yield_now();
                assert_ne!(self.gate.load(Ordering::SeqCst), 3, "what is to be a hole is just written");
            }
        }
        self.stop_at::<F, AWAY>(7, cx);
        let code = self.fails.load(Ordering::Relaxed);
        if code > 100 {
            self.fails(0);
        }
        assert_ne!(code, PANICS, "as it was asked to");
        if code > 0 {
            return Err(SourceError(code));
        }
        self.writes.lock().expect("nobody panics").push((first, pages.bytes()));
        pages.copy_to(0, &mut File::bytes(self)[(first << 12) as usize..][..pages.bytes()]);
        called_back(cx);
        Ok(())
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn closed(&self, _: &mut Cx<'_, 'h>) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }
}

/// An object over a file, and a space that shows all of it at [`AT`].
pub(crate) fn show<'v, 'h, F: PageFormat>(
    rig: &'v Rig<'h, F, true>,
    cx: &mut Cx<'_, 'h>,
    file: &'static File,
) -> Shown<'v, 'h, F, true> {
    let object = rig.vm.open_source(cx, file).expect("memory");
    let space = rig.vm.create(cx, bounds()).expect("memory");
    let area = span(AT, object.pages() << 12);
    let kind = rig.vm.map(cx, &space, area, SMALL, Backing::Shared(&object, 0)).expect("an area").kind;
    assert!(kind.sourced && kind.shared);
    (object, space)
}

/// The same in use by the first CPU.
pub(crate) fn enter<'v, 'h, F: PageFormat>(
    rig: &'v Rig<'h, F, true>,
    cx: &mut Cx<'_, 'h>,
    file: &'static File,
) -> Shown<'v, 'h, F, true> {
    let shown = show(rig, cx, file);
    rig.enter(cx, &shown.1);
    shown
}

pub(crate) fn end<'h, F: PageFormat>(
    rig: &Rig<'h, F, true>,
    cx: &mut Cx<'_, 'h>,
    (object, space): Shown<'_, 'h, F, true>,
) {
    rig.end(cx, space);
    rig.vm.close(cx, object).expect("its own");
}

/// The same, where it is CPU 1 that uses the space.
pub(crate) fn end_of_other<'h, F: PageFormat>(rig: &Rig<'h, F, true>, (object, space): Shown<'_, 'h, F, true>) {
    rig.on(1, |cx| rig.leave(cx, &space));
    rig.on(0, |cx| {
        rig.end_shown(cx, (object, space));
    });
}

/// Pages that were dropped, or why not.
pub(crate) fn drops<'h, F: PageFormat>(
    rig: &Rig<'h, F, true>,
    cx: &mut Cx<'_, 'h>,
    space: &AddressSpace<Model<'h, F, true>>,
    at: u64,
) -> Result<u64, VmError> {
    let deferred = rig.deferred();
    let unhooked = rig.unhook(cx, space, at, &deferred);
    drop_unhooked(cx, unhooked)
}

/// The same of a page that has been unhooked.
pub(crate) fn drop_unhooked<'h, F: PageFormat>(
    cx: &mut Cx<'_, 'h>,
    unhooked: UnhookedPage<'_, 'h, Model<'h, F, true>>,
) -> Result<u64, VmError> {
    type Kept<'d, 'h, F> = (VmError, UnhookedPage<'d, 'h, Model<'h, F, true>>);
    let none = |_: &Cx<'_, 'h>, _: Frozen| panic!("it goes to no swap");
    // SAFETY: no slot is made.
    let done: Result<u64, Kept<'_, 'h, F>> = unsafe { unhooked.page_out(cx, none, |_, _, _| panic!("small")) };
    done.map_err(|(error, page)| {
        page.put_back(cx);
        error
    })
}

fn read<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    // Forty pages and a part.
    let file = File::new((40 << 12) + 100);
    let (object, space) = enter(rig, cx, file);
    assert_eq!(object.pages(), 41);
    let word = |page: u64| AT + (page << 12) + 8 * (page % 10);
    (0..41).for_each(|page| assert_eq!(rig.load(cx, &space, word(page)), Ok(word(page) - AT)));
    let fills = [(0, 1 << 16), (16, 1 << 16), (32, 8 << 12), (40, 100)];
    assert_eq!(file.fills(), fills, "sixteen at a time, or as many as a block has");
    assert_eq!(space.counters().mapped, 4, "and shown");
    let last = AT + (40 << 12);
    assert_eq!(rig.load(cx, &space, last + 96).map(|word| word >> 32), Ok(0), "nothing is behind its end");
    assert_eq!(rig.load(cx, &space, last + 104), Ok(0));
    // The other way through a window, which is read at once.
    rig.vm.punch(cx, &object, 0, 16).expect("its own");
    assert_eq!(rig.load(cx, &space, word(9)), Ok(word(9) - AT));
    assert_eq!(file.fills(), [(0, 1 << 16)]);
    (0..16).for_each(|page| assert_eq!(rig.load(cx, &space, word(page)), Ok(word(page) - AT)));
    assert!(file.fills().is_empty() && file.writes().is_empty());
    end(rig, cx, (object, space));
    assert_eq!((file.closed.load(Ordering::Relaxed), file.writes().len()), (1, 0), "nobody has stored");
}

fn stored<F: PageFormat>(rig: &Rig<'_, F, true>) {
    let file = File::new(32 << 12);
    let (object, space) = rig.on(0, |cx| show(rig, cx, file));
    for cpu in [0, 1] {
        rig.on(cpu, |cx| {
            rig.enter(cx, &space);
            [3, 4, 20].into_iter().for_each(|page| rig.store(cx, &space, AT + (page << 12), page).expect("memory"));
        });
    }
    rig.on(0, |cx| {
        assert_eq!(file.word(3 << 12), 3 << 12, "not yet");
        let before = rig.flushes();
        assert_eq!(rig.vm.sync(cx, &object, 0, 16), Ok(2), "of these");
        assert_eq!(rig.flushes() - before, 1);
        assert_eq!((file.writes(), file.word(4 << 12)), (vec![(3, 2 << 12)], 4), "those that adjoin together");
        assert_eq!(rig.vm.sync(cx, &object, 0, 16), Ok(0));
        // Nobody stores by what he has of a page that is known as clean.
        for page in [3, 4] {
            assert!(rig.mmu.store(CpuId::new(1), VirtAddr::new(AT + (page << 12)), 9).is_err());
        }
        assert!(rig.mmu.load(CpuId::new(1), VirtAddr::new(AT + (20 << 12))).is_ok());
        assert_eq!(rig.store(cx, &space, AT + (4 << 12), 44), Ok(()));
        // Rights that come do not make a page writable that is clean.
        rig.vm.protect(cx, &space, span(AT, 32 << 12), READ).expect("an area");
        rig.vm.protect(cx, &space, span(AT, 32 << 12), READ.with(Protection::WRITE)).expect("an area");
        assert!(rig.mmu.store(CpuId::new(0), VirtAddr::new(AT + (3 << 12)), 9).is_err());
        rig.vm.write(cx, &space, VirtAddr::new(AT + (7 << 12)), &7_u64.to_le_bytes()).expect("an area");
        assert_eq!(rig.vm.sync(cx, &object, 0, 99), Ok(3));
        assert_eq!([3, 4, 7, 20].map(|page| file.word(page << 12)), [3, 44, 7, 20]);
        // The last one out writes what is dirty.
        assert_eq!(rig.store(cx, &space, AT + 8, 1), Ok(()));
    });
    rig.end_for_both(space);
    rig.on(0, |cx| {
        assert_eq!(file.word(8), 8);
        rig.vm.close(cx, object).expect("its own");
        assert_eq!(file.word(8), 1);
    });
}

fn dropped<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = File::new(32 << 12);
    let (object, space) = enter(rig, cx, file);
    rig.vm.map(cx, &space, span(THERE, 32 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
    let at = |page: u64| AT + (page << 12);
    assert_eq!(rig.load(cx, &space, at(2)), Ok(2 << 12));
    assert_eq!(rig.load(cx, &space, THERE + (2 << 12)), Ok(2 << 12));
    file.fills();
    assert_eq!(drops(rig, cx, &space, at(2)), Ok(1), "clean: without a word to anybody");
    assert!(file.writes().is_empty());
    assert!(rig.mmu.load(CpuId::new(0), VirtAddr::new(THERE + (2 << 12))).is_err(), "wherever it was shown");
    assert_eq!(rig.load(cx, &space, at(2)), Ok(2 << 12));
    assert_eq!(file.fills(), [(2, 1 << 12)], "only what is missing");
    // Dirty, also where its entry has gone.
    assert_eq!(rig.store(cx, &space, at(2), 22), Ok(()));
    rig.vm.unmap(cx, &space, span(AT, 32 << 12)).expect("in the space");
    assert_eq!(rig.load(cx, &space, THERE + (2 << 12)), Ok(22));
    let there = THERE + (2 << 12);
    assert_eq!(drops(rig, cx, &space, there), Err(VmError::NotWritten));
    assert_eq!(rig.load(cx, &space, there), Ok(22));
    let owner = rig.vm.owner(rig.leaf(cx, &space, there).frame).expect("the object");
    assert_eq!(rig.vm.write_back(cx, owner), 1);
    assert_eq!(rig.load(cx, &space, there), Ok(22));
    assert_eq!(drops(rig, cx, &space, there), Ok(1));
    assert_eq!((rig.load(cx, &space, there), file.word(2 << 12)), (Ok(22), 22));
    rig.vm.lock(cx, &space, span(there, 1 << 12), 9).expect("an area");
    assert_eq!(drops(rig, cx, &space, there), Err(VmError::InUse), "locked");
    end(rig, cx, (object, space));
}

fn shorter<F: PageFormat>(rig: &Rig<'_, F, true>) {
    let file = File::new(64 << 12);
    let (object, space) = rig.on(0, |cx| {
        let (object, space) = show(rig, cx, file);
        rig.vm.map(cx, &space, span(THERE, 8 << 12), SMALL, Backing::Shared(&object, 36)).expect("an area");
        (object, space)
    });
    let at = |page: u64| AT + (page << 12);
    for cpu in [0, 1] {
        rig.on(cpu, |cx| {
            rig.enter(cx, &space);
            (30..50).for_each(|page| rig.store(cx, &space, at(page), page).expect("memory"));
            assert_eq!(rig.load(cx, &space, THERE + (5 << 12)), Ok(41));
        });
    }
    rig.on(0, |cx| {
        let used = rig.used(cx);
        file.bytes().truncate((40 << 12) + 16);
        let flushes = rig.flushes();
        assert_eq!(rig.vm.truncate(cx, &object, (40 << 12) + 16), Ok(23), "all that was read");
        assert_eq!((rig.flushes() - flushes, object.pages()), (1, 41), "one, though two areas showed some");
        assert!(used - rig.used(cx) >= 7, "they are free");
    });
    for cpu in [1, 0] {
        for at in [at(41), at(49), THERE + (5 << 12)] {
            assert!(rig.mmu.load(CpuId::new(cpu), VirtAddr::new(at)).is_err(), "cpu{cpu} at {at:#x}");
            let beyond = VmError::OutOfBounds { at: VirtAddr::new(at) };
            rig.on(cpu, |cx| {
                assert_eq!(rig.load(cx, &space, at), Err(beyond));
                assert_eq!(rig.store(cx, &space, at, 1), Err(beyond));
            });
        }
    }
    rig.on(0, |cx| {
        assert_eq!((rig.load(cx, &space, at(40)), rig.load(cx, &space, at(40) + 8)), (Ok(40), Ok((40 << 12) + 8)));
        assert_eq!(rig.load(cx, &space, at(40) + 16), Ok(0), "the rest of the last page");
        assert_eq!(rig.vm.sync(cx, &object, 0, 99), Ok(11), "what is left of what was stored");
        assert_eq!(file.writes().iter().map(|write| write.1).sum::<usize>(), (10 << 12) + 16, "to its end");
        // Longer again: what was there is no longer.
        file.bytes().resize(64 << 12, 0);
        assert_eq!(rig.vm.truncate(cx, &object, 64 << 12), Ok(0));
        assert_eq!((rig.load(cx, &space, at(45)), rig.load(cx, &space, THERE + (5 << 12))), (Ok(0), Ok(0)));
        // A hole: its pages are read anew.
        rig.store(cx, &space, at(31), 99).expect("memory");
        file.bytes()[31 << 12..33 << 12].fill(0);
        assert_eq!(rig.load(cx, &space, THERE), Ok(36));
        let flushes = rig.flushes();
        assert_eq!((rig.vm.punch(cx, &object, 31, 38), rig.flushes() - flushes), (Ok(7), 1));
        assert_eq!([30, 31, 32, 33].map(|page| rig.load(cx, &space, at(page))), [Ok(30), Ok(0), Ok(0), Ok(33)]);
        let none = rig.vm.truncate(cx, &object, u64::MAX);
        assert_eq!(none, Err(VmError::OutOfBounds { at: VirtAddr::new(u64::MAX) }));
        assert_eq!(object.pages(), 64);
    });
    rig.end_for_both(space);
    rig.on(0, |cx| rig.vm.close(cx, object).expect("its own"));
}

/// A page that reclaim finds nowhere in a space that owes a flush may be what that flush is of.
fn owed<F: PageFormat>(rig: &Rig<'_, F, true>) {
    let file = File::new(4 << 12);
    rig.on(0, |cx| {
        let (object, space) = enter(rig, cx, file);
        let at = |page: u64| AT + (page << 12);
        assert_eq!((rig.load(cx, &space, at(0)), rig.load(cx, &space, at(3))), (Ok(0), Ok(3 << 12)));
        let [first, last] = [at(0), at(3)].map(|at| rig.leaf(cx, &space, at).frame);
        rig.vm.discard(cx, &space, span(at(3), 1 << 12), Discard::Now).expect("an area");
        for owes in [false, true] {
            let [one, other] = [rig.deferred(), rig.deferred()];
            let away = owes.then(|| rig.vm.unhook(cx, rig.hold(first), &one).expect("nobody else has it"));
            let flushes = rig.flushes();
            rig.vm.unhook(cx, rig.hold(last), &other).expect("nobody else has it").put_back(cx);
            assert_eq!(rig.flushes() - flushes, u64::from(owes));
            if let Some(away) = away {
                away.put_back(cx);
            }
        }
        end(rig, cx, (object, space));
    });
}

fn beside<F: PageFormat>(rig: &Rig<'_, F, true>) {
    for way in ["sync", "reclaim", "close"] {
        rig.on(0, |cx| {
            let (file, other) = (File::new(4 << 12), File::new(4 << 12));
            let (object, space) = enter(rig, cx, file);
            let unwritten = rig.vm.open_source(cx, other).expect("memory");
            rig.vm.map(cx, &space, span(THERE, 4 << 12), SMALL, Backing::Shared(&unwritten, 0)).expect("an area");
            let [owner, beside] = [AT, THERE].map(|at| {
                rig.store(cx, &space, at + 0x1000, 7).expect("memory");
                rig.vm.owner(rig.leaf(cx, &space, at + 0x1000).frame).expect("the object")
            });
            file.calls.store(std::ptr::from_ref(&rig.vm).addr(), Ordering::Relaxed);
            *file.beside.lock().expect("nobody panics") = Some(beside);
            match way {
                "sync" => assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(1)),
                "reclaim" => assert_eq!(rig.vm.write_back(cx, owner), 1),
                _ => (),
            }
            end(rig, cx, (object, space));
            assert!(file.beside.lock().expect("nobody panics").is_none() && file.word(0x1000) == 7, "{way}");
            assert_eq!(rig.vm.write_back(cx, beside), 1, "nobody writes any more");
            rig.vm.close(cx, unwritten).expect("its own");
            assert_eq!(other.word(0x1000), 7);
        });
    }
}

/// Who waits for a page on its way lets reclaim write other files back.
fn waiting<F: PageFormat>(rig: &Rig<'_, F, true>) {
    rig.on(0, |cx| {
        let (file, other) = (File::new(4 << 12), File::new(4 << 12));
        let (object, space) = show(rig, cx, file);
        let unwritten = rig.vm.open_source(cx, other).expect("memory");
        rig.vm.map(cx, &space, span(THERE, 4 << 12), SMALL, Backing::Shared(&unwritten, 0)).expect("an area");
        for at in [AT, AT + 0x1000, THERE] {
            rig.vm.write(cx, &space, VirtAddr::new(at + 8), &7_u64.to_le_bytes()).expect("an area");
        }
        let owner = rig.vm.owner(rig.leaf(cx, &space, THERE).frame).expect("the object");
        let deferred = rig.deferred();
        let away = rig.unhook(cx, &space, AT + 0x1000, &deferred);
        std::thread::scope(|scope| {
            let sync = scope.spawn(|| rig.on(1, |cx| rig.vm.sync(cx, &object, 0, 4)));
            while file.word(8) != 7 {
                std::thread::yield_now();
            }
            let until = Instant::now() + Duration::from_secs(2);
            let mut written = 0;
            while written == 0 && Instant::now() < until {
                written = rig.vm.write_back(cx, owner);
            }
            assert!(!sync.is_finished(), "a page is away");
            away.put_back(cx);
            assert_eq!(sync.join().ok(), Some(Ok(2)));
            assert_eq!((written, other.word(8), file.word(0x1008)), (1, 7, 7));
        });
        rig.vm.destroy(cx, space).expect("nobody uses it");
        [object, unwritten].into_iter().for_each(|object| rig.vm.close(cx, object).expect("its own"));
    });
}

fn unpinned<'h, F: PageFormat>(rig: &Rig<'h, F, true>) {
    rig.on(0, |cx| {
        let file = File::new(4 << 12);
        let (object, space) = enter(rig, cx, file);
        let at = AT + 0x1000;
        rig.store(cx, &space, at, 1).expect("memory");
        let pinned: Cell<Option<Pinned<'_>>> = Cell::new(None);
        rig.vm
            .pin(cx, &space, span(at, 0x1000), Access::Write, None, &Never, |pin| pinned.set(Some(pin)))
            .expect("memory");
        let device = |cx: &mut Cx<'_, 'h>| {
            let pin = pinned.take().expect("once");
            let window = rig.mmu.open(pin.extent(), None).expect("memory");
            // SAFETY: the page stays until it is unpinned, and nobody else uses it.
            unsafe { window.ptr.cast::<u64>().write(2) };
            rig.vm.unpin(cx, &space, pin).expect("its own");
        };
        rig.calling_back(device, || assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(1)));
        assert_eq!(file.word(0x1000), 1, "before the device");
        assert_eq!(drops(rig, cx, &space, at), Err(VmError::NotWritten), "the device has stored since");
        assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(1));
        assert_eq!((file.word(0x1000), rig.load(cx, &space, at)), (2, Ok(2)));
        assert_eq!(drops(rig, cx, &space, at), Ok(1));
        // One that begins while it is written makes it dirty.
        rig.store(cx, &space, at, 3).expect("memory");
        let pin = |cx: &mut Cx<'_, 'h>| {
            rig.vm
                .pin(cx, &space, span(at, 0x1000), Access::Write, None, &Never, |pin| pinned.set(Some(pin)))
                .expect("memory");
            device(cx);
        };
        rig.calling_back(pin, || assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(1)));
        assert_eq!(drops(rig, cx, &space, at), Err(VmError::NotWritten), "the device has stored since");
        assert_eq!((rig.vm.sync(cx, &object, 0, 4), file.word(0x1000)), (Ok(1), 2));
        end(rig, cx, (object, space));
    });
}

/// Pages that do not adjoin are made read-only together.
fn scattered<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = File::new(600 << 12);
    let (object, space) = enter(rig, cx, file);
    let at = |page: u64| AT + (page << 12);
    let pages: Vec<u64> = (0..80).step_by(2).chain([511, 512, 599]).collect();
    for page in &pages {
        rig.store(cx, &space, at(*page), page + 1).expect("memory");
    }
    let before = rig.flushes();
    assert_eq!(rig.vm.sync(cx, &object, 0, 600), Ok(43));
    assert_eq!(rig.flushes() - before, 3, "32 runs of 512 pages at a time");
    assert_eq!(file.writes(), pages.iter().map(|page| (*page, 1 << 12)).collect::<Vec<_>>());
    for page in &pages {
        assert!(rig.mmu.store(CpuId::new(0), VirtAddr::new(at(*page)), 9).is_err());
        assert_eq!(file.word(page << 12), page + 1);
    }
    // What the source refuses is dirty, each of them.
    rig.store(cx, &space, at(2), 9).expect("memory");
    rig.store(cx, &space, at(4), 9).expect("memory");
    file.fails(3);
    assert_eq!(rig.vm.sync(cx, &object, 0, 600), Err(VmError::Source { at: VirtAddr::new(2 << 12), code: 3 }));
    file.fails(0);
    assert_eq!(rig.vm.sync(cx, &object, 0, 600), Ok(2));
    end(rig, cx, (object, space));
}

fn failing<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = File::new(32 << 12);
    let (object, space) = enter(rig, cx, file);
    rig.vm.map(cx, &space, span(THERE, 16 << 12), SMALL, Backing::Copied(&object, 16)).expect("an area");
    let used = rig.used(cx);
    file.fails(5);
    let failed = |at, code| VmError::Source { at: VirtAddr::new(at), code };
    for at in [AT, THERE] {
        assert_eq!(rig.load(cx, &space, at), Err(failed(at, 5)));
    }
    assert_eq!(rig.vm.prefault_shared(&object, 0, 4).work(cx, &Never), Err(failed(0, 5)));
    // Short by a page and a bit: what is whole is there.
    file.fails(4096 + 200);
    let last = AT + (15 << 12);
    assert_eq!(rig.load(cx, &space, last), Err(failed(last, SourceError::SHORT.0)));
    assert_eq!(rig.load(cx, &space, AT + (13 << 12)), Ok(13 << 12));
    file.fails(0);
    file.fills();
    assert_eq!(rig.load(cx, &space, AT + (15 << 12)), Ok(15 << 12));
    assert_eq!(file.fills(), [(15, 1 << 12)]);
    rig.store(cx, &space, AT, 1).expect("memory");
    rig.store(cx, &space, AT + (9 << 12), 9).expect("memory");
    file.fails(6);
    assert_eq!(rig.vm.sync(cx, &object, 0, 32), Err(failed(0, 6)));
    let owner = rig.vm.owner(rig.leaf(cx, &space, AT).frame).expect("the object");
    assert_eq!(rig.vm.write_back(cx, owner), 0);
    assert_eq!(drops(rig, cx, &space, AT), Err(VmError::NotWritten), "it is dirty, still");
    file.fails(0);
    assert_eq!(rig.vm.sync(cx, &object, 0, 32), Ok(2));
    assert_eq!([0, 9 << 12].map(|at| file.word(at)), [1, 9]);
    let plain = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("memory");
    assert_eq!(rig.vm.sync(cx, &plain, 0, 4), Err(VmError::OtherKind));
    assert_eq!(rig.vm.truncate(cx, &plain, 0), Err(VmError::OtherKind));
    assert_eq!(rig.vm.punch(cx, &plain, 0, 4), Err(VmError::OtherKind));
    let beyond = |page: u64| Err(VmError::OutOfBounds { at: VirtAddr::new(page << 12) });
    for (from, to, done) in [(5, 3, beyond(5)), (99, 98, beyond(99)), (5, 5, Ok(0)), (98, 99, Ok(0))] {
        assert_eq!(rig.vm.sync(cx, &object, from, to), done);
        assert_eq!(rig.vm.punch(cx, &object, from, to), done);
        assert_eq!(rig.vm.prefault_shared(&object, from, to).work(cx, &Never).map(|()| 0), done);
    }
    let no_copy = rig.vm.map(cx, &space, span(2 * AT, 0x1000), SMALL, Backing::Copied(&plain, 0));
    assert_eq!(no_copy, Err(VmError::OtherKind));
    let large = VmaKind::private(PageSize::Size2M);
    let no_large = rig.vm.map(cx, &space, span(2 * AT, 2 << 20), large, Backing::Shared(&object, 0));
    assert_eq!(no_large, Err(VmError::OtherKind));
    assert!(rig.used(cx) > used);
    rig.end(cx, space);
    for object in [object, plain] {
        rig.vm.close(cx, object).expect("its own");
    }
}

fn lost<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = File::new(32 << 12);
    let (object, space) = enter(rig, cx, file);
    rig.vm.map(cx, &space, span(THERE, 32 << 12), SMALL, Backing::Copied(&object, 0)).expect("an area");
    rig.store(cx, &space, AT, 1).expect("memory");
    rig.store(cx, &space, THERE, 2).expect("memory");
    file.fails(7);
    let gone = |at: u64| VmError::Source { at: VirtAddr::new(at), code: 7 };
    let (absent, absent_there) = (AT + (20 << 12), THERE + (20 << 12));
    for _ in 0..2 {
        assert_eq!(rig.load(cx, &space, absent), Err(gone(absent)));
        assert_eq!(rig.store(cx, &space, absent_there, 3), Err(gone(absent_there)));
        let read = rig.vm.read(cx, &space, VirtAddr::new(AT + (15 << 12)), &mut vec![0; 2 << 12]);
        let stopped = read.expect_err("a page is not there");
        assert_eq!((stopped.done, stopped.cause), (1 << 12, gone(AT + (16 << 12))));
        // What was read before is there, for stores too, and what is dirty stays.
        assert_eq!(rig.load(cx, &space, AT + (5 << 12)), Ok(5 << 12));
        rig.store(cx, &space, AT + 8, 4).expect("memory");
        assert_eq!(rig.vm.sync(cx, &object, 0, 32), Err(gone(0)));
        assert_eq!(drops(rig, cx, &space, AT), Err(VmError::NotWritten));
        assert_eq!([AT, AT + 8, THERE].map(|at| rig.load(cx, &space, at)), [Ok(1), Ok(4), Ok(2)]);
    }
    assert_eq!(file.word(0), 0, "nothing was written");
    end(rig, cx, (object, space));
    assert_eq!(file.closed.load(Ordering::Relaxed), 1);
}

/// Of three runs one is refused by the source, and for one there is no memory.
fn lacking<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = File::new(8 << 12);
    let (object, space) = enter(rig, cx, file);
    let at = |page: u64| AT + (page << 12);
    [0, 2, 4].into_iter().for_each(|page| rig.store(cx, &space, at(page), 9).expect("memory"));
    let frame = rig.leaf(cx, &space, at(2)).frame;
    // SAFETY: the object keeps it.
    let more = || unsafe { rig.vm.frames().get_at(frame) }.ok();
    let held: Vec<_> = std::iter::from_fn(more).collect();
    rig.vm.pager().holds_back.store(true, Ordering::Relaxed);
    file.fails(101);
    assert_eq!(rig.vm.sync(cx, &object, 0, 8), Err(VmError::Source { at: VirtAddr::new(0), code: 101 }));
    assert_eq!([0, 2, 4].map(|page| file.word(page << 12)), [0, 2 << 12, 9]);
    assert_eq!(rig.vm.sync(cx, &object, 0, 8), Err(VmError::NoMemory));
    rig.vm.pager().holds_back.store(false, Ordering::Relaxed);
    held.into_iter().for_each(|folio| assert!(rig.vm.frames().put(cx, folio).is_ok()));
    assert_eq!(rig.vm.sync(cx, &object, 0, 8), Ok(1));
    assert_eq!([0, 2].map(|page| file.word(page << 12)), [9, 9]);
    end(rig, cx, (object, space));
}

/// Who is left by unwinding writes nothing back any more.
fn unwinding<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let (file, other) = (File::new(4 << 12), File::new(4 << 12));
    let (object, space) = enter(rig, cx, file);
    let beside = rig.vm.open_source(cx, other).expect("memory");
    rig.vm.map(cx, &space, span(THERE, 4 << 12), SMALL, Backing::Shared(&beside, 0)).expect("an area");
    let owners = [AT, THERE].map(|at| {
        rig.store(cx, &space, at, 9).expect("memory");
        rig.vm.owner(rig.leaf(cx, &space, at).frame).expect("the object")
    });
    file.fails(PANICS);
    let synced = std::panic::catch_unwind(AssertUnwindSafe(|| rig.vm.sync(cx, &object, 0, 4)));
    assert!(synced.is_err());
    // What it had in hand stays.
    rig.keep(1);
    assert_eq!(rig.vm.write_back(cx, owners[1]), 1, "nobody writes back");
    rig.store(cx, &space, AT + 0x1000, 9).expect("memory");
    assert_eq!(rig.vm.write_back(cx, owners[0]), 1, "nor this one");
    end(rig, cx, (object, space));
    rig.vm.close(cx, beside).expect("its own");
}

fn empty<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = File::new(0);
    let object = rig.vm.open_source(cx, file).expect("memory");
    let space = rig.vm.create(cx, bounds()).expect("memory");
    rig.enter(cx, &space);
    let map = |cx: &mut Cx<'_, 'h>| rig.vm.map(cx, &space, span(AT, 2 << 12), SMALL, Backing::Shared(&object, 0));
    let beyond = |at: u64| VmError::OutOfBounds { at: VirtAddr::new(at) };
    for _ in 0..2 {
        assert_eq!(object.pages(), 0);
        assert_eq!(map(cx), Err(beyond(0)));
        assert_eq!((rig.vm.sync(cx, &object, 0, 9), rig.vm.punch(cx, &object, 0, 9)), (Ok(0), Ok(0)));
        // It becomes longer.
        assert_eq!(rig.vm.truncate(cx, &object, 0x1800), Ok(0));
        file.bytes().resize(0x1800, 0);
        map(cx).expect("an area");
        assert_eq!(rig.load(cx, &space, AT + 0x1000), Ok(0));
        rig.store(cx, &space, AT + 0x1000, 7).expect("memory");
        assert_eq!((rig.vm.sync(cx, &object, 0, 9), file.word(0x1000)), (Ok(1), 7));
        // And empty again.
        file.bytes().clear();
        assert_eq!(rig.vm.truncate(cx, &object, 0), Ok(2));
        assert_eq!(rig.load(cx, &space, AT), Err(beyond(AT)));
        rig.vm.unmap(cx, &space, span(AT, 2 << 12)).expect("in the space");
    }
    end(rig, cx, (object, space));
    assert_eq!(file.closed.load(Ordering::Relaxed), 1);
}

/// Whatever allocation fails: what was stored is in the file, or the object says that it is not.
#[test]
fn every_allocation_can_fail() {
    let runs = hugemm_base::inject::every_fault(|plan: &FaultPlan| {
        with_format::<Metered, true>(8, 1, 21, plan, |rig| {
            rig.on(0, |cx| {
                let file = File::new(20 << 12);
                let Ok(space) = rig.vm.create(cx, bounds()) else { return };
                if let Ok(object) = rig.vm.open_source(cx, file) {
                    let shared = rig.vm.map(cx, &space, span(AT, 20 << 12), SMALL, Backing::Shared(&object, 0));
                    let copied = rig.vm.map(cx, &space, span(THERE, 4 << 12), SMALL, Backing::Copied(&object, 4));
                    rig.enter(cx, &space);
                    let stored = shared.is_ok() && rig.store(cx, &space, AT + (2 << 12), 7).is_ok();
                    if copied.is_ok()
                        && let Ok(found) = rig.load(cx, &space, THERE + 0x1000)
                    {
                        assert_eq!(found, 5 << 12);
                    }
                    let synced = rig.vm.sync(cx, &object, 0, 20);
                    assert!(matches!(synced, Ok(_) | Err(VmError::NoMemory)), "{synced:?}");
                    assert!(synced.is_err() || file.word(2 << 12) == if stored { 7 } else { 2 << 12 });
                    rig.vm.truncate(cx, &object, 20 << 12).expect("takes no memory");
                    rig.leave(cx, &space);
                    rig.end_shown(cx, (object, space));
                    assert_eq!(file.word(2 << 12), if stored { 7 } else { 2 << 12 });
                } else {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
            });
        });
    });
    assert!(runs > 12, "{runs} allocations");
}

/// A page that is read only by what faults.
#[test]
fn an_instruction_is_read_like_a_word() {
    as_first::<Metered, true>(16, 1, 6, |rig, cx| {
        let object = rig.vm.open_source(cx, File::new(4 << 12)).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        let text = SMALL.allowing(READ.with(Protection::EXEC));
        rig.vm.map(cx, &space, span(AT, 4 << 12), text, Backing::Shared(&object, 0)).expect("an area");
        let fetch = FaultAccess { access: Access::Exec, user: true };
        rig.vm.fault(cx, &space, VirtAddr::new(AT), fetch).expect("memory");
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT + 8), Ok(8));
        end(rig, cx, (object, space));
    });
}

on_both_formats! {
    /// A file begins with nothing, as most do.
    fn an_empty_file_becomes_longer: empty (first);
    fn pages_are_read_by_windows: read (first);
    /// A page is dirty from the first store on, and what is dirty is written, once.
    fn what_is_stored_is_written_back: stored (rig);
    /// What is clean goes without being written, what is dirty not before it has been.
    fn clean_pages_are_dropped_and_dirty_ones_are_not: dropped (first);
    /// What a file has no longer is gone from every space, with one flush for each, and its frames are free.
    fn a_file_becomes_shorter_under_its_mappings: shorter (rig);
    fn a_page_is_nobodys_before_a_flush_that_a_space_owes: owed (rig);
    /// Nobody writes back for memory that he needs to write back.
    fn reclaim_writes_nothing_while_others_write: beside (rig);
    fn who_waits_for_a_page_lets_reclaim_write_others: waiting (rig);
    fn what_a_device_stores_while_its_page_is_written_is_written_too: unpinned (rig);
    /// The first error is what is said, and what can be written is.
    fn what_cannot_be_written_keeps_nothing_else: lacking (first);
    fn a_source_that_panics_keeps_nobody_from_writing: unwinding (first);
    fn runs_that_lie_near_each_other_cost_one_flush: scattered (first);
    /// What a source fails with reaches whoever wanted something of it, and nothing is different after it.
    fn a_source_that_fails_says_why: failing (first);
    /// And so does one that has lost what it is over while that is mapped: what is there stays, and all of it ends.
    fn a_source_that_is_lost_says_so: lost (first);
}
