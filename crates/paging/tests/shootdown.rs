//! Who is asked, what it costs, and what is refused.

mod support;

use hugemm_base::Quarantine;
use hugemm_base::inject::NoFaults;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{
    Counters, Cpu, CpuCx, CpuId, Invalidation, PageSize, PhysAddr, PreemptModel, TlbHw, TlbScope, VirtAddr, VirtRange,
};
use hugemm_paging::{
    Counting, DeferredUnmap, Detached, EditLock, Editing, Flags, Keep, KernelSpace, Lookup, Mapping, PageTable,
    PagingError, ShootdownBatch, ShootdownCounts, ShootdownPolicy, SpaceKind, TlbCpu, TlbShootdown, TlbShootdownError,
    TlbSpace, UserSpace, X86_64,
};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use support::{Heap, at, extent, lower, span};

/// A CPU that the thread plays.
struct Player {
    number: Cell<u32>,
    interrupts: Cell<bool>,
    counters: Counters,
}

impl Player {
    fn new(number: u32) -> Self {
        Player { number: Cell::new(number), interrupts: Cell::new(true), counters: Counters::default() }
    }

    /// The same as another CPU, for the time of it.
    fn on<R>(&self, number: u32, f: impl FnOnce(&CpuCx<'_, Player>) -> R) -> R {
        let before = self.number.replace(number);
        let result = self.run(f);
        self.number.set(before);
        result
    }

    /// Runs `f` with a context of the CPU.
    fn run<R>(&self, f: impl FnOnce(&CpuCx<'_, Player>) -> R) -> R {
        // SAFETY: the only context in use on this thread.
        f(&unsafe { CpuCx::new(self) })
    }
}

// SAFETY: a thread plays one CPU at a time, and no other thread the same. The operating system fences when it switches
// threads.
unsafe impl Cpu for Player {
    fn current(&self) -> CpuId {
        CpuId::new(self.number.get())
    }

    unsafe fn pin(&self) -> usize {
        usize::from(self.interrupts.replace(false))
    }

    unsafe fn unpin(&self, state: usize) {
        self.interrupts.set(state != 0);
    }

    fn cpus(&self) -> u32 {
        self.number.get() + 1
    }

    fn interrupts_on(&self) -> bool {
        self.interrupts.get()
    }

    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::None
    }

    unsafe fn cond_resched(&self) {}

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

struct Parts {
    cpus: Vec<TlbCpu>,
    inboxes: Vec<AtomicU64>,
}

fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

impl Parts {
    fn new(cpus: usize) -> Self {
        Parts { cpus: (0..cpus).map(|_| TlbCpu::new()).collect(), inboxes: words(cpus * cpus.div_ceil(64)) }
    }

    fn shootdown<H: TlbHw>(&self, hw: H) -> TlbShootdown<'_, H> {
        // SAFETY: these CPUs are the tests'.
        unsafe { TlbShootdown::new(&self.cpus, &self.inboxes, hw) }.expect("fits")
    }

    fn space<K: SpaceKind, H: TlbHw>(&self, shootdown: &TlbShootdown<'_, H>) -> TlbSpace<K, Keep, Vec<AtomicU64>> {
        let masks = words(2 * self.cpus.len().div_ceil(64));
        // SAFETY: these CPUs walk nothing.
        unsafe { TlbSpace::with_masks(shootdown, PhysAddr::new(0x1000), Keep, masks) }.expect("fits")
    }
}

fn range(page: u64, pages: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(page << 12), pages << 12).expect("a range")
}

/// Changes `pages` pages and flushes them on CPU 0; what that cost.
fn change<H: TlbHw>(
    shootdown: &TlbShootdown<'_, H>,
    cx: &CpuCx<'_, Player>,
    space: &TlbSpace<UserSpace, Keep, Vec<AtomicU64>>,
    pages: u64,
    policy: &ShootdownPolicy,
) -> ShootdownCounts {
    let before = shootdown.counts();
    for part in policy.batches(range(0x100, pages), PageSize::Size4K) {
        let mut batch = ShootdownBatch::new(space);
        batch.changed(part, PageSize::Size4K);
        batch.flush(shootdown, cx, policy);
    }
    shootdown.counts().since(before)
}

