//! Conversion of rows to examples: the prompt, answer and solution settings, checked and
//! compiled.

use firebrick_models::tokenizer::{Control, Message, SpecialTokens};
use firebrick_spec::json::to_text;
use regex::Regex;
use serde_json::Value;
use std::ops::Range;

use super::conversation::{check_text_only, message, read_template_kwargs, read_tools};
use super::jsonl::config::{Extract, JsonlConfig, MessageTemplate};
use super::reward::compile;
use super::rows::TRAIN;
use super::template::{Row, Template};
use super::{Example, PromptText, TaskError};

/// Source of a text of an example.
#[derive(Debug)]
pub(crate) enum TextSource {
    Template(Template),
    Field { path: String, setting: &'static str },
}

impl TextSource {
    /// The source named by a template setting or by a field setting, if either is set.
    fn new(
        template: Option<&str>,
        template_setting: &'static str,
        field: Option<&str>,
        field_setting: &'static str,
    ) -> Result<Option<Self>, TaskError> {
        match (template, field) {
            (None, None) => Ok(None),
            (Some(text), None) => Ok(Some(Self::Template(Template::parse(text, template_setting)?))),
            (None, Some(path)) => Ok(Some(Self::Field { path: path.to_owned(), setting: field_setting })),
            (Some(_), Some(_)) => {
                let detail = format!("expected at most one of it and `{field_setting}`, found both");
                Err(TaskError::config(template_setting, detail))
            }
        }
    }

    fn text(&self, row: &Row) -> Result<String, TaskError> {
        match self {
            Self::Template(template) => template.render(row),
            Self::Field { path, setting } => row.text(path, setting),
        }
    }
}

#[derive(Debug)]
enum Prompt {
    Text(Template),
    Chat(Vec<(String, Template)>),
    Field(String),
}

/// A [`JsonlConfig`] checked and compiled: converts rows to examples.
#[derive(Debug)]
pub(crate) struct Recipe {
    prompt: Prompt,
    system: Option<String>,
    special_tokens: SpecialTokens,
    answer: Option<TextSource>,
    extract: Option<Extraction>,
    solution: Option<TextSource>,
}

#[derive(Debug)]
enum Extraction {
    Gsm8k,
    Regex(Regex),
}

const PROMPT_FIELD: &str = "task.prompt_field";

/// The field of the ground truth in verl's rows.
const GROUND_TRUTH: &str = "reward_model.ground_truth";

/// The value, or its error in `wrong`.
fn ok_or_report<T>(part: Result<T, TaskError>, wrong: &mut Vec<TaskError>) -> Option<T> {
    part.map_err(|error| wrong.push(error)).ok()
}

impl Prompt {
    fn new(config: &JsonlConfig) -> Result<Self, Vec<TaskError>> {
        let prompt = match (&config.prompt, &config.messages, &config.prompt_field) {
            (Some(text), None, None) => Self::Text(Template::parse(text, "task.prompt").map_err(|e| vec![e])?),
            (None, Some(messages), None) => Self::Chat(parse_messages(messages)?),
            (None, None, field) => Self::Field(field.clone().unwrap_or("prompt".to_owned())),
            _ => {
                let detail = "expected at most one of `prompt`, `messages` and `prompt_field`, \
                              found several";
                return Err(vec![TaskError::config("task.prompt", detail)]);
            }
        };
        if let (Self::Text(_), Some(_)) = (&prompt, &config.system_prompt) {
            let detail = "needs a conversation, but `prompt` is plain text; write the prompt as `messages`";
            return Err(vec![TaskError::config("task.system_prompt", detail)]);
        }
        Ok(prompt)
    }
}

/// The messages as templates, or all of their errors.
fn parse_messages(messages: &[MessageTemplate]) -> Result<Vec<(String, Template)>, Vec<TaskError>> {
    let mut wrong = Vec::new();
    let parse = |(at, message): (usize, &MessageTemplate)| {
        let setting = format!("task.messages[{at}].content");
        let template = ok_or_report(Template::parse(&message.content, &setting), &mut wrong)?;
        Some((message.role.clone(), template))
    };
    let templates = messages.iter().enumerate().filter_map(parse).collect();
    if wrong.is_empty() { Ok(templates) } else { Err(wrong) }
}

impl Extraction {
    fn new(extract: &Extract, has_answer: bool) -> Result<Self, TaskError> {
        match extract {
            _ if !has_answer => {
                let detail = "there is no answer to extract it from; set `answer_field`";
                Err(TaskError::config("task.answer_extract", detail))
            }
            Extract::Gsm8k => Ok(Self::Gsm8k),
            Extract::Regex(pattern) => compile(pattern, "task.answer_extract.regex").map(Self::Regex),
        }
    }
}

impl Recipe {
    pub fn new(config: &JsonlConfig) -> Result<Self, TaskError> {
        Self::checked(config).map_err(|mut wrong| wrong.swap_remove(0))
    }

