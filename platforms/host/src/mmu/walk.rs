//! Walking real tables, setting accessed and dirty bits as hardware does, and accesses.

use super::entries::{GROUP, LEVELS, Tables};
use super::tlb::{CachedTable, CpuTlb, Translation, reach};
use super::{Fault, Mmu, MmuAccess, take_any};
use hugemm_base::{CpuId, PAGE_SHIFT, Pfn, PhysAddr, VirtAddr};
use std::sync::atomic::{AtomicU64, Ordering};

/// The frame of an address in the block that a leaf of `level` maps from `frame` on.
fn within(frame: Pfn, at: VirtAddr, level: u32) -> Pfn {
    let pages = reach(level) >> PAGE_SHIFT;
    Pfn::new(frame.get() & !(pages - 1) | at.get() >> PAGE_SHIFT & (pages - 1))
}

impl Mmu<'_, '_> {
    /// One access of a CPU; the physical address.
    pub(super) fn access(
        &self,
        cpu: CpuId,
        tlb: &mut CpuTlb,
        at: VirtAddr,
        access: MmuAccess,
    ) -> Result<PhysAddr, Fault> {
        tlb.evict();
        let mut matching = tlb.matching(at);
        if access == MmuAccess::Store
            && self.keeps_refusals.load(Ordering::Relaxed)
            && matching.iter().any(|known| !tlb.leaves[*known].writable)
        {
            return Err(Fault::Protection);
        }
        if tlb.random.below(8) != 0
            && let Some(index) = take_any(&mut tlb.random, &mut matching)
        {
            let known = tlb.leaves[index];
            if access == MmuAccess::Load || known.writable && known.dirty {
                return Ok(self.through(cpu, tlb, known, at, access));
            }
            // The tables decide whether a first store is allowed, and have to be told of it.
            tlb.leaves.swap_remove(index);
        }
        let known = self.walk(cpu, tlb, at, access)?;
        Ok(self.through(cpu, tlb, known, at, access))
    }

    /// Uses a translation.
    fn through(&self, cpu: CpuId, tlb: &CpuTlb, known: Translation, at: VirtAddr, access: MmuAccess) -> PhysAddr {
        let offset = at.get() - known.base;
        let phys = PhysAddr::new(known.frame.start().get() + offset);
        let frame = Pfn::containing(phys);
        if self.oracle.freed_since(frame, known.seen) {
            self.oracle.report(format!("{cpu} used {at} through a stale translation to {frame}, which has been freed"));
        }
        if access == MmuAccess::Store {
            self.oracle.wrote(frame);
            if self.mapped_now(tlb, at).is_some_and(|now| now != frame) {
                self.oracle
                    .report(format!("{cpu} stored at {at} through a stale translation to {frame}; the store is lost"));
            }
        }
        phys
    }

    /// The frame that the tables give for an address at this moment, without a trace.
    fn mapped_now(&self, tlb: &CpuTlb, at: VirtAddr) -> Option<Pfn> {
        let mut table = Pfn::containing(tlb.root?);
        for level in (0..LEVELS).rev() {
            let entry = self.entry(table, at, level)?.load(Ordering::Acquire);
            if !Tables::is_present(entry) {
                return None;
            }
            table = self.walks.frame(entry);
            if self.walks.is_leaf(entry, level) {
                return Some(within(table, at, level));
            }
        }
        None
    }

    /// The entry for an address in a table; `None` if the table is no memory.
    fn entry(&self, table: Pfn, at: VirtAddr, level: u32) -> Option<&AtomicU64> {
        let base = self.host().address(table)?;
        let index = at.get() / reach(level) % 512;
        // SAFETY: an aligned word within a frame of the host's memory, which page tables' users access atomically while
        // they are hooked in.
        Some(unsafe { base.cast::<AtomicU64>().add(index as usize).as_ref() })
    }

