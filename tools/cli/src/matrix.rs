//! `hugemm probe --matrix`: how fast the CPUs of each node clear the memory of each node, by how many they are, how long they do
//! not reschedule under a cooperative model, and what somebody else's access to that memory takes meanwhile.

use crate::args::Probe;
use crate::clear;
use crate::document::Row;
use crate::interference::lines_in;
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::results::Results;
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Result, ensure};
use hugemm_base::{CancelFlag, CpuId, Never, NodeId, PageSize, PreemptModel};
use hugemm_clear::{ClearPolicy, Clearer};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_inspect::interrupt;
use hugemm_inspect::memory::Region;
use hugemm_inspect::topology::MachineTopology;
use hugemm_workloads::chase::Chase;
use hugemm_workloads::size::Size;
use std::sync::Barrier;

/// How long a neighbour is measured without any load.
const IDLE_NS: u64 = 20_000_000;

/// Memory of one node: what is cleared, and what a neighbour follows a random cycle through.
struct NodeMemory {
    /// The kernel's number of the node.
    node: u32,
    cleared: Region,
    chased: Region,
}

/// Some CPUs of one node, the memory of one node, and a CPU that uses that memory meanwhile.
struct Cell {
    /// The kernel's number of the CPUs' node.
    cpu_node: u32,
    /// Which of the nodes with memory.
    memory: usize,
    threads: usize,
    /// Those that clear, and then the neighbour, if a CPU is left.
    places: Vec<CpuPlace>,
}

pub fn run(args: &Probe, machine: &Machine) -> Result<()> {
    let size = match args.size {
        Some(size) => machine.whole_pages(size, PageSize::Size2M)?,
        None => GIB,
    };
    ensure!(size >= 64 << 20, "{} is too small to be cleared by several CPUs; use 64MB or more", Size(size));
    let mut memories = Vec::new();
    for node in machine.topology.nodes.iter().filter(|node| node.memory_bytes > 0).map(|node| node.id) {
        let cleared = machine.memory_on(size, args.kind, node)?;
        machine.note_region(format!("cleared, node {node}"), &cleared);
        let chased = machine.memory_on(machine.calibration_bytes() as u64, args.kind, node)?;
        memories.push(NodeMemory { node, cleared, chased });
    }
    let Some(first) = memories.first_mut() else { anyhow::bail!("no node with memory was found") };
    let profile = machine.profile(&args.calibration, first.chased.as_mut_slice())?.profile;
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;

    let nodes: Vec<u32> = memories.iter().map(|memory| memory.node).collect();
    let cells = cells(&machine.topology, &nodes);
    let repeat = Repeat { runs: args.runs, warmup: args.warmup.warmup };
    let bar = progress::bar((cells.len() * repeat.all()) as u64, machine.quiet());
    let mut measured = vec![<[Samples; 4]>::default(); cells.len()];
    for (index, counts) in repeat.turns(cells.len()) {
        interrupt::check()?;
        let cell = &cells[index];
        let memory = &mut memories[cell.memory];
        bar.set_message(format!("{} CPUs of node {}, memory of node {}", cell.threads, cell.cpu_node, memory.node));
        let figures = once(cell, memory, &clearer)?;
        if counts {
            measured[index].iter_mut().zip(figures).for_each(|(samples, figure)| {
                figure.into_iter().for_each(|figure| samples.push(figure));
            });
        }
        bar.inc(1);
    }
    bar.finish_and_clear();

    let mut lines = table::new([
        "CPUs of",
        "memory of",
        "CPUs",
        "GB/s",
        "longest unit",
        "neighbour alone",
        "beside it",
        "slowed by",
    ]);
    let mut rows = Vec::new();
    for (cell, [bandwidth, longest, alone, beside]) in cells.iter().zip(&measured) {
        let node = memories[cell.memory].node;
        let label = |row: Row| {
            row.label("cpu_node", cell.cpu_node).label("memory_node", node).label("threads", cell.threads as u64)
        };
        rows.push(label(Row::median("clear.matrix.bandwidth", bandwidth, "GB/s")));
        rows.push(label(Row::median("clear.matrix.worst_unit", longest, "ms")));
        let mut line = vec![
            format!("node {}", cell.cpu_node),
            format!("node {node}"),
            cell.threads.to_string(),
            table::gbps(bandwidth.median()),
            format!("{:.2} ms", longest.median()),
        ];
        if cell.places.len() > cell.threads {
            let slowed = beside.per_run_ratio(alone);
            line.extend([alone, beside].map(|samples| format!("{:.1} ns", samples.median())));
            line.push(format!("{:.2} ×", slowed.median()));
            rows.push(label(Row::median("clear.matrix.neighbour_alone", alone, "ns")));
            rows.push(label(Row::median("clear.matrix.neighbour_beside", beside, "ns")));
        }
        lines.add_row(line);
    }
    let intro = format!(
        "{} of each node's memory are cleared in one request, by the policy, under a cooperative model. A neighbour, a CPU of the\n\
         memory's node where one is left, follows a random cycle through {} there, a load\nafter the other. Median of {} runs.",
        Size(size),
        Size(machine.calibration_bytes() as u64),
        args.runs
    );
    let tables = vec![("Matrix".to_owned(), lines)];
    machine.show(Results { intro, tables, rows, ..Results::default() })
}

