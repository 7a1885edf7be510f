//! The whole system on CPUs that take turns as a seed says: every word read is the word written last.

mod file;
mod pins;
mod program;
mod runs;
mod world;

use file::File;
use hugemm_base::inject::FaultPlan;
use hugemm_base::{Never, NodeId, PageSize};
use hugemm_paging::{Aarch64, PageFormat, X86_64};
use hugemm_reclaim::{ShrinkBudget, Swap};
use hugemm_schedule::{Task, explore, point, progress, seeds, wait_until};
use hugemm_threads::Random;
use hugemm_vm::{Backing, Discard, Protection, VmaKind};
use program::{ALL_DEEDS, CPUS, Deeds, Program, SHARED_PAGES, Test};
use std::cell::Cell;
use world::{bounds, span, with_large_pages_away, with_world};

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
            let test = Test::new(world, &object, file, seed, deeds);
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
fn runs(run: impl Fn(u64, &FaultPlan, &Deeds) -> u64, inject: impl Fn(u64) -> FaultPlan) -> u64 {
    let (deeds, failed) = (Deeds::default(), Cell::new(0));
    let done = explore(seeds(FEW), |seed| {
        let plan = inject(seed);
        run(seed, &plan, &deeds);
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
    assert_eq!(runs(run::<X86_64>, |_| no_faults()), 0);
}

#[test]
fn every_word_is_the_word_written_last_where_entries_break_first() {
    assert_eq!(runs(run::<Aarch64>, |_| no_faults()), 0);
}

#[test]
fn every_word_is_the_word_written_last_though_allocations_fail() {
    // What the test's own setting up asks for must be there.
    let plan = |seed| FaultPlan::random(150, 20, seed);
    let either = |seed: u64, plan: &FaultPlan, deeds: &Deeds| {
        if seed % 8 < 4 { run::<X86_64>(seed, plan, deeds) } else { run::<Aarch64>(seed, plan, deeds) }
    };
    assert_ne!(runs(either, plan), 0, "none was made to fail");
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

/// Three small pages that have one place among faults under way, so that none keeps faults at another apart, and a large one.
const MET: [u64; 3] = [AT, AT + 0xd000, AT + 0x1_a000];
const LARGE: u64 = 2 * AT;
/// CPUs that store there, each to a word of its own in each small page.
const STORING: u64 = 5;

/// What reclaim has just taken away is touched by all at once, and forked: who has a page in swap loses no share of it to others, and each
/// part of a large page comes back where it was. How many pages of 4 KiB have come back.
fn meet<F: PageFormat>(seed: u64) -> u64 {
    let mut loads = 0;
    with_large_pages_away::<F>(STORING as u32 + 1, seed, |world| {
        let mut cx = world.machine.cx();
        let owned = world.vm.create(&mut cx, bounds()).expect("a space");
        for (at, pages, page) in [(AT, 32, PageSize::Size4K), (LARGE, 512, PageSize::Size2M)] {
            let kind = VmaKind::private(page);
            world.vm.map(&mut cx, &owned, span(at, pages << 12), kind, Backing::Private).expect("an area");
        }
        world.enter(&cx, &owned);
        let part = |number: u64| LARGE + (number << 12) + number * 8;
        // What is filled with one word is stored soon.
        let has = |number: u64| if number.is_multiple_of(37) { number + 1 } else { 0 };
        (0..512).step_by(37).for_each(|number| world.put(&mut cx, &owned, part(number), has(number)).expect("memory"));
        world.leave(&cx, &owned);
        let (space, passes, storing) = (&owned, &Cell::new(0_u64), &Cell::new(STORING));
        // What each CPU has stored to each page: it has, or is about to.
        let stored: &[[[Cell<u64>; 2]; STORING as usize]; MET.len()] = &Default::default();
        let task = |cpu: u64| -> Task<'_> {
            Box::new(move || {
                let (cx, random) = (&mut world.machine.cx(), &mut Random(seed << 8 | cpu));
                for round in 1..6 {
                    let seen = passes.get();
                    wait_until("a pass of reclaim", &|| passes.get() > seen);
                    world.enter(cx, space);
                    let first = random.below(2) as usize;
                    let child = (random.below(6) == 0).then(|| {
                        let before = stored.each_ref().map(|page| page.each_ref().map(|word| word[0].get()));
                        (world.vm.fork(cx, space).expect("memory"), before)
                    });
                    let (of, before) = match &child {
                        Some((child, before)) => (child, *before),
                        None => (space, Default::default()),
                    };
                    if child.is_some() {
                        world.enter(cx, of);
                        world.leave(cx, space);
                    }
                    for page in first..first + 2 {
                        let (at, words) = (MET[page], &stored[page]);
                        if child.is_none() && random.below(2) == 0 {
                            words[cpu as usize][1].set(round);
                            world.put(cx, of, at + cpu * 8, round).expect("memory");
                            words[cpu as usize][0].set(round);
                        }
                        let other = random.below(STORING);
                        let word = &words[other as usize];
                        let least = if child.is_some() { before[page][other as usize] } else { word[0].get() };
                        let found = world.get(cx, of, at + other * 8).expect("memory");
                        let may = least..=word[1].get();
                        assert!(may.contains(&found), "cpu{cpu} at {at:#x}: {found} of cpu{other}, not {may:?}");
                    }
                    for number in [random.below(512), random.below(13) * 37] {
                        assert_eq!(world.get(cx, of, part(number)), Ok(has(number)), "part {number}");
                    }
                    progress();
                    // Nobody's accesses, which a CPU goes on with by itself, keep pages young while all wait.
                    world.leave(cx, of);
                    if let Some((child, _)) = child {
                        world.vm.destroy(cx, child).expect("destroyed");
                    }
                }
                storing.set(storing.get() - 1);
            })
        };
        let away: Task<'_> = Box::new(move || {
            let cx = &mut world.machine.cx();
            let budget = ShrinkBudget::new(u64::MAX, 520);
            while storing.get() > 0 {
                // What has been used is not taken the first time.
                for turn in 0..8 {
                    world.vm.pager().shrink(&world.vm, cx, NodeId::new(turn % 2), budget, &Never);
                    progress();
                }
                passes.set(passes.get() + 1);
                cx.cond_resched();
            }
        });
        world.run(seed, (0..STORING).map(task).chain([away]).collect());
        world.enter(&cx, space);
        for (page, words) in stored.iter().enumerate() {
            for (cpu, word) in (0..).zip(words) {
                assert_eq!(world.get(&mut cx, space, MET[page] + cpu * 8), Ok(word[0].get()));
            }
        }
        world.leave(&cx, space);
        world.vm.destroy(&mut cx, owned).expect("destroyed");
        loads = Swap::stats(world.store, &cx).loads;
    });
    loads
}

