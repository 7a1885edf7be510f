//! Every primitive that this CPU runs, bit-exact, each forced in turn.
//!
//! For arm64 on another machine, under QEMU's user mode emulation (`dc zva` blocks of 512 bytes; of 64 with
//! `QEMU_CPU=cortex-a57`):
//!
//! ```text
//! CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=qemu-aarch64 \
//!     cargo test --target aarch64-unknown-linux-musl -p hugemm-clear --test rules primitives
//! ```

use hugemm_clear::features::Features;
use hugemm_clear::primitive::Primitive;
#[cfg(not(miri))]
use hugemm_clear::primitive::PrimitiveClass;
use hugemm_clear::raw;

/// What this CPU runs, and the model, which the raw layer runs as plain stores.
#[cfg(not(miri))]
fn runnable() -> Vec<Primitive> {
    // SAFETY: `raw::zero` runs the model as Portable.
    unsafe { Features::detect().with(Primitive::Model) }.iter().collect()
}

/// Plain heap memory and no system call, so that Miri can run it.
#[test]
fn portable_on_the_heap() {
    for p in [Primitive::Portable, Primitive::Model] {
        for words in [0usize, 1, 2, 7, 8, 9, 64, 511, 512] {
            for start in [1usize, 2, 8] {
                let mut memory = vec![!0u64; start + words + 1];
                let run = &mut memory[start..start + words];
                // SAFETY: the slice is owned, aligned to 8 bytes, and both run as plain stores anywhere.
                unsafe { raw::zero(p, run.as_mut_ptr().cast(), size_of_val(run)) };
                raw::store_fence();
                assert!(memory[..start].iter().all(|&w| w == !0));
                assert!(memory[start..start + words].iter().all(|&w| w == 0));
                assert_eq!(memory[start + words], !0);
            }
        }
    }
}

/// Primitives of another architecture are run as plain stores, not as garbage.
#[test]
fn foreign_primitives_fall_back() {
    #[repr(align(64))]
    struct Lines([[u64; 8]; 4]);

    use Primitive::*;
    let foreign: &[Primitive] = match cfg!(target_arch = "x86_64") {
        true => &[DcZva, Stnp],
        false => &[RepStosq, RepStosb, Movnti, Clzero, Movdir64b, Avx2Store, Avx2Stream, Avx512Stream],
    };
    for &p in foreign {
        let mut memory = Lines([[!0u64; 8]; 4]);
        // SAFETY: a primitive that is not compiled in is run as Portable; the line is owned and aligned.
        unsafe { raw::zero(p, memory.0[1].as_mut_ptr().cast(), 64) };
        raw::store_fence();
        assert_eq!(memory.0, [[!0; 8], [0; 8], [!0; 8], [!0; 8]], "{p}");
    }
}

#[test]
fn detection_finds_what_the_architecture_guarantees() {
    let found = Features::detect();
    assert!(found.contains(Primitive::Portable));
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        assert!(found.contains(Primitive::RepStosq) && found.contains(Primitive::Movnti));
        assert!(found.identity().is_some());
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        assert!(found.contains(Primitive::Stnp) && found.contains(Primitive::Unrolled));
    }
    println!("{:?} {:?}", found.identity(), found.iter().map(Primitive::name).collect::<Vec<_>>());
}

#[cfg(all(target_os = "linux", not(miri)))]
mod mapped {
    use super::*;
    use crate::checks::{Guarded, PAGE, clear, every_length_and_alignment, whole_pages};
    use crate::support::memory::{file, map};

    #[test]
    fn every_length_at_every_alignment() {
        for p in runnable() {
            every_length_and_alignment(p);
        }
    }

    #[test]
    fn page_multiples_between_guards() {
        for p in runnable() {
            whole_pages(p, 1024);
        }
    }

    /// With any one primitive hidden, as in a guest whose hypervisor masks it, the others still clear, and there is a
    /// cached one left.
    #[test]
    fn masked_features() {
        let memory = Guarded::new(1);
        let all = Features::detect();
        for hidden in Primitive::ALL {
            let left = all.without(hidden);
            assert!(hidden == Primitive::Portable || !left.contains(hidden));
            assert!(left.iter().any(|p| p.class() == PrimitiveClass::Cached));
            for p in left.iter() {
                // SAFETY: the page is owned and the CPU has what detection left in.
                unsafe {
                    memory.base().write_bytes(0xA5, PAGE);
                    clear(p, memory.base(), PAGE);
                    assert!((0..PAGE).all(|i| memory.base().add(i).read() == 0), "{p} without {hidden}");
                }
            }
        }
    }

    /// Lengths past 32 bits, on a few MiB of memory: 4 GiB of addresses that all lead to the same 2 MiB, and a last
    /// page of its own.
    #[test]
    fn lengths_past_4_gib() {
        const BLOCK: usize = 2 << 20;
        const REPEATED: usize = (4 << 30) + BLOCK;
        const LAST: usize = PAGE / 2;

        let fd = file(BLOCK + PAGE);
        let base = map(core::ptr::null_mut(), REPEATED + PAGE, -1, 0);
        for at in (0..REPEATED).step_by(BLOCK) {
            map(base.wrapping_add(at), BLOCK, fd, 0);
        }
        let last = map(base.wrapping_add(REPEATED), PAGE, fd, BLOCK);

        for p in runnable() {
            // 4 GiB exactly (0 in 32 bits), and 4 GiB and some (a small number in 32 bits), both ending mid-page.
            for len in [4usize << 30, REPEATED + LAST] {
                // SAFETY: the mappings are this test's own; start and length are multiples of 64.
                unsafe {
                    last.write_bytes(0x5A, PAGE);
                    clear(p, last.add(LAST).sub(len), len);
                    let last = core::slice::from_raw_parts(last, PAGE);
                    assert!(last[..LAST].iter().all(|&b| b == 0), "{p}: the end of {len} bytes was not cleared");
                    assert!(last[LAST..].iter().all(|&b| b == 0x5A), "{p}: wrote past {len} bytes");
                    let block = core::slice::from_raw_parts(base, BLOCK);
                    assert!(block.iter().all(|&b| b == 0), "{p}");
                }
            }
        }
        // SAFETY: the mappings and the descriptor are this test's own.
        unsafe {
            libc::munmap(base.cast(), REPEATED + PAGE);
            libc::close(fd);
        }
    }
}

