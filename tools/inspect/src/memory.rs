//! Regions of real memory whose pages are what they are said to be.
//!
//! A measurement of huge pages on memory that the kernel quietly gave in 4 KiB pages is worthless, and nothing in the
//! program would show it. So a [`Region`] is populated and then *verified* from the kernel's own report
//! (`/proc/self/smaps`): where fewer huge pages came than were required, everything is given back and the error names
//! the cause and the way out.
//!
//! ```no_run
//! use hugemm_inspect::memory::{RegionBacking, Region, RegionRequest};
//!
//! let region = Region::allocate(&RegionRequest { bytes: 4 << 30, backing: RegionBacking::Thp, ..Default::default() })?;
//! println!("{} at {:p}: {}", region.len(), region.as_ptr(), region.verified());
//! # anyhow::Ok(())
//! ```
//!
//! Nothing is taken that the machine, a cgroup or the process cannot spare ([`Limits`]), and that is checked again
//! between chunks of 64 MiB, which are also the points where Ctrl-C ([`crate::interrupt`]) can stop it.

mod error;
mod plan;
mod smaps;

use crate::interrupt;
use crate::limits::Limits;
use crate::pool::PoolGuard;
use crate::roots::{Human, Roots};
use anyhow::{Result, anyhow, bail};
use error::{call_error, shortage_cause};
use hugemm_base::PageSize;
use hugemm_host::mmap::{Kind, Mmap};
use plan::{RegionPlan, bind_to, map_hugetlb};
use rustix::io::Errno;
use smaps::Seen;
use std::fmt;
use std::ptr::NonNull;

/// How much is populated between two cancellation points, in bytes (one page, if that is larger).
pub const CHUNK: u64 = 64 << 20;

/// The share of transparent huge pages that is required. Of hugetlb pages it is all.
pub const REQUIRED_THP_SHARE: f64 = 0.95;

/// What pages a region is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegionBacking {
    /// Transparent huge pages of private anonymous memory: no privilege and no pool needed. 2 MiB on x86-64.
    #[default]
    Thp,
    /// Pages of a hugetlb pool: [`PageSize::Size2M`] or [`PageSize::Size1G`].
    Hugetlb(PageSize),
    /// Base pages only, whatever the system's setting of transparent huge pages: for comparisons.
    Small,
}

/// What to allocate. `RegionRequest { bytes, ..Default::default() }` asks for populated transparent huge pages.
#[derive(Clone, Debug, PartialEq)]
pub struct RegionRequest {
    /// The size, a multiple of the page size.
    pub bytes: u64,
    /// What pages to use.
    pub backing: RegionBacking,
    /// Populate and verify now (the default). Otherwise pages come on first touch, and nothing is known of them until
    /// [`Region::verify`].
    pub populate: bool,
    /// Take memory from this NUMA node only.
    pub node: Option<u32>,
    /// Whether the hugetlb pool may be raised for this region. It is put back when the region is dropped.
    pub raise_pool: bool,
}

impl Default for RegionRequest {
    fn default() -> Self {
        Self { bytes: 0, backing: RegionBacking::Thp, populate: true, node: None, raise_pool: false }
    }
}

/// What the kernel reports of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Bytes held in pages of `page_size`. For [`RegionBacking::Small`]: in huge pages, which is 0.
    pub huge_bytes: u64,
    /// Bytes that have memory at all.
    pub resident_bytes: u64,
    /// The region's size.
    pub total_bytes: u64,
    /// The page size that was asked for, in bytes.
    pub page_size: u64,
}

impl Verified {
    /// The share of the region in huge pages, 0 to 1.
    pub fn huge_share(&self) -> f64 {
        if self.total_bytes == 0 { 0.0 } else { self.huge_bytes as f64 / self.total_bytes as f64 }
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} resident, {} in huge pages ({}), page size {}",
            Human(self.resident_bytes),
            Human(self.total_bytes),
            Human(self.huge_bytes),
            Percent(self.huge_share()),
            Human(self.page_size)
        )
    }
}

/// A share for people, rounded down so that 99.99 % never reads as 100 %.
struct Percent(f64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", (self.0 * 1000.0).floor() / 10.0)
    }
}

