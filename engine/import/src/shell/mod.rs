//! Launch scripts: the commands that bash would start, and their settings.
//!
//! Nothing is run. The reader follows a script as bash would run it without arguments: assignments, functions, loops,
//! and branches whose conditions are certain. For other conditions, such as a command's status, it follows both
//! outcomes, one after the other: a setting that differs between them gets candidates.

mod builtins;
mod command;
mod conditions;
mod launch;
mod read;
mod run;
mod simple;
mod strings;
mod value;
mod words;

use super::branches::Branches;
use super::entry::{EnvironmentLookup, ParsedSource};
use super::error::{ImportError, ImportResult};
use super::source_file::SourceFile;
use brush_parser::ast::{FunctionBody, Program};
use brush_parser::{ParseError, Parser, ParserOptions, Token, TokenizerError, tokenize_str_with_options};
use command::Launch;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use value::{Place, Text, Unknown, Variable, placeholder};

pub(super) use launch::looks_like_overrides;
pub(super) use read::read;

/// Most commands and words of all paths together, so that loops within loops end.
const MAX_STEPS: usize = 4_000_000;
/// Deepest nesting of expansions and commands.
const MAX_DEPTH: usize = 64;
/// Deepest nesting of brackets and blocks in a text.
const MAX_NESTING: usize = 100;
/// Deepest nesting of subshells and, each as [`CASE`] of them, of `case`: behind an error or without an end, brush's
/// parser reads the inside of each at least twice.
const MAX_REREAD: usize = 14;
const CASE: usize = 3;

/// A script and its surroundings.
pub(super) struct Script<'a> {
    pub name: &'a str,
    pub text: &'a str,
    /// Files that it may source, run, or name as a configuration.
    pub files: &'a [SourceFile],
    pub environment: EnvironmentLookup<'a>,
}

/// Control flow after a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flow {
    #[default]
    Next,
    Continue,
    Break(usize),
    Return,
    Exit,
}

/// Output of commands.
#[derive(Clone, Debug, Default)]
struct Output {
    text: Text,
    is_captured: bool,
    is_unknown: bool,
}

/// State of a subshell.
#[derive(Clone, Debug, Default)]
struct Scope {
    variables: BTreeMap<String, Variable>,
    /// Variables that are mappings.
    mappings: BTreeSet<String>,
    functions: BTreeMap<String, Arc<(FunctionBody, usize)>>,
    arguments: Vec<Text>,
    /// `$0`.
    name: String,
    /// Variables that local ones of running functions hide.
    locals: Vec<Vec<(String, Option<Variable>)>>,
    /// A missing file that was sourced, with its line.
    sourced: Option<String>,
    flow: Flow,
    /// Success of the last command, if certain.
    status: Option<bool>,
    output: Output,
}

/// A path through a script.
struct Shell<'a> {
    files: &'a [SourceFile],
    environment: EnvironmentLookup<'a>,
    options: ParserOptions,
    scope: Scope,
    /// Names of the files that are run; the first is the script.
    names: Vec<String>,
    file: usize,
    line: usize,
    /// True while a text within a line runs, whose lines have no numbers.
    is_nested: bool,
    /// Call sites of the running functions.
    calls: Vec<Place>,
    depth: usize,
    steps: usize,
    unknowns: Vec<Unknown>,
    /// Text of the last condition.
    question: String,
    branches: &'a mut Branches,
    launches: Vec<Launch>,
    /// Files written by here-documents.
    written_files: Vec<SourceFile>,
    /// Notes, used files and missing files.
    reading: ParsedSource,
}

