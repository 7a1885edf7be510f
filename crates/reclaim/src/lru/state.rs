//! The state word of a folio: pure transitions of one descriptor word, written under the LRU's lock, and of a new page under its place's.

use hugemm_base::Order;

/// Where a folio is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Not on the LRU.
    Off,
    /// A page of 4 KiB that waits for a list, in this place.
    New {
        /// Which.
        place: usize,
    },
    /// On the list with this label.
    On {
        /// Which.
        label: usize,
    },
    /// Taken off for a look, to be put back.
    Isolated,
}

/// What is remembered of a folio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Nothing.
    #[default]
    None,
    /// Found young once since it was last put on a list from outside or judged idle: of the two-list policy.
    Referenced,
    /// Storing it would free nothing, and it has not been found young since: it is not tried again.
    Incompressible,
}

/// A state word, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) standing: Standing,
    pub(crate) order: Order,
    pub(crate) mark: Mark,
    /// It is a source's, on the lists of those.
    pub(crate) sourced: bool,
}

const ORDER: u64 = 31;
const PLACE: u64 = 255;
const LABEL_SHIFT: u32 = 8;
const ON: u64 = 1 << 16;
const ISOLATED: u64 = 1 << 17;
const REFERENCED: u64 = 1 << 18;
const INCOMPRESSIBLE: u64 = 1 << 19;
const SOURCED: u64 = 1 << 20;
const NEW: u64 = 1 << 21;

impl State {
    pub(crate) fn word(self) -> u64 {
        let standing = match self.standing {
            Standing::Off => return 0,
            Standing::New { place } => NEW | (place as u64) << LABEL_SHIFT,
            Standing::On { label } => ON | (label as u64) << LABEL_SHIFT,
            Standing::Isolated => ISOLATED,
        };
        let mark = match self.mark {
            Mark::None => 0,
            Mark::Referenced => REFERENCED,
            Mark::Incompressible => INCOMPRESSIBLE,
        };
        standing | u64::from(self.order.get()) | mark | if self.sourced { SOURCED } else { 0 }
    }

    pub(crate) fn from_word(word: u64) -> Self {
        let standing = match word & (ON | ISOLATED | NEW) {
            NEW => Standing::New { place: (word >> LABEL_SHIFT & PLACE) as usize },
            ON => Standing::On { label: (word >> LABEL_SHIFT) as usize & 3 },
            ISOLATED => Standing::Isolated,
            _ => Standing::Off,
        };
        let order = Order::new((word & ORDER) as u32).unwrap_or(Order::ZERO);
        let mark = match word & (REFERENCED | INCOMPRESSIBLE) {
            REFERENCED => Mark::Referenced,
            INCOMPRESSIBLE => Mark::Incompressible,
            _ => Mark::None,
        };
        State { standing, order, mark, sourced: word & SOURCED != 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_holds_everything() {
        for order in [0, 9, 18].map(|order| Order::new(order).expect("valid")) {
            for mark in [Mark::None, Mark::Referenced, Mark::Incompressible] {
                let on = [0, 1, 2, 3].map(|label| Standing::On { label });
                let others = [Standing::Isolated, Standing::New { place: 0 }, Standing::New { place: 255 }];
                for standing in on.into_iter().chain(others) {
                    for sourced in [false, true] {
                        let state = State { standing, order, mark, sourced };
                        assert_eq!(State::from_word(state.word()), state);
                    }
                }
            }
        }
        assert_eq!(State::from_word(0).standing, Standing::Off);
    }
}
