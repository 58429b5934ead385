//! Lists of content parts, for templates that read them and for those that read text only.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::Message;
use super::message::part_text;

/// Written in place of the text of a list to see what a template does with it.
const PROBE_TEXT: &str = "xqzpart";

/// Messages as a template reads them: a list of parts stays a list if the template writes the text of its parts, as it
/// does in transformers; in other templates it becomes the text of its parts, one after the other. `render` is the
/// template.
///
/// # Errors
/// A description of a part that is not text, in a list that the template does not read.
pub(super) fn readable<E>(
    messages: &[Message],
    render: impl Fn(&[Message]) -> Result<String, E>,
) -> Result<Cow<'_, [Message]>, String> {
    let is_list = |message: &Message| message.content().is_some_and(Value::is_array);
    let lists: Vec<usize> = (0..messages.len()).filter(|&at| is_list(&messages[at])).collect();
    if lists.is_empty() {
        return Ok(Cow::Borrowed(messages));
    }
    let joined = |message: &Message| message.clone().with_content(message.text());
    let probe = |at: usize| format!("{PROBE_TEXT}{at}z");
    let probed = |some: &[usize]| {
        let one = |(at, message): (usize, &Message)| {
            if some.contains(&at) {
                message.clone().with_content(json!([{"type": "text", "text": probe(at)}]))
            } else if is_list(message) {
                joined(message)
            } else {
                message.clone()
            }
        };
        render(&messages.iter().enumerate().map(one).collect::<Vec<_>>())
    };
    // in quotes it is the list that was written
    let writes =
        |text: &str, at: usize| text.match_indices(&probe(at)).any(|(place, _)| !text[..place].ends_with(['"', '\'']));
    let read: Vec<usize> = match probed(&lists) {
        Ok(text) => lists.iter().copied().filter(|&at| writes(&text, at)).collect(),
        Err(_) => lists.iter().copied().filter(|&at| probed(&[at]).is_ok_and(|text| writes(&text, at))).collect(),
    };
    let mut joined_messages = messages.to_vec();
    for at in lists.into_iter().filter(|at| !read.contains(at)) {
        let parts = messages[at].content().and_then(Value::as_array);
        if let Some(other) = parts.into_iter().flatten().find(|part| part_text(part).is_none()) {
            return Err(format!(
                "it does not read lists of content parts, and the content of message {at} has a part that is not text: \
                 {other}"
            ));
        }
        joined_messages[at] = joined(&messages[at]);
    }
    Ok(Cow::Owned(joined_messages))
}
