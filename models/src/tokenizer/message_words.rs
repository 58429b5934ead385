//! The words of a message: what its author wrote, in all fields that have some.

use super::Message;
use super::turn_spans::is_turn;
use serde_json::Value;

/// Fields of a message and of its calls that label it.
const LABELS: [&str; 4] = ["role", "type", "id", "tool_call_id"];

/// The same message with each of its texts replaced, of the assistant in all fields and of others in the content; blank
/// texts only if there are no others, as templates ask whether there are some.
pub(super) fn map_words(message: &Message, mut text: impl FnMut(&str) -> String) -> Message {
    let is_read = |name: &str| is_turn(message) || name == "content";
    let mut fields = message.fields().clone();
    let mut has_words = false;
    for (name, value) in fields.iter_mut().filter(|(name, _)| is_read(name)) {
        each(name, value, &mut |own| has_words |= !own.trim().is_empty());
    }
    for (name, value) in fields.iter_mut().filter(|(name, _)| is_read(name)) {
        each(name, value, &mut |own| {
            if !(has_words && own.trim().is_empty()) {
                *own = text(own);
            }
        });
    }
    Message::of(fields).unwrap_or_else(|| message.clone())
}

/// Visits every text in the value of a field.
fn each(name: &str, value: &mut Value, visit: &mut dyn FnMut(&mut String)) {
    match value {
        Value::String(own) if !LABELS.contains(&name) => visit(own),
        Value::Array(list) => list.iter_mut().for_each(|own| each(name, own, visit)),
        Value::Object(fields) => fields.iter_mut().for_each(|(name, own)| each(name, own, visit)),
        _ => {}
    }
}
