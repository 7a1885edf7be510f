//! Results, as JSON lines to the host.
//!
//! Each line is an object with `seq`, its number from 0, so that the host notices a lost one, and `kind`:
//!
//! | kind | other fields |
//! |---|---|
//! | `boot` | `cpus`, `memory` (bytes that the allocator manages), `counter_khz`, `interrupt_controller` |
//! | `progress` | `done`, `of`, `what` |
//! | `sample` | a figure: the `value` of `metric` in `unit`, with the `labels` that tell it from others |
//! | `record` | what one run counted: the `name` of a record of `hugemm_workloads`, its fields by their names, and `labels` |
//! | `note` | `text`, for the user |
//! | `failed` | `text`: the command failed, and why; the last line |
//! | `done` | nothing: the command succeeded; the last line |
//!
//! Everything else on the port is text for people.

use core::fmt::{self, Write};

/// The value of a field.
#[derive(Clone, Copy)]
pub enum Value<'a> {
    /// A whole number.
    Int(u64),
    /// Any number; what JSON cannot say (not finite) becomes `null`.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// Text, as it prints.
    Text(&'a dyn fmt::Display),
}

impl From<u64> for Value<'_> {
    fn from(value: u64) -> Self {
        Value::Int(value)
    }
}

impl From<u32> for Value<'_> {
    fn from(value: u32) -> Self {
        Value::Int(value.into())
    }
}

impl From<bool> for Value<'_> {
    fn from(value: bool) -> Self {
        Value::Bool(value)
    }
}

impl From<f64> for Value<'_> {
    fn from(value: f64) -> Self {
        Value::Float(value)
    }
}

impl<'a, T: fmt::Display> From<&'a T> for Value<'a> {
    fn from(value: &'a T) -> Self {
        Value::Text(value)
    }
}

/// Escapes what passes through it for a JSON string.
struct Escape<'a, W>(&'a mut W);

impl<W: Write> Write for Escape<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '"' => self.0.write_str("\\\"")?,
                '\\' => self.0.write_str("\\\\")?,
                c if c < ' ' => write!(self.0, "\\u{:04x}", c as u32)?,
                c => self.0.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Named values.
pub type Fields<'a> = &'a [(&'a str, Value<'a>)];

fn fields(out: &mut impl Write, fields: Fields<'_>) -> fmt::Result {
    for (index, (name, value)) in fields.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write!(out, "{comma}\"{name}\":")?;
        match value {
            Value::Int(value) => write!(out, "{value}")?,
            Value::Bool(value) => write!(out, "{value}")?,
            Value::Float(value) if value.is_finite() => write!(out, "{value:?}")?,
            Value::Float(_) => out.write_str("null")?,
            Value::Text(value) => {
                out.write_char('"')?;
                write!(Escape(out), "{value}")?;
                out.write_char('"')?;
            }
        }
    }
    Ok(())
}

/// Writes a line: number `seq`, its `kind`, its fields, and labels if it has any.
pub fn line(out: &mut impl Write, seq: u64, kind: &str, own: Fields<'_>, labels: Option<Fields<'_>>) -> fmt::Result {
    fields(out_open(out)?, &[("seq", Value::Int(seq)), ("kind", Value::Text(&kind))])?;
    if !own.is_empty() {
        out.write_char(',')?;
        fields(out, own)?;
    }
    if let Some(labels) = labels {
        out.write_str(",\"labels\":{")?;
        fields(out, labels)?;
        out.write_char('}')?;
    }
    out.write_str("}\n")
}

fn out_open<W: Write>(out: &mut W) -> Result<&mut W, fmt::Error> {
    out.write_char('{')?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    #[test]
    fn lines_are_json() {
        let mut out = String::new();
        let text = "a \"quoted\"\\\n\u{1} µ";
        let own = [
            ("metric", Value::from(&text)),
            ("value", 1.5.into()),
            ("n", 7_u64.into()),
            ("x", f64::NAN.into()),
            ("on", true.into()),
        ];
        line(&mut out, 3, "sample", &own, Some(&[("order", 9_u32.into())])).expect("a string");
        assert!(out.ends_with("}\n") && out.lines().count() == 1, "{out}");
        let read: Json = serde_json::from_str(&out).expect("JSON");
        let expected = json!({
            "seq": 3, "kind": "sample", "metric": text, "value": 1.5, "n": 7, "x": null, "on": true,
            "labels": {"order": 9}
        });
        assert_eq!(read, expected);
    }

    #[test]
    fn a_line_may_have_no_fields() {
        let mut out = String::new();
        line(&mut out, 0, "done", &[], None).expect("a string");
        assert_eq!(out, "{\"seq\":0,\"kind\":\"done\"}\n");
    }
}
