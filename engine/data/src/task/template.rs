//! Templates with fields in braces, and dotted paths into a row.

use std::ops::Range;

use firebrick_spec::json;
use serde_json::{Map, Value};

use super::error::{RowLocation, TaskError};
use super::fields::Fields;

/// One row of a dataset with its place.
#[derive(Clone, Debug)]
pub struct Row {
    /// File and line.
    pub place: RowLocation,
    /// Values by column.
    pub fields: Fields,
}

impl Row {
    /// The value at a dotted path as in the row's file, with [marks](json). A key that contains the dots takes precedence
    /// over nesting.
    ///
    /// # Errors
    /// `TaskError::MissingField` with the row's place and the fields that it has.
    pub fn written(&self, path: &str, setting: &str) -> Result<&Value, TaskError> {
        self.fields.at(path).ok_or_else(|| TaskError::MissingField {
            place: self.place.clone(),
            field: path.to_owned(),
            setting: setting.to_owned(),
            found: names(&self.fields),
        })
    }

    /// The value at a dotted path as text: strings and numbers as in the row, booleans, lists and objects
    /// as JSON. A null has no text.
    ///
    /// # Errors
    /// As [`Self::written`]; for a null an error that names the row and the field.
    pub fn text(&self, path: &str, setting: &str) -> Result<String, TaskError> {
        match self.written(path, setting)? {
            Value::String(text) => Ok(text.clone()),
            Value::Null => {
                Err(self.bad(setting, format!("field `{path}` is null; expected text, a number or a boolean")))
            }
            other => Ok(json::to_text(other)),
        }
    }

    /// The names of its fields, for a message.
    pub fn names(&self) -> String {
        names(&self.fields)
    }

    /// A [`TaskError::BadField`] at this row.
    pub fn bad(&self, setting: &str, detail: impl Into<String>) -> TaskError {
        TaskError::bad_field(&self.place, setting, detail)
    }
}

/// The fields of a row with one level of nesting, for a message.
fn names(fields: &Map<String, Value>) -> String {
    let mut paths = Vec::new();
    for (key, value) in fields {
        match value.as_object().filter(|inner| !inner.is_empty()) {
            Some(inner) => paths.extend(inner.keys().map(|k| format!("`{key}.{k}`"))),
            None => paths.push(format!("`{key}`")),
        }
    }
    if paths.is_empty() { "none (the row is empty)".to_owned() } else { paths.join(", ") }
}

/// A text with fields of a row in braces; `{{` and `}}` are literal braces.
#[derive(Clone, Debug)]
pub(crate) struct Template {
    setting: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
enum Piece {
    Literal(String),
    Field(String),
}

impl Template {
    pub fn parse(template: &str, setting: &str) -> Result<Self, TaskError> {
        let fail = |detail: &str| TaskError::Template {
            setting: setting.to_owned(),
            template: template.to_owned(),
            detail: detail.to_owned(),
        };
        let mut pieces = Vec::new();
        let mut literal = String::new();
        let mut rest = template;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            let after = &rest[at + 1..];
            if let Some(tail) = after.strip_prefix(brace) {
                literal.push_str(brace);
                rest = tail;
                continue;
            }
            if brace == "}" {
                return Err(fail("has a `}` without a `{`"));
            }
            let end = after.find('}').ok_or_else(|| fail("has a `{` without a `}`"))?;
            let field = after[..end].trim();
            if field.is_empty() {
                return Err(fail("has empty braces"));
            }
            if field.contains('{') {
                return Err(fail("has a `{` inside a field name"));
            }
            if !literal.is_empty() {
                pieces.push(Piece::Literal(std::mem::take(&mut literal)));
            }
            pieces.push(Piece::Field(field.to_owned()));
            rest = &after[end + 1..];
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            pieces.push(Piece::Literal(literal));
        }
        Ok(Self { setting: setting.to_owned(), pieces })
    }

    pub fn render(&self, row: &Row) -> Result<String, TaskError> {
        Ok(self.render_with_literals(row)?.0)
    }

