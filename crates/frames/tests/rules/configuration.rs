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
        let config = FramesConfig { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
        let bytes = Frames::<Plain>::required_bytes(&config).expect("valid").size() as u64;
        let per_mille = bytes * 100_000 / (gib * GIB * 4096);
        assert!(per_mille <= 1600, "{per_mille} per 100 000 of {gib} GiB");
    }
}

#[test]
fn bad_configurations_are_refused() {
    let need =
        |arenas: &[ArenaSpec]| Frames::<Plain>::required_bytes(&FramesConfig { arenas, cpus: 1, cpu_nodes: &[] });
    assert_eq!(need(&[]), Err(FramesConfigError::Empty));
    assert_eq!(need(&[arena(0, 0, 0)]), Err(FramesConfigError::Empty));
    assert_eq!(need(&[arena(0, 10, 0), arena(9, 10, 0)]), Err(FramesConfigError::Overlap(Pfn::new(9))));
    assert_eq!(need(&[arena(50, 10, 0), arena(9, 10, 0)]), Err(FramesConfigError::Overlap(Pfn::new(9))));
    let arenas = [arena(0, 512, 0)];
    let config = FramesConfig { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
    let mut small = vec![0_u8; 4096];
    // SAFETY: the memory is too small, which is found out before it is used.
    let result = unsafe { Frames::new(&config, Plain(NoFaults), small.as_mut_ptr(), small.len()) };
    assert!(matches!(result, Err(FramesConfigError::Memory { .. })));
}
