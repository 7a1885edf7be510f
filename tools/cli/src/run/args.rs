//! Options of `hugemm run`.

use crate::args::{Calibration, Common, Kind};
use clap::Args;
use hugemm_workloads::request;
use hugemm_workloads::size::Size;
use std::path::PathBuf;

/// What the run consists of.
pub const RUN_HELP: &str = "\
The work of a virtual machine host, once through, by hugemm on memory of this machine:
  fill pool      5/8 of the memory, or all but 512 MiB, becomes a pool of 2 MiB pages; redundant descriptors are given back
  prefault VM    a machine of half the pool is created: allocated, cleared, mapped, by all CPUs
  pin VM         a machine of a quarter of the pool is created and pinned, as for a device
  4 KiB guests   four guests share memory and have their own; all of it is written to
  working sets   which pages guests have used, twice
  pressure       one more guest wants as much as there is: idle pages go to compressed swap, and come back when touched; where two CPUs
                 create machines, a worker on the second keeps memory free meanwhile
  failures        a machine too large for the pool, a guest that takes all there is, two frames that go bad
  destroy        everything is unmapped and freed
  shrink pool    the pool is emptied and its descriptors restored
Then the accounting is checked: every frame is back, and every counter adds up.

It is run in three ways, which are values of the same policies. Page by page is what kernels that work by pages do: \
4 KiB cleared at a time, a fault for each page, an unmap that gathers some thousand pages, flushes once for them and frees them, \
descriptors edited one by one with one flush for a batch. By extent is the same by whole requests; first cleared through the \
cache, then past it where the calibrated policy says so. This machine's kernel does what it can be asked to do. Where memory is \
not touched, time is per page and not per byte. Interrupts are counted for CPUs that nobody plays, since a process has no TLB of \
its own to flush; 'hugemm boot' has real ones.";

/// `hugemm run`
#[derive(Debug, Args)]
pub struct Run {
    /// Memory to take, a multiple of 128MB [default: a quarter of what is available, 512 MiB to 8 GiB].
    #[arg(short, long)]
    pub size: Option<Size>,
    /// Kind of huge pages that the memory is made of.
    #[arg(long, value_enum, default_value_t = Kind::Thp)]
    pub kind: Kind,
    /// CPUs that create machines [default: all].
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=44))]
    pub workers: Option<u32>,
    /// CPUs that each guest runs on, and that its flushes have to interrupt (counted, not sent).
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4))]
    pub vcpus: u32,
    #[command(flatten)]
    pub host: request::Run,
    /// Leave this machine's kernel out.
    #[arg(long)]
    pub no_kernel: bool,
    /// Write an HTML page with plots to FILE.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    #[command(flatten)]
    pub calibration: Calibration,
    #[command(flatten)]
    pub common: Common,
}
