//! Areas of TiB, few pages of which are touched, by every verb, across the borders of tables of every level, beside a model of each page
//! that is there: what is in it, whose it is, and where. On formats of four and five levels, with and without folded groups.

use crate::support::{Cx, Handle, Metered, Model, Rig, as_first};
use hugemm_base::{Never, PageSize, VirtAddr, VirtRange};
use hugemm_frames::Frozen;
use hugemm_paging::{Aarch64, Flags, Lookup, PageFormat, X86_64La57};
use hugemm_threads::Random;
use hugemm_vm::{Backing, Discard, LENT, Protection, SharedRef, UnhookedPage, Usage, VmError, VmaInfo, VmaKind};
use std::collections::BTreeMap;

/// In pages.
const MIB2: u64 = 512;
const GIB: u64 = 1 << 18;
const GIB512: u64 = 1 << 27;
const TIB: u64 = 1 << 28;

fn at(page: u64) -> VirtAddr {
    VirtAddr::new(page << 12)
}

fn pages(first: u64, end: u64) -> VirtRange {
    VirtRange::from_pages(first, end - first).expect("a range")
}

/// A part of an area.
fn part(mut area: VmaInfo, range: VirtRange, offset: u64) -> VmaInfo {
    (area.range, area.offset) = (range, offset);
    area
}

/// A number of a page, which its places have.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    Here(u64),
    Zeroes,
    Away,
}

/// A page of an area's size, and in private areas what its 4 KiB pages begin with, if not with 0.
#[derive(Clone, Debug)]
struct Unit {
    is: Is,
    words: BTreeMap<u64, u64>,
}

struct Space<'r, 'h, F: PageFormat, const AWAY: bool> {
    handle: Handle<'r, 'h, F, AWAY>,
    areas: BTreeMap<u64, VmaInfo>,
    units: BTreeMap<u64, Unit>,
}

impl<F: PageFormat, const AWAY: bool> Space<'_, '_, F, AWAY> {
    fn area(&self, page: u64) -> Option<VmaInfo> {
        self.areas.range(..=page).next_back().map(|(_, area)| *area).filter(|area| area.range.end_page() > page)
    }

    fn meeting(&self, first: u64, end: u64) -> Vec<VmaInfo> {
        let before = self.area(first).map_or(first, |area| area.range.first_page());
        self.areas.range(before..end).map(|(_, area)| *area).filter(|area| area.range.end_page() > first).collect()
    }

    fn may_cut(&self, ends: [u64; 2]) -> bool {
        let inside = |at: u64| self.area(at).filter(|area| area.range.first_page() < at);
        ends.into_iter().all(|at| inside(at).is_none_or(|area| at.is_multiple_of(area.kind.page.pages())))
    }

    /// Whether a range is in areas throughout, and ends at whole pages of them.
    fn may_change(&self, first: u64, end: u64) -> bool {
        let covered: u64 = self.meeting(first, end).iter().map(|area| within(area.range, (first, end))).sum();
        covered == end - first && self.may_cut([first, end])
    }

    /// Takes out what areas and units have in a range, at whose ends they are cut.
    fn take(&mut self, first: u64, end: u64) -> (Vec<VmaInfo>, Vec<(u64, Unit)>) {
        for at in [first, end] {
            if let Some(area) = self.area(at).filter(|area| area.range.first_page() < at) {
                let (begins, ends) = (area.range.first_page(), area.range.end_page());
                let offset = area.offset + (at - begins);
                self.areas.insert(begins, part(area, pages(begins, at), area.offset));
                self.areas.insert(at, part(area, pages(at, ends), offset));
            }
        }
        let areas = self.meeting(first, end);
        areas.iter().for_each(|area| _ = self.areas.remove(&area.range.first_page()));
        let units: Vec<_> = self.units.range(first..end).map(|(page, unit)| (*page, unit.clone())).collect();
        units.iter().for_each(|(page, _)| _ = self.units.remove(page));
        (areas, units)
    }

