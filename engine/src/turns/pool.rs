//! Threads that run requests to environments during sampling.

use super::outcome::Reply;
use crate::task::{Environment, EnvironmentError, Turn};
use firebrick_backends::device::panic_message;
use firebrick_backends::heartbeat::{beat, wait_for};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A request to an environment.
pub(super) struct EnvironmentJob {
    /// Index of the rollout.
    pub episode: usize,
    pub environment: Box<dyn Environment>,
    pub request: EnvironmentRequest,
}

/// Kinds of requests.
pub(super) enum EnvironmentRequest {
    /// The reply to a turn, or the reward of the rollout if there is none.
    Turn(Turn),
    /// The reward of the rollout.
    Reward,
}

/// An environment's answer.
pub(super) struct EnvironmentAnswer {
    pub episode: usize,
    pub environment: Box<dyn Environment>,
    pub answer: Result<Reply, EnvironmentError>,
}

impl EnvironmentJob {
    /// Runs the request.
    pub fn run(mut self) -> EnvironmentAnswer {
        let environment = &mut self.environment;
        let answer = catch_unwind(AssertUnwindSafe(|| match &self.request {
            EnvironmentRequest::Turn(turn) => environment.step(turn).and_then(|observation| {
                if observation.messages.is_empty() {
                    end(environment.as_mut())
                } else {
                    Ok(Reply::Messages(observation))
                }
            }),
            EnvironmentRequest::Reward => end(environment.as_mut()),
        }));
        let answer = answer.unwrap_or_else(|panic| {
            Err(EnvironmentError::of_code(format!("it panicked: {}", panic_message(panic.as_ref()))))
        });
        EnvironmentAnswer { episode: self.episode, environment: self.environment, answer }
    }
}

/// The end of a rollout, with a finite reward.
fn end(environment: &mut dyn Environment) -> Result<Reply, EnvironmentError> {
    let (reward, object) = (environment.reward()?, environment.object()?);
    match reward {
        Some(reward) if !reward.is_finite() => {
            Err(EnvironmentError::of_code(format!("its reward is {reward}; rewards must be finite")))
        }
        _ => Ok(Reply::End(reward, object)),
    }
}

/// A thread for each worker of the environments. Dropping it waits for running jobs.
pub(super) struct Pool {
    jobs: Vec<Sender<EnvironmentJob>>,
    answers: Receiver<EnvironmentAnswer>,
    threads: Vec<JoinHandle<()>>,
    busy: usize,
}

impl Pool {
    pub fn new(workers: usize) -> Self {
        let (finished, answers) = channel();
        let (mut jobs, mut threads) = (Vec::new(), Vec::new());
        for _ in 0..workers {
            let (job, receiver) = channel::<EnvironmentJob>();
            let finished = finished.clone();
            jobs.push(job);
            threads.push(std::thread::spawn(move || {
                for job in receiver {
                    if finished.send(job.run()).is_err() {
                        return;
                    }
                }
            }));
        }
        Self { jobs, answers, threads, busy: 0 }
    }

    /// Sends a job to the thread of its environment.
    pub fn push(&mut self, job: EnvironmentJob) {
        let worker = job.episode % self.jobs.len();
        // a job's panic is caught: the thread lives as long as the pool
        let sent = self.jobs[worker].send(job);
        self.busy += usize::from(sent.is_ok());
    }

    /// Waits for all jobs.
    pub fn wait(&mut self) -> Vec<EnvironmentAnswer> {
        let busy = std::mem::take(&mut self.busy);
        let _wait = wait_for("answers of environments");
        self.answers.iter().take(busy).inspect(|_| beat()).collect()
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
