//! Primitives that this CPU lacks, bit-exact: their real encodings run into the CPU's invalid-opcode fault and are
//! carried out by a signal handler. This proves the code that ships byte by byte, not the silicon's timing or ordering.
//!
//! The emulator is proved in turn: its decoder against an independent encoder and decoder over every operand form, its
//! reading of vector registers against known values, and all of it by taking the CPU's place over instructions that
//! the CPU does have.

#![cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]

mod checks;
mod emulate;

use checks::{PAGE, clear, every_length_and_alignment, whole_pages};
use emulate::Emulator;
use emulate::decode::{Op, decode};
use hugemm_clear::features::Features;
use hugemm_clear::primitive::Primitive;
use iced_x86::{Code, Encoder, Instruction, MemoryOperand, Register};
use proptest::prelude::*;

#[repr(align(64))]
struct Lines([u8; PAGE]);

/// The primitives to emulate: compiled in, each one instruction per line, but not reported by the CPU.
fn lacking() -> Vec<Primitive> {
    let here = Features::detect();
    [Primitive::Clzero, Primitive::Movdir64b, Primitive::Avx512Stream]
        .into_iter()
        .filter(|&p| !here.contains(p))
        // The zero register is made by an AVX instruction, which is not emulated.
        .filter(|&p| p != Primitive::Avx512Stream || here.contains(Primitive::Avx2Stream))
        .collect()
}

/// Whether the CPU refuses `p`; one may run an instruction that its hypervisor does not report.
fn refused(p: Primitive, emulator: &Emulator) -> bool {
    let mut memory = Lines([0xFF; PAGE]);
    let before = emulator.count();
    // SAFETY: the line is owned and aligned, and the handler carries out what the CPU refuses.
    unsafe { clear(p, memory.0.as_mut_ptr(), 64) };
    assert!(memory.0[..64].iter().all(|&b| b == 0) && memory.0[64..].iter().all(|&b| b == 0xFF), "{p}");
    match emulator.count() - before {
        0 => {
            println!("{p}: this CPU runs it although it does not report it; not emulated");
            false
        }
        n => {
            assert_eq!(n, 1, "{p}");
            true
        }
    }
}

#[test]
fn lacking_primitives_are_bit_exact() {
    let emulator = Emulator::install();
    for p in lacking() {
        let expected_per_line = usize::from(refused(p, &emulator));
        for check in [every_length_and_alignment, |p| whole_pages(p, 127)] {
            let before = emulator.count();
            let cleared = check(p);
            let emulated = emulator.count() - before;
            assert_eq!(emulated, cleared / 64 * expected_per_line, "{p}: instructions per line");
            println!("{p}: {cleared} bytes cleared by {emulated} emulated instructions");
        }
    }
}

/// The emulator in the place of a CPU that has the instruction leaves the same memory, and is asked exactly once per
/// store.
#[test]
fn emulator_in_place_of_the_cpu() {
    let emulator = Emulator::install();
    let here = Features::detect();
    for (p, stores_per_line) in [(Primitive::Clzero, 1), (Primitive::Avx2Stream, 2), (Primitive::Movdir64b, 1)] {
        if !here.contains(p) {
            continue;
        }
        for (first, lines) in [(0, 64), (1, 1), (3, 20), (63, 1), (5, 0)] {
            let run = first * 64..(first + lines) * 64;
            let (mut native, mut stepped) = (Lines([0xFF; PAGE]), Lines([0xFF; PAGE]));
            let before = emulator.count();
            // SAFETY: the lines are owned and aligned, and the CPU has the primitive.
            unsafe { clear(p, native.0[run.clone()].as_mut_ptr(), run.len()) };
            assert_eq!(emulator.count(), before, "{p}: the CPU has it, yet it faulted");
            let ptr = stepped.0[run.clone()].as_mut_ptr();
            // SAFETY: as above; the handler of this emulator is installed.
            emulator.instead_of_the_cpu(|| unsafe { clear(p, ptr, run.len()) });
            assert_eq!(emulator.count() - before, lines * stores_per_line, "{p}");
            assert!(native.0 == stepped.0, "{p}: lines {first}, {lines}");
        }
    }
}

/// The handler reads the registers that the program had, not zeros that happen to be right.
#[test]
fn emulator_stores_the_register() {
    let here = Features::detect();
    if here.contains(Primitive::Avx512Stream) || !here.contains(Primitive::Avx2Stream) {
        println!("not run: it takes a CPU with AVX2 and without AVX-512");
        return;
    }
    let emulator = Emulator::install();
    let source: [u8; 32] = core::array::from_fn(|i| i as u8 + 1);
    let mut memory = Lines([0xFF; PAGE]);
    // SAFETY: the line is owned and aligned; xmm5 and xmm13 are declared; the handler carries out the refused store.
    unsafe {
        core::arch::asm!(
            "vmovdqu ymm5, ymmword ptr [{src}]",
            "vmovdqu ymm13, ymmword ptr [{src}]",
            "vmovntdq zmmword ptr [{dst}], zmm5",
            "vmovntdq zmmword ptr [{dst} + 128], zmm13",
            "vzeroupper",
            src = in(reg) source.as_ptr(), dst = in(reg) memory.0.as_mut_ptr(),
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
            out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
        );
    }
    assert_eq!(emulator.count(), 2);
    for at in [0, 128] {
        assert_eq!(memory.0[at..at + 32], source);
        assert!(memory.0[at + 32..at + 64].iter().all(|&b| b == 0));
        assert!(memory.0[at + 64..at + 128].iter().all(|&b| b == 0xFF));
    }
}

const RIP: u64 = 0x7F12_3456_7000;

const GENERAL: [Register; 16] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::RBX,
    Register::RSP,
    Register::RBP,
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
    Register::R12,
    Register::R13,
    Register::R14,
    Register::R15,
];