/// Parses a script.
fn parse(file: &str, line: Option<usize>, text: &str) -> ImportResult<Program> {
    if let Some(deep) = too_deep(text).or_else(|| reread_too_often(text)) {
        return Err(ImportError::at(file, line.or(Some(deep)), "blocks and brackets are nested too deeply"));
    }
    if let Some(at) = long_number(text) {
        let at_line = line.or(Some(text[..at].matches('\n').count() + 1));
        return Err(ImportError::at(file, at_line, "a number here has more digits than bash takes; correct it"));
    }
    // a file has no placeholder characters; a text within a line has those of its variables
    let is_file = line.is_none();
    let plain = |c: char| if is_file && value::number(c).is_some() { '\u{FFFD}' } else { c };
    let text: String = text.chars().map(plain).collect();
    let text = text.replace("\r\n", "\n");
    let parsed = |text: &str| Parser::new(text.as_bytes(), &ParserOptions::default()).parse_program();
    let error = match parsed(&text) {
        Ok(program) => return Ok(program),
        Err(error) => error,
    };
    let (error_line, detail) = match &error {
        ParseError::ParsingNear(place) => (Some(place.line), "expected bash, found something else here".to_owned()),
        ParseError::Tokenizing { inner, position } => match inner {
            TokenizerError::UnterminatedSingleQuote(place) => {
                (Some(place.line), "a quote ' that begins here is never closed".into())
            }
            TokenizerError::UnterminatedDoubleQuote(place) => {
                (Some(place.line), "a quote \" that begins here is never closed".into())
            }
            TokenizerError::UnterminatedBackquote(place) => {
                (Some(place.line), "a quote ` that begins here is never closed".into())
            }
            inner if inner.is_incomplete() => {
                (None, format!("a bracket or text that begins here is never closed ({inner})"))
            }
            inner => (position.as_ref().map(|place| place.line), inner.to_string()),
        },
        ParseError::ParsingAtEndOfInput => (None, "a bracket or block that begins here is never closed".to_owned()),
    };
    let error_line = error_line.or_else(|| {
        // the last line before which the text parses
        let starts: Vec<usize> = text.match_indices('\n').map(|(at, _)| at + 1).take(300).collect();
        let parsed_lines = (0..=starts.len()).rev().find(|&n| n == 0 || parsed(&text[..starts[n - 1]]).is_ok());
        parsed_lines.map(|n| n + 1)
    });
    Err(ImportError::at(file, line.or(error_line), detail))
}

/// Offset of a number that overflows brush's parser: in `{1..N}`, `~N` or `N>FILE`.
fn long_number(text: &str) -> Option<usize> {
    let is_digit = |c: char| c.is_ascii_digit();
    let starts = text.match_indices(is_digit).filter(|(at, _)| !text[..*at].ends_with(is_digit));
    starts.map(|(at, _)| at).find(|at| {
        let before = text[..*at].trim_end_matches(['+', '-']);
        let digits = text[*at..].chars().take_while(|c| is_digit(*c)).count();
        let is_bound = before.ends_with(['~', '{']) || before.ends_with("..");
        digits > 18 && is_bound || digits > 9 && text[at + digits..].starts_with(['<', '>'])
    })
}

/// The first line that is nested too deeply for the parser.
fn too_deep(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, line) in text.lines().enumerate() {
        let mut begins = true;
        for word in line.split_whitespace().take_while(|word| !word.starts_with('#')) {
            let block = matches!(word, "if" | "while" | "until" | "for" | "case" | "!" | "[[");
            let end = matches!(word.trim_end_matches([';', ')']), "fi" | "done" | "esac" | "]]");
            let opens = word.bytes().filter(|b| matches!(b, b'(' | b'{')).count() + usize::from(begins && block);
            let closes = word.bytes().filter(|b| matches!(b, b')' | b'}')).count() + usize::from(begins && end);
            depth = (depth + opens).saturating_sub(closes);
            if depth > MAX_NESTING || opens > MAX_NESTING {
                return Some(at + 1);
            }
            begins = block || word.ends_with([';', '&', '|', '(']) || matches!(word, "then" | "do" | "else" | "{");
        }
    }
    None
}

