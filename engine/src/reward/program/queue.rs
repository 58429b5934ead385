//! Queue of calls, and the retry of failed ones.

use super::pending::{Failure, ProgramResult};
use crate::task::Score;
use serde_json::{Map, Value};
use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// Completions of a prompt in the format of the program.
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
    /// True if it has failed before.
    pub repeated: bool,
    pub results: Sender<(usize, ProgramResult)>,
    pub wanted: Weak<()>,
}

impl Job {
    /// Returns true if somebody waits for it.
    pub fn is_wanted(&self) -> bool {
        self.wanted.strong_count() > 0
    }

    /// Sends scores. A completion whose worker died or timed out is scored once more in a separate call, with a
    /// warning; after a second failure its score is lost.
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
                    // fails if nobody waits any more
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
        queue.push_front(again);
    }
}

/// Jobs in the order of execution.
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
    /// Adds a job at the end.
    pub fn push(&self, job: Job) {
        self.state().jobs.push_back(job);
        self.changed.notify_one();
    }

    /// Adds jobs at the front, in their order.
    fn push_front(&self, jobs: Vec<Job>) {
        let mut state = self.state();
        for job in jobs.into_iter().rev() {
            state.jobs.push_front(job);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for the next job; `None` once the queue is closed.
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

    /// Adds files of the user's modules that a worker has imported.
    pub fn add_modules(&self, modules: Vec<PathBuf>) {
        self.state().modules.extend(modules);
    }

    /// Files of the user's modules that workers have imported.
    pub fn modules(&self) -> Vec<PathBuf> {
        self.state().modules.iter().cloned().collect()
    }

    /// Closes the queue and cancels running jobs.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    /// Returns true if the queue is closed.
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
