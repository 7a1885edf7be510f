//! What the compiler makes of the fast paths, read back from this program's own machine code and held against the table
//! in `golden/fast_paths.txt`.
//!
//! A *hit* is a way through a function, from its entry to a return, on which nothing is called: what misses goes to a
//! function of its own. Of all such ways the worst figure in each column counts. Only an optimised build is judged:
//! `cargo test --release -p hugemm-frames --test codegen -- --nocapture` prints the table as it is.

#![cfg(all(target_arch = "x86_64", target_os = "linux", not(miri), not(loom)))]

use hugemm_base::platform::{Cpu, PreemptModel};
use hugemm_base::{Counters, CpuCx, CpuId, Order};
use hugemm_frames::{AllocRequest, FolioRef, Frames, Frozen};
use iced_x86::{Decoder, FlowControl, Instruction, InstructionInfoFactory, OpAccess, OpKind};
use std::collections::HashMap;
use std::fmt;

/// A platform whose pin is one load, as a kernel's is one load relative to its per-CPU segment.
struct Machine {
    cpu: CpuId,
    counters: Counters,
}

// SAFETY: nothing here ever runs; the code is only read.
unsafe impl Cpu for Machine {
    #[inline]
    fn current(&self) -> CpuId {
        self.cpu
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        0
    }

    #[inline]
    unsafe fn unpin(&self, _state: usize) {}

    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::Full
    }

    unsafe fn cond_resched(&self) {}

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

type Cx<'a> = CpuCx<'a, Machine>;

const NINE: Order = match Order::new(9) {
    Ok(order) => order,
    Err(_) => Order::ZERO,
};

// The probes are never called; only read. One word in, one word out, so that the way in and out costs nothing.

#[inline(never)]
fn alloc_order_0(frames: &Frames<'_>, cx: &Cx<'_>) -> Option<Frozen> {
    frames.alloc(cx, AllocRequest::order(Order::ZERO)).ok()
}

#[inline(never)]
fn alloc_order_9(frames: &Frames<'_>, cx: &Cx<'_>) -> Option<Frozen> {
    frames.alloc(cx, AllocRequest::order(NINE)).ok()
}

#[inline(never)]
fn alloc_any_order(frames: &Frames<'_>, cx: &Cx<'_>, order: Order) -> Option<Frozen> {
    frames.alloc(cx, AllocRequest::order(order)).ok()
}

#[inline(never)]
fn free_any_order(frames: &Frames<'_>, cx: &Cx<'_>, block: Frozen) {
    frames.free(cx, block);
}

#[inline(never)]
fn count(frames: &Frames<'_>, block: Frozen) -> bool {
    frames.count(block).is_ok()
}

#[inline(never)]
fn put(frames: &Frames<'_>, cx: &Cx<'_>, folio: FolioRef) -> bool {
    frames.put(cx, folio).is_ok()
}

fn probes() -> [(&'static str, usize); 6] {
    [
        ("alloc_order_0", alloc_order_0 as *const () as usize),
        ("alloc_order_9", alloc_order_9 as *const () as usize),
        ("alloc_any_order", alloc_any_order as *const () as usize),
        ("free_any_order", free_any_order as *const () as usize),
        ("count", count as *const () as usize),
        ("put", put as *const () as usize),
    ]
}

/// What a way through a function costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    branches: u32,
    loads: u32,
    stores: u32,
    atomics: u32,
}

impl Cost {
    fn plus(self, other: Cost) -> Cost {
        Cost {
            branches: self.branches + other.branches,
            loads: self.loads + other.loads,
            stores: self.stores + other.stores,
            atomics: self.atomics + other.atomics,
        }
    }

    fn worst(self, other: Cost) -> Cost {
        Cost {
            branches: self.branches.max(other.branches),
            loads: self.loads.max(other.loads),
            stores: self.stores.max(other.stores),
            atomics: self.atomics.max(other.atomics),
        }
    }

    fn is_within(self, bound: Cost) -> bool {
        self.worst(bound) == bound
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:8}  {:5}  {:6}  {:7}", self.branches, self.loads, self.stores, self.atomics)
    }
}

