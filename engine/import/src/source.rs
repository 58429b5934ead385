//! Files by what they are: scripts, YAML, JSON, Python.

use super::common::texts;
use super::entry::{EnvironmentLookup, Given, Reading, SourceLocation};
use super::error::ImportError;
use super::page::CodeBlock;
use super::shell::Script;
use super::source_file::{SourceFile, is_known};
use super::{page, python, shell, yaml};
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

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
        "yaml" | "yml" => layered(script, &[name]),
        "json" => yaml::json_entries(name, text).map(Reading::from),
        "py" => deep(name, || python::read(name, text, script.environment)),
        _ => read_as(guessed(text), script),
    }
}

/// A YAML file over those that its `defaults` name with their endings, as `NeMo RL` lays them: each over the one
/// before, from the file's own folder. `above` are the files that led here.
fn layered(script: &Script, above: &[&str]) -> Result<Reading, ImportError> {
    let own = yaml::entries(script.name, script.text)?;
    let mut reading = Reading::default();
    for entry in own.iter().filter(|entry| entry.key == "defaults") {
        let Given::Value(value) = &entry.given else { continue };
        let error = |detail: String| ImportError::at(script.name, entry.place.line, detail);
        let is_file = |name: &&str| matches!(Path::new(name).extension().and_then(OsStr::to_str), Some("yaml" | "yml"));
        for name in texts(value).into_iter().filter(is_file) {
            let base = beside(script, name).ok_or_else(|| {
                error(format!(
                    "its settings are laid over {name}, which is neither in this file's folder nor among the files: \
                     import it with this file"
                ))
            })?;
            if above.contains(&base.name.as_str()) {
                return Err(error(format!("{name} leads back to itself")));
            }
            let under = Script { name: &base.name, text: &base.text, ..*script };
            let under = layered(&under, &[above, &[&base.name]].concat())?;
            reading.entries.extend(under.entries);
            reading.used.extend(under.used);
            reading.used.push(base.name);
        }
    }
    reading.entries.extend(own);
    Ok(reading)
}

/// The file that another names: of those given, by its path or at least its name, or in the other's folder.
fn beside(script: &Script, name: &str) -> Option<SourceFile> {
    let mut path = PathBuf::new();
    for part in Path::new(script.name).parent().unwrap_or(Path::new("")).join(name).components() {
        match part {
            Component::ParentDir if path.file_name().is_some() => drop(path.pop()),
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    let given = |same: &dyn Fn(&Path) -> bool| {
        script.files.iter().find(|file| file.name != script.name && same(Path::new(&file.name))).cloned()
    };
    let by_path = given(&|own| own == path);
    let read = || std::fs::read_to_string(&path).ok().filter(|text| text.len() <= yaml::LARGEST);
    let there = || read().map(|text| SourceFile::new(path.display().to_string(), text));
    by_path.or_else(there).or_else(|| given(&|own| own.file_name() == path.file_name()))
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
