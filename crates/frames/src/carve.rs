//! A manager that lives in the memory it manages.

use crate::arena::{ArenaSpec, REGION_ORDER};
#[cfg(feature = "debug")]
use crate::debug::{Finding, Record, Watch};
use crate::frames::{Env, Frames};
use crate::layout::{FramesConfig, FramesConfigError};
use core::fmt;
use hugemm_base::inject::Inject;
use hugemm_base::lock::SpinLock;
use hugemm_base::platform::{Cpu, LinearMap};
use hugemm_base::{CpuCx, CpuPin, Extent, NodeId, PAGE_BYTES, Ram};

/// The surroundings of a manager made by [`Frames::carve`]: spin locks, no faults, and per-CPU caches for the CPUs of one
/// platform. A task of another platform is served by the nodes, as a CPU without a cache is.
#[derive(Debug)]
pub struct Carved {
    /// The address of the platform whose CPUs have the caches.
    platform: usize,
    /// Over records in the manager's own memory: nobody has it but through the manager.
    #[cfg(feature = "debug")]
    watch: Option<Watch<'static>>,
}

impl Carved {
    fn new<P: Cpu>(cx: &CpuCx<'_, P>) -> Self {
        Carved {
            platform: core::ptr::from_ref(cx.platform()).addr(),
            #[cfg(feature = "debug")]
            watch: None,
        }
    }
}

impl Inject for Carved {}

// SAFETY: arithmetic within the array that the manager has placed for itself.
unsafe impl Env for Carved {
    type Lock = SpinLock;

    #[cfg(feature = "debug")]
    fn watch(&self) -> Option<&Watch<'_>> {
        self.watch.as_ref()
    }

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

/// Why no manager can be carved out of some memory. Its `Debug`, which `expect` shows, is the same sentence as its `Display`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CarveReason {
    /// The metadata would leave no frame to manage, or cannot be sized.
    Size(FramesConfigError),
    /// These frames are not mapped, or are to hold the metadata and are not mapped as one.
    NotMapped(Extent),
    /// The memory map has more than [`MOST_PIECES`] pieces that do not adjoin.
    TooManyPieces,
}

/// How many pieces of RAM with holes between them [`Frames::carve_all`] takes.
pub const MOST_PIECES: usize = 64;

impl fmt::Display for CarveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes from frame {} on: {}", self.ram.extent().bytes(), self.ram.extent().base(), self.reason)
    }
}

impl core::error::Error for CarveError {}

impl fmt::Display for CarveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CarveReason::Size(reason) => write!(f, "no manager of frames can be carved out of that: {reason}"),
            CarveReason::NotMapped(metadata) => {
                write!(f, "the platform maps no {} pages from frame {} on", metadata.pages(), metadata.base())
            }
            CarveReason::TooManyPieces => {
                write!(f, "the memory map has more than {MOST_PIECES} pieces; leave out the smallest")
            }
        }
    }
}

impl fmt::Debug for CarveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for CarveReason {}

impl<'m> Frames<'m, Carved> {
    /// A manager of all of `ram`, every frame of it free, but for those that hold the metadata: 1.6 % of 128 MiB and more (1.8 % of 2 MiB), and a
    /// few KiB per CPU of the platform. They are at its end, or at its beginning where that leaves a whole GiB more, and belong to no arena, so
    /// nothing ever hands them out. One node.
    ///
    /// The platform maps memory for good, since the metadata is used for as long as the manager lives. Its CPUs have caches.
    /// A machine with several pieces of RAM has [`carve_all`](Frames::carve_all); one with several nodes, or with descriptors elsewhere,
    /// [`Frames::new`].
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
    /// Too little memory, or some that the platform does not map; `ram` comes back. If the platform unwinds, `ram` is lost:
    /// nobody has any of it. O(2 MiB blocks); any context but NMI.
    pub fn carve<P: Cpu + LinearMap>(cx: &CpuCx<'m, P>, ram: Ram) -> Result<Self, CarveError> {
        match Self::carve_arenas(cx, &mut [arena(ram.extent())], 0, |_| Carved::new(cx)) {
            Ok((frames, _)) => Ok(frames),
            Err(reason) => Err(CarveError { ram, reason }),
        }
    }