/// The first line within too many subshells and `case`s.
fn reread_too_often(text: &str) -> Option<usize> {
    // what has no tokens is refused when it is parsed
    let tokens = tokenize_str_with_options(text, &ParserOptions::default().tokenizer_options()).unwrap_or_default();
    let (mut open, mut begins) = (Vec::new(), true);
    for token in &tokens {
        let is_operator = matches!(token, Token::Operator(..));
        match token.to_str() {
            "(" if is_operator => open.push(1),
            // in a `case`, one ends a pattern
            ")" if is_operator && open.last() == Some(&1) => drop(open.pop()),
            "case" if begins => open.push(CASE),
            "esac" if begins => while open.pop().is_some_and(|kind| kind != CASE) {},
            _ => {}
        }
        if open.iter().sum::<usize>() > MAX_REREAD {
            return Some(token.location().start.line);
        }
        let word =
            matches!(token.to_str(), "!" | "{" | "do" | "elif" | "else" | "if" | "in" | "then" | "until" | "while");
        begins = is_operator || word;
    }
    None
}

impl<'a> Shell<'a> {
    fn new(script: &Script<'a>, branches: &'a mut Branches, steps: usize) -> Self {
        Self {
            files: script.files,
            environment: script.environment,
            options: ParserOptions::default(),
            scope: Scope { name: script.name.to_owned(), status: Some(true), ..Scope::default() },
            names: vec![script.name.to_owned()],
            file: 0,
            line: 1,
            is_nested: false,
            calls: Vec::new(),
            depth: 0,
            steps,
            unknowns: Vec::new(),
            question: String::new(),
            branches,
            launches: Vec::new(),
            written_files: Vec::new(),
            reading: ParsedSource::default(),
        }
    }

    fn error(&self, detail: impl Into<String>) -> ImportError {
        ImportError::at(&self.names[self.file], Some(self.line), detail)
    }

    fn place(&self) -> Place {
        (self.file, self.line)
    }

    fn note(&mut self, detail: impl AsRef<str>) {
        let note = format!("{}:{}: {}", self.names[self.file], self.line, detail.as_ref());
        if !self.reading.notes.contains(&note) {
            self.reading.notes.push(note);
        }
    }

    /// Counts a step, and one level of nesting.
    fn deeper(&mut self) -> ImportResult {
        self.depth += 1;
        self.steps += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.error("commands and words are nested too deeply; does it call itself?"));
        }
        if self.steps > MAX_STEPS {
            return Err(self.error("it does too much to be followed; does a loop end?"));
        }
        Ok(())
    }

    /// A placeholder for an unknown text.
    fn unknown(&mut self, written: &str, needs: &str, is_unset: bool) -> Text {
        let unknown = Unknown { written: written.to_owned(), needs: needs.to_owned(), is_unset };
        let at = self.unknowns.iter().position(|known| *known == unknown).unwrap_or_else(|| {
            self.unknowns.push(unknown);
            self.unknowns.len() - 1
        });
        Text::new(placeholder(at))
    }

    fn choose_question(&mut self) -> bool {
        self.branches.choose(&self.question)
    }

    /// Runs a command and returns its output.
    fn substitute(&mut self, command: &str, written: &str) -> ImportResult<Text> {
        self.deeper()?;
        let output = Output { is_captured: true, ..Output::default() };
        let outer = std::mem::replace(&mut self.scope.output, output);
        self.in_subshell(|shell| shell.nested(command))?;
        let Output { mut text, is_unknown, .. } = std::mem::replace(&mut self.scope.output, outer);
        self.depth -= 1;
        if is_unknown {
            return Ok(self.unknown(written, &format!("the output of the command {command}"), false));
        }
        text.text.truncate(text.text.trim_end_matches('\n').len());
        Ok(text)
    }

    /// Runs a text within a line.
    fn nested(&mut self, text: &str) -> ImportResult {
        let program = parse(&self.names[self.file].clone(), Some(self.line), text)?;
        let outer = std::mem::replace(&mut self.is_nested, true);
        for list in &program.complete_commands {
            self.list(list)?;
        }
        self.is_nested = outer;
        Ok(())
    }
}
