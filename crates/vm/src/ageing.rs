//! Ageing pages by the run: the accessed bits of all mappings of adjoining pages, in one walk per mapping, and no flush.
//!
//! Pages that adjoin in their object adjoin wherever it is mapped. So their bits are read and cleared by one walk over a
//! few cache lines of each page table, under one lock round, instead of a reverse-map walk per page. Around them other
//! pages of the same 64 entries can be looked at for nothing (look-around).

use crate::address_space::AddressSpace;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::{Pattern, Vma};
use core::cell::RefCell;
use core::fmt;
use hugemm_base::{Order, PAGE_SHIFT, Pfn, VirtAddr, VirtRange};

/// 4 KiB pages that one look-around reaches over, itself included: the entries of 8 cache lines.
pub const AROUND: u64 = 64;

/// What the mappings of a page say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recency {
    /// One that counts has used it.
    pub young: bool,
    /// One keeps it in memory: it is locked, or all of them are in spaces that go away by themselves.
    pub keep: bool,
    /// How many mappings have used it.
    pub users: u32,
}

impl Recency {
    /// None has used it, and none keeps it.
    pub const UNUSED: Recency = Recency { young: false, keep: false, users: 0 };
}

/// Pages of one object that are aged together: offset and head of each, in ascending order and not empty. Those that do not
/// lie in the same [`AROUND`] pages of their order as the first are not looked at, and of several with one offset only the first is.
#[derive(Clone, Copy, Debug)]
pub struct AgeRun<'a> {
    /// The object's number.
    pub object: u64,
    /// The pages.
    pub pages: &'a [(u64, Pfn)],
    /// Their order.
    pub order: Order,
}

/// What is done about other 4 KiB pages that were used and lie in the same [`AROUND`] pages of the object as a run.
pub struct Neighbours<'a, 'p, S: Setup> {
    /// Whether a page is wanted: then it counts as looked at, and is old afterwards in this mapping and those that come after.
    pub wants: &'a dyn Fn(Pfn) -> bool,
    /// Is given those that a walk of one mapping found, none twice. The mapping's page table is locked, so that they stay; it may
    /// neither sleep nor lock page tables, areas or objects.
    pub take: &'a mut dyn FnMut(&Cx<'p, S>, &[Pfn]),
}

impl<S: Setup> fmt::Debug for Neighbours<'_, '_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Neighbours").finish_non_exhaustive()
    }
}

impl AgeRun<'_> {
    /// The [`AROUND`] pages of its order that the first page lies in: the first offset, and the one after the last.
    fn around(&self) -> Option<(u64, u64)> {
        let (first, _) = self.pages.first()?;
        let reach = AROUND * self.order.pages();
        let base = first - first % reach;
        Some((base, base.saturating_add(reach)))
    }

    /// The pages that are looked at.
    fn together(&self) -> impl Iterator<Item = (u64, Pfn)> {
        let reach = AROUND * self.order.pages();
        let base = self.around().map_or(0, |(base, _)| base);
        self.pages.iter().copied().take_while(move |(offset, _)| offset.wrapping_sub(base) < reach)
    }
}

/// A page at one of the places, and what its mappings have said.
#[derive(Clone, Copy)]
struct Slot {
    /// Its head's number + 1; 0 if nobody wants one there.
    page: u64,
    users: u32,
}

/// What is being found of the [`AROUND`] pages of a run.
struct Around<'a, 'p, S: Setup> {
    order: u32,
    slots: [Slot; AROUND as usize],
    neighbours: Option<Neighbours<'a, 'p, S>>,
    /// Neighbours that the walk of one mapping has found.
    heads: [Pfn; AROUND as usize],
}

/// The place of an offset.
const fn place(offset: u64, order: u32) -> usize {
    (offset >> order & (AROUND - 1)) as usize
}

impl<'a, 'p, S: Setup> Around<'a, 'p, S> {
    /// With these pages, of which the first at each place counts.
    fn new(order: Order, pages: impl Iterator<Item = (u64, Pfn)>, neighbours: Option<Neighbours<'a, 'p, S>>) -> Self {
        let mut slots = [Slot { page: 0, users: 0 }; AROUND as usize];
        for (offset, head) in pages {
            let slot = &mut slots[place(offset, order.get())];
            slot.page = if slot.page == 0 { head.get() + 1 } else { slot.page };
        }
        Around { order: order.get(), slots, neighbours, heads: [Pfn::new(0); AROUND as usize] }
    }

    /// Takes the accessed bits of what an area shows of the offsets `first..last`, in one walk.
    fn take_bits(
        &mut self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'p, S>,
        space: &AddressSpace<S>,
        area: &Vma<S>,
        (first, last): (u64, u64),
    ) {
        let (start, alone) = (area.page_of(first), area.info.kind.pattern == Pattern::Random);
        let Some(span) = crate::vma::pages(start, start + (last - first)) else { return };
        let task = RefCell::new(cx);
        let mut table = space.table().exclusive(vm.tables(&task));
        // What is there now is the next area's.
        if area.leaves() {
            return;
        }
        let mut count = 0;
        let (order, shift, wants) =
            (self.order, first.wrapping_sub(start), self.neighbours.as_ref().filter(|_| !alone).map(|all| all.wants));
        let (slots, wanted, number) = (&mut self.slots, &mut self.heads, &mut count);
        // By value what it needs for each leaf that was used: what is behind a reference would be loaded anew after each store.
        let choose = move |page: u64, frame: Pfn| {
            let slot = &mut slots[place(page.wrapping_add(shift), order)];
            if slot.page == 0 && wants.is_some_and(|wants| wants(frame)) {
                slot.page = frame.get() + 1;
                wanted[*number] = frame;
                *number += 1;
            }
            // If not, it is another page of the object at the same offset: a process's own copy.
            if slot.page != frame.get() + 1 {
                return false;
            }
            slot.users += 1;
            true
        };
        // In bounds: the area is.
        let _ = table.test_and_clear_young_of(span, choose);
        if let Some(neighbours) = self.neighbours.as_mut().filter(|_| count > 0) {
            (neighbours.take)(&**task.borrow(), &self.heads[..count]);
        }
    }

