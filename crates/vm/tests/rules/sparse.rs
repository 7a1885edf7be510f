//! What a range has decides what it costs, not how many addresses it is: of TiB that nobody has touched no page is looked at.

use crate::support::{AT, SMALL, as_first, bounds, lock_rounds, span};
use hugemm_base::{PageSize, VirtAddr};
use hugemm_paging::{Lookup, X86_64};
use hugemm_vm::{Advice, Backing, PageSource, Setup, SourceError, StoredPages};

const TIB: u64 = 1 << 40;
/// What a GiB that has nothing may cost, and what has been done besides.
const ROUNDS: u64 = 4 * 1024 + 100;

fn rounds(work: impl FnOnce()) -> u64 {
    let before = lock_rounds();
    work();
    lock_rounds() - before
}

/// As the area's first and last page, and one between, each stored to.
const TOUCHED: [u64; 3] = [AT, AT + TIB / 2 + 0x5000, AT + TIB - 0x1000];

#[test]
fn areas_cost_what_they_have() {
    as_first::<X86_64, true>(16, 1, 301, |rig, cx| {
        let all = span(AT, TIB);
        let space = rig.space(cx, all, SMALL);
        rig.enter(cx, &space);
        let store = |cx: &mut _| {
            TOUCHED.into_iter().for_each(|at| rig.store(cx, &space, at, at).expect("memory"));
        };
        store(cx);
        let pins = rig.pin(cx, &space, span(AT, 0x1000));
        let mut child = None;
        let forked = rounds(|| child = rig.vm.fork(cx, &space).ok());
        let child = child.expect("memory");
        let mut word = [0; 8];
        for at in TOUCHED.map(VirtAddr::new) {
            rig.vm.read(cx, &child, at, &mut word).expect("memory");
            assert_eq!(u64::from_le_bytes(word), at.get());
        }
        rig.vm.destroy(cx, child).expect("idle");
        rig.unpin(cx, &space, pins);
        store(cx);
        rig.vm.pager().unused_pages();
        let cooled = rounds(|| rig.vm.advise(cx, &space, all, Advice::Cold).expect("an area"));
        assert_eq!(rig.vm.pager().unused_pages().len(), TOUCHED.len());
        let mut seen = Vec::new();
        store(cx);
        let looked = rounds(|| {
            TOUCHED.into_iter().for_each(|at| _ = rig.vm.read(cx, &space, VirtAddr::new(at), &mut word));
            let used = rig.vm.test_and_clear_young(cx, &space, all, |page| seen.push(page.start().get()));
            assert!(used.is_ok());
        });
        assert_eq!(seen, TOUCHED);
        TOUCHED.into_iter().for_each(|at| rig.page_out(cx, &space, at));
        let brought = rounds(|| rig.vm.advise(cx, &space, all, Advice::WillNeed).expect("an area"));
        for at in TOUCHED {
            assert!(matches!(rig.vm.lookup(cx, &space, VirtAddr::new(at)), Lookup::Mapped(_)), "{at:#x}");
        }
        let all = [forked, cooled, looked, brought];
        assert!(all.into_iter().all(|rounds| rounds < ROUNDS), "{all:?}");
        rig.end(cx, space);
    });
}

#[test]
fn objects_cost_what_they_have() {
    as_first::<X86_64, true>(16, 1, 302, |rig, cx| {
        let object = rig.vm.create_shared(cx, TIB >> 12, PageSize::Size4K, false).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        let (all, shown) = (span(AT, TIB), Backing::Shared(&object, 0));
        rig.vm.map(cx, &space, all, SMALL, shown).expect("memory");
        for at in TOUCHED.map(VirtAddr::new) {
            rig.vm.write(cx, &space, at, &at.get().to_le_bytes()).expect("memory");
            rig.page_out(cx, &space, at.get());
        }
        assert_eq!(rig.vm.pager().used(), TOUCHED.len());
        let brought = rounds(|| rig.vm.advise(cx, &space, all, Advice::WillNeed).expect("an area"));
        assert_eq!(rig.vm.pager().used(), 0, "all are back");
        assert!(brought < ROUNDS, "{brought}");
        rig.end_shown(cx, (object, space));
    });
}

/// All of it is zero.
struct Hole(u64);

impl<S: Setup> PageSource<S> for Hole {
    fn bytes(&self) -> u64 {
        self.0
    }

    fn fill(&self, _: &mut hugemm_vm::Cx<'_, S>, _: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        pages.fill(0);
        Ok(pages.len())
    }

    fn write_back(&self, _: &mut hugemm_vm::Cx<'_, S>, _: u64, _: &StoredPages<'_>) -> Result<(), SourceError> {
        Ok(())
    }
}

#[test]
fn files_cost_what_is_read_of_them() {
    let file: &'static Hole = Box::leak(Box::new(Hole(TIB)));
    as_first::<X86_64, true>(16, 1, 303, |rig, cx| {
        let object = rig.vm.open_source(cx, file).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        rig.vm.map(cx, &space, span(AT, TIB), SMALL, Backing::Shared(&object, 0)).expect("memory");
        for at in TOUCHED.map(VirtAddr::new) {
            rig.vm.write(cx, &space, at, &[1; 8]).expect("memory");
        }
        let synced = rounds(|| assert_eq!(rig.vm.sync(cx, &object, 0, u64::MAX), Ok(TOUCHED.len() as u64)));
        rig.vm.destroy(cx, space).expect("idle");
        let closed = rounds(|| rig.vm.close(cx, object).expect("its own"));
        assert!(synced < 100 && closed < 100, "{synced}, {closed}");
    });
}
