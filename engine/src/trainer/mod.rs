//! The trainer: a run from its first step to its last.

mod attempt;
mod begin;
mod builder;
mod dry_run;
mod evaluate;
mod gather;
mod models;
mod non_finite;
mod recovery;
mod replay;
mod rl;
mod sampler;
mod save;
mod schedule;
mod scorer;
mod session;
mod sft;
mod telemetry;
mod turns;
mod updater;
mod watchdog;

#[cfg(test)]
mod tests;

pub use builder::TrainerBuilder;
pub use dry_run::{DryRun, References};
pub use evaluate::{EvaluatedSample, Evaluation, evaluate};
pub use replay::{Difference, Replay, replay};
pub use session::resume::Start;
pub use watchdog::Hang;

use crate::config::Mode;
use crate::metrics::timeline::Reason;
use crate::metrics::{Control, Metrics, StepMemory, StepReport, Summary, is_of_a_machine, metrics, phase_memory};
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::heartbeat::beat;
use firebrick_backends::memory::peak_resident_bytes;
use firebrick_core::message;
use firebrick_models::Decoder;
use firebrick_spec::DeviceProfile;
use recovery::Recovery;
use sampler::Sampler;
use schedule::SessionTimes;
use scorer::Scorer;
use session::Session;
use std::sync::Arc;
use std::time::{Duration, Instant};
use updater::Updater;

/// Time between polls of an observer that pauses the run.
const PAUSE_POLL: Duration = Duration::from_millis(50);

/// A run: its session, the parts that a step goes through, and its state.
pub struct Trainer {
    session: Arc<Session>,
    sampler: Sampler,
    scorer: Scorer,
    updater: Updater,
    /// Models, state, and the phases that run on them.
    recovery: Recovery,
    times: SessionTimes,
    /// True if it continues from a checkpoint.
    resumed: bool,
    /// True once the work before the first step is done.
    started: bool,
    /// True once `trainer.max_minutes` or an observer has ended the session before its last step.
    stopped: bool,
}

impl Trainer {
    /// Runs to the end, or until the observer returns [`Control::Stop`]: the work before the first step, the steps with
    /// their validations and checkpoints, the summary. Between steps the observer may steer the run.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, a reward cannot be computed, the device fails, memory runs out under every plan, or
    /// gradients stay non-finite. The run can then continue from its last checkpoint.
    pub fn run(&mut self) -> Result<Summary> {
        let _place = self.recovery.watchdog.enter(self.finished_steps(), watchdog::REPORT);
        let has_ended = self.resumed && !self.started && self.finished_steps() >= self.session.steps;
        let done = if has_ended {
            self.end_again()
        } else {
            let begun = self.begin();
            self.recovery.telemetry.dump_timeline_on_oom(begun).and_then(|()| self.run_steps())
        };
        self.broadcast_failure(done)
    }

    /// Ends a resumed run that has done all of its steps. Its files stay as they are.
    fn end_again(&mut self) -> Result<Summary> {
        // it may have been killed between the last checkpoint and the end
        let ended = self.recovery.telemetry.recorder.run.path().join("summary.json").exists();
        if self.session.world.broadcast(ended)? {
            return Ok(self.summary());
        }
        let pruned = self.recovery.prune(self.recovery.checkpoints.good);
        self.session.world.agree(pruned)?;
        self.finish()
    }

    fn run_steps(&mut self) -> Result<Summary> {
        self.stopped = false;
        self.recovery.saves.beside_steps = true;
        while !self.is_over() {
            self.step()?;
            self.control()?;
        }
        self.finish()
    }

