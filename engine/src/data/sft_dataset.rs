//! Examples of supervised training: rows of a file, or the task's solutions.
//!
//! A row is a conversation (`messages`) with scored assistant turns, or a `prompt` with a scored `completion`: both
//! texts, or both lists of messages. Examples of a file are encoded once, when it is read.

use crate::checkpoint::PolicySource;
use crate::config::SftConfig;
use crate::data::spelled::{SpelledTokens, spelled_in_chat};
use crate::data::{Prompt, PromptDataset, SAMPLED_ROWS};
use crate::objective::aggregate::{Denominators, LossAggMode, token_weights};
use crate::sequence::{SampleId, Sequence};
use crate::task::conversation::{check_text_only, message, read_template_kwargs, read_tools};
use crate::task::rows::{RowFiles, Rows};
use crate::task::template::Row;
use crate::task::{PromptText, TEMPLATE_KWARGS, TOOLS, Task, TaskError, shuffled_index};
use crate::{Error, Result};
use firebrick_models::tokenizer::{ChatOptions, ChatTokens, EndTokens, Message, SpecialTokens};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// First draw of supervised training, far from the draws of RL: other examples of an endless task, other epochs of a
/// finite one.
const SFT_DRAWS: u64 = 1 << 40;

/// Columns of rows that are trained on.
const TRAINED_COLUMNS: [&str; 5] = ["messages", "prompt", "completion", TOOLS, TEMPLATE_KWARGS];

/// Examples of supervised training.
#[derive(Debug)]
pub struct SftDataset {
    config: SftConfig,
    /// Examples of `train`; `None`: the task's are drawn.
    rows: Option<Vec<Sequence>>,
    /// Number of examples; `None` of an endless task.
    examples: Option<u64>,
    /// Validation examples.
    pub validation: Vec<Sequence>,
    /// Rows skipped for their length.
    pub filtered: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Files of its rows, each with the key that names it.
    pub files: Vec<(&'static str, PathBuf)>,
    /// Maximum tokens of an example of the task.
    max_tokens: usize,
    /// Section of its settings.
    section: &'static str,
}

impl SftDataset {
    /// Reads and encodes the examples of a section (`sft` or `warmup.sft`).
    ///
    /// # Errors
    /// `Error::Task` for a row that cannot be read, `Error::Model` for one that cannot be encoded, `Error::Config` if
    /// none is short enough, or for epochs of an endless task.
    pub fn new(config: &SftConfig, section: &'static str, source: &PolicySource, data: &PromptDataset) -> Result<Self> {
        let (mut filtered, mut files) = (0, Vec::new());
        let mut read = |file: &Path, setting| {
            let paths = RowFiles::from(file).list(Path::new("."), setting)?.concat();
            let (rows, skipped) = read_rows(config, &paths, setting, source)?;
            files.extend(paths.into_iter().map(|path| (setting, path)));
            filtered += skipped;
            Ok::<_, Error>(rows)
        };
        let [train, validation] = match section {
            "sft" => ["sft.train", "sft.validation"],
            _ => ["warmup.sft.train", "warmup.sft.validation"],
        };
        let rows = config.train.as_ref().map(|file| read(file, train)).transpose()?;
        let limit = limit(config, source);
        let validation = match &config.validation {
            Some(file) => read(file, validation)?,
            None => {
                let mut examples = held_out(source, data)?;
                examples.retain(|sequence| sequence.tokens.len() <= limit);
                examples
            }
        };
        let examples = match &rows {
            Some(rows) => Some(rows.len() as u64),
            None => data.examples(),
        };
        Ok(Self {
            config: config.clone(),
            steps: config.length(section, examples)?,
            rows,
            examples,
            validation: weighted(validation),
            filtered,
            files,
            max_tokens: if data.examples().is_none() { declared(source, data)?.min(limit) } else { limit },
            section,
        })
    }

