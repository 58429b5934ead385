//! Files by what they are: scripts, YAML, JSON, Python.

use super::entry::{EnvironmentLookup, Reading, SourceLocation};
use super::error::ImportError;
use super::page::CodeBlock;
use super::shell::Script;
use super::source_file::{SourceFile, is_known};
use super::{page, python, shell, yaml};

/// The stack for a parser, in bytes; only what is used of it is memory.
const STACK: usize = 256 << 20;

impl SourceFile {
    /// What the file says. `files` are those that it may name.
    pub(super) fn read(&self, files: &[Self], environment: EnvironmentLookup) -> Result<Reading, ImportError> {
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
            return self.of_page(&blocks, files, environment);
        }
        if let Some(line) = self.line {
            let detail = "a line chooses among the code blocks of a page, and this file has none";
            return Err(ImportError::at(name, Some(line), detail));
        }
        read_as(&ending, &Script { name, text, files, environment })
    }

    /// The block of a page that has settings.
    fn of_page(
        &self,
        blocks: &[CodeBlock],
        files: &[Self],
        environment: EnvironmentLookup,
    ) -> Result<Reading, ImportError> {
        let read = |block: &CodeBlock| {
            let language = match block.language.trim_start_matches('.') {
                "shell" | "console" | "zsh" => "sh",
                "python" | "python3" => "py",
                other => other,
            };
            read_as(language, &Script { name: &self.name, text: &block.text, files, environment })
        };
        let has_settings = |block: &CodeBlock| {
            // JSON, YAML and Python of something else are no settings: their keys are in no engine's tables
            read(block).is_ok_and(|reading| reading.entries.iter().any(|own| is_known(&own.key)))
        };
        let block = page::chosen(&self.name, blocks, self.line, has_settings)?;
        let moved = |place: &mut SourceLocation| {
            place.line = place.line.map(|line| line + block.line);
        };
        let mut reading = read(&block).map_err(|error| match error {
            ImportError::Unreadable { mut place, detail } => {
                moved(&mut place);
                ImportError::Unreadable { place, detail }
            }
            other => other,
        })?;
        reading.entries.iter_mut().for_each(|entry| moved(&mut entry.place));
        reading.definitions.iter_mut().for_each(|(_, place)| moved(place));
        Ok(reading)
    }
}

/// A text by what its ending, or its block's language, says that it is.
fn read_as(kind: &str, script: &Script) -> Result<Reading, ImportError> {
    let (name, text) = (script.name, script.text);
    match kind {
        "sh" | "bash" | "slurm" | "sbatch" => deep(name, || shell::read(script)),
        "yaml" | "yml" => yaml::entries(name, text).map(Reading::from),
        "json" => yaml::json_entries(name, text).map(Reading::from),
        "py" => deep(name, || python::read(name, text, script.environment)),
        _ => read_as(guessed(text), script),
    }
}

/// What a text is of which nothing says so.
fn guessed(text: &str) -> &'static str {
    let first = text.trim_start();
    let has = |part: &str| text.contains(part);
    if first.starts_with('{') {
        "json"
    } else if ["GRPOConfig(", "RLOOConfig(", "PPOConfig("].iter().any(|call| has(call)) {
        "py"
    } else if first.starts_with("#!") || has("python") || shell::looks_like_overrides(text) {
        "sh"
    } else {
        "yaml"
    }
}

/// Reads on a stack that is deep enough for the grammars' parsers.
fn deep(file: &str, read: impl FnOnce() -> Result<Reading, ImportError> + Send) -> Result<Reading, ImportError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, read);
        match thread.map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(reading)) => reading,
            Ok(Err(_)) => Err(ImportError::at(file, None, "cannot be parsed: the parser panicked; please report it")),
            Err(error) => Err(ImportError::at(file, None, format!("no thread to read it in: {error}"))),
        }
    })
}
