//! Text that is data: the spelling of a special token in it is text, and not that token.
//!
//! A mark, a character that the data do not have, is put behind the first character of such a spelling, so the
//! tokenizer does not find it. The marks are removed before the text between special tokens is split into words: all
//! other tokens are what they are without marks. What a chat template has written of data is found by rendering the
//! conversation again with marks.

use std::collections::BTreeSet;
use std::ops::Range;

use firebrick_spec::json::number_text;
use serde_json::{Map, Value};
use tokenizers::{Encoding, Model as _, OffsetReferential, OffsetType, PreTokenizer as _};

use super::special_tokens::{MARK_BYTES, MARKS, SpecialTokens};
use super::{ChatOptions, Message, Tokenizer, caught};
use crate::error::{Error, Result};
use crate::ranges::consecutive;

/// Parts of a text in which the spelling of a special token is that token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// Everywhere.
    Everywhere,
    /// In these ranges of bytes, each of which has the whole spelling.
    In(Vec<Range<usize>>),
}

impl Control {
    /// Nowhere: all of the text is data.
    pub const NOWHERE: Self = Self::In(Vec::new());

    /// The part of the ranges from a byte on, counted from there.
    #[must_use]
    pub fn after(&self, start: usize) -> Self {
        match self {
            Self::Everywhere => Self::Everywhere,
            Self::In(ranges) => {
                let ranges = ranges.iter().filter(|range| range.end > start);
                Self::In(ranges.map(|range| range.start.max(start) - start..range.end - start).collect())
            }
        }
    }

    fn has(&self, spelling: &Range<usize>) -> bool {
        match self {
            Self::Everywhere => true,
            Self::In(ranges) => ranges.iter().any(|range| range.start <= spelling.start && spelling.end <= range.end),
        }
    }
}

impl From<SpecialTokens> for Control {
    fn from(special_tokens: SpecialTokens) -> Self {
        match special_tokens {
            SpecialTokens::Text => Self::NOWHERE,
            SpecialTokens::Allow => Self::Everywhere,
        }
    }
}

/// Tokens of a text, and the bytes of the text that each is.
pub(super) struct Encoded {
    pub ids: Vec<u32>,
    pub offsets: Vec<(usize, usize)>,
}

impl Tokenizer {
    /// The special tokens that a text spells.
    pub fn special_tokens_in(&self, text: &str) -> BTreeSet<String> {
        self.spelled(text).into_iter().map(|range| text[range].to_owned()).collect()
    }

    /// The special tokens that the strings in a value spell.
    pub fn special_tokens_in_value(&self, value: &Value) -> BTreeSet<String> {
        let mut strings = Vec::new();
        gather(value, &mut strings);
        strings.into_iter().flat_map(|text| self.special_tokens_in(text)).collect()
    }

    /// Token ids of a text. `control` is where the spelling of a special token is that token. With
    /// `add_special_tokens`, a text that begins with the token that is put before every text (beginning of sequence)
    /// keeps a single one.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_text(&self, text: &str, control: &Control, add_special_tokens: bool) -> Result<Vec<u32>> {
        let marks = self.marks(text, control);
        let mut ids = match marks {
            None => self.encode(text, add_special_tokens)?,
            Some((mark, at)) => {
                let encoding = self.encode_marked(&inserted(text, mark, &at), mark, add_special_tokens)?;
                self.embedded(encoding.get_ids().to_vec())?
            }
        };
        if add_special_tokens && self.begin.is_some() && ids.first() == self.begin.as_ref() && ids.get(1) == ids.first()
        {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// Text of a conversation by the chat template, and its token ids.
    ///
    /// # Errors
    /// As [`Tokenizer::render_chat`] and [`Tokenizer::encode`].
    pub fn encode_chat(&self, messages: &[Message], options: ChatOptions<'_>) -> Result<(String, Vec<u32>)> {
        let text = self.render_chat_with(messages, options)?;
        let control = self.control(&text, messages, 0, options, self)?;
        let ids = self.encode_text(&text, &control, false)?;
        Ok((text, ids))
    }

    /// Ranges in which special tokens of `reader`, which may be another tokenizer, are control tokens in the text that
    /// the chat template has written of a conversation: not in the parts from its tools and its messages from `from`
    /// on, unless the options allow it. Spellings that the template itself reads in messages, such as the `</think>`
    /// that it splits them at, are its own.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] when what the template takes from messages cannot be found in its text.
    pub fn control(
        &self,
        text: &str,
        messages: &[Message],
        from: usize,
        options: ChatOptions<'_>,
        reader: &Self,
    ) -> Result<Control> {
        if options.special_tokens == SpecialTokens::Allow {
            return Ok(Control::Everywhere);
        }
        let mut strings = Vec::new();
        let fields = messages[from..].iter().flat_map(|message| message.fields().values());
        for value in fields.chain(options.tools) {
            gather(value, &mut strings);
        }
        let spelled: BTreeSet<String> = strings.iter().flat_map(|text| reader.special_tokens_in(text)).collect();
        if spelled.is_empty() && !strings.iter().any(|text| reader.tail(text).is_some()) {
            return Ok(Control::Everywhere);
        }
        let is_free = |mark: &char| !text.contains(*mark) && !strings.iter().any(|text| text.contains(*mark));
        let Some(mark) = MARKS.clone().find(is_free) else {
            return Err(self.unmarkable("they contain all Unicode noncharacters"));
        };
        // the text with marks, if they change nothing but that
        let with = |marker: &Marker<'_>| {
            let mut marked = messages.to_vec();
            for message in &mut marked[from..] {
                *message = marker.message(message);
            }
            let tools = options.tools.map(|tools| marker.value(tools, true));
            let options = ChatOptions { tools: tools.as_ref(), ..options };
            let wrote = self.render_chat_with(&marked, options).ok()?;
            (wrote.replace(mark, "") == text).then(|| consecutive(wrote.split(mark).map(str::len)).collect())
        };
        let marker = |spellings, tails| Marker { reader, mark, spellings, tails };
        if let Some(ranges) = with(&marker(spelled.clone(), true)) {
            return Ok(Control::In(ranges));
        }
        let alone = |one: &String| with(&marker(BTreeSet::from([one.clone()]), false)).is_some();
        let unread: BTreeSet<String> = spelled.iter().filter(|one| alone(one)).cloned().collect();
        if unread.is_empty() {
            return Ok(Control::Everywhere);
        }
        let control = with(&marker(unread.clone(), false)).map(Control::In);
        control.ok_or_else(|| self.unmarkable(&format!("it changes {unread:?} in them")))
    }