/// A memory operand of any 64-bit form: base, index and displacement each there or not, or relative to RIP.
fn operand() -> impl Strategy<Value = MemoryOperand> {
    let disp = prop_oneof![
        2 => Just(None),
        2 => (-128i64..128).prop_map(Some),
        2 => (-128i64..128).prop_map(|d| Some(d * 64)),
        1 => any::<i32>().prop_map(|d| Some(i64::from(d))),
    ];
    let register = || prop::option::of(prop::sample::select(&GENERAL[..]));
    let scale = prop::sample::select(vec![1u32, 2, 4, 8]);
    let indexed = (register(), register(), scale, disp).prop_map(|(base, index, scale, disp)| {
        let base = base.unwrap_or(Register::None);
        // RSP cannot be an index.
        let index = index.filter(|&r| r != Register::RSP).unwrap_or(Register::None);
        // Without a base the form always has 32 bits of displacement; without any register it is an absolute address.
        let size = match disp {
            None if base == Register::None => 8,
            None => 0,
            Some(_) if base == Register::None => 8,
            Some(_) => 1,
        };
        let scale = if index == Register::None { 1 } else { scale };
        MemoryOperand::new(base, index, scale, disp.unwrap_or(0), size, false, Register::None)
    });
    let relative = any::<i32>()
        .prop_map(|d| MemoryOperand::with_base_displ(Register::RIP, RIP.wrapping_add_signed(i64::from(d)) as i64));
    prop_oneof![8 => indexed, 1 => relative]
}

/// Encodes by one library, decodes by ours, and compares with that library's own decoding.
fn agree(instruction: &Instruction, gpr: &[u64; 16]) -> Result<(), TestCaseError> {
    let mut encoder = Encoder::new(64);
    let len = encoder.encode(instruction, RIP).map_err(|e| TestCaseError::reject(e.to_string()))? as u64;
    let code = encoder.take_buffer();
    let theirs = iced_x86::Decoder::with_ip(64, &code, RIP, 0).decode();
    prop_assert_eq!(theirs.code(), instruction.code());

    let read = |register: Register, _, _| Some(GENERAL.iter().position(|&r| r == register).map_or(0, |i| gpr[i]));
    let memory = if theirs.code() == Code::Movdir64b_r64_m512 { 1 } else { 0 };
    let address = theirs.virtual_address(memory, 0, read).unwrap();
    let expected = match theirs.code() {
        Code::Movdir64b_r64_m512 => Op::Movdir64b { dst: read(theirs.op0_register(), 0, 0).unwrap(), src: address },
        code => Op::Vmovntdq {
            dst: address,
            reg: theirs.op1_register().number() as u8,
            bytes: if code == Code::EVEX_Vmovntdq_m512_zmm { 64 } else { 32 },
        },
    };
    // Fetching past the end panics: the decoder must not read there.
    let ours = decode(&|at| code[(at - RIP) as usize], RIP, gpr);
    let ours = ours.ok_or_else(|| TestCaseError::fail(format!("not decoded: {theirs} {code:02x?}")))?;
    prop_assert_eq!(ours.op, expected, "{} {:02x?}", theirs, code);
    prop_assert_eq!(ours.len, len);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decoder_agrees_on_evex_vmovntdq(memory in operand(), reg in 0u32..32, gpr: [u64; 16]) {
        let i = Instruction::with2(Code::EVEX_Vmovntdq_m512_zmm, memory, Register::ZMM0 + reg).unwrap();
        agree(&i, &gpr)?;
    }

    #[test]
    fn decoder_agrees_on_vex_vmovntdq(memory in operand(), reg in 0u32..16, gpr: [u64; 16]) {
        let i = Instruction::with2(Code::VEX_Vmovntdq_m256_ymm, memory, Register::YMM0 + reg).unwrap();
        agree(&i, &gpr)?;
    }

    #[test]
    fn decoder_agrees_on_movdir64b(memory in operand(), reg in 0u32..16, gpr: [u64; 16]) {
        let i = Instruction::with2(Code::Movdir64b_r64_m512, Register::RAX + reg, memory).unwrap();
        agree(&i, &gpr)?;
    }

    /// Whatever ours takes for one of its instructions, the other decoder takes for the same.
    #[test]
    fn decoder_takes_nothing_else(
        start in prop::sample::select(vec![
            &[0x62u8][..], &[0x62, 0xF1, 0x7D, 0x48, 0xE7], &[0xC4], &[0xC4, 0xE1, 0x7D, 0xE7], &[0xC5, 0xFD, 0xE7],
            &[0xC5], &[0x66, 0x0F, 0x38, 0xF8], &[0x66], &[0x0F, 0x01], &[],
        ]),
        rest: [u8; 15],
        gpr: [u64; 16],
    ) {
        let code: Vec<u8> = start.iter().copied().chain(rest).take(15).collect();
        if let Some(ours) = decode(&|at| code[(at - RIP) as usize], RIP, &gpr) {
            let theirs = iced_x86::Decoder::with_ip(64, &code, RIP, 0).decode();
            let same = match ours.op {
                Op::Clzero { .. } => theirs.code() == Code::Clzeroq,
                Op::Movdir64b { .. } => theirs.code() == Code::Movdir64b_r64_m512,
                Op::Vmovntdq { bytes: 64, .. } => theirs.code() == Code::EVEX_Vmovntdq_m512_zmm,
                Op::Vmovntdq { .. } => theirs.code() == Code::VEX_Vmovntdq_m256_ymm,
            };
            prop_assert!(same, "{:?}, but {} {:02x?}", ours, theirs, code);
            prop_assert_eq!(ours.len, theirs.len() as u64);
        }
    }
}
