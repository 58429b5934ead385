//! Hugging Face tokenizers and chat templates: text to token ids and back, and conversations to text, by
//! `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`.
//!
//! The ids, the decoded text and the rendered chats are those of transformers v5; the parity tests
//! hold them to its output.

mod assistant_mask;
mod char_level;
mod chat_template;
mod end_tokens;
mod files;
mod guarded;
mod message;
mod message_words;
mod most_tokens;
mod parts;
mod python_text;
mod settings;
mod special_tokens;
mod tojson;
mod training_template;
mod turn_spans;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use tokenizers::{AddedToken, ModelWrapper, Tokenizer as Backend};

pub use assistant_mask::ChatTokens;
pub use chat_template::{CONVERSATION_VARIABLES, ChatOptions};
pub use end_tokens::EndTokens;
pub use guarded::Control;
pub use message::Message;
pub use special_tokens::SpecialTokens;

use crate::error::{Error, Result};
use chat_template::ChatTemplate;
use files::Files;
use firebrick_backends::allocation_limit::{AllocationLimit, limited};
use firebrick_backends::device::panic_message;
use serde_json::{Map, Value};
use settings::{Settings, TemplateSource};
use training_template::Variant;

/// A tokenizer with its special tokens and its chat template.
pub struct Tokenizer {
    /// The folder it came from, for messages.
    origin: PathBuf,
    /// Kept as read, so that what is saved is what was loaded, whatever became of the folder.
    files: Files,
    backend: Backend,
    settings: Settings,
    template: ChatTemplate,
    /// The template for training of a known family.
    training: Option<Training>,
    vocab_size: usize,
    /// Rows of the embedding that ids are looked up in, where it is known.
    rows: Option<usize>,
    clean_up: bool,
    /// Special tokens by their ids.
    special: BTreeMap<u32, String>,
    /// The characters that they begin with.
    first_of_special: Vec<char>,
    /// Bytes of the longest one.
    longest_special: usize,
    /// The special token that is put before every text.
    begin: Option<u32>,
}

/// The template for training of a family.
struct Training {
    variant: &'static Variant,
    template: ChatTemplate,
}

/// What a tokenizer of these bytes may take while it is read: those of 35 MB take 10 times as much.
fn limit_of(bytes: &[u8]) -> AllocationLimit {
    AllocationLimit::total((64 << 20) + 24 * bytes.len())
}

/// Calls the `tokenizers` library, which panics on some parts that do not fit each other.
fn caught<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_message(panic.as_ref()).into()))
}

