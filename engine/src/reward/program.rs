//! Rewards of programs: Python functions and commands, in several processes each. A group of completions is a call. If
//! the process of a call dies or times out, its completions are scored once more one at a time and counted, so that one
//! bad completion does not cost the others their rewards. An exception or invalid answer of the user's code ends the
//! run.

mod pending;
mod protocol;
mod queue;
mod request;
mod worker;

pub(super) use self::pending::PendingScores;
pub use self::pending::{Failure, ProgramResult, Progress};
#[doc(hidden)]
pub use self::protocol::read_answer;

use self::protocol::{Parameter, Protocol};
use self::queue::{Call, Job, Queue};
use self::request::{check_rows, sample};
use self::worker::Worker;
use super::Answer;
use crate::task::{RewardProgram, Task};
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A program that scores, with its workers, which end when it is dropped.
#[derive(Debug)]
pub struct Program {
    /// Name among the rewards.
    pub name: String,
    protocol: Protocol,
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl Program {
    /// Starts a program's workers. The first must become ready, and the task's rows must have the columns that it
    /// needs.
    pub fn open(name: &str, program: &RewardProgram, task: &dyn Task) -> Result<Self> {
        let refusal = |detail: String| {
            let what = match program {
                RewardProgram::Python(config) => {
                    format!("`{}` of {}", config.function, config.file.display())
                }
                RewardProgram::Command(config) => config.command.join(" "),
            };
            Error::Config(format!("reward `{name}` ({what}): {detail}"))
        };
        let mut first = Worker::start(name, program, &|| true).map_err(|failure| refusal(failure.to_string()))?;
        let protocol = first.protocol.clone();
        check_rows(&protocol, task).map_err(refusal)?;
        check_environments(name, &protocol, task).map_err(refusal)?;
        let queue = Arc::new(Queue::default());
        queue.add_modules(first.take_modules());
        let mut first = Some(first);
        let threads = (0..program.workers()).map(|_| {
            let (name, program) = (name.to_owned(), program.clone());
            let (queue, worker) = (Arc::clone(&queue), first.take());
            thread::spawn(move || work(&name, &program, &queue, worker))
        });
        Ok(Self { name: name.to_owned(), protocol, threads: threads.collect(), queue })
    }

    /// Files of the user's modules that it has imported so far, except its own file.
    pub fn modules(&self) -> Vec<PathBuf> {
        self.queue.modules()
    }

    /// Sends it the completions of a prompt of the task with this name. Returns an error if the row lacks a column.
    pub(super) fn submit(&self, group: &[Answer<'_>], task: &str, progress: Progress) -> Result<PendingScores> {
        let samples = group.iter().map(|answer| {
            sample(&self.protocol, task, answer)
                .map_err(|detail| answer.failed(format!("reward `{}`: {detail}", self.name)))
        });
        let samples = samples.collect::<Result<Vec<_>>>()?;
        let (results, receiver) = channel();
        let wanted = Arc::new(());
        let len = samples.len();
        self.queue.push(Job {
            call: Arc::new(Call { samples, trainer_state: json!(progress) }),
            samples: (0..len).collect(),
            repeated: false,
            results,
            wanted: Arc::downgrade(&wanted),
        });
        Ok(PendingScores { results: receiver, len, wanted })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            // a thread that has panicked has no worker left
            let _ = thread.join();
        }
    }
}

/// Keeps the objects of the task's environments for a function that reads them. If they are not Python objects, rejects
/// a function that requires them, and warns of one that takes them optionally.
fn check_environments(name: &str, protocol: &Protocol, task: &dyn Task) -> Result<(), String> {
    const INSTEAD: &str = "the environments of this task are not objects of a Python class; their reward is the part \
                           `environment`, and `completions` has the tools' answers";
    let (Protocol::Trl { environments, .. }, Some(task)) = (protocol, task.environments()) else {
        return Ok(());
    };
    match environments {
        None => {}
        Some(_) if task.keep_objects() => {}
        Some(Parameter::Required) => return Err(format!("it needs `environments`: {INSTEAD}")),
        Some(Parameter::Optional) => {
            tracing::warn!("reward `{name}`: its argument `environments` is None: {INSTEAD}");
        }
    }
    Ok(())
}

/// Runs jobs until the queue is closed, with one worker at a time.
fn work(name: &str, program: &RewardProgram, queue: &Queue, worker: Option<Worker>) {
    let timeout = Duration::from_secs_f64(program.timeout());
    // started early, to be ready for the first job; if that fails, the job starts one
    let mut worker = worker.or_else(|| Worker::start(name, program, &|| !queue.is_closed()).ok());
    while let Some(job) = queue.next() {
        let wanted = || !queue.is_closed() && job.is_wanted();
        if !wanted() {
            continue;
        }
        let ready = match worker.take() {
            Some(worker) => Ok(worker),
            None => Worker::start(name, program, &wanted),
        };
        let results = match ready {
            Ok(ready) => {
                let results;
                (worker, results) = ready.score(&job, timeout, &wanted);
                queue.add_modules(worker.as_mut().map(Worker::take_modules).unwrap_or_default());
                results
            }
            Err(failure) => vec![Err(failure); job.samples.len()],
        };
        job.complete(name, results, queue);
    }
}

#[cfg(test)]
mod tests;
