//! The program's standard streams: results go to stdout, everything else to stderr.

use anyhow::Context;
use serde::Serialize;
use std::io::{ErrorKind, Write};

/// Writes a command's result to stdout. A reader that closes the pipe early (`firebrick plan … | head`) is
/// satisfied, so that is no error; a full disk is one.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    match written.and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}

/// Prints a command's result: one JSON value or a text.
pub fn print_as(json: bool, value: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    print(&if json { serde_json::to_string_pretty(value)? + "\n" } else { text() })
}

/// A text of rows, prompts or models that is safe for a terminal: control characters and direction marks
/// become their codes, except line breaks and tabs.
pub fn printable(text: &str) -> String {
    let is_unsafe = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().fold(String::new(), |mut printable, c| {
        if is_unsafe(c) {
            printable.extend(c.escape_unicode());
        } else {
            printable.push(c);
        }
        printable
    })
}

/// Writes a line to stderr.
pub fn message(line: &str) {
    // one write per line, so that lines of several threads stay whole
    let _ = Stderr.write_all(format!("{line}\n").as_bytes());
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
