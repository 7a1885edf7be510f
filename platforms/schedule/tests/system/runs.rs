//! What a run finds, and that it finds it again.

use hugemm_base::lock::Lock;
use hugemm_base::{CpuCx, CpuId, NodeId};
use hugemm_host::cpu::{CpuPlace, Host, allowed_cpus};
use hugemm_host::mmu::Mmu;
use hugemm_paging::cpu_readers::{CountedLock, Half, Inside, ReaderLine, Readers};
use hugemm_schedule::{Failure, Machine, ModelLock, Task, explore, point, progress, run};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

/// Runs tasks that a seed's machine gives to.
fn with_machine<R>(test: impl for<'h> FnOnce(Machine<'h>) -> R) -> R {
    let os_cpu = allowed_cpus().expect("a CPU")[0];
    let host = Host::new(&[CpuPlace { os_cpu, node: NodeId::new(0) }], &mut []).expect("a machine");
    let mmu = Mmu::new(&host, 4, 1, 1);
    test(Machine::new(&mmu))
}

fn failure(seeds: u64, test: impl Fn(u64)) -> Failure {
    explore(0..seeds, test).expect_err("one of the seeds finds it")
}

/// Two tasks that add to each other's order.
fn order(seed: u64) -> Vec<u32> {
    let order = RefCell::new(Vec::new());
    with_machine(|machine| {
        let note = |cpu: u32| -> Task<'_> {
            let order = &order;
            Box::new(move || {
                for _ in 0..50 {
                    assert_eq!(machine.cx().pinned(|pin| pin.cpu()), CpuId::new(cpu));
                    order.borrow_mut().push(cpu);
                }
            })
        };
        run(machine.mmu(), seed, &|| (), (0..4).map(note).collect());
    });
    order.into_inner()
}

#[test]
fn a_seed_is_an_order_and_others_are_others() {
    let orders: Vec<_> = (0..20).map(order).collect();
    assert!((0..20).all(|seed| orders[seed as usize] == order(seed)));
    assert!(orders.iter().all(|order| (0..4).all(|cpu| order.iter().filter(|of| **of == cpu).count() == 50)));
    let different: std::collections::BTreeSet<_> = orders.into_iter().collect();
    assert_eq!(different.len(), 20);
}

/// A lost update, which takes a change of CPUs between two lines.
#[test]
fn what_is_not_locked_is_lost() {
    let lost = |locked: bool| {
        move |seed| {
            let (count, lock) = (Cell::new(0), Lock::<ModelLock, ()>::new(()));
            with_machine(|machine| {
                let add = || {
                    let _guard = locked.then(|| lock.lock());
                    let seen = count.get();
                    point();
                    count.set(seen + 1);
                };
                run(machine.mmu(), seed, &|| (), (0..4).map(|_| -> Task<'_> { Box::new(add) }).collect());
            });
            assert_eq!(count.get(), 4);
        }
    };
    assert!(failure(50, lost(false)).text.contains("left: "));
    assert_eq!(explore(0..50, lost(true)).expect("nothing is lost"), 50);
}

/// Two locks, in either order.
#[test]
fn a_deadlock_names_each_cpus_place() {
    let test = |seed| {
        let (a, b) = (Lock::<ModelLock, ()>::new(()), Lock::<ModelLock, ()>::new(()));
        with_machine(|machine| {
            let first: Task<'_> = Box::new(|| {
                let _a = a.lock();
                let _b = b.lock();
            });
            let second: Task<'_> = Box::new(|| {
                let _b = b.lock();
                let _a = a.lock();
            });
            run(machine.mmu(), seed, &|| (), vec![first, second]);
        });
    };
    let found = failure(50, test);
    assert!(found.text.starts_with("every CPU waits"), "{found}");
    for said in ["cpu0 waits for a lock; it has 1 locks", "cpu1 waits for a lock; it has 1 locks", "runs.rs:"] {
        assert!(found.text.contains(said), "{said} is not in {found}");
    }
    let again = explore([found.seed], test).expect_err("the same");
    assert_eq!((again.step, again.text), (found.step, found.text));
}

#[test]
fn who_gets_nothing_done_is_stopped() {
    let found = failure(1, |seed| {
        let over = Cell::new(false);
        with_machine(|machine| {
            let wait = || {
                while !over.get() {
                    machine.cx().cond_resched();
                }
            };
            let tasks: Vec<Task<'_>> = vec![Box::new(progress), Box::new(wait), Box::new(wait)];
            run(machine.mmu(), seed, &|| (), tasks);
        });
    });
    assert!(found.text.starts_with("nobody got anything done") && found.text.contains("cond_resched"), "{found}");
}

/// Also where nobody wants the lock.
#[test]
fn no_lock_is_held_at_a_reschedule_point() {
    let found = failure(1, |seed| {
        let lock = Lock::<ModelLock, ()>::new(());
        with_machine(|machine| {
            let task = || {
                let _guard = lock.lock();
                machine.cx().cond_resched();
            };
            run(machine.mmu(), seed, &|| (), vec![Box::new(task)]);
        });
    });
    assert!(found.text.starts_with("a reschedule point with locks held"), "{found}");
    let taken = found.text.split("step").last().expect("where it was taken");
    assert!(taken.contains("runs.rs:") && taken.contains("lock"), "{found}");
}

/// A reader that is counted on a line which nobody visits.
#[test]
fn a_reader_that_is_not_waited_for_is_noticed() {
    let test = |visited: bool| {
        move |seed| {
            let (line, readers) = (ReaderLine::default(), Readers::default());
            let mut lock = CountedLock::<ModelLock>::new();
            // SAFETY: they stay; no other lock counts on them.
            unsafe { lock.count_on(NonNull::from(&readers), Half::Low) };
            if visited {
                // SAFETY: new, and it stays.
                unsafe { readers.add(NonNull::from(&line)) };
            }
            with_machine(|machine| {
                let read = || {
                    // SAFETY: what a wrong line does is looked at here, and there is nothing behind the lock.
                    let _inside = unsafe { Inside::enter(&line, [&lock]) };
                    point();
                };
                let change = || {
                    lock.lock_exclusive();
                    // SAFETY: locked above.
                    unsafe { lock.unlock_exclusive() };
                };
                run(machine.mmu(), seed, &|| (), vec![Box::new(read), Box::new(change)]);
            });
        }
    };
    let found = failure(50, test(false));
    assert!(found.text.contains("cpu0 is inside a lock that another has alone"), "{found}");
    assert_eq!(explore(0..50, test(true)).expect("it is waited for"), 50);
}

#[test]
fn interrupts_come_where_they_are_on_and_nowhere_else() {
    for seed in 0..20 {
        let came = Cell::new(0);
        with_machine(|machine| {
            let handler = || {
                came.set(came.get() + 1);
                let cx: CpuCx<'_, _> = machine.cx();
                cx.pinned(|_| (0..300).for_each(|_| point()));
            };
            let task = || {
                let cx = machine.cx();
                (0..600).for_each(|_| point());
                let me = came.get();
                cx.pinned(|_| (0..600).for_each(|_| point()));
                assert!(came.get() - me <= 1, "one at the end of the pin");
            };
            run(machine.mmu(), seed, &handler, vec![Box::new(task)]);
        });
    }
}
