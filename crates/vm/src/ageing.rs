//! Ageing pages by the run: the accessed bits of all mappings of adjoining pages, in one walk per mapping, and no flush.
//!
//! Pages that adjoin in their object adjoin wherever it is mapped. So their bits are read and cleared by one walk over a
//! few cache lines of each page table, under one lock round, instead of a reverse-map walk per page. Around them other
//! pages of the same 64 entries can be looked at for nothing (look-around).

use crate::area::Area;
use crate::object::Owner;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use core::cell::RefCell;
use hugemm_base::{Order, Pfn, VirtAddr};
use hugemm_paging::Span;

/// Pages that one look-around reaches over, itself included: the entries of 8 cache lines.
const AROUND: u64 = 64;

/// What the mappings of a page say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recency {
    /// One that counts has used it.
    pub young: bool,
    /// One keeps it in memory: it is locked, or all of them are in spaces that go away by themselves.
    pub keep: bool,
    /// How many mappings say so: `folio_referenced`'s count.
    pub mappings: u32,
}

/// Which pages are aged together.
#[derive(Clone, Copy, Debug)]
pub struct AgeRun<'a> {
    /// Their heads, in the order of their offsets.
    pub heads: &'a [Pfn],
    /// Their order.
    pub order: Order,
    /// What the first belongs to; the others are the pages after it.
    pub first: Owner,
}

impl<S: Setup> Vm<'_, S> {
    /// How many of `heads` adjoin from the first on, as one run: pages of one object at ascending offsets. At least 1 of
    /// them, or none if the first is nobody's. O(run); reads two words of each descriptor.
    pub fn age_run<'a>(&self, heads: &'a [Pfn], order: Order) -> Option<AgeRun<'a>> {
        let first = self.owner(*heads.first()?)?;
        let follows = |(index, head): (u64, &Pfn)| {
            let offset = first.offset + index * order.pages();
            self.owner(*head) == Some(Owner { object: first.object, offset })
        };
        let count = (0_u64..).zip(heads).take_while(|next| follows(*next)).count();
        Some(AgeRun { heads: &heads[..count.max(1)], order, first })
    }

    /// Tests and clears the accessed bits of every mapping of the run's pages, and asks secondary MMUs; no TLB is touched.
    /// `found[i]` is what was found of `heads[i]`. Mappings without recency and those of spaces that go away do not count.
    ///
    /// Other pages nearby that have been used are shown to `neighbour`, which says whether it wants them: then they count
    /// as looked at and are old afterwards. It is called under a page table's lock, so what is mapped there can be held.
    /// One lock round of the object, and two per mapping.
    pub fn age(
        &self,
        cx: &mut Cx<'_, S>,
        run: &AgeRun<'_>,
        found: &mut [Recency],
        mut neighbour: impl FnMut(Pfn) -> bool,
    ) {
        let Some(object) = self.registry.shared().get(run.first.object) else { return };
        let (pages, size) = (run.heads.len() as u64 * run.order.pages(), run.order.pages());
        let (from, to) = (run.first.offset, run.first.offset + pages);
        let mut mapped = false;
        let mut going = false;
        {
            // SAFETY: `Registry::get` took a reference.
            let areas = unsafe { object.as_ref() }.areas.shared();
            for area in areas.iter() {
                let Some((first, last)) = part(area, from, to) else { continue };
                let index = |offset: u64| ((offset - from) / size) as usize;
                if area.info.kind.locked {
                    found[index(first)..index(last - 1) + 1].iter_mut().for_each(|page| page.keep = true);
                    continue;
                }
                // SAFETY: a space outlives its areas, and this one is on the list, which is locked.
                let space = unsafe { area.space.as_ref() };
                if Self::is_exiting(space) {
                    going = true;
                    continue;
                }
                mapped = true;
                if area.info.kind.no_recency {
                    continue;
                }
                // Look-around: not for large pages, whose neighbours are in other cache lines or tables.
                let (wide_first, wide_last) = match size {
                    1 => part(area, from & !(AROUND - 1), to.next_multiple_of(AROUND)).unwrap_or((first, last)),
                    _ => (first, last),
                };
                let start = area.info.span.first() + (wide_first - area.info.offset);
                let Some(span) = crate::unmap::pages(start, start + (wide_last - wide_first)) else { continue };
                let task = RefCell::new(&mut *cx);
                let mut table = space.table.shared(self.tables(&task));
                let choose = |page: u64, frame: Pfn| {
                    let offset = wide_first + (page - start);
                    if (from..to).contains(&offset) {
                        let place = index(offset);
                        let mine = run.heads.get(place) == Some(&frame);
                        if mine {
                            found[place].young = true;
                            found[place].mappings += 1;
                        }
                        mine
                    } else {
                        neighbour(frame)
                    }
                };
                // In bounds: the area is.
                let _ = table.clear_young_of(span, choose, |_| ());
                drop(table);
                if space.is_followed() {
                    for offset in (first..last).step_by(size as usize) {
                        let at = VirtAddr::new((area.info.span.first() + (offset - area.info.offset)) << 12);
                        let young =
                            Span::new(at, run.order.bytes()).is_ok_and(|span| space.followers_age(span.range()));
                        found[index(offset)].young |= young;
                    }
                }
            }
        }
        if going && !mapped {
            found.iter_mut().for_each(|page| page.keep = true);
        }
        self.put_object(cx, object);
    }
}

/// The offsets of `from..to` that an area shows.
fn part<S: Setup>(area: &Area<S>, from: u64, to: u64) -> Option<(u64, u64)> {
    let (begins, ends) = (area.info.offset, area.info.offset + area.info.span.pages());
    let (first, last) = (from.max(begins), to.min(ends));
    (first < last).then_some((first, last))
}
