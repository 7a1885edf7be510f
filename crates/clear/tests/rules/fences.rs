//! The fence: on every way out of a clear, once per unit; and what becomes visible without it, on a model of a weakly
//! ordered store buffer and on this machine.

use crate::support::memory::Memory;
use crate::support::{BULK, CACHED, Event, Script, StopAt, clearer, open};
use hugemm_base::{CounterSnapshot, Never, Unfenced, with};
use hugemm_clear::{StopReason, Unit};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

fn script(pages: u64) -> Script {
    Script::new(Memory::heap(pages))
}

/// Whether every streaming store in a record is fenced before the next reschedule point and before the end.
fn all_fenced(events: &[Event]) -> bool {
    let mut owed = false;
    events.iter().all(|event| {
        match event {
            Event::Open { .. } => owed = true,
            Event::Fence => owed = false,
            Event::Reschedule => return !owed,
            _ => {}
        }
        true
    }) && !owed
}

#[test]
fn a_cancelled_clear_is_fenced() {
    for n in 1..=4 {
        let script = script(12);
        let stopped = script.run(|cx| clearer(4).clear(cx, script.dirty(), &BULK, &StopAt::new(n)));
        assert_eq!(stopped.is_ok(), n == 4);
        assert_eq!((script.count(Event::Fence), script.counted().cancellations), (n - 1, u64::from(n < 4)));
        assert!(all_fenced(&script.events()));
    }
}

/// Also in the middle of a unit.
#[test]
fn a_clear_that_meets_an_unreachable_frame_is_fenced() {
    for reach in 1..12 {
        let script = script(12);
        script.window.set(1);
        script.reach.set(reach);
        let stopped = script.run(|cx| clearer(4).clear(cx, script.dirty(), &BULK, &Never)).expect_err("out of reach");
        assert!(matches!(stopped.reason, StopReason::Unreachable(_)));
        assert!(all_fenced(&script.events()), "{reach} pages reachable");
    }
}

/// An observer that panics finds the unit fenced already.
#[test]
fn a_clear_that_unwinds_is_fenced() {
    let script = script(12);
    let mut observer = |_: &Unit| panic!("planned");
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        script.run(|cx| clearer(4).clear_observed(cx, script.dirty(), &BULK, &Never, &mut observer))
    }));
    assert!(unwound.is_err());
    assert_eq!(script.events(), [Event::Reschedule, open(0, 4), Event::Close(0), Event::Fence]);
}

/// A debt that is dropped is paid, counted and reported.
#[test]
fn a_dropped_debt_is_paid_and_counted() {
    let script = script(4);
    script.run(|cx| drop(clearer(4).clear_now(cx, script.dirty(), &BULK)));
    assert_eq!(script.events(), [open(0, 4), Event::Close(0), Event::Fence, Event::Dropped]);
    assert_eq!((script.counted().fences, script.counted().fences_on_drop), (1, 1));
    script.run(|cx| drop(clearer(4).clear_now(cx, script.dirty(), &CACHED)));
    assert_eq!(script.events(), [open(0, 4), Event::Close(0), Event::Publish, Event::Dropped]);
    assert_eq!((script.counted().fences, script.counted().fences_on_drop), (1, 1));
}

/// Two extents, one fence; the stronger barrier pays for both.
#[test]
fn debts_that_are_joined_cost_one_fence() {
    let script = script(8);
    let clear = |first, second| {
        let before = script.counted();
        let both = script.run(|cx| {
            let one: Unfenced<'_, _, Script> = clearer(4).clear_now(cx, script.own(0, 4), first);
            one.join(clearer(4).clear_now(cx, script.own(4, 8), second)).fence()
        });
        assert!(both.0.is_ok() && both.1.is_ok());
        let barriers: Vec<_> = script
            .events()
            .into_iter()
            .filter(|e| matches!(e, Event::Fence | Event::Publish | Event::Dropped))
            .collect();
        let CounterSnapshot { fences, .. } = script.counted().since(before);
        (barriers, fences)
    };
    assert_eq!(clear(&BULK, &BULK), (vec![Event::Fence], 1));
    assert_eq!(clear(&CACHED, &BULK), (vec![Event::Fence], 1));
    assert_eq!(clear(&BULK, &CACHED), (vec![Event::Fence], 1));
    assert_eq!(clear(&CACHED, &CACHED), (vec![Event::Publish], 0));
}

