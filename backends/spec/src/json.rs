//! JSON as Python's `json` writes and reads it: `NaN`, `Infinity` and `-Infinity` are numbers, and a number keeps the
//! text that it is written as.
//!
//! `serde_json`'s numbers have 64 bits. A number that these would write otherwise is a *mark*: an object of one key,
//! which [`plain`] turns into the nearest number of 64 bits and [`to_text`] into its text.

use serde_json::{Map, Number, Value, json};

/// The key of a mark.
const MARK: &str = "\u{0}number";

/// Python's spelling of floats that JSON does not have.
const NOT_FINITE: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// Why and where a text is not JSON.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at line {line}, column {column}")]
pub struct Fault {
    /// Its line, from 1.
    pub line: usize,
    /// The column in the line, from 1; 0 at its end.
    pub column: usize,
    /// The mistake.
    pub reason: String,
}

/// The value of a text, with marks.
///
/// # Errors
/// A [`Fault`] for what Python does not read either.
pub fn parse(text: &[u8]) -> Result<Value, Fault> {
    if let Err(error) = std::str::from_utf8(text) {
        let before = &text[..error.valid_up_to()];
        let begins = before.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        return Err(Fault {
            line: before.split(|&b| b == b'\n').count(),
            column: before.len() - begins + 1,
            reason: format!("byte 0x{:02X} is not UTF-8", text[before.len()]),
        });
    }
    let (marked, changes) = marked(text);
    serde_json::from_slice(marked.as_deref().unwrap_or(text)).map_err(|error| {
        let message = error.to_string();
        let reason = message.split(" at line ").next().unwrap_or_default().to_owned();
        let read = marked.as_deref().unwrap_or(text);
        let column = column_before(read, &changes, error.line(), error.column());
        Fault { line: error.line(), column, reason }
    })
}

/// A number that a mark replaced: where the mark ends, and by how much it is longer.
struct Change {
    end: usize,
    longer: usize,
}

/// The column of the text before marks were put into it.
fn column_before(text: &[u8], changes: &[Change], line: usize, column: usize) -> usize {
    let begins: usize = text.split_inclusive(|&b| b == b'\n').take(line.saturating_sub(1)).map(<[u8]>::len).sum();
    let before = changes.iter().filter(|change| change.end > begins && change.end <= begins + column);
    column.saturating_sub(before.map(|change| change.longer).sum())
}

/// The text with marks for the numbers that need one; none where no number does.
fn marked(text: &[u8]) -> (Option<Vec<u8>>, Vec<Change>) {
    let mut out: Option<Vec<u8>> = None;
    let (mut changes, mut at, mut copied) = (Vec::new(), 0, 0);
    while at < text.len() {
        let start = at;
        at += 1;
        match text[start] {
            b'"' => at = end_of_string(text, at),
            b'-' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                let is_part = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
                at += text[at..].iter().take_while(|b| is_part(b)).count();
                let Some(number) = std::str::from_utf8(&text[start..at]).ok().filter(|number| needs_mark(number))
                else {
                    continue;
                };
                let out = out.get_or_insert_default();
                out.extend_from_slice(&text[copied..start]);
                let mark = number_as_written(number).to_string();
                out.extend_from_slice(mark.as_bytes());
                changes.push(Change { end: out.len(), longer: mark.len() - number.len() });
                copied = at;
            }
            _ => {}
        }
    }
    if let Some(out) = &mut out {
        out.extend_from_slice(&text[copied..]);
    }
    (out, changes)
}

/// End of a string that began before `at`.
fn end_of_string(text: &[u8], mut at: usize) -> usize {
    while at < text.len() {
        match text[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    text.len()
}

/// Returns true if a word is a number that 64 bits do not write again as it is.
fn needs_mark(word: &str) -> bool {
    let digits = word.strip_prefix('-').unwrap_or(word);
    if digits.len() < 19 && digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0') {
        return false;
    }
    is_number(word) && serde_json::from_str(word).map_or(true, |number: Number| number.to_string() != word)
}

/// Returns true if Python reads a text as a number.
fn is_number(word: &str) -> bool {
    if NOT_FINITE.contains(&word) {
        return true;
    }
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let unsigned = word.strip_prefix('-').unwrap_or(word);
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))),
        None => (unsigned, None),
    };
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (mantissa, None),
    };
    let has_zeros = whole.len() > 1 && whole.starts_with('0');
    digits(whole) && !has_zeros && fraction.is_none_or(digits) && exponent.is_none_or(digits)
}

