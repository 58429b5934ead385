//! Which run a folder holds: whether it is the one that is asked for, and where it continues.

use super::Start;
use super::setup::Opened;
use crate::checkpoint::{Inputs, RunDir, TrainerState};
use crate::config::{Mode, RunConfig, check_resume_compat};
use crate::metrics::Recorder;
use crate::world::World;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

impl Opened {
    /// Opens the run folder, checks that it is the same run, and rewinds its logs to the newest checkpoint, where that
    /// is not after the last of `steps` already. The checkpoint is `None` of a run that was killed before its first one
    /// and starts over; of a folder without a run all is.
    pub fn resume(&self, start: Start, steps: u64) -> Result<(Option<RunDir>, Option<PathBuf>)> {
        let (config, world) = (&self.config, &self.world);
        // before rank 0 makes one
        if !is_there(world, &config.output)? {
            if world.writes() {
                tracing::warn!("--resume: {} contains no run, so a new one starts", config.output.display());
            }
            return Ok((None, None));
        }
        // rank 0 makes what is missing, and changes nothing before all have looked
        let opened = world.together(if world.writes() {
            RunDir::open(&config.output)
        } else {
            Ok(RunDir::of_another(&config.output))
        });
        let run = opened?;
        let newest = run.checkpoints()?.pop();
        if newest.is_none() && world.writes() {
            tracing::warn!("--resume: {} contains no checkpoint, so the run starts over", config.output.display());
        }
        let inputs = world.together(if world.writes() { self.inputs().map(Some) } else { Ok(None) })?;
        if let Some((_, dir)) = &newest {
            let earlier = crate::config::parse(&run.config_yaml()?, &[])?;
            check_resume_compat(&earlier, config, self.mode)?;
            check_mode(config, self.mode, dir)?;
            let compared = inputs.as_ref().map(|now| compare_inputs(&run, now, start));
            world.together(compared.unwrap_or(Ok(())))?;
        }
        let found = newest.as_ref().map_or(u64::MAX, |(step, _)| *step);
        let advice = "every rank needs the run folder on a file system that all machines share";
        world.same("the newest checkpoint", advice, &found.to_le_bytes())?;
        if newest.as_ref().is_none_or(|(step, _)| *step < steps) {
            // a run that starts over keeps nothing; one that continues keeps what its checkpoint knows
            Recorder::rewind(&run, newest.as_ref().map(|(step, _)| *step))?;
            run.write("config.yaml", config.to_yaml()?.as_bytes())?;
            if let Some(inputs) = inputs {
                inputs.keep(&run)?;
            }
        }
        Ok((Some(run), newest.map(|(_, dir)| dir)))
    }

    /// A new run folder, which keeps what the run reads.
    pub fn new_folder(&self) -> Result<RunDir> {
        let output = &self.config.output;
        let made = || {
            let run = RunDir::create(output, &self.config.to_yaml()?)?;
            self.inputs()?.keep(&run)?;
            Ok::<_, Error>(run)
        };
        self.world.together(if self.world.writes() { made() } else { Ok(RunDir::of_another(output)) })
    }

    /// The files that the run reads, as they are now.
    fn inputs(&self) -> Result<Inputs> {
        Inputs::of(&self.config, self.mode, self.data.files())
    }

    /// The key that says how long the run is.
    pub fn length_key(&self) -> String {
        match (self.mode, &self.sft) {
            (Mode::Sft, Some((section, sft))) => {
                format!("{section}.{}", if sft.epochs.is_some() { "epochs" } else { "steps" })
            }
            _ => "trainer.steps".to_owned(),
        }
    }
}

/// Whether a folder holds a run, as rank 0 sees it.
fn is_there(world: &World, output: &Path) -> Result<bool> {
    let said = world.of_main(vec![u8::from(RunDir::holds_run(output))])?;
    Ok(said.first() == Some(&1))
}

/// Refuses a run that the other command started.
fn check_mode(config: &RunConfig, mode: Mode, checkpoint: &Path) -> Result<()> {
    let text = std::fs::read_to_string(checkpoint.join("trainer/state.json")).unwrap_or_default();
    let other = match mode {
        Mode::Rl => Mode::Sft,
        Mode::Sft => Mode::Rl,
    };
    if serde_json::from_str::<TrainerState>(&text).is_ok_and(|s| s.mode == other) {
        let detail = "the run in it was started by the other command (train or sft); use that one".into();
        return Err(Error::Resume { path: config.output.clone(), detail });
    }
    Ok(())
}

/// Refuses files that are not as they were when the run began, or warns of them where they are allowed.
fn compare_inputs(run: &RunDir, now: &Inputs, start: Start) -> Result<()> {
    let Some(kept) = Inputs::kept(run)? else {
        return Ok(());
    };
    let changes = kept.changes(now);
    if changes.is_empty() {
        return Ok(());
    }
    let changes = changes.join("; ");
    if start == Start::ResumeChanged {
        tracing::warn!("files have changed since the run began, and it continues with them: {changes}");
        return Ok(());
    }
    let detail = format!(
        "files have changed since the run began: {changes}; restore them, start a new run with another `output`, or \
         continue with the changed files by --allow-changed-inputs"
    );
    Err(Error::Resume { path: run.path().to_owned(), detail })
}