    /// Puts areas and units there.
    fn put(&mut self, areas: impl IntoIterator<Item = VmaInfo>, units: impl IntoIterator<Item = (u64, Unit)>) {
        self.areas.extend(areas.into_iter().map(|area| (area.range.first_page(), area)));
        self.units.extend(units);
    }
}

/// How much of a range is within two pages.
fn within(range: VirtRange, (first, end): (u64, u64)) -> u64 {
    range.end_page().min(end).saturating_sub(range.first_page().max(first))
}

/// With those that say the same joined.
fn joined(areas: impl Iterator<Item = VmaInfo>) -> Vec<VmaInfo> {
    let mut all: Vec<VmaInfo> = Vec::new();
    for next in areas {
        let goes_on = |last: &&mut VmaInfo| {
            let adjoins = last.range.end_page() == next.range.first_page();
            let shows = last.object == next.object && last.offset + last.range.pages() == next.offset;
            adjoins && shows && last.kind == next.kind
        };
        match all.last_mut().filter(goes_on) {
            Some(last) => last.range = pages(last.range.first_page(), next.range.end_page()),
            None => all.push(next),
        }
    }
    all
}

/// A shared object, its number, what 4 KiB pages begin with, and which units are away.
struct Shared<'r, 'h, F: PageFormat, const AWAY: bool> {
    handle: SharedRef<'r, Model<'h, F, AWAY>>,
    id: u64,
    page: PageSize,
    words: BTreeMap<u64, u64>,
    away: Vec<u64>,
}

struct World<'r, 'h, F: PageFormat, const AWAY: bool> {
    rig: &'r Rig<'h, F, AWAY>,
    random: Random,
    spaces: Vec<Space<'r, 'h, F, AWAY>>,
    objects: Vec<Shared<'r, 'h, F, AWAY>>,
    stamp: u64,
}

impl<'r, 'h, F: PageFormat, const AWAY: bool> World<'r, 'h, F, AWAY> {
    const LIMIT: u64 = 1 << (9 * F::LEVELS - 1);

    fn new(rig: &'r Rig<'h, F, AWAY>, cx: &mut Cx<'_, 'h>, seed: u64) -> Self {
        let objects = [(3 * TIB, PageSize::Size4K), (1 << 33, PageSize::Size2M)].map(|(pages, page)| {
            let handle = rig.vm.create_shared(cx, pages, page, false).expect("memory");
            Shared { handle, id: 0, page, words: BTreeMap::new(), away: Vec::new() }
        });
        let handle = rig.vm.create(cx, pages(0, Self::LIMIT)).expect("memory");
        let spaces = vec![Space { handle, areas: BTreeMap::new(), units: BTreeMap::new() }];
        World { rig, random: Random(seed), spaces, objects: objects.into(), stamp: 0 }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound.max(1))
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    fn length(&mut self) -> u64 {
        match self.below(5) {
            0 => 1 + self.below(9),
            1 => MIB2 - 2 + self.below(5),
            2 => GIB - 1 + self.below(3),
            3 => GIB512 / 2 + self.below(3) * MIB2,
            _ => self.one_of(&[MIB2, 3 * MIB2, GIB, GIB512, TIB, 2 * TIB + 3]),
        }
    }

    /// A place near a border, at which so many pages end before the last.
    fn somewhere(&mut self, length: u64) -> u64 {
        let top = Self::LIMIT;
        let border = self.one_of(&[GIB, GIB512, 3 * GIB512 + 5 * GIB, top / 2, top / 2 + 9 * TIB, top - 4 * TIB]);
        let steps = self.below(3) * self.one_of(&[1, MIB2, GIB, GIB512]);
        let page = if self.below(2) == 0 { border.saturating_sub(steps) } else { border + steps };
        page.min(top - length)
    }

    /// An area, if there is one.
    fn any(&mut self, of: usize) -> Option<VmaInfo> {
        let areas: Vec<VmaInfo> = self.spaces[of].areas.values().copied().collect();
        (!areas.is_empty()).then(|| self.one_of(&areas))
    }