    /// A manager of all RAM of a machine's memory map, in any order: what [`carve`](Frames::carve) is for one piece. The metadata is at
    /// the end of the largest piece, or at another end where that leaves a whole GiB more. Holes cost nothing: pieces that adjoin are one
    /// arena, the others one each, in one node. Empty pieces are passed over; so is frame 0 where it is mapped at address 0.
    ///
    /// ```
    /// # use hugemm_base::{Extent, PageSize, Pfn, SingleCpu};
    /// # use hugemm_frames::Frames;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (ram, layout) = (Extent::new(Pfn::new(0), 4 * 512)?, std::alloc::Layout::from_size_align(8 << 20, 2 << 20)?);
    /// # let base = unsafe { std::alloc::alloc_zeroed(layout) };
    /// # // SAFETY: nobody else uses it; it stays mapped at `base`.
    /// # let (cx, ram) = unsafe { SingleCpu::start(ram, base) };
    /// let (below, above) = ram.split_at(600); // what a boot loader says is RAM
    /// let frames = Frames::carve_all(&cx, [above, below])?;
    /// let page = frames.alloc(&cx, PageSize::Size2M)?;
    /// # frames.free(&cx, page);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`carve`](Frames::carve), and more than [`MOST_PIECES`] pieces; all of the memory is lost then: a kernel that cannot start has no
    /// use for it. O(2 MiB blocks + pieces²); any context but NMI; 19 KiB of stack, 70 without optimisation.
    pub fn carve_all<P: Cpu + LinearMap>(
        cx: &CpuCx<'m, P>,
        map: impl IntoIterator<Item = Ram>,
    ) -> Result<Self, CarveReason> {
        let mut pieces = [arena(Extent::default()); MOST_PIECES];
        let count = sort(cx, map, &mut pieces)?;
        Ok(Self::carve_arenas(cx, &mut pieces[..count], 0, |_| Carved::new(cx))?.0)
    }

