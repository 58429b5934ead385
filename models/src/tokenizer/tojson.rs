//! The `tojson` filter as transformers defines it for chat templates: Python's `json.dumps`.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python_text::{is_integer, number};
use super::special_tokens::MARKS;

/// `value|tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
///
/// Nothing is escaped for HTML, which Jinja's own filter would do.
#[expect(clippy::needless_pass_by_value, reason = "the signature minijinja calls")]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let given = |name: &str| -> Result<Option<Value>, Error> {
        Ok(options.get::<Option<Value>>(name)?.filter(|value| !value.is_none()))
    };
    let indent = match given("indent")? {
        // Python takes a number of spaces or the indentation itself.
        Some(text) if text.kind() == ValueKind::String => Some(text.to_string()),
        Some(width) => Some(" ".repeat(usize::try_from(width)?)),
        None => None,
    };
    let (item, key) = match given("separators")? {
        Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
        // Python leaves no space at the end of a line.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = Style {
        indent,
        item,
        key,
        ascii: given("ensure_ascii")?.is_some_and(|yes| yes.is_true()),
        sorted: given("sort_keys")?.is_some_and(|yes| yes.is_true()),
    };
    options.assert_all_used()?;

    let mut out = String::new();
    style.value(&mut out, value, 0)?;
    Ok(out)
}

/// Python's layout of JSON.
struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

impl Style {
    fn value(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            _ if is_integer(value) => out.push_str(&number(value)),
            ValueKind::Number => out.push_str(match number(value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                finite => finite,
            }),
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => return self.map(out, value, depth),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                return self.block(out, ['[', ']'], depth, &items, |out, item| self.value(out, item, depth + 1));
            }
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: a value of kind {other} cannot be written as JSON"),
                ));
            }
        }
        Ok(())
    }

    fn map(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            entries.push((Self::key_text(&key), value.get_item(&key)?));
        }
        if self.sorted {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.block(out, ['{', '}'], depth, &entries, |out, (key, value)| {
            self.string(out, key);
            out.push_str(&self.key);
            self.value(out, value, depth + 1)
        })
    }

    /// Keys of JSON are strings: Python writes other keys as it would write the values.
    fn key_text(key: &Value) -> String {
        match key.kind() {
            ValueKind::None => "null".to_owned(),
            ValueKind::Bool => key.is_true().to_string(),
            _ => key.to_string(),
        }
    }

    /// Brackets around `items`, each on a line of its own when there is indentation.
    fn block<T>(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        depth: usize,
        items: &[T],
        mut write: impl FnMut(&mut String, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item);
            }
            self.line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn string(&self, out: &mut String, text: &str) {
        // serde_json escapes what Python does when it may write any character.
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ascii {
            out.push_str(&quoted);
            return;
        }
        for c in quoted.chars() {
            // a mark is no character of the text
            if (' '..='~').contains(&c) || MARKS.contains(&c) {
                out.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
}
