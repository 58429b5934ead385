//! The cache folder, in the layout of Python's `huggingface_hub`: `blobs`, `snapshots/COMMIT/FILE` as links to them,
//! and `refs/REVISION` with the commit.

use super::{Hub, HubError, HubName, ModelFiles, RepoKind};
use firebrick_spec::file::{MAX_TEXT_BYTES, read_text};
use hf_hub::{Repo, RepoType};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Most bytes of a reference, which has a commit.
const MAX_REFERENCE_BYTES: u64 = 1 << 10;

impl HubName {
    /// The repository at another revision, as the client knows it.
    pub(super) fn repo_at(&self, revision: &str) -> Repo {
        let kind = match self.kind {
            RepoKind::Model => RepoType::Model,
            RepoKind::Dataset => RepoType::Dataset,
        };
        Repo::with_revision(self.repo.clone(), kind, revision.to_owned())
    }

    pub(super) fn error(&self, detail: impl Into<String>) -> HubError {
        HubError { name: self.shown(), detail: detail.into() }
    }
}

impl Hub {
    /// The repository's folder in the cache.
    pub(super) fn repo_folder(&self, name: &HubName) -> PathBuf {
        self.folder.join(name.repo_at(&name.revision).folder_name())
    }

    /// The folder of a commit, even if it does not exist.
    pub(super) fn snapshot(&self, name: &HubName, commit: &str) -> PathBuf {
        self.repo_folder(name).join("snapshots").join(commit)
    }

    /// The snapshot that the cache holds of a revision.
    pub(super) fn cached(&self, name: &HubName) -> Option<PathBuf> {
        let of_commit = Some(self.snapshot(name, &name.revision)).filter(|f| f.is_dir());
        of_commit.or_else(|| {
            let reference = self.repo_folder(name).join("refs").join(&name.revision);
            let commit = read_text(&reference, MAX_REFERENCE_BYTES).ok()?;
            let commit = commit.trim();
            // a folder of the cache, and no path
            let is_name = commit.chars().all(|c| c.is_ascii_alphanumeric());
            Some(self.snapshot(name, commit)).filter(|folder| is_name && folder.is_dir())
        })
    }
}

/// Files below a folder, relative to it and with slashes, in order. Links to missing blobs are left out.
pub(super) fn files_below(folder: &Path) -> Vec<String> {
    fn walk(folder: &Path, prefix: &str, files: &mut Vec<String>) {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        for entry in entries {
            let path = entry.path();
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if path.is_dir() {
                walk(&path, &format!("{name}/"), files);
            } else if path.is_file() {
                files.push(name);
            }
        }
    }
    let mut files = Vec::new();
    walk(folder, "", &mut files);
    files.sort();
    files
}

/// Selects the files of a model repository.
pub(super) fn model_files(files: &[String], wanted: ModelFiles) -> Result<Vec<String>, String> {
    let top: Vec<&String> = files.iter().filter(|file| !file.contains('/')).collect();
    let has = |name: &str| top.iter().any(|file| *file == name);
    if !has("config.json") && !has("adapter_config.json") {
        return Err("it has no config.json; is it a model for transformers?".to_owned());
    }
    if wanted == ModelFiles::Config {
        return Ok(select(&top, |name| name == "config.json" || name == "adapter_config.json"));
    }
    let is_small = |name: &str| {
        let ends = |end: &str| name.ends_with(end);
        (ends(".json") && !name.contains(".index.")) || ends(".jinja") || ends(".txt") || ends(".model")
    };
    let small = select(&top, is_small);
    if wanted == ModelFiles::Tokenizer {
        return Ok(small);
    }
    let weights = select(&top, |name| {
        let is_ours = name.starts_with("model") || name.starts_with("adapter_model");
        is_ours && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"))
    });
    if weights.is_empty() {
        let detail =
            "it has no model*.safetensors; save it again with transformers' `save_pretrained`, and set the folder";
        return Err(detail.to_owned());
    }
    Ok([small, weights].concat())
}

fn select(files: &[&String], is_wanted: impl Fn(&str) -> bool) -> Vec<String> {
    files.iter().filter(|file| is_wanted(file)).map(|file| (*file).clone()).collect()
}

/// Missing parts of the series that numbered names (`…-00001-of-00003.safetensors`) or a weight index announce: an
/// interrupted download leaves some out. `None` if the series are complete.
pub(super) fn missing_part(folder: &Path, files: &[String]) -> Option<String> {
    let mut series: BTreeMap<(String, usize), BTreeSet<usize>> = BTreeMap::new();
    for file in files {
        if let Some((stem, part, of)) = numbered(file) {
            series.entry((stem, of)).or_default().insert(part);
        }
    }
    for ((stem, of), parts) in &series {
        if parts.len() < *of {
            return Some(format!("{} of {of} files {stem}-…", of - parts.len()));
        }
    }
    let index = folder.join("model.safetensors.index.json");
    let indexed = files.iter().any(|f| f == "model.safetensors.index.json");
    let text = indexed.then(|| read_text(&index, MAX_TEXT_BYTES).ok()).flatten()?;
    let index: serde_json::Value = serde_json::from_str(&text).ok()?;
    let shards = index.get("weight_map")?.as_object()?.values();
    let mut shards = shards.filter_map(serde_json::Value::as_str);
    let lacking = shards.find(|shard| !files.iter().any(|file| file == shard));
    lacking.map(str::to_owned)
}

/// `stem-00002-of-00005.ending` as its stem and the two numbers. Numbers may count from 0 or from 1.
fn numbered(file: &str) -> Option<(String, usize, usize)> {
    let (before, after) = file.rsplit_once("-of-")?;
    let of = after.split(|c: char| !c.is_ascii_digit()).next()?;
    let (stem, part) = before.rsplit_once('-')?;
    Some((stem.to_owned(), part.parse().ok()?, of.parse().ok()?))
}
