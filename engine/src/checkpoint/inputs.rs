//! The files that a run reads, as they were when it began: rows, weights, tokenizers, templates, programs. A run that
//! is resumed compares, because with other ones it would not be the run that it was.

use super::RunDir;
use crate::config::{Mode, RunConfig, is_template};
use crate::hub::{ModelFiles, model_folder};
use crate::task::{EnvironmentConfig, RewardKind, TaskConfig};
use crate::{Error, Result};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The file in the run folder.
const INPUTS: &str = "inputs.json";

/// Bytes of a file of weights up to which all of it is read. Of a larger one, the first so many bytes of every
/// [`STRIDE`] are, and the last: training changes every matrix, and those are larger.
const WHOLE: u64 = 64 << 20;
const BLOCK: u64 = 64 << 10;
const STRIDE: u64 = 4 << 20;

/// Bytes that are read at a time.
const BUFFER: usize = 1 << 20;

/// Files by the key of the configuration that names them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Inputs(BTreeMap<String, Vec<InputFile>>);

/// A file as it was.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
struct InputFile {
    path: PathBuf,
    bytes: u64,
    /// The checksum of its bytes; of large weights, of a sample.
    crc32c: u32,
}

impl Inputs {
    /// What a mode of a configuration reads now, beside `rows`: files of rows with the keys that name them.
    ///
    /// # Errors
    /// `Error::Io` where a file cannot be read, `Error::Hub` where a model's folder cannot be had.
    pub fn of(config: &RunConfig, mode: Mode, rows: Vec<(&'static str, PathBuf)>) -> Result<Self> {
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
        let template = config.model.chat_template.iter().filter(|own| !own.to_str().is_some_and(is_template));
        named.extend(template.map(|file| ("model.chat_template".to_owned(), file.clone())));
        if let Some(task) = &config.task {
            add_programs(&mut named, task)?;
        }
        let files: Vec<Result<(String, InputFile)>> =
            named.into_par_iter().map(|(key, path)| Ok((key, InputFile::of(path)?))).collect();
        let mut all: BTreeMap<String, Vec<InputFile>> = BTreeMap::new();
        for file in files {
            let (key, file) = file?;
            all.entry(key).or_default().push(file);
        }
        Ok(Self(all))
    }

    /// Those that a run folder keeps; none of a run that kept none.
    ///
    /// # Errors
    /// `Error::Io` where the file cannot be read, `Error::Resume` where it is damaged.
    pub fn kept(run: &RunDir) -> Result<Option<Self>> {
        let path = run.path().join(INPUTS);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", path)(e)),
        };
        let kept = serde_json::from_str(&text);
        kept.map(Some).map_err(|e| Error::Resume {
            detail: format!("{e}; delete the file to continue without a comparison of inputs"),
            path,
        })
    }

    /// Keeps them in a run folder.
    ///
    /// # Errors
    /// `Error::Io` where the file cannot be written.
    pub fn keep(&self, run: &RunDir) -> Result<()> {
        run.write_json(INPUTS, self)
    }

    /// What is not as it was, given these as they were: each key with its files.
    #[must_use]
    pub fn changes(&self, now: &Self) -> Vec<String> {
        let mut keys: Vec<&String> = self.0.keys().chain(now.0.keys()).collect();
        keys.sort_unstable();
        keys.dedup();
        let of = |own: &Self, key: &str| own.0.get(key).cloned().unwrap_or_default();
        keys.into_iter()
            .filter_map(|key| {
                let found = differences(&of(self, key), &of(now, key));
                (!found.is_empty()).then(|| format!("{key} ({})", found.join(", ")))
            })
            .collect()
    }
}

