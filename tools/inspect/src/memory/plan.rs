//! A request, checked: which pages, from where, on which node.

use super::error::call_error;
use super::{REQUIRED_THP_SHARE, RegionBacking, RegionRequest};
use crate::limits::check_hugetlb_cgroups;
use crate::pool::{HugetlbPool, PoolGuard};
use crate::roots::{Human, Roots};
use crate::topology::{ThpSettings, node_ids};
use anyhow::{Result, bail};
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
    pub(super) fn check(roots: &Roots, request: &RegionRequest) -> Result<Self> {
        let &RegionRequest { bytes, backing, .. } = request;
        let page = match backing {
            RegionBacking::Small => rustix::param::page_size() as u64,
            RegionBacking::Hugetlb(PageSize::Size4K) => {
                bail!("4KB is no hugetlb page size; use 2MB or 1GB, or small pages")
            }
            RegionBacking::Hugetlb(size) => size.bytes(),
            RegionBacking::Thp => thp_size(roots)?,
        };
        let required = match backing {
            RegionBacking::Small => 0.0,
            RegionBacking::Thp => REQUIRED_THP_SHARE,
            RegionBacking::Hugetlb(_) => 1.0,
        };
        if bytes == 0 {
            bail!("a region of 0 bytes was asked for; ask for at least one page");
        }
        // More than half of the addresses there are can never be mapped; and sums below cannot overflow.
        if usize::try_from(bytes).is_err() || bytes > u64::MAX / 4 {
            bail!("{bytes} bytes are more than this machine's address space holds; ask for less");
        }
        if bytes % page != 0 {
            let (up, page) = (bytes.next_multiple_of(page), Human(page));
            bail!("{bytes} bytes are not a multiple of the page size, {page}; the next size up is {up}");
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
fn thp_size(roots: &Roots) -> Result<u64> {
    let dir = roots.sys.join("kernel/mm/transparent_hugepage");
    let settings = ThpSettings::read(roots);
    let (Some((deciding, file)), Some(size)) = (settings.deciding(), settings.page_bytes) else {
        let file = dir.join("enabled");
        bail!("this kernel has no transparent huge pages ({} is missing); use a hugetlb pool", file.display());
    };
    if deciding == "never" {
        let file = dir.join(file);
        let file = file.display();
        bail!(
            "transparent huge pages are off ({file} is never); run `echo madvise | sudo tee {file}`, or use a hugetlb pool"
        );
    }
    if settings.off_for_process {
        bail!(
            "transparent huge pages are off for this process (prctl PR_SET_THP_DISABLE, inherited from its parent); start \
             it from a plain shell, or use a hugetlb pool"
        );
    }
    Ok(size)
}

/// The node to bind to, or `None` where there is only one to choose.
pub(super) fn bind_to(roots: &Roots, node: Option<u32>) -> Result<Option<u32>> {
    let Some(node) = node else { return Ok(None) };
    let mut existing = node_ids(roots);
    if existing.is_empty() {
        existing.push(0);
    }
    if !existing.contains(&node) {
        bail!("NUMA node {node} does not exist; the nodes here are {existing:?}");
    }
    Ok((existing.len() > 1).then_some(node))
}

pub(super) fn map_hugetlb(
    roots: &Roots,
    plan: &RegionPlan,
    size: PageSize,
    request: &RegionRequest,
) -> Result<(Option<PoolGuard>, Mmap)> {
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
            bail!(
                "the pool of {size} pages has {free} free pages and {pages} are needed; allow raising it, or run `{command}`"
            )
        }
        Err(e) => Err(call_error(e, plan.bytes)),
    }
}
