//! Environments that are objects of a Python class.

use super::config::PythonEnvironmentConfig;
use super::session::{Abilities, Session, gone};
use super::{Environment, EnvironmentError, Environments, Observation, Turn};
use crate::task::{Example, TOOLS, TaskError};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The environments of a class, in Python processes. A process that dies, hangs or answers
/// nonsense is replaced; all rollouts with an environment in it start again.
#[derive(Debug)]
pub struct PythonEnvironments {
    abilities: Abilities,
    sessions: Vec<Arc<Mutex<Session>>>,
    /// True if a reward function uses the objects.
    keeps_objects: Arc<AtomicBool>,
}

impl PythonEnvironments {
    /// Starts the first process, which lists the tools; the others start when they are needed.
    ///
    /// # Errors
    /// `TaskError::Config` for settings out of range, a process that does not start, or an unusable class.
    pub fn open(config: &PythonEnvironmentConfig) -> Result<Self, TaskError> {
        TaskError::check("task.environment", config)?;
        let mut first = Session::new(config);
        let abilities = first.ready().map_err(|error| {
            let detail = format!("`{}` of {}: {error}", config.class, config.file.display());
            TaskError::config("task.environment", detail)
        })?;
        let Some(abilities) = abilities else { unreachable!("a new session was not started") };
        let others = (1..config.workers).map(|_| Session::new(config));
        let sessions = std::iter::once(first).chain(others);
        Ok(Self {
            abilities,
            sessions: sessions.map(|session| Arc::new(Mutex::new(session))).collect(),
            keeps_objects: Arc::default(),
        })
    }
    /// Returns true if the class has `get_reward`.
    pub fn has_reward(&self) -> bool {
        self.abilities.has_reward
    }
}

impl Environments for PythonEnvironments {
    fn tools(&self) -> &Value {
        &self.abilities.tools
    }

    fn make(&self, worker: usize) -> Box<dyn Environment> {
        Box::new(PythonEnvironment {
            session: Arc::clone(&self.sessions[worker % self.sessions.len()]),
            has_reward: self.abilities.has_reward,
            keeps_objects: Arc::clone(&self.keeps_objects),
            seed: None,
            handle: None,
        })
    }

    fn workers(&self) -> usize {
        self.sessions.len()
    }

    fn adds_to_prompts(&self) -> bool {
        true
    }

    fn modules(&self) -> Vec<PathBuf> {
        let sessions = self.sessions.iter();
        let modules =
            sessions.flat_map(|session| session.lock().unwrap_or_else(PoisonError::into_inner).modules.clone());
        modules.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn keep_objects(&self) -> bool {
        self.keeps_objects.store(true, Ordering::Relaxed);
        true
    }
}

/// An object of the class.
struct PythonEnvironment {
    session: Arc<Mutex<Session>>,
    has_reward: bool,
    keeps_objects: Arc<AtomicBool>,
    seed: Option<u32>,
    /// Its process and its number there; `None` before the first reset.
    handle: Option<(u64, u64)>,
}

impl PythonEnvironment {
    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self, op: &str, more: (&str, &Value)) -> Result<Map<String, Value>, EnvironmentError> {
        let mut session = self.session();
        match self.handle {
            Some((process, number)) if process == session.started => session.request(number, op, more),
            _ => Err(gone()),
        }
    }

    fn close(&mut self) {
        if let Some((process, number)) = self.handle.take() {
            let session = self.session();
            if process == session.started {
                session.close(number);
            }
        }
    }
}

impl Environment for PythonEnvironment {
    fn seed(&mut self, seed: u32) {
        self.seed = Some(seed);
    }

    fn reset(&mut self, example: &Example) -> Result<Option<String>, EnvironmentError> {
        self.close();
        let mut session = self.session();
        session.ready()?;
        let handle = (session.started, session.number());
        drop(session);
        self.handle = Some(handle);
        // the row's tools are for the template
        let row = example.fields.columns().filter(|(name, _)| *name != TOOLS);
        let row: Map<String, Value> = row.map(|(name, value)| (name.clone(), value.clone())).collect();
        let mut fields = self.request("reset", ("start", &json!({"row": row, "seed": self.seed})))?;
        match fields.remove("text") {
            Some(Value::String(text)) => Ok(Some(text)),
            _ => Ok(None),
        }
    }

    fn step(&mut self, turn: &Turn) -> Result<Observation, EnvironmentError> {
        if turn.calls.is_empty() {
            return Ok(Observation::end());
        }
        // malformed calls are answered here, in their places
        let calls: Vec<_> = turn.calls.iter().flatten().collect();
        let mut results = Vec::new();
        if !calls.is_empty() {
            let fields = self.request("call", ("calls", &json!(calls)))?;
            results = fields.get("results").and_then(Value::as_array).cloned().unwrap_or_default();
        }
        if results.len() != calls.len() {
            let reason = format!("it answered {} of {} calls", results.len(), calls.len());
            return Err(EnvironmentError::new(reason));
        }
        let mut results = results.into_iter();
        let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        Ok(Observation::of_calls(turn, |_| {
            let result = results.next().unwrap_or_default();
            text(&result, "content").ok_or_else(|| text(&result, "error").unwrap_or_default())
        }))
    }

    fn reward(&mut self) -> Result<Option<f64>, EnvironmentError> {
        if !self.has_reward {
            return Ok(None);
        }
        let fields = self.request("reward", ("of", &Value::Null))?;
        Ok(fields.get("reward").and_then(Value::as_f64))
    }

    fn object(&mut self) -> Result<Option<Value>, EnvironmentError> {
        if !self.keeps_objects.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut fields = self.request("object", ("of", &Value::Null))?;
        Ok(fields.remove("object"))
    }
}

impl Drop for PythonEnvironment {
    fn drop(&mut self) {
        self.close();
    }
}
