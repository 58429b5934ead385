//! Which run a folder holds: whether it is the one that is asked for, and where it continues.
//!
//! Rank 0 alone looks, locks and writes. What it finds is every rank's: all continue from the same checkpoint, or end
//! with the same message.

use super::Session;
use crate::checkpoint::{Inputs, RunDir, TrainerState};
use crate::config::{Mode, RunConfig, check_resume_compat};
use crate::metrics::Recorder;
use crate::reward::Programs;
use crate::task::{RewardKind, Task, TaskConfig};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// Which run: a new one, or the one in the output folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// A new run folder.
    Fresh,
    /// The newest complete checkpoint of the output folder; a new run where it holds none.
    Resume,
    /// The same, also where files that the run reads have changed since it began.
    ResumeChanged,
}

/// What a session finds in its run folder, before anything is loaded.
#[derive(Debug, Default)]
pub(in crate::trainer) struct Found {
    /// The folder of a run that continues, or starts over; none of a new one.
    pub run: Option<RunDir>,
    /// The newest checkpoint: its step and its folder.
    pub checkpoint: Option<(u64, PathBuf)>,
    /// Whether the run has done all of its steps, and its summary is there.
    pub ended: bool,
    /// The files that the run reads; on rank 0.
    inputs: Option<Inputs>,
}

impl Session {
    /// Looks at the run folder. A new run needs one without a run. One that is resumed has to be the same run; the
    /// checkpoint is none of a run that was killed before its first one and starts over, and all is of a folder without
    /// a run. Says where there is nothing to train, since all steps are done.
    pub fn look(&self, start: Start) -> Result<Found> {
        let (config, world) = (&self.config, &self.world);
        let mut found = Found::default();
        let (holds_run, ended) = world.on_main(|| {
            found = self.found(start)?;
            Ok((found.run.is_some(), found.ended))
        })?;
        if !holds_run {
            return Ok(found);
        }
        if !world.writes() {
            let run = RunDir::of_another(&config.output);
            found.checkpoint = run.checkpoints()?.pop();
            found.ended = ended;
            found.run = Some(run);
        }
        let newest = found.checkpoint.as_ref().map_or(u64::MAX, |(step, _)| *step);
        let advice = "every rank needs the run folder on a file system that all machines share";
        world.same("the newest checkpoint", advice, &newest.to_le_bytes())?;
        Ok(found)
    }

    /// What rank 0 finds. It makes what is missing, and changes nothing before all have looked.
    fn found(&self, start: Start) -> Result<Found> {
        let output = &self.config.output;
        if start == Start::Fresh {
            RunDir::check_free(output)?;
            return Ok(Found::default());
        }
        if !RunDir::holds_run(output) {
            tracing::warn!("--resume: {} contains no run, so a new one starts", output.display());
            return Ok(Found::default());
        }
        let run = RunDir::open(output)?;
        let inputs = self.inputs()?;
        let Some((step, folder)) = run.checkpoints()?.pop() else {
            tracing::warn!("--resume: {} contains no checkpoint, so the run starts over", output.display());
            return Ok(Found { run: Some(run), inputs: Some(inputs), ..Found::default() });
        };
        self.check_same_run(&run, &inputs)?;
        check_mode(&self.config, self.mode, &folder)?;
        if let Some(kept) = Inputs::kept(&run)? {
            refuse(&run, &kept.changes(&inputs), start)?;
        }
        let (done, steps) = (step >= self.steps, self.steps);
        if done {
            let key = self.length_key();
            tracing::warn!(
                "nothing to train: the run in {} has finished {step} steps, and {key} ends it after {steps}; raise {key} \
                 to continue",
                output.display()
            );
        }
        // it may have been killed between the last checkpoint and the end
        let ended = done && run.path().join("summary.json").exists();
        Ok(Found { run: Some(run), checkpoint: Some((step, folder)), ended, inputs: Some(inputs) })
    }

    /// Refuses a configuration that is not the run's. A file may have moved.
    fn check_same_run(&self, run: &RunDir, now: &Inputs) -> Result<()> {
        let earlier = crate::config::parse(&run.config_yaml()?, &[])?;
        let kept = Inputs::kept(run)?.unwrap_or_default();
        check_resume_compat(&earlier, &self.config, self.mode, &kept.same(now))?;
        let moved = kept.moved(now);
        if !moved.is_empty() {
            tracing::warn!("files have moved since the run began, with the same contents: {}", moved.join("; "));
        }
        Ok(())
    }

    /// Begins where the newest checkpoint is, before anything is loaded: compares the modules that programs import, and
    /// rewinds the logs, where that is not after the last step already.
    pub fn resume(&self, found: &mut Found, start: Start, programs: &Programs) -> Result<()> {
        let Some(run) = &found.run else { return Ok(()) };
        let (inputs, newest) = (&mut found.inputs, found.checkpoint.as_ref().map(|(step, _)| *step));
        let continues = newest.is_none_or(|step| step < self.steps);
        self.world.on_main(|| {
            let Some(mut inputs) = inputs.take() else { return Ok(()) };
            inputs.add_modules(modules(&self.config, self.data.prompts.task(), programs))?;
            if let (Some(kept), true) = (Inputs::kept(run)?, newest.is_some()) {
                inputs.recall_modules(&kept)?;
                refuse(run, &kept.changed_modules(&inputs), start)?;
            }
            if continues {
                inputs.keep(run)?;
            }
            Ok(())
        })?;
        if continues {
            // a run that starts over keeps nothing; one that continues keeps what its checkpoint knows
            Recorder::rewind(run, newest)?;
            run.write("config.yaml", self.config.to_yaml()?.as_bytes())?;
        }
        Ok(())
    }

    /// A new run folder, which keeps what the run reads.
    pub fn new_folder(&self, programs: &Programs) -> Result<RunDir> {
        let output = &self.config.output;
        let mut made = None;
        self.world.on_main(|| {
            let run = RunDir::create(output, &self.config.to_yaml()?)?;
            let mut inputs = self.inputs()?;
            inputs.add_modules(modules(&self.config, self.data.prompts.task(), programs))?;
            inputs.keep(&run)?;
            made = Some(run);
            Ok(())
        })?;
        Ok(made.unwrap_or_else(|| RunDir::of_another(output)))
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

/// The user's modules that the Python programs of a task have imported, each list with the key of its program.
pub(in crate::trainer) fn modules(
    config: &RunConfig,
    task: &dyn Task,
    programs: &Programs,
) -> Vec<(String, Vec<PathBuf>)> {
    let Some(rows) = config.task.as_ref().and_then(TaskConfig::rows) else { return Vec::new() };
    let rewards = rows.rewards.iter().enumerate();
    let functions = rewards.filter(|(_, own)| matches!(own.kind, RewardKind::Python(_)));
    let functions = functions.map(|(at, own)| (format!("task.rewards.{at}"), programs.modules(own.name())));
    let environments = task.environments().filter(|_| rows.environment.is_some());
    let environments = environments.map(|own| ("task.environment".to_owned(), own.modules()));
    functions.chain(environments).collect()
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
fn refuse(run: &RunDir, changes: &[String], start: Start) -> Result<()> {
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