    /// Maximum tokens of an example: of the longest row of a file, validation example, and solution of the task if all
    /// are known; else the model's context.
    ///
    /// # Errors
    /// `Error::Task` and `Error::Model` if an example cannot be read or encoded.
    pub fn longest(&self, source: &PolicySource, data: &PromptDataset) -> Result<usize> {
        let read = self.rows.iter().flatten().chain(&self.validation);
        let longest = read.map(|s| s.tokens.len()).max().unwrap_or(0);
        if self.rows.is_some() {
            return Ok(longest);
        }
        let rows = data.examples();
        // of few rows, one beyond the model's context is an error; of many, it is replaced when it is drawn
        let skips = self.config.max_length.is_some() || rows.is_some_and(|rows| rows > SAMPLED_ROWS);
        let longer = AtomicU64::new(0);
        let solutions = data.largest(|prompt| {
            let sequence = example(prompt, data.task(), source)?;
            match sequence.tokens.len() {
                length if length <= self.max_tokens => Ok(length),
                _ if skips => {
                    longer.fetch_add(1, Ordering::Relaxed);
                    Ok(0)
                }
                _ => Err(too_long(prompt, &sequence, source)),
            }
        })?;
        let (section, max_tokens, longer) = (self.section, self.max_tokens, longer.into_inner());
        match (solutions, rows) {
            (Some(0), Some(rows)) if rows > 0 => {
                return Err(Error::Config(format!(
                    "all {rows} prompts with their solutions are longer than {max_tokens} tokens; raise {section}.max_length \
                     (the model's context is {})",
                    source.trained_context()
                )));
            }
            (Some(_), Some(rows)) if longer > 0 => tracing::warn!(
                "{longer} of {rows} prompts with their solutions are longer than {max_tokens} tokens, and are replaced \
                 when they are drawn"
            ),
            (None, Some(rows)) => tracing::warn!(
                "memory is planned for examples of {max_tokens} tokens, because {rows} rows are too many to encode all before \
                 the first step; set {section}.max_length"
            ),
            _ => {}
        }
        Ok(longest.max(solutions.unwrap_or(max_tokens)))
    }

    /// Examples of a step, weighted for the mean over its scored tokens, and the finished epochs after it, for finite
    /// examples.
    ///
    /// # Errors
    /// `Error::Task` and `Error::Model` if an example cannot be read or encoded; those of [`PromptDataset::draw`].
    pub fn step(
        &self,
        step: u64,
        seed: u64,
        source: &PolicySource,
        data: &PromptDataset,
    ) -> Result<(Vec<Sequence>, Option<f64>)> {
        let draws = self.draws(step);
        let first = self.first_draw();
        let epochs = self.examples.map(|n| (draws.end - first) as f64 / n as f64);
        let drawn = draws.map(|draw| {
            let sequence = match &self.rows {
                Some(rows) => {
                    let index = shuffled_index(self.examples, seed, draw);
                    rows[index.unwrap_or_default() as usize].clone()
                }
                None => data.draw_as(seed, draw, |prompt| {
                    let sequence = example(&prompt, data.task(), source)?;
                    Ok((sequence.tokens.len() <= self.max_tokens).then_some(sequence))
                })?,
            };
            let id = SampleId { prompt_index: draw, sample: 0 };
            Ok(Sequence { id, ..sequence })
        });
        Ok((weighted(drawn.collect::<Result<_>>()?), epochs))
    }

    /// First draw: the beginning of an epoch.
    fn first_draw(&self) -> u64 {
        self.examples.map_or(SFT_DRAWS, |n| SFT_DRAWS.next_multiple_of(n.max(1)))
    }