impl Tokenizer {
    /// Reads the tokenizer of a checkpoint folder.
    ///
    /// `tokenizer.json` is required. `tokenizer_config.json` and `special_tokens_map.json` name the
    /// special tokens; as in transformers v5 the latter is only read when the former has no
    /// `added_tokens_decoder`. The chat template is `chat_template.jinja`, else `chat_template` in
    /// `tokenizer_config.json` (a string, or a list of named ones of which `default` is taken).
    /// Truncation and padding set inside `tokenizer.json` are switched off: a caller asks for them.
    ///
    /// # Errors
    /// [`Error::MissingFile`] without `tokenizer.json`; [`Error::Tokenizer`] when it cannot be
    /// understood; [`Error::Config`] when one of the other files is not what it should be.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        Self::from_files(dir, Files::read(dir)?)
    }

    /// A tokenizer made in memory with one token per character: id 0 is `<pad>`, id 1 is `<eos>`,
    /// then the characters of `alphabet` in their order. There is no beginning-of-sequence token and
    /// no chat template. Decoding gives back exactly the encoded text.
    ///
    /// [`Tokenizer::save`] writes it as files that transformers' `AutoTokenizer` reads.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when `alphabet` is empty or names a character twice.
    pub fn characters(alphabet: &str) -> Result<Self> {
        Self::characters_and_words(alphabet, &[])
    }

    /// [`Self::characters`] with further tokens of several characters, which are found before single ones. They are no
    /// special tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::characters`], and for a word of fewer than two characters.
    pub fn characters_and_words(alphabet: &str, words: &[&str]) -> Result<Self> {
        let files = char_level::files(alphabet, words)?;
        Self::from_files(Path::new(char_level::ORIGIN), files)
    }

    fn from_files(origin: &Path, files: Files) -> Result<Self> {
        let path = origin.join(files::TOKENIZER);
        let broken = |detail: String| Error::Tokenizer { path: path.clone(), detail };

        let bytes = files.get(files::TOKENIZER).unwrap_or_default();
        let read = || caught(|| Backend::from_bytes(bytes));
        let backend = limited(limit_of(bytes), &format!("reading {}", path.display()), read);
        let mut backend = backend.map_err(|cause| {
            broken(format!(
                "not a valid tokenizer of the Hugging Face `tokenizers` library: {cause}; save it again with a recent \
                     transformers"
            ))
        })?;
        backend.with_padding(None);
        backend.with_truncation(None).map_err(|cause| broken(cause.to_string()))?;

        let settings = Settings::parse(origin, &files)?;
        register(&mut backend, &settings).map_err(|cause| broken(cause.to_string()))?;

        let template = ChatTemplate::new(origin, &settings.chat_template);
        let training = match &settings.chat_template {
            TemplateSource::Text(text) => Variant::find(text).map(|variant| Training {
                variant,
                template: ChatTemplate::new(origin, &TemplateSource::Text(variant.apply(text))),
            }),
            TemplateSource::Absent | TemplateSource::NoDefault(_) => None,
        };
        let vocab_size = backend.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let clean_up = settings.cleans_up(matches!(backend.get_model(), ModelWrapper::BPE(_)));
        let added = backend.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special);
        let special: BTreeMap<u32, String> = added.map(|(id, token)| (id, token.content)).collect();
        let firsts = special.values().filter_map(|token| token.chars().next());
        // a normalizer may change its case
        let mut first_of_special: Vec<char> =
            firsts.flat_map(|c| c.to_lowercase().chain(c.to_uppercase()).chain([c])).collect();
        first_of_special.sort_unstable();
        first_of_special.dedup();
        let around = caught(|| backend.encode_fast("", true)).map_err(|cause| {
            broken(format!("its parts do not fit each other: {cause}; save it again with a recent transformers"))
        })?;
        let begin = around.get_ids().first().copied().filter(|id| special.contains_key(id));
        Ok(Self {
            origin: origin.to_owned(),
            files,
            backend,
            settings,
            template,
            training,
            vocab_size,
            rows: None,
            clean_up,
            longest_special: special.values().map(String::len).max().unwrap_or(0),
            special,
            first_of_special,
            begin,
        })
    }

    /// Token ids of `text`. Special tokens written out in `text` become their ids either way, unlike in
    /// [`Tokenizer::encode_text`]; `add_special_tokens` says whether those the checkpoint puts around a text (often a
    /// beginning-of-sequence token) are added. A rendered chat already has them.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the vocabulary has no way to write a character, naming it, and for a token
    /// [beyond the embedding](Tokenizer::for_embedding).
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        match caught(|| self.backend.encode_fast(text, add_special_tokens)) {
            Ok(encoding) => self.embedded(encoding.get_ids().to_vec()),
            Err(cause) => Err(self.unencodable(text, None, &cause)),
        }
    }

    /// The error of a text that cannot be encoded, with the marks that it has.
    fn unencodable(&self, text: &str, mark: Option<char>, cause: &tokenizers::Error) -> Error {
        Error::Tokenizer {
            path: self.origin.clone(),
            detail: match self.unknown_character(text, mark) {
                Some(character) => format!(
                    "the vocabulary has no token for {character:?} (U+{:04X}); add the character to the vocabulary or \
                     remove it from the text",
                    u32::from(character)
                ),
                None => format!("cannot encode {text:?}: {cause}"),
            },
        }
    }

    /// Text of `ids`; ids outside the vocabulary (a padded embedding can sample them) give nothing.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the tokenizer's own decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        let text = caught(|| self.backend.decode(ids, skip_special_tokens)).map_err(|cause| Error::Tokenizer {
            path: self.origin.clone(),
            detail: format!("cannot decode {} ids: {cause}", ids.len()),
        })?;
        Ok(if self.clean_up { clean_up_spaces(&text) } else { text })
    }

    /// The largest token id + 1, added tokens included, up to the rows of [its embedding](Tokenizer::for_embedding). A
    /// model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.rows.map_or(self.vocab_size, |rows| rows.min(self.vocab_size))
    }

    /// Sets the rows of the model's embedding. Published models have tokens beyond it, such as the placeholders of
    /// images in Gemma 3's models of text: a text that uses one is an error.
    #[must_use]
    pub fn for_embedding(mut self, rows: usize) -> Self {
        self.rows = Some(rows);
        self
    }

    /// These ids, unless one is beyond the embedding.
    fn embedded(&self, ids: Vec<u32>) -> Result<Vec<u32>> {
        let beyond = |id: &&u32| self.rows.is_some_and(|rows| **id as usize >= rows);
        let Some(&id) = ids.iter().find(beyond) else { return Ok(ids) };
        Err(Error::Tokenizer {
            path: self.origin.clone(),
            detail: format!(
                "the token {:?} has id {id}, but the model's embedding has {} rows (vocab_size); remove it from the row, \
                 the prompt or the chat template that uses it",
                self.backend.id_to_token(id).unwrap_or_default(),
                self.rows.unwrap_or_default()
            ),
        })
    }

    /// Id of the beginning-of-sequence token, when one is named.
    pub fn bos_id(&self) -> Option<u32> {
        self.named_id("bos_token")
    }

    /// Id of the end-of-sequence token, when one is named.
    pub fn eos_id(&self) -> Option<u32> {
        self.named_id("eos_token")
    }

    /// Id of the padding token, when one is named.
    pub fn pad_id(&self) -> Option<u32> {
        self.named_id("pad_token")
    }

    /// Id of the token written exactly `token`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.backend.token_to_id(token)
    }

    /// The first id that stands for another token in the other tokenizer, with both tokens: ids of one mean nothing to
    /// a model of the other. An id that only one of them has differs too.
    pub fn differing_id(&self, other: &Self) -> Option<(u32, [String; 2])> {
        let most = self.vocab_size.max(other.vocab_size) as u32;
        let spelled = |token: Option<String>| match token {
            Some(token) => format!("{token:?}"),
            None => "no token".to_owned(),
        };
        (0..most)
            .map(|id| (id, [self, other].map(|t| t.backend.id_to_token(id))))
            .find(|(_, [token, other])| token != other)
            .map(|(id, tokens)| (id, tokens.map(spelled)))
    }

    /// True if the checkpoint has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_present()
    }

    /// Text of a conversation by the checkpoint's chat template, as transformers'
    /// `apply_chat_template(..., tokenize=False)` writes it. Encode it without adding special tokens.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] when there is no template, when it cannot be understood, and when it
    /// refuses the conversation (`raise_exception`), with its own words.
    pub fn render_chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.render_chat_with(messages, ChatOptions { add_generation_prompt, ..ChatOptions::default() })
    }

    /// [`Self::render_chat`] with more options of the template.
    ///
    /// # Errors
    /// As [`Tokenizer::render_chat`].
    pub fn render_chat_with(&self, messages: &[Message], options: ChatOptions<'_>) -> Result<String> {
        let template = if options.training { self.training_template() } else { &self.template };
        template.render(&self.settings.named, messages, options)
    }

    /// The template that supervised training renders conversations with.
    fn training_template(&self) -> &ChatTemplate {
        self.supervised().map_or(&self.template, |training| &training.template)
    }

    /// The template for supervised training, where it is another one.
    fn supervised(&self) -> Option<&Training> {
        self.training.as_ref().filter(|training| training.variant.trains)
    }

    /// The model family of a chat template that writes a turn otherwise once others follow, and of which there is one
    /// for training, which writes every turn as the model wrote it. Conversations that are trained on are rendered with
    /// it. There is none for a template that [`Tokenizer::with_chat_template`] has set.
    pub fn training_family(&self) -> Option<&'static str> {
        self.supervised().map(|training| training.variant.family)
    }

    /// [`Self::training_family`] of rollouts of several turns, whose turns are given to the template as they were
    /// sampled: gpt-oss has a template for these only.
    pub fn turns_family(&self) -> Option<&'static str> {
        self.training.as_ref().map(|training| training.variant.family)
    }

    /// Uses the template of [`Tokenizer::turns_family`] for all conversations; the files that [`Tokenizer::save`]
    /// writes keep the checkpoint's.
    #[must_use]
    pub fn for_turns(mut self) -> Self {
        if let Some(training) = self.training.take() {
            self.template = training.template;
        }
        self
    }

    /// Replaces the chat template, in Jinja; [`Tokenizer::save`] writes it too. `origin` is its source, for messages.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] when the template is not understood.
    pub fn with_chat_template(mut self, template: &str, origin: &Path) -> Result<Self> {
        // Python's text mode, with which transformers reads it
        let template = template.replace("\r\n", "\n");
        let kwargs = self.template.kwargs.clone();
        let source = TemplateSource::Text(template.clone());
        self.template = ChatTemplate::new(origin, &source);
        self.template.check()?;
        self.template.set_kwargs(&kwargs)?;
        self.training = None;
        self.files.set(files::CHAT_TEMPLATE, template.into_bytes());
        Ok(self)
    }

    /// Gives these variables to the chat template with every conversation, as the keyword arguments of transformers'
    /// `apply_chat_template`. The files that [`Tokenizer::save`] writes do not have them.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for a name that each conversation sets (`messages`, `tools`, `documents`,
    /// `add_generation_prompt`).
    pub fn with_chat_template_kwargs(mut self, kwargs: &Map<String, Value>) -> Result<Self> {
        self.template.set_kwargs(kwargs)?;
        if let Some(training) = &mut self.training {
            training.template.set_kwargs(kwargs)?;
        }
        Ok(self)
    }

    /// The variables that its chat template is given with every conversation.
    pub fn chat_template_kwargs(&self) -> &Map<String, Value> {
        &self.template.kwargs
    }

    /// Writes the tokenizer files of a Hugging Face checkpoint into `dir`, which is created if its
    /// parent exists: those it was read from byte for byte, or for a made tokenizer ones that transformers reads.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder or a file cannot be written.
    pub fn save(&self, dir: &Path) -> Result<()> {
        self.files.write(dir)
    }

    fn named_id(&self, name: &str) -> Option<u32> {
        self.settings.named.get(name).and_then(|token| self.token_id(token))
    }

    /// The first character that no token covers; special tokens are taken out first, as they are
    /// matched whole and their characters need not be in the vocabulary.
    fn unknown_character(&self, text: &str, mark: Option<char>) -> Option<char> {
        let mut rest = text.to_owned();
        for token in self.backend.get_added_tokens_decoder().values() {
            rest = rest.replace(&token.content, "");
        }
        let mut buffer = [0; 4];
        rest.chars().filter(|&c| Some(c) != mark).find(|c| {
            let one: &str = c.encode_utf8(&mut buffer);
            caught(|| self.backend.encode_fast(one, false)).is_err()
        })
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The vocabulary would bury everything else.
        f.debug_struct("Tokenizer")
            .field("origin", &self.origin)
            .field("vocab_size", &self.vocab_size)
            .field("special", &self.settings.named)
            .field("chat_template", &self.has_chat_template())
            .finish_non_exhaustive()
    }
}

/// Adds the tokens that the configuration names and `tokenizer.json` lacks, and makes special those
/// it knows as plain ones: transformers does so on load, and ids depend on it.
fn register(backend: &mut Backend, settings: &Settings) -> tokenizers::Result<()> {
    let known: Vec<AddedToken> = backend.get_added_tokens_decoder().into_values().collect();
    let find = |content: &str| known.iter().find(|token| token.content == content);

    // Declared tokens come first, in the order of their ids: a new id is the next free one.
    let mut wanted: Vec<AddedToken> =
        settings.declared.values().filter(|token| find(&token.content).is_none()).cloned().collect();
    for token in &settings.special {
        if let Some(listed) = wanted.iter_mut().find(|other| other.content == token.content) {
            listed.special = true;
            continue;
        }
        match find(&token.content) {
            Some(there) if there.special => {}
            Some(there) => wanted.push(there.clone().special(true)),
            None => wanted.push(token.clone()),
        }
    }
    backend.add_tokens(wanted)?;
    Ok(())
}

/// transformers' `clean_up_tokenization`: joins punctuation and English contractions to the word before them, in this
/// order.
fn clean_up_spaces(text: &str) -> String {
    const JOINED: [(&str, &str); 10] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    JOINED.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests;
