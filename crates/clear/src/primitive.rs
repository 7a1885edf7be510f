//! The clearing primitives by name, and the facts about each that do not depend on the machine.
//!
//! The stores themselves are in [`crate::raw`]; which of them this CPU runs, in [`crate::features`].

use core::fmt;

/// One way of storing zeros to a run of memory.
///
/// The cached ones come first and the streaming ones after them: [`Primitive::class`] is one comparison, and so is the
/// first branch of [`crate::raw::zero`]. Every variant exists on every architecture, so that names, tables and saved
/// results mean the same everywhere; [`crate::features::Features`] says what can run.
#[non_exhaustive]
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Primitive {
    /// 8-byte volatile stores in plain Rust. Runs everywhere, also under Miri.
    Portable = 0,
    /// A 64-byte line per iteration: eight 8-byte stores on x86-64, four `stp xzr, xzr` on arm64.
    Unrolled = 1,
    /// x86-64 `rep stosq`.
    RepStosq = 2,
    /// x86-64 `rep stosb`, fast where the CPU has ERMS.
    RepStosb = 3,
    /// x86-64 AVX2: cached 32-byte stores (`vmovdqa`).
    Avx2Store = 4,
    /// arm64 `dc zva`: zeroes a block of the size that DCZID_EL0 states.
    DcZva = 5,
    /// x86-64 `movnti`: 8-byte streaming stores from a general register.
    Movnti = 6,
    /// x86-64 `clzero` (AMD): one 64-byte line per instruction.
    Clzero = 7,
    /// x86-64 AVX2: 32-byte streaming stores (`vmovntdq`).
    Avx2Stream = 8,
    /// x86-64 AVX-512F: 64-byte streaming stores (`vmovntdq`).
    Avx512Stream = 9,
    /// x86-64 `movdir64b`: 64-byte direct stores, each written whole.
    Movdir64b = 10,
    /// arm64 `stnp` of zero registers: stores with a non-temporal hint.
    Stnp = 11,
    /// The test platform's streaming primitive. The platform intercepts it and keeps its stores in a per-CPU buffer
    /// until the store fence; [`crate::raw::zero`] itself, knowing no platform, treats it as [`Primitive::Portable`].
    Model = 12,
}

/// How a primitive's stores are ordered against this CPU's later plain stores.
///
/// The distinction is x86-64's. On arm64 no store is ordered against a later one to another address, so there a cleared
/// extent of either class is published through a store-release or behind [`crate::raw::store_fence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PrimitiveClass {
    /// Ordered as plain stores are, and written through the caches. `rep stos` stores may pass each other inside the
    /// instruction, but not a later store (Intel SDM vol. 3, "Fast-String Operation and Out-of-Order Stores").
    Cached,
    /// Weakly ordered and written past the caches: another CPU may see a later plain store, such as the entry that maps
    /// the page, before these. [`crate::raw::store_fence`] must run, on the CPU that stored, before the memory is
    /// published, the task moves to another CPU, or the caller reschedules (Intel SDM vol. 1, "Caching of Temporal vs.
    /// Non-Temporal Data"; AMD APM vol. 3, "CLZERO").
    Streaming,
}

impl Primitive {
    /// Every variant, in the order of their numbers, for every architecture.
    pub const ALL: [Self; 13] = [
        Self::Portable,
        Self::Unrolled,
        Self::RepStosq,
        Self::RepStosb,
        Self::Avx2Store,
        Self::DcZva,
        Self::Movnti,
        Self::Clzero,
        Self::Avx2Stream,
        Self::Avx512Stream,
        Self::Movdir64b,
        Self::Stnp,
        Self::Model,
    ];

    /// The first streaming variant; all before it are cached.
    pub(crate) const FIRST_STREAMING: Self = Self::Movnti;

    /// The name used on command lines and in saved results, e.g. `rep-stosb`. It does not change between versions.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Unrolled => "unrolled",
            Self::RepStosq => "rep-stosq",
            Self::RepStosb => "rep-stosb",
            Self::Avx2Store => "avx2-store",
            Self::DcZva => "dc-zva",
            Self::Movnti => "movnti",
            Self::Clzero => "clzero",
            Self::Avx2Stream => "avx2-stream",
            Self::Avx512Stream => "avx512-stream",
            Self::Movdir64b => "movdir64b",
            Self::Stnp => "stnp",
            Self::Model => "model",
        }
    }

    /// The primitive of that [`name`](Self::name), exactly as spelt there.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name)
    }

    /// Whether the stores need the store fence before they are published.
    #[inline]
    #[must_use]
    pub const fn class(self) -> PrimitiveClass {
        if (self as u8) < (Self::FIRST_STREAMING as u8) { PrimitiveClass::Cached } else { PrimitiveClass::Streaming }
    }

    /// The address and the length in bytes must both be multiples of this: a power of two, at most 64, so any run of
    /// whole pages will do.
    ///
    /// It is 64 also for [`Primitive::DcZva`], whose block (16 to 2048 bytes) is known only at run time: what lies
    /// outside whole blocks is stored plainly.
    #[inline]
    #[must_use]
    pub const fn granule(self) -> usize {
        match self {
            Self::RepStosb => 1,
            Self::Portable | Self::RepStosq | Self::Model => 8,
            _ => 64,
        }
    }

    /// Whether it uses vector registers: the caller must then own the platform's vector context.
    #[inline]
    #[must_use]
    pub const fn needs_vector(self) -> bool {
        matches!(self, Self::Avx2Store | Self::Avx2Stream | Self::Avx512Stream)
    }

    /// Whether its stores are of the MOVNT family, the ones that [`crate::deny::movnt_slow`] is about.
    #[inline]
    pub(crate) const fn is_movnt(self) -> bool {
        matches!(self, Self::Movnti | Self::Avx2Stream | Self::Avx512Stream)
    }
}

impl fmt::Display for Primitive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_holds_every_number_once() {
        for (i, p) in Primitive::ALL.into_iter().enumerate() {
            assert_eq!(p as usize, i);
        }
    }

    #[test]
    fn names_are_unique_and_lead_back() {
        for p in Primitive::ALL {
            assert_eq!(Primitive::from_name(p.name()), Some(p));
        }
        assert_eq!(Primitive::from_name("REP-STOSB"), None);
        assert_eq!(Primitive::from_name(""), None);
    }

    #[test]
    fn primitives_are_told_apart() {
        use Primitive::*;
        let those = |which: fn(Primitive) -> bool| Primitive::ALL.into_iter().filter(move |p| which(*p));
        let streaming = [Movnti, Clzero, Avx2Stream, Avx512Stream, Movdir64b, Stnp, Model];
        assert!(those(|p| p.class() == PrimitiveClass::Streaming).eq(streaming));
        assert!(those(|p| p.granule() == 1).eq([RepStosb]) && those(|p| p.granule() == 64).count() == 9);
        assert!(those(|p| p.granule() == 8).eq([Portable, RepStosq, Model]));
        assert!(those(Primitive::needs_vector).eq([Avx2Store, Avx2Stream, Avx512Stream]));
        assert!(those(Primitive::is_movnt).eq([Movnti, Avx2Stream, Avx512Stream]));
        assert_eq!(format!("{Movnti:>8}|{RepStosb:<10}|"), "  movnti|rep-stosb |");
    }
}
