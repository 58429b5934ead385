//! Fetching a snapshot: from the cache, or else file by file from the Hub.

use super::cache::{files_below, missing_part, model_files};
use super::progress::DownloadReporter;
use super::{Hub, HubError, HubName, ModelFiles, RepoKind};
use firebrick_spec::file::{MAX_TEXT_BYTES, is_below};
use firebrick_spec::heartbeat::wait_for;
use hf_hub::api::sync::{ApiError, ApiRepo};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Attempts to download a file; each continues where the one before broke off.
const MAX_ATTEMPTS: u32 = 4;

/// The Hub's description of a repository.
#[derive(Debug, Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    lfs: Option<LargeFile>,
}

/// The Hub's description of a content-addressed file (Git LFS, Xet).
#[derive(Debug, Deserialize)]
struct LargeFile {
    sha256: String,
}

/// Selects files of a repository by their names, or returns the reason why it cannot.
pub(super) type FileChoice<'a> = dyn Fn(&[String]) -> Result<Vec<String>, String> + 'a;

/// Reason why a request failed.
enum Failure {
    /// The Hub answered with this status.
    Status(u16),
    /// It was not reached, or its answer was not understood.
    Unreachable(String),
    /// The cache cannot be written to.
    Cache(std::io::Error),
}

impl Hub {
    /// The folder of a model's snapshot with the wanted files.
    ///
    /// # Errors
    /// [`HubError`] for an unknown repository or revision, a missing file without a connection, or a file that differs
    /// from the Hub's description.
    pub fn model(&self, name: &HubName, wanted: ModelFiles) -> Result<PathBuf, HubError> {
        let (folder, _) = self.fetch(name, &|files| model_files(files, wanted))?;
        Ok(folder)
    }

    /// Paths of the files of a dataset's snapshot that `choose` selects by the names in the repository, in
    /// order.
    ///
    /// # Errors
    /// As [`Self::model`].
    pub fn dataset(&self, name: &HubName, choose: &FileChoice<'_>) -> Result<Vec<PathBuf>, HubError> {
        let (folder, files) = self.fetch(name, choose)?;
        Ok(files.iter().map(|file| folder.join(file)).collect())
    }

    fn fetch(&self, name: &HubName, choose: &FileChoice<'_>) -> Result<(PathBuf, Vec<String>), HubError> {
        let _wait = wait_for(format!("{} of the Hub, {}", name.shown(), self.endpoint()));
        let cached = self.complete_in_cache(name, choose);
        match cached {
            Ok(snapshot) if self.offline || name.is_commit() => return Ok(snapshot),
            Err(why) if self.offline => {
                let why = format!("{}, and {why}", Self::why_offline());
                return Err(name.error(advice(name, &why)));
            }
            _ => {}
        }
        let listing = match (self.list(name), cached) {
            (Ok(listing), _) => listing,
            (Err(Failure::Unreachable(why)), Ok(snapshot)) => {
                tracing::warn!("{} is taken from the cache: {why}", name.shown());
                return Ok(snapshot);
            }
            (Err(failure), cached) => {
                let missing = cached.err();
                return Err(name.error(self.failure_message(name, failure, missing.as_deref())));
            }
        };
        let names: Vec<String> = listing.siblings.iter().map(|s| s.rfilename.clone()).collect();
        // a Hub at another address may answer anything
        if let Some(other) = names.iter().chain([&listing.sha]).find(|name| !is_below(name)) {
            return Err(name.error(format!("the Hub names the file {other:?}, which is outside of the repository")));
        }
        let files = choose(&names).map_err(|why| name.error(why))?;
        let folder = self.snapshot(name, &listing.sha);
        for file in &files {
            let stated = listing.siblings.iter().find(|s| s.rfilename == *file);
            self.file(name, &listing.sha, file, stated)?;
        }
        self.remember(name, &listing.sha)?;
        Ok((folder, files))
    }

