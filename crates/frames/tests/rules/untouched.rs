//! Which metadata a free reads: the manager's memory is made unreadable, and each page that is touched all the same is
//! counted and given back. A free of 1 GiB that looked at its frames one by one would touch 256 pages of descriptors per
//! 16384 frames, or every one of its 512 blocks.

use crate::support::{Memory, Threads, arena, extent, release};
use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuCx, Order};
use hugemm_frames::{AllocRequest, Frames, FramesConfig, Frozen, Plain};
use std::alloc::Layout;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: usize = 4096;

/// The watched memory. Set before it is made unreadable.
static START: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
static TOUCHED: AtomicUsize = AtomicUsize::new(0);

/// Makes the page readable again and counts it. A fault elsewhere gets what it would have got.
extern "C" fn touched(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel's own, for this signal.
    let at = unsafe { (*info).si_addr() } as usize;
    let start = START.load(Ordering::Relaxed);
    if at.wrapping_sub(start) >= BYTES.load(Ordering::Relaxed) {
        // SAFETY: async-signal-safe; the access faults again, and ends the test.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        return;
    }
    TOUCHED.fetch_add(1, Ordering::Relaxed);
    protect(at & !(PAGE - 1), PAGE, libc::PROT_READ | libc::PROT_WRITE);
}

fn protect(at: usize, bytes: usize, rights: i32) {
    // SAFETY: whole pages of the memory under test, which a fault gives back before anybody reads or writes them.
    let result = unsafe { libc::mprotect(at as *mut libc::c_void, bytes, rights) };
    assert_eq!(result, 0);
}

/// How many pages of the manager's memory `f` touches.
fn pages_touched(f: impl FnOnce()) -> usize {
    let (start, bytes) = (START.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
    TOUCHED.store(0, Ordering::Relaxed);
    protect(start, bytes, libc::PROT_NONE);
    f();
    protect(start, bytes, libc::PROT_READ | libc::PROT_WRITE);
    TOUCHED.load(Ordering::Relaxed)
}

type Manager<'m> = Frames<'m, Plain<NoFaults>>;

/// Frees a frozen extent.
type Free = fn(&Manager<'_>, &mut CpuCx<'_, Threads>, Frozen);

#[test]
fn a_free_of_a_frozen_extent_does_not_look_at_its_frames() {
    let gib = 1_u64 << 18;
    let arenas = [arena(0, 4 * gib, 0)];
    let config = FramesConfig::new(&arenas, 1);
    let needed = Frames::<Plain>::required_bytes(&config).expect("valid");
    let whole = Layout::from_size_align(needed.size().next_multiple_of(PAGE), PAGE.max(needed.align())).expect("fits");
    let mut memory = Memory::new(whole);
    let bytes = memory.bytes();
    START.store(bytes.as_ptr() as usize, Ordering::Relaxed);
    BYTES.store(bytes.len(), Ordering::Relaxed);
    // SAFETY: a handler that only changes the rights of the watched pages, with an alternate signature that is asked for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = touched as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()), 0);
    }
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, 4 * gib));
    let threads: Threads = Threads::default();
    hugemm_threads::run_as(0);
    let mut cx = threads.cx();
    let ways: [(&str, Free); 4] = [
        ("free", |frames, cx, block| frames.free(cx, block)),
        ("free_extent", |frames, cx, block| {
            frames.free_extent(cx, block.into_dirty());
        }),
        ("free_zeroed", |frames, cx, block| {
            // SAFETY: there is no memory behind the numbers.
            let zero = unsafe { hugemm_base::Zeroed::assume_owned(block.into_dirty().into_extent()) };
            frames.free_zeroed(cx, zero);
        }),
        ("put", |frames, cx, block| {
            let folio = frames.count(block).expect("managed");
            assert!(frames.put(cx, folio).is_ok());
        }),
    ];
    let mut least = Vec::new();
    for shift in [9, 18] {
        let order = Order::new(shift).expect("valid");
        for (index, (name, free)) in ways.into_iter().enumerate() {
            let block = frames.alloc(&cx, AllocRequest::order(order)).expect("memory");
            let pages = pages_touched(|| free(&frames, &mut cx, block));
            assert!(pages > 0, "{name}: nothing is watched");
            match shift {
                9 => least.push(pages),
                // A block of 2 MiB may stay in a cache of the CPU: the node and its lists are some pages more.
                _ => assert!(pages <= least[index] + 12, "{name}: {pages} pages, {} for 2 MiB", least[index]),
            }
        }
    }
}
