//! The files a tokenizer is stored in, held as bytes.

use std::io::ErrorKind;
use std::path::Path;

use crate::error::{Error, Result};
use firebrick_backends::host::{create_folder, write_synced};
use firebrick_spec::file;

/// The whole tokenizer: vocabulary, rules and added tokens.
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// Names of special tokens, and up to transformers v4 the chat template.
pub(super) const CONFIG: &str = "tokenizer_config.json";
/// Names of special tokens, written up to transformers v4.
pub(super) const SPECIAL_TOKENS: &str = "special_tokens_map.json";
/// The chat template, written since transformers v4.52.
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Everything of a checkpoint that belongs to its tokenizer. Beyond the four files we read, these
/// are the slow tokenizers' vocabularies, which other programs read.
const KNOWN: [&str; 10] = [
    TOKENIZER,
    CONFIG,
    SPECIAL_TOKENS,
    CHAT_TEMPLATE,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
];

/// Tokenizer files by name; `tokenizer.json` is always among them.
pub(super) struct Files(pub Vec<(&'static str, Vec<u8>)>);

impl Files {
    /// Reads those of the known files that `dir` has.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let mut files = Vec::new();
        for name in KNOWN {
            let path = dir.join(name);
            match file::inside(dir, name).and_then(|path| file::read(&path, file::MAX_TEXT_BYTES)) {
                Ok(bytes) => files.push((name, bytes)),
                Err(cause) if cause.kind() == ErrorKind::NotFound => {}
                Err(cause) => return Err(Error::io("read", path)(cause)),
            }
        }
        let files = Self(files);
        if files.get(TOKENIZER).is_none() {
            return Err(Error::MissingFile {
                dir: dir.to_owned(),
                file: TOKENIZER.to_owned(),
                hint: files.hint().to_owned(),
            });
        }
        Ok(files)
    }

    pub(super) fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, bytes)| bytes.as_slice())
    }

    /// Puts a file in the place of the one of its name.
    pub(super) fn set(&mut self, name: &'static str, bytes: Vec<u8>) {
        self.0.retain(|(known, _)| *known != name);
        self.0.push((name, bytes));
    }

    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        create_folder(dir).map_err(Error::io("create", dir))?;
        for (name, bytes) in &self.0 {
            let path = dir.join(name);
            write_synced(&path, bytes).map_err(Error::io("write", path))?;
        }
        Ok(())
    }

    /// Remedy for a missing `tokenizer.json`.
    fn hint(&self) -> &'static str {
        if self.0.is_empty() {
            "pass the folder of a Hugging Face checkpoint, or copy the tokenizer files of its base model into this one"
        } else {
            "only older formats were found; load the folder with transformers' AutoTokenizer and `save_pretrained` it, which \
             writes tokenizer.json"
        }
    }
}
