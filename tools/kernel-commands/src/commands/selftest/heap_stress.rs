//! All CPUs use the global allocator, interrupts on: what one takes another frees, every word is known.

use super::{Cx, Failure, Finding, Steps, on_all};
use ::alloc::vec::Vec;
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::random::Random;
use hugemm_workloads::request::Plant;

/// Steps of each CPU in a round, at most.
const STEPS: u64 = 20_000;
/// Places through which memory goes from one CPU to another.
const EXCHANGE: usize = 64;

/// Words that follow from where they are and whose: of two owners of the same memory one finds the other's.
#[derive(Default)]
struct Words {
    words: Vec<u64>,
    tag: u64,
}

impl Words {
    fn word(&self, index: usize) -> u64 {
        self.tag ^ (self.words.as_ptr().addr() as u64).wrapping_add(index as u64)
    }

    /// Of a slab mostly, of a block of frames sometimes; none if there is no memory.
    fn new(random: &mut Random) -> Self {
        let most = if random.below(64) == 0 { 1 << 15 } else { 1 << random.below(10) };
        let (mut words, count) = (Words { words: Vec::new(), tag: random.word() }, random.below(most) as usize + 1);
        if words.words.try_reserve_exact(count).is_ok() {
            (0..count).for_each(|index| words.words.push(words.word(index)));
        }
        words
    }

    /// The planted bug: this memory is handed out once more, and the other owner writes.
    fn hand_out_again(&mut self, random: &mut Random) {
        let mut other = Words { words: core::mem::take(&mut self.words), tag: random.word() };
        (0..other.words.len()).for_each(|index| other.words[index] = other.word(index));
        self.words = other.words;
    }

    fn check(&self, cpu: u32) -> Result<(), Finding> {
        for (index, found) in self.words.iter().enumerate() {
            let expected = self.word(index);
            if *found != expected {
                let at = core::ptr::from_ref(found).addr();
                let what = format_args!("cpu{cpu} found {found:#x} at {at:#x}, not {expected:#x}");
                return Err(Finding::new("heap", what));
            }
        }
        Ok(())
    }
}

/// One round on all CPUs, until `until` at the latest.
pub fn round(cx: Cx<'_>, seed: u64, plant: Plant, until: u64) -> Result<(), Failure> {
    let exchange: [Lock<SpinLock, Words>; EXCHANGE] = core::array::from_fn(|_| Lock::new(Words::default()));
    let steps = Steps::until(until);
    on_all(cx, |cx, cpu| {
        let mut random = Random(seed ^ u64::from(cpu) << 32);
        steps.each(cx, STEPS, |_, _| {
            let mut new = Words::new(&mut random);
            if plant == Plant::DoubleAlloc && cpu == 0 {
                new.hand_out_again(&mut random);
            }
            let old = core::mem::replace(&mut *exchange[random.below(EXCHANGE as u64) as usize].lock(), new);
            Ok(old.check(cpu)?)
        })
    })
}