    /// Draws of a step. With `epochs`, the last step of an epoch is shorter; otherwise a step may reach into the next
    /// epoch.
    fn draws(&self, step: u64) -> Range<u64> {
        let (first, batch) = (self.first_draw(), self.config.batch_size as u64);
        match (self.config.epochs, self.examples) {
            (Some(_), Some(n)) => {
                let each = n.div_ceil(batch);
                let epoch = first + step / each * n;
                let start = epoch + step % each * batch;
                start..(start + batch).min(epoch + n)
            }
            _ => first + step * batch..first + (step + 1) * batch,
        }
    }
}

/// Maximum tokens of an example, by a section's settings.
fn limit(config: &SftConfig, source: &PolicySource) -> usize {
    let context = source.trained_context();
    config.max_length.unwrap_or(context).min(context)
}

/// Reads and encodes rows. Returns those that fit, and the number of the others.
fn read_rows(
    config: &SftConfig,
    files: &[PathBuf],
    setting: &'static str,
    source: &PolicySource,
) -> Result<(Vec<Sequence>, u64)> {
    let (context, max_tokens) = (source.trained_context(), limit(config, source));
    let rows = Rows::read(files, setting, None, &|_| Ok(()))?;
    let (count, mut shortest) = (rows.len() as usize, usize::MAX);
    let mut kept = Vec::with_capacity(count);
    let mut findings = Findings::default();
    for at in 0..rows.len() {
        let row = rows.get(at)?;
        let place = row.place.clone();
        let sequence = sequence(row, setting, config.special_tokens, source, &mut findings);
        let sequence = sequence.map_err(|error| error.in_row(&place))?;
        shortest = shortest.min(sequence.tokens.len());
        firebrick_sampler::check_ids(&sequence.tokens, source.checkpoint.arch().vocab_size)?;
        if sequence.tokens.len() <= max_tokens {
            kept.push(sequence);
        }
    }
    findings.report(setting, config.special_tokens);
    if let Some(family) = source.tokenizer.training_family().filter(|_| findings.conversations) {
        tracing::info!(
            "{setting}: conversations are rendered with the chat template of {family} for training, which writes the \
             reasoning of every turn; saved models keep the checkpoint's. Set model.chat_template to a file for another"
        );
    }
    if kept.is_empty() {
        return Err(Error::Config(format!(
            "{setting}: all {count} rows are longer than {max_tokens} tokens (the shortest has {shortest}); raise max_length \
             (the model's context is {context})"
        )));
    }
    let ends =
        |sequence: &Sequence| sequence.positions.iter().any(|at| source.ends.ids.contains(&sequence.tokens[at + 1]));
    if !kept.iter().any(ends) {
        tracing::warn!(
            "{setting}: no row has a trained token that ends completions ({}), so the model does not learn to end its \
             turns: let the chat template write one of these behind a turn (model.chat_template)",
            EndTokens::shown(&source.ends.ids, &source.tokenizer)
        );
    }
    let skipped = count - kept.len();
    if skipped > 0 {
        tracing::warn!("skipped {skipped} of {count} rows of {setting} longer than {max_tokens} tokens");
    }
    Ok((kept, skipped as u64))
}

/// Findings in the rows of a file.
#[derive(Default)]
struct Findings {
    spelled: SpelledTokens,
    /// True if there are conversations.
    conversations: bool,
    /// Rows with a value in a column that is not trained on.
    unread: BTreeMap<String, u64>,
}

impl Findings {
    fn add(&mut self, row: &Row, spelled: BTreeSet<String>) {
        self.spelled.add(spelled);
        let unread =
            row.fields.iter().filter(|(name, value)| !TRAINED_COLUMNS.contains(&name.as_str()) && !value.is_null());
        for (name, _) in unread {
            *self.unread.entry(name.clone()).or_default() += 1;
        }
    }

