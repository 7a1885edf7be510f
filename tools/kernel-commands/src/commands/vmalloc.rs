//! Kernel areas taken and freed, in the ways of Linux's `test_vmalloc`; many freed, batched and page by page. One CPU works; the others
//! use the kernel's half, so that each flush has to reach them.

use super::{Cx, Failure, vec_of};
use crate::output::{progress, record};
use hugemm_base::{Extent, PAGE_BYTES};
use hugemm_kernel::kva::areas;
use hugemm_kernel::memory::{frames, managed_bytes};
use hugemm_kernel::{percpu, tlb};
use hugemm_kva::Area;
use hugemm_workloads::request::Vmalloc;
use hugemm_workloads::vmalloc::{FREES, HELD, Rig, SIZES, Test, Way};
use hugemm_workloads::words::Named;

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Vmalloc) -> Result<(), Failure> {
    let flushes = || tlb::shootdown().counts().flushes();
    let touch = |area: &Area| {
        let bytes = args.write.unwrap_or(0).min(area.range().bytes());
        // SAFETY: of its own pages, which nobody else knows of.
        unsafe { area.as_ptr().write_bytes(0, bytes as usize) };
    };
    let rig = Rig { kva: areas(), frames: frames(), flushes: &flushes, touch: &touch };
    let bytes = managed_bytes() / 4;
    let mut held = vec_of(HELD, || None)?;
    let mut pages = vec_of((bytes / PAGE_BYTES) as usize, Extent::default)?;
    for run in 0..args.runs {
        progress(run.into(), args.runs.into(), "vmalloc");
        for &test in Test::ALL {
            percpu::beat();
            let looped = rig.run(cx, test, args.areas, &mut held)?;
            record(&looped, &[("test", (&test.name()).into())]);
        }
        for size in SIZES {
            let count = (bytes / size).clamp(1, HELD as u64) as usize;
            for &way in Way::ALL {
                percpu::beat();
                let freed = rig.free(cx, (size, way), args.areas.min(FREES), &mut held[..count], &mut pages)?;
                record(&freed, &[("bytes", size.into()), ("side", (&way.name()).into())]);
            }
        }
    }
    areas().trim(cx);
    Ok(())
}
