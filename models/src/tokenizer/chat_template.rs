//! Chat templates: the Jinja templates with which a checkpoint formats a conversation.
//!
//! Templates are written for the environment of transformers' `apply_chat_template`, which this
//! module reproduces: Jinja blocks trimmed, loop controls, methods of Python's strings and
//! dictionaries, and the functions `raise_exception`, `strftime_now` and `tojson`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use firebrick_backends::allocation_limit::{AllocationLimit, limited};
use firebrick_backends::device::panic_message;
use firebrick_spec::json::number_text;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, Value, context};

use super::message::Message;
use super::parts::readable;
use super::python_text;
use super::settings::TemplateSource;
use super::special_tokens::SpecialTokens;
use super::tojson::tojson;
use crate::error::{Error, Result};

/// Inputs of a template besides the messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatOptions<'a> {
    /// True if the text ends with the prompt for the assistant's turn.
    pub add_generation_prompt: bool,
    /// The tools that the assistant may call: a list of JSON schemas. Null and an empty list are none.
    pub tools: Option<&'a serde_json::Value>,
    /// More variables, such as `enable_thinking`, for this conversation.
    pub kwargs: Option<&'a serde_json::Map<String, serde_json::Value>>,
    /// Meaning of the spelling of a special token in messages and tools.
    pub special_tokens: SpecialTokens,
    /// True if the conversation is trained on, with the template for training where there is one
    /// ([`Tokenizer::training_family`](super::Tokenizer::training_family)).
    pub training: bool,
}

impl ChatOptions<'_> {
    /// A conversation that the assistant continues with.
    pub fn prompt() -> Self {
        Self { add_generation_prompt: true, ..Self::default() }
    }

    fn tools(&self) -> Value {
        let given = self.tools.filter(|tools| tools.as_array().map_or(!tools.is_null(), |list| !list.is_empty()));
        given.map_or(Value::from(()), from_json)
    }
}

/// Variables of templates that each conversation sets, and neither a configuration nor a row's variables.
pub const CONVERSATION_VARIABLES: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// The reasoning of a turn, by the names that datasets have for it.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message as transformers gives it to templates: without the fields that are null, and with its reasoning under
/// the names that templates read, whatever the dataset calls it.
fn variables(message: &Message) -> Value {
    let present = message.fields().iter().filter(|(_, value)| !value.is_null());
    let mut fields: Vec<(&str, Value)> = present.map(|(name, value)| (name.as_str(), from_json(value))).collect();
    let find = |fields: &[(&str, Value)], wanted: &str| fields.iter().position(|(name, _)| *name == wanted);
    if let Some(at) = REASONING.iter().find_map(|name| find(&fields, name)) {
        let reasoning = fields[at].1.clone();
        match find(&fields, "reasoning_content") {
            Some(at) => fields[at].1 = reasoning.clone(),
            None => fields.push(("reasoning_content", reasoning.clone())),
        }
        match find(&fields, "thinking") {
            // `{"thinking": …, **message}` has the key first, with the message's value
            Some(at) => fields[..=at].rotate_right(1),
            None => fields.insert(0, ("thinking", reasoning)),
        }
    }
    Value::from_pairs(fields)
}

/// The name under which a template's own errors give their lines.
const NAME: &str = "chat_template";

/// Written around what a template marks as generated: two Unicode noncharacters, which occur in no text.
const MARKS: [char; 2] = ['\u{10FFFE}', '\u{10FFFF}'];

/// Most bytes of a template: the longest known ones have half as many. Its depth is bounded by them alone.
const MAX_BYTES: usize = 64 << 10;

/// Stack of the compiler, which recurses along operators; the system allocates only the used part.
const COMPILER_STACK_BYTES: usize = 256 << 20;

/// Instructions of a rendering: those of a thousand turns take a tenth.
const FUEL: u64 = 5_000_000;

/// What a rendering may allocate: a context of a million tokens has a few megabytes of text.
const RENDER_LIMIT: AllocationLimit = AllocationLimit { largest: 64 << 20, total: 192 << 20 };

/// The filter that writes them.
const MARK: &str = "mark_generation";

/// The compiled template of a tokenizer.
pub(super) struct ChatTemplate {
    origin: PathBuf,
    state: State,
    /// True if it marks the assistant's text by `{% generation %}`.
    pub marks: bool,
    /// Variables that every rendering is given.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
}

