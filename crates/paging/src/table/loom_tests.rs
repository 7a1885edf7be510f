//! The words of a table as loom sees them.

use super::*;
use crate::page_table::Editing;
use crate::protect::{Change, Edit};
use crate::write_protect::restrict;
use crate::x86_64::X86_64;
use loom::sync::Arc;
use loom::thread;

/// Two tables: an upper one, and a lower one that its first entry is to refer to.
struct Tables {
    upper: Box<[AtomicU64; LINE]>,
    lower: [Box<[AtomicU64; LINE]>; 2],
}

const PRESENT: u64 = 1;
const HIDDEN: u64 = 1 << 52 | PRESENT;

impl Tables {
    fn new() -> Arc<Self> {
        let entries = || Box::new(core::array::from_fn(|_| AtomicU64::new(0)));
        Arc::new(Tables { upper: entries(), lower: [entries(), entries()] })
    }

    // The handles use their first entries only.
    fn upper(&self) -> Table {
        Table(NonNull::from(&self.upper[0]))
    }

    fn lower(&self, which: u64) -> Table {
        Table(NonNull::from(&*self.lower[which as usize]).cast())
    }

    fn lower_leaf(&self, index: usize) -> &AtomicU64 {
        &self.lower[0][index]
    }
}

/// Hooks in table `mine`, filled, unless another is there; returns which one is.
fn hook(tables: &Tables, mine: u64) -> u64 {
    tables.lower(mine).set(0, 7);
    match tables.upper().publish_if_empty(0, mine << 12 | PRESENT) {
        Ok(()) => mine,
        Err(seen) => {
            assert_eq!(tables.lower(seen >> 12).get(0), 7, "the loser walks the winner's table");
            seen >> 12
        }
    }
}

/// Of two that hook in a table, both use the same one, and everybody who sees it sees it filled. Fails with the
/// orderings of `publish_if_empty` or of `get` weakened.
#[test]
fn one_table_is_hooked_in_and_seen_filled() {
    loom::model(|| {
        let tables = Tables::new();
        let other = tables.clone();
        let other = thread::spawn(move || hook(&other, 1));
        let walker = tables.clone();
        let walker = thread::spawn(move || {
            let entry = walker.upper().get(0);
            if entry != 0 {
                assert_eq!(walker.lower(entry >> 12).get(0), 7);
            }
        });
        let mine = hook(&tables, 0);
        assert_eq!(mine, other.join().expect("the other"));
        walker.join().expect("the walker");
    });
}

/// Of two that need the same work done, one does it, once, and neither goes on before it is done.
#[test]
fn work_is_done_once_and_seen_by_all() {
    const CLAIMED: u64 = 1 << 57;
    const NEEDED: u64 = 2;
    fn share(tables: &Tables, leaf: usize) {
        tables.upper().claimed(
            0,
            CLAIMED,
            |entry| entry & NEEDED != 0,
            |entry| {
                // As handing down does, by plain stores: every leaf loses the right that whoever is through may give back.
                (1..3).for_each(|leaf| tables.lower(0).set(leaf, tables.lower(0).get(leaf) & !PRESENT));
                tables.lower(0).set(3, 9);
                entry ^ NEEDED
            },
        );
        assert_eq!(tables.lower_leaf(3).load(Ordering::Relaxed), 9, "the work is seen");
        assert_eq!(tables.lower_leaf(leaf).fetch_or(PRESENT, Ordering::Relaxed) & PRESENT, 0);
    }
    loom::model(|| {
        let tables = Tables::new();
        tables.upper().set(0, PRESENT | NEEDED);
        (1..3).for_each(|leaf| tables.lower(0).set(leaf, PRESENT));
        let other = tables.clone();
        let other = thread::spawn(move || share(&other, 1));
        share(&tables, 2);
        other.join().expect("the other");
        assert_eq!((tables.lower(0).get(1), tables.lower(0).get(2)), (PRESENT, PRESENT));
    });
}

/// A table that was hooked in while the entries above it were being flipped is seen filled by whoever finds the flipped entry.
/// Fails without the fence between loads and stores.
#[test]
fn a_flipped_entry_is_seen_filled() {
    const FLIPPED: u64 = 1 << 1;
    loom::model(|| {
        let upper: Arc<[AtomicU64; 4 * LINE]> = Arc::new(core::array::from_fn(|_| AtomicU64::new(0)));
        let lower = Arc::new(AtomicU64::new(0));
        // The first line but for its first entry; the second is not alike, so that it ends there.
        (1..LINE).for_each(|index| upper[index].store(PRESENT, Ordering::Relaxed));
        let flipped = upper.clone();
        let flip = thread::spawn(move || {
            let table = Table(NonNull::from(&flipped[0]));
            table.flip_alike::<true>((0, 4 * LINE), |line| alike::<X86_64>(line, PRESENT), FLIPPED, Ask::Own);
        });
        let (walked, below) = (upper.clone(), lower.clone());
        let walker = thread::spawn(move || {
            if Table(NonNull::from(&walked[0])).get(0) != 0 {
                assert_eq!(below.load(Ordering::Relaxed), 7);
            }
        });
        lower.store(7, Ordering::Relaxed);
        assert_eq!(publish_if_empty(&upper[0], PRESENT), Ok(()));
        flip.join().expect("the other");
        walker.join().expect("the walker");
    });
}

/// The same where one entry is restricted. Fails if the restricted entry is stored relaxed.
#[test]
fn a_table_that_is_restricted_is_seen_filled() {
    loom::model(|| {
        let tables = Tables::new();
        let (restricted, walked) = (tables.clone(), tables.clone());
        let restrict = thread::spawn(move || {
            let mut edit = Edit::handing_down(Change::NO_WRITE, Editing::LIVE);
            restrict::<X86_64>(restricted.upper(), 0, 1, &mut edit);
        });
        let walker = thread::spawn(move || {
            if walked.upper().get(0) != 0 {
                assert_eq!(walked.lower_leaf(0).load(Ordering::Relaxed), 7);
            }
        });
        tables.lower(0).set(0, 7);
        assert_eq!(tables.upper().publish_if_empty(0, X86_64::table(Pfn::new(1))), Ok(()));
        restrict.join().expect("the other");
        walker.join().expect("the walker");
    });
}

/// What was reserved is seen filled once it is committed. Fails without the fence before the commit.
#[test]
fn a_committed_entry_is_seen_filled() {
    loom::model(|| {
        let tables = Tables::new();
        let walker = tables.clone();
        let walker = thread::spawn(move || {
            let entry = walker.upper().get(0);
            if entry & PRESENT != 0 {
                assert_eq!(walker.lower(0).get(0), 7);
            }
        });
        // As `map` does: reserve, fill what is below, then one fence, then the commit.
        tables.upper().set(0, PRESENT ^ HIDDEN);
        tables.lower(0).set(0, 7);
        ready_to_commit();
        tables.upper().set(0, PRESENT);
        walker.join().expect("the walker");
    });
}
