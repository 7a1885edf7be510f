//! Everything at once on four CPUs, with less memory than is used, and devices that have some of it: every word read is the
//! word written last, by whichever of them. Some of their pages are poisoned meanwhile.

use crate::rig::{Cx, Handle, Model, NODE, Rig, Size, bounds, no_faults, span, with_rig};
use crate::support::Rng;
use hugemm_base::inject::FaultPlan;
use hugemm_base::{Cancel, CancelFlag, CpuId, Never, PageSize, Pfn, VirtAddr};
use hugemm_frames::HwPoisoned;
use hugemm_paging::Lookup;
use hugemm_reclaim::{Ageing, LruPolicy, Swap};
use hugemm_vm::{AddressSpace, Backing, Pinned, SharedRef, VmError, VmaKind};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

const SHARED_AT: u64 = 0x4000_0000;
const PRIVATE_AT: u64 = 0x8000_0000;
const CPUS: u32 = 4;

struct Program<'r, 'h> {
    rig: &'r Rig<'h>,
    cpu: u32,
    /// Of the shared object, and of private areas.
    page: PageSize,
    private_page: PageSize,
    shared_pages: u64,
    private_pages: u64,
    rng: Rng,
    /// What this CPU, or a device of its, stored last, by address, in its own words.
    known: BTreeMap<u64, u64>,
    /// Private pages that devices have.
    devices: Vec<Device<'r>>,
    /// Pages that it may still find poisoned.
    poison: u64,
    value: u64,
}

/// A device with a pinned page.
struct Device<'r> {
    pinned: Pinned<'r>,
    /// Whether the page is still where it was pinned.
    mapped: bool,
    /// If not, what is in it, by the place.
    stored: BTreeMap<u64, u64>,
}

/// A request that may be refused: for want of memory, or because it would have to read what is poisoned.
#[track_caller]
fn refused(error: VmError) {
    assert!(matches!(error, VmError::NoMemory | VmError::HwPoisoned { .. }), "{error}");
}

/// Pages of a program that are poisoned: each takes a page of memory for good.
fn most_poisoned(page: PageSize, cpu: u32) -> u64 {
    match page {
        PageSize::Size4K => 16,
        // One of all programs'.
        _ => u64::from(cpu == 1),
    }
}

/// Most pages that devices of a program have: most of memory stays reclaim's.
fn most_pinned(page: PageSize) -> usize {
    if page == PageSize::Size4K { 3 } else { 1 }
}

impl<'r, 'h> Program<'r, 'h> {
    fn any_at(&mut self) -> u64 {
        let (base, pages, page) = match self.rng.below(33) {
            0..=15 => (SHARED_AT, self.shared_pages, self.page),
            16..=31 => (PRIVATE_AT, self.private_pages, self.private_page),
            // One that a device has, now and then: seldom enough for reclaim to want it.
            _ => match self.devices.first() {
                Some(device) if device.mapped => (device.pinned.at().get(), 1, self.private_page),
                _ => (PRIVATE_AT, self.private_pages, self.private_page),
            },
        };
        // One of this CPU's words of some page; of a 2 MiB page, in one of eight places.
        let within = if page == PageSize::Size4K { 0 } else { self.rng.below(8) * 0x4_0000 };
        base + self.rng.below(pages) * page.bytes() + within + u64::from(self.cpu) * 8
    }

    fn check(&self, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h>>, at: u64, expected: u64) {
        match self.rig.get(cx, space, at) {
            Ok(found) => assert_eq!(found, expected, "CPU {} at {at:#x}", self.cpu),
            Err(error) => refused(error),
        }
    }

