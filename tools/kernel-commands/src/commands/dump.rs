//! What the kernel has, as text.

use super::{Cx, Failure};
use crate::output::Notes;
use crate::space::memory;
use core::fmt;
use hugemm_kernel::memory::frames;
use hugemm_kernel::tables;
use hugemm_workloads::request::Dumped;

#[inline(never)]
pub fn run(cx: Cx<'_>, what: Dumped) -> Result<(), Failure> {
    let mut notes = Notes::default();
    let _: fmt::Result = match what {
        Dumped::Frames => frames().dump(cx, &mut notes),
        Dumped::Tables => tables::kernel().dump(memory(cx), &mut notes),
    };
    Ok(())
}
