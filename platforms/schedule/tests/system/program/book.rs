//! Where processes have memory, and what is known of every word of it.

use hugemm_base::{PageSize, with};
use hugemm_vm::VmaKind;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub struct Area {
    pub start: u64,
    pub pages: u64,
    pub kind: VmaKind,
    /// It copies what the shared one shows, if that is a file's.
    pub copies: bool,
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

    /// Addresses of some of its pages.
    pub fn part(&self, pages: &Range<u64>) -> Range<u64> {
        let at = |page: u64| self.start + page * self.kind.page.bytes();
        at(pages.start)..at(pages.end)
    }

    /// Where the page begins that an address is in.
    pub fn page(&self, at: u64) -> u64 {
        at & !(self.kind.page.bytes() - 1)
    }
}

pub const SMALL: VmaKind = VmaKind::private(PageSize::Size4K);
pub const LARGE: VmaKind = VmaKind::private(PageSize::Size2M);

/// Private ones, one that all processes share, which adjoins the first, and one that copies that.
pub static AREAS: [Area; 5] = [
    Area { start: 0x4000_0000, pages: 24, kind: SMALL, copies: false },
    Area { start: 0x4001_8000, pages: SHARED_PAGES, kind: with!(SMALL, shared = true), copies: false },
    Area { start: 0x8000_0000, pages: 1, kind: LARGE, copies: false },
    Area { start: 0xc000_0000, pages: 1, kind: LARGE.pooled(), copies: false },
    Area { start: 0x5000_0000, pages: SHARED_PAGES, kind: SMALL, copies: true },
];
pub const PRIVATE: &Area = &AREAS[0];
pub const SHARED: &Area = &AREAS[1];
pub const COPIED: &Area = &AREAS[4];
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
    /// What a file may have had, since an area that copies it was as new last, in each word there.
    pub lent: BTreeMap<u64, BTreeSet<u64>>,
    /// Pages there that are the process's own for certain.
    pub own: BTreeSet<u64>,
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
        let lent = self.lent.get(&at).filter(|_| !self.own.contains(&area_of(at).page(at)));
        let stored = self.words.get(&at).into_iter().chain(lent).flatten().copied().collect::<BTreeSet<_>>();
        if stored.is_empty() { [0].into() } else { stored }
    }

    /// What a range of pages has that has been emptied: what was stored meanwhile, or nothing.
    pub fn empty(&mut self, range: &Range<u64>) {
        let fresh: Vec<_> = self.fresh.range(range.clone()).map(|(at, values)| (*at, values.clone())).collect();
        self.words.retain(|at, _| !range.contains(at));
        for (at, mut values) in fresh {
            if !self.lent.contains_key(&at) {
                values.insert(0);
            }
            self.words.insert(at, values);
        }
    }

    /// A page that copied a file is this process's own by now: what the file had is in the other words.
    pub fn copied(&mut self, page: u64) {
        if self.own.insert(page) {
            for (at, values) in self.lent.range(page..page + 4096) {
                self.words.entry(*at).or_default().extend(values);
            }
        }
    }

    /// A value has been stored; `torn`: the page was changed meanwhile.
    pub fn stored(&mut self, by: Option<u32>, at: u64, value: u64, torn: bool) {
        if torn {
            let mut may = self.may_be(at);
            may.extend([0, value]);
            self.words.insert(at, may);
            self.fresh.entry(at).or_default().insert(value);
        } else {
            if self.lent.contains_key(&at) {
                self.copied(area_of(at).page(at));
            }
            self.words.insert(at, [value].into());
            self.given_up.remove(&area_of(at).page(at));
        }
        self.forks.iter_mut().for_each(|fork| fork.stores.push((by, at, value)));
    }
}
