//! Random sequences of everything, by several CPUs, against what every byte has to be.

use crate::support::{AT, Handle, Model, Rig, bounds, no_faults, span, with_format, with_rig};
use hugemm_base::{CpuId, Never, PageSize, VirtAddr};
use hugemm_paging::{Aarch64, PageFormat};
use hugemm_vm::{Access, Backing, Protection, SharedRef, VmError, VmaKind};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const SPACES: usize = 3;
/// Addresses are 64 KiB apart in units; huge areas lie at multiples of 2 MiB.
const UNIT: u64 = 0x1_0000;

#[derive(Clone, Debug)]
enum Op {
    Map { space: usize, at: u64, units: u64, huge: bool, shared: bool, pooled: bool },
    Unmap { space: usize, at: u64, units: u64 },
    Protect { space: usize, at: u64, units: u64, writable: bool },
    Move { space: usize, at: u64, units: u64, to: u64, to_units: u64 },
    Lock { space: usize, at: u64, units: u64, unlocks: bool },
    Store { space: usize, at: u64, cpu: u32 },
    Load { space: usize, at: u64, cpu: u32 },
    Prefault { space: usize, at: u64, units: u64 },
    Fork { from: usize, into: usize },
    Switch { space: usize, cpu: u32 },
    Lazy { cpu: u32 },
    Pin { space: usize, at: u64, units: u64 },
    Unpin,
}

/// What a space has at each word that was stored, and which areas it has, by 4 KiB page: which backing.
#[derive(Clone, Default)]
struct Known {
    /// Page number to whether it is shared, at which page of the object.
    pages: BTreeMap<u64, Option<u64>>,
    /// Those that may not be stored to.
    read_only: BTreeSet<u64>,
    words: BTreeMap<u64, u64>,
}

/// The pages that are accessed: four at a time, 192 KiB apart.
fn hot(index: u64) -> u64 {
    index / 4 * 48 + index % 4
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let space = 0..SPACES;
    let at = 0u64..36;
    // Few pages, so that CPUs come back to what they have in their TLBs.
    let page = (0u64..40).prop_map(hot);
    let op = prop_oneof![
        3 => (space.clone(), 0u64..36, 1u64..40, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
            |(space, at, units, huge, shared, pooled)| Op::Map { space, at, units, huge, shared, pooled }),
        2 => (space.clone(), at.clone(), 1u64..64).prop_map(|(space, at, units)| Op::Unmap { space, at, units }),
        2 => (space.clone(), at.clone(), 1u64..40, any::<bool>()).prop_map(
            |(space, at, units, writable)| Op::Protect { space, at, units, writable }),
        2 => (space.clone(), at.clone(), 1u64..40, at.clone(), 1u64..40).prop_map(
            |(space, at, units, to, to_units)| Op::Move { space, at, units, to, to_units }),
        1 => (space.clone(), at.clone(), 1u64..40, any::<bool>()).prop_map(
            |(space, at, units, unlocks)| Op::Lock { space, at, units, unlocks }),
        12 => (space.clone(), page.clone(), 0u32..3).prop_map(|(space, at, cpu)| Op::Store { space, at, cpu }),
        8 => (space.clone(), page, 0u32..3).prop_map(|(space, at, cpu)| Op::Load { space, at, cpu }),
        1 => (space.clone(), at.clone(), 1u64..40).prop_map(|(space, at, units)| Op::Prefault { space, at, units }),
        2 => (space.clone(), space.clone()).prop_map(|(from, into)| Op::Fork { from, into }),
        2 => (space.clone(), 0u32..3).prop_map(|(space, cpu)| Op::Switch { space, cpu }),
        1 => (0u32..3).prop_map(|cpu| Op::Lazy { cpu }),
        1 => (space, at, 1u64..8).prop_map(|(space, at, units)| Op::Pin { space, at, units }),
        1 => Just(Op::Unpin),
    ];
    proptest::collection::vec(op, 1..120)
}