/// The asm blocks write only the registers that they declare.
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
mod registers {
    use core::arch::asm;
    use core::hint::black_box;

    use super::*;

    #[repr(align(64))]
    struct Lines([u8; 4096]);

    /// Holds a value in one register, runs the primitive inlined, and looks at the register again. Where a block
    /// declares the register, the compiler moves the value out of its way; where it wrote it without declaring it, it
    /// shows. One register at a time: with more, the compiler would keep the values in memory.
    macro_rules! survives {
        ($p:ident, $value:expr, $($register:tt)+) => {$({
            let mut memory = Lines([0xFF; 4096]);
            let (ptr, len) = black_box((memory.0.as_mut_ptr(), 4096));
            let expected = $value;
            let mut held = black_box(expected);
            // SAFETY: the empty blocks only tie the value to the register; the lines are owned and aligned, and the
            // caller has asked for the primitive.
            unsafe {
                asm!("", inout($register) held, options(nomem, nostack, preserves_flags));
                raw::zero(Primitive::$p, ptr, len);
                asm!("", inout($register) held, options(nomem, nostack, preserves_flags));
            }
            raw::store_fence();
            assert_eq!(held, expected, "{}: {} changed", Primitive::$p, $register);
            assert!(memory.0.iter().all(|&b| b == 0), "{}", Primitive::$p);
        })+};
    }

    /// The same for the registers that hold the arguments.
    macro_rules! arguments_survive {
        ($p:ident) => {{
            let mut memory = Lines([0xFF; 4096]);
            let expected = (memory.0.as_mut_ptr(), 4096usize);
            let (mut ptr, mut len) = black_box(expected);
            // SAFETY: as in `survives`.
            unsafe {
                raw::zero(Primitive::$p, ptr, len);
                asm!("/* {} {} */", inout(reg) ptr, inout(reg) len, options(nostack, preserves_flags));
            }
            raw::store_fence();
            assert_eq!((ptr, len), expected, "{}: an argument's register changed", Primitive::$p);
        }};
    }

    macro_rules! registers_survive {
        ($($p:ident),+) => {$(
            if Features::detect().contains(Primitive::$p) {
                arguments_survive!($p);
                survives!($p, 0x0123_4567_89AB_CDEFu64,
                    "rax" "rcx" "rdx" "rsi" "rdi" "r8" "r9" "r10" "r11" "r12" "r13" "r14" "r15");
                survives!($p, 1.5f64,
                    "xmm0" "xmm1" "xmm2" "xmm3" "xmm4" "xmm5" "xmm6" "xmm7"
                    "xmm8" "xmm9" "xmm10" "xmm11" "xmm12" "xmm13" "xmm14" "xmm15");
            }
        )+};
    }

    #[test]
    fn undeclared_registers_survive_inlined_stores() {
        registers_survive!(
            Portable,
            Unrolled,
            RepStosq,
            RepStosb,
            Avx2Store,
            Movnti,
            Clzero,
            Avx2Stream,
            Avx512Stream,
            Movdir64b
        );
    }

    extern "C" fn called(p: Primitive, ptr: *mut u8, len: usize) {
        // SAFETY: the test passes owned, aligned lines and a primitive that the CPU has.
        unsafe { raw::zero(p, ptr, len) };
    }

    /// The registers that a callee must keep, among them the two that `asm!` cannot name, survive a call.
    #[test]
    fn callee_saved_registers_survive_a_call() {
        for p in runnable() {
            let mut memory = Lines([0xFF; 4096]);
            let keep: [u64; 4] = black_box([0xB0B0, 0xC1C1, 0xD2D2, 0xE3E3].map(|x: u64| x << 32 | 0x7777));
            let (bx, bp): (u64, u64);
            let mut after = keep;
            // SAFETY: rbx and rbp are saved and restored around the call; the two pushes keep the stack aligned; the
            // rest is declared.
            unsafe {
                asm!(
                    "push rbx",
                    "push rbp",
                    "mov rbx, r12",
                    "not rbx",
                    "mov rbp, r13",
                    "not rbp",
                    "call {f}",
                    "mov rax, rbx",
                    "mov rcx, rbp",
                    "pop rbp",
                    "pop rbx",
                    f = sym called,
                    in("rdi") p as u64, in("rsi") memory.0.as_mut_ptr(), in("rdx") memory.0.len(),
                    out("rax") bx, out("rcx") bp,
                    inout("r12") after[0], inout("r13") after[1], inout("r14") after[2], inout("r15") after[3],
                    clobber_abi("C"),
                );
            }
            raw::store_fence();
            assert_eq!(after, keep, "{p}");
            assert_eq!((bx, bp), (!keep[0], !keep[1]), "{p}");
            assert!(memory.0.iter().all(|&b| b == 0), "{p}");
        }
    }
}