/// What an attempt has got; where that `is_short` of huge pages it goes, the kernel puts its free memory together, which takes seconds, and
/// the attempt is made `again`: what the first one reclaimed is free then.
///
/// # Errors
///
/// The attempt's.
pub fn again_if_short<T>(
    roots: &Roots,
    mut attempt: impl FnMut(bool) -> Result<T>,
    is_short: impl Fn(&T) -> bool,
) -> Result<T> {
    let first = attempt(false)?;
    if !is_short(&first) {
        return Ok(first);
    }
    drop(first);
    // Whoever may not is told how, should they come short again.
    let _ = std::fs::write(roots.proc.join("sys/vm/compact_memory"), "1");
    attempt(true)
}

/// A region of private, readable and writable memory, given back on drop.
///
/// It starts at a multiple of 1 GiB if it is that large, else of 2 MiB (or the page size, if larger). A page that
/// faults on access lies on either side. The region is not inherited by child processes and is left out of core dumps.
///
/// The region may be shared between threads: its bytes are reached through raw pointers, under the caller's rules.
#[derive(Debug)]
pub struct Region {
    // Dropped in this order: first the memory, then the pool that it came from is put back.
    mapping: Mmap,
    _pool: Option<PoolGuard>,
    plan: RegionPlan,
    verified: Verified,
    roots: Roots,
}

impl Region {
    /// Allocates, populates and verifies a region. Ctrl-C stops it ([`crate::interrupt`]).
    ///
    /// Populating costs what the kernel's clearing costs: about 0.1 s per GiB where memory was touched before, and up
    /// to 3 s per GiB on the first touch inside a virtual machine.
    ///
    /// # Errors
    /// What could not be had, and the way out; everything taken has been given back by then.
    pub fn allocate(request: &RegionRequest) -> Result<Self> {
        Self::allocate_on(&Roots::default(), request, |_| ())
    }

