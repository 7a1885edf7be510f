//! Random operations against the model: every answer, and the sum of free and used after every step.

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..if cfg!(miri) { ProptestConfig::with_cases(2) } else { ProptestConfig::default() } })]

    #[test]
    fn random_operations_agree_with_the_model(data in proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 60 } else { 1500 })) {
        crate::support::ops::run(&data);
    }
}