/// On the host platform, with its store buffer model and on the real CPUs.
#[cfg(not(miri))]
mod host {
    use super::*;
    use crate::support::host::places;
    use crate::support::{PAGE, PROFILE, features};
    use hugemm_base::barriers::hardware_store_fence;
    use hugemm_base::platform::StoreBuffer;
    use hugemm_base::{
        Counters, Cpu, CpuCx, CpuId, Dirty, Extent, NodeId, Pfn, PhysMap, PreemptModel, Topology, VirtAddr, Window,
    };
    use hugemm_clear::{
        ClearPolicy, Clearer, Content, Features, Lane, Outcome, ParallelClear, Primitive, PrimitiveClass,
    };
    use hugemm_host::cpu::{BASE_FRAME, Host, allowed_cpus};
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    fn pages(from: u64, pages: u64) -> Extent {
        Extent::new(Pfn::new(BASE_FRAME.get() + from), pages).expect("in range")
    }

    /// The frames' words, as any CPU may read them at any time.
    fn words<'h>(host: &'h Host<'_>, extent: Extent) -> &'h [AtomicU64] {
        let base = host.address(extent.base()).expect("in the memory");
        // SAFETY: the extent lies in the host's memory (its base does, and the tests cut extents from it), which
        // outlives the host; whoever writes meanwhile does so by atomics or by stores that the test means to catch.
        unsafe { std::slice::from_raw_parts(base.as_ptr().cast(), extent.bytes() as usize / 8) }
    }

    fn stale(words: &[AtomicU64]) -> usize {
        words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count()
    }

