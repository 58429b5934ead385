//! Launch scripts: the settings on the command line that starts a training program.

use super::entry::{Entry, EnvironmentLookup, Given, PROGRAM, SourceLocation};
use super::error::ImportError;
use super::literal::{hydra, word as literal_word};
use super::shell_words::{Command, Word, commands, flat};
use serde_json::Value;

/// Words that a launch command of TRL's has.
const TRL_WORDS: [&str; 4] = ["trl", "grpo", "rloo", "ppo"];

/// Entries of a script: Hydra's `key=value` of a command that starts verl, lines that are nothing but such, or the
/// `--key value` of a command that starts TRL.
pub(super) fn entries(file: &str, text: &str, environment: EnvironmentLookup) -> Result<Vec<Entry>, ImportError> {
    let mut commands = commands(file, text, environment)?;
    for command in &mut commands {
        command.words = flat(std::mem::take(&mut command.words));
    }
    let launches: Vec<&Command> = commands.iter().filter(|c| is_launch(c)).collect();
    if let [first, second, ..] = launches[..] {
        return Err(ImportError::at(
            file,
            Some(second.line),
            format!(
                "a second command with settings begins here, and the first in line {}; a run has one: keep the one to import",
                first.line
            ),
        ));
    }
    let lines: Vec<&Command> = commands.iter().filter(|c| is_lines(c)).collect();
    let mut found = Vec::new();
    for command in launches.iter().chain(&lines) {
        overrides(file, command, &mut found);
    }
    if found.is_empty() {
        for command in commands.iter().filter(|c| starts_trl(c)) {
            flags(file, command, &mut found);
        }
    }
    if found.is_empty() {
        return Err(ImportError::at(
            file,
            None,
            "no settings found: expected a command with key=value settings, as in `python3 -m verl.trainer.main_ppo \
             data.train_batch_size=256`, or with --key value ones, as in `trl grpo --learning_rate 1e-6`",
        ));
    }
    Ok(found)
}

/// Whether a text without a telling name is a list of overrides.
pub(super) fn looks_like_overrides(text: &str) -> bool {
    let lines = text.lines().map(str::trim);
    let mut lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.next().is_some_and(|line| dotted_override(line).is_some())
}

/// The key and value of an override.
fn split_override(word: &str) -> Option<(&str, &str)> {
    if let Some(key) = word.strip_prefix('~') {
        let (key, value) = key.split_once('=').unwrap_or((key, ""));
        return is_key(key).then_some((key, value));
    }
    let (key, value) = word.trim_start_matches('+').split_once('=')?;
    is_key(key).then_some((key, value))
}

/// The same, if the key has a dot: what a shell's own assignment never has.
fn dotted_override(word: &str) -> Option<(&str, &str)> {
    split_override(word).filter(|(key, _)| key.contains('.'))
}

fn is_key(key: &str) -> bool {
    let part = |c: char| c.is_ascii_alphanumeric() || "_./@-".contains(c);
    key.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && key.chars().all(part)
}

fn is_lines(command: &Command) -> bool {
    command.words.first().is_some_and(|word| dotted_override(&word.text).is_some())
}

fn is_launch(command: &Command) -> bool {
    let dotted = |word: &Word| dotted_override(&word.text).is_some();
    !is_lines(command) && command.words.iter().any(dotted)
}

fn starts_trl(command: &Command) -> bool {
    let is_one = |word: &Word| {
        let parts = word.text.split(['/', '.', '_', '-']);
        let mut parts = parts.filter(|part| TRL_WORDS.contains(part));
        !word.text.starts_with("--") && parts.next().is_some()
    };
    command.words.iter().any(is_one)
}

fn given(word: &Word, text: &str, read: fn(&str) -> Value) -> Given {
    match &word.needs {
        Some(needs) => Given::open(text, needs),
        None => Given::Value(read(text)),
    }
}

/// The program that a command starts: the module behind `-m`, a Python file, or a command of `trl`.
fn program(words: &[Word]) -> Option<&str> {
    let after = |own: &str| words.iter().skip_while(|word| word.text != own).nth(1);
    let module =
        after("trl").or_else(|| words.iter().rposition(|word| word.text == "-m").and_then(|at| words.get(at + 1)));
    let file = words.iter().find(|word| word.text.rsplit_once('.').is_some_and(|(_, ending)| ending == "py"));
    Some(module.or(file)?.text.as_str())
}

fn overrides(file: &str, command: &Command, into: &mut Vec<Entry>) {
    let place = &SourceLocation { file: file.to_owned(), line: Some(command.line) };
    if let Some(program) = program(&command.words) {
        into.push(Entry::new(PROGRAM, Given::Value(program.into()), place));
    }
    for word in &command.words {
        if word.text.starts_with("--config") {
            let (flag, value) = word.text.split_once('=').unwrap_or((word.text.as_str(), ""));
            into.push(Entry::new(flag, given(word, value, literal_word), place));
        } else if let Some((key, value)) = split_override(&word.text) {
            let removes = word.text.starts_with('~');
            match given(word, value, hydra) {
                Given::Value(value) if !removes => Entry::flatten(key, value, place, into),
                given => into.push(Entry { removes, ..Entry::new(key, given, place) }),
            }
        }
    }
}

/// `--key value`, `--key=value` and `--key` alone, which is true; several values of one key are a list.
fn flags(file: &str, command: &Command, into: &mut Vec<Entry>) {
    let place = &SourceLocation { file: file.to_owned(), line: Some(command.line) };
    if let Some(program) = program(&command.words) {
        into.push(Entry::new(PROGRAM, Given::Value(program.into()), place));
    }
    let mut words = command.words.iter().peekable();
    while let Some(word) = words.next() {
        let Some(flag) = word.text.strip_prefix("--") else {
            continue;
        };
        if let Some((key, value)) = flag.split_once('=') {
            into.push(Entry::new(key.replace('-', "_"), given(word, value, hydra), place));
            continue;
        }
        let mut values = Vec::new();
        while let Some(value) = words.next_if(|next| !next.text.starts_with("--") && next.text != "-m") {
            // what follows the program's own name belongs to no flag
            if value.text.rsplit_once('.').is_some_and(|(_, ending)| ending == "py") {
                break;
            }
            values.push(value);
        }
        let given = match values[..] {
            [] => Given::Value(Value::Bool(true)),
            [one] => given(one, &one.text, hydra),
            _ => Given::Value(values.iter().map(|one| literal_word(&one.text)).collect()),
        };
        into.push(Entry::new(flag.replace('-', "_"), given, place));
    }
}
