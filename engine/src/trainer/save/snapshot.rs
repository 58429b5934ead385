//! A checkpoint that a thread writes: the values of models and optimizers at the end of a step, shared with the run
//! until the next update.

use super::{Files, Written};
use crate::Result;
use crate::checkpoint::{RunDir, TrainerState};
use crate::executor::ResidentModel;
use crate::optim::AdamW;
use crate::plan::estimate::EstimatePhase;
use crate::trainer::recovery::Recovery;
use crate::trainer::session::Session;
use firebrick_backends::Error as DeviceError;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// Sources of a checkpoint's files at the end of a step.
pub(super) struct Snapshot {
    session: Arc<Session>,
    folder: RunDir,
    state: TrainerState,
    policy: (ResidentModel, AdamW),
    critic: Option<(ResidentModel, AdamW)>,
    /// Account of the buffers of writing.
    _buffers: MemoryGuard,
}

impl Snapshot {
    /// A run's models and state; `None` if values cannot be shared.
    pub fn of(run: &Recovery) -> Option<Self> {
        let models = &run.models;
        let critic = match &models.critic {
            Some(critic) => Some(critic.shared()?),
            None => None,
        };
        let estimate = run.planned.estimate();
        let predicted = estimate.phase(EstimatePhase::Save)?.categories.get(&Category::Buffers);
        let buffers = usize::try_from(*predicted?).ok()?;
        Some(Self {
            session: Arc::clone(&run.session),
            folder: run.telemetry.recorder.run.clone(),
            state: run.state.clone(),
            policy: models.policy.shared()?,
            critic,
            _buffers: models.policy.runtime.accounts.hold(Category::Buffers, Home::Host, buffers),
        })
    }

    fn write(&self) -> Result<Written> {
        let (model, optimizer) = &self.policy;
        let files = Files {
            session: &self.session,
            folder: &self.folder,
            state: &self.state,
            policy: (model, optimizer),
            critic: self.critic.as_ref().map(|(model, optimizer)| (model, optimizer)),
        };
        Ok(Written { path: files.write()?, ended: Instant::now() })
    }
}

/// A checkpoint under way. A run that fails waits for it, too.
pub(super) struct PendingSave {
    pub began: Instant,
    result: Option<Receiver<Result<Written>>>,
    /// One thread: those of the global pool work for the step.
    _pool: ThreadPool,
}

impl PendingSave {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's, if it starts no more threads.
    pub fn start(snapshot: Snapshot, began: Instant) -> Result<Self, ThreadPoolBuildError> {
        let pool = ThreadPoolBuilder::new().num_threads(1).thread_name(|_| "firebrick-save".into()).build()?;
        let (done, result) = channel();
        pool.spawn(move || {
            let written = catch_unwind(AssertUnwindSafe(|| snapshot.write()));
            // the next update finds its values unshared, and changes them in place
            drop(snapshot);
            // the receiver waits
            let _ = done.send(written.unwrap_or_else(|panic| Err(DeviceError::panicked(panic.as_ref()).into())));
        });
        Ok(Self { began, result: Some(result), _pool: pool })
    }

    /// Waits until all files are on disk, or writing has failed.
    pub fn wait(mut self) -> Result<Written> {
        self.receive().unwrap_or_else(|| unreachable!("the thread sends one result"))
    }

    fn receive(&mut self) -> Option<Result<Written>> {
        self.result.take()?.recv().ok()
    }
}

impl Drop for PendingSave {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.receive() {
            tracing::warn!("a checkpoint is missing: {error}");
        }
    }
}
