//! The files of one pool.

use super::{PoolStatus, unusable};
use crate::roots::number;
use anyhow::Result;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The files of one pool, of the whole machine or of one node.
#[derive(Debug)]
pub(super) struct PoolFiles {
    pub(super) directory: PathBuf,
    pub(super) node: Option<u32>,
}

impl PoolFiles {
    pub(super) fn status(&self) -> Result<PoolStatus> {
        let need = |name: &str| {
            let path = self.directory.join(name);
            std::fs::read_to_string(&path)
                .and_then(|text| text.trim().parse().map_err(|_| ErrorKind::InvalidData.into()))
                .map_err(|why| unusable(&path, &why))
        };
        let may = |name: &str| number(self.directory.join(name)).unwrap_or(0);
        Ok(PoolStatus {
            total: need("nr_hugepages")?,
            free: need("free_hugepages")?,
            reserved: may("resv_hugepages"),
            surplus: may("surplus_hugepages"),
            overcommit: may("nr_overcommit_hugepages"),
        })
    }

    pub(super) fn setting(&self) -> PathBuf {
        self.directory.join("nr_hugepages")
    }

    /// The number of persistent pages.
    pub(super) fn persistent(&self) -> io::Result<u64> {
        let total = number(self.setting()).ok_or_else(|| io::Error::from(ErrorKind::InvalidData))?;
        Ok(total.saturating_sub(number(self.directory.join("surplus_hugepages")).unwrap_or(0)))
    }

    pub(super) fn set(&self, pages: u64) -> io::Result<()> {
        std::fs::write(self.setting(), format!("{pages}\n"))
    }

    pub(super) fn command(&self, pages: u64) -> String {
        format!("echo {pages} | sudo tee {}", self.setting().display())
    }

    /// Keeps other programs that use this module out until dropped. Gives up after a while, or where the file cannot be
    /// locked: being alone is good manners here, not safety.
    pub(super) fn exclusive(&self) -> Option<File> {
        let file = File::open(self.setting()).ok()?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Some(file),
                Err(std::fs::TryLockError::WouldBlock) if start.elapsed() < Duration::from_secs(5) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(_) => return None,
            }
        }
    }
}
