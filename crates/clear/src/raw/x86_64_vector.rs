//! x86-64 primitives on vector registers. Compiled only where the target has them (never on soft-float kernels), and
//! run only by callers who own the vector context.
//!
//! In `asm!` rather than intrinsics, so that exactly these encodings come out and no target feature need be enabled
//! around them. The zero register is made by a VEX-encoded `vpxor`, which zeroes it up to the widest width the CPU
//! has. `vzeroupper` at the end spares later SSE code the transition penalty (Intel SDM vol. 1, "Mixing AVX Code with
//! SSE Code"); it writes all of registers 0 to 15, so all are declared clobbered.

/// A primitive that stores `$store…`, one line.
macro_rules! vector_loop {
    ($(#[$doc:meta])* $name:ident: $($store:literal),+) => {
        line_loop! {
            $(#[$doc])*
            $name(ptr, end):
            "vpxor xmm0, xmm0, xmm0", "2:", $($store,)+ "add {p}, 64", "cmp {p}, {end}", "jne 2b", "vzeroupper",
            p = inout(reg) ptr => _, end = in(reg) end,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _
        }
    };
}

vector_loop! {
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes. The CPU has AVX2 and the system has enabled its state.
    avx2_store: "vmovdqa ymmword ptr [{p}], ymm0", "vmovdqa ymmword ptr [{p} + 32], ymm0"
}

vector_loop! {
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes. Streaming. The CPU has AVX2 and the system has enabled its state.
    avx2_stream: "vmovntdq ymmword ptr [{p}], ymm0", "vmovntdq ymmword ptr [{p} + 32], ymm0"
}

vector_loop! {
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes. Streaming. The CPU has AVX-512F and the system has enabled its
    /// state.
    avx512_stream: "vmovntdq zmmword ptr [{p}], zmm0"
}
