//! Calls that wait for a worker, and what becomes of one that fails.

use super::pending::{Failure, ProgramResult};
use crate::task::Score;
use serde_json::{Map, Value};
use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// The completions of a prompt as their program reads them.
#[derive(Debug)]
pub(super) struct Call {
    pub samples: Vec<Map<String, Value>>,
    pub trainer_state: Value,
}

/// A call, or the part of it that is repeated.
#[derive(Debug)]
pub(super) struct Job {
    pub call: Arc<Call>,
    /// Places in the call of the completions to score.
    pub samples: Vec<usize>,
    /// Whether it has failed before.
    pub repeated: bool,
    pub results: Sender<(usize, ProgramResult)>,
    pub wanted: Weak<()>,
}

impl Job {
    /// Whether somebody waits for it.
    pub fn is_wanted(&self) -> bool {
        self.wanted.strong_count() > 0
    }

    /// Hands scores over. A completion whose worker died or did not answer is asked for once more, with a warning and
    /// in a call of its own; what fails alone is lost.
    pub fn complete(self, name: &str, results: Vec<ProgramResult>, queue: &Queue) {
        let (mut again, mut first) = (Vec::new(), None);
        for (&at, result) in self.samples.iter().zip(results) {
            match result {
                Err(Failure::Failed(reason)) if !self.repeated => {
                    first.get_or_insert(reason);
                    again.push(Self {
                        call: Arc::clone(&self.call),
                        samples: vec![at],
                        repeated: true,
                        results: self.results.clone(),
                        wanted: Weak::clone(&self.wanted),
                    });
                }
                result => {
                    let result = result.map(|score| Score { repeated: self.repeated, ..score });
                    // fails where nobody waits any more
                    let _ = self.results.send((at, result));
                }
            }
        }
        if let Some(reason) = first.filter(|_| self.is_wanted()) {
            tracing::warn!(
                "reward `{name}` failed for {} of {} completions, which are scored again one by one: {reason}",
                again.len(),
                self.samples.len()
            );
        }
        queue.first(again);
    }
}

/// Jobs in the order in which they are done.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
    /// Files of the user's modules that workers have imported.
    modules: BTreeSet<PathBuf>,
}

impl Queue {
    /// Puts a job last.
    pub fn push(&self, job: Job) {
        self.state().jobs.push_back(job);
        self.changed.notify_one();
    }

    /// Puts jobs first, in their order.
    fn first(&self, jobs: Vec<Job>) {
        let mut state = self.state();
        for job in jobs.into_iter().rev() {
            state.jobs.push_front(job);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The next job, once there is one; none of a queue that is closed.
    pub fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Keeps files of the user's modules that a worker has imported.
    pub fn add_modules(&self, modules: Vec<PathBuf>) {
        self.state().modules.extend(modules);
    }

    /// All of those.
    pub fn modules(&self) -> Vec<PathBuf> {
        self.state().modules.iter().cloned().collect()
    }

    /// Ends the work: what is under way is called off too.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    /// Whether work has ended.
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
