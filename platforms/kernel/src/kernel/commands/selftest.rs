//! Every system's stress on the real machine. It runs for a time and fails at the first thing that is wrong; bugs planted
//! on purpose show that it would.

mod frames_stress;

use super::{Cx, Failure};
use crate::kernel::output::{progress, sample};
use core::fmt;
use hugemm_base::Clock;
use hugemm_kernel::request::Selftest;
use hugemm_workloads::alloc_free::stress::Broken;

/// What the self-test found.
#[derive(Debug)]
pub enum Finding {
    /// The allocator broke a rule.
    Frames(Broken),
    /// Frames are missing at the end.
    Lost {
        /// How many there should be.
        expected: u64,
        /// How many there are.
        found: u64,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Frames(broken) => write!(f, "self-test, frames: {broken}"),
            Finding::Lost { expected, found } => {
                write!(f, "self-test, frames: {found} are free at the end instead of {expected}")
            }
        }
    }
}

impl core::error::Error for Finding {}

/// Runs the command.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Selftest) -> Result<(), Failure> {
    let start = cx.platform().now_ns();
    let of = u64::from(args.seconds.max(1)) * 1_000_000_000;
    let (mut rounds, mut seed) = (0_u64, 1_u64);
    loop {
        let spent = cx.platform().now_ns() - start;
        progress((spent / 1_000_000_000).min(of / 1_000_000_000), of / 1_000_000_000, "selftest");
        if rounds > 0 && spent >= of {
            break;
        }
        frames_stress::round(cx, seed, args.plant)?;
        (rounds, seed) = (rounds + 1, seed.wrapping_mul(31).wrapping_add(7));
    }
    sample("selftest.rounds", rounds as f64, "rounds", &[]);
    Ok(())
}