enum State {
    Absent(String),
    // A broken template must not keep a run from loading that never renders a chat.
    Broken(String),
    Ready(Box<Environment<'static>>),
}

impl ChatTemplate {
    pub(super) fn new(origin: &Path, source: &TemplateSource) -> Self {
        let marks = matches!(source, TemplateSource::Text(text) if matches!(marked_generation(text), Cow::Owned(_)));
        let state = match source {
            TemplateSource::Absent => State::Absent("there is none".to_owned()),
            TemplateSource::NoDefault(names) => {
                State::Absent(format!("there is no template named \"default\", only {names:?}"))
            }
            TemplateSource::Text(text) if text.len() > MAX_BYTES => {
                State::Broken(format!("it has {} bytes, expected at most {MAX_BYTES}", text.len()))
            }
            TemplateSource::Text(text) => match compile_on_deep_stack(text) {
                Ok(environment) => State::Ready(Box::new(environment)),
                Err(cause) => State::Broken(format!("not understood: {cause}")),
            },
        };
        Self { origin: origin.to_owned(), state, marks, kwargs: serde_json::Map::new() }
    }

    /// Gives every rendering more variables.
    pub(super) fn set_kwargs(&mut self, kwargs: &serde_json::Map<String, serde_json::Value>) -> Result<()> {
        if let Some(name) = CONVERSATION_VARIABLES.iter().find(|name| kwargs.contains_key(**name)) {
            return Err(Error::ChatTemplate {
                path: self.origin.clone(),
                detail: format!("chat_template_kwargs: `{name}` is set by each conversation; remove it"),
            });
        }
        self.kwargs.clone_from(kwargs);
        Ok(())
    }

    pub(super) fn is_present(&self) -> bool {
        !matches!(self.state, State::Absent(_))
    }

    /// Refuses a template that is not understood.
    pub(super) fn check(&self) -> Result<()> {
        match &self.state {
            State::Broken(detail) => Err(Error::ChatTemplate { path: self.origin.clone(), detail: detail.clone() }),
            State::Absent(_) | State::Ready(_) => Ok(()),
        }
    }

    pub(super) fn render(
        &self,
        special_tokens: &BTreeMap<String, String>,
        messages: &[Message],
        options: ChatOptions<'_>,
    ) -> Result<String> {
        let marked = self.render_marked(special_tokens, messages, options)?;
        Ok(marked.0)
    }

    /// [`Self::render`], and the bytes that the template marks as generated.
    pub(super) fn render_marked(
        &self,
        special_tokens: &BTreeMap<String, String>,
        messages: &[Message],
        options: ChatOptions<'_>,
    ) -> Result<(String, Vec<Range<usize>>)> {
        let text = self.rendered(special_tokens, messages, options)?;
        if !self.marks {
            return Ok((text, Vec::new()));
        }
        let (mut plain, mut spans) = (String::with_capacity(text.len()), Vec::new());
        for c in text.chars() {
            match c {
                c if c == MARKS[0] => spans.push(plain.len()..plain.len()),
                c if c == MARKS[1] => {
                    if let Some(span) = spans.last_mut() {
                        span.end = plain.len();
                    }
                }
                c => plain.push(c),
            }
        }
        Ok((plain, spans))
    }

