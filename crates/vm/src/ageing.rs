//! Ageing pages by the run: the accessed bits of all mappings of adjoining pages, in one walk per mapping, and no flush.
//!
//! Pages that adjoin in their object adjoin wherever it is mapped. So their bits are read and cleared by one walk over a
//! few cache lines of each page table, under one lock round, instead of a reverse-map walk per page. Around them other
//! pages of the same 64 entries can be looked at for nothing (look-around).

use crate::cpu_masks::SpaceTlb;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::Vma;
use core::cell::RefCell;
use hugemm_base::{Order, PAGE_SHIFT, Pfn, VirtAddr, VirtRange};

/// 4 KiB pages that one look-around reaches over, itself included: the entries of 8 cache lines.
pub const AROUND: u64 = 64;

/// What the mappings of a page say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recency {
    /// One that counts has used it.
    pub young: bool,
    /// One keeps it in memory: it is locked, or all of them are in spaces that go away by themselves.
    pub keep: bool,
    /// How many mappings have used it.
    pub users: u32,
}

/// Pages of one object that are aged together: offset and head of each, in ascending order and not empty.
#[derive(Clone, Copy, Debug)]
pub struct AgeRun<'a> {
    /// The object's number.
    pub object: u64,
    /// The pages.
    pub pages: &'a [(u64, Pfn)],
    /// Their order.
    pub order: Order,
}

