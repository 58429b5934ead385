//! Messages of conversations, with every field that a chat template may read.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer, Serialize, de};
use serde_json::{Map, Value, json};

const ROLE: &str = "role";
const CONTENT: &str = "content";

/// One turn of a conversation: a JSON object with a string `role`. Chat templates are given all of its fields in their
/// order: `content`, which may be a string, null or a list of parts, `tool_calls`, `reasoning_content`, `name`, and any
/// other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Message(Map<String, Value>);

impl Message {
    /// A message of a role and a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let fields = [(ROLE, role.into()), (CONTENT, content.into())];
        Self(fields.into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect())
    }

    /// The message that an object is; `None` if it has no string `role`.
    pub fn from_fields(fields: Map<String, Value>) -> Option<Self> {
        fields.get(ROLE).is_some_and(Value::is_string).then_some(Self(fields))
    }

    /// Its role, such as `system`, `user` or `assistant`.
    pub fn role(&self) -> &str {
        self.0.get(ROLE).and_then(Value::as_str).unwrap_or_default()
    }

    /// All of its fields.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }

    /// Its `content`; `None` if there is none.
    pub fn content(&self) -> Option<&Value> {
        self.0.get(CONTENT).filter(|content| !content.is_null())
    }

    /// The text of its `content`: a string, or the text parts of a list, one after the other.
    pub fn text(&self) -> Cow<'_, str> {
        match self.content() {
            Some(Value::String(text)) => Cow::Borrowed(text),
            Some(Value::Array(parts)) => parts.iter().filter_map(part_text).collect::<String>().into(),
            _ => Cow::Borrowed(""),
        }
    }

    /// Replaces the `content`.
    #[must_use]
    pub fn with_content(self, content: impl Into<Value>) -> Self {
        self.with(CONTENT, content)
    }

    /// Sets a field.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.0.insert(field.to_owned(), value.into());
        self
    }

    /// Adds text to the end of its `content`.
    pub fn push_text(&mut self, more: &str) {
        match self.0.entry(CONTENT).or_insert(Value::Null) {
            Value::String(text) => text.push_str(more),
            Value::Array(parts) => parts.push(json!({"type": "text", "text": more})),
            other => *other = more.into(),
        }
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        Self::from_fields(fields).ok_or_else(|| de::Error::custom("expected a message: an object with a string `role`"))
    }
}

/// The text of a part of a `content` list; `None` of another kind of part.
pub(super) fn part_text(part: &Value) -> Option<&str> {
    match part {
        Value::String(text) => Some(text),
        Value::Object(fields) => {
            let is_text = fields.get("type").is_none_or(|kind| kind == "text");
            fields.get("text").and_then(Value::as_str).filter(|_| is_text)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(value: Value) -> Message {
        serde_json::from_value(value).expect("a message")
    }

    #[test]
    fn a_message_keeps_all_of_its_fields_in_their_order() {
        let text = r#"{"tool_calls":[{"b":null,"a":1.5}],"role":"assistant","content":null,"x":{"y":[true]}}"#;
        let parsed: Message = serde_json::from_str(text).expect("a message");
        assert_eq!(serde_json::to_string(&parsed).expect("JSON"), text);
        assert_eq!((parsed.role(), parsed.content(), parsed.text().as_ref()), ("assistant", None, ""));
    }

    #[test]
    fn a_message_has_a_role_that_is_text() {
        for wrong in [json!({"content": "x"}), json!({"role": null}), json!({"role": 3}), json!("user"), json!([])] {
            assert!(serde_json::from_value::<Message>(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_text_of_a_list_is_that_of_its_text_parts() {
        let parts = json!([{"type": "text", "text": "a "}, {"type": "image", "text": "no"}, {"text": "b"}, "c"]);
        assert_eq!(message(json!({"role": "user", "content": parts})).text(), "a bc");
    }

    #[test]
    fn text_is_added_to_every_kind_of_content() {
        for (content, expected) in [
            (json!("a"), json!("ab")),
            (json!(null), json!("b")),
            (
                json!([{"type": "text", "text": "a"}]),
                json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            ),
        ] {
            let mut edited = message(json!({"role": "user", "content": content}));
            edited.push_text("b");
            assert_eq!(edited.fields()["content"], expected);
        }
    }
}
