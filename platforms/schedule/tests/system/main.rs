//! The whole system on CPUs that take turns as a seed says: every word read is the word written last.

mod world;

use hugemm_base::PageSize;
use hugemm_paging::X86_64;
use hugemm_schedule::{Task, explore, progress, seeds};
use hugemm_vm::{Backing, VmaKind};
use world::{bounds, span, with_world};

const AT: u64 = 0x4000_0000;

/// A fork while others map, unmap and store.
#[test]
#[ignore = "red: a fork passes reschedule points with the parent's area list locked"]
fn a_fork_beside_others() {
    let test = |seed| {
        with_world::<X86_64>(4, 6, seed, |world| {
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
    if let Err(failure) = explore(seeds(200), test) {
        panic!("{failure}");
    }
}
