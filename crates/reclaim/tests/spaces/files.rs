//! Files under pressure: clean pages go without being written, dirty ones when they have been; nobody waits for memory that he needs to
//! give some back.

use crate::rig::{Cx, Model, NODE, Rig, Size, span, with_cpu, with_either};
use crate::rules::{AT, SIZE};
use hugemm_base::{Never, PageSize, Pfn, VirtAddr};
use hugemm_frames::AllocRequest;
use hugemm_paging::Lookup;
use hugemm_reclaim::{LruPolicy, ShrinkBudget, ShrinkProgress, Swap};
use hugemm_vm::{AddressSpace, Advice, Backing, Discard, PageSource, SharedRef, SourceError, StoredPages, Vm, VmaKind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A file in memory.
#[derive(Default)]
struct File {
    bytes: Mutex<Vec<u8>>,
    /// Calls and pages of them.
    writes: AtomicU64,
    written: AtomicU64,
    /// Pages that were read.
    read: AtomicU64,
    /// Where the manager is whose memory it needs to write.
    vm: AtomicUsize,
}

impl File {
    /// Of so many pages, each of which begins with its number.
    fn new(pages: u64) -> &'static File {
        let mut bytes = vec![0; (pages << 12) as usize];
        (0..pages).for_each(|page| bytes[(page << 12) as usize..][..8].copy_from_slice(&page.to_le_bytes()));
        Box::leak(Box::new(File { bytes: Mutex::new(bytes), ..File::default() }))
    }

    fn word(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.bytes.lock().expect("bytes")[at as usize..][..8].try_into().expect("eight"))
    }
}

impl<'h> PageSource<Model<'h>> for File {
    fn bytes(&self) -> u64 {
        self.bytes.lock().expect("bytes").len() as u64
    }

    fn fill(&self, _: &mut Cx<'_, 'h>, first: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        self.read.fetch_add((pages.len() >> 12) as u64, Ordering::Relaxed);
        pages.copy_from_slice(&self.bytes.lock().expect("bytes")[(first << 12) as usize..][..pages.len()]);
        Ok(pages.len())
    }

    fn write_back(&self, cx: &mut Cx<'_, 'h>, first: u64, pages: &StoredPages<'_>) -> Result<(), SourceError> {
        let vm = self.vm.load(Ordering::Relaxed) as *const Vm<'h, Model<'h>>;
        if !vm.is_null() {
            // SAFETY: the test's, which goes on.
            let vm = unsafe { &*vm };
            // As whoever allocates and finds nothing does.
            let all = core::iter::from_fn(|| vm.frames().alloc(cx, AllocRequest::order(hugemm_base::Order::ZERO)).ok());
            let held: Vec<_> = all.collect();
            let got = vm.pager().shrink(vm, cx, NODE, ShrinkBudget::new(4, 1 << 10), &Never);
            assert_eq!(got.written, 0, "nothing is written back to write back");
            held.into_iter().for_each(|block| vm.frames().free(cx, block));
        }
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written.fetch_add((pages.bytes() as u64) >> 12, Ordering::Relaxed);
        pages.copy_to(0, &mut self.bytes.lock().expect("bytes")[(first << 12) as usize..][..pages.bytes()]);
        Ok(())
    }
}

const SMALL: VmaKind = VmaKind::private(PageSize::Size4K);

fn all_of_it<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>) -> ShrinkProgress {
    rig.vm.pager().shrink(&rig.vm, cx, NODE, ShrinkBudget::new(u64::MAX, 400), &Never)
}

