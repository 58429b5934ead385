//! Inputs of a run: its files at the start, which are rows, weights, tokenizers, templates, programs and their modules.
//! A resumed run compares them, because with other files it would be another run.

use super::{RunDir, read_if_there};
use crate::config::{Mode, RunConfig, is_template};
use crate::hub::{ModelFiles, model_folder};
use crate::task::{EnvironmentConfig, RewardKind, TaskConfig};
use crate::{Error, Result};
use firebrick_backends::heartbeat::beat;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The file in the run folder.
const INPUTS: &str = "inputs.json";

/// Largest file of weights that is read completely. Of a larger one, a [`BLOCK`] per [`STRIDE`] and the last one are
/// read: training changes every matrix, and matrices are larger.
const MAX_WHOLE: u64 = 64 << 20;
const BLOCK: u64 = 64 << 10;
const STRIDE: u64 = 4 << 20;

/// Bytes per read.
const BUFFER: usize = 1 << 20;

/// End of the key of a program's modules, in place of [`FILE`].
const MODULES: &str = ".modules";
const FILE: &str = ".file";

/// Files by the key of the configuration that names them; modules by the key of their program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Inputs(BTreeMap<String, Vec<InputFile>>);

/// A file at the start.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
struct InputFile {
    path: PathBuf,
    bytes: u64,
    /// Checksum of its bytes; of large weights, of a sample.
    crc32c: u32,
}

