//! What can go wrong between a checkpoint folder and a running decoder.

use std::path::PathBuf;

/// Errors of this crate. Every message says what was expected, what was found, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read`, `write`, `create`, …
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A checkpoint folder is not there.
    #[error(
        "{} is no folder; give the path of a local Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)",
        dir.display()
    )]
    NoFolder {
        /// What was given.
        dir: PathBuf,
    },
    /// A checkpoint folder lacks a file.
    #[error("{} has no {file}; {hint}", dir.display())]
    MissingFile {
        /// The checkpoint folder.
        dir: PathBuf,
        /// The file that was looked for.
        file: String,
        /// What to do about it.
        hint: String,
    },
    /// A JSON file does not say what it should.
    #[error("{}: {detail}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What was expected and what was found.
        detail: String,
    },
    /// The architecture is not one of ours.
    #[error("unknown architecture {found:?}; known: {known}")]
    UnknownArchitecture {
        /// What the config names.
        found: String,
        /// What we know, separated by commas.
        known: String,
    },
    /// A weight file is shorter than its header says.
    #[error(
        "{} is truncated: tensor {tensor} ends at byte {end}, the file has {found}; download or copy it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The first tensor that is not whole.
        tensor: String,
        /// Where it should end.
        end: u64,
        /// Length of the file.
        found: u64,
    },
    /// A weight file's header cannot be read.
    #[error("{} is no safetensors file: {detail}; download or copy it again", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        detail: String,
    },
    /// The checkpoint lacks tensors that its config calls for.
    #[error("{} lacks {count} of the tensors its config calls for; first missing: {tensor}", path.display())]
    MissingTensor {
        /// The checkpoint folder.
        path: PathBuf,
        /// The first missing one.
        tensor: String,
        /// How many are missing.
        count: usize,
    },
    /// The checkpoint has tensors that its config knows nothing of.
    #[error(
        "{} has {count} tensors that its config does not call for; first: {tensor}; is config.json of another model?",
        path.display()
    )]
    UnexpectedTensor {
        /// The checkpoint folder.
        path: PathBuf,
        /// The first unexpected one.
        tensor: String,
        /// How many.
        count: usize,
    },
    /// A tensor's shape is not what the config calls for.
    #[error("{}: tensor {tensor} should have shape {expected:?}, found {found:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// By the config.
        expected: Vec<usize>,
        /// In the file.
        found: Vec<usize>,
    },
    /// A tensor's element type is not one that weights come in.
    #[error("{}: tensor {tensor} is {found}; known: F32, BF16, F16", path.display())]
    UnsupportedDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// In the file.
        found: String,
    },
    /// A sequence does not fit the model's context.
    #[error(
        "{what} has {length} tokens, the model's context is {context} (max_position_embeddings); \
         shorten it or allow fewer new tokens"
    )]
    TooLong {
        /// Which sequence.
        what: String,
        /// Its length, new tokens included.
        length: usize,
        /// Positions the model was made for.
        context: usize,
    },
    /// A token id is outside the model's vocabulary.
    #[error(
        "token id {id} is outside the model's vocabulary of {vocab}; is the tokenizer another model's?"
    )]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// Sampling settings that cannot work.
    #[error("sampling: {0}")]
    Sampling(String),
    /// The device failed or a value could not be read back.
    #[error("the device failed while {doing}: {detail}")]
    Device {
        /// What was going on.
        doing: &'static str,
        /// What it said.
        detail: String,
    },
    /// A tokenizer file could not be understood, or a text could not be encoded.
    #[error("tokenizer {}: {detail}", path.display())]
    Tokenizer {
        /// The tokenizer's folder or file.
        path: PathBuf,
        /// What was wrong and what to do.
        detail: String,
    },
    /// A chat template is missing, broken, or raised an exception of its own.
    #[error("chat template of {}: {detail}", path.display())]
    ChatTemplate {
        /// The tokenizer's folder.
        path: PathBuf,
        /// What was wrong and what to do.
        detail: String,
    },
}

impl Error {
    /// Wraps an I/O error with the action and the path it happened on.
    pub fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

impl From<firebrick_backends::Error> for Error {
    fn from(e: firebrick_backends::Error) -> Self {
        Self::Device {
            doing: "moving weights",
            detail: e.to_string(),
        }
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
