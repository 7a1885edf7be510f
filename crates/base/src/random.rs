//! Random numbers for tests, models and measurements; nothing secret.

/// Random numbers, the same ones for the same seed: SplitMix64, for which any seed is as good as any other, also one beside it.
#[derive(Clone, Debug, Default)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `limit`; 0 if that is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(limit)) >> 64) as u64
    }
}

/// A word in which every bit depends on every bit of `word`: the last steps of the generator.
pub const fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
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