/// Pages that nobody uses any more: those that were only read cost nothing but their flush, and those that were stored to one write for
/// a run of them.
#[test]
fn clean_pages_go_first_and_dirty_ones_by_runs() {
    with_either(SIZE, 17, |policy, rig, cx| {
        let file = File::new(128);
        let object = rig.vm.open_source(cx, file).expect("memory");
        let space = rig.vm.create(cx, span(0, 1 << 47)).expect("memory");
        rig.vm.map(cx, &space, span(AT, 128 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        let at = |page: u64| AT + (page << 12);
        (0..128).for_each(|page| assert_eq!(rig.get(cx, &space, at(page)), Ok(page)));
        (64..80).for_each(|page| rig.put(cx, &space, at(page), page + 1000).expect("memory"));
        rig.leave(cx, &space);
        rig.enter(cx, &space);
        let (mut freed, mut written) = (0, 0);
        for _ in 0..40 {
            let pass = all_of_it(rig, cx);
            freed += pass.freed;
            written += pass.written;
            if freed >= 112 && written == 0 {
                assert_eq!(file.writes.load(Ordering::Relaxed), 0, "{policy:?}");
            }
        }
        assert_eq!((freed, written), (128, 16), "{policy:?}");
        let found = |page: u64| rig.vm.lookup(cx, &space, VirtAddr::new(at(page)));
        assert!((0..128).map(found).all(|found| found == Lookup::Absent));
        assert!(file.writes.load(Ordering::Relaxed) <= 2, "sixteen pages that were read together");
        assert_eq!(rig.store.stats(cx).stores, 0, "nothing of it goes to swap");
        assert_eq!((file.word(70 << 12), file.word(7 << 12)), (1070, 7));
        (0..128).for_each(|page| {
            let expected = if (64..80).contains(&page) { page + 1000 } else { page };
            assert_eq!(rig.get(cx, &space, at(page)), Ok(expected));
        });
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// A file whose reader is slow: between what it has read and its end, others use the page.
struct Slow {
    file: &'static File,
    /// A [`Scene`], for the next read only.
    scene: AtomicUsize,
}

/// Where others use it.
struct Scene<'s, 'h> {
    rig: &'s Rig<'h>,
    space: &'s AddressSpace<Model<'h>>,
    object: &'s SharedRef<'s, Model<'h>>,
    value: u64,
}

/// Shows the same file at another place, for readers who read each page alone.
const ALONE: u64 = AT + (1 << 30);

impl<'h> Scene<'_, 'h> {
    /// Somebody stores to the page, it is written back, and goes.
    fn run(&self, cx: &mut Cx<'_, 'h>) {
        let Scene { rig, space, object, value } = *self;
        rig.put(cx, space, ALONE + (3 << 12), value).expect("memory");
        rig.vm.sync(cx, object, 0, 8).expect("it takes all");
        rig.leave(cx, space);
        for _ in 0..40 {
            all_of_it(rig, cx);
        }
        assert_eq!(rig.vm.lookup(cx, space, VirtAddr::new(ALONE + (3 << 12))), Lookup::Absent);
        rig.enter(cx, space);
    }
}

impl<'h> PageSource<Model<'h>> for Slow {
    fn bytes(&self) -> u64 {
        PageSource::<Model<'h>>::bytes(self.file)
    }

    fn fill(&self, cx: &mut Cx<'_, 'h>, first: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        let filled = self.file.fill(cx, first, pages);
        let scene = self.scene.swap(0, Ordering::Relaxed) as *const Scene<'_, 'h>;
        // SAFETY: the test's, which waits for this.
        if let Some(scene) = unsafe { scene.as_ref() } {
            scene.run(cx);
        }
        filled
    }

    fn write_back(&self, cx: &mut Cx<'_, 'h>, first: u64, pages: &StoredPages<'_>) -> Result<(), SourceError> {
        self.file.write_back(cx, first, pages)
    }
}

/// Claims save work and keep nobody out: whoever reads a page that others read meanwhile, stored to, wrote back and lost has old bytes, and
/// enters none of them; where it was never read before, and where it was.
#[test]
fn what_was_read_before_a_page_went_is_not_entered() {
    let slow = Box::leak(Box::new(Slow { file: File::new(8), scene: AtomicUsize::new(0) }));
    with_cpu(SIZE, 23, |rig, cx| {
        let object = rig.vm.open_source(cx, &*slow).expect("memory");
        let space = rig.vm.create(cx, span(0, 1 << 47)).expect("memory");
        for (at, advice) in [(AT, Advice::Normal), (ALONE, Advice::Random)] {
            rig.vm.map(cx, &space, span(at, 8 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
            rig.vm.advise(cx, &space, span(at, 8 << 12), advice).expect("an area");
        }
        rig.enter(cx, &space);
        for value in [1000, 1001] {
            let scene = Scene { rig, space: &space, object: &object, value };
            slow.scene.store(std::ptr::from_ref(&scene).addr(), Ordering::Relaxed);
            assert_eq!(rig.get(cx, &space, AT + (3 << 12)), Ok(value));
            assert_eq!(slow.scene.load(Ordering::Relaxed), 0, "it was read");
            rig.leave(cx, &space);
            for _ in 0..40 {
                all_of_it(rig, cx);
            }
            rig.enter(cx, &space);
        }
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// A file that does not fit into memory, all of it stored to; writing back needs memory itself.
#[test]
fn a_file_larger_than_memory_is_edited() {
    with_either(SIZE, 18, |policy, rig, cx| {
        let pages = rig.vm.frames().managed() + 500;
        let file = File::new(pages);
        file.vm.store(std::ptr::from_ref(&rig.vm).addr(), Ordering::Relaxed);
        let object = rig.vm.open_source(cx, file).expect("memory");
        let space = rig.vm.create(cx, span(0, 1 << 47)).expect("memory");
        rig.vm.map(cx, &space, span(AT, pages << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        for page in 0..pages {
            rig.put(cx, &space, AT + (page << 12) + 8, page + 1).expect("memory comes back");
        }
        assert!(file.written.load(Ordering::Relaxed) > 400, "{policy:?}");
        for page in (0..pages).step_by(7) {
            let at = AT + (page << 12);
            assert_eq!((rig.get(cx, &space, at), rig.get(cx, &space, at + 8)), (Ok(page), Ok(page + 1)));
        }
        rig.vm.sync(cx, &object, 0, pages).expect("it takes all");
        (0..pages).for_each(|page| assert_eq!(file.word((page << 12) + 8), page + 1));
        file.vm.store(0, Ordering::Relaxed);
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// A file that is read once from end to end takes nothing from others but what is free, however idle they are; what is read twice in a row
/// neither.
#[test]
fn a_stream_pushes_nothing_out() {
    with_either(SIZE, 19, |policy, rig, cx| {
        let all = rig.vm.frames().managed();
        let (own, pages) = (all / 2, 3 * all);
        let object = rig.vm.open_source(cx, File::new(pages)).expect("memory");
        let space = rig.space(cx, span(AT, own << 12), SMALL);
        let stream = AT + (own << 12);
        rig.vm.map(cx, &space, span(stream, pages << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        (0..own).for_each(|page| rig.put(cx, &space, AT + (page << 12), page + 1).expect("memory"));
        for page in 0..pages {
            assert_eq!(rig.get(cx, &space, stream + (page << 12)), Ok(page));
        }
        assert_eq!(rig.store.stats(cx).stores, 0, "{policy:?}");
        let there = rig.vm.usage(cx, &space, span(AT, own << 12)).expect("in the space");
        assert_eq!((there.present, there.swapped), (own, 0));
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// A file that is read again and again, and would fit if idle memory went: it does, and the file is read no more.
#[test]
fn idle_memory_makes_room_for_a_file_that_is_used() {
    with_either(SIZE, 20, |policy, rig, cx| {
        let all = rig.vm.frames().managed();
        let (own, pages) = (all / 2, all * 5 / 8);
        let file = File::new(pages);
        let object = rig.vm.open_source(cx, file).expect("memory");
        let space = rig.space(cx, span(AT, own << 12), SMALL);
        let used = AT + (own << 12);
        rig.vm.map(cx, &space, span(used, pages << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        (0..own).for_each(|page| rig.put(cx, &space, AT + (page << 12), page + 1).expect("memory"));
        let mut reads = Vec::new();
        for _ in 0..12 {
            let before = file.read.load(Ordering::Relaxed);
            (0..pages).for_each(|page| assert_eq!(rig.get(cx, &space, used + (page << 12)), Ok(page)));
            reads.push(file.read.load(Ordering::Relaxed) - before);
        }
        assert!(reads[11] * 20 < pages, "{policy:?}: {reads:?} of {pages} pages were read");
        assert!(rig.store.stats(cx).stores > 0);
        assert_eq!(rig.vm.usage(cx, &space, span(used, pages << 12)).expect("in the space").swapped, 0);
        (0..own).for_each(|page| assert_eq!(rig.get(cx, &space, AT + (page << 12)), Ok(page + 1)));
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// Reads 64 pages of a file that an area shows; where they are.
fn frames<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h>>) -> Vec<Pfn> {
    let frame = |page: u64| {
        let at = 2 * AT + (page << 12);
        assert_eq!(rig.get(cx, space, at), Ok(page));
        match rig.vm.lookup(cx, space, VirtAddr::new(at)) {
            Lookup::Mapped(leaf) => leaf.frame,
            found => panic!("{found:?}"),
        }
    };
    (0..64).map(frame).collect()
}

/// Swap that is full is no reason to keep what a file has, wherever that has been moved.
#[test]
fn files_go_though_swap_is_full() {
    with_either(Size { swap: 60, ..SIZE }, 21, |policy, rig, cx| {
        let object = rig.vm.open_source(cx, File::new(64)).expect("memory");
        let space = rig.space(cx, span(AT, 256 << 12), SMALL);
        let shown = span(2 * AT, 64 << 12);
        rig.vm.map(cx, &space, shown, SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        let mut random = hugemm_threads::Random(21);
        for page in 0..256 {
            // Nothing that compresses to less than half.
            let noise: Vec<u8> = (0..200).flat_map(|_| random.word().to_le_bytes()).collect();
            rig.vm.write(cx, &space, VirtAddr::new(AT + (page << 12)), &noise).expect("memory");
        }
        let before = frames(rig, cx, &space);
        let mut moves = || rig.vm.pager().compact(&rig.vm, cx, NODE) && frames(rig, cx, &space) != before;
        assert!((0..4).any(|_| moves()), "{policy:?}: files stay where they are");
        rig.leave(cx, &space);
        rig.enter(cx, &space);
        let mut full = false;
        for pass in 0..40 {
            full |= all_of_it(rig, cx).full;
            let present = rig.vm.usage(cx, &space, shown).expect("in the space").present;
            assert!(pass < 2 || present == 0, "{policy:?}: {present} behind what cannot go");
        }
        assert!(full, "{policy:?}: there was room");
        // Brought at once, before anybody touches it.
        rig.vm.advise(cx, &space, shown, Advice::WillNeed).expect("an area");
        rig.vm.prefault_shared(&object, 0, 64).work(cx, &Never).expect("memory");
        (0..64).for_each(|page| assert_eq!(rig.get(cx, &space, 2 * AT + (page << 12)), Ok(page)));
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// What is cold goes first, and what was given up costs no swap.
#[test]
fn what_is_not_needed_goes_first() {
    for policy in LruPolicy::ALL {
        for given_up in [false, true] {
            with_cpu(Size { policy, ..SIZE }, 22, |rig, cx| {
                let space = rig.space(cx, span(AT, 100 << 12), SMALL);
                rig.enter(cx, &space);
                (0..100).for_each(|page| rig.put(cx, &space, AT + (page << 12), page + 1).expect("memory"));
                rig.leave(cx, &space);
                rig.enter(cx, &space);
                let cold = span(AT + (70 << 12), 20 << 12);
                if given_up {
                    rig.vm.discard(cx, &space, cold, Discard::WhenShort).expect("an area");
                } else {
                    rig.vm.advise(cx, &space, cold, Advice::Cold).expect("an area");
                }
                let budget = ShrinkBudget::new(20, 64);
                assert_eq!(rig.vm.pager().shrink(&rig.vm, cx, NODE, budget, &Never).freed, 20);
                assert_eq!(rig.store.stats(cx).stores, if given_up { 0 } else { 20 }, "{policy:?}");
                let usage = rig.vm.usage(cx, &space, span(AT, 100 << 12)).expect("in the space");
                assert_eq!((usage.present, usage.swapped), (80, if given_up { 0 } else { 20 }));
                for page in 0..100 {
                    let gone = given_up && (70..90).contains(&page);
                    assert_eq!(rig.get(cx, &space, AT + (page << 12)), Ok(if gone { 0 } else { page + 1 }));
                }
                rig.end(cx, space);
            });
        }
    }
}

/// A file whose disk is full.
struct Full(u64);

impl<'h> PageSource<Model<'h>> for Full {
    fn bytes(&self) -> u64 {
        self.0 << 12
    }

    fn fill(&self, _: &mut Cx<'_, 'h>, _: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        pages.fill(0);
        Ok(pages.len())
    }

    fn write_back(&self, _: &mut Cx<'_, 'h>, _: u64, _: &StoredPages<'_>) -> Result<(), SourceError> {
        Err(SourceError(28))
    }
}

/// One dirty page that its source does not take back keeps nobody else's idle memory from going.
#[test]
fn one_page_that_cannot_be_written_back_keeps_no_other() {
    with_either(SIZE, 17, |policy, rig, cx| {
        let object = rig.vm.open_source(cx, Box::leak(Box::new(Full(4)))).expect("memory");
        let space = rig.space(cx, span(AT, 400 << 12), SMALL);
        rig.vm.map(cx, &space, span(2 * AT, 4 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        (0..400).for_each(|page| rig.put(cx, &space, AT + (page << 12), page + 1).expect("memory"));
        rig.put(cx, &space, 2 * AT, 1).expect("memory");
        rig.leave(cx, &space);
        rig.enter(cx, &space);
        let mut freed = 0;
        for _ in 0..20 {
            let budget = ShrinkBudget::new(u64::MAX, 4000);
            freed += rig.vm.pager().shrink(&rig.vm, cx, NODE, budget, &Never).freed;
        }
        let stores = rig.store.stats(cx).stores;
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
        assert!(freed >= 300, "{policy:?}: {freed} of 400 idle pages went, {stores} were stored");
    });
}
