//! Whom an allocation asks that finds nothing.

use crate::{AllocError, AllocResult};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// At least so many pages are asked for.
pub(crate) const MIN_RECLAIM_PAGES: usize = 16;
/// So often at most.
pub(crate) const MAX_RECLAIM_ATTEMPTS: usize = 4;

/// Gives up pages, about as many as it is told, and says how many.
pub type PageReclaimFn = fn(num_pages: usize) -> usize;

/// A [`PageReclaimFn`], or null.
static RECLAIM: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
/// Whether it is at work.
static RECLAIMING: AtomicBool = AtomicBool::new(false);

/// Who is asked from here on when there is no memory. It must neither allocate nor wait.
pub fn register_page_reclaim_fn(f: PageReclaimFn) {
    // Release pairs with the Acquire in `try_page_reclaim`.
    RECLAIM.store(f as *mut (), Ordering::Release);
}

/// Asks for pages to be given up; says how many were. None while somebody else asks, or if nobody is registered.
pub fn try_page_reclaim(num_pages: usize) -> usize {
    let f = RECLAIM.load(Ordering::Acquire);
    // Acquire pairs with the Release below: one at a time.
    if f.is_null() || RECLAIMING.swap(true, Ordering::Acquire) {
        return 0;
    }
    // SAFETY: not null, so what `register_page_reclaim_fn` has stored.
    let f = unsafe { core::mem::transmute::<*mut (), PageReclaimFn>(f) };
    let given = f(num_pages);
    RECLAIMING.store(false, Ordering::Release);
    given
}

/// Tries again after `reclaim` has been asked, as long as it gives up something; once more if it gives up nothing, for others may have.
#[inline]
pub(crate) fn retry_after_page_reclaim<T>(
    target_pages: usize,
    mut attempt: impl FnMut() -> AllocResult<T>,
    mut reclaim: impl FnMut(usize) -> usize,
) -> AllocResult<T> {
    let mut result = attempt();
    for _ in 0..MAX_RECLAIM_ATTEMPTS {
        if !matches!(result, Err(AllocError::NoMemory)) {
            break;
        }
        let given = reclaim(target_pages.max(MIN_RECLAIM_PAGES));
        result = attempt();
        if given == 0 {
            break;
        }
    }
    result
}
