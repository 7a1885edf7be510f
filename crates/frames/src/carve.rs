//! A manager that lives in the memory it manages.

use crate::arena::ArenaSpec;
use crate::frames::{Env, Frames};
use crate::layout::{FramesConfig, FramesConfigError};
use core::fmt;
use hugemm_base::inject::Inject;
use hugemm_base::lock::SpinLock;
use hugemm_base::platform::{Cpu, LinearMap};
use hugemm_base::{CpuCx, CpuPin, Extent, NodeId, PAGE_BYTES, Ram};

/// The surroundings of a manager made by [`Frames::carve`]: spin locks, no faults, and per-CPU caches for the CPUs of one
/// platform. A task of another platform is served by the nodes, as a CPU without a cache is.
#[derive(Clone, Copy, Debug)]
pub struct Carved {
    /// The address of the platform whose CPUs have the caches.
    platform: usize,
}

impl Inject for Carved {}

// SAFETY: arithmetic within the array that the manager has placed for itself.
unsafe impl Env for Carved {
    type Lock = SpinLock;

    #[inline]
    fn has_cache(&self, pin: CpuPin<'_>) -> bool {
        pin.platform() == self.platform
    }
}

/// Why no manager could be carved, and the memory.
#[derive(Debug, PartialEq, Eq)]
pub struct CarveError {
    /// The memory, untouched.
    pub ram: Ram,
    /// Why.
    pub reason: CarveReason,
}

/// Why no manager can be carved out of some memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarveReason {
    /// The metadata would leave no frame to manage, or cannot be sized.
    Size(FramesConfigError),
    /// These frames, which would hold the metadata, are not mapped as a whole.
    NotMapped(Extent),
}

impl fmt::Display for CarveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.ram.extent().bytes();
        match self.reason {
            CarveReason::Size(reason) => write!(f, "no manager of frames can be carved out of {bytes} bytes: {reason}"),
            CarveReason::NotMapped(metadata) => {
                write!(f, "the platform maps no {} pages from frame {} on", metadata.pages(), metadata.base())
            }
        }
    }
}

impl core::error::Error for CarveError {}

impl<'m> Frames<'m, Carved> {
    /// A manager of all of `ram`, every frame of it free, but for those at its end that hold the metadata: at most 1.6 % and a
    /// few KiB per CPU of the platform. They belong to no arena, so nothing ever hands them out. One node.
    ///
    /// The platform maps memory for good, since the metadata is used for as long as the manager lives. Its CPUs have caches.
    /// A kernel with several arenas or nodes, or with descriptors elsewhere, uses [`Frames::new`].
    ///
    /// ```
    /// # use hugemm_base::{Extent, PageSize, Pfn, SingleCpu};
    /// # use hugemm_frames::Frames;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (ram, layout) = (Extent::new(Pfn::new(0), 4 * 512)?, std::alloc::Layout::from_size_align(8 << 20, 2 << 20)?);
    /// # let base = unsafe { std::alloc::alloc_zeroed(layout) };
    /// // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
    /// let (cx, ram) = unsafe { SingleCpu::start(ram, base) }; // `ram` is owned now
    /// let frames = Frames::carve(&cx, ram)?; //                  by value: once
    /// let page = frames.alloc(&cx, PageSize::Size2M)?;
    /// # frames.free(&cx, page);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Memory is carved once:
    ///
    /// ```compile_fail,E0382
    /// # use hugemm_base::{CpuCx, Ram, SingleCpu};
    /// # use hugemm_frames::Frames;
    /// fn rule(cx: &CpuCx<'_, SingleCpu>, ram: Ram) {
    ///     let (one, two) = (Frames::carve(cx, ram), Frames::carve(cx, ram)); // error: use of moved value
    /// }
    /// ```
    ///
    /// and frames of one manager, which it knows by their numbers, do not become another's:
    ///
    /// ```compile_fail,E0308
    /// # use hugemm_base::{CpuCx, SingleCpu};
    /// # use hugemm_frames::{Frames, Frozen};
    /// fn rule(cx: &CpuCx<'_, SingleCpu>, block: Frozen) {
    ///     let inner = Frames::carve(cx, block.into_dirty()); // error: `Ram` is wanted
    /// }
    /// ```
    ///
    /// Windows that come and go are no place for metadata:
    ///
    /// ```compile_fail,E0277
    /// # use hugemm_base::{Cpu, CpuCx, PhysMap, Ram};
    /// # use hugemm_frames::Frames;
    /// fn rule<P: Cpu + PhysMap>(cx: &CpuCx<'_, P>, ram: Ram) {
    ///     let frames = Frames::carve(cx, ram); // error: `P: LinearMap`
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// Too little memory, or metadata that the platform does not map; `ram` comes back. If the platform unwinds, `ram` is lost:
    /// nobody has any of it. O(2 MiB blocks); any context but NMI.
    pub fn carve<P: Cpu + LinearMap>(cx: &CpuCx<'m, P>, ram: Ram) -> Result<Self, CarveError> {
        match Self::carve_extent(cx, ram.extent()) {
            Ok(frames) => Ok(frames),
            Err(reason) => Err(CarveError { ram, reason }),
        }
    }

    /// For the owner of `ram`, who has nothing to do with it any more if this succeeds.
    fn carve_extent<P: Cpu + LinearMap>(cx: &CpuCx<'m, P>, ram: Extent) -> Result<Self, CarveReason> {
        let (free, metadata) = divide(ram, cx.platform().cpus()).map_err(CarveReason::Size)?;
        let window = cx.platform().open(metadata, None).filter(|window| window.pages >= metadata.pages());
        let window = window.ok_or(CarveReason::NotMapped(metadata))?;
        let arenas = [ArenaSpec { extent: free, node: NodeId(0), descriptors: None }];
        let config = FramesConfig { arenas: &arenas, cpus: cx.platform().cpus(), cpu_nodes: &[] };
        let env = Carved { platform: core::ptr::from_ref(cx.platform()).addr() };
        // SAFETY: the metadata's frames are the caller's, who gives them up, and mapped for `'m`: the platform is borrowed for
        // as long. That no other manager knows frames of `Ram` is what it stands for. Contexts of other platforms find no cache.
        let frames = unsafe { Self::new(&config, env, window.ptr, metadata.bytes() as usize) };
        let frames = frames.map_err(CarveReason::Size)?;
        // SAFETY: the same owner's; released once, to the only manager that knows them.
        unsafe { frames.release_extent(cx, free) };
        Ok(frames)
    }
}

/// What is managed of `ram`, and the frames after it that hold its metadata.
fn divide(ram: Extent, cpus: u32) -> Result<(Extent, Extent), FramesConfigError> {
    // How many frames the metadata needs if `given` are set aside.
    let need = |given: u64| {
        let (extent, _) = ram.split_at(ram.pages().saturating_sub(given));
        let arenas = [ArenaSpec { extent, node: NodeId(0), descriptors: None }];
        let config = FramesConfig { arenas: &arenas, cpus, cpu_nodes: &[] };
        let layout = Frames::<Carved>::required_bytes(&config)?;
        let pages = (layout.size() as u64).div_ceil(PAGE_BYTES);
        if pages >= ram.pages() {
            return Err(FramesConfigError::Memory { bytes: layout.size(), align: layout.align() });
        }
        Ok(pages)
    };
    // The need falls with what is set aside. So the first figure is too large and the second too small, and the third, which
    // is what the second leaves needs, is enough for what it leaves itself.
    let pages = need(need(need(0)?)?)?;
    Ok(ram.split_at(ram.pages() - pages))
}
