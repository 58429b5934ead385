//! Readers of files by format: scripts, YAML, JSON, Python.

use super::common::texts;
use super::entry::{EnvironmentLookup, ParsedSource, SourceLocation, SourceValue};
use super::error::{ImportError, ImportResult};
use super::page::CodeBlock;
use super::shell::Script;
use super::source_file::{SourceFile, is_known};
use super::{page, python, shell, yaml};
use firebrick_spec::file::{MAX_CONFIG_BYTES, read_text};
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

/// Stack size of a parser, in bytes; the system allocates only the used part.
const PARSER_STACK_BYTES: usize = 256 << 20;

impl SourceFile {
    /// Parses the file. `files` are those that it may name.
    pub(super) fn read(&self, files: &[Self], environment: EnvironmentLookup) -> ImportResult<ParsedSource> {
        let (name, text) = (&self.name, &self.text);
        if text.len() > yaml::MAX_BYTES {
            return Err(ImportError::at(
                name,
                None,
                format!(
                    "has {} bytes, and a configuration has at most {}; is this the right file?",
                    text.len(),
                    yaml::MAX_BYTES
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
            return self.read_page(&blocks, files, environment);
        }
        if let Some(line) = self.line {
            let detail = "a line chooses among the code blocks of a page, and this file has none";
            return Err(ImportError::at(name, Some(line), detail));
        }
        read_as(&ending, &Script { name, text, files, environment })
    }

    /// Parses the block of a page that has settings.
    fn read_page(
        &self,
        blocks: &[CodeBlock],
        files: &[Self],
        environment: EnvironmentLookup,
    ) -> ImportResult<ParsedSource> {
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
            read(block).is_ok_and(|reading| reading.entries.iter().any(|entry| is_known(&entry.key)))
        };
        let block = page::select(&self.name, blocks, self.line, has_settings)?;
        let move_line = |place: &mut SourceLocation| {
            place.line = place.line.map(|line| line + block.line);
        };
        let mut reading = read(&block).map_err(|error| match error {
            ImportError::Unreadable { mut place, detail } => {
                move_line(&mut place);
                ImportError::Unreadable { place, detail }
            }
            other => other,
        })?;
        reading.entries.iter_mut().for_each(|entry| move_line(&mut entry.place));
        reading.definitions.iter_mut().for_each(|(_, place)| move_line(place));
        Ok(reading)
    }
}

/// Parses a text by its file ending or its block's language.
fn read_as(kind: &str, script: &Script) -> ImportResult<ParsedSource> {
    let (name, text) = (script.name, script.text);
    match kind {
        "sh" | "bash" | "slurm" | "sbatch" => with_deep_stack(name, || shell::read(script)),
        "yaml" | "yml" => layered(script, &[name]),
        "json" => yaml::json_entries(name, text).map(ParsedSource::from),
        "py" => with_deep_stack(name, || python::read(name, text, script.environment)),
        _ => read_as(guess_format(text), script),
    }
}

/// Parses a YAML file on top of the files that its `defaults` name with their endings, as `NeMo RL` does: each
/// overrides the one before, from the file's folder. `above` are the files that led here.
fn layered(script: &Script, above: &[&str]) -> ImportResult<ParsedSource> {
    let entries = yaml::entries(script.name, script.text)?;
    let mut reading = ParsedSource::default();
    for entry in entries.iter().filter(|entry| entry.key == "defaults") {
        let SourceValue::Known(value) = &entry.value else { continue };
        let error = |detail: String| ImportError::at(script.name, entry.place.line, detail);
        let is_file = |name: &&str| matches!(Path::new(name).extension().and_then(OsStr::to_str), Some("yaml" | "yml"));
        for name in texts(value).into_iter().filter(is_file) {
            let base = find_file(script, name).ok_or_else(|| {
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
    reading.entries.extend(entries);
    Ok(reading)
}

/// Finds a file that another names: among the inputs by path, in the other's folder, or among the inputs by name.
fn find_file(script: &Script, name: &str) -> Option<SourceFile> {
    let mut path = PathBuf::new();
    for part in Path::new(script.name).parent().unwrap_or(Path::new("")).join(name).components() {
        match part {
            Component::ParentDir if path.file_name().is_some() => drop(path.pop()),
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    let find = |is_match: &dyn Fn(&Path) -> bool| {
        script.files.iter().find(|file| file.name != script.name && is_match(Path::new(&file.name))).cloned()
    };
    let by_path = find(&|file| file == path);
    let read = || read_text(&path, MAX_CONFIG_BYTES).ok();
    let on_disk = || read().map(|text| SourceFile::new(path.display().to_string(), text));
    by_path.or_else(on_disk).or_else(|| find(&|file| file.file_name() == path.file_name()))
}

/// Guesses the format of a text without a telling name.
fn guess_format(text: &str) -> &'static str {
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

/// Parses on a thread with a stack deep enough for the grammars' parsers.
fn with_deep_stack(file: &str, read: impl FnOnce() -> ImportResult<ParsedSource> + Send) -> ImportResult<ParsedSource> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(PARSER_STACK_BYTES).spawn_scoped(scope, read);
        match thread.map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(reading)) => reading,
            Ok(Err(_)) => Err(ImportError::at(file, None, "cannot be parsed: the parser panicked; please report it")),
            Err(error) => Err(ImportError::at(file, None, format!("no thread to read it in: {error}"))),
        }
    })
}
