//! Pages that are unmapped, given up, locked, moved elsewhere, and get other rights.

use super::*;
use hugemm_host::mmu::MmuAccess;

impl<'v, 'h, F: PageFormat> Program<'_, 'v, 'h, F> {
    /// Some pages may be stored to no longer, or again.
    pub(super) fn protect(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let size = area.kind.page.bytes();
        let start = self.any_page(area);
        let pages = (1 + self.random.below(6)).min((area.end() - start) / size);
        let all = || (0..pages).map(|page| start + page * size);
        let read_only = self.random.below(2) == 0;
        self.ask_for_away(cx, &process, start..start + pages * size);
        {
            let mut book = process.book.borrow_mut();
            let busy = |page| book.changes(page).under_way || book.rights(page).under_way || book.gone.contains(&page);
            if process.pinning.get() > 0 || all().any(busy) {
                return;
            }
            for page in all() {
                let rights = book.rights(page);
                book.rights.insert(page, Rights { begun: rights.begun + 1, under_way: true, ..rights });
            }
        }
        process.protecting.set(process.protecting.get() + 1);
        let rights = if read_only { Protection::USER } else { area.kind.protection };
        let done = self.test.world.vm.protect(cx, &process.space, span(start, pages * size), rights);
        process.protecting.set(process.protecting.get() - 1);
        if done.is_ok() && read_only {
            self.is_in_no_tlb(&process, all(), MmuAccess::Store);
        }
        let mut book = process.book.borrow_mut();
        for page in all() {
            let rights = book.rights.get_mut(&page).expect("begun");
            rights.under_way = false;
            rights.read_only = if done.is_ok() { read_only } else { rights.read_only };
        }
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
        let all = || parts.iter().flat_map(|(area, part)| part.clone().step_by(area.kind.page.bytes() as usize));
        let stays;
        {
            let mut book = process.book.borrow_mut();
            if all().any(|page| book.changes(page).under_way || book.rights(page).under_way) {
                return;
            }
            stays = gives_up
                && parts.iter().all(|(area, _)| !area.kind.pooled)
                && !all().any(|page| book.gone.contains(&page));
            for page in all() {
                let changes = book.changes(page);
                book.changes.insert(page, Changes { begun: changes.begun + 1, under_way: true });
            }
            book.fresh.retain(|at, _| !range.contains(at));
            // A device keeps the page as it is.
            for device in self.test.devices.borrow_mut().iter_mut() {
                let at = device.pinned.at().get();
                if std::ptr::eq(&*device.process, process) && range.contains(&at) && device.apart.is_none() {
                    let at = at + u64::from(device.of) * 8;
                    let mut apart = book.may_be(at);
                    let in_flight = self.test.in_flight.borrow()[device.of as usize];
                    apart.extend(
                        in_flight.filter(|(of, to, _)| std::ptr::eq(*of, &process.book) && *to == at).map(|of| of.2),
                    );
                    device.apart = Some(apart);
                }
            }
        }
        let whole = span(range.start, range.end - range.start);
        if stays {
            self.test.world.vm.discard(cx, &process.space, whole).expect("areas");
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
        let mut book = process.book.borrow_mut();
        if !stays {
            book.rights.retain(|page, _| !range.contains(page));
        }
        for page in all() {
            book.changes.get_mut(&page).expect("begun").under_way = false;
        }
        for (_, part) in parts.iter().filter(|(area, _)| !area.kind.shared) {
            let fresh: Vec<_> = book.fresh.range(part.clone()).map(|(at, values)| (*at, values.clone())).collect();
            book.words.retain(|at, _| !part.contains(at));
            for (at, mut values) in fresh {
                values.insert(0);
                book.words.insert(at, values);
            }
        }
    }

    /// No CPU can use these pages so any more, whatever its TLB has kept.
    fn is_in_no_tlb(&self, process: &Process<'v, 'h, F>, pages: impl Iterator<Item = u64>, access: MmuAccess) {
        let world = self.test.world;
        for page in pages {
            for cpu in world.users(&process.space) {
                let found = world.machine.mmu().translate(cpu, VirtAddr::new(page), access);
                assert!(found.is_err(), "cpu{} uses {page:#x} as before", cpu.0);
            }
        }
    }

    /// Whoever still finds private pages there finds zeroes, or what was stored since.
    fn is_given_up(&self, process: &Process<'v, 'h, F>, pages: impl Iterator<Item = u64>) {
        let world = self.test.world;
        for at in pages.filter(|at| !area_of(*at).kind.shared) {
            for cpu in world.users(&process.space) {
                let at = at + u64::from(cpu.0) * 8;
                let Ok(found) = world.machine.mmu().load(cpu, VirtAddr::new(at)) else { continue };
                let since = process.book.borrow().fresh.get(&at).is_some_and(|values| values.contains(&found));
                let in_flight = self.test.in_flight.borrow()[cpu.0 as usize].is_some_and(|store| store.2 == found);
                assert!(found == 0 || since || in_flight, "cpu{} finds {found} at {at:#x} as before", cpu.0);
            }
        }
    }

    /// Some pages are locked for a while: all of them are there, whatever reclaim does.
    pub(super) fn lock(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let size = area.kind.page.bytes();
        let first = (self.any_page(area) - area.start) / size;
        let pages = (1 + self.random.below(6)).min(area.pages - first);
        let part = span(area.start + first * size, pages * size);
        let all = || (0..pages).map(|page| area.start + (first + page) * size);
        {
            let mut book = process.book.borrow_mut();
            let busy = |page| book.changes(page).under_way || book.rights(page).under_way || book.gone.contains(&page);
            if all().any(busy) {
                return;
            }
            for page in all() {
                let rights = book.rights(page);
                book.rights.insert(page, Rights { begun: rights.begun + 1, under_way: true, ..rights });
            }
        }
        let vm = &self.test.world.vm;
        match vm.lock(cx, &process.space, part, u64::MAX) {
            Ok(()) => {
                (0..self.random.below(400)).for_each(|_| point());
                let usage = vm.usage(cx, &process.space, part).expect("in the space");
                if !area.kind.shared {
                    assert_eq!((usage.present, usage.swapped), (part.pages(), 0), "{part:?}");
                }
                self.test.did("locked", 1);
            }
            Err(error) => refused(error),
        }
        while let Err(error) = vm.unlock(cx, &process.space, part) {
            assert_eq!(error, VmError::NoMemory);
            cx.cond_resched();
        }
        let mut book = process.book.borrow_mut();
        for page in all() {
            book.rights.get_mut(&page).expect("begun").under_way = false;
        }
    }

    /// Some pages are elsewhere for a while, where nobody looks, and come back as they were.
    pub(super) fn relocate(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = self.any_area();
        let size = area.kind.page.bytes();
        let first = (self.any_page(area) - area.start) / size;
        let pages = (1 + self.random.below(6)).min(area.pages - first);
        let here = span(area.start + first * size, pages * size);
        let all = || (0..pages).map(|page| area.start + (first + page) * size);
        {
            let mut book = process.book.borrow_mut();
            let busy = |page| book.changes(page).under_way || book.rights(page).under_way || book.gone.contains(&page);
            if all().any(busy) {
                return;
            }
            for page in all() {
                let changes = book.changes(page);
                book.changes.insert(page, Changes { begun: changes.begun + 1, under_way: true });
            }
        }
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
        let mut book = process.book.borrow_mut();
        for page in all() {
            book.changes.get_mut(&page).expect("begun").under_way = false;
        }
    }
}
