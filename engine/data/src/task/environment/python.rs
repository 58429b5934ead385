//! Environments that are objects of a Python class.

use super::config::PythonEnvironmentConfig;
use super::session::{Abilities, Session, gone};
use super::{Environment, EnvironmentError, Environments, Observation, Turn};
use crate::task::{Example, TOOLS, TaskError, workers};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The environments of a class, in processes of `python3` or what is set. A process that dies, hangs or answers
/// nonsense is ended, and another one takes its place; all rollouts that had an environment in it begin again.
#[derive(Debug)]
pub struct PythonEnvironments {
    abilities: Abilities,
    sessions: Vec<Arc<Mutex<Session>>>,
    /// Whether a reward function looks at the objects.
    keeps: Arc<AtomicBool>,
}

impl PythonEnvironments {
    /// Starts the first process, which says what tools there are; the others are started when they are needed.
    ///
    /// # Errors
    /// `TaskError::Config` for settings out of range, and where the process does not start or the class cannot be used.
    pub fn open(config: &PythonEnvironmentConfig) -> Result<Self, TaskError> {
        workers::check(config.workers, config.timeout, "task.environment")?;
        let mut first = Session::new(config);
        let abilities = first.ready().map_err(|error| {
            let detail = format!("`{}` of {}: {error}", config.class, config.file.display());
            TaskError::config("task.environment", detail)
        })?;
        let Some(abilities) = abilities else { unreachable!("a new session was not started") };
        let others = (1..config.workers).map(|_| Session::new(config));
        let sessions = std::iter::once(first).chain(others);
        Ok(Self { abilities, sessions: sessions.map(|own| Arc::new(Mutex::new(own))).collect(), keeps: Arc::default() })
    }
}

impl PythonEnvironments {
    /// Whether the class has `get_reward`.
    #[must_use]
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
            keeps: Arc::clone(&self.keeps),
            seed: None,
            own: None,
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
        let all = sessions.flat_map(|own| own.lock().unwrap_or_else(PoisonError::into_inner).modules.clone());
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn keep_objects(&self) -> bool {
        self.keeps.store(true, Ordering::Relaxed);
        true
    }
}

/// An object of the class.
struct PythonEnvironment {
    session: Arc<Mutex<Session>>,
    has_reward: bool,
    keeps: Arc<AtomicBool>,
    seed: Option<u32>,
    /// The process that it lives in, and its number there; none before it is reset.
    own: Option<(u64, u64)>,
}

impl PythonEnvironment {
    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, op: &str, more: (&str, &Value)) -> Result<Map<String, Value>, EnvironmentError> {
        let mut session = self.session();
        match self.own {
            Some((process, number)) if process == session.started => session.ask(number, op, more),
            _ => Err(gone()),
        }
    }

    fn close(&mut self) {
        if let Some((process, number)) = self.own.take() {
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
        let own = (session.started, session.number());
        drop(session);
        self.own = Some(own);
        // its own tools are for the template
        let row = example.fields.columns().filter(|(name, _)| *name != TOOLS);
        let row: Map<String, Value> = row.map(|(name, value)| (name.clone(), value.clone())).collect();
        let mut fields = self.ask("reset", ("start", &json!({"row": row, "seed": self.seed})))?;
        match fields.remove("text") {
            Some(Value::String(text)) => Ok(Some(text)),
            _ => Ok(None),
        }
    }

    fn step(&mut self, turn: &Turn) -> Result<Observation, EnvironmentError> {
        if turn.calls.is_empty() {
            return Ok(Observation::end());
        }
        // those that cannot be read are answered here, in their places
        let calls: Vec<_> = turn.calls.iter().flatten().collect();
        let mut said = Vec::new();
        if !calls.is_empty() {
            let fields = self.ask("call", ("calls", &json!(calls)))?;
            let results = fields.get("results").and_then(Value::as_array);
            said = results.cloned().unwrap_or_default();
        }
        if said.len() != calls.len() {
            let reason = format!("it answered {} of {} calls", said.len(), calls.len());
            return Err(EnvironmentError::new(reason));
        }
        let mut said = said.into_iter();
        let text = |value: &Value, key: &str| {
            let text = value.get(key).and_then(Value::as_str);
            text.map(str::to_owned)
        };
        Ok(Observation::of_calls(turn, |_| {
            let own = said.next().unwrap_or_default();
            match text(&own, "content") {
                Some(content) => Ok(content),
                None => Err(text(&own, "error").unwrap_or_default()),
            }
        }))
    }

    fn reward(&mut self) -> Result<Option<f64>, EnvironmentError> {
        if !self.has_reward {
            return Ok(None);
        }
        let fields = self.ask("reward", ("of", &Value::Null))?;
        Ok(fields.get("reward").and_then(Value::as_f64))
    }

    fn object(&mut self) -> Result<Option<Value>, EnvironmentError> {
        if !self.keeps.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut fields = self.ask("object", ("of", &Value::Null))?;
        Ok(fields.remove("object"))
    }
}

impl Drop for PythonEnvironment {
    fn drop(&mut self) {
        self.close();
    }
}
