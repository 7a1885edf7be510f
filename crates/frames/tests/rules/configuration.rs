//! What a manager can be made of, and how much it needs.

use super::GIB;
use super::support::arena;
use hugemm_base::Pfn;
use hugemm_base::inject::NoFaults;
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, FramesConfigError, Plain};

#[test]
fn metadata_is_within_its_limits() {
    for gib in [1, 8, 64, 1024] {
        let arenas = [arena(GIB, gib * GIB, 0)];
        let config = FramesConfig::new(&arenas, 1);
        let bytes = Frames::<Plain>::required_bytes(&config).expect("valid").size() as u64;
        let per_mille = bytes * 100_000 / (gib * GIB * 4096);
        assert!(per_mille <= 1600, "{per_mille} per 100 000 of {gib} GiB");
    }
}

/// Small arenas need more: per 100 000 of 64 KiB, 2 MiB, 128 MiB and 1 GiB, at first and later.
#[test]
fn small_arenas_need_more() {
    let part = |bytes: usize, pages: u64| bytes as u64 * 100_000 / (pages * 4096);
    let sizes = [16, 512, 1 << 15, GIB];
    let given = sizes.map(|pages| {
        // Without what a manager needs once.
        let need = |arenas: &[ArenaSpec]| {
            let config = FramesConfig::new(arenas, 0);
            Frames::<Plain>::required_bytes(&config).expect("valid").size()
        };
        let one = [arena(0, pages, 0), arena(4 * GIB, pages, 0)];
        part(need(&one) - need(&one[..1]), pages)
    });
    let added =
        sizes.map(|pages| part(Frames::<Plain>::added_bytes(&arena(0, pages, 0)).expect("valid").size(), pages));
    assert_eq!((given, added), ([8789, 1788, 1599, 1596], [16_113, 2017, 1602, 1596]));
}

#[test]
fn bad_configurations_are_refused() {
    let need = |arenas: &[ArenaSpec]| Frames::<Plain>::required_bytes(&FramesConfig::new(arenas, 1));
    assert_eq!(need(&[]), Err(FramesConfigError::Empty));
    assert_eq!(need(&[arena(0, 0, 0)]), Err(FramesConfigError::Empty));
    assert_eq!(need(&[arena(0, 10, 0), arena(9, 10, 0)]), Err(FramesConfigError::Overlap(Pfn::new(9))));
    assert_eq!(need(&[arena(50, 10, 0), arena(9, 10, 0)]), Err(FramesConfigError::Overlap(Pfn::new(9))));
    let arenas = [arena(0, 512, 0)];
    let config = FramesConfig::new(&arenas, 1);
    let mut small = vec![0_u8; 4096];
    // SAFETY: the memory is too small, which is found out before it is used.
    let result = unsafe { Frames::new(&config, Plain(NoFaults), small.as_mut_ptr(), small.len()) };
    assert!(matches!(result, Err(FramesConfigError::Memory { .. })));
}
