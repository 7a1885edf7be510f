//! How arguments are written as words of a line: numbers, values that have names, and short lists of them.

use core::fmt;
use hugemm_base::{Order, PageSize};
use hugemm_reclaim::{Ageing, LruPolicy};

/// Most values that a list can have.
pub const MOST: usize = 16;

/// What can be an argument.
pub trait Word: Sized {
    /// Writes it, without white space.
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;

    /// Reads what [`write`](Word::write) has written.
    fn read(text: &str) -> Option<Self>;
}

macro_rules! numbers {
    ($($type:ty)+) => {
        $(impl Word for $type {
            fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }

            fn read(text: &str) -> Option<Self> {
                text.parse().ok()
            }
        })+
    };
}

numbers! { u32 u64 f64 }

impl Word for Order {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().write(f)
    }

    fn read(text: &str) -> Option<Self> {
        Order::new(u32::read(text)?).ok()
    }
}

/// What is left out is written as `-`.
impl<T: Word> Word for Option<T> {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Some(value) => value.write(f),
            None => f.write_str("-"),
        }
    }

    fn read(text: &str) -> Option<Self> {
        if text == "-" { Some(None) } else { T::read(text).map(Some) }
    }
}

/// A short list of values, written with commas between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct List<T>([Option<T>; MOST]);

/// More values than a list can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than {MOST} values in one list; measure them in two runs")]
pub struct TooMany;

impl<T: Copy> List<T> {
    /// A list of these values.
    ///
    /// # Errors
    ///
    /// They are more than [`MOST`].
    pub fn new(values: impl IntoIterator<Item = T>) -> Result<Self, TooMany> {
        let (mut list, mut values) = ([None; MOST], values.into_iter());
        list.iter_mut().zip(&mut values).for_each(|(place, value)| *place = Some(value));
        if values.next().is_some() { Err(TooMany) } else { Ok(List(list)) }
    }

    /// A list of one value.
    pub fn one(value: T) -> Self {
        let mut list = [None; MOST];
        list[0] = Some(value);
        List(list)
    }

    /// The values.
    pub fn iter(&self) -> impl Iterator<Item = T> + Clone {
        self.0.iter().copied().flatten()
    }

    /// Whether it has this value.
    pub fn contains(&self, value: T) -> bool
    where
        T: PartialEq,
    {
        self.0.contains(&Some(value))
    }
}

impl<T: Word + Copy> fmt::Display for List<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().enumerate().try_for_each(|(index, value)| {
            f.write_str(if index == 0 { "" } else { "," })?;
            value.write(f)
        })
    }
}

impl<T: Word + Copy> Word for List<T> {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }

    fn read(text: &str) -> Option<Self> {
        let mut values = [None; MOST];
        for (index, word) in text.split(',').enumerate() {
            *values.get_mut(index)? = Some(T::read(word)?);
        }
        Some(List(values))
    }
}

/// A type whose values have names.
pub trait Named: Copy + PartialEq + 'static {
    /// Every value, its name, and what it means.
    const VALUES: &'static [(Self, &'static str, &'static str)];

    /// The value's name.
    fn name(self) -> &'static str {
        Self::VALUES.iter().find(|value| value.0 == self).map_or("?", |value| value.1)
    }

    /// The value of this name, in capitals or not.
    fn by_name(name: &str) -> Option<Self> {
        Self::VALUES.iter().find(|value| value.1.eq_ignore_ascii_case(name)).map(|value| value.0)
    }
}

impl<T: Named> Word for T {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }

    fn read(text: &str) -> Option<Self> {
        Self::by_name(text)
    }
}

/// Names for the values of a type of another crate (`for Type`), or an enumeration with names.
#[macro_export]
macro_rules! named {
    (for $type:ty { $($(#[doc = $help:literal])+ $value:ident = $name:expr,)+ }) => {
        impl $crate::words::Named for $type {
            const VALUES: &'static [(Self, &'static str, &'static str)] =
                &[$((<$type>::$value, $name, concat!($($help),+)),)+];
        }
    };
    ($(#[$doc:meta])+ $type:ident { $($(#[doc = $help:literal])+ $value:ident = $name:literal,)+ }) => {
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type { $($(#[doc = $help])+ $value,)+ }

        impl $type {
            /// Every value, in order.
            #[allow(dead_code, reason = "not every list is gone through")]
            pub const ALL: &'static [Self] = &[$($type::$value,)+];
        }

        $crate::named! { for $type { $($(#[doc = $help])+ $value = $name,)+ } }
    };
}

pub(crate) use named;

named! {
    for PageSize {
        /// Normal pages.
        Size4K = "4KB",
        /// Huge pages.
        Size2M = "2MB",
        /// Gigantic pages.
        Size1G = "1GB",
    }
}

named! {
    for Ageing {
        /// Page by page, no flush: what Linux does on x86-64 for 4 KiB.
        NoFlush = Ageing::NoFlush.name(),
        /// By runs, no flush.
        Batch = Ageing::Batch.name(),
    }
}

named! {
    for LruPolicy {
        /// An active and an inactive list.
        TwoList = LruPolicy::TwoList.name(),
        /// Up to four generations.
        Generations = LruPolicy::Generations.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_bounded() {
        assert!(List::new(0..MOST as u64).is_ok());
        assert_eq!(List::new(0..=MOST as u64), Err(TooMany));
        assert_eq!(List::read("1,2").map(|list: List<u64>| list.iter().count()), Some(2));
        assert!(List::<u64>::read("1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16").is_some());
        assert!(List::<u64>::read("1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17").is_none());
    }

    #[test]
    fn pages_are_named_as_they_print() {
        assert!(PageSize::VALUES.iter().all(|(page, name, _)| page.to_string() == *name));
        assert_eq!(PageSize::by_name("2mb"), Some(PageSize::Size2M));
    }
}
