//! Choices of a test by random operations: by the bytes of a fuzzer, or by a seed.

use hugemm_base::random::Random;

/// What decides.
#[derive(Debug)]
pub enum Choices<'a> {
    /// Bytes; zeroes when they have run out.
    Bytes(std::slice::Iter<'a, u8>),
    /// Random numbers, without an end.
    Random(Random),
}

impl Choices<'_> {
    /// A number below a limit; 0 for none. Two bytes.
    pub fn below(&mut self, limit: u64) -> u64 {
        match self {
            Choices::Bytes(bytes) => {
                let mut next = || u64::from(bytes.next().copied().unwrap_or(0));
                (next() << 8 | next()) % limit.max(1)
            }
            Choices::Random(random) => random.below(limit.max(1)),
        }
    }

    /// Whether all bytes have been used.
    pub fn are_over(&self) -> bool {
        matches!(self, Choices::Bytes(bytes) if bytes.len() == 0)
    }
}
