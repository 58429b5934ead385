//! What turns a row into an example: the prompt, answer and solution settings, checked and
//! compiled.

use firebrick_models::tokenizer::Message;
use regex::Regex;
use serde_json::Value;

use super::jsonl::{Extract, JsonlConfig};
use super::reward::compile;
use super::template::{Row, Template, lookup};
use super::{Example, PromptText, TOOLS, TaskError};

/// Where one text of an example comes from.
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

/// A [`JsonlConfig`] checked and compiled: what turns a row into an example.
#[derive(Debug)]
pub(crate) struct Recipe {
    prompt: Prompt,
    system: Option<String>,
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

/// Where verl's rows have their ground truth.
const GROUND_TRUTH: &str = "reward_model.ground_truth";

/// What is there, and what is wrong with what is not.
fn sorted<T>(part: Result<T, TaskError>, wrong: &mut Vec<TaskError>) -> Option<T> {
    part.map_err(|error| wrong.push(error)).ok()
}

impl Prompt {
    fn new(config: &JsonlConfig) -> Result<Self, Vec<TaskError>> {
        let prompt = match (&config.prompt, &config.messages, &config.prompt_field) {
            (Some(text), None, None) => Self::Text(Template::parse(text, "task.prompt").map_err(|e| vec![e])?),
            (None, Some(messages), None) if messages.is_empty() => {
                let detail = "expected at least one message, found none";
                return Err(vec![TaskError::config("task.messages", detail)]);
            }
            (None, Some(messages), None) => Self::Chat(parsed(messages)?),
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

/// The messages as templates, or all that is wrong with them.
fn parsed(messages: &[Message]) -> Result<Vec<(String, Template)>, Vec<TaskError>> {
    let mut wrong = Vec::new();
    let parse = |(at, message): (usize, &Message)| {
        let setting = format!("task.messages[{at}].content");
        let template = sorted(Template::parse(&message.content, &setting), &mut wrong)?;
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

    /// The same with all that is wrong, of which there is something.
    pub fn checked(config: &JsonlConfig) -> Result<Self, Vec<TaskError>> {
        let mut wrong = Vec::new();
        let prompt = Prompt::new(config).map_err(|own| wrong.extend(own)).ok();
        let (answer, field) = (config.answer.as_deref(), config.answer_field.as_deref());
        let has_answer = answer.is_some() || field.is_some();
        let answer = TextSource::new(answer, "task.answer", field, "task.answer_field");
        let answer = sorted(answer, &mut wrong);
        let extract = config.answer_extract.as_ref();
        let extract = extract.map(|own| Extraction::new(own, has_answer)).transpose();
        let extract = sorted(extract, &mut wrong);
        let (solution, field) = (config.solution.as_deref(), config.solution_field.as_deref());
        let solution = TextSource::new(solution, "task.solution", field, "task.solution_field");
        let solution = sorted(solution, &mut wrong);
        match (prompt, answer, extract, solution) {
            (Some(prompt), Some(answer), Some(extract), Some(solution)) => {
                Ok(Self { prompt, system: config.system_prompt.clone(), answer, extract, solution })
            }
            _ => Err(wrong),
        }
    }

    /// All that a row lacks, where [`example`](Self::example) gives the first.
    pub fn faults(&self, row: &Row) -> Vec<TaskError> {
        let mut faults = match &self.prompt {
            Prompt::Text(template) => template.faults(row),
            Prompt::Chat(messages) => {
                let faults = messages.iter().flat_map(|(_, content)| content.faults(row));
                faults.collect()
            }
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

    /// Whether a row has a ground truth: one that the task names, or verl's.
    pub fn has_answer(&self, row: &Row) -> bool {
        self.answer.is_some() || verls_answer(row)
    }

    pub fn example(&self, mut row: Row) -> Result<Example, TaskError> {
        let mut answer = match &self.answer {
            Some(source) => source.text(&row)?,
            None if verls_answer(&row) => row.text(GROUND_TRUTH, "task.answer_field")?,
            None => String::new(),
        };
        if let Some(extract) = &self.extract {
            answer = extract.apply(&answer, &row)?;
        }
        let solution = self.solution.as_ref().map(|source| source.text(&row)).transpose()?;
        let prompt = self.prompt(&row)?;
        if let PromptText::Chat(_) = prompt {
            read_tools(&mut row)?;
        }
        Ok(Example { prompt, answer, solution, fields: row.fields })
    }

    fn prompt(&self, row: &Row) -> Result<PromptText, TaskError> {
        let mut chat = match &self.prompt {
            Prompt::Text(template) => return Ok(PromptText::Text(template.render(row)?)),
            Prompt::Chat(messages) => {
                let render = |(role, content): &(String, Template)| {
                    Ok(Message { role: role.clone(), content: content.render(row)? })
                };
                messages.iter().map(render).collect::<Result<Vec<_>, _>>()?
            }
            Prompt::Field(path) => match row.get(path, PROMPT_FIELD)? {
                Value::String(_) if self.system.is_some() => {
                    let detail = format!("field `{path}` is plain text, expected a list of messages");
                    return Err(row.bad("task.system_prompt", detail));
                }
                Value::String(text) => return Ok(PromptText::Text(text.clone())),
                Value::Array(list) if !list.is_empty() => {
                    list.iter().map(|value| message(value, path, PROMPT_FIELD, row)).collect::<Result<_, _>>()?
                }
                other => {
                    let detail = format!("field `{path}` is {other}, expected a string or a list of chat messages");
                    return Err(row.bad(PROMPT_FIELD, detail));
                }
            },
        };
        if let Some(system) = &self.system {
            if chat.first().is_some_and(|first| first.role == "system") {
                let detail = "the prompt already begins with a system message; remove one of the two";
                return Err(row.bad("task.system_prompt", detail));
            }
            chat.insert(0, Message { role: "system".to_owned(), content: system.clone() });
        }
        Ok(PromptText::Chat(chat))
    }
}

/// Whether a row has verl's ground truth.
fn verls_answer(row: &Row) -> bool {
    lookup(&row.fields, GROUND_TRUTH).is_some_and(|truth| !truth.is_null())
}

/// Makes the field `tools` of a conversation a list, as chat templates expect it: datasets hold it as a list, or as the
/// JSON of one, since its entries differ in shape. A null or an empty list says that there are none.
pub(crate) fn read_tools(row: &mut Row) -> Result<(), TaskError> {
    let Some(value) = row.fields.get(TOOLS) else {
        return Ok(());
    };
    let list = match value {
        Value::String(json) if json.trim().is_empty() => Value::Null,
        Value::String(json) => serde_json::from_str(json).unwrap_or_else(|_| value.clone()),
        other => other.clone(),
    };
    let is_good = match &list {
        Value::Null => true,
        Value::Array(tools) => tools.iter().all(Value::is_object),
        _ => false,
    };
    if !is_good {
        let detail = format!(
            "field `{TOOLS}` is {value}, expected a list of tools (JSON schemas), or the JSON of such a list; it is what the \
             chat template is given, so rename a column that means something else"
        );
        return Err(row.bad(TOOLS, detail));
    }
    row.fields.insert(TOOLS.to_owned(), list);
    Ok(())
}

/// A chat message of a row. Content other than text (images, tool calls) is not ours to drop.
pub(crate) fn message(value: &Value, path: &str, setting: &str, row: &Row) -> Result<Message, TaskError> {
    let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    if let (Some(role), Some(content)) = (text("role"), text("content")) {
        return Ok(Message { role, content });
    }
    let detail =
        format!("field `{path}` has the message {value}, expected an object with the strings `role` and `content`");
    Err(row.bad(setting, detail))
}

impl Extraction {
    fn apply(&self, text: &str, row: &Row) -> Result<String, TaskError> {
        let (found, wanted) = match self {
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
        found.map(|answer| answer.trim().to_owned()).ok_or_else(|| {
            let detail = format!("expected {wanted} in the answer, found {text:?}");
            row.bad("task.answer_extract", detail)
        })
    }
}