/// A number from its text, as a mark where it needs one; text where Python does not read it as a number.
pub fn number(text: &str) -> Value {
    if needs_mark(text) {
        return number_as_written(text);
    }
    match serde_json::from_str(text) {
        Ok(number @ Value::Number(_)) => number,
        _ => Value::String(text.to_owned()),
    }
}

/// A float, as a mark where JSON does not have it.
pub fn float(value: f64) -> Value {
    match Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None if value.is_nan() => number_as_written(NOT_FINITE[0]),
        None => number_as_written(NOT_FINITE[if value > 0.0 { 1 } else { 2 }]),
    }
}

fn number_as_written(text: &str) -> Value {
    json!({MARK: text})
}

/// The text of a number that is a mark; `None` of any other value.
pub fn number_text(value: &Value) -> Option<&str> {
    let object = value.as_object().filter(|object| object.len() == 1)?;
    // a file may have the key too: what is no number stays what it is
    object.get(MARK)?.as_str().filter(|text| is_number(text))
}

/// Returns true if a value has a mark in it.
pub fn has_marks(value: &Value) -> bool {
    match value {
        Value::Object(map) => number_text(value).is_some() || map.values().any(has_marks),
        Value::Array(list) => list.iter().any(has_marks),
        _ => false,
    }
}

/// The value without marks: each is the nearest number of 64 bits, or null where there is none.
pub fn plain(value: &Value) -> Value {
    unmarked(value, &|_| Value::Null)
}

/// The value without marks, as transformers 5 writes configs: what is not finite is `{"__float__": "Infinity"}`.
pub fn plain_config(value: &Value) -> Value {
    unmarked(value, &|text| json!({"__float__": text}))
}

fn unmarked(value: &Value, not_finite: &dyn Fn(&str) -> Value) -> Value {
    if let Some(text) = number_text(value) {
        let whole = text.parse::<i64>().ok().map(Value::from);
        let float = || text.parse().ok().and_then(Number::from_f64).map(Value::Number);
        return whole.or_else(float).unwrap_or_else(|| not_finite(text));
    }
    match value {
        Value::Object(map) => {
            let members = map.iter().map(|(key, value)| (key.clone(), unmarked(value, not_finite)));
            Value::Object(members.collect::<Map<_, _>>())
        }
        Value::Array(list) => list.iter().map(|value| unmarked(value, not_finite)).collect(),
        other => other.clone(),
    }
}

/// The value as one line of JSON that Python reads, with every mark as its text.
pub fn to_text(value: &Value) -> String {
    let mut text = String::new();
    write(value, None, &mut text);
    text
}

/// [`to_text`] on several lines, indented by two spaces.
pub fn to_lines(value: &Value) -> String {
    let mut text = String::new();
    write(value, Some(0), &mut text);
    text
}

/// Writes a value, at this depth of indentation if there is any.
fn write(value: &Value, depth: Option<usize>, to: &mut String) {
    if let Some(text) = number_text(value) {
        to.push_str(text);
        return;
    }
    let inner = depth.map(|depth| depth + 1);
    match value {
        Value::Object(map) if !map.is_empty() => {
            let colon = if depth.is_some() { ": " } else { ":" };
            block(['{', '}'], depth, map.iter(), to, |(key, value), to| {
                to.push_str(&Value::from(key.as_str()).to_string());
                to.push_str(colon);
                write(value, inner, to);
            });
        }
        Value::Array(list) if !list.is_empty() => {
            block(['[', ']'], depth, list.iter(), to, |value, to| write(value, inner, to));
        }
        other => to.push_str(&other.to_string()),
    }
}

