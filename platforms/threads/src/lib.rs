//! Threads as CPUs: a platform for tests and small programs, on the standard library alone.
//!
//! Nothing is asked of the system, so Miri can interpret it: threads are not bound to real CPUs, and there are as many CPUs
//! as [`CPUS`], whatever the machine has. `hugemm-host` is the platform that measures; it binds threads and verifies memory.
//!
//! ```
//! use hugemm_base::PageSize;
//! use hugemm_frames::Frames;
//! use hugemm_threads::{Threads, run_as};
//!
//! let (threads, ram) = Threads::with_memory(8 << 20);
//! let frames = Frames::carve(&threads.cx(), ram)?;
//! std::thread::scope(|scope| {
//!     for cpu in 0..4 {
//!         let (threads, frames) = (&threads, &frames);
//!         scope.spawn(move || {
//!             run_as(cpu);
//!             let cx = threads.cx();
//!             let page = frames.alloc(&cx, PageSize::Size4K).expect("enough for four");
//!             frames.free(&cx, page);
//!         });
//!     }
//! });
//! # Ok::<(), hugemm_frames::CarveError>(())
//! ```
//!
//! A CPU is a number that a thread says it is ([`run_as`]; 0 before). Threads with one number are tasks of one CPU: while one
//! of them is pinned or stays, the others wait at their own pins.
//!
//! # Interrupts
//!
//! The pin is real. A test may give its thread an interrupt handler ([`Threads::interrupted`]), which then runs wherever an
//! interrupt could come and be noticed: before and after every call of the platform, before and after every change of a
//! [`TestLock`], and where the test says so ([`interrupt_point`]); never while the CPU is pinned, hence never in a handler.
//! A handler that allocates and frees finds the places that forgot their pin: they find their data changed, or the handler
//! wants the lock that they hold, and says so.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `across.rs` | which types may go from thread to thread |
//! | `cpu.rs` | one task at a time on a CPU that is pinned; an interrupt wherever one could come |
//! | `lock.rs` | a lock that finds who would wait for itself |
//! | `memory.rs` | memory as frames whose numbers nobody else has |
//! | `watchdog.rs` | an end for a test that would not end by itself |
#![warn(missing_debug_implementations)]

pub mod across;
mod cpu;
mod lock;
mod memory;
mod watchdog;

pub use cpu::{CPUS, Threads, interrupt_point, run_as, this_cpu};
pub use lock::TestLock;
pub use memory::Memory;
pub use watchdog::Watchdog;

/// Random numbers, the same ones for the same seed: SplitMix64, for which any seed is as good as any other, also one beside it.
#[derive(Clone, Debug, Default)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// A number below `limit`; 0 if that is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(limit)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    /// The generator's published outputs for the seed 1234567.
    #[test]
    fn words_are_those_of_splitmix64() {
        let mut random = Random(1_234_567);
        let words = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(words.map(|_| random.word()), words);
    }

    /// Tests give their CPUs seeds that are next to each other: what one chooses says nothing of what the next does.
    #[test]
    fn seeds_beside_each_other_are_as_different_as_any() {
        let first: std::collections::BTreeSet<u64> = (0..200).map(|seed| Random(seed).below(200)).collect();
        // 200 times one of 200: 126 of them are expected, give or take six.
        assert!((108..145).contains(&first.len()), "{}", first.len());
        for seed in 0..1000 {
            let mut random = Random(seed);
            let rare = (0..4500).filter(|_| random.below(200) == 4).count();
            assert!((2..55).contains(&rare), "seed {seed}: {rare} of 4500, where 22 are expected");
        }
        assert_eq!(Random(1).below(0), 0);
    }
}
