//! Changing what an area allows, after it has been filled.

use crate::area::{Area, check_rights};
use crate::error::KvaError;
use crate::kva::Kva;
use crate::setup::{Cx, KvaSetup};
use hugemm_base::VirtRange;
use hugemm_paging::{Change, Flags, ShootdownBatch};

/// What changes.
const RIGHTS: Flags = Flags::WRITE.with(Flags::EXEC);

impl<S: KvaSetup> Kva<'_, S> {
    /// Has `span`, which is all of an area or a part of it, allow `rights` and nothing else: [`Flags::WRITE`], [`Flags::EXEC`], or
    /// neither. When it returns, no CPU goes by what was allowed before. The direct map's view of the same pages is not this crate's: a
    /// kernel that wants code nobody can store to takes the right from there too. Instruction caches are the caller's.
    ///
    /// A task, with interrupts on and no lock that is taken with them off. One walk, one atomic for each leaf; one flush, of more rights
    /// too: a kernel that meets an old refusal has nobody who would try again.
    ///
    /// # Errors
    ///
    /// [`Rights`](KvaError::Rights), [`OutOfBounds`](KvaError::OutOfBounds), [`Foreign`](KvaError::Foreign);
    /// [`Paging`](KvaError::Paging) if a leaf of 2 MiB reaches over an end of `span`. Nothing has changed.
    pub fn protect(&self, cx: &Cx<'_, S>, area: &mut Area, span: VirtRange, rights: Flags) -> Result<(), KvaError> {
        check_rights(area.kind, rights)?;
        if !RIGHTS.contains(rights) {
            return Err(KvaError::Rights { flags: rights });
        }
        if !area.range().covers(span) {
            let at = if span.start() < area.range().start() { span.start() } else { area.end() };
            return Err(KvaError::OutOfBounds { at });
        }
        self.with_record(cx, area, |_, _| ())?;
        let change = Change { set: rights, clear: RIGHTS.without(rights) };
        let stale = self.parts.table.shared(self.tables(cx)).protect(span, change)?;
        let mut batch = ShootdownBatch::new(self.parts.space);
        batch.stale(stale);
        batch.flush(self.parts.shootdown, cx, &self.parts.shootdown_policy);
        Ok(())
    }
}
