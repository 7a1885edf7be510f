//! Whether anybody still has a file that was lent: the kernel says so to whoever watches its inode, who need not have it open
//! (inotify(7), IN_DELETE_SELF of a file without a name).

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

/// Watches over files that are given away.
#[derive(Debug, Default)]
pub(crate) struct Watches(OnceLock<OwnedFd>);

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Watch(i32);

impl Watches {
    /// Watches a file, which this process must be allowed to read. An error: it cannot be known who has it.
    pub(crate) fn add(&self, file: impl AsFd) -> Result<Watch, Errno> {
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        inotify::add_watch(self.kernels()?, path, WatchFlags::DELETE_SELF).map(Watch)
    }

    /// Some that the kernel does not know.
    #[cfg(test)]
    pub(crate) fn broken() -> Self {
        Watches(OnceLock::from(OwnedFd::from(std::fs::File::open("/dev/null").expect("there"))))
    }

    /// Made when it is wanted, and asked for again as long as the kernel has none left for this user.
    fn kernels(&self) -> Result<&OwnedFd, Errno> {
        if let Some(fd) = self.0.get() {
            return Ok(fd);
        }
        let new = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(self.0.get_or_init(|| new))
    }

    /// Those whose files somebody has open or mapped. A page alone, in a pipe or pinned by a device, is not seen. Costs a line of text
    /// for each. `None`: the kernel does not say, for want of a descriptor.
    ///
    /// A watch goes with its file. The events that say so are left unread: their queue has an end, and the kernel's list of the watches
    /// that are left has none (proc_pid_fdinfo(5)).
    pub(crate) fn alive(&self) -> Option<BTreeSet<Watch>> {
        let Some(fd) = self.0.get() else { return Some(BTreeSet::new()) };
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
        Some(text.lines().filter_map(watch).collect())
    }
}

/// What follows where a file cannot be watched, and the way out.
pub(crate) fn unknown(errno: Errno) -> String {
    let way_out = match errno {
        Errno::MFILE => "; raise fs.inotify.max_user_instances",
        Errno::NOSPC => "; raise fs.inotify.max_user_watches",
        _ => "",
    };
    format!("it cannot be known how long the memory is in use: inotify: {errno}{way_out}")
}

fn watch(line: &str) -> Option<Watch> {
    let number = line.strip_prefix("inotify wd:")?.split(' ').next()?;
    i32::from_str_radix(number, 16).ok().map(Watch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn a_file_is_seen_until_nobody_has_it() {
        let watches = Watches::default();
        let file = |_| memfd_create(c"watched", MemfdFlags::CLOEXEC).expect("a file");
        // More than ten: the kernel writes their numbers in hexadecimal.
        let (files, others): (Vec<_>, Vec<_>) = ((0..20).map(file).collect(), (0..20).map(file).collect());
        let add = |files: &[OwnedFd]| files.iter().map(|file| watches.add(file).expect("watched")).collect();
        let alive = || watches.alive().expect("the kernel says it");
        let (watched, more): (BTreeSet<_>, BTreeSet<_>) = (add(&files), add(&others));
        assert_eq!(alive(), &watched | &more);
        let copy = others[3].try_clone().expect("a descriptor");
        drop(others);
        assert_eq!(alive().difference(&watched).count(), 1, "a duplicate is left");
        drop(copy);
        assert_eq!(alive(), watched);
        drop(files);
        assert_eq!(alive(), BTreeSet::new());
    }
}