struct World<'r, 'h, F: PageFormat> {
    rig: &'r Rig<'h, F>,
    spaces: Vec<Option<Handle<'r, 'h, F>>>,
    known: Vec<Known>,
    object: SharedRef<'r, Model<'h, F>>,
    /// Of the shared object, by word.
    shared: BTreeMap<u64, u64>,
    loaded: [Option<usize>; 3],
    pinned: Vec<(usize, hugemm_vm::Pinned<'r>)>,
    stamp: u64,
}

impl<'r, 'h, F: PageFormat> World<'r, 'h, F> {
    fn space(&self, index: usize) -> &Handle<'r, 'h, F> {
        self.spaces[index].as_ref().expect("a space")
    }

    fn switch(&mut self, cpu: u32, to: Option<usize>) {
        let from = std::mem::replace(&mut self.loaded[cpu as usize], to);
        if from == to {
            return;
        }
        self.rig.on(cpu, |cx| {
            if let Some(to) = to {
                self.rig.enter(cx, self.space(to));
            }
            if let Some(from) = from {
                self.rig.leave(cx, self.space(from));
            }
        });
    }

    /// What the word at an address has to be; `None` without an area.
    fn expected(&self, space: usize, at: u64) -> Option<u64> {
        let known = &self.known[space];
        Some(match known.pages.get(&(at >> 12))? {
            Some(page) => self.shared.get(&(page << 12 | at & 0xfff)).copied().unwrap_or(0),
            None => known.words.get(&at).copied().unwrap_or(0),
        })
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Map { space, at, units, huge, shared, pooled } => self.map(space, at, units, huge, shared, pooled),
            Op::Unmap { space, at, units } => {
                let range = span(AT + at * UNIT, units * UNIT);
                let done = self.rig.on(1, |cx| self.rig.vm.unmap(cx, self.space(space), range));
                match done {
                    Ok(_) => {
                        let known = &mut self.known[space];
                        known.pages.retain(|page, _| *page < range.first_page() || *page >= range.end_page());
                        known.read_only.retain(|page| *page < range.first_page() || *page >= range.end_page());
                        let (from, to) = (range.start().get(), range.start().get() + range.bytes());
                        known.words.retain(|at, _| *at < from || *at >= to);
                    }
                    Err(error) => assert!(matches!(error, VmError::Misaligned { .. }), "{error}"),
                }
            }
            Op::Protect { space, at, units, writable } => {
                let range = span(AT + at * UNIT, units * UNIT);
                let rights = Protection::USER.with(if writable { Protection::WRITE } else { Protection::EXEC });
                let done = self.rig.on(1, |cx| self.rig.vm.protect(cx, self.space(space), range, rights));
                let (known, pages) = (&mut self.known[space], range.first_page()..range.end_page());
                let hole = pages.clone().find(|page| !known.pages.contains_key(page));
                match (done, hole) {
                    (Ok(()), None) if writable => pages.for_each(|page| _ = known.read_only.remove(&page)),
                    (Ok(()), None) => known.read_only.extend(pages),
                    (Err(VmError::NoArea { at }), Some(hole)) => assert_eq!(at.get() >> 12, hole),
                    (Err(VmError::Misaligned { .. }), None) => {}
                    (done, hole) => panic!("{done:?} with hole {hole:?}"),
                }
            }
            Op::Move { space, at, units, to, to_units } => self.move_to(space, (at, units), (to, to_units)),
            Op::Lock { space, at, units, unlocks } => {
                let range = span(AT + at * UNIT, units * UNIT);
                let (vm, space) = (&self.rig.vm, self.space(space));
                let done = self.rig.on(2, |cx| match unlocks {
                    true => vm.unlock(cx, space, range),
                    false => vm.lock(cx, space, range, 1200),
                });
                let of_unlock = matches!(done, Ok(()) | Err(VmError::Misaligned { .. }));
                let of_lock = matches!(
                    done,
                    Err(VmError::LockLimit { .. } | VmError::NoArea { .. } | VmError::NoMemory | VmError::NoPool)
                );
                assert!(of_unlock || of_lock && !unlocks, "{done:?}");
                assert!(space.locked() <= 1200);
            }
            Op::Store { space, at, cpu } => {
                let at = AT + at * 4096 + ((at * 40) & 0xff8);
                self.switch(cpu, Some(space));
                self.stamp += 1;
                let stamp = self.stamp;
                let done = self.rig.on(cpu, |cx| self.rig.store(cx, self.space(space), at, stamp));
                if self.known[space].read_only.contains(&(at >> 12)) {
                    assert_eq!(done, Err(VmError::Denied { at: VirtAddr::new(at) }));
                    return;
                }
                match (done, self.known[space].pages.get(&(at >> 12)).copied()) {
                    (Ok(()), Some(Some(page))) => {
                        self.shared.insert(page << 12 | at & 0xfff, stamp);
                    }
                    (Ok(()), Some(None)) => {
                        self.known[space].words.insert(at, stamp);
                    }
                    (Err(VmError::NoArea { .. }), None) | (Err(VmError::NoMemory | VmError::NoPool), Some(_)) => {}
                    (done, area) => panic!("{done:?} where {area:?} at {at:#x}"),
                }
            }
            Op::Load { space, at, cpu } => {
                let at = AT + at * 4096 + ((at * 40) & 0xff8);
                self.switch(cpu, Some(space));
                let found = self.rig.on(cpu, |cx| self.rig.load(cx, self.space(space), at));
                match (found, self.expected(space, at)) {
                    (Ok(found), Some(expected)) => assert_eq!(found, expected, "at {at:#x} of space {space}"),
                    (Err(VmError::NoArea { .. }), None) | (Err(VmError::NoMemory | VmError::NoPool), Some(_)) => {}
                    (found, expected) => panic!("{found:?} instead of {expected:?} at {at:#x}"),
                }
            }
            Op::Prefault { space, at, units } => {
                let range = span(AT + at * UNIT, units * UNIT);
                let done = self.rig.on(2, |cx| self.rig.vm.prefault(self.space(space), range, None).work(cx, &Never));
                let expected =
                    matches!(done, Ok(()) | Err(VmError::NoArea { .. } | VmError::NoMemory | VmError::NoPool));
                assert!(expected, "{done:?}");
            }
            Op::Fork { from, into } if from != into => self.fork(from, into),
            Op::Fork { .. } => {}
            Op::Switch { space, cpu } => self.switch(cpu, Some(space)),
            Op::Lazy { cpu } => {
                if let Some(space) = self.loaded[cpu as usize].take() {
                    self.rig.on(cpu, |cx| {
                        self.rig.mmu.pause(CpuId::new(cpu), true);
                        // SAFETY: it accesses nothing before it wakes.
                        unsafe { self.space(space).tlb().enter_lazy(self.rig.vm.shootdown(), cx) };
                        self.rig.mmu.meanwhile();
                        self.space(space).tlb().switch_in(self.rig.vm.shootdown(), cx);
                        self.rig.mmu.pause(CpuId::new(cpu), false);
                    });
                    self.loaded[cpu as usize] = Some(space);
                }
            }
            Op::Pin { space, at, units } => {
                let range = span(AT + at * UNIT, units * UNIT);
                let pinned = &mut self.pinned;
                let handle = self.spaces[space].as_ref().expect("a space");
                let _ = self.rig.on(0, |cx| {
                    self.rig.vm.pin(cx, handle, range, Access::Write, None, &Never, |run| pinned.push((space, run)))
                });
            }
            Op::Unpin => self.unpin(|_| true),
        }
        self.rig.mmu.meanwhile();
        self.probe();
        self.rig.mmu.check().expect("the oracle");
    }

