//! Files by what they are: scripts, YAML, JSON, Python.

use super::engine::Engine;
use super::entry::{Entry, EnvironmentLookup, SourceLocation};
use super::error::ImportError;
use super::key_mapping::rule;
use super::page::CodeBlock;
use super::{page, python, shell, yaml};

/// A file of another engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Of a page with several code blocks: a line of the one that is meant, from 1.
    pub line: Option<usize>,
    /// Its name, for messages; the ending says what it is: `.sh`, `.yaml`, `.yml`, `.json`, `.py`. With another, the
    /// text says it.
    pub name: String,
    /// Its text.
    pub text: String,
}

impl SourceFile {
    /// A file with its text.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { line: None, name: name.into(), text: text.into() }
    }

    /// The code block of a page that has a line, counted from 1.
    #[must_use]
    pub fn at_line(mut self, line: usize) -> Self {
        self.line = Some(line);
        self
    }

    /// What the file says.
    pub(super) fn entries(&self, environment: EnvironmentLookup) -> Result<Vec<Entry>, ImportError> {
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
        let ending = ending.to_ascii_lowercase();
        let blocks = match ending.as_str() {
            "md" | "markdown" | "rst" | "txt" | "mdx" | "" => page::blocks(text),
            _ => Vec::new(),
        };
        if !blocks.is_empty() {
            return self.of_page(&blocks, environment);
        }
        if let Some(line) = self.line {
            let detail = "a line chooses among the code blocks of a page, and this file has none";
            return Err(ImportError::at(name, Some(line), detail));
        }
        read_as(&ending, name, text, environment)
    }

    /// The block of a page that has settings.
    fn of_page(&self, blocks: &[CodeBlock], environment: EnvironmentLookup) -> Result<Vec<Entry>, ImportError> {
        let read = |block: &CodeBlock| {
            let language = match block.language.trim_start_matches('.') {
                "shell" | "console" | "zsh" => "sh",
                "python" | "python3" => "py",
                other => other,
            };
            read_as(language, &self.name, &block.text, environment)
        };
        let has_settings = |block: &CodeBlock| {
            // JSON, YAML and Python of something else are no settings: their keys are in no engine's tables
            read(block).is_ok_and(|entries| entries.iter().any(|own| is_known(&own.key)))
        };
        let block = page::chosen(&self.name, blocks, self.line, has_settings)?;
        let moved = |place: &mut SourceLocation| {
            place.line = place.line.map(|line| line + block.line);
        };
        let mut entries = read(&block).map_err(|error| match error {
            ImportError::Unreadable { mut place, detail } => {
                moved(&mut place);
                ImportError::Unreadable { place, detail }
            }
            other => other,
        })?;
        for entry in &mut entries {
            moved(&mut entry.place);
        }
        Ok(entries)
    }
}

/// Whether an engine has a key of that name.
fn is_known(key: &str) -> bool {
    let of = |engine: &Engine| rule(engine.tables(), key).is_some();
    Engine::ALL.iter().any(of)
}

/// A text by what its ending, or its block's language, says that it is.
fn read_as(kind: &str, name: &str, text: &str, environment: EnvironmentLookup) -> Result<Vec<Entry>, ImportError> {
    match kind {
        "sh" | "bash" | "slurm" | "sbatch" => shell::entries(name, text, environment),
        "yaml" | "yml" => yaml::entries(name, text),
        "json" => yaml::json_entries(name, text),
        "py" => python::entries(name, text),
        _ => guessed(name, text, environment),
    }
}

/// A text of which nothing says what it is.
fn guessed(name: &str, text: &str, environment: EnvironmentLookup) -> Result<Vec<Entry>, ImportError> {
    let first = text.trim_start();
    let has = |part: &str| text.contains(part);
    if first.starts_with('{') {
        yaml::json_entries(name, text)
    } else if ["GRPOConfig(", "RLOOConfig(", "PPOConfig("].iter().any(|call| has(call)) {
        python::entries(name, text)
    } else if first.starts_with("#!") || has("python") || shell::looks_like_overrides(text) {
        shell::entries(name, text, environment)
    } else {
        yaml::entries(name, text)
    }
}
