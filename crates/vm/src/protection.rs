//! What a mapping may be asked to allow.

use core::fmt;
use hugemm_paging::Flags;

/// What whoever makes an area may choose about its mappings: rights, and of [given](crate::Vm::create_given) frames cache attributes.
/// Reading is always allowed.
///
/// Everything else that an entry says is the manager's: whether it is present, what is known of its use, and that it is
/// one space's only. A *global* translation outlives the switch to another space and that space's flushes: with it another
/// tenant's memory, and memory that has been freed, could be read. It cannot be asked for:
///
/// ```compile_fail
/// use hugemm_base::PageSize;
/// use hugemm_paging::Flags;
/// use hugemm_vm::VmaKind;
///
/// // Flags of entries are no protection of an area.
/// let _ = VmaKind::private(PageSize::Size4K).allowing(Flags::WRITE | Flags::GLOBAL);
/// ```
///
/// ```
/// use hugemm_base::PageSize;
/// use hugemm_vm::{VmaKind, Protection};
///
/// let _ = VmaKind::private(PageSize::Size4K).allowing(Protection::WRITE.with(Protection::USER));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Protection(Flags);

impl Protection {
    /// Read-only data that only the kernel reaches.
    pub const READ: Protection = Protection(Flags::NONE);

    /// Stores are allowed.
    pub const WRITE: Protection = Protection(Flags::WRITE);

    /// Instructions may be fetched: by user mode if it may reach the page, by the kernel otherwise.
    pub const EXEC: Protection = Protection(Flags::EXEC);

    /// User mode may reach the page.
    pub const USER: Protection = Protection(Flags::USER);

    /// Stores go to memory at once.
    pub const WRITE_THROUGH: Protection = Protection(Flags::WRITE_THROUGH);

    /// Device memory: nothing is cached. See [`Flags::UNCACHED`].
    pub const UNCACHED: Protection = Protection(Flags::UNCACHED);

    /// What either allows.
    #[must_use]
    pub const fn with(self, other: Protection) -> Protection {
        Protection(self.0.with(other.0))
    }

    /// Whether all of `other` is allowed.
    pub const fn contains(self, other: Protection) -> bool {
        self.0.contains(other.0)
    }

    /// Of it, what an access needs.
    pub(crate) const fn rights(self) -> Protection {
        Protection(self.0.without(Protection::ATTRIBUTES))
    }

    /// Of it, how memory is reached.
    pub(crate) const fn attributes(self) -> Protection {
        Protection(self.0.without(self.rights().0))
    }

    const ATTRIBUTES: Flags = Flags::UNCACHED.with(Flags::WRITE_THROUGH);

    /// The same in the page tables' words.
    pub const fn flags(self) -> Flags {
        self.0
    }
}

impl fmt::Debug for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
