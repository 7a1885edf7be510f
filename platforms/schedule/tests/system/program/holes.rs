//! The file becomes shorter, and longer again, and gets holes; requests that go over several pages, and over the end of all areas.

use super::*;
use hugemm_host::mmu::MmuAccess;

impl<'v, 'h, F: PageFormat> Program<'_, 'v, 'h, F> {
    /// Some pages of the file are zeroes from here on: whoever shows them finds that, and whoever has copied them what he has.
    pub(super) fn punch(&mut self, cx: &mut Cx<'_, 'h>) {
        let test = self.test;
        let Some(file) = test.file.filter(|_| !test.file_changes.replace(true)) else { return };
        let from = self.random.below(SHARED_PAGES);
        let to = SHARED_PAGES.min(from + 1 + self.random.below(4));
        test.leave_shared_to_devices(&(from..to));
        test.begin_file_changes(from..to);
        let done = file.punch(from..to, || test.world.vm.punch(cx, test.object, from, to));
        test.did("punched", done.expect("its own"));
        test.is_nowhere_else(&(from..to));
        test.end_file_changes(from..to);
    }

    /// The file ends early for a while, at a page or within one. Copies of what is beyond go, too; a page of a process's own in which it
    /// ends stays as it is.
    pub(super) fn truncate(&mut self, cx: &mut Cx<'_, 'h>) {
        let (test, vm) = (self.test, &self.test.world.vm);
        let Some(file) = test.file else { return };
        let end = self.random.below(SHARED_PAGES);
        // Between two CPUs' words.
        let into = self.random.below(2) * self.random.below(u64::from(CPUS)) * 8;
        let (bytes, gone) = ((end << 12) + into, end + u64::from(into > 0)..SHARED_PAGES);
        {
            let all: Vec<_> = test.all.borrow().iter().filter_map(Weak::upgrade).collect();
            let busy = |process: &Rc<Process<'v, 'h, F>>| process.book.borrow().is_busy(pages_of(COPIED, gone.clone()));
            if all.iter().any(busy) || test.file_changes.replace(true) {
                return;
            }
            *test.shortened.borrow_mut() = Some(Shortened { gone: gone.clone(), whose: Vec::new() });
            all.iter().for_each(|process| _ = test.goes_for(process));
        }
        test.leave_shared_to_devices(&gone);
        test.begin_file_changes(end..SHARED_PAGES);
        file.resize(bytes);
        test.did("shortened", vm.truncate(cx, test.object, bytes).expect("its own"));
        test.is_nowhere_else(&gone);
        (0..self.random.below(300)).for_each(|_| point());
        assert_eq!(vm.truncate(cx, test.object, SHARED_PAGES << 12), Ok(0));
        file.resize(SHARED_PAGES << 12);
        test.end_file_changes_from(end..SHARED_PAGES, into);
        let Shortened { gone, whose } = test.shortened.take().expect("said above");
        for process in whose.iter().filter_map(Weak::upgrade) {
            test.end_changes(&process, pages_of(COPIED, gone.clone()));
        }
    }

    /// Reads from a page on, over the pages behind it, as far as there are areas: what others do not store to is as it was stored.
    pub(super) fn read_across(&mut self, cx: &mut Cx<'_, 'h>) {
        let (process, test) = (self.process.clone(), self.test);
        // The first area, which the second adjoins, and nothing that.
        let from = PRIVATE.start + self.random.below(PRIVATE.pages + SHARED_PAGES) * 4096;
        let to = from + (1 + self.random.below(6)) * 4096;
        let end = AREAS[1].end();
        let there = || (from..to.min(end)).step_by(4096);
        let state = || {
            let gone = process.book.borrow().gone.clone();
            there().map(|page| (test.changes(&process, page), gone.contains(&page))).collect::<Vec<_>>()
        };
        let (before, mut bytes) = (state(), vec![0; (to - from) as usize]);
        let done = test.world.vm.read(cx, &process.space, VirtAddr::new(from), &mut bytes);
        let still = before.iter().all(|(changes, gone)| !changes.are_under_way() && !gone) && state() == before;
        let read = done.map_or_else(|error| error.done, |()| to - from);
        match done {
            Ok(()) => assert!(to <= end || !still, "there is nothing behind {end:#x}"),
            Err(error) if !still => {
                assert!(!matches!(error.cause, VmError::Lost | VmError::Paging(_) | VmError::Foreign), "{error}");
            }
            Err(error) if error.cause == (VmError::NoArea { at: VirtAddr::new(end) }) => {
                assert_eq!((error.done, error.at.get()), (end - from, end));
                test.did("stopped at a hole", 1);
            }
            Err(error) => refused(error.cause),
        }
        if !still {
            return;
        }
        for page in there().filter(|page| page + 4096 <= from + read) {
            let at = page + u64::from(self.cpu) * 8;
            let found = u64::from_ne_bytes(bytes[(at - from) as usize..][..8].try_into().expect("eight"));
            let may = test.may_be(&process, at);
            assert!(may.contains(&found), "cpu{} read {found} at {at:#x}, which may be {may:?}", self.cpu);
            test.did("read across", u64::from(page > from));
        }
    }

    /// Writes, or zeroes, over the border of two pages: nobody's bytes at the end of the first, and the first word of the second, which is
    /// that of the first CPU.
    pub(super) fn write_across(&mut self, cx: &mut Cx<'_, 'h>) {
        let (process, vm) = (self.process.clone(), &self.test.world.vm);
        let area = if self.random.below(4) == 0 { COPIED } else { PRIVATE };
        let at = area.start + (1 + self.random.below(area.pages - 1)) * 4096;
        if self.cpu != 0 || process.book.borrow().is_busy([at - 4096, at].into_iter()) {
            return;
        }
        let value = if self.random.below(2) == 0 { 0 } else { self.test.next_value() };
        let mut bytes: Vec<u8> = (0..NOISE / 8).flat_map(|_| self.random.word().to_le_bytes()).collect();
        bytes.extend(value.to_ne_bytes());
        let before = self.test.changes(&process, at - 4096);
        self.storing(&process, at, value, |program| {
            let from = VirtAddr::new(at - NOISE);
            let done = match value {
                0 => vm.zero(cx, &process.space, from, bytes.len()),
                _ => vm.write(cx, &process.space, from, &bytes),
            };
            match done {
                // What is known of rights is that of the second.
                Err(error) if error.done < NOISE => {
                    let torn = before.are_under_way() || program.test.changes(&process, at - 4096) != before;
                    let may = torn || matches!(error.cause, VmError::Denied { .. });
                    if !may {
                        refused(error.cause);
                    }
                    Ok(false)
                }
                done => {
                    done.map_err(|error| error.cause)?;
                    program.test.did("written across", 1);
                    Ok(true)
                }
            }
        });
    }
}