impl Inputs {
    /// Reads the current inputs of a configuration in a mode. `rows` are files of rows with the keys that name them.
    ///
    /// # Errors
    /// `Error::Io` if a file cannot be read, `Error::Hub` if a model's folder cannot be fetched.
    pub fn read(config: &RunConfig, mode: Mode, rows: Vec<(&'static str, PathBuf)>) -> Result<Self> {
        let mut named: Vec<(String, PathBuf)> = rows.into_iter().map(|(key, path)| (key.to_owned(), path)).collect();
        let models = [
            ("model.path", config.model.path.as_ref()),
            ("model.tokenizer", config.model.tokenizer.as_ref()),
            ("model.lora.path", config.model.lora.as_ref().and_then(|lora| lora.path.as_ref())),
            ("critic.model.path", config.critic.as_ref().and_then(|critic| critic.model.path.as_ref())),
        ];
        let used = |key: &str| mode == Mode::Rl || !key.starts_with("critic");
        for (key, path) in models.into_iter().filter(|(key, _)| used(key)) {
            if let Some(path) = path {
                // a tokenizer's folder has no weights to fetch
                let files = if key == "model.tokenizer" { ModelFiles::Tokenizer } else { ModelFiles::All };
                add_model(&mut named, key, &model_folder(path, files)?)?;
            }
        }
        // a template that is text is compared with the settings
        let template = config.model.chat_template.iter().filter(|template| !template.to_str().is_some_and(is_template));
        named.extend(template.map(|file| ("model.chat_template".to_owned(), file.clone())));
        if let Some(task) = &config.task {
            add_programs(&mut named, task)?;
        }
        let files: Vec<Result<(String, InputFile)>> =
            named.into_par_iter().map(|(key, path)| Ok((key, InputFile::read(path)?))).collect();
        let mut inputs = Self::default();
        for file in files {
            let (key, file) = file?;
            inputs.0.entry(key).or_default().push(file);
        }
        Ok(inputs)
    }

    /// Adds modules that programs have imported, by the key of the program (`task.rewards.0`). Returns true if one is
    /// new.
    ///
    /// # Errors
    /// `Error::Io` if a file cannot be read.
    pub fn add_modules(&mut self, modules: Vec<(String, Vec<PathBuf>)>) -> Result<bool> {
        let mut has_new = false;
        for (program, files) in modules {
            let known = self.0.entry(program + MODULES).or_default();
            for path in files.into_iter().filter(|path| path.is_file()) {
                if known.iter().all(|file| file.path != path) {
                    known.push(InputFile::read(path)?);
                    has_new = true;
                }
            }
            known.sort_by(|a, b| a.path.cmp(&b.path));
        }
        Ok(has_new)
    }

    /// Adds the existing modules that programs imported at their first calls in an earlier session, and would again.
    ///
    /// # Errors
    /// `Error::Io` if a file cannot be read.
    pub fn recall_modules(&mut self, earlier: &Self) -> Result<()> {
        for (key, files) in &earlier.0 {
            let Some(program) = key.strip_suffix(MODULES) else { continue };
            let file = format!("{program}{FILE}");
            let path = |inputs: &Self| Some(inputs.0.get(&file)?.first()?.path.clone());
            let Some((from, to)) = path(earlier).zip(path(self)) else { continue };
            let modules = files.iter().map(|module| rebased(&module.path, &from, &to)).collect();
            self.add_modules(vec![(program.to_owned(), modules)])?;
        }
        Ok(())
    }

    /// Keys whose files are equal in contents and order, whatever their paths.
    pub fn same(&self, now: &Self) -> BTreeSet<String> {
        let keys = self.0.iter().filter(|(key, before)| now.0.get(*key).is_some_and(|now| equal(key, before, now)));
        keys.map(|(key, _)| key.clone()).collect()
    }

    /// Unchanged files at other paths: each key with its first such file.
    pub fn moved(&self, now: &Self) -> Vec<String> {
        let moved = self.same(now).into_iter().filter_map(|key| {
            let mut pairs = self.0[&key].iter().zip(&now.0[&key]);
            let (before, now) = pairs.find(|(before, now)| before.path != now.path)?;
            Some(format!("{key} ({}, it was {})", now.path.display(), before.path.display()))
        });
        moved.collect()
    }

    /// The inputs in a run folder, if it has any.
    ///
    /// # Errors
    /// `Error::Io` if the file cannot be read, `Error::Resume` if it is damaged.
    pub fn kept(run: &RunDir) -> Result<Option<Self>> {
        let path = run.path().join(INPUTS);
        let Some(text) = read_if_there(run.path(), INPUTS)? else { return Ok(None) };
        let kept = serde_json::from_slice(&text);
        kept.map(Some).map_err(|e| Error::Resume {
            detail: format!("{e}; delete the file to continue without a comparison of inputs"),
            path,
        })
    }

    /// Writes the inputs into a run folder.
    ///
    /// # Errors
    /// `Error::Io` if the file cannot be written.
    pub fn keep(&self, run: &RunDir) -> Result<()> {
        run.write_json(INPUTS, self)
    }

    /// Changes from these inputs to the current ones, except modules: each key with its files.
    pub fn changes(&self, now: &Self) -> Vec<String> {
        self.differing(now, |key| !key.ends_with(MODULES))
    }

    /// Changes of the modules of programs that both have.
    pub fn changed_modules(&self, now: &Self) -> Vec<String> {
        self.differing(now, |key| key.ends_with(MODULES) && self.0.contains_key(key) && now.0.contains_key(key))
    }

    fn differing(&self, now: &Self, is_compared: impl Fn(&str) -> bool) -> Vec<String> {
        let mut keys: Vec<&String> = self.0.keys().chain(now.0.keys()).collect();
        keys.sort_unstable();
        keys.dedup();
        let changes = keys.into_iter().filter(|key| is_compared(key)).filter_map(|key| {
            let [before, now] = [self, now].map(|inputs| inputs.0.get(key).map_or(&[][..], Vec::as_slice));
            (!equal(key, before, now)).then(|| format!("{key} ({})", differences(before, now).join(", ")))
        });
        changes.collect()
    }
}

/// Returns true if lists of files have the same contents in the same order. Files of models must also have the same
/// names.
fn equal(key: &str, before: &[InputFile], now: &[InputFile]) -> bool {
    let by_name = matches!(key.rsplit('.').next(), Some("path" | "tokenizer"));
    let mut pairs = before.iter().zip(now);
    before.len() == now.len()
        && pairs.all(|(a, b)| {
            a.bytes == b.bytes && a.crc32c == b.crc32c && (!by_name || a.path.file_name() == b.path.file_name())
        })
}

/// A path near `from`, moved with it to `to`: the path relative to a folder of `from`, in the corresponding folder of
/// `to`.
fn rebased(path: &Path, from: &Path, to: &Path) -> PathBuf {
    let (mut from, mut to) = (from, to);
    while from.file_name() == to.file_name() {
        let (Some(above), Some(other)) = (from.parent(), to.parent()) else { break };
        (from, to) = (above, other);
        if let Ok(rest) = path.strip_prefix(from)
            && from.file_name() != to.file_name()
        {
            return to.join(rest);
        }
    }
    path.to_owned()
}

/// Maximum parts of a path in a message.
const MAX_PARTS: usize = 64;

/// Differences of lists of files, by name, in their order.
fn differences(before: &[InputFile], now: &[InputFile]) -> Vec<String> {
    let depth =
        (1..=MAX_PARTS).find(|&depth| has_distinct_names(before, depth) && has_distinct_names(now, depth)).unwrap_or(1);
    let with = |files: &[InputFile], name: &str| files.iter().position(|file| file.name(depth) == name);
    let mut differences = Vec::new();
    for (at, file) in now.iter().enumerate() {
        let name = file.name(depth);
        match with(before, &name).map(|place| (place, &before[place])) {
            None => differences.push(format!("{name} is new")),
            Some((_, earlier)) if earlier.bytes != file.bytes => {
                differences.push(format!("{name} has {} bytes, it had {}", file.bytes, earlier.bytes));
            }
            Some((_, earlier)) if earlier.crc32c != file.crc32c => {
                differences.push(format!("{name} has other contents"));
            }
            Some((place, _)) if place != at && before.len() == now.len() => {
                differences.push(format!("{name} is in another place of the list"));
            }
            Some(_) => {}
        }
    }
    let gone = before.iter().filter(|file| with(now, &file.name(depth)).is_none());
    differences.extend(gone.map(|file| format!("{} is gone", file.name(depth))));
    if differences.is_empty() {
        // such as a file that is listed twice
        differences.push(format!("{} files, there were {}", now.len(), before.len()));
    }
    differences
}

/// Returns true if different files have different names of `depth` path parts.
fn has_distinct_names(files: &[InputFile], depth: usize) -> bool {
    let names: BTreeSet<String> = files.iter().map(|file| file.name(depth)).collect();
    let paths: BTreeSet<&Path> = files.iter().map(|file| file.path.as_path()).collect();
    let longest = paths.iter().map(|path| path.components().count()).max().unwrap_or(0);
    names.len() == paths.len() || depth >= longest
}

impl InputFile {
    fn read(path: PathBuf) -> Result<Self> {
        let read = || {
            let file = File::open(&path)?;
            let bytes = file.metadata()?.len();
            let sampled = bytes > MAX_WHOLE && path.extension().is_some_and(|ending| ending == "safetensors");
            let crc = if sampled { crc_of_sample(file, bytes)? } else { crc_of_all(file)? };
            Ok::<_, std::io::Error>((bytes, crc))
        };
        let (bytes, crc32c) = read().map_err(Error::io("read", &path))?;
        Ok(Self { path, bytes, crc32c })
    }

