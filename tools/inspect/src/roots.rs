//! Where the kernel's reports are read from, and small readers for them.
//!
//! Everything that this crate knows of the machine comes from text files under `/proc` and `/sys`. [`Roots`] names
//! those two trees (and `/boot`), so that a test can describe another machine by a few files in a temporary directory.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The directories under which the kernel's reports are found.
///
/// `Roots::default()` is the running machine. Resource limits (`RLIMIT_*`) and memory itself always belong to the
/// running process, whatever the roots say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// The proc file system, normally `/proc`.
    pub proc: PathBuf,
    /// The sys file system, normally `/sys`.
    pub sys: PathBuf,
    /// Where the kernel's configuration lies, normally `/boot`.
    pub boot: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { proc: "/proc".into(), sys: "/sys".into(), boot: "/boot".into() }
    }
}

impl Roots {
    /// Roots below one directory: `base/proc`, `base/sys` and `base/boot`.
    pub fn below(base: &Path) -> Self {
        Self { proc: base.join("proc"), sys: base.join("sys"), boot: base.join("boot") }
    }
}

/// A number of bytes for people: `1.5 GiB`, `512 MiB`, `17 bytes`. Binary units, at most two decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Human(pub u64);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        for (unit, shift) in UNITS {
            let one = 1u64 << shift;
            if self.0 >= one {
                // Hundredths, rounded down, so that a shortage is never shown as "enough".
                let hundredths = (u128::from(self.0) * 100) >> shift;
                let (whole, rest) = (hundredths / 100, hundredths % 100);
                return match rest {
                    0 => write!(f, "{whole} {unit}"),
                    r if r % 10 == 0 => write!(f, "{whole}.{} {unit}", r / 10),
                    r => write!(f, "{whole}.{r:02} {unit}"),
                };
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

/// The trimmed text of a file, or `None` if it cannot be read. Bytes that are not UTF-8 are replaced.
pub(crate) fn text(path: impl AsRef<Path>) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// The decimal number that is the whole content of a file.
pub(crate) fn number(path: impl AsRef<Path>) -> Option<u64> {
    text(path)?.parse().ok()
}

/// The value of `key: value` in a report such as `/proc/self/status`; `None` if the key is missing.
pub(crate) fn field<'a>(report: &'a str, key: &str) -> Option<&'a str> {
    report.lines().find_map(|line| {
        let (k, v) = line.split_once(':')?;
        (k.trim() == key).then(|| v.trim())
    })
}

/// The value of `key: N kB`, in bytes.
pub(crate) fn field_kib(report: &str, key: &str) -> Option<u64> {
    kib(field(report, key)?)
}

/// `N kB` in bytes.
pub(crate) fn kib(value: &str) -> Option<u64> {
    value.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The bracketed choice of a sysfs selector: `always [madvise] never` gives `madvise`.
pub(crate) fn chosen(selector: &str) -> Option<&str> {
    let (_, rest) = selector.split_once('[')?;
    Some(rest.split_once(']')?.0)
}

/// A directory below the system's temporary one, removed with all it holds on drop. For unit tests.
#[cfg(test)]
pub(crate) mod testing {
    use super::Roots;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering};

    pub(crate) struct FakeMachine(PathBuf);

    impl FakeMachine {
        pub(crate) fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let name = format!("hugemm-host-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let dir = std::env::temp_dir().join(name);
            fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        pub(crate) fn path(&self) -> &Path {
            &self.0
        }

        pub(crate) fn roots(&self) -> Roots {
            Roots::below(&self.0)
        }

        pub(crate) fn file(&self, path: &str, content: &str) -> &Self {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
            self
        }

        pub(crate) fn read(&self, path: &str) -> String {
            fs::read_to_string(self.0.join(path)).unwrap().trim().to_owned()
        }
    }

    impl Drop for FakeMachine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_for_people() {
        let cases = [
            (0, "0 bytes"),
            (17, "17 bytes"),
            (4096, "4 KiB"),
            (2 << 20, "2 MiB"),
            (3 << 29, "1.5 GiB"),
            ((1 << 30) + (1 << 30) / 20, "1.04 GiB"),
            (u64::MAX, "16777215.99 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Human(bytes).to_string(), text);
        }
    }

    #[test]
    fn reports_are_read() {
        let report = "MemTotal:       24684096 kB\nTHP_enabled:\t1\n";
        assert_eq!(field_kib(report, "MemTotal"), Some(24684096 * 1024));
        assert_eq!(field(report, "THP_enabled"), Some("1"));
        assert_eq!(field(report, "Missing"), None);
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen("none"), None);
        assert_eq!(number("/nonexistent/file"), None);
    }
}
