//! The trainer: a run from its first step to its last.

mod attempt;
mod begin;
mod builder;
mod dry_run;
mod evaluate;
mod gather;
mod models;
mod ranks;
mod recovery;
mod rl;
mod sampler;
mod save;
mod scorer;
mod session;
mod sft;
mod telemetry;
mod turns;
mod updater;
mod validate;

#[cfg(test)]
mod tests;

pub use builder::TrainerBuilder;
pub use dry_run::{DryRun, References};
pub use evaluate::{EvaluatedSample, Evaluation, evaluate};
pub use session::resume::Start;

use crate::Result;
use crate::checkpoint::TrainerState;
use crate::config::Mode;
use crate::metrics::timeline::Reason;
use crate::metrics::{Control, StepMemory, StepReport, Summary, phase_memory};
use crate::world::World;
use firebrick_backends::memory::peak_resident_bytes;
use firebrick_models::Decoder;
use firebrick_spec::DeviceProfile;
use recovery::Recovery;
use sampler::Sampler;
use scorer::Scorer;
use session::Session;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};
use updater::Updater;

/// Time between two questions to an observer that pauses the run.
const PAUSE_POLL: Duration = Duration::from_millis(50);

/// A run: what it is made of, the parts that a step goes through, and where it stands.
pub struct Trainer {
    session: Arc<Session>,
    sampler: Sampler,
    scorer: Scorer,
    updater: Updater,
    /// The models, and the phases that run on them.
    recovery: Recovery,
    state: TrainerState,
    /// Whether it continues from a checkpoint.
    resumed: bool,
    /// Whether what comes before the first step is done.
    started: bool,
}

impl Trainer {
    /// Runs to the end, or until the observer says [`Control::Stop`]: what comes before the first step, the steps with
    /// their validations and checkpoints, the summary. Between two steps the observer may steer the run.
    ///
    /// # Errors
    ///
    /// Where a file cannot be written, a reward cannot be computed, the device fails, memory runs out under every plan,
    /// or gradients stay non-finite. The run can then continue from its last checkpoint.
    pub fn run(&mut self) -> Result<Summary> {
        let done = if self.has_nothing_to_do() {
            self.end_again()
        } else {
            let begun = self.begin();
            self.recovery.telemetry.dump_timeline_on_oom(begun).and_then(|()| self.run_steps())
        };
        self.broadcast_failure(done)
    }

    /// Whether it continues from a checkpoint that is not before its last step.
    fn has_nothing_to_do(&self) -> bool {
        self.resumed && !self.started && self.state.step >= self.session.steps
    }

    /// The end of a resumed run that had ended before. What it left stays as it is.
    fn end_again(&mut self) -> Result<Summary> {
        // it may have been killed between the last checkpoint and the end
        let ended = self.recovery.telemetry.recorder.run().path().join("summary.json").exists();
        if self.session.world.of_main(ended)? { Ok(self.summary()) } else { self.finish() }
    }

    fn run_steps(&mut self) -> Result<Summary> {
        while self.state.step < self.session.steps {
            self.step()?;
            if self.control()?.is_break() {
                break;
            }
        }
        self.finish()
    }

