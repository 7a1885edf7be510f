//! loom runs the shipped protocol functions through every interleaving (bounded by `LOOM_MAX_PREEMPTIONS`):
//! `RUSTFLAGS="--cfg loom" cargo test --release -p hugemm-frames --test loom`.
#![cfg(loom)]

use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering};
use hugemm_frames::pcp::{Mailbox, Watch};
use hugemm_frames::refs::{self, Dropped, PackedSide, Put, RefError};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;

/// One word of states, one of side counts, one wide counter for lane 0.
struct Page {
    state: AtomicU64,
    side: AtomicU64,
    wide: AtomicU64,
}

impl Page {
    fn new(state: u64, side: u64) -> Arc<Self> {
        Arc::new(Page { state: AtomicU64::new(state), side: AtomicU64::new(side), wide: AtomicU64::new(0) })
    }

    fn side<'a>(&'a self) -> PackedSide<'a, AtomicU64, impl Fn() -> Option<&'a AtomicU64>> {
        PackedSide { word: &self.side, shift: 0, wide: || Some(&self.wide) }
    }

    fn put(&self) -> u32 {
        u32::from(refs::put_only(&self.state, 0) || refs::put(&self.state, 0, &self.side()) == Ok(Put::Last))
    }

    /// A speculative get, and the put that ends it; how often that was the last.
    fn visit(&self) -> u32 {
        match refs::try_get(&self.state, 0, &self.side()) {
            Ok(true) => self.put(),
            Ok(false) => 0,
            Err(error) => panic!("{error:?}"),
        }
    }

    fn assert_frozen(&self) {
        assert_eq!(AtomicWord::load(&self.state, Ordering::Relaxed) & 3, 0, "still referenced");
        assert_eq!(AtomicWord::load(&self.side, Ordering::Relaxed) & 15, 0, "a count is left over");
    }
}

/// A model that more threads than two do not make too large.
fn bounded() -> loom::model::Builder {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(3));
    model
}

/// Whoever drops the last reference is told so, exactly once, whatever a speculative getter does meanwhile; or one and another holder, where a
/// put has to decide while the count changes under it; or two getters.
#[test]
fn a_drop_against_speculative_gets() {
    type Does = fn(&Page) -> u32;
    let cases: [(u64, u64, &[Does]); 3] =
        [(1, 0, &[Page::visit]), (3, 1, &[Page::put, Page::visit]), (1, 0, &[Page::visit, Page::visit])];
    for (state, side, others) in cases {
        let model = if others.len() > 1 { bounded() } else { loom::model::Builder::new() };
        model.check(move || {
            let page = Page::new(state, side);
            let beside = |does: &Does| {
                let (page, does) = (Arc::clone(&page), *does);
                thread::spawn(move || does(&page))
            };
            let others: Vec<_> = others.iter().map(beside).collect();
            let last = page.put() + others.into_iter().map(|other| other.join().unwrap()).sum::<u32>();
            assert_eq!(last, 1);
            page.assert_frozen();
        });
    }
}

/// The frame is frozen by its last put, used again and dropped again, while a getter that saw the first life acts in the
/// second.
#[test]
fn a_late_get_in_the_next_life() {
    bounded().check(|| {
        let page = Page::new(1, 0);
        let other = Arc::clone(&page);
        let visitor = thread::spawn(move || other.visit());
        let mut last = page.put();
        let mut lives = 1;
        if last == 1 {
            refs::hold(&page.state, 0);
            lives = 2;
            last += page.put();
        }
        last += visitor.join().unwrap();
        assert_eq!(last, lives);
        page.assert_frozen();
    });
}

/// A range drop of several lanes against the last put of one of them.
#[test]
fn a_range_drop_against_the_last_put() {
    loom::model(|| {
        // Lane 0 has two references, lane 1 one.
        let page = Page::new(0b0111, 1);
        let other = Arc::clone(&page);
        let holder = thread::spawn(move || other.put());
        let dropped = refs::put_lanes(&page.state, 3);
        assert_eq!((dropped.last & 2, dropped.dead), (2, 0));
        let mut last = dropped.last & 1;
        if dropped.shared & 1 != 0 {
            last += page.put();
        }
        last += holder.join().unwrap();
        assert_eq!(last, 1);
        page.assert_frozen();
        assert_eq!(AtomicWord::load(&page.state, Ordering::Relaxed), 0);
    });
}

