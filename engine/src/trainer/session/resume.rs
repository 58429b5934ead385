//! Start and resumption of a run: the run that its folder holds, and the checkpoint to continue from.
//!
//! Only rank 0 looks, locks and writes. All ranks continue from the same checkpoint, or end with the same message.

use super::Session;
use crate::checkpoint::checksums::{self, Verdict};
use crate::checkpoint::{Inputs, RunDir, TrainerState};
use crate::config::{Mode, RunConfig, check_resume_compat};
use crate::metrics::Recorder;
use crate::reward::Programs;
use crate::task::{RewardKind, Task, TaskConfig};
use crate::trainer::models::REFERENCE;
use crate::{Error, Result};
use firebrick_spec::file::{MAX_TEXT_BYTES, read_text};
use std::path::{Path, PathBuf};

/// Run to start: a new one, or the one in the output folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// A new run folder.
    Fresh,
    /// The newest whole checkpoint of the output folder; a new run if it holds none.
    Resume,
    /// As [`Resume`](Self::Resume), even if files that the run reads have changed since it began.
    ResumeChanged,
}

/// Contents of the run folder, before anything is loaded.
#[derive(Debug, Default)]
pub(in crate::trainer) struct RunFiles {
    /// Folder of a run that continues or starts over; `None` of a new one.
    pub folder: Option<RunDir>,
    /// The newest whole checkpoint: its step and its folder.
    pub checkpoint: Option<(u64, PathBuf)>,
    /// Folder of the run whose steps are replayed, which stays as it is.
    pub origin: Option<RunDir>,
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
        let run = files.folder.get_or_insert_with(|| RunDir::read_only(&self.config.output));
        let mut checkpoints = run.checkpoints()?;
        let steps: Vec<u8> = checkpoints.iter().flat_map(|(step, _)| step.to_le_bytes()).collect();
        let advice = "every rank needs the run folder on a file system that all machines share";
        world.same("the list of checkpoints", advice, &steps)?;
        if ended {
            files.checkpoint = checkpoints.pop();
        } else {
            files.checkpoint = self.newest_whole(checkpoints)?;
            if files.checkpoint.is_some() && self.has_reference() {
                self.verify_reference(&run.path().join(REFERENCE))?;
            }
        }
        files.ended = ended;
        if let Some((step, _)) = files.checkpoint {
            self.warn_if_done(step);
        }
        Ok(files)
    }

    /// The newest checkpoint before a step of another run, from which a new run in another folder replays the step;
    /// without one, it starts from the beginning.
    pub fn look_at_replayed(&self, run: &Path, step: u64) -> Result<RunFiles> {
        let origin = RunDir::read_only(run);
        let refused = |detail: String| Error::Report { path: run.to_owned(), detail };
        self.world.run_on_main(|| {
            let changes =
                Inputs::kept(&origin)?.map_or_else(|| Ok(Vec::new()), |kept| Ok(kept.changes(&self.inputs()?)));
            match changes {
                Ok(changes) if changes.is_empty() => Ok(()),
                Ok(changes) => Err(refused(format!(
                    "files have changed since the run began, so it cannot be replayed: {}; restore them",
                    changes.join("; ")
                ))),
                Err(error) => Err(error),
            }
        })?;
        let checkpoint = origin.checkpoints()?.into_iter().rfind(|(saved, _)| *saved < step);
        let reference = origin.path().join(REFERENCE);
        let folders =
            checkpoint.iter().flat_map(|(_, folder)| [Some(folder), self.has_reference().then_some(&reference)]);
        for folder in folders.flatten() {
            if let Verdict::Damaged(damage) = checksums::verify(folder, &self.world)? {
                return Err(refused(format!("{} is damaged: {damage}", folder.display())));
            }
        }
        Ok(RunFiles { checkpoint, origin: Some(origin), ..RunFiles::default() })
    }

    /// The newest of the checkpoints that is whole; `None` if there are none. The others are reported.
    fn newest_whole(&self, checkpoints: Vec<(u64, PathBuf)>) -> Result<Option<(u64, PathBuf)>> {
        let mut damages: Vec<String> = Vec::new();
        for (step, folder) in checkpoints.into_iter().rev() {
            match checksums::verify(&folder, &self.world)? {
                Verdict::Damaged(damage) => damages.push(format!("{}: {damage}", folder.display())),
                verdict => {
                    if self.world.writes() {
                        warn_of(&folder, &verdict, step, &damages);
                    }
                    return Ok(Some((step, folder)));
                }
            }
        }
        if damages.is_empty() {
            return Ok(None);
        }
        let detail = format!(
            "all of its checkpoints are damaged: {}; restore the named files from a copy, or start again with another \
             `output`",
            damages.join("; ")
        );
        Err(Error::Resume { path: self.config.output.clone(), detail })
    }

    /// Rejects a damaged folder of the reference policy.
    fn verify_reference(&self, folder: &Path) -> Result<()> {
        let Verdict::Damaged(damage) = checksums::verify(folder, &self.world)? else { return Ok(()) };
        let detail = format!(
            "the reference policy is damaged: {damage}; restore the file, or start again with another `output`"
        );
        Err(Error::Resume { path: folder.to_owned(), detail })
    }

    /// Warns of a run that has done all of its steps.
    fn warn_if_done(&self, step: u64) {
        let (steps, key, output) = (self.steps, self.length_key(), self.config.output.display());
        if step >= steps && self.world.writes() {
            tracing::warn!(
                "nothing to train: the run in {output} has finished {step} steps, and {key} ends it after {steps}; raise \
                 {key} to continue"
            );
        }
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
        let Some((newest, folder)) = run.checkpoints()?.pop() else {
            tracing::warn!("--resume: {} contains no checkpoint, so the run starts over", output.display());
            return Ok(RunFiles { folder: Some(run), inputs: Some(inputs), ..RunFiles::default() });
        };
        self.check_same_run(&run, &inputs)?;
        check_mode(&self.config, self.mode, &folder)?;
        if let Some(kept) = Inputs::kept(&run)? {
            refuse(&run, &kept.changes(&inputs), start)?;
        }
        // it may have been killed between the last checkpoint and the end
        let ended = newest >= self.steps && run.path().join("summary.json").exists();
        Ok(RunFiles { folder: Some(run), ended, inputs: Some(inputs), ..RunFiles::default() })
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
            if let Some(step) = newest {
                run.set_aside_after(step)?;
            }
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

/// Warns of damaged checkpoints newer than the one to continue from, and of one without checksums.
fn warn_of(folder: &Path, verdict: &Verdict, step: u64, damages: &[String]) {
    if !damages.is_empty() {
        tracing::warn!(
            "damaged checkpoint, the run continues from the one of step {step} before it: {}; its folder gets the ending \
             .damaged",
            damages.join("; ")
        );
    }
    if *verdict == Verdict::Unverified {
        tracing::warn!(
            "{} has no checksums.json, because an earlier version wrote it, so its files are not verified",
            folder.display()
        );
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
    let text = read_text(&checkpoint.join("trainer/state.json"), MAX_TEXT_BYTES).unwrap_or_default();
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
