//! Builder of a run, and the assembly of its parts.

use super::Trainer;
use super::models::Loaded;
use super::recovery::{Checkpoints, Recovery};
use super::sampler::Sampler;
use super::save::Saves;
use super::schedule::SessionTimes;
use super::scorer::Scorer;
use super::session::resume::{RunFiles, Start};
use super::session::{LrSchedules, Planned, Session};
use super::telemetry::Telemetry;
use super::updater::Updater;
use super::watchdog::{Hang, HangHandler, LOAD, Watchdog};
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
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Builds a run: see [`Trainer::builder`].
#[must_use]
pub struct TrainerBuilder {
    config: RunConfig,
    mode: Mode,
    start: Start,
    task: Option<Arc<dyn Task>>,
    objective: Option<Arc<dyn Objective>>,
    observer: Box<dyn Observer>,
    trackers: Vec<Box<dyn Tracker>>,
    profile: u64,
    /// Run folder and step that are replayed.
    replayed: Option<(PathBuf, u64)>,
    on_hang: Option<HangHandler>,
    ranks: Arc<dyn Collective>,
    started: Instant,
}

impl Trainer {
    /// Builds a run: by default reinforcement learning in a new run folder, with the configured task and objective and
    /// without an observer.
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
            replayed: None,
            on_hang: None,
            ranks: Arc::new(Solo),
            started: Instant::now(),
        }
    }
}

impl TrainerBuilder {
    /// Reinforcement learning or supervised training.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// A new run, or the one in the output folder.
    pub fn start(mut self, start: Start) -> Self {
        self.start = start;
        self
    }

    /// A custom task in place of the configured one.
    pub fn task(mut self, task: impl Task + 'static) -> Self {
        self.task = Some(Arc::new(task));
        self
    }

    /// A custom objective in place of the configured one. It must need a critic if and only if the `objective` section
    /// does.
    pub fn objective(mut self, objective: impl Objective + 'static) -> Self {
        self.objective = Some(Arc::new(objective));
        self
    }

    /// Receiver of events, which may steer the run.
    pub fn observer(mut self, observer: impl Observer + 'static) -> Self {
        self.observer = Box::new(observer);
        self
    }

    /// Opens the session of the configuration; see [`Session::open`].
    pub(super) fn open(&mut self, ranks: &Arc<dyn Collective>, files: ModelFiles) -> Result<Session> {
        let config = std::mem::take(&mut self.config).resolve()?;
        let task = match self.task.take() {
            Some(task) => task,
            None => task_of(&config, self.mode)?,
        };
        Session::open(config, self.mode, task, self.objective.take(), ranks, files)
    }

    /// A custom tracker, besides those of `trainer.logger`.
    pub fn tracker(mut self, tracker: impl Tracker + 'static) -> Self {
        self.trackers.push(Box::new(tracker));
        self
    }

    /// Traces this many steps into `profile.pftrace` of the run folder; 0: none. See `Profiler`.
    pub fn profile(mut self, steps: u64) -> Self {
        self.profile = steps;
        self
    }

    /// Continues in a new run folder from the newest checkpoint before a step of another run.
    pub(super) fn replaying(mut self, run: &Path, step: u64) -> Self {
        self.replayed = Some((run.to_owned(), step));
        self
    }

    /// Receiver of a hang (`trainer.heartbeat_timeout`), on a separate thread; it may end the process. Without one, a
    /// hang is logged. Other ranks have been told, and end.
    pub fn on_hang(mut self, handler: impl Fn(&Hang) + Send + Sync + 'static) -> Self {
        self.on_hang = Some(Box::new(handler));
        self
    }

    /// Ranks of this run; one by default. Every rank of a collective builds the same run. Rank 0 writes the run folder
    /// and the trackers, and its observer steers all; each observer can stop all. `trainer.ddp_backend` selects the
    /// transport.
    pub fn world(mut self, ranks: Arc<dyn Collective>) -> Self {
        self.ranks = ranks;
        self
    }

