//! Values as Hydra writes them on a command line: numbers, words, lists, mappings, quoted texts.

use serde_json::{Map, Value};

/// Deepest nesting of lists and mappings.
const MAX_DEPTH: usize = 32;

/// A value of Hydra's overrides: a list, a mapping, a quoted text or else a word (number, boolean, null,
/// text).
pub(super) fn hydra(text: &str) -> Value {
    let text = text.trim();
    let chars: Vec<char> = text.chars().collect();
    if text.starts_with(['[', '{', '\'', '"']) {
        let mut reader = Reader { chars, at: 0 };
        if let Some(value) = reader.value(0) {
            reader.skip_spaces();
            if reader.at == reader.chars.len() {
                return value;
            }
        }
    }
    word(text)
}

/// Returns true if a space-separated list contains a word.
pub(super) fn has_word(words: &str, word: &str) -> bool {
    words.split_whitespace().any(|listed| listed == word)
}

/// Settings of a section, as `key=value` with spaces between them.
pub(super) fn settings(section: &str, text: &str) -> Vec<(String, Value)> {
    let pairs = text.split_whitespace().filter_map(|word| word.split_once('='));
    pairs.map(|(key, value)| (format!("{section}{key}"), hydra(value))).collect()
}

/// Value of an unquoted word.
pub(super) fn word(text: &str) -> Value {
    match text {
        "" | "null" | "Null" | "NULL" | "None" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    let digits = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    let plain = text.replace('_', "");
    let plain = plain.strip_prefix('+').unwrap_or(&plain);
    if let (true, Ok(whole)) = (digits, plain.parse::<i64>()) {
        return whole.into();
    }
    let number = plain.parse::<f64>().ok().filter(|_| digits);
    let number = number.and_then(serde_json::Number::from_f64);
    number.map_or_else(|| text.into(), Value::Number)
}

struct Reader {
    chars: Vec<char>,
    at: usize,
}

impl Reader {
    fn skip_spaces(&mut self) {
        while self.chars.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
    }

    fn takes(&mut self, wanted: char) -> bool {
        self.skip_spaces();
        let matches = self.chars.get(self.at) == Some(&wanted);
        self.at += usize::from(matches);
        matches
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        self.skip_spaces();
        if depth > MAX_DEPTH {
            return None;
        }
        match self.chars.get(self.at)? {
            '[' => self.list(depth),
            '{' => self.mapping(depth),
            '\'' | '"' => self.quoted().map(Value::String),
            _ => Some(word(&self.plain(&[',', ']', '}']))),
        }
    }

    fn list(&mut self, depth: usize) -> Option<Value> {
        self.at += 1;
        let mut items = Vec::new();
        while !self.takes(']') {
            items.push(self.value(depth + 1)?);
            if !self.takes(',') {
                return self.takes(']').then_some(Value::Array(items));
            }
        }
        Some(Value::Array(items))
    }

    fn mapping(&mut self, depth: usize) -> Option<Value> {
        self.at += 1;
        let mut map = Map::new();
        while !self.takes('}') {
            self.skip_spaces();
            let key = match self.chars.get(self.at)? {
                '\'' | '"' => self.quoted()?,
                _ => self.plain(&[':', ',', '}']),
            };
            if !self.takes(':') {
                return None;
            }
            map.insert(key, self.value(depth + 1)?);
            if !self.takes(',') {
                return self.takes('}').then_some(Value::Object(map));
            }
        }
        Some(Value::Object(map))
    }

    /// Parses a text in quotes, with backslash escapes of quotes and backslashes.
    fn quoted(&mut self) -> Option<String> {
        let quote = *self.chars.get(self.at)?;
        self.at += 1;
        let mut text = String::new();
        loop {
            let next = *self.chars.get(self.at)?;
            self.at += 1;
            match next {
                '\\' if self.chars.get(self.at).is_some_and(|c| *c == quote || *c == '\\') => {
                    text.push(self.chars[self.at]);
                    self.at += 1;
                }
                c if c == quote => return Some(text),
                c => text.push(c),
            }
        }
    }

    fn plain(&mut self, ends: &[char]) -> String {
        let start = self.at;
        while self.chars.get(self.at).is_some_and(|c| !ends.contains(c)) {
            self.at += 1;
        }
        let text: String = self.chars[start..self.at].iter().collect();
        text.trim().to_owned()
    }
}
