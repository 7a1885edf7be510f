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

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_base::{Extent, Pfn, Sweep};

    fn parts(pages: u64, touched: u64) -> Vec<(u64, u64, Sweep)> {
        let extent = Extent::new(Pfn::new(1 << 18), pages).expect("in range");
        // SAFETY: no memory is behind the frames.
        let mut clearing = begin_around(unsafe { Dirty::assume_owned(extent) }, touched);
        let mut parts = Vec::new();
        while let Some((part, sweep)) = clearing.next_part() {
            let from = part.base().get() - extent.base().get();
            parts.push((from, from + part.pages(), sweep));
            // SAFETY: as above.
            unsafe { clearing.advance(part.pages()) };
        }
        assert!(clearing.finish().is_ok());
        parts
    }

    #[test]
    fn right_left_then_the_five_pages_around_the_touch() {
        for pages in [512, 1 << 18] {
            assert_eq!(parts(pages, 100), [(103, pages, Sweep::Far), (0, 98, Sweep::Far), (98, 103, Sweep::Near)]);
        }
    }

    #[test]
    fn the_neighbourhood_is_cut_off_at_the_ends() {
        assert_eq!(parts(512, 0), [(3, 512, Sweep::Far), (0, 3, Sweep::Near)]);
        assert_eq!(parts(512, 511), [(0, 509, Sweep::Far), (509, 512, Sweep::Near)]);
        assert_eq!(parts(512, 9999), parts(512, 511));
        assert_eq!(parts(0, 0), []);
    }

    /// Every touched page of every small folio, each page exactly once.
    #[test]
    fn every_page_once() {
        for pages in 1..=16 {
            for touched in 0..pages {
                let mut times = vec![0; pages as usize];
                for (from, to, _) in parts(pages, touched) {
                    (from..to).for_each(|page| times[page as usize] += 1);
                }
                assert!(times.iter().all(|t| *t == 1), "{pages} pages, touched {touched}: {times:?}");
            }
        }
    }

    /// Addresses within a page, before and after the folio, and none.
    #[test]
    fn hints_need_not_be_aligned() {
        let folio = 0x7f00_0020_0000_u64;
        assert_eq!(touched_page(VirtAddr::new(folio + 0x64_123), 512), 100);
        assert_eq!(touched_page(VirtAddr::new(folio), 512), 0);
        assert_eq!(touched_page(VirtAddr::new(0), 512), 0);
        assert_eq!(touched_page(VirtAddr::new((1 << 30) + 0x5000), 1 << 18), 5);
    }
}
