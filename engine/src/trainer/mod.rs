//! The trainer: a run from its first step to its last.

mod begin;
mod builder;
mod checks;
mod ddp_backend;
mod dry_run;
mod evaluate;
mod evaluated_sample;
mod gather;
mod greedy;
mod links;
mod load;
mod phases;
mod ranks;
mod recover;
mod resume;
mod rl;
mod rollout;
mod sampler;
mod save;
mod saved;
mod score;
mod sequences;
mod setup;
mod sft;
mod sharding;
mod timeline;
mod turns;
mod update;
mod validate;
mod wire;

#[cfg(test)]
mod tests;

pub use builder::TrainerBuilder;
pub use dry_run::{DryRun, References};
pub use evaluate::{Evaluation, evaluate};
pub use evaluated_sample::EvaluatedSample;

use crate::Result;
use crate::checkpoint::CriticSource;
use crate::checkpoint::PolicySource;
use crate::checkpoint::TrainerState;
use crate::config::Mode;
use crate::config::RunConfig;
use crate::data::PromptDataset;
use crate::data::SftDataset;
use crate::executor::ResidentModel;
use crate::learner::Learner;
use crate::lr_scheduler::LrSchedule;
use crate::metrics::Ledger;
use crate::metrics::profile::Profiler;
use crate::metrics::timeline::Reason;
use crate::metrics::{
    Control, Phase, PhaseTimings, Recorder, Snapshots, StepMemory, StepReport, Summary, phase_memory,
};
use crate::objective::Objective;
use crate::plan::Plan;
use crate::plan::planner::Request;
use crate::reward::RewardManager;
use crate::turns::TurnTemplate;
use crate::world::World;
use crate::world::codec::{Reader, Writer};
use burn::tensor::Device;
use firebrick_backends::DeviceInfo;
use firebrick_backends::accounts::MemoryGuard;
use firebrick_backends::memory::peak_resident_bytes;
use firebrick_models::Decoder;
use firebrick_spec::DeviceProfile;
use saved::Saved;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Folder of the critic in the trainer's part of a checkpoint.
const CRITIC: &str = "critic";

/// Folder of the reference policy in the run folder.
const REFERENCE: &str = "reference";

/// Time between two questions to an observer that pauses the run.
const PAUSE_POLL: Duration = Duration::from_millis(50);

/// Non-finite optimizer steps in a row that end a run.
const MAX_SKIPPED: u64 = 10;

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

