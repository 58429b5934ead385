//! The engines whose files are read.

use super::assembly::Assembly;
use super::entry::PROGRAM;
use super::error::ImportError;
use super::facts::Facts;
use super::rules::{Functions, Rules};
use super::{common, grpo_guide, nemo, trl, verl};
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

/// An engine whose configurations can be imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// verl: YAML and Hydra overrides.
    Verl,
    /// TRL: `GRPOConfig`, `RLOOConfig`, `PPOConfig` as YAML, JSON, flags or Python.
    Trl,
    /// `NeMo RL`: YAML.
    Nemo,
    /// The names of the guide to GRPO's memory: `batch_size`, `group_size`, ….
    GrpoGuide,
}

/// The rules of every engine, in the order of [`Engine::ALL`].
static RULES: LazyLock<[Rules; 4]> = LazyLock::new(|| Engine::ALL.map(Engine::read));

impl Engine {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Verl, Self::Trl, Self::Nemo, Self::GrpoGuide];

    /// Its spelling on the command line, and its name in prose.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Verl => ("verl", "verl"),
            Self::Trl => ("trl", "TRL"),
            Self::Nemo => ("nemo", "NeMo RL"),
            Self::GrpoGuide => ("grpo_guide", "the guide to GRPO's memory"),
        }
    }

    /// Its spelling on the command line.
    pub fn name(self) -> &'static str {
        self.names().0
    }

    /// Reads its tables, which are part of the program.
    fn read(self) -> Rules {
        let (tables, functions): (&[&str], &[Functions]) = match self {
            Self::Verl => (&[include_str!("../rules/verl.txt")], &verl::FUNCTIONS),
            Self::Trl => (&[trl::refusal::TABLE, include_str!("../rules/trl.txt")], &trl::FUNCTIONS),
            Self::Nemo => (&[include_str!("../rules/nemo.txt")], &nemo::FUNCTIONS),
            Self::GrpoGuide => (&[include_str!("../rules/grpo_guide.txt")], &[grpo_guide::FUNCTIONS]),
        };
        let functions = [functions, &[common::FUNCTIONS]].concat();
        Rules::read(tables, &functions).unwrap_or_else(|why| panic!("the tables of {self}: {why}"))
    }

    /// Its rules by their names.
    pub(super) fn rules(self) -> &'static Rules {
        &RULES[self as usize]
    }

    /// Its defaults that differ from Firebrick's.
    pub(super) fn defaults(self, facts: &Facts) -> Vec<(String, Value)> {
        let mut defaults = self.rules().defaults(facts);
        if self == Self::Nemo {
            defaults.extend(nemo::defaults(facts));
        }
        defaults
    }

    /// Reason why the files' run is not imported, if it is not.
    pub(super) fn refusal(self, facts: &Facts) -> Option<String> {
        if self == Self::Trl { trl::refusal(facts) } else { self.rules().refusal(facts) }
    }

    /// Functions for settings that follow from several keys.
    pub(super) fn finishers(self) -> &'static [fn(&Facts, &mut Assembly)] {
        match self {
            Self::Verl => &[verl::finish],
            Self::Trl => &[trl::finish, trl::batches],
            Self::Nemo => &[nemo::finish],
            Self::GrpoGuide => &[],
        }
    }

    /// The engine of the program, or the one with the most matching keys.
    pub(super) fn detect(facts: &Facts) -> Result<Self, ImportError> {
        if facts.text(PROGRAM).is_some_and(|program| program.starts_with("verl.")) {
            return Ok(Self::Verl);
        }
        let known_keys = |engine: Self| {
            let keys = facts.keys().filter(|key| *key != PROGRAM);
            let names = keys.filter_map(|key| engine.rules().find(key));
            // a key by its name is worth two by their section
            names.map(|(name, _)| if name.ends_with("**") { 1 } else { 2 }).sum::<usize>()
        };
        // of equals the first
        match Self::ALL.into_iter().rev().max_by_key(|engine| known_keys(*engine)) {
            Some(engine) if known_keys(engine) > 0 => Ok(engine),
            _ => {
                let keys: Vec<&str> = facts.keys().take(3).collect();
                Err(ImportError::UnknownEngine(format!(
                    "no key of the files is one of verl, TRL or NeMo RL; the first keys are {}. To choose an engine \
                     anyway, pass --from verl, trl or nemo",
                    if keys.is_empty() { "none".to_owned() } else { keys.join(", ") }
                )))
            }
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names().1)
    }
}

impl FromStr for Engine {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let has_name = |engine: &Self| engine.name() == name.to_ascii_lowercase();
        Self::ALL.into_iter().find(has_name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name);
            format!("unknown engine {name:?}; known: {}", names.join(", "))
        })
    }
}
