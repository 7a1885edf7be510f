//! Which words of a block head's descriptor this crate uses.
//!
//! The owner of an allocated block owns all eight words of its head's descriptor
//! (see [`hugemm_frames::descriptor`]). Words 0 and 1 are left to chains of extents.
//!
//! | word | block on (or isolated from) an LRU | block of a compressed store |
//! |---|---|---|
//! | 2, 3 | next, previous | next, previous |
//! | 4 | state | whose, class |
//! | 5 | free for its owner | which pieces are free |
//! | 6 | free for its owner | holders of a page stored whole |
//! | 7 | free for its owner | – |

/// Next block on the list.
pub(crate) const NEXT: usize = 2;
/// Previous block on the list.
pub(crate) const PREV: usize = 3;
/// LRU: where the folio is. Owner: the LRU's lock.
pub(crate) const STATE: usize = 4;
/// Store: identity and class. Written once, before the first slot is handed out.
pub(crate) const TAG: usize = 4;
/// Store: one bit per piece, set while it is free. Owner: the class's lock.
pub(crate) const FREE: usize = 5;
/// Store: how many hold a page stored whole. Owner: the class's lock.
pub(crate) const HOLDERS: usize = 6;