    /// Each CPU looks at what it may have in its TLB, in the space that it has loaded.
    fn probe(&mut self) {
        for cpu in 0..3 {
            let Some(space) = self.loaded[cpu as usize] else { continue };
            for index in 0..40 {
                let page = hot(index);
                let at = AT + page * 4096 + ((page * 40) & 0xff8);
                // Only through what is there, in the tables or in the TLB: no fault is served.
                let found = self.rig.mmu.load(CpuId::new(cpu), VirtAddr::new(at));
                if let Ok(found) = found {
                    assert_eq!(Some(found), self.expected(space, at), "at {at:#x} of space {space}, seen by cpu{cpu}");
                }
            }
        }
    }

    fn unpin(&mut self, which: impl Fn(usize) -> bool) {
        for (space, run) in std::mem::take(&mut self.pinned) {
            if which(space) {
                self.rig.on(0, |cx| self.rig.vm.unpin(cx, self.space(space), run).expect("its own"));
            } else {
                self.pinned.push((space, run));
            }
        }
    }

    /// Longer or shorter, to the same or another place.
    fn move_to(&mut self, space: usize, (at, units): (u64, u64), (to, to_units): (u64, u64)) {
        let (from, to) = (span(AT + at * UNIT, units * UNIT), span(AT + to * UNIT, to_units * UNIT));
        let done = self.rig.on(1, |cx| self.rig.vm.move_to(cx, self.space(space), from, to));
        let known = &mut self.known[space];
        let (first, there) = (from.first_page(), to.first_page());
        let kept = from.pages().min(to.pages());
        let hole = (first..from.end_page()).find(|page| !known.pages.contains_key(page));
        match done {
            Ok(()) => {}
            Err(VmError::NoArea { at }) => return assert_eq!(Some(at.get() >> 12), hole),
            Err(VmError::Overlap { .. }) => {
                let new = if first == there { from.end_page() } else { there };
                let goes_on = first == there && known.pages.contains_key(&(from.end_page() - 1));
                return assert!(goes_on || (new..to.end_page()).any(|page| known.pages.contains_key(&page)));
            }
            Err(error) => {
                let fits = matches!(error, VmError::Misaligned { .. } | VmError::NoPool | VmError::NoMemory)
                    || matches!(error, VmError::OutOfBounds { .. } | VmError::Denied { .. }) && to.pages() > kept;
                return assert!(fits, "{error}");
            }
        }
        assert_eq!(hole, None);
        let last = known.pages[&(first + kept - 1)];
        let read_only = known.read_only.contains(&(first + kept - 1));
        let part = |page: &u64| (first..from.end_page()).contains(page);
        let moved: Vec<_> = known.pages.iter().filter(|(page, _)| part(page)).map(|(page, of)| (*page, *of)).collect();
        let denied: Vec<_> = known.read_only.iter().copied().filter(part).collect();
        let words: Vec<_> =
            known.words.iter().filter(|(at, _)| part(&(*at >> 12))).map(|(at, to)| (*at, *to)).collect();
        known.pages.retain(|page, _| !part(page));
        known.read_only.retain(|page| !part(page));
        known.words.retain(|at, _| !part(&(at >> 12)));
        let stays = |page: &u64| *page < first + kept;
        let new = |page: u64| page - first + there;
        known.pages.extend(moved.into_iter().filter(|(page, _)| stays(page)).map(|(page, of)| (new(page), of)));
        known.read_only.extend(denied.into_iter().filter(stays).map(new));
        let word = |(at, value): (u64, u64)| (new(at >> 12) << 12 | at & 0xfff, value);
        known.words.extend(words.into_iter().filter(|(at, _)| stays(&(at >> 12))).map(word));
        for (page, more) in (there + kept..to.end_page()).zip(1..) {
            known.pages.insert(page, last.map(|of| of + more));
            if read_only {
                known.read_only.insert(page);
            }
        }
    }