fn cost_of(instruction: &Instruction, factory: &mut InstructionInfoFactory) -> Cost {
    let mut cost = Cost::default();
    match instruction.flow_control() {
        FlowControl::ConditionalBranch => cost.branches = 1,
        FlowControl::Return => return cost,
        _ => {}
    }
    for memory in factory.info(instruction).used_memory() {
        match memory.access() {
            OpAccess::Read | OpAccess::CondRead => cost.loads += 1,
            OpAccess::Write | OpAccess::CondWrite => cost.stores += 1,
            OpAccess::ReadWrite | OpAccess::ReadCondWrite => {
                cost.loads += 1;
                cost.stores += 1;
            }
            _ => {}
        }
    }
    let exchange = instruction.mnemonic() == iced_x86::Mnemonic::Xchg
        && (0..instruction.op_count()).any(|op| instruction.op_kind(op) == OpKind::Memory);
    cost.atomics = u32::from(instruction.has_lock_prefix() || exchange);
    cost
}

/// How far from its entry a probe can reach: what is beyond belongs to another function.
const REACH: u64 = 2048;

/// This program's code from `entry` on.
fn code(entry: usize) -> &'static [u8] {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux has it");
    let parse = |line: &str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
    };
    let (_, to) = maps.lines().filter_map(parse).find(|&(from, to)| (from..to).contains(&entry)).expect("mapped");
    // SAFETY: the kernel says that these bytes are mapped; code is readable and nobody writes it.
    unsafe { core::slice::from_raw_parts(entry as *const u8, (to - entry).min(REACH as usize)) }
}

/// The ways through one function.
struct Ways {
    entry: u64,
    code: &'static [u8],
    factory: InstructionInfoFactory,
    /// What is known from an address on; `None` while it is being found out, so that ways that loop do not count.
    known: HashMap<u64, Option<Cost>>,
}

impl Ways {
    fn of(entry: usize) -> Self {
        let (code, factory) = (code(entry), InstructionInfoFactory::new());
        Ways { entry: entry as u64, code, factory, known: HashMap::new() }
    }

    /// The worst cost of all ways from `ip` to a return on which nothing is called; `None` if there is no such way.
    fn worst(&mut self, ip: u64) -> Option<Cost> {
        if ip < self.entry || ip - self.entry >= REACH {
            return None;
        }
        if let Some(known) = self.known.get(&ip) {
            return *known;
        }
        self.known.insert(ip, None);
        let instruction = Decoder::with_ip(64, &self.code[(ip - self.entry) as usize..], ip, 0).decode();
        assert!(!instruction.is_invalid(), "no instruction at {ip:#x}");
        let (next, target) = (instruction.next_ip(), instruction.near_branch_target());
        let rest = match instruction.flow_control() {
            FlowControl::Next => self.worst(next),
            FlowControl::UnconditionalBranch => self.worst(target),
            FlowControl::ConditionalBranch => match (self.worst(next), self.worst(target)) {
                (Some(a), Some(b)) => Some(a.worst(b)),
                (a, b) => a.or(b),
            },
            FlowControl::Return => Some(Cost::default()),
            // Calls miss; indirect jumps and traps are not ways to a return.
            _ => None,
        };
        let cost = rest.map(|rest| rest.plus(cost_of(&instruction, &mut self.factory)));
        self.known.insert(ip, cost);
        cost
    }
}

/// The table: a bound for each operation.
fn golden() -> Vec<(&'static str, Cost)> {
    let lines = include_str!("golden/fast_paths.txt").lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next().expect("a name");
            let mut number = || words.next().and_then(|word| word.parse().ok()).expect("four numbers");
            (name, Cost { branches: number(), loads: number(), stores: number(), atomics: number() })
        })
        .collect()
}

#[test]
#[cfg_attr(debug_assertions, ignore = "judged with --release")]
fn fast_paths_cost_no_more_than_the_table_says() {
    let golden = golden();
    let mut wrong = Vec::new();
    println!("# operation      branches  loads  stores  atomics");
    for (name, entry) in probes() {
        let found = Ways::of(entry).worst(entry as u64);
        let Some(found) = found else { panic!("{name}: every way through it calls something") };
        println!("{name:15}  {found}");
        match golden.iter().find(|(golden, _)| *golden == name) {
            Some((_, bound)) if found.is_within(*bound) => {}
            Some((_, bound)) => wrong.push(format!("{name}: {found}\n  allowed: {bound}")),
            None => wrong.push(format!("{name}: not in the table")),
        }
    }
    for (name, _) in &golden {
        assert!(probes().iter().any(|(probe, _)| probe == name), "{name} is in the table and not in the test");
    }
    assert!(wrong.is_empty(), "branches, loads, stores, atomics:\n{}", wrong.join("\n"));
}