#[test]
fn every_word_comes_back_where_faults_and_forks_meet() {
    let loads = Cell::new(0);
    let done = explore(seeds(FEW / 3), |seed| {
        let of = if seed.is_multiple_of(2) { meet::<X86_64>(seed) } else { meet::<Aarch64>(seed) };
        loads.set(loads.get() + of);
    });
    let done = done.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(loads.get() > 600 * done, "few pages were away: {loads:?}");
}

/// Pages of a file that are lent, to all of which all CPUs store at once: each store stays, whoever else copies the page, and the file has
/// none of them.
fn stores_meet<F: PageFormat>(seed: u64) {
    const PAGES: u64 = 3;
    with_world::<F>(STORING as u32, seed, &no_faults(), |world| {
        let (cx, file) = (&mut world.machine.cx(), File::new(PAGES));
        let handle = world.vm.open_source(cx, file).expect("memory");
        let owned = world.vm.create(cx, bounds()).expect("a space");
        let (kind, all) = (VmaKind::private(PageSize::Size4K), span(AT, PAGES << 12));
        world.vm.map(cx, &owned, all, kind, Backing::Copied(&handle, 0)).expect("an area");
        let (space, object, came) = (&owned, &handle, &Cell::new(0));
        // Waits for all others.
        let meet = || {
            let so_far = came.get() / STORING;
            came.set(came.get() + 1);
            wait_until("the others", &|| came.get() / STORING > so_far);
            progress();
        };
        let task = |cpu: u64| -> Task<'_> {
            Box::new(move || {
                let (cx, random) = (&mut world.machine.cx(), &mut Random(seed << 8 | cpu));
                let word = |page: u64| AT + (page << 12) + cpu * 8;
                world.enter(cx, space);
                for round in 1..6 {
                    (0..PAGES).for_each(|page| assert_eq!(world.get(cx, space, word(page)), Ok(0)));
                    meet();
                    for rights in [Protection::USER, kind.protection].into_iter().filter(|_| cpu == 0) {
                        world.vm.protect(cx, space, all, rights).expect("an area");
                    }
                    meet();
                    let first = random.below(PAGES);
                    for page in (first..first + PAGES).map(|page| page % PAGES) {
                        world.put(cx, space, word(page), round).expect("memory");
                        if cpu == 0 {
                            world.vm.punch(cx, object, 0, PAGES).expect("its own");
                        }
                    }
                    meet();
                    for page in 0..PAGES {
                        assert_eq!(world.get(cx, space, word(page)), Ok(round), "cpu{cpu}, page {page}");
                    }
                    meet();
                    if cpu == 0 {
                        world.vm.discard(cx, space, all, Discard::Now).expect("an area");
                    }
                    meet();
                }
                world.leave(cx, space);
            })
        };
        world.run(seed, (0..STORING).map(task).collect());
        assert_eq!(world.vm.sync(cx, object, 0, PAGES), Ok(0));
        let stored = (0..PAGES << 9).filter(|word| file.word(word * 8) != 0).count();
        assert_eq!(stored, 0, "in the file");
        world.vm.destroy(cx, owned).expect("destroyed");
        world.vm.close(cx, handle).expect("its own");
    });
}

#[test]
fn every_store_to_what_is_lent_stays() {
    let of =
        |seed: u64| if seed.is_multiple_of(2) { stores_meet::<X86_64>(seed) } else { stores_meet::<Aarch64>(seed) };
    let done = explore(seeds(FEW), of);
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