#[test]
fn a_batch_costs_the_same_for_any_number_of_pages_and_any_number_of_cpus_is_reached() {
    for cpus in [1, 2, 63, 64, 65, 130, 200] {
        let parts = Parts::new(cpus);
        let shootdown = parts.shootdown(Counting);
        let space = parts.space(&shootdown);
        let cpu = Player::new(0);
        for number in (0..cpus).rev() {
            cpu.on(number as u32, |cx| space.switch_in(&shootdown, cx));
        }
        let others = cpus as u64 - 1;
        for pages in [1, 33, 34, 512, 1 << 18] {
            let counts = cpu.run(|cx| change(&shootdown, cx, &space, pages, &ShootdownPolicy::BATCHED));
            assert_eq!((counts.targets, counts.interrupts, counts.served), (others, others, others));
            assert_eq!((counts.flushes_range, counts.flushes_all), if pages <= 33 { (1, 0) } else { (0, 1) });
            assert_eq!((counts.pages, counts.caught_up), (if pages <= 33 { pages } else { 0 }, 0));
        }
        let counts = cpu.run(|cx| change(&shootdown, cx, &space, 100, &ShootdownPolicy::PER_PAGE));
        assert_eq!((counts.flushes_range, counts.targets), (100, 100 * others));
    }
}

#[test]
fn lazy_cpus_and_those_that_left_are_not_asked_and_catch_up() {
    let parts = Parts::new(130);
    let shootdown = parts.shootdown(Counting);
    let (space, other) = (parts.space::<UserSpace, _>(&shootdown), parts.space::<UserSpace, _>(&shootdown));
    let cpu = Player::new(0);
    for number in [0, 1, 64, 129] {
        cpu.on(number, |cx| space.switch_in(&shootdown, cx));
    }
    // SAFETY: it uses nothing at all.
    cpu.on(64, |cx| unsafe { space.enter_lazy(&shootdown, cx) });
    cpu.on(129, |cx| {
        other.switch_in(&shootdown, cx);
        space.switch_out(&shootdown, cx);
    });
    let counts = cpu.run(|cx| change(&shootdown, cx, &space, 1, &ShootdownPolicy::BATCHED));
    assert_eq!((counts.targets, counts.skipped_lazy), (1, 1));
    // With tables, the lazy one is asked too, and has missed a flush.
    let before = shootdown.counts();
    cpu.run(|cx| {
        let mut batch = ShootdownBatch::new(&space);
        let debt = batch.unhooked((), range(0, 512), PageSize::Size4K, true);
        debt.release(&batch.flush(&shootdown, cx, &ShootdownPolicy::BATCHED)).expect("paid");
    });
    let counts = shootdown.counts().since(before);
    assert_eq!((counts.targets, counts.skipped_lazy, counts.caught_up), (2, 0, 1));
    // Up to date, it wakes for nothing; after another flush it does not.
    let before = shootdown.counts();
    cpu.on(64, |cx| space.switch_in(&shootdown, cx));
    assert_eq!(shootdown.counts().since(before).caught_up, 0);
    // SAFETY: it uses nothing at all.
    cpu.on(64, |cx| unsafe { space.enter_lazy(&shootdown, cx) });
    cpu.run(|cx| change(&shootdown, cx, &space, 1, &ShootdownPolicy::BATCHED));
    let before = shootdown.counts();
    cpu.on(64, |cx| space.switch_in(&shootdown, cx));
    assert_eq!(shootdown.counts().since(before).caught_up, 1);
}

/// Notes with what each load began.
#[derive(Default)]
struct Tagging {
    kept: Mutex<Vec<bool>>,
    invalidated: AtomicU32,
}

// SAFETY: nothing is translated.
unsafe impl TlbHw for &Tagging {
    unsafe fn invalidate(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) {
        self.invalidated.fetch_add(1, Ordering::Relaxed);
    }

    fn interrupt(&self, _cpu: CpuId, _first: CpuId, _cpus: u64, _serve: &mut dyn FnMut(CpuId)) {
        unreachable!("nobody is asked");
    }

    fn tags(&self) -> usize {
        4
    }

    unsafe fn load(&self, _cpu: CpuId, _root: PhysAddr, _tag: usize, keep: bool) {
        self.kept.lock().expect("not poisoned").push(keep);
    }

    unsafe fn unload(&self, _cpu: CpuId) {}
}

