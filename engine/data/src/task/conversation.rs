//! Inputs of chat templates from a row: messages with all fields, tools and variables. Rows with images,
//! video or audio are rejected.

use firebrick_models::tokenizer::{CONVERSATION_VARIABLES, Message};
use firebrick_spec::json::{parse, to_text};
use serde_json::{Map, Value};

use super::rows::fills_structs;
use super::template::Row;
use super::{TEMPLATE_KWARGS, TOOLS, TaskError};

/// Columns of media, as datasets of TRL, verl and others have them.
const MEDIA_COLUMNS: [&str; 6] = ["image", "images", "video", "videos", "audio", "audios"];

/// Substrings of the kinds and keys of media content parts.
const MEDIA: [&str; 3] = ["image", "video", "audio"];

/// Fields of a message that do not give a template anything to write.
const LABELS: [&str; 4] = ["role", "content", "name", "tool_call_id"];

/// A chat message of a row, with all of its fields.
///
/// # Errors
/// `TaskError` for a message without a role, or with content that is no text.
pub fn message(value: &Value, path: &str, setting: &str, row: &Row) -> Result<Message, TaskError> {
    let bad = |what: &str| row.bad(setting, format!("field `{path}` has the message {}, {what}", to_text(value)));
    let value = if fills_structs(&row.place.path) { without_nulls(value) } else { value.clone() };
    let message = match value {
        Value::Object(fields) => Message::from_fields(fields),
        _ => None,
    };
    let message = message.ok_or_else(|| bad("expected an object with a string `role`"))?;
    if let Some(media) = media_kind(&message) {
        return Err(bad(&format!("which has {media}: only text is trained on; remove the row")));
    }
    let is_empty = |(name, value): (&String, &Value)| LABELS.contains(&name.as_str()) || value.is_null();
    if message.content().is_none() && message.fields().iter().all(is_empty) {
        return Err(bad("expected an object with `role` and `content` (or `tool_calls`, or another field with text)"));
    }
    Ok(message)
}

/// The kind of image, video or audio that a message has.
fn media_kind(message: &Message) -> Option<String> {
    let has = |value: &Value| match value {
        Value::Null => false,
        Value::Array(list) => !list.is_empty(),
        _ => true,
    };
    let is_media = |name: &str| MEDIA.iter().any(|media| name.contains(media));
    let column = MEDIA_COLUMNS.iter().find(|name| message.fields().get(**name).is_some_and(has));
    let parts = message.content().and_then(Value::as_array).into_iter().flatten();
    let mut parts = parts.filter_map(|part| {
        let kind = part.get("type").and_then(Value::as_str).filter(|kind| is_media(kind));
        let key = || part.as_object()?.iter().find(|(name, value)| is_media(name) && has(value)).map(|(name, _)| name);
        kind.map(|kind| format!("a content part of type `{kind}`"))
            .or_else(|| key().map(|key| format!("a content part with `{key}`")))
    });
    column.map(|name| format!("`{name}`")).or_else(|| parts.next())
}

/// Rejects a row with images, video or audio in columns that are not `read` as text.
///
/// # Errors
/// `TaskError` with the row and the column.
pub fn check_text_only(row: &Row, setting: &str, read: impl Fn(&str) -> bool) -> Result<(), TaskError> {
    let has_media = |name: &&&str| {
        let value = row.fields.get(**name);
        let is_none = value.is_none_or(|value| match value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.iter().all(Value::is_null),
            Value::Object(fields) => fields.values().all(Value::is_null),
            _ => false,
        });
        !is_none && !read(name)
    };
    match MEDIA_COLUMNS.iter().find(has_media) {
        None => Ok(()),
        Some(name) => Err(row.bad(
            setting,
            format!(
                "the row has a value in `{name}`, but only text is trained on; remove rows with images, video or audio, or \
                 rename the column if it means something else"
            ),
        )),
    }
}

/// Makes the field `tools` of a conversation a list, as chat templates expect it: datasets hold it as a list, or as the
/// JSON of one, since its entries differ in shape. A null or an empty list means no tools. Entries of a list
/// in a table have the fields of all others as nulls, which are left out.
///
/// # Errors
/// `TaskError` with the row, if the field is no list.
pub fn read_tools(row: &mut Row) -> Result<(), TaskError> {
    let Some(value) = row.fields.column(TOOLS) else {
        return Ok(());
    };
    let list = read(value, true);
    let is_good = match &list {
        Value::Null => true,
        Value::Array(tools) => tools.iter().all(Value::is_object),
        _ => false,
    };
    if !is_good {
        let detail = format!(
            "field `{TOOLS}` is {}, expected a list of tools (JSON schemas), or the JSON of such a list; it is what the \
             chat template is given, so rename a column that means something else",
            to_text(value)
        );
        return Err(row.bad(TOOLS, detail));
    }
    row.fields.insert(TOOLS.to_owned(), list);
    Ok(())
}

/// Checks the field `chat_template_kwargs` of a conversation: variables of the chat template, or the JSON of them.
///
/// # Errors
/// `TaskError` with the row, if the field is no object.
pub fn read_template_kwargs(row: &mut Row) -> Result<(), TaskError> {
    let Some(value) = row.fields.column(TEMPLATE_KWARGS) else {
        return Ok(());
    };
    let kwargs = read(value, fills_structs(&row.place.path));
    let bad = |what: &str| row.bad(TEMPLATE_KWARGS, format!("field `{TEMPLATE_KWARGS}` is {}, {what}", to_text(value)));
    match &kwargs {
        Value::Null => {}
        Value::Object(variables) => {
            if let Some(name) = CONVERSATION_VARIABLES.iter().find(|name| variables.contains_key(**name)) {
                return Err(bad(&format!("but `{name}` is set by each conversation; remove it")));
            }
        }
        _ => return Err(bad("expected an object of variables of the chat template")),
    }
    row.fields.insert(TEMPLATE_KWARGS.to_owned(), kwargs);
    Ok(())
}

/// A column, or the value of the JSON in it. `filled`: its objects have all others' fields as nulls.
fn read(value: &Value, filled: bool) -> Value {
    match value {
        Value::String(json) if json.trim().is_empty() => Value::Null,
        Value::String(json) => parse(json.as_bytes()).unwrap_or_else(|_| value.clone()),
        other if filled => without_nulls(other),
        other => other.clone(),
    }
}

/// A value without the fields of objects that are null. Entries of lists stay.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().map(without_nulls).collect(),
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(_, value)| !value.is_null());
            let fields: Map<String, Value> = fields.map(|(name, value)| (name.clone(), without_nulls(value))).collect();
            Value::Object(fields)
        }
        other => other.clone(),
    }
}
