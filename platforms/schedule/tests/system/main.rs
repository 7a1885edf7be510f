//! The whole system on CPUs that take turns as a seed says: every word read is the word written last.

mod file;
mod program;
mod runs;
mod world;

use file::File;
use hugemm_base::PageSize;
use hugemm_base::inject::FaultPlan;
use hugemm_paging::{Aarch64, PageFormat, X86_64};
use hugemm_schedule::{Task, explore, point, progress, seeds};
use hugemm_vm::{Backing, VmaKind};
use program::{ALL_DEEDS, CPUS, Deeds, Program, SHARED_PAGES, Test};
use std::cell::Cell;
use world::{bounds, span, with_world};

const AT: u64 = 0x4000_0000;
/// What each program does.
const STEPS: u64 = 60;
/// With this one a page that two had taken away lost a reference, which few orders show.
const RARE: u64 = 1_882_940_969_582_795;
/// Runs where nobody asks for more.
const FEW: u64 = 30;

fn no_faults() -> FaultPlan {
    FaultPlan::nth(u64::MAX)
}

fn run<F: PageFormat>(seed: u64, inject: &FaultPlan, deeds: &Deeds) -> u64 {
    let mut steps = 0;
    with_world::<F>(CPUS + 2, seed, inject, |world| {
        let cx = &mut world.machine.cx();
        // Memory of its own, or a file's.
        let file = seed.is_multiple_of(2).then(|| File::new(SHARED_PAGES));
        let object = match file {
            Some(file) => world.vm.open_source(cx, file),
            None => world.vm.create_shared(cx, SHARED_PAGES, PageSize::Size4K, false),
        };
        let object = object.expect("memory");
        let shared = {
            let test = Test::new(world, &object, seed, deeds);
            let shared = &test;
            let program = |cpu| -> Task<'_> { Box::new(move || Program::run(shared, cpu, seed, STEPS)) };
            let mut tasks: Vec<Task<'_>> = (0..CPUS).map(program).collect();
            tasks.push(Box::new(|| shared.work(seed)));
            tasks.push(Box::new(|| shared.unhook(seed)));
            steps = world.run(seed, tasks);
            test.finish()
        };
        world.vm.close(cx, object).expect("its own");
        if let Some(file) = file {
            shared.iter().for_each(|(at, may)| {
                assert!(may.contains(&file.word(*at)), "{at:#x}: {} in the file", file.word(*at))
            });
        }
    });
    steps
}

/// All of it, on other memory.
#[test]
fn a_seed_is_one_run() {
    for seed in 0..4 {
        let steps = [(); 2].map(|()| {
            let deeds = Deeds::default();
            (run::<X86_64>(seed, &no_faults(), &deeds), deeds.into_inner())
        });
        assert_eq!(steps[0], steps[1], "seed {seed}");
    }
}

/// Runs a test's seeds, and sees that everything has happened in some. How many allocations failed.
fn runs<F: PageFormat>(inject: impl Fn(u64) -> FaultPlan) -> u64 {
    let (deeds, failed) = (Deeds::default(), Cell::new(0));
    let done = explore(seeds(FEW), |seed| {
        let plan = inject(seed);
        run::<F>(seed, &plan, &deeds);
        failed.set(failed.get() + plan.failed());
    });
    let done = done.unwrap_or_else(|failure| panic!("{failure}"));
    let missing = |deed: &&&str| done >= FEW && deeds.borrow().get(**deed).copied().unwrap_or(0) == 0;
    let missing: Vec<_> = ALL_DEEDS.iter().filter(missing).collect();
    assert!(missing.is_empty(), "in {done} runs there was none of {missing:?}: {deeds:?}");
    failed.get()
}

#[test]
fn every_word_is_the_word_written_last() {
    assert_eq!(runs::<X86_64>(|_| no_faults()), 0);
}

#[test]
fn every_word_is_the_word_written_last_where_entries_break_first() {
    assert_eq!(runs::<Aarch64>(|_| no_faults()), 0);
}

