//! Where processes have memory, and what is known of every word of it.

use hugemm_base::PageSize;
use hugemm_base::with;
use hugemm_vm::VmaKind;
use std::collections::{BTreeMap, BTreeSet};

pub struct Area {
    pub start: u64,
    pub pages: u64,
    pub kind: VmaKind,
}

impl Area {
    pub fn bytes(&self) -> u64 {
        self.pages * self.kind.page.bytes()
    }

    pub fn end(&self) -> u64 {
        self.start + self.bytes()
    }

    pub fn holds(&self, at: u64) -> bool {
        (self.start..self.end()).contains(&at)
    }

    /// Where the page begins that an address is in.
    pub fn page(&self, at: u64) -> u64 {
        at & !(self.kind.page.bytes() - 1)
    }
}

pub const SMALL: VmaKind = VmaKind::private(PageSize::Size4K);
pub const LARGE: VmaKind = VmaKind::private(PageSize::Size2M);

/// Private ones, and one that all processes share, which adjoins the first.
pub static AREAS: [Area; 4] = [
    Area { start: 0x4000_0000, pages: 24, kind: SMALL },
    Area { start: 0x4001_8000, pages: 10, kind: with!(SMALL, shared = true) },
    Area { start: 0x8000_0000, pages: 1, kind: LARGE },
    Area { start: 0xc000_0000, pages: 1, kind: LARGE.pooled() },
];
pub const PRIVATE: &Area = &AREAS[0];
pub const SHARED_PAGES: u64 = 10;

pub fn area_of(at: u64) -> &'static Area {
    AREAS.iter().find(|area| area.holds(at)).expect("in an area")
}

/// Stores while a process is forked.
pub struct Fork {
    pub id: u64,
    /// By whom; `None`: a device.
    pub stores: Vec<(Option<u32>, u64, u64)>,
}

/// How often a page has been unmapped, and whether it is just now.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Changes {
    pub begun: u64,
    pub under_way: bool,
}

/// How often a page has got other rights, whether it gets some just now, and whether it may not be stored to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Rights {
    pub begun: u64,
    pub under_way: bool,
    pub read_only: bool,
}

/// What is known of some words.
#[derive(Default)]
pub struct Book {
    /// What may be in each; 0 in those that are not here.
    pub words: BTreeMap<u64, BTreeSet<u64>>,
    pub changes: BTreeMap<u64, Changes>,
    pub rights: BTreeMap<u64, Rights>,
    /// What was stored during a change.
    pub fresh: BTreeMap<u64, BTreeSet<u64>>,
    /// Pages that could not be mapped again.
    pub gone: BTreeSet<u64>,
    /// Pages that are given up, and not stored to since: each word is what it was or 0, and may be 0 any time.
    pub given_up: BTreeSet<u64>,
    pub forks: Vec<Fork>,
}

impl Book {
    pub fn changes(&self, page: u64) -> Changes {
        self.changes.get(&page).copied().unwrap_or_default()
    }

    pub fn rights(&self, page: u64) -> Rights {
        self.rights.get(&page).copied().unwrap_or_default()
    }

    /// Whether something is being done to a page.
    pub fn is_under_way(&self, page: u64) -> bool {
        self.changes(page).under_way || self.rights(page).under_way
    }

    /// Whether something is being done to one of these pages, or one is not there.
    pub fn is_busy(&self, mut pages: impl Iterator<Item = u64>) -> bool {
        pages.any(|page| self.is_under_way(page) || self.gone.contains(&page))
    }

    pub fn begin_changes(&mut self, pages: impl Iterator<Item = u64>) {
        for page in pages {
            let changes = self.changes.entry(page).or_default();
            *changes = Changes { begun: changes.begun + 1, under_way: true };
        }
    }

    pub fn end_changes(&mut self, pages: impl Iterator<Item = u64>) {
        pages.for_each(|page| self.changes.get_mut(&page).expect("begun").under_way = false);
    }

    pub fn begin_rights(&mut self, pages: impl Iterator<Item = u64>) {
        for page in pages {
            let rights = self.rights.entry(page).or_default();
            *rights = Rights { begun: rights.begun + 1, under_way: true, ..*rights };
        }
    }

    /// `read_only`: whether they may be stored to from here on, if that has changed.
    pub fn end_rights(&mut self, pages: impl Iterator<Item = u64>, read_only: Option<bool>) {
        for page in pages {
            let rights = self.rights.get_mut(&page).expect("begun");
            *rights = Rights { under_way: false, read_only: read_only.unwrap_or(rights.read_only), ..*rights };
        }
    }

    pub fn may_be(&self, at: u64) -> BTreeSet<u64> {
        self.words.get(&at).cloned().unwrap_or_else(|| [0].into())
    }

    /// A value has been stored; `torn`: the page was changed meanwhile.
    pub fn stored(&mut self, by: Option<u32>, at: u64, value: u64, torn: bool) {
        if torn {
            let mut may = self.may_be(at);
            may.extend([0, value]);
            self.words.insert(at, may);
            self.fresh.entry(at).or_default().insert(value);
        } else {
            self.words.insert(at, [value].into());
            self.given_up.remove(&area_of(at).page(at));
        }
        self.forks.iter_mut().for_each(|fork| fork.stores.push((by, at, value)));
    }
}
