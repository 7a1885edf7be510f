//! What a run measured: a record of counts that a guest sends to its host by name, and the metrics that are made of it.
//!
//! A record is sent as it is counted. Rows and tables are made on the host, by the same code wherever it was measured.

/// Counts with names.
pub trait Record: Default {
    /// The record's own name.
    const NAME: &'static str;

    /// Tells each field and its value.
    fn each(&self, tell: &mut dyn FnMut(&'static str, f64));

    /// Sets a field; false if there is none of that name.
    fn set(&mut self, field: &str, value: f64) -> bool;
}

/// Makes a structure a [`Record`] by a list of its fields, which are whole numbers below 2^53 or `f64`.
macro_rules! record {
    ($type:ty = $name:literal { $($($field:ident).+: $kind:ty,)+ }) => {
        impl $crate::record::Record for $type {
            const NAME: &'static str = $name;

            fn each(&self, tell: &mut dyn FnMut(&'static str, f64)) {
                $(tell(stringify!($($field).+), self.$($field).+ as f64);)+
            }

            fn set(&mut self, field: &str, value: f64) -> bool {
                $(if field == stringify!($($field).+) {
                    self.$($field).+ = value as $kind;
                    return true;
                })+
                false
            }
        }
    };
}

pub(crate) use record;

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Smaller figures.
    Lower,
    /// Larger figures.
    Higher,
}

/// A figure that is made of a record.
#[derive(Clone, Copy, Debug)]
pub struct Metric<R> {
    /// Its name in saved results.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// The head of its column; empty if it has none.
    pub head: &'static str,
    /// Which way is better, if either is.
    pub better: Option<Better>,
    /// Its value.
    pub of: fn(&R) -> f64,
}

impl<R> Metric<R> {
    /// A metric without a column or a direction.
    pub const fn new(name: &'static str, unit: &'static str, of: fn(&R) -> f64) -> Self {
        Metric { name, unit, head: "", better: None, of }
    }

    /// The same with a column.
    pub const fn column(self, head: &'static str) -> Self {
        Metric { head, ..self }
    }

    /// The same with a direction.
    pub const fn better(self, better: Better) -> Self {
        Metric { better: Some(better), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, PartialEq)]
    struct Inner {
        deep: i64,
    }

    #[derive(Debug, Default, PartialEq)]
    struct Sent {
        count: u64,
        share: f64,
        inner: Inner,
    }

    record! {
        Sent = "sent" { count: u64, share: f64, inner.deep: i64, }
    }

    #[test]
    fn what_is_sent_arrives() {
        let sent = Sent { count: 1 << 52, share: 0.25, inner: Inner { deep: -3 } };
        let mut arrived = Sent::default();
        sent.each(&mut |name, value| assert!(arrived.set(name, value), "{name}"));
        assert_eq!(arrived, sent);
        assert!(!arrived.set("other", 1.0));
    }
}