    /// The last parts of its path.
    fn name(&self, depth: usize) -> String {
        let parts: Vec<_> = self.path.components().collect();
        let last: PathBuf = parts[parts.len().saturating_sub(depth)..].iter().collect();
        last.display().to_string()
    }
}

fn crc_of_all(mut file: File) -> std::io::Result<u32> {
    let (mut buffer, mut crc) = (vec![0; BUFFER], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(crc),
            n => {
                beat();
                crc = crc32c::crc32c_append(crc, &buffer[..n]);
            }
        }
    }
}

fn crc_of_sample(mut file: File, bytes: u64) -> std::io::Result<u32> {
    let (mut buffer, mut crc) = (vec![0; BLOCK as usize], 0);
    let starts = (0..bytes / STRIDE).map(|block| block * STRIDE);
    for start in starts.chain([bytes - BLOCK]) {
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut buffer)?;
        crc = crc32c::crc32c_append(crc, &buffer);
    }
    Ok(crc)
}

/// Adds the files of a model's folder that determine its computation.
fn add_model(named: &mut Vec<(String, PathBuf)>, key: &str, folder: &Path) -> Result<()> {
    const NAMES: [&str; 5] = [
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "adapter_config.json",
    ];
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let path = entry.map_err(Error::io("read", folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let begins = |start: &str| name.starts_with(start);
        let weights = name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
        if path.is_file()
            && (weights || NAMES.contains(&name.as_str()) || begins("tokenizer") || begins("chat_template"))
        {
            files.push(path);
        }
    }
    files.sort();
    named.extend(files.into_iter().map(|path| (key.to_owned(), path)));
    Ok(())
}

/// Adds reward models, and files of reward functions and environments.
fn add_programs(named: &mut Vec<(String, PathBuf)>, task: &TaskConfig) -> Result<()> {
    let Some(rows) = task.rows() else { return Ok(()) };
    for (at, reward) in rows.rewards.iter().enumerate() {
        let key = |name: &str| format!("task.rewards.{at}.{name}");
        match &reward.kind {
            RewardKind::Model(model) => {
                add_model(named, &key("path"), &model_folder(&model.path, ModelFiles::All)?)?;
            }
            RewardKind::Python(python) => named.push((key("file"), python.file.clone())),
            RewardKind::Command(command) => {
                let folder = command.folder.clone().unwrap_or_default();
                let files = command.command.iter().map(|part| folder.join(part)).filter(|path| path.is_file());
                named.extend(files.map(|path| (key("command"), path)));
            }
            _ => {}
        }
    }
    if let Some(EnvironmentConfig::Python(python)) = &rows.environment {
        named.push(("task.environment.file".to_owned(), python.file.clone()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(folder: &Path, names: &[&str]) -> Inputs {
        let rows = names.iter().map(|name| ("task.train", folder.join(name))).collect();
        Inputs::read(&RunConfig::default(), Mode::Rl, rows).unwrap()
    }

    #[test]
    fn what_has_changed_is_named_by_key_and_file() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        for name in ["a.jsonl", "b.jsonl", "c.jsonl"] {
            write(name, "{\"q\": 1}\n");
        }
        let before = inputs(folder.path(), &["a.jsonl", "b.jsonl", "c.jsonl"]);
        assert!(before.changes(&before).is_empty());
        // the same contents in another folder are the same
        let moved = tempfile::tempdir().unwrap();
        for name in ["a.jsonl", "b.jsonl", "c.jsonl"] {
            std::fs::copy(folder.path().join(name), moved.path().join(name)).unwrap();
        }
        assert!(before.changes(&inputs(moved.path(), &["a.jsonl", "b.jsonl", "c.jsonl"])).is_empty());
        write("a.jsonl", "{\"q\": 2}\n");
        write("b.jsonl", "{\"q\": 1}\n{\"q\": 2}\n");
        write("d.jsonl", "{\"q\": 1}\n");
        let now = inputs(folder.path(), &["a.jsonl", "b.jsonl", "d.jsonl"]);
        assert_eq!(
            before.changes(&now),
            [
                "task.train (a.jsonl has other contents, b.jsonl has 18 bytes, it had 9, d.jsonl is new, c.jsonl is gone)"
            ]
        );
        write("a.jsonl", "{\"q\": 1}\n");
        write("b.jsonl", "{\"q\": 2}\n");
        let before = inputs(folder.path(), &["a.jsonl", "b.jsonl", "c.jsonl"]);
        let swapped = before.changes(&inputs(folder.path(), &["b.jsonl", "a.jsonl", "c.jsonl"]));
        assert!(swapped[0].contains("another place"), "{swapped:?}");
    }

    #[test]
    fn files_that_have_moved_or_have_other_names_are_the_same_and_those_of_a_model_need_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for (name, text) in [("a/x.jsonl", "1"), ("b/x.jsonl", "2"), ("c/y.jsonl", "1"), ("c/z.jsonl", "2")] {
            write(name, text);
        }
        // two files of one name
        let before = inputs(folder.path(), &["a/x.jsonl", "b/x.jsonl"]);
        assert!(before.changes(&before).is_empty() && before.moved(&before).is_empty());
        let moved = inputs(folder.path(), &["c/y.jsonl", "c/z.jsonl"]);
        assert!(before.changes(&moved).is_empty());
        assert_eq!(before.same(&moved).into_iter().collect::<Vec<_>>(), ["task.train"]);
        let messages = before.moved(&moved);
        let expected = |message: &str| message.contains("y.jsonl, it was ") && message.ends_with("x.jsonl)");
        assert!(messages.len() == 1 && expected(&messages[0]), "{messages:?}");
        write("b/x.jsonl", "3");
        let now = inputs(folder.path(), &["a/x.jsonl", "b/x.jsonl"]);
        assert_eq!(before.changes(&now), ["task.train (b/x.jsonl has other contents)"]);
        assert!(before.same(&now).is_empty() && before.moved(&now).is_empty());
        let twice = inputs(folder.path(), &["a/x.jsonl", "a/x.jsonl"]);
        let once = inputs(folder.path(), &["a/x.jsonl"]);
        assert_eq!(once.changes(&twice), ["task.train (2 files, there were 1)"]);
        let of_model = |name: &str| {
            let file = InputFile::read(folder.path().join(name)).unwrap();
            Inputs(BTreeMap::from([("model.path".to_owned(), vec![file])]))
        };
        assert!(of_model("a/x.jsonl").changes(&of_model("a/x.jsonl")).is_empty());
        let changes = of_model("a/x.jsonl").changes(&of_model("c/y.jsonl"));
        assert_eq!(changes, ["model.path (y.jsonl is new, x.jsonl is gone)"]);
    }

    #[test]
    fn modules_are_moved_with_their_program() {
        for (path, from, to, expected) in [
            ("/a/x/pkg/h.py", "/a/x/pkg/r.py", "/b/pkg/r.py", "/b/pkg/h.py"),
            ("/a/x/h.py", "/a/x/pkg/r.py", "/b/pkg/r.py", "/b/h.py"),
            ("/a/x/pkg/h.py", "/a/x/pkg/r.py", "/a/x/pkg/r.py", "/a/x/pkg/h.py"),
            ("/a/h.py", "/a/r.py", "/a/s.py", "/a/h.py"),
            ("/else/h.py", "/a/r.py", "/b/r.py", "/else/h.py"),
            ("/a/h.py", "r.py", "r.py", "/a/h.py"),
        ] {
            assert_eq!(rebased(Path::new(path), Path::new(from), Path::new(to)), Path::new(expected), "{path}");
        }
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a/r.py", "a/h.py", "a/late.py", "b/r.py", "b/h.py", "b/late.py"] {
            std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            std::fs::write(at(name), name.rsplit('/').next().unwrap()).unwrap();
        }
        let of = |file: &str, modules: &[&str]| {
            let file = InputFile::read(at(file)).unwrap();
            let mut inputs = Inputs(BTreeMap::from([("task.rewards.0.file".to_owned(), vec![file])]));
            let modules = modules.iter().map(|name| at(name)).collect();
            inputs.add_modules(vec![("task.rewards.0".to_owned(), modules)]).unwrap();
            inputs
        };
        let kept = of("a/r.py", &["a/h.py", "a/late.py"]);
        let mut now = of("b/r.py", &["b/h.py"]);
        assert_eq!(kept.changed_modules(&now), ["task.rewards.0.modules (late.py is gone)"]);
        now.recall_modules(&kept).unwrap();
        assert!(kept.changed_modules(&now).is_empty() && kept.changes(&now).is_empty());
        std::fs::write(at("b/late.py"), "other").unwrap();
        let mut now = of("b/r.py", &["b/h.py"]);
        now.recall_modules(&kept).unwrap();
        assert_eq!(kept.changed_modules(&now), ["task.rewards.0.modules (late.py has 5 bytes, it had 7)"]);
        // runs of earlier versions kept none
        assert!(inputs(folder.path(), &[]).changed_modules(&now).is_empty());
    }

    #[test]
    fn other_weights_in_a_large_file_are_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        // sparse: nothing of it is on the disk
        File::create(&path).unwrap().set_len(MAX_WHOLE + 3 * STRIDE + 5).unwrap();
        let before = InputFile::read(path.clone()).unwrap();
        for place in [0, MAX_WHOLE + STRIDE + 7, before.bytes - 1] {
            let mut bytes = File::options().write(true).open(&path).unwrap();
            bytes.seek(SeekFrom::Start(place)).unwrap();
            std::io::Write::write_all(&mut bytes, &[1]).unwrap();
            let now = InputFile::read(path.clone()).unwrap();
            assert!(now.bytes == before.bytes && now.crc32c != before.crc32c, "{place}");
            bytes.seek(SeekFrom::Start(place)).unwrap();
            std::io::Write::write_all(&mut bytes, &[0]).unwrap();
        }
        assert_eq!(InputFile::read(path).unwrap(), before);
    }
}
