//! `firebrick config`: the schema of configurations, the meaning of their keys, and the mistakes of a file.

use super::UserError;
use crate::arguments::{CheckArgs, ConfigCommand, ExplainArgs};
use crate::checked::{self, Checked};
use crate::{explain, output};
use firebrick::engine::config::{Place, Problem, schema};
use std::fmt::Write;
use std::path::Path;

/// Shown characters of a line before and after a mistake.
const CONTEXT: usize = 60;

pub fn run(command: &ConfigCommand) -> anyhow::Result<()> {
    match command {
        ConfigCommand::Schema => output::print_raw(&(serde_json::to_string_pretty(&schema())? + "\n")),
        ConfigCommand::Explain(args) => explain(args),
        ConfigCommand::Check(args) => check(args),
    }
}

fn explain(args: &ExplainArgs) -> anyhow::Result<()> {
    let text = match &args.key {
        Some(key) => explain::explain(key).map_err(UserError)?,
        None => explain::overview(),
    };
    output::print(&text)
}

fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let Checked { problems, left_out } = checked::check(&args.config, &args.overrides, args.offline)?;
    let name = args.config.display();
    let text = std::fs::read_to_string(&args.config).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let mut report = String::new();
    for problem in &problems {
        report.push_str(&describe(&args.config, &lines, problem));
    }
    for what in &left_out {
        let _ = writeln!(report, "not checked: {what}");
    }
    if problems.is_empty() {
        let _ = writeln!(report, "{name}: no mistakes");
        return output::print(&report);
    }
    output::print(&report)?;
    let count = match problems.len() {
        1 => "1 mistake".to_owned(),
        n => format!("{n} mistakes"),
    };
    Err(UserError(format!("{name}: {count}")).into())
}

/// `file:line:column: message`, and the line.
fn describe(file: &Path, lines: &[&str], problem: &Problem) -> String {
    let mut description = file.display().to_string();
    if let Some(Place { line, column }) = problem.place {
        let _ = write!(description, ":{line}:{column}");
    }
    let _ = writeln!(description, ": {}", problem.message);
    if let Some((place, line)) = problem.place.and_then(|place| Some((place, lines.get(place.line - 1)?))) {
        let from = (place.column - 1).saturating_sub(CONTEXT);
        let part: String = line.chars().skip(from).take(2 * CONTEXT).collect();
        let part: String = part.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let number = place.line.to_string();
        let (gap, before) = (" ".repeat(number.len()), " ".repeat(place.column - 1 - from));
        let _ = writeln!(description, "  {number} | {}\n  {gap} | {before}^", part.trim_end());
    }
    description
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_is_shown_with_its_line_and_a_mark_below_it() {
        let problem = Problem { message: "wrong".into(), place: Some(Place { line: 2, column: 5 }) };
        assert_eq!(
            describe(Path::new("run.yaml"), &["a: 1", "b: {c}"], &problem),
            "run.yaml:2:5: wrong\n  2 | b: {c}\n    |     ^\n"
        );
        let nowhere = Problem { place: None, ..problem };
        assert_eq!(describe(Path::new("run.yaml"), &[], &nowhere), "run.yaml: wrong\n");
    }

    #[test]
    fn of_a_long_line_the_part_around_the_mistake_is_shown() {
        let line = format!("{}\u{1b}x: [{}]", " ".repeat(300), "1, ".repeat(200));
        let problem = Problem { message: "wrong".into(), place: Some(Place { line: 1, column: 302 }) };
        let message = describe(Path::new("a"), &[&line], &problem);
        let lines: Vec<&str> = message.lines().collect();
        assert!(lines.iter().all(|line| line.len() < 140), "{message}");
        let mark = lines[2].find('^').unwrap();
        assert_eq!(&lines[1][mark..=mark], "x");
        assert!(!message.contains('\u{1b}'));
    }
}