/// Two CPUs drop different lanes of one word.
#[test]
fn range_drops_of_neighbours() {
    loom::model(|| {
        let page = Page::new(0b0101_0101, 0);
        let other = Arc::clone(&page);
        let neighbour = thread::spawn(move || refs::put_lanes(&other.state, 0b1100));
        assert_eq!(refs::put_lanes(&page.state, 0b0011), Dropped { last: 0b0011, shared: 0, dead: 0 });
        assert_eq!(neighbour.join().unwrap(), Dropped { last: 0b1100, shared: 0, dead: 0 });
        assert_eq!(AtomicWord::load(&page.state, Ordering::Relaxed), 0);
    });
}

/// One CPU makes frames of a word counted while another drops its neighbours one by one: neither loses what the other did.
#[test]
fn a_range_is_counted_while_neighbours_are_dropped() {
    loom::model(|| {
        let page = Page::new(0b0101, 0);
        let other = Arc::clone(&page);
        let neighbour = thread::spawn(move || {
            let only = |lane| refs::put_only(&other.state, lane);
            // A change of another lane in between is no reference: `put` decides.
            let last = |lane| only(lane) || refs::put(&other.state, lane, &other.side()) == Ok(Put::Last);
            assert!(last(0) && last(1));
        });
        refs::hold_lanes(&page.state, 0b1100);
        neighbour.join().unwrap();
        assert_eq!(AtomicWord::load(&page.state, Ordering::Relaxed), 0b0101_0000);
    });
}

/// The count outgrows its four bits while another holder puts.
#[test]
fn moving_to_the_wide_counter_against_a_put() {
    loom::model(|| {
        // 15 references.
        let page = Page::new(3, 14);
        let (a, b) = (Arc::clone(&page), Arc::clone(&page));
        let getter = thread::spawn(move || refs::get(&a.state, 0, &a.side()));
        let putter = thread::spawn(move || b.put());
        assert_eq!(getter.join().unwrap(), Ok(()));
        assert_eq!(putter.join().unwrap(), 0);
        // 15 again: the fifteenth put is the last, and not before.
        for _ in 0..14 {
            assert_eq!(page.put(), 0);
        }
        assert_eq!(page.put(), 1);
        assert_eq!(refs::put(&page.state, 0, &page.side()), Err(RefError::NotCounted));
    });
}

/// Two getters move to the wide counter at once.
#[test]
fn two_move_to_the_wide_counter() {
    loom::model(|| {
        let page = Page::new(3, 14);
        let other = Arc::clone(&page);
        let getter = thread::spawn(move || refs::get(&other.state, 0, &other.side()));
        assert_eq!(refs::get(&page.state, 0, &page.side()), Ok(()));
        assert_eq!(getter.join().unwrap(), Ok(()));
        for _ in 0..16 {
            assert_eq!(page.put(), 0);
        }
        assert_eq!(page.put(), 1);
    });
}

