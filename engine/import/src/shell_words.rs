//! The commands of a shell script as words: quotes, continued lines, variables and their defaults, arithmetic, lists.
//!
//! Nothing is run. Conditions are not looked at: of several assignments the last one counts. What only running could
//! tell, such as a command's output, is kept as text with what it would need.

use super::entry::EnvironmentLookup;
use super::error::ImportError;
use std::collections::BTreeMap;

/// Longest word, in characters: variables that double each other end here.
const LONGEST: usize = 1 << 18;

/// A word, after quotes and variables.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Word {
    pub text: String,
    /// What it would take to know all of it.
    pub needs: Option<String>,
    /// The words of a list that is assigned: `NAME=(…)`.
    pub list: Option<Vec<Word>>,
}

/// A command.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Command {
    pub words: Vec<Word>,
    pub line: usize,
}

#[derive(Clone)]
pub(super) enum Variable {
    Text(Word),
    List(Vec<Word>),
}

/// What a `$` stands for.
pub(super) enum Expansion {
    Text(Word),
    Words(Vec<Word>),
}

/// All commands of a script that are more than assignments.
pub(super) fn commands(file: &str, text: &str, environment: EnvironmentLookup) -> Result<Vec<Command>, ImportError> {
    let mut reader = WordReader {
        file,
        chars: text.chars().collect(),
        at: 0,
        line: 1,
        environment,
        variables: BTreeMap::new(),
        depth: 0,
    };
    let mut commands = Vec::new();
    while reader.at < reader.chars.len() {
        let mut words = Vec::new();
        let mut line = None;
        while let Some(more) = reader.next_words(&mut line)? {
            words.extend(more);
        }
        let words = reader.assign(words);
        if !words.is_empty() {
            let line = line.unwrap_or(reader.line);
            commands.push(Command { words, line });
        }
    }
    Ok(commands)
}

pub(super) struct WordReader<'a> {
    file: &'a str,
    pub(super) chars: Vec<char>,
    pub(super) at: usize,
    pub(super) line: usize,
    pub(super) environment: EnvironmentLookup<'a>,
    pub(super) variables: BTreeMap<String, Variable>,
    pub(super) depth: usize,
}

/// The name and value of an assignment.
fn assignment(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    is_name(name).then_some((name, value))
}

