//! What types may go from thread to thread.

use core::marker::PhantomData;
use std::fs;
use std::path::Path;

/// Answers for a type; see [`across_threads`](crate::across_threads).
#[derive(Debug)]
pub struct Of<T: ?Sized>(PhantomData<T>);

/// The answer where no other is.
pub trait No {
    /// Whether it may be sent.
    const SEND: bool = false;
    /// Whether it may be shared.
    const SYNC: bool = false;
}

impl<T: ?Sized> No for Of<T> {}

impl<T: ?Sized + Send> Of<T> {
    /// Whether it may be sent.
    pub const SEND: bool = true;
}

impl<T: ?Sized + Sync> Of<T> {
    /// Whether it may be shared.
    pub const SYNC: bool = true;
}

/// Asserts which types may be sent to other threads and which may be shared with them, and that every `pub struct` and `pub
/// enum` in the sources under `src` is said, or is `private` to its crate.
#[macro_export]
macro_rules! across_threads {
    ($src:expr, private { $($private:ident),* $(,)? } $($kind:ident { $($type:ty),* $(,)? })*) => {{
        #[allow(unused_imports, reason = "where every type may")]
        use $crate::across::{No, Of};
        let mut wrong: Vec<String> = Vec::new();
        $(let expected = stringify!($kind);
        $({
            let found = match (Of::<$type>::SEND, Of::<$type>::SYNC) {
                (true, true) => "both",
                (true, false) => "send",
                (false, true) => "sync",
                (false, false) => "neither",
            };
            if found != expected {
                wrong.push(format!("{} is {found}, not {expected}", stringify!($type)));
            }
        })*)*
        let said = concat!($($(stringify!($type), " ",)*)* $(stringify!($private), " ",)*);
        wrong.extend($crate::across::unsaid($src, said).iter().map(|name| format!("nothing is said of {name}")));
        assert!(wrong.is_empty(), "{wrong:#?}");
    }};
}

/// Names of public types declared in a directory's sources that are not among the words of `said`.
pub fn unsaid(src: impl AsRef<Path>, said: &str) -> Vec<String> {
    let mut unsaid = Vec::new();
    for entry in fs::read_dir(src).expect("a directory").map(|entry| entry.expect("an entry").path()) {
        if entry.is_dir() {
            unsaid.extend(self::unsaid(entry, said));
            continue;
        }
        let text = fs::read_to_string(entry).expect("a source");
        for line in text.lines().map(str::trim_start) {
            let declared = ["pub struct ", "pub enum ", "pub union "].iter().find_map(|what| line.strip_prefix(what));
            let Some(declared) = declared else { continue };
            let name = declared.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            if !said.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == name) {
                unsaid.push(name.to_owned());
            }
        }
    }
    unsaid
}
