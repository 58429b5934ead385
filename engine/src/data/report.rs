//! Report on a task's data: columns, lengths, duplicates, and rendered prompts.

use super::lengths::Lengths;
use super::prompt_dataset::{encode_prompt, sample};
use super::spelled::{SpelledTokens, spelled_in};
use crate::checkpoint::tokenizer_of;
use crate::config::RunConfig;
use crate::task::{Example, PromptText, Split, TOOLS, Task, TaskConfig};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{Message, SpecialTokens};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

/// Examined examples of an endless task.
const ENDLESS_SAMPLE: u64 = 256;
/// Examples that one core examines at a time.
const BATCH: u64 = 1024;
/// Maximum kinds of values reported per column.
const MAX_KINDS: usize = 4;

/// Report on a task's data.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataReport {
    /// Name of the task in metrics.
    pub task: String,
    /// Maximum tokens of a training prompt: `rollout.prompt_length`.
    pub prompt_length: usize,
    /// Training split.
    pub train: SplitReport,
    /// Validation split, if it has examples.
    pub validation: Option<SplitReport>,
    /// Validation examples whose prompt is also a training prompt.
    pub shared_prompts: u64,
    /// True if the tokenizer has a chat template.
    pub has_chat_template: bool,
    /// Encoding of special tokens in the text of rows: `task.special_tokens`.
    pub special_tokens: SpecialTokens,
    /// Variables of the chat template: `model.chat_template_kwargs`.
    pub chat_template_kwargs: Map<String, Value>,
    /// Some training prompts.
    pub samples: Vec<SampledPrompt>,
}

/// One split.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SplitReport {
    /// Examples; `None` of an endless task.
    pub rows: Option<u64>,
    /// Examined examples.
    pub looked_at: u64,
    /// Columns of their rows, in order of appearance.
    pub columns: Vec<Column>,
    /// Examples whose prompt equals that of an earlier one.
    pub duplicates: u64,
    /// Tokens of prompts, of all or of an evenly spread sample.
    pub prompt_tokens: Option<Lengths>,
    /// Prompts above the limit among them.
    pub over_long: u64,
    /// Special tokens in the text of examples.
    pub special_tokens: SpelledTokens,
    /// Tokens of demonstrations with the end token, of the same examples, if there are any.
    pub solution_tokens: Option<Lengths>,
}

/// A column of the rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Column {
    /// Name.
    pub name: String,
    /// Kinds of values.
    pub kinds: BTreeSet<String>,
    /// Rows with a value other than null.
    pub values: u64,
}

/// A prompt with its sources.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampledPrompt {
    /// Index in the split.
    pub index: u64,
    /// Messages for the chat template; `None` of a plain text.
    pub messages: Option<Vec<Message>>,
    /// Tools for the chat template.
    pub tools: Option<Value>,
    /// Output of the chat template, or the plain text.
    pub text: String,
    /// Decoded tokens, with special tokens.
    pub decoded: String,
    /// Number of tokens.
    pub tokens: usize,
    /// Ground truth.
    pub answer: String,
    /// Demonstration.
    pub solution: Option<String>,
}

impl DataReport {
    /// Reads and examines the configured task; token lengths are those of at most [`SAMPLED_ROWS`](super::SAMPLED_ROWS)
    /// examples.
    ///
    /// # Errors
    /// `Error::Config` without a task; `Error::Task` if rows cannot be read; those of [`tokenizer_of`], and
    /// `Error::Model` for a prompt that cannot be rendered.
    pub fn of(config: &RunConfig, samples: usize) -> Result<Self> {
        let Some(mut task) = config.task.clone() else {
            return Err(Error::Config("`task` is missing; set its `kind` (arithmetic or dataset)".into()));
        };
        // each row once, however often it is drawn
        if let TaskConfig::Dataset(rows) | TaskConfig::Jsonl(rows) = &mut task {
            for source in &mut rows.train.0 {
                source.weight = None;
            }
        }
        let task = task.build(Path::new("."))?;
        let tokenizer = tokenizer_of(&config.model, task.as_ref())?;
        let prompt_length = config.rollout.prompt_length;
        let examiner = Examiner { task: task.as_ref(), tokenizer: &tokenizer, prompt_length };
        let (train, prompts) = examiner.split(Split::Train)?;
        let (validation, held_out) = examiner.split(Split::Validation)?;
        let known: HashSet<u64> = prompts.into_iter().collect();
        let samples = 0..(samples as u64).min(train.looked_at);
        let rows = config.task.as_ref().and_then(TaskConfig::rows);
        Ok(Self {
            task: task.name().to_owned(),
            prompt_length,
            shared_prompts: held_out.iter().filter(|p| known.contains(p)).count() as u64,
            samples: samples.map(|index| examiner.sample(index)).collect::<Result<_>>()?,
            train,
            validation: Some(validation).filter(|split| split.looked_at > 0),
            special_tokens: rows.map(|rows| rows.special_tokens).unwrap_or_default(),
            has_chat_template: tokenizer.has_chat_template(),
            chat_template_kwargs: tokenizer.chat_template_kwargs().clone(),
        })
    }
}

/// Examines a task.
struct Examiner<'a> {
    task: &'a dyn Task,
    tokenizer: &'a Tokenizer,
    prompt_length: usize,
}

