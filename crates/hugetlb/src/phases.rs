//! Several CPUs doing one operation in phases, with one of them between two phases.
//!
//! A phase is a number of units. Workers take units until none is left; whoever completes the last one is alone until it
//! opens the next phase, and does there what must be done once: flush, take a lock, count. Workers may come and go
//! between units; with one worker it is a loop.
//!
//! All of it is one word, so that the state is never half changed:
//!
//! ```text
//! 63     60 59        40 39        20 19         0
//! [ phase ] [  units   ] [  taken   ] [   done   ]
//! ```

use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering};

/// Most units in a phase.
pub(crate) const MOST_UNITS: u64 = (1 << FIELD) - 1;

const FIELD: u32 = 20;
const FINISHED: u64 = 15;

/// A state, unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    phase: u64,
    units: u64,
    taken: u64,
    done: u64,
}

impl State {
    const fn unpack(word: u64) -> State {
        State {
            phase: word >> (3 * FIELD),
            units: word >> (2 * FIELD) & MOST_UNITS,
            taken: word >> FIELD & MOST_UNITS,
            done: word & MOST_UNITS,
        }
    }

    const fn pack(self) -> u64 {
        self.phase << (3 * FIELD) | self.units << (2 * FIELD) | self.taken << FIELD | self.done
    }

    /// One more unit taken, if there is one.
    const fn take(self) -> Option<State> {
        if self.taken < self.units { Some(State { taken: self.taken + 1, ..self }) } else { None }
    }

    /// One of the taken units done.
    const fn complete(self) -> Option<State> {
        if self.done < self.taken { Some(State { done: self.done + 1, ..self }) } else { None }
    }

    /// Whether everything is done, so that somebody is between this phase and the next.
    const fn is_over(self) -> bool {
        self.done == self.units
    }
}

/// What a worker does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// This unit of this phase.
    Unit { phase: u64, unit: u64 },
    /// Wait: others are at the phase's last units.
    Wait,
    /// Nothing: the operation is over.
    Finished,
}

/// The word. Generic so that loom runs it.
#[derive(Debug)]
pub(crate) struct Phases<W = AtomicU64>(W);

impl Phases {
    /// Phase 0 with so many units, at least 1.
    pub(crate) fn new(units: u64) -> Self {
        Phases(AtomicU64::new(first(units)))
    }
}

fn first(units: u64) -> u64 {
    State { phase: 0, units: units.clamp(1, MOST_UNITS), taken: 0, done: 0 }.pack()
}

impl<W: AtomicWord> Phases<W> {
    /// The next thing to do.
    pub(crate) fn next(&self) -> Step {
        // Acquire pairs with the Release in `open`: a worker of a phase sees what was done before the phase.
        let taken =
            self.0.transition(Ordering::Acquire, Ordering::Acquire, |word| State::unpack(word).take().map(State::pack));
        match taken.map(State::unpack) {
            Ok(State { phase, taken, .. }) => Step::Unit { phase, unit: taken },
            Err(word) if State::unpack(word).phase == FINISHED => Step::Finished,
            Err(_) => Step::Wait,
        }
    }

    /// A unit is done. True: it was the phase's last, and the caller is alone until it calls [`open`](Phases::open) or
    /// [`finish`](Phases::finish).
    pub(crate) fn complete(&self) -> bool {
        // Release and Acquire: whoever completes the last unit sees what was done in all of them.
        let done = self
            .0
            .transition(Ordering::AcqRel, Ordering::Relaxed, |word| State::unpack(word).complete().map(State::pack));
        done.is_ok_and(|word| State::unpack(word).complete().is_some_and(State::is_over))
    }

    /// Opens a phase with so many units, at least 1. Only for whoever is between two phases.
    pub(crate) fn open(&self, phase: u64, units: u64) {
        let state = State { phase: phase.min(FINISHED - 1), units: units.clamp(1, MOST_UNITS), taken: 0, done: 0 };
        // Release pairs with the Acquire in `next`.
        self.0.store(state.pack(), Ordering::Release);
    }