/// What is kept under tags hides no use for longer than until it expires, and that costs no interrupt.
#[test]
fn what_is_kept_under_tags_expires() {
    let (hw, parts) = (Tagging::default(), Parts::new(2));
    let shootdown = parts.shootdown(&hw);
    let spaces = [parts.space::<UserSpace, _>(&shootdown), parts.space::<UserSpace, _>(&shootdown)];
    let cpu = Player::new(0);
    let turn = || {
        hw.kept.lock().expect("not poisoned").clear();
        cpu.run(|cx| {
            for (to, from) in [(0, 1), (1, 0)] {
                spaces[to].switch_in(&shootdown, cx);
                spaces[from].switch_out(&shootdown, cx);
            }
        });
        hw.kept.lock().expect("not poisoned").clone()
    };
    turn();
    assert_eq!(turn(), [true, true]);
    shootdown.expire();
    assert_eq!(turn(), [false, false]);
    assert_eq!(turn(), [true, true]);
    // A space that is still loaded, lazily, is not loaded again: it is invalidated.
    // SAFETY: it uses nothing at all.
    cpu.run(|cx| unsafe { spaces[1].enter_lazy(&shootdown, cx) });
    shootdown.expire();
    cpu.run(|cx| spaces[1].switch_in(&shootdown, cx));
    assert_eq!(hw.invalidated.load(Ordering::Relaxed), 1);
    assert_eq!(turn(), [false, true]);
    assert_eq!(shootdown.counts().targets, 0);
}

#[test]
fn a_space_is_retired_when_only_lazy_cpus_are_left() {
    let parts = Parts::new(3);
    let shootdown = parts.shootdown(Counting);
    let space = parts.space::<UserSpace, _>(&shootdown);
    let cpu = Player::new(1);
    cpu.run(|cx| space.switch_in(&shootdown, cx));
    let space = cpu.on(0, |cx| space.retire(&shootdown, cx)).expect_err("CPU 1 uses it");
    // SAFETY: it uses nothing at all.
    cpu.on(1, |cx| unsafe { space.enter_lazy(&shootdown, cx) });
    cpu.number.set(0);
    let before = shootdown.counts();
    cpu.run(|cx| space.retire(&shootdown, cx)).expect("nobody uses it");
    assert_eq!(shootdown.counts().since(before).targets, 1);
}

#[test]
fn others_flushes_are_made_use_of_and_nothing_is_flushed_for_nothing() {
    let parts = Parts::new(2);
    let shootdown = parts.shootdown(Counting);
    let space = parts.space::<UserSpace, _>(&shootdown);
    let cpu = Player::new(0);
    cpu.run(|cx| {
        space.switch_in(&shootdown, cx);
        ShootdownBatch::new(&space).flush(&shootdown, cx, &ShootdownPolicy::BATCHED);
        assert_eq!(shootdown.counts(), ShootdownCounts::default());
        let mut late = ShootdownBatch::new(&space);
        let debt = late.unhooked(7, range(0, 1), PageSize::Size4K, false);
        change(&shootdown, cx, &space, 1 << 10, &ShootdownPolicy::BATCHED);
        let before = shootdown.counts();
        let receipt = late.flush(&shootdown, cx, &ShootdownPolicy::BATCHED);
        assert_eq!(debt.release(&receipt).expect("paid"), 7);
        assert_eq!(shootdown.counts().since(before), ShootdownCounts { elided: 1, ..Default::default() });
    });
}

#[test]
fn a_deferred_batch_asks_each_cpu_once_for_all_spaces() {
    let parts = Parts::new(3);
    let shootdown = parts.shootdown(Counting);
    let spaces = [parts.space::<UserSpace, _>(&shootdown), parts.space(&shootdown)];
    // SAFETY: one machine.
    let deferred = unsafe { DeferredUnmap::new(&shootdown) }.expect("fits");
    let cpu = Player::new(0);
    for number in [1, 2] {
        cpu.on(number, |cx| spaces[number as usize - 1].switch_in(&shootdown, cx));
    }
    cpu.on(0, |cx| {
        let debts: Vec<_> =
            (0..100).map(|page| deferred.unmapped(&spaces[page as usize % 2], page, range(page, 1))).collect();
        let before = shootdown.counts();
        let receipt = deferred.flush(&shootdown, cx);
        let counts = shootdown.counts().since(before);
        assert_eq!((counts.flushes_all, counts.targets), (1, 2));
        for (page, debt) in debts.into_iter().enumerate() {
            assert_eq!(debt.release(&receipt).expect("paid"), page as u64);
        }
        // The spaces do not know of that flush: whoever relies on them flushes once.
        let flushes = || [&spaces[0], &spaces[1]].map(|space| space.domain().generation());
        let before = flushes();
        for _ in 0..2 {
            spaces[0].settle(&shootdown, cx);
            assert_eq!(flushes(), [before[0] + 1, before[1]]);
        }
    });
}

