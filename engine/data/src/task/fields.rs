//! The fields of a row, which keep the spelling of numbers.

use std::ops::Deref;

use firebrick_spec::json;
use serde_json::{Map, Value};

/// The fields of a row: a map of values whose numbers have 64 bits. Rewards, environments, templates and answers get
/// numbers as in the row's file: integers of any length, decimals with all their digits, NaN and infinities.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fields {
    plain: Map<String, Value>,
    /// The columns with a number that 64 bits cannot represent, with [marks](json).
    marked: Map<String, Value>,
}

impl Fields {
    /// Sets a column, which may have [marks](json).
    pub fn insert(&mut self, name: impl Into<String>, value: Value) {
        let name = name.into();
        self.marked.remove(&name);
        let plain = if json::has_marks(&value) {
            let plain = json::plain(&value);
            self.marked.insert(name.clone(), value);
            plain
        } else {
            value
        };
        self.plain.insert(name, plain);
    }

    /// A column as in its file, with [marks](json).
    pub fn column(&self, name: &str) -> Option<&Value> {
        self.marked.get(name).or_else(|| self.plain.get(name))
    }

    /// Columns as in their file, with [marks](json), in order.
    pub fn columns(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.plain.iter().map(|(name, value)| (name, self.marked.get(name).unwrap_or(value)))
    }

    /// The value at a dotted path, with [marks](json). A key that itself contains the dots wins over nesting.
    pub(crate) fn at(&self, path: &str) -> Option<&Value> {
        let nested = |(dot, _)| lookup(self.column(&path[..dot])?.as_object()?, &path[dot + 1..]);
        self.column(path).or_else(|| path.match_indices('.').find_map(nested))
    }

    /// The row as one line of JSON.
    pub(crate) fn to_text(&self) -> String {
        if self.marked.is_empty() {
            return serde_json::to_string(&self.plain).unwrap_or_default();
        }
        let columns = self.columns().map(|(name, value)| (name.clone(), value.clone()));
        json::to_text(&Value::Object(columns.collect()))
    }
}

/// The value at a dotted path.
fn lookup<'a>(fields: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    let nested = |(dot, _)| lookup(fields.get(&path[..dot])?.as_object()?, &path[dot + 1..]);
    fields.get(path).or_else(|| path.match_indices('.').find_map(nested))
}

impl Deref for Fields {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Self::Target {
        &self.plain
    }
}

impl From<Map<String, Value>> for Fields {
    /// Fields of columns, which may have [marks](json).
    fn from(columns: Map<String, Value>) -> Self {
        let mut fields = Self { plain: columns, marked: Map::new() };
        for (name, value) in &mut fields.plain {
            if json::has_marks(value) {
                let plain = json::plain(value);
                fields.marked.insert(name.clone(), std::mem::replace(value, plain));
            }
        }
        fields
    }
}

impl From<Fields> for Map<String, Value> {
    fn from(fields: Fields) -> Self {
        fields.plain
    }
}

impl FromIterator<(String, Value)> for Fields {
    fn from_iter<I: IntoIterator<Item = (String, Value)>>(columns: I) -> Self {
        columns.into_iter().collect::<Map<_, _>>().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        let Ok(Value::Object(own)) = json::parse(text.as_bytes()) else { panic!("{text}") };
        own.into()
    }

    #[test]
    fn a_row_is_written_as_it_was_read_and_its_values_have_64_bits() {
        let text = r#"{"a":12345678901234567890123,"b":{"c":[1.50,NaN]},"d":7}"#;
        let fields = fields(text);
        assert_eq!(fields.to_text(), text);
        assert_eq!(fields["b"], serde_json::json!({"c": [1.5, null]}));
        assert_eq!(fields.at("b.c").map(json::to_text).as_deref(), Some("[1.50,NaN]"));
        assert_eq!(fields.columns().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b", "d"]);
    }

    #[test]
    fn a_column_that_is_set_again_is_what_it_was_set_to() {
        let mut fields = fields(r#"{"a":1E3}"#);
        fields.insert("a", Value::from(2));
        assert_eq!(fields.to_text(), r#"{"a":2}"#);
        fields.insert("a", json::number("98765432109876543210"));
        assert_eq!(fields.to_text(), r#"{"a":98765432109876543210}"#);
        assert_eq!(fields["a"], 98_765_432_109_876_543_210_f64);
    }
}