    /// The cached snapshot of a revision if it is complete, or else the reason why it is not.
    fn complete_in_cache(&self, name: &HubName, choose: &FileChoice<'_>) -> Result<(PathBuf, Vec<String>), String> {
        let folder =
            self.cached(name).ok_or_else(|| format!("the cache {} does not have it", self.folder.display()))?;
        let names = files_below(&folder);
        let cache = folder.display();
        let files = choose(&names).map_err(|why| format!("in the cache {cache}: {why}"))?;
        match missing_part(&folder, &files) {
            Some(what) => Err(format!("the cache {cache} lacks {what}")),
            None => Ok((folder, files)),
        }
    }

    fn list(&self, name: &HubName) -> Result<Listing, Failure> {
        let api = self.api().map_err(Failure::from)?;
        let repo = api.repo(name.repo_at(&name.revision));
        let response = repo.info_request().query("blobs", "true").call();
        let response = response.map_err(|e| Failure::from(ApiError::from(Box::new(e))))?;
        let listing = serde_json::from_reader(BufReader::new(response.into_reader().take(MAX_TEXT_BYTES)));
        listing.map_err(|e| Failure::Unreachable(format!("its answer was not understood: {e}")))
    }

    /// Ensures that a complete file of a commit is in the cache. A download must have the size and the SHA-256
    /// that the Hub states.
    fn file(&self, name: &HubName, commit: &str, file: &str, stated: Option<&Sibling>) -> Result<(), HubError> {
        let link = self.snapshot(name, commit).join(file);
        if wrong_size(&link, stated).is_none() {
            return Ok(());
        }
        discard(&link);
        let api = self.api().map_err(|e| name.error(e.to_string()))?;
        let repo = api.repo(name.repo_at(commit));
        let mut last = String::new();
        for attempt in 0..MAX_ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(200 << attempt));
            }
            match download(&repo, file) {
                Ok(()) => match wrong_size(&link, stated).or_else(|| damage(&link, stated)) {
                    None => return Ok(()),
                    Some(what) => {
                        last = what;
                        discard(&link);
                    }
                },
                // the partial file cannot be continued
                Err(Failure::Status(416)) => self.discard_parts(name),
                Err(failure @ (Failure::Status(_) | Failure::Cache(_))) => {
                    return Err(name.error(self.failure_message(name, failure, None)));
                }
                Err(Failure::Unreachable(why)) => last = why,
            }
        }
        Err(name.error(format!("cannot download {file}: {last}; run the same command again to continue the download")))
    }

    /// Removes files of incomplete downloads.
    fn discard_parts(&self, name: &HubName) {
        let blobs = self.repo_folder(name).join("blobs");
        let files = files_below(&blobs).into_iter().map(|file| blobs.join(file));
        for file in files.filter(|file| file.extension().is_some_and(|e| e == "part")) {
            discard(&file);
        }
    }

    /// Records the commit of the revision, after all files are there. The client also writes such a reference for every
    /// commit, which Python's library does not.
    fn remember(&self, name: &HubName, commit: &str) -> Result<(), HubError> {
        if name.revision == commit {
            return Ok(());
        }
        let cache = self.cache().repo(name.repo_at(&name.revision));
        cache.create_ref(commit).map_err(|e| name.error(format!("cannot write to {}: {e}", self.folder.display())))?;
        discard(&self.repo_folder(name).join("refs").join(commit));
        Ok(())
    }

    /// Message of a failed request, with the remedy.
    fn failure_message(&self, name: &HubName, failure: Failure, cache: Option<&str>) -> String {
        let repo = &name.repo;
        match failure {
            Failure::Unreachable(why) => {
                let cache = cache.map_or(String::new(), |cache| format!(", and {cache}"));
                advice(name, &format!("{} cannot be reached ({why}){cache}", self.endpoint()))
            }
            Failure::Cache(error) => format!(
                "the cache {} cannot be written to: {error}; set HF_HOME to a folder with space",
                self.folder.display()
            ),
            Failure::Status(401 | 403) => format!(
                "the Hub refused it: it does not exist, is private, or is gated. Check the name (there is no local folder \
                 {repo} either), accept its terms at {}/{repo}, and set HF_TOKEN to a token that may read it",
                self.endpoint()
            ),
            Failure::Status(404) => format!(
                "there is no such repository, revision or file on {}, and no local folder {repo}; check the name, and the \
                 revision after `@`",
                self.endpoint()
            ),
            Failure::Status(status) => {
                format!("the Hub answered with status {status}; try again later, or set a local folder")
            }
        }
    }
}

