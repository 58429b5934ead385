//! `firebrick doctor`.

use crate::arguments::DoctorArgs;
use crate::doctor::{Check, Machine, Status, checks, kernel_checks};
use crate::output;
use firebrick::backends::device::probe;
use std::fmt::Write;

pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let mut checks = checks(&Machine::this(), &probe(), &args.output);
    if let Some(device) = args.device {
        checks.extend(kernel_checks(device));
    }
    output::print_as(args.json, &checks, || report(&checks))?;
    let failed = checks.iter().find(|check| check.status == Status::Failed);
    match failed {
        Some(check) => anyhow::bail!("nothing can train here: {}: {}", check.name, check.found),
        None => Ok(()),
    }
}

/// A line per check, and below it the command that fixes the problem.
fn report(checks: &[Check]) -> String {
    let names = checks.iter().map(|check| check.name.chars().count());
    let width = names.max().unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        // writing to a string cannot fail
        let _ = writeln!(text, "{:<8} {:<width$}  {}", check.status.name(), check.name, check.found);
        if let Some(command) = &check.fix {
            let _ = writeln!(text, "{:<8} {:<width$}  $ {command}", "", "");
        }
    }
    text
}
