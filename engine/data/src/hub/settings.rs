//! Address and cache of the Hub, from the variables of Python's `huggingface_hub`.

use super::home::expand_home;
use firebrick_spec::file::read_text;
use hf_hub::Cache;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Default of `HF_ENDPOINT`.
const ENDPOINT: &str = "https://huggingface.co";

/// True after [`stay_offline`].
static STAY_OFFLINE: AtomicBool = AtomicBool::new(false);

/// Makes this process read repositories from the cache only, as with `HF_HUB_OFFLINE`.
pub fn stay_offline() {
    STAY_OFFLINE.store(true, Ordering::Relaxed);
}

/// Settings of the Hub client.
#[derive(Clone)]
pub struct Hub {
    endpoint: String,
    /// The folder `hub` of the cache.
    pub(super) folder: PathBuf,
    token: Option<String>,
    pub(super) offline: bool,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // the token is secret
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("folder", &self.folder)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

impl Hub {
    /// As Python's libraries read the environment: `HF_ENDPOINT`; `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else in
    /// `~/.cache/huggingface`; the token in `HF_TOKEN`, else in the file `token` of `HF_HOME`; `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        let mut hub = Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
        hub.offline |= STAY_OFFLINE.load(Ordering::Relaxed);
        hub
    }

    /// Settings from variables.
    pub(super) fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let user_cache = || {
            variable("XDG_CACHE_HOME")
                .map_or_else(|| std::env::home_dir().unwrap_or_default().join(".cache"), PathBuf::from)
        };
        let path = |text: String| expand_home(Path::new(&text));
        let home = variable("HF_HOME").map_or_else(|| user_cache().join("huggingface"), path);
        let folder = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE"));
        let token_file = variable("HF_TOKEN_PATH").map_or_else(|| home.join("token"), path);
        let token = variable("HF_TOKEN")
            .or_else(|| variable("HUGGING_FACE_HUB_TOKEN"))
            .or_else(|| read_text(&token_file, 1 << 10).ok())
            .map(|token| token.trim().to_owned());
        let offline = variable("HF_HUB_OFFLINE").unwrap_or_default().to_lowercase();
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            folder: folder.map_or_else(|| home.join("hub"), path),
            token: token.filter(|token| !token.is_empty()),
            offline: ["1", "on", "yes", "true"].contains(&offline.as_str()),
        }
    }

    /// The client. Retries are ours: the crate's append to a file that they should replace.
    pub(super) fn api(&self) -> Result<Api, ApiError> {
        ApiBuilder::from_cache(self.cache())
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_progress(false)
            .with_user_agent("firebrick", env!("CARGO_PKG_VERSION"))
            .build()
    }

    pub(super) fn cache(&self) -> Cache {
        Cache::new(self.folder.clone())
    }

    /// Reason of offline mode, for messages.
    pub(super) fn why_offline() -> &'static str {
        if STAY_OFFLINE.load(Ordering::Relaxed) { "nothing is fetched offline" } else { "HF_HUB_OFFLINE is set" }
    }

    /// Address of the Hub, for messages.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }
}
