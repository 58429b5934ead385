//! Files by what they are: scripts, YAML, JSON, Python.

use super::entry::{Entry, Environment};
use super::error::ImportError;
use super::{python, shell, yaml};

/// A file of another engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Its name, for messages; the ending says what it is: `.sh`, `.yaml`, `.yml`, `.json`, `.py`. With another, the text says it.
    pub name: String,
    /// Its text.
    pub text: String,
}

impl SourceFile {
    /// A file with its text.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            text: text.into(),
        }
    }

    /// What the file says.
    pub(super) fn entries(&self, environment: Environment) -> Result<Vec<Entry>, ImportError> {
        let (name, text) = (&self.name, &self.text);
        if text.len() > yaml::LARGEST {
            return Err(ImportError::at(
                name,
                None,
                format!(
                    "has {} bytes, and a configuration has at most {}; is this the right file?",
                    text.len(),
                    yaml::LARGEST
                ),
            ));
        }
        let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
        match ending.to_ascii_lowercase().as_str() {
            "sh" | "bash" | "slurm" | "sbatch" => shell::entries(name, text, environment),
            "yaml" | "yml" => yaml::entries(name, text),
            "json" => yaml::json_entries(name, text),
            "py" => python::entries(name, text),
            _ => self.guessed(environment),
        }
    }

    /// A file whose name does not say what it is.
    fn guessed(&self, environment: Environment) -> Result<Vec<Entry>, ImportError> {
        let (name, text) = (&self.name, &self.text);
        let first = text.trim_start();
        let has = |part: &str| text.contains(part);
        if first.starts_with('{') {
            yaml::json_entries(name, text)
        } else if ["GRPOConfig(", "RLOOConfig(", "PPOConfig("]
            .iter()
            .any(|call| has(call))
        {
            python::entries(name, text)
        } else if first.starts_with("#!") || has("python") || shell::looks_like_overrides(text) {
            shell::entries(name, text, environment)
        } else {
            yaml::entries(name, text)
        }
    }
}
