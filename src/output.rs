//! The program's standard streams: results go to stdout, everything else to stderr.

use anyhow::Context;
use firebrick::spec::secrets::without_passwords;
use serde::Serialize;
use std::borrow::Cow;
use std::io::{ErrorKind, Write};

/// Writes a command's text to stdout, as [`printable`].
pub fn print(text: &str) -> anyhow::Result<()> {
    print_raw(&printable(text))
}

/// Writes a command's JSON or script to stdout. A reader that closes the pipe early (`firebrick plan … | head`) is
/// satisfied, so that is no error; a full disk is one.
pub fn print_raw(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    match written.and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}

/// Prints a command's result: one JSON value or a text.
pub fn print_as(json: bool, value: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    if json { print_raw(&(serde_json::to_string_pretty(value)? + "\n")) } else { print(&text()) }
}

/// A text that is safe for a terminal, whatever rows, prompts, models and paths have: control characters and direction
/// marks become their codes, except line breaks and tabs, and passwords of URLs are left out.
pub fn printable(text: &str) -> String {
    let is_unsafe = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    without_passwords(text).chars().fold(String::new(), |mut printable, c| {
        if is_unsafe(c) {
            printable.extend(c.escape_unicode());
        } else {
            printable.push(c);
        }
        printable
    })
}

/// Most characters of an error: a value that it shows may be a whole file.
const MAX_ERROR_CHARS: usize = 8 << 10;

/// The text, cut if it is too long for an error.
pub fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_ERROR_CHARS) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}… ({} more bytes)", &text[..end], text.len() - end)),
    }
}

/// Writes a line to stderr, as [`printable`].
pub fn message(line: &str) {
    // one write per line, so that lines of several threads stay whole
    let _ = Stderr.write_all((printable(line) + "\n").as_bytes());
}

/// Stderr, with writes that always succeed: a run must not end because nobody reads its progress.
#[derive(Clone, Copy, Debug)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = std::io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let _ = std::io::stderr().flush();
        Ok(())
    }
}