impl<'v, 'h, F: PageFormat> Test<'v, 'h, F> {
    /// What is about to be stored to some pages of the file is there afterwards, or not.
    fn begin_file_changes(&self, pages: Range<u64>) {
        self.shared.borrow_mut().begin_changes(pages_of(&AREAS[1], pages.clone()));
        self.shared.borrow_mut().fresh.retain(|at, _| !(AREAS[1].part(&pages)).contains(at));
        for at in pages_of(&AREAS[1], pages).flat_map(|page| (0..u64::from(CPUS)).map(move |cpu| page + cpu * 8)) {
            self.lend(at, 0);
        }
    }

    fn end_file_changes(&self, pages: Range<u64>) {
        self.end_file_changes_from(pages, 0);
    }

    /// The same; of the first page so many bytes have stayed.
    fn end_file_changes_from(&self, pages: Range<u64>, into: u64) {
        let (mut book, part) = (self.shared.borrow_mut(), AREAS[1].part(&pages));
        book.end_changes(pages_of(&AREAS[1], pages));
        book.empty(&(part.start + into..part.end));
        self.file_changes.set(false);
    }

    /// If the file is shorter just now, the pages of a process that go with what it has no longer.
    pub(super) fn goes_for(&self, process: &Rc<Process<'v, 'h, F>>) -> BTreeSet<u64> {
        let mut shortened = self.shortened.borrow_mut();
        let Some(Shortened { gone, whose }) = &mut *shortened else { return BTreeSet::new() };
        let copies = pages_of(COPIED, gone.clone());
        self.begin_changes(process, copies.clone());
        self.leave_to_devices(process, &COPIED.part(gone));
        whose.push(Rc::downgrade(process));
        copies.collect()
    }

    /// No CPU uses a frame that is free where pages of the file are shown, or have been: looked at without letting anybody run.
    fn is_nowhere_else(&self, pages: &Range<u64>) {
        let (mmu, frames) = (self.world.machine.mmu(), self.world.vm.frames());
        let first = mmu.host().frames().base();
        let base = mmu.host().address(first).expect("memory").addr().get();
        for process in self.all.borrow().iter().filter_map(Weak::upgrade) {
            let at = pages_of(&AREAS[1], pages.clone()).chain(pages_of(COPIED, pages.clone()));
            for (at, cpu) in at.flat_map(|at| self.world.users(&process.space).map(move |cpu| (VirtAddr::new(at), cpu)))
            {
                let Ok(used) = mmu.translate(cpu, at, MmuAccess::Load) else { continue };
                let frame = Pfn::new(first.get() + ((used.addr().get() - base) >> 12) as u64);
                assert_ne!(frames.references(frame), 0, "cpu{} uses what {at} had", cpu.get());
            }
        }
    }
}

/// Where some pages of an area of small ones begin.
fn pages_of(area: &Area, pages: Range<u64>) -> impl Iterator<Item = u64> + Clone + use<> {
    area.part(&pages).step_by(4096)
}
