//! Reading files: what is read beside each other, and errors, which say where whoever faulted was.

use crate::support::{AT, Cx, Model, Rig, SMALL, bounds, on_both_formats, span};
use hugemm_base::{Never, VirtAddr};
use hugemm_paging::PageFormat;
use hugemm_vm::{Access, Advice, Backing, PageSource, Pattern, Served, SourceError, StoredPages, VmError};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const COPIED: u64 = 0x70_0000_0000;

/// A file of ones.
struct Ones {
    bytes: AtomicU64,
    /// How long it becomes while it is read next; 0: it stays.
    becomes: AtomicU64,
    /// What it fails with; 0: it does not.
    fails: AtomicU32,
    /// What was asked for: from which page on, and how many.
    fills: Mutex<Vec<(u64, u64)>>,
    /// 1: the next fill says 2, and waits for 3.
    gate: AtomicU32,
}

impl Ones {
    fn new(pages: u64) -> &'static Self {
        Box::leak(Box::new(Ones {
            bytes: AtomicU64::new(pages << 12),
            becomes: AtomicU64::new(0),
            fails: AtomicU32::new(0),
            fills: Mutex::default(),
            gate: AtomicU32::new(0),
        }))
    }

    fn wait_for(&self, gate: u32) {
        while self.gate.load(Ordering::SeqCst) != gate {
            std::thread::yield_now();
        }
    }
}

impl<'h, F: PageFormat> PageSource<Model<'h, F, true>> for Ones {
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn fill(
        &self,
        _: &mut hugemm_vm::Cx<'_, Model<'h, F, true>>,
        first: u64,
        pages: &mut [u8],
    ) -> Result<usize, SourceError> {
        pages.fill(1);
        match self.becomes.swap(0, Ordering::Relaxed) {
            0 => {}
            bytes => self.bytes.store(bytes, Ordering::Relaxed),
        }
        self.fills.lock().expect("nobody panics").push((first, pages.len() as u64 >> 12));
        if self.gate.compare_exchange(1, 2, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.wait_for(3);
        }
        match self.fails.load(Ordering::Relaxed) {
            0 => Ok(pages.len().min((self.bytes.load(Ordering::Relaxed).saturating_sub(first << 12)) as usize)),
            code => Err(SourceError(code)),
        }
    }

    fn write_back(
        &self,
        _: &mut hugemm_vm::Cx<'_, Model<'h, F, true>>,
        _: u64,
        _: &StoredPages<'_>,
    ) -> Result<(), SourceError> {
        Ok(())
    }
}

fn named<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = Ones::new(32);
    let object = rig.vm.open_source(cx, file).expect("memory");
    let space = rig.vm.create(cx, bounds()).expect("memory");
    for (at, backing) in [(AT, Backing::Shared(&object, 8)), (COPIED, Backing::Copied(&object, 8))] {
        rig.vm.map(cx, &space, span(at, 16 << 12), SMALL, backing).expect("an area");
    }
    for (start, access) in [AT, COPIED].into_iter().flat_map(|at| [Access::Read, Access::Write].map(|how| (at, how))) {
        let at = VirtAddr::new(start + 0x7008);
        file.fails.store(7, Ordering::Relaxed);
        assert_eq!(rig.vm.fault(cx, &space, at, access), Err(VmError::Source { at, code: 7 }), "{access:?}");
        let page = at.align_down(0x1000);
        let filled = rig.vm.prefault(&space, span(page.get(), 0x1000), None).work(cx, &Never);
        assert_eq!(filled, Err(VmError::Source { at: page, code: 7 }));
        // Shorter, of which nobody has told the object yet.
        file.fails.store(0, Ordering::Relaxed);
        file.bytes.store(4 << 12, Ordering::Relaxed);
        let beyond = VmError::OutOfBounds { at };
        assert_eq!(rig.vm.fault(cx, &space, at, access), Err(beyond), "{access:?}");
        let read = rig.vm.read(cx, &space, at, &mut [0; 8]);
        assert_eq!(read.map_err(|error| (error.at, error.cause)), Err((at, beyond)));
        file.bytes.store(32 << 12, Ordering::Relaxed);
    }
    rig.end_shown(cx, (object, space));
}