    /// Compiles the settings, or returns all errors (at least one).
    pub fn checked(config: &JsonlConfig) -> Result<Self, Vec<TaskError>> {
        let mut wrong = Vec::new();
        let prompt = Prompt::new(config).map_err(|errors| wrong.extend(errors)).ok();
        let (answer, field) = (config.answer.as_deref(), config.answer_field.as_deref());
        let has_answer = answer.is_some() || field.is_some();
        let answer = TextSource::new(answer, "task.answer", field, "task.answer_field");
        let answer = ok_or_report(answer, &mut wrong);
        let extract = config.answer_extract.as_ref();
        let extract = extract.map(|extract| Extraction::new(extract, has_answer)).transpose();
        let extract = ok_or_report(extract, &mut wrong);
        let (solution, field) = (config.solution.as_deref(), config.solution_field.as_deref());
        let solution = TextSource::new(solution, "task.solution", field, "task.solution_field");
        let solution = ok_or_report(solution, &mut wrong);
        match (prompt, answer, extract, solution) {
            (Some(prompt), Some(answer), Some(extract), Some(solution)) => {
                let (system, special_tokens) = (config.system_prompt.clone(), config.special_tokens);
                Ok(Self { prompt, system, special_tokens, answer, extract, solution })
            }
            _ => Err(wrong),
        }
    }

    /// All errors of a row, of which [`example`](Self::example) returns the first.
    pub fn faults(&self, row: &Row) -> Vec<TaskError> {
        let mut faults = match &self.prompt {
            Prompt::Text(template) => template.faults(row),
            Prompt::Chat(messages) => messages.iter().flat_map(|(_, content)| content.faults(row)).collect(),
            Prompt::Field(_) => self.prompt(row).err().into_iter().collect(),
        };
        for source in [&self.answer, &self.solution].into_iter().flatten() {
            match source {
                TextSource::Template(template) => faults.extend(template.faults(row)),
                TextSource::Field { .. } => faults.extend(source.text(row).err()),
            }
        }
        if faults.is_empty() {
            faults.extend(self.example(row.clone()).err());
        }
        faults
    }

    /// Returns true if a row has a ground truth: the task's field, or verl's.
    pub fn has_answer(&self, row: &Row) -> bool {
        self.answer.is_some() || has_verl_answer(row)
    }

    pub fn example(&self, mut row: Row) -> Result<Example, TaskError> {
        let mut answer = match &self.answer {
            Some(source) => source.text(&row)?,
            None if has_verl_answer(&row) => row.text(GROUND_TRUTH, "task.answer_field")?,
            None => String::new(),
        };
        if let Some(extract) = &self.extract {
            answer = extract.apply(&answer, &row)?;
        }
        let solution = self.solution.as_ref().map(|source| source.text(&row)).transpose()?;
        check_text_only(&row, TRAIN, |column| self.reads(column))?;
        let (prompt, literals) = self.prompt(&row)?;
        if let PromptText::Chat(_) = prompt {
            read_tools(&mut row)?;
            read_template_kwargs(&mut row)?;
        }
        let control = match self.special_tokens {
            SpecialTokens::Allow => Control::Everywhere,
            SpecialTokens::Text => Control::In(literals),
        };
        Ok(Example { prompt, answer, solution, fields: row.fields, control })
    }

