//! What a `$` of a shell script stands for: variables and their defaults, arithmetic, lists.

use super::arithmetic::evaluate;
use super::error::ImportError;
use super::shell_words::{Expansion, Variable, Word, WordReader, add_all, needs};

/// Deepest nesting of defaults within defaults.
const DEEPEST: usize = 16;

impl WordReader<'_> {
    /// What the `$` here stands for.
    pub(super) fn expansion(&mut self) -> Result<Expansion, ImportError> {
        let line = self.line;
        self.next();
        match self.peek() {
            Some('(') if self.starts_with("((") => {
                let inner = self.until_closed('(', ')', line)?;
                let number = evaluate(&inner, &|name| self.lookup(name).text.trim().parse().ok());
                Ok(Expansion::Text(match number {
                    Some(number) => Word { text: number.to_string(), ..Word::default() },
                    None => needs(format!("$({inner})"), format!("the value of $({inner})")),
                }))
            }
            Some('(') => {
                let inner = self.until_closed('(', ')', line)?;
                Ok(Expansion::Text(needs(format!("$({inner})"), format!("the output of the command {inner}"))))
            }
            Some('{') => {
                let inner = self.until_closed('{', '}', line)?;
                self.parameter(&inner, line)
            }
            Some('\'') => Ok(Expansion::Text(Word::default())),
            Some('@' | '*') => {
                self.next();
                Ok(Expansion::Words(Vec::new()))
            }
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                let from = self.at;
                while self.peek().is_some_and(|c| c.is_ascii_alphanumeric() || c == '_') {
                    self.next();
                }
                let name: String = self.chars[from..self.at].iter().collect();
                Ok(Expansion::Text(self.lookup(&name)))
            }
            Some(c) if c.is_ascii_digit() || "?$!#-".contains(c) => {
                self.next();
                Ok(Expansion::Text(needs(format!("${c}"), format!("the value of ${c} when the script runs"))))
            }
            _ => Ok(Expansion::Text(Word { text: "$".into(), ..Word::default() })),
        }
    }

    /// The text up to the bracket that closes the one here; both are passed.
    fn until_closed(&mut self, open: char, close: char, line: usize) -> Result<String, ImportError> {
        self.next();
        let from = self.at;
        let mut depth = 1_usize;
        loop {
            match self.next() {
                None => {
                    return self.error(line, format!("a ${open} that begins here is never closed"));
                }
                Some(c) if c == open => depth += 1,
                Some(c) if c == close => depth -= 1,
                Some(_) => {}
            }
            if depth == 0 {
                return Ok(self.chars[from..self.at - 1].iter().collect());
            }
        }
    }

    /// What `${…}` stands for.
    fn parameter(&mut self, inner: &str, line: usize) -> Result<Expansion, ImportError> {
        let end = inner.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let (name, rest) = inner.split_at(end.unwrap_or(inner.len()));
        if inner == "@" || inner == "*" {
            return Ok(Expansion::Words(Vec::new()));
        }
        if matches!(rest, "[@]" | "[*]") {
            return Ok(match self.variables.get(name) {
                Some(Variable::List(words)) => Expansion::Words(words.clone()),
                _ => Expansion::Text(self.lookup(name)),
            });
        }
        let found = self.lookup(name);
        let is_set = found.needs.is_none() && !found.text.is_empty();
        let plain = rest.strip_prefix(':').unwrap_or(rest);
        let text = match plain.chars().next() {
            _ if name.is_empty() => unknown(inner),
            None if rest.is_empty() => found,
            // what another assignment could not tell is no reason to take the default
            Some('-' | '=') if is_set || self.variables.contains_key(name) && !found.text.is_empty() => found,
            Some('-' | '=') => self.inner_text(&plain[1..], line)?,
            Some('+') if is_set => self.inner_text(&plain[1..], line)?,
            Some('+') => Word::default(),
            Some('?') => found,
            _ => unknown(inner),
        };
        Ok(Expansion::Text(text))
    }

    /// A text within `${…}`, with its own quotes and variables.
    fn inner_text(&mut self, text: &str, line: usize) -> Result<Word, ImportError> {
        if self.depth >= DEEPEST {
            return self.error(line, "defaults of variables are nested too deeply");
        }
        self.depth += 1;
        let outer = std::mem::replace(&mut self.chars, text.chars().collect());
        let at = std::mem::replace(&mut self.at, 0);
        let outer_line = self.line;
        let words = self.word(true);
        (self.chars, self.at, self.line) = (outer, at, outer_line);
        self.depth -= 1;
        let mut word = Word::default();
        add_all(&mut word, &words?);
        Ok(word)
    }

    /// A variable of the script or the environment.
    fn lookup(&self, name: &str) -> Word {
        match self.variables.get(name) {
            Some(Variable::Text(word)) => word.clone(),
            Some(Variable::List(words)) => words.first().cloned().unwrap_or_default(),
            None => match (self.environment)(name) {
                Some(text) => Word { text, ..Word::default() },
                None => needs(
                    format!("${name}"),
                    format!("the variable {name}, which neither the script nor the environment sets"),
                ),
            },
        }
    }
}

fn unknown(inner: &str) -> Word {
    needs(format!("${{{inner}}}"), format!("the value of ${{{inner}}}"))
}
