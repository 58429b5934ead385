//! What a run is made of, put together and opened.

use super::Trainer;
use super::models::Loaded;
use super::recovery::{Checkpoints, Recovery};
use super::sampler::Sampler;
use super::scorer::Scorer;
use super::session::resume::{Found, Start};
use super::session::{LrSchedules, Planned, Session};
use super::telemetry::Telemetry;
use super::updater::Updater;
use crate::Result;
use crate::checkpoint::RunDir;
use crate::config::{Mode, RunConfig};
use crate::data::task_of;
use crate::hub::ModelFiles;
use crate::metrics::tracker::{self, TrackedRun, Tracker, Trackers};
use crate::metrics::{Observer, Recorder, Silent, Summary, TokenSettings};
use crate::objective::Objective;
use crate::reward::Programs;
use crate::task::Task;
use crate::world::World;
use firebrick_backends::collective::{Collective, Solo};
use std::sync::Arc;

/// A run that is being put together: see [`Trainer::builder`].
pub struct TrainerBuilder {
    config: RunConfig,
    mode: Mode,
    start: Start,
    task: Option<Arc<dyn Task>>,
    objective: Option<Arc<dyn Objective>>,
    observer: Box<dyn Observer>,
    trackers: Vec<Box<dyn Tracker>>,
    profile: u64,
    ranks: Arc<dyn Collective>,
}

