//! Operations on a page table, at random.

use hugemm_base::PageSize;
use proptest::prelude::*;

/// The window: 4096 pages around a border of 512 GiB, so that every level takes part.
pub const BASE: u64 = (1 << 27) - 2048;
pub const PAGES: u64 = 4096;

#[derive(Clone, Debug)]
pub enum Op {
    /// `fail`: which table allocation to fail, if there is one.
    Map {
        first: u64,
        runs: Vec<(u64, u64)>,
        flags: u8,
        largest: PageSize,
        shared: bool,
        fold: bool,
        fail: Option<u64>,
    },
    Detach {
        first: u64,
        pages: u64,
        live: bool,
    },
    Harvest {
        which: usize,
    },
    Attach {
        which: usize,
        size: PageSize,
        fail: Option<u64>,
    },
    Protect {
        first: u64,
        pages: u64,
        set: u8,
        clear: u8,
        shared: bool,
    },
    WriteProtect {
        first: u64,
        pages: u64,
    },
    Age {
        first: u64,
        pages: u64,
    },
    Access {
        page: u64,
        write: bool,
    },
    Split {
        first: u64,
        pages: u64,
        resizes: bool,
        fail: Option<u64>,
    },
    Collapse {
        block: u64,
        resizes: bool,
    },
    /// All of it comes to lie elsewhere.
    Relocate {
        first: u64,
        pages: u64,
        to: u64,
        fail: Option<u64>,
    },
    /// The leaf gives way to the owner's word.
    Away {
        page: u64,
        word: u64,
    },
    /// It comes back, or its word changes or goes.
    Back {
        which: usize,
        next: u8,
    },
    /// A word where nothing is.
    Enter {
        page: u64,
        size: PageSize,
        word: u64,
    },
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    let length = prop_oneof![1_u64..8, 1_u64..600, Just(512), Just(1024), Just(2048)];
    (prop_oneof![0..PAGES, (0..8_u64).prop_map(|block| block * 512)], length)
        .prop_map(|(first, pages)| (first, pages.min(PAGES - first)))
}

pub fn op() -> impl Strategy<Value = Op> {
    let fail = prop_oneof![3 => Just(None), 1 => (0_u64..4).prop_map(Some)];
    let size = prop_oneof![Just(PageSize::Size4K), Just(PageSize::Size2M), Just(PageSize::Size1G)];
    let run = (
        prop_oneof![0_u64..4096, (0_u64..8).prop_map(|block| block * 512)],
        prop_oneof![1_u64..5, 1_u64..600, Just(512)],
    );
    let runs = prop::collection::vec(run, 1..5);
    prop_oneof![
        6 => (0..PAGES, prop::bool::ANY, runs, 0_u8..32, size.clone(), prop::bool::ANY, prop::bool::ANY, fail.clone()).prop_map(
            |(first, aligned, runs, flags, largest, shared, fold, fail)| {
                let first = if aligned { first & !511 } else { first };
                Op::Map { first, runs, flags, largest, shared, fold, fail }
            }
        ),
        4 => (range(), prop::bool::ANY).prop_map(|((first, pages), live)| Op::Detach { first, pages, live }),
        3 => (0_usize..8).prop_map(|which| Op::Harvest { which }),
        3 => (0_usize..8, size, fail.clone()).prop_map(|(which, size, fail)| Op::Attach { which, size, fail }),
        2 => (range(), 0_u8..32, 0_u8..32, prop::bool::ANY)
            .prop_map(|((first, pages), set, clear, shared)| Op::Protect { first, pages, set, clear, shared }),
        2 => range().prop_map(|(first, pages)| Op::WriteProtect { first, pages }),
        1 => range().prop_map(|(first, pages)| Op::Age { first, pages }),
        3 => (0..PAGES, prop::bool::ANY).prop_map(|(page, write)| Op::Access { page, write }),
        1 => (range(), prop::bool::ANY, fail.clone())
            .prop_map(|((first, pages), resizes, fail)| Op::Split { first, pages, resizes, fail }),
        3 => (range(), prop_oneof![0..PAGES, (0..8_u64).prop_map(|block| block * 512)], fail)
            .prop_map(|((first, pages), to, fail)| Op::Relocate { first, pages, to, fail }),
        1 => (0..PAGES / 512, prop::bool::ANY).prop_map(|(block, resizes)| Op::Collapse { block, resizes }),
        3 => (0..PAGES, 0_u64..1 << 52).prop_map(|(page, word)| Op::Away { page, word }),
        2 => (0_usize..64, 0_u8..3).prop_map(|(which, next)| Op::Back { which, next }),
        1 => (0..PAGES, prop_oneof![Just(PageSize::Size4K), Just(PageSize::Size2M)], 0_u64..1 << 52)
            .prop_map(|(page, size, word)| Op::Enter { page: page & !(size.pages() - 1), size, word }),
    ]
}
