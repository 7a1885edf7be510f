//! Copying a page, by the extent, without spreading bad memory.

use crate::access;
use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::vm::Vm;
use hugemm_base::{Dirty, Extent, PAGE_SHIFT, PhysMap};
use hugemm_clear::folio;

/// Pages copied between two reschedule points, 2 MiB: at 5 GB/s, 0.4 ms.
const UNIT: u64 = 512;

impl<S: Setup> Vm<'_, S> {
    /// Copies `from` to `to`: right of the touched page, left of it, and its neighbourhood last, as pages are cleared. A device, or whoever
    /// has the page where it is, may be storing to `from` meanwhile. Stops at the first frame that is known to be bad; the copy is then
    /// incomplete and must not be mapped. Passes a reschedule point after each unit; may sleep.
    ///
    /// The stores are ordinary ones: publishing the copy orders them.
    pub(crate) fn copy_pages(&self, cx: &mut Cx<'_, S>, from: Extent, to: &Dirty, want: &Want) -> Result<(), VmError> {
        let whole = to.extent();
        // SAFETY: the numbers order the copy; nothing is cleared or advanced through this value, and it is given up below.
        let mut order = folio::begin_around(unsafe { Dirty::assume_owned(whole) }, want.touched.unwrap_or(0));
        let mut copied = Ok(());
        while let Some((part, _)) = order.next_part() {
            let (unit, _) = part.split_at(UNIT);
            let into = unit.base().get() - whole.base().get();
            copied = self.copy_unit(cx, from.slice(into, into + unit.pages()), unit);
            if copied.is_err() {
                break;
            }
            cx.resched_if_may_sleep();
            // SAFETY: this value stands for an order only; it is abandoned as dirty whatever has been recorded.
            unsafe { order.advance(unit.pages()) };
        }
        let _ = order.abandon().into_extent();
        copied
    }

    fn copy_unit(&self, cx: &Cx<'_, S>, from: Extent, to: Extent) -> Result<(), VmError> {
        if let Some(frame) = self.frames().first_hwpoisoned(from) {
            return Err(VmError::HwPoisoned { frame });
        }
        let map = cx.platform();
        let (Some(source), Some(target)) = (map.open(from, None), map.open(to, None)) else {
            return Err(VmError::Unreachable);
        };
        let bytes = (source.pages.min(target.pages).min(from.pages()) << PAGE_SHIFT) as usize;
        if bytes as u64 != from.bytes() {
            return Err(VmError::Unreachable);
        }
        // SAFETY: both windows span the extents; the caller owns `to`.
        unsafe {
            access::load(source.ptr, target.ptr, bytes);
            map.close(source);
            map.close(target);
        }
        Ok(())
    }
}