    /// As [`carve_all`](Frames::carve_all), with the manager itself beside its metadata: there for good, before there is a heap, as
    /// `GlobalHeap` wants it.
    ///
    /// # Errors
    ///
    /// As [`carve_all`](Frames::carve_all).
    pub fn carve_in_place<P: Cpu + LinearMap>(
        cx: &CpuCx<'m, P>,
        map: impl IntoIterator<Item = Ram>,
    ) -> Result<&'m Self, CarveReason> {
        let mut pieces = [arena(Extent::default()); MOST_PIECES];
        let count = sort(cx, map, &mut pieces)?;
        Self::in_place(cx, &mut pieces[..count], 0, |_| Carved::new(cx))
    }

    /// The same with a [`Watch`] over all of its memory, which tells `report` what it finds. The records, 24 bytes for each frame from the first
    /// to the last and for those between pieces, are with the metadata.
    ///
    /// # Errors
    ///
    /// As [`carve_all`](Frames::carve_all); all pieces have to be mapped at one distance.
    #[cfg(feature = "debug")]
    pub fn carve_watched<P: Cpu + LinearMap>(
        cx: &CpuCx<'m, P>,
        map: impl IntoIterator<Item = Ram>,
        report: fn(&Finding),
    ) -> Result<&'m Self, CarveReason> {
        let mut pieces = [arena(Extent::default()); MOST_PIECES];
        let count = sort(cx, map, &mut pieces)?;
        let pieces = &mut pieces[..count];
        let (Some(first), Some(last)) = (pieces.first().map(|piece| piece.extent), pieces.last()) else {
            return Err(CarveReason::Size(FramesConfigError::Empty));
        };
        let records = (last.extent.end().get() - first.base().get()) as usize;
        let distance = |extent: Extent| {
            let window = cx.platform().open(extent, None).filter(|window| window.pages == extent.pages());
            let window = window.ok_or(CarveReason::NotMapped(extent))?;
            Ok(window.ptr.expose_provenance().wrapping_sub(extent.start().get() as usize))
        };
        let offset = distance(first)?;
        for piece in &*pieces {
            if distance(piece.extent)? != offset {
                return Err(CarveReason::NotMapped(piece.extent));
            }
        }
        Self::in_place(cx, pieces, records * size_of::<Record>(), |place| {
            let place: *mut Record = place.cast();
            // SAFETY: `records` of them have room there, aligned, for as long as there is a manager; each is written before the slice exists,
            // and each frame is mapped at `offset`.
            let watch = unsafe {
                (0..records).for_each(|index| place.add(index).write(Record::default()));
                Watch::new(first.base(), core::slice::from_raw_parts(place, records), offset, report)
            };
            Carved { watch: Some(watch), ..Carved::new(cx) }
        })
    }

    /// A manager with `room` bytes, in front of itself, behind the metadata.
    fn in_place<P: Cpu + LinearMap>(
        cx: &CpuCx<'m, P>,
        arenas: &mut [ArenaSpec],
        room: usize,
        env: impl FnOnce(*mut u8) -> Carved,
    ) -> Result<&'m Self, CarveReason> {
        let (frames, place) = Self::carve_arenas(cx, arenas, room + size_of::<Self>(), env)?;
        let place: *mut Self = place.wrapping_add(room).cast();
        // SAFETY: as many bytes of the metadata's frames as it has, at the end of them, where it is aligned; nobody else has them, and they
        // are mapped for `'m`.
        unsafe {
            place.write(frames);
            Ok(&*place)
        }
    }

    /// For the owner of the arenas' frames, who has nothing to do with them any more if this succeeds. At the end of the
    /// metadata's frames, after it, `room` bytes are left; where, `env` is told.
    fn carve_arenas<P: Cpu + LinearMap>(
        cx: &CpuCx<'m, P>,
        arenas: &mut [ArenaSpec],
        room: usize,
        env: impl FnOnce(*mut u8) -> Carved,
    ) -> Result<(Self, *mut u8), CarveReason> {
        let metadata = set_aside(arenas, cx.platform().cpus(), room).map_err(CarveReason::Size)?;
        let window = cx.platform().open(metadata, None).filter(|window| window.pages >= metadata.pages());
        let window = window.ok_or(CarveReason::NotMapped(metadata))?;
        for arena in &*arenas {
            let mut rest = arena.extent;
            while !rest.is_empty() {
                let window = cx.platform().open(rest, None).filter(|window| window.pages != 0);
                rest = rest.split_at(window.ok_or(CarveReason::NotMapped(rest))?.pages).1;
            }
        }
        let config = FramesConfig::new(arenas, cx.platform().cpus());
        let bytes = metadata.bytes() as usize - room;
        let place = window.ptr.wrapping_add(bytes);
        // SAFETY: the metadata's frames are the caller's, who gives them up, and mapped for `'m`: the platform is borrowed for
        // as long. That no other manager knows frames of `Ram` is what it stands for. Contexts of other platforms find no cache.
        let frames = unsafe { Self::new(&config, env(place), window.ptr, bytes) };
        let frames = frames.map_err(CarveReason::Size)?;
        for arena in &*arenas {
            // SAFETY: the same owner's; released once, to the only manager that knows them.
            unsafe { frames.release_extent(cx, arena.extent) };
        }
        Ok((frames, place))
    }
}

/// Some RAM as an arena of a manager with one node.
fn arena(extent: Extent) -> ArenaSpec {
    ArenaSpec { extent, node: NodeId::new(0), descriptors: None }
}