    /// The same with settings, limits and pools read from the given roots. The memory itself, and the report by which it is verified,
    /// are always the running process's own. `on_progress` hears of the bytes populated before each chunk of [`CHUNK`] bytes and at
    /// the end.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_on(roots: &Roots, request: &RegionRequest, mut on_progress: impl FnMut(u64)) -> Result<Self> {
        if !request.populate {
            return Self::map(roots, request);
        }
        let attempt = |again| {
            let mut region = Self::map(roots, request)?;
            region.populate(&mut on_progress)?;
            if again {
                region.collapse()?;
            }
            region.verify()?;
            Ok(region)
        };
        let is_short = |region: &Self| region.verified.huge_share() < region.plan.required;
        let region =
            again_if_short(roots, attempt, |region| region.backing() == RegionBacking::Thp && is_short(region))?;
        region.require_share()?;
        Ok(region)
    }

    /// Address space, and the pool's pages if they come from one.
    fn map(roots: &Roots, request: &RegionRequest) -> Result<Self> {
        let plan = RegionPlan::check(roots, request)?;
        let bind = bind_to(roots, request.node)?;
        let (pool, mapping) = match plan.backing {
            RegionBacking::Hugetlb(size) => map_hugetlb(roots, &plan, size, request)?,
            RegionBacking::Thp | RegionBacking::Small => {
                Limits::read_from(roots)?.check(plan.bytes)?;
                let mapping = plan.map(Kind::Anonymous).map_err(|e| call_error(e, plan.bytes))?;
                mapping
                    .transparent_huge(plan.backing == RegionBacking::Thp)
                    // A kernel without transparent huge pages does not know the call; small pages are then certain.
                    .or_else(|e| {
                        if plan.backing == RegionBacking::Small { Ok(()) } else { Err(call_error(e, plan.bytes)) }
                    })?;
                (None, mapping)
            }
        };
        if let Some(node) = bind {
            mapping.bind(node).map_err(|e| call_error(e, plan.bytes))?;
        }
        let verified = Verified { huge_bytes: 0, resident_bytes: 0, total_bytes: plan.bytes, page_size: plan.page };
        Ok(Self { mapping, _pool: pool, plan, verified, roots: roots.clone() })
    }

    fn populate(&mut self, on_progress: &mut dyn FnMut(u64)) -> Result<()> {
        let total = self.plan.bytes;
        let chunk = CHUNK.max(self.plan.page);
        let mut done = 0;
        while done < total {
            interrupt::check()?;
            on_progress(done);
            let next = total.min(done + chunk);
            if !matches!(self.plan.backing, RegionBacking::Hugetlb(_)) {
                let (now, all) = (Human(done), Human(total));
                Limits::read_from(&self.roots)?
                    .check_more(next - done)
                    .map_err(|why| anyhow!("memory became short after {now} of {all} and was given back: {why}"))?;
            }
            let page = match self.plan.backing {
                RegionBacking::Hugetlb(_) => self.plan.page as usize,
                RegionBacking::Thp | RegionBacking::Small => rustix::param::page_size(),
            };
            self.mapping.populate(done as usize..next as usize, page).map_err(|e| {
                match (self.plan.backing, e.errno) {
                    (RegionBacking::Hugetlb(size), Errno::FAULT | Errno::NOMEM) => anyhow!(
                        "the pool of {size} pages ran out after {} of {}: the node has too few of them or a hugetlb cgroup limit \
                         was met; raise the pool of that node or the limit",
                        Human(done),
                        Human(total)
                    ),
                    _ => call_error(e, next - done),
                }
            })?;
            done = next;
        }
        on_progress(done);
        Ok(())
    }

    /// Has the kernel put huge pages in place of small ones. What it could not do shows in its report.
    fn collapse(&self) -> Result<()> {
        let chunk = CHUNK.max(self.plan.page) as usize;
        for start in (0..self.len()).step_by(chunk) {
            interrupt::check()?;
            let _ = self.mapping.collapse(start..self.len().min(start + chunk));
        }
        Ok(())
    }

    /// Fails if too little came in pages of the size asked for, or did not stay.
    fn require_share(&self) -> Result<()> {
        let (verified, required) = (self.verified, self.plan.required);
        if verified.huge_share() < required {
            let cause = shortage_cause(&self.roots, self.plan.backing);
            bail!(
                "only {} of {} came in huge pages, {} are required: {cause}",
                Percent(verified.huge_share()),
                Human(verified.total_bytes),
                Percent(required)
            );
        }
        if verified.resident_bytes < verified.total_bytes {
            bail!(
                "only {} of {} stayed in memory after populating: the machine is swapping; ask for less",
                Human(verified.resident_bytes),
                Human(verified.total_bytes)
            );
        }
        Ok(())
    }

    /// Reads the kernel's report of this region anew. Takes time in proportion to the memory that the whole process has
    /// in small pages.
    ///
    /// # Errors
    /// If the report cannot be read.
    pub fn verify(&mut self) -> Result<Verified> {
        let start = self.mapping.start().as_ptr() as u64;
        let seen = std::fs::read_to_string("/proc/self/smaps")
            .map_err(|error| format!("/proc/self/smaps cannot be read: {error}"))
            .and_then(|report| Seen::read(&report, start, start + self.plan.bytes))
            .map_err(|why| {
                anyhow!("page sizes cannot be verified: {why}; mount the proc file system and use Linux 4.6 or later")
            })?;
        self.verified = Verified {
            huge_bytes: match self.plan.backing {
                RegionBacking::Hugetlb(_) if seen.page == self.plan.page => seen.hugetlb,
                RegionBacking::Hugetlb(_) => 0,
                RegionBacking::Thp | RegionBacking::Small => seen.transparent,
            },
            resident_bytes: seen.resident + seen.hugetlb,
            total_bytes: self.plan.bytes,
            page_size: self.plan.page,
        };
        Ok(self.verified)
    }

    /// The first byte. Valid for reads and writes of [`len`](Self::len) bytes until the region is dropped.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    /// The size in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// The bytes, zero at first.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.mapping.bytes_mut()
    }

    /// What backs the region.
    pub fn backing(&self) -> RegionBacking {
        self.plan.backing
    }

    /// What the kernel reported when it was asked last; nothing resident if the region was never populated.
    pub fn verified(&self) -> Verified {
        self.verified
    }
}

#[cfg(test)]
mod tests;
