//! What a run is made of, put together and opened.

use super::load::Loaded;
use super::setup::Opened;
use super::{Start, Trainer};
use crate::Result;
use crate::config::{Mode, RunConfig};
use crate::data::task_of;
use crate::metrics::{Ledger, Observer, PhaseTimings, Recorder, Silent, Snapshots};
use crate::objective::Objective;
use crate::task::Task;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A run that is being put together: see [`Trainer::builder`].
pub struct TrainerBuilder {
    config: RunConfig,
    mode: Mode,
    start: Start,
    task: Option<Arc<dyn Task>>,
    objective: Option<Arc<dyn Objective>>,
    observer: Box<dyn Observer>,
}

impl Trainer {
    /// Puts a run together: reinforcement learning in a new run folder, with the configured task and objective and without an
    /// observer, unless the builder is told otherwise.
    #[must_use]
    pub fn builder(config: RunConfig) -> TrainerBuilder {
        TrainerBuilder {
            config,
            mode: Mode::Rl,
            start: Start::Fresh,
            task: None,
            objective: None,
            observer: Box::new(Silent),
        }
    }
}

impl TrainerBuilder {
    /// Reinforcement learning or supervised training.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// A new run, or the one in the output folder.
    #[must_use]
    pub fn start(mut self, start: Start) -> Self {
        self.start = start;
        self
    }

    /// A task of one's own in place of the configured one.
    #[must_use]
    pub fn task(mut self, task: impl Task + 'static) -> Self {
        self.task = Some(Arc::new(task));
        self
    }

    /// An objective of one's own in place of the configured one. Whether it needs a critic has to agree with the `objective`
    /// section, which says whether the run has one.
    #[must_use]
    pub fn objective(mut self, objective: impl Objective + 'static) -> Self {
        self.objective = Some(Arc::new(objective));
        self
    }

    /// Who is told what happens, and may steer the run.
    #[must_use]
    pub fn observer(mut self, observer: impl Observer + 'static) -> Self {
        self.observer = Box::new(observer);
        self
    }

    /// Opens the run: reads what it is made of, plans its memory, loads its models, and restores the checkpoint that it goes on
    /// from. Nothing is trained yet.
    ///
    /// # Errors
    ///
    /// Where the configuration is wrong, a file cannot be read, no plan fits the budget, or the output folder holds another run.
    pub fn build(self) -> Result<Trainer> {
        let config = self.config.resolve()?;
        let task = match self.task {
            Some(task) => task,
            None => task_of(&config, self.mode)?,
        };
        let opened = Opened::open(config, self.mode, task, self.objective)?;
        let mut planned = opened.plan()?;
        let (mut loaded, state, resumed) = Loaded::begin(&opened, &mut planned, self.start)?;
        let recorder = Recorder::new(loaded.folder(&opened)?, self.observer);
        recorder.plans(&planned.request, &planned.plan)?;
        let (accounts, log) = (&loaded.policy.runtime.accounts, &loaded.log);
        let mut snapshots = Snapshots::new(
            log,
            format!("{} ({})", opened.info.device, opened.info.name),
            planned.request.profile.is_unified(),
            state.step,
            opened.config.memory.snapshot,
        );
        let predicted = planned.request.predict(planned.plan.clone());
        snapshots.planned(predicted.estimate.phases);
        Ok(Trainer {
            ledger: Ledger::new(state.peak_bytes, &opened.device, accounts, log),
            snapshots,
            config: opened.config,
            info: opened.info,
            device: opened.device,
            source: opened.source,
            data: opened.data.prompts,
            demonstrations: opened.data.demonstrations,
            learner: loaded.policy,
            reference: loaded.reference,
            reward_manager: loaded.reward_manager,
            critic: loaded.critic,
            critic_source: opened.critic_source,
            request: planned.request,
            plan: planned.plan,
            replans: 0,
            objective: opened.objective,
            recorder,
            saved: resumed.then_some(state.step),
            state,
            steps: planned.steps,
            lr_schedule: planned.schedules.policy,
            critic_lr_schedule: planned.schedules.critic,
            resumed,
            started: false,
            timings: PhaseTimings::default(),
            skipped_in_a_row: BTreeMap::new(),
            phase_step: 0,
        })
    }
}
