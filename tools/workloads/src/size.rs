//! Sizes as `perf bench` writes them: `4KB`, `2MB`, `64GB`, powers of 1024.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, read from and written in binary units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl Size {
    /// Rounded for people: at most one decimal, in the largest unit that leaves a number of one or more.
    pub fn rounded(self) -> String {
        match UNITS.into_iter().find(|(_, shift)| self.0 >= 1 << shift) {
            Some((unit, shift)) if self.0.is_multiple_of(1 << shift) => format!("{}{unit}", self.0 >> shift),
            Some((unit, shift)) => format!("{:.1}{unit}", self.0 as f64 / (1_u64 << shift) as f64),
            None => format!("{}B", self.0),
        }
    }
}

const UNITS: [(&str, u32); 4] = [("TB", 40), ("GB", 30), ("MB", 20), ("KB", 10)];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let help = "write a number and a unit, such as 4KB, 2MB or 1GB (units are powers of 1024)";
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let number: u64 = match number.parse() {
            Ok(number) => number,
            Err(_) if digits == 0 => return Err(format!("no number in '{text}'; {help}")),
            Err(_) => return Err(format!("'{text}' is larger than any memory; {help}")),
        };
        let shift = match unit.trim().to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            _ => return Err(format!("unknown unit '{unit}'; {help}")),
        };
        match number.checked_mul(1 << shift) {
            Some(0) => Err(format!("'{text}' is no size: it must be larger than zero")),
            Some(bytes) => Ok(Size(bytes)),
            None => Err(format!("'{text}' is larger than any memory; {help}")),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS.into_iter().find(|(_, shift)| self.0 >= 1 << shift && self.0.is_multiple_of(1 << shift));
        let text = match exact {
            Some((unit, shift)) => format!("{}{unit}", self.0 >> shift),
            None => format!("{}B", self.0),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_perf_units() {
        for (text, bytes) in [
            ("4KB", 4096),
            ("2MB", 2 << 20),
            ("1GB", 1 << 30),
            ("64g", 64 << 30),
            ("8MiB", 8 << 20),
            ("512", 512),
            ("3TB", 3 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_named() {
        for text in ["", "0", "0MB", "MB", "-1MB", "1XB", "99999999999999999999", "99999999999GB", "1.5GB"] {
            let error = text.parse::<Size>().expect_err(text);
            assert!(!error.contains('\n') && error.len() > 20, "{error}");
        }
    }

    #[test]
    fn sizes_print_as_they_are_read() {
        for text in ["4KB", "2MB", "1GB", "5TB", "1000B", "48MB"] {
            assert_eq!(text.parse::<Size>().expect(text).to_string(), text);
        }
        assert_eq!(Size((64 << 20) + 4096).to_string(), "65540KB");
        assert_eq!(Size((64 << 20) + (1 << 19)).rounded(), "64.5MB");
        assert_eq!((Size(1 << 30).rounded(), Size(100).rounded()), ("1GB".to_owned(), "100B".to_owned()));
    }
}