impl Trainer {
    /// Puts a run together: reinforcement learning in a new run folder, with the configured task and objective and
    /// without an observer, unless the builder is told otherwise.
    #[must_use]
    pub fn builder(config: RunConfig) -> TrainerBuilder {
        TrainerBuilder {
            config,
            mode: Mode::Rl,
            start: Start::Fresh,
            task: None,
            objective: None,
            observer: Box::new(Silent),
            trackers: Vec::new(),
            profile: 0,
            ranks: Arc::new(Solo),
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

    /// An objective of one's own in place of the configured one. Whether it needs a critic has to agree with the
    /// `objective` section, which says whether the run has one.
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

    /// Reads and checks what the configuration names; see [`Session::open`].
    pub(super) fn open(&mut self, ranks: &Arc<dyn Collective>, files: ModelFiles) -> Result<Session> {
        let config = std::mem::take(&mut self.config).resolve()?;
        let task = match self.task.take() {
            Some(task) => task,
            None => task_of(&config, self.mode)?,
        };
        Session::open(config, self.mode, task, self.objective.take(), ranks, files)
    }

    /// A tracker of one's own, beside those of `trainer.logger`.
    #[must_use]
    pub fn tracker(mut self, tracker: impl Tracker + 'static) -> Self {
        self.trackers.push(Box::new(tracker));
        self
    }

    /// Traces this many steps into `profile.pftrace` of the run folder; 0: none. See `Profiler`.
    #[must_use]
    pub fn profile(mut self, steps: u64) -> Self {
        self.profile = steps;
        self
    }

    /// Ranks of this run; one by default. Every rank of a collective builds the same run. Rank 0 writes the run folder
    /// and the trackers, and its observer steers all. `trainer.ddp_backend` selects the transport.
    #[must_use]
    pub fn world(mut self, ranks: Arc<dyn Collective>) -> Self {
        self.ranks = ranks;
        self
    }

    /// Opens the run: reads what it is made of, plans its memory, loads its models, and restores the checkpoint that it
    /// continues from. Nothing is trained yet.
    ///
    /// # Errors
    ///
    /// Where the configuration is wrong, a file cannot be read, no plan fits the budget, or the output folder holds
    /// another run.
    pub fn build(mut self) -> Result<Trainer> {
        let ranks = Arc::clone(&self.ranks);
        let prepared = self.prepare();
        broadcast_failure(ranks, prepared.and_then(|prepared| self.load(prepared)))
    }

    /// Does all of the run, as [`build`](Self::build) and [`Trainer::run`] do; nothing of one that has ended before, of
    /// which it says so before it loads anything.
    ///
    /// # Errors
    ///
    /// Those of both.
    pub fn run(mut self) -> Result<Option<Summary>> {
        let ranks = Arc::clone(&self.ranks);
        let prepared = self.prepare();
        let loaded =
            prepared.and_then(|prepared| if prepared.found.ended { Ok(None) } else { self.load(prepared).map(Some) });
        let trainer = broadcast_failure(ranks, loaded)?;
        trainer.map(|mut trainer| trainer.run()).transpose()
    }

    /// Opens and plans the run, and looks at its folder. Nothing is loaded or written yet.
    fn prepare(&mut self) -> Result<Prepared> {
        let ranks = Arc::clone(&self.ranks);
        let session = self.open(&ranks, ModelFiles::All)?;
        let (planned, schedules) = session.plan()?;
        session.check_ranks(&planned.plan)?;
        let found = session.look(self.start)?;
        Ok(Prepared { session, planned, schedules, found })
    }

    fn load(mut self, prepared: Prepared) -> Result<Trainer> {
        let Prepared { mut session, mut planned, schedules, mut found } = prepared;
        let task = session.data.prompts.task();
        let programs = if session.judges() { Programs::open(task)? } else { Programs::default() };
        session.resume(&mut found, self.start, &programs)?;
        let (loaded, state, resumed) = Loaded::begin(&session, &mut planned, &found, &programs)?;
        // a new one is made last, so that a run that cannot start leaves none in its own way
        let folder = match found.run.take() {
            Some(folder) => folder,
            None => session.new_folder(&programs)?,
        };
        let resumed_from = resumed.then_some(&state);
        let ended = resumed_from.is_some_and(|state| state.step >= session.steps);
        let mut trackers = tracker::configured(&session.config.trainer);
        trackers.append(&mut self.trackers);
        if ended || !session.world.writes() {
            trackers.clear();
        }
        let trackers = begin_trackers(trackers, &folder, &session.config, resumed_from.map(|state| state.step))?;
        let tokens = TokenSettings::new(session.config.trainer.log_tokens);
        let recorder = Recorder::new(folder, self.observer, trackers).keep_tokens(tokens, &session.source.tokenizer)?;
        if !ended {
            recorder.plans(&planned.request, &planned.plan)?;
        }
        let checkpoints = Checkpoints::at_start(recorder.run(), &session.world, resumed_from)?;
        let demonstrations = session.data.demonstrations.take();
        let telemetry = Telemetry::begin(recorder, &session, &planned, &loaded, &state, self.profile);
        let session = Arc::new(session);
        Ok(Trainer {
            sampler: Sampler::new(&session),
            scorer: Scorer::new(&session, loaded.reward_manager),
            updater: Updater::new(&session, schedules, demonstrations),
            recovery: Recovery {
                session: Arc::clone(&session),
                models: loaded.models,
                planned,
                telemetry,
                checkpoints,
                step: 0,
            },
            session,
            state,
            resumed,
            started: false,
        })
    }
}

/// A run that nothing has been loaded of.
struct Prepared {
    session: Session,
    planned: Planned,
    schedules: LrSchedules,
    found: Found,
}

/// Tells the other ranks of an error that ends the run.
fn broadcast_failure<T>(ranks: Arc<dyn Collective>, done: Result<T>) -> Result<T> {
    if let Err(error) = &done {
        World::new(ranks).give_up(error);
    }
    done
}

/// Tells trackers of the run that they are to follow.
fn begin_trackers(
    trackers: Vec<Box<dyn Tracker>>,
    folder: &RunDir,
    config: &RunConfig,
    last_step: Option<u64>,
) -> Result<Trackers> {
    if trackers.is_empty() {
        return Ok(Trackers::default());
    }
    let named = config.trainer.experiment_name.clone();
    let name = named.or_else(|| {
        let own = folder.path().file_name();
        own.map(|name| name.to_string_lossy().into_owned())
    });
    let run = TrackedRun {
        folder: folder.path(),
        project: &config.trainer.project_name,
        name: &name.unwrap_or_else(|| "run".into()),
        config: &serde_json::to_value(config).unwrap_or_default(),
        yaml: &config.to_yaml()?,
        last_step,
    };
    Ok(Trackers::begin(trackers, &run))
}
