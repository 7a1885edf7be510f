//! The pairs: an operation as CPU 0, then the same or its partner as CPU 1, on memory that is warm.

mod memory;
mod reclaim;
mod spaces;

use crate::machine::{CPUS, Cpus, Ground, Machine, Site, span};
use anyhow::Result;
use hugemm::base::{CpuCx, Never, PageSize};
use hugemm::vm::{AddressSpaceRef, Backing, Vm, VmaKind};
use hugemm_threads::run_as;
use std::any::type_name;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU8, Ordering};

/// A task's context.
pub(crate) type Context = CpuCx<'static, Cpus>;

/// Stored to where a window begins, and where it ends.
static MARKS: [AtomicU8; 2] = [const { AtomicU8::new(0) }; 2];

/// Rounds before the one that is traced.
const WARM: u64 = 3;

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
}

/// A CPU's area in a space that both use.
fn area(cpu: u64) -> u64 {
    (1 << 42) + cpu * FAR
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
