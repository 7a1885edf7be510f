//! A request, checked: which pages, from where, on which node.

use super::error::call_error;
use super::{MemoryError, REQUIRED_THP_SHARE, RegionBacking, RegionRequest};
use crate::limits::check_hugetlb_cgroups;
use crate::pool::{HugetlbPool, PoolGuard};
use crate::roots::Roots;
use crate::topology::{ThpSettings, node_ids};
use hugemm_base::PageSize;
use hugemm_host::mmap::{CallFailed, Kind, Mmap};
use rustix::io::Errno;

/// A request that has been checked.
#[derive(Clone, Debug)]
pub(super) struct RegionPlan {
    pub(super) backing: RegionBacking,
    pub(super) page: u64,
    pub(super) required: f64,
    pub(super) bytes: u64,
}

impl RegionPlan {
    pub(super) fn check(roots: &Roots, request: &RegionRequest) -> Result<Self, MemoryError> {
        let &RegionRequest { bytes, backing, .. } = request;
        let page = match backing {
            RegionBacking::Small => rustix::param::page_size() as u64,
            RegionBacking::Hugetlb(PageSize::Size4K) => return Err(MemoryError::NotHuge(PageSize::Size4K)),
            RegionBacking::Hugetlb(size) => size.bytes(),
            RegionBacking::Thp => thp_size(roots)?,
        };
        let required = match backing {
            RegionBacking::Small => 0.0,
            RegionBacking::Thp => request.required_share.unwrap_or(REQUIRED_THP_SHARE),
            RegionBacking::Hugetlb(_) => request.required_share.unwrap_or(1.0),
        };
        if !(0.0..=1.0).contains(&required) {
            return Err(MemoryError::BadShare(required));
        }
        if bytes == 0 {
            return Err(MemoryError::ZeroSize);
        }
        // More than half of the addresses there are can never be mapped; and sums below cannot overflow.
        if usize::try_from(bytes).is_err() || bytes > u64::MAX / 4 {
            return Err(MemoryError::Overflow { bytes });
        }
        if bytes % page != 0 {
            return Err(MemoryError::Misaligned { bytes, page_size: page });
        }
        Ok(Self { backing, page, required, bytes })
    }

    pub(super) fn map(&self, kind: Kind) -> Result<Mmap, CallFailed> {
        let natural = if self.bytes >= 1 << 30 { 1 << 30 } else { 2 << 20 };
        let align = self.page.max(natural) as usize;
        Mmap::new(self.bytes as usize, align, rustix::param::page_size(), kind)
    }
}

/// The size of transparent huge pages, if this process may have any.
fn thp_size(roots: &Roots) -> Result<u64, MemoryError> {
    let dir = roots.sys.join("kernel/mm/transparent_hugepage");
    let settings = ThpSettings::read(roots);
    let (Some((deciding, file)), Some(size)) = (settings.deciding(), settings.page_bytes) else {
        return Err(MemoryError::NoThp { path: dir.join("enabled") });
    };
    if deciding == "never" {
        return Err(MemoryError::ThpNever { path: dir.join(file) });
    }
    if settings.off_for_process {
        return Err(MemoryError::ThpOffForProcess);
    }
    Ok(size)
}

/// The node to bind to, or `None` where there is only one to choose.
pub(super) fn bind_to(roots: &Roots, node: Option<u32>) -> Result<Option<u32>, MemoryError> {
    let Some(node) = node else { return Ok(None) };
    let mut existing = node_ids(roots);
    if existing.is_empty() {
        existing.push(0);
    }
    if !existing.contains(&node) {
        return Err(MemoryError::NoSuchNode { node, existing });
    }
    Ok((existing.len() > 1).then_some(node))
}

pub(super) fn map_hugetlb(
    roots: &Roots,
    plan: &RegionPlan,
    size: PageSize,
    request: &RegionRequest,
) -> Result<(Option<PoolGuard>, Mmap), MemoryError> {
    let pool = HugetlbPool::at(roots.clone());
    let node = request.node;
    let pages = plan.bytes / plan.page;
    // First of all, so that a size that does not exist is the error that is told.
    pool.status(size, node)?;
    check_hugetlb_cgroups(roots, plan.page, plan.bytes)?;
    let guard = if request.raise_pool { Some(pool.ensure(size, pages, node)?) } else { None };
    match plan.map(Kind::Hugetlb { shift: plan.page.trailing_zeros() }) {
        Ok(mapping) => Ok((guard, mapping)),
        Err(CallFailed { call: "mmap(MAP_HUGETLB)", errno: Errno::NOMEM }) => {
            // Put the pool back before counting what is free without us.
            drop(guard);
            let free = pool.status(size, node)?.unreserved();
            let command = pool.command_to_add(size, pages.saturating_sub(free), node)?;
            Err(MemoryError::PoolShort { size, free, wanted: pages, command })
        }
        Err(e) => Err(call_error(e, plan.bytes)),
    }
}
