//! What can be run. A command gets the boot CPU's context and reports samples; it fails with a reason.

mod age;
mod alloc;
mod crash;
mod dump;
mod free;
mod pool;
mod populate;
mod processes;
mod run;
mod selftest;
mod shootdown;
mod swapped;
mod vm_create;
mod vmalloc;

use crate::output;
use ::alloc::vec::Vec;
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_clear::{CalibrateError, ProfileError};
use hugemm_frames::{AllocError, Frozen};
use hugemm_hugetlb::PoolError;
use hugemm_kernel::memory::frames;
use hugemm_kernel::{BootInfo, Cx, ExitCode, smp};
use hugemm_paging::PagingError;
use hugemm_vm::VmError;
use hugemm_workloads::alloc_free::Exhausted;
use hugemm_workloads::request::{Request, RequestError};
use thiserror::Error;

/// Why a command ended early.
#[derive(Debug, Error)]
pub enum Failure {
    #[error("the guest has too little memory for this; use a larger --memory or a smaller size")]
    Memory,
    /// The architecture does not have it, or not yet; what to do instead.
    #[error("{0}")]
    NotHere(&'static str),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    #[error(transparent)]
    Calibrate(#[from] CalibrateError),
    #[error(transparent)]
    Policy(#[from] ProfileError),
    /// A page table refused what a command asked of it.
    #[error(transparent)]
    Paging(#[from] PagingError),
    /// A huge page pool refused what a command asked of it.
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Vm(#[from] VmError),
    /// A request for a kernel area was refused.
    #[error(transparent)]
    Kva(#[from] hugemm_kva::KvaError),
    #[error(transparent)]
    HostRun(#[from] hugemm_workloads::vm_host::HostRunError),
    #[error(transparent)]
    Age(#[from] hugemm_workloads::age::Failed),
    #[error(transparent)]
    Found(#[from] selftest::Finding),
}

impl From<AllocError> for Failure {
    fn from(_: AllocError) -> Self {
        Failure::Memory
    }
}

/// What the kernel calls: runs the command that its command line asks for.
pub fn main(cx: Cx<'_>, boot: &BootInfo) -> ExitCode {
    output::boot(boot);
    match boot.command_line.parse().map_err(Failure::Request).and_then(|request| run(cx, &request)) {
        Ok(()) => {
            output::line("done", &[]);
            ExitCode::Done
        }
        Err(failure) => {
            output::line("failed", &[("text", (&failure).into())]);
            ExitCode::Failed
        }
    }
}

fn run(cx: Cx<'_>, request: &Request) -> Result<(), Failure> {
    match request {
        Request::VmCreate(args) => vm_create::run(cx, args),
        Request::Free(args) => free::run(cx, args),
        Request::Alloc(args) => alloc::run(cx, args),
        Request::Shootdown(args) => shootdown::run(cx, args),
        Request::Vmalloc(args) => vmalloc::run(cx, args),
        Request::Pool(args) => pool::run(cx, args),
        Request::Age(args) => age::run(cx, args),
        Request::Run(args) => run::run(cx, args),
        Request::Selftest(args) => selftest::run(cx, args),
        Request::Dump(args) => dump::run(cx, args.what),
        Request::CrashTest(args) => crash::run(cx, args.how),
    }
}

/// Runs `f` on the first `cpus` CPUs at once; what they come to together, or the first failure.
fn on_cpus<T: Default + Send, E: Send>(
    cx: Cx<'_>,
    cpus: u32,
    f: impl Fn(Cx<'_>, u32) -> Result<T, E> + Sync,
    add: impl Fn(&mut T, T) + Sync,
) -> Result<T, E> {
    let all: Lock<SpinLock, _> = Lock::new(Ok(T::default()));
    smp::on_cpus(cx, cpus, &|cx, cpu| {
        let done = f(cx, cpu);
        let mut all = all.lock();
        match (&mut *all, done) {
            (Ok(all), Ok(done)) => add(all, done),
            (Ok(_), Err(error)) => *all = Err(error),
            (Err(_), _) => {}
        }
    });
    core::mem::replace(&mut *all.lock(), Ok(T::default()))
}

/// `count` values, each made by `make`.
fn vec_of<T>(count: usize, make: impl FnMut() -> T) -> Result<Vec<T>, Failure> {
    let mut all = vec_for(count)?;
    all.resize_with(count, make);
    Ok(all)
}

/// An empty vector with room for `most` values: it takes no memory while memory is used up.
fn vec_for<T>(most: usize) -> Result<Vec<T>, Failure> {
    let mut all = Vec::new();
    all.try_reserve_exact(most).map_err(|_| Failure::Memory)?;
    Ok(all)
}

fn free_all(cx: Cx<'_>, blocks: impl IntoIterator<Item = Frozen>) {
    blocks.into_iter().for_each(|block| frames().free(cx, block));
}

/// 1, 2, 4, … and all CPUs.
fn cpu_counts(cpus: u32) -> impl Iterator<Item = u32> {
    let mut next = Some(1);
    core::iter::from_fn(move || {
        let now = next?;
        next = (now < cpus).then(|| (now * 2).min(cpus));
        Some(now)
    })
}

/// Takes about `bytes` of memory in a row, in whole 2 MiB: as much as the largest free block has, at most.
fn region(cx: Cx<'_>, bytes: u64) -> Result<Frozen, AllocError> {
    use hugemm_base::Order;
    use hugemm_frames::AllocRequest;
    let pages = (bytes / hugemm_base::PAGE_BYTES).max(512);
    let order = Order::largest_within(pages).unwrap_or(Order::ZERO);
    frames().alloc(cx, AllocRequest::order(order))
}