    /// A range in which there is something, mostly with ends that lie as its areas' pages do.
    fn stretch(&mut self, of: usize) -> (u64, u64) {
        let length = self.length();
        let Some(area) = self.any(of).filter(|_| self.random.below(8) > 0) else {
            let first = self.somewhere(length);
            return (first, first + length);
        };
        let (begins, ends, size) = (area.range.first_page(), area.range.end_page(), area.kind.page.pages());
        let unit = self.one_of(&[1, MIB2, GIB, GIB512]).max(size);
        let inside = [begins, (begins + self.below(ends - begins)) / unit * unit, begins + self.below(3) * unit];
        let first = self.one_of(&inside).clamp(begins, ends - size);
        let few = first + (1 + self.below(5)) * size;
        let lengths = [ends, (first + length).min(ends), few, first + length.next_multiple_of(size)];
        (first, self.one_of(&lengths).min(Self::LIMIT))
    }

    /// A page of an area: at its ends, at a border in it, or of a unit.
    fn page(&mut self, of: usize) -> Option<u64> {
        let area = self.any(of)?;
        let units: Vec<u64> = self.spaces[of].units.keys().copied().collect();
        if !units.is_empty() && self.below(3) == 0 {
            let first = self.one_of(&units);
            return Some(first + self.below(self.size_at(of, first)));
        }
        let (begins, ends) = (area.range.first_page(), area.range.end_page());
        let border = begins.next_multiple_of(self.one_of(&[MIB2, GIB, GIB512])) + self.below(2);
        Some(self.one_of(&[begins, ends - 1, begins + 1, border.max(1) - 1]).clamp(begins, ends - 1))
    }

    fn size_at(&self, of: usize, page: u64) -> u64 {
        self.spaces[of].area(page).expect("of an area").kind.page.pages()
    }

    fn rights_at(&self, of: usize, page: u64) -> Flags {
        self.spaces[of].area(page).expect("of an area").kind.flags()
    }

    fn fresh(&mut self) -> Is {
        self.stamp += 1;
        Is::Here(self.stamp)
    }

    /// What an access comes to: the first word that it finds, before it stores.
    fn accessed(&mut self, of: usize, page: u64, store: Option<u64>) -> Result<u64, VmError> {
        let area = self.spaces[of].area(page).ok_or(VmError::NoArea { at: at(page) })?;
        if store.is_some() && !area.kind.protection.contains(Protection::WRITE) {
            return Err(VmError::Denied { at: at(page) });
        }
        let size = area.kind.page.pages();
        let (first, offset) = (page / size * size, area.offset + (page - area.range.first_page()));
        if area.kind.shared {
            let index = self.objects.iter().position(|object| object.id == area.object).expect("known");
            let object = &mut self.objects[index];
            let found = object.words.get(&offset).copied().unwrap_or(0);
            store.into_iter().for_each(|word| _ = object.words.insert(offset, word));
            let unit = offset - (page - first);
            object.away.retain(|away| *away != unit);
            let is = Is::Here(1 << 60 | (index as u64) << 50 | unit);
            self.spaces[of].units.insert(first, Unit { is, words: BTreeMap::new() });
            return Ok(found);
        }
        let (was, mut words) = self.spaces[of]
            .units
            .get(&first)
            .map_or((None, BTreeMap::new()), |unit| (Some(unit.is), unit.words.clone()));
        let places =
            |is| self.spaces.iter().flat_map(|space| space.units.values()).filter(|unit| unit.is == is).count();
        let is = match was {
            None | Some(Is::Zeroes) if store.is_none() => Is::Zeroes,
            Some(here @ Is::Here(_)) if store.is_none() || places(here) == 1 => here,
            _ => self.fresh(),
        };
        let found = words.get(&(page - first)).copied().unwrap_or(0);
        store.into_iter().for_each(|word| _ = words.insert(page - first, word));
        self.spaces[of].units.insert(first, Unit { is, words });
        Ok(found)
    }

