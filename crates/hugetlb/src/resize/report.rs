//! What a resize did, in numbers.

/// What a resize did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResizeReport {
    /// Pages that entered the pool.
    pub entered: u64,
    /// Pages that left it.
    pub left: u64,
    /// Surplus pages that were declared persistent.
    pub kept: u64,
    /// Pages that were declared surplus because they are in use or promised, or could not be freed.
    pub lent: u64,
    /// Pages whose redundant descriptors were given back.
    pub lean: u64,
    /// Frames of descriptors and tables that were freed.
    pub freed_frames: u64,
    /// Frames of descriptors and tables that were allocated.
    pub taken_frames: u64,
    /// Flushes.
    pub flushes: u64,
    /// How often the steps between allocating and freeing, or restoring and freeing, were gone through.
    pub batches: u64,
    /// Pages from which frames for descriptors were carved.
    pub carved: u64,
    /// Whether it was cancelled.
    pub cancelled: bool,
}
