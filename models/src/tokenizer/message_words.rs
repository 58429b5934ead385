//! The words of a message: what its author wrote, in all fields that have some.

use super::Message;
use firebrick_spec::json::number_text;
use serde_json::Value;

/// The role whose turns are trained on.
const ASSISTANT: &str = "assistant";

/// Fields of a message and of its calls that label it.
const LABELS: [&str; 4] = ["role", "type", "id", "tool_call_id"];

/// True if a message is a turn of the assistant.
pub(super) fn is_turn(message: &Message) -> bool {
    message.role() == ASSISTANT
}

/// A message with each of its texts replaced, of the assistant in all fields and of others in the content; blank texts
/// only if there are no others, as templates ask whether there are some.
pub(super) fn map_words(message: &Message, mut text: impl FnMut(&str) -> String) -> Message {
    let is_read = |name: &str| is_turn(message) || name == "content";
    let mut fields = message.fields().clone();
    let mut has_words = false;
    for (name, value) in fields.iter_mut().filter(|(name, _)| is_read(name)) {
        each(name, value, &mut |words| has_words |= !words.trim().is_empty());
    }
    for (name, value) in fields.iter_mut().filter(|(name, _)| is_read(name)) {
        each(name, value, &mut |words| {
            if !(has_words && words.trim().is_empty()) {
                *words = text(words);
            }
        });
    }
    Message::from_fields(fields).unwrap_or_else(|| message.clone())
}

/// Visits every text in the value of a field.
fn each(name: &str, value: &mut Value, visit: &mut dyn FnMut(&mut String)) {
    match value {
        Value::String(words) if !LABELS.contains(&name) => visit(words),
        Value::Array(list) => list.iter_mut().for_each(|entry| each(name, entry, visit)),
        number if number_text(number).is_some() => {}
        Value::Object(fields) => fields.iter_mut().for_each(|(name, entry)| each(name, entry, visit)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn upper(message: Value) -> Value {
        let message: Message = serde_json::from_value(message).expect("a message");
        serde_json::to_value(map_words(&message, str::to_uppercase)).expect("JSON")
    }

    #[test]
    fn the_words_of_a_turn_are_in_all_of_its_fields_and_of_other_messages_in_the_content() {
        let calls =
            |name: &str, s: &str| json!([{"type": "function", "function": {"name": name, "arguments": {"s": s}}}]);
        assert_eq!(
            upper(json!({"role": "assistant", "content": "a", "thinking": "b", "tool_calls": calls("f", "x"), "n": 1})),
            json!({"role": "assistant", "content": "A", "thinking": "B", "tool_calls": calls("F", "X"), "n": 1})
        );
        let parts = |text: &str| json!([{"type": "text", "text": text}]);
        assert_eq!(
            upper(json!({"role": "tool", "name": "f", "content": parts("a")})),
            json!({"role": "tool", "name": "f", "content": parts("A")})
        );
    }

    #[test]
    fn a_number_of_any_length_has_no_words() {
        let arguments = |s: &str| json!({"n": firebrick_spec::json::number("98765432109876543210"), "s": s});
        assert_eq!(
            upper(json!({"role": "assistant", "tool_calls": [{"function": {"arguments": arguments("x")}}]})),
            json!({"role": "assistant", "tool_calls": [{"function": {"arguments": arguments("X")}}]})
        );
    }

    #[test]
    fn blank_texts_are_words_only_if_there_are_no_others() {
        let marked = |message: Value| {
            let message: Message = serde_json::from_value(message).expect("a message");
            serde_json::to_value(map_words(&message, |text| format!("{text}!"))).expect("JSON")
        };
        assert_eq!(
            marked(json!({"role": "assistant", "content": " ", "reasoning_content": "a"})),
            json!({"role": "assistant", "content": " ", "reasoning_content": "a!"})
        );
        assert_eq!(marked(json!({"role": "user", "content": ""})), json!({"role": "user", "content": "!"}));
    }
}
