//! Faults, areas and pages of spaces without a pager.

use super::{Context, NODES, Pairs, Used, WARM, area, small};
use crate::machine::{Bare, Machine, Site, span};
use anyhow::Result;
use hugemm::base::{Never, PageSize, VirtAddr, VirtRange};
use hugemm::paging::Lookup;
use hugemm::vm::{Access, Backing, Protection, Served, VmaKind};

/// Pages of 2 MiB that are faulted in. Few, because each store of a clear is a line of the trace.
const HUGE: u64 = 8;

/// Something at an address, as a CPU.
type Work = fn(&Used<Bare>, &mut Context, u64, VirtRange);

/// A pair of one space: its name, of how many operations it is, where a CPU does it in a round, what comes before, and what is traced.
type Case = (&'static str, u64, fn(u64, u64) -> VirtRange, Work, Work);

const CASES: [Case; 12] = [
    (
        "a fault of 2 MiB each in one space, far apart, many",
        HUGE,
        |cpu, round| span(area(cpu) + (10 + round) * (1 << 30), HUGE << 21),
        |on, cx, cpu, at| {
            let kind = VmaKind::private(PageSize::Size2M);
            on.vm.map(cx, on.space(cpu), at, kind, Backing::Private).expect("an area");
        },
        |on, cx, cpu, at| {
            for page in 0..HUGE {
                let at = VirtAddr::new(at.start().get() + (page << 21));
                assert_eq!(on.vm.fault(cx, on.space(cpu), at, Access::Write), Ok(Served::Mapped));
            }
        },
    ),
    ("an area mapped each in one space, far apart", 1, beyond, nothing, Used::map),
    ("an area unmapped each in one space, far apart", 1, beyond, Used::touch, Used::unmap),
    (
        "a page unmapped each in one space, far apart",
        1,
        |cpu, round| pages(cpu, 2 * round + 1, 1),
        nothing,
        Used::unmap,
    ),
    (
        "a page unmapped in one space, a fault in another table",
        1,
        |cpu, round| pages(cpu, 512 * cpu + 2 * round + 1, 1),
        nothing,
        |on, cx, cpu, at| if cpu == 0 { on.unmap(cx, cpu, at) } else { on.fault(cx, cpu, at) },
    ),
    ("lookup of a page each in one space, far apart", 1, page, nothing, |on, cx, cpu, at| {
        assert!(matches!(on.vm.lookup(cx, on.space(cpu), at.start()), Lookup::Mapped(_)));
    }),
    ("find_vma of an area each in one space, far apart", 1, page, nothing, |on, cx, cpu, at| {
        on.space(cpu).find_vma(cx, at.start()).expect("an area");
    }),
    ("an area of 256 pages protected each in one space, far apart", 1, beyond, Used::fill, |on, cx, cpu, at| {
        on.vm.protect(cx, on.space(cpu), at, Protection::READ).expect("an area");
    }),
    ("64 bytes read each in one space, far apart", 1, page, nothing, |on, cx, cpu, at| {
        on.vm.read(cx, on.space(cpu), at.start(), &mut [0; 64]).expect("it is mapped");
    }),
    ("64 pages pinned each in one space, far apart", 1, some_pages, nothing, |on, cx, cpu, at| {
        let pinned = on.vm.pin(cx, on.space(cpu), at, Access::Write, None, &Never, std::mem::forget);
        assert_eq!(pinned.ok(), Some(64));
    }),
    (
        "the halves of 2 MiB prefaulted in one space, 4 KiB pages",
        256,
        |cpu, round| span(area(0) + (1 + round) * (2 << 20) + cpu * (1 << 20), 1 << 20),
        nothing,
        |on, cx, cpu, half| on.vm.prefault(on.space(cpu), half, Some(2 << 20)).work(cx, &Never).expect("memory"),
    ),
    (
        "2 MiB prefaulted each in one space, far apart, 4 KiB pages",
        512,
        |cpu, round| pages(cpu, 512 * (1 + round), 512),
        nothing,
        Used::prefault,
    ),
];

fn nothing(_: &Used<Bare>, _: &mut Context, _: u64, _: VirtRange) {}

/// Some of a CPU's pages.
fn pages(cpu: u64, first: u64, count: u64) -> VirtRange {
    span(area(cpu) + (first << 12), count << 12)
}

fn page(cpu: u64, round: u64) -> VirtRange {
    pages(cpu, round, 1)
}

fn some_pages(cpu: u64, round: u64) -> VirtRange {
    pages(cpu, 64 * round, 64)
}

/// Where a CPU has no area.
fn beyond(cpu: u64, round: u64) -> VirtRange {
    span(area(cpu) + (2 + round) * (1 << 30), 1 << 20)
}

impl Used<Bare> {
    fn map(&self, cx: &mut Context, cpu: u64, at: VirtRange) {
        self.vm.map(cx, self.space(cpu), at, small(), Backing::Private).expect("an area");
    }

    fn unmap(&self, cx: &mut Context, cpu: u64, at: VirtRange) {
        self.vm.unmap(cx, self.space(cpu), at).expect("an area, or a part of one");
    }

    fn fault(&self, cx: &mut Context, cpu: u64, at: VirtRange) {
        self.vm.fault(cx, self.space(cpu), at.start(), Access::Write).expect("memory");
    }

    fn prefault(&self, cx: &mut Context, cpu: u64, at: VirtRange) {
        self.vm.prefault(self.space(cpu), at, None).work(cx, &Never).expect("memory");
    }

    /// An area with a page.
    fn touch(&self, cx: &mut Context, cpu: u64, at: VirtRange) {
        self.map(cx, cpu, at);
        self.fault(cx, cpu, at);
    }

    /// An area with all its pages.
    fn fill(&self, cx: &mut Context, cpu: u64, at: VirtRange) {
        self.map(cx, cpu, at);
        self.prefault(cx, cpu, at);
    }
}

impl Pairs<'_> {
    /// Faults: `spaces`, `areas` and `tables` each 1 or 2; on one node and on two.
    pub(super) fn faults<S: Site>(
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

    pub(super) fn space(&self) -> Result<()> {
        let machine = |nodes| Machine::bare(self.ground, nodes);
        for (name, operations, place, before, traced) in CASES {
            let prepare = |on: &Used<_>, cx: &mut Context, cpu, round| {
                let at = place(cpu, round);
                before(on, cx, cpu, at);
                at
            };
            self.of_space(machine, name, operations, prepare, traced)?;
        }
        self.of_space(
            machine,
            "64 pages unpinned each in one space, far apart",
            1,
            |on, cx, cpu, round| {
                let (at, mut pins) = (some_pages(cpu, round), Vec::new());
                on.vm
                    .pin(cx, on.space(cpu), at, Access::Write, None, &Never, |pinned| pins.push(pinned))
                    .expect("memory");
                pins
            },
            |on, cx, cpu, pins| {
                for pinned in pins {
                    assert!(on.vm.unpin(cx, on.space(cpu), pinned).is_ok());
                }
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
                    |_, cpu, round| page(cpu, 513 + round).start(),
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
}