    /// Renders the template, with the byte ranges of its literals.
    pub fn render_with_literals(&self, row: &Row) -> Result<(String, Vec<Range<usize>>), TaskError> {
        let (mut text, mut literals) = (String::new(), Vec::new());
        for piece in &self.pieces {
            match piece {
                Piece::Literal(literal) => {
                    literals.push(text.len()..text.len() + literal.len());
                    text.push_str(literal);
                }
                Piece::Field(path) => text.push_str(&row.text(path, &self.setting)?),
            }
        }
        Ok((text, literals))
    }

    /// Returns true if it has a field of a column.
    pub fn reads(&self, column: &str) -> bool {
        let is_of = |path: &str| path.strip_prefix(column).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        self.pieces.iter().any(|piece| matches!(piece, Piece::Field(path) if is_of(path)))
    }

    /// Errors of all fields without text, of which [`render`](Self::render) returns the first.
    pub fn faults(&self, row: &Row) -> Vec<TaskError> {
        let fields = self.pieces.iter().filter_map(|piece| match piece {
            Piece::Literal(_) => None,
            Piece::Field(path) => row.text(path, &self.setting).err(),
        });
        fields.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::error::Unit;

    fn row(text: &str) -> Row {
        let Ok(Value::Object(fields)) = json::parse(text.as_bytes()) else { panic!("{text}") };
        let place = RowLocation { path: "data.jsonl".into(), line: 3, unit: Unit::Line };
        Row { place, fields: fields.into() }
    }

    fn rendered(template: &str, json: &str) -> String {
        Template::parse(template, "prompt").and_then(|t| t.render(&row(json))).expect("renders")
    }

    fn refused(template: &str) -> String {
        Template::parse(template, "prompt").expect_err("refused").to_string()
    }

    #[test]
    fn fields_are_filled_in_and_doubled_braces_stay() {
        assert_eq!(rendered("Q: {q}\nA:", r#"{"q": "1+1?"}"#), "Q: 1+1?\nA:");
        assert_eq!(rendered("{{{q}}} is {n}", r#"{"q": "x", "n": 0.5}"#), "{x} is 0.5");
        assert_eq!(rendered("{a.b} {a.c.d}", r#"{"a": {"b": true, "c.d": [1, 2]}}"#), "true [1,2]");
    }

    #[test]
    fn a_number_is_written_as_the_row_has_it() {
        for number in ["12345678901234567890123", "-0", "1E3", "1.50", "1e-05", "9007199254740993", "NaN", "-Infinity"]
        {
            assert_eq!(
                rendered("{n} {a.n}", &format!(r#"{{"n": {number}, "a": {{"n": {number}}}}}"#)),
                format!("{number} {number}")
            );
            assert_eq!(rendered("{n}", &format!(r#"{{"n": [{number}]}}"#)), format!("[{number}]"));
        }
    }

    #[test]
    fn a_field_that_looks_like_a_template_is_not_rendered_again() {
        assert_eq!(rendered("{q}", r#"{"q": "{q}"}"#), "{q}");
    }

    #[test]
    fn a_missing_field_is_named_with_the_fields_that_are_there() {
        let template = Template::parse("{question}", "prompt").expect("parses");
        let error = template.render(&row(r#"{"problem": "", "meta": {"id": 1}}"#));
        assert_eq!(
            error.expect_err("missing").to_string(),
            "data.jsonl, line 3: the row has no field `question` (set by `prompt`); \
             its fields are `problem`, `meta.id`"
        );
    }

    #[test]
    fn a_null_field_is_refused() {
        let template = Template::parse("{q}", "prompt").expect("parses");
        let error = template.render(&row(r#"{"q": null}"#)).expect_err("null").to_string();
        assert!(error.contains("field `q` is null"), "{error}");
    }

    #[test]
    fn unbalanced_and_empty_braces_say_what_is_wrong() {
        assert_eq!(
            refused("Q: {question"),
            "the template \"Q: {question\" of `prompt` has a `{` without a `}`; \
             write a field as `{name}`, and a literal brace as `{{` or `}}`"
        );
        assert!(refused("a } b").contains("has a `}` without a `{`"));
        assert!(refused("a { } b").contains("empty braces"));
        assert!(refused("a {b {c} d").contains("inside a field name"));
    }
}
