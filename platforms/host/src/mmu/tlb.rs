//! What one CPU remembers.

use super::{MmuAccess, take_any};
use hugemm_base::random::Random;
use hugemm_base::{PAGE_SHIFT, Pfn, PhysAddr, TlbScope, VirtAddr, X86Flush};

/// Translations that a CPU keeps before it has to evict.
const CAPACITY: usize = 64;

/// Accesses that a CPU's program repeats.
const RECENT: usize = 16;

/// One translation of a leaf.
#[derive(Clone, Copy, Debug)]
pub(super) struct Translation {
    pub(super) tag: usize,
    pub(super) global: bool,
    /// Address of its first byte.
    pub(super) base: u64,
    /// 0: 4 KiB; 1: 2 MiB; 2: 1 GiB.
    pub(super) level: u32,
    /// Bytes that it translates: a leaf's, or a group's.
    pub(super) bytes: u64,
    /// Whether the leaf is one of a group.
    pub(super) folded: bool,
    pub(super) frame: Pfn,
    pub(super) writable: bool,
    pub(super) dirty: bool,
    /// When it was read from the tables.
    pub(super) seen: u64,
}

/// A table that a walk may start from.
#[derive(Clone, Copy, Debug)]
pub(super) struct CachedTable {
    pub(super) tag: usize,
    /// First address that it translates.
    pub(super) base: u64,
    /// Level of its entries.
    pub(super) level: u32,
    pub(super) table: Pfn,
    pub(super) writable: bool,
    pub(super) seen: u64,
}

/// What an invalidation has to reach.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    pub(super) scope: TlbScope,
    /// Upper levels too; else they stay.
    pub(super) tables: bool,
    /// What is under every tag, not under the present one alone.
    pub(super) tags: bool,
    /// Leaves of this level; others stay.
    pub(super) level: Option<u32>,
}

/// Bytes that an entry of a level translates.
pub(super) const fn reach(level: u32) -> u64 {
    1 << (PAGE_SHIFT + 9 * level)
}

/// Whether two ranges of addresses, by their start and bytes, have an address in common.
fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    one.0 < other.0.wrapping_add(other.1) && other.0 < one.0.wrapping_add(one.1)
}

/// Whether the leaf stands in an entry on the way to the table, the table's own included.
fn replaces(table: &CachedTable, leaf: &Translation) -> bool {
    leaf.level > table.level && overlap((table.base, reach(table.level + 1)), (leaf.base, leaf.bytes))
}

/// Adds one, in any other's place if there are as many as there may be.
fn keep<T>(random: &mut Random, all: &mut Vec<T>, most: usize, new: T) {
    if all.len() >= most {
        take_any(random, all);
    }
    all.push(new);
}

/// One CPU's registers and TLB.
pub(super) struct CpuTlb {
    pub(super) root: Option<PhysAddr>,
    pub(super) tag: usize,
    pub(super) leaves: Vec<Translation>,
    pub(super) tables: Vec<CachedTable>,
    pub(super) random: Random,
    pub(super) recent: Vec<(VirtAddr, MmuAccess)>,
    pub(super) paused: bool,
}

impl CpuTlb {
    pub(super) fn new(seed: u64) -> Self {
        CpuTlb {
            root: None,
            tag: 0,
            leaves: Vec::new(),
            tables: Vec::new(),
            random: Random(seed),
            recent: Vec::new(),
            paused: false,
        }
    }

    /// Where the translations are that an access to `at` may use.
    pub(super) fn matching(&self, at: VirtAddr) -> Vec<usize> {
        let fits = |t: &Translation| (t.global || t.tag == self.tag) && at.get().wrapping_sub(t.base) < t.bytes;
        (0..self.leaves.len()).filter(|&i| fits(&self.leaves[i])).collect()
    }

    /// The tables that a walk for `at` may start from.
    pub(super) fn starts(&self, at: VirtAddr) -> Vec<CachedTable> {
        let fits = |t: &&CachedTable| t.tag == self.tag && at.get().wrapping_sub(t.base) < reach(t.level + 1);
        self.tables.iter().filter(fits).copied().collect()
    }

    /// Whether a translation that is about to be kept says something else than what is kept of its addresses: of another
    /// size, folded or not (unless the CPU `resizes`), or to another frame.
    pub(super) fn contradicts(&self, new: &Translation, resizes: bool) -> bool {
        let to = |t: &Translation| t.frame.start().get().wrapping_sub(t.base);
        self.leaves.iter().any(|old| {
            (old.global || new.global || old.tag == new.tag)
                && overlap((old.base, old.bytes), (new.base, new.bytes))
                && (to(old) != to(new) || (old.level, old.folded) != (new.level, new.folded) && !resizes)
        }) || self.tables.iter().any(|old| !resizes && old.tag == new.tag && replaces(old, new))
    }

    /// The same for a table.
    pub(super) fn contradicts_table(&self, new: &CachedTable, resizes: bool) -> bool {
        self.tables
            .iter()
            .any(|old| (old.tag, old.base, old.level) == (new.tag, new.base, new.level) && old.table != new.table)
            || self.leaves.iter().any(|old| !resizes && (old.global || old.tag == new.tag) && replaces(new, old))
    }

    pub(super) fn insert(&mut self, translation: Translation) {
        keep(&mut self.random, &mut self.leaves, CAPACITY, translation);
    }

    pub(super) fn insert_table(&mut self, table: CachedTable) {
        keep(&mut self.random, &mut self.tables, CAPACITY, table);
    }

    /// Forgets something, now and then.
    pub(super) fn evict(&mut self) {
        if self.random.below(16) == 0 {
            take_any(&mut self.random, &mut self.leaves);
        }
        if self.random.below(32) == 0 {
            take_any(&mut self.random, &mut self.tables);
        }
    }

    /// Remembers an access of the CPU's program, to be repeated.
    pub(super) fn remember(&mut self, at: VirtAddr, access: MmuAccess) {
        keep(&mut self.random, &mut self.recent, RECENT, (at, access));
    }

    /// Does exactly what an instruction does and no more: less even, where nothing more was asked for.
    pub(super) fn execute(&mut self, step: X86Flush, reach_of: Reach) {
        let (Reach { scope, tables, tags, level }, tag) = (reach_of, self.tag);
        let mine = |t: &Translation| match scope {
            TlbScope::Space => (tags || t.tag == tag) && !t.global,
            TlbScope::Kernel => t.global,
        };
        let named = |base: u64, bytes: u64| match step {
            X86Flush::Page(at) => at.get().wrapping_sub(base) < bytes,
            X86Flush::Space | X86Flush::All => true,
        };
        self.leaves.retain(|t| !(mine(t) && named(t.base, t.bytes) && level.is_none_or(|level| t.level == level)));
        if tables {
            // Tables have no global mark: those of the kernel's half are under each tag whose space has walked them.
            let every_tag = tags || step == X86Flush::All;
            self.tables.retain(|t| !((every_tag || t.tag == tag) && named(t.base, reach(t.level + 1))));
        }
    }

    /// Loads tables.
    pub(super) fn load(&mut self, root: PhysAddr, tag: usize, keep: bool) {
        if !keep {
            self.leaves.retain(|t| t.global || t.tag != tag);
            self.tables.retain(|t| t.tag != tag);
        }
        self.root = Some(root);
        self.tag = tag;
        // Another program.
        self.recent.clear();
    }
}
