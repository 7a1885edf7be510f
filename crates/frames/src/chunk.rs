//! Chunks: 256 frames whose references share a cache line. CPUs fill their caches from different ones.
//!
//! Taking and dropping a reference writes the line that the references of a chunk share. If two CPUs' pages lie in one chunk, each pair
//! costs a transfer of that line: 102 to 126 ns on each of two CPUs that hold up to 8 pages, instead of 22. So the node remembers for each
//! chunk which CPU took from it last, and each CPU which chunk it took from last: a chunk is a CPU's while both agree.
//!
//! * A refill takes the lowest place that will do, as everybody does, unless that is in another CPU's chunk; a large one does
//!   not ask.
//! * Then it takes from the CPU's own chunk; if nothing is left there, from the lowest place in nobody's, of the first few
//!   2 MiB blocks that have room; and then from a fresh 2 MiB block. If there is none, it shares: memory is never refused.
//!
//! So one CPU alone gets the places that it would get without chunks, and a CPU holds at most one per mobility. All of it
//! is under the node's lock, and nothing is to be undone: what is out of date does not agree.

use crate::arena::{Arena, BLOCK_ORDER, in_region};
use crate::arenas::Search;
use crate::blockmap::{Pages, Position, WORDS, first_run};
use crate::frames::{Env, Frames};
use crate::free2m::Sought;
use crate::free4k::{Place, kind, kinds_from};
use crate::freelist::{FreeLists, Places};
use crate::looks;
use crate::mobility::Mobility;
use crate::pcp::PerCpu;
use crate::takers::{CHUNK_SHIFT, HALVES, chunk_of, half_of};
use hugemm_base::Pfn;

/// 2 MiB blocks that may have room that are looked at for a place in nobody's chunk.
const TRIES: usize = 4;

/// In one search, which is under the node's lock: as many as one arena may have.
const MOST_TRIES: usize = TRIES * BLOCK_ORDER as usize;

/// Whether a refill of so many blocks should look for a place apart. Whoever fetches many fills memory rather than taking and
/// dropping the same few again and again, and shares at the edges of what it got only; the look costs as much as the rest.
pub(crate) const fn is_worth_it(blocks: u64) -> bool {
    blocks < 1 << (CHUNK_SHIFT - 3)
}

/// Clears those of the bits of a 2 MiB block that are in one chunk.
#[inline(never)]
fn clear(bits: &mut [u64; WORDS], half: usize) {
    let words = WORDS / HALVES;
    bits[half % HALVES * words..][..words].fill(0);
}

impl<'m, E: Env> Frames<'m, E> {
    /// A CPU's cache got frames at `pfn`.
    pub(crate) fn note_chunk(&self, own: &PerCpu<'m>, arena: &Arena<'m>, pfn: Pfn) {
        let block = arena.block(pfn);
        block.takers.note(half_of(pfn), own.number);
        own.chunks.note(block.mobility(), chunk_of(pfn));
    }

    /// Whether a frame is in the chunk of a CPU other than `own`.
    #[inline(never)]
    pub(crate) fn is_anothers(&self, own: &PerCpu<'m>, arena: &Arena<'m>, pfn: Pfn) -> bool {
        let block = arena.block(pfn);
        let taker = block.takers.of(half_of(pfn)).filter(|taker| *taker != own.number);
        let taker = taker.and_then(|taker| self.caches().get(taker as usize));
        taker.is_some_and(|taker| taker.chunks.of(block.mobility()) == Some(chunk_of(pfn)))
    }

    /// A run of one kind in no other CPU's chunk.
    #[inline(never)]
    pub(crate) fn apart(
        &self,
        lists: &FreeLists,
        own: &PerCpu<'m>,
        order: u32,
        mobility: Mobility,
        sought: Sought,
    ) -> Option<Place<'m>> {
        if let Some(place) = self.in_own_chunk(lists, own, order, mobility, sought) {
            return Some(place);
        }
        let mut search = Search::new(kinds_from(mobility, sought, order), Pfn::LIMIT).in_few();
        let mut left = MOST_TRIES;
        while left > 0
            && let Some(places) = self.next_places(lists, &mut search)
        {
            let mut lowest: Option<Place<'m>> = None;
            for larger in order..BLOCK_ORDER {
                if let Some(place) =
                    self.in_nobodys(&places, own, order, sought, kind(mobility, sought, larger), &mut left)
                    && lowest.as_ref().is_none_or(|lowest| place.pfn() < lowest.pfn())
                {
                    lowest = Some(place);
                }
            }
            if lowest.is_some() {
                return lowest;
            }
        }
        None
    }

    /// The lowest in nobody's chunk, of the first few 2 MiB that may have some of a kind.
    #[inline(never)]
    fn in_nobodys(
        &self,
        places: &Places<'m>,
        own: &PerCpu<'m>,
        order: u32,
        sought: Sought,
        kind: usize,
        left: &mut usize,
    ) -> Option<Place<'m>> {
        let (arena, region, base) = places.at(places.rows.first(kind)?)?;
        for at in region.has.get(kind)?.positions().filter(|at| !region.isolated.get(*at)).take(TRIES) {
            *left = left.checked_sub(1)?;
            looks::count();
            let near = at.pfn(base).max(arena.extent.base());
            // What has room has bits of its own mobility only.
            let mut room = arena.block(near).room(sought);
            for half in 0..HALVES {
                let pfn = Position::<Pages>::new(half << CHUNK_SHIFT).pfn(near);
                if self.is_anothers(own, arena, pfn.max(arena.extent.base())) {
                    clear(&mut room, half);
                }
            }
            if let Some(index) = first_run(order, &room) {
                return Some(Place { arena, near, index, sought });
            }
        }
        None
    }

    /// The lowest in the CPU's own chunk.
    fn in_own_chunk(
        &self,
        lists: &FreeLists,
        own: &PerCpu<'m>,
        order: u32,
        mobility: Mobility,
        sought: Sought,
    ) -> Option<Place<'m>> {
        let near = Pfn::new(own.chunks.of(mobility)? << CHUNK_SHIFT);
        let arena = self.arena_table().of_any(near, lists)?;
        let (region, block, half) = (arena.region(near), arena.block(near), half_of(near));
        // Where pages are free it is a group.
        let ours = !region.isolated.get(in_region(near))
            && block.mobility() == mobility
            && block.takers.of(half) == Some(own.number);
        let mut room = block.room(sought);
        (0..HALVES).filter(|other| *other != half).for_each(|other| clear(&mut room, other));
        let index = first_run(order, &room).filter(|_| ours)?;
        Some(Place { arena, near, index, sought })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_half_of_2_mib() {
        let place = |pfn| (chunk_of(Pfn::new(pfn)), half_of(Pfn::new(pfn)));
        let places = [0, 0xff, 0x100, 0x1ff, 0x200, 0x300].map(place);
        assert_eq!(places, [(0, 0), (0, 0), (1, 1), (1, 1), (2, 0), (3, 1)]);
        let [all, none] = [[u64::MAX; WORDS / 2], [0; WORDS / 2]];
        for (half, left) in [(0, [none, all]), (1, [all, none])] {
            let mut bits = [u64::MAX; WORDS];
            clear(&mut bits, half);
            assert_eq!(bits, left.as_flattened());
        }
    }

    /// A refill that fetches an eighth of a chunk or more does not ask whose it is.
    #[test]
    fn large_refills_keep_nothing_apart() {
        assert_eq!([1, 31, 32, 1000].map(is_worth_it), [true, true, false, false]);
    }
}
