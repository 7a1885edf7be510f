//! A virtual machine monitor that keeps guest memory between tenants (a pool, a DAX device) and has to hand it out as
//! zero: prefault with `clear` alone, by all CPUs, against a `memset` of each page in turn.
//!
//! Memory that is new from Linux is zero already and needs none of this.
//!
//! `cargo run --release -p hugemm-example-vmm-prefault [MIB]`
use hugemm::clear::{Lane, Outcome, ParallelClear};
use hugemm::prelude::*;
use hugemm_host::cpu::{CpuPlace, Host, allowed_cpus};
use hugemm_host::mmap::Mmap;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mib: usize = std::env::args().nth(1).map_or(Ok(256), |mib| mib.parse())?;
    let places: Vec<_> = allowed_cpus()?.into_iter().map(|os_cpu| CpuPlace { os_cpu, node: NodeId::new(0) }).collect();
    let (features, mut guest) = (Features::detect(), Mmap::anonymous(mib << 20)?);
    // Where Linux has no huge pages to give, small ones do.
    let _ = guest.transparent_huge(true);
    let bytes = guest.bytes_mut();

    // Which primitive, from which size: about a tenth of a second, once per machine.
    let scratch = bytes.len().min(64 << 20);
    let one = Host::new(&places[..1], &mut [])?;
    let profile = one.run_on(CpuId::new(0), |cx| calibrate(cx, &features, &mut bytes[..scratch]))??;
    let clearer = Clearer::new(features, ClearPolicy::new(profile))?;

    for page in bytes.chunks_mut(2 << 20) {
        page.fill(0xa5);
    }
    let start = Instant::now();
    bytes.chunks_mut(2 << 20).for_each(|page| page.fill(0));
    let each = start.elapsed();
    bytes.fill(0xa5);

    let host = Host::new(&places, bytes)?;
    let start = Instant::now();
    // SAFETY: this program is the only owner of the host's frames.
    let dirty = unsafe { host.own_frames() };
    let mut lanes = [Lane::empty()];
    let clear = ParallelClear::new(dirty, &mut lanes, &host).map_err(|_| "no lanes")?;
    let whole = ClearRequest::bulk((mib << 20) as u64);
    let cpus = (0..places.len() as u32).map(CpuId::new);
    for stopped in host.run_on_each(cpus, |cx| clear.work(cx, &clearer, &whole, &Never, &mut ()))? {
        stopped?;
    }
    let Outcome::Zeroed(zeroed) = clear.finish() else { return Err("not all of it could be cleared".into()) };
    let extent = start.elapsed();
    println!("{mib} MiB by {} CPUs in {extent:.1?}; one memset per 2 MiB page: {each:.1?}", places.len());
    assert_eq!(zeroed.into_extent().bytes(), (mib << 20) as u64);
    drop(host);
    assert!(guest.bytes_mut().iter().all(|byte| *byte == 0));
    Ok(())
}
