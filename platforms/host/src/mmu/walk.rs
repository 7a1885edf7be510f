//! Walking real x86-64 tables, setting accessed and dirty bits as hardware does, and accesses.
//!
//! The bits are the manuals', written down here once more on purpose: hardware does not ask the mapper what an entry is.

use super::oracle::Violation;
use super::tlb::{CachedTable, CpuTlb, Translation, reach};
use super::{Fault, Mmu, MmuAccess};
use hugemm_base::{CpuId, Pfn, PhysAddr, VirtAddr};
use std::sync::atomic::{AtomicU64, Ordering};

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const FRAME: u64 = 0x000f_ffff_ffff_f000;

/// Levels of tables.
const LEVELS: u32 = 4;

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
        let matching = tlb.matching(at);
        if access == MmuAccess::Store
            && self.keeps_refusals.load(Ordering::Relaxed)
            && matching.iter().any(|known| !tlb.leaves[*known].writable)
        {
            return Err(Fault::Protection);
        }
        let mut hit = None;
        if !matching.is_empty() && !tlb.random.one_in(8) {
            hit = Some(matching[tlb.random.below(matching.len())]);
        }
        if let Some(index) = hit {
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
            self.oracle.report(Violation::StaleUse { cpu, at, frame });
        }
        if access == MmuAccess::Store {
            self.oracle.wrote(frame);
            if self.mapped_now(tlb, at).is_some_and(|now| now != frame) {
                self.oracle.report(Violation::LostStore { cpu, at, frame });
            }
        }
        phys
    }

    /// The frame that the tables give for an address at this moment, without a trace.
    fn mapped_now(&self, tlb: &CpuTlb, at: VirtAddr) -> Option<Pfn> {
        let mut table = Pfn::containing(tlb.root?);
        for level in (0..LEVELS).rev() {
            let entry = self.entry(table, at, level)?.load(Ordering::Acquire);
            if entry & PRESENT == 0 {
                return None;
            }
            table = Pfn::containing(PhysAddr::new(entry & FRAME));
            if level == 0 || entry & LARGE != 0 {
                let inside = at.get() & (reach(level) - 1);
                return Some(Pfn::containing(PhysAddr::new((entry & FRAME & !(reach(level) - 1)) + inside)));
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

    /// Walks, sets the bits, remembers.
    pub(super) fn walk(
        &self,
        cpu: CpuId,
        tlb: &mut CpuTlb,
        at: VirtAddr,
        access: MmuAccess,
    ) -> Result<Translation, Fault> {
        let root = tlb.root.ok_or(Fault::NotPresent)?;
        let top = CachedTable {
            tag: tlb.tag,
            base: 0,
            level: LEVELS - 1,
            table: Pfn::containing(root),
            writable: true,
            seen: self.oracle.now(),
        };
        let starts = tlb.starts(at);
        let start =
            if starts.is_empty() || tlb.random.one_in(8) { top } else { starts[tlb.random.below(starts.len())] };
        if self.oracle.freed_since(start.table, start.seen) {
            self.oracle.report(Violation::FreedTable { cpu, at, table: start.table });
            return Err(Fault::NotPresent);
        }
        let (mut table, mut writable) = (start.table, start.writable);
        for level in (0..=start.level).rev() {
            if self.oracle.is_free(table) {
                self.oracle.report(Violation::FreedTable { cpu, at, table });
                return Err(Fault::NotPresent);
            }
            let Some(entry) = self.entry(table, at, level) else {
                self.oracle.report(Violation::Wild { at, frame: table });
                return Err(Fault::NotPresent);
            };
            let mut value = entry.load(Ordering::Acquire);
            let leaf = loop {
                if value & PRESENT == 0 {
                    return Err(Fault::NotPresent);
                }
                let leaf = level == 0 || value & LARGE != 0;
                if leaf && access == MmuAccess::Store && !(writable && value & WRITABLE != 0) {
                    return Err(Fault::Protection);
                }
                let set = if leaf && access == MmuAccess::Store { ACCESSED | DIRTY } else { ACCESSED };
                if value & set == set {
                    break leaf;
                }
                // As hardware does: a locked update of the entry as it was seen, or another look.
                match entry.compare_exchange(value, value | set, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        value |= set;
                        break leaf;
                    }
                    Err(now) => value = now,
                }
            };
            // After the entry was read: what it refers to may have been freed and used anew before, but not since, because
            // that would have had to wait for this CPU.
            let seen = self.oracle.now();
            writable &= value & WRITABLE != 0;
            let below = value & FRAME & !if leaf { reach(level) - 1 } else { 0 };
            let frame = Pfn::containing(PhysAddr::new(below));
            if leaf {
                let translation = Translation {
                    tag: tlb.tag,
                    global: value & GLOBAL != 0,
                    base: at.get() & !(reach(level) - 1),
                    level,
                    frame,
                    writable,
                    dirty: value & DIRTY != 0,
                    seen,
                };
                let used = Pfn::new(frame.number() + ((at.get() & (reach(level) - 1)) >> 12));
                if self.host().address(used).is_none() {
                    self.oracle.report(Violation::Wild { at, frame: used });
                    return Err(Fault::NotPresent);
                }
                if self.oracle.is_free(used) {
                    self.oracle.report(Violation::FreeMapped { cpu, at, frame: used });
                }
                tlb.insert(translation);
                return Ok(translation);
            }
            table = frame;
            if tlb.random.one_in(2) {
                let base = at.get() & !(reach(level) - 1);
                tlb.insert_table(CachedTable { tag: tlb.tag, base, level: level - 1, table, writable, seen });
            }
        }
        Err(Fault::NotPresent)
    }

    /// Something that a CPU does by itself.
    pub(super) fn repeat(&self, cpu: CpuId, tlb: &mut CpuTlb) {
        tlb.evict();
        if tlb.recent.is_empty() {
            return;
        }
        let index = tlb.random.below(tlb.recent.len());
        let (at, access) = tlb.recent[index];
        if tlb.paused || tlb.random.one_in(4) {
            // Speculation: never a store, and a fault is nobody's business. Mostly nearby.
            let near = tlb.random.next() % 4 * 4096;
            let _ = self.walk(cpu, tlb, VirtAddr::new(at.get() ^ near), MmuAccess::Load);
        } else if self.access(cpu, tlb, at, access).is_err() {
            tlb.recent.swap_remove(index);
        }
    }
}