/// Message of an unavailable repository, with the remedy.
fn advice(name: &HubName, why: &str) -> String {
    let repo = &name.repo;
    let kind = match name.kind {
        RepoKind::Model => "",
        RepoKind::Dataset => " --repo-type dataset",
    };
    format!(
        "{why}. There is no local folder {repo} either. Connect to the network, or run `hf download {repo}{kind}` on a \
         machine with a network, copy the cache folder here, and set HF_HOME to its path; or set the path of a local \
         copy"
    )
}

fn download(repo: &ApiRepo, file: &str) -> Result<(), Failure> {
    repo.download_with_progress(file, DownloadReporter::new(file))?;
    Ok(())
}

/// Difference of a file's size from the Hub's; `None` if they are equal. A missing file has no size.
fn wrong_size(link: &Path, stated: Option<&Sibling>) -> Option<String> {
    let size = std::fs::metadata(link).map(|m| m.len()).ok();
    let expected = stated.and_then(|s| s.size);
    let is_complete = size.is_some_and(|size| expected.is_none_or(|expected| expected == size));
    let (size, expected) = (size.unwrap_or(0), expected.unwrap_or(0));
    (!is_complete).then(|| format!("it has {size} bytes, the Hub lists {expected}"))
}

/// Difference of a downloaded file's SHA-256 from the Hub's; `None` if they are equal, or if the Hub states none,
/// as for small files. The name of a large file's blob, its etag, is the same sum.
fn damage(link: &Path, stated: Option<&Sibling>) -> Option<String> {
    let stated = stated.and_then(|s| s.lfs.as_ref()).map(|l| l.sha256.clone());
    let wanted = stated.or_else(|| sum_of_blob(link))?;
    match sha256(link) {
        Ok(actual) if actual.eq_ignore_ascii_case(&wanted) => None,
        Ok(actual) => Some(format!("its SHA-256 is {actual}, the Hub states {wanted}: it was damaged on the way")),
        Err(error) => Some(format!("it cannot be read back: {error}")),
    }
}

/// The SHA-256 in the name of the blob behind a link.
fn sum_of_blob(link: &Path) -> Option<String> {
    let blob = std::fs::canonicalize(link).ok()?;
    let name = blob.file_name()?.to_str()?;
    let is_sum = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
    is_sum.then(|| name.to_owned())
}

/// The SHA-256 of a file, in hexadecimal.
fn sha256(path: &Path) -> std::io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => hasher.update(&buffer[..read]),
        }
    }
    Ok(hex::encode(hasher.finalize()))
}

/// Returns true for errors of a folder that another attempt meets again.
fn is_of_folder(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(error.kind(), NotADirectory | PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull)
}

/// Removes a file and, if it is a link, what it points to.
fn discard(path: &Path) {
    // a missing file is fine
    if let Ok(blob) = std::fs::canonicalize(path) {
        let _ = std::fs::remove_file(blob);
    }
    let _ = std::fs::remove_file(path);
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::RequestError(error) => {
                let text = error.to_string();
                match error.into_response() {
                    Some(response) => Self::Status(response.status()),
                    None => Self::Unreachable(text),
                }
            }
            ApiError::LockAcquisition(path) => {
                Self::Unreachable(format!("another process is downloading it (it holds {})", path.display()))
            }
            ApiError::IoError(error) if is_of_folder(&error) => Self::Cache(error),
            other => Self::Unreachable(other.to_string()),
        }
    }
}
