//! Parses a script along all paths through it.

use super::launch::merge_launches;
use super::{Script, Shell, parse};
use crate::branches::Branches;
use crate::entry::ParsedSource;
use crate::error::ImportResult;

/// Parses a script.
pub(crate) fn read(script: &Script) -> ImportResult<ParsedSource> {
    let program = parse(script.name, None, script.text)?;
    let (mut steps, mut runs) = (0, Vec::new());
    let mut merged = ParsedSource::default();
    Branches::explore(script.name, |branches| {
        let mut shell = Shell::new(script, branches, steps);
        for list in &program.complete_commands {
            shell.list(list)?;
        }
        let launches = std::mem::take(&mut shell.launches);
        runs.push(launches.into_iter().map(|launch| shell.settings(launch)).collect::<Result<_, _>>()?);
        steps = shell.steps;
        merged.merge(shell.reading);
        Ok(())
    })?;
    let (entries, absent) = merge_launches(script.name, runs)?;
    merged.merge(ParsedSource { absent, ..ParsedSource::default() });
    Ok(ParsedSource { entries, ..merged })
}