    fn report(&self, setting: &str, special_tokens: SpecialTokens) {
        // `sft.train` or `warmup.sft.train`
        let section = setting.rsplit_once('.').map_or(setting, |(section, _)| section);
        let rows = format!("rows of {setting}");
        let key = format!("{section}.special_tokens");
        if let Some(warning) = self.spelled.warning(&rows, &key, special_tokens) {
            tracing::warn!("{warning}");
        }
        if !self.unread.is_empty() {
            let columns: Vec<String> = self.unread.iter().map(|(name, n)| format!("`{name}` ({n} rows)")).collect();
            tracing::warn!("columns of {setting} that are not trained on: {}", columns.join(", "));
        }
    }
}

fn sequence(
    mut row: Row,
    setting: &str,
    special_tokens: SpecialTokens,
    source: &PolicySource,
    findings: &mut Findings,
) -> Result<Sequence> {
    check_text_only(&row, setting, |_| false)?;
    if !row.fields.get("prompt").is_some_and(Value::is_string) {
        read_tools(&mut row)?;
        read_template_kwargs(&mut row)?;
    }
    let row = &row;
    let chat = |key: &str, list: &[Value]| {
        let messages = list.iter().map(|value| message(value, key, setting, row));
        messages.collect::<Result<Vec<Message>, TaskError>>()
    };
    let fields = ["messages", "prompt", "completion"].map(|key| {
        // a Parquet file has a null where a row has no such column
        row.fields.column(key).filter(|value| !value.is_null())
    });
    let tokenizer = &source.tokenizer;
    let tools = row.fields.column(TOOLS);
    let mut encode = |messages: &[Message], from| {
        findings.conversations = true;
        findings.add(row, spelled_in_chat(tokenizer, messages, tools));
        let kwargs = row.fields.column(TEMPLATE_KWARGS).and_then(Value::as_object);
        let options = ChatOptions { tools, kwargs, special_tokens, ..ChatOptions::default() };
        tokenizer.encode_with_assistant_mask(messages, from, options)
    };
    let encoded = match fields {
        [Some(Value::Array(list)), None, None] => encode(&chat("messages", list)?, 0),
        [None, Some(Value::Array(prompt)), Some(Value::Array(completion))] => {
            let mut messages = chat("prompt", prompt)?;
            let from = messages.len();
            messages.extend(chat("completion", completion)?);
            encode(&messages, from)
        }
        [None, Some(Value::String(prompt)), Some(Value::String(completion))] => {
            let spelled = [prompt, completion].into_iter().flat_map(|text| tokenizer.special_tokens_in(text));
            findings.add(row, spelled.collect());
            let prompt = tokenizer.encode_text(prompt, &special_tokens.into(), true)?;
            if prompt.is_empty() {
                return Err(row.bad(setting, "its prompt has no tokens").into());
            }
            return completed(&prompt, completion, special_tokens, source.ends.of_text, source);
        }
        _ => {
            let detail = "expected `messages` (a list), or `prompt` and `completion` (both strings or both lists of \
             messages)";
            return Err(row.bad(setting, detail).into());
        }
    };
    let encoded = encoded.map_err(|e| row.bad(setting, e.to_string()))?;
    conversation(encoded).ok_or_else(|| {
        let detail = "there is no assistant turn with text to train on";
        row.bad(setting, detail).into()
    })
}

/// A conversation with scored tokens of the assistant; `None` without any.
fn conversation(encoded: ChatTokens) -> Option<Sequence> {
    let ChatTokens { tokens, assistant_mask } = encoded;
    // no token predicts the first one
    let positions: Vec<usize> = (1..tokens.len()).filter(|&t| assistant_mask[t]).map(|t| t - 1).collect();
    (!positions.is_empty()).then(|| Sequence { tokens, positions, ..Sequence::default() })
}

/// A prompt with its scored completion and end token.
fn completed(
    prompt: &[u32],
    completion: &str,
    special_tokens: SpecialTokens,
    end: Option<u32>,
    source: &PolicySource,
) -> Result<Sequence> {
    let mut completion = source.tokenizer.encode_text(completion, &special_tokens.into(), false)?;
    completion.extend(end);
    Ok(Sequence::completion(prompt, &completion))
}

fn too_long(prompt: &Prompt, sequence: &Sequence, source: &PolicySource) -> Error {
    let what = format!("prompt {:?} with its solution", prompt.text);
    let (length, context) = (sequence.tokens.len(), source.trained_context());
    firebrick_models::Error::TooLong { what, length, context }.into()
}

/// A task's prompt with its demonstration, or its solution, of any length.
fn example(prompt: &Prompt, task: &dyn Task, source: &PolicySource) -> Result<Sequence> {
    let sequence = match demonstrated(prompt, task, source)? {
        Some(sequence) => sequence,
        None => with_solution(prompt, source)?,
    };
    firebrick_sampler::check_ids(&sequence.tokens, source.checkpoint.arch().vocab_size)?;
    Ok(sequence)
}

/// Maximum tokens of an example of an endless task, from its longest example; without one, the model's context.
fn declared(source: &PolicySource, data: &PromptDataset) -> Result<usize> {
    let context = source.trained_context();
    let Some(prompt) = data.longest_example()? else {
        return Ok(context);
    };
    let sequence = example(&prompt, data.task(), source)?;
    let tokenizer = &source.tokenizer;
    let text = match (data.task().demonstration(&prompt.example), &prompt.example.prompt) {
        (Some(demonstration), PromptText::Chat(messages)) => {
            let options = ChatOptions { add_generation_prompt: false, ..prompt.example.chat_options() };
            tokenizer.render_chat_with(&[messages.as_slice(), &demonstration].concat(), options)?
        }
        // with a character for the token that ends it
        _ => format!("{}{} ", prompt.text, prompt.example.solution.as_deref().unwrap_or_default()),
    };
    Ok(tokenizer.most_tokens(&text, sequence.tokens.len()).min(context))
}

/// A prompt with a demonstration of several turns, if the task has one, with scored assistant turns.
fn demonstrated(prompt: &Prompt, task: &dyn Task, source: &PolicySource) -> Result<Option<Sequence>> {
    let (Some(demonstration), PromptText::Chat(messages)) =
        (task.demonstration(&prompt.example), &prompt.example.prompt)
    else {
        return Ok(None);
    };
    let whole = [messages.as_slice(), &demonstration].concat();
    let tokenizer = &source.tokenizer;
    let encoded = tokenizer.encode_with_assistant_mask(&whole, messages.len(), prompt.example.chat_options())?;
    conversation(encoded).map(Some).ok_or_else(|| {
        Error::Config(format!(
            "the task's demonstration for prompt {:?} has no turn of the assistant with text to train on",
            prompt.text
        ))
    })
}

/// A prompt with its solution.
fn with_solution(prompt: &Prompt, source: &PolicySource) -> Result<Sequence> {
    let Some(solution) = &prompt.example.solution else {
        return Err(Error::Config(format!(
            "supervised training needs solutions, but the task has none for prompt {:?}; set `solution` in the task's \
             configuration, or a file of rows as `sft.train` (`warmup.sft.train`)",
            prompt.text
        )));
    };
    let end = source.ends.target(matches!(prompt.example.prompt, PromptText::Chat(_)));
    completed(&prompt.tokens, solution, prompt.example.special_tokens(), end, source)
}

/// The task's validation prompts with their solutions, if it has solutions.
fn held_out(source: &PolicySource, data: &PromptDataset) -> Result<Vec<Sequence>> {
    let task = data.task();
    let has_none = |p: &Prompt| p.example.solution.is_none() && task.demonstration(&p.example).is_none();
    if data.validation.iter().any(has_none) {
        return Ok(Vec::new());
    }
    let within = |prompt: &Prompt| {
        let sequence = example(prompt, task, source)?;
        let fits = sequence.tokens.len() <= source.trained_context();
        if fits { Ok(sequence) } else { Err(too_long(prompt, &sequence, source)) }
    };
    data.validation.iter().map(within).collect()
}

/// Gives every scored token the same weight; weights sum to one.
fn weighted(mut sequences: Vec<Sequence>) -> Vec<Sequence> {
    let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
    let denominators = Denominators::new(&lengths, 1);
    let weights = token_weights(LossAggMode::TokenMean, &lengths, denominators);
    for (sequence, weights) in sequences.iter_mut().zip(weights) {
        sequence.columns.weight = Some(weights);
    }
    sequences
}
