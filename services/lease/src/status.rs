//! How things stand with a daemon, as it answers when asked and as its metrics count.

use crate::memory_file::Page;
use crate::wire::Seen;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A daemon's whole state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Of which pages its files are.
    pub page: Page,
    /// From which node, if it was told one.
    pub node: Option<u32>,
    /// What should be ready: the lengths in bytes.
    pub wanted: Vec<u64>,
    /// What is.
    pub ready: Vec<u64>,
    /// What is being filled.
    pub filling: Option<Filling>,
    /// Why nothing is filled though something is missing.
    pub waiting: Option<String>,
    /// Whether it was told to give memory back.
    pub drained: bool,
    /// What is lent.
    pub leases: Vec<Lent>,
    /// What is kept for programs that come back.
    pub kept: Vec<KeptMemory>,
    /// What somebody still has of leases that are over.
    pub left: Vec<Left>,
    /// What is filled with a file's bytes.
    #[serde(default)]
    pub templates: Vec<TemplateMemory>,
    /// Sums since the start.
    pub counts: Counts,
    /// How long those who got a lease waited for it.
    pub times: LeaseTimes,
}

/// A histogram of times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseTimes {
    /// How many took no longer than each of [`BOUNDS_MS`](LeaseTimes::BOUNDS_MS), and longer than the one before; the last are
    /// those that took longer than all.
    pub counts: [u64; LeaseTimes::BOUNDS_MS.len() + 1],
    /// All times together, in nanoseconds.
    pub sum_ns: u64,
}

impl LeaseTimes {
    /// Bounds in milliseconds.
    pub const BOUNDS_MS: [u64; 8] = [1, 3, 10, 30, 100, 300, 1000, 10_000];

    /// Counts one more.
    pub fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = Self::BOUNDS_MS.iter().position(|&ms| ns <= ms * 1_000_000).unwrap_or(Self::BOUNDS_MS.len());
        self.counts[bucket] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }
}

/// A file on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filling {
    /// How long it will be.
    pub bytes: u64,
    /// How much of it is filled.
    pub done: u64,
    /// How often the rate was halved, because the machine has better things to do.
    #[serde(default)]
    pub halvings: u32,
}

/// A lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// Its number.
    pub lease: u64,
    /// Its user.
    pub uid: u32,
    /// Its process.
    pub pid: u32,
    /// How much.
    pub bytes: u64,
    /// For how many seconds.
    pub seconds: u64,
    /// What its supervisor saw last: nothing, if it has none, for its program was given a path, a descriptor or a socket.
    #[serde(default)]
    pub seen: Option<Seen>,
}

/// Memory that is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptMemory {
    /// Its user.
    pub uid: u32,
    /// Its name.
    pub name: String,
    /// How much.
    pub bytes: u64,
    /// The lease that has it now.
    pub lease: Option<u64>,
    /// Whether somebody has it, by a lease or after its end, as far as its lock says.
    #[serde(default)]
    pub in_use: bool,
}

/// A template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateMemory {
    /// Its name.
    pub name: String,
    /// Its file's length, if there is one.
    pub bytes: Option<u64>,
    /// Whether memory is filled with it.
    pub ready: bool,
    /// The digest of its file, once that was read.
    pub sha256: Option<String>,
    /// Why nothing is filled with it.
    pub why: Option<String>,
}

/// Memory of a lease that is over, which a process has open or mapped still: a child of the one that leased it, say. It counts as its
/// user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Whose lease it was.
    pub uid: u32,
    /// How much.
    pub bytes: u64,
}

/// Sums since the daemon's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Leases served with all of their memory ready.
    pub hits: u64,
    /// Leases of which a part had to be filled while the client waited.
    pub grown: u64,
    /// Requests for which nothing was ready.
    pub misses: u64,
    /// Requests that the policy or their own contents forbade.
    pub refused: u64,
    /// Bytes filled ahead.
    pub filled_bytes: u64,
    /// CPU time spent on that, in nanoseconds.
    pub fill_cpu_ns: u64,
    /// Time spent on that, waiting for the cap left out, in nanoseconds.
    pub fill_ns: u64,
    /// Bytes filled while clients waited.
    pub filled_late_bytes: u64,
    /// Files given up because of broken pages.
    pub poisoned: u64,
    /// Leases that took the place of a program's own file.
    pub placed: u64,
    /// Leases that their programs map privately, and so gain nothing from.
    pub private: u64,
    /// Leases whose program never asked for memory of that length.
    pub unused: u64,
}
