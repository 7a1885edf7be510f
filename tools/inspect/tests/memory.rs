//! Real memory of the running machine, at most 256 MiB at a time. Where the machine has no huge pages to give, the
//! error is what is tested.

use hugemm_base::PageSize;
use hugemm_inspect::memory::{Region, RegionBacking, RegionRequest};
use hugemm_inspect::pool::HugetlbPool;

const MIB: u64 = 1 << 20;

fn request(bytes: u64, backing: RegionBacking) -> RegionRequest {
    RegionRequest { bytes, backing, ..Default::default() }
}

/// It is one of these that the machine does not allow.
#[track_caller]
fn says(error: &anyhow::Error, any: &[&str]) {
    let why = error.to_string();
    assert!(any.iter().any(|words| why.contains(words)), "{why}");
}

/// Transparent huge pages can be off or short on the machine that runs the tests.
fn thp(bytes: u64) -> Option<Region> {
    match Region::allocate(&request(bytes, RegionBacking::Thp)) {
        Ok(region) => Some(region),
        Err(error) => {
            says(&error, &["no transparent huge pages", "huge pages are off", "came in huge pages"]);
            None
        }
    }
}

#[test]
fn transparent_huge_pages_are_verified() {
    let Some(mut region) = thp(128 * MIB) else { return };
    let verified = region.verified();
    assert_eq!((verified.total_bytes, verified.resident_bytes), (128 * MIB, 128 * MIB));
    assert!(verified.huge_share() >= 0.95, "{verified}");
    assert_eq!(region.as_ptr().as_ptr() as usize % (2 << 20), 0);
    assert_eq!((region.len() as u64, verified.page_size), (128 * MIB, 2 * MIB));
    assert!(region.as_mut_slice().iter().step_by(4096).all(|&b| b == 0));
}

#[test]
fn neighbours_are_told_apart() {
    let Some(a) = thp(4 * MIB) else { return };
    let Some(mut b) = thp(4 * MIB) else { return };
    let Some(c) = thp(4 * MIB) else { return };
    drop(a);
    drop(c);
    assert_eq!(b.verify().unwrap().total_bytes, 4 * MIB);
}

#[test]
fn a_gibibyte_is_aligned_to_itself_and_populated_on_demand() {
    let unpopulated = RegionRequest { populate: false, ..request(1 << 30, RegionBacking::Small) };
    let mut region = match Region::allocate(&unpopulated) {
        Err(e) if e.to_string().contains("ask for less") => return println!("not enough memory here: {e}"),
        other => other.unwrap(),
    };
    assert_eq!(region.as_ptr().as_ptr() as usize % (1 << 30), 0);
    assert_eq!(region.verified().resident_bytes, 0);
    region.as_mut_slice()[4096 * 5] = 1;
    assert_eq!(region.verify().unwrap().resident_bytes, 4096);
}

#[test]
fn small_means_small() {
    let region = Region::allocate(&request(8 * MIB, RegionBacking::Small)).unwrap();
    assert_eq!(region.verified().huge_bytes, 0);
    assert_eq!(region.verified().resident_bytes, 8 * MIB);
}

#[test]
fn a_node_that_exists_is_fine() {
    let on_node = RegionRequest { node: Some(0), ..request(2 * MIB, RegionBacking::Small) };
    match Region::allocate(&on_node) {
        Ok(region) => assert_eq!(region.verified().resident_bytes, 2 * MIB),
        // Node 0 can be missing, out of bounds or not to be chosen.
        Err(error) => says(&error, &["does not exist", "mbind of"]),
    }
}

#[test]
fn more_than_the_machine_has_is_refused() {
    let err = Region::allocate(&request(1 << 50, RegionBacking::Small)).unwrap_err();
    says(&err, &["ask for less"]);
}

/// The numbers of a pool are the whole machine's: tests that change or compare them take turns.
static POOL: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn hugetlb(size: PageSize, bytes: u64) {
    let _turn = POOL.lock().unwrap_or_else(|e| e.into_inner());
    let pool = HugetlbPool::new();
    let raised = RegionRequest { raise_pool: true, ..request(bytes, RegionBacking::Hugetlb(size)) };
    match Region::allocate(&raised) {
        Ok(mut region) => {
            let verified = region.verified();
            assert_eq!((verified.huge_bytes, verified.page_size), (bytes, size.bytes()));
            assert_eq!(region.as_ptr().as_ptr() as u64 % size.bytes(), 0);
            region.as_mut_slice()[bytes as usize - 1] = 1;
            let during = pool.status(size, None).unwrap();
            drop(region);
            let after = pool.status(size, None).unwrap();
            // What the region had been given is given back, at the least what others left of it.
            assert!(after.total <= during.total, "{during:?} {after:?}");
        }
        Err(error) => says(&error, &["sudo tee", "no hugetlb pool of", "the kernel gave", "cannot be raised"]),
    }
}

#[test]
fn hugetlb_pages_of_2_mib() {
    hugetlb(PageSize::Size2M, 16 * MIB);
}

#[test]
#[ignore = "one first touch of 1 GiB takes seconds in a virtual machine"]
fn hugetlb_pages_of_1_gib() {
    hugetlb(PageSize::Size1G, 1 << 30);
}

#[test]
fn without_leave_to_raise_the_pool_the_command_is_named() {
    let _turn = POOL.lock().unwrap_or_else(|e| e.into_inner());
    let Ok(status) = HugetlbPool::new().status(PageSize::Size2M, None) else { return };
    let bytes = (status.unreserved() + status.overcommit + 1) * 2 * MIB;
    match Region::allocate(&RegionRequest {
        populate: false,
        ..request(bytes, RegionBacking::Hugetlb(PageSize::Size2M))
    }) {
        Err(error) => says(&error, &["hugepages-2048kB/nr_hugepages", "the cgroup limit"]),
        Ok(region) => panic!("{region:?}"),
    }
}
