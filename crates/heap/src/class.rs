//! Which sizes are kept in slabs, how a slab of each is divided, and what is a block of frames of its own.
//!
//! Sizes rise by 16 bytes up to 128 and by a quarter, a fifth, a sixth and a seventh of a power of two from there on, so that
//! rounding up loses a fifth at most. 4096 bytes are a frame, and what is above 6144 is a block of frames: of a power of two of them up to
//! 8, of as many as it needs above.
//!
//! What has grown from 2048 bytes to 4096 may be two pieces. Its address says so: a frame's is a multiple of 4096, theirs is not.
//!
//! Alignment needs no case of its own: a size that is a multiple of a power of two is rounded up to a multiple of it, and pieces
//! lie at multiples of the largest power of two that divides their size.

use core::alloc::Layout;
use hugemm_base::{Order, PAGE_BYTES, PAGE_SHIFT};

/// How many sizes have slabs. The one of 4096 bytes has none: a frame serves.
pub(crate) const CLASSES: usize = 31;

/// What a slab begins with: its header.
pub(crate) const HEADER: u32 = 128;

/// The largest piece.
const MOST: usize = 6144;

/// The class whose pieces would be frames.
const FRAME: u8 = 28;

/// The one of half a frame: two of its pieces, one after the other, may stand for a frame.
pub(crate) const HALF: u8 = 24;

const _: () = assert!(PAGE_BYTES == piece(FRAME as usize) as u64 && PAGE_BYTES == 2 * piece(HALF as usize) as u64);

/// A slab has so many pieces, if that takes no more than [`MOST_ORDER`].
const ENOUGH: u32 = 16;

/// What frames keeps in its per-CPU caches.
const MOST_ORDER: u32 = 3;

/// Blocks up to so many frames are powers of two.
pub(crate) const SMALL: u32 = 1 << MOST_ORDER;

/// Where memory of some layout comes from. Says everything about it, so nothing need be stored beside the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A piece of a slab of this class.
    Slab(u8),
    /// A block of so many frames.
    Block(u32),
    /// Nowhere.
    TooLarge,
}

impl Source {
    /// That of a layout.
    #[inline]
    pub(crate) const fn of(layout: Layout) -> Self {
        let (size, mask) = (if layout.size() == 0 { 1 } else { layout.size() }, layout.align() - 1);
        // Layouts promise that this does not overflow, and alignments are powers of two: `next_multiple_of` would divide.
        let bytes = (size + mask) & !mask;
        let last = bytes.wrapping_sub(1);
        if last / 8 < FINE.len() {
            return Source::Slab(FINE[last / 8]);
        }
        if last / 256 >= COARSE.len() {
            return block(bytes);
        }
        match COARSE[last / 256] {
            FRAME => Source::Block(1),
            class => Source::Slab(class),
        }
    }

    /// Of which order the block is that it takes where it has nothing.
    pub(crate) fn order(self) -> Order {
        match self {
            Source::Slab(class) => SHAPES[class as usize].order,
            Source::Block(pages) => Order::covering(u64::from(pages)).unwrap_or(Order::MAX),
            Source::TooLarge => Order::MAX,
        }
    }

    /// How many bytes memory from it has.
    #[inline]
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Source::Slab(class) => SHAPES[class as usize].piece as usize,
            Source::Block(pages) => pages as usize * PAGE_BYTES as usize,
            Source::TooLarge => 0,
        }
    }
}

/// How many bytes of a heap memory of this layout has, all of which are its user's: the layout's, rounded up. It may be freed
/// with a layout of that size as well, whatever its alignment was. `None` for what no heap has: more than 1 GiB, or aligned to
/// more.
///
/// ```
/// # use core::alloc::Layout;
/// assert_eq!(hugemm_heap::usable_size(Layout::new::<[u8; 130]>()), Some(160));
/// assert_eq!(hugemm_heap::usable_size(Layout::new::<[u8; 8193]>()), Some(16384));
/// assert_eq!(hugemm_heap::usable_size(Layout::new::<[u8; 33 << 10]>()), Some(36 << 10));
/// ```
#[inline]
pub const fn usable_size(layout: Layout) -> Option<usize> {
    match Source::of(layout) {
        Source::TooLarge => None,
        source => Some(source.bytes()),
    }
}

const fn block(bytes: usize) -> Source {
    match (bytes as u64).div_ceil(PAGE_BYTES) {
        pages if pages <= SMALL as u64 => Source::Block(pages.next_power_of_two() as u32),
        pages if pages <= Order::MAX.pages() => Source::Block(pages as u32),
        _ => Source::TooLarge,
    }
}

/// The classes of sizes by eights of bytes, up to 1024: nearly all that is asked for, and no branch would foresee which it is.
/// Constants, so that the class of a constant layout is one too.
const FINE: [u8; 128] = classes(8);

/// Those of larger sizes, by 256 bytes.
const COARSE: [u8; MOST / 256] = classes(256);