    /// Accesses three pages at once from outside, or one as the program does.
    fn touch(&mut self, cx: &mut Cx<'_, 'h>, of: usize) {
        let Some(page) = self.page(of) else { return };
        self.stamp += 4;
        let stamp = self.stamp;
        let store = |n: u64| stamp.is_multiple_of(8).then_some(stamp + n);
        let (rig, handle) = (self.rig, &self.spaces[of].handle);
        if F::LEVELS == 4 && of == 0 && self.random.below(2) == 0 {
            let done = match store(0) {
                Some(word) => rig.store(cx, handle, page << 12, word).map(|()| None),
                None => rig.load(cx, handle, page << 12).map(Some),
            };
            let expected = self.accessed(of, page, store(0));
            return assert_eq!(done, expected.map(|word| store(0).is_none().then_some(word)), "{page:#x}");
        }
        let mut buffer = [0_u8; 2 * 4096 + 8];
        let done = if store(0).is_some() {
            (0..3).for_each(|n| buffer[n * 4096..][..8].copy_from_slice(&(stamp + n as u64).to_le_bytes()));
            rig.vm.write(cx, handle, at(page), &buffer)
        } else {
            rig.vm.read(cx, handle, at(page), &mut buffer)
        };
        for n in 0..3 {
            let found = self.accessed(of, page + n, store(n));
            let here = u64::from_le_bytes(buffer[n as usize * 4096..][..8].try_into().expect("eight"));
            match found {
                Ok(word) => assert_eq!(here, store(n).unwrap_or(word), "{:#x}", page + n),
                Err(cause) => {
                    let stopped = done.expect_err("it goes no further");
                    return assert_eq!((stopped.done, stopped.cause), (n * 4096, cause));
                }
            }
        }
        assert_eq!(done, Ok(()));
    }

    fn map(&mut self, cx: &mut Cx<'_, 'h>, of: usize) {
        let index = self.below(5) as usize;
        let page = self.one_of(&[PageSize::Size4K, PageSize::Size2M]);
        let page = self.objects.get(index).map_or(page, |object| object.page);
        let size = page.pages();
        let length = self.length().next_multiple_of(size);
        let first = self.somewhere(length) / size * size;
        let last = self.objects.get(index).map_or(0, |object| object.handle.pages() - length);
        let offset = self.one_of(&[0, TIB - 2, GIB512 - 1, 1 << 30, last]).min(last) / size * size;
        let space = &mut self.spaces[of];
        let (meets, range) = (!space.meeting(first, first + length).is_empty(), pages(first, first + length));
        let backing = match self.objects.get(index) {
            Some(object) => Backing::Shared(&object.handle, offset),
            None => Backing::Private,
        };
        match self.rig.vm.map(cx, &space.handle, range, VmaKind::private(page), backing) {
            Ok(info) => {
                assert!(!meets && info.offset == offset);
                self.objects.get_mut(index).into_iter().for_each(|object| object.id = info.object);
                space.put([info], []);
            }
            Err(error) => assert!(meets && matches!(error, VmError::Overlap { .. }), "{error:?}"),
        }
    }

    /// Takes what a range has away, with its areas or without.
    fn unmap(&mut self, cx: &mut Cx<'_, 'h>, of: usize) {
        let ((first, end), discards) = (self.stretch(of), self.below(2) == 0);
        let space = &mut self.spaces[of];
        let (may, vm) =
            (if discards { space.may_change(first, end) } else { space.may_cut([first, end]) }, &self.rig.vm);
        let done = match discards {
            true => vm.discard(cx, &space.handle, pages(first, end), Discard::Now),
            false => vm.unmap(cx, &space.handle, pages(first, end)).map(|unmapped| unmapped.pages),
        };
        assert_eq!(done.is_ok(), may, "{done:?} of {first:#x}..{end:#x}");
        let Ok(gone) = done else { return };
        let (areas, units) = space.take(first, end);
        let size = |page: u64| {
            areas.iter().find(|area| area.range.covers(pages(page, page + 1))).expect("of an area").kind.page.pages()
        };
        let entries = units.iter().filter(|(_, unit)| unit.is != Is::Away);
        assert_eq!(gone, entries.map(|(page, _)| size(*page)).sum::<u64>());
        space.put(areas.into_iter().filter(|_| discards), []);
    }