/// Makes `pieces` those of a memory map, in ascending order, those that adjoin as one: how many they are.
fn sort<P: Cpu + LinearMap>(
    cx: &CpuCx<'_, P>,
    map: impl IntoIterator<Item = Ram>,
    pieces: &mut [ArenaSpec; MOST_PIECES],
) -> Result<usize, CarveReason> {
    let mut count = 0;
    for piece in map.into_iter().map(|ram| ram.extent()).filter(|piece| !piece.is_empty()) {
        // The first frame of all may be where no pointer leads.
        let unreachable = piece.base().get() == 0 && cx.platform().open(piece, None).is_none();
        let (_, piece) = piece.split_at(u64::from(unreachable));
        if piece.is_empty() {
            continue;
        }
        // Where it belongs, by frame number.
        let at = pieces[..count].partition_point(|other| other.extent.base() < piece.base());
        let before = at.checked_sub(1).and_then(|at| pieces[at].extent.join(piece));
        let after = |piece: Extent| pieces[..count].get(at).and_then(|next| piece.join(next.extent));
        match (before, after(before.unwrap_or(piece))) {
            (Some(_), Some(all)) => {
                pieces[at - 1].extent = all;
                pieces.copy_within(at + 1..count, at);
                count -= 1;
            }
            (Some(joined), None) => pieces[at - 1].extent = joined,
            (None, Some(joined)) => pieces[at].extent = joined,
            (None, None) if count == MOST_PIECES => return Err(CarveReason::TooManyPieces),
            (None, None) => {
                pieces.copy_within(at..count, at + 1);
                pieces[at].extent = piece;
                count += 1;
            }
        }
    }
    Ok(count)
}

/// Takes the frames that hold the metadata, and `room` bytes, from the end of the largest arena; from another's, or from a beginning, where that
/// leaves more whole GiB.
fn set_aside(arenas: &mut [ArenaSpec], cpus: u32, room: usize) -> Result<Extent, FramesConfigError> {
    let largest = (0..arenas.len()).max_by_key(|at| arenas[*at].extent.pages()).ok_or(FramesConfigError::Empty)?;
    let (mut best, mut least) = (Err(FramesConfigError::Empty), u64::MAX);
    // Low memory last: devices want it.
    let count = arenas.len();
    let all = |from_end| (0..count).rev().map(move |at| (at, from_end));
    for (at, from_end) in [(largest, true)].into_iter().chain(all(true)).chain(all(false)) {
        let whole = arenas[at].extent;
        let found = split_off(arenas, at, from_end, cpus, room);
        let lost = found.map_or(u64::MAX, |(rest, _)| gibibytes(whole) - gibibytes(rest));
        if lost < least || best == Err(FramesConfigError::Empty) {
            (best, least) = (found.map(|(rest, metadata)| (at, rest, metadata)), lost);
        }
    }
    let (at, rest, metadata) = best?;
    arenas[at].extent = rest;
    Ok(metadata)
}

/// An arena without the metadata, and the metadata, at the arena's end or at its beginning.
fn split_off(
    arenas: &mut [ArenaSpec],
    at: usize,
    from_end: bool,
    cpus: u32,
    room: usize,
) -> Result<(Extent, Extent), FramesConfigError> {
    let whole = arenas[at].extent;
    let split = |pages: u64| {
        let (first, second) = whole.split_at(if from_end { whole.pages().saturating_sub(pages) } else { pages });
        if from_end { (first, second) } else { (second, first) }
    };
    // How many frames the metadata needs if `given` are set aside.
    let mut need = |given: u64| {
        (arenas[at].extent, _) = split(given);
        let layout = Frames::<Carved>::required_bytes(&FramesConfig::new(arenas, cpus))?;
        let pages = (layout.size() as u64 + room as u64).div_ceil(PAGE_BYTES);
        if pages >= whole.pages() {
            return Err(FramesConfigError::Memory { bytes: layout.size() + room, align: layout.align() });
        }
        Ok(pages)
    };
    // The need falls with what is set aside. So the first figure is too large and the second too small, and the third, which
    // is what the second leaves needs, is enough for what it leaves itself.
    let pages = need(0).and_then(&mut need).and_then(&mut need);
    arenas[at].extent = whole;
    pages.map(split)
}

/// How many whole GiB, at multiples of that, an extent has.
fn gibibytes(extent: Extent) -> u64 {
    (extent.end().get() >> REGION_ORDER).saturating_sub(extent.base().get().div_ceil(1 << REGION_ORDER))
}
