//! Checkpoints of a run: policy, optimizer state, critic, trainer state.
//!
//! An update can ruin the weights, which only the next one shows by non-finite gradients. So no checkpoint is written
//! while updates are skipped, and the one before the newest stays until an update after the newest was applied.

use super::Trainer;
use super::models::CRITIC;
use super::recovery::{Checkpoints, Recovery};
use super::scorer::Scorer;
use super::session::Session;
use super::session::resume::modules;
use crate::Result;
use crate::checkpoint::{Inputs, RunDir, checksums, trainer_state};
use crate::metrics::{Event, Phase};
use firebrick_models::checkpoint::{ExportOptions, StoredDtype};
use std::path::{Path, PathBuf};
use std::time::Instant;

impl Trainer {
    /// Writes a checkpoint of the finished step and removes the oldest beyond `trainer.max_ckpt_to_keep`. While updates
    /// are skipped it does neither.
    pub(super) fn save(&mut self) -> Result<()> {
        let Self { session, scorer, updater, recovery: run, times, .. } = self;
        let (step, newest) = (run.state.step, run.checkpoints.newest);
        if newest == Some(step) {
            return Ok(());
        }
        if updater.skips_updates() {
            tracing::warn!(
                "step {step}: no checkpoint is written, because updates are skipped and the weights may be ruined; \
                 {}",
                run.resume_advice()
            );
            return Ok(());
        }
        let (phase, began) = (Phase::SaveCheckpoint, Instant::now());
        let written = run.recovering(phase, |run| write_checkpoint(run, scorer));
        let written = written.map_err(|error| run.failed(phase, step, error));
        let good = if run.newest_works() { newest } else { run.checkpoints.good };
        let pruned = written.and_then(|path| {
            if run.state.best.as_ref().is_some_and(|best| best.step == step) {
                run.telemetry.recorder.best(run.state.best.as_ref())?;
            }
            run.prune(good).map(|()| path)
        });
        // rank 0 writes; the others continue once it is there
        let path = session.world.agree(pruned)?;
        let updates = [run.state.optimizer_steps, run.state.critic_steps];
        run.checkpoints = Checkpoints { newest: Some(step), updates, good, spares: good.is_some() };
        times.add_save(began, Instant::now());
        run.telemetry.recorder.event(Event::Saved { path });
        Ok(())
    }
}

/// Writes all files of a checkpoint. The next attempt removes the files of a failed one.
fn write_checkpoint(run: &Recovery, scorer: &Scorer) -> Result<PathBuf> {
    let (policy, Session { source, world, .. }) = (&run.models.policy, run.session.as_ref());
    let decoder = policy.decoder();
    // an f32 folder of an f32 model is its own master copy, and so is an adapter
    let masters = decoder.specs().any(|spec| {
        let stored = |name: &str| source.checkpoint.stored_dtype(name);
        let rounds = || spec.tensors().iter().any(|t| stored(&t.name) != StoredDtype::F32);
        spec.trainable && (decoder.arch().precision.is_half() || rounds())
    });
    let name = RunDir::checkpoint_name(run.state.step);
    let folder = &run.telemetry.recorder.run;
    world.agree(keep_modules(run, scorer))?;
    let dir = world.agree(folder.stage(&name))?;
    let trainer = dir.join("trainer");
    // rank 0 writes models, of which the others give it their parts; then all write their shards into its folders
    world.agree(write_models(run, &dir, &trainer))?;
    trainer_state::save_optimizer(&trainer, &policy.optimizer, decoder, masters, world)?;
    if let Some(critic) = &run.models.critic {
        let (dir, decoder) = (trainer.join(CRITIC), critic.decoder());
        let half = decoder.arch().precision.is_half();
        trainer_state::save_optimizer(&dir, &critic.optimizer, decoder, half, world)?;
    }
    checksums::write(&dir, world)?;
    folder.complete(&name)
}

/// Adds the modules that programs have imported since the start to the inputs of the run.
fn keep_modules(run: &Recovery, scorer: &Scorer) -> Result<()> {
    let (session, folder) = (&run.session, &run.telemetry.recorder.run);
    let kept = if session.world.writes() { Inputs::kept(folder)? } else { None };
    let Some(mut inputs) = kept else { return Ok(()) };
    let programs = scorer.programs(&run.state);
    if inputs.add_modules(modules(&session.config, session.data.prompts.task(), &programs))? {
        inputs.keep(folder)?;
    }
    Ok(())
}

/// Writes models and trainer state, on rank 0, tensor by tensor.
fn write_models(run: &Recovery, dir: &Path, trainer: &Path) -> Result<()> {
    let Session { config, source, critic_source, .. } = run.session.as_ref();
    run.models.policy.model.write_whole(|policy| {
        source.save(policy, config, dir)?;
        trainer_state::save(trainer, &run.state, policy)
    })?;
    let (Some(critic), Some(source)) = (&run.models.critic, critic_source) else {
        return Ok(());
    };
    let options = ExportOptions { max_shard_bytes: config.trainer.max_shard_bytes };
    critic.model.write_whole(|critic| source.save(critic, &trainer.join(CRITIC), options))
}
