//! Pins that meet at a page: each has the one that its space has.

use crate::world::{bounds, span, with_world};
use crate::{AT, FEW, no_faults};
use hugemm_base::{Never, PageSize, VirtAddr};
use hugemm_paging::{Aarch64, Lookup, PageFormat, X86_64};
use hugemm_schedule::{Task, explore, seeds};
use hugemm_vm::{Access, Backing, Protection, VmaKind};

/// Pages that are pinned one after the other, and how many CPUs do so.
const PAGES: u64 = 8;
const CPUS: u32 = 3;

/// Nobody may store to them, and a fork shares them, so the first pin of each has a copy made.
fn pins_meet<F: PageFormat>(seed: u64) {
    with_world::<F>(CPUS, seed, &no_faults(), |world| {
        let (cx, vm, all) = (&mut world.machine.cx(), &world.vm, span(AT, PAGES << 12));
        let page = |number: u64| span(AT + (number << 12), 0x1000);
        let space = vm.create(cx, bounds()).expect("a space");
        vm.map(cx, &space, all, VmaKind::private(PageSize::Size4K), Backing::Private).expect("an area");
        world.enter(cx, &space);
        (0..PAGES).for_each(|number| world.put(cx, &space, page(number).start().get(), number).expect("memory"));
        vm.protect(cx, &space, all, Protection::USER).expect("an area");
        world.leave(cx, &space);
        let child = vm.fork(cx, &space).expect("memory");
        let shared = &space;
        let device = || -> Task<'_> {
            Box::new(move || {
                let (cx, mut pins) = (&mut world.machine.cx(), Vec::new());
                for number in 0..PAGES {
                    vm.pin(cx, shared, page(number), Access::Read, None, &Never, |pinned| pins.push(pinned))
                        .expect("memory");
                }
                for pinned in pins {
                    let found = vm.lookup(cx, shared, VirtAddr::new(pinned.at().get()));
                    let has = matches!(found, Lookup::Mapped(leaf) if leaf.frame == pinned.extent().base());
                    assert!(has, "{pinned:?} is not what the space has: {found:?}");
                    vm.unpin(cx, shared, pinned).expect("its own");
                }
            })
        };
        world.run(seed, (0..CPUS).map(|_| device()).collect());
        vm.destroy(cx, child).expect("destroyed");
        vm.destroy(cx, space).expect("destroyed");
    });
}

#[test]
fn pins_that_meet_have_what_the_space_has() {
    let of = |seed: u64| if seed.is_multiple_of(2) { pins_meet::<X86_64>(seed) } else { pins_meet::<Aarch64>(seed) };
    explore(seeds(FEW), of).unwrap_or_else(|failure| panic!("{failure}"));
}