    fn map(&mut self, space: usize, at: u64, units: u64, huge: bool, shared: bool, pooled: bool) {
        let (start, bytes) = (AT + at * UNIT, units * UNIT);
        let (start, bytes) = if huge { (start & !0x1f_ffff, (bytes + 0x1f_ffff) & !0x1f_ffff) } else { (start, bytes) };
        let range = span(start, bytes);
        let page = if huge { PageSize::Size2M } else { PageSize::Size4K };
        let kind = VmaKind::private(page);
        let kind = if huge && pooled { kind.pooled() } else { kind };
        let backing = if shared && !huge { Backing::Shared(&self.object, at) } else { Backing::Private };
        let shared = matches!(backing, Backing::Shared(..));
        let done = self.rig.on(0, |cx| self.rig.vm.map(cx, self.space(space), range, kind, backing));
        let pages = range.first_page()..range.end_page();
        match done {
            Ok(area) => {
                assert_eq!(self.known[space].pages.range(pages.clone()).count(), 0);
                for page in pages {
                    let offset = shared.then(|| at + page - range.first_page());
                    self.known[space].pages.insert(page, offset);
                }
                assert_eq!(area.range, range);
            }
            Err(VmError::Overlap { .. }) => assert!(self.known[space].pages.range(pages).count() > 0),
            Err(error) => assert!(matches!(error, VmError::NoPool | VmError::NoMemory), "{error}"),
        }
    }

