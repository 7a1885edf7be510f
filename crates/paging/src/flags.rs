//! What a mapping allows and what is known of its use, in the same words for every entry format.

use core::fmt;
use core::ops::{BitAnd, BitOr};

/// A set of properties of a mapping. Reading is always allowed; everything else is a member.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct Flags(u16);

macro_rules! members {
    ($($(#[$doc:meta])* $name:ident = $bit:literal,)*) => {
        impl Flags {
            $($(#[$doc])* pub const $name: Flags = Flags(1 << $bit);)*

            /// Every member, with its name.
            const NAMES: &'static [(Flags, &'static str)] = &[$((Flags::$name, stringify!($name)),)*];
        }
    };
}

members! {
    /// Stores are allowed.
    WRITE = 0,
    /// Instructions may be fetched: by user mode if it may reach the page, by the kernel otherwise.
    EXEC = 1,
    /// User mode may reach the page.
    USER = 2,
    /// The translation is the same in every address space and outlives a switch, and a flush of one space. Only tables that
    /// are [common](crate::PageTable::with_fixed_top) to all spaces have it, and [adopted](crate::PageTable::adopt) ones.
    GLOBAL = 3,
    /// Stores go to memory at once.
    WRITE_THROUGH = 4,
    /// Device memory: nothing is cached; on x86-64 memory-type registers may still make it write-combining, and on arm64
    /// the device may acknowledge writes early. With `WRITE_THROUGH` neither.
    UNCACHED = 5,
    /// Used since the bit was cleared last. Set by hardware, or given at map time to spare it the work.
    ACCESSED = 6,
    /// Written since the bit was cleared last, by this mapping.
    DIRTY = 7,
    /// The owner's; hugemm keeps it and does not look.
    OWNER0 = 8,
    /// The owner's; hugemm keeps it and does not look.
    OWNER1 = 9,
}

impl Flags {
    /// Read-only, kernel-only data that nobody has used.
    pub const NONE: Flags = Flags(0);

    /// What hardware changes by itself.
    pub const HARDWARE: Flags = Flags(Flags::ACCESSED.0 | Flags::DIRTY.0);

    /// Members of either.
    #[must_use]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// Members that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }

    /// Whether all of `other` are members.
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// `bits` if all of `flags` are members, 0 otherwise: how formats translate.
    pub(crate) const fn select(self, flags: Flags, bits: u64) -> u64 {
        if self.contains(flags) { bits } else { 0 }
    }

    /// `self` if `yes`, nothing otherwise: how formats translate back.
    pub(crate) const fn only_if(self, yes: bool) -> Flags {
        if yes { self } else { Flags::NONE }
    }
}

impl BitOr for Flags {
    type Output = Flags;

    fn bitor(self, other: Flags) -> Flags {
        self.with(other)
    }
}

impl BitAnd for Flags {
    type Output = Flags;

    fn bitand(self, other: Flags) -> Flags {
        Flags(self.0 & other.0)
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("READ")?;
        Flags::NAMES.iter().filter(|(flag, _)| self.contains(*flag)).try_for_each(|(_, name)| write!(f, "|{name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let flags = Flags::WRITE | Flags::USER;
        assert!(flags.contains(Flags::USER) && !flags.contains(Flags::USER | Flags::EXEC));
        assert_eq!(flags.without(Flags::USER) & flags, Flags::WRITE);
        assert_eq!((flags | Flags::USER, flags.without(Flags::EXEC)), (flags, flags), "a set has each member once");
        assert_eq!(format!("{flags:?}"), "READ|WRITE|USER");
    }
}