    fn protect(&mut self, cx: &mut Cx<'_, 'h>, of: usize) {
        let (first, end) = self.stretch(of);
        let rights = self.one_of(&[Protection::WRITE, Protection::WRITE, Protection::READ, Protection::EXEC]);
        let (rights, space) = (rights.with(Protection::USER), &mut self.spaces[of]);
        let done = self.rig.vm.protect(cx, &space.handle, pages(first, end), rights);
        assert_eq!(done.is_ok(), space.may_change(first, end), "{done:?} of {first:#x}..{end:#x}");
        if done.is_ok() {
            let (areas, units) = space.take(first, end);
            let changed = |mut area: VmaInfo| {
                area.kind = area.kind.allowing(rights);
                area
            };
            space.put(areas.into_iter().map(changed), units);
        }
    }

    /// To another place or none, longer or shorter.
    fn move_to(&mut self, cx: &mut Cx<'_, 'h>, of: usize) {
        let (first, end) = self.stretch(of);
        let (kept, less) = (end - first, self.one_of(&[0, 0, 1, MIB2, GIB]));
        let length = if self.below(2) == 0 { kept.saturating_sub(less).max(1) } else { kept + less.min(2 * MIB2) };
        let unit = self.one_of(&[1, MIB2, GIB, GIB512]);
        // Mostly where nothing is.
        let mut there = self.somewhere(length + unit) / unit * unit + first % unit;
        for _ in 0..self.below(8) {
            if !self.spaces[of].meeting(there, there + length).is_empty() {
                there = self.somewhere(length + unit) / unit * unit + first % unit;
            }
        }
        let there = if self.below(6) == 0 { first } else { there };
        let (kept, grown) = (first + length.min(kept), length.saturating_sub(kept));
        if there + length > Self::LIMIT {
            return;
        }
        let space = &mut self.spaces[of];
        let (moves, last) = (there != first, space.area(kept - 1));
        let mut may = space.may_change(first, end) && space.may_cut([kept, kept]);
        let lies = |area: &VmaInfo| there.wrapping_sub(first).is_multiple_of(area.kind.page.pages());
        may &= space.meeting(first, kept).iter().all(lies);
        let (new, new_end) = if moves { (there, there + length) } else { (kept, kept + grown) };
        may &= new == new_end || space.meeting(new, new_end).is_empty();
        if let Some(last) = last.filter(|_| grown > 0) {
            may &= (moves || last.range.end_page() == kept) && grown.is_multiple_of(last.kind.page.pages());
            let object = self.objects.iter().find(|object| last.kind.shared && object.id == last.object);
            let ends = last.offset + (kept - last.range.first_page()) + grown;
            may &= object.is_none_or(|object| ends <= object.handle.pages());
        }
        let done = self.rig.vm.move_to(cx, &space.handle, pages(first, end), pages(there, there + length));
        assert_eq!(done.is_ok(), may, "{done:?} of {first:#x}..{end:#x} to {there:#x}, {length:#x}");
        if done.is_err() {
            return;
        }
        let (mut areas, units) = space.take(first, kept);
        if kept < end {
            space.take(kept, end);
        }
        let to = |page: u64| page - first + there;
        areas.iter_mut().for_each(|area| area.range = pages(to(area.range.first_page()), to(area.range.end_page())));
        let last = areas.last_mut().expect("no hole");
        last.range = pages(last.range.first_page(), last.range.end_page() + grown);
        space.put(areas, units.into_iter().map(|(page, unit)| (to(page), unit)));
    }

    /// Fills the page at a place, and the next.
    fn prefault(&mut self, cx: &mut Cx<'_, 'h>, of: usize) {
        let Some(page) = self.page(of) else { return };
        let area = self.spaces[of].area(page).expect("of an area");
        let size = area.kind.page.pages();
        let (first, end) = (page / size * size, (page / size * size + 2 * size).min(area.range.end_page()));
        let request = self.rig.vm.prefault(&self.spaces[of].handle, pages(first, end), Some(1 << 40));
        request.work(cx, &Never).expect("memory");
        for unit in (first..end).step_by(size as usize) {
            match self.spaces[of].units.get(&unit).map(|unit| unit.is) {
                Some(Is::Here(_) | Is::Zeroes) => {}
                None if !area.kind.shared => {
                    let is = self.fresh();
                    self.spaces[of].units.insert(unit, Unit { is, words: BTreeMap::new() });
                }
                _ => _ = self.accessed(of, unit, None),
            }
        }
    }

