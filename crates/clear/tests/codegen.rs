//! What the compiler makes of the choice of primitive, read back from this program's own machine code.
//!
//! The choice is a few direct, predictable branches and never an indirect jump or call; each leaf holds the encoding
//! it is named after; primitives for soft-float kernels touch no vector register. Only an optimised build is judged:
//! `cargo test --release -p hugemm-clear --test codegen`.

#![cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use hugemm_base::{CpuCx, SingleCpu, Unfenced};
use hugemm_clear::primitive::Primitive;
use hugemm_clear::raw;
use iced_x86::{Code, Decoder, FlowControl, Instruction, Mnemonic, OpKind, Register};

/// Conditional branches from the entry to the first store, at most: the depth of the tree, plus the test for an empty
/// run, which loops need.
const BRANCHES: usize = 5;

/// # Safety
/// As [`raw::zero`]. Never called; only read.
#[inline(never)]
unsafe extern "C" fn choose(p: Primitive, ptr: *mut u8, len: usize) {
    // SAFETY: the caller's promises.
    unsafe { raw::zero(p, ptr, len) }
}

/// Probes with the primitive fixed at compile time: the cost where no choice is left, and each leaf by itself.
macro_rules! fixed {
    ($($name:ident $p:ident),+) => {
        $(
            /// # Safety
            /// As [`raw::zero`]. Never called; only read.
            #[inline(never)]
            unsafe extern "C" fn $name(ptr: *mut u8, len: usize) {
                // SAFETY: the caller's promises.
                unsafe { raw::zero(Primitive::$p, ptr, len) }
            }
        )+
        const FIXED: &[(Primitive, unsafe extern "C" fn(*mut u8, usize))] = &[$((Primitive::$p, $name)),+];
    };
}

fixed!(portable Portable, unrolled Unrolled, rep_stosq RepStosq, rep_stosb RepStosb, avx2_store Avx2Store,
    movnti Movnti, clzero Clzero, avx2_stream Avx2Stream, avx512_stream Avx512Stream, movdir64b Movdir64b);

/// What was stored past the cache is published by a store, on a platform with the barriers that are provided. Never called; only
/// read.
#[inline(never)]
extern "C" fn publish(cpu: &SingleCpu, flag: &AtomicU64) {
    // SAFETY: never called.
    let cx = unsafe { CpuCx::new(cpu) };
    Unfenced::streaming(flag, &cx).fence().store(PUBLISHED, Ordering::Relaxed);
}

const PUBLISHED: u64 = 0x5eed;

/// The instructions that a primitive's leaf must hold: an opcode, and the bytes that must occur in its encoding.
fn signature(p: Primitive) -> Option<(Code, &'static [u8])> {
    Some(match p {
        Primitive::RepStosq => (Code::Stosq_m64_RAX, &[0xF3, 0x48, 0xAB]),
        Primitive::RepStosb => (Code::Stosb_m8_AL, &[0xF3, 0xAA]),
        Primitive::Avx2Store => (Code::VEX_Vmovdqa_ymmm256_ymm, &[0x7F]),
        Primitive::Movnti => (Code::Movnti_m64_r64, &[0x0F, 0xC3]),
        Primitive::Clzero => (Code::Clzeroq, &[0x0F, 0x01, 0xFC]),
        Primitive::Avx2Stream => (Code::VEX_Vmovntdq_m256_ymm, &[0xE7]),
        Primitive::Avx512Stream => (Code::EVEX_Vmovntdq_m512_zmm, &[0x62]),
        Primitive::Movdir64b => (Code::Movdir64b_r64_m512, &[0x0F, 0x38, 0xF8]),
        _ => return None,
    })
}

/// This program's executable code.
fn text() -> (u64, &'static [u8]) {
    let here = choose as *const () as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let parse = |line: &str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
    };
    let (from, to) = maps.lines().filter_map(parse).find(|&(from, to)| (from..to).contains(&here)).unwrap();
    // SAFETY: the kernel says that these bytes are mapped; code is readable and nobody writes it.
    (from as u64, unsafe { core::slice::from_raw_parts(from as *const u8, to - from) })
}

/// An instruction that a function can reach, and the least number of conditional branches on the way to it.
struct Reached {
    instruction: Instruction,
    branches: usize,
}