/// A CPU's cache, touched by its owner alone; somebody isolates a block and asks for the cache. Once the request is
/// served nothing of the block is cached, nor will be.
#[test]
fn refill_and_free_against_a_remote_drain() {
    struct Cpu {
        mailbox: Mailbox,
        isolated: AtomicU64,
        cache: UnsafeCell<u32>,
        node: Mutex<u32>,
    }
    impl Cpu {
        fn watch(&self) -> Watch {
            if self.is_isolated() { Watch::Everything } else { Watch::Places(0) }
        }

        fn is_isolated(&self) -> bool {
            // Relaxed, as in the allocator: serving is what makes it visible.
            AtomicWord::load(&self.isolated, Ordering::Relaxed) != 0
        }

        fn serve(&self) {
            let drain = || {
                // SAFETY: the cache is the owner's; loom checks that.
                let cached = self.cache.with_mut(|cache| unsafe { core::mem::take(&mut *cache) });
                *self.node.lock().unwrap() += cached;
            };
            self.mailbox.serve(drain, || self.watch());
        }

        fn free(&self) {
            if !self.mailbox.admits_place(7) {
                self.serve();
                if self.is_isolated() {
                    *self.node.lock().unwrap() += 1;
                    return;
                }
            }
            // SAFETY: as above.
            self.cache.with_mut(|cache| unsafe { *cache += 1 });
        }
    }
    // SAFETY: as above.
    unsafe impl Sync for Cpu {}
    // SAFETY: as above.
    unsafe impl Send for Cpu {}
    loom::model(|| {
        let cpu = Arc::new(Cpu {
            mailbox: Mailbox::new(AtomicU64::new(0), AtomicU64::new(0)),
            isolated: AtomicU64::new(0),
            cache: UnsafeCell::new(0),
            node: Mutex::new(0),
        });
        let other = Arc::clone(&cpu);
        let owner = thread::spawn(move || {
            other.free();
            other.free();
            other.serve();
        });
        AtomicWord::store(&cpu.isolated, 1, Ordering::Relaxed);
        cpu.mailbox.post();
        let served = !cpu.mailbox.pending();
        let found = *cpu.node.lock().unwrap();
        owner.join().unwrap();
        // SAFETY: the owner has ended.
        let cached = cpu.cache.with(|cache| unsafe { *cache });
        assert_eq!(cached + *cpu.node.lock().unwrap(), 2, "a frame was lost");
        if served || !cpu.mailbox.pending() {
            assert_eq!(cached, 0, "served, and yet cached");
            assert!(!cpu.mailbox.is_quiet(), "something is isolated, and yet blocks are allocated without a look");
            assert!(!cpu.mailbox.admits_place(7), "something is isolated, and yet blocks are freed without a look");
        }
        assert!(found <= 2);
    });
}

/// What an owner looks out for while `isolated` is not 0.
fn watch(isolated: &AtomicU64) -> Watch {
    match AtomicWord::load(isolated, Ordering::Relaxed) {
        0 => Watch::Places(0),
        _ => Watch::Everything,
    }
}

/// An isolation that ends while another begins: the owner ends up on the slow path if and only if one is left.
#[test]
fn a_second_isolation_while_the_first_ends() {
    loom::model(|| {
        let cpu = Arc::new((Mailbox::new(AtomicU64::new(0), AtomicU64::new(0)), AtomicU64::new(1)));
        cpu.0.post();
        let other = Arc::clone(&cpu);
        let owner = thread::spawn(move || {
            for _ in 0..2 {
                other.0.serve(|| (), || watch(&other.1));
            }
        });
        // The first ends, the second begins and says so.
        cpu.1.fetch_add(1_u64.wrapping_neg(), Ordering::Relaxed);
        cpu.1.fetch_add(1, Ordering::Relaxed);
        cpu.0.post();
        owner.join().unwrap();
        cpu.0.serve(|| (), || watch(&cpu.1));
        assert!(!cpu.0.is_quiet() && !cpu.0.pending() && !cpu.0.admits_place(0));
    });
}

/// A frame is poisoned while its owner serves an earlier request: afterwards its place is closed, or a request is there that
/// will close it, and no free takes the fast path until then.
#[test]
fn a_place_is_closed_while_an_earlier_request_is_served() {
    loom::model(|| {
        let cpu = Arc::new((Mailbox::new(AtomicU64::new(0), AtomicU64::new(0)), AtomicU64::new(0)));
        cpu.0.post();
        let other = Arc::clone(&cpu);
        let owner = thread::spawn(move || {
            let (mailbox, places) = &*other;
            mailbox.serve(|| (), || Watch::Places(AtomicWord::load(places, Ordering::Relaxed)));
        });
        cpu.1.fetch_add(1 << 5, Ordering::Relaxed);
        cpu.0.post();
        owner.join().unwrap();
        assert!(!cpu.0.admits_place(5), "poisoned, and yet freed without a look");
        assert!(!cpu.0.pending() || !cpu.0.admits_place(6), "a request that nobody who frees will see");
        cpu.0.serve(|| (), || Watch::Places(AtomicWord::load(&cpu.1, Ordering::Relaxed)));
        assert!(cpu.0.is_quiet() && !cpu.0.admits_place(5) && cpu.0.admits_place(6));
    });
}

