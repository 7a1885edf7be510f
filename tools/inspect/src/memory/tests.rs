use super::*;
use crate::roots::testing::FakeMachine;

const MIB: u64 = 1 << 20;

fn request(bytes: u64, backing: RegionBacking) -> RegionRequest {
    RegionRequest { bytes, backing, ..Default::default() }
}

fn fake() -> FakeMachine {
    let m = FakeMachine::new();
    m.file("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nMemFree: 1048576 kB\n")
        .file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        .file("sys/kernel/mm/transparent_hugepage/defrag", "always defer defer+madvise [madvise] never\n")
        .file("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
    m
}

fn allocate_on(m: &FakeMachine, request: &RegionRequest) -> Result<Region> {
    Region::allocate_on(&m.roots(), request, |_| ())
}

#[test]
fn smaps_are_read() {
    let smaps = "\
1000-2000 r--p 00000000 00:00 0
Rss:                   4 kB
KernelPageSize:        4 kB
200000-600000 rw-p 00000000 00:00 0
Size:               4096 kB
KernelPageSize:        4 kB
Rss:                3072 kB
AnonHugePages:      2048 kB
Private_Hugetlb:       0 kB
VmFlags: rd wr mr mw me ac hg
600000-800000 rw-p 00000000 00:10 7      /anon_hugepage (deleted)
KernelPageSize:     2048 kB
Rss:                   0 kB
Private_Hugetlb:    2048 kB
";
    let thp = Seen::read(smaps, 0x200000, 0x600000).unwrap();
    assert_eq!(thp, Seen { resident: 3 * MIB, transparent: 2 * MIB, hugetlb: 0, page: 4096 });
    let huge = Seen::read(smaps, 0x600000, 0x800000).unwrap();
    assert_eq!(huge, Seen { resident: 0, transparent: 0, hugetlb: 2 * MIB, page: 2 * MIB });
    assert!(Seen::read(smaps, 0x200000, 0x800000).unwrap_err().contains("different page sizes"));
    assert!(Seen::read(smaps, 0x200000, 0x400000).unwrap_err().contains("merged"));
    assert!(Seen::read(smaps, 0x900000, 0xa00000).unwrap_err().contains("0 of 1048576"));
    assert!(Seen::read("", 0, 0).is_err());
}

#[test]
fn sizes_that_make_no_sense_have_errors_of_their_own() {
    let m = fake();
    for (bytes, backing, why) in [
        (0, RegionBacking::Thp, "a region of 0 bytes"),
        (3 * MIB, RegionBacking::Thp, "not a multiple of the page size, 2 MiB; the next size up is 4194304"),
        (4097, RegionBacking::Small, "not a multiple of the page size"),
        (u64::MAX, RegionBacking::Small, "than this machine's address space holds"),
        (1 << 62, RegionBacking::Small, "than this machine's address space holds"),
        (MIB, RegionBacking::Hugetlb(PageSize::Size4K), "4KB is no hugetlb page size"),
        (1 << 40, RegionBacking::Thp, "8 GiB of memory is available"),
    ] {
        let err = allocate_on(&m, &request(bytes, backing)).unwrap_err().to_string();
        assert!(err.contains(why), "{err}");
    }
    let node = RegionRequest { node: Some(9), ..request(2 * MIB, RegionBacking::Thp) };
    let err = allocate_on(&m, &node).unwrap_err().to_string();
    assert!(err.contains("NUMA node 9 does not exist"), "{err}");
}

#[test]
fn transparent_huge_pages_that_are_off_are_named() {
    let m = fake();
    m.file("proc/self/status", "THP_enabled:\t0\n");
    let err = allocate_on(&m, &request(2 * MIB, RegionBacking::Thp)).unwrap_err();
    assert!(err.to_string().contains("off for this process"), "{err}");

    m.file("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    let err = allocate_on(&m, &request(2 * MIB, RegionBacking::Thp)).unwrap_err().to_string();
    let path = m.path().join("sys/kernel/mm/transparent_hugepage/enabled");
    assert!(err.contains(&format!("`echo madvise | sudo tee {}`", path.display())), "{err}");

    std::fs::remove_file(&path).unwrap();
    let err = allocate_on(&m, &request(2 * MIB, RegionBacking::Thp)).unwrap_err();
    assert!(err.to_string().contains("this kernel has no transparent huge pages"), "{err}");
}

#[test]
fn a_cgroup_limit_is_met_before_anything_is_taken() {
    let m = fake();
    let mount = m.path().join("cg");
    m.file("proc/self/cgroup", "0::/\n")
        .file("proc/self/mountinfo", &format!("29 22 0:26 / {} rw - cgroup2 none rw\n", mount.display()))
        .file("cg/memory.max", "104857600\n")
        .file("cg/memory.current", "0\n");
    let err = allocate_on(&m, &request(40 * MIB, RegionBacking::Small)).unwrap_err();
    assert!(err.to_string().contains("memory.max = 100 MiB leaves"), "{err}");
}

#[test]
fn memory_that_becomes_short_is_given_back() {
    let m = fake();
    let mut calls = 0;
    let result = Region::allocate_on(&m.roots(), &request(96 * MIB, RegionBacking::Small), |done| {
        calls += 1;
        if done > 0 {
            m.file("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 300000 kB\n");
        }
    });
    let err = result.unwrap_err().to_string();
    assert!(err.starts_with("memory became short after 64 MiB of 96 MiB"), "{err}");
    assert_eq!(calls, 2);
}

#[test]
fn the_caller_hears_how_far_it_is() {
    let mut told = Vec::new();
    Region::allocate_on(&Roots::default(), &request(96 * MIB, RegionBacking::Small), |done| told.push(done)).unwrap();
    assert_eq!(told, [0, CHUNK, 96 * MIB]);
}

#[test]
fn causes_of_a_shortage_are_named() {
    let m = fake();
    m.file(
        "proc/buddyinfo",
        "Node 0, zone   Normal  14467   4366   1583    601    242     94     49     17      7      2   1\n",
    );
    let cause = shortage_cause(&m.roots(), RegionBacking::Thp);
    assert!(cause.contains("8 MiB of 1 GiB free lie in runs of 2 MiB"), "{cause}");
    m.file("sys/kernel/mm/transparent_hugepage/defrag", "always defer defer+madvise madvise [never]\n");
    let cause = shortage_cause(&m.roots(), RegionBacking::Thp);
    assert!(cause.contains("defrag is never"), "{cause}");
}

#[test]
fn shares_are_never_rounded_up() {
    let v = Verified { huge_bytes: 9999, resident_bytes: 10000, total_bytes: 10000, page_size: 4096 };
    assert_eq!(Percent(v.huge_share()).to_string(), "99.9 %");
    assert_eq!(Percent(1.0).to_string(), "100 %");
    assert_eq!(Verified { total_bytes: 0, ..v }.huge_share(), 0.0);
}
