//! The pairs: an operation as CPU 0, then the same or its partner as CPU 1, on memory that is warm.

use crate::machine::{CPUS, Cpus, Ground, Machine, Site, keep, span};
use anyhow::{Result, anyhow};
use hugemm::base::{CpuCx, Never, NodeId, Order, PageSize, VirtAddr};
use hugemm::frames::{Frames, Frozen, Plain};
use hugemm::heap::Heap;
use hugemm::hugetlb::{FlatMemory, HugePage, Nodes, SoftMap, VmemmapOptimizer, WalkCache};
use hugemm::kva::Request;
use hugemm::paging::{Keep, Lookup};
use hugemm::reclaim::ShrinkBudget;
use hugemm::vm::{Access, AddressSpaceRef, Backing, Protection, Served, Vm, VmaKind};
use hugemm_threads::run_as;
use std::alloc::Layout;
use std::any::type_name;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU8, Ordering};

/// A task's context.
pub(crate) type Context = CpuCx<'static, Cpus>;

/// Stored to where a window begins, and where it ends.
static MARKS: [AtomicU8; 2] = [const { AtomicU8::new(0) }; 2];

/// Rounds before the one that is traced.
const WARM: u64 = 3;

/// Pages of 2 MiB that are faulted in. Few, because each store of a clear is a line of the trace.
const HUGE: u64 = 8;

/// How many nodes there are, and what a pair is called there. CPU 1 is on the last.
const NODES: [(u32, &str); 2] = [(1, "one node"), (2, "two nodes")];

/// Addresses that are far apart: another table of every level but the root.
const FAR: u64 = 1 << 40;

/// Tells the tracer, and waits until it has read what it wants to.
fn say(line: &str) -> Result<()> {
    println!("{line}");
    std::io::stdout().flush()?;
    Ok(std::io::stdin().read_exact(&mut [0])?)
}

/// A space that both CPUs use, or one for each, and their manager.
struct Used<S: Site> {
    vm: &'static Vm<'static, S>,
    spaces: Vec<AddressSpaceRef<'static, S>>,
}

impl<S: Site> Used<S> {
    fn space(&self, cpu: u64) -> &AddressSpaceRef<'static, S> {
        &self.spaces[cpu as usize % self.spaces.len()]
    }
}

/// Which pairs are traced.
struct Pairs<'a> {
    ground: &'static Ground,
    only: &'a str,
}