/// Changes to several ranges that one flush pays for, whoever needs it first.
#[test]
fn what_a_space_owes_is_paid_once() {
    let (parts, heap) = (Parts::new(3), Heap::new(NoFaults));
    let shootdown = parts.shootdown(Counting);
    let table = table(&heap);
    // SAFETY: one machine, which walks nothing.
    let space = unsafe { TlbSpace::<UserSpace, Keep, _>::with_masks(&shootdown, table.root().start(), Keep, words(2)) };
    let (space, cpu) = (space.expect("fits"), Player::new(2));
    let small = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
    cpu.run(|cx| space.switch_in(&shootdown, cx));
    cpu.number.set(0);
    table.exclusive(&heap).map(range(0, 8), [extent(0, 8)], small).expect("mapped");
    cpu.run(|cx| {
        for (pages, flushes) in [(range(100, 9), 0), (range(0, 2), 1), (range(0, 2), 0), (range(2, 6), 1)] {
            for page in [pages.first_page(), pages.first_page() + 1] {
                let mut table = table.exclusive(&heap);
                space.owe(table.take_leaves(range(page, 1), |_, _| true).expect("in bounds"));
            }
            let before = shootdown.counts();
            (0..2).for_each(|_| space.settle(&shootdown, cx));
            let counts = shootdown.counts().since(before);
            assert_eq!((counts.flushes_all, counts.targets), (flushes, flushes), "{pages:?}");
        }
    });
}

/// Hardware with a broadcast instruction.
#[derive(Default)]
struct Everywhere {
    /// Begun and not waited for.
    begun: Cell<u64>,
    waits: Cell<u64>,
}

// SAFETY: no CPU holds any translation.
unsafe impl TlbHw for Everywhere {
    unsafe fn invalidate(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) {}

    fn broadcast(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) -> Option<u64> {
        self.begun.set(self.begun.get() + 1);
        Some(3)
    }

    fn sync(&self, _cpu: CpuId) {
        self.begun.set(0);
        self.waits.set(self.waits.get() + 1);
    }

    fn interrupt(&self, _cpu: CpuId, _first: CpuId, _cpus: u64, _serve: &mut dyn FnMut(CpuId)) {
        panic!("nobody is to be interrupted");
    }

    unsafe fn load(&self, _cpu: CpuId, _root: PhysAddr, _tag: usize, _keep: bool) {}

    unsafe fn unload(&self, _cpu: CpuId) {}
}

#[test]
fn a_broadcast_interrupts_nobody() {
    let parts = Parts::new(4);
    let shootdown = parts.shootdown(Everywhere::default());
    let (space, cpu) = (parts.space(&shootdown), Player::new(0));
    for number in (0..4).rev() {
        cpu.on(number, |cx| space.switch_in(&shootdown, cx));
    }
    let counts = cpu.run(|cx| change(&shootdown, cx, &space, 5, &ShootdownPolicy::BATCHED));
    assert_eq!((counts.broadcasts, counts.instructions, counts.targets), (1, 3, 0));
    assert_eq!((shootdown.hw().begun.get(), shootdown.hw().waits.get()), (0, 1));
}

#[test]
fn the_kernels_half_reaches_every_cpu_that_is_online() {
    let parts = Parts::new(70);
    let shootdown = parts.shootdown(Counting);
    let (kernel, cpu) = (parts.space::<KernelSpace, _>(&shootdown), Player::new(0));
    for number in (0..70).rev() {
        cpu.on(number, |cx| kernel.online(&shootdown, cx));
    }
    // SAFETY: the CPU is this test's, and has no TLB.
    cpu.on(69, |cx| unsafe { kernel.offline(cx) });
    cpu.on(0, |cx| {
        let before = shootdown.counts();
        let mut batch = ShootdownBatch::new(&kernel);
        batch.changed(range(1 << 36, 8), PageSize::Size4K);
        batch.flush(&shootdown, cx, &ShootdownPolicy::BATCHED);
        assert_eq!(shootdown.counts().since(before).targets, 68);
    });
}

