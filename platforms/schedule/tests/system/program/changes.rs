//! Pages that are unmapped, given up, locked, moved elsewhere, and get other rights.

use super::*;
use hugemm_host::mmu::MmuAccess;

impl<'v, 'h, F: PageFormat> Program<'_, 'v, 'h, F> {
    /// A few pages of an area.
    fn any_part(&mut self) -> (&'static Area, Range<u64>) {
        let area = self.any_area();
        let start = self.any_page(area);
        (area, start..area.end().min(start + (1 + self.random.below(6)) * area.kind.page.bytes()))
    }

    /// Some pages may be stored to no longer, or again.
    pub(super) fn protect(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let (area, part) = self.any_part();
        let all = || pages_of(area, &part);
        let read_only = self.random.below(2) == 0;
        self.ask_for_away(cx, &process, part.clone());
        {
            let mut book = process.book.borrow_mut();
            if process.pinning.get() > 0 || book.is_busy(all()) {
                return;
            }
            book.begin_rights(all());
        }
        process.protecting.set(process.protecting.get() + 1);
        let rights = if read_only { Protection::USER } else { area.kind.protection };
        let done = self.test.world.vm.protect(cx, &process.space, span_of(&part), rights);
        process.protecting.set(process.protecting.get() - 1);
        if done.is_ok() && read_only {
            self.is_in_no_tlb(&process, all(), MmuAccess::Store);
        }
        process.book.borrow_mut().end_rights(all(), done.is_ok().then_some(read_only));
        match done {
            Ok(()) => self.test.did("protected", 1),
            Err(error) => assert_eq!(error, VmError::NoMemory),
        }
    }

    /// Now and then pages are away when something is done to them. Whoever has them must not wait for a fork, so somebody else does.
    fn ask_for_away(&mut self, cx: &mut Cx<'_, 'h>, process: &Rc<Process<'v, 'h, F>>, pages: Range<u64>) {
        let test = self.test;
        if !test.is_narrow() || test.wished.get() || self.random.below(2) == 0 {
            return;
        }
        test.wished.set(true);
        process.users.set(process.users.get() + 1);
        *test.wish.borrow_mut() = Some((process.clone(), pages));
        for _ in 0..100 {
            if !test.wished.get() {
                break;
            }
            cx.cond_resched();
        }
    }

    /// Some pages are given up, or unmapped and mapped again, of areas that adjoin too: private ones read as zeroes, and shared ones as
    /// before.
    pub(super) fn change(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let size = area.kind.page.bytes();
        let start = self.any_page(area);
        let end = if area.end() == AREAS[1].start { AREAS[1].end() } else { area.end() };
        let end = end.min(start + (1 + self.random.below(6)) * size);
        let gives_up = self.random.below(3) == 0;
        self.ask_for_away(cx, &process, start..end);
        self.change_pages(cx, &process, start..end, gives_up);
    }

    pub(super) fn change_pages(
        &self,
        cx: &mut Cx<'_, 'h>,
        process: &Process<'v, 'h, F>,
        range: Range<u64>,
        gives_up: bool,
    ) {
        let part = |area: &'static Area| (area, range.start.max(area.start)..range.end.min(area.end()));
        let parts: Vec<_> = AREAS.iter().map(part).filter(|(_, part)| !part.is_empty()).collect();
        let all = || parts.iter().flat_map(|(area, part)| pages_of(area, part));
        let stays;
        {
            let book = process.book.borrow();
            if all().any(|page| book.is_under_way(page)) {
                return;
            }
            stays = gives_up
                && parts.iter().all(|(area, _)| !area.kind.pooled)
                && !all().any(|page| book.gone.contains(&page));
            drop(book);
            self.test.begin_changes(process, all());
            self.test.leave_to_devices(process, &range);
        }
        let whole = span_of(&range);
        if stays {
            self.test.world.vm.discard(cx, &process.space, whole, Discard::Now).expect("areas");
            self.is_given_up(process, all());
            self.test.did("discarded", 1);
        } else {
            while let Err(error) = self.test.world.vm.unmap(cx, &process.space, whole) {
                assert_eq!(error, VmError::NoMemory);
                cx.cond_resched();
            }
            self.is_in_no_tlb(process, all(), MmuAccess::Load);
            self.test.did("unmapped", 1);
            process.book.borrow_mut().gone.retain(|page| !range.contains(page));
            for (area, part) in &parts {
                self.test.map(cx, process, area, part.clone());
            }
        }
        if !stays {
            process.book.borrow_mut().rights.retain(|page, _| !range.contains(page));
        }
        self.test.end_changes(process, all());
    }

    /// Some pages may go unstored when memory is short.
    pub(super) fn give_up(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let (area, part) = self.any_part();
        let all = || pages_of(area, &part);
        {
            let mut book = process.book.borrow_mut();
            if area.kind.shared || area.kind.pooled || self.test.is_lent(area) || book.is_busy(all()) {
                return;
            }
            book.begin_changes(all());
        }
        self.test.world.vm.discard(cx, &process.space, span_of(&part), Discard::WhenShort).expect("areas");
        let mut book = process.book.borrow_mut();
        book.words.range_mut(part.clone()).for_each(|(_, may)| _ = may.insert(0));
        book.given_up.extend(all());
        book.end_changes(all());
        drop(book);
        self.test.did("given up", 1);
    }

    /// How some pages are used changes nothing of what is in them.
    pub(super) fn advise(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let (area, part) = self.any_part();
        {
            let mut book = process.book.borrow_mut();
            if book.is_busy(pages_of(area, &part)) {
                return;
            }
            book.begin_rights(pages_of(area, &part));
        }
        let all = [Advice::Normal, Advice::Sequential, Advice::Random, Advice::WillNeed, Advice::Cold];
        let advice = all[self.random.below(5) as usize];
        let done = self.test.world.vm.advise(cx, &process.space, span_of(&part), advice);
        process.book.borrow_mut().end_rights(pages_of(area, &part), None);
        match done {
            Ok(()) => self.test.did("advised", 1),
            Err(error) => assert_eq!(error, VmError::NoMemory),
        }
    }

    /// Who asks what has been used changes nothing of it.
    pub(super) fn working_set(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let (_, part) = self.any_part();
        let used = self.test.world.vm.test_and_clear_young(cx, &process.space, span_of(&part), |_| ());
        self.test.did("found used", used.expect("in the space"));
    }

    /// No CPU can use these pages so any more, whatever its TLB has kept.
    fn is_in_no_tlb(&self, process: &Process<'v, 'h, F>, pages: impl Iterator<Item = u64>, access: MmuAccess) {
        let world = self.test.world;
        for page in pages {
            for cpu in world.users(&process.space) {
                let found = world.machine.mmu().translate(cpu, VirtAddr::new(page), access);
                assert!(found.is_err(), "cpu{} uses {page:#x} as before", cpu.get());
            }
        }
    }

    /// Whoever still finds private pages there finds zeroes, or what was stored since.
    fn is_given_up(&self, process: &Process<'v, 'h, F>, pages: impl Iterator<Item = u64>) {
        let world = self.test.world;
        for at in pages.filter(|at| !area_of(*at).kind.shared && !self.test.is_lent(area_of(*at))) {
            for cpu in world.users(&process.space) {
                let at = at + u64::from(cpu.get()) * 8;
                let Ok(found) = world.machine.mmu().load(cpu, VirtAddr::new(at)) else { continue };
                let since = process.book.borrow().fresh.get(&at).is_some_and(|values| values.contains(&found));
                let in_flight = self.test.in_flight.borrow()[cpu.get() as usize].is_some_and(|store| store.2 == found);
                assert!(found == 0 || since || in_flight, "cpu{} finds {found} at {at:#x} as before", cpu.get());
            }
        }
    }

    /// Some pages are locked for a while: all of them are there, whatever reclaim does.
    pub(super) fn lock(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let (area, part) = self.any_part();
        let all = || pages_of(area, &part);
        {
            let mut book = process.book.borrow_mut();
            if book.is_busy(all()) {
                return;
            }
            book.begin_rights(all());
        }
        let (whole, vm) = (span_of(&part), &self.test.world.vm);
        let (forks, forking) = (process.forks.get(), !process.book.borrow().forks.is_empty());
        match vm.lock(cx, &process.space, whole, u64::MAX) {
            Ok(()) => {
                (0..self.random.below(400)).for_each(|_| point());
                let usage = vm.usage(cx, &process.space, whole).expect("in the space");
                if !area.kind.shared {
                    assert_eq!((usage.swapped, usage.zeroes), (0, 0), "{part:?} {usage:?}");
                    // Of what a fork shares each store makes a copy, and nobody counts the page while that takes its place.
                    let copied = forking || process.forks.get() != forks;
                    assert!(usage.present == whole.pages() || copied, "{part:?} {usage:?}");
                    all().for_each(|at| self.is_there(cx, &process, at));
                }
                self.test.did("locked", 1);
            }
            // The file is shorter just now.
            Err(VmError::OutOfBounds { .. }) if area.kind.shared => {}
            Err(error) => refused(error),
        }
        while let Err(error) = vm.unlock(cx, &process.space, whole) {
            assert_eq!(error, VmError::NoMemory);
            cx.cond_resched();
        }
        process.book.borrow_mut().end_rights(all(), None);
    }

    /// A page is mapped, moving, or has another one put in its place.
    fn is_there(&self, cx: &mut Cx<'_, 'h>, process: &Process<'v, 'h, F>, at: u64) {
        loop {
            match self.test.world.vm.lookup(cx, &process.space, VirtAddr::new(at)) {
                Lookup::Busy => cx.cond_resched(),
                found => return assert_ne!(found, Lookup::Absent, "{at:#x} is locked"),
            }
        }
    }

    /// Some pages are elsewhere for a while, where nobody looks, and come back as they were.
    pub(super) fn relocate(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let (area, part) = self.any_part();
        let all = || pages_of(area, &part);
        {
            let mut book = process.book.borrow_mut();
            if book.is_busy(all()) {
                return;
            }
            book.begin_changes(all());
        }
        let (here, size) = (span_of(&part), area.kind.page.bytes());
        let vm = &self.test.world.vm;
        // By whole tables or not.
        let there = 0x10_0000_0000 + (u64::from(self.cpu) << 32) + here.start().get();
        let there = span(there + if size == 4096 { self.random.below(3) * size } else { 0 }, here.bytes());
        // A fork may have come between, once.
        while let Err(error) = vm.unmap(cx, &process.space, there) {
            assert_eq!(error, VmError::NoMemory);
            cx.cond_resched();
        }
        match vm.move_to(cx, &process.space, here, there) {
            Ok(()) => {
                (0..self.random.below(100)).for_each(|_| point());
                while let Err(error) = vm.move_to(cx, &process.space, there, here) {
                    assert_eq!(error, VmError::NoMemory);
                    cx.cond_resched();
                }
                self.test.did("relocated", 1);
            }
            Err(error) => assert_eq!(error, VmError::NoMemory),
        }
        process.book.borrow_mut().end_changes(all());
    }
}

/// Where the pages of a part of an area begin.
fn pages_of(area: &Area, part: &Range<u64>) -> impl Iterator<Item = u64> + Clone + use<> {
    part.clone().step_by(area.kind.page.bytes() as usize)
}

fn span_of(part: &Range<u64>) -> VirtRange {
    span(part.start, part.end - part.start)
}
