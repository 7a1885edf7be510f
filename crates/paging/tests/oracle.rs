//! Random sequences of operations against a map of single pages, for every entry format.

mod support;

use hugemm_paging::{Aarch64, X86_64, X86_64La57};
use proptest::prelude::*;
use support::ops::op;
use support::oracle::check;

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 192 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn x86_64_agrees_with_single_pages(ops in prop::collection::vec(op(), 1..40)) {
        check::<X86_64>(ops);
    }

    #[test]
    fn aarch64_agrees_with_single_pages(ops in prop::collection::vec(op(), 1..40)) {
        check::<Aarch64>(ops);
    }

    #[test]
    fn five_levels_agree_with_single_pages(ops in prop::collection::vec(op(), 1..20)) {
        check::<X86_64La57>(ops);
    }
}