    /// Makes a child, or ends the last of two.
    fn fork(&mut self, cx: &mut Cx<'_, 'h>) {
        if self.spaces.len() > 2 {
            let last = self.spaces.pop().expect("a child");
            return self.rig.vm.destroy(cx, last.handle).expect("idle");
        }
        let handle = self.rig.vm.fork(cx, &self.spaces[0].handle).expect("memory");
        let (areas, mut units) = (self.spaces[0].areas.clone(), self.spaces[0].units.clone());
        units.retain(|page, _| !self.spaces[0].area(*page).expect("of an area").kind.shared);
        self.spaces.push(Space { handle, areas, units });
    }

    fn page_out(&mut self, cx: &mut Cx<'_, 'h>, of: usize) {
        let here = |(page, unit): (&u64, &Unit)| matches!(unit.is, Is::Here(_)).then_some((*page, unit.is));
        let units: Vec<_> = self.spaces[of].units.iter().filter_map(here).collect();
        if units.is_empty() || !AWAY {
            return;
        }
        let ((first, is), rig) = (self.one_of(&units), self.rig);
        let (area, deferred) = (self.spaces[of].area(first).expect("of an area"), rig.deferred());
        let unhooked = rig.unhook(cx, &self.spaces[of].handle, first << 12, &deferred);
        let store = |cx: &Cx<'_, 'h>, block: &Frozen, page| rig.vm.pager().store(cx, block, page);
        type Back<'d, 'h, F, const AWAY: bool> = (VmError, UnhookedPage<'d, 'h, Model<'h, F, AWAY>>);
        let evict = |cx: &Cx<'_, 'h>, block: Frozen| Ok((store(cx, &block, 0), Some(block)));
        // SAFETY: the slots are new ones of this pager.
        let done: Result<u64, Back<'_, 'h, F, AWAY>> =
            unsafe { unhooked.page_out(cx, evict, |cx: &Cx<'_, 'h>, block: &Frozen, page| Ok(store(cx, block, page))) };
        assert_eq!(done.ok(), Some(area.kind.page.pages()));
        if area.kind.shared {
            let object = self.objects.iter_mut().find(|object| object.id == area.object).expect("known");
            object.away.push(area.offset + (first - area.range.first_page()));
            return self.spaces.iter_mut().for_each(|space| space.units.retain(|_, unit| unit.is != is));
        }
        let units = self.spaces.iter_mut().flat_map(|space| space.units.values_mut());
        units.filter(|unit| unit.is == is).for_each(|unit| unit.is = Is::Away);
    }

    /// What there is of a part of an area, by the model.
    fn usage(&self, of: usize, area: &VmaInfo, part: (u64, u64)) -> Usage {
        let (mut usage, size) = (Usage::default(), area.kind.page.pages());
        for (page, unit) in self.spaces[of].units.range(area.range.first_page()..area.range.end_page()) {
            let pages = within(pages(*page, page + size), part);
            match unit.is {
                Is::Here(_) => {
                    usage.present += pages;
                    usage.huge += if size > 1 { pages } else { 0 };
                }
                Is::Zeroes => usage.zeroes += pages,
                Is::Away => usage.swapped += pages,
            }
        }
        let object = self.objects.iter().find(|object| area.kind.shared && object.id == area.object);
        for offset in object.iter().flat_map(|object| &object.away).filter(|offset| **offset >= area.offset) {
            let page = area.range.first_page() + (offset - area.offset);
            usage.swapped += if page < area.range.end_page() { within(pages(page, page + size), part) } else { 0 };
        }
        usage
    }

    fn check(&mut self, cx: &mut Cx<'_, 'h>) {
        let (mut frames, all) = (BTreeMap::new(), self.below(60) == 0);
        for of in 0..self.spaces.len() {
            let space = &self.spaces[of];
            let areas = joined(space.handle.vmas(pages(0, Self::LIMIT)));
            assert_eq!(areas, joined(space.areas.values().copied()));
            for area in areas {
                let (begins, ends) = (area.range.first_page(), area.range.end_page());
                let (from, reach) = (begins + self.below(ends - begins), if all { ends } else { 2 * GIB });
                for (first, end) in [(begins, ends.min(begins + reach)), (from, ends.min(from + reach))] {
                    let usage = self.rig.vm.usage(cx, &self.spaces[of].handle, pages(first, end));
                    assert_eq!(usage, Ok(self.usage(of, &area, (first, end))), "{first:#x}..{end:#x} of space {of}");
                }
            }
            for (first, unit) in &self.spaces[of].units {
                let found = self.rig.vm.lookup(cx, &self.spaces[of].handle, at(*first));
                let same = match (found, unit.is) {
                    (Lookup::Owner(_), Is::Away) => true,
                    (Lookup::Mapped(leaf), is) if is != Is::Away => {
                        let (zeroes, may) = (leaf.flags.contains(LENT), self.rights_at(of, *first));
                        assert_eq!(leaf.flags & Flags::EXEC, may & Flags::EXEC, "{first:#x} of space {of}");
                        assert!(may.contains(leaf.flags & Flags::WRITE), "{first:#x} of space {of}");
                        // One frame is one page, wherever it is.
                        let other = !zeroes && *frames.entry(leaf.frame).or_insert(is) != is;
                        !other && zeroes == (is == Is::Zeroes) && leaf.size.pages() == self.size_at(of, *first)
                    }
                    _ => false,
                };
                assert!(same, "{found:?} for {unit:?} at {first:#x} of space {of}");
            }
        }
        for of in 0..if all { self.spaces.len() } else { 0 } {
            let units = self.spaces[of].units.clone();
            for page in units.iter().flat_map(|(first, unit)| unit.words.keys().map(move |page| first + page)) {
                let mut word = [0; 8];
                self.rig.vm.read(cx, &self.spaces[of].handle, at(page), &mut word).expect("memory");
                assert_eq!(self.accessed(of, page, None), Ok(u64::from_le_bytes(word)), "{page:#x} of space {of}");
            }
        }
    }

    fn step(&mut self, cx: &mut Cx<'_, 'h>) {
        let of = self.below(self.spaces.len() as u64) as usize;
        let here: usize = self.spaces.iter().map(|space| space.units.len()).sum();
        match self.below(32) {
            _ if here > 200 => self.unmap(cx, of),
            0..7 if self.spaces[of].areas.len() < 14 => self.map(cx, of),
            7 | 8 => self.unmap(cx, of),
            9..12 => self.protect(cx, of),
            12..17 => self.move_to(cx, of),
            17 => self.prefault(cx, of),
            18 => self.fork(cx),
            19..22 => self.page_out(cx, of),
            _ => self.touch(cx, of),
        }
    }
}

fn run<F: PageFormat, const AWAY: bool>(seed: u64) {
    as_first::<F, AWAY>(128, 2, seed, |rig, cx| {
        let mut world = World::new(rig, cx, seed);
        rig.enter(cx, &world.spaces[0].handle);
        for _ in 0..150 {
            world.step(cx);
            world.check(cx);
        }
        rig.leave(cx, &world.spaces[0].handle);
        world.spaces.drain(..).for_each(|space| rig.vm.destroy(cx, space.handle).expect("idle"));
        world.objects.drain(..).for_each(|object| rig.vm.close(cx, object.handle).expect("its own"));
    });
}

#[test]
fn areas_of_terabytes_are_what_their_pages_are() {
    for seed in 0..3 {
        run::<Metered, true>(seed);
        run::<Aarch64, false>(seed + 10);
        run::<Aarch64, true>(seed + 20);
        run::<X86_64La57, true>(seed + 30);
    }
}
