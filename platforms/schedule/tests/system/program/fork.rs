//! A process becomes two, of which each has what there was at one moment.

use super::*;

impl<'v, 'h, F: PageFormat> Program<'_, 'v, 'h, F> {
    /// A child has the private words as they are at one moment, whatever others do.
    pub(super) fn fork(&mut self, cx: &mut Cx<'_, 'h>) {
        let (test, parent) = (self.test, self.process.clone());
        if test.processes.borrow().len() >= PROCESSES {
            return;
        }
        let (id, pins, begun) = (test.next_value(), parent.pins.get(), parent.pins_begun.get());
        let (before, mut words, gone, given_up, lent, own) = {
            let mut book = parent.book.borrow_mut();
            book.forks.push(Fork { id, stores: Vec::new() });
            let (words, gone, given_up) = (book.words.clone(), book.gone.clone(), book.given_up.clone());
            (book.changes.clone(), words, gone, given_up, book.lent.clone(), book.own.clone())
        };
        parent.forks.set(parent.forks.get() + 1);
        let forked = test.world.vm.fork(cx, &parent.space);
        parent.forks.set(parent.forks.get() + 1);
        let stores = {
            let mut book = parent.book.borrow_mut();
            let at = book.forks.iter().position(|fork| fork.id == id).expect("its own");
            let mut stores = book.forks.swap_remove(at).stores;
            // What is about to be stored may have been in time.
            for (cpu, store) in test.in_flight.borrow().iter().enumerate() {
                let of_this = store.filter(|(of, ..)| std::ptr::eq(*of, &parent.book));
                stores.extend(of_this.map(|(_, at, value)| (Some(cpu as u32), at, value)));
            }
            stores
        };
        let child = match forked {
            Ok(child) => child,
            Err(error) => return refused(error),
        };
        for (_, at, value) in &stores {
            // What a file may have lent is known besides.
            let none = if lent.contains_key(at) { [].into() } else { [0].into() };
            words.entry(*at).or_insert(none).insert(*value);
        }
        test.did("forked", 1);
        let pages =
            AREAS.iter().flat_map(|area| (0..area.pages).map(|page| area.start + page * area.kind.page.bytes()));
        let rights = pages.filter_map(|page| {
            let allowed = child.find_vma(cx, VirtAddr::new(page)).ok()?.kind.protection;
            Some((page, Rights { read_only: !allowed.contains(Protection::WRITE), ..Rights::default() }))
        });
        let rights = rights.collect();
        let child = test.process(cx, child, Book { words, gone, rights, given_up, lent, own, ..Book::default() });
        // What the file has got since.
        for (at, values) in &parent.book.borrow().lent {
            child.book.borrow_mut().lent.entry(*at).or_default().extend(values);
        }
        // From here on it is one of those whose copies go when the file becomes shorter.
        let goes = test.goes_for(&child);
        let unlike = |(page, now): (&u64, &Changes)| {
            let changed = now.under_way || before.get(page).copied().unwrap_or_default() != *now;
            (changed && !goes.contains(page)).then_some(*page)
        };
        let torn: BTreeSet<u64> = parent.book.borrow().changes.iter().filter_map(unlike).collect();
        child.users.set(1);
        test.world.enter(cx, &child.space);
        test.world.leave(cx, &parent.space);
        // What came or went meanwhile is there or not.
        for page in &torn {
            self.change_pages(cx, &child, *page..page + area_of(*page).kind.page.bytes(), false);
        }
        // Nothing is changed where the file is, or has just become, shorter, though the parent may have had no area there.
        for page in torn.into_iter().chain(goes).filter(|page| COPIED.holds(*page)) {
            if child.space.find_vma(cx, VirtAddr::new(page)).is_err() {
                test.map(cx, &child, COPIED, page..page + 4096);
            }
        }
        self.process = child.clone();
        // What may be pinned is copied for the child, each page at its own moment.
        let pinned = pins != 0 || parent.pins_begun.get() != begun;
        self.is_one_moment(cx, &stores, pinned.then_some(&*parent));
        if self.random.below(2) == 0 {
            let own = child.book.borrow().words.keys().copied().collect::<Vec<_>>();
            for at in own {
                self.get(cx, at);
            }
        }
        test.processes.borrow_mut().push(child);
        self.test.let_go(cx, parent);
    }

    /// Of the stores of one CPU, the child has seen the first so many; beside pins, of those to pages that it has with the parent.
    fn is_one_moment(
        &mut self,
        cx: &mut Cx<'_, 'h>,
        stores: &[(Option<u32>, u64, u64)],
        pinned: Option<&Process<'_, 'h, F>>,
    ) {
        // Zeroes were there before, perhaps.
        let unsure = |store: &&(Option<u32>, u64, u64)| store.0.is_none() || store.2 == 0;
        let unsure: BTreeSet<u64> = stores.iter().filter(unsure).map(|store| store.1).collect();
        for cpu in 0..=CPUS {
            let own: Vec<(u64, u64)> =
                stores.iter().filter(|store| store.0 == Some(cpu)).map(|store| (store.1, store.2)).collect();
            let places: BTreeSet<u64> = own.iter().map(|store| store.0).filter(|at| !unsure.contains(at)).collect();
            let (mut least, mut most) = (0, own.len());
            for at in places {
                let changed = self.process.book.borrow().changes(area_of(at).page(at)).begun > 0;
                if let Some(parent) = pinned {
                    if !self.has_with(cx, parent, at) {
                        continue;
                    }
                    self.test.did("forked beside pins", 1);
                }
                let Some(found) = self.get(cx, at).filter(|_| !changed) else { continue };
                let here =
                    || own.iter().enumerate().filter(|(_, store)| store.0 == at).map(|(index, store)| (index, store.1));
                let seen = here().find(|(_, value)| *value == found).map(|(index, _)| index);
                least = least.max(seen.map_or(0, |index| index + 1));
                most = most.min(
                    here()
                        .map(|(index, _)| index)
                        .find(|index| seen.is_none_or(|seen| *index > seen))
                        .unwrap_or(own.len()),
                );
            }
            assert!(least <= most, "the child has store {least} of cpu{cpu}, and not the one after {most}: {own:x?}");
        }
    }

    /// Whether the page there is one that both processes have.
    fn has_with(&self, cx: &mut Cx<'_, 'h>, other: &Process<'_, 'h, F>, at: u64) -> bool {
        let mut frame =
            |process: &Process<'_, 'h, F>| match self.test.world.vm.lookup(cx, &process.space, VirtAddr::new(at)) {
                Lookup::Mapped(leaf) => Some(leaf.frame),
                _ => None,
            };
        let own = frame(&self.process);
        own.is_some() && own == frame(other)
    }
}
