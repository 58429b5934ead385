//! Which run a folder holds: whether it is the one that is asked for, and where it continues.

use crate::checkpoint::{RunDir, TrainerState};
use crate::config::{Mode, RunConfig, check_resume_compat};
use crate::metrics::Recorder;
use crate::world::World;
use crate::{Error, Result};
use std::path::PathBuf;

/// Opens the run folder, checks that it is the same run, and rewinds its logs to the newest checkpoint.
/// `None`: it was killed before its first checkpoint and starts over.
pub(super) fn resume(config: &RunConfig, mode: Mode, world: &World) -> Result<(RunDir, Option<PathBuf>)> {
    // rank 0 makes what is missing, and changes nothing before all have looked
    let opened = world.together(if world.writes() {
        RunDir::open(&config.output)
    } else {
        Ok(RunDir::of_another(&config.output))
    });
    let run = opened?;
    let newest = run.checkpoints()?.pop();
    if newest.is_some() {
        let earlier = crate::config::parse(&run.config_yaml()?, &[])?;
        check_resume_compat(&earlier, config, mode)?;
    }
    if let Some((_, dir)) = &newest {
        let text = std::fs::read_to_string(dir.join("trainer/state.json")).unwrap_or_default();
        let other = match mode {
            Mode::Rl => Mode::Sft,
            Mode::Sft => Mode::Rl,
        };
        if serde_json::from_str::<TrainerState>(&text).is_ok_and(|s| s.mode == other) {
            let detail = "the run in it was started by the other command (train or sft); use that one".into();
            return Err(Error::Resume { path: config.output.clone(), detail });
        }
    }
    let found = newest.as_ref().map_or(u64::MAX, |(step, _)| *step);
    let advice = "every rank needs the run folder on a file system that all machines share";
    world.same("the newest checkpoint", advice, &found.to_le_bytes())?;
    // a run that starts over keeps nothing; one that continues keeps what its checkpoint knows
    Recorder::rewind(&run, newest.as_ref().map(|(step, _)| *step))?;
    run.write("config.yaml", config.to_yaml()?.as_bytes())?;
    Ok((run, newest.map(|(_, dir)| dir)))
}
