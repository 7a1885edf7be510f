//! Words that are stored and loaded, and whether they are what they have to be.

use super::*;

impl<'v, 'h, F: PageFormat> Program<'_, 'v, 'h, F> {
    /// As a task, or from outside of it.
    pub(super) fn put(&mut self, cx: &mut Cx<'_, 'h>, at: u64) {
        let (process, vm, way) = (self.process.clone(), &self.test.world.vm, self.random.below(16));
        let value = if way == 0 { 0 } else { self.test.next_value() };
        self.storing(&process, at, value, |program| {
            let (space, to) = (&process.space, VirtAddr::new(at));
            match way {
                0 => vm.zero(cx, space, to, 8).map_err(|error| error.cause)?,
                1 => vm.write(cx, space, to, &value.to_ne_bytes()).map_err(|error| error.cause)?,
                _ => program.test.world.put(cx, space, at, value)?,
            }
            program.test.did("written from outside", u64::from(way < 2));
            Ok(true)
        });
        // A guest that has the page has what was stored.
        if process.guest.pages.lock().expect("one thread").contains_key(&(at & !0xfff)) {
            self.guest_loads(cx, &process, at);
        }
    }

    /// Stores by some way, which says whether it has.
    pub(super) fn storing(
        &mut self,
        process: &Process<'v, 'h, F>,
        at: u64,
        value: u64,
        store: impl FnOnce(&mut Self) -> Result<bool, VmError>,
    ) {
        let (test, area) = (self.test, area_of(at));
        let page = area.page(at);
        let before = test.changes(process, page);
        let rights = process.book.borrow().rights(page);
        let book = test.book(process, area);
        test.in_flight.borrow_mut()[self.cpu as usize] = Some((book, at, value));
        if area.kind.shared && test.file.is_some() {
            test.lend(at, value);
        }
        let stored = store(self);
        test.in_flight.borrow_mut()[self.cpu as usize] = None;
        let after = test.changes(process, page);
        let torn = before.are_under_way() || before != after;
        let known = !torn && !rights.under_way && rights == process.book.borrow().rights(page);
        match stored {
            Ok(true) => {
                assert!(!known || !rights.read_only, "cpu{} at {at:#x}: stored what may not be", self.cpu);
                let lost =
                    if area.kind.shared { before.shared.under_way || before.shared != after.shared } else { torn };
                book.borrow_mut().stored(Some(self.cpu), at, value, lost);
                test.did("copied", u64::from(!lost && test.is_lent(area)));
                // A page that leaves may have got it.
                for device in test.devices.borrow_mut().iter_mut().filter(|device| torn && device.of == self.cpu) {
                    if device.pinned.at().get() == page
                        && (area.kind.shared || std::ptr::eq(&*device.process, process))
                        && let Some(apart) = &mut device.apart
                    {
                        apart.insert(value);
                    }
                }
            }
            Ok(false) => {}
            Err(VmError::Denied { .. }) if !known || rights.read_only => test.did("denied", 1),
            Err(error) => self.missed(process, page, torn, error),
        }
    }

    /// Fills what no word of interest is in, so that the page does not compress.
    pub(super) fn scramble(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        let area = if self.random.below(8) == 0 { COPIED } else { PRIVATE };
        let page = self.any_page(area);
        let before = process.book.borrow().changes(page);
        let noise: Vec<u8> = (0..NOISE / 8).flat_map(|_| self.random.word().to_le_bytes()).collect();
        let written = self.test.world.vm.write(cx, &process.space, VirtAddr::new(page + 4096 - NOISE), &noise);
        let after = process.book.borrow().changes(page);
        match written.map_err(|error| error.cause) {
            Ok(()) | Err(VmError::Denied { .. }) => {}
            Err(error) => self.missed(&process, page, before.under_way || before != after, error),
        }
    }

    /// An access that was refused.
    #[track_caller]
    pub(super) fn missed(&self, process: &Process<'v, 'h, F>, page: u64, torn: bool, error: VmError) {
        if torn || process.book.borrow().gone.contains(&page) {
            assert!(!matches!(error, VmError::Lost | VmError::Paging(_) | VmError::Foreign), "{error}");
        } else {
            refused(error);
        }
    }

    pub(super) fn get(&mut self, cx: &mut Cx<'_, 'h>, at: u64) -> Option<u64> {
        let (process, world) = (self.process.clone(), self.test.world);
        if self.random.below(16) == 0 {
            // Which lets others run when it has what it wants, so what it says of a page that is changed meanwhile may be old.
            let (page, mut word) = (area_of(at).page(at), [0; 8]);
            let test = self.test;
            let changes = || test.changes(&process, page);
            return self.loading(&process, at, |_| {
                let before = changes();
                world.vm.read(cx, &process.space, VirtAddr::new(at), &mut word).map_err(|error| error.cause)?;
                Ok((!before.are_under_way() && changes() == before).then(|| u64::from_ne_bytes(word)))
            });
        }
        self.loading(&process, at, |_| world.get(cx, &process.space, at).map(Some))
    }

    /// Loads by some way, which says what it has found; what that is, if nobody changed the page meanwhile.
    pub(super) fn loading(
        &mut self,
        process: &Process<'v, 'h, F>,
        at: u64,
        load: impl FnOnce(&mut Self) -> Result<Option<u64>, VmError>,
    ) -> Option<u64> {
        let (area, page) = (area_of(at), area_of(at).page(at));
        let before = self.test.changes(process, page);
        let found = load(self);
        let after = self.test.changes(process, page);
        let torn = before.are_under_way() || before != after;
        let emptied = if area.kind.shared { before.shared.under_way || before.shared != after.shared } else { torn };
        let book = self.test.book(process, area);
        match found {
            Ok(Some(found)) => {
                let may = book.borrow().may_be(at);
                let zero = emptied && found == 0;
                assert!(may.contains(&found) || zero, "cpu{} at {at:#x}: {found}, which may be {may:?}", self.cpu);
                let is_own = !self.test.is_lent(area) || process.book.borrow().own.contains(&page);
                let known = !torn && is_own && !process.book.borrow().given_up.contains(&page);
                if known {
                    book.borrow_mut().words.insert(at, [found].into());
                }
                known.then_some(found)
            }
            Ok(None) => None,
            Err(error) => {
                self.missed(process, page, torn, error);
                None
            }
        }
    }
}
