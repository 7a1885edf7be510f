//! In which order a folio is cleared: the part right of the first touch, the part left of it, and the touched page with
//! its two neighbours on either side last, so that these five pages are in the cache when the faulting task goes on
//! ("mm, folio_zero_user: support clearing page ranges"). The rule holds at every folio size.

use hugemm_base::{Clearing, Dirty, PAGE_SHIFT, VirtAddr};

/// Pages on either side of the touched one that are cleared last, with it.
pub const NEIGHBOURS: u64 = 2;

/// The index of the page that `hint` touches in a folio of `pages` pages (a power of two) that is mapped naturally
/// aligned. The hint need not be page-aligned; 0, "not known", is the first page.
pub const fn touched_page(hint: VirtAddr, pages: u64) -> u64 {
    (hint.get() >> PAGE_SHIFT) & pages.wrapping_sub(1)
}

/// Starts clearing `folio`, whose page `touched` will be touched first; an index beyond the end stands for the last
/// page. O(1).
pub fn begin_around(folio: Dirty, touched: u64) -> Clearing {
    let extent = folio.extent();
    let pages = extent.pages();
    let touched = touched.min(pages.saturating_sub(1));
    let near_from = touched.saturating_sub(NEIGHBOURS);
    let near_to = (touched + NEIGHBOURS + 1).min(pages);
    let parts = ([extent.slice(near_to, pages), extent.slice(0, near_from)], extent.slice(near_from, near_to));
    // The three slices partition the extent by construction, so this cannot fail; if it did, ascending order is right
    // too.
    folio.begin_around(parts.0, parts.1).unwrap_or_else(Dirty::begin)
}