impl<S: Setup> Vm<'_, S> {
    /// Tests and clears the accessed bits of every mapping of the run's pages, and asks secondary MMUs; no TLB is touched.
    /// `found[i]` is what was found of page `i`; pages beyond its end stay as old as they are. Mappings without recency and those
    /// of spaces that go away do not count.
    ///
    /// Other 4 KiB pages in the run's range, and in the [64 entries](AROUND) that its ends lie in, that have been used are
    /// shown to `neighbour`, which says whether it wants them: then they count as looked at and are old afterwards, in all
    /// mappings that are walked from then on. It is called under a page table's lock, so what is mapped there can be held;
    /// in a run that spans no more than those 64 entries, once for a page that it wants.
    ///
    /// One lock round of the object and two per mapping; one walk per mapping over the run's range. Interrupts are on; the caller
    /// holds no lock.
    pub fn age(
        &self,
        cx: &mut Cx<'_, S>,
        run: &AgeRun<'_>,
        found: &mut [Recency],
        mut neighbour: Option<&mut dyn FnMut(Pfn) -> bool>,
    ) {
        let (Some((from, _)), Some((last, _))) = (run.pages.first().copied(), run.pages.last().copied()) else {
            return;
        };
        let Some(object) = self.registry().shared().get(run.object) else { return };
        let size = run.order.pages();
        let to = last.saturating_add(size);
        let mut mapped = false;
        let mut going = false;
        // Neighbours that are wanted, by their place among the 64: frame number + 1.
        let mut wanted = [0; AROUND as usize];
        {
            // SAFETY: `Registry::get` took a reference.
            let areas = unsafe { object.as_ref() }.areas.shared();
            for area in areas.iter() {
                let Some((first, last)) = part(area, from, to) else { continue };
                let here = |offset: u64| (first..last).contains(&offset);
                if area.info.kind.locked {
                    let pages = run.pages.iter().zip(&mut *found).filter(|((offset, _), _)| here(*offset));
                    pages.for_each(|(_, page)| page.keep = true);
                    continue;
                }
                // SAFETY: a space outlives its areas, and this one is on the list, which is locked.
                let space = unsafe { area.space.as_ref() };
                if space.is_exiting() {
                    going = true;
                    continue;
                }
                mapped = true;
                if area.info.kind.no_recency {
                    continue;
                }
                let (first, last) = match &neighbour {
                    Some(_) if size == 1 => {
                        part(area, from & !(AROUND - 1), to.checked_next_multiple_of(AROUND).unwrap_or(u64::MAX))
                    }
                    _ => None,
                }
                .unwrap_or((first, last));
                let start = area.info.range.first_page() + (first - area.info.offset);
                let Some(span) = crate::vma::pages(start, start + (last - first)) else { continue };
                let task = RefCell::new(&mut *cx);
                let mut table = space.table().shared(self.tables(&task));
                // Both go up.
                let mut next = 0;
                let choose = |page: u64, frame: Pfn| {
                    let offset = first + (page - start);
                    while run.pages.get(next).is_some_and(|page| page.0 < offset) {
                        next += 1;
                    }
                    match run.pages.get(next) {
                        Some((at, head)) if *at == offset => {
                            // If not, it is another page of the object at the same offset: a process's own copy.
                            let Some(found) = found.get_mut(next).filter(|_| *head == frame) else { return false };
                            found.young = true;
                            found.users += 1;
                            true
                        }
                        _ => {
                            let wanted = &mut wanted[(offset % AROUND) as usize];
                            let this = frame.number() + 1;
                            if *wanted != this && neighbour.as_mut().is_some_and(|wants| wants(frame)) {
                                *wanted = this;
                            }
                            *wanted == this
                        }
                    }
                };
                // In bounds: the area is.
                let _ = table.test_and_clear_young_of(span, choose);
                drop(table);
                if space.is_followed() {
                    for ((offset, _), page) in
                        run.pages.iter().zip(&mut *found).filter(|((offset, _), _)| here(*offset))
                    {
                        let at =
                            VirtAddr::new((area.info.range.first_page() + (offset - area.info.offset)) << PAGE_SHIFT);
                        let young = VirtRange::new(at, run.order.bytes()).is_ok_and(|span| space.followers_age(span));
                        page.young |= young;
                        page.users += u32::from(young);
                    }
                }
            }
        }
        if going && !mapped {
            found.iter_mut().for_each(|page| page.keep = true);
        }
        self.put_object(cx, object);
    }

    /// The old way, one page at a time: one walk of the page tables for each mapping, as the patch series has it, and for
    /// each that has used the page `stale` is told where: whether and how to flush there is its business. For comparison
    /// with [`age`](Vm::age), and by the same rules.
    pub fn age_page(
        &self,
        cx: &mut Cx<'_, S>,
        head: Pfn,
        order: Order,
        mut stale: impl FnMut(&mut Cx<'_, S>, &SpaceTlb, VirtRange),
    ) -> Recency {
        let mut found = Recency::default();
        let (mut mapped, mut going) = (false, false);
        let Some(owner) = self.owner(head) else { return found };
        let Some(object) = self.registry().shared().get(owner.object) else { return found };
        {
            // SAFETY: `Registry::get` took a reference.
            let areas = unsafe { object.as_ref() }.areas.shared();
            for area in areas.iter() {
                let Some(at) = area.address_of(owner.offset) else { continue };
                let Ok(span) = VirtRange::new(at, order.bytes()) else { continue };
                if area.info.kind.locked {
                    found.keep = true;
                    continue;
                }
                // SAFETY: a space outlives its areas, and this one is on the list, which is locked.
                let space = unsafe { area.space.as_ref() };
                if space.is_exiting() {
                    going = true;
                    continue;
                }
                mapped = true;
                if area.info.kind.no_recency {
                    continue;
                }
                let young = {
                    let task = RefCell::new(&mut *cx);
                    let mut table = space.table().shared(self.tables(&task));
                    table.test_and_clear_young_of(span, |_, frame| frame == head)
                };
                let young = young.is_ok_and(|young| young.young > 0);
                if young {
                    stale(cx, space.tlb(), span);
                }
                let young = young | (space.is_followed() && space.followers_age(span));
                found.young |= young;
                found.users += u32::from(young);
            }
        }
        self.put_object(cx, object);
        found.keep |= going && !mapped;
        found
    }
}

/// The offsets of `from..to` that an area shows.
fn part<S: Setup>(area: &Vma<S>, from: u64, to: u64) -> Option<(u64, u64)> {
    let (begins, ends) = (area.info.offset, area.info.offset + area.info.range.pages());
    let (first, last) = (from.max(begins), to.min(ends));
    (first < last).then_some((first, last))
}
