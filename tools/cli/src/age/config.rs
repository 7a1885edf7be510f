//! What `hugemm bench age` does in one run.

use hugemm_base::PageSize;
use hugemm_reclaim::{Ageing, LruPolicy};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunConfig {
    pub page: PageSize,
    pub policy: LruPolicy,
    pub ageing: Ageing,
    pub procs: u32,
    pub cpus: u32,
    /// Bytes.
    pub shared: u64,
    pub swap: u64,
    pub time: Duration,
}
