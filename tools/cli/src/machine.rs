//! What every command sets up before it measures: verified memory, CPUs, the environment, a profile.

use crate::document::{self, Document, Row};
use crate::options::{Common, Kind};
use crate::results::Results;
use crate::{environment_text, noise, progress};
use anyhow::{Result, anyhow, bail};
use hugemm_base::{CpuId, NodeId, PageSize};
use hugemm_clear::{Features, Profile, calibrate};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_inspect::environment::{Environment, GuestInfo};
use hugemm_inspect::interrupt::SignalReceived;
use hugemm_inspect::limits::Limits;
use hugemm_inspect::memory::{Region, RegionBacking, RegionRequest};
use hugemm_inspect::roots::Roots;
use hugemm_inspect::topology::MachineTopology;
use hugemm_workloads::size::Size;
use std::cell::{Ref, RefCell};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// A gibibyte: the least that large regions are measured in, unless the user says otherwise.
pub const GIB: u64 = 1 << 30;

pub struct Machine {
    pub topology: MachineTopology,
    pub features: Features,
    /// What figures depend on, as it was in the beginning.
    environment: RefCell<Environment>,
    /// Whether standard output belongs to JSON, and where that goes.
    quiet: bool,
    json: Option<PathBuf>,
}

impl Machine {
    /// Looks at the machine, and whether the results can be saved where the user wants them.
    pub fn new(common: &Common) -> Result<Self> {
        document::check_writable(common.json.as_deref())?;
        let (topology, environment) = (MachineTopology::read()?, RefCell::new(Environment::read()?));
        let (quiet, json) = (common.json_only(), common.json.clone());
        Ok(Machine { topology, features: Features::detect(), environment, quiet, json })
    }

    pub fn quiet(&self) -> bool {
        self.quiet
    }

    /// Up to `count` CPUs to bind threads to, the last ones first: the first CPUs get most of the interrupts.
    pub fn places(&self, count: usize) -> Result<Vec<CpuPlace>> {
        let cpus = &self.topology.cpus;
        if count == 0 || count > cpus.len() {
            bail!("{count} threads were asked for, and this process may use {} CPUs; use 1 to {0}", cpus.len());
        }
        let nodes: Vec<u32> = self.topology.nodes.iter().map(|node| node.id).collect();
        let node = |id: u32| NodeId::new(nodes.iter().position(|n| *n == id).unwrap_or(0) as u32);
        Ok(cpus.iter().rev().take(count).map(|cpu| CpuPlace { os_cpu: cpu.id, node: node(cpu.node) }).collect())
    }

    /// Numbers of CPUs: those that were asked for, or 1, 2, 4, … and all.
    pub fn or_doubling(&self, asked: &[u32]) -> Vec<u32> {
        let all = self.topology.cpus.len() as u32;
        let doubling = || (0..31).map(|log| 1 << log).take_while(|cpus| *cpus < all).chain([all]);
        if asked.is_empty() { doubling().collect() } else { asked.to_vec() }
    }

    /// The size to measure in when the user gave none: `share` of what may be taken, as a power of two within bounds.
    pub fn default_size(&self, share: u64, least: u64, most: u64) -> Result<u64> {
        let (takeable, _) = Limits::read()?.takeable();
        let part = takeable / share;
        let bytes = if part == 0 { 0 } else { 1 << part.ilog2() };
        Ok(bytes.clamp(least, most))
    }

    /// Memory of pages of 4 KiB or 2 MiB, populated and verified, with a progress bar. `kind` decides between transparent and
    /// hugetlb pages.
    pub fn memory(&self, bytes: u64, page: PageSize, kind: Kind) -> Result<Region> {
        let allocate = |backing| self.allocate(bytes, backing);
        match kind {
            _ if page == PageSize::Size4K => allocate(RegionBacking::Small),
            Kind::Thp => allocate(RegionBacking::Thp),
            Kind::Hugetlb => allocate(RegionBacking::Hugetlb(page)),
            Kind::Auto => match allocate(RegionBacking::Hugetlb(page)) {
                Err(error) if !error.is::<SignalReceived>() => allocate(RegionBacking::Thp),
                result => result,
            },
        }
    }

    fn allocate(&self, bytes: u64, backing: RegionBacking) -> Result<Region> {
        let bar = progress::bar(bytes, self.quiet);
        bar.set_message(format!("taking and touching {} of memory", Size(bytes)));
        let request = RegionRequest { bytes, backing, raise_pool: true, ..RegionRequest::default() };
        let region = Region::allocate_on(&Roots::default(), &request, |done| bar.set_position(done));
        bar.finish_and_clear();
        region
    }

    /// The profile, measured in `scratch`, whose content is lost; and how long that took.
    pub fn profile(&self, scratch: &mut [u8]) -> Result<(Profile, Duration)> {
        let host = Host::new(&self.places(1)?, &mut [])?;
        let bytes = self.calibration_bytes().min(scratch.len());
        let start = Instant::now();
        let profile = host.run_on(CpuId::new(0), |cx| calibrate(cx, &self.features, &mut scratch[..bytes]))??;
        Ok((profile, start.elapsed()))
    }

    /// Scratch memory that makes cold measurements cold: four times the last-level cache, but not more than 256 MiB,
    /// because what a virtual machine says of its last-level cache is often the whole socket's.
    pub fn calibration_bytes(&self) -> usize {
        let llc = self.topology.caches.last_level().unwrap_or(32 * MIB);
        (4 * llc).clamp(64 * MIB, 256 * MIB) as usize
    }

    /// Notes what a measured region was really made of.
    pub fn note_region(&self, label: impl Into<String>, region: &Region) {
        self.environment.borrow_mut().note_region(label, region);
    }

    /// Notes that figures are of this virtual machine.
    pub fn note_guest(&self, guest: GuestInfo) {
        self.environment.borrow_mut().guest = Some(guest);
    }

    pub fn environment(&self) -> Ref<'_, Environment> {
        self.environment.borrow()
    }

    pub fn print_environment(&self) {
        environment_text::print(&self.environment.borrow());
    }

    /// Prints what a command came to, or its JSON.
    pub fn show(&self, results: Results) -> Result<()> {
        let goals = results.goals();
        if !self.quiet {
            self.print_environment();
            results.print(&goals);
        }
        self.report(results.rows.into_iter().chain(goals).collect())
    }

    /// Warns of noise, and prints or saves the results as JSON if the user wants them so.
    pub fn report(&self, rows: Vec<Row>) -> Result<()> {
        if let Some(warning) = noise::warning(&rows).filter(|_| !self.quiet) {
            println!("\n  {warning}");
        }
        self.save(rows)
    }

    pub fn save(&self, rows: Vec<Row>) -> Result<()> {
        Document::new(self.environment.borrow().clone(), rows).write(self.json.as_deref())
    }

    pub fn whole_pages(&self, size: Size, page: PageSize) -> Result<u64> {
        if size.0.is_multiple_of(page.bytes()) {
            return Ok(size.0);
        }
        let up = size.0.checked_next_multiple_of(page.bytes());
        let up = up.ok_or_else(|| anyhow!("{size} is larger than any memory"))?;
        bail!("{size} is not a multiple of the page size {page}; the next size up is {}", Size(up))
    }
}
