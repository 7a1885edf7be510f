//! What is asked for, and the value that owns it.

use crate::addresses::{Node, Taken, Use};
use crate::error::KvaError;
use crate::kva::pages_of;
use crate::place::{AreaInfo, AreaKind};
use core::ptr::NonNull;
use hugemm_base::{PAGE_BYTES, PAGE_SHIFT, PageSize, VirtAddr, VirtRange};
use hugemm_paging::Flags;

/// What to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// Bytes; rounded up to pages.
    pub bytes: u64,
    /// What the first address is a multiple of: a power of two, 4 KiB at least. From 2 MiB on, areas are aligned to that anyway.
    pub align: u64,
    /// Whether all bytes are zero at first; they are anything otherwise.
    pub zeroed: bool,
    /// [`Flags::WRITE`], [`Flags::EXEC`], or neither; for devices, of which caches keep nothing, `WRITE` and what says how strictly.
    pub rights: Flags,
    /// What a fault's report calls it.
    pub name: &'static str,
}

impl Request {
    /// Writable memory of any content.
    pub const fn new(bytes: u64, name: &'static str) -> Self {
        Request { bytes, align: PAGE_BYTES, zeroed: false, rights: Flags::WRITE, name }
    }

    /// The same, all zero.
    pub const fn zeroed(self) -> Self {
        Request { zeroed: true, ..self }
    }

    /// The same, aligned.
    pub const fn aligned(self, align: u64) -> Self {
        Request { align, ..self }
    }

    /// The same, allowing this.
    pub const fn allowing(self, rights: Flags) -> Self {
        Request { rights, ..self }
    }

    /// What addresses that takes.
    pub(crate) fn shape(&self, kind: AreaKind, range: VirtRange) -> Result<Shape, KvaError> {
        let (own, pages) = (pages_of(self.bytes), range.pages());
        if own == 0 {
            return Err(KvaError::Empty);
        }
        let misaligned = KvaError::Align { align: self.align };
        if !self.align.is_power_of_two() || self.align >> PAGE_SHIFT > pages {
            return Err(misaligned);
        }
        check_rights(kind, self.rights)?;
        let huge = PageSize::Size2M.pages();
        let least = if own >= huge { huge } else { 1 };
        let align = (self.align >> PAGE_SHIFT).max(least);
        // A stack is the upper half of what is aligned to twice its size: one bit of an address tells it from what is below it.
        let (below, align) = if kind == AreaKind::Stack { (own, 2 * own) } else { (0, align) };
        let all = below.saturating_add(own).saturating_add(1);
        if all > pages {
            return Err(KvaError::NoSpace { pages: all });
        }
        Ok(Shape { below, own, pages: all, align, kind, name: self.name })
    }
}

/// Which rights an area of a kind may have.
pub(crate) fn check_rights(kind: AreaKind, rights: Flags) -> Result<(), KvaError> {
    let both = Flags::WRITE | Flags::EXEC;
    let may_be = match kind {
        AreaKind::Pages | AreaKind::Mapped => both,
        AreaKind::Stack => Flags::WRITE,
        AreaKind::Device => Flags::WRITE | Flags::UNCACHED | Flags::WRITE_THROUGH,
    };
    if !may_be.contains(rights) || rights.contains(both) { Err(KvaError::Rights { flags: rights }) } else { Ok(()) }
}

/// Addresses, in pages.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    below: u64,
    own: u64,
    /// With guards.
    pub(crate) pages: u64,
    pub(crate) align: u64,
    kind: AreaKind,
    name: &'static str,
}

impl Shape {
    fn info(&self, first: u64) -> AreaInfo {
        // It lies in the range, so it is one.
        let range = VirtRange::from_pages(first + self.below, self.own).unwrap_or(VirtRange::ALL);
        AreaInfo { name: self.name, kind: self.kind, range }
    }

    /// What a node that begins with a page is used for.
    pub(crate) fn usage(&self, first: u64) -> Use {
        Use::Area(Taken { info: self.info(first), below: self.below })
    }
}

/// A range of kernel addresses, and the pages behind it if they are its own. [Free](crate::Kva::free) it.
#[derive(Debug)]
#[must_use = "dropping this keeps its addresses and pages in use for good: free it"]
pub struct Area {
    record: NonNull<()>,
    home: u8,
    below: u64,
    range: VirtRange,
    pub(crate) kind: AreaKind,
}

// SAFETY: it is a number, which only its manager takes for more, under a lock.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    pub(crate) fn new<D>(record: NonNull<Node<D>>, home: u8, shape: &Shape) -> Self {
        // SAFETY: the caller has just taken it, and nobody gives it back before this value is gone.
        let first = unsafe { record.as_ref() }.first();
        Area { record: record.cast(), home, below: shape.below, range: shape.info(first).range, kind: shape.kind }
    }

    /// Its addresses, without guard pages.
    pub fn range(&self) -> VirtRange {
        self.range
    }

    /// Its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.range.start().get() as usize)
    }

    /// The address after its last.
    pub fn end(&self) -> VirtAddr {
        VirtAddr::new(self.range.end_page() << PAGE_SHIFT)
    }

    pub(crate) fn home(&self) -> u8 {
        self.home
    }

    /// The first page of its node.
    pub(crate) fn first(&self) -> u64 {
        self.range.first_page() - self.below
    }

    /// What a node says of it, if that is its record.
    pub(crate) fn taken<D>(&self, node: &Node<D>) -> Option<Taken> {
        match node.usage() {
            Use::Area(taken) if NonNull::from(node).cast() == self.record => Some(taken),
            _ => None,
        }
    }
}

/// A stack of 2^order pages, above as many guard pages: one step over its end is a fault whose address
/// [says](crate::Kva::what_is) whose it was.
#[derive(Debug)]
#[must_use = "dropping this keeps its addresses and pages in use for good: free it"]
pub struct Stack(pub(crate) Area);

impl Stack {
    /// Where it begins: it grows down.
    pub fn top(&self) -> VirtAddr {
        self.0.end()
    }

    /// Its lowest address.
    pub fn bottom(&self) -> VirtAddr {
        self.0.range().start()
    }

    /// The area that it is: free that.
    pub fn into_area(self) -> Area {
        self.0
    }
}