/// Writes brackets around items, each on a line if there is indentation.
fn block<T>(
    [open, close]: [char; 2],
    depth: Option<usize>,
    items: impl Iterator<Item = T>,
    to: &mut String,
    item: impl Fn(T, &mut String),
) {
    let line = |depth: Option<usize>, to: &mut String| {
        if let Some(depth) = depth {
            to.push('\n');
            (0..depth).for_each(|_| to.push_str("  "));
        }
    };
    to.push(open);
    for (at, value) in items.enumerate() {
        to.push_str(if at > 0 { "," } else { "" });
        line(depth.map(|depth| depth + 1), to);
        item(value, to);
    }
    line(depth, to);
    to.push(close);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_written_as_it_was_read() {
        for number in [
            "0",
            "-1",
            "1.5",
            "1.50",
            "-0",
            "-0.0",
            "1E3",
            "1e3",
            "1e-05",
            "1e+20",
            "12345678901234567890123",
            "9007199254740993",
            "18446744073709551615",
            "18446744073709551616",
            "-9223372036854775809",
            "1e999",
            "0.1000000000000000055511151231257827",
            "NaN",
            "Infinity",
            "-Infinity",
        ] {
            let text = format!("{{\"a\":[{number},\"{number}\",true,null],\"b\\\"1E3\":{{\"c\":{number}}}}}");
            let value = parse(text.as_bytes()).unwrap();
            assert_eq!(to_text(&value), text);
            assert_eq!(to_text(&parse(number.as_bytes()).unwrap()), number);
        }
    }

    #[test]
    fn the_plain_value_has_the_nearest_number() {
        let value = parse(br"[12345678901234567890123, -0, 1E3, 1.50, NaN, -Infinity, 7]").unwrap();
        assert!(has_marks(&value));
        assert_eq!(plain(&value), json!([1.234_567_890_123_456_8e22, 0, 1000.0, 1.5, null, null, 7]));
        assert!(!has_marks(&plain(&value)));
        let config = plain_config(&parse(br#"{"a": [0.0, Infinity], "b": 1e-05}"#).unwrap());
        assert_eq!(config, json!({"a": [0.0, {"__float__": "Infinity"}], "b": 1e-5}));
    }

    #[test]
    fn what_python_does_not_read_is_refused_at_its_column() {
        for (text, column) in [
            (r#"{"a": 01}"#, 8),
            (r#"{"a": +1}"#, 7),
            (r#"{"a": nan}"#, 8),
            (r#"{"a": -NaN}"#, 8),
            (r#"{"a": .5}"#, 7),
            (r#"{"a": 1.}"#, 9),
            (r#"{"a": NaN, "b": 1E3, "c": }"#, 27),
        ] {
            let fault = parse(text.as_bytes()).unwrap_err();
            assert_eq!((fault.line, fault.column), (1, column), "{text}: {fault}");
        }
        let fault = parse(b"{\"a\":\n \"caf\xe9\"}").unwrap_err();
        assert_eq!((fault.line, fault.column, &*fault.reason), (2, 6, "byte 0xE9 is not UTF-8"));
        let fault = parse(b"{\"a\": NaN,\n \"b\": 1E3 x}").unwrap_err();
        assert_eq!((fault.line, fault.column), (2, 11), "{fault}");
    }

    #[test]
    fn lines_are_those_of_other_json_with_numbers_as_written() {
        let value = json!({"a": [1, {"b": null}], "c": {}, "d": [], "e": "x"});
        assert_eq!(to_lines(&value), serde_json::to_string_pretty(&value).unwrap());
        let value = parse(br#"{"a": [12345678901234567890123]}"#).unwrap();
        assert_eq!(to_lines(&value), "{\n  \"a\": [\n    12345678901234567890123\n  ]\n}");
    }

    #[test]
    fn a_file_with_the_key_of_a_mark_writes_no_other_json() {
        let text = "{\"\\u0000number\":\"1, \\\"evil\\\": 2\"}";
        let value = parse(text.as_bytes()).unwrap();
        assert_eq!(to_text(&value), text);
        assert!(!has_marks(&value));
    }

    #[test]
    fn what_is_no_number_is_text() {
        assert_eq!(number("007"), json!("007"));
        assert_eq!(number("7"), json!(7));
        assert_eq!(to_text(&number("1.50")), "1.50");
        assert_eq!(to_text(&float(f64::NEG_INFINITY)), "-Infinity");
    }
}