/// How lists of files differ: by name, in their order.
fn differences(before: &[InputFile], now: &[InputFile]) -> Vec<String> {
    let with = |files: &[InputFile], name: &str| files.iter().position(|file| file.name() == name);
    let mut found = Vec::new();
    for (at, own) in now.iter().enumerate() {
        let name = own.name();
        match with(before, &name).map(|place| (place, &before[place])) {
            None => found.push(format!("{name} is new")),
            Some((_, earlier)) if earlier.bytes != own.bytes => {
                found.push(format!("{name} has {} bytes, it had {}", own.bytes, earlier.bytes));
            }
            Some((_, earlier)) if earlier.crc32c != own.crc32c => found.push(format!("{name} has other contents")),
            Some((place, _)) if place != at && before.len() == now.len() => {
                found.push(format!("{name} is in another place of the list"));
            }
            Some(_) => {}
        }
    }
    let gone = before.iter().filter(|file| with(now, &file.name()).is_none());
    found.extend(gone.map(|file| format!("{} is gone", file.name())));
    found
}

impl InputFile {
    fn of(path: PathBuf) -> Result<Self> {
        let read = || {
            let file = File::open(&path)?;
            let bytes = file.metadata()?.len();
            let sampled = bytes > WHOLE && path.extension().is_some_and(|ending| ending == "safetensors");
            let crc = if sampled { crc_of_sample(file, bytes)? } else { crc_of_all(file)? };
            Ok::<_, std::io::Error>((bytes, crc))
        };
        let (bytes, crc32c) = read().map_err(Error::io("read", &path))?;
        Ok(Self { path, bytes, crc32c })
    }

    /// The file's name: a folder may be moved.
    fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        name.to_string_lossy().into_owned()
    }
}

fn crc_of_all(mut file: File) -> std::io::Result<u32> {
    let (mut buffer, mut crc) = (vec![0; BUFFER], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(crc),
            n => crc = crc32c::crc32c_append(crc, &buffer[..n]),
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

/// Adds the files of a model's folder that say what it computes.
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

/// Adds what scores a task's completions and answers its turns: reward models, files of programs.
fn add_programs(named: &mut Vec<(String, PathBuf)>, task: &TaskConfig) -> Result<()> {
    let Some(rows) = task.rows() else { return Ok(()) };
    for (at, reward) in rows.rewards.iter().enumerate() {
        let key = |name: &str| format!("task.rewards.{at}.{name}");
        match &reward.kind {
            RewardKind::Model(model) => {
                add_model(named, &key("path"), &model_folder(&model.path, ModelFiles::All)?)?;
            }
            RewardKind::Python(python) => named.push((key("file"), python.file.clone())),
            RewardKind::Command(own) => {
                let folder = own.folder.clone().unwrap_or_default();
                let files = own.command.iter().map(|part| folder.join(part)).filter(|path| path.is_file());
                named.extend(files.map(|path| (key("command"), path)));
            }
            _ => {}
        }
    }
    if let Some(EnvironmentConfig::Python(own)) = &rows.environment {
        named.push(("task.environment.file".to_owned(), own.file.clone()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(folder: &Path, names: &[&str]) -> Inputs {
        let rows = names.iter().map(|name| ("task.train", folder.join(name))).collect();
        Inputs::of(&RunConfig::default(), Mode::Rl, rows).unwrap()
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
        write("b.jsonl", "{\"q\": 1}\n");
        let swapped = before.changes(&inputs(folder.path(), &["b.jsonl", "a.jsonl", "c.jsonl"]));
        assert!(swapped[0].contains("another place"), "{swapped:?}");
    }

    #[test]
    fn other_weights_in_a_large_file_are_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        // sparse: nothing of it is on the disk
        File::create(&path).unwrap().set_len(WHOLE + 3 * STRIDE + 5).unwrap();
        let before = InputFile::of(path.clone()).unwrap();
        for place in [0, WHOLE + STRIDE + 7, before.bytes - 1] {
            let mut bytes = File::options().write(true).open(&path).unwrap();
            bytes.seek(SeekFrom::Start(place)).unwrap();
            std::io::Write::write_all(&mut bytes, &[1]).unwrap();
            let now = InputFile::of(path.clone()).unwrap();
            assert!(now.bytes == before.bytes && now.crc32c != before.crc32c, "{place}");
            bytes.seek(SeekFrom::Start(place)).unwrap();
            std::io::Write::write_all(&mut bytes, &[0]).unwrap();
        }
        assert_eq!(InputFile::of(path).unwrap(), before);
    }
}