    fn unmarkable(&self, why: &str) -> Error {
        Error::ChatTemplate {
            path: self.origin.clone(),
            detail: format!(
                "the text of messages, which spells special tokens, cannot be distinguished from what the template \
                 writes: {why}; remove the spellings, or set `special_tokens: allow`"
            ),
        }
    }

    /// Tokens of a text with their places in it. The token before every text is not added.
    pub(super) fn encode_with_offsets(&self, text: &str, control: &Control) -> Result<Encoded> {
        let Some((mark, at)) = self.marks(text, control) else {
            let encoding = caught(|| self.backend.encode(text, false));
            let encoding = encoding.map_err(|cause| self.unencodable(text, None, &cause))?;
            return Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() });
        };
        let encoding = self.encode_marked(&inserted(text, mark, &at), mark, false)?;
        let plain = |offset: usize| {
            let before = at.iter().enumerate().take_while(|(i, place)| *place + i * MARK_BYTES < offset).count();
            offset - before * MARK_BYTES
        };
        let offsets = encoding.get_offsets().iter().map(|&(start, end)| (plain(start), plain(end))).collect();
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets })
    }

    /// Encodes a text with marks, which are removed once special tokens are found.
    fn encode_marked(&self, text: &str, mark: char, add_special_tokens: bool) -> Result<Encoding> {
        let backend = &self.backend;
        let encode = || {
            let mut pieces = backend.get_added_vocabulary().extract_and_normalize(backend.get_normalizer(), text);
            pieces.normalize(|piece| {
                piece.filter(|c| c != mark);
                Ok(())
            })?;
            if let Some(splits) = backend.get_pre_tokenizer() {
                splits.pre_tokenize(&mut pieces)?;
            }
            backend.get_model().tokenize_in_pretokenized(&mut pieces, None)?;
            let encoding = pieces.into_encoding(None, 0, OffsetType::Byte)?;
            backend.post_process(encoding, None, add_special_tokens)
        };
        caught(encode).map_err(|cause| self.unencodable(text, Some(mark), &cause))
    }

    /// The mark, and its places in a text as byte offsets; `None` if no spelling is text.
    fn marks(&self, text: &str, control: &Control) -> Option<(char, Vec<usize>)> {
        if *control == Control::Everywhere {
            return None;
        }
        let mark = MARKS.clone().find(|&mark| !text.contains(mark))?;
        let at = self.breaks(text, mark, |spelling| !control.has(spelling));
        (!at.is_empty()).then_some((mark, at))
    }

    /// The places behind the first characters of spellings in a text that are to be broken. A broken spelling can
    /// reveal another one.
    fn breaks(&self, text: &str, mark: char, wanted: impl Fn(&Range<usize>) -> bool) -> Vec<usize> {
        let mut at: Vec<usize> = Vec::new();
        loop {
            let marked = inserted(text, mark, &at);
            let whole = self.spelled(&marked).into_iter().filter(|range| !marked[range.clone()].contains(mark));
            let plain = whole.map(|range| {
                let before = marked[..range.start].matches(mark).count() * MARK_BYTES;
                range.start - before..range.end - before
            });
            let new: Vec<usize> = plain.filter(&wanted).filter_map(|range| behind_first(text, &range)).collect();
            if new.is_empty() {
                return at;
            }
            at.extend(new);
            at.sort_unstable();
        }
    }

    /// The places of special tokens that the tokenizer finds in a text.
    fn spelled(&self, text: &str) -> Vec<Range<usize>> {
        if !text.contains(self.first_of_special.as_slice()) {
            return Vec::new();
        }
        let backend = &self.backend;
        let pieces = backend.get_added_vocabulary().extract_and_normalize(backend.get_normalizer(), text);
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let special = splits.into_iter().filter_map(|(_, (start, end), tokens)| {
            let id = tokens.as_ref()?.first()?.id;
            self.special.contains_key(&id).then_some(start..end)
        });
        // a token may take the spaces around it
        special
            .map(|range| {
                let spelling = &text[range.clone()];
                let start = range.start + (spelling.len() - spelling.trim_start().len());
                start..start + spelling.trim().len()
            })
            .filter(|range| !range.is_empty())
            .collect()
    }

    /// The place behind the first character of a special token that a text ends in the middle of: what follows it in
    /// the conversation must not complete it.
    fn tail(&self, text: &str) -> Option<usize> {
        let from = text.floor_char_boundary(text.len().saturating_sub(self.longest_special));
        let starts = text[from..].char_indices().map(|(at, c)| (from + at, c));
        let mut starts = starts.filter(|(_, c)| self.first_of_special.contains(c));
        let begins = |at: usize| {
            self.special.values().any(|token| token.len() > text.len() - at && token.starts_with(&text[at..]))
        };
        starts.find(|&(at, _)| begins(at)).map(|(at, c)| at + c.len_utf8())
    }
}

