//! A process that gets no transparent huge pages although every setting says that it should: verification must notice.
//! One test only, for it changes the whole process.

use hugemm_inspect::memory::{Region, RegionBacking, RegionRequest};
use hugemm_inspect::roots::Roots;

#[test]
fn small_pages_in_place_of_huge_ones_are_an_error() {
    rustix::thread::disable_transparent_huge_pages(true).unwrap();
    let request = RegionRequest { bytes: 8 << 20, backing: RegionBacking::Thp, ..Default::default() };
    let err = Region::allocate(&request).unwrap_err().to_string();
    assert!(err.contains("huge pages are off") || err.contains("no transparent huge pages"), "{err}");

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
    put("proc/sys/vm/compact_memory", "0");
    let result = Region::allocate_on(&Roots::below(&dir), &request, |_| ());
    let compacted = std::fs::read_to_string(dir.join("proc/sys/vm/compact_memory")).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let err = result.unwrap_err().to_string();
    // A kernel built without transparent huge pages refuses the advice.
    let refused = err.starts_with("madvise(MADV_HUGEPAGE) of");
    assert!(refused || compacted == "1", "the kernel was not asked to put memory together: {compacted:?}");
    assert!(refused || err.starts_with("only 0 % of 8 MiB came in huge pages, 95 % are required"), "{err}");
}
