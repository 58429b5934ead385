//! Errors of checkpoints, tokenizers, sampling and the device.

use firebrick_backends::collective::CollectiveError;
use firebrick_backends::host::remedy;
use firebrick_backends::out_of_memory::OutOfMemory;
use std::path::PathBuf;

/// Errors of this crate. Every message says what was expected, what was found, where, and what to do. A message
/// includes its cause, which [`source`](std::error::Error::source) therefore does not give again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("cannot {action} {}: {error}{}", path.display(), remedy(action, error))]
    Io {
        /// `read`, `write`, `create`, …
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The checkpoint folder does not exist.
    #[error(
        "{} is not a folder; expected a local Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)",
        dir.display()
    )]
    NoFolder {
        /// The given path.
        dir: PathBuf,
    },
    /// A checkpoint folder lacks a file.
    #[error("{} has no {file}; {hint}", dir.display())]
    MissingFile {
        /// The checkpoint folder.
        dir: PathBuf,
        /// The missing file.
        file: String,
        /// Remedy.
        hint: String,
    },
    /// A JSON file has invalid contents.
    #[error("{}: {detail}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Expected and found contents.
        detail: String,
    },
    /// A model's `config.json` does not describe a supported decoder.
    #[error(transparent)]
    Architecture(#[from] firebrick_spec::Error),
    /// A weight file is shorter than its header requires.
    #[error(
        "{} is truncated: tensor {tensor} ends at byte {end}, the file has {found}; download or copy it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The first incomplete tensor.
        tensor: String,
        /// The end that the header names.
        end: u64,
        /// Length of the file.
        found: u64,
    },
    /// A weight file's header is invalid.
    #[error("{} is not a valid safetensors file: {detail}; download or copy it again", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The cause.
        detail: String,
    },
    /// The checkpoint lacks tensors that its config requires.
    #[error("{} lacks {count} tensor(s) that its config requires; first missing: {tensor}", path.display())]
    MissingTensor {
        /// The checkpoint folder.
        path: PathBuf,
        /// The first missing one.
        tensor: String,
        /// Number of missing tensors.
        count: usize,
    },
    /// The checkpoint has tensors that its config does not define.
    #[error(
        "{} has {count} unexpected tensor(s); first: {tensor}; does config.json belong to another model?",
        path.display()
    )]
    UnexpectedTensor {
        /// The checkpoint folder.
        path: PathBuf,
        /// The first unexpected one.
        tensor: String,
        /// Number of unexpected tensors.
        count: usize,
    },
    /// A tensor's shape differs from the config's.
    #[error("{}: tensor {tensor} has shape {found:?}, expected {expected:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The config's shape.
        expected: Vec<usize>,
        /// In the file.
        found: Vec<usize>,
    },
    /// A tensor's element type is not supported.
    #[error("{}: tensor {tensor} has type {found}; supported: F32, BF16, F16", path.display())]
    UnsupportedDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// In the file.
        found: String,
    },
    /// A tensor is quantised in a way that is not read, or not as it was asked for.
    #[error("{}: tensor {tensor} {detail}", path.display())]
    QuantizedWeight {
        /// The checkpoint folder.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its format, the supported ones, and a remedy.
        detail: String,
    },
    /// A sequence does not fit the model's context.
    #[error(
        "{what} has {length} tokens, but the model's context is {context} (max_position_embeddings); \
         shorten it or allow fewer new tokens"
    )]
    TooLong {
        /// Which sequence.
        what: String,
        /// Its length, new tokens included.
        length: usize,
        /// The model's maximum number of positions.
        context: usize,
    },
    /// A token id is outside the model's vocabulary.
    #[error("token id {id} is outside the model's vocabulary of {vocab}; does the tokenizer belong to another model?")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// Invalid sampling settings.
    #[error("sampling: {0}")]
    Sampling(String),
    /// A model that ranks cannot share while it is trained.
    #[error("memory.tensor_model_parallel_size shards a model's matrices, but {0}")]
    Shared(String),
    /// A model that cannot be cut into stages while it is trained.
    #[error("memory.pipeline_model_parallel_size splits a model's layers, but {0}")]
    Stages(String),
    /// The device failed or a value could not be read back.
    #[error("the device failed while {doing}: {detail}")]
    Device {
        /// The operation that failed.
        doing: &'static str,
        /// The device's message.
        detail: String,
    },
    /// Memory ran out on the device or the host.
    #[error("out of memory while {doing}: {what}")]
    OutOfMemory {
        /// The operation that failed.
        doing: &'static str,
        /// The refused allocation.
        what: OutOfMemory,
    },
    /// Ranks that share matrices have failed, are gone, or do not do the same.
    #[error(transparent)]
    Ranks(#[from] CollectiveError),
    /// Ranks that share matrices have sampled different tokens.
    #[error(
        "rank {rank} of a group that samples together has other tokens than its first; start every rank with the same program on \
         processors of the same kind, or set rollout.tensor_model_parallel_size to 1"
    )]
    Diverged {
        /// The first rank of the group that differs.
        rank: usize,
    },
    /// A tokenizer file is invalid, or a text could not be encoded.
    #[error("tokenizer {}: {detail}", path.display())]
    Tokenizer {
        /// The tokenizer's folder or file.
        path: PathBuf,
        /// The cause, and how to fix it.
        detail: String,
    },
    /// A chat template is missing or invalid, or raised an exception.
    #[error("chat template of {}: {detail}", path.display())]
    ChatTemplate {
        /// The tokenizer's folder.
        path: PathBuf,
        /// The cause, and how to fix it.
        detail: String,
    },
}

impl Error {
    /// Wraps an I/O error with the action and the path it happened on.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |error| Self::Io { action, path, error }
    }

    /// Wraps a device's error: memory that ran out, or another failure.
    pub fn device(doing: &'static str, error: &(dyn std::error::Error + 'static)) -> Self {
        match OutOfMemory::in_error(error) {
            Some(what) => Self::OutOfMemory { doing, what },
            None => Self::Device { doing, detail: error.to_string() },
        }
    }

    /// Memory that ran out, where this error says so.
    pub fn out_of_memory(&self) -> Option<OutOfMemory> {
        match self {
            Self::OutOfMemory { what, .. } => Some(what.clone()),
            Self::Io { error, .. } => OutOfMemory::in_error(error),
            Self::Ranks(error) => error.failure()?.memory(),
            _ => None,
        }
    }

    /// True if the user can fix it by other settings, as opposed to a device that failed.
    pub fn is_user_error(&self) -> bool {
        let failed = matches!(self, Self::Device { .. } | Self::Ranks(_) | Self::Diverged { .. });
        !failed && self.out_of_memory().is_none()
    }
}

impl From<firebrick_backends::Error> for Error {
    fn from(e: firebrick_backends::Error) -> Self {
        let doing = "moving weights";
        match e {
            firebrick_backends::Error::OutOfMemory(what) => Self::OutOfMemory { doing, what },
            // another rank's memory that ran out is told apart from other failures
            firebrick_backends::Error::Collective(error) => Self::Ranks(error),
            other => Self::Device { doing, detail: other.to_string() },
        }
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
