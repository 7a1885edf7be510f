//! Which allocations share 2 MiB blocks: those that can be moved, and those that cannot.

/// Whether whoever allocates can have the content moved elsewhere. Allocations of one kind share 2 MiB blocks, so that
/// a few that cannot be moved do not spoil many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Mobility {
    /// Stays where it is: page tables, slabs, anything known by its physical address.
    #[default]
    Unmovable,
    /// Can be migrated: user memory.
    Movable,
}

impl Mobility {
    /// Both.
    pub const ALL: [Mobility; 2] = [Mobility::Unmovable, Mobility::Movable];

    #[inline]
    pub(crate) const fn index(self) -> usize {
        match self {
            Mobility::Unmovable => 0,
            Mobility::Movable => 1,
        }
    }

    #[inline]
    pub(crate) const fn from_index(index: u64) -> Self {
        if index & 1 == 0 { Mobility::Unmovable } else { Mobility::Movable }
    }

    pub(crate) const fn other(self) -> Self {
        match self {
            Mobility::Unmovable => Mobility::Movable,
            Mobility::Movable => Mobility::Unmovable,
        }
    }
}
