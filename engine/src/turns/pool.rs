//! Threads that ask environments while others are sampled.

use super::outcome::Played;
use crate::task::{Environment, EnvironmentError, Turn};
use firebrick_backends::device::panic_message;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A request to an environment.
pub(super) struct EnvironmentJob {
    /// Which rollout it is of.
    pub episode: usize,
    pub environment: Box<dyn Environment>,
    pub request: EnvironmentRequest,
}

/// The kinds of requests.
pub(super) enum EnvironmentRequest {
    /// To answer a turn; where it has nothing to say, what the rollout was worth.
    Turn(Turn),
    /// What the rollout was worth.
    Reward,
}

/// An environment's answer.
pub(super) struct EnvironmentAnswer {
    pub episode: usize,
    pub environment: Box<dyn Environment>,
    pub answer: Result<Played, EnvironmentError>,
}

impl EnvironmentJob {
    /// Carries the request out.
    pub fn run(mut self) -> EnvironmentAnswer {
        let environment = &mut self.environment;
        let answer = catch_unwind(AssertUnwindSafe(|| match &self.request {
            EnvironmentRequest::Turn(turn) => environment.step(turn).and_then(|observation| {
                if observation.messages.is_empty() {
                    ended(environment.as_mut())
                } else {
                    Ok(Played::GoesOn(observation))
                }
            }),
            EnvironmentRequest::Reward => ended(environment.as_mut()),
        }));
        let answer = answer.unwrap_or_else(|panic| {
            Err(EnvironmentError::of_code(format!("it panicked: {}", panic_message(panic.as_ref()))))
        });
        EnvironmentAnswer { episode: self.episode, environment: self.environment, answer: answer.and_then(checked) }
    }
}

/// The end of a rollout.
fn ended(environment: &mut dyn Environment) -> Result<Played, EnvironmentError> {
    let reward = environment.reward()?;
    Ok(Played::Ended(reward, environment.object()?))
}

/// Refuses a reward that is no number.
fn checked(answer: Played) -> Result<Played, EnvironmentError> {
    match answer {
        Played::Ended(Some(reward), _) if !reward.is_finite() => {
            Err(EnvironmentError::of_code(format!("its reward is {reward}; rewards must be finite")))
        }
        other => Ok(other),
    }
}

/// A thread for each worker of the environments. Dropped, it waits for what they are busy with.
pub(super) struct Pool {
    jobs: Vec<Sender<EnvironmentJob>>,
    done: Receiver<EnvironmentAnswer>,
    threads: Vec<JoinHandle<()>>,
    busy: usize,
}

impl Pool {
    pub fn new(workers: usize) -> Self {
        let (finished, done) = channel();
        let (mut jobs, mut threads) = (Vec::new(), Vec::new());
        for _ in 0..workers {
            let (job, coming) = channel::<EnvironmentJob>();
            let finished = finished.clone();
            jobs.push(job);
            threads.push(std::thread::spawn(move || {
                for job in coming {
                    if finished.send(job.run()).is_err() {
                        return;
                    }
                }
            }));
        }
        Self { jobs, done, threads, busy: 0 }
    }

    /// Hands a job to the thread of its environment.
    pub fn push(&mut self, job: EnvironmentJob) {
        let worker = job.episode % self.jobs.len();
        // a job's panic is caught: the thread is there as long as the pool
        let sent = self.jobs[worker].send(job);
        self.busy += usize::from(sent.is_ok());
    }

    /// Waits for all jobs.
    pub fn wait(&mut self) -> Vec<EnvironmentAnswer> {
        let busy = std::mem::take(&mut self.busy);
        self.done.iter().take(busy).collect()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.jobs.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
