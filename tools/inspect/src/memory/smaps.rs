//! The kernel's own report of what a range of addresses is made of.

use crate::roots::kib;

/// What smaps says of a range of addresses, in bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) resident: u64,
    pub(super) transparent: u64,
    pub(super) hugetlb: u64,
    /// The kernel's page size; 0 if parts differ.
    pub(super) page: u64,
}

impl Seen {
    /// Sums up the areas that make up `start..end`. They must cover it and not reach beyond it.
    pub(super) fn read(smaps: &str, start: u64, end: u64) -> Result<Self, String> {
        let mut seen = Seen::default();
        let mut covered = 0;
        let mut inside = false;
        for line in smaps.lines() {
            if let Some((from, to)) = area(line) {
                inside = from < end && to > start;
                if inside && (from < start || to > end) {
                    return Err(format!("the kernel merged the region with its neighbour at {from:x}-{to:x}"));
                }
                covered += if inside { to - from } else { 0 };
            } else if inside {
                let Some((key, value)) = line.split_once(':') else { continue };
                let Some(bytes) = kib(value) else { continue };
                match key {
                    "KernelPageSize" if seen.page == 0 || seen.page == bytes => seen.page = bytes,
                    "KernelPageSize" => return Err("parts of the region have different page sizes".into()),
                    "Rss" => seen.resident += bytes,
                    "AnonHugePages" => seen.transparent += bytes,
                    "Private_Hugetlb" | "Shared_Hugetlb" => seen.hugetlb += bytes,
                    _ => {}
                }
            }
        }
        if covered != end - start || seen.page == 0 {
            return Err(format!("smaps describes {covered} of {} bytes", end - start));
        }
        Ok(seen)
    }
}

/// The addresses of a line of smaps that starts an area: `7f00-7f80 rw-p ...`.
fn area(line: &str) -> Option<(u64, u64)> {
    let (from, to) = line.split_once(' ')?.0.split_once('-')?;
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
}