/// Puts marks into strings.
struct Marker<'a> {
    reader: &'a Tokenizer,
    mark: char,
    /// The spellings that are marked.
    spellings: BTreeSet<String>,
    /// True if unfinished spellings at the ends of strings are marked too.
    tails: bool,
}

impl Marker<'_> {
    fn string(&self, text: &str, tails: bool) -> String {
        let wanted = |range: &Range<usize>| self.spellings.contains(&text[range.clone()]);
        let mut at = self.reader.breaks(text, self.mark, wanted);
        let tail = self.reader.tail(text).filter(|place| tails && self.tails && !at.contains(place));
        at.extend(tail);
        at.sort_unstable();
        inserted(text, self.mark, &at)
    }

    fn value(&self, value: &Value, tails: bool) -> Value {
        match value {
            Value::String(text) => Value::String(self.string(text, tails)),
            Value::Array(list) => list.iter().map(|entry| self.value(entry, tails)).collect(),
            number if number_text(number).is_some() => number.clone(),
            Value::Object(fields) => {
                let fields = fields.iter();
                Value::Object(
                    fields.map(|(name, entry)| (self.string(name, tails), self.value(entry, tails))).collect(),
                )
            }
            other => other.clone(),
        }
    }

    /// A template may write a special token with the role in it: only whole spellings are marked there.
    fn message(&self, message: &Message) -> Message {
        let fields = message.fields().iter();
        let fields: Map<String, Value> =
            fields.map(|(name, value)| (name.clone(), self.value(value, name != "role"))).collect();
        Message::from_fields(fields).unwrap_or_else(|| message.clone())
    }
}

/// All strings in a value, the names of fields too.
fn gather<'v>(value: &'v Value, to: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => to.push(text),
        Value::Array(list) => {
            for entry in list {
                gather(entry, to);
            }
        }
        number if number_text(number).is_some() => {}
        Value::Object(fields) => {
            for (name, entry) in fields {
                to.push(name);
                gather(entry, to);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The place behind the first character of a spelling; `None` of a single character, which cannot be broken.
fn behind_first(text: &str, range: &Range<usize>) -> Option<usize> {
    let first = text[range.clone()].chars().next()?;
    Some(range.start + first.len_utf8()).filter(|&at| at < range.end)
}

/// A text with marks at some places.
fn inserted(text: &str, mark: char, at: &[usize]) -> String {
    let mut out = String::with_capacity(text.len() + at.len() * MARK_BYTES);
    let mut from = 0;
    for &place in at {
        out.push_str(&text[from..place]);
        out.push(mark);
        from = place;
    }
    out.push_str(&text[from..]);
    out
}

#[cfg(test)]
mod tests;