    /// Sends an error that ends the run to the other ranks.
    fn broadcast_failure<T>(&self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            self.session.world.give_up(error);
        }
        done
    }

    /// Runs exactly one step and records it, with the validation and the checkpoint that are due after it; before the
    /// first one, what comes before it. `while trainer.finished_steps() < trainer.steps() { trainer.step()?; }` and
    /// [`finish`](Self::finish) leave what [`run`](Self::run) leaves. The observer is told of all that happens;
    /// [`run`](Self::run) alone asks it between steps what to do ([`Control`]), since here the caller decides.
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run).
    pub fn step(&mut self) -> Result<StepReport> {
        let done = self.next_step();
        let done = self.recovery.telemetry.dump_timeline_on_oom(done);
        self.broadcast_failure(done)
    }

    fn next_step(&mut self) -> Result<StepReport> {
        self.begin()?;
        let started = Instant::now();
        let step = self.state.step + 1;
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
        report.seconds = seconds;
        self.count_step(report.seconds);
        self.recovery.release_spared(&self.state)?;
        report.step = step;
        let telemetry = &mut self.recovery.telemetry;
        report.timings = std::mem::take(&mut telemetry.timings);
        let leak = telemetry.ledger.close_step();
        report.memory = Some(StepMemory::new(telemetry.ledger.take(), leak));
        self.compare(&report)?;
        self.recovery.telemetry.recorder.step(&report, self.session.steps, mode)?;
        if self.is_due(self.session.config.trainer.test_freq) {
            self.validate()?;
        }
        let telemetry = &mut self.recovery.telemetry;
        telemetry.recorder.end_line(step)?;
        if telemetry.snapshots.is_due(step) {
            telemetry.write_timeline(Reason::Snapshot, None);
        }
        // a negative one: never
        let save_freq = u64::try_from(self.session.config.trainer.save_freq);
        if save_freq.is_ok_and(|freq| self.is_due(freq)) {
            self.save()?;
        }
        Ok(report)
    }

    /// Writes the summary of the steps so far. Several ranks call it together.
    ///
    /// # Errors
    ///
    /// Where the file cannot be written, or a rank has failed or is gone.
    pub fn finish(&mut self) -> Result<Summary> {
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

    /// Steps that have been run, in earlier sessions too.
    #[must_use]
    pub fn finished_steps(&self) -> u64 {
        self.state.step
    }

    /// Steps of the whole run.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.session.steps
    }

    /// Does what the observer asks for between two steps.
    fn control(&mut self) -> Result<ControlFlow<()>> {
        let mut saved = false;
        loop {
            match self.poll_observer()? {
                Control::Continue => return Ok(ControlFlow::Continue(())),
                Control::Pause => {
                    std::thread::sleep(PAUSE_POLL);
                    saved = false;
                }
                // one that answers this whenever it is asked wants a checkpoint after every step
                Control::Save if saved => return Ok(ControlFlow::Continue(())),
                Control::Save => {
                    self.save()?;
                    saved = true;
                }
                Control::Stop => {
                    self.save()?;
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
    }

    /// Brings what checkpoints keep of the run up to date with a step that has ended.
    fn count_step(&mut self, seconds: f64) {
        let Self { state, recovery, .. } = self;
        state.step += 1;
        state.seconds += seconds;
        state.peak_bytes = recovery.telemetry.ledger.peak_bytes();
        let optimizer = &recovery.models.policy.optimizer;
        (state.optimizer_steps, state.loss_scale) = (optimizer.steps(), optimizer.scaler());
        if let Some(critic) = &recovery.models.critic {
            let optimizer = &critic.optimizer;
            (state.critic_steps, state.critic_loss_scale) = (optimizer.steps(), optimizer.scaler());
        }
    }

    /// Whether what is done every `freq` steps (0: at the end only) is due after the step that has ended.
    fn is_due(&self, freq: u64) -> bool {
        let step = self.state.step;
        step == self.session.steps || (freq > 0 && step.is_multiple_of(freq))
    }

    /// The ranks of the run.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.session.world
    }

    /// The policy as it stands on this rank. Where ranks share out weights (`memory.zero_stage: 3`), matrices
    /// (`memory.tensor_model_parallel_size`) or layers (`memory.pipeline_model_parallel_size`) this may be a part of
    /// it: [`whole_policy`](Self::whole_policy) is all of it.
    #[must_use]
    pub fn policy(&self) -> &Decoder {
        self.recovery.models.policy.decoder()
    }

    /// The whole policy as it stands, on every rank. All ranks of the run call it together. Where they share matrices
    /// it is put together in host memory; else it shares its weights with [`policy`](Self::policy), which the next step
    /// divides again.
    ///
    /// # Errors
    /// Where memory runs out, the device fails, or a rank has failed or is gone.
    pub fn whole_policy(&mut self) -> Result<Decoder> {
        let model = &mut self.recovery.models.policy.model;
        model.make_whole()?;
        Ok(model.assembled(true)?.unwrap_or_else(|| model.decoder.clone()))
    }

    /// How fast and how large the device is, as the planner sees it.
    #[must_use]
    pub fn profile(&self) -> &DeviceProfile {
        &self.recovery.planned.request.profile
    }

    fn summary(&mut self) -> Summary {
        let Self { session, recovery, state, .. } = self;
        let predicted = recovery.planned.estimate();
        let ledger = &mut recovery.telemetry.ledger;
        Summary {
            steps: state.step,
            seconds: state.seconds,
            tokens_per_second: state.tokens as f64 / state.seconds.max(1e-9),
            first: state.first_validation.clone(),
            last: state.last_validation.clone(),
            predicted_peak_bytes: Some(predicted.peak_bytes),
            measured_peak_bytes: ledger.peak_bytes(),
            rank_peak_bytes: Vec::new(),
            memory: phase_memory(&predicted, ledger.phases()),
            replans: recovery.planned.replans,
            peak_resident_bytes: peak_resident_bytes(),
            device: session.info.device.to_string(),
            precision: session.config.precision.name(),
            skipped_steps: state.skipped_steps,
        }
    }
}
