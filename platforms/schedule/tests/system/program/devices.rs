//! Devices that have pinned pages, and memory that goes bad.

use super::*;

/// A device of a CPU's, with a pinned page.
pub(super) struct Device<'v, 'h, F: PageFormat> {
    pub(super) of: u32,
    pub(super) process: Rc<Process<'v, 'h, F>>,
    pub(super) pinned: Pinned<'v>,
    pub(super) stores: bool,
    /// If the page has been unmapped, or is the file's no longer, what may be in the CPU's word of it.
    pub(super) apart: Option<BTreeSet<u64>>,
}

impl<'v, 'h, F: PageFormat> Test<'v, 'h, F> {
    /// Pages of a process go, but a device that has one keeps it as it is. What is shared does not go with the process's area.
    pub(super) fn leave_to_devices(&self, process: &Process<'v, 'h, F>, range: &Range<u64>) {
        self.leave(range, |device, area| !area.kind.shared && std::ptr::eq(&*device.process, process));
    }

    /// The same of pages of the file, whoever shows them.
    pub(super) fn leave_shared_to_devices(&self, pages: &Range<u64>) {
        self.leave(&SHARED.part(pages), |_, _| true);
    }

    fn leave(&self, range: &Range<u64>, is_it: impl Fn(&Device<'v, 'h, F>, &Area) -> bool) {
        for device in self.devices.borrow_mut().iter_mut() {
            let page = device.pinned.at().get();
            if range.contains(&page) && device.apart.is_none() && is_it(device, area_of(page)) {
                let (at, book) = (page + u64::from(device.of) * 8, self.book(&device.process, area_of(page)));
                let mut apart = book.borrow().may_be(at);
                let in_flight = self.in_flight.borrow()[device.of as usize];
                apart.extend(in_flight.filter(|(of, to, _)| std::ptr::eq(*of, book) && *to == at).map(|of| of.2));
                device.apart = Some(apart);
            }
        }
    }
}

impl<'v, 'h, F: PageFormat> Program<'_, 'v, 'h, F> {
    /// A device gets a private page, or one that all share.
    pub(super) fn pin(&mut self, cx: &mut Cx<'_, 'h>) {
        let (test, process) = (self.test, self.process.clone());
        let area = [COPIED, COPIED, SHARED, SHARED, PRIVATE, PRIVATE][self.random.below(6) as usize];
        let at = self.any_page(area);
        let rights = process.book.borrow().rights(at);
        let stores = self.random.below(3) > 0;
        if test.devices.borrow().len() >= DEVICES || stores && rights.read_only || process.protecting.get() > 0 {
            return;
        }
        let before = test.changes(&process, at);
        process.pins.set(process.pins.get() + 1);
        process.pins_begun.set(process.pins_begun.get() + 1);
        process.pinning.set(process.pinning.get() + 1);
        let (access, mut pins) = (if stores { Access::Write } else { Access::Read }, Vec::new());
        let done =
            test.world.vm.pin(cx, &process.space, span(at, 4096), access, None, &Never, |pinned| pins.push(pinned));
        process.pinning.set(process.pinning.get() - 1);
        let torn = before.are_under_way() || test.changes(&process, at) != before;
        if let Err(error) = done {
            assert!(
                torn || error.cause == VmError::InUse
                    || matches!(error.cause, VmError::NoMemory | VmError::HwPoisoned { .. }),
                "{error}"
            );
        }
        if pins.is_empty() {
            process.pins.set(process.pins.get() - 1);
        }
        for pinned in pins {
            if torn {
                // Nobody knows which page it is.
                test.unpin(cx, &process, pinned);
            } else {
                let what = if area.kind.shared { "pinned and shared" } else { "pinned" };
                test.did(if test.is_lent(area) { "pinned of a file" } else { what }, 1);
                if test.is_lent(area) {
                    process.book.borrow_mut().copied(at);
                }
                test.devices.borrow_mut().push(Device {
                    of: self.cpu,
                    process: process.clone(),
                    pinned,
                    stores,
                    apart: None,
                });
            }
        }
    }

    pub(super) fn unpin(&mut self, cx: &mut Cx<'_, 'h>) {
        let mut devices = self.test.devices.borrow_mut();
        let Some(own) = devices.iter().position(|device| device.of == self.cpu) else { return };
        let Device { process, pinned, .. } = devices.swap_remove(own);
        drop(devices);
        process.users.set(process.users.get() + 1);
        self.test.unpin(cx, &process, pinned);
        self.test.let_go(cx, process);
    }

    /// A device finds in its page what it and the program stored last, and may store something else.
    pub(super) fn device_acts(&mut self) {
        let value = self.test.next_value();
        let mut devices = self.test.devices.borrow_mut();
        let Some(device) = devices.iter().find(|device| device.of == self.cpu) else { return };
        let (page, within) = (device.pinned.at().get(), u64::from(self.cpu) * 8);
        let (process, area) = (device.process.clone(), area_of(page));
        let changes = self.test.changes(&process, page);
        // What goes with a process's area, or with the file.
        let under_way = if area.kind.shared { changes.shared.under_way } else { changes.own.under_way };
        if device.stores && area.kind.shared && self.test.file.is_some() {
            self.test.lend(page + within, value);
        }
        let mut book = self.test.book(&process, area).borrow_mut();
        let may = device.apart.clone().unwrap_or_else(|| book.may_be(page + within));
        let frame = device.pinned.extent().base();
        let found = self.test.world.device_get(frame, within);
        // The file may be about to end within the page.
        let zeroed = found == 0 && under_way && device.apart.is_none();
        assert!(may.contains(&found) || zeroed, "a device of cpu{} at {page:#x}: {found}, not {may:?}", self.cpu);
        if !device.stores {
            return;
        }
        self.test.world.device_put(frame, within, value);
        if device.apart.is_some() {
            // The CPU's other device may have the same page.
            let same = |other: &&mut Device<'v, 'h, F>| other.of == self.cpu && other.pinned.extent().base() == frame;
            devices
                .iter_mut()
                .filter(same)
                .filter_map(|other| other.apart.as_mut())
                .for_each(|apart| *apart = [value].into());
            if under_way {
                // It may be the page that is mapped, still.
                let mut may = book.may_be(page + within);
                may.insert(value);
                book.words.insert(page + within, may);
                book.forks.iter_mut().for_each(|fork| fork.stores.push((None, page + within, value)));
            }
        } else {
            book.stored(None, page + within, value, area.kind.shared && under_way);
        }
    }

    /// A page is found to be bad.
    pub(super) fn poison(&mut self, cx: &mut Cx<'_, 'h>) {
        let at = self.any_page(PRIVATE);
        let (test, process) = (self.test, &self.process);
        if test.poison.get() == 0 {
            return;
        }
        let Lookup::Mapped(leaf) = test.world.vm.lookup(cx, &process.space, VirtAddr::new(at)) else { return };
        if test.world.guest.extent.contains(leaf.frame) {
            return;
        }
        // Others have used it up meanwhile, or may while the frame goes bad.
        let Some(left) = test.poison.get().checked_sub(1) else { return };
        test.poison.set(left);
        // It may be gone by now: what is free, or somebody else's, is as good.
        let done = test.world.vm.frames().hwpoison(cx, leaf.frame);
        let is_new = matches!(done, HwPoisoned::Free | HwPoisoned::InUse);
        test.poison.set(test.poison.get() + u32::from(!is_new));
        test.did("poisoned", u64::from(is_new));
    }
}