fn beside<F: PageFormat>(rig: &Rig<'_, F, true>) {
    for second in [Pattern::Normal, Pattern::Sequential] {
        let file = Ones::new(128);
        let (space, object) = rig.on(0, |cx| {
            let object = rig.vm.open_source(cx, file).expect("memory");
            let space = rig.vm.create(cx, bounds()).expect("memory");
            for at in [AT, 2 * AT] {
                rig.vm.map(cx, &space, span(at, 128 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
            }
            rig.vm.advise(cx, &space, span(AT, 128 << 12), Advice::Sequential).expect("an area");
            let other = if second == Pattern::Normal { Advice::Normal } else { Advice::Sequential };
            rig.vm.advise(cx, &space, span(2 * AT, 128 << 12), other).expect("an area");
            (space, object)
        });
        let touch = |cpu, at| {
            rig.on(cpu, |cx| {
                rig.vm.fault(cx, &space, VirtAddr::new(at), Access::Read).expect("memory");
            });
        };
        file.gate.store(1, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                file.wait_for(2);
                touch(1, 2 * AT + (16 << 12));
                file.gate.store(3, Ordering::SeqCst);
            });
            touch(0, AT);
        });
        touch(0, 2 * AT + (16 << 12));
        let mut read = vec![0; 128];
        for (first, pages) in file.fills.lock().expect("nobody panics").iter() {
            (*first..first + pages).for_each(|page| read[page as usize] += 1);
        }
        assert!(read[0] == 1 && read[16] == 1 && read.iter().all(|times| *times < 2), "{second:?}: {read:?}");
        rig.on(0, |cx| {
            rig.end_shown(cx, (object, space));
        });
    }
}

/// Who reads one page at a time does not wait for who reads another near it.
fn alone<F: PageFormat>(rig: &Rig<'_, F, true>) {
    let file = Ones::new(64);
    let (space, object) = rig.on(0, |cx| {
        let object = rig.vm.open_source(cx, file).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        rig.vm.map(cx, &space, span(AT, 64 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.vm.advise(cx, &space, span(AT, 64 << 12), Advice::Random).expect("an area");
        (space, object)
    });
    let touch = |cpu, at| rig.on(cpu, |cx| rig.vm.fault(cx, &space, VirtAddr::new(at), Access::Read));
    file.gate.store(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            file.wait_for(2);
            let served = touch(1, AT + (16 << 12));
            file.gate.store(3, Ordering::SeqCst);
            assert_eq!(served, Ok(Served::Mapped));
        });
        assert_eq!(touch(0, AT), Ok(Served::Mapped));
    });
    assert_eq!(*file.fills.lock().expect("nobody panics"), [(0, 1), (16, 1)]);
    rig.on(0, |cx| {
        rig.end_shown(cx, (object, space));
    });
}

fn ending<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = Ones::new(16);
    let object = rig.vm.open_source(cx, file).expect("memory");
    let space = rig.vm.create(cx, bounds()).expect("memory");
    rig.vm.map(cx, &space, span(AT, 16 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
    rig.enter(cx, &space);
    file.becomes.store((8 << 12) + 16, Ordering::Relaxed);
    assert_eq!(
        rig.load(cx, &space, AT + 0x8008),
        Ok(u64::from_ne_bytes([1; 8])),
        "its last page, of which it has this"
    );
    assert_eq!(rig.vm.truncate(cx, &object, (8 << 12) + 16), Ok(0));
    assert_eq!(rig.load(cx, &space, AT + 0x8010), Ok(0));
    rig.end(cx, space);
    rig.vm.close(cx, object).expect("its own");
}

on_both_formats! {
    fn errors_name_the_address_that_was_touched: named (first);
    fn a_window_is_read_by_one_at_a_time: beside (rig);
    fn pages_read_alone_do_not_wait_for_each_other: alone (rig);
    /// A file that ends within a page while that is read has the page.
    fn a_file_that_becomes_shorter_while_it_is_read_is_read_again: ending (first);
}