    /// Sends an error that ends the run to the other ranks.
    fn broadcast_failure<T>(&mut self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            self.session.world.abort(error);
            if let Err(error) = self.finish_save() {
                tracing::warn!("the last checkpoint is missing, too: {error}");
            }
        }
        done
    }

    /// Runs exactly one step and records it, with the validation and the checkpoint that are due after it; the first
    /// call also does the work before the first step. `while !trainer.is_over() { trainer.step()?; }` and
    /// [`finish`](Self::finish) write the files that [`run`](Self::run) writes. The observer receives all events, but
    /// only [`run`](Self::run) asks it for a [`Control`], since here the caller decides.
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run).
    pub fn step(&mut self) -> Result<StepReport> {
        let _place = self.recovery.watchdog.enter(self.finished_steps() + 1, watchdog::REPORT);
        let done = self.next_step();
        let done = self.recovery.telemetry.dump_timeline_on_oom(done);
        self.broadcast_failure(done)
    }

    fn next_step(&mut self) -> Result<StepReport> {
        self.begin()?;
        let began = Instant::now();
        let report = self.step_and_save()?;
        self.times.add_step(began.elapsed());
        self.heed_times()?;
        Ok(report)
    }

    fn step_and_save(&mut self) -> Result<StepReport> {
        let started = Instant::now();
        let waited_before = self.recovery.saves.waited.unwrap_or_default();
        let step = self.finished_steps() + 1;
        self.recovery.step = step;
        self.recovery.telemetry.begin_step(step);
        let mode = self.session.mode;
        let stepped = match mode {
            Mode::Rl => self.rl_step(),
            Mode::Sft => self.sft_step(),
        };
        let seconds = started.elapsed().as_secs_f64();
        self.recovery.telemetry.end_step();
        let mut report = stepped?;
        self.add_save_time();
        let waited = self.recovery.saves.waited.take();
        report.save_seconds = waited.map(|waited| waited.as_secs_f64());
        report.seconds = seconds - waited.unwrap_or_default().saturating_sub(waited_before).as_secs_f64();
        self.count_step(report.seconds);
        self.recovery.release_spared()?;
        report.step = step;
        let telemetry = &mut self.recovery.telemetry;
        report.timings = std::mem::take(&mut telemetry.timings);
        let leak = telemetry.ledger.close_step();
        report.memory = Some(StepMemory::new(telemetry.ledger.take(), leak));
        self.compare(&report)?;
        self.recovery.telemetry.recorder.step(&report, self.session.steps, mode)?;
        let mut best = Ok(None);
        if self.is_due(self.session.config.trainer.test_freq) {
            self.validate()?;
            best = self.new_best();
        }
        let telemetry = &mut self.recovery.telemetry;
        telemetry.recorder.end_line(step)?;
        if telemetry.snapshots.is_due(step) {
            telemetry.write_timeline(Reason::Snapshot, None);
        }
        // a negative one: never
        let save_freq = u64::try_from(self.session.config.trainer.save_freq);
        // an error is a misspelled metric, which only a validation tells: it loses no step
        let is_saved = !matches!(best, Ok(None));
        if let Ok(Some(best)) = &best {
            self.recovery.state.best = Some(best.clone());
        }
        if is_saved || save_freq.is_ok_and(|freq| self.is_due(freq)) {
            self.save_beside()?;
        }
        best.map(|_| report)
    }

    /// Writes the summary of the steps so far. Several ranks call it together.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, or a rank has failed or is gone.
    pub fn finish(&mut self) -> Result<Summary> {
        let _place = self.recovery.watchdog.enter(self.finished_steps(), watchdog::REPORT);
        let telemetry = &mut self.recovery.telemetry;
        if telemetry.snapshots.is_owed() {
            telemetry.write_timeline(Reason::Ended, None);
        }
        let mut summary = self.summary();
        if !self.world().is_solo() {
            summary.rank_peak_bytes = self.world().gather(&summary.measured_peak_bytes)?;
        }
        self.recovery.telemetry.recorder.finished(&summary)?;
        Ok(summary)
    }

    /// Finished steps, earlier sessions included.
    pub fn finished_steps(&self) -> u64 {
        self.recovery.state.step
    }

    /// Returns true if no step is left, or if `trainer.max_minutes` or an observer has ended the session, after a
    /// checkpoint: the rest is for a session with [`Start::Resume`].
    pub fn is_over(&self) -> bool {
        self.stopped || self.finished_steps() >= self.session.steps
    }

    /// Steps of the whole run.
    pub fn steps(&self) -> u64 {
        self.session.steps
    }

    /// Obeys the observer between two steps.
    fn control(&mut self) -> Result<()> {
        let mut saved = false;
        while !self.stopped {
            match self.poll_observer()? {
                Control::Continue => break,
                Control::Pause => {
                    self.finish_save()?;
                    std::thread::sleep(PAUSE_POLL);
                    beat();
                    saved = false;
                    self.heed_times()?;
                }
                // an observer that always returns this wants a checkpoint after every step
                Control::Save if saved => break,
                Control::Save => {
                    self.save()?;
                    saved = true;
                }
                Control::Stop => {
                    self.save()?;
                    self.stopped = true;
                }
            }
        }
        Ok(())
    }

    /// Updates the state with a step that has ended.
    fn count_step(&mut self, seconds: f64) {
        let Recovery { state, telemetry, models, .. } = &mut self.recovery;
        state.step += 1;
        state.seconds += seconds;
        state.peak_bytes = telemetry.ledger.peak_bytes();
        let optimizer = &models.policy.optimizer;
        (state.optimizer_steps, state.loss_scale) = (optimizer.steps(), optimizer.scaler());
        if let Some(critic) = &models.critic {
            let optimizer = &critic.optimizer;
            (state.critic_steps, state.critic_loss_scale) = (optimizer.steps(), optimizer.scaler());
        }
    }

    /// Returns true if work of every `freq` steps (0: only after the last) is due after the finished step.
    fn is_due(&self, freq: u64) -> bool {
        let step = self.finished_steps();
        step == self.session.steps || (freq > 0 && step.is_multiple_of(freq))
    }

    /// Ranks of the run.
    pub fn world(&self) -> &World {
        &self.session.world
    }

    /// The policy on this rank. With sharded weights (`memory.zero_stage: 3`), matrices
    /// (`memory.tensor_model_parallel_size`) or layers (`memory.pipeline_model_parallel_size`) it may be a shard:
    /// [`whole_policy`](Self::whole_policy) is all of it.
    pub fn policy(&self) -> &Decoder {
        self.recovery.models.policy.decoder()
    }

    /// The whole policy, on every rank. All ranks of the run call it together. With tensor parallelism it is assembled
    /// in host memory; else it shares its weights with [`policy`](Self::policy), which the next step shards again.
    ///
    /// # Errors
    /// If memory runs out, the device fails, or a rank has failed or is gone.
    pub fn whole_policy(&mut self) -> Result<Decoder> {
        let model = &mut self.recovery.models.policy.model;
        model.make_whole()?;
        Ok(model.assembled(true)?.unwrap_or_else(|| model.decoder.clone()))
    }

    /// Speed and size of the device, as the planner sees it.
    pub fn profile(&self) -> &DeviceProfile {
        &self.recovery.planned.request.profile
    }

    fn summary(&mut self) -> Summary {
        let Recovery { session, planned, telemetry, state, .. } = &mut self.recovery;
        let (predicted, ledger) = (planned.estimate(), &mut telemetry.ledger);
        Summary {
            steps: state.step,
            max_steps: session.steps,
            seconds: state.seconds,
            tokens_per_second: state.tokens as f64 / state.seconds.max(1e-9),
            first: state.first_validation.clone(),
            last: state.last_validation.clone(),
            predicted_peak_bytes: Some(predicted.peak_bytes),
            measured_peak_bytes: ledger.peak_bytes(),
            rank_peak_bytes: Vec::new(),
            memory: phase_memory(&predicted, &ledger.phases),
            replans: planned.replans,
            peak_resident_bytes: peak_resident_bytes(),
            device: session.info.device.to_string(),
            precision: session.config.precision.name(),
            skipped_steps: state.skipped_steps,
        }
    }

    /// Request of the observers: of rank 0's, or a stop of any, since a queue may signal one rank alone.
    fn poll_observer(&mut self) -> Result<Control> {
        const ALL: [Control; 4] = [Control::Continue, Control::Pause, Control::Save, Control::Stop];
        let control = self.recovery.telemetry.recorder.control();
        if self.session.world.is_solo() {
            return Ok(control);
        }
        let requests = self.session.world.gather::<u8>(&(control as u8))?;
        let Some(rank) = requests.iter().position(|&request| request == Control::Stop as u8) else {
            return Ok(ALL[usize::from(requests[0]).min(ALL.len() - 1)]);
        };
        if control != Control::Stop {
            tracing::warn!("rank {rank} was asked to stop, so all ranks end after step {}", self.finished_steps());
        }
        Ok(Control::Stop)
    }

    /// Returns an error if ranks differ in the rollouts of a step or in a metric other than times and memory: they
    /// would train different models. Micro-batches follow from sequences and plan.
    fn compare(&self, report: &StepReport) -> Result<()> {
        if self.session.world.is_solo() {
            return Ok(());
        }
        let mut metrics: Metrics = metrics(report);
        metrics.retain(|name, _| !is_of_a_machine(name));
        let trained = report.rollout.iter().flat_map(|sampled| &sampled.rollouts);
        let trained = trained.map(|r| (r.prompt_index, r.sample, &r.prompt, &r.completion, r.reward));
        let bytes = message::encode(&(&metrics, trained.collect::<Vec<_>>()))?;
        let advice =
            "the ranks have drifted apart; resume from the last checkpoint, and report it with the configuration";
        let same = self.session.world.same("a sequence or a metric of the step", advice, &bytes);
        let Err(Error::Ranks(message)) = same else {
            return same;
        };
        // every rank is here
        let ranks = self.session.world.gather::<Metrics>(&metrics)?;
        let other = ranks.iter().enumerate().find_map(|(rank, metrics)| {
            let pairs = ranks[0].iter().zip(metrics);
            let mut different = pairs.filter(|(a, b)| a.0 != b.0 || a.1.to_bits() != b.1.to_bits());
            different.next().map(|(a, b)| format!("{} is {} on rank 0 and {} is {} on rank {rank}", a.0, a.1, b.0, b.1))
        });
        Err(Error::Phase {
            phase: "comparison of ranks",
            step: report.step,
            detail: format!("{message} ({})", other.unwrap_or_else(|| "their sequences differ".into())),
        })
    }
}