/// The smallest classes with pieces of 1, 2, 3… times so many bytes.
const fn classes<const N: usize>(step: usize) -> [u8; N] {
    let (mut classes, mut class, mut at) = ([0; N], 0, 0);
    while at < N {
        while (piece(class) as usize) < (at + 1) * step {
            class += 1;
        }
        classes[at] = class as u8;
        at += 1;
    }
    classes
}

/// The bytes of a class's pieces.
const fn piece(class: usize) -> u32 {
    match class {
        0 => 8,
        1..=8 => 16 * class as u32,
        _ => (5 + (class as u32 - 9) % 4) << (5 + (class as u32 - 9) / 4),
    }
}

/// How a slab is divided. Offsets are in bytes from its first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// A piece's bytes.
    pub(crate) piece: u32,
    /// The offset of the first piece.
    pub(crate) first: u32,
    /// The offset after the last one.
    pub(crate) end: u32,
    /// The slab's order.
    pub(crate) order: Order,
}

impl Shape {
    const fn of(class: usize) -> Self {
        let piece = piece(class);
        let first = HEADER.next_multiple_of(1 << piece.trailing_zeros());
        let mut log = 0;
        loop {
            let bytes = 1_u32 << (PAGE_SHIFT + log);
            let pieces = (bytes - first) / piece;
            if pieces >= ENOUGH || log == MOST_ORDER {
                let order = match Order::new(log) {
                    Ok(order) => order,
                    Err(_) => Order::ZERO,
                };
                return Shape { piece, first, end: first + pieces * piece, order };
            }
            log += 1;
        }
    }

    /// Bytes of the slab.
    #[inline]
    pub(crate) const fn bytes(&self) -> usize {
        self.order.bytes() as usize
    }
}

/// Every class's.
pub(crate) static SHAPES: [Shape; CLASSES] = {
    let mut shapes = [Shape::of(0); CLASSES];
    let mut class = 1;
    while class < CLASSES {
        shapes[class] = Shape::of(class);
        class += 1;
    }
    shapes
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).expect("valid")
    }

    #[test]
    fn every_size_and_alignment_fits_and_loses_a_fifth_at_most() {
        for align in (0..14).map(|log| 1 << log) {
            for size in (0..=MOST + 1).step_by(if cfg!(miri) { 61 } else { 1 }) {
                let bytes = size.max(1).next_multiple_of(align);
                let usable = usable_size(layout(size, align)).expect("not too large");
                assert!(usable >= bytes && Source::of(layout(usable, 1)) == Source::of(layout(size, align)));
                match Source::of(layout(size, align)) {
                    Source::Slab(class) => {
                        let shape = SHAPES[class as usize];
                        let piece = shape.piece as usize;
                        assert!(piece >= bytes, "{size} {align}");
                        assert!(piece - bytes < 16 || (piece - bytes) * 5 <= piece, "{bytes} in {piece}");
                        assert!(
                            piece.is_multiple_of(align) && (shape.first as usize).is_multiple_of(align),
                            "{size} {align}"
                        );
                    }
                    Source::Block(pages) => {
                        assert!(usable == pages as usize * 4096 && pages.is_power_of_two() && bytes > 3584);
                        assert!(pages == 1 || usable / 2 < bytes);
                    }
                    Source::TooLarge => panic!("{size} {align}"),
                }
            }
        }
    }

    #[test]
    fn large_ones_are_blocks_up_to_1_gib() {
        for (size, align, source) in [
            (4096, 8, Source::Block(1)),
            (1, 4096, Source::Block(1)),
            (8192, 16, Source::Block(2)),
            (8193, 16, Source::Block(4)),
            (20_000, 16, Source::Block(8)),
            (32_769, 16, Source::Block(9)),
            (40_000, 16_384, Source::Block(12)),
            (1, 2 << 20, Source::Block(512)),
            (1 << 30, 1, Source::Block(1 << 18)),
            ((1 << 30) - 4096, 1, Source::Block((1 << 18) - 1)),
            (1, 1 << 30, Source::Block(1 << 18)),
            ((1 << 30) + 1, 1, Source::TooLarge),
            (1, 1 << 31, Source::TooLarge),
            (1, 1 << 62, Source::TooLarge),
            (isize::MAX as usize, 1, Source::TooLarge),
        ] {
            assert_eq!(Source::of(layout(size, align)), source, "{size} {align}");
            let bytes = if let Source::Block(pages) = source { Some(pages as usize * 4096) } else { None };
            assert_eq!(usable_size(layout(size, align)), bytes);
        }
        assert_eq!((usable_size(layout(MOST, 8)), usable_size(layout(MOST + 1, 8))), (Some(6144), Some(8192)));
    }

    #[test]
    fn slabs_are_full_of_pieces() {
        for (class, shape) in SHAPES.iter().enumerate().filter(|(class, _)| *class != FRAME as usize) {
            let rest = shape.bytes() as u32 - (shape.end - shape.first);
            assert!(shape.first >= HEADER && shape.end as usize <= shape.bytes());
            assert!(rest < shape.bytes() as u32 / 8, "{class}: {shape:?}");
            assert_eq!((shape.end - shape.first) % shape.piece, 0);
        }
    }
}