    /// How many mappings have used the page at an offset.
    fn users(&self, offset: u64, head: Pfn) -> u32 {
        let slot = self.slots[place(offset, self.order)];
        if slot.page == head.get() + 1 { slot.users } else { 0 }
    }
}

impl<S: Setup> Vm<'_, S> {
    /// Tests and clears the accessed bits of every mapping of the run's pages, and asks secondary MMUs; no TLB is touched.
    /// `found[i]` is what was found of page `i`; the run ends where it does. Mappings without recency and those
    /// of spaces that go away do not count.
    ///
    /// One lock round of the object and two per mapping; one walk per mapping, over the run's range or, with neighbours, the
    /// [`AROUND`] pages that it lies in. The page table is the caller's alone meanwhile, so what hardware has finished with is
    /// edited by plain stores. Interrupts are on; the caller holds no lock. If the run has many mappings a reschedule point is passed
    /// where the caller may sleep.
    pub fn age<'p>(
        &self,
        cx: &mut Cx<'p, S>,
        run: &AgeRun<'_>,
        found: &mut [Recency],
        neighbours: Option<Neighbours<'_, 'p, S>>,
    ) {
        let (Some((first, _)), Some(around)) = (run.pages.first().copied(), run.around()) else { return };
        // Only small pages have neighbours.
        let neighbours = neighbours.filter(|_| run.order == Order::ZERO);
        let last = run.together().zip(&*found).last().map_or(first, |((offset, _), _)| offset);
        let whole = (first, last.saturating_add(run.order.pages()));
        let (from, to) = if neighbours.is_some() { around } else { whole };
        let mut bits = Around::new(run.order, run.together().take(found.len()), neighbours);
        let shown = |area: &Vma<S>| part(area, from, to);
        let going = self.look(cx, run.object, whole, shown, |cx, area, (first, last), space| {
            let pages = run.together().zip(&mut *found).filter(|((offset, _), _)| (first..last).contains(offset));
            let Some(space) = space else { return pages.for_each(|(_, page)| page.keep = true) };
            bits.take_bits(self, cx, space, area, (first, last));
            if space.is_followed() {
                for ((offset, _), page) in pages {
                    let at = VirtAddr::new(area.page_of(offset) << PAGE_SHIFT);
                    let young = VirtRange::new(at, run.order.bytes()).is_ok_and(|span| space.followers_age(span));
                    page.young |= young;
                    page.users += u32::from(young);
                }
            }
        });
        for ((offset, head), page) in run.together().zip(&mut *found) {
            let users = bits.users(offset, head);
            page.young |= users > 0;
            page.users += users;
        }
        if going {
            found.iter_mut().for_each(|page| page.keep = true);
        }
    }

    /// Calls `each` for those areas of an object whose mappings count and that show one of the pages `first..end`, with what is `shown` there: with the space, or with
    /// none if the area is locked. Returns whether all that are not locked are in spaces that go away, and there are some.
    fn look<'p, T>(
        &self,
        cx: &mut Cx<'p, S>,
        object: u64,
        (first, end): (u64, u64),
        shown: impl Fn(&Vma<S>) -> Option<T>,
        mut each: impl FnMut(&mut Cx<'p, S>, &Vma<S>, T, Option<&AddressSpace<S>>),
    ) -> bool {
        let (mut mapped, mut going) = (false, false);
        let Some(object) = self.object(object) else { return false };
        let looked = {
            // SAFETY: `Registry::get` took a reference.
            let object = unsafe { object.as_ref() };
            object.each_area(first, end, |area| {
                let Some(part) = shown(area) else { return true };
                if area.info.kind.locked {
                    // What copies the object has its own there.
                    if area.info.object == object.id {
                        each(cx, area, part, None);
                    }
                    return true;
                }
                // SAFETY: a space outlives its areas, and this one is in the tree, which is locked.
                let space = unsafe { area.space.as_ref() };
                if space.is_exiting() {
                    going = true;
                    return true;
                }
                mapped = true;
                if area.info.kind.pattern != Pattern::Sequential {
                    each(cx, area, part, Some(space));
                }
                true
            })
        };
        self.put_object(cx, object);
        self.resched_after(cx, looked);
        going && !mapped
    }
}

/// The offsets of `from..to` that an area shows.
fn part<S: Setup>(area: &Vma<S>, from: u64, to: u64) -> Option<(u64, u64)> {
    let (begins, ends) = (area.info.offset, area.info.offset + area.info.range.pages());
    let (first, last) = (from.max(begins), to.min(ends));
    (first < last).then_some((first, last))
}