    fn step(&mut self, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>) {
        match self.rng.below(200) {
            0 => self.fork(cx, space),
            1 => self.unmap(cx, space),
            2 | 3 => self.pin(cx, space),
            4 => self.poison(cx, space),
            5..=20 => self.device_acts(),
            21..=90 => {
                let at = self.any_at();
                self.check(cx, space, at, self.known.get(&at).copied().unwrap_or(0));
            }
            _ => {
                let at = self.any_at();
                self.value += 1;
                if self.rig.put(cx, space, at, self.value).is_ok() {
                    self.known.insert(at, self.value);
                }
            }
        }
        self.rig.vm.shootdown().handle_ipi(cx);
        self.rig.vm.frames().serve(cx);
    }

    /// A page of the program's, or a part of one, is found to be bad.
    fn poison(&mut self, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>) {
        let at = self.any_at();
        if self.poison == 0 {
            return;
        }
        let Lookup::Mapped(leaf) = self.rig.vm.lookup(cx, space, VirtAddr::new(at)) else { return };
        let size = if at < PRIVATE_AT { self.page } else { self.private_page };
        // It may be gone by now: what is free, or somebody else's, is as good.
        let frame = Pfn::new(leaf.frame.number() + self.rng.below(size.pages()));
        let done = self.rig.vm.frames().hwpoison(cx, frame);
        self.poison -= u64::from(matches!(done, HwPoisoned::Free | HwPoisoned::InUse));
    }

    /// A device gets a private page.
    fn pin(&mut self, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>) {
        if self.devices.len() == most_pinned(self.private_page) {
            if self.rng.below(8) == 0 {
                self.unpin(cx, space);
            }
            return;
        }
        let page = self.private_page.bytes();
        let at = PRIVATE_AT + self.rng.below(self.private_pages) * page;
        let devices = &mut self.devices;
        let visit = |pinned| devices.push(Device { pinned, mapped: true, stored: BTreeMap::new() });
        if let Err(error) = self.rig.vm.pin(cx, space, span(at, page), None, &Never, visit) {
            let cause = error.cause;
            assert!(matches!(cause, VmError::NoMemory | VmError::InUse | VmError::HwPoisoned { .. }), "{error}");
        }
    }

    fn unpin(&mut self, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>) {
        if !self.devices.is_empty() {
            let device = self.devices.swap_remove(self.rng.below(self.devices.len() as u64) as usize);
            self.rig.vm.unpin(cx, space, device.pinned).expect("its own");
        }
    }

    /// A device finds in its page what it and the program stored last, and stores something else.
    fn device_acts(&mut self) {
        let which = self.rng.below(most_pinned(self.private_page) as u64) as usize;
        let place = if self.private_page == PageSize::Size4K { 0 } else { self.rng.below(8) * 0x4_0000 };
        let Some(device) = self.devices.get_mut(which) else { return };
        let (within, head) = (place + u64::from(self.cpu) * 8, device.pinned.extent().base());
        let at = device.pinned.at().get() + within;
        let known = if device.mapped { self.known.get(&at) } else { device.stored.get(&within) };
        if let Some(known) = known {
            assert_eq!(self.rig.device_load(head, within), *known, "a device of CPU {} at {at:#x}", self.cpu);
        }
        self.value += 1;
        self.rig.device_store(head, within, self.value);
        if device.mapped {
            self.known.insert(at, self.value);
        } else {
            device.stored.insert(within, self.value);
        }
    }

    /// A child has the private pages as they are now, whatever the parent does then.
    fn fork(&mut self, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>) {
        let child = match self.rig.vm.fork(cx, space) {
            Ok(child) => child,
            Err(error) => return refused(error),
        };
        let then = self.known.clone();
        for _ in 0..10 {
            let at = self.any_at();
            self.value += 1;
            if self.rig.put(cx, space, at, self.value).is_ok() {
                self.known.insert(at, self.value);
            }
            self.device_acts();
            self.rig.vm.shootdown().handle_ipi(cx);
        }
        self.rig.leave(cx, space);
        self.rig.enter(cx, &child);
        for (at, value) in then.iter().filter(|(at, _)| **at >= PRIVATE_AT) {
            self.check(cx, &child, *at, *value);
            self.rig.vm.shootdown().handle_ipi(cx);
        }
        self.rig.leave(cx, &child);
        self.rig.vm.destroy(cx, child).expect("destroyed");
        self.rig.enter(cx, space);
    }