    /// Notes an access in any leaf of the group that `at` is in; false if that one says otherwise by now.
    fn note_in_group(&self, tlb: &mut CpuTlb, table: Pfn, at: VirtAddr, level: u32, store: bool) -> bool {
        let group = at.get() & !(reach(level) * GROUP - 1);
        let other = VirtAddr::new(group + tlb.random.below(GROUP) * reach(level));
        let Some(entry) = self.entry(table, other, level) else { return false };
        let value = entry.load(Ordering::Acquire);
        let noted = self.walks.noted(value, true, store);
        Tables::is_present(value)
            && self.walks.is_folded(value)
            && entry.compare_exchange(value, noted, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether the leaf `value` at `at` is one of a whole group: all are present, but beside [edits](Mmu::see_edits), and say the same,
    /// but for what hardware notes.
    fn is_group(&self, table: Pfn, at: VirtAddr, level: u32, value: u64) -> bool {
        let group = at.get() & !(reach(level) * GROUP - 1);
        let first = value.wrapping_sub((at.get() & !(reach(level) - 1)) - group);
        let aligned = self.walks.frame(first).start().get().is_multiple_of(reach(level) * GROUP);
        aligned
            && (0..GROUP).all(|place| {
                let entry = self.entry(table, VirtAddr::new(group + place * reach(level)), level);
                let seen = entry.map_or(0, |entry| entry.load(Ordering::Acquire));
                self.walks.noted_apart(seen) == self.walks.noted_apart(first + place * reach(level))
                    || !Tables::is_present(seen) && self.sees_edits.load(Ordering::Relaxed)
            })
    }

    /// Walks, sets the bits, remembers.
    pub(super) fn walk(
        &self,
        cpu: CpuId,
        tlb: &mut CpuTlb,
        at: VirtAddr,
        access: MmuAccess,
    ) -> Result<Translation, Fault> {
        let (root, walks) = (tlb.root.ok_or(Fault::NotPresent)?, self.walks);
        let top = CachedTable {
            tag: tlb.tag,
            base: 0,
            level: LEVELS - 1,
            table: Pfn::containing(root),
            writable: true,
            seen: self.oracle.now(),
        };
        let mut starts = tlb.starts(at);
        let start = match tlb.random.below(8) {
            0 => top,
            _ => take_any(&mut tlb.random, &mut starts).unwrap_or(top),
        };
        if self.oracle.freed_since(start.table, start.seen) {
            self.oracle.report(format!("{cpu} walked {at} through the freed table {}", start.table));
            return Err(Fault::NotPresent);
        }
        let (mut table, mut writable) = (start.table, start.writable);
        for level in (0..=start.level).rev() {
            if self.oracle.is_free(table) {
                self.oracle.report(format!("{cpu} walked {at} through the freed table {table}"));
                return Err(Fault::NotPresent);
            }
            let Some(entry) = self.entry(table, at, level) else {
                self.oracle.report(format!("{at} leads to {table}, which is no memory"));
                return Err(Fault::NotPresent);
            };
            let mut value = entry.load(Ordering::Acquire);
            let leaf = loop {
                if !Tables::is_present(value) {
                    return Err(Fault::NotPresent);
                }
                let leaf = walks.is_leaf(value, level);
                let store = access == MmuAccess::Store;
                if leaf && store && !(writable && walks.lets_write(value, leaf)) {
                    return Err(Fault::Protection);
                }
                let noted = walks.noted(value, leaf, store);
                if value == noted {
                    break leaf;
                }
                // As hardware does: a locked update of the entry as it was seen, or another look.
                // For one of a group, perhaps in another of it.
                if leaf
                    && self.walks.is_folded(value)
                    && tlb.random.below(2) == 0
                    && self.note_in_group(tlb, table, at, level, store)
                {
                    break leaf;
                }
                match entry.compare_exchange(value, noted, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        value = noted;
                        break leaf;
                    }
                    Err(now) => value = now,
                }
            };
            // After the entry was read: what it refers to may have been freed and used anew before, but not since, because
            // that would have had to wait for this CPU.
            let seen = self.oracle.now();
            writable &= walks.lets_write(value, leaf);
            let below = walks.frame(value);
            if leaf {
                let folded = walks.is_folded(value);
                if folded && !self.is_group(table, at, level, value) {
                    self.oracle.report(format!("{cpu} found {at} in a folded group whose entries do not agree"));
                }
                let bytes = if folded && tlb.random.below(2) == 0 { reach(level) * GROUP } else { reach(level) };
                let translation = Translation {
                    tag: tlb.tag,
                    global: walks.is_global(value),
                    base: at.get() & !(bytes - 1),
                    level,
                    bytes,
                    folded,
                    frame: Pfn::new(below.get() & !((bytes >> PAGE_SHIFT) - 1)),
                    writable,
                    dirty: walks.is_dirty(value),
                    seen,
                };
                let used = within(below, at, level);
                if self.host().address(used).is_none() {
                    self.oracle.report(format!("{at} leads to {used}, which is no memory"));
                    return Err(Fault::NotPresent);
                }
                if self.oracle.is_free(used) {
                    self.oracle.report(format!("{cpu} found {at} mapped to {used}, which is free"));
                }
                if let Tables::Arm64 { resizes } = walks
                    && tlb.contradicts(&translation, resizes)
                {
                    self.conflict(cpu, at);
                }
                tlb.insert(translation);
                self.fills.fetch_add(1, Ordering::Relaxed);
                return Ok(translation);
            }
            table = below;
            if tlb.random.below(2) == 0 {
                let base = at.get() & !(reach(level) - 1);
                let new = CachedTable { tag: tlb.tag, base, level: level - 1, table, writable, seen };
                if let Tables::Arm64 { resizes } = walks
                    && tlb.contradicts_table(&new, resizes)
                {
                    self.conflict(cpu, at);
                }
                tlb.insert_table(new);
            }
        }
        Err(Fault::NotPresent)
    }

    fn conflict(&self, cpu: CpuId, at: VirtAddr) {
        self.oracle
            .report(format!("{cpu} has two translations of {at}: an entry was changed that had to be broken first"));
    }

    /// Something that a CPU does by itself.
    pub(super) fn repeat(&self, cpu: CpuId, tlb: &mut CpuTlb) {
        tlb.evict();
        if tlb.recent.is_empty() {
            return;
        }
        let index = tlb.random.below(tlb.recent.len() as u64) as usize;
        let (at, access) = tlb.recent[index];
        if tlb.paused || tlb.random.below(4) == 0 {
            // Speculation: never a store, and a fault is nobody's business. Mostly nearby.
            let near = tlb.random.below(4) * 4096;
            let _ = self.walk(cpu, tlb, VirtAddr::new(at.get() ^ near), MmuAccess::Load);
        } else if self.access(cpu, tlb, at, access).is_err() {
            tlb.recent.swap_remove(index);
        }
    }
}
