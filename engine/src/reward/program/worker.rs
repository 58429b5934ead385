//! A worker: a process that scores, from its start to its first failure.

use super::pending::{Failure, ProgramResult};
use super::protocol::{Protocol, command_line, command_reply, function_reply};
use super::queue::Call;
use crate::process::{Process, Silence, failure, with_stderr};
use crate::task::{CommandRewardConfig, PythonRewardConfig, RewardProgram};
use firebrick_spec::json::to_text;
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// The program that calls a Python function.
const SCRIPT: &str = include_str!("worker.py");
/// Time that a command is watched for after its start: one that cannot work ends at once.
const WATCHED: Duration = Duration::from_millis(500);

/// A process that is ready to score.
#[derive(Debug)]
pub(super) struct Worker {
    process: Process,
    protocol: Protocol,
    /// Number of the next call, or of its first completion.
    next: u64,
    /// Files of the user's modules that it has imported, those that are known already apart.
    modules: Vec<PathBuf>,
}

impl Worker {
    /// Starts a worker and waits until it is ready; or says why it cannot be.
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
        match process.line(Instant::now() + WATCHED, wanted) {
            Err(Silence::TimedOut) => Ok(Self { process, protocol: Protocol::Lines, next: 0, modules: Vec::new() }),
            Ok(line) => Err(format!("it wrote {:?} before it was asked", line.trim_end())),
            Err(silence) => Err(failure(process, &silence, WATCHED)),
        }
    }

    /// How it is asked.
    pub fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    /// Files of the user's modules that it has imported since this was asked.
    pub fn take_modules(&mut self) -> Vec<PathBuf> {
        std::mem::take(&mut self.modules)
    }

    /// Scores some completions of a call, within a time. After a failure of the process, which it does not outlive,
    /// there is no worker left.
    pub fn score(
        mut self,
        call: &Call,
        samples: &[usize],
        time: Duration,
        wanted: &dyn Fn() -> bool,
    ) -> (Option<Self>, Vec<ProgramResult>) {
        let deadline = Instant::now() + time;
        let results = match self.protocol {
            Protocol::Lines => self.by_lines(call, samples, deadline, wanted),
            _ => self.by_call(call, samples, deadline, wanted),
        };
        match results {
            Ok(results) => {
                let written = self.process.stderr();
                let told = |failure: Failure| failure.map(|reason| with_stderr(reason, &written));
                (Some(self), results.into_iter().map(|result| result.map_err(told)).collect())
            }
            Err(silence) => {
                // what a command writes is what its user wrote; a function's answer is written by its worker
                let is_user_error = matches!((&silence, &self.protocol), (Silence::Unreadable(_), Protocol::Lines));
                let failed = if is_user_error { Failure::Misused } else { Failure::Failed };
                let reason = failure(self.process, &silence, time);
                (None, vec![Err(failed(reason)); samples.len()])
            }
        }
    }

    /// One line for all of the completions, one back.
    fn by_call(
        &mut self,
        call: &Call,
        samples: &[usize],
        deadline: Instant,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<ProgramResult>, Silence> {
        let id = self.next;
        self.next += 1;
        let own: Vec<_> = samples.iter().map(|&at| &call.samples[at]).collect();
        let request = json!({"id": id, "samples": own, "trainer_state": call.trainer_state});
        self.process.send(format!("{}\n", to_text(&request)));
        let line = self.process.line(deadline, wanted)?;
        let (results, modules) = function_reply(&line, id, samples.len()).map_err(Silence::Unreadable)?;
        self.modules.extend(modules);
        Ok(results)
    }

    /// A line for each of the completions, and one back, in whatever order.
    fn by_lines(
        &mut self,
        call: &Call,
        samples: &[usize],
        deadline: Instant,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<ProgramResult>, Silence> {
        let first = self.next;
        self.next += samples.len() as u64;
        let own = samples.iter().zip(first..);
        let lines = own.map(|(&at, id)| command_line(id, &call.samples[at]));
        self.process.send(lines.collect());
        let mut results: Vec<Option<ProgramResult>> = vec![None; samples.len()];
        for _ in samples {
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