/// A run: policy, data, optimizer, plan, and where it stands.
pub struct Trainer {
    config: RunConfig,
    /// Ranks of this run; one by default.
    world: World,
    info: DeviceInfo,
    device: Device,
    source: PolicySource,
    data: PromptDataset,
    /// The chat template, where rollouts have several turns.
    turns: Option<TurnTemplate>,
    /// Examples of supervised training, where there is or was to come any.
    demonstrations: Option<Arc<SftDataset>>,
    learner: Learner,
    reference: Option<ResidentModel>,
    /// The value model, where it is a model of its own, and where its weights come from.
    critic: Option<Learner>,
    critic_source: Option<CriticSource>,
    /// The task's reward models.
    reward_manager: RewardManager,
    /// The rows of the data, as the accounts count them.
    _rows: MemoryGuard,
    /// What the planner was asked, and the plan in force.
    request: Request,
    plan: Plan,
    /// Plans taken because one before ran out of memory.
    replans: u64,
    objective: Arc<dyn Objective>,
    state: TrainerState,
    ledger: Ledger,
    /// Its memory timelines.
    snapshots: Snapshots,
    /// Its trace of some steps.
    profiler: Profiler,
    /// Files and observer of the run.
    recorder: Recorder,
    /// Steps of the whole run, and the learning rates of each.
    steps: u64,
    lr_schedule: LrSchedule,
    critic_lr_schedule: Option<LrSchedule>,
    /// Whether it continues from a checkpoint.
    resumed: bool,
    /// Whether what comes before the first step is done.
    started: bool,
    /// The newest checkpoints.
    saved: Saved,
    /// Seconds of the phases since they were last reported.
    timings: PhaseTimings,
    /// Optimizer steps skipped in a row, by phase: for gradients that were not finite, or that only overflowed.
    skipped_in_a_row: BTreeMap<Phase, u64>,
    overflows_in_a_row: BTreeMap<Phase, u64>,
    /// Whether this session has said that most completions are cut.
    warned_of_cut_completions: bool,
    /// The step that phases belong to: 0 before the first.
    phase_step: u64,
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
            self.dump_timeline_on_oom(Self::begin).and_then(|()| self.run_steps())
        };
        self.broadcast_failure(done)
    }

    /// Whether it continues from a checkpoint that is not before its last step.
    fn has_nothing_to_do(&self) -> bool {
        self.resumed && !self.started && self.state.step >= self.steps
    }

    /// The end of a resumed run that had ended before. What it left stays as it is.
    fn end_again(&mut self) -> Result<Summary> {
        // it may have been killed between the last checkpoint and the end
        let ended = self.recorder.run().path().join("summary.json").exists();
        let ended = self.world.of_main(vec![u8::from(ended)])?;
        if ended.first() == Some(&0) { self.finish() } else { Ok(self.summary()) }
    }

    fn run_steps(&mut self) -> Result<Summary> {
        while self.state.step < self.steps {
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
            self.world.give_up(error);
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
        let done = self.dump_timeline_on_oom(Self::next_step);
        self.broadcast_failure(done)
    }

    fn next_step(&mut self) -> Result<StepReport> {
        self.begin()?;
        let started = Instant::now();
        self.phase_step = self.state.step + 1;
        let profiled = self.profiler.begin_step(self.phase_step);
        self.snapshots.begin_step(self.phase_step, profiled);
        let stepped = match self.state.mode {
            Mode::Rl => self.rl_step(),
            Mode::Sft => self.sft_step(),
        };
        let seconds = started.elapsed().as_secs_f64();
        self.profiler.end_step(self.recorder.run());
        let mut report = stepped?;
        report.seconds = seconds;
        self.count_step(report.seconds);
        self.release_spared()?;
        report.step = self.state.step;
        report.timings = std::mem::take(&mut self.timings);
        let leak = self.ledger.close_step();
        report.memory = Some(StepMemory::new(self.ledger.take(), leak));
        self.compare(&report)?;
        self.recorder.step(&report, self.steps, self.state.mode)?;
        if self.is_due(self.config.trainer.test_freq) {
            self.validate()?;
        }
        self.recorder.end_line(report.step)?;
        if self.snapshots.is_due(report.step) {
            self.write_timeline(Reason::Snapshot, None);
        }
        // a negative one: never
        let save_freq = u64::try_from(self.config.trainer.save_freq);
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
        if self.snapshots.is_owed() {
            self.write_timeline(Reason::Ended, None);
        }
        let mut summary = self.summary();
        if !self.world.is_solo() {
            let own = [summary.measured_peak_bytes].into_iter();
            let all = self.world.gather(|w| w.list(own, Writer::number), |r| r.list(Reader::number))?;
            summary.rank_peak_bytes = all.concat();
        }
        self.recorder.finished(&summary)?;
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
        self.steps
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
        let state = &mut self.state;
        state.step += 1;
        state.seconds += seconds;
        state.peak_bytes = self.ledger.peak_bytes();
        let optimizer = &self.learner.optimizer;
        (state.optimizer_steps, state.loss_scale) = (optimizer.steps(), optimizer.scaler());
        if let Some(critic) = &self.critic {
            let optimizer = &critic.optimizer;
            (state.critic_steps, state.critic_loss_scale) = (optimizer.steps(), optimizer.scaler());
        }
    }

    /// Whether what is done every `freq` steps (0: at the end only) is due after the step that has ended.
    fn is_due(&self, freq: u64) -> bool {
        let step = self.state.step;
        step == self.steps || (freq > 0 && step.is_multiple_of(freq))
    }

    /// The ranks of the run.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The policy as it stands on this rank. Where ranks share out weights (`memory.zero_stage: 3`), matrices
    /// (`memory.tensor_model_parallel_size`) or layers (`memory.pipeline_model_parallel_size`) this may be a part of
    /// it: [`whole_policy`](Self::whole_policy) is all of it.
    #[must_use]
    pub fn policy(&self) -> &Decoder {
        self.learner.decoder()
    }

    /// The whole policy as it stands, on every rank. All ranks of the run call it together. Where they share matrices
    /// it is put together in host memory; else it shares its weights with [`policy`](Self::policy), which the next step
    /// divides again.
    ///
    /// # Errors
    /// Where memory runs out, the device fails, or a rank has failed or is gone.
    pub fn whole_policy(&mut self) -> Result<Decoder> {
        self.learner.model.make_whole()?;
        let whole = self.learner.model.assembled(true)?;
        Ok(whole.unwrap_or_else(|| self.learner.decoder().clone()))
    }

    /// How fast and how large the device is, as the planner sees it.
    #[must_use]
    pub fn profile(&self) -> &DeviceProfile {
        &self.request.profile
    }

    fn summary(&mut self) -> Summary {
        let predicted = self.request.predict(self.plan.clone()).estimate;
        let measured_peak_bytes = self.ledger.peak_bytes();
        Summary {
            steps: self.state.step,
            seconds: self.state.seconds,
            tokens_per_second: self.state.tokens as f64 / self.state.seconds.max(1e-9),
            first: self.state.first_validation.clone(),
            last: self.state.last_validation.clone(),
            predicted_peak_bytes: Some(predicted.peak_bytes),
            measured_peak_bytes,
            rank_peak_bytes: Vec::new(),
            memory: phase_memory(&predicted, self.ledger.phases()),
            replans: self.replans,
            peak_resident_bytes: peak_resident_bytes(),
            device: self.info.device.to_string(),
            precision: self.config.precision.name(),
            skipped_steps: self.state.skipped_steps,
        }
    }
}
