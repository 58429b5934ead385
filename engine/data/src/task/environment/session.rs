//! A process of Python environments: its requests and failures.

use super::EnvironmentError;
use super::config::PythonEnvironmentConfig;
use crate::process::{Opening, Process, Silence, failure, with_stderr};
use firebrick_spec::json::to_text;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The Python program of environments.
const SCRIPT: &str = include_str!("session.py");

/// Properties of a class.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Abilities {
    /// JSON schemas of its tools.
    pub tools: Value,
    /// True if it has `get_reward`.
    pub has_reward: bool,
    /// Files of the user's imported modules.
    #[serde(default)]
    pub modules: Vec<PathBuf>,
}

/// A sequence of processes, each until its first failure.
#[derive(Debug)]
pub(super) struct Session {
    config: PythonEnvironmentConfig,
    process: Option<Process>,
    /// Number of the running process. Environments of earlier ones are lost.
    pub started: u64,
    requests: u64,
    environments: u64,
    /// Files of the user's imported modules.
    pub modules: BTreeSet<PathBuf>,
}

impl Session {
    pub fn new(config: &PythonEnvironmentConfig) -> Self {
        let config = config.clone();
        Self { config, process: None, started: 0, requests: 0, environments: 0, modules: BTreeSet::new() }
    }

    /// Starts the process if none runs; then it returns the properties of the class.
    pub fn ready(&mut self) -> Result<Option<Abilities>, EnvironmentError> {
        if self.process.is_some() {
            return Ok(None);
        }
        let config = &self.config;
        let name = format!("environment `{}`", config.class);
        let opening = json!({"file": config.file, "name": config.class, "kwargs": config.kwargs});
        let started =
            Process::python(&config.python, SCRIPT, &name, (&config.file, &opening), config.timeout, &|| true);
        let (process, line) = started.map_err(EnvironmentError::new)?;
        match serde_json::from_str::<Opening<Abilities>>(&line) {
            Ok(Opening::Ready(abilities)) => {
                self.process = Some(process);
                self.started += 1;
                self.modules.extend(abilities.modules.iter().cloned());
                Ok(Some(abilities))
            }
            Ok(Opening::Refused { refused }) => Err(EnvironmentError::of_code(refused)),
            Err(_) => Err(EnvironmentError::new(format!("it wrote {:?} before it was asked", line.trim_end()))),
        }
    }

    /// Returns the number of a new environment.
    pub fn number(&mut self) -> u64 {
        self.environments += 1;
        self.environments
    }

    /// Sends a request for an environment of the running process. A failure of the process ends it; an error of the
    /// code is Python's report.
    pub fn request(
        &mut self,
        environment: u64,
        op: &str,
        more: (&str, &Value),
    ) -> Result<Map<String, Value>, EnvironmentError> {
        let Some(process) = &self.process else {
            return Err(gone());
        };
        let id = self.requests;
        self.requests += 1;
        let message = json!({"id": id, "op": op, "environment": environment, more.0: more.1});
        process.send(format!("{}\n", to_text(&message)));
        let time = Duration::from_secs_f64(self.config.timeout);
        let answer = process
            .line(Instant::now() + time, &|| true)
            .and_then(|line| reply(&line, id).map_err(Silence::Unreadable));
        match answer {
            Ok(Ok(mut fields)) => {
                let new = fields.remove("modules").and_then(|new| serde_json::from_value::<Vec<PathBuf>>(new).ok());
                self.modules.extend(new.unwrap_or_default());
                Ok(fields)
            }
            Ok(Err(reason)) => {
                let stderr = process.stderr();
                Err(EnvironmentError::of_code(with_stderr(reason, &stderr)))
            }
            Err(silence) => {
                let reason = self.process.take().map(|process| failure(process, &silence, time));
                Err(EnvironmentError::new(reason.unwrap_or_default()))
            }
        }
    }

    /// Drops an environment of the running process.
    pub fn close(&self, environment: u64) {
        if let Some(process) = &self.process {
            let request = json!({"id": 0, "op": "close", "environment": environment});
            process.send(format!("{request}\n"));
        }
    }
}

/// The error of an environment whose process ended with another one.
pub(super) fn gone() -> EnvironmentError {
    EnvironmentError { own: false, ..EnvironmentError::new("its process ended while another environment was asked") }
}

/// Reads a line as an answer, for fuzz targets.
#[doc(hidden)]
pub fn read_reply(line: &str) {
    let _ = (serde_json::from_str::<Opening<Abilities>>(line), reply(line, 0));
}

/// The fields of an answer, or Python's exception; an error if the line does not answer the request.
fn reply(line: &str, id: u64) -> Result<Result<Map<String, Value>, String>, String> {
    let nonsense = || format!("it answered {:?}", line.chars().take(200).collect::<String>());
    let Ok(Value::Object(mut fields)) = serde_json::from_str(line) else {
        return Err(nonsense());
    };
    if fields.remove("id") != Some(json!(id)) {
        return Err(nonsense());
    }
    Ok(match fields.remove("error") {
        Some(Value::String(reason)) => Err(reason),
        Some(_) => return Err(nonsense()),
        None => Ok(fields),
    })
}
