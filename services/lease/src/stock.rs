//! What should be ready, what is, and which file serves a request. Pure: lengths in, decisions out.

/// How a request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// File number `index` has the length.
    Exact(usize),
    /// It is longer: the shortest such. Its end goes back to the kernel.
    Cut(usize),
    /// All are shorter; this is the longest, and the rest has to be filled while the asker waits.
    Grow(usize),
    /// All are shorter, the longest by so much that it cannot be had.
    Short(u64),
    /// Nothing is ready.
    Empty,
}

/// Which of the `ready` files, by their lengths, serves a request for `bytes`, if one may grow by less than `growth`.
pub fn choose(ready: &[u64], bytes: u64, growth: u64) -> Choice {
    let numbered = || ready.iter().copied().enumerate();
    match numbered().filter(|&(_, have)| have >= bytes).min_by_key(|&(_, have)| have) {
        Some((index, have)) if have == bytes => Choice::Exact(index),
        Some((index, _)) => Choice::Cut(index),
        None => match numbered().max_by_key(|&(_, have)| have) {
            Some((index, have)) if bytes - have < growth => Choice::Grow(index),
            Some((_, have)) => Choice::Short(have),
            None => Choice::Empty,
        },
    }
}

/// Those of the `shapes` for which there is no file among the `ready`, in the order announced.
pub fn missing(shapes: &[u64], ready: &[u64]) -> Vec<u64> {
    let mut left = ready.to_vec();
    let is_missing = |shape: &u64| {
        let found = left.iter().position(|have| have == shape);
        found.map(|found| left.swap_remove(found)).is_none()
    };
    shapes.iter().copied().filter(is_missing).collect()
}

/// `--shape 64G×4,16G`: sizes with how many of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shapes(pub Vec<u64>);

/// Why shapes cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Not a multiple of the page.
    #[error("a shape of {bytes} bytes is not whole pages of {page}; announce a multiple with --shape")]
    NotPages {
        /// The size.
        bytes: u64,
        /// The page.
        page: u64,
    },
    /// More than the pool is to have.
    #[error("the shapes add up to {sum} bytes, more than the pool's {size}; serve more with --size")]
    TooMuch {
        /// All shapes.
        sum: u64,
        /// The pool.
        size: u64,
    },
    /// Nothing at all.
    #[error("the pool is smaller than one page ({page} bytes); serve more with --size")]
    Nothing {
        /// The page.
        page: u64,
    },
}

impl Shapes {
    /// Into how many equal files a pool is cut whose shapes nobody has announced.
    const UNANNOUNCED: u64 = 4;

    /// Checks announced shapes, `(bytes, how many)`, against the pool's size, and lists them one by one, as announced. With
    /// none, the pool is cut into four.
    ///
    /// # Errors
    ///
    /// [`ShapeError`].
    pub fn new(announced: &[(u64, u64)], size: u64, page: u64) -> Result<Self, ShapeError> {
        if size < page {
            return Err(ShapeError::Nothing { page });
        }
        if announced.is_empty() {
            let each = size / Self::UNANNOUNCED / page * page;
            let (each, count) = if each == 0 { (page, size / page) } else { (each, Self::UNANNOUNCED) };
            return Ok(Shapes(vec![each; count as usize]));
        }
        let mut sum = 0u64;
        let mut shapes = Vec::new();
        for &(bytes, count) in announced {
            if bytes == 0 || !bytes.is_multiple_of(page) {
                return Err(ShapeError::NotPages { bytes, page });
            }
            sum = sum.saturating_add(bytes.saturating_mul(count));
            if sum > size {
                return Err(ShapeError::TooMuch { sum, size });
            }
            shapes.extend(std::iter::repeat_n(bytes, count as usize));
        }
        Ok(Shapes(shapes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_file_that_is_long_enough_serves() {
        assert_eq!(choose(&[8, 4, 16], 4, 0), Choice::Exact(1));
        assert_eq!(choose(&[8, 4, 16], 5, 0), Choice::Cut(0));
        assert_eq!(choose(&[8, 4, 16], 17, 2), Choice::Grow(2));
        assert_eq!(choose(&[8, 4, 16], 18, 2), Choice::Short(16));
        assert_eq!(choose(&[], 1, 2), Choice::Empty);
    }

    #[test]
    fn what_is_missing_is_filled_in_the_order_announced() {
        assert_eq!(missing(&[8, 8, 4], &[]), [8, 8, 4]);
        assert_eq!(missing(&[8, 8, 4], &[8]), [8, 4]);
        assert_eq!(missing(&[8, 8, 4], &[8, 8]), [4]);
        assert!(missing(&[8, 8, 4], &[4, 8, 8]).is_empty());
        assert_eq!(missing(&[8], &[16]), [8], "a file nobody announced takes no shape's place");
    }

    #[test]
    fn shapes_are_whole_pages_and_fit() {
        assert_eq!(Shapes::new(&[(4, 2), (2, 1)], 10, 2), Ok(Shapes(vec![4, 4, 2])));
        assert_eq!(Shapes::new(&[], 16, 2), Ok(Shapes(vec![4; 4])));
        assert_eq!(Shapes::new(&[], 6, 2), Ok(Shapes(vec![2; 3])));
        assert_eq!(Shapes::new(&[], 1, 2), Err(ShapeError::Nothing { page: 2 }));
        assert_eq!(Shapes::new(&[(3, 1)], 10, 2), Err(ShapeError::NotPages { bytes: 3, page: 2 }));
        assert_eq!(Shapes::new(&[(4, u64::MAX)], 10, 2), Err(ShapeError::TooMuch { sum: u64::MAX, size: 10 }));
    }
}