    /// Ends the operation. Also for a worker that cannot go on, whatever the others do.
    pub(crate) fn finish(&self) {
        // Release pairs with the Acquire in `next`.
        self.0.store(State { phase: FINISHED, units: 0, taken: 0, done: 0 }.pack(), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_unit_of_every_phase_is_taken_once() {
        let phases = Phases::new(3);
        let mut seen = Vec::new();
        while let Step::Unit { phase, unit } = phases.next() {
            seen.push((phase, unit));
            if phases.complete() {
                match phase {
                    0 => phases.open(4, 2),
                    _ => phases.finish(),
                }
            }
        }
        assert_eq!(seen, [(0, 0), (0, 1), (0, 2), (4, 0), (4, 1)]);
        assert_eq!(phases.next(), Step::Finished);
    }

    #[test]
    fn states_survive_packing_and_bad_transitions_are_refused() {
        for state in [
            State { phase: 0, units: 1, taken: 0, done: 0 },
            State { phase: 14, units: MOST_UNITS, taken: MOST_UNITS, done: MOST_UNITS - 1 },
        ] {
            assert_eq!(State::unpack(state.pack()), state);
        }
        let state = State { phase: 1, units: 2, taken: 1, done: 1 };
        assert_eq!(state.complete(), None);
        assert_eq!(state.take(), Some(State { taken: 2, ..state }));
        assert_eq!(State { taken: 2, ..state }.take(), None);
    }

    /// A phase that cannot be told from the end, or has no unit or too many, is the nearest that can be.
    #[test]
    fn phases_and_units_are_kept_within_the_word() {
        let phases = Phases::new(0);
        assert_eq!(phases.next(), Step::Unit { phase: 0, unit: 0 });
        assert!(phases.complete());
        phases.open(FINISHED, 0);
        assert_eq!(phases.next(), Step::Unit { phase: FINISHED - 1, unit: 0 });
        assert_eq!(phases.next(), Step::Wait);
        assert!(phases.complete());
        phases.open(3, u64::MAX);
        let word = State::unpack(phases.0.load(Ordering::Relaxed));
        assert_eq!(word, State { phase: 3, units: 0xf_ffff, taken: 0, done: 0 });
    }

    /// Only the last unit that is done ends the phase, in whatever order they were taken.
    #[test]
    fn a_phase_is_over_when_all_units_are_done() {
        let phases = Phases::new(3);
        assert!(!phases.complete(), "none is taken");
        for _ in 0..3 {
            phases.next();
        }
        assert_eq!([phases.complete(), phases.complete(), phases.complete()], [false, false, true]);
        assert!(!phases.complete(), "there are no more");
    }

    #[test]
    fn a_worker_that_comes_late_waits_or_goes() {
        let phases = Phases::new(1);
        assert_eq!(phases.next(), Step::Unit { phase: 0, unit: 0 });
        assert_eq!(phases.next(), Step::Wait);
        assert!(phases.complete());
        assert_eq!(phases.next(), Step::Wait);
        phases.finish();
        assert_eq!(phases.next(), Step::Finished);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// Two workers, two phases of two units: each unit is one worker's, the one between the phases sees all that was
    /// done before it, and the units after it see what it did.
    #[test]
    fn phases_follow_each_other() {
        loom::model(|| {
            let shared = Arc::new((
                Phases(AtomicU64::new(first(2))),
                [UnsafeCell::new(0), UnsafeCell::new(0)],
                UnsafeCell::new(0),
            ));
            let work = |shared: Arc<(Phases, [UnsafeCell<u64>; 2], UnsafeCell<u64>)>| {
                let (phases, cells, between) = &*shared;
                loop {
                    match phases.next() {
                        Step::Unit { phase, unit } => {
                            // SAFETY: units are handed out once; loom checks.
                            cells[unit as usize].with_mut(|cell| unsafe {
                                if phase == 1 {
                                    assert_eq!(between.with(|sum| *sum), 2);
                                }
                                *cell += 1;
                            });
                            if phases.complete() {
                                // SAFETY: alone between the phases; loom checks.
                                between.with_mut(|sum| unsafe {
                                    *sum = cells.iter().map(|cell| cell.with(|cell| *cell)).sum();
                                });
                                if phase == 0 { phases.open(1, 2) } else { phases.finish() }
                            }
                        }
                        Step::Wait => thread::yield_now(),
                        Step::Finished => break,
                    }
                }
            };
            let other = thread::spawn({
                let shared = shared.clone();
                move || work(shared)
            });
            work(shared.clone());
            other.join().expect("no panic");
            // SAFETY: the workers have returned.
            assert_eq!(shared.2.with(|sum| unsafe { *sum }), 4);
        });
    }
}
