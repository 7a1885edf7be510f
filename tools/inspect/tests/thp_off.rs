//! A process that gets no transparent huge pages although every setting says that it should: verification must notice.
//! One test only, for it changes the whole process.

use hugemm_inspect::memory::{MemoryError, Region, RegionBacking, RegionRequest};
use hugemm_inspect::roots::Roots;
use std::ops::ControlFlow;

#[test]
fn small_pages_in_place_of_huge_ones_are_an_error() {
    rustix::thread::disable_transparent_huge_pages(true).unwrap();
    let request = RegionRequest { bytes: 8 << 20, backing: RegionBacking::Thp, ..Default::default() };
    let err = Region::allocate(&request).unwrap_err();
    assert!(matches!(err, MemoryError::ThpOffForProcess | MemoryError::NoThp { .. } | MemoryError::ThpNever { .. }));

    // The same, from a made-up report of a machine where all is well.
    let dir = std::env::temp_dir().join(format!("hugemm-thp-off-{}", std::process::id()));
    let put = |path: &str, content: &str| {
        let path = dir.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    };
    put("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n");
    put("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
    put("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
    let result = Region::allocate_on(&Roots::below(&dir), &request, |_| ControlFlow::Continue(()));
    std::fs::remove_dir_all(&dir).unwrap();
    match result {
        Err(MemoryError::TooFewHuge { verified, required, .. }) => {
            assert_eq!((verified.huge_bytes, verified.resident_bytes, required), (0, 8 << 20, 0.95));
        }
        // A kernel built without transparent huge pages refuses the advice.
        Err(MemoryError::Call { call: "madvise(MADV_HUGEPAGE)", .. }) => {}
        other => panic!("{other:?}"),
    }
}