    /// Returns true if a column is text of the prompt, the answer or the solution.
    fn reads(&self, column: &str) -> bool {
        let reads = |source: &TextSource| match source {
            TextSource::Template(template) => template.reads(column),
            TextSource::Field { path, .. } => path == column,
        };
        let in_prompt = match &self.prompt {
            Prompt::Text(template) => template.reads(column),
            Prompt::Chat(messages) => messages.iter().any(|(_, content)| content.reads(column)),
            Prompt::Field(path) => path == column,
        };
        in_prompt || [&self.answer, &self.solution].into_iter().flatten().any(reads)
    }

    /// A row's prompt, and for plain text the byte ranges of the configuration's text.
    fn prompt(&self, row: &Row) -> Result<(PromptText, Vec<Range<usize>>), TaskError> {
        let mut chat = match &self.prompt {
            Prompt::Text(template) => {
                let (text, literals) = template.render_with_literals(row)?;
                return Ok((PromptText::Text(text), literals));
            }
            Prompt::Chat(messages) => {
                let render =
                    |(role, content): &(String, Template)| Ok(Message::new(role.clone(), content.render(row)?));
                messages.iter().map(render).collect::<Result<Vec<_>, _>>()?
            }
            Prompt::Field(path) => match row.written(path, PROMPT_FIELD)? {
                Value::String(_) if self.system.is_some() => {
                    let detail = format!("field `{path}` is plain text, expected a list of messages");
                    return Err(row.bad("task.system_prompt", detail));
                }
                Value::String(text) => return Ok((PromptText::Text(text.clone()), Vec::new())),
                Value::Array(list) if !list.is_empty() => {
                    list.iter().map(|value| message(value, path, PROMPT_FIELD, row)).collect::<Result<_, _>>()?
                }
                other => {
                    let other = to_text(other);
                    let detail = format!("field `{path}` is {other}, expected a string or a list of chat messages");
                    return Err(row.bad(PROMPT_FIELD, detail));
                }
            },
        };
        if let Some(system) = &self.system {
            if chat.first().is_some_and(|first| first.role() == "system") {
                let detail = "the prompt already begins with a system message; remove one of the two";
                return Err(row.bad("task.system_prompt", detail));
            }
            chat.insert(0, Message::new("system", system.clone()));
        }
        Ok((PromptText::Chat(chat), Vec::new()))
    }
}

/// Returns true if a row has verl's ground truth.
fn has_verl_answer(row: &Row) -> bool {
    row.fields.at(GROUND_TRUTH).is_some_and(|truth| !truth.is_null())
}

impl Extraction {
    fn apply(&self, text: &str, row: &Row) -> Result<String, TaskError> {
        let (answer, expected) = match self {
            Self::Gsm8k => {
                let after = text.rsplit_once("####").map(|(_, tail)| tail.replace(',', ""));
                (after, "`#### ` and a number".to_owned())
            }
            Self::Regex(pattern) => {
                let last = pattern.captures_iter(text).last();
                let group = last.and_then(|c| c.get(pattern.captures_len().min(2) - 1));
                (group.map(|g| g.as_str().to_owned()), format!("a match of {:?}", pattern.as_str()))
            }
        };
        answer.map(|answer| answer.trim().to_owned()).ok_or_else(|| {
            let detail = format!("expected {expected} in the answer, found {text:?}");
            row.bad("task.answer_extract", detail)
        })
    }
}
