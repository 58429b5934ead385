//! `docs/reference/cli.md`, from the parser of the command line.

use super::fill;
use crate::arguments::Arguments;
use clap::{Arg, Command, CommandFactory};
use std::collections::BTreeMap;
use std::fmt::Write;

pub fn render() -> String {
    let mut program = Arguments::command();
    program.build();
    let mut page = "# Command line\n\n".to_owned();
    page.push_str(&fill("", "This page is generated from `firebrick --help` and the help of each command."));
    let about = program.get_about().map(ToString::to_string).unwrap_or_default();
    let _ = write!(page, "\n{}", fill("", &sentence(&about)));
    if let Some(after) = program.get_after_help() {
        let _ = write!(page, "\n```text\n{}\n```\n", after.to_string().trim_end());
    }
    let mut described = BTreeMap::new();
    for command in program.get_subcommands().filter(|command| is_listed(command)) {
        add(&mut page, command, 2, &mut described);
    }
    page
}

fn is_listed(command: &Command) -> bool {
    !command.is_hide_set() && command.get_name() != "help"
}

/// Adds a command. `described` has the arguments of the commands before it and the command that each is described in.
fn add(page: &mut String, command: &Command, level: usize, described: &mut BTreeMap<String, String>) {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let positional: Vec<String> = command.get_positionals().map(usage).collect();
    let _ = write!(page, "\n{} {name}\n\n", "#".repeat(level));
    let about = command.get_long_about().or_else(|| command.get_about());
    page.push_str(&fill("", &sentence(&about.map(ToString::to_string).unwrap_or_default())));
    if !positional.is_empty() {
        let _ = write!(page, "\n```text\n{name} [OPTIONS] {}\n```\n", positional.join(" "));
    }
    let listed = |arg: &&Arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str());
    let mut first = true;
    let mut repeated = BTreeMap::new();
    for arg in command.get_arguments().filter(listed) {
        if std::mem::take(&mut first) {
            page.push('\n');
        }
        let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
        let mut text = format!("`{}`: {}", flag(arg), sentence(&help));
        let defaults: Vec<String> =
            arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
        if !defaults.is_empty() && arg.get_action().takes_values() {
            let _ = write!(text, " Default: `{}`.", defaults.join(" "));
        }
        if let Some(before) = described.get(&text) {
            let flags: &mut Vec<String> = repeated.entry(before.clone()).or_default();
            flags.push(format!("`{}`", flag(arg)));
            continue;
        }
        page.push_str(&fill("- ", &text));
        described.insert(text, name.to_owned());
    }
    for (before, flags) in repeated {
        page.push_str(&fill("- ", &format!("As in `{before}`: {}.", flags.join(", "))));
    }
    if let Some(after) = command.get_after_help() {
        let _ = write!(page, "\n```text\n{}\n```\n", after.to_string().trim_end());
    }
    for below in command.get_subcommands().filter(|below| is_listed(below)) {
        add(page, below, level + 1, described);
    }
}

/// A positional as a usage line has it.
fn usage(arg: &Arg) -> String {
    let name = value(arg);
    let many = arg.get_num_args().is_some_and(|count| count.max_values() > 1);
    let dots = if many { "…" } else { "" };
    if arg.is_required_set() { format!("{name}{dots}") } else { format!("[{name}{dots}]") }
}

fn value(arg: &Arg) -> String {
    let names: Vec<String> = arg.get_value_names().into_iter().flatten().map(ToString::to_string).collect();
    if names.is_empty() { arg.get_id().as_str().to_uppercase() } else { names.join(" ") }
}

/// An option with its value, or a positional's name.
fn flag(arg: &Arg) -> String {
    let Some(long) = arg.get_long() else {
        return value(arg);
    };
    let takes = if arg.get_action().takes_values() { format!(" {}", value(arg)) } else { String::new() };
    let short = arg.get_short().map(|short| format!("-{short}, ")).unwrap_or_default();
    format!("{short}--{long}{takes}")
}

/// Help ends with a full stop in prose, and without one on a terminal.
fn sentence(text: &str) -> String {
    let text = text.trim();
    if text.is_empty() || text.ends_with(['.', ':', '!']) { text.to_owned() } else { format!("{text}.") }
}
