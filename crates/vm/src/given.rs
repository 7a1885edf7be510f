//! Objects that show given frames: a device's memory, a framebuffer, a page of the kernel's that processes may read.
//!
//! Such an object is a shared one whose index is full from the beginning and whose pages are nobody's here: they are not counted, not
//! on any list of the pager's, and stay what they are when the object goes. A fork shows them to the child, as those of every shared object.
//! They cannot be pinned: there may be no descriptor that a reference could be counted in. Whoever gives them answers for them.

use crate::cuts::Cuts;
use crate::error::VmError;
use crate::fault::Served;
use crate::inflight_faults::InflightFaults;
use crate::mapping::SharedRef;
use crate::object::Index;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use hugemm_base::sync::{AtomicBool, AtomicU64};
use hugemm_base::{Extent, PageSize, VirtAddr, VirtRange};
use hugemm_paging::{Flags, Mapping};

impl<S: Setup> Vm<'_, S> {
    /// A shared object that is these frames, in pages of size `page`: for areas made with
    /// [`Backing::Shared`](crate::Backing::Shared), whose [`Protection`](crate::Protection) says how memory is reached too;
    /// [`given`](crate::VmaKind::given) says of an area that it shows such an object. The frames need not be the manager's, nor have descriptors.
    ///
    /// Two allocations, and tables for one entry per page. Interrupts are on; may sleep.
    ///
    /// # Errors
    ///
    /// [`Misaligned`](VmError::Misaligned) if the frames are no whole pages of that size, [`OutOfBounds`](VmError::OutOfBounds) if there are
    /// none or entries cannot refer to them, [`NoMemory`](VmError::NoMemory).
    ///
    /// # Safety
    ///
    /// As long as areas show the object, the frames stay what they are: nobody frees them or uses them for something else, and whoever the
    /// areas let read or write them may. No two mappings of a frame, the platform's own included, are of memory types that the
    /// architecture forbids to be mixed.
    pub unsafe fn create_given<'v>(
        &'v self,
        cx: &mut Cx<'_, S>,
        frames: Extent,
        page: PageSize,
    ) -> Result<SharedRef<'v, S>, VmError> {
        let at = VirtAddr::new(frames.base().start().get());
        if !frames.base().get().is_multiple_of(page.pages()) || !frames.pages().is_multiple_of(page.pages()) {
            return Err(VmError::Misaligned { at });
        }
        let span = VirtRange::from_pages(0, frames.pages()).map_err(|_| VmError::OutOfBounds { at })?;
        let table = self.new_table(cx, span, None)?;
        let root = table.root();
        let index = Index {
            table,
            length: AtomicU64::new(span.bytes()),
            page,
            pooled: false,
            given: true,
            inflight: InflightFaults::new(),
            source: None,
            cuts: Cuts::new(AtomicU64::new(0)),
            writer: AtomicBool::new(false),
        };
        let object = self.new_object(cx, Some(index), None).inspect_err(|_| self.free_root(cx, root))?;
        let shared = self.shared_ref(object);
        let how = Mapping { flags: Flags::NONE, largest: page };
        let filled = match &shared.object().index {
            Some(index) => self.try_map(cx, |task| index.table.shared(self.tables(task)).map(span, [frames], how)),
            None => Err(VmError::OtherKind),
        };
        match filled {
            Ok(Served::Mapped) => Ok(shared),
            failed => {
                // Its own.
                let _ = self.close(cx, shared);
                Err(failed.err().unwrap_or(VmError::OutOfBounds { at }))
            }
        }
    }
}