    /// Some private pages are unmapped, and read as zeroes when they are mapped again.
    fn unmap(&mut self, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>) {
        let first = self.rng.below(self.private_pages);
        let pages = (1 + self.rng.below(8)).min(self.private_pages - first);
        let (start, bytes) = (PRIVATE_AT + first * self.private_page.bytes(), pages * self.private_page.bytes());
        match self.rig.vm.unmap(cx, space, span(start, bytes)) {
            Ok(_) => {}
            Err(error) => return assert_eq!(error, VmError::NoMemory),
        }
        // A device keeps the page as it is.
        for device in &mut self.devices {
            let at = device.pinned.at().get();
            if device.mapped && (start..start + bytes).contains(&at) {
                device.mapped = false;
                let page = self.known.range(at..at + self.private_page.bytes());
                device.stored = page.map(|(word, value)| (word - at, *value)).collect();
            }
        }
        self.known.retain(|at, _| !(start..start + bytes).contains(at));
        loop {
            match self.rig.vm.map(cx, space, span(start, bytes), VmaKind::private(self.private_page), Backing::Private)
            {
                Ok(_) => return,
                Err(error) => assert_eq!(error, VmError::NoMemory),
            }
            self.rig.vm.shootdown().handle_ipi(cx);
        }
    }
}

/// Ends the process when its thread fails: the others would wait for its CPU for ever, and nobody would hear why.
struct EndAll;

impl Drop for EndAll {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Says what is wrong though the test never ends by itself: what a test prints is kept back until it does.
fn say_at_once() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let _ = writeln!(std::io::stderr(), "{panic}");
            others(panic);
        }));
    });
}

fn run(rig: &Rig<'_>, [page, private_page]: [PageSize; 2], seed: u64, steps: u64) {
    say_at_once();
    // Half as much again as there is memory.
    let scale = if page == PageSize::Size4K { 1 } else { 2 };
    let (shared_pages, private_pages) = ((scale << 22) / page.bytes(), (scale << 21) / private_page.bytes());
    let object = rig
        .mmu
        .as_cpu(CpuId(0), |cx| rig.vm.create_shared(cx, shared_pages * page.pages(), page, false).expect("an object"));
    let start = Barrier::new(CPUS as usize);
    let over = CancelFlag::new();
    let [played, ended] = [(); 2].map(|()| AtomicU32::new(0));
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (object, start, over): (&SharedRef<'_, _>, _, _) = (&object, &start, &over);
            let (played, ended) = (&played, &ended);
            scope.spawn(move || {
                let _end = EndAll;
                rig.beside_others(cpu, |cx| {
                    start.wait();
                    if cpu == 0 {
                        // The worker, whose way of ageing and of choosing changes all the time.
                        let mut turn = 0;
                        while !over.requested() {
                            let pager = rig.vm.pager();
                            pager.set_ageing(Ageing::ALL[turn % 2]);
                            pager.lru(NODE).expect("one").set_policy(cx, LruPolicy::ALL[turn / 4 % 2]);
                            pager.balance(&rig.vm, cx, NODE, 512, over);
                            if page != private_page && turn % 16 == 0 {
                                pager.compact(&rig.vm, cx, NODE);
                            }
                            turn += 1;
                            rig.vm.shootdown().handle_ipi(cx);
                            std::thread::yield_now();
                        }
                        return;
                    }
                    let space = rig.vm.create(cx, bounds()).expect("a space");
                    let kind = VmaKind::private(page);
                    let shared = span(SHARED_AT, shared_pages * page.bytes());
                    rig.vm.map(cx, &space, shared, kind, Backing::Shared(object, 0)).expect("shared");
                    let private = span(PRIVATE_AT, private_pages * private_page.bytes());
                    let kind = VmaKind::private(private_page);
                    rig.vm.map(cx, &space, private, kind, Backing::Private).expect("private");
                    rig.enter(cx, &space);
                    let (rng, known, devices) = (Rng(seed + u64::from(cpu) * 77), BTreeMap::new(), Vec::new());
                    let mut program = Program {
                        rig,
                        cpu,
                        page,
                        private_page,
                        shared_pages,
                        private_pages,
                        rng,
                        known,
                        devices,
                        poison: most_poisoned(private_page, cpu),
                        value: 0,
                    };
                    for _ in 0..steps {
                        program.step(cx, &space);
                    }
                    // Nobody's memory goes before everybody has his: one after the other they would have enough.
                    played.fetch_add(1, Ordering::SeqCst);
                    while played.load(Ordering::SeqCst) + 1 < CPUS {
                        rig.vm.shootdown().handle_ipi(cx);
                        rig.vm.frames().serve(cx);
                        std::thread::yield_now();
                    }
                    for (at, value) in program.known.clone() {
                        program.check(cx, &space, at, value);
                        rig.vm.shootdown().handle_ipi(cx);
                    }
                    while !program.devices.is_empty() {
                        program.unpin(cx, &space);
                    }
                    rig.end(cx, space);
                    if ended.fetch_add(1, Ordering::SeqCst) + 2 == CPUS {
                        over.raise();
                    }
                });
            });
        }
    });
    rig.mmu.as_cpu(CpuId(0), |cx| {
        rig.vm.close(cx, object).expect("its own");
        let stats = rig.store.stats(cx);
        assert!(stats.stores > 0 && stats.loads > 0, "there was no pressure: {stats:?}");
        assert!(rig.vm.frames().stats(cx).refused > 0, "nothing was poisoned");
    });
}

