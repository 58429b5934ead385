//! End tokens of a completion: one answer for sampling, for training, and for the exported model.
//!
//! Three files name it. `generation_config.json` has the ids that end generation, `tokenizer_config.json` a token, and
//! the chat template writes a token after each turn. A base model often ends texts with one token and has the template
//! of a chat model, which ends turns with another: trained on chats, it would never stop.

use super::{ChatOptions, Message, Tokenizer};
use serde_json::json;
use std::collections::BTreeMap;

/// Written in the place of a turn's words: a Unicode noncharacter, which occurs in no text.
const WORDS: char = '\u{1FFFE}';

/// The ids that end a completion, and those that training ends one with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndTokens {
    /// All ids that end a completion: the checkpoint's first.
    pub ids: Vec<u32>,
    /// The ids that the checkpoint does not name: the tokenizer's, or the chat template's.
    pub added: Vec<u32>,
    /// The one that ends a completion of a plain text.
    pub of_text: Option<u32>,
    /// The one that ends a turn by the chat template, where it writes one.
    pub of_turn: Option<u32>,
    /// Text that the chat template writes after a turn, where no token in it ends completions.
    pub endless: Option<String>,
}

impl EndTokens {
    /// Compares the ids of a checkpoint, `eos_token_id`, with the tokenizer's end token and with what its chat template
    /// writes behind a turn. A token that is named by one of them ends completions.
    pub fn new(checkpoint: &[u32], tokenizer: &Tokenizer) -> Self {
        let of_text = tokenizer.eos_id().or(checkpoint.first().copied());
        let mut ends = Self { ids: checkpoint.to_vec(), added: Vec::new(), of_text, of_turn: None, endless: None };
        ends.add(tokenizer.eos_id());
        let Some(behind) = tokenizer.behind_turn(false) else {
            return ends;
        };
        let named = ends.ids.iter().filter_map(|&id| Some((behind.find(&tokenizer.token_text(id)?)?, id)));
        ends.of_turn = named.min().map(|(_, id)| id).or_else(|| tokenizer.end_within(&behind)).or_else(|| {
            // some templates end a turn only with the message that follows it
            let behind = tokenizer.behind_turn(true)?;
            tokenizer.special_at(behind.trim_start()).map(|(id, _)| id)
        });
        ends.of_turn = ends.of_turn.map(|end| tokenizer.end_of_each_turn(&behind, end));
        match ends.of_turn {
            Some(_) => ends.add(ends.of_turn),
            None => ends.endless = Some(behind),
        }
        ends.add(tokenizer.end_of_call());
        ends
    }

    fn add(&mut self, id: Option<u32>) {
        if let Some(id) = id.filter(|id| !self.ids.contains(id)) {
            self.ids.push(id);
            self.added.push(id);
        }
    }

    /// The one that ends what follows a prompt: a conversation, or a plain text.
    pub fn target(&self, conversation: bool) -> Option<u32> {
        self.of_turn.filter(|_| conversation).or(self.of_text)
    }

    /// Tokens without the id that ended them.
    pub fn strip<'t>(&self, tokens: &'t [u32]) -> &'t [u32] {
        match tokens.split_last() {
            Some((last, rest)) if self.ids.contains(last) => rest,
            _ => tokens,
        }
    }

    /// Some of the ids as they are spelled, for messages.
    pub fn shown(ids: &[u32], tokenizer: &Tokenizer) -> String {
        let spelled = ids.iter().map(|&id| match tokenizer.token_text(id) {
            Some(token) => format!("`{token}`"),
            None => format!("id {id}"),
        });
        spelled.collect::<Vec<_>>().join(", ")
    }
}

impl Tokenizer {
    /// Text that the chat template writes after the words of a turn, the last one or one that is `followed` by the
    /// user's; none without a template, and where it refuses the shortest conversation.
    pub(super) fn behind_turn(&self, followed: bool) -> Option<String> {
        let mut chat = vec![Message::new("user", "1"), Message::new("assistant", WORDS.to_string())];
        chat.extend(followed.then(|| Message::new("user", WORDS.to_string())));
        let text = self.render_chat_with(&chat, ChatOptions::default()).ok()?;
        text.split(WORDS).nth(1).map(str::to_owned)
    }

