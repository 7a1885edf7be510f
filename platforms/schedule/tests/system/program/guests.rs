//! Guests, which reach a process's memory through translations of their own.

use super::*;

/// Another machine's view of a process's memory: translations of its own.
#[derive(Default)]
pub(super) struct Guest {
    /// The frame, and whether it may be stored to.
    pub(super) pages: Mutex<BTreeMap<u64, (Pfn, bool)>>,
    pub(super) following: Following,
}

impl<'h> Notifier<Machine<'h>> for Guest {
    fn begin(&self, _cx: &mut CpuCx<'_, Machine<'h>>, range: VirtRange) {
        self.following.begin();
        let (first, last) = (range.start().get(), range.last().get());
        self.pages.lock().expect("one thread").retain(|page, _| page + 0xfff < first || last < *page);
    }

    fn end(&self, _cx: &mut CpuCx<'_, Machine<'h>>, _range: VirtRange) {
        self.following.end();
    }
}

impl<'v, 'h, F: PageFormat> Program<'_, 'v, 'h, F> {
    /// A guest accesses the process's memory through translations of its own.
    pub(super) fn guest_acts(&mut self, cx: &mut Cx<'_, 'h>) {
        let process = self.process.clone();
        if process.follower.borrow().is_none() {
            return;
        }
        let area = &AREAS[[0, 1, 4][self.random.below(3) as usize]];
        let at = self.any_page(area) + u64::from(self.cpu) * 8;
        let world = self.test.world;
        if self.random.below(2) == 0 {
            self.guest_loads(cx, &process, at);
            return;
        }
        let value = self.test.next_value();
        self.storing(&process, at, value, |program| {
            let Some(frame) = translated(world, cx, &process, at, true)? else { return Ok(false) };
            world.device_put(frame, at & 0xfff, value);
            program.test.did("stored by guests", 1);
            Ok(true)
        });
    }

    pub(super) fn guest_loads(&mut self, cx: &mut Cx<'_, 'h>, process: &Process<'v, 'h, F>, at: u64) {
        let world = self.test.world;
        let load = |_: &mut Self| {
            Ok(translated(world, cx, process, at, false)?.map(|frame| world.device_get(frame, at & 0xfff)))
        };
        self.loading(process, at, load);
    }
}

/// The frame that a guest finds at an address, to be used at once; `None` if others change it all the time.
fn translated<'h, F: PageFormat>(
    world: &World<'h, F>,
    cx: &mut Cx<'_, 'h>,
    process: &Process<'_, 'h, F>,
    at: u64,
    store: bool,
) -> Result<Option<Pfn>, VmError> {
    let (page, guest) = (at & !0xfff, &process.guest);
    for _ in 0..20 {
        point();
        let known = guest.pages.lock().expect("one thread").get(&page).copied();
        if let Some((frame, writable)) = known
            && (writable || !store)
        {
            return Ok(Some(frame));
        }
        let state = guest.following.state();
        match world.vm.lookup(cx, &process.space, VirtAddr::new(page)) {
            Lookup::Mapped(leaf) if !store || leaf.flags.contains(Flags::WRITE) => {
                point();
                let first = Extent::block(leaf.frame, leaf.size.order()).base().get();
                let frame = Pfn::new(first + (page >> 12) % leaf.size.pages());
                if guest.following.is_unchanged(state) {
                    let writable = leaf.flags.contains(Flags::WRITE);
                    guest.pages.lock().expect("one thread").insert(page, (frame, writable));
                }
            }
            _ => {
                let access = if store { Access::Write } else { Access::Read };
                world.vm.fault(cx, &process.space, VirtAddr::new(page), access)?;
            }
        }
    }
    Ok(None)
}
