//! What an address is: for whoever reports a fault.

use crate::addresses::{Addresses, Use};
use crate::kva::Kva;
use crate::setup::{Cx, KvaSetup};
use core::fmt;
use hugemm_base::{PAGE_SHIFT, VirtAddr, VirtRange};

/// What an area is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AreaKind {
    /// Pages of its own.
    Pages,
    /// A stack: pages of its own, and as many guard pages below them.
    Stack,
    /// Pages of somebody else.
    Mapped,
    /// A device's registers or memory.
    Device,
}

/// An area, for those who say what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AreaInfo {
    /// What whoever took it calls it.
    pub name: &'static str,
    /// What it is for.
    pub kind: AreaKind,
    /// Its addresses, without guard pages.
    pub range: VirtRange,
}

impl fmt::Display for AreaInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            AreaKind::Stack => "stack",
            AreaKind::Pages | AreaKind::Mapped | AreaKind::Device => "area",
        };
        write!(f, "the {kind} '{}' at {}", self.name, self.range)
    }
}

/// What an address is. `Display` says it in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// An area's.
    Area(AreaInfo),
    /// A guard page, or one of several, or free, next to an area: the one that begins above it (a stack that ran over), and the one that ends below.
    Guard {
        /// Whoever came down to it.
        above: Option<AreaInfo>,
        /// Whoever went up to it.
        below: Option<AreaInfo>,
    },
    /// It was an area's until that was freed, not long ago; its guard pages too.
    Freed(AreaInfo),
    /// Nobody's.
    Unused,
    /// Not of the range.
    Outside,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Area(info) => write!(f, "it is in {info}"),
            Place::Guard { above: Some(info), .. } => write!(f, "it is a guard page below {info}"),
            Place::Guard { below: Some(info), .. } => write!(f, "it is the guard page above {info}"),
            Place::Freed(info) => write!(f, "it was in {info}, which has been freed"),
            Place::Guard { .. } | Place::Unused => f.write_str("it is in no kernel area"),
            Place::Outside => f.write_str("it is no address for kernel areas"),
        }
    }
}

/// How often the lock of a home is tried.
const TRIES: u32 = 1000;

impl<S: KvaSetup> Kva<'_, S> {
    /// What an address is. `None` if a lock that it takes to know is held all the time, perhaps by the very task that is interrupted.
    ///
    /// Any context, a page fault's and a non-maskable interrupt's included: it waits for nobody. Two lock rounds, O(log areas).
    pub fn what_is(&self, cx: &Cx<'_, S>, at: VirtAddr) -> Option<Place> {
        let page = at.get() >> PAGE_SHIFT;
        if page < self.range.first_page() || page >= self.range.end_page() {
            return Some(Place::Outside);
        }
        let of_all = self.looked_up(cx, Self::ALL, page)?;
        let Look { block: Some(home), .. } = of_all else { return Some(of_all.place()) };
        let mut look = self.looked_up(cx, home.into(), page)?;
        // The next area may be behind the block.
        look.above = look.above.or(of_all.above);
        Some(look.place())
    }

    fn looked_up(&self, cx: &Cx<'_, S>, home: usize, page: u64) -> Option<Look> {
        (0..TRIES).find_map(|_| {
            core::hint::spin_loop();
            cx.pinned(|pin| self.homes.get(home)?.0.try_lock(pin).map(|addresses| Look::at(&addresses, page)))
        })
    }
}

/// What one home's nodes say of a page.
#[derive(Default)]
struct Look {
    block: Option<u8>,
    inside: Option<Place>,
    above: Option<AreaInfo>,
    below: Option<AreaInfo>,
}

impl Look {
    fn at<D>(addresses: &Addresses<D>, page: u64) -> Look {
        let mut look = Look::default();
        // Only those without guard pages of their own begin with their first page.
        if let Some(Use::Area(taken)) = addresses.at(page + 1).map(|node| node.usage())
            && taken.below == 0
        {
            look.above = Some(taken.info);
        }
        match addresses.holding(page).map(|node| (node.first(), node.usage())) {
            Some((_, Use::Block(home))) => look.block = Some(home),
            Some((_, Use::Waiting(taken))) => look.inside = Some(Place::Freed(taken.info)),
            Some((first, Use::Area(taken))) if page < first + taken.below => look.above = Some(taken.info),
            Some((_, Use::Area(taken))) if page < taken.info.range.end_page() => {
                look.inside = Some(Place::Area(taken.info));
            }
            Some((_, Use::Area(taken))) => look.below = Some(taken.info),
            Some((_, Use::Free | Use::Held)) | None => {}
        }
        look
    }

    fn place(self) -> Place {
        let Look { inside, above, below, .. } = self;
        match inside {
            // What was freed has a guard page that is another's too.
            Some(Place::Freed(_)) if above.is_some() => Place::Guard { above, below },
            Some(place) => place,
            None if above.is_some() || below.is_some() => Place::Guard { above, below },
            None => Place::Unused,
        }
    }
}
