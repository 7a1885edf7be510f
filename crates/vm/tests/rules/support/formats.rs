//! Rules that hold on both formats: one whose entries are x86-64's all the same, and arm64's.

/// A test of each: `fn name: rule how;`, where how is
///
/// - `()`: the rule is run;
/// - `(each SOME)`: it is told each of those;
/// - `(rig)`: it is given a rig whose pages can be paged out; `(first)`: and the first CPU of it;
/// - `(stale)`: it is told a seed, and says whether another CPU still had an old translation: some had.
macro_rules! on_both_formats {
    ($($(#[$about:meta])* fn $name:ident: $rule:ident $how:tt;)+) => {$(
        $(#[$about])*
        #[test]
        fn $name() {
            $crate::support::on_both_formats!(@ $how $rule, $crate::support::Metered, hugemm_paging::Aarch64);
        }
    )+};
    (@ (each $all:expr) $rule:ident, $($format:ty),+) => {
        for each in $all {
            $($rule::<$format>(each);)+
        }
    };
    (@ (rig) $rule:ident, $($format:ty),+) => {
        let none = $crate::support::no_faults();
        $($crate::support::with_format::<$format, true>(16, 2, 5, &none, |rig| $rule(rig));)+
    };
    (@ (first) $rule:ident, $($format:ty),+) => {
        $($crate::support::as_first::<$format, true>(16, 2, 5, |rig, cx| $rule(rig, cx));)+
    };
    (@ (stale) $rule:ident, $($format:ty),+) => { $crate::support::some_are_stale([$($rule::<$format>),+]) };
    (@ () $rule:ident, $($format:ty),+) => { $($rule::<$format>();)+ };
}
pub(crate) use on_both_formats;

/// Runs a test of each format with twelve seeds; it says whether another CPU still had an old translation. TLBs forget at random, so some
/// had.
pub fn some_are_stale(tests: [fn(u64) -> bool; 2]) {
    let stale = tests.map(|test| (0..12).filter(|seed| test(*seed)).count());
    assert!(stale.into_iter().all(|seeds| seeds > 0), "{stale:?}");
}
