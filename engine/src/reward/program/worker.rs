//! Workers: processes that score, from their start to their first failure.

use super::pending::{Failure, ProgramResult};
use super::protocol::{Protocol, command_line, command_reply, function_reply};
use super::queue::Job;
use crate::process::{Process, Silence, failure, with_stderr};
use crate::task::{CommandRewardConfig, PythonRewardConfig, RewardProgram};
use firebrick_spec::json::to_text;
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// The program that calls a Python function.
const SCRIPT: &str = include_str!("worker.py");
/// Time after its start in which a command must not end or write: one that cannot work ends at once.
const STARTUP_TIMEOUT: Duration = Duration::from_millis(500);

/// A process that is ready to score.
#[derive(Debug)]
pub(super) struct Worker {
    process: Process,
    pub protocol: Protocol,
    /// Number of the next call, or of its first completion.
    next: u64,
    /// Files of the user's modules that it has imported and not yet reported.
    modules: Vec<PathBuf>,
}

impl Worker {
    /// Starts a worker and waits until it is ready.
    pub fn start(name: &str, program: &RewardProgram, wanted: &dyn Fn() -> bool) -> Result<Self, Failure> {
        match program {
            RewardProgram::Python(config) => Self::python(name, config, wanted),
            RewardProgram::Command(config) => Self::command(name, config, wanted).map_err(Failure::Failed),
        }
    }

    fn python(name: &str, config: &PythonRewardConfig, wanted: &dyn Fn() -> bool) -> Result<Self, Failure> {
        let (file, function) = (&config.file, &config.function);
        let opening = json!({"file": file, "name": function, "kwargs": config.kwargs, "arguments": config.arguments});
        let name = format!("reward `{name}`");
        let started = Process::python(&config.python, SCRIPT, &name, (file, &opening), config.timeout, wanted);
        let (process, line) = started.map_err(Failure::Failed)?;
        let (protocol, modules) = Protocol::of_function(&line)?;
        Ok(Self { process, protocol, next: 0, modules })
    }

    fn command(name: &str, config: &CommandRewardConfig, wanted: &dyn Fn() -> bool) -> Result<Self, String> {
        let program = &config.command[0];
        let mut command = Command::new(program);
        command.args(&config.command[1..]);
        if let Some(folder) = &config.folder {
            command.current_dir(folder);
        }
        let process = Process::start(&mut command, &format!("reward `{name}`"))
            .map_err(|e| format!("cannot run `{program}`: {e}"))?;
        match process.line(Instant::now() + STARTUP_TIMEOUT, wanted) {
            Err(Silence::TimedOut) => Ok(Self { process, protocol: Protocol::Lines, next: 0, modules: Vec::new() }),
            Ok(line) => Err(format!("it wrote {:?} before it was asked", line.trim_end())),
            Err(silence) => Err(failure(process, &silence, STARTUP_TIMEOUT)),
        }
    }

    /// Files of the user's modules that it has imported since the last call.
    pub fn take_modules(&mut self) -> Vec<PathBuf> {
        std::mem::take(&mut self.modules)
    }

    /// Scores the completions of a job before a timeout. After a failure of the process there is no worker left.
    pub fn score(
        mut self,
        job: &Job,
        timeout: Duration,
        wanted: &dyn Fn() -> bool,
    ) -> (Option<Self>, Vec<ProgramResult>) {
        let deadline = Instant::now() + timeout;
        let results = match self.protocol {
            Protocol::Lines => self.by_lines(job, deadline, wanted),
            _ => self.by_call(job, deadline, wanted),
        };
        match results {
            Ok(results) => {
                let stderr = self.process.stderr();
                let explain = |failure: Failure| failure.map(|reason| with_stderr(reason, &stderr));
                (Some(self), results.into_iter().map(|result| result.map_err(explain)).collect())
            }
            Err(silence) => {
                // the user writes a command's answers, but not those of a function's worker
                let is_user_error = matches!((&silence, &self.protocol), (Silence::Unreadable(_), Protocol::Lines));
                let failed = if is_user_error { Failure::Misused } else { Failure::Failed };
                let reason = failure(self.process, &silence, timeout);
                (None, vec![Err(failed(reason)); job.samples.len()])
            }
        }
    }

    /// One line for all of the completions, one back.
    fn by_call(
        &mut self,
        job: &Job,
        deadline: Instant,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<ProgramResult>, Silence> {
        let id = self.next;
        self.next += 1;
        let samples: Vec<_> = job.samples.iter().map(|&at| &job.call.samples[at]).collect();
        let request = json!({"id": id, "samples": samples, "trainer_state": job.call.trainer_state});
        self.process.send(format!("{}\n", to_text(&request)));
        let line = self.process.line(deadline, wanted)?;
        let (results, modules) = function_reply(&line, id, samples.len()).map_err(Silence::Unreadable)?;
        self.modules.extend(modules);
        Ok(results)
    }

    /// A line for each of the completions, and one back, in any order.
    fn by_lines(
        &mut self,
        job: &Job,
        deadline: Instant,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<ProgramResult>, Silence> {
        let first = self.next;
        self.next += job.samples.len() as u64;
        let numbered = job.samples.iter().zip(first..);
        self.process.send(numbered.map(|(&at, id)| command_line(id, &job.call.samples[at])).collect());
        let mut results: Vec<Option<ProgramResult>> = vec![None; job.samples.len()];
        for _ in &job.samples {
            let line = self.process.line(deadline, wanted)?;
            let (id, result) = command_reply(&line).map_err(Silence::Unreadable)?;
            let place = id.checked_sub(first).map(|at| at as usize);
            match place.and_then(|at| results.get_mut(at)) {
                Some(place @ None) => *place = Some(result),
                _ => {
                    let reason = format!("it answered id {id}, which it was not asked, or twice");
                    return Err(Silence::Unreadable(reason));
                }
            }
        }
        Ok(results.into_iter().flatten().collect())
    }
}
