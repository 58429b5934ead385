//! Names of repositories.

use std::path::Path;

/// Content of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepoKind {
    /// A model.
    Model,
    /// A dataset.
    Dataset,
}

/// A repository with a revision and a path inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// Content of the repository.
    pub kind: RepoKind,
    /// `owner/name`.
    pub repo: String,
    /// A branch, a tag or a commit; `main` by default.
    pub revision: String,
    /// A file, a folder or a pattern inside; empty for the whole repository.
    pub inside: String,
}

/// Default revision.
const MAIN: &str = "main";

/// Prefix of a URL of `huggingface_hub`'s file system.
const SCHEME: &str = "hf://";

/// Endings of local files, which a repository's name does not have.
const FILE_ENDINGS: &str = "json jsonl ndjson parquet pq arrow feather csv tsv txt gz zst zstd safetensors";

impl HubName {
    /// The repository that a path names. A URL (`hf://…`) always does; `owner/name` and `owner/name@revision` do where
    /// there is no such local path.
    pub fn of_path(path: &Path, kind: RepoKind) -> Option<Self> {
        let text = path.to_str()?;
        if let Some(url) = text.strip_prefix(SCHEME) {
            return Self::of_url(url, kind);
        }
        let name = Self::bare(text, kind)?;
        (!path.exists()).then_some(name)
    }

    /// Returns true if a path of a configuration in the folder `base` names a repository.
    pub fn is_one(text: &str, base: &Path) -> bool {
        text.starts_with(SCHEME) || (Self::bare(text, RepoKind::Model).is_some() && !base.join(text).exists())
    }

    /// `datasets/owner/name@revision/inside`, `models/owner/name…` or `owner/name…`.
    fn of_url(url: &str, kind: RepoKind) -> Option<Self> {
        let (kind, rest) = match url.split_once('/')? {
            ("datasets", rest) => (RepoKind::Dataset, rest),
            ("models", rest) => (RepoKind::Model, rest),
            _ => (kind, url),
        };
        let mut parts = rest.splitn(3, '/');
        let (owner, name) = (parts.next()?, parts.next()?);
        let inside = parts.next().unwrap_or_default().trim_matches('/');
        let mut repo = Self::bare(&format!("{owner}/{name}"), kind)?;
        inside.clone_into(&mut repo.inside);
        Some(repo)
    }

    fn bare(text: &str, kind: RepoKind) -> Option<Self> {
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, revision),
            None => (text, MAIN),
        };
        let (owner, name) = repo.split_once('/')?;
        let is_word = |word: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !word.is_empty() && !word.starts_with(['.', '-']) && word.chars().all(allowed)
        };
        let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
        let is_file = FILE_ENDINGS.split(' ').any(|file| ending.eq_ignore_ascii_case(file));
        let is_name = is_word(owner) && is_word(name) && !is_file && !revision.is_empty() && !revision.contains("..");
        is_name.then(|| Self {
            kind,
            repo: repo.to_owned(),
            // how a URL writes a revision with a slash
            revision: revision.replace("%2F", "/"),
            inside: String::new(),
        })
    }

    /// Returns true if the revision is a commit, which never moves.
    pub(super) fn is_commit(&self) -> bool {
        self.revision.len() == 40 && self.revision.chars().all(|c| c.is_ascii_hexdigit())
    }

    /// The name for messages.
    pub(super) fn shown(&self) -> String {
        let Self { repo, revision, .. } = self;
        let kind = match self.kind {
            RepoKind::Model => "model",
            RepoKind::Dataset => "dataset",
        };
        if revision == MAIN { format!("{kind} {repo}") } else { format!("{kind} {repo}@{revision}") }
    }
}