impl Examiner<'_> {
    /// Report on a split, and the fingerprints of its prompts.
    fn split(&self, split: Split) -> Result<(SplitReport, Vec<u64>)> {
        let rows = self.task.len(split);
        let looked_at = rows.unwrap_or(ENDLESS_SAMPLE);
        let pieces: Vec<Result<Piece>> = (0..looked_at.div_ceil(BATCH))
            .into_par_iter()
            .map(|piece| self.piece(split, piece * BATCH, looked_at))
            .collect();
        let mut whole = Piece::default();
        for piece in pieces {
            whole.join(piece?);
        }
        let lengths: Vec<Result<(usize, Option<usize>)>> =
            sample(looked_at).into_par_iter().map(|index| self.lengths(split, index)).collect();
        let (mut prompts, mut solutions) = (Vec::new(), Vec::new());
        for length in lengths {
            let (prompt, solution) = length?;
            prompts.push(prompt);
            solutions.extend(solution);
        }
        let over_long = prompts.iter().filter(|&&n| n > self.prompt_length).count();
        let distinct: HashSet<u64> = whole.prompts.iter().copied().collect();
        let report = SplitReport {
            rows,
            looked_at,
            columns: whole.columns,
            duplicates: (whole.prompts.len() - distinct.len()) as u64,
            prompt_tokens: Lengths::new(prompts),
            over_long: over_long as u64,
            special_tokens: whole.spelled,
            solution_tokens: Lengths::new(solutions),
        };
        Ok((report, whole.prompts))
    }

    fn piece(&self, split: Split, from: u64, end: u64) -> Result<Piece> {
        let mut piece = Piece::default();
        for index in from..(from + BATCH).min(end) {
            let example = self.task.example(split, index)?;
            piece.spelled.add(spelled_in(self.tokenizer, &example));
            piece.add(&example);
        }
        Ok(piece)
    }

    /// Tokens of an example's prompt and of its solution.
    fn lengths(&self, split: Split, index: u64) -> Result<(usize, Option<usize>)> {
        let example = self.task.example(split, index)?;
        let (_, tokens) = encode_prompt(self.tokenizer, &example)?;
        let (solution, control) = (example.solution.as_deref(), example.special_tokens().into());
        let solution =
            solution.map(|text| Ok::<_, Error>(self.tokenizer.encode_text(text, &control, false)?.len() + 1));
        Ok((tokens.len(), solution.transpose()?))
    }

    fn sample(&self, index: u64) -> Result<SampledPrompt> {
        let example = self.task.example(Split::Train, index)?;
        let (text, tokens) = encode_prompt(self.tokenizer, &example)?;
        let messages = match example.prompt {
            PromptText::Chat(messages) => Some(messages),
            PromptText::Text(_) => None,
        };
        let tools = example.fields.column(TOOLS).filter(|tools| !tools.is_null());
        Ok(SampledPrompt {
            index,
            tools: tools.cloned().filter(|_| messages.is_some()),
            messages,
            decoded: self.tokenizer.decode(&tokens, false)?,
            text,
            tokens: tokens.len(),
            answer: example.answer,
            solution: example.solution,
        })
    }
}

/// Findings of some examples.
#[derive(Default)]
struct Piece {
    columns: Vec<Column>,
    prompts: Vec<u64>,
    spelled: SpelledTokens,
}

impl Piece {
    fn add(&mut self, example: &Example) {
        self.prompts.push(fingerprint(example));
        for (name, value) in example.fields.iter() {
            let column = self.column(name);
            column.values += u64::from(!value.is_null());
            if !value.is_null() && column.kinds.len() < MAX_KINDS {
                column.kinds.insert(kind(value, 2));
            }
        }
    }

    fn column(&mut self, name: &str) -> &mut Column {
        let at = self.columns.iter().position(|column| column.name == name);
        let at = at.unwrap_or_else(|| {
            self.columns.push(Column { name: name.to_owned(), kinds: BTreeSet::new(), values: 0 });
            self.columns.len() - 1
        });
        &mut self.columns[at]
    }

    fn join(&mut self, other: Self) {
        self.prompts.extend(other.prompts);
        self.spelled.join(other.spelled);
        for column in other.columns {
            let total = self.column(&column.name);
            total.values += column.values;
            let free = MAX_KINDS.saturating_sub(total.kinds.len());
            let new: Vec<String> = column.kinds.difference(&total.kinds).take(free).cloned().collect();
            total.kinds.extend(new);
        }
    }
}

/// Hash of a prompt, equal for equal prompts.
fn fingerprint(example: &Example) -> u64 {
    let mut hasher = DefaultHasher::new();
    match &example.prompt {
        PromptText::Text(text) => text.hash(&mut hasher),
        PromptText::Chat(messages) => {
            serde_json::to_string(&(messages, example.fields.column(TOOLS))).unwrap_or_default().hash(&mut hasher);
        }
    }
    hasher.finish()
}

/// Kind of a value; objects and lists are described to a depth.
fn kind(value: &Value, depth: usize) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "boolean".to_owned(),
        Value::Number(number) if number.is_f64() => "number".to_owned(),
        Value::Number(_) => "integer".to_owned(),
        Value::String(_) => "text".to_owned(),
        Value::Array(list) => {
            let is_message = |entry: &Value| entry.get("role").is_some_and(Value::is_string);
            match list.first() {
                None => "empty list".to_owned(),
                Some(_) if list.iter().all(is_message) => "messages".to_owned(),
                Some(first) if depth > 0 => format!("list of {}", kind(first, depth - 1)),
                Some(_) => "list".to_owned(),
            }
        }
        Value::Object(fields) if depth > 0 => {
            let known = fields.iter().filter(|(_, value)| !value.is_null());
            let fields: Vec<String> =
                known.map(|(name, value)| format!("{name}: {}", kind(value, depth - 1))).collect();
            format!("{{{}}}", fields.join(", "))
        }
        Value::Object(_) => "object".to_owned(),
    }
}