    /// How many words another CPU finds unclear once it sees the flag that `clear`, on CPU 0, has returned.
    fn stale_after<'h, 'm>(host: &'h Host<'m>, clear: impl FnOnce(&mut CpuCx<'_, Host<'m>>)) -> usize {
        let published = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                host.run_on(CpuId::new(1), |_| {
                    // Acquire pairs with the writer's Release.
                    while !published.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    stale(words(host, host.frames()))
                })
                .expect("the CPU exists")
            });
            host.run_on(CpuId::new(0), |cx| {
                clear(cx);
                published.store(true, Ordering::Release);
                // Leaving the CPU drains its buffer: not before the reader has looked.
                reader.join().unwrap_or_else(|panic| resume_unwind(panic))
            })
            .expect("the CPU exists")
        })
    }

    /// The engine's clear.
    fn clear_by<P: Cpu + PhysMap>(cx: &mut CpuCx<'_, P>, frames: Extent, unit: u64) {
        // SAFETY: the test owns the host's frames.
        let dirty = unsafe { Dirty::assume_owned(frames) };
        assert!(clearer(unit).clear(cx, dirty, &BULK, &Never).is_ok());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the order in which stores reach memory, what `clear` returns is zero for every CPU.
        #[test]
        fn no_cpu_sees_an_unclear_byte_after_a_clear(seed: u64, pages in 1_u64..40, unit in 1_u64..40) {
            let mut memory = Memory::heap(pages);
            let host = Host::new(&places(2), memory.bytes()).expect("a machine").with_store_model(seed).strict();
            host.set_preempt_model(PreemptModel::None);
            prop_assert_eq!(stale_after(&host, |cx| clear_by(cx, host.frames(), unit)), 0);
        }
    }

    /// A planted bug: stores through the buffer are published without a fence. The model must show it.
    #[test]
    fn the_model_catches_a_missing_fence() {
        for (seed, size) in [(1, 1), (2, 4), (3, 33)] {
            let mut memory = Memory::heap(size);
            let host = Host::new(&places(2), memory.bytes()).expect("a machine").with_store_model(seed);
            let clear = |fence| {
                words(&host, host.frames()).iter().for_each(|word| word.store(!0, Ordering::Relaxed));
                stale_after(&host, |_| {
                    let buffer = host.store_buffer().expect("a store model");
                    let base = host.address(BASE_FRAME).expect("memory").as_ptr();
                    // SAFETY: the memory is the test's own, and this CPU does not read it.
                    unsafe { buffer.zero(base, (size * PAGE) as usize) };
                    if fence {
                        host.store_fence();
                    }
                })
            };
            assert!(clear(false) > 0, "seed {seed}: the model hid a missing fence");
            assert_eq!(clear(true), 0);
        }
    }

    /// The host with planted faults: a fence that does nothing, as on a platform that forgot to implement it; windows of
    /// one page, of which the last one panics instead of being opened.
    struct Faulty<'h, 'm> {
        host: &'h Host<'m>,
        fences: bool,
        windows: AtomicU64,
    }

    impl<'h, 'm> Faulty<'h, 'm> {
        fn forgetful(host: &'h Host<'m>) -> Self {
            Faulty { host, fences: false, windows: AtomicU64::new(u64::MAX) }
        }

        fn fragile(host: &'h Host<'m>, windows: u64) -> Self {
            Faulty { host, fences: true, windows: AtomicU64::new(windows) }
        }
    }

    // SAFETY: the host's. The operating system fences when it switches threads. Deliberately not kept where `fences` is
    // off: `store_fence` orders nothing. Only the store model's stores, which are atomics, run on it.
    unsafe impl Cpu for Faulty<'_, '_> {
        fn current(&self) -> CpuId {
            self.host.current()
        }

        unsafe fn pin(&self) -> usize {
            // SAFETY: the caller's promise.
            unsafe { self.host.pin() }
        }

        unsafe fn unpin(&self, state: usize) {
            // SAFETY: the caller's promise.
            unsafe { self.host.unpin(state) }
        }

        fn cpus(&self) -> u32 {
            self.host.cpus()
        }

        fn preempt_model(&self) -> PreemptModel {
            self.host.preempt_model()
        }

        unsafe fn cond_resched(&self) {}

        fn store_fence(&self) {
            if self.fences {
                self.host.store_fence();
            }
        }

        fn store_buffer(&self) -> Option<&dyn StoreBuffer> {
            self.host.store_buffer()
        }

        fn counters(&self) -> &Counters {
            self.host.counters()
        }
    }

    impl Topology for Faulty<'_, '_> {
        fn node_of_cpu(&self, cpu: CpuId) -> NodeId {
            self.host.node_of_cpu(cpu)
        }

        fn node_run(&self, extent: Extent) -> (NodeId, u64) {
            self.host.node_run(extent)
        }
    }

    // SAFETY: the host's windows, a page at a time.
    unsafe impl PhysMap for Faulty<'_, '_> {
        fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
            // Relaxed: each test has one thread per window.
            assert!(self.windows.fetch_sub(1, Ordering::Relaxed) > 1, "planned");
            self.host.open(extent.split_at(1).0, user)
        }
    }

    /// The engine on a platform whose fence is missing fails the property that it passes on one that has it.
    #[test]
    fn the_model_catches_an_engine_without_fences() {
        let mut memory = Memory::heap(8);
        let host = Host::new(&places(2), memory.bytes()).expect("a machine").with_store_model(7);
        let clear = |_: &mut CpuCx<'_, Host<'_>>| {
            let platform = Faulty::forgetful(&host);
            // SAFETY: the task has no other context of this platform.
            let mut cx = unsafe { CpuCx::new(&platform) };
            clear_by(&mut cx, host.frames(), 8);
        };
        assert!(stale_after(&host, clear) > 0);
    }

    /// Whatever `clear` does when a window cannot be opened in the middle of a unit, whoever gets the frames next
    /// may write to them: no store of the clear arrives later. How many words lost what was written.
    fn lost_after_unwinding(windows: u64, clear: impl Fn(&mut CpuCx<'_, Faulty<'_, '_>>, &Clearer)) -> usize {
        let mut memory = Memory::heap(8);
        let host = Host::new(&places(1), memory.bytes()).expect("a machine").with_store_model(windows).strict();
        host.set_preempt_model(PreemptModel::None);
        let platform = Faulty::fragile(&host, windows);
        let lost = host.run_on(CpuId::new(0), |_| {
            // SAFETY: the task uses no other context of this platform.
            let mut cx = unsafe { CpuCx::new(&platform) };
            let unwound = catch_unwind(AssertUnwindSafe(|| clear(&mut cx, &clearer(8))));
            assert!(unwound.is_err(), "all {windows} windows were opened");
            let words = words(&host, host.frames());
            words.iter().for_each(|word| word.store(!0, Ordering::Relaxed));
            host.store_fence();
            words.iter().filter(|word| word.load(Ordering::Relaxed) != !0).count()
        });
        let owed = platform.counters().snapshot();
        assert_eq!((owed.fences, owed.fences_on_drop), (1, 1), "{windows} windows");
        lost.expect("the CPU exists")
    }

    #[test]
    fn a_clear_that_unwinds_in_a_unit_leaves_no_store_behind() {
        for windows in 1..=8 {
            let lost = lost_after_unwinding(windows, |cx, clearer| {
                // SAFETY: the test owns the frames.
                let dirty = unsafe { Dirty::assume_owned(pages(0, 8)) };
                let _ = clearer.clear(cx, dirty, &BULK, &Never);
            });
            assert_eq!(lost, 0, "{windows} windows");
            let lost = lost_after_unwinding(windows, |cx, clearer| {
                // SAFETY: as above.
                let dirty = unsafe { Dirty::assume_owned(pages(0, 8)) };
                let _ = clearer.clear_now(cx, dirty, &BULK).fence();
            });
            assert_eq!(lost, 0, "{windows} windows, at once");
        }
    }

    /// The same for a worker of a parallel clear, whose frames go back to their owner as dirty.
    #[test]
    fn a_worker_that_unwinds_in_a_unit_leaves_no_store_behind() {
        for windows in 1..=8 {
            let lost = lost_after_unwinding(windows, |cx, clearer| {
                let mut lanes = [Lane::empty()];
                // SAFETY: the test owns the frames.
                let dirty = unsafe { Dirty::assume_owned(pages(0, 8)) };
                let shared = ParallelClear::new(dirty, &mut lanes, cx.platform()).expect("a lane");
                let unwound =
                    catch_unwind(AssertUnwindSafe(|| shared.work(cx, clearer, &BULK, &Never, &mut ()).is_ok()));
                assert!(matches!(shared.finish(), Outcome::Dirty(_)));
                unwound.unwrap_or_else(|panic| resume_unwind(panic));
            });
            assert_eq!(lost, 0, "{windows} windows");
        }
    }

    #[test]
    fn a_strict_host_panics_over_a_dropped_debt_but_not_while_unwinding() {
        let mut memory = Memory::heap(2);
        let host = Host::new(&places(1), memory.bytes()).expect("a machine").with_store_model(1).strict();
        let dropped = |panic_first: bool| {
            catch_unwind(AssertUnwindSafe(|| {
                host.run_on(CpuId::new(0), |cx| {
                    // SAFETY: the test owns the host's frames.
                    let _debt = clearer(2).clear_now(cx, unsafe { host.own_frames() }, &BULK);
                    if panic_first {
                        panic!("planned");
                    }
                })
            }))
            .expect_err("panics")
        };
        assert_eq!(dropped(true).downcast_ref::<&str>(), Some(&"planned"));
        let message = dropped(false).downcast::<String>().expect("the host's own message");
        assert!(message.contains("pending store fence"), "{message}");
        assert_eq!(host.counters_sum().fences_on_drop, 2);
        assert_eq!(stale(words(&host, pages(0, 2))), 0);
    }

    /// On this machine's CPUs, with every streaming primitive that they have. Set
    /// `HUGEMM_STRESS_ITERATIONS` for a longer run.
    #[test]
    fn a_consumer_never_sees_an_unclear_word() {
        let iterations = std::env::var("HUGEMM_STRESS_ITERATIONS").map_or(100_000, |n| n.parse().expect("a number"));
        let streaming =
            Features::detect().iter().filter(|p| p.class() == PrimitiveClass::Streaming).collect::<Vec<_>>();
        for p in streaming {
            let found = produce_and_consume(p, iterations);
            let cpus = allowed_cpus().map_or(0, |cpus| cpus.len()).min(2);
            println!("{p}: {iterations} extents published, {found} unclear words seen, {cpus} CPUs");
            assert_eq!(found, 0, "{p}");
        }
    }

    /// Publishes `iterations` extents of 4 to 64 KiB; how many words the consumer saw that were not zero.
    fn produce_and_consume(p: Primitive, iterations: u64) -> usize {
        const SIZES: [u64; 8] = [1, 1, 2, 1, 4, 1, 16, 1];
        let mut memory = Memory::heap(16);
        let host = Host::new(&places(2), memory.bytes()).expect("a machine").strict();
        let policy = with!(ClearPolicy::new(PROFILE), force = Some(p));
        // SAFETY: the host has no store model to intercept the model primitive, which is not detected; the profile
        // names it, the forced primitive is used.
        let all = unsafe { Features::detect().with(Primitive::Model) };
        assert!(features().contains(Primitive::Model));
        let clearer = Clearer::new(all, policy).expect("available");
        // How many extents were published, and how many taken back.
        let (published, consumed) = (AtomicU64::new(0), AtomicU64::new(0));
        let wait = |word: &AtomicU64, value: u64| {
            // Acquire pairs with the Release of the other side's store.
            for spins in 0_u64.. {
                if word.load(Ordering::Acquire) >= value {
                    break;
                }
                if spins % 1024 == 1023 { std::thread::yield_now() } else { std::hint::spin_loop() }
            }
        };
        let extent = |n: u64| pages(0, SIZES[(n % 8) as usize]);
        let consume = |n| {
            wait(&published, n + 1);
            let words = words(&host, extent(n));
            // From the end, where stores that are late would be.
            let found = words.iter().rev().filter(|word| word.load(Ordering::Relaxed) != 0).count();
            words.iter().for_each(|word| word.store(!0, Ordering::Relaxed));
            consumed.store(n + 1, Ordering::Release);
            found
        };
        let produce = |cx: &mut CpuCx<'_, Host<'_>>, n| {
            wait(&consumed, n);
            // SAFETY: the consumer has handed the frames back.
            let dirty = unsafe { Dirty::assume_owned(extent(n)) };
            let zeroed = clearer.clear(cx, Content::Dirty(dirty), &BULK, &Never);
            assert!(zeroed.is_ok());
            published.store(n + 1, Ordering::Release);
        };
        std::thread::scope(|scope| {
            let consumer = scope.spawn(|| host.run_on(CpuId::new(1), |_| (0..iterations).map(consume).sum()));
            host.run_on(CpuId::new(0), |cx| (0..iterations).for_each(|n| produce(cx, n))).expect("the CPU exists");
            hardware_store_fence();
            let found = consumer.join().unwrap_or_else(|panic| resume_unwind(panic));
            assert_eq!(host.counters_sum().fences, iterations);
            found.expect("the CPU exists")
        })
    }
}