/// Two spaces of the kernel's half: what a CPU has seen of one says nothing of the other, whose flush it would leave out.
#[test]
fn the_kernels_halves_are_seen_apart() {
    let parts = Parts::new(2);
    let shootdown = parts.shootdown(Counting);
    let (halves, cpu) = ([(); 2].map(|()| parts.space::<KernelSpace, _>(&shootdown)), Player::new(0));
    for number in [1, 0] {
        cpu.on(number, |cx| halves.each_ref().map(|half| half.online(&shootdown, cx)));
    }
    // Each is asked for the first time after the other has been flushed more often.
    for half in [0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0] {
        cpu.run(|cx| {
            let before = shootdown.counts();
            let mut batch = ShootdownBatch::new(&halves[half]);
            batch.changed(range(1 << 36, 8), PageSize::Size4K);
            batch.flush(&shootdown, cx, &ShootdownPolicy::BATCHED);
            let counts = shootdown.counts().since(before);
            assert_eq!((counts.targets, counts.served, counts.late), (1, 1, 0));
        });
    }
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "interrupts off")]
fn a_shootdown_with_interrupts_off() {
    let parts = Parts::new(2);
    let shootdown = parts.shootdown(Counting);
    let (space, cpu) = (parts.space(&shootdown), Player::new(0));
    cpu.run(|cx| {
        cx.pinned(|_| change(&shootdown, cx, &space, 1, &ShootdownPolicy::BATCHED));
    });
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let parts = Parts::new(65);
    // SAFETY: never used.
    let error = unsafe { TlbShootdown::new(&parts.cpus, &parts.inboxes[..64], Counting) }.expect_err("too few");
    assert_eq!(error, TlbShootdownError::TooFewWords { needed: 130, given: 64 });
    // SAFETY: never used.
    assert_eq!(unsafe { TlbShootdown::new(&[], &[], Counting) }.expect_err("none"), TlbShootdownError::NoCpus);
    let shootdown = parts.shootdown(Counting);
    // SAFETY: never used.
    let error =
        unsafe { TlbSpace::<UserSpace>::new(&shootdown, PhysAddr::new(0)) }.expect_err("two masks of two words");
    assert_eq!(error, TlbShootdownError::TooFewWords { needed: 4, given: 2 });
    // SAFETY: one machine.
    let error = unsafe { DeferredUnmap::new(&shootdown) }.expect_err("two masks of two words");
    assert_eq!(error, TlbShootdownError::TooFewWords { needed: 4, given: 2 });
    for given in [4, 5] {
        // SAFETY: never used.
        assert!(unsafe { DeferredUnmap::with_masks(&shootdown, Keep, words(given)) }.is_ok());
    }
    assert_eq!(error.to_string(), "2 words are too few for the masks of these CPUs; give 4");
}

