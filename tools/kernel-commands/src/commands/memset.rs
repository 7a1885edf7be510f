//! Memory cleared chunk by chunk with every primitive that the kernel can use: the table of "huge page
//! clearing optimizations".

use super::{Cx, Failure, region};
use crate::output::{note, progress, record};
use hugemm_clear::Features;
use hugemm_kernel::memory::frames;
use hugemm_workloads::request::{KERNEL_SIZE, Memset};
use hugemm_workloads::sweep::{self, ClearWith};

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Memset) -> Result<(), Failure> {
    let features = Features::detect();
    let usable = || features.iter().filter(|primitive| !primitive.needs_vector());
    let mut memory = region(cx, args.size.unwrap_or(KERNEL_SIZE))?.into_dirty();
    let bytes = memory.extent().bytes();
    // Once untimed: the hypervisor gives memory when it is touched first.
    let first = ClearWith::Primitive { primitive: hugemm_clear::Primitive::Portable, features: &features };
    (memory, _) = sweep::pass(cx, first, memory, 4096, false).map_err(|stopped| stopped.reason)?;
    let of = u64::from(args.loops) * args.chunk.iter().count() as u64 * usable().count() as u64;
    let mut done = 0;
    for chunk in args.chunk.iter().filter(|chunk| *chunk > bytes) {
        note(format_args!("a chunk of {chunk} bytes is more than the {bytes} that are cleared; use a larger --size"));
    }
    for chunk in args.chunk.iter().filter(|chunk| *chunk <= bytes) {
        for _ in 0..args.loops {
            for primitive in usable() {
                let name = primitive.name();
                progress(done, of, name);
                done += 1;
                let how = ClearWith::Primitive { primitive, features: &features };
                let pass;
                (memory, pass) = sweep::pass(cx, how, memory, chunk, false).map_err(|stopped| stopped.reason)?;
                let labels = [("chunk", chunk.into()), ("function", (&name).into()), ("size", bytes.into())];
                record(&pass, &labels);
            }
        }
    }
    frames().free_extent(cx, memory);
    Ok(())
}
