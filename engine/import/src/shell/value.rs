//! Strings of bash, of which parts may be unknown until the script runs.

use std::collections::BTreeSet;

/// A line: the file's index, and the line from 1.
pub(super) type Place = (usize, usize);

/// A string, and the lines that made it. Placeholder characters mark its unknown parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Text {
    pub text: String,
    pub lines: BTreeSet<Place>,
}

/// An unknown text behind a placeholder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unknown {
    /// Source text.
    pub written: String,
    /// Description of what it depends on.
    pub needs: String,
    /// True for an unset variable, which is empty in bash.
    pub is_unset: bool,
}

/// A variable: one item, a list, or a mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Variable {
    pub items: Vec<(String, Text)>,
    pub is_list: bool,
    pub exported: bool,
}

/// First placeholder: the start of a private use area of Unicode.
const FIRST_PLACEHOLDER: u32 = 0xF_0000;

/// The placeholder with an index.
pub(super) fn placeholder(number: usize) -> char {
    char::from_u32(FIRST_PLACEHOLDER + number as u32).unwrap_or(char::MAX)
}

/// The index of a placeholder.
pub(super) fn number(c: char) -> Option<usize> {
    u32::from(c).checked_sub(FIRST_PLACEHOLDER).map(|number| number as usize)
}

impl Text {
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), lines: BTreeSet::new() }
    }

    pub fn is_known(&self) -> bool {
        !self.text.chars().any(|c| number(c).is_some())
    }

    pub fn push(&mut self, more: &Self) {
        self.text.push_str(&more.text);
        self.lines.extend(&more.lines);
    }

    /// Another string of the same lines.
    pub fn with(&self, text: impl Into<String>) -> Self {
        Self { text: text.into(), lines: self.lines.clone() }
    }
}

impl Variable {
    pub fn text(text: Text) -> Self {
        Self { items: vec![("0".into(), text)], ..Self::default() }
    }

    pub fn list(items: impl IntoIterator<Item = Text>) -> Self {
        let items = items.into_iter().enumerate().map(|(at, item)| (at.to_string(), item));
        Self { items: items.collect(), is_list: true, exported: false }
    }

    pub fn at(&self, key: &str) -> Option<&Text> {
        if let Some(from_end) = key.strip_prefix('-').and_then(|n| n.parse::<usize>().ok()) {
            return self.items.iter().rev().nth(from_end.checked_sub(1)?).map(|(_, item)| item);
        }
        self.items.iter().find(|(known, _)| known == key).map(|(_, item)| item)
    }

    pub fn texts(&self) -> Vec<Text> {
        self.items.iter().map(|(_, item)| item.clone()).collect()
    }

    /// Sets an item, or appends to it.
    pub fn put(&mut self, key: String, item: Text, append: bool) {
        match self.items.iter_mut().find(|(known, _)| *known == key) {
            Some((_, current)) if append => current.push(&item),
            Some((_, current)) => *current = item,
            None => self.items.push((key, item)),
        }
    }
}

/// State of a word expansion.
pub(super) struct Fields {
    pub done: Vec<Text>,
    pub current: Option<Text>,
    pub mode: Mode,
    /// Separators of words.
    pub separators: String,
}

/// Context of a word expansion.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Arguments of a command: unquoted variables are split into words.
    Words,
    /// A value: one string.
    Value,
    /// A pattern: quoted text is literal.
    Pattern,
}

impl Fields {
    pub fn new(mode: Mode, separators: Option<&str>) -> Self {
        let separators = separators.unwrap_or(" \t\n").to_owned();
        Self { done: Vec::new(), current: None, mode, separators }
    }

    pub fn literal(&mut self, text: &str, quoted: bool) {
        let current = self.current.get_or_insert_default();
        for c in text.chars() {
            if quoted && self.mode == Mode::Pattern && "*?[]\\()|@!+".contains(c) {
                current.text.push('\\');
            }
            current.text.push(c);
        }
    }

    pub fn value(&mut self, value: &Text, quoted: bool) {
        let splits = self.mode == Mode::Words && !quoted;
        let parts: Vec<&str> =
            if splits { value.text.split(|c| self.separators.contains(c)).collect() } else { vec![&value.text] };
        for (at, part) in parts.into_iter().enumerate() {
            if at > 0 {
                self.finish();
            }
            if !part.is_empty() || !splits {
                self.literal(part, quoted);
                self.current.get_or_insert_default().lines.extend(&value.lines);
            }
        }
    }

    /// `$@` and `${A[@]}`.
    pub fn list(&mut self, items: &[Text], quoted: bool) {
        for (at, item) in items.iter().enumerate() {
            match self.mode {
                _ if at == 0 => {}
                Mode::Words => self.finish(),
                Mode::Value | Mode::Pattern => self.literal(" ", quoted),
            }
            self.value(item, quoted);
        }
    }

    pub fn finish(&mut self) {
        self.done.extend(self.current.take());
    }

    pub fn into_text(mut self) -> Text {
        self.finish();
        let mut text = Text::default();
        for part in &self.done {
            text.push(part);
        }
        text
    }
}