/// A page that somebody may look at by a speculative reference.
struct Looked {
    page: Page,
    content: UnsafeCell<u64>,
}

// SAFETY: loom checks who reaches the content when.
unsafe impl Sync for Looked {}
// SAFETY: as above.
unsafe impl Send for Looked {}

/// Whoever freezes a page has it alone: nobody who got a speculative reference reads it then, or gets one later.
#[test]
fn a_freeze_against_speculative_gets() {
    for (state, side) in [(1, 0), (3, 0)] {
        loom::model(move || {
            let page = Page { state: AtomicU64::new(state), side: AtomicU64::new(side), wide: AtomicU64::new(0) };
            let looked = Arc::new(Looked { page, content: UnsafeCell::new(0) });
            let other = Arc::clone(&looked);
            let visitor = thread::spawn(move || {
                let page = &other.page;
                match refs::try_get(&page.state, 0, &page.side()) {
                    Ok(true) => {
                        // SAFETY: loom checks who reaches the content when.
                        other.content.with(|content| unsafe { core::hint::black_box(*content) });
                        page.put()
                    }
                    Ok(false) => 0,
                    Err(error) => panic!("{error:?}"),
                }
            });
            let page = &looked.page;
            let frozen = refs::freeze(&page.state, 0, &page.side());
            if frozen {
                // SAFETY: as above.
                looked.content.with_mut(|content| unsafe { *content = 7 });
                // Its next life.
                refs::hold(&page.state, 0);
            }
            // One life ends with a last put; if there was another before, the freeze was its end.
            assert_eq!(page.put() + visitor.join().unwrap(), 1, "frozen: {frozen}");
            page.assert_frozen();
        });
    }
}

/// A shared page is not frozen, and stays shared.
#[test]
fn a_freeze_of_what_others_share_changes_nothing() {
    loom::model(|| {
        let page = Page::new(3, 1);
        let other = Arc::clone(&page);
        let holder = thread::spawn(move || other.put());
        let frozen = refs::freeze(&page.state, 0, &page.side());
        let theirs = holder.join().unwrap();
        assert_eq!(theirs, 0, "this one was still held, or frozen by whoever had the last");
        if !frozen {
            assert_eq!(page.put(), 1);
        }
        page.assert_frozen();
    });
}

/// Frames whose states share a word, and whose side counts do: what happens to one leaves the others as they are.
#[test]
fn neighbours_in_a_word() {
    bounded().check(|| {
        // Lane 0 is shared no longer, lane 1 is held once, lane 2 is frozen; lane 3 is shared by two.
        let page = Page::new(0b11_00_01_11, 0x1000);
        let other = Arc::clone(&page);
        let neighbour = thread::spawn(move || {
            let side = |lane: u32| PackedSide { word: &other.side, shift: lane * 4, wide: || Some(&other.wide) };
            assert!(refs::put_only(&other.state, 1) || refs::put(&other.state, 1, &side(1)) == Ok(Put::Last));
            refs::hold(&other.state, 2);
            assert_eq!(refs::put(&other.state, 3, &side(3)), Ok(Put::Kept));
        });
        assert!(refs::freeze(&page.state, 0, &page.side()));
        refs::hold(&page.state, 0);
        assert_eq!(refs::get(&page.state, 0, &page.side()), Ok(()));
        assert_eq!((page.put(), page.put()), (0, 1));
        neighbour.join().unwrap();
        assert_eq!(AtomicWord::load(&page.state, Ordering::Relaxed), 0b11_01_00_00);
        assert_eq!(AtomicWord::load(&page.side, Ordering::Relaxed), 0);
    });
}