/// Every node's CPUs with every node's memory: 1, 2, 4… CPUs, and all.
fn cells(topology: &MachineTopology, memories: &[u32]) -> Vec<Cell> {
    let cpus = &topology.cpus;
    let place = |id: u32| CpuPlace { os_cpu: id, node: NodeId(0) };
    let mut cells = Vec::new();
    for cpu_node in topology.nodes.iter().map(|node| node.id) {
        // One CPU of each core before their siblings; the last first, since the first get most interrupts.
        let mut mine: Vec<_> = cpus.iter().rev().filter(|cpu| cpu.node == cpu_node).collect();
        mine.sort_by_key(|cpu| cpu.id != cpu.core);
        let counts = (0..usize::BITS).map(|log| 1 << log).take_while(|count| *count < mine.len());
        for threads in counts.chain((!mine.is_empty()).then_some(mine.len())) {
            for (memory, node) in memories.iter().enumerate() {
                let (used, _) = mine.split_at(threads);
                let idle = || cpus.iter().filter(|cpu| used.iter().all(|used| used.id != cpu.id));
                let shares_core = |id: u32| used.iter().any(|used| used.core == id);
                // Rather of the memory's node, and rather of a core that does nothing else.
                let neighbour = idle().min_by_key(|cpu| (cpu.node != *node, shares_core(cpu.core)));
                let places = used.iter().copied().chain(neighbour).map(|cpu| place(cpu.id)).collect();
                cells.push(Cell { cpu_node, memory, threads, places });
            }
        }
    }
    cells
}

/// GB/s of one clear, the longest time between reschedule points in ms, and a neighbour's ns per load without it and beside it.
fn once(cell: &Cell, memory: &mut NodeMemory, clearer: &Clearer) -> Result<[Option<f64>; 4]> {
    let bytes = memory.cleared.len() as u64;
    let host = Host::new(&cell.places, memory.cleared.as_mut_slice())?;
    host.set_preempt_model(PreemptModel::None);
    // SAFETY: the only owner of this host's frames.
    let dirty = unsafe { host.own_frames() };
    let threads = cell.threads as u32;
    let cleared = |dirty| {
        let (_, pass) = clear::once(&host, clearer, dirty, threads)?;
        anyhow::Ok([bytes as f64 / pass.nanos.max(1) as f64, pass.longest as f64 / 1e6])
    };
    if cell.places.len() == cell.threads {
        let [gbps, longest] = cleared(dirty)?;
        return Ok([Some(gbps), Some(longest), None, None]);
    }
    let chase = Chase::new(lines_in(memory.chased.as_mut_slice()), 0x9e37_79b9);
    let (done, start) = (CancelFlag::new(), Barrier::new(2));
    let per_step = |(steps, nanos): (u64, u64)| nanos as f64 / steps.max(1) as f64;
    std::thread::scope(|scope| {
        let neighbour = scope.spawn(|| {
            host.run_on(CpuId(threads), |_| {
                let alone = per_step(chase.run(&host, IDLE_NS, &Never));
                start.wait();
                (alone, per_step(chase.run(&host, u64::MAX, &done)))
            })
        });
        start.wait();
        let figures = cleared(dirty);
        done.raise();
        let (alone, beside) = neighbour.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let [gbps, longest] = figures?;
        Ok([gbps, longest, alone, beside].map(Some))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_inspect::roots::Roots;
    use hugemm_inspect::topology::{Caches, HostCpu, HostNode, PageSizes};

    /// Two nodes of two cores of two CPUs each, and a node of memory alone.
    fn two_nodes() -> MachineTopology {
        // Siblings have adjoining numbers: the last two CPUs of a node are one core.
        let cpu = |id: u32| HostCpu { id, node: id / 4, core: id / 2 * 2, package: 0 };
        let node = |id: u32| HostNode { id, cpus: vec![], memory_bytes: 1, distances: vec![] };
        MachineTopology {
            cpus: (0..8).map(cpu).collect(),
            online: 8,
            nodes: (0..3).map(node).collect(),
            caches: Caches::default(),
            page_sizes: PageSizes::read(&Roots::below("/nonexistent".as_ref())),
        }
    }

    #[test]
    fn every_nodes_cpus_meet_every_nodes_memory() {
        let topology = two_nodes();
        let cells = cells(&topology, &[0, 1, 2]);
        let seen: Vec<_> = cells.iter().map(|cell| (cell.cpu_node, cell.memory, cell.threads)).collect();
        let all = (0..2)
            .flat_map(|cpu| [1, 2, 4].into_iter().flat_map(move |threads| (0..3).map(move |m| (cpu, m, threads))));
        assert_eq!(seen, all.collect::<Vec<_>>());
        let of = |id: u32| topology.cpus.iter().find(|cpu| cpu.id == id).expect("a CPU");
        for cell in &cells {
            let (used, neighbour) = cell.places.split_at(cell.threads);
            assert!(used.iter().all(|place| of(place.os_cpu).node == cell.cpu_node));
            // Two CPUs are two cores.
            let mut cores: Vec<u32> = used.iter().map(|place| of(place.os_cpu).core).collect();
            cores.sort_unstable();
            cores.dedup();
            assert_eq!(cores.len(), cell.threads.min(2));
            let [neighbour] = neighbour else { panic!("one neighbour") };
            assert!(used.iter().all(|place| place.os_cpu != neighbour.os_cpu));
            let free = cell.cpu_node != cell.memory as u32 || cell.threads < 4;
            if cell.memory < 2 && free {
                assert_eq!(of(neighbour.os_cpu).node, cell.memory as u32, "near the memory");
            }
            assert!(
                cores.len() == 2 && of(neighbour.os_cpu).node == cell.cpu_node
                    || !cores.contains(&of(neighbour.os_cpu).core)
            );
        }
    }
}
