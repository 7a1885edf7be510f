//! Numbers at the end of their types, through every call that takes one: an answer or an error, no panic, and an end.

use crate::support::{Runs, assert_nothing_lost, machine, with_frames};
use hugemm_base::inject::NoFaults;
use hugemm_base::with;
use hugemm_reclaim::{Compressed, Level, ShrinkProgress, StoreError, Swap, Watermarks};

const NUMBERS: [u64; 8] = [0, 1, 31, 1 << 16, 1 << 40, 1 << 63, u64::MAX - 1, u64::MAX];

#[test]
fn marks_and_figures() {
    for a in NUMBERS {
        let marks = Watermarks::for_node(a);
        assert!(marks.min() <= marks.low() && marks.low() <= marks.high() && marks.high() <= a / 2);
        assert_eq!(marks.level(u64::MAX), Level::Ample);
        for b in NUMBERS {
            assert_eq!(Watermarks::new(a, b, u64::MAX).is_some(), a <= b);
            let one = |n| with!(ShrinkProgress::default(), scanned = n, aged = n, freed = n, flushes = n);
            let both = one(a).plus(one(b));
            assert!(both.freed >= a.max(b) && both.looked_at() >= a.max(b), "{both:?}");
        }
    }
}

#[test]
fn stores() {
    let machine = machine(256, 1);
    with_frames(&machine, NoFaults, |frames| {
        let cx = machine.cx();
        for cpus in [0, 1, 1 << 16, u32::MAX] {
            for limit in NUMBERS {
                match Compressed::<_, _>::new(frames, &cx, Runs, cpus, limit) {
                    Ok(store) => {
                        assert!(store.stats(&cx).frames <= limit);
                        assert!(store.close(&cx).is_ok(), "empty");
                    }
                    Err(error) => assert!(matches!(error, StoreError::Full | StoreError::NoMemory)),
                }
            }
        }
        assert_nothing_lost(&machine, frames);
    });
}