impl Pairs<'_> {
    fn wants(&self, name: &str) -> bool {
        name.contains(self.only)
    }

    /// What is wanted of a pair: how many nodes, and its name there.
    fn on_nodes(&self, name: &str) -> Vec<(u32, String)> {
        let named = NODES.map(|(nodes, on)| (nodes, format!("{name}, {on}")));
        named.into_iter().filter(|(_, name)| self.wants(name)).collect()
    }

    /// Traces `operations` of them as one CPU and as the other. `prepare` is called before, for each CPU; what it makes is gone when
    /// the operation is over. Both know the CPU and the number of the round.
    fn trace<S: Site, T>(
        &self,
        machine: &Machine<S>,
        name: &str,
        operations: u64,
        mut prepare: impl FnMut(&mut Context, u64, u64) -> T,
        mut operate: impl FnMut(&mut Context, u64, T),
    ) -> Result<()> {
        let look = || {
            let roots = machine.roots;
            let name = type_name_of(roots).rsplit_once("::Roots").map_or("", |(_, arguments)| arguments);
            let name = format!("Roots{name}");
            let mut line = format!("look\t{name}\t{}\t{}", std::ptr::from_ref(roots).addr(), self.ground.base);
            for space in [&roots.space, &roots.other_space].map(std::cell::Cell::get) {
                // SAFETY: the pairs' spaces live as long as their pairs.
                if let Some(space) = unsafe { space.as_ref() } {
                    line += &format!("\t{}", space.root().get());
                }
            }
            say(&line)
        };
        for round in 0..=WARM {
            let mut ready = Vec::new();
            for cpu in 0..CPUS {
                run_as(cpu);
                ready.push(prepare(&mut self.ground.cpus.cx(), cpu.into(), round));
            }
            if round == WARM {
                look()?;
            }
            for (cpu, ready) in (0..CPUS).zip(ready) {
                run_as(cpu);
                let mut cx = self.ground.cpus.cx();
                if round == WARM {
                    MARKS[0].store(1, Ordering::SeqCst);
                }
                operate(&mut cx, cpu.into(), ready);
                if round == WARM {
                    MARKS[1].store(1, Ordering::SeqCst);
                }
            }
        }
        look()?;
        say(&format!("pair\t{name}\t{operations}\t{}", self.ground.base))
    }

    /// Traces a pair of the page allocator on a machine of its own.
    fn of_frames<T>(
        &self,
        nodes: u32,
        name: &str,
        operations: u64,
        prepare: impl Fn(&'static Frames<'static>, &mut Context) -> T,
        operate: impl Fn(&'static Frames<'static>, &mut Context, T),
    ) -> Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        let machine = Machine::bare(self.ground, nodes)?;
        let frames = machine.roots.frames;
        self.trace(
            &machine,
            name,
            operations,
            |cx, _, _| prepare(frames, cx),
            |cx, _, ready| operate(frames, cx, ready),
        )
    }

    /// Traces a pair of one space that both CPUs [use](Pairs::shared), and of a space for each where it says `each in one space`, on one node
    /// and on two, on machines of their own.
    fn of_space<S: Site, T>(
        &self,
        make: impl Fn(u32) -> Result<Machine<S>>,
        name: &str,
        operations: u64,
        prepare: impl Fn(&Used<S>, &mut Context, u64, u64) -> T,
        operate: impl Fn(&Used<S>, &mut Context, u64, T),
    ) -> Result<()> {
        let apart = name.replace("each in one space, far apart", "each in two spaces");
        let apart = (apart != name).then_some((2, &*apart));
        for (spaces, name) in [(1, name)].into_iter().chain(apart) {
            for (nodes, name) in self.on_nodes(name) {
                let machine = make(nodes)?;
                let used = Used { vm: machine.roots.vm, spaces: (0..spaces).map(|_| self.shared(&machine)).collect() };
                self.trace(
                    &machine,
                    &name,
                    operations,
                    |cx, cpu, round| prepare(&used, cx, cpu, round),
                    |cx, cpu, ready| operate(&used, cx, cpu, ready),
                )?;
            }
        }
        Ok(())
    }

    fn blocks(&self) -> Result<()> {
        for (nodes, on) in NODES {
            for (what, order) in [("4 KiB", 0), ("2 MiB", 9), ("order 6", 6)] {
                let order = Order::new(order).map_err(|error| anyhow!("{error}"))?;
                let once = format!("{what} taken and freed, {on}");
                self.of_frames(
                    nodes,
                    &once,
                    1,
                    |_, _| (),
                    |frames, cx, ()| {
                        let block = frames.alloc(cx, order).expect("memory");
                        frames.free(cx, block);
                    },
                )?;
                // More than a CPU keeps.
                let count = if order == Order::ZERO { 8192 } else { 64 };
                let many = format!("{what} taken, then all freed, {on}");
                self.of_frames(
                    nodes,
                    &many,
                    count as u64,
                    |_, _| Vec::<Frozen>::with_capacity(count),
                    |frames, cx, mut blocks| {
                        for _ in 0..count {
                            blocks.push(frames.alloc(cx, order).expect("memory"));
                        }
                        for block in blocks {
                            frames.free(cx, block);
                        }
                    },
                )?;
            }
            let counted = |frames: &'static Frames<'static>, cx: &mut Context| {
                let block = frames.alloc(cx, PageSize::Size2M).expect("memory");
                let run = frames.split(block, Order::ZERO).expect("a block");
                frames.count_run(run).expect("nobody else's")
            };
            self.of_frames(
                nodes,
                &format!("512 counted pages freed as a range, {on}"),
                1,
                counted,
                |frames, cx, run| {
                    frames.free_range(cx, run);
                },
            )?;
            self.of_frames(
                nodes,
                &format!("512 counted pages freed as a range, many, {on}"),
                64,
                |frames, cx| (0..64).map(|_| counted(frames, cx)).collect::<Vec<_>>(),
                |frames, cx, runs| {
                    for run in runs {
                        frames.free_range(cx, run);
                    }
                },
            )?;
        }
        Ok(())
    }

    /// Faults: `spaces`, `areas` and `tables` each 1 or 2; on one node and on two.
    fn faults<S: Site>(
        &self,
        name: &str,
        make: impl Fn(u32) -> Result<Machine<S>>,
        spaces: usize,
        areas: u64,
        far: u64,
        many: bool,
    ) -> Result<()> {
        let pairs = NODES
            .into_iter()
            .flat_map(|(nodes, on)| [(nodes, 1, format!("{name}, {on}")), (nodes, 256, format!("{name}, {on}, many"))]);
        for (nodes, count, name) in pairs {
            if !self.wants(&name) || (count > 1 && !many) {
                continue;
            }
            let machine = make(nodes)?;
            let (vm, mut cx) = (machine.roots.vm, self.ground.cpus.cx());
            let spaces: Vec<_> = (0..spaces).map(|_| machine.space(&mut cx)).collect();
            let of = |cpu: u64| &spaces[cpu as usize % spaces.len()];
            let at = |cpu: u64, page: u64| (1 << 42) + cpu * far + page * 4096;
            for (cpu, space) in spaces
                .iter()
                .enumerate()
                .filter(|_| spaces.len() > 1 || areas == 2)
                .chain((areas == 2 && spaces.len() == 1).then(|| (1, &spaces[0])))
            {
                vm.map(&mut cx, space, span(at(cpu as u64, 0), 1 << 30), small(), Backing::Private).expect("an area");
            }
            if spaces.len() == 1 && areas == 1 {
                vm.map(&mut cx, &spaces[0], span(at(0, 0), far + (1 << 30)), small(), Backing::Private)
                    .expect("an area");
            }
            let fault = |cx: &mut Context, cpu: u64, page: u64| {
                vm.fault(cx, of(cpu), VirtAddr::new(at(cpu, page)), Access::Write).expect("memory");
            };
            let prepare = |cx: &mut Context, cpu: u64, round: u64| {
                // So that the CPU's cache has a page, and the tables are there.
                let scratch = at(cpu, (WARM + 1) * count);
                if count == 1 {
                    fault(cx, cpu, (WARM + 1) * count);
                    vm.unmap(cx, of(cpu), span(scratch, 4096)).map(drop).err();
                    vm.map(cx, of(cpu), span(scratch, 4096), small(), Backing::Private).map(drop).err();
                }
                round * count
            };
            self.trace(&machine, &name, count, prepare, |cx, cpu, first| {
                for page in first..first + count {
                    fault(cx, cpu, page);
                }
            })?;
        }
        Ok(())
    }

    /// One space in which both CPUs have an area of 1 GiB, far apart, the first 512 pages of which are mapped.
    fn shared<S: Site>(&self, machine: &Machine<S>) -> AddressSpaceRef<'static, S> {
        let (vm, mut cx) = (machine.roots.vm, self.ground.cpus.cx());
        let space = machine.space(&mut cx);
        for cpu in 0..u64::from(CPUS) {
            run_as(cpu as u32);
            vm.map(&mut cx, &space, span(area(cpu), 1 << 30), small(), Backing::Private).expect("an area");
            vm.prefault(&space, span(area(cpu), 2 << 20), None).work(&mut cx, &Never).expect("memory");
        }
        space
    }

    fn space(&self) -> Result<()> {
        let machine = |nodes| Machine::bare(self.ground, nodes);
        let page = |cpu: u64, round: u64| VirtAddr::new(area(cpu) + round * 4096);
        let pages = |at: VirtAddr, pages: u64| span(at.get(), pages << 12);
        let beyond = |cpu: u64, round: u64| span(area(cpu) + (2 + round) * (1 << 30), 1 << 20);

        // Of a part of each area that has pages of 2 MiB.
        let huge = |cpu: u64, round: u64| span(area(cpu) + (10 + round) * (1 << 30), HUGE << 21);
        self.of_space(
            machine,
            "a fault of 2 MiB each in one space, far apart, many",
            HUGE,
            |used, cx, cpu, round| {
                let kind = VmaKind::private(PageSize::Size2M);
                used.vm.map(cx, used.space(cpu), huge(cpu, round), kind, Backing::Private).expect("an area");
                huge(cpu, round).start().get()
            },
            |used, cx, cpu, at| {
                for page in 0..HUGE {
                    let at = VirtAddr::new(at + (page << 21));
                    assert_eq!(used.vm.fault(cx, used.space(cpu), at, Access::Write), Ok(Served::Mapped));
                }
            },
        )?;
        self.of_space(
            machine,
            "an area mapped each in one space, far apart",
            1,
            |_, _, cpu, round| beyond(cpu, round),
            |used, cx, cpu, at| {
                used.vm.map(cx, used.space(cpu), at, small(), Backing::Private).expect("an area");
            },
        )?;
        self.of_space(
            machine,
            "an area unmapped each in one space, far apart",
            1,
            |used, cx, cpu, round| {
                let at = beyond(cpu, round);
                used.vm.map(cx, used.space(cpu), at, small(), Backing::Private).expect("an area");
                used.vm.fault(cx, used.space(cpu), at.start(), Access::Write).expect("memory");
                at
            },
            |used, cx, cpu, at| {
                used.vm.unmap(cx, used.space(cpu), at).expect("an area");
            },
        )?;
        self.of_space(
            machine,
            "a page unmapped each in one space, far apart",
            1,
            |_, _, cpu, round| page(cpu, 2 * round + 1),
            |used, cx, cpu, at| {
                used.vm.unmap(cx, used.space(cpu), pages(at, 1)).expect("a page");
            },
        )?;
        self.of_space(
            machine,
            "a page unmapped in one space, a fault in another table",
            1,
            |_, _, cpu, round| page(cpu, 512 * cpu + 2 * round + 1),
            |used, cx, cpu, at| {
                if cpu == 0 {
                    used.vm.unmap(cx, used.space(cpu), pages(at, 1)).expect("a page");
                } else {
                    used.vm.fault(cx, used.space(cpu), at, Access::Write).expect("a page");
                }
            },
        )?;
        self.of_space(
            machine,
            "lookup of a page each in one space, far apart",
            1,
            |_, _, cpu, round| page(cpu, round),
            |used, cx, cpu, at| {
                assert!(matches!(used.vm.lookup(cx, used.space(cpu), at), Lookup::Mapped(_)));
            },
        )?;
        self.of_space(
            machine,
            "find_vma of an area each in one space, far apart",
            1,
            |_, _, cpu, round| page(cpu, round),
            |used, cx, cpu, at| {
                used.space(cpu).find_vma(cx, at).expect("an area");
            },
        )?;
        let area_of = |used: &Used<_>, cx: &mut Context, cpu: u64, round: u64| {
            let at = beyond(cpu, round);
            used.vm.map(cx, used.space(cpu), at, small(), Backing::Private).expect("an area");
            used.vm.prefault(used.space(cpu), at, None).work(cx, &Never).expect("memory");
            at
        };
        self.of_space(
            machine,
            "an area of 256 pages protected each in one space, far apart",
            1,
            area_of,
            |used, cx, cpu, at| {
                used.vm.protect(cx, used.space(cpu), at, Protection::READ).expect("an area");
            },
        )?;
        self.of_space(
            machine,
            "64 bytes read each in one space, far apart",
            1,
            |_, _, cpu, round| page(cpu, round),
            |used, cx, cpu, at| {
                used.vm.read(cx, used.space(cpu), at, &mut [0; 64]).expect("it is mapped");
            },
        )?;
        self.of_space(
            machine,
            "64 pages pinned each in one space, far apart",
            1,
            |_, _, cpu, round| page(cpu, 64 * round),
            |used, cx, cpu, at| {
                let pinned = used.vm.pin(cx, used.space(cpu), pages(at, 64), None, &Never, std::mem::forget);
                assert_eq!(pinned.ok(), Some(64));
            },
        )?;
        self.of_space(
            machine,
            "64 pages unpinned each in one space, far apart",
            1,
            |used, cx, cpu, round| {
                let (at, mut pins) = (page(cpu, 64 * round), Vec::new());
                let pinned = used.vm.pin(cx, used.space(cpu), pages(at, 64), None, &Never, |pinned| pins.push(pinned));
                pinned.expect("memory");
                pins
            },
            |used, cx, cpu, pins| {
                for pinned in pins {
                    assert!(used.vm.unpin(cx, used.space(cpu), pinned).is_ok());
                }
            },
        )?;
        self.of_space(
            machine,
            "the halves of 2 MiB prefaulted in one space, 4 KiB pages",
            256,
            |_, _, cpu, round| span(area(0) + (1 + round) * (2 << 20) + cpu * (1 << 20), 1 << 20),
            |used, cx, cpu, half| {
                used.vm.prefault(used.space(cpu), half, Some(2 << 20)).work(cx, &Never).expect("memory");
            },
        )?;
        self.of_space(
            machine,
            "2 MiB prefaulted each in one space, far apart, 4 KiB pages",
            512,
            |_, _, cpu, round| span(area(cpu) + (1 + round) * (2 << 20), 2 << 20),
            |used, cx, cpu, part| {
                used.vm.prefault(used.space(cpu), part, None).work(cx, &Never).expect("memory");
            },
        )?;
        for (name, other) in
            [("a fork, and a fault in the parent", false), ("a fork, and a fault in another space", true)]
        {
            for (nodes, name) in self.on_nodes(name) {
                let machine = machine(nodes)?;
                let (vm, space) = (machine.roots.vm, self.shared(&machine));
                let second = other.then(|| self.shared(&machine));
                self.trace(
                    &machine,
                    &name,
                    1,
                    |_, cpu, round| page(cpu, 513 + round),
                    |cx, cpu, at| {
                        if cpu == 0 {
                            let _child = vm.fork(cx, &space).expect("memory");
                        } else {
                            vm.fault(cx, second.as_ref().unwrap_or(&space), at, Access::Write).expect("memory");
                        }
                    },
                )?;
            }
        }
        for (nodes, name) in self.on_nodes("a fault each in one shared object, two spaces") {
            let machine = machine(nodes)?;
            let (vm, mut cx) = (machine.roots.vm, self.ground.cpus.cx());
            let object = vm.create_shared(&mut cx, 1 << 20, PageSize::Size4K, false).expect("memory");
            let spaces = [(); 2].map(|()| self.shared(&machine));
            let at = |cpu: u64, round: u64| (1 << 44) + cpu * (1 << 30) + round * 4096;
            for space in &spaces {
                vm.map(&mut cx, space, span(at(0, 0), 1 << 32), small(), Backing::Shared(&object, 0)).expect("room");
            }
            self.trace(
                &machine,
                &name,
                1,
                |_, cpu, round| VirtAddr::new(at(cpu, round)),
                |cx, cpu, at| {
                    vm.fault(cx, &spaces[cpu as usize], at, Access::Write).expect("memory");
                },
            )?;
        }
        for (nodes, name) in self.on_nodes("a space made and ended each") {
            let machine = machine(nodes)?;
            let vm = machine.roots.vm;
            self.trace(
                &machine,
                &name,
                1,
                |_, _, _| (),
                |cx, _, ()| {
                    let space = vm.create(cx, span(0, 1 << 47)).expect("memory");
                    assert!(vm.destroy(cx, space).is_ok());
                },
            )?;
        }
        Ok(())
    }

    fn reclaim(&self) -> Result<()> {
        let machine = |nodes| Machine::paged(self.ground, nodes);
        self.faults("a fault each in two spaces, with a pager", machine, 2, 2, FAR, true)?;
        self.faults("a fault each in one space, with a pager", machine, 1, 2, FAR, true)?;
        let page = |cpu: u64, round: u64| VirtAddr::new(area(cpu) + round * 4096);
        self.of_space(
            machine,
            "accessed bits of 64 pages taken each in one space, far apart",
            1,
            |_, _, cpu, round| page(cpu, 64 * round),
            |used, cx, cpu, at| {
                used.vm.test_and_clear_young(cx, used.space(cpu), span(at.get(), 64 << 12), drop).expect("an area");
            },
        )?;
        self.of_space(
            machine,
            "accessed bits of 64 pages taken, and a fault in the same space, far apart",
            1,
            |_, _, cpu, round| page(cpu, 512 * cpu + 64 * round),
            |used, cx, cpu, at| {
                if cpu == 0 {
                    used.vm.test_and_clear_young(cx, used.space(cpu), span(at.get(), 64 << 12), drop).expect("an area");
                } else {
                    used.vm.fault(cx, used.space(cpu), at, Access::Write).expect("memory");
                }
            },
        )?;
        // Each CPU reclaims from its node and faults in its space.
        for (name, away, back) in [
            ("32 pages looked at for reclaim each", 0, false),
            ("32 pages written out each", 1, false),
            ("a page brought back each in two spaces", u64::MAX, true),
        ] {
            for (nodes, name) in self.on_nodes(name) {
                let machine = machine(nodes)?;
                let (vm, spaces) = (machine.roots.vm, [(); 2].map(|()| self.shared(&machine)));
                let node = |cpu: u64| NodeId::new(cpu as u32 % nodes);
                let shrink = |cx: &mut Context, cpu, pages| {
                    let budget = ShrinkBudget::new(pages, pages);
                    vm.pager().shrink(vm, cx, node(cpu), budget, &Never)
                };
                for cpu in 0..2 {
                    run_as(cpu);
                    let mut cx = self.ground.cpus.cx();
                    if away > 0 {
                        for index in 0..512 {
                            let bytes = [index as u8 | 1; 64];
                            vm.write(&mut cx, &spaces[cpu as usize], page(cpu.into(), index), &bytes).expect("memory");
                        }
                    }
                    // Until pages are idle, and some go, or all.
                    let mut gone = 0;
                    for _ in 0..64 {
                        if gone < away {
                            gone += shrink(&mut cx, cpu.into(), if back { 512 } else { 32 }).freed;
                        }
                    }
                }
                self.trace(
                    &machine,
                    &name,
                    if back { 1 } else { 32 },
                    |_, cpu, round| page(cpu, round),
                    |cx, cpu, at| {
                        if back {
                            let served = vm.fault(cx, &spaces[cpu as usize], at, Access::Read);
                            assert_eq!(served.expect("memory"), Served::Refaulted, "it was away");
                        } else {
                            let done = shrink(cx, cpu, 32);
                            assert!(away == 0 || done.freed > 0, "{done:?}");
                        }
                    },
                )?;
            }
        }
        Ok(())
    }

    fn heap(&self) -> Result<()> {
        for (name, elsewhere) in [
            ("heap: a piece of each size taken and freed", false),
            ("heap: a piece of each size freed that the other CPU took", true),
        ] {
            for (nodes, name) in self.on_nodes(name) {
                let machine = Machine::bare(self.ground, nodes)?;
                let cx = self.ground.cpus.cx();
                let heap: &'static Heap<'static, Plain> =
                    keep(Heap::new(machine.roots.frames, &cx, CPUS).map_err(|error| anyhow!("{error}"))?);
                machine.roots.heap.set(heap);
                let sizes = || sizes_of_pieces().map(|size| Layout::from_size_align(size, 8).expect("small"));
                let take = |cx: &mut Context| {
                    sizes().map(|layout| heap.alloc(cx, layout).expect("memory")).collect::<Vec<_>>()
                };
                let prepare = |cx: &mut Context, cpu: u64, _| {
                    if elsewhere {
                        run_as(1 - cpu as u32);
                        take(cx)
                    } else {
                        Vec::with_capacity(sizes_of_pieces().count())
                    }
                };
                self.trace(&machine, &name, sizes_of_pieces().count() as u64, prepare, |cx, _, mut pieces| {
                    if !elsewhere {
                        pieces.extend(sizes().map(|layout| heap.alloc(cx, layout).expect("memory")));
                    }
                    for (piece, layout) in pieces.into_iter().zip(sizes()) {
                        // SAFETY: taken with this layout, and freed once.
                        unsafe { heap.free(cx, piece, layout) };
                    }
                })?;
            }
        }
        Ok(())
    }

    fn areas(&self) -> Result<()> {
        for (nodes, name) in self.on_nodes("kva: an area of 16 KiB taken and freed each") {
            let machine = Machine::bare(self.ground, nodes)?;
            let kva = machine.kva(&self.ground.cpus.cx())?;
            self.trace(
                &machine,
                &name,
                64,
                |_, _, _| (),
                |cx, _, ()| {
                    for _ in 0..64 {
                        let area = kva.alloc(cx, Request::new(16 << 10, "a pair")).expect("memory");
                        assert!(kva.free(cx, area).is_ok());
                    }
                },
            )?;
        }
        Ok(())
    }

    fn pool(&self) -> Result<()> {
        let name = "pool: a huge page taken and put back each";
        if !self.wants(name) {
            return Ok(());
        }
        let machine = Machine::bare(self.ground, 1)?;
        let (pool, frames, mut cx) = (machine.roots.pool, machine.roots.frames, self.ground.cpus.cx());
        struct Flat;
        // SAFETY: nothing is remembered.
        unsafe impl WalkCache for Flat {}
        let memory =
            hugemm::base::Extent::new(hugemm::base::Pfn::new(crate::machine::FIRST), crate::machine::MEMORY >> 12)
                .map_err(|error| anyhow!("{error}"))?;
        let start = std::ptr::with_exposed_provenance_mut(self.ground.base as usize);
        let start = std::ptr::NonNull::new(start).ok_or_else(|| anyhow!("mapped"))?;
        // SAFETY: all of memory is mapped there, for ever.
        let map = SoftMap::new(VirtAddr::new(0), &mut [], unsafe { FlatMemory::new(start, memory) }, Flat, Keep);
        // SAFETY: nothing is mapped by it.
        let optimizer = unsafe { VmemmapOptimizer::new(frames, &map, &[], Default::default()) };
        optimizer.set_enabled(false);
        pool.resize(&mut cx, &optimizer, 16, Nodes::All, &Never).map_err(|error| anyhow!("{error}"))?;
        self.trace(
            &machine,
            name,
            1,
            |_, _, _| (),
            |cx, _, ()| {
                let page: HugePage = pool.take(cx, Nodes::All, false).expect("a page");
                assert!(pool.put(cx, page, false).is_ok());
            },
        )
    }
}

