//! How arguments are read from a command line, and what its help says of them.

use crate::size::Size;
use crate::words::{List, Named};
use clap::builder::{
    PossibleValue, PossibleValuesParser, RangedI64ValueParser, RangedU64ValueParser, TypedValueParser,
};
use clap::error::ErrorKind;
use clap::{Arg, Command, Error, value_parser};
use hugemm_base::Order;
use std::ffi::OsStr;

/// How often something may be measured.
pub fn runs() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=1000)
}

/// How many CPUs or threads there may be.
pub fn cpus() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=4096)
}

/// How long something may take: a day.
pub fn seconds() -> RangedU64ValueParser {
    value_parser!(u64).range(1..=86_400)
}

/// Reads a time that may be a part of a second.
pub fn time(text: &str) -> Result<f64, String> {
    let time = text.parse().ok().filter(|time: &f64| time.is_finite() && *time > 0.0);
    time.ok_or_else(|| format!("'{text}' is no time in seconds; give a number above 0"))
}

/// Reads an order.
pub fn order(text: &str) -> Result<Order, String> {
    let help = "orders are 0 (4 KiB) to 18 (1 GiB)";
    let number: u32 = text.parse().map_err(|_| format!("'{text}' is no order; {help}"))?;
    Order::new(number).map_err(|_| format!("there is no order {number}; {help}"))
}

/// Reads a size in bytes.
pub fn bytes(text: &str) -> Result<u64, String> {
    text.parse().map(|size: Size| size.0)
}

/// The same, of `least` or more.
pub fn bytes_from(least: u64) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync {
    move |text| match bytes(text)? {
        few if few < least => Err(format!("that is too little; give at least {}", Size(least))),
        enough => Ok(enough),
    }
}

/// A value by its name.
pub fn named<T: Named + Send + Sync>() -> impl TypedValueParser<Value = T> {
    one_of(|_: T| true)
}

/// One of those of a type's values that may be given.
pub fn one_of<T: Named + Send + Sync>(may_be: fn(T) -> bool) -> impl TypedValueParser<Value = T> {
    let help = |text: &'static str| text.trim().trim_end_matches('.');
    let value = |(_, name, text): &(T, &'static str, &'static str)| PossibleValue::new(*name).help(help(text));
    PossibleValuesParser::new(T::VALUES.iter().filter(|value| may_be(value.0)).map(value))
        .try_map(|name| T::by_name(&name).ok_or("there is no such name"))
}

/// Several values with commas between them, each read by `each`.
pub fn list<P>(each: P) -> ListParser<P> {
    ListParser(each)
}

/// See [`list`].
#[derive(Clone, Debug)]
pub struct ListParser<P>(P);

impl<P: TypedValueParser> TypedValueParser for ListParser<P>
where
    P::Value: Copy,
{
    type Value = List<P::Value>;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, text: &OsStr) -> Result<Self::Value, Error> {
        let words = text.to_str().ok_or_else(|| Error::new(ErrorKind::InvalidUtf8).with_cmd(command))?.split(',');
        let values = words.map(|word| self.0.parse_ref(command, arg, word.as_ref())).collect::<Result<Vec<_>, _>>()?;
        List::new(values).map_err(|error| Error::raw(ErrorKind::TooManyValues, error).with_cmd(command))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.0.possible_values()
    }
}
