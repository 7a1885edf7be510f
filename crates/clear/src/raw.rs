//! The stores themselves: one function that zeroes memory by a named primitive, and the fence that streaming
//! primitives need.
//!
//! Nothing here allocates, sleeps, takes a lock or keeps state, so all of it may be called from any context: with
//! interrupts off, from an interrupt handler, before other CPUs run. Nothing here bounds latency either: one call
//! stores the whole run it is given, and callers cut long runs into units.

/// Bytes per iteration of the loops, and the line size that CLZERO, MOVDIR64B and CLFLUSH work on.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
const LINE: usize = 64;

/// Defines a primitive that stores whole lines: a loop from `$ptr` to `$end`, in instructions and operands of `asm!`, which runs at least
/// once.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
macro_rules! line_loop {
    ($(#[$doc:meta])* $name:ident($ptr:ident, $end:ident): $($asm:tt)+) => {
        $(#[$doc])*
        #[inline]
        pub(super) unsafe fn $name($ptr: *mut u8, len: usize) {
            let bytes = len & !($crate::raw::LINE - 1);
            if bytes == 0 {
                return;
            }
            let $end = $ptr.wrapping_add(bytes);
            // SAFETY: the caller owns what lies between the two, a whole, non-zero number of lines, and promises what is said above.
            unsafe { core::arch::asm!($($asm)+, options(nostack)) }
        }
    };
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod aarch64;
mod portable;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64;
#[cfg(all(target_arch = "x86_64", target_feature = "sse2", not(miri)))]
mod x86_64_vector;

#[cfg(all(target_arch = "aarch64", not(miri)))]
pub(crate) use aarch64::dc_zva_block;

use crate::primitive::Primitive;

pub use hugemm_base::barriers::hardware_store_fence as store_fence;

/// Stores zeros to the `len` bytes from `ptr` by `p`, each byte at least once and none outside.
///
/// `len` is a full 64-bit count; 0 does nothing. The time is linear in `len`. `p` is chosen by direct compares and
/// branches, without a table: no indirect jump or call (which kernels turn into a retpoline), at most five conditional
/// branches, all predictable from one unit to the next, and none at all where `p` is a constant. A primitive that
/// this target was not compiled with is run as [`Primitive::Portable`].
///
/// Interruptible: `rep stos` keeps its progress in registers, the others are loops. A machine check or page fault on
/// the way is not handled.
///
/// # Safety
/// * This CPU has `p`, or a fault handler carries out its instructions ([`crate::features::Features::contains`]).
/// * `ptr..ptr + len` is mapped writable, write-back cacheable memory that the caller owns exclusively, and does not
///   wrap.
/// * `ptr` and `len` are multiples of [`Primitive::granule`].
/// * If [`Primitive::needs_vector`], the caller owns the CPU's vector registers (all of them: their upper halves are
///   zeroed at the end).
/// * If the class is [`Streaming`](crate::primitive::PrimitiveClass::Streaming), [`store_fence`] runs on this CPU before the
///   memory is published.
#[inline]
pub unsafe fn zero(p: Primitive, ptr: *mut u8, len: usize) {
    debug_assert!((ptr.addr() | len) & (p.granule() - 1) == 0, "ptr or len is no multiple of the granule");
    // SAFETY: the caller's promises are exactly those of the primitive chosen by the same `p`.
    unsafe { dispatch(p, ptr, len) }
}

// The trees below compare by `<` near the root on purpose. A `match`, or a chain of `==`, is one value tested against
// many constants to the compiler, and it would make a jump table of it; it does not turn ordered comparisons into one.
// tests/codegen.rs holds it to that.

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
unsafe fn dispatch(p: Primitive, ptr: *mut u8, len: usize) {
    // SAFETY: see `zero`; every leaf gets the caller's promises for that leaf's primitive.
    unsafe {
        if p < Primitive::FIRST_STREAMING {
            if p >= Primitive::RepStosb {
                if p == Primitive::RepStosb {
                    return x86_64::rep_stosb(ptr, len);
                }
                #[cfg(target_feature = "sse2")]
                if p == Primitive::Avx2Store {
                    return x86_64_vector::avx2_store(ptr, len);
                }
            } else if p >= Primitive::RepStosq {
                return x86_64::rep_stosq(ptr, len);
            } else if p == Primitive::Unrolled {
                return x86_64::unrolled(ptr, len);
            }
        } else if p < Primitive::Avx2Stream {
            if p == Primitive::Movnti {
                return x86_64::movnti(ptr, len);
            }
            return x86_64::clzero(ptr, len);
        } else if p < Primitive::Movdir64b {
            #[cfg(target_feature = "sse2")]
            {
                if p == Primitive::Avx2Stream {
                    return x86_64_vector::avx2_stream(ptr, len);
                }
                return x86_64_vector::avx512_stream(ptr, len);
            }
        } else if p == Primitive::Movdir64b {
            return x86_64::movdir64b(ptr, len);
        }
        portable::zero(ptr, len);
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[inline(always)]
unsafe fn dispatch(p: Primitive, ptr: *mut u8, len: usize) {
    // SAFETY: see `zero`; every leaf gets the caller's promises for that leaf's primitive.
    unsafe {
        if p < Primitive::FIRST_STREAMING {
            if p == Primitive::DcZva {
                return aarch64::dc_zva(ptr, len);
            }
            if p == Primitive::Unrolled {
                return aarch64::unrolled(ptr, len);
            }
        } else if p == Primitive::Stnp {
            return aarch64::stnp(ptr, len);
        }
        portable::zero(ptr, len);
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[inline(always)]
unsafe fn dispatch(_: Primitive, ptr: *mut u8, len: usize) {
    // SAFETY: see `zero`; the portable stores ask no more than any other primitive does.
    unsafe { portable::zero(ptr, len) }
}