    fn fork(&mut self, from: usize, into: usize) {
        self.unpin(|space| space == into);
        for cpu in 0..3 {
            if self.loaded[cpu as usize] == Some(into) {
                self.switch(cpu, None);
            }
        }
        let old = self.spaces[into].take().expect("a space");
        let forked = self.rig.on(0, |cx| {
            self.rig.vm.destroy(cx, old).map_err(|(error, _)| error).expect("nobody uses it");
            match self.rig.vm.fork(cx, self.space(from)) {
                Ok(child) => (child, true),
                Err(VmError::NoMemory | VmError::NoPool) => (self.rig.vm.create(cx, bounds()).expect("a space"), false),
                Err(error) => panic!("{error}"),
            }
        });
        self.spaces[into] = Some(forked.0);
        self.known[into] = if forked.1 { self.known[from].clone() } else { Known::default() };
    }
}

fn play<F: PageFormat>(rig: &Rig<'_, F>, ops: &[Op]) {
    let mut world = rig.on(0, |cx| {
        rig.fill_pool(cx, 6);
        World {
            rig,
            spaces: (0..SPACES).map(|_| Some(rig.vm.create(cx, bounds()).expect("a space"))).collect(),
            known: vec![Known::default(); SPACES],
            object: rig.vm.create_shared(cx, 1024, PageSize::Size4K, false).expect("an object"),
            shared: BTreeMap::new(),
            loaded: [None; 3],
            pinned: Vec::new(),
            stamp: 0,
        }
    });
    for op in ops {
        world.apply(op);
    }
    // Everything once more.
    for space in 0..SPACES {
        world.switch(0, Some(space));
        let words: Vec<u64> = world.known[space].words.keys().copied().collect();
        for at in words {
            let found = rig.on(0, |cx| rig.load(cx, world.space(space), at));
            assert_eq!(Some(found.expect("it is mapped")), world.expected(space, at), "at {at:#x} of space {space}");
        }
        // The reverse map finds what the page table has.
        for at in world.known[space].pages.keys().map(|page| page << 12) {
            rig.on(0, |cx| {
                let found = rig.vm.lookup(cx, world.space(space), VirtAddr::new(at));
                let hugemm_paging::Lookup::Mapped(leaf) = found else { return };
                // Nobody's page.
                if leaf.flags.contains(hugemm_vm::LENT) {
                    return;
                }
                let mut here = 0;
                rig.vm.walk_mappings(cx, leaf.frame, |_, place| {
                    let same = std::ptr::eq(place.space, &raw const **world.space(space));
                    here += u64::from(same && place.at.get() == at & !(leaf.size.bytes() - 1));
                });
                assert_eq!(here, 1, "{at:#x} of space {space}");
            });
        }
    }
    world.unpin(|_| true);
    for cpu in 0..3 {
        world.switch(cpu, None);
    }
    rig.on(0, |cx| {
        for space in world.spaces.into_iter().flatten() {
            rig.vm.destroy(cx, space).map_err(|(error, _)| error).expect("nobody uses it");
        }
        rig.vm.close(cx, world.object).expect("its own");
        assert_eq!(rig.pool_available(cx), 6);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every load finds what was stored, whoever forked, unmapped or pinned in between, through TLBs that forget nothing
    /// by themselves.
    #[test]
    fn memory_holds_what_was_stored(ops in ops(), seed in any::<u64>()) {
        with_rig(48, 3, seed, &no_faults(), |rig| play(rig, &ops));
    }

    /// The same on arm64, where no CPU may come to know two translations of one address that differ.
    #[test]
    fn nothing_changes_in_use_on_arm64(ops in ops(), seed in any::<u64>()) {
        with_format::<Aarch64, false>(48, 3, seed, &no_faults(), |rig| play(rig, &ops));
    }
}