/// CPUs that have a space loaded are noted for one machine, and a flush asks that one's. Whatever is given another's is refused, and nothing
/// has happened.
#[test]
fn another_machines_shootdown_is_refused() {
    let (parts, others) = (Parts::new(2), Parts::new(2));
    let (own, other) = (parts.shootdown(Counting), others.shootdown(Counting));
    let space = || parts.space::<UserSpace, _>(&own);
    let kernel = parts.space::<KernelSpace, _>(&own);
    // SAFETY: one machine each, which are there until the end.
    let [deferred, deferred_there] =
        [&own, &other].map(|shootdown| unsafe { DeferredUnmap::new(shootdown) }.expect("fits"));
    Player::new(0).run(|cx| {
        let (here, lent) = (space(), space());
        here.switch_in(&own, cx);
        let changed = || {
            let mut batch = ShootdownBatch::new(&here);
            batch.changed(range(1, 1), PageSize::Size4K);
            batch
        };
        type Deed<'a> = &'a dyn Fn(&TlbShootdown<'_, Counting>);
        let deeds: [(&str, Deed<'_>); 7] = [
            ("settle", &|shootdown| here.settle(shootdown, cx)),
            ("flush", &|shootdown| _ = changed().flush(shootdown, cx, &ShootdownPolicy::BATCHED)),
            // SAFETY: nothing is there to be used.
            ("enter_lazy", &|shootdown| unsafe { here.enter_lazy(shootdown, cx) }),
            ("switch_in", &|shootdown| lent.switch_in(shootdown, cx)),
            ("switch_out", &|shootdown| lent.switch_out(shootdown, cx)),
            ("retire", &|shootdown| _ = space().retire(shootdown, cx)),
            ("deferred flush", &|shootdown| _ = deferred.flush(shootdown, cx)),
        ];
        let refused = |name: &str, deed: &dyn Fn()| {
            let before = (own.counts(), other.counts());
            let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(deed));
            assert!(refused.is_err() && (own.counts(), other.counts()) == before, "{name}");
        };
        refused("online", &|| kernel.online(&other, cx));
        refused("unmapped", &|| _ = deferred_there.unmapped(&here, (), range(1, 1)));
        for (name, deed) in deeds {
            here.owe_flush();
            refused(name, &|| deed(&other));
            assert!(here.asks_this_cpu(cx), "{name}");
            deed(&own);
            here.switch_in(&own, cx);
        }
    });
}

/// Interrupted CPUs poll.
struct Polling;

// SAFETY: no CPU holds any translation.
unsafe impl TlbHw for Polling {
    unsafe fn invalidate(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) {}

    fn interrupt(&self, _cpu: CpuId, _first: CpuId, _cpus: u64, _serve: &mut dyn FnMut(CpuId)) {}

    unsafe fn load(&self, _cpu: CpuId, _root: PhysAddr, _tag: usize, _keep: bool) {}

    unsafe fn unload(&self, _cpu: CpuId) {}
}

/// All CPUs shoot each other, some of them while they hold a lock for which the others queue with interrupts on. It ends.
#[test]
fn all_cpus_shoot_each_other_under_a_lock_convoy() {
    const CPUS: u32 = 4;
    let parts = Parts::new(CPUS as usize);
    let shootdown = parts.shootdown(Polling);
    let space = parts.space(&shootdown);
    let (convoy, done, ready) = (Mutex::new(0_u32), AtomicU32::new(0), AtomicBool::new(false));
    let (shootdown, space, convoy, done, ready) = (&shootdown, &space, &convoy, &done, &ready);
    let _watched = hugemm_threads::Watchdog::new();
    std::thread::scope(|scope| {
        for number in 0..CPUS {
            scope.spawn(move || {
                let cpu = Player::new(number);
                cpu.run(|cx| {
                    space.switch_in(shootdown, cx);
                    while !ready.load(Ordering::Acquire) && number != 0 {
                        shootdown.handle_ipi(cx);
                    }
                    ready.store(true, Ordering::Release);
                    for round in 0..30 {
                        if round % 3 == number % 3 {
                            // Waits as a CPU with interrupts on does.
                            let mut held = loop {
                                match convoy.try_lock() {
                                    Ok(held) => break held,
                                    Err(_) => {
                                        shootdown.handle_ipi(cx);
                                        std::thread::yield_now();
                                    }
                                }
                            };
                            *held += 1;
                            change(shootdown, cx, space, 2, &ShootdownPolicy::PER_PAGE);
                        } else {
                            change(shootdown, cx, space, 1, &ShootdownPolicy::BATCHED);
                        }
                    }
                    done.fetch_add(1, Ordering::AcqRel);
                    while done.load(Ordering::Acquire) < CPUS {
                        shootdown.handle_ipi(cx);
                        std::thread::yield_now();
                    }
                });
            });
        }
    });
    let counts = shootdown.counts();
    assert_eq!(counts.targets, counts.served);
    assert!(*convoy.lock().expect("unpoisoned") > 0 && counts.targets > 0);
}

#[derive(Default)]
struct Kept(Arc<Mutex<Vec<Detached>>>);

// SAFETY: the test that takes it out has flushed, or has no CPU that walks.
unsafe impl Quarantine<Detached> for Kept {
    fn take(&self, value: Detached, _range: VirtRange) {
        self.0.lock().expect("unpoisoned").push(value);
    }
}

fn table(heap: &Heap) -> PageTable<X86_64, EditLock> {
    // SAFETY: one heap; nobody translates by the table.
    unsafe { PageTable::new(&mut &*heap, lower::<X86_64>()) }.expect("a root")
}

/// Out against the receipt of its own space's flush, and nobody else's: neither a batch of another space takes what was
/// detached, nor another table, nor the other half of the same one.
#[test]
fn what_was_detached_is_paid_for_by_its_own_space() {
    let (heap, parts, cpu) = (Heap::new(NoFaults), Parts::new(1), Player::new(0));
    let shootdown = parts.shootdown(Counting);
    let (table, other) = (table(&heap), table(&heap));
    let new = |table: &PageTable<X86_64, EditLock>, kept: &Arc<_>| {
        let (kept, masks) = (Kept(Arc::clone(kept)), words(2));
        // SAFETY: each of another table; nothing is walked.
        unsafe { TlbSpace::<UserSpace, _, _>::with_masks(&shootdown, table.root().start(), kept, masks) }.expect("fits")
    };
    let kept = Arc::default();
    let (space, others) = (new(&table, &kept), new(&other, &Arc::default()));
    let small = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
    table.exclusive(&heap).map(span(10, 10), [extent(70, 10)], small).expect("mapped");

    let unhooked = table.exclusive(&heap).detach(span(12, 3), Editing::LIVE).expect("detached");
    assert!(!unhooked.tables());
    let unhooked = ShootdownBatch::new(&others).detached(unhooked).expect_err("another space's");
    let mut batch = ShootdownBatch::new(&space);
    let pending = batch.detached(unhooked).expect("its own").expect("something");
    let receipt = cpu.run(|cx| batch.flush(&shootdown, cx, &ShootdownPolicy::BATCHED));
    let detached = pending.release(&receipt).expect("paid");
    let (error, detached) = other.exclusive(&heap).harvest(detached, Flags::NONE, |_| ()).expect_err("another table's");
    assert_eq!(error, PagingError::Foreign);
    let upper = hugemm_base::VirtRange::new(VirtAddr::new(0xffff_8000_0000_0000), 1 << 47).expect("a half");
    // SAFETY: it edits another half of the same tables.
    let half = unsafe { PageTable::<X86_64>::adopt(table.root(), upper) }.expect("a half");
    let (error, detached) = half.exclusive(&heap).harvest(detached, Flags::NONE, |_| ()).expect_err("another half's");
    assert_eq!(error, PagingError::Foreign);
    let harvest = table.exclusive(&heap).harvest(detached, Flags::NONE, |_| ()).expect("its own");
    assert_eq!(harvest.pages, 3);

    // A debt that is dropped blocks its addresses, and nothing is lost: it is still there in the end.
    let unhooked = table.exclusive(&heap).detach(span(15, 3), Editing::LIVE).expect("detached");
    drop(ShootdownBatch::new(&space).detached(unhooked).expect("its own"));
    assert_eq!(space.domain().dropped_debts(), 1);
    assert_eq!(kept.lock().expect("unpoisoned").len(), 1);
    assert_eq!(table.shared(&heap).lookup(at(15)), Lookup::Busy);
    let mut left = 0;
    // SAFETY: nothing is cached anywhere, and the quarantined token is not used any more.
    unsafe { table.retire(&mut &heap, |run| left += run.extent.pages()) };
    assert_eq!(left, 7);
    // SAFETY: as above.
    unsafe { other.retire(&mut &heap, |_| ()) };
    assert_eq!(heap.live(), 0);
}

/// Tables wait for a flush that reaches those who may walk them: one that leaves lazy CPUs out pays for leaves only.
#[test]
fn detached_tables_are_not_paid_for_by_a_flush_of_leaves() {
    let (heap, parts, cpu) = (Heap::new(NoFaults), Parts::new(1), Player::new(0));
    let shootdown = parts.shootdown(Counting);
    let table = table(&heap);
    // SAFETY: nothing is walked.
    let space =
        unsafe { TlbSpace::<UserSpace, _, _>::with_masks(&shootdown, table.root().start(), Kept::default(), words(2)) };
    let space = space.expect("fits");
    let small = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
    table.exclusive(&heap).map(span(0, 1024), [extent(0, 1024)], small).expect("mapped");
    let mut batch = ShootdownBatch::new(&space);
    let mut detach = |first, pages| {
        let unhooked = table.exclusive(&heap).detach(span(first, pages), Editing::LIVE).expect("detached");
        batch.detached(unhooked).expect("its own").expect("something")
    };
    let (tables, leaves) = (detach(0, 512), detach(512, 5));
    let mut other = ShootdownBatch::new(&space);
    other.changed(VirtRange::ALL, PageSize::Size4K);
    let receipt = cpu.run(|cx| other.flush(&shootdown, cx, &ShootdownPolicy::BATCHED));
    let leaves = leaves.release(&receipt).expect("paid");
    let tables = tables.release(&receipt).expect_err("lazy CPUs were left out");
    let receipt = cpu.run(|cx| batch.flush(&shootdown, cx, &ShootdownPolicy::BATCHED));
    let tables = tables.release(&receipt).expect("paid");
    for (detached, found) in [(leaves, (5, 0)), (tables, (512, 1))] {
        let harvest = table.exclusive(&heap).harvest(detached, Flags::NONE, |_| ()).expect("its own");
        assert_eq!((harvest.pages, harvest.tables), found);
    }
}

/// What is invalidated is as fine as the smallest leaf that went, whoever asks: below a table that went as a whole that may
/// be any.
#[test]
fn what_was_detached_knows_its_stride() {
    let heap = Heap::new(NoFaults);
    let table = table(&heap);
    let all = |largest| Mapping { flags: Flags::WRITE, largest };
    table.exclusive(&heap).map(span(0, 512), [extent(0, 512)], all(PageSize::Size2M)).expect("mapped");
    table.exclusive(&heap).map(span(512, 5), [extent(0, 5)], all(PageSize::Size4K)).expect("mapped");
    table.exclusive(&heap).map(span(1 << 18, 1 << 18), [extent(0, 1 << 18)], all(PageSize::Size1G)).expect("mapped");
    table.exclusive(&heap).map(span(1 << 19, 1 << 18), [extent(0, 1 << 18)], all(PageSize::Size2M)).expect("mapped");
    let stride =
        |first, pages| table.exclusive(&heap).detach(span(first, pages), Editing::LIVE).expect("detached").stride();
    assert_eq!(stride(1 << 18, 1 << 18), PageSize::Size1G);
    assert_eq!(stride(1 << 19, 1 << 18), PageSize::Size4K, "a table");
    assert_eq!(stride(0, 514), PageSize::Size4K);
    assert_eq!(stride(514, 3), PageSize::Size4K);
}

/// Hardware that fails: when it interrupts, or when it invalidates.
struct Failing(bool);

// SAFETY: none: what unwinds here is what the test is about, in a process of its own.
unsafe impl TlbHw for Failing {
    unsafe fn invalidate(&self, _: CpuId, _: TlbScope, _: &Invalidation) {
        assert!(self.0, "planned");
    }

    fn interrupt(&self, _: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        assert!(!self.0, "planned");
        serve(CpuId::new(first.get() + cpus.trailing_zeros()));
    }

    unsafe fn load(&self, _: CpuId, _: PhysAddr, _: usize, _: bool) {}

    unsafe fn unload(&self, _: CpuId) {}
}

/// A shootdown that unwinds ends the program, whoever would catch it: nobody is left to wait for ever.
#[test]
#[cfg_attr(miri, ignore = "starts processes")]
fn a_shootdown_that_unwinds_is_the_end() {
    const NAME: &str = "HUGEMM_TEST_SHOOTDOWN_UNWINDS";
    if let Ok(interrupts) = std::env::var(NAME) {
        let parts = Parts::new(2);
        let shootdown = parts.shootdown(Failing(interrupts == "true"));
        let (space, cpu) = (parts.space(&shootdown), Player::new(1));
        cpu.run(|cx| space.switch_in(&shootdown, cx));
        let flush = || cpu.on(0, |cx| change(&shootdown, cx, &space, 1, &ShootdownPolicy::BATCHED));
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(flush));
        std::process::exit(0);
    }
    for interrupts in ["true", "false"] {
        let mut again = std::process::Command::new(std::env::current_exe().expect("this program"));
        let again = again.args(["--exact", "a_shootdown_that_unwinds_is_the_end", "--nocapture"]).env(NAME, interrupts);
        let output = again.output().expect("it starts");
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), None, "it was not ended by a signal: {err}");
        assert!(err.contains("planned") && err.contains("a shootdown was left by unwinding"), "{err}");
    }
}
