//! Start and resumption of a run: the run that its folder holds, and the checkpoint to continue from.
//!
//! Only rank 0 looks, locks and writes. All ranks continue from the same checkpoint, or end with the same message.

use super::Session;
use crate::checkpoint::{Inputs, RunDir, TrainerState};
use crate::config::{Mode, RunConfig, check_resume_compat};
use crate::metrics::Recorder;
use crate::reward::Programs;
use crate::task::{RewardKind, Task, TaskConfig};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// Run to start: a new one, or the one in the output folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// A new run folder.
    Fresh,
    /// The newest complete checkpoint of the output folder; a new run if it holds none.
    Resume,
    /// As [`Resume`](Self::Resume), even if files that the run reads have changed since it began.
    ResumeChanged,
}

/// Contents of the run folder, before anything is loaded.
#[derive(Debug, Default)]
pub(in crate::trainer) struct RunFiles {
    /// Folder of a run that continues or starts over; `None` of a new one.
    pub folder: Option<RunDir>,
    /// The newest checkpoint: its step and its folder.
    pub checkpoint: Option<(u64, PathBuf)>,
    /// True if the run has done all of its steps, and its summary exists.
    pub ended: bool,
    /// Files that the run reads; on rank 0.
    inputs: Option<Inputs>,
}

impl Session {
    /// Looks at the run folder. A new run needs a folder without a run, and a resumed one must be the same run. Without
    /// a checkpoint, the run was killed before its first one and starts over.
    pub fn look(&self, start: Start) -> Result<RunFiles> {
        let world = &self.world;
        let mut files = RunFiles::default();
        let (holds_run, ended) = world.run_on_main(|| {
            files = self.run_files(start)?;
            Ok((files.folder.is_some(), files.ended))
        })?;
        if !holds_run {
            return Ok(files);
        }
        if !world.writes() {
            let folder = RunDir::read_only(&self.config.output);
            files = RunFiles { checkpoint: folder.checkpoints()?.pop(), folder: Some(folder), ended, inputs: None };
        }
        let newest = files.checkpoint.as_ref().map_or(u64::MAX, |(step, _)| *step);
        let advice = "every rank needs the run folder on a file system that all machines share";
        world.same("the newest checkpoint", advice, &newest.to_le_bytes())?;
        Ok(files)
    }

    /// Contents of the run folder, on rank 0. It creates missing folders, and changes nothing before all ranks have
    /// looked.
    fn run_files(&self, start: Start) -> Result<RunFiles> {
        let output = &self.config.output;
        if start == Start::Fresh {
            RunDir::check_free(output)?;
            return Ok(RunFiles::default());
        }
        if !RunDir::holds_run(output) {
            tracing::warn!("--resume: {} contains no run, so a new one starts", output.display());
            return Ok(RunFiles::default());
        }
        let run = RunDir::open(output)?;
        let inputs = self.inputs()?;
        let Some((step, folder)) = run.checkpoints()?.pop() else {
            tracing::warn!("--resume: {} contains no checkpoint, so the run starts over", output.display());
            return Ok(RunFiles { folder: Some(run), inputs: Some(inputs), ..RunFiles::default() });
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
        Ok(RunFiles { folder: Some(run), checkpoint: Some((step, folder)), ended, inputs: Some(inputs) })
    }

    /// Rejects a configuration that differs from the run's. Files may have moved.
    fn check_same_run(&self, run: &RunDir, now: &Inputs) -> Result<()> {
        let earlier = crate::config::parse(&run.config_yaml()?, &[]).map_err(|error| Error::Resume {
            path: run.path().to_owned(),
            detail: format!(
                "its config.yaml is of another version ({error}). Continue the run with that version, or start another \
                 one from the last checkpoint: set model.path to its folder `model`, and another output"
            ),
        })?;
        let kept = Inputs::kept(run)?.unwrap_or_default();
        check_resume_compat(&earlier, &self.config, self.mode, &kept.same(now))?;
        let moved = kept.moved(now);
        if !moved.is_empty() {
            tracing::warn!("files have moved since the run began, with the same contents: {}", moved.join("; "));
        }
        Ok(())
    }

    /// Prepares the folder for a run that continues from the newest checkpoint, before anything is loaded: compares the
    /// modules that programs import, and rewinds the logs unless all steps are done.
    pub fn resume(&self, files: &mut RunFiles, start: Start, programs: &Programs) -> Result<()> {
        let Some(run) = &files.folder else { return Ok(()) };
        let (inputs, newest) = (&mut files.inputs, files.checkpoint.as_ref().map(|(step, _)| *step));
        let continues = newest.is_none_or(|step| step < self.steps);
        self.world.run_on_main(|| {
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
            // a run that starts over keeps no lines; one that continues keeps those up to its checkpoint
            Recorder::rewind(run, newest)?;
            run.write("config.yaml", self.config.to_yaml()?.as_bytes())?;
        }
        Ok(())
    }

    /// Creates the run folder with the inputs of the run.
    pub fn new_folder(&self, programs: &Programs) -> Result<RunDir> {
        let output = &self.config.output;
        let mut folder = None;
        self.world.run_on_main(|| {
            let run = RunDir::create(output, &self.config.to_yaml()?)?;
            let mut inputs = self.inputs()?;
            inputs.add_modules(modules(&self.config, self.data.prompts.task(), programs))?;
            inputs.keep(&run)?;
            folder = Some(run);
            Ok(())
        })?;
        Ok(folder.unwrap_or_else(|| RunDir::read_only(output)))
    }

    /// The files that the run reads, as they are now.
    fn inputs(&self) -> Result<Inputs> {
        Inputs::read(&self.config, self.mode, self.data.files())
    }

    /// Key of the run's length.
    fn length_key(&self) -> String {
        match (self.mode, &self.sft) {
            (Mode::Sft, Some((section, sft))) => {
                format!("{section}.{}", if sft.epochs.is_some() { "epochs" } else { "steps" })
            }
            _ => "trainer.steps".to_owned(),
        }
    }
}

/// Modules of the user that the Python programs of a task have imported, by the key of the program.
pub(in crate::trainer) fn modules(
    config: &RunConfig,
    task: &dyn Task,
    programs: &Programs,
) -> Vec<(String, Vec<PathBuf>)> {
    let Some(rows) = config.task.as_ref().and_then(TaskConfig::rows) else { return Vec::new() };
    let rewards = rows.rewards.iter().enumerate();
    let functions = rewards.filter(|(_, reward)| matches!(reward.kind, RewardKind::Python(_)));
    let functions = functions.map(|(at, reward)| (format!("task.rewards.{at}"), programs.modules(reward.name())));
    let environments = task.environments().filter(|_| rows.environment.is_some());
    let environments = environments.map(|environments| ("task.environment".to_owned(), environments.modules()));
    functions.chain(environments).collect()
}

/// Rejects a run that the other command started.
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

/// Rejects files that have changed since the run began, or warns of them if they are allowed.
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