/// All instructions that `entry` reaches by falling through, direct jumps and direct calls, by address.
fn reach(entry: usize) -> BTreeMap<u64, Reached> {
    let (base, text) = text();
    let mut reached = BTreeMap::<u64, Reached>::new();
    // Cheapest first: free steps go to the front, steps that cost a branch to the back.
    let mut queue = VecDeque::from([(entry as u64, 0)]);
    while let Some((ip, branches)) = queue.pop_front() {
        if reached.get(&ip).is_some_and(|r| r.branches <= branches) {
            continue;
        }
        let code = usize::try_from(ip - base).ok().and_then(|at| text.get(at..)).expect("a jump out of the program");
        let instruction = Decoder::with_ip(64, code, ip, 0).decode();
        assert!(!instruction.is_invalid(), "no instruction at {ip:#x}");
        let next = instruction.next_ip();
        match instruction.flow_control() {
            FlowControl::Next => queue.push_front((next, branches)),
            FlowControl::UnconditionalBranch => queue.push_front((instruction.near_branch_target(), branches)),
            FlowControl::ConditionalBranch => {
                queue.push_back((next, branches + 1));
                queue.push_back((instruction.near_branch_target(), branches + 1));
            }
            FlowControl::Call => {
                queue.push_front((next, branches));
                queue.push_front((instruction.near_branch_target(), branches));
            }
            // Indirect ones are kept for the tests to find.
            _ => {}
        }
        reached.insert(ip, Reached { instruction, branches });
    }
    reached
}

fn listing(reached: &BTreeMap<u64, Reached>) -> String {
    reached.values().map(|r| format!("{:2} {:x} {}\n", r.branches, r.instruction.ip(), r.instruction)).collect()
}

fn bytes_of(i: &Instruction) -> &'static [u8] {
    let (base, text) = text();
    &text[(i.ip() - base) as usize..][..i.len()]
}

#[test]
#[cfg_attr(debug_assertions, ignore = "judged with --release")]
fn no_indirect_jump_or_call() {
    let probes = FIXED.iter().map(|&(p, f)| (p.name(), f as *const () as usize));
    for (name, entry) in probes.chain([("choose", choose as *const () as usize)]) {
        let reached = reach(entry);
        for r in reached.values() {
            let flow = r.instruction.flow_control();
            let direct = matches!(
                flow,
                FlowControl::Next
                    | FlowControl::Return
                    | FlowControl::UnconditionalBranch
                    | FlowControl::ConditionalBranch
                    | FlowControl::Call
            );
            assert!(direct, "{name}: {} ({flow:?}) in\n{}", r.instruction, listing(&reached));
        }
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "judged with --release")]
fn every_leaf_is_there_within_the_bound() {
    let reached = reach(choose as *const () as usize);
    for p in Primitive::ALL {
        let Some((code, encoding)) = signature(p) else { continue };
        let first = reached.values().filter(|r| r.instruction.code() == code).min_by_key(|r| r.branches);
        let Some(first) = first else { panic!("{p}: no {code:?} in\n{}", listing(&reached)) };
        let bytes = bytes_of(&first.instruction);
        assert!(bytes.windows(encoding.len()).any(|w| w == encoding), "{p}: {bytes:02x?}");
        assert!(first.branches <= BRANCHES, "{p}: {} branches in\n{}", first.branches, listing(&reached));
        println!("{p}: {} branches, then {bytes:02x?}", first.branches);
    }
    let all = reached.values().filter(|r| r.instruction.flow_control() == FlowControl::ConditionalBranch).count();
    println!("{} instructions, {all} conditional branches in all", reached.len());
}

#[test]
#[cfg_attr(debug_assertions, ignore = "judged with --release")]
fn a_fixed_primitive_costs_no_choice() {
    for &(p, f) in FIXED {
        let reached = reach(f as *const () as usize);
        let branches =
            reached.values().filter(|r| r.instruction.flow_control() == FlowControl::ConditionalBranch).count();
        let expected = match p {
            Primitive::RepStosq | Primitive::RepStosb => 0,
            Primitive::Portable => usize::MAX, // the compiler's own loop, however it unrolls it
            _ => 2,                            // an empty run, and the loop
        };
        assert!(branches <= expected, "{p}: {branches} branches in\n{}", listing(&reached));
        if let Some((code, _)) = signature(p) {
            assert!(reached.values().any(|r| r.instruction.code() == code), "{p}: no {code:?}");
        }
    }
}