/// A CPU's area in a space that both use.
fn area(cpu: u64) -> u64 {
    (1 << 42) + cpu * FAR
}

/// One of each class of the heap.
fn sizes_of_pieces() -> impl Iterator<Item = usize> {
    let large = (5..=10).flat_map(|log| [5, 6, 7, 8].map(|part| part << log)).filter(|size| *size <= 6144);
    [8].into_iter().chain((1..=8).map(|part| 16 * part)).chain(large)
}

/// Pages of 4 KiB.
fn small() -> VmaKind {
    VmaKind::private(PageSize::Size4K)
}

fn type_name_of<T>(_: &T) -> &'static str {
    type_name::<T>()
}

/// What is traced side by side, each by a program of its own; in the table's order.
pub(crate) const GROUPS: [&str; 7] = ["blocks", "faults", "space", "reclaim", "heap", "areas", "pool"];

/// Runs all pairs of a group that have `only` in their names.
pub(crate) fn run(group: &str, only: &str) -> Result<()> {
    let ground: &'static Ground = Box::leak(Box::new(Ground::new()?));
    say(&format!("marks\t{}", MARKS.as_ptr().addr()))?;
    let pairs = Pairs { ground, only };
    match group {
        "blocks" => pairs.blocks(),
        "faults" => {
            let on = |nodes| Machine::bare(ground, nodes);
            pairs.faults("a fault each in two spaces", on, 2, 2, FAR, true)?;
            pairs.faults("a fault each in one space, one area, tables far apart", on, 1, 1, FAR, false)?;
            pairs.faults("a fault each in one space, two areas, far apart", on, 1, 2, FAR, true)?;
            pairs.faults("a fault each in one space, two areas, two tables that adjoin", on, 1, 2, 1 << 30, false)
        }
        "space" => pairs.space(),
        "reclaim" => pairs.reclaim(),
        "heap" => pairs.heap(),
        "areas" => pairs.areas(),
        _ => pairs.pool(),
    }
}