    /// The end of every turn, where `end` is after a conversation's last turn only, and another special token before
    /// it: `<|end|>` of Phi-3, which writes the end of a text after the last one.
    fn end_of_each_turn(&self, behind: &str, end: u32) -> u32 {
        let first = self.special_at(behind.trim_start()).map(|(id, _)| id).filter(|first| *first != end);
        let Some((first, followed)) = first.zip(self.behind_turn(true)) else { return end };
        let starts = self.special_at(followed.trim_start()).is_some_and(|(id, _)| id == first);
        let is_there = self.token_text(end).is_some_and(|end| followed.contains(&end));
        if starts && !is_there { first } else { end }
    }

    /// The special token that the chat template ends a turn with that is a call of a tool; none where it writes no
    /// calls, or something else behind them.
    fn end_of_call(&self) -> Option<u32> {
        let arguments = json!({"x": WORDS.to_string()});
        // some templates append the arguments to text
        [arguments.clone(), arguments.to_string().into()].into_iter().find_map(|arguments| {
            let call =
                json!([{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
            let chat = [Message::new("user", "1"), Message::new("assistant", "").with("tool_calls", call)];
            let text = self.render_chat_with(&chat, ChatOptions::default()).ok()?;
            let (_, behind) = text.rsplit_once(WORDS)?;
            let behind = behind.trim_end();
            let ends = self.special.iter().filter(|(_, token)| behind.ends_with(token.as_str()));
            ends.max_by_key(|(_, token)| token.len()).map(|(id, _)| *id)
        })
    }

    /// Length of the special token at the beginning of what is behind a turn, where the template writes none behind a
    /// last turn, so that the message that follows ends the turn.
    pub(super) fn end_by_next(&self, behind: &str) -> Option<usize> {
        let (_, length) = self.special_at(behind)?;
        let last = self.behind_turn(false)?;
        self.end_within(&last).is_none().then_some(length)
    }

    /// The special token that a text begins with, and its length.
    fn special_at(&self, text: &str) -> Option<(u32, usize)> {
        let entry = self.special.iter().find(|(_, token)| text.starts_with(token.as_str()));
        entry.map(|(id, token)| (*id, token.len()))
    }

    /// A token as it is written in texts.
    pub fn token_text(&self, id: u32) -> Option<String> {
        let text = self.decode(&[id], false).ok();
        text.filter(|text| !text.trim().is_empty())
    }

    /// The added token that ends a turn in what follows its words: the first one behind whitespace, or else the first
    /// special one.
    pub(super) fn end_within(&self, behind: &str) -> Option<u32> {
        let added = self.backend.get_added_tokens_decoder();
        let words = behind.trim_start();
        let first = added.iter().filter(|(_, token)| words.starts_with(&token.content));
        let first = first.max_by_key(|(_, token)| token.content.len()).map(|(id, _)| *id);
        first.or_else(|| {
            let places = self.special.iter().filter_map(|(id, token)| Some((behind.find(token.as_str())?, *id)));
            places.min().map(|(_, id)| id)
        })
    }

    /// End of a turn in the text that the template writes after its words: after the tokenizer's end token, the one
    /// that ends the last turn of a conversation, or else the first special token.
    pub(super) fn end_of_turn_in(&self, behind: &str) -> Option<usize> {
        let template = || self.behind_turn(false).and_then(|last| self.end_within(&last));
        let end = |id: Option<u32>| {
            let token = self.token_text(id?)?;
            Some(behind.find(&token)? + token.len())
        };
        end(self.eos_id()).or_else(|| end(template())).or_else(|| end(self.end_within(behind)))
    }

    /// Special tokens with their ids.
    pub fn special_tokens(&self) -> &BTreeMap<u32, String> {
        &self.special
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A tokenizer whose texts end with `<eos>`, with the template's way of writing what is behind a turn.
    fn tokenizer(behind: &str) -> Tokenizer {
        let template = format!(
            "{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content | trim }}}}{{% if m.role == 'assistant' %}}{behind}\
             {{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
        );
        let tokenizer = Tokenizer::characters_and_words("ab1<>/|\n", &["<user>", "<assistant>", "<end>", "<call>"]);
        tokenizer.expect("a tokenizer").with_chat_template(&template, Path::new("test")).expect("a template")
    }

    fn id(tokenizer: &Tokenizer, token: &str) -> u32 {
        tokenizer.token_id(token).expect(token)
    }

    #[test]
    fn the_template_s_end_of_a_turn_ends_completions_unless_what_it_writes_there_does() {
        let base = tokenizer("<end>\n");
        let [eos, end] = ["<eos>", "<end>"].map(|token| id(&base, token));
        let ends = EndTokens::new(&[eos], &base);
        assert_eq!(
            (ends.ids, ends.added, ends.of_turn, ends.of_text),
            (vec![eos, end], vec![end], Some(end), Some(eos))
        );
        // several ends, the template's among them
        let ends = EndTokens::new(&[end, eos], &base);
        assert_eq!((ends.ids, ends.added, ends.of_turn), (vec![end, eos], Vec::new(), Some(end)));
        // none is named by the checkpoint
        assert_eq!(EndTokens::new(&[], &base).ids, [eos, end]);
        // something of the checkpoint's ends the turn, behind another token
        let call_eos = tokenizer("<call><eos>");
        assert_eq!(EndTokens::new(&[eos], &call_eos).added, Vec::<u32>::new());
        assert_eq!(EndTokens::new(&[eos], &call_eos).of_turn, Some(eos));
        // the tokenizer's token ends texts where the checkpoint names another one
        let ends = EndTokens::new(&[end], &call_eos);
        assert_eq!((ends.ids, ends.added), (vec![end, eos], vec![eos]));
    }

    #[test]
    fn a_turn_that_no_token_ends_is_told() {
        for behind in ["", "/a/"] {
            let model = tokenizer(behind);
            let ends = EndTokens::new(&[], &model);
            assert_eq!((ends.of_turn, ends.endless), (None, Some(behind.to_owned())), "{behind:?}");
        }
        let plain = Tokenizer::characters("ab").expect("a tokenizer");
        let ends = EndTokens::new(&[1], &plain);
        assert_eq!((ends.of_turn, ends.endless.as_deref(), ends.target(true)), (None, None, Some(1)));
    }

    #[test]
    fn a_template_that_ends_turns_with_the_next_message_has_the_end_of_those() {
        let model = tokenizer("{% if not loop.last %}<pad>{% endif %}");
        let end = id(&model, "<pad>");
        assert_eq!(EndTokens::new(&[1], &model).of_turn, Some(end));
        assert_eq!(EndTokens::new(&[1], &model).ids, [1, end]);
    }

    #[test]
    fn a_turn_ends_with_what_ends_every_one_and_not_with_what_is_behind_the_last() {
        let model = tokenizer("<pad>{% if loop.last %}<eos>{% endif %}");
        let [eos, pad] = ["<eos>", "<pad>"].map(|token| id(&model, token));
        let ends = EndTokens::new(&[eos], &model);
        assert_eq!((ends.ids, ends.added, ends.of_turn), (vec![eos, pad], vec![pad], Some(pad)));
        // another token behind the last turn
        let model = tokenizer("{% if loop.last %}<eos>{% else %}<pad>{% endif %}");
        let ends = EndTokens::new(&[eos], &model);
        assert_eq!((ends.ids, ends.of_turn), (vec![eos], Some(eos)));
    }

    #[test]
    fn what_the_template_ends_a_call_with_ends_completions() {
        let call = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}/<pad>{% else %}<end>{% endif %}";
        let model = tokenizer(call);
        let [eos, end, pad] = ["<eos>", "<end>", "<pad>"].map(|token| id(&model, token));
        let ends = EndTokens::new(&[eos], &model);
        assert_eq!((ends.ids, ends.added, ends.of_turn), (vec![eos, end, pad], vec![end, pad], Some(end)));
    }

    #[test]
    fn completions_end_with_the_token_of_their_prompt() {
        let base = tokenizer("<end>");
        let ends = EndTokens::new(&[1], &base);
        assert_eq!((ends.target(false), ends.target(true)), (Some(1), Some(id(&base, "<end>"))));
        assert_eq!((ends.strip(&[3, 1]), ends.strip(&[1, 3])), (&[3][..], &[1, 3][..]));
        assert_eq!(EndTokens::shown(&ends.ids, &base), "`<eos>`, `<end>`");
    }
}