#[test]
fn every_word_is_the_word_written_last() {
    // Longer where somebody asks for it.
    let steps = std::env::var("HUGEMM_SOAK_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(2500);
    for (page, policy, mib) in
        [(PageSize::Size4K, LruPolicy::Generations, 7), (PageSize::Size4K, LruPolicy::TwoList, 8)]
    {
        let size = Size { mib, swap: 2500, cpus: CPUS, policy, nodes: 1, strange: false };
        with_rig(size, 31, &no_faults(), |rig| run(rig, [page; 2], 7, steps));
    }
}

#[test]
fn every_word_of_large_pages_is_the_word_written_last() {
    let steps = std::env::var("HUGEMM_SOAK_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(600);
    let size = Size { mib: 24, swap: 2500, cpus: CPUS, policy: LruPolicy::Generations, nodes: 1, strange: false };
    with_rig(size, 32, &no_faults(), |rig| run(rig, [PageSize::Size2M; 2], 8, steps));
}

/// Small pages break memory up, and move all the time to make blocks of it.
#[test]
fn every_word_is_the_word_written_last_while_pages_move() {
    let steps = std::env::var("HUGEMM_SOAK_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(800);
    let size = Size { mib: 12, swap: 2500, cpus: CPUS, policy: LruPolicy::TwoList, nodes: 1, strange: false };
    with_rig(size, 33, &no_faults(), |rig| {
        run(rig, [PageSize::Size2M, PageSize::Size4K], 9, steps);
        assert!(rig.vm.pager().counts().moved.get() > 0, "no page moved");
    });
}

/// As before, but every so manieth allocation fails: that is one access's failure, or one page's that stays.
#[test]
fn every_word_is_the_word_written_last_though_allocations_fail() {
    let size = Size { mib: 8, swap: 2500, cpus: CPUS, policy: LruPolicy::Generations, nodes: 1, strange: false };
    // What the test's own setting up asks for must be there.
    let plan = FaultPlan::periodic(500, 17);
    with_rig(size, 34, &plan, |rig| run(rig, [PageSize::Size4K; 2], 7, 2500));
    assert!(plan.failed() > 0);
}
