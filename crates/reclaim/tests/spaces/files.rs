//! Files under pressure: clean pages go without being written, dirty ones when they have been; nobody waits for memory that he needs to
//! give some back.

use crate::rig::{Cx, Model, NODE, Rig, Size, span, with_cpu};
use crate::rules::{AT, SIZE};
use hugemm_base::{Never, PageSize, VirtAddr};
use hugemm_frames::AllocRequest;
use hugemm_paging::Lookup;
use hugemm_reclaim::{LruPolicy, ShrinkBudget, ShrinkProgress, Swap};
use hugemm_vm::{Backing, PageSource, SourceError, StoredPages, Vm, VmaKind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A file in memory.
#[derive(Default)]
struct File {
    bytes: Mutex<Vec<u8>>,
    /// Calls and pages of them.
    writes: AtomicU64,
    written: AtomicU64,
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
            let got = vm.pager().shrink(vm, cx, NODE, ShrinkBudget { free: 4, scan: 1 << 10 }, &Never);
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
    rig.vm.pager().shrink(&rig.vm, cx, NODE, ShrinkBudget { free: u64::MAX, scan: 400 }, &Never)
}

/// Pages that nobody uses any more: those that were only read cost nothing but their flush, and those that were stored to one write for
/// a run of them.
#[test]
fn clean_pages_go_first_and_dirty_ones_by_runs() {
    for policy in LruPolicy::ALL {
        with_cpu(Size { policy, ..SIZE }, 17, |rig, cx| {
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
}

/// A file that does not fit into memory, all of it stored to; writing back needs memory itself.
#[test]
fn a_file_larger_than_memory_is_edited() {
    for policy in LruPolicy::ALL {
        with_cpu(Size { policy, ..SIZE }, 18, |rig, cx| {
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
}
