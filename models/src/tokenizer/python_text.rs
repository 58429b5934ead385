//! Values as Python writes them: what a template prints of a list, a dictionary or a number.

use std::fmt::{self, Write};
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr, ValueKind};

/// An integer that the template engine has no type for, in digits.
#[derive(Debug)]
struct LongInteger(String);

impl Object for LongInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The number that Python reads a text of JSON as: integers keep all their digits, others are floats.
pub(super) fn parsed(text: &str) -> Value {
    if let Ok(integer) = text.parse::<i128>() {
        return integer.into();
    }
    let digits = text.strip_prefix('-').unwrap_or(text);
    if digits.bytes().all(|b| b.is_ascii_digit()) {
        return Value::from_object(LongInteger(text.to_owned()));
    }
    // Rust reads Python's names of what is not finite, and what is too large is infinite to both
    text.parse().map_or_else(|_| text.into(), |float: f64| float.into())
}

/// True if a value is an integer of any length.
pub(super) fn is_integer(value: &Value) -> bool {
    value.is_integer() || value.downcast_object_ref::<LongInteger>().is_some()
}

/// `str(value)`.
pub(super) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => repr(value),
    }
}

/// `repr(value)`.
pub(super) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write(&mut out, value);
    out
}

fn write(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            out.push('[');
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write(out, &item);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write(out, &key);
                out.push_str(": ");
                write(out, &value.get_item(&key).unwrap_or_default());
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// A number: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn number(value: &Value) -> String {
    if is_integer(value) {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else {
        return value.to_string();
    };
    if !float.is_finite() {
        return float.to_string().to_lowercase();
    }
    let shortest = format!("{float:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if float == 0.0 || (-4..16).contains(&exponent) {
        return format!("{float:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// A string in quotes, single ones unless it has such and no double ones.
fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                // writing to a string cannot fail
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::context;

    #[test]
    fn values_are_written_as_python_writes_them() {
        // repr of CPython 3.11
        let value = context! { a => vec![Value::from(1), Value::from(()), Value::from(true)], b => "it's", c => "\"'\n\\\u{7f}é" };
        let text = repr(&value);
        for part in ["'a': [1, None, True]", "'b': \"it's\"", r#"'c': '"\'\n\\\x7fé'"#] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        for (float, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e-7, "1e-07"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e300, "1.25e+300"),
            (123_456_789.125, "123456789.125"),
        ] {
            assert_eq!(number(&Value::from(float)), expected);
        }
        assert_eq!(number(&Value::from(10_i64.pow(17))), "100000000000000000");
    }

    #[test]
    fn numbers_are_read_as_python_reads_them() {
        // repr(json.loads(text)) of CPython 3.11
        let long = "1234567890".repeat(9);
        for (text, expected) in [
            ("98765432109876543210", "98765432109876543210"),
            ("-18446744073709551616", "-18446744073709551616"),
            (long.as_str(), long.as_str()),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1.50", "1.5"),
            ("1E3", "1000.0"),
            ("12345678901234567890.5", "1.2345678901234567e+19"),
            ("1e999", "inf"),
            ("-Infinity", "-inf"),
            ("NaN", "nan"),
        ] {
            let value = parsed(text);
            assert_eq!(repr(&value), expected, "{text}");
            assert_eq!(is_integer(&value), !text.contains(['.', 'E', 'e', 'N', 'I']), "{text}");
        }
    }
}