    /// Opens the run: opens its session, plans its memory, loads its models, and restores the checkpoint that it
    /// continues from. Nothing is trained yet.
    ///
    /// # Errors
    ///
    /// If the configuration is wrong, a file cannot be read, no plan fits the budget, or the output folder holds
    /// another run.
    pub fn build(self) -> Result<Trainer> {
        let trainer = self.load_unless(|_| false)?;
        Ok(trainer.unwrap_or_else(|| unreachable!("loaded in any case")))
    }

    /// Builds the run and runs it, as [`build`](Self::build) and [`Trainer::run`] do. A run that has ended before is
    /// not loaded, and the result is `None`.
    ///
    /// # Errors
    ///
    /// Those of both.
    pub fn run(self) -> Result<Option<Summary>> {
        let trainer = self.load_unless(|prepared| prepared.run_files.ended)?;
        trainer.map(|mut trainer| trainer.run()).transpose()
    }

    /// Prepares the run, and loads it unless a condition holds.
    fn load_unless(mut self, condition: impl FnOnce(&Prepared) -> bool) -> Result<Option<Trainer>> {
        let ranks = Arc::clone(&self.ranks);
        let watchdog = Watchdog::start(&self.config, &ranks, self.on_hang.take());
        let _place = watchdog.enter(0, LOAD);
        let prepared = self.prepare(&ranks);
        let loaded = prepared
            .and_then(|prepared| if condition(&prepared) { Ok(None) } else { self.load(prepared, watchdog).map(Some) });
        if let Err(error) = &loaded {
            World::new(ranks).abort(error);
        }
        loaded
    }

    /// Opens and plans the run, and looks at its folder. Nothing is loaded or written yet.
    fn prepare(&mut self, ranks: &Arc<dyn Collective>) -> Result<Prepared> {
        let session = self.open(ranks, ModelFiles::All)?;
        let (planned, schedules) = session.plan()?;
        session.check_ranks(&planned.plan)?;
        let run_files = match &self.replayed {
            Some((run, step)) => session.look_at_replayed(run, *step)?,
            None => session.look(self.start)?,
        };
        Ok(Prepared { session, planned, schedules, run_files })
    }

    fn load(mut self, prepared: Prepared, watchdog: Watchdog) -> Result<Trainer> {
        let Prepared { mut session, mut planned, schedules, mut run_files } = prepared;
        let task = session.data.prompts.task();
        let programs = if session.judges() { Programs::open(task)? } else { Programs::default() };
        session.resume(&mut run_files, self.start, &programs)?;
        let (loaded, state, resumed) = Loaded::begin(&session, &mut planned, &run_files, &programs)?;
        // a new folder is made last, so that a run that cannot start leaves none
        let folder = match run_files.folder.take() {
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
        let recorder =
            Recorder::new(folder, self.observer, trackers).with_token_log(tokens, &session.source.tokenizer)?;
        if !ended {
            recorder.plans(&planned.request, &planned.plan)?;
            // a later one was rewound
            recorder.best(state.best.as_ref())?;
        }
        let checkpoints = Checkpoints::at_start(&recorder.run, &session.world, resumed_from)?;
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
                watchdog,
                state,
                checkpoints,
                saves: Saves::default(),
                step: 0,
            },
            session,
            times: SessionTimes::new(self.started),
            resumed,
            started: false,
            stopped: false,
        })
    }
}

/// A run before anything is loaded.
struct Prepared {
    session: Session,
    planned: Planned,
    schedules: LrSchedules,
    run_files: RunFiles,
}

/// Begins the run in all trackers.
fn begin_trackers(
    trackers: Vec<Box<dyn Tracker>>,
    folder: &RunDir,
    config: &RunConfig,
    last_step: Option<u64>,
) -> Result<Trackers> {
    if trackers.is_empty() {
        return Ok(Trackers::default());
    }
    let folder_name = || folder.path().file_name().map(|name| name.to_string_lossy().into_owned());
    let name = config.trainer.experiment_name.clone().or_else(folder_name);
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
