//! What a script says, by all ways through it.

use super::launch::merged;
use super::{Script, Shell, parse};
use crate::entry::Reading;
use crate::error::ImportError;
use crate::ways::Ways;

/// What a script says.
pub(crate) fn read(script: &Script) -> Result<Reading, ImportError> {
    let program = parse(script.name, None, script.text)?;
    let (mut steps, mut runs) = (0, Vec::new());
    let mut whole = Reading::default();
    Ways::follow(script.name, |ways| {
        let mut shell = Shell::new(script, ways, steps);
        for list in &program.complete_commands {
            shell.list(list)?;
        }
        let launches = std::mem::take(&mut shell.launches);
        runs.push(launches.into_iter().map(|launch| shell.settings(launch)).collect::<Result<_, _>>()?);
        steps = shell.steps;
        whole.join(shell.reading);
        Ok(())
    })?;
    let (entries, absent) = merged(script.name, runs)?;
    whole.join(Reading { absent, ..Reading::default() });
    Ok(Reading { entries, ..whole })
}