/// Every loop stores zeros to each byte of a line once, at a register that then moves on by a line, until it is at the end. The machine that
/// runs this has not all of these instructions, so their operands are read.
#[test]
#[cfg_attr(debug_assertions, ignore = "judged with --release")]
fn loops_store_whole_lines_of_zeros() {
    for &(p, f) in FIXED.iter().filter(|(p, _)| p.granule() == 64) {
        let reached = reach(f as *const () as usize);
        let all = || reached.values().map(|r| &r.instruction);
        let back = |i: &&Instruction| i.is_jcc_short_or_near() && i.near_branch_target() < i.ip();
        let last = all().find(back).unwrap_or_else(|| panic!("{p}: no loop in\n{}", listing(&reached)));
        let lines = all().filter(|i| i.ip() < last.ip());
        let (before, body): (Vec<&Instruction>, Vec<_>) = lines.partition(|i| i.ip() < last.near_branch_target());
        let [stores @ .., add, compare] = body.as_slice() else { panic!("{p}: no loop in\n{}", listing(&reached)) };
        let moved = add.op0_register();
        assert!(add.mnemonic() == Mnemonic::Add && add.immediate(1) == 64, "{p}: {add}");
        assert!(compare.mnemonic() == Mnemonic::Cmp && compare.op0_register() == moved, "{p}: {compare}");
        assert_eq!(last.mnemonic(), Mnemonic::Jne, "{p}: {last}");
        let zeroed = |register: Register| {
            let full = register.full_register();
            let written =
                before.iter().rfind(|i| i.op0_kind() == OpKind::Register && i.op0_register().full_register() == full);
            written.is_some_and(|i| {
                let sources = || (1..i.op_count()).map(|op| i.op_register(op).full_register());
                matches!(i.mnemonic(), Mnemonic::Xor | Mnemonic::Vpxor) && sources().all(|source| source == full)
            })
        };
        let mut stored = 0_u64;
        for store in stores {
            let (at, offset, bytes) = match store.code() {
                Code::Clzeroq => (Register::RAX, 0, 64),
                Code::Movdir64b_r64_m512 => {
                    let source = before.iter().rfind(|i| i.op0_register() == store.memory_base()).expect("a source");
                    assert!(source.is_ip_rel_memory_operand() && store.memory_displacement64() == 0, "{source}");
                    let at = source.ip_rel_memory_address() as *const u64;
                    let line = match source.mnemonic() {
                        Mnemonic::Lea => at,
                        // SAFETY: what the primitive reads: the place of the line.
                        _ => unsafe { at.read() as *const u64 },
                    };
                    // SAFETY: the primitive reads a line there.
                    let line = unsafe { line.cast::<[u64; 8]>().read() };
                    assert_eq!(line, [0; 8]);
                    (store.op0_register(), 0, 64)
                }
                _ => {
                    assert!(store.op0_kind() == OpKind::Memory && zeroed(store.op1_register()), "{p}: {store}");
                    (store.memory_base(), store.memory_displacement64(), store.memory_size().size())
                }
            };
            let bits = u64::MAX >> (64 - bytes) << offset;
            assert!(at == moved && stored & bits == 0 && store.memory_index() == Register::None, "{p}: {store}");
            stored |= bits;
        }
        assert_eq!(stored, u64::MAX, "{p} in\n{}", listing(&reached));
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "judged with --release")]
fn only_vector_primitives_touch_vector_registers() {
    for &(p, f) in FIXED {
        let reached = reach(f as *const () as usize);
        let touches = reached.values().any(|r| {
            let i = &r.instruction;
            (0..i.op_count()).any(|op| i.op_kind(op) == OpKind::Register && i.op_register(op).is_vector_register())
        });
        assert_eq!(touches, p.needs_vector(), "{p} in\n{}", listing(&reached));
    }
}

/// The optimiser leaves the fence that a platform is given where it belongs: on the only way to the store that publishes.
#[test]
#[cfg_attr(debug_assertions, ignore = "judged with --release")]
fn the_provided_store_fence_comes_before_what_publishes() {
    let reached = reach(publish as *const () as usize);
    let of = |is: &dyn Fn(&Instruction) -> bool| reached.values().find(|r| is(&r.instruction));
    let store = of(&|i| {
        i.op_count() == 2 && i.op0_kind() == OpKind::Memory && i.try_immediate(1).is_ok_and(|value| value == PUBLISHED)
    });
    let fence = of(&|i| i.code() == Code::Sfence);
    let (Some(store), Some(fence)) = (store, fence) else { panic!("{}", listing(&reached)) };
    assert_eq!((fence.branches, store.branches), (0, 0), "{}", listing(&reached));
    assert!(fence.instruction.ip() < store.instruction.ip(), "{}", listing(&reached));
}