fn is_name(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

impl WordReader<'_> {
    pub(super) fn error<T>(&self, line: usize, detail: impl Into<String>) -> Result<T, ImportError> {
        Err(ImportError::at(self.file, Some(line), detail))
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    pub(super) fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += 1;
        self.line += usize::from(next == '\n');
        Some(next)
    }

    pub(super) fn starts_with(&self, text: &str) -> bool {
        let rest = &self.chars[self.at.min(self.chars.len())..];
        text.chars().count() <= rest.len() && text.chars().zip(rest).all(|(a, b)| a == *b)
    }

    /// Takes the assignments at the start of a command, and gives the rest of it.
    fn assign(&mut self, words: Vec<Word>) -> Vec<Word> {
        const BEFORE: [&str; 8] = ["export", "local", "declare", "readonly", "then", "else", "do", "{"];
        let mut rest = words.into_iter().peekable();
        let mut set = Vec::new();
        while let Some(word) = rest.peek() {
            if let Some((name, value)) = assignment(&word.text) {
                let text = Word { text: value.to_owned(), ..word.clone() };
                let value = match &word.list {
                    Some(list) => Variable::List(list.clone()),
                    None => Variable::Text(text),
                };
                set.push((name.to_owned(), value));
            } else if !BEFORE.contains(&word.text.as_str()) {
                break;
            }
            rest.next();
        }
        let rest: Vec<Word> = rest.collect();
        // before a command they are that command's environment, which the script's own words do not see
        if rest.is_empty() {
            self.variables.extend(set);
        }
        rest
    }

    /// The next word, which may be several or none; nothing at the end of a command, which is passed.
    fn next_words(&mut self, line: &mut Option<usize>) -> Result<Option<Vec<Word>>, ImportError> {
        loop {
            match self.peek() {
                None => return Ok(None),
                Some('\\') if self.starts_with("\\\n") || self.starts_with("\\\r\n") => {
                    while self.next() != Some('\n') {}
                }
                Some('\n' | ';' | '&' | '|' | '(' | ')') => {
                    self.next();
                    return Ok(None);
                }
                Some(c) if c.is_whitespace() => {
                    self.next();
                }
                Some('#') => self.skip_line(),
                Some('<' | '>') => self.skip_redirection()?,
                Some(_) => {
                    line.get_or_insert(self.line);
                    return self.word(false).map(Some);
                }
            }
        }
    }

    fn skip_line(&mut self) {
        while self.peek().is_some_and(|c| c != '\n') {
            self.next();
        }
    }

    fn skip_redirection(&mut self) -> Result<(), ImportError> {
        let is_here = self.starts_with("<<") && !self.starts_with("<<<");
        while self.peek().is_some_and(|c| "<>&-".contains(c)) {
            self.next();
        }
        while self.peek().is_some_and(|c| c == ' ' || c == '\t') {
            self.next();
        }
        let start = self.line;
        let target = self.word(false)?;
        let Some(end) = target.first().filter(|_| is_here) else {
            return Ok(());
        };
        self.skip_line();
        while self.next().is_some() {
            let from = self.at;
            self.skip_line();
            let line: String = self.chars[from..self.at].iter().collect();
            if line.trim() == end.text {
                return Ok(());
            }
        }
        self.error(start, format!("the text after `<<` has no line `{}` that ends it", end.text))
    }

    /// A word from here on; with `whole`, all that is left.
    pub(super) fn word(&mut self, whole: bool) -> Result<Vec<Word>, ImportError> {
        let mut word = Word::default();
        let start = self.at;
        let line = self.line;
        while let Some(c) = self.peek() {
            match c {
                '\\' => {
                    self.next();
                    match self.next() {
                        None | Some('\n') => {}
                        Some(escaped) => word.text.push(escaped),
                    }
                }
                '\'' => self.single_quoted(&mut word)?,
                '"' => self.double_quoted(&mut word)?,
                '`' => self.backticks(&mut word)?,
                '$' => {
                    let alone = self.at == start && !whole;
                    match self.expansion()? {
                        Expansion::Text(text) if alone && self.at_end_of_word() => {
                            return Ok(split(text));
                        }
                        Expansion::Text(text) => add(&mut word, &text),
                        Expansion::Words(words) if alone && self.at_end_of_word() => {
                            return Ok(words);
                        }
                        Expansion::Words(words) => add_all(&mut word, &words),
                    }
                }
                '(' if !whole && assignment(&word.text).is_some_and(|(_, v)| v.is_empty()) => {
                    word.list = Some(self.list()?);
                    return Ok(vec![word]);
                }
                c if !whole && ends_word(c) => break,
                c => {
                    word.text.push(c);
                    self.next();
                }
            }
            if word.text.len() > LONGEST {
                return self.error(line, "a word becomes longer than 256 KiB; do variables double each other?");
            }
        }
        Ok(vec![word])
    }

    fn at_end_of_word(&self) -> bool {
        self.peek().is_none_or(ends_word)
    }

    fn single_quoted(&mut self, word: &mut Word) -> Result<(), ImportError> {
        let line = self.line;
        self.next();
        loop {
            match self.next() {
                None => return self.error(line, "a quote ' that begins here is never closed"),
                Some('\'') => return Ok(()),
                Some(c) => word.text.push(c),
            }
        }
    }

    fn double_quoted(&mut self, word: &mut Word) -> Result<(), ImportError> {
        let line = self.line;
        self.next();
        loop {
            match self.peek() {
                None => return self.error(line, "a quote \" that begins here is never closed"),
                Some('"') => {
                    self.next();
                    return Ok(());
                }
                Some('\\') => {
                    self.next();
                    match self.next() {
                        None | Some('\n') => {}
                        Some(c @ ('$' | '`' | '"' | '\\')) => word.text.push(c),
                        Some(c) => word.text.extend(['\\', c]),
                    }
                }
                Some('`') => self.backticks(word)?,
                Some('$') => match self.expansion()? {
                    Expansion::Text(text) => add(word, &text),
                    // "${NAME[@]}" alone in its quotes is its words, which `word` is given as one list
                    Expansion::Words(words) if self.peek() == Some('"') && word.text.is_empty() => {
                        word.list = Some(words);
                    }
                    Expansion::Words(words) => add_all(word, &words),
                },
                Some(c) => {
                    word.text.push(c);
                    self.next();
                }
            }
            if word.text.len() > LONGEST {
                return self.error(line, "a word becomes longer than 256 KiB; do variables double each other?");
            }
        }
    }

    fn backticks(&mut self, word: &mut Word) -> Result<(), ImportError> {
        let line = self.line;
        self.next();
        let from = self.at;
        loop {
            match self.next() {
                None => return self.error(line, "a quote ` that begins here is never closed"),
                Some('`') => break,
                Some(_) => {}
            }
        }
        let command: String = self.chars[from..self.at - 1].iter().collect();
        add(word, &needs(format!("`{command}`"), format!("the output of the command {command}")));
        Ok(())
    }

    /// The words between the brackets of `NAME=(…)`.
    fn list(&mut self) -> Result<Vec<Word>, ImportError> {
        let line = self.line;
        self.next();
        let mut words = Vec::new();
        loop {
            match self.peek() {
                None => return self.error(line, "a list ( that begins here is never closed"),
                Some(')') => {
                    self.next();
                    return Ok(words);
                }
                Some('#') => self.skip_line(),
                Some('\\') if self.starts_with("\\\n") => {
                    self.next();
                    self.next();
                }
                Some(c) if c.is_whitespace() || ends_word(c) => {
                    self.next();
                }
                Some(_) => words.extend(flat(self.word(false)?)),
            }
        }
    }
}

fn ends_word(c: char) -> bool {
    c.is_whitespace() || ";&|<>()".contains(c)
}

pub(super) fn needs(text: String, needs: String) -> Word {
    Word { text, needs: Some(needs), list: None }
}

/// Adds what something stands for to a word.
pub(super) fn add(word: &mut Word, more: &Word) {
    word.text.push_str(&more.text);
    if word.needs.is_none() {
        word.needs.clone_from(&more.needs);
    }
}

/// Adds several, one behind the other.
pub(super) fn add_all(word: &mut Word, more: &[Word]) {
    for own in more {
        add(word, own);
    }
}

/// An unquoted variable is as many words as it has.
fn split(word: Word) -> Vec<Word> {
    if word.needs.is_some() || !word.text.contains(char::is_whitespace) {
        return if word.text.is_empty() { Vec::new() } else { vec![word] };
    }
    let words = word.text.split_whitespace();
    words.map(|text| Word { text: text.to_owned(), ..Word::default() }).collect()
}

/// Words, with those of a quoted list in its place.
pub(super) fn flat(words: Vec<Word>) -> Vec<Word> {
    let each = words.into_iter().map(|word| match word.list {
        Some(list) if word.text.is_empty() => list,
        _ => vec![word],
    });
    each.flatten().collect()
}