#[test]
fn every_word_is_the_word_written_last_though_allocations_fail() {
    // What the test's own setting up asks for must be there.
    assert_ne!(runs::<X86_64>(|seed| FaultPlan::random(150, 20, seed)), 0, "none was made to fail");
}

/// A page that two take away at once, of two processes while a third is made: it comes back to each, once.
#[test]
fn a_page_is_away_by_one_hand() {
    let test = |seed| {
        with_world::<X86_64>(4, seed, &no_faults(), |world| {
            let kind = VmaKind::private(PageSize::Size4K);
            let mut cx = world.machine.cx();
            let space = world.vm.create(&mut cx, bounds()).expect("a space");
            world.vm.map(&mut cx, &space, span(AT, 0x1000), kind, Backing::Private).expect("an area");
            let (shared, forking) = (&space, &Cell::new(2));
            let fork = || -> Task<'_> {
                Box::new(move || {
                    let cx = &mut world.machine.cx();
                    world.enter(cx, shared);
                    for round in 1..6 {
                        world.put(cx, shared, AT, round).expect("memory");
                        let child = world.vm.fork(cx, shared).expect("memory");
                        (0..60).for_each(|_| point());
                        world.vm.destroy(cx, child).expect("destroyed");
                        progress();
                    }
                    world.leave(cx, shared);
                    forking.set(forking.get() - 1);
                })
            };
            let away = || -> Task<'_> {
                Box::new(move || {
                    let cx = &mut world.machine.cx();
                    let deferred = world.deferred();
                    while forking.get() > 0 {
                        let page = world.unhook(cx, shared, AT, &deferred);
                        point();
                        page.into_iter().for_each(|page| page.put_back(cx));
                        cx.cond_resched();
                    }
                })
            };
            world.run(seed, vec![fork(), fork(), away(), away()]);
            world.vm.destroy(&mut cx, space).expect("destroyed");
        });
    };
    let done = explore(seeds(FEW).chain([RARE]), test);
    done.unwrap_or_else(|failure| panic!("{failure}"));
}

/// A fork while others map, unmap and store.
#[test]
fn a_fork_beside_others() {
    let test = |seed| {
        with_world::<X86_64>(6, seed, &no_faults(), |world| {
            let kind = VmaKind::private(PageSize::Size4K);
            let mut cx = world.machine.cx();
            let space = world.vm.create(&mut cx, bounds()).expect("a space");
            world.vm.map(&mut cx, &space, span(AT, 0x8000), kind, Backing::Private).expect("an area");
            let shared = &space;
            let task = |cpu: u64| -> Task<'_> {
                Box::new(move || {
                    let space = shared;
                    let cx = &mut world.machine.cx();
                    world.enter(cx, space);
                    let own = AT + 0x10_0000 + cpu * 0x1_0000;
                    for round in 1..4 {
                        let at = AT + (round + cpu) % 8 * 0x1000 + cpu * 8;
                        world.put(cx, space, at, round).expect("memory");
                        if cpu < 2 {
                            let child = world.vm.fork(cx, space).expect("memory");
                            world.enter(cx, &child);
                            assert_eq!(world.get(cx, &child, at), Ok(round));
                            world.leave(cx, &child);
                            world.enter(cx, space);
                            world.vm.destroy(cx, child).expect("destroyed");
                        } else {
                            world.vm.map(cx, space, span(own, 0x4000), kind, Backing::Private).expect("an area");
                            world.put(cx, space, own, round).expect("memory");
                            assert_eq!(world.get(cx, space, own), Ok(round));
                            world.vm.unmap(cx, space, span(own, 0x4000)).expect("memory");
                        }
                        assert_eq!(world.get(cx, space, at), Ok(round));
                        progress();
                    }
                    world.leave(cx, space);
                })
            };
            world.run(seed, (0..6).map(task).collect());
            world.vm.destroy(&mut cx, space).expect("destroyed");
        });
    };
    let done = explore(seeds(FEW), test);
    done.unwrap_or_else(|failure| panic!("{failure}"));
}