    fn rendered(
        &self,
        special_tokens: &BTreeMap<String, String>,
        messages: &[Message],
        options: ChatOptions<'_>,
    ) -> Result<String> {
        let failed = |detail: String| Error::ChatTemplate { path: self.origin.clone(), detail };
        let environment = match &self.state {
            State::Ready(environment) => environment,
            State::Broken(why) => return Err(failed(why.clone())),
            State::Absent(why) => {
                return Err(failed(format!(
                    "{why}; add a `chat_template` to tokenizer_config.json, or use a prompt template in the task instead of \
                     messages"
                )));
            }
        };
        if messages.is_empty() {
            return Err(failed("the conversation has no messages".to_owned()));
        }
        // as in transformers, what is given goes before what the tokenizer names
        let named = special_tokens.iter().map(|(role, token)| (role.as_str(), token.as_str().into()));
        let given = self.kwargs.iter().chain(options.kwargs.into_iter().flatten());
        let given = given.map(|(name, value)| (name.as_str(), from_json(value)));
        let shared = Value::from_pairs(named.chain(given));
        let render = |messages: &[Message]| {
            let variables = context! {
                messages => messages.iter().map(variables).collect::<Vec<_>>(),
                add_generation_prompt => options.add_generation_prompt,
                tools => options.tools(),
                documents => (),
                ..shared.clone()
            };
            let render = || environment.get_template(NAME).and_then(|template| template.render(variables));
            limited(RENDER_LIMIT, &format!("rendering the chat template of {}", self.origin.display()), render)
        };
        let messages = readable(messages, render).map_err(failed)?;
        render(&messages).map_err(|cause| failed(raised_message(&cause)))
    }
}

/// A value of JSON as templates see it, the keys of objects in their order, numbers as Python reads them.
fn from_json(value: &serde_json::Value) -> Value {
    if let Some(number) = number_text(value) {
        return python_text::parsed(number);
    }
    match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(is) => (*is).into(),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => integer.into(),
            (None, Some(integer)) => integer.into(),
            (None, None) => number.as_f64().unwrap_or(f64::NAN).into(),
        },
        serde_json::Value::String(text) => text.as_str().into(),
        serde_json::Value::Array(list) => list.iter().map(from_json).collect(),
        serde_json::Value::Object(fields) => {
            let fields = fields.iter();
            Value::from_pairs(fields.map(|(name, value)| (name.as_str(), from_json(value))))
        }
    }
}

fn compile_on_deep_stack(source: &str) -> Result<Environment<'static>, minijinja::Error> {
    let failed = |why: String| minijinja::Error::new(ErrorKind::SyntaxError, why);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(COMPILER_STACK_BYTES);
        let thread = thread.spawn_scoped(scope, || compile(source)).map_err(|e| failed(e.to_string()))?;
        thread.join().unwrap_or_else(|panic| Err(failed(panic_message(panic.as_ref()))))
    })
}

fn compile(source: &str) -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, state, value| match value.kind() {
        // Python's text of these: minijinja writes JSON.
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            out.write_str(&python_text::text(value)).map_err(Into::into)
        }
        _ => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter("string", python_text::text);
    // Strings and dictionaries are sequences to Jinja: they have a length and items.
    environment.add_test("sequence", |value: &Value| {
        let kind = value.kind();
        matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    });
    // Templates ask this of `tools`; the engine's own answer for none is yes.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("integer", python_text::is_integer);
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || python_text::is_integer(value)
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter(MARK, |text: String| format!("{}{text}{}", MARKS[0], MARKS[1]));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_template_owned(NAME, marked_generation(source).into_owned())?;
    Ok(environment)
}

/// Message of a template's `raise_exception`, carried through the engine's own errors.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

#[expect(clippy::needless_pass_by_value, reason = "the signature minijinja calls")]
fn raise_exception(message: Value) -> Result<Value, minijinja::Error> {
    let raised = Raised(message.to_string());
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(raised))
}

/// The local time, so a template that calls this gives another prompt tomorrow: as transformers.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now()).map_err(|cause| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {cause}"))
    })
}

/// The template's own message when it raised one, else where and why rendering stopped.
fn raised_message(error: &minijinja::Error) -> String {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(one) = cause {
        if let Some(Raised(message)) = one.downcast_ref() {
            return message.clone();
        }
        cause = one.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("takes more than {FUEL} instructions for a conversation; does it loop?");
    }
    error.to_string()
}

/// Replaces transformers' `{% generation %}` … `{% endgeneration %}`, which mark the assistant's
/// words, by a filter that writes marks around them: same whitespace control, same lines.
fn marked_generation(source: &str) -> Cow<'_, str> {
    if !source.contains("endgeneration") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut replaced = false;
    let mut rest = source;
    while let Some((before, after)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        rest = after;
        if let Some((inside, _)) = after.split_once("%}") {
            let word = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
            let instead = match word {
                "generation" => format!("filter {MARK}"),
                "endgeneration" => "endfilter".to_owned(),
                _ => continue,
            };
            replaced = true;
            out.push_str(&inside.replace(word, &instead));
            rest = &after[inside.len()..];
        }
    }
    if !replaced {
        return Cow::Borrowed(source);
    }
    out.push_str(rest);
    Cow::Owned(out)
}
